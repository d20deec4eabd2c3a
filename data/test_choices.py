"""Tests of prepare_choices.py on small records, which are written here."""

import gzip
import io
import itertools
import json
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np
import prepare_choices
import pyarrow
import pyarrow.parquet
import tokenizers
from choices import Example
from program import Result
from test_tokenizer import train_bpe

HERE = Path(__file__).resolve().parent
LETTERS = {"text": ["a bee", "naïve 数学", "red"], "label": ["A", "B", "C"]}
POOL = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())  # its maximum is that of one test
WIKI = "[header] Fold it [title] Take  paper "
# task: (records, [(context, completions, label)]), the completions with the space before them
RECORDS = {
    "hellaswag": (
        [
            {
                "activity_label": "Paper",
                "ctx_a": WIKI,
                "ctx_b": "the Man",
                "endings": [" folds. [step] Ends", "[substeps] sits.", "runs  off"],
                "label": "1",
            },
            {"activity_label": "A", "ctx_a": "b.", "ctx_b": "", "endings": ["x", "y", "z", "w"], "label": 3},
            {"activity_label": "C", "ctx_a": "d [step]", "ctx_b": "", "endings": ["x", "yy"], "label": "0"},
        ],
        [
            ("Paper: Fold it. Take paper The man", [" folds. Ends", "  sits.", " runs off"], 1),
            ("A: b.", [" x", " y", " z", " w"], 3),
            ("C: d", ["  x", "  yy"], 0),
        ],
    ),
    "arc_easy": (
        [{"question": "Which flies?", "choices": LETTERS, "answerKey": "C"}],
        [("Question: Which flies?\nAnswer:", [" a bee", " naïve 数学", " red"], 2)],
    ),
    "piqa": (
        [{"goal": "Open a jar.", "sol1": "Twist it. ", "sol2": " Sit on it.", "label": 0}],
        [("Question: Open a jar.\nAnswer:", [" Twist it. ", "  Sit on it."], 0)],
    ),
    "openbookqa": (
        [{"question_stem": "Ice is cold because  ", "choices": LETTERS, "answerKey": " A"}],
        [("Ice is cold because", ["   a bee", "   naïve 数学", "   red"], 0)],
    ),
}
[ARC], ARC_WANTED = RECORDS["arc_easy"]
NUMBERS = {**LETTERS, "label": ["1", "2", "3"]}  # of some questions; lm-evaluation-harness: label.index(answerKey)
RECORDS["arc_challenge"] = [{**ARC, "choices": NUMBERS, "answerKey": "3"}], ARC_WANTED


def prepare(task, local, out, *options, tokenizer="bytes"):
    words = [task, "--local", local, "--out", out, "--tokenizer", tokenizer, *options]
    return run_here(prepare_choices, "prepare_choices.py", *words)


def run_here(program, *words):
    """The main() of a program, in this process, since the tests start it often."""
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    with mock.patch.object(sys, "argv", [*map(str, words)]), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            program.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            stderr.write("" if isinstance(end.code, int) else f"{end.code}\n")
    return Result(status, stdout.getvalue(), stderr.getvalue())


def read_choices(path):
    """(version, examples) of a multiple-choice file."""
    data = path.read_bytes()
    version, count = struct.unpack_from("<ii", data, 4)
    words, examples = iter(np.frombuffer(data, "<u2" if version == 1 else "<u4", offset=1024).tolist()), []
    take = lambda number: list(itertools.islice(words, number))
    for _ in range(count):
        _, _, _, label, completions, length = take(6)
        examples.append(Example(take(length), [take(*take(1)) for _ in range(completions)], label))
    assert not take(1)
    return version, examples


def prepared(*arguments, **more):
    prepare(*arguments, **more).done()
    return read_choices(arguments[2])


def write_jsonl(path, records, mark=""):
    data = (mark + "".join(json.dumps(r) + "\n" for r in records)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_repeated(path, name, size, count, lists=False, store_schema=False):
    """Writes a Parquet file of few bytes whose `count` rows, or elements of one row, are one text of `size` bytes."""
    column = pyarrow.DictionaryArray.from_arrays([0] * count, ["x" * size])
    column = pyarrow.ListArray.from_arrays([0, count], column) if lists else column
    pyarrow.parquet.write_table(pyarrow.table({name: column}), path, compression="zstd", store_schema=store_schema)


def test_records_become_contexts_completions_and_labels(tmp_path):
    for task, (records, wanted) in RECORDS.items():
        files = [write_jsonl(tmp_path / f"{task}.jsonl.gz", records, "\ufeff")]
        if task != "hellaswag":  # whose labels above have two types
            for dictionary in (True, False):
                files.append(tmp_path / f"{task}{dictionary}.parquet")
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), files[-1], use_dictionary=dictionary)
        for file in files:
            version, examples = prepared(task, file, tmp_path / "out.bin")
            assert version == 1 and len(examples) == len(wanted)
            for e, (context, completions, label) in zip(examples, wanted):
                scored = [bytes(tokens).decode() for tokens in e.completions]
                assert bytes(e.context) == b"\0" + context.encode()
                assert scored == completions and e.label == label, (task, scored, e.label)


def test_only_the_first_examples_are_written(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", RECORDS["piqa"][0] * 2)
    r = prepare("piqa", tmp_path / "in.jsonl", tmp_path / "out.bin", "--examples", 1)
    words = "1 examples of piqa with 2 completions, version 1; the longest has 42 tokens and requires --seq-len 41\n"
    assert r.out.endswith(words), r


def trained_tokenizer(path):
    """A tokenizer without a pattern: its tokens may join the end of a context with the beginning of a completion."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rows = [row for _, wanted in RECORDS.values() for row in wanted]
    train_bpe(tokenizer, 270, [context + x for context, texts, _ in rows for x in texts], ["<|endoftext|>"])
    tokenizer.save(str(path))
    return tokenizer


def test_tokens_are_those_of_the_context_with_the_completion(tmp_path):
    tokenizer = trained_tokenizer(tmp_path / "tokenizer.json")
    separator, joined = tokenizer.token_to_id("<|endoftext|>"), 0
    for task, (records, wanted) in RECORDS.items():
        file = write_jsonl(tmp_path / "in.jsonl", records)
        _, examples = prepared(task, file, tmp_path / "out.bin", tokenizer=tmp_path / "tokenizer.json")
        for e, (context, completions, _) in zip(examples, wanted):
            ids = tokenizer.encode(context).ids
            assert e.context == [separator] + ids, task
            for tokens, completion in zip(e.completions, completions):
                assert tokens == tokenizer.encode(context + completion).ids[len(ids) :], (task, completion)
                joined += tokens != tokenizer.encode(completion).ids
    assert joined > 2, ("only", joined, "completions have other tokens alone")


def test_llmc_s_format_has_its_words(tmp_path):
    file = write_jsonl(tmp_path / "in.jsonl", RECORDS["arc_easy"][0] * 2)
    version, _ = prepared("arc_easy", file, tmp_path / "out.bin")
    _, wanted = RECORDS["arc_easy"]
    context, completions, label = wanted[0]
    rows = []
    for index in range(2):
        words = [65535, 0, index, label, len(completions)]
        for tokens in [b"\0" + context.encode(), *(c.encode() for c in completions)]:
            words += [len(tokens), *tokens]
        words[1] = 2 * len(words)
        rows.append(struct.pack(f"<{len(words)}H", *words))
    header = struct.pack("<256i", 20240522, 1, 2, len(rows[0]), *[0] * 252)
    assert version == 1 and (tmp_path / "out.bin").read_bytes() == header + b"".join(rows), "other bytes"


def test_large_vocabularies_and_examples_have_words_of_32_bits(tmp_path):
    corpus = {"tokenizer": "bytes", "vocab_size": 65536, "separator": {"token": 65535, "place": "after"}}
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/corpus.json").write_text("\ufeff" + json.dumps(corpus))
    file = write_jsonl(tmp_path / "in.jsonl", RECORDS["piqa"][0])
    found, examples = prepared("piqa", file, tmp_path / "out.bin", tokenizer=tmp_path / "corpus")
    assert found == 2 and examples[0].context[0] == 65535, (found, examples[0].context[:3])
    for letters, version in ((32000, 1), (33000, 2)):  # of 2 bytes
        long = write_jsonl(tmp_path / "long.jsonl", [{**RECORDS["piqa"][0][0], "goal": "x" * letters}])
        assert prepared("piqa", long, tmp_path / "out.bin")[0] == version, letters


def test_invalid_records_are_a_one_line_error(tmp_path):
    good = {task: json.dumps(records[0]) for task, (records, _) in RECORDS.items()}
    changed = lambda task, **more: json.dumps({**RECORDS[task][0][0], **more})
    cases = [
        ("piqa", b"{", "line 2 is not a JSON object"),
        ("piqa", b"[1]", "line 2 is not a JSON object"),
        ("piqa", b'{"goal": "\xff"}', "line 2 is not UTF-8"),
        ("piqa", changed("piqa", goal=None), "record 2 has no text in 'goal'"),
        ("piqa", changed("piqa", sol2="\ud800"), "record 2 has no text in 'sol2'"),
        ("piqa", changed("piqa", sol2=""), "record 2 has an empty completion 2"),
        ("piqa", changed("piqa", label=-1), "record 2 has 'label' '-1', which is none of 0, 1"),
        ("hellaswag", changed("hellaswag", label=""), "record 2 has 'label' ''"),
        ("hellaswag", changed("hellaswag", endings=[]), "record 2 has no list of texts in 'endings'"),
        ("arc_easy", changed("arc_easy", answerKey="E"), "record 2 has 'answerKey' 'E'"),
        ("arc_easy", changed("arc_easy", choices={**LETTERS, "text": ["x"]}), "record 2 has answer 3 of 1"),
        ("arc_easy", changed("arc_easy", choices={"text": ["x"], "label": ["C"]}), "record 2 has one completion"),
        ("arc_easy", changed("arc_easy", choices=[]), "record 2 has no list of texts in 'choices.label'"),
        ("piqa", changed("piqa", goal="a\0 b"), "byte 0"),
        ("piqa", changed("piqa", goal="x" * (1 << 20)), "bytes or more, and the limit is 1048576 of a record"),
    ]
    for task, line, words in cases:
        line = line if isinstance(line, bytes) else line.encode()
        (tmp_path / "in.jsonl").write_bytes(good[task].encode() + b"\n" + line + b"\n")
        expect_error(prepare(task, tmp_path / "in.jsonl", tmp_path / "out.bin"), tmp_path, words)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "in.txt").write_text("text")
    (tmp_path / "array.json").write_text(f"[{good['piqa']}]")
    write_repeated(tmp_path / "long.parquet", "goal", 10_000_000, 200)
    write_repeated(tmp_path / "dictionary.parquet", "goal", 10_000_000, 200, store_schema=True)
    write_repeated(tmp_path / "list.parquet", "goal", 1_000_000, 200, lists=True)
    pyarrow.set_memory_pool(POOL)
    (tmp_path / "in.jsonl").write_text(good["piqa"])
    word = write_jsonl(tmp_path / "word.jsonl", [{"question_stem": " ", "choices": LETTERS, "answerKey": "A"}])
    (tmp_path / "no").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    for task, file, options, words in (
        ("piqa", "in.parquet", {}, "damaged"),
        ("piqa", "empty.jsonl", {}, "has no records"),
        ("piqa", "in.txt", {}, "must end in .parquet"),
        ("piqa", "missing.jsonl", {}, "does not exist"),
        ("piqa", "array.json", {}, "line 1 is the beginning of '[', an array, and must be one record"),
        ("piqa", "long.parquet", {}, "row 1 has 10000001 bytes or more"),
        ("piqa", "dictionary.parquet", {}, "row 1 has 10000001 bytes or more"),
        ("piqa", "list.parquet", {}, "row 1 has 2000003 bytes or more"),
        ("piqa", "in.jsonl", {"tokenizer": tmp_path / "no"}, "no corpus.json: it is not a corpus, or unfinished\n"),
        ("piqa", "in.jsonl", {"tokenizer": tmp_path / "model"}, f"--tokenizer {tmp_path}/model/tokenizer.json"),
        ("piqa", "in.jsonl", {"tokenizer": tmp_path / "in.txt"}, "not a tokenizer.json"),
    ):
        expect_error(prepare(task, tmp_path / file, tmp_path / "out.bin", **options), tmp_path, words)
    assert POOL.max_memory() < 200e6, "a text of many rows or elements is repeated in memory"
    expect_error(prepare("openbookqa", word, tmp_path / "no/no/out.bin"), tmp_path, "No such file")
    expect_error(prepare("openbookqa", word, tmp_path / "out.bin", "--local", word, word), tmp_path, "are one file")
    vocabulary = {"a": 0, "\u0120": 1, "b": 2, "\u0120b": 3, "a\u0120b": 4}
    joined = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("\u0120", "b"), ("a", "\u0120b")]))
    joined.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    joined.save(str(tmp_path / "joined.json"))
    choices = {"text": ["b", "a"], "label": ["A", "B"]}
    pair = write_jsonl(tmp_path / "pair.jsonl", [{"question_stem": "a", "choices": choices, "answerKey": "A"}])
    r = prepare("openbookqa", pair, tmp_path / "out.bin", tokenizer=tmp_path / "joined.json")
    expect_error(r, tmp_path, "no tokens of its own in ' b'")
    r = prepare("openbookqa", word, tmp_path / "out.bin", tokenizer=tmp_path / "joined.json")
    expect_error(r, tmp_path, "no context")
    r = prepare("boolq", word, tmp_path / "out.bin")
    assert r.status == 2 and "boolq" in r.err, r


def expect_error(r, d, words):
    r.one_line(1, words)
    assert not list(d.rglob("out.bin*")), ("left:", list(d.iterdir()))
