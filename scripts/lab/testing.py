"""testing.py: what the tests of the lab share."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program import write_shard

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAINER = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "train_diffv2")).absolute()


def run_lab(*words, **more):
    """Runs a command of the lab to its end."""
    command = [sys.executable, HERE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


def expect_error(done, status, text, lines=None):
    """A finished program has this exit status, and on stderr the text, in this number of lines."""
    assert done.returncode == status and text in done.stderr, (done.args, done.returncode, done.stderr)
    assert lines is None or done.stderr.count("\n") == lines, (done.args, done.stderr)


@contextlib.contextmanager
def raises(kind, text):
    """The block raises an exception with one line, which has the text."""
    with pytest.raises(kind) as found:
        yield
    assert text in str(found.value) and "\n" not in str(found.value), f"said '{found.value}', wanted '{text}'"


def near(got, wanted, tolerance=1e-9):
    assert abs(got - wanted) <= tolerance * max(1, abs(wanted)), f"{got!r}, wanted {wanted!r}"


def wait_until(what, seconds=60, name=""):
    deadline = time.time() + seconds
    while not what():
        assert time.time() < deadline, f"timed out: {name}"
        time.sleep(0.05)


def rewrite(path, change):
    """Changes a JSON file in place by a function."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def text_shard(path, count, first=0):
    """A shard of bytes: arithmetic, which a model can learn."""
    text = "".join(f"{n} plus {n % 7} is {n + n % 7}.\n" for n in range(first, first + count))
    write_shard(path, list(text[:count].encode()))


def has(text, *parts):
    missing = [part for part in parts if part not in text]
    assert parts and not missing, (missing, text[:3000])
