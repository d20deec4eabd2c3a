"""The converter: the tokens and the split of its shards, corpus.json, and refused options and input."""

import filecmp
import os
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from program import DONE, FAILED, USAGE, Random, Started, program, read_json, read_table, run, run_trainer
from shards import file_digest, open_shard


@pytest.fixture(scope="module")
def converter():
    return program("TEXT_TO_SHARDS", "./text_to_shards")


def shards_of(directory, split):
    """The bytes of the tokens of each shard of a split."""
    found = sorted(directory.glob(f"{split}_*.bin"))
    assert [path.name for path in found] == [f"{split}_{i:06d}.bin" for i in range(len(found))]
    for path in found:
        tokens = open_shard(path)
        assert tokens.dtype == "<u2" and tokens.max() < 256 and not any(path.read_bytes()[12:1024]), path
    return [bytes(open_shard(path).astype("u1")) for path in found]


def tokens_of(directory, split):
    return b"".join(shards_of(directory, split))


def documents(text, delimiter=None):
    """The expected tokens of a text."""
    return b"".join(b"\0" + part for part in (text.split(delimiter) if delimiter else [text]) if part)


def test_converter_bytes(converter, tmp_path):
    """the converter keeps every byte and puts a 0 before each document"""
    # z precedes a, as on the command line; in a directory names are in byte order, and .hidden is not read
    texts = {"z": bytes(range(1, 256)) + b"."}
    for name in ("in/B", "in/a/x", "in/a.txt", "in/b", "in/.hidden"):
        texts[name] = f"text of {name}\r\nno newline at its end".encode()
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "in/a/loop").symlink_to("..")
    mark = b"\xef\xbb\xbf"  # a byte order mark, which is text in the middle of a file
    texts["in/a.txt"] += mark
    for name, text in [*texts.items(), ("in/empty", mark), ("in/a.txt", mark + texts["in/a.txt"])]:
        (tmp_path / name).write_bytes(text)
    result = run(*converter, "--out out --val-tokens 0 --shard-tokens 100 z in", cwd=tmp_path).done()
    result.one_line(DONE, "skipped in/a/loop, a link to a directory")
    assert "6 files (1 empty), 5 documents" in result.out
    wanted = b"".join(documents(text) for name, text in texts.items() if name != "in/.hidden")
    shards = shards_of(tmp_path / "out", "train")
    assert b"".join(shards) == wanted
    assert len(shards) == -(-len(wanted) // 100) and max(map(len, shards)) == -(-len(wanted) // len(shards))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"corpus.json", *(f"train_{i:06d}.bin" for i in range(len(shards)))}


def test_documents_of_a_shard(converter, tmp_path):
    """a document that begins where a shard begins has its 0 too"""
    text = b"%".join(bytes([letter]) * 99 for letter in b"abcd")
    (tmp_path / "text").write_bytes(text)
    run(*converter, "--out out --val-tokens 0 --shard-tokens 100 --delimiter % text", cwd=tmp_path).done()
    assert shards_of(tmp_path / "out", "train") == [b"\0" + part for part in text.split(b"%")]


def test_planted_links(converter, tmp_path):
    """links in the place of temporary files do not change their targets"""
    (tmp_path / "out").mkdir()
    names = ("corpus.json", "train_000000.bin", "val_000000.bin", "text_to_shards.spool")
    for name in names:
        (tmp_path / f"mine.{name}").write_text("mine")
        (tmp_path / f"out/{name}.tmp").symlink_to(f"../mine.{name}")
    for name in ("text", "more"):
        (tmp_path / name).write_bytes(bytes(range(1, 128)) * 9)
    run(*converter, "--out out text more", cwd=tmp_path).done()
    assert {path.read_bytes() for path in tmp_path.glob("mine.*")} == {b"mine"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names[:3])
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


BINARY = {  # name: content, words of the error
    "image.png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is not text: 3 of its first 16 bytes are NUL and 1 are not UTF-8"),
    "windows.txt": ("\ufeffwide 数学".encode("utf-16-le"), "is UTF-16 or UTF-32: it begins with FF FE: convert it"),
    "utf16.txt": ("\ufeff数学".encode("utf-16-be"), "is UTF-16 or UTF-32: it begins with FE FF: convert it"),
    "koi8.txt": (
        "другой код".encode("koi8-r"),
        "is not text: 0 of its first 10 bytes are NUL and 9 are not UTF-8; convert it",
    ),
}
TEXT = {
    "dictionnaire": "déjà vu, à bientôt".encode("latin-1"),
    "late": b"\xc3\xa9" * (1 << 17) + b"\0.",  # the first NUL byte is behind the first 256 KiB
}


def test_converter_binary_files(converter, tmp_path):
    """the converter skips and lists binary files of directories, and keeps text in other encodings"""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/stray").write_bytes(b"a\0b")
    for name, text in [*TEXT.items(), *((name, binary[0]) for name, binary in BINARY.items())]:
        (tmp_path / "in" / name).write_bytes(text)
    result = run(*converter, "--out out --val-tokens 0 in", cwd=tmp_path).done()
    names = "in/image.png, in/koi8.txt, in/stray, in/utf16.txt, in/windows.txt"
    assert f"skipped 5 binary files: {names}\n" in result.err
    assert "dropped 1 NUL bytes, the first in in/late\n" in result.err and result.err.count("\n") == 2
    assert tokens_of(tmp_path / "out", "train") == b"".join(b"\0" + t.replace(b"\0", b"") for t in TEXT.values())
    for i in range(6):
        (tmp_path / f"in/{i}").write_bytes(b"\0")
    result = run(*converter, "--out more in", cwd=tmp_path).done()
    names = "in/0, in/1, in/2, in/3, in/4, in/5, in/image.png, in/koi8.txt"
    assert f"skipped 11 binary files: {names}, ...\n" in result.err


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("by", ["file", "stdin"])
def test_converter_named_binary_file(converter, inputs, name, by):
    """the converter rejects a named binary file"""
    text, words = BINARY[name]
    (inputs / name).write_bytes(text)
    given = {"stdin": text} if by == "stdin" else {}
    result = run(*converter, "--out out t", "-" if given else name, cwd=inputs, **given)
    expect_error(inputs, result, FAILED, f"{'stdin' if given else name} {words}")


def test_converter_named_text_with_nul_bytes(converter, tmp_path):
    """the converter drops NUL bytes of a named text in UTF-8, also if the first 256 KiB end inside of a character"""
    text = b"." + b"\xe2\x82\xac" * (1 << 17) + b"\0"
    result = run(*converter, "--out out --val-tokens 0 -", stdin=b"\0" + text, cwd=tmp_path)
    result.one_line(DONE, "dropped 2 NUL bytes, the first in stdin")
    assert tokens_of(tmp_path / "out", "train") == b"\0" + text[:-1]


def delimited():
    """Delimiters and texts."""
    yield b"\n\n", b"one\n\ntwo\n\n\n\nthree\n"
    yield b"\n\n", b"\n\n\n"
    yield b"aab", b"aaabaaab"
    yield b"aab", b"xaa"
    yield b"abab", b"abaabababb"
    yield b"%", b"%a%%b%"
    yield b"<|end|>", b"a<|end|>b<|end<|end|>c<|en"
    rng = Random(1)
    letters = lambda count: bytes(b"ab"[rng.below(2)] for _ in range(count))
    for _ in range(40):  # two letters: many false starts
        yield letters(1 + rng.below(5)), letters(200)
    yield b"\n\n", (4095 * b"x" + b"\n\n" + 4094 * b"x").join(37 * [b""])  # across every place where a read may end


def test_converter_delimiters(converter, tmp_path):
    """the converter splits documents at every delimiter"""
    for i, (delimiter, text) in enumerate(delimited()):
        (tmp_path / "text").write_bytes(text)
        options = ["--out out --force --val-tokens 0 --delimiter", delimiter.decode().replace("\n", r"'\n'")]
        by = {"stdin": text} if i % 2 else {}
        result = run(*converter, *options, "-" if by else "text", cwd=tmp_path, **by)
        wanted = documents(text, delimiter)
        assert result.status == (DONE if wanted else FAILED), (delimiter, text)
        assert not wanted or tokens_of(tmp_path / "out", "train") == wanted, (delimiter, text)


@pytest.mark.parametrize("wanted", [None, 1, 5000, -1])  # tokens, or less than all; None: 1%
def test_converter_validation(converter, tmp_path, wanted):
    """the converter selects the same evenly spread validation documents in each run"""
    count = 3000
    text = "".join(f"{i} {' ' * (50 + i % 37)}.\n" for i in range(count))
    (tmp_path / "text").write_text(text)
    options, target = "", len(text) // 100
    if wanted:
        target = wanted % len(text)
        options = f"--val-tokens {target}"
    found = []
    for out in ("one", "two"):
        run(*converter, "--out", out, r"--delimiter '\n'", options, "text", cwd=tmp_path).done()
        found.append([tokens_of(tmp_path / out, split) for split in ("train", "val")])
    assert found[0] == found[1]
    train, val = ([int(text.split()[0]) for text in tokens.split(b"\0")[1:]] for tokens in found[0])
    assert train == sorted(train) and val == sorted(val) and sorted(train + val) == list(range(count))
    tokens = len(found[0][1])
    assert 1 <= len(val) < count and target - 100 <= tokens <= max(88, target)
    if len(val) >= 100:
        for tenth in range(10):  # binomial, six standard deviations
            difference = sum(number * 10 // count == tenth for number in val) - len(val) / 10
            assert abs(difference) < 6 * (len(val) / 10 * 0.9) ** 0.5, tenth


def test_converter_two_documents(converter, tmp_path):
    """of two documents that are too long for validation the converter takes the smaller one, with a warning"""
    for name, text in {"a": "a long text", "b": "short"}.items():
        (tmp_path / name).write_text(text)
    for order in ("a b", "b a"):
        result = run(*converter, "--out out --force", order, cwd=tmp_path)
        result.one_line(DONE, "validation has 6 of 18 tokens, more than 10%: split long documents with --delimiter, or")
        assert tokens_of(tmp_path / "out", "val") == b"\0short"


@pytest.mark.parametrize(
    ("text", "options", "last"),  # the part of the text that is for validation
    [
        (b"0123456789" * 100, "", b"0123456789"),
        (b"0123456789" * 100, "--val-tokens 3", b"789"),
        (b"0123456789", "", b"9"),
        (b"0123456789", "--val-tokens 10", b"123456789"),
        ("größe".encode(), "--val-tokens 2", "ße".encode()),
        ("0\N{GRINNING FACE}".encode(), "", "\N{GRINNING FACE}".encode()),
        ("vidé".encode("latin-1"), "", "é".encode("latin-1")),
        (b"0" + b"\x80" * 9 + b"some text", "--val-tokens 10", b"\x80" * 4 + b"some text"),  # at most 3 bytes earlier
    ],
    ids="default fraction short most ß emoji latin-1 invalid".split(),
)
def test_converter_one_document(converter, tmp_path, text, options, last):
    """of one document the converter takes the last part, from the beginning of a character"""
    (tmp_path / "text").write_bytes(text)
    run(*converter, "--out out", options, "text", cwd=tmp_path).done()
    assert tokens_of(tmp_path / "out", "val") == b"\0" + last
    assert tokens_of(tmp_path / "out", "train") == b"\0" + text.removesuffix(last)
    assert read_json(tmp_path / "out/corpus.json")["documents"] == 2


# ---- errors

MISTAKES = [  # arguments, words of the error
    ("--out out", "no input"),
    ("t", "--out"),
    ("--out out --sharding 3 t", "--sharding"),
    ("--out out -x t", "-x"),
    ("--out out t --delimiter", "--delimiter"),
    ("--out out --force=1 t", "--force=1"),
    ("--out out --shard-tokens many t", "many"),
    ("--out out --shard-tokens 10x t", "10x"),
    ("--out out --val-tokens -5 t", "-5"),
    ("--out out --shard-tokens 0 t", "--shard-tokens 0"),
    ("--out out --shard-tokens 3G t", "3G"),  # more than a header can say
    ("--out out --val-tokens 99999999999999999999 t", "--val-tokens"),
    ("--out out --delimiter '' t", "empty"),
    (r"--out out --delimiter 'a\q' t", r"\q"),
    ("--out out - -", "once"),
    ("--out out --bpe 100 t", "--bpe 100"),
    ("--out out --bpe 99999 t", "--bpe 99999"),
    ("--out out --bpe x t", "--bpe x"),
]
INPUTS = [
    ("--out out t nowhere", "nowhere"),
    ("--out out t e", "e is empty"),
    ("--out out t mark", "mark is empty"),
    ("--out out -", "stdin is empty"),
    ("--out out d", "no text"),
    ("--out out --bpe 512 d", "no text"),
    ("--out out z", "no text"),
    ("--out out x", "a text of 1 bytes is too short"),
    ("--out out links", "links/link"),
    ("--out t t", "cannot open directory t"),
    ("--out no/where t", "no/where"),
    ("--out done t", "--force"),
    ("--out out done/train_000000.bin", "is a token shard, not text"),
    ("--out out --val-tokens 1000 t", "1000"),
]
FULL = [  # bytes of text, of the largest file, options, words of the error
    (90000, 4096, "", "out"),  # while spooling
    (9000, 10240, "--val-tokens 0", "cannot write shard 0"),
    (1400, 2048, "--val-tokens 0", "cannot write shard 0"),  # at the last flush
    (1400, 4096, "--bpe 512 --val-tokens 0", "cannot write out/tokenizer.json"),
]


@pytest.fixture
def inputs(converter, tmp_path):
    """A directory with texts, an empty file, NUL bytes, directories without text and with a broken link, a corpus."""
    for name in ("d", "links"):
        (tmp_path / name).mkdir()
    for name, text in {"t": "some text", "e": "", "x": "x", "d/e": "", "z": "\0" * 10, "mark": "\ufeff"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "links/link").symlink_to("nowhere")
    run(*converter, "--out done t", cwd=tmp_path).done()
    return tmp_path


def expect_error(directory, result, status, words):
    result.one_line(status, words)
    assert result.err.startswith("text_to_shards: ")
    assert not (directory / "out").exists() or not list((directory / "out").iterdir())


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [(USAGE, *case) for case in MISTAKES] + [(FAILED, *case) for case in INPUTS],
    ids=[arguments.removeprefix("--out out ") for arguments, _ in MISTAKES + INPUTS],
)
def test_converter_errors(converter, inputs, status, arguments, words):
    """the converter rejects invalid options and input, and leaves no files"""
    expect_error(inputs, run(*converter, arguments, cwd=inputs), status, words)


SAME = {  # arguments: the two names of one file
    "t t": ("t", "t"),
    "both/y t both": ("both/y", "both/y"),
    "both .": ("both/x", "./both/x"),
    "t hard": ("t", "hard"),
    "d/soft t": ("d/soft", "t"),
    "t both/y -": ("t", "stdin"),
}


@pytest.mark.parametrize("arguments", SAME)
def test_converter_same_file(converter, inputs, arguments):
    """the converter rejects a file that is in the input twice, before it reads any"""
    (inputs / "both").mkdir()
    for name in "xy":
        (inputs / "both" / name).write_text(f"text {name}")
    (inputs / "hard").hardlink_to(inputs / "t")
    (inputs / "d/soft").symlink_to("../t")
    os.truncate(inputs / "both/y", 1 << 40)  # a hole: reading it would take minutes
    (inputs / "links/link").unlink()
    with (inputs / "t").open("rb") as stdin:
        result = run(*converter, "--out out", arguments, cwd=inputs, stdin=stdin)
    expect_error(inputs, result, FAILED, "{} and {} are one file".format(*SAME[arguments]))


@pytest.mark.parametrize(("size", "limit", "options", "words"), FULL, ids=["spool", "shard", "last flush", "tokenizer"])
def test_converter_disk(converter, inputs, size, limit, options, words):
    """the converter leaves no files when the disk is full"""
    (inputs / "t").write_text("a" * size)
    result = run(f"prlimit --fsize={limit}", *converter, "--out out", options, "t", cwd=inputs)
    expect_error(inputs, result, FAILED, words)


def test_converter_signal(converter, inputs):
    """the converter leaves no files when a signal ends it"""
    command = [*converter, "--out", "out", "-"]
    with subprocess.Popen(command, cwd=inputs, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"some text")
        process.stdin.flush()
        while not (inputs / "out").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # until it has read the text
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read()
    assert process.returncode == FAILED and err.count(b"\n") == 1 and b"signal 15" in err
    assert not list((inputs / "out").iterdir())


def test_converter_signal_in_training(converter, inputs):
    """the converter leaves no files when a signal ends it while it trains a tokenizer, and ends soon"""
    (inputs / "t").write_bytes(random.Random(1).randbytes(2_000_000).translate(b"ACGT" * 64))
    before = os.times().children_user
    with Started(*converter, "--out out --bpe 32768 --val-tokens 0 t", cwd=inputs) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        process.wait_until(lambda: int(stat.read_text().split()[13]) >= 10)  # 0.1 s of CPU: it has read the text
        process.send_signal(signal.SIGINT)
        result = process.end()
    assert os.times().children_user - before < 1  # less than the training takes
    expect_error(inputs, result, FAILED, "signal 2")


# ---- the corpus


@pytest.mark.parametrize("name", ["plain", 'q"b\\s', "ä\udcff\n"])
def test_converter_description(converter, tmp_path, name):
    """the converter describes its corpus in corpus.json"""
    (tmp_path / name).write_text("".join(f"document {i}\n" for i in range(300)))
    options = ["--out out --shard-tokens 1000 --delimiter", r"'\n'", shlex.quote(name)]
    run(*converter, *options, cwd=tmp_path).done()
    described = read_json(tmp_path / "out/corpus.json")
    assert described["vocab_size"] == 256 and described["source"] == name.replace("\udcff", "\ufffd")
    assert (described["separator"]["token"], described["separator"]["place"]) == (0, "before")
    assert described["documents"] == 300 and described["val_tokens"] > 0
    assert described["train_tokens"] + described["val_tokens"] == described["text_bytes"] + 300
    found = {shard["file"]: shard["xxh64"] for shard in described["shards"]}
    assert len(found) == 5  # four of the 3990 bytes and separators or so, one for validation
    assert found == {path.name: file_digest(path) for path in (tmp_path / "out").glob("*.bin")}
    result = run_trainer("--dry-run --preset 124m --train-data out", cwd=tmp_path).done()
    assert "vocabulary 256" in result.out


def test_converter_deep_directories(converter, tmp_path):
    """the converter reads deep directories with little stack"""
    (tmp_path / ("in" + "/d" * 300)).mkdir(parents=True)
    (tmp_path / ("in" + "/d" * 300) / "text").write_text("deep")
    run("prlimit --stack=1048576", *converter, "--out out --val-tokens 0 in", cwd=tmp_path).done()
    assert tokens_of(tmp_path / "out", "train") == b"\0deep"


def test_converter_force(converter, tmp_path):
    """the converter replaces a corpus only with --force, and reports dropped bytes"""
    out = tmp_path / "out"
    convert = lambda text, *options: run(*converter, "--out", out, *options, "-", stdin=text)
    replace = lambda: convert(b"a\0\0b", "--force --val-tokens 0").one_line(
        DONE, "dropped 2 NUL bytes, the first in stdin"
    )
    convert(b"abcdefghij", "--shard-tokens 2 --val-tokens 0").done()
    assert [len(shard) for shard in shards_of(out, "train")] == [1, 2, 2, 2, 2, 2]
    (out / "train_note.txt").write_text("x")
    remaining = ["corpus.json", "train_000000.bin", "train_note.txt"]
    replace()  # by a smaller text
    assert shards_of(out, "train") == [b"\0ab"] and sorted(path.name for path in out.iterdir()) == remaining
    for other in ("corpus.json", "progress.json", "tokenizer.json", "tokenizer.bin"):  # without its shards
        for path in out.iterdir():
            if path.name != "train_note.txt":
                path.unlink()
        (out / other).write_text("x\n")
        assert other in convert(b"a").one_line(FAILED, "--force").err
        replace()
        assert sorted(path.name for path in out.iterdir()) == remaining
    # and the trainer takes what comes out
    run_trainer("--dump-grads", tmp_path / "grads", "--train-data", out, "--seq-len 2 --batch-size 1").done()


def test_converter_tokenizer(converter, tmp_path):
    """the converter trains a tokenizer, and describes its corpus like one of bytes"""
    lines = [f"line {i} of the text: naïve 数学 {i * i}\n" for i in range(2000)]
    (tmp_path / "text").write_text("%".join(lines) + "%\0\0")
    convert = lambda out, *options: run(*converter, "--delimiter % text --out", out, *options, cwd=tmp_path).done()
    convert("bytes", "--val-tokens 8000")
    for out in ("out", "again"):
        result = convert(out, "--bpe 600 --shard-tokens 5000 --val-tokens 8000")
        assert "bpe   vocabulary 600, " in result.out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in set(names) - {"corpus.json"}:
        assert filecmp.cmp(tmp_path / "out" / name, tmp_path / "again" / name, shallow=False), name
    described, of_bytes = (read_json(tmp_path / out / "corpus.json") for out in ("out", "bytes"))
    assert read_json(tmp_path / "again/corpus.json") == {**described, "name": "again"}
    assert described["separator"] == {"token": 0, "text": "<|endoftext|>", "place": "before"}
    assert (described["tokenizer"], described["vocab_size"]) == ("bpe-600", 600)
    assert (described["documents"], described["text_bytes"]) == (2001, len("".join(lines).encode()) + 2)
    shards = {shard["file"]: (shard["tokens"], shard["xxh64"]) for shard in described["shards"]}
    paths = {path.name: path for path in (tmp_path / "out").glob("*_0*.bin")}
    assert shards == {name: (len(open_shard(path)), file_digest(path)) for name, path in paths.items()}
    assert names == sorted(["corpus.json", "tokenizer.bin", "tokenizer.json", *shards])
    texts, _ = read_table(tmp_path / "out/tokenizer.bin")
    for split in ("train", "val"):
        found = [open_shard(paths[name]).tolist() for name in sorted(shards) if name.startswith(split)]
        sizes = [len(tokens) for tokens in found]
        assert sum(sizes) == described[f"{split}_tokens"] and max(sizes) - min(sizes) <= 1 and max(sizes) <= 5000
        whole = b"".join(b"\xff" if token == 0 else texts[token] for tokens in found for token in tokens)
        kept = whole.replace(b"\xff\0\0", b"")  # the document of NUL bytes, which are kept
        assert (kept == tokens_of(tmp_path / "bytes", split).replace(b"\0", b"\xff")) is True, split
        if split == "train":  # the tokenizer has seen these documents alone
            (tmp_path / "train").write_bytes(whole[1:].replace(b"\xff", b"%"))
            run(*converter, "--out alone --delimiter % --bpe 600 --val-tokens 0 train", cwd=tmp_path).done()
            assert filecmp.cmp(tmp_path / "alone/tokenizer.json", tmp_path / "out/tokenizer.json", shallow=False)
    assert len(shards) > 4 and described["val_tokens"] > 0


def test_converter_small_vocabulary(converter, tmp_path):
    """the converter says when the text has too few pairs, and --force replaces its tokenizer"""
    for text, tokens in {"ab ab ab": 259, "xy": 257}.items():  # the separator, 256 bytes, ab, " ab"
        result = run(*converter, "--out out --force --val-tokens 2 --bpe 512 -", stdin=text.encode(), cwd=tmp_path)
        assert f"bpe   vocabulary {tokens} (the training text has no more pairs), " in result.out
        assert read_json(tmp_path / "out/corpus.json")["vocab_size"] == tokens
        run_trainer("--dump-grads grads --train-data out --seq-len 1 --batch-size 1", cwd=tmp_path).done()
    run(*converter, "--out out --force --val-tokens 0 -", stdin=b"abcd", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"corpus.json", "train_000000.bin"}
