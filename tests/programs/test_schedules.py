"""What changes during a run: the decay of the learning rate."""

import shutil

import pytest
from program import FAILED, SHAPE, USAGE, checkpoint, expect_same, records, run_trainer

BATCH = "--batch-size 4 --warmup 2 --threads 2"
SQRT = "--decay-shape 1-sqrt --schedule"


def start(corpus, out, *options):
    return run_trainer("--train-data", corpus / "train.bin", SHAPE, BATCH, "--out", out, *options)


def resume(run, *options):
    return run_trainer("--out", run, "--resume", *options)


# ---- the decay of wsd


@pytest.mark.parametrize("stable", ["wsd --steps 1000", "constant --steps 7"])
def test_decay_now(corpus, tmp_path, stable):
    """a decay that branches off a stable checkpoint equals the run that decays there, also when it is interrupted"""
    whole, trunk, branch = (tmp_path / name for name in ("whole", "trunk", "branch"))
    start(corpus, whole, SQRT, "wsd --steps 10 --decay-steps 4").done()
    rates = [record["lr"] for record in records(whole, "train")]
    assert rates[4:] == pytest.approx([1e-3, 1e-3, 5.5e-4, 3.636e-4, 2.206e-4, 1e-4], 1e-3)
    planned = run_trainer("--dry-run", BATCH, SQRT, "wsd --steps 10 --decay-steps 4").done().out
    assert "wsd: warmup to step 2, constant to step 6, 1-sqrt decay to step 10\n" in planned
    start(corpus, trunk, SQRT, stable, "--stop-after 6").done()
    shutil.copytree(trunk, branch, symlinks=True)
    result = resume(branch, "--decay-now --decay-steps 4 --stop-after 8").done()
    assert "decays from step 6 to the last step, 10" in result.out
    resume(branch, "--decay-now").one_line(USAGE, "the checkpoint of step 8 is in the decay")
    resume(branch).done()
    expect_same(checkpoint(whole, 10), checkpoint(branch, 10))
    resume(trunk, "--stop-after 7").done()
    assert records(trunk, "train")[-1]["lr"] == 1e-3


def test_decay_mistakes(corpus, tmp_path):
    """a decay of another schedule, in the warmup, or without steps is refused"""
    linear, run = tmp_path / "linear", tmp_path / "run"
    start(corpus, linear, "--schedule linear --steps 9 --stop-after 3 --decay-steps 1").done()
    resume(linear, "--decay-now --decay-steps 4").one_line(USAGE, "requires --schedule wsd or constant, not linear")
    start(corpus, run, "--schedule wsd --steps 9 --stop-after 1").done()
    resume(run, "--decay-now --decay-steps 4").one_line(USAGE, "step 1 is in the warmup: use a checkpoint")
    resume(run, "--decay-now --decay-steps 4 --steps 9").one_line(USAGE, "mutually exclusive: the run ends with")
    resume(run, "--stop-after 3").done()
    resume(run, "--decay-now").one_line(USAGE, "--decay-now requires --decay-steps N")
    shutil.rmtree(run / "checkpoints")
    resume(run, "--decay-now --decay-steps 4").one_line(FAILED, "has no checkpoint to decay from")
    for words, message in (
        ("--decay-now", "--decay-now requires --resume"),
        ("--schedule wsd --steps 9 --decay-steps 8", "--decay-steps 8 is more than the 7 steps after the warmup"),
    ):
        start(corpus, tmp_path / "refused", words).one_line(USAGE, message)
