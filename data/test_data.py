"""Tests of the scripts in data/ on small generated inputs. Each runs in an empty directory."""

import fcntl
import gzip
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import shards
import zstandard
from outputs import open_output
from sources import HUB
from test_choices import write_repeated
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
import program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

TRAINER = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
CONVERTER = Path(os.environ.get("TEXT_TO_SHARDS", ROOT / "build/text_to_shards")).resolve()
WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all naïve 数学 'tis don't"
).split()
COMPACT = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
BYTES = "--tokenizer bytes"
SMALL = f"{BYTES} --val-tokens 3000 --shard-tokens 20000"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def execute(*command, **more):
    done = subprocess.run(program.words_of(command), capture_output=True, text=True, **more)
    return program.Result(done.returncode, done.stdout, done.stderr)


def run(script, *arguments, **more):
    return execute(sys.executable, HERE / script, *arguments, **more)


def prepare(*arguments, **more):
    return run("prepare.py", *arguments, **more)


def train(*arguments):
    return execute(TRAINER, "--doc-mask --seq-len 64 --batch-size 2", *arguments)


def failed(done, out, words):
    """The result of a program that failed with one line, or with its usage, and left no corpus and no damaged shard."""
    assert done.status in (1, 2) and words in done.err, done
    assert done.status == 2 or done.err.strip().count("\n") == 0, done
    out = Path(out)
    if out.exists():
        assert not (out / "corpus.json").exists() and not list(out.glob("*.tmp")), list(out.iterdir())
        for path in [*out.glob("train_*.bin"), *out.glob("val_*.bin")]:
            shards.open_shard(path)
    return done


def refused(words, out, *arguments, **more):
    return failed(prepare("--out", out, *arguments, **more), out, words)


def make_documents(count, seed=1):
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 120))) + f" #{i}." for i in range(count)]


def write(path, content):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_json(path, *values):
    write(path, "".join(json.dumps(value) + "\n" for value in values))


def read_json(path):
    return program.read_json(Path(path))


def write_jsonl(path, documents, mark=""):
    data = (mark + "".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(documents))).encode()
    if path.endswith(".gz"):
        data = gzip.compress(data)
    elif path.endswith(".zst"):  # in two frames, and one between that readers skip, as pzstd writes files
        parts = data[: len(data) // 2], data[len(data) // 2 :]
        data = struct.pack("<II3x", 0x184D2A50, 3).join(map(zstandard.ZstdCompressor().compress, parts))
    write(path, data)


def write_parquet(path, documents, field="text"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"other": list(range(len(documents))), field: documents})
    pyarrow.parquet.write_table(table, path, row_group_size=100)


def read_corpus(directory):
    """All tokens of a corpus, validation first, and corpus.json."""
    corpus = read_json(f"{directory}/corpus.json")
    return np.concatenate([shards.open_shard(Path(directory) / s["file"]) for s in corpus["shards"]]), corpus


def byte_documents(directory):
    tokens, corpus = read_corpus(directory)
    assert corpus["tokenizer"] == "bytes" and tokens[0] == 0, ("a byte corpus begins with", tokens[:3])
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[1:]


def expect_documents(directory, documents):
    """Expects these documents, which differ, in their order: first those for validation, then those for training."""
    found = byte_documents(directory)
    assert sorted(found) == sorted(documents), "the documents differ"
    places = [documents.index(document) for document in found]
    assert sum(a > b for a, b in zip(places, places[1:])) <= 1, ("the order of documents:", places)


def digests(directory):
    paths = sorted(Path(directory).iterdir())
    return {p.name: shards.file_digest(p) for p in paths if p.suffix in (".bin", ".json")}


def test_all_formats_give_the_same_documents():
    mark, documents = "\ufeff", make_documents(400)  # a byte order mark, which is text in the middle of a file
    documents[330] = mark + documents[330]
    write_jsonl("in/a.jsonl", documents[:80], mark)
    long = Path("in/a.jsonl").read_bytes().replace(b'"id": 7,', b'"id": %s,' % (b"7" * 5000))
    write("in/a.jsonl", long)  # Python refuses to read integers of more than 4300 digits
    write_jsonl("in/b.jsonl.gz", documents[80:160], mark)
    write_jsonl("in/c.json.zst", documents[160:240], mark)
    kinds = (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view(), COMPACT)
    for i, kind in enumerate(kinds):
        write_parquet(f"in/d{i}.parquet", pyarrow.array(documents[240 + 16 * i :][:16]).cast(kind))
    write("in/e.txt", mark + "\f".join(documents[320:390]))
    write("in/f.txt.gz", gzip.compress((mark + "\f".join(documents[390:])).encode()))
    write("in/g.txt", mark)
    write("in/ignored.bin", b"\0")
    prepare("in --out out", SMALL, r"--delimiter '\f'").done()
    expect_documents("out", documents)
    corpus = read_json("out/corpus.json")
    assert corpus["documents"] == 400 and corpus["text_bytes"] == sum(len(t.encode()) for t in documents)
    assert all(shards.file_digest(Path("out") / s["file"]) == s["xxh64"] for s in corpus["shards"])
    assert 2900 < corpus["val_tokens"] <= 3000 and len(corpus["shards"]) > 3


def test_the_tokenizer_is_checked_before_the_documents_are_read():
    write_jsonl("in.jsonl", make_documents(50))
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="the"))
    tokenizer.save("t.json")
    command = "in.jsonl --val-tokens 100 --tokenizer"
    refused("no known separator", "o", command, "t.json")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save("t.json")
    refused("its model is WordLevel; only BPE is supported", "o", command, "t.json")
    tokenizer = Tokenizer(models.BPE({"the": 0, "</s>": 1}, []))
    for decoder in (None, decoders.BPEDecoder(), decoders.Metaspace(), decoders.Sequence([decoders.Fuse()])):
        if decoder:
            tokenizer.decoder = decoder
        tokenizer.save("t.json")
        name = json.loads(decoder.__getstate__())["type"].replace("Sequence", "Fuse") if decoder else "none"
        refused(f"its decoder is {name}; supported are ", "o", command, "t.json")
    assert not list(Path("o").glob("*.bin")), "the documents were tokenized before"
    refused("is inside --out", "o", command, "o/tokenizer.json --force")
    assert Path("o/tokenizer.json").exists(), "--force removed the tokenizer"
    for damaged in ("[]", '{"shards": [], "options": 1}', "[" * 99999):
        write("o/progress.json", damaged)
        refused("progress.json is damaged: --force", "o", command, "t.json")


def spaces_tokenizer(documents, strip):
    """A tokenizer as that of Llama 2 or, without strip, of Gemma: spaces are "\u2581", and unknown characters bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    parts = [normalizers.Prepend("\u2581")] * strip + [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(parts)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special + fallback, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(config))


@pytest.mark.parametrize("strip", [True, False])
def test_texts_of_tokens_with_spaces_and_bytes_are_those_of_the_library(strip):
    documents = make_documents(200)
    write_jsonl("in.jsonl", documents)
    tokenizer = spaces_tokenizer(documents, strip)
    write("t.json", "\ufeff" + tokenizer.to_str())
    done = prepare("in.jsonl --out o --tokenizer t.json --val-tokens 500").done()
    reason = done.out
    tokens, corpus = read_corpus("o")
    end, size = corpus["separator"]["token"], corpus["vocab_size"]
    texts = ["Hello world x", "  two spaces", "Zürich 数\u00a0学😀", "the </s", "\u2581", *documents[:9]]
    ids = [tokenizer.encode(text).ids for text in texts]
    expected = [tokenizer.decode(one, False) for one in ids]
    assert expected[0] == texts[0] and expected[5:] == documents[:9]
    begins = (np.flatnonzero(tokens == end) + 1).tolist()
    assert ids[-1] in [tokens[at : at + len(ids[-1])].tolist() for at in begins], "other training tokens"
    small = f"--layers 1 --hidden 16 --heads 2 --head-dim 8 --ffn 16 --seq-len 2048 --vocab {size} --tokenizer o"
    numbers = ",".join(str(i) for one in ids for i in (*one, end))
    done = execute(TRAINER, small, f"--generate 1 --prompt-tokens {numbers}").done()
    assert done.out.startswith("\n\n".join(expected)), (done.out, expected)
    first = ids[0][0]
    write_json("prompts", *[{"tokens": [first]}] * 200)  # what follows a prompt keeps its space
    lines = execute(TRAINER, small, "--generate 2 --temperature 9 --prompts prompts").done().out.splitlines()
    spaces = 0
    for line in map(json.loads, lines):
        whole, prompt = (tokenizer.decode(one, False) for one in ([first, *line["tokens"]], [first]))
        # of invalid UTF-8 the library also replaces the valid bytes beside it
        assert prompt + line["text"] == whole or "\ufffd" in whole, line
        spaces += line["text"].startswith(" ")
    assert spaces > 5, lines
    assert "cannot encode prompts with this tokenizer: its tokens are not byte-level" in reason, reason
    done = execute(TRAINER, small, "--generate 1 --prompt a")
    assert done.status == 1 and "its tokens are not byte-level" in done.err, done


FAKE_HUB = """
import os, shutil, types
ROOT = os.environ["FAKE_HUB"]
class HfApi:
    def dataset_info(self, repository, revision):
        return types.SimpleNamespace(sha="commit")
    def list_repo_tree(self, repository, path_in_repo, **more):
        for folder, _, names in os.walk(os.path.join(ROOT, path_in_repo)):
            for path in (os.path.join(folder, name) for name in sorted(names, reverse=True)):
                yield types.SimpleNamespace(path=os.path.relpath(path, ROOT), size=os.path.getsize(path))
def hf_hub_download(repository, name, local_dir, **more):
    path = os.path.join(local_dir, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.path.join(ROOT, "log"), "a") as log:
        print(name, *os.listdir(os.path.dirname(path)), file=log)
    return shutil.copyfile(os.path.join(ROOT, name), path)
"""


@pytest.fixture
def hub(directory, monkeypatch):
    """The library of the Hub has the files of the folder hub/."""
    write("packages/huggingface_hub/__init__.py", FAKE_HUB)
    write("packages/huggingface_hub/utils.py", "class logging:\n    set_verbosity_error = lambda: None\n")
    monkeypatch.setenv("PYTHONPATH", str(Path("packages").resolve()))
    monkeypatch.setenv("FAKE_HUB", str(Path("hub").resolve()))


def test_corpora_of_the_hub_are_read_by_their_layout(hub, monkeypatch):
    documents = make_documents(150)
    names = {
        **dict.fromkeys(("fineweb", "fineweb-edu"), "sample/10BT/00{}_00000.parquet"),
        "tinystories": "data/train-0000{}-of-00004.parquet",
        "dclm": "global-shard_01_of_10/local-shard_0_of_10/shard_0000000{}_processed.jsonl.zst",
        "c4": "en/c4-train.0000{}-of-01024.json.gz",
    }
    assert set(names) == set(HUB), "a corpus has no test"
    for name, pattern in names.items():
        for i in range(3):
            path = f"hub/{name}/{pattern.format(i)}"
            (write_parquet if path.endswith(".parquet") else write_jsonl)(path, documents[50 * i : 50 * i + 50])
        write(Path(path).with_name("README.md"), "no document")
        monkeypatch.setenv("FAKE_HUB", str(Path("hub", name).resolve()))
        prepare(f"{name} --out out_{name} --max-tokens 1e6", SMALL).done()
        expect_documents(f"out_{name}", documents)
    prepare("fineweb --out none", SMALL).one_line(1, "HuggingFaceFW/fineweb no longer has files")


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_corpus():
    write_jsonl("in.jsonl", make_documents(3000))
    for workers in (1, 2, 5):
        options = f"--train-bpe 600 --workers {workers} --val-tokens 5000 --shard-tokens 20000"
        prepare(f"in.jsonl --out {workers}", options).done()

    def plain(n):
        found = digests(str(n))
        del found["corpus.json"], found["progress.json"]  # these contain the directory
        return found

    assert plain(1) == plain(2) == plain(5) and len(plain(1)) > 4


def test_a_corpus_is_that_of_its_command_and_of_no_other():
    write_jsonl("a.jsonl", make_documents(600))
    write_parquet("b.parquet", make_documents(300, 2))
    inputs = f"a.jsonl b.parquet {BYTES} --val-tokens 3000"
    command = f"{inputs} --shard-tokens 10000 --out"
    prepare(command, "c").done()
    before = digests("c")
    assert "finished" in prepare(command, "c").done().out
    prepare(inputs, "--shard-tokens 9000 --out c").one_line(1, "shard_tokens 10000")
    with open("c/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(command, "c").one_line(1, "another prepare.py")
    times = Path("a.jsonl").stat()
    os.utime("a.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert len(prepare(command, "c").one_line(1, "started with inputs").err) < 1000
    os.utime("a.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    program.overwrite(Path("c/train_000002.bin"), 5000, b"\xff")
    prepare(command, "c").one_line(1, "train_000002.bin has changed")
    prepare(command, "c --force").done()
    assert digests("c") == before


@pytest.mark.full
def test_invalid_input_is_a_one_line_error():
    good = make_documents(200)
    write_jsonl("good.jsonl", good)
    lines = Path("good.jsonl").read_bytes().splitlines()
    with_line = lambda line: b"\n".join([*lines[:150], line, *lines[150:]])
    bad_lines = {
        "utf8": (b'{"text": "\xff"}', "line 151 is not UTF-8"),
        "json": (b'{"text": ', "line 151 is not JSON"),
        "deep": (b"[" * 200000, "line 151 is not JSON"),
        "field": (b'{"txt": "a"}', "line 151 has no text in 'text'"),
        "surrogate": (b'{"text": "\\ud800"}', "surrogate"),
        "long": (b'{"text": "' + b"a" * 3_000_000 + b'"}', "--max-document"),
        "nul": (b'{"text": "a\\u0000b"}', "document 151 has a byte 0"),
    }
    bad = {f"{name}.jsonl": (with_line(line), words) for name, (line, words) in bad_lines.items()} | {
        "empty.txt.GZ": (b"", "an empty file"),
        "text.txt": (b"abc\xfe", "is not UTF-8 at its byte 3"),
        "cut.jsonl.gz": (gzip.compress(b"\n".join(lines))[:-400], "truncated"),
        "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(b"\n".join(lines))[:-400], "truncated"),
        "bad.jsonl.zst": (b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "damaged"),
        "none.jsonl": (b"", "no document"),
        "blank.jsonl": (b'{"text": ""}\n\n{"text": ""}\n', "no document"),
    }
    for name, (data, words) in bad.items():
        write(name, data)
        refused(words, f"o_{name}", name, SMALL, "--max-document 1e6", r"--delimiter '\f'" if ".txt" in name else "")
    write_parquet("cut.parquet", good)
    whole = Path("cut.parquet").read_bytes()
    write("cut.parquet", whole[: len(whole) // 2])
    refused("damaged or truncated", "o1", "cut.parquet", SMALL)
    write_parquet("field.parquet", good, "body")
    refused("--text-field", "o2", "field.parquet", SMALL)
    for name in bad_lines:
        done = prepare(f"{name}.jsonl --out s_{name} --max-document 1e6 --skip-bad", SMALL).done()
        expect_documents(f"s_{name}", good)
        assert "(1 bad)" in done.out, (name, done)
    refused(
        "--val-tokens 10000000 leaves nothing for training: the text has", "o3", f"good.jsonl {BYTES} --val-tokens 1e7"
    )
    refused("does not exist", "o4", "nothing", SMALL)
    refused("not a tokenizer.json", "o5", "good.jsonl --tokenizer good.jsonl")
    refused("--val-tokens 0", "o6", "good.jsonl --val-tokens 0")
    refused("--val-tokens 2e+09: must be an integer from 1 to 1e+09", "o6", "good.jsonl --val-tokens 2e9")
    refused("use \\xHH for each byte", "o6", r"good.jsonl --delimiter '\x'")
    failed(prepare("good.jsonl --out good.jsonl", SMALL), "o7", "good.jsonl")


@pytest.mark.full
def test_a_small_corpus_has_one_percent_of_validation_documents():
    documents = make_documents(2000)
    write_jsonl("in.jsonl", documents)
    prepare("in.jsonl --out o", BYTES).done()
    corpus = read_json("o/corpus.json")
    tokens = corpus["val_tokens"] + corpus["train_tokens"]
    assert 0.009 * tokens < corpus["val_tokens"] <= 0.01 * tokens
    expect_documents("o", documents)
    assert "finished" in prepare("in.jsonl --out o", BYTES).done().out, "the same command again"
    for name in "ab":
        write(f"two/{name}.txt", f"{name} document\n")
    prepare("two --out o2 --train-bpe 300").done()
    assert read_json("o2/corpus.json")["documents"] == 2
    prepare("two/a.txt --out o3 --delimiter ' '", BYTES).done()
    assert byte_documents("o3") == ["a", "document\n"]


SAME = {  # files, options of both programs
    "many": (
        {"in/a.txt": "\n".join(make_documents(900)), "in/b.txt": "\n".join(make_documents(900, 2))},
        r"--delimiter '\n'",
    ),
    "number": ({"in/a.txt": "\f".join(make_documents(300))}, r"--delimiter '\f' --val-tokens 5555"),
    "files": ({f"in/{i:03}.md": text for i, text in enumerate(make_documents(250))}, ""),
    "one": ({"in/one.txt": " ".join(make_documents(200))}, ""),
    "character": ({"in/one.txt": "数学" * 50}, "--val-tokens 20"),
    "long": (
        {"in/a.txt": "long" * 30000, "in/b.txt": "longer" * 30000, "in/c/d.txt": "ten tiny ones " * 10},
        r"--delimiter ' '",
    ),
    "smallest": ({"in/a.txt": "long" * 300, "in/b.txt": "tiny" * 30, "in/c.txt": "longer" * 300}, ""),
}


@pytest.mark.parametrize("name", SAME)
def test_both_programs_choose_the_same_documents_for_validation(name):
    files, options = SAME[name]
    for path, text in files.items():
        write(path, text)
    mine, other = prepare("in --out p", BYTES, options).done(), execute(CONVERTER, "--out c in", options).done()
    for one, two in (("val_000000", "val_000000"), ("train_000001", "train_000000")):
        assert Path(f"p/{one}.bin").read_bytes() == Path(f"c/{two}.bin").read_bytes(), (one, mine, other)
    described = [{k: read_json(f"{c}/corpus.json")[k] for k in ("documents", "text_bytes", "val_tokens")} for c in "pc"]
    assert described[0] == described[1]
    for done in (mine, other):
        assert ("validation has" in done.err) == (name in ("long", "smallest")), done


CHOICES = (BYTES, pytest.param("--train-bpe 300", marks=pytest.mark.full))


@pytest.mark.parametrize("choice", CHOICES)
def test_one_text_has_validation_that_the_trainer_reads(choice):
    write("one.txt", " ".join(make_documents(300)))
    done = prepare("one.txt --out o --val-tokens 300", choice).done()
    assert read_json("o/corpus.json")["documents"] == 2 and done.err == "", done
    options = "--steps 2 --train-data o --val-data o --layers 1 --hidden 16 --heads 2 --head-dim 8"
    assert "step 2: validation loss" in train(options).done().out


def test_a_text_that_is_too_short_for_validation_is_refused():
    write("short.txt", "é")
    refused("a text of 2 bytes is too short for training and validation", "o", "short.txt", BYTES)


@pytest.mark.parametrize("choice", CHOICES)
def test_max_tokens_has_validation_from_the_documents_before_its_end(choice):
    write_jsonl("in.jsonl", make_documents(2000))
    prepare("in.jsonl --out o --max-tokens 100000 --val-tokens 5000", choice).done()
    corpus = read_json("o/corpus.json")
    assert 100000 <= corpus["train_tokens"] + corpus["val_tokens"] < 101000, corpus
    assert 2500 < corpus["val_tokens"] < 10000, corpus


def test_the_document_after_max_tokens_is_for_validation_if_no_other_is(hub):
    documents = make_documents(200)
    write_jsonl("hub/en/c4-train.00000.json.gz", documents)
    prepare("c4 --out o --max-tokens 1000 --val-tokens 1", BYTES).done()
    found = byte_documents("o")
    assert documents[: len(found)] == [*found[1:], found[0]]


def test_a_corpus_of_the_hub_has_validation_from_all_of_its_files(hub):
    for i in range(6):
        write_jsonl(f"hub/en/c4-train.0000{i}.json.gz", make_documents(500, i))
    prepare("c4 --val-tokens 60000 --shard-tokens 100000 --out o", BYTES).done()
    names = [f"en/c4-train.0000{i}.json.gz" for i in range(6)]
    assert Path("hub/log").read_text().splitlines() == names, "two downloads are there at once"
    found = byte_documents("o")
    held = set(found[: bytes(shards.open_shard("o/val_000000.bin").astype(np.uint8)).count(0)])
    counts = [sum(text in held for text in make_documents(500, i)) for i in range(6)]
    assert sum(counts) == len(held) and min(counts) > 0.5 * sum(counts) / 6, counts
    tokens = read_json("o/corpus.json")["val_tokens"]
    assert 20000 < tokens < 180000, ("of about 60000 by the published numbers:", tokens)
    expect_documents("o", [text for i in range(6) for text in make_documents(500, i)])


CRASH = """
import os, runpy, sys
count, real = int(sys.argv[1]), os.fsync
def fsync(file):
    global count
    count -= 1
    if count == 0:
        os._exit(9)
    real(file)
os.fsync = fsync
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], None, "__main__")
"""


@pytest.mark.full
def test_a_run_that_ends_at_any_flush_resumes_to_the_same_corpus():
    write("crash.py", CRASH)
    write_jsonl("a.jsonl", make_documents(250))
    write("b.txt", "\f".join(make_documents(250, 2)))
    command = rf"a.jsonl b.txt {BYTES} --delimiter '\f' --val-tokens 9000 --shard-tokens 30000 --out"
    prepare(command, "whole/c").done()
    assert len(read_json("whole/c/corpus.json")["shards"]) > 4
    for count in range(1, 100):
        shutil.rmtree("c", ignore_errors=True)
        if execute(sys.executable, "crash.py", count, HERE / "prepare.py", command, "c").status != 9:
            break
        if Path("c/validation.part").exists():
            with open("c/validation.part", "ab") as file:
                file.write(b"not flushed")
        prepare(command, "c").done()
        assert digests("c") == digests("whole/c"), ("after flush", count)
        assert not Path("c/validation.part").exists()
    assert count > 15


def test_skipped_files_are_listed():
    for name in ("a.txt", "b.TXT", "notes.rst", "data.csv", "odd\n.x"):
        write(f"in/{name}", f"text of {name[:1]}")
    done = prepare("in --out o", BYTES).done()
    expect_documents("o", ["text of a", "text of b"])
    assert len(done.err.splitlines()) == 2 and all(n in done.err for n in ("notes.rst", "data.csv", "odd\\n.x")), done
    for i in range(30):
        write(f"in/{i}.log", "")
    done = prepare("in --out p", BYTES).done()
    assert len(done.err) < 1000 and "and 25 more" in done.err, done
    Path("in/links").mkdir()
    write("far/c.txt", "text of c")
    for name in ("one", "two"):
        Path("in/links", name).symlink_to("../../far")
    done = prepare("in --out l", BYTES).done()
    assert done.err.count("\n") == 3 and "links to directories: in/links/one, in/links/two\n" in done.err, done
    expect_documents("l", ["text of a", "text of b"])
    prepare("in in/links/one --out n", BYTES).done()
    expect_documents("n", ["text of a", "text of b", "text of c"])  # a named link is followed
    Path("in/links/dead.txt").symlink_to("nowhere")
    refused("dead.txt is a link to nowhere", "r", "in", BYTES)
    shutil.rmtree("in/links")
    if os.geteuid():
        Path("in/locked").mkdir(mode=0)
        refused("locked: Permission denied", "r", "in", BYTES)
        Path("in/locked").rmdir()
    prepare("in --out in/corpus", BYTES).done()  # whose files are no input
    assert "is finished" in prepare("in --out in/corpus", BYTES).done().out, "--out inside of the input"
    refused("is also --out", "in", "in")
    shutil.rmtree("in/corpus")
    for name in ("a.txt", "b.TXT"):
        Path("in", name).unlink()
    assert "0.log" in refused("has no files that end in", "q", "in", BYTES).err


def test_names_that_begin_with_a_dot_are_skipped_as_by_pyarrow():
    for name in ("a.txt", "b/c.txt", ".a.txt", "b/._c.txt", ".ipynb_checkpoints/a-checkpoint.txt"):
        write(f"in/{name}", f"text of {name}")
    done = prepare("in --out o", BYTES).done()
    assert done.err.startswith("skipped hidden files: in/.a.txt, in/.ipynb_checkpoints, in/b/._c.txt\n"), done
    seen = pyarrow.dataset.dataset("in", pyarrow.schema([]), "csv").files
    expect_documents("o", [Path(name).read_text() for name in seen])


def test_a_file_that_is_in_the_input_twice_is_refused():
    for name in ("in/a.jsonl", "in/b.jsonl"):
        write_jsonl(name, make_documents(30))
    os.link("in/a.jsonl", "hard.jsonl")
    Path("soft.jsonl").symlink_to("in/b.jsonl")
    for arguments, first, second in (
        ("in/a.jsonl in/a.jsonl", "in/a.jsonl", "in/a.jsonl"),
        ("in/b.jsonl in", "in/b.jsonl", "in/b.jsonl"),
        ("in ./in/../in", "in/a.jsonl", "in/../in/a.jsonl"),
        ("in hard.jsonl", "in/a.jsonl", "hard.jsonl"),
        ("soft.jsonl in", "soft.jsonl", "in/b.jsonl"),
    ):
        refused(f"{first} and {second} are one file", "o", arguments, SMALL)
        assert not Path("o").exists(), arguments


def test_mistakes_are_found_before_packages_are_installed_and_notes_are_printed_once():
    for path in ("in/a.rst", "other/a.txt", "other/a.parquet", "other/tokenizer.json"):
        write(path, "text")
    begin = "import runpy, sys; sys.path[:0] = sys.argv[1:3]; import python_environment as p"
    instead = (
        "p.ensure = lambda name: sys.exit('installs'); sys.argv[:3] = []; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    write("start.py", f"{begin}; {instead}")
    without_packages = [sys.executable, "start.py", HERE, ROOT / "scripts", HERE / "prepare.py"]
    for arguments, words in (
        ("in", "has no files that end in"),
        ("fineweb --tokenizer none.json", "--tokenizer none.json is not a file"),
        ("fineweb --train-bpe 300 --tokenizer in", "--train-bpe and --tokenizer are mutually exclusive"),
        ("fineweb --tokenizer in", "--tokenizer in is a directory: it has no tokenizer.json"),
        ("fineweb --tokenizer other", "--tokenizer other is a directory: use other/tokenizer.json"),
        ("fineweb --out in/a.rst", "--out in/a.rst is not a directory"),
        ("fineweb --val-tokens 0", "--val-tokens 0"),
        ("other/a.parquet --delimiter d", "a.parquet: --delimiter requires text files"),
    ):
        failed(execute(*without_packages, "--out o", arguments), "o", words)
    for name in "bc":
        write(f"in/{name}.txt", f"{name} document\n")
    base = getattr(sys, "_base_executable", sys.executable)  # which has no packages, and starts that which has them
    done = execute(base, HERE / "prepare.py", "in --out o", BYTES).done()
    assert done.err.count("skipped") == 1 and done.err.count("\n") == 2, done


def limited(resource_, size):
    """An argument of subprocess that limits a resource."""
    return {"preexec_fn": lambda: resource.setrlimit(resource_, (size, size))}


def test_files_of_other_encodings_and_without_a_record_on_a_line_are_refused_as_a_whole():
    write("good.jsonl", '{"text": "a document"}\n' * 2)
    array, an_object = "line 1 is the beginning of '[', an array", "line 2 is the beginning of '{', an object of"
    for name, data, words in (
        ("a.json", '[{"text": "a"}, {"text": "b"}]', f"{array}, and must be one record (JSON lines): jq -c '.[]' FILE"),
        ("b.json", '\ufeff[\n{"text": "a"},\n{"text": "b"}\n]', array),
        ("c.jsonl.gz", gzip.compress(b"[" + b" " * 3_000_000 + b"]"), array),
        ("d.json", '\n{\n  "text": "a"\n}\n', an_object),
        ("e.txt", "wide".encode("utf-16"), "e.txt is UTF-16 or UTF-32: it begins with FF FE: convert it to UTF-8"),
        ("f.jsonl.gz", gzip.compress(b"\xfe\xff" + "{}".encode("utf-16-be")), "it begins with FE FF"),
    ):
        write(name, data)
        refused(words, f"o_{name}", "good.jsonl", name, BYTES, "--max-document 1e6 --skip-bad")


def peak_of(*arguments):
    """The memory in bytes that prepare.py requires, with its result."""
    code = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]).returncode; "
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
    done = execute(sys.executable, "-c", repr(code), sys.executable, HERE / "prepare.py", *arguments)
    return 1024 * int(done.out.splitlines()[-1]), done


@pytest.mark.slow
def test_few_bytes_of_input_require_little_memory():
    write("small.jsonl", '{"text": "a document"}\n' * 2)
    for name in ("text", "dictionary"):
        write_repeated(f"{name}.parquet", "text", 10_000_000, 60, store_schema=name == "dictionary")
        assert Path(f"{name}.parquet").stat().st_size < 2000
        peak, done = peak_of(f"{name}.parquet --out {name} --max-tokens 2e7", BYTES)
        assert read_json(f"{name}/corpus.json")["text_bytes"] == 20_000_000, done
        assert peak < 600e6, (name, peak)  # of which 90 MB are the program's
    peak, done = peak_of("small.jsonl text.parquet dictionary.parquet --out o --max-document 1e6 --skip-bad", BYTES)
    assert "120 empty or bad documents skipped (120 bad)" in done.out and peak < 600e6, (peak, done)
    write("long.jsonl.zst", zstandard.ZstdCompressor().compress(b'{"text": "' + b"a" * 500_000_000))
    write("long.jsonl", '{"text": "')
    os.truncate("long.jsonl", 1_000_000_000)  # a hole: zeros
    for name in ("long.jsonl.zst", "long.jsonl"):
        begin = time.monotonic()
        peak, done = peak_of(f"{name} --out long --max-document 1e6", BYTES)
        assert "line 1 has" in done.err and "the limit is --max-document 1000000" in done.err, done
        assert peak < 200e6 and time.monotonic() - begin < 60, (name, peak, "that took", time.monotonic() - begin, "s")
    plain = pyarrow.table({"text": ["x" * 40_000_000, "y"]})
    pyarrow.parquet.write_table(plain, "plain.parquet", compression="zstd", use_dictionary=False)
    refused("row group 1 has 2 rows of 40000", "p", "small.jsonl plain.parquet --max-document 1e6 --skip-bad", BYTES)


@pytest.mark.slow
def test_a_start_that_wrote_only_its_tokenizer_does_not_affect_the_next_one():
    write_jsonl("in.jsonl", make_documents(100))
    assert prepare("in.jsonl --out p --train-bpe 300 --separator none").status == 1
    assert Path("p/tokenizer.json").exists()
    prepare("in.jsonl --out p --train-bpe 280 --val-tokens 1000").done()
    assert read_json("p/corpus.json")["vocab_size"] == 280


def test_a_run_resumes_from_its_complete_shards_after_a_full_disk():
    write_jsonl("in.jsonl", [text for document in make_documents(3000) for text in ("", document, "")])
    command = f"in.jsonl {BYTES} --val-tokens 3000 --shard-tokens 100000"
    refused("continues", "o", command, **limited(resource.RLIMIT_FSIZE, 30_000))  # smaller than the second shard
    assert not list(Path("o").glob("*.bin")), list(Path("o").iterdir())
    text = prepare(command, "--out o").done().out
    expect_documents("o", make_documents(3000))
    assert "3000 documents" in text and "6000 empty or bad documents skipped (0 bad)" in text


@pytest.mark.slow
def test_special_tokens_in_documents_are_text():
    documents = ["one <|endoftext|> two", *make_documents(300)]
    write_jsonl("in.jsonl", documents)
    prepare("in.jsonl --out o --train-bpe 400 --val-tokens 2000").done()
    tokens, corpus = read_corpus("o")
    separator = corpus["separator"]["token"]
    assert tokens[0] == separator and int((tokens == separator).sum()) == len(documents)
    tokenizer = Tokenizer.from_file("o/tokenizer.json")
    pieces = np.split(tokens, np.flatnonzero(tokens == separator))
    texts = [tokenizer.decode([t for t in p.tolist() if t != separator], skip_special_tokens=False) for p in pieces]
    assert sorted(t for t in texts if t) == sorted(documents), "the documents do not come back"


def test_shards_are_printed_and_verified():
    write_jsonl("in.jsonl", make_documents(500))
    prepare("in.jsonl --out o", SMALL).done()
    out = run("inspect", "o --tokens 40 --verify").done().out
    corpus = read_json("o/corpus.json")
    assert repr(make_documents(1)[0][:20])[1:-1] in out
    write_json("o/corpus.json", {**corpus, "vocab_size": 100})
    done = run("inspect", "o --verify")
    assert done.status == 1 and "the vocabulary has 100" in done.out, done
    write_json("o/corpus.json", corpus)
    assert run("inspect", "o --tokens 0").out.count("ends:") == 0, "--tokens 0 prints tokens"
    Path("o/train_000001.bin").rename("o/train_000009.bin")
    done = run("inspect", "o --verify")
    words = ("train_000001.bin: is missing", "train_000009.bin: is not in corpus.json")
    assert done.status == 1 and all(w in done.out for w in words), done
    write("o/corpus.json", "[]")
    run("inspect", "o").one_line(1, "corpus.json is damaged")
    write("short.bin", Path("o/val_000000.bin").read_bytes()[:-2])
    run("inspect", "short.bin").one_line(1, "of its header")


def test_output_files_may_be_links_and_devices_and_change_no_other_file():
    write("in/file", "old")
    Path("link").symlink_to("in/file")
    write("link.tmp", "the user's")
    os.mkfifo("pipe")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE)
    for name in ("link", "pipe"):
        with open_output(Path(name)) as f:
            f.write(b"new")
    assert reader.communicate()[0] == b"new" and Path("pipe").is_fifo(), "the pipe"
    assert Path("link").is_symlink() and Path("in/file").read_text() == "new", "the link"
    with pytest.raises(ValueError), open_output(Path("link")) as f:
        f.write(b"half")
        raise ValueError
    assert Path("in/file").read_text() == "new", "what failed was written"
    assert Path("link.tmp").read_text() == "the user's" and os.listdir("in") == ["file"], os.listdir("in")


@pytest.mark.full
def test_links_in_the_place_of_temporary_files_do_not_change_their_targets():
    write("text", "one document\n\n" * 300)
    planted = ("tokenizer.json.tmp", "corpus.json.tmp", "progress.json.tmp", "validation.part", ".lock")
    os.mkdir("o")
    for name in planted:
        write(f"mine{name}", "mine")
        os.symlink(f"../mine{name}", f"o/{name}")
    prepare(r"--out o text --train-bpe 300 --val-tokens 100 --delimiter '\n\n'").done()
    changed = [name for name in planted if Path(f"mine{name}").read_text() != "mine"]
    assert not changed, changed
