"""The data loader's errors, as the program reports them."""

import os
import re

import pytest
from program import FAILED, Started, checkpoint, expect_same, overwrite, records, run_trainer, saved
from program import without_times, write_shard
from small_runs import ENDLESS, TWELVE, command, resume, start

MODEL = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --threads 1"


def evaluate(data, steps=1):
    """--eval of windows of 5 tokens, in the order of the files."""
    return run_trainer("--eval --val-data", data, MODEL, f"--vocab 256 --seq-len 5 --batch-size 1 --val-steps {steps}")


def first_tokens(data, length, vocab=256, batch_size=1):
    """--dump-grads, which reads the first batch_size * length + 1 tokens in the order of the files."""
    model = f"{MODEL} --vocab {vocab} --seq-len {length} --batch-size {batch_size}"
    return run_trainer("--dump-grads /dev/null --train-data", data, model)


def test_refused_paths(tmp_path):
    """a pattern without files, a directory that is no corpus and a pipe are rejected by name"""
    write_shard(tmp_path / "good.bin", range(6))  # the least that is accepted
    assert evaluate(tmp_path / "good.bin").done().err == ""
    evaluate(tmp_path / "none_*.bin").one_line(FAILED, "no file matches")
    assert str(tmp_path) in evaluate(tmp_path).one_line(FAILED, "no corpus.json").err
    os.mkfifo(tmp_path / "bad.bin")
    assert "/bad.bin" in evaluate(tmp_path / "*.bin").one_line(FAILED, "not a regular file").err


@pytest.mark.parametrize("token", [256, 65535, 65536, 2**32 - 1])
def test_vocabulary(tmp_path, token):
    """a token outside the vocabulary is reported with its position, at its batch"""
    path, words = tmp_path / "a.bin", f"token 17 of {tmp_path}/a.bin is {token}, outside the vocabulary of 256"
    tokens = list(range(31))
    write_shard(path, tokens, wide=token > 65535)
    evaluate(path, steps=6).done()
    tokens[17] = token  # in window 3 alone
    write_shard(path, tokens, wide=token > 65535)
    evaluate(path, steps=3).done()
    assert "--vocab" in evaluate(path, steps=4).one_line(FAILED, words).err
    first_tokens(path, 17).one_line(FAILED, words)
    first_tokens(path, 16).done()


def test_too_few_tokens(tmp_path):
    """more first tokens than there are is an error"""
    for i in range(300):
        write_shard(tmp_path / f"{i:03d}.bin", range(i, i + 6))
    result = first_tokens(tmp_path / "*.bin", 5, vocab=65536, batch_size=360).one_line(FAILED, "1801")
    assert "1800" in result.err


# ---- data that cannot be read during a run

TOKEN_100 = 1024 + 2 * 100  # its place in a shard
BAD = b"\0\1"  # 256


def advice(result):
    """The command line that the error advises, as one text."""
    return re.search("or read other data: (.*)\n", result.err)[1]


def test_token_in_run(short):
    """a token outside the vocabulary ends a run with the checkpoint of the last step, and the advice continues it"""
    run, whole, options = short / "run", short / "whole", f"{TWELVE} --change 1-12:lr=0.5"
    overwrite(short / "train.bin", TOKEN_100, BAD)
    result = start(run, options).one_line(FAILED, "token 100 of train.bin is 256, outside the vocabulary of 256")
    steps = [len(records(run, "train"))]
    assert 0 < steps[0] < 5 and saved(run) == steps, "the first epoch ends in step 5"
    assert f"the state of step {steps[0]} is saved" in result.err
    start(whole, options, f"--stop-after {steps[0]}").done()
    expect_same(checkpoint(whole, steps[0]), checkpoint(run, steps[0]))
    # without the advice the same again, and nothing is lost; with it, on to the next epoch, which has the window again
    assert resume(run, f"--change {steps[0] + 1}-12:lr=0.5").one_line(FAILED, "is 256, outside").err == result.err
    assert saved(run) == steps
    while result.status == FAILED:
        next_step = steps[-1] + 1
        assert f"--resume --change '{next_step}-12:lr=0.5 {next_step}:replace=" in advice(result)
        result = run_trainer(advice(result), "--threads 1", cwd=short)
        steps.append(len(records(run, "train")))
        assert steps[-1] > steps[-2] and steps[-1] in saved(run)
    assert result.done().err == "" and steps[2:] == [12], steps  # the end of the third epoch is not reached
    changes = [record["change"].split("=")[0] for record in records(run, "event", what="change")]
    later = [f"{step + 1}{rest}" for step in steps[:2] for rest in ("-12:lr", ":replace")]
    assert changes == ["1-12:lr", *later]


def test_shard_lost_in_run(short):
    """a shard that is cut off during a run ends it with a checkpoint, and a resume continues when it is restored"""
    data = (short / "train.bin").read_bytes()
    with Started(*command(short / "run", ENDLESS), cwd=short) as process:
        process.wait_for_step(short / "run", 3)
        os.truncate(short / "train.bin", 0)
        result = process.end().one_line(FAILED, "has 0 now")
    (last,) = saved(short / "run")
    assert last == records(short / "run", "train")[-1]["step"] and f"the state of step {last} is saved" in result.err
    (short / "train.bin").write_bytes(data)
    resume(short / "run", f"--steps {last + 2}").done()
    assert [record["step"] for record in records(short / "run", "train")] == list(range(1, last + 3))


@pytest.mark.full
def test_token_in_validation(short):
    """validation data that cannot be read end a run with a checkpoint, and the validation is made when they can"""
    run, whole, options = short / "run", short / "whole", f"{TWELVE} --val-data val.bin --val-every 4 --val-steps 100"
    data = (short / "train.bin").read_bytes()
    for name in ("val.bin", "other.bin"):
        (short / name).write_bytes(data)
    start(whole, options).done()
    start(run, options, "--stop-after 2").done()
    overwrite(short / "val.bin", TOKEN_100, BAD)
    result = resume(run).one_line(FAILED, "token 100 of val.bin is 256")
    assert saved(run) == [2, 4] and "; the state of step 4 is saved" in result.err
    assert resume(run).one_line(FAILED, "token 100 of val.bin is 256").err == result.err
    assert advice(result) == "--out run --resume --val-data DATA"
    other = run_trainer(advice(result).replace("DATA", "other.bin"), "--threads 1 --stop-after 4", cwd=short).done()
    assert "step 4: validation loss" in other.out
    overwrite(short / "val.bin", TOKEN_100, data[TOKEN_100:][:2])
    resume(run, "--val-data val.bin").done()
    for kind in ("val", "train"):
        assert without_times(records(run, kind)) == without_times(records(whole, kind))
