"""Ranks save one checkpoint together, at one step, in the background, and after failures of the disk."""

import statistics

import pytest
from program import DONE, FAILED, SIGNALLED, all_records, expect_same, saved
from ranks import SMALL_OF_RANKS, expect_same_weights, faulty, mpirun, resume_ranks, train_ranks


@pytest.mark.slow
def test_save_together(short):
    """all ranks save at the step that the clock of rank 0 determines"""
    # The time of two steps, more or less, so that ranks that used their own clocks would disagree.
    whole, run = short / "whole", short / "run"
    train_ranks(whole, 3, "--steps 60 --batch-size 2 --checkpoint-minutes 0").done()
    minutes = 2 * statistics.median(r["ms"] for r in all_records(whole) if r["kind"] == "train") / 6e4
    train_ranks(run, 3, f"--steps 60 --batch-size 2 --checkpoint-minutes {minutes} --keep 0 --timeout 5").done()
    expect_same_weights(whole, run, 60)
    assert len(saved(whole)) == 1 and len(saved(run)) > 2
    # a resume has the option from the checkpoint
    assert resume_ranks(run, 3, "--steps 80").done().out.count("written in") > 1


BACKGROUND = "--steps 9 --total-batch 192 --batch-size 2 --checkpoint-every 3 --keep 0"


def written_beside_steps(run):
    """For each checkpoint of the log, whether it was written during at least one step."""
    found = []
    for event in (record for record in all_records(run) if "of_step" in record and "stall_ms" in record):
        background = event["background"]
        assert background or (event["step"] == event["of_step"] and event["ms"] == event["stall_ms"]), event
        found.append(background and event["step"] > event["of_step"] and event["ms"] > 0 and event["stall_ms"] > 0)
    return found


@pytest.mark.parametrize(
    ("ranks", "zero", "variables"),
    [*((ranks, zero, {"SLOW": "150"}) for ranks, zero in [(1, 0), (2, 0), (3, 1), (3, 2)]), (2, 1, {"NO_COPY": "1"})],
    ids=["1 rank", "2 ranks", "3 ranks --zero 1", "3 ranks --zero 2", "no memory for the copy"],
)
@pytest.mark.full(cases_from=1)
def test_background(short, ranks, zero, variables):
    """a background checkpoint has exactly the state of its step"""
    # Writing takes several steps, during which the whole state changes.
    waits, goes_on = short / "waits", short / "goes_on"
    train_ranks(waits, ranks, BACKGROUND, f"--zero {zero}", NO_COPY="0").done()
    assert written_beside_steps(waits) == 3 * [False]
    result = train_ranks(goes_on, ranks, BACKGROUND, f"--zero {zero}", **variables).done()
    slow = "SLOW" in variables
    assert (len(written_beside_steps(goes_on)), sum(written_beside_steps(goes_on))) == (3, 2 if slow else 0)
    assert result.err.count("training waits while") == (0 if slow else 1)
    expect_same(waits / "checkpoints", goes_on / "checkpoints")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.full(cases_from=1)
def test_background_faults(short, ranks):
    """a kill or signal during a background checkpoint loses no data"""
    whole = short / "whole"
    train_ranks(whole, ranks, BACKGROUND).done()
    for name, fault, left in [("killed", "kill:0:6:write", [3]), ("signalled", "signal:0:4:1", [3, 4])]:
        run = short / name
        result = train_ranks(run, ranks, BACKGROUND, SLOW="150", FAULT=fault)
        assert result.status != DONE if name == "killed" else result.status == SIGNALLED, result
        assert [step for step in saved(run) if isinstance(step, int)] == left
        assert "skipping checkpoint" not in resume_ranks(run, ranks).done().err
        expect_same_weights(whole, run, 9)


def test_full_disk(short):
    """a full disk on one rank leaves no checkpoint"""
    options = "--batch-size 2 --steps 12 --checkpoint-every 5"
    start = ["-n 1", faulty(), "--train-data train.bin", SMALL_OF_RANKS, options, "--out run"]
    # A file size limit acts like a full disk: a write fails, on this rank only. The files of shared memory are larger.
    limited = ["-n 1 prlimit --fsize=2048", *start[1:]]
    result = mpirun(*start, ":", *limited, cwd=short, OMPI_MCA_btl="self,tcp")
    result.one_line(FAILED, "diffv2: rank 1 (")
    assert "cannot write run/checkpoints/step_00000005.tmp" in result.err
    assert saved(short / "run") == []
    resume_ranks(short / "run", 2).done()
    train_ranks(short / "whole", 2, options).done()
    expect_same_weights(short / "whole", short / "run", 12)
