"""What a dry run prints of windows."""

import pytest
from program import run_trainer


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--window 8 --full-every 3", "layers: 3 attend to the last 8 positions, 1 to all\n"),
        (
            "--window 9 --yoco",
            "layers: 2 attend to the last 9 positions, 2 to all, with keys and values that they share\n",
        ),
        (
            "--sparse-blocks 2 --sparse-block-size 32 --full-every 3",
            "block-sparse attention: 3 layers select 2 blocks of 32 positions besides the first and their own; score: "
            "group\n",
        ),
    ],
    ids=["full-every", "yoco", "sparse"],
)
def test_layers_of_dry_run(options, line):
    """a dry run says what the layers attend to"""
    assert line in run_trainer("--preset tiny --dry-run", options).done().out
