"""Tests of needles.py: prompts against an independent reading of them, mistakes, and what the trainer reads."""

import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import needles as tasks
import pytest
from program import run, write_shard
from test_choices import run_here

HERE = Path(__file__).resolve().parent
TRAINER = Path(os.environ.get("TRAIN_DIFFV2", HERE.parent / "train_diffv2")).absolute()
TEXT = [200 + i if i % 3 else 10 + i // 3 for i in range(300)]  # every third token is a symbol: 10, 11, ..


def values_of(example):
    assert all(len(tokens) == 1 for tokens in example.completions), "completions are not tokens"
    return [tokens[0] for tokens in example.completions]


def expect_needles(found, needles, asked, length):
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
    without = lambda i: [t for t in 2 * (TEXT[i:] + TEXT[:i]) if t not in drawn]  # around the end
    starts = [i for i in range(len(TEXT)) if TEXT[i] == rest[0] and rest == without(i)[:text]]
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


def test_needles_are_at_their_depths_and_their_keys_and_values_nowhere_else():
    for needles, asked, length, count in ((2, 1, 9, 4), (4, 2, 64, 30), (8, 7, 61, 36), (40, 5, 300, 80)):
        symbols, depths, seen = list(range(10, 10 + count)), Counter(), set()
        for i in range(100):
            made = lambda: tasks.needle_questions(needles, asked, length, i % 5, TEXT, symbols, random.Random(i))
            found = made()
            expect_needles(found, needles, asked, length)
            assert i % 5 in [depth for _, depth in found], "no question about its depth"
            depths.update(depth for _, depth in found)
            assert found == made(), "not the same"
            seen.add(tuple(found[-1][0].context))
        assert len(seen) == 100 and all(depths[i] >= 20 for i in range(5)), (len(seen), depths)


@pytest.fixture
def corpus(tmp_path):
    """A corpus of lower-case letters and spaces, with the separator "~"."""
    letters = random.Random(1).choices(b"abcdefghijklmnopqrstuvwxyz~ ", k=6000)
    for i in range(2):
        write_shard(tmp_path / f"val_{i}.bin", letters[i * 3000 :][:3000])
    about = {"format": 1, "vocab_size": 256, "separator": {"token": 126, "place": "before"}}
    (tmp_path / "corpus.json").write_text("\ufeff" + json.dumps(about))
    return tmp_path


def test_the_text_has_no_separators_and_symbols_are_of_its_rarer_half(corpus):
    letters = random.Random(1).choices(b"abcdefghijklmnopqrstuvwxyz~ ", k=6000)
    assert tasks.read_text(corpus, 5000) == [t for t in letters[:5000] if t != 126]
    assert tasks.symbols_of([1] * 5 + [2] * 4 + [3] * 3 + [4] * 2, 2) == [3, 4]


def run_tasks(*words):
    """needles.py, in this process, since the tests start it often."""
    return run_here(tasks, "needles.py", *words)


def test_mistakes_are_named_in_one_line(corpus):
    before = {p.name for p in corpus.iterdir()}
    refused = "needles '{}' is not accepted: it must be N:R, such as 4:2, with N from 2 to 64, and R from 1 to N - 1: "
    cases = [(x, refused.format(x)) for x in ("4", "4:2,", ":2", "4:+2", "4294967300:2", "1:1", "65:1", "4:4", "4:0")]
    cases += [("4:2 --seq-len 59", "needles 4:2 requires --seq-len 60 or more, and it is 59")]
    cases += [("26:2 --seq-len 260", "52 symbols are required, and the first 64 windows of the validation data have")]
    cases += [(f"4:2 --val-data {corpus}/none", f"{corpus}/none/corpus.json: No such file")]
    cases += [(f"4:2 --out {corpus}/none/x", "none/x")]
    for words, said in cases:
        given = dict(itertools.zip_longest(*[iter(words.split()[1:])] * 2))
        options = {"--val-data": corpus, "--seq-len": 100, "--out": corpus / "x.bin"} | given
        r = run_tasks(words.split()[0], *(word for option in options.items() for word in option))
        r.one_line(1, said)
    (corpus / "corpus.json").write_text("[]")
    r = run_tasks("4:2", "--val-data", corpus, "--seq-len", 100, "--out", corpus / "x.bin")
    r.one_line(1, "corpus.json is damaged")
    assert {p.name for p in corpus.iterdir()} == before, [*corpus.iterdir()]


def test_the_trainer_scores_the_questions(corpus):
    run_tasks("3:2", "--val-data", corpus, "--seq-len", 52, "--out", corpus / "needles.bin").done()
    size = "--layers 1 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --seq-len 52 --threads 1"
    words = "--eval --val-data . --val-steps 1 --eval-choices needles=needles.bin --eval-out eval.json"
    run(TRAINER, size, words, cwd=corpus).done()
    (choice,) = json.loads((corpus / "eval.json").read_text())["choices"]
    assert abs(choice["chance"] - (1 / 3 + 1 / 2) / 2) < 1e-12 and choice["examples"] == 2000, choice
