"""Runs of 12 steps whose epoch ends within them, on the train.bin of the fixture `short`."""

from program import SHAPE, checkpoint, expect_same, records, run_trainer, trainer, without_times

MODEL = f"{SHAPE} --warmup 2 --threads 1"
TWELVE = "--steps 12 --total-batch 128 --batch-size 4"
# so many steps that a test can stop it in the middle; the schedule is constant so that a resume may change --steps
ENDLESS = "--steps 1000000 --schedule constant --total-batch 128 --batch-size 4"


def command(run, *options):
    """The words that start a run, in the directory of its parent."""
    return [*trainer(), "--train-data train.bin", MODEL, "--out", run.name, *options]


def start(run, *options, **more):
    return run_trainer(*command(run, *options)[len(trainer()) :], cwd=run.parent, **more)


def resume(run, *options):
    return run_trainer("--out", run.name, "--resume --threads 1", *options, cwd=run.parent)


def expect_whole(whole, run):
    """A run has the last checkpoint and the records of steps of an uninterrupted one."""
    expect_same(checkpoint(whole, 12), checkpoint(run, 12))
    assert without_times(records(run, "train")) == without_times(records(whole, "train"))
