"""What these tests share: corpora and runs."""

import program
import pytest
import ranks
import small_runs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """train.bin and val.bin: sentences of a grammar whose entropy is known. Tests do not write there."""
    directory = tmp_path_factory.mktemp("corpus")
    program.write_grammar(directory / "train.bin", 200000, 1)
    program.write_grammar(directory / "val.bin", 20000, 2)
    return directory


@pytest.fixture
def short(tmp_path):
    """A directory with train.bin, whose epoch ends within a run of 12 steps."""
    ranks.write_short_epoch(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """An uninterrupted run of 12 steps, beside its train.bin. Tests do not write there."""
    directory = tmp_path_factory.mktemp("whole")
    ranks.write_short_epoch(directory)
    small_runs.start(directory / "whole", small_runs.TWELVE).done()
    return directory / "whole"
