"""What a dry run prints of windows, and starts with selected blocks."""

import pytest
from program import checkpoint, lose_checkpoints, read_json, records, run_trainer, train


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
            "block-sparse attention: 3 layers select 2 blocks of 32 positions besides the first and their own\n",
        ),
    ],
    ids=["full-every", "yoco", "sparse"],
)
def test_layers_of_dry_run(options, line):
    """a dry run says what the layers attend to"""
    assert line in run_trainer("--preset tiny --dry-run", options).done().out


def test_init_with_selected_blocks(corpus, tmp_path):
    """--init with --sparse-blocks starts from weights of full attention; a resume before a checkpoint does too"""
    train(corpus, tmp_path / "full", "--steps 3").done()
    base, losses = checkpoint(tmp_path / "full", 3), []
    for blocks in (0, 6, 1):  # 6 of 8 blocks between the first and its own: all keys
        out = tmp_path / f"run{blocks}"
        options = f"--sparse-blocks {blocks} --sparse-block-size 2" if blocks else ""
        validation = ("--steps 2 --val-every 1 --val-data", corpus / "train.bin")
        train(corpus, out, options, *validation, "--init", base).done()
        losses.append(records(out, "val")[0]["loss"])
        found = read_json(checkpoint(out, 2) / "config.json")
        assert (found.get("sparse_blocks") or 0) == blocks, found
    assert abs(losses[1] - losses[0]) < 1e-6 and abs(losses[2] - losses[0]) > 1e-5, losses
    lose_checkpoints(tmp_path / "run1")
    run_trainer("--out", tmp_path / "run1", "--resume --threads 2").done()
    assert records(tmp_path / "run1", "val")[0]["loss"] == losses[2]
