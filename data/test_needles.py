"""Tests of needles.py: prompts against an independent reading of them, guesses, and the answers of the trainer."""

import itertools
import json
import os
import random
import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import needles as tasks
import xxhash
from choices import read_choices
from shards import write_shard
from test_choices import run_here

HERE = Path(__file__).resolve().parent
TRAINER = Path(os.environ.get("TRAIN_DIFFV2", HERE.parent / "train_diffv2")).absolute()
FIRST_SYMBOL, FIRST_TEXT, TEXT = 10, 200, 300
NEEDLES = [255, 256, 29, 258, 259, 261, 262, 30, 25, 21, 15, 31, 264, 265, 32, 267, 268, 33, 270, 271, 273, 274, 35]
NEEDLES += [276, 277, 38, 28, 279, 280, 37, 282, 283, 285, 286, 39, 36, 34, 21, 15, 30]


def made_words(count):
    """Text of 300 tokens, of which every third is a symbol; symbols are the tokens 10, 11, .."""
    words = tasks.Words.__new__(tasks.Words)
    words.symbols, words.are_words = list(range(FIRST_SYMBOL, FIRST_SYMBOL + count)), True
    words.text = [FIRST_TEXT + i if i % 3 else FIRST_SYMBOL + i // 3 % count for i in range(TEXT)]
    return words


def values_of(example):
    assert all(len(tokens) == 1 for tokens in example.completions), "completions are not tokens"
    return [tokens[0] for tokens in example.completions]


def expect_needles(found, needles, asked, length, words):
    """Reads the questions of a prompt: where the pairs are, that the rest continues the text, that each key and value
    is there once, and that the pair of a question has the depth that is stated."""
    whole, candidates = found[-1][0].context, values_of(found[0][0])
    body = length - (2 * asked - 1)
    text, tokens = body - 2 * needles, whole[:body]
    assert len(whole) == length and len(found) == asked and len(candidates) == needles
    assert candidates == sorted(set(candidates)), "candidates are not different and sorted"
    assert all(tokens.count(c) == 1 and tokens.index(c) > 0 for c in candidates), "a value is not there once"
    of_pair = {i for c in candidates for i in (tokens.index(c) - 1, tokens.index(c))}
    drawn, rest = {tokens[i] for i in of_pair}, [t for i, t in enumerate(tokens) if i not in of_pair]
    assert len(rest) == text and not drawn & set(rest), "the text has tokens of pairs"
    without = lambda i: [t for t in 2 * (words.text[i:] + words.text[:i]) if t not in drawn]  # around the end
    starts = [i for i in range(TEXT) if words.text[i] == rest[0] and rest == without(i)[:text]]
    assert starts, "the rest is not the text"
    keys = []
    for q, (example, depth) in enumerate(found):
        assert example.context == whole[: body + 2 * q + 1], ("question", q, "has another context")
        key, answer = example.context[-1], values_of(example)[example.label]
        at = tokens.index(key)
        assert tokens.count(key) == 1 and tokens[at + 1] == answer, "the answer does not follow the key"
        assert q == asked - 1 or whole[body + 2 * q + 1] == answer, "the next question does not show the answer"
        shown = {values_of(e)[e.label] for e, _ in found[:q]}
        assert values_of(example) == sorted(set(candidates) - shown), ("candidates of question", q)
        assert sum(i not in of_pair for i in range(at)) == text * depth // 4, ("depth", depth)
        keys.append(key)
    assert len(set(keys)) == asked, "a key is asked for twice"


def test_needles_are_at_their_depths_and_their_keys_and_values_nowhere_else(tmp_path):
    for needles, asked, length, symbols in ((2, 1, 9, 4), (4, 2, 64, 30), (8, 7, 61, 36), (64, 5, 400, 128)):
        words, depths, seen = made_words(symbols), Counter(), set()
        for i in range(100):
            found = tasks.needle_questions(needles, asked, length, i % 5, words, tasks.mix(i))
            expect_needles(found, needles, asked, length, words)
            assert i % 5 in [depth for _, depth in found], "no question about its depth"
            depths.update(depth for _, depth in found)
            assert found == tasks.needle_questions(needles, asked, length, i % 5, words, tasks.mix(i)), "not the same"
            seen.add(tuple(found[-1][0].context))
        assert len(seen) == 100 and all(depths[i] >= 20 for i in range(5)), (len(seen), depths)


def test_prompts_are_those_that_the_trainer_drew(tmp_path):
    # Those that the trainer drew, of the same key and symbols, before the task became a file.
    found = tasks.needle_questions(4, 2, 40, 1, made_words(30), 12345)
    assert found[-1][0].context == NEEDLES and [e.label for e, _ in found] == [0, 0], found


def test_words_are_tokens_of_letters_after_a_space_or_capitals_and_digits(tmp_path):
    for text, word in ((b" abc", 1), (b" ab", 0), (b"abcd", 0), (b" ab1", 0), (" naïve".encode(), 1), (b" abc ", 0)):
        assert tasks.is_word(text) == bool(word), text
    assert [v for v in range(256) if tasks.is_byte_word(v)] == [*b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"], "bytes"


def write_table(path, texts, separator=2**32 - 1):
    head = struct.pack("<8s12I", b"DV2TOK\0\1", 1, len(texts), 0, 0, separator, *[0] * 4, len(b"".join(texts)), 0, 0)
    data = head + struct.pack(f"<{len(texts)}I", *map(len, texts)) + b"".join(texts)
    path.write_bytes(data + struct.pack("<Q", xxhash.xxh64(data).intdigest()))


def byte_shard(path, count):
    """Bytes: 0, which separates documents, then capitals of which A is the most frequent, then lower-case letters."""
    byte = lambda i: 0 if i % 10 == 0 else 65 + i // 10 % count * (i % 10 - 1) if i % 10 < 3 else 97 + i % 26
    write_shard(path, np.array([byte(i) for i in range(1010)], "<u2"))


def test_the_text_has_no_separators_and_symbols_are_its_most_frequent_words(tmp_path):
    for count in (4, 12):  # 4 are too few
        byte_shard(tmp_path / "val.bin", count)
        words = tasks.Words(12, str(tmp_path / "v*l.bin"), 10)
        assert len(words.text) == 64 * 9 and 0 not in words.text and words.text[0] == 65, len(words.text)
        assert words.are_words == (count == 12) and words.symbols[0] == 65, words.symbols
        assert len(words.symbols) == (12 if count == 12 else 4 + 26), words.symbols
    # a tokenizer in which lower-case letters are words, and its separator; a corpus has its own
    write_table(tmp_path / "tokenizer.bin", [b" abc" if 97 <= v < 123 else b"x" for v in range(256)], 65)
    words = tasks.Words(12, str(tmp_path / "val.bin"), 10, tmp_path)
    assert 65 not in words.text and 0 in words.text and min(words.symbols) >= 97 and words.are_words, words.symbols
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for shard in (1, 0):  # sorted by name
        byte_shard(corpus / f"val_{shard}.bin", 12 - shard)
    (corpus / "corpus.json").write_text('\ufeff{"vocab_size": 300, "separator": {"token": 66}}')
    words = tasks.Words(12, str(corpus), 100)
    assert 66 not in words.text and 0 in words.text and len(words.text) > 1000 and not words.are_words, words.symbols


def run_tasks(*words):
    """needles.py, in this process, since the tests start it often."""
    return run_here(tasks, "needles.py", *words)


def test_mistakes_are_named_in_one_line(tmp_path):
    byte_shard(tmp_path / "val.bin", 12)
    needles = "needles '{}' is not accepted: "
    cases = [(x, needles.format(x) + "it must be N:R, such as 4:2") for x in ("4", "4:2,", ":2", "4:+2")]
    cases += [("4294967300:2", needles.format("4294967300:2") + "it must be N:R")]
    cases += [(x, needles.format(x) + "N must be 2 to 64") for x in ("1:1", "65:1")]
    cases += [(x, needles.format(x) + "R must be 1 to N - 1: the last") for x in ("4:4", "4:0")]
    cases += [("4:2 --seq-len 59", "needles 4:2 requires --seq-len 60 or more, and it is 59")]
    cases += [("26:2 --seq-len 260", "53 different tokens are required in the first 64 validation windows")]
    cases += [(f"4:2 --val-data {tmp_path}/none.bin", f"--val-data {tmp_path}/none.bin: no such shards")]
    cases += [(f"4:2 --val-data a={tmp_path}:1", "a mixture of corpora; specify one of them")]
    cases += [("4:2 --seq-len 2000", "no shard has 2001 tokens, a window of --seq-len 2000")]
    cases += [(f"4:2 --tokenizer {tmp_path}/val.bin", "val.bin: not a tokenizer.bin, or damaged")]
    cases += [(f"4:2 --out {tmp_path}/none/x", "none/x")]
    for words, said in cases:
        given = dict(itertools.zip_longest(*[iter(words.split()[1:])] * 2))
        options = {"--val-data": tmp_path / "val.bin", "--seq-len": 100, "--out": tmp_path / "x.bin"} | given
        r = run_tasks(words.split()[0], *(word for option in options.items() for word in option))
        r.one_line(1, said)
    assert {p.name for p in tmp_path.iterdir()} == {"val.bin"}, [*tmp_path.iterdir()]


def train(*words):
    r = subprocess.run([TRAINER, "--threads", "2", *map(str, words)], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    return r.stdout


def test_the_trainer_scores_questions_whatever_the_batches(tmp_path):
    letters = random.Random(1).choices(b"abcdefghijklmnopqrstuvwxyz ", k=6000)
    write_shard(tmp_path / "val.bin", np.array(letters, "<u2"))
    size = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --seq-len 52 --total-batch 52"
    data, out = ("--train-data", tmp_path / "val.bin", "--val-data", tmp_path / "val.bin"), tmp_path / "run"
    train(*data, *size.split(), "--batch-size", 1, "--steps", 2, "--out", out)
    file, found = tmp_path / "needles.bin", []
    r = run_tasks("3:2", "--val-data", tmp_path / "val.bin", "--seq-len", 52, "--out", file)
    assert r.status == 0 and "tokens" in r.out, r  # lower-case letters are no words
    for batch in (12, 28):
        init = ("--init", out / "checkpoints/step_00000002", "--val-data", tmp_path / "val.bin", "--val-steps", 2)
        words = ("--eval-choices", f"needles={file}", "--eval-out", tmp_path / "eval.json")
        train("--eval", *init, "--batch-size", batch, *words)
        found.append(json.loads((tmp_path / "eval.json").read_text()))
    (choice,) = found[0]["choices"]
    assert [choice] == found[1]["choices"] and "loss" in found[0], "other batches give other scores"
    assert abs(choice["chance"] - (1 / 3 + 1 / 2) / 2) < 1e-12, choice["chance"]
    assert choice["examples"] == len(read_choices(file)[1]) == 2000
