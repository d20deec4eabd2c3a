"""Signals, closed terminals and pipes, and kills: a run saves, or continues, and a resume continues bit for bit."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from program import DONE, FAILED, ROOT, SIGNALLED, Started, all_records, checkpoint, expect_same, linked_with, program
from program import SHAPE, has_open, records, run, run_trainer, saved, trainer
from ranks import faulty, write_many
from small_runs import ENDLESS, TWELVE, command, expect_whole, resume, start


@pytest.mark.parametrize("step", range(1, 12))
def test_resume_at_every_step(short, whole, step):
    """a run resumes bitwise at every step, with accumulation and across the end of an epoch"""
    assert "--resume" in start(short / "run", TWELVE, f"--stop-after {step}").done().out
    resume(short / "run").done()
    expect_whole(whole, short / "run")


# ---- signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_signal(short, name):
    """a signal causes a checkpoint, and a resume continues bitwise"""
    with Started(*command(short / "run", ENDLESS, "--checkpoint-every 1"), cwd=short) as process:
        process.wait_for_step(short / "run", 3).send_signal(signal.Signals[name])
        result = process.end().one_line(SIGNALLED, "saves a checkpoint")
    assert "--resume" in result.out
    steps = len(records(short / "run", "train")) + 2
    resume(short / "run", f"--steps {steps}").done()
    assert [record["step"] for record in records(short / "run", "train")] == list(range(1, steps + 1))
    start(short / "whole", ENDLESS.replace("1000000", str(steps))).done()
    last = (checkpoint(short / name, steps) for name in ("run", "whole"))
    expect_same(*last, without=["trainer_state.json"])


@pytest.mark.full
def test_signal_during_product(short):
    """a signal during a matrix product stops the run with a checkpoint, even if it is repeated"""
    # Products of a width at which oneDNN computes with its stack pointer in a buffer on the heap, where a signal
    # handler must not run; and a signal comes more than once, as when a launcher passes on what a scheduler has sent
    # to all processes.
    model = "--preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --steps 1000000 --threads 1"
    for i in range(2 if linked_with("libasan") else 8):
        out = short / f"run{i}"
        with Started(*trainer(), model, "--train-data train.bin --out", out, cwd=short) as process:
            process.wait_for_step(out, 2).send_signal(signal.SIGUSR1)
            time.sleep(i / 100)
            process.terminate()
            assert process.end().status == SIGNALLED, (i, process.printed())


def test_second_signal(short):
    """the first signal is acknowledged at once, and a second ends the run"""
    # one step that takes long: many micro-steps, so that the first signal is still waiting for its end
    options = "--steps 10 --batch-size 1 --total-batch 16000000 --checkpoint-every 1"
    with Started(*command(short / "run", options), cwd=short) as process:
        process.wait_until(lambda: "training from" in process.printed()[0])
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        acknowledged = process.printed()[1]
        process.send_signal(signal.SIGINT)
        result = process.end()
    assert "the run stops after the current step" in acknowledged and result.err.startswith(acknowledged)
    assert result.status == FAILED and "second signal: ending at once" in result.err and result.err.count("\n") == 2


# Starts that take long: with so many shards, or so many windows to measure.
LONG = {
    "opening data": (20000, "--train-data 'many/*.bin' --steps 2 --out run", "ended before the first step"),
    "evaluation": (50, "--eval --val-data 'many/*.bin' --val-steps 1000000 --eval-out out.json", "ended before every"),
}


@pytest.mark.parametrize("what", LONG)
def test_signal_without_run(short, what):
    """a signal ends the opening of data and an evaluation at once, and nothing is written"""
    shards, options, words = LONG[what]
    write_many(short, shards)
    before = sorted(short.iterdir())
    with Started(*trainer(), SHAPE, "--batch-size 1 --threads 1", options, cwd=short) as process:
        process.wait_until(lambda: has_open(process.pid, "/many/")).terminate()
        assert process.end().one_line(SIGNALLED, words).out == ""
    assert sorted(short.iterdir()) == before


def test_signal_in_first_validation(short):
    """a signal during the validation before the first step abandons it"""
    write_many(short, 2000)
    validation = "--val-data 'many/*.bin' --val-steps 1000000 --batch-size 1"
    with Started(*command(short / "run", "--steps 2", validation), cwd=short) as process:
        process.wait_until(lambda: "training from" in process.printed()[0]).terminate()
        result = process.end().one_line(SIGNALLED, "the run stops")
    assert "stopped after step 0 of 2" in result.out
    assert {record["kind"] for record in all_records(short / "run")} == {"event"}
    resume(short / "run", "--val-steps 1").done()
    assert [record["step"] for record in records(short / "run", "val")] == [0, 2]


@pytest.mark.parametrize("ignored", [False, True])
def test_interrupted_output(short, ignored):
    """an interrupted dump leaves no temporary file, and an ignored signal does not interrupt it"""
    dump = "--threads 1 --seq-len 16 --batch-size 2 --train-data train.bin --dump-grads big.st"
    start = "env --ignore-signal=INT" if ignored else ""
    with Started(start, faulty(), dump, cwd=short, env={"SLOW": "1000" if ignored else "20000"}) as process:
        process.wait_until(lambda: list(short.glob("big.st.*.tmp"))).send_signal(signal.SIGINT)
        assert process.end().status == (DONE if ignored else -signal.SIGINT)
    assert [path.name for path in short.glob("big.st*")] == ["big.st"] * ignored


def test_nohup(short):
    """SIGHUP is ignored under nohup"""
    steps = "--steps 300 --total-batch 128 --batch-size 4"
    with Started("nohup", *command(short / "run", steps), cwd=short) as process:
        process.wait_for_step(short / "run", 3).send_signal(signal.SIGHUP)
        assert "signal" not in process.end().done().err


def test_terminal_closed(short):
    """closing the terminal stops the run with a checkpoint"""
    ours, theirs = os.openpty()
    options = "--steps 1000000 --schedule constant --batch-size 4"
    # setsid: the terminal is the controlling one of a session
    with Started("setsid --ctty", *command(short / "run", options), cwd=short, terminal=theirs) as process:
        os.close(theirs)
        process.wait_for_step(short / "run", 3)
        while len(os.read(ours, 256)) == 256:  # else the run waits for room in the terminal
            pass
        os.close(ours)
        assert process.end().status == SIGNALLED
    assert saved(short / "run")[-1] == records(short / "run", "train")[-1]["step"]
    assert "Hangup" in (short / "run/log.jsonl").read_text()


# ---- closed streams


def into(reader):
    """A process that reads a pipe; its stdin is the end to write to."""
    return subprocess.Popen(reader, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "reader",
    [["true"], ["head", "-n", "1"], ["sed", "/step..*2.12/q"]],
    ids=["before the start", "after a line", "during the run"],
)
def test_stdout_closed(short, whole, reader):
    """a run continues after the reader of its stdout has closed it"""
    with into(reader) as process:
        result = start(short / "run", TWELVE, stdout=process.stdin).done()
    if reader[0] != "sed" or result.err:  # during the run it may come too late
        result.one_line(DONE, "stdout was closed")
    expect_whole(whole, short / "run")


def test_result_into_closed_pipe():
    """what prints a result and nothing else ends as other programs do when stdout is closed"""
    with into(["true"]) as process:
        process.wait()
        result = run_trainer("--generate 30 --vocab 256", stdout=process.stdin)
    result.one_line(-signal.SIGPIPE, "the weights are random")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_descriptors(short, whole, closed):
    """a run and a conversion of text are complete when stdin, stdout and stderr are closed"""
    # Descriptors that are closed at the start must not become those of files that the program writes.
    close = f"sh -c 'exec \"$@\" {closed}' sh"
    for words in (command(short / "run", TWELVE, "--stop-after 6"), [*trainer(), "--out run --resume --threads 1"]):
        result = run(close, *words, cwd=short).done()
        assert result.out == "" and result.err == ""
    expect_whole(whole, short / "run")
    run(close, *program("TEXT_TO_SHARDS", "./text_to_shards"), "--out", short / "shards", ROOT / "README.md").done()


# ---- kills


@pytest.mark.full
def test_kill_while_saving(short):
    """kill -9 never leaves a partial checkpoint under its final name"""
    # Killed at moments spread over a run that saves after every step, and resumed each time; once it is done, another
    # begins. Machines differ much, and so do their minutes: what a run takes is learnt as the starts go on.
    kills, killed, out, begin = 25, 0, short / "run", time.monotonic()
    options = f"{TWELVE} --checkpoint-every 1"
    start(short / "whole", options).done()
    seconds = time.monotonic() - begin

    def next_start():
        if (out / "run.json").exists():
            return [*trainer(), "--out run --resume --threads 1"]
        return command(out, options)

    for i in range(kills):
        if checkpoint(out, 12).exists():
            shutil.rmtree(out)
        with Started(*next_start(), cwd=short) as process:
            time.sleep(seconds * (0.1 + 0.9 * (i * 7 % kills) / kills))
            process.kill()
            result = process.end()
        assert "diffv2: " not in result.err, "the run was refused, or a broken checkpoint has its final name"
        died = result.status == -signal.SIGKILL
        killed += died
        seconds *= 1.1 if died else 0.7
    assert killed > kills / 3, f"only {killed} of {kills} starts were killed: the test tests little"
    if checkpoint(out, 12).exists():  # a start after the last step removes nothing
        shutil.rmtree(out)
    run(*next_start(), cwd=short).done()
    expect_whole(short / "whole", out)
    assert all(isinstance(step, int) for step in saved(out)), "an unfinished checkpoint is left"
