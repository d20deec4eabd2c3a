"""The data loader's errors, as the program reports them."""

import os

import pytest
from program import FAILED, run_trainer, write_shard

MODEL = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --threads 1"


def evaluate(data, steps=1):
    """--eval of windows of 5 tokens, in the order of the files."""
    return run_trainer("--eval --val-data", data, MODEL, f"--vocab 256 --seq-len 5 --batch-size 1 --val-steps {steps}")


def first_tokens(data, length, vocab=256, batch_size=1):
    """--dump-grads, which reads the first batch_size * length + 1 tokens in the order of the files."""
    model = f"{MODEL} --vocab {vocab} --seq-len {length} --batch-size {batch_size}"
    return run_trainer("--dump-grads /dev/null --train-data", data, model)


def test_refused_paths(tmp_path):
    """a pattern without files, a directory without shards and a pipe are rejected by name"""
    write_shard(tmp_path / "good.bin", range(6))  # the least that is accepted
    assert evaluate(tmp_path / "good.bin").done().err == ""
    evaluate(tmp_path / "none_*.bin").one_line(FAILED, "no file matches")
    assert str(tmp_path) in evaluate(tmp_path).one_line(FAILED, "no val_").err
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
