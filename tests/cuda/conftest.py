"""What the tests of the CUDA trainer share: their data, and which of them a build runs.

A build runs the tests without a mark and those that are marked with its precision. Most of the marked tests are of
bf16, since both precisions run the same kernels except for the rounding. Under sanitizers, where a step takes seconds,
a build runs only the tests with the mark `sanitized`.
"""

from pathlib import Path

import pytest
import device

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items):
    builds = {"sanitized"} if device.SANITIZED else {device.PRECISION}

    def belongs(item):
        marked = {mark.name for mark in item.iter_markers()} & {"bf16", "fp32", "sanitized"}
        return bool(marked & builds) if marked or device.SANITIZED else True

    here = Path(__file__).parent
    items[:] = [item for item in items if here not in item.path.parents or belongs(item)]


@pytest.fixture
def odd(tmp_path):
    """A directory with data.bin of the vocabulary of device.ODD."""
    device.write_data(tmp_path, 43)
    return tmp_path


@pytest.fixture
def even(tmp_path):
    """A directory with data.bin of the vocabulary of device.EVEN."""
    device.write_data(tmp_path, 256)
    return tmp_path
