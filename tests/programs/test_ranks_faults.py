"""If a rank is killed, stopped or wrong, all ranks end with a line that names it, and a restart continues."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from program import DONE, FAILED, SIGNALLED, Started, all_records, checkpoint, expect_same, has_open, overwrite
from program import records, run, saved, without_times, write_random_choices
from ranks import OPENMPI, SMALL_OF_RANKS, expect_losses, expect_same_weights, faulty, resume_ranks, skip_without_mpi
from ranks import train_ranks, write_many, write_short_epoch

WATCHED = "--steps 12 --total-batch 192 --batch-size 2 --checkpoint-every 2 --timeout 2"


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """An uninterrupted run of three ranks. Tests do not write there."""
    directory = tmp_path_factory.mktemp("watched")
    write_short_epoch(directory)
    train_ranks(directory / "watched", 3, WATCHED).done()
    return directory / "watched"


@pytest.mark.parametrize(
    "fault",
    [
        "kill:1:6:data",
        "stop:1:6:data",
        "kill:2:6:backward",
        "kill:1:6:gradients",
        "stop:1:6:gradients",
        "kill:2:6:update",
        "kill:1:6:save",
        "stop:1:6:save",
        "kill:2:6:write",
        # rank 0, which prints the warnings and removes the files
        "kill:0:6:backward",
        "stop:0:6:gradients",
    ],
)
@pytest.mark.full(cases_from=1)
@pytest.mark.slow(cases_from=4)
def test_lost_rank(short, watched, fault):
    """a killed or stopped rank is reported, and a restart resumes bitwise"""
    run, begin = short / "run", time.monotonic()
    result = train_ranks(run, 3, WATCHED, FAULT=fault)
    assert time.monotonic() - begin < 30
    assert result.status != DONE and f"rank {fault.split(':')[1]} (" in result.err
    assert 1 <= result.err.count("\n") < 3
    last = 8 if "write" in fault else 6  # a file is written while step 7 or 8 is computed
    assert any(5 <= int(step) <= last for step in re.findall(r"at step (\d+)", result.err)), result.err
    resume_ranks(run, 3).done()
    expect_same_weights(watched, run, 12)


# ---- signals


def ranks_of(launcher):
    """The processes that mpirun has started."""
    return [int(pid) for pid in run("pgrep -P", launcher, "-f faulty_diffv2").out.split()]


def newest(run):
    return max((step for step in saved(run) if isinstance(step, int)), default=0)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("TERM", 1),
        ("USR1", 0),
        ("INT", "all"),
        ("HUP", 1),
        ("USR1", "launcher"),
        ("TERM", "launcher"),
        ("KILL", "launcher"),
        ("KILL", "all"),
    ],
)
@pytest.mark.full(cases_from=1)
def test_signal(short, name, target):
    """a signal to one rank, to all or to the launcher leaves a checkpoint"""
    # mpirun forwards SIGUSR1; after SIGTERM and SIGKILL its processes end, and the newest checkpoint remains
    out, steps = short / "run", "--steps 1000000 --schedule constant --batch-size 2 --checkpoint-every 3"
    skip_without_mpi()
    ranks = ["mpirun -q -n 2", faulty(), "--train-data train.bin", SMALL_OF_RANKS]
    with Started(*ranks, steps, "--out run", cwd=short, env=OPENMPI) as launcher:
        launcher.wait_for_step(out, 5).wait_until(lambda: newest(out))
        pids = ranks_of(launcher.pid)
        for pid in {"all": pids, "launcher": [launcher.pid]}.get(target) or [pids[target]]:
            os.kill(pid, signal.Signals[f"SIG{name}"])
        result = launcher.end()
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < end, "processes remain"
            time.sleep(0.01)
    if name == "KILL" or (name, target) == ("TERM", "launcher"):
        assert result.status != DONE
    else:
        assert result.status == SIGNALLED and "--resume" in result.out, result.err
        assert result.err.count("a checkpoint is saved") == 1  # one rank answers for all
    last = newest(out)
    resume_ranks(out, 2, f"--steps {last + 3}").done()
    assert [record["step"] for record in records(out, "train")] == list(range(1, last + 4))


@pytest.mark.parametrize(
    ("ranks", "fault"),
    [(1, "signal:0:5:1"), (1, "signal:0:5:2"), (1, "signal:0:5:3"), (2, "signal:0:5:1"), (2, "signal:1:5:1")],
)
def test_signal_at_any_point(short, ranks, fault):
    """a signal at any point of a step loses no data"""
    # At whichever point of a step a signal arrives, the run ends with status 3 and a checkpoint of its last step.
    result = train_ranks(short / "run", ranks, "--steps 12 --batch-size 2", FAULT=fault)
    step = records(short / "run", "train")[-1]["step"]
    assert result.status == (SIGNALLED if step < 12 else DONE), result.err
    assert step == 5 or fault == "signal:0:5:3"  # after the last look of step 5
    assert saved(short / "run") == [step]


MEASURED = ("val", "choices", "sample")
MEASURES = {
    "all": "--val-data train.bin --val-steps 4 --val-every 4 --eval-choices c=choices.bin --sample-every 4",
    "choices": "--val-every 4 --eval-choices c=choices.bin",
    "sample": "--sample-every 4",
}


def options_measured(measures):
    return "--steps 8 --batch-size 2 " + MEASURES[measures]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Gives the uninterrupted run of so many ranks with these measurements. Tests do not write there."""
    directory = tmp_path_factory.mktemp("measured")
    write_short_epoch(directory)
    write_random_choices(directory / "choices.bin", 128, 4, 1)

    def whole(ranks, measures):
        path = directory / f"{measures}{ranks}"
        if not path.exists():
            train_ranks(path, ranks, options_measured(measures)).done()
        return path

    return whole


@pytest.mark.parametrize(
    ("ranks", "measures", "fault", "before"),
    [
        # signals before so many reads of a step: 1 in the step, 4 in the validation, one per batch of choices, of which
        # there are more than 100, and one per token of the sample
        (1, "all", "signal:0:0:3", []),
        (1, "all", "signal:0:4:1", []),
        (1, "all", "signal:0:4:3", []),
        (1, "all", "signal:0:4:20", ["val"]),
        (1, "all", "signal:0:4:300", ["val", "choices"]),
        (1, "all", "signal:0:8:3", []),
        (2, "all", "signal:1:0:2", []),
        (2, "all", "signal:1:4:3", []),
        (2, "choices", "signal:1:8:3", []),
        (2, "sample", "signal:0:4:20", []),
    ],
)
@pytest.mark.full(cases_from=1)
def test_signal_in_measurement(measured, ranks, measures, fault, before):
    """a signal abandons a measurement without a record, and a resume makes it: the log is that of a whole run"""
    whole, step = measured(ranks, measures), int(fault.split(":")[2])
    run = whole.parent / f"{whole.name}-{fault}"
    result = train_ranks(run, ranks, options_measured(measures), FAULT=fault)
    assert result.status == SIGNALLED and f"stopped after step {step} of 8" in result.out, result
    assert [r["kind"] for r in all_records(run) if r["step"] == step and r["kind"] in MEASURED] == before
    assert not step or saved(run) == [step]
    resume_ranks(run, ranks).done()
    for kind in ("train", *MEASURED):
        found, wanted = (without_times(records(path, kind)) for path in (run, whole))
        assert found == wanted, kind
    expect_same(checkpoint(whole, 8), checkpoint(run, 8))
    assert "nothing to do" in resume_ranks(run, ranks).done().out


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_without_run(short, rank):
    """a signal to one rank ends an evaluation of all ranks at once"""
    skip_without_mpi()
    write_many(short, 50)
    evaluate = "--eval --val-data 'many/*.bin' --val-steps 1000000 --batch-size 1 --timeout 60"
    with Started("mpirun -q -n 2", faulty(), SMALL_OF_RANKS, evaluate, cwd=short, env=OPENMPI) as launcher:
        launcher.wait_until(lambda: sum(has_open(pid, "/many/") for pid in ranks_of(launcher.pid)) == 2)
        os.kill(ranks_of(launcher.pid)[rank], signal.SIGTERM)
        begin, result = time.monotonic(), launcher.end()
    assert time.monotonic() - begin < 20 and result.status == SIGNALLED
    assert result.err.count("diffv2: ") == result.err.count("signal: ended before everything was measured") == 1


# ---- data


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.full(cases_from=1)
def test_token_of_one_rank(short, zero):
    """a token outside the vocabulary in the data of one rank ends all with the checkpoint of the last step"""
    options = f"--steps 12 --batch-size 1 --total-batch 128 --zero {zero}"  # four micro-steps of two ranks
    overwrite(short / "train.bin", 1024 + 2 * 100, b"\0\1")
    result = train_ranks(short / "run", 2, options).one_line(FAILED, "token 100 of train.bin is 256")
    (last,) = saved(short / "run")
    assert 0 < last < 5 and f"the state of step {last} is saved" in result.err
    train_ranks(short / "whole", 2, options, f"--stop-after {last}").done()
    expect_same(checkpoint(short / "whole", last), checkpoint(short / "run", last))


@pytest.mark.full
def test_validation_token_of_one_rank(short):
    """a token outside the vocabulary in the validation data of one rank ends all with a checkpoint"""
    whole, run, bad = short / "whole", short / "run", 1024 + 2 * 100
    options = "--steps 8 --batch-size 1 --val-data val.bin --val-every 4 --val-steps 40 --zero 3"
    data = (short / "train.bin").read_bytes()
    (short / "val.bin").write_bytes(data)
    train_ranks(whole, 2, options).done()
    train_ranks(run, 2, options, "--stop-after 2").done()
    overwrite(short / "val.bin", bad, b"\0\1")
    resume_ranks(run, 2).one_line(FAILED, "token 100 of val.bin is 256")
    assert saved(run) == [2, 4]
    overwrite(short / "val.bin", bad, data[bad : bad + 2])
    resume_ranks(run, 2).done()
    expect_same(checkpoint(whole, 8), checkpoint(run, 8))
    assert without_times(records(run, "val")) == without_times(records(whole, "val"))


# ---- values


@pytest.mark.full
def test_nan(short):
    """all ranks skip an update if a gradient of one rank is NaN"""
    for name, options in [*((f"zero{zero}", f"--zero {zero}") for zero in range(4)), ("fp8", "--matmul-dtype fp8")]:
        common = "--steps 8 --batch-size 2 --check-ranks-every 1"
        result = train_ranks(short / name, 3, common, options, FAULT="nan:2:4")
        assert "not finite" in result.one_line(DONE, "step 4:").err
    for zero in (1, 2, 3):
        expect_same_weights(short / "zero0", short / f"zero{zero}", 8)


@pytest.mark.full
def test_bit_flip(short):
    """a bit flip on one rank is detected"""
    options = "--steps 12 --batch-size 2 --checkpoint-every 2 --check-ranks-every 100"
    result = train_ranks(short / "run", 3, options, FAULT="flip:1:5")
    # before the checkpoint of step 6
    words = "after step 6 rank 1 has different values in model.embed_tokens.weight than most ranks"
    result.one_line(FAILED, words)
    train_ranks(short / "whole", 3, options).done()
    resume_ranks(short / "run", 3).done()
    expect_same_weights(short / "whole", short / "run", 12)


@pytest.mark.full
def test_bit_flip_in_a_group(short):
    """a bit flip in a piece that only one rank of each group has is detected"""
    for zero in (1, 2, 3):
        options = f"--steps 6 --batch-size 2 --check-ranks-every 1 --zero {zero} --zero-group 2"
        result = train_ranks(short / f"zero{zero}", 4, options, FAULT="moment:3:5")
        result.one_line(FAILED, "after step 5 the pieces of rank 1 and of rank 3 differ")


def test_weights_not_finite(short):
    """no rank saves weights that are not finite"""
    options = "--steps 12 --batch-size 2 --checkpoint-every 3 --timeout 5"
    result = train_ranks(short / "run", 3, options, FAULT="broken:0:6,broken:1:6,broken:2:6")
    assert result.status == FAILED and "weights after step 6 are not finite and are not saved" in result.err, result
    assert saved(short / "run") == [3]  # nor was it begun
    (stopped,) = records(short / "run", "event", what="stopped")
    assert stopped["why"] == "not_finite" and stopped["last_good_checkpoint"].endswith("step_00000003")


# ---- rollbacks

ROLLBACK = "--steps 12 --batch-size 2 --total-batch 96 --checkpoint-every 3 --schedule constant --rollback 2:4"


def test_rollback_skips_data(short):
    """a rollback returns to a checkpoint and skips the data of the bad steps"""
    # steps 7 and 8 are bad: from step 8 back to the checkpoint of step 6, then on with window 48
    for ranks in (1, 3):
        run = short / f"run{ranks}"
        result = train_ranks(run, ranks, ROLLBACK, FAULT="nan:0:7,nan:0:8")
        # the fault depends on the step, so it occurs twice more; the third time the run gives up
        assert result.status == FAILED and "does not help" in result.err, result
        back = "data that follow (window 48); a resume from this checkpoint drops steps 7 to 8 of log.jsonl"
        assert back in result.err and result.out.count("checkpoint of step 6 written") == 4  # once after each
        # without the fault: continues from step 6, with the data after the last bad step
        assert "training from step 6" in resume_ranks(run, ranks).done().out
        steps, events = records(run, "train"), records(run, "event", what="rollback")
        assert [step["step"] for step in steps] == list(range(1, 13))
        assert steps[-1]["tokens"] == 12 * 96
        assert events and (events[-1]["from_step"], events[-1]["first_bad_step"]) == (8, 7)
        state = (checkpoint(run, 12) / "trainer_state.json").read_text()
        # three times two steps of six windows were passed over and saved
        assert int(re.search(r'"next_window": *"?(\d+)', state)[1]) == 12 * 6 + 3 * 2 * 6
    expect_losses(short / "run1", short / "run3")
    options = "--steps 12 --batch-size 2 --checkpoint-every 6 --rollback 1:1"
    result = train_ranks(short / "early", 1, options, FAULT="nan:0:2").done()
    assert "there is no checkpoint before step 2: training continues" in result.err


def test_rollback_of_pieces(short):
    """a rollback with --zero 3 reverts the updates of all pieces"""
    # The update of step 8 is reverted, although no rank has all parameters: the losses that follow are those of
    # --zero 2.
    for zero in (2, 3):
        options = f"--steps 12 --batch-size 2 --checkpoint-every 3 --rollback 2:4 --matmul-dtype bf16 --zero {zero}"
        result = train_ranks(short / f"zero{zero}", 3, options, FAULT="nan:0:7,nan:0:9")
        assert result.status == FAILED and "back to the checkpoint of step 6" in result.err, result
    losses = [re.findall(r'"loss": *[\d.]*', (short / f"zero{zero}/log.jsonl").read_text()) for zero in (2, 3)]
    assert len(losses[0]) > 12 and losses[0] == losses[1]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.full(cases_from=1)
def test_rollback_reverts_updates(short, ranks):
    """a rollback reverts all bad updates and their checkpoints, also across a resume"""
    # Steps 135 and 137 are spikes, whose updates are applied. The checkpoint of step 135 includes the first one, so
    # the run returns to that of step 134, where the first start was stopped.
    options = "--steps 140 --batch-size 2 --total-batch 96 --checkpoint-every 3 --schedule constant --rollback 2:4"
    train_ranks(short / "base", ranks, options, "--stop-after 134").done()
    killed, stopped, again = (shutil.copytree(short / "base", short / name) for name in ("killed", "stopped", "again"))
    # Killed between the removal of the abandoned checkpoints and the next one: they must not be resumed. In the
    # background the checkpoint of step 135 could still be saved in step 137, before the removal.
    spikes = "spike:0:135,spike:0:137"
    result = resume_ranks(killed, ranks, NO_COPY="0", FAULT=f"{spikes},kill:0:137:save")
    assert result.status != DONE and newest(killed) == 134
    # the first bad step is known after a resume
    resume_ranks(stopped, ranks, "--stop-after 136", FAULT="spike:0:135").done()
    assert len(records(stopped, "event", what="spike")) == 1
    back = "back to the checkpoint of step 134, training continues with the data that follow (window 822)"
    assert resume_ranks(stopped, ranks, FAULT="spike:0:137").done().err.count(back) == 1
    # it occurs three more times, then the run gives up, and again at once after a resume
    for rollbacks in (3, 0):
        result = resume_ranks(again, ranks, FAULT=spikes)
        assert result.status == FAILED
        assert "for the 4th time in a row to the checkpoint of step 134" in result.err
        assert result.err.count("back to the checkpoint of step 134,") == rollbacks
        assert newest(again) == 134
    assert "training from step 134 to 140" in resume_ranks(again, ranks).done().out
