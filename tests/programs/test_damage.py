"""Damaged checkpoints, full disks, and files that change during a run: one line, and nothing saved is lost."""

import os
import shutil

import pytest
from choices import Example, write_choices
from program import DONE, FAILED, SIGNALLED, Started, checkpoint, linked_with, lose_checkpoints, overwrite, records, run
from program import run_trainer, saved, trainer, write_corpus
from small_runs import ENDLESS, MODEL, TWELVE, command, resume, start


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def cut(path):
    """Removes the last byte."""
    os.truncate(path, path.stat().st_size - 1)


# ---- checkpoints


def test_old_checkpoints(short):
    """old checkpoints are removed, and files of other programs are kept"""
    out = short / "run"
    start(out, TWELVE, "--checkpoint-every 2 --keep 2 --stop-after 5").done()
    assert saved(out) == [4, 5]
    for name in ("step_1", "step_00000099.tmp", "notes"):
        (out / "checkpoints" / name).mkdir()
    mine = [out / name for name in ("checkpoints/step_00000007", "checkpoints/notes/a", "plan.txt")]
    for path in mine:
        path.write_text("mine")
    resume(out).done()
    assert saved(out) == ["notes", 7, 10, 12, "step_1"]
    assert [path.read_text() for path in mine] == 3 * ["mine"]


@pytest.fixture(scope="module")
def every_4(whole):
    """The run `whole`, with a checkpoint every 4 steps. Tests do not write there."""
    start(whole.parent / "every_4", TWELVE, "--checkpoint-every 4").done()
    return whole.parent / "every_4"


FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"]


def test_no_whole_checkpoint(short, every_4):
    """a run without a whole checkpoint reports each of them"""
    shutil.copytree(every_4, short / "run")
    for step in saved(short / "run"):
        cut(checkpoint(short / "run", step) / "model.safetensors")
    result = resume(short / "run")
    assert result.status == FAILED and result.err.count("\n") == 4


CHANGED_WEIGHTS = "its model.safetensors does not match its checksum"
CHANGED_STATE = "trainer_state.json does not match its checksum"
CONFIG, WEIGHTS, OPTIMIZER, STATE = FILES
DAMAGES = {  # what is done to the files of a checkpoint, and the error; "": it is accepted
    "nothing": (lambda start: None, ""),
    "no optimizer": (lambda start: (start / OPTIMIZER).unlink(), ""),
    "a longer optimizer": (lambda start: append(start / OPTIMIZER, b"x"), ""),
    "a longer config.json": (lambda start: append(start / CONFIG, b"\n"), "its config.json has"),
    "changed weights": (lambda start: overwrite(start / WEIGHTS, 5001, b"x"), CHANGED_WEIGHTS),
    "a shorter state": (lambda start: cut(start / STATE), CHANGED_STATE),
    "another step": (
        lambda start: (start / STATE).write_text((start / STATE).read_text().replace('"step": 1', '"step": 9')),
        CHANGED_STATE,
    ),
    "an empty state": (lambda start: (start / STATE).write_text(""), CHANGED_STATE),
    "changed weights without a state": (
        lambda start: (overwrite(start / WEIGHTS, 5001, b"x"), (start / STATE).unlink()),
        "",
    ),
    "files of Transformers": (
        lambda start: (append(start / CONFIG, b"\n"), (start / STATE).write_text('{"log_history": []}')),
        "",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_init(short, whole, damage):
    """--init rejects a damaged checkpoint in every mode, and accepts weights of other programs"""
    act, words = DAMAGES[damage]
    shutil.copytree(checkpoint(whole, 12), short / "start")
    act(short / "start")
    for mode in (
        "--train-data train.bin --steps 1 --seq-len 16",
        "--generate 5",
        "--eval --val-data train.bin --seq-len 16",
        "--dump-grads dump --train-data train.bin --seq-len 16",
    ):
        result = run_trainer("--init start --batch-size 2 --threads 1", mode, cwd=short)
        if words:
            result.one_line(FAILED, words)
        else:
            result.done()


def move_checkpoints(out):
    (out / "checkpoints").rename(out.with_name("moved"))


LOSSES = {  # what happens to the checkpoints of a run, and the line of a resume
    "moved": (move_checkpoints, "run/checkpoints has no checkpoint, but log.jsonl states one of step 12: restore the"),
    "not mounted": (
        lambda out: (move_checkpoints(out), (out / "checkpoints").mkdir()),
        "run/checkpoints has no checkpoint, but log.jsonl states one of step 12: restore the",
    ),
    "a link to nothing": (
        lambda out: (move_checkpoints(out), (out / "checkpoints").symlink_to("../nothing")),
        "run/checkpoints has no checkpoint, but log.jsonl states one of step 12: restore the",
    ),
    "a file": (
        lambda out: (move_checkpoints(out), (out / "checkpoints").write_text("")),
        "cannot read the directory run/checkpoints: Not a directory",
    ),
    "moved after a kill before the record of a checkpoint": (
        lambda out: (lose_checkpoints(out), move_checkpoints(out)),
        "run/checkpoints is missing, but log.jsonl has 12 steps: restore the",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_lost_checkpoints(short, whole, loss):
    """a resume whose checkpoints are gone is refused in every mode, and changes nothing"""
    act, words = LOSSES[loss]
    out = short / "run"
    shutil.copytree(whole, out)
    act(out)
    before = [(out / name).read_bytes() for name in ("run.json", "log.jsonl")]
    for mode in ("--steps 13", "--generate 2", "--eval --val-data train.bin", "--dump-grads x", "--dry-run"):
        run_trainer("--out run --resume --threads 1", mode, cwd=short).one_line(FAILED, words)
    assert before == [(out / name).read_bytes() for name in ("run.json", "log.jsonl")]


def test_killed_before_checkpoint(short):
    """a run that was killed before its first checkpoint starts again"""
    out = short / "run"
    with Started(*command(out, ENDLESS), cwd=short) as process:
        process.wait_for_step(out, 3)
        process.kill()
        process.end()
    assert "from step 0" in resume(out, "--stop-after 5").done().out
    assert [record["step"] for record in records(out, "train")] == [1, 2, 3, 4, 5]


def test_absent_files(short, every_4):
    """a checkpoint that is a link to nothing is reported as any other that cannot be read, and a log that is missing"""
    out = short / "run"
    shutil.copytree(every_4, out)
    checkpoint(out, 12).rename(short / "moved")
    checkpoint(out, 12).symlink_to("../../nothing")
    words = "skipping checkpoint run/checkpoints/step_00000012: cannot read its trainer_state.json: No such file"
    resume(out, "--stop-after 9").one_line(DONE, words)
    checkpoint(out, 12).unlink()
    (out / "log.jsonl").unlink()
    resume(out).one_line(DONE, "run/log.jsonl is missing: the records up to step 9 are lost, and a new log begins")
    assert [record["step"] for record in records(out, "train")] == [10, 11, 12]


@pytest.mark.parametrize("name", ["corpus.json", "tokenizer.bin"])
def test_description_that_is_gone(short, name):
    """a file of a corpus that is a link to nothing is refused, not taken for absent"""
    write_corpus(short / "corpus", 1, 1, {"vocab_size": 256})
    (short / "corpus" / name).unlink(missing_ok=True)
    (short / "corpus" / name).symlink_to("nothing")
    options = "--train-data corpus --steps 2 --sample-every 1"
    run_trainer(MODEL, options, cwd=short).one_line(FAILED, f"corpus/{name}")


def test_init_of_run(short, whole):
    """a run without a checkpoint verifies the weights from which it starts again"""
    shutil.copytree(checkpoint(whole, 12), short / "start")
    options = "--init start --out run --train-data train.bin --batch-size 2 --steps 1"
    run_trainer(options, cwd=short).done()
    lose_checkpoints(short / "run")
    append(short / "start/config.json", b"\n")
    run_trainer("--out run --resume", cwd=short).one_line(FAILED, "its config.json has")


def test_one_validation(short):
    """a run that starts again from step 0 has one validation of step 0"""
    out, choice = short / "run", Example([1], [[2], [3]], 0)
    write_choices(short / "task", [choice, choice], 256)
    start(out, TWELVE, "--val-data train.bin --eval-choices task=task --stop-after 1").done()
    lose_checkpoints(out)
    resume(out, "--stop-after 2").done()
    assert (len(records(out, "val")), len(records(out, "choices"))) == (1, 1)
    assert len(records(out, "event")) > 2


def test_killed_resume(short, whole):
    """what a resume leaves that is killed while it copies the log is removed by the next one, also of a finished run"""
    out = short / "run"
    shutil.copytree(whole, out)
    append(out / "log.jsonl", b'{"kind": "val", "step": 1}\n' * 400000)  # a copy that takes a second
    (out / "run.json.tmp").write_text("{")
    with Started(*trainer(), "--out", out, "--resume --steps 13 --threads 1", cwd=short) as process:
        process.wait_until(lambda: any(out.glob("log.jsonl.*")))
        process.kill()
        process.end()
    assert any(out.glob("log.jsonl.*"))
    assert "nothing to do" in resume(out).done().out
    assert {path.name for path in out.iterdir()} == {"run.json", "log.jsonl", "checkpoints"}


# ---- other programs


def replace(path):
    """Another file with the same bytes takes its place."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


@pytest.mark.parametrize(
    ("act", "words", "lines", "status"),
    [
        (lambda out: (out / "log.jsonl").unlink(), "run/log.jsonl was deleted", 2, SIGNALLED),
        (lambda out: replace(out / "log.jsonl"), "run/log.jsonl was replaced", 2, SIGNALLED),
        (lambda out: (out / "run.json").unlink(), "run/run.json was deleted", 2, SIGNALLED),
        (lambda out: out.rename(out.with_name("old")), "run/run.json was deleted", 3, SIGNALLED),
        (lambda out: replace(out / "run.json"), "run/run.json was replaced", 2, FAILED),
    ],
    ids=["no log.jsonl", "another log.jsonl", "no run.json", "no directory", "another run.json"],
)
def test_lost_directory(short, act, words, lines, status):
    """a deleted or replaced log.jsonl, run.json or directory of a run is written again, or ends it"""
    # what another program does to the directory of a run between two checkpoints
    out = short / "run"
    with Started(*command(out, ENDLESS), cwd=short) as process:
        process.wait_for_step(out, 3)
        act(out)
        process.terminate()
        result = process.end()
    assert result.status == status and f"{words} during the run" in result.err and result.err.count("\n") == lines
    steps = [record["step"] for record in records(out, "train")]
    assert len(steps) == steps[-1] >= 3
    if status == SIGNALLED:
        assert "nothing to do" in resume(out, "--steps 1000000 --stop-after 1").done().out


# ---- disks


@pytest.mark.parametrize(
    ("limit", "options", "line"),
    [
        ("--fsize=0", "", "cannot write run/run.json.tmp: File too large"),
        ("--fsize=102400", "", "cannot write run/checkpoints/step_00000012.tmp/optimizer.safetensors: File too large"),
        (
            "--fsize=102400",
            "--checkpoint-every 5",
            "cannot write run/checkpoints/step_00000005.tmp/optimizer.safetensors: File too large",
        ),
        ("--stack=131072", "", "the stack is limited to 128 KiB"),
    ],
    ids=["no files", "a checkpoint", "a checkpoint in the background", "the stack"],
)
def test_limits(short, limit, options, line):
    """a limit of the stack or of the size of files is a one-line error, and nothing incomplete is left"""
    # A file size limit is a disk that is full for the file of the optimizer.
    if "stack" in limit and linked_with("libasan"):
        pytest.skip("the sanitizer requires more for its start")
    run("prlimit", limit, *command(short / "run", TWELVE, options), cwd=short).one_line(FAILED, line)
    assert not list(short.rglob("*tmp*"))
