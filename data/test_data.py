"""Tests of the scripts in data/ on small generated inputs."""

import base64
import fcntl
import gzip
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import chat
import numpy as np
import pyarrow
import pyarrow.parquet
import shards
import zstandard
from huggingface_hub import errors as hub_errors
from outputs import open_output
from sources import HUB, BadInput
from tokenizers import Tokenizer, models

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all naïve 数学 'tis don't"
).split()


def run(program, *arguments, **more):
    return subprocess.run(
        [sys.executable, str(HERE / program), *map(str, arguments)], capture_output=True, text=True, **more
    )


def prepare(*arguments, **more):
    return run("prepare.py", *arguments, **more)


def make_documents(count, seed=1):
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 120))) + f" #{i}." for i in range(count)]


def write_jsonl(path, documents, field="text"):
    data = "".join(json.dumps({"id": i, field: d}) + "\n" for i, d in enumerate(documents)).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":  # in two frames, as large files often have
        middle = len(data) // 2
        data = zstandard.ZstdCompressor().compress(data[:middle]) + zstandard.ZstdCompressor().compress(data[middle:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_parquet(path, documents, field="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"other": list(range(len(documents))), field: documents}), path, row_group_size=100
    )


def read_corpus(directory):
    """All tokens of a corpus, validation first, and corpus.json."""
    corpus = json.loads((directory / "corpus.json").read_text())
    return np.concatenate([shards.open_shard(directory / s["file"]) for s in corpus["shards"]]), corpus


def byte_documents(directory):
    tokens, corpus = read_corpus(directory)
    assert corpus["tokenizer"] == "bytes" and tokens[0] == 0, ("a byte corpus begins with", tokens[:3])
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[1:]


def digests(directory):
    return {p.name: shards.file_digest(p) for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".json")}


SMALL = ("--tokenizer", "bytes", "--val-tokens", "3000", "--shard-tokens", "20000")


def test_all_formats_give_the_same_documents(tmp_path):
    documents = make_documents(400)
    write_jsonl(tmp_path / "in/a.jsonl", documents[:80])
    write_jsonl(tmp_path / "in/b.jsonl.gz", documents[80:160])
    write_jsonl(tmp_path / "in/c.json.zst", documents[160:240])
    write_parquet(tmp_path / "in/d.parquet", documents[240:320])
    (tmp_path / "in/e.txt").write_text("\f".join(documents[320:390]))
    (tmp_path / "in/f.txt.gz").write_bytes(gzip.compress("\f".join(documents[390:]).encode()))
    (tmp_path / "in/ignored.bin").write_bytes(b"\0")
    r = prepare(tmp_path / "in", "--out", tmp_path / "out", *SMALL, "--delimiter", "\\f")
    assert r.returncode == 0, r.stderr
    assert byte_documents(tmp_path / "out") == documents, "the documents differ"
    corpus = json.loads((tmp_path / "out/corpus.json").read_text())
    assert corpus["documents"] == 400 and corpus["text_bytes"] == sum(len(t.encode()) for t in documents)
    assert all(shards.file_digest(tmp_path / "out" / s["file"]) == s["xxh64"] for s in corpus["shards"]), (
        "a digest does not agree"
    )
    assert 3000 <= corpus["val_tokens"] < 4000 and len(corpus["shards"]) > 3


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_lines(count):
    rng, say = random.Random(4), lambda role, text: {"role": role, "content": text}
    for i in range(count):
        words = lambda: " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 20)))
        turns = [say(role, words()) for _ in range(rng.randrange(1, 4)) for role in ("user", "assistant")]
        yield [say("system", f"Be #{i}.")] * (i % 2) + turns


def counted_tokens(directory, split=""):
    """The tokens of a corpus that count."""
    _, corpus = read_corpus(directory)
    found = []
    for shard in (s for s in corpus["shards"] if s["file"].startswith(split)):
        mask = directory / f"{shard['file']}.mask"
        assert shards.file_digest(mask) == shard["mask"], "the digest of a mask differs"
        bits = np.unpackbits(np.fromfile(mask, np.uint8)[1024:], bitorder="little")[: shard["tokens"]].astype(bool)
        found.append(shards.open_shard(directory / shard["file"])[bits])
    return np.concatenate(found)


def test_chats_become_tokens_of_which_those_of_the_assistant_count(tmp_path):
    chats = list(chat_lines(60))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in chats))
    (tmp_path / "chatml.jinja").write_text(CHATML)
    template = ("--chat-template", tmp_path / "chatml.jinja")
    r = prepare("--chat", tmp_path / "in.jsonl", "--out", tmp_path / "bytes", *SMALL, *template)
    assert r.returncode == 0, r.stderr
    render = lambda m: "".join(f"<|im_start|>{x['role']}\n{x['content']}<|im_end|>\n" for x in m)
    assert byte_documents(tmp_path / "bytes") == [render(m) for m in chats], "the texts differ"
    said = [f"{x['content']}<|im_end|>\n" for m in chats for x in m if x["role"] == "assistant"]
    assert bytes(counted_tokens(tmp_path / "bytes").astype(np.uint8)).decode() == "".join(said), "other tokens count"
    assert run("inspect", tmp_path / "bytes", "--verify").returncode == 0, "inspect --verify"
    trainer = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
    options = "--doc-mask --steps 2 --seq-len 64 --batch-size 2 --out".split()
    r = subprocess.run(
        [trainer, "--train-data", tmp_path / "bytes", *options, tmp_path / "run"], capture_output=True, text=True
    )
    assert r.returncode == 0 and f"{len(counted_tokens(tmp_path / 'bytes', 'train'))} of them count" in r.stdout, (
        r.stderr
    )
    r = run("../dev/reference/export_hub.py", tmp_path / "run/checkpoints/step_00000002", tmp_path / "hub")
    assert r.returncode == 0 and (tmp_path / "hub/chat_template.jinja").read_text() == CHATML, r.stderr
    (tmp_path / "bytes/train_000001.bin.mask").unlink()
    r = subprocess.run(
        [trainer, "--train-data", tmp_path / "bytes", *options, tmp_path / "run2"], capture_output=True, text=True
    )
    assert r.returncode == 1 and "train_000001.bin.mask is missing" in r.stderr and not (tmp_path / "run2").exists(), (
        r.stderr
    )
    # a tokenizer.json whose special tokens the template writes, with the template beside it
    write_jsonl(tmp_path / "text.jsonl", make_documents(200))
    r = prepare(tmp_path / "text.jsonl", "--out", tmp_path / "bpe", "--train-bpe", 300, "--val-tokens", 500)
    assert r.returncode == 0, r.stderr
    tokenizer = Tokenizer.from_file(str(tmp_path / "bpe/tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    settings = {
        "chat_template": "{{ bos_token }}" + CHATML,
        "bos_token": {"content": "<bos>"},
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(settings))
    command = (
        "--chat",
        tmp_path / "in.jsonl",
        "--out",
        tmp_path / "out",
        "--tokenizer",
        tmp_path / "model/tokenizer.json",
    )
    r = prepare(*command, "--val-tokens", 500)
    assert r.returncode == 0, r.stderr
    stored = {"bos_token": "<bos>", "eos_token": "<|im_end|>", "turn_end": tokenizer.token_to_id("<|im_end|>")}
    assert read_corpus(tmp_path / "out")[1]["chat"] == stored, read_corpus(tmp_path / "out")[1]
    assert tokenizer.decode(counted_tokens(tmp_path / "out").tolist(), False) == "".join(said), "other tokens count"
    assert (tmp_path / "out/chat_template.jinja").read_text() == settings["chat_template"], "the template is not kept"
    r = run("chat_prompts.py", tmp_path / "out", tmp_path / "in.jsonl")
    assert r.returncode == 0 and not r.stderr, r.stderr
    tokens = json.loads(r.stdout.splitlines()[1])["tokens"]
    separator = read_corpus(tmp_path / "out")[1]["separator"]["token"]
    options = "--doc-mask --steps 1 --seq-len 64 --batch-size 2 --out".split()
    subprocess.run(
        [trainer, "--train-data", tmp_path / "out", *options, tmp_path / "run3"], capture_output=True, check=True
    )
    with open(tmp_path / "run3/log.jsonl", "a") as f:
        f.write('{"kind": "val", "st\n')  # a broken line
    r = run("../dev/reference/export_hub.py", tmp_path / "run3/checkpoints/step_00000001", tmp_path / "hub3")
    assert r.returncode == 0 and not r.stderr, r.stderr
    about = json.loads((tmp_path / "hub3/tokenizer_config.json").read_text())
    texts = about["bos_token"], about["eos_token"], about["pad_token"]
    assert texts == ("<bos>", "<|im_end|>", "<|endoftext|>") and "add_bos_token" not in about, about
    ends = json.loads((tmp_path / "hub3/generation_config.json").read_text())["eos_token_id"]
    assert ends == [separator, stored["turn_end"]], ends
    assert tokens[0] == separator, "the prompt does not follow a separator"
    assert tokenizer.decode(tokens[1:], False) == f"<bos>{render(chats[1])}<|im_start|>assistant\n", "another prompt"
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<s>"}))
    r = prepare(*command, "--val-tokens", 500)
    assert r.returncode == 1 and "started with chat_tokens" in r.stderr, r.stderr
    # a corpus of an earlier version, which did not store the tokens of the template
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(settings))
    state, corpus = (json.loads((tmp_path / "out" / name).read_text()) for name in ("progress.json", "corpus.json"))
    del corpus["chat"], state["options"]["chat_tokens"], state["options"]["tokenizer_xxh64"]
    for name, value in (("progress.json", state), ("corpus.json", corpus)):
        (tmp_path / "out" / name).write_text(json.dumps(value))
    r = prepare(*command, "--val-tokens", 500)
    assert r.returncode == 0 and "is finished" in r.stdout, r.stderr
    r = run("chat_prompts.py", tmp_path / "out", tmp_path / "in.jsonl")
    assert r.returncode == 0 and "did not store bos_token and eos_token" in r.stderr, r.stderr


def test_bad_chats_are_refused_with_one_line(tmp_path):
    say = lambda role, text: {"role": role, "content": text}
    (tmp_path / "chatml.jinja").write_text(CHATML)
    for value, words in (
        ({"messages": [{"content": "a"}]}, "line 2 has no role in message 1"),
        ({"messages": [say("user", "a"), say("robot", "b")]}, "line 2 has the unknown role 'robot'"),
        ({"messages": [say("user", "a"), say("assistant", None)]}, "line 2 has no text as content of message 2"),
        ({"messages": [say("user", "a")]}, "line 2 has no message of the assistant"),
        ({"text": "a"}, "line 2 has no list of messages"),
    ):
        good = {"messages": [say("user", "a"), say("assistant", "b")]}
        (tmp_path / "in.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(value) + "\n")
        r = prepare(
            "--chat",
            tmp_path / "in.jsonl",
            "--out",
            tmp_path / "out",
            *SMALL,
            "--chat-template",
            tmp_path / "chatml.jinja",
        )
        assert r.returncode == 1 and r.stderr.count("\n") == 1 and words in r.stderr, (words, r.stderr)
        assert not list((tmp_path / "out").glob("*.bin*")), "a shard was written"
        shutil.rmtree(tmp_path / "out")
    for template, messages, words in (
        (
            CHATML,
            [{**say("user", "a"), "name": "<|x|>"}, say("assistant", "b")],
            "the special token <|x|> in message 1",
        ),
        (CHATML, [say("user", "\ud800"), say("assistant", "b")], "an unpaired surrogate in message 1"),
        ("{{ 1 // 0 }}", [say("user", "a"), say("assistant", "b")], "refused by the chat template: integer division"),
    ):
        value = chat.Chat(template, {})
        value.special = ["<|x|>"]
        try:
            assert not value.conversation(messages), ("accepted:", words)
        except ValueError as error:
            assert words in str(error), error
    value = chat.Chat("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}", {})
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    turns = [say("user", "a"), say("assistant", "b")]
    found, wanted = (chat.Chat(template, {}).conversation(turns) for template in (marked, CHATML))
    assert (found, found.spans) == (wanted, wanted.spans), "a mark of targets changes the text"
    message = say("user", "'<é")
    assert value.render([message, {}], False) == json.dumps(message, ensure_ascii=False), "tojson is another"
    for error, words in ((hub_errors.LocalEntryNotFoundError("offline"), "offline"), (OSError("refused"), "refused")):
        with unittest.mock.patch.object(chat, "hub") as hub:
            hub.return_value.hf_hub_download.side_effect = error
            try:
                assert not chat.find_chat("owner/name", tmp_path / "chatml.jinja"), "without the tokenizer's settings"
            except BadInput as error:
                assert f"tokenizer_config.json of --tokenizer owner/name on the Hub: {words}" in str(error), error
    r = prepare("--chat", tmp_path / "in.jsonl", "--out", tmp_path / "none", *SMALL)
    assert r.returncode == 1 and "has no chat template: give --chat-template FILE" in r.stderr, r.stderr
    (tmp_path / "last.jinja").write_text("{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}")
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"messages": [say(r, "abc") for r in ("user", "assistant") * 2]}) + "\n"
    )
    r = prepare(
        "--chat", tmp_path / "in.jsonl", "--out", tmp_path / "out", *SMALL, "--chat-template", tmp_path / "last.jinja"
    )
    assert r.returncode == 1 and "is written differently by the chat template" in r.stderr, r.stderr


def test_the_tokenizer_is_checked_before_the_documents_are_read(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", make_documents(50))
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="the"))
    tokenizer.save(str(tmp_path / "t.json"))
    command = (tmp_path / "in.jsonl", "--out", tmp_path / "o", "--val-tokens", 100, "--tokenizer", tmp_path / "t.json")
    expect_error(prepare(*command), tmp_path / "o", "no known separator")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    expect_error(prepare(*command), tmp_path / "o", "its model is WordLevel; only BPE is supported")
    assert not list((tmp_path / "o").glob("*.bin")), "the documents were tokenized before"
    expect_error(prepare(*command[:-1], tmp_path / "o/tokenizer.json", "--force"), tmp_path / "o", "is inside --out")
    assert (tmp_path / "o/tokenizer.json").exists(), "--force removed the tokenizer"
    for damaged in ("[]", '{"shards": [], "options": 1}', "[" * 99999):
        (tmp_path / "o/progress.json").write_text(damaged)
        expect_error(prepare(*command), tmp_path / "o", "progress.json is damaged: --force")


def test_corpora_of_the_hub_are_read_by_their_layout(tmp_path):
    documents = make_documents(150)
    names = {
        "fineweb": "sample/10BT/00{}_00000.parquet",
        "fineweb-edu": "sample/10BT/00{}_00000.parquet",
        "tinystories": "data/train-0000{}-of-00004.parquet",
        "dclm": "global-shard_01_of_10/local-shard_0_of_10/shard_0000000{}_processed.jsonl.zst",
        "c4": "en/c4-train.0000{}-of-01024.json.gz",
    }
    assert set(names) == set(HUB), "a corpus has no test"
    for name, pattern in names.items():
        for i in range(3):
            path = tmp_path / name / pattern.format(i)
            (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, documents[50 * i : 50 * i + 50])
        (tmp_path / name / "README.md").write_text("no document")
        r = prepare(
            name, "--source-dir", tmp_path / name, "--out", tmp_path / f"out_{name}", *SMALL, "--max-tokens", 1e6
        )
        assert r.returncode == 0, (name, r.stderr)
        assert byte_documents(tmp_path / f"out_{name}") == documents, (name, "the documents differ")
    r = prepare("c4", "--source-dir", tmp_path / "fineweb", "--out", tmp_path / "none", *SMALL)
    assert r.returncode == 1 and "allenai/c4" in r.stderr, r.stderr


def test_the_number_of_workers_does_not_change_the_corpus(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", make_documents(3000))
    for workers in (1, 2, 5):
        options = f"--train-bpe 600 --workers {workers} --val-tokens 5000 --shard-tokens 20000".split()
        r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / str(workers), *options)
        assert r.returncode == 0, r.stderr

    def plain(n):
        found = digests(tmp_path / str(n))
        del found["corpus.json"], found["progress.json"]  # these contain the directory
        return found

    assert plain(1) == plain(2) == plain(5) and len(plain(1)) > 4


def test_a_killed_run_resumes_to_the_same_corpus(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", make_documents(6000))
    write_parquet(tmp_path / "b.parquet", make_documents(3000, 2))
    options = "--tokenizer bytes --val-tokens 3000 --shard-tokens 100000 --out".split()
    command = [tmp_path / "a.jsonl", tmp_path / "b.parquet", *options]
    begin = time.monotonic()
    r = prepare(*command, tmp_path / "whole/c")
    whole = time.monotonic() - begin
    assert r.returncode == 0, r.stderr
    killed = partial = 0
    for i in range(12):
        if (tmp_path / "c/corpus.json").exists():
            break
        process = subprocess.Popen(
            [sys.executable, str(HERE / "prepare.py"), *map(str, command), str(tmp_path / "c")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        time.sleep(whole * (0.3 + 0.06 * i))
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        killed += process.returncode == -9
        partial += (tmp_path / "c/progress.json").exists() and not (tmp_path / "c/corpus.json").exists()
        assert process.returncode in (-9, 0), err
    assert killed >= 2, ("only", killed, "runs were killed")
    r = prepare(*command, tmp_path / "c")
    assert r.returncode == 0 and not list((tmp_path / "c").glob("*.tmp")), (r.stderr, list((tmp_path / "c").iterdir()))
    assert digests(tmp_path / "c") == digests(tmp_path / "whole/c"), ("the corpora differ;", partial, "partial ones")
    r = prepare(*command, tmp_path / "c")
    assert r.returncode == 0 and "finished" in r.stdout, (r.stdout, r.stderr)
    r = prepare(*command[:-2], "90000", "--out", tmp_path / "c")
    assert r.returncode == 1 and "shard_tokens 100000" in r.stderr, r.stderr
    with open(tmp_path / "c/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        r = prepare(*command, tmp_path / "c")
        assert r.returncode == 1 and "another prepare.py" in r.stderr, r.stderr
    before = (tmp_path / "a.jsonl").stat()
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    r = prepare(*command, tmp_path / "c")
    assert r.returncode == 1 and "started with inputs" in r.stderr and len(r.stderr) < 1000, r.stderr
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    with open(tmp_path / "c/train_000002.bin", "r+b") as f:
        f.seek(5000)
        f.write(b"\xff")
    r = prepare(*command, tmp_path / "c")
    assert r.returncode == 1 and "train_000002.bin has changed" in r.stderr, r.stderr
    r = prepare(*command, tmp_path / "c", "--force")
    assert r.returncode == 0 and digests(tmp_path / "c") == digests(tmp_path / "whole/c"), ("after --force", r.stderr)


def expect_error(r, out, words):
    lines = r.stderr.strip().splitlines()
    assert r.returncode in (1, 2) and words in r.stderr, ("status", r.returncode, r.stderr)
    assert len(lines) == 1 or r.returncode == 2, ("not one line:", r.stderr)
    if out.exists():
        assert not (out / "corpus.json").exists() and not list(out.glob("*.tmp")), ("left:", list(out.iterdir()))
        for path in [*out.glob("train_*.bin"), *out.glob("val_*.bin")]:
            shards.open_shard(path)


def test_invalid_input_is_a_one_line_error(tmp_path):
    good = make_documents(200)
    write_jsonl(tmp_path / "good.jsonl", good)
    lines = (tmp_path / "good.jsonl").read_bytes().splitlines()
    bad = {
        "utf8.jsonl": (b"\n".join([*lines[:150], b'{"text": "\xff"}', *lines[150:]]), "line 151 is not UTF-8"),
        "json.jsonl": (b"\n".join([*lines[:150], b'{"text": ', *lines[150:]]), "line 151 is not JSON"),
        "deep.jsonl": (b"\n".join([*lines[:150], b"[" * 200000, *lines[150:]]), "line 151 is not JSON"),
        "field.jsonl": (b"\n".join([*lines[:150], b'{"txt": "a"}', *lines[150:]]), "line 151 has no text in 'text'"),
        "surrogate.jsonl": (b"\n".join([*lines[:150], b'{"text": "\\ud800"}', *lines[150:]]), "surrogate"),
        "long.jsonl": (
            b"\n".join([*lines[:150], b'{"text": "' + b"a" * 3_000_000 + b'"}', *lines[150:]]),
            "--max-document",
        ),
        "nul.jsonl": (b"\n".join([*lines[:150], b'{"text": "a\\u0000b"}', *lines[150:]]), "document 151 has a byte 0"),
        "empty.txt.GZ": (b"", "an empty file"),
        "text.txt": (b"abc\xfe", "is not UTF-8 at its byte 3"),
        "cut.jsonl.gz": (gzip.compress(b"\n".join(lines))[:-400], "truncated"),
        "cut.jsonl.zst": (zstandard.ZstdCompressor().compress(b"\n".join(lines))[:-400], "truncated"),
        "bad.jsonl.zst": (b"\x28\xb5\x2f\xfd" + b"\xff" * 40, "damaged"),
        "none.jsonl": (b"", "no document"),
        "blank.jsonl": (b'{"text": ""}\n\n{"text": ""}\n', "no document"),
    }
    for name, (data, words) in bad.items():
        (tmp_path / name).write_bytes(data)
        options = [*SMALL, "--max-document", 1e6, *(["--delimiter", "\\f"] if ".txt" in name else [])]
        r = prepare(tmp_path / name, "--out", tmp_path / f"o_{name}", *options)
        expect_error(r, tmp_path / f"o_{name}", words)
    write_parquet(tmp_path / "cut.parquet", good)
    whole = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    expect_error(
        prepare(tmp_path / "cut.parquet", "--out", tmp_path / "o1", *SMALL), tmp_path / "o1", "damaged or truncated"
    )
    write_parquet(tmp_path / "field.parquet", good, "body")
    expect_error(prepare(tmp_path / "field.parquet", "--out", tmp_path / "o2", *SMALL), tmp_path / "o2", "--text-field")
    for name in "utf8.jsonl json.jsonl deep.jsonl field.jsonl surrogate.jsonl long.jsonl nul.jsonl".split():
        r = prepare(tmp_path / name, "--out", tmp_path / f"s_{name}", *SMALL, "--max-document", 1e6, "--skip-bad")
        assert r.returncode == 0 and byte_documents(tmp_path / f"s_{name}") == good and "(1 bad)" in r.stdout, (
            name,
            r.stderr,
            r.stdout[-200:],
        )
    expect_error(
        prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o3", *SMALL[:2], "--val-tokens", 1e7),
        tmp_path / "o3",
        "all",
    )
    expect_error(prepare(tmp_path / "nothing", "--out", tmp_path / "o4", *SMALL), tmp_path / "o4", "does not exist")
    ranks = prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o8", "--gpt2-ranks", tmp_path / "good.jsonl")
    expect_error(ranks, tmp_path / "o8", "is not a token in base64 and its rank")
    (tmp_path / "ranks").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256)))
    ranks = prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o9", "--gpt2-ranks", tmp_path / "ranks")
    expect_error(ranks, tmp_path / "o9", "has other ranks than GPT-2")
    expect_error(
        prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o5", "--tokenizer", tmp_path / "good.jsonl"),
        tmp_path / "o5",
        "not a tokenizer.json",
    )
    expect_error(
        prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o6", "--val-tokens", "0"),
        tmp_path / "o6",
        "--val-tokens 0",
    )
    expect_error(
        prepare(tmp_path / "good.jsonl", "--out", tmp_path / "o6", "--delimiter", "\\x"),
        tmp_path / "o6",
        "use \\xHH for each byte",
    )
    expect_error(
        prepare(tmp_path / "good.jsonl", "--out", tmp_path / "good.jsonl", *SMALL), tmp_path / "o7", "good.jsonl"
    )


def test_a_small_corpus_has_one_percent_of_validation_documents(tmp_path):
    documents = make_documents(2000)
    write_jsonl(tmp_path / "in.jsonl", documents)
    r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / "o", "--tokenizer", "bytes")
    assert r.returncode == 0, r.stderr
    corpus = json.loads((tmp_path / "o/corpus.json").read_text())
    share = corpus["val_tokens"] / (corpus["val_tokens"] + corpus["train_tokens"])
    assert 0.005 < share < 0.02 and byte_documents(tmp_path / "o") == documents, ("validation has", share)
    r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / "o", "--tokenizer", "bytes")
    assert r.returncode == 0 and "finished" in r.stdout, ("the same command again:", r.stdout, r.stderr)
    # two documents are enough; a single one is an error before anything is written
    for name in "ab":
        (tmp_path / f"two/{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / f"two/{name}.txt").write_text(f"{name} document\n")
    r = prepare(tmp_path / "two", "--out", tmp_path / "o2", "--train-bpe", 300)
    assert r.returncode == 0 and json.loads((tmp_path / "o2/corpus.json").read_text())["documents"] == 2, r.stderr
    expect_error(prepare(tmp_path / "two/a.txt", "--out", tmp_path / "o3"), tmp_path / "o3", "--delimiter")
    assert not (tmp_path / "o3").exists(), "a directory was made"
    r = prepare(tmp_path / "two/a.txt", "--out", tmp_path / "o3", "--tokenizer", "bytes", "--delimiter", " ")
    assert r.returncode == 0 and byte_documents(tmp_path / "o3") == ["a", "document\n"], r.stderr
    write_jsonl(tmp_path / "one.jsonl", documents[:1])
    expect_error(
        prepare(tmp_path / "one.jsonl", "--out", tmp_path / "o4", "--tokenizer", "bytes"),
        tmp_path / "o4",
        "only one document: add others",
    )


def make_package(directory, package, texts):
    """A package with these documents of git."""
    root = directory / package
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        f"Package: {package}\nVersion: 1:2-3\nArchitecture: all\nMaintainer: none\nDescription: none\n"
    )
    (root / "usr/share/doc/git").mkdir(parents=True)
    for i, text in enumerate(texts):
        (root / f"usr/share/doc/git/{i}.txt").write_text(text)
    build = ["dpkg-deb", "-b", root, directory / f"{package}_1%3a2-3_all.deb"]
    subprocess.run(build, check=True, capture_output=True)


def test_a_corpus_of_packages_has_no_repetitions_and_validation_shards_by_source(tmp_path):
    once = [" ".join(f"{word}{i}" for word in WORDS) * 8 for i in range(40)]
    license = "This is the text of a license, which is the same in all documents, and longer than a short heading.\n\n"
    (tmp_path / "debs").mkdir()
    make_package(tmp_path / "debs", "git-doc", [license + text for text in once] + [once[0], "short"])
    words = ["--sources", "git", "--debs", tmp_path / "debs", "--tokenizer", "bytes", "--workers", 1]
    r = run("offline_corpus.py", "--out", tmp_path / "one", *words)
    assert r.returncode == 0 and "git-doc 1:2-3" in r.stdout, r.stdout + r.stderr
    files = [s["file"] for s in json.loads((tmp_path / "one/corpus.json").read_text())["shards"]]
    assert files == ["val_000000_all.bin", "val_000001_git.bin", "train_000002.bin"], files
    documents = byte_documents(tmp_path / "one")
    assert sorted(t.removeprefix(license) for t in documents) == sorted(once), "documents are lost or repeated"
    assert sum(t.startswith(license) for t in documents) == 1, "a license is repeated"
    about = json.loads((tmp_path / "one/sources.json").read_text())
    assert about["sources"]["git"]["packages"] == {"git-doc": ["1:2-3", "GPL-2"]}, about
    assert f"fingerprint {about['fingerprint'][:16]}" in r.stdout, r.stdout
    assert run("offline_corpus.py", "--out", f"{tmp_path / 'two'}/", *words).returncode == 0, "a second time"
    same = [(tmp_path / name / "corpus.json").read_text().replace(name, "") for name in ("one", "two")]
    assert same[0] == same[1], "the same packages give another corpus"
    r = run("offline_corpus.py", "--out", tmp_path / "two", "--sources", "prose")
    assert r.returncode == 1 and "two.jsonl has the sources git: remove it, or " in r.stderr, r.stderr
    r = run("offline_corpus.py", "--out", tmp_path / "four", *words, env={**os.environ, "PATH": "/none"})
    assert r.returncode == 1 and r.stderr == "offline_corpus.py: dpkg-deb is missing: install dpkg\n", r.stderr
    r = run("offline_corpus.py", "--out", tmp_path / "three", "--sources", "got")
    assert r.returncode == 2 and "'got' is not one of prose, " in r.stderr, r.stderr


def test_skipped_files_are_listed(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.TXT", "notes.rst", "data.csv", "odd\n.x"):
        (tmp_path / "in" / name).write_text(f"text of {name[:1]}")
    r = prepare(tmp_path / "in", "--out", tmp_path / "o", "--tokenizer", "bytes")
    assert r.returncode == 0 and byte_documents(tmp_path / "o") == ["text of a", "text of b"], r.stderr
    assert len(r.stderr.splitlines()) == 1 and all(n in r.stderr for n in ("notes.rst", "data.csv", "odd\\n.x")), (
        r.stderr
    )
    for i in range(30):
        (tmp_path / f"in/{i}.log").write_text("")
    r = prepare(tmp_path / "in", "--out", tmp_path / "p", "--tokenizer", "bytes")
    assert r.returncode == 0 and len(r.stderr) < 1000 and "and 25 more" in r.stderr, r.stderr
    (tmp_path / "in/links").mkdir()
    (tmp_path / "in/links/dead.txt").symlink_to("nowhere")
    expect_error(
        prepare(tmp_path / "in", "--out", tmp_path / "r", "--tokenizer", "bytes"),
        tmp_path / "r",
        "dead.txt is a link to nowhere",
    )
    shutil.rmtree(tmp_path / "in/links")
    if os.geteuid():
        (tmp_path / "in/locked").mkdir(mode=0)
        expect_error(
            prepare(tmp_path / "in", "--out", tmp_path / "r", "--tokenizer", "bytes"),
            tmp_path / "r",
            "locked: Permission denied",
        )
        (tmp_path / "in/locked").rmdir()
    inside = (tmp_path / "in", "--out", tmp_path / "in/corpus", "--tokenizer", "bytes")  # whose files are no input
    assert prepare(*inside).returncode == 0 and "is finished" in prepare(*inside).stdout, "--out inside of the input"
    expect_error(prepare(tmp_path / "in", "--out", tmp_path / "in"), tmp_path / "in", "is also --out")
    shutil.rmtree(tmp_path / "in/corpus")
    for name in ("a.txt", "b.TXT"):
        (tmp_path / "in" / name).unlink()
    r = prepare(tmp_path / "in", "--out", tmp_path / "q", "--tokenizer", "bytes")
    expect_error(r, tmp_path / "q", "has no files that end in")
    assert "0.log" in r.stderr, r.stderr


def test_mistakes_are_found_before_packages_are_installed_and_notes_are_printed_once(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.rst").write_text("text")
    (tmp_path / "other").mkdir()
    for name in ("a.txt", "a.parquet"):
        (tmp_path / "other" / name).write_text("text")
    begin = "import runpy, sys; sys.path[:0] = sys.argv[1:3]; import python_environment as p"
    instead = (
        "p.ensure = lambda name: sys.exit('installs'); sys.argv[:3] = []; runpy.run_path(sys.argv[0], None, '__main__')"
    )
    without_packages = [sys.executable, "-c", f"{begin}; {instead}", HERE, ROOT / "scripts", HERE / "prepare.py"]
    for arguments, words in (
        (["in"], "has no files that end in"),
        (["fineweb", "--source-dir", "in"], "has no files sample"),
        (["fineweb", "--tokenizer", "none.json"], "--tokenizer none.json is not a file"),
        (["fineweb", "--out", "in/a.rst"], "--out in/a.rst is not a directory"),
        (["fineweb", "--val-tokens", "0"], "--val-tokens 0"),
        (["fineweb", "--chat", "--val-field", "v"], "--chat and --val-field are mutually exclusive"),
        (["fineweb", "--gpt2-ranks", "r", "--tokenizer", "bytes"], "--gpt2-ranks requires --tokenizer gpt2"),
        (["other/a.txt", "--val-field", "v"], "a.txt: --val-field requires files of JSON lines"),
        (["other/a.parquet", "--val-field", "v"], "a.parquet: --val-field requires files of JSON lines"),
        (["other/a.parquet", "--delimiter", "d"], "a.parquet: --delimiter requires text files"),
        (["other/a.parquet", "--source-dir", "in"], "--source-dir requires a corpus of the Hub: "),
    ):
        r = subprocess.run(
            [*without_packages, "--out", tmp_path / "o", *arguments], capture_output=True, text=True, cwd=tmp_path
        )
        expect_error(r, tmp_path / "o", words)
    for name in "bc":
        (tmp_path / f"in/{name}.txt").write_text(f"{name} document\n")
    base = getattr(sys, "_base_executable", sys.executable)  # which has no packages, and starts that which has them
    command = [base, HERE / "prepare.py", "--out", tmp_path / "o", "--tokenizer", "bytes", "in"]
    r = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert r.returncode == 0 and r.stderr.count("skipped") == 1 and r.stderr.count("\n") == 1, r.stderr


def test_a_line_of_a_gigabyte_requires_little_memory(tmp_path):
    with open(tmp_path / "long.jsonl", "wb") as f:
        f.write(b'{"text": "')
        f.truncate(1_000_000_000)  # a hole: zeros

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    begin = time.monotonic()
    r = prepare(tmp_path / "long.jsonl", "--out", tmp_path / "o", *SMALL, preexec_fn=limit)
    expect_error(r, tmp_path / "o", "--max-document")
    assert time.monotonic() - begin < 60, ("that took", time.monotonic() - begin, "s")


def test_disk_space_is_checked_before_reading(tmp_path):
    with open(tmp_path / "huge.txt", "wb") as f:
        f.truncate(shutil.disk_usage(tmp_path).free * 3)  # a hole
    r = prepare(tmp_path / "huge.txt", "--out", tmp_path / "o", *SMALL, "--delimiter", ".")
    expect_error(r, tmp_path / "o", "free disk space")
    with open(tmp_path / "huge.txt", "wb") as f:
        f.write("".join(make_documents(400)).encode())
    r = prepare(tmp_path / "huge.txt", "--out", tmp_path / "o", *SMALL, "--delimiter", ".")
    assert r.returncode == 0, r.stderr
    # a start that wrote only its tokenizer does not affect the next one
    write_jsonl(tmp_path / "in.jsonl", make_documents(100))
    r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / "p", "--train-bpe", 300, "--separator", "none")
    assert r.returncode == 1 and (tmp_path / "p/tokenizer.json").exists(), r.stderr
    r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / "p", "--train-bpe", 280, "--val-tokens", 1000)
    assert r.returncode == 0 and json.loads((tmp_path / "p/corpus.json").read_text())["vocab_size"] == 280, r.stderr


def test_a_run_resumes_from_its_complete_shards_after_a_full_disk(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [text for document in make_documents(3000) for text in ("", document, "")])

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # smaller than the second shard

    options = "--tokenizer bytes --val-tokens 3000 --shard-tokens 100000 --out".split()
    command = (tmp_path / "in.jsonl", *options, tmp_path / "o")
    r = prepare(*command, preexec_fn=limit)
    expect_error(r, tmp_path / "o", "continues")
    assert [p.name for p in (tmp_path / "o").glob("*.bin")] == ["val_000000.bin"], list((tmp_path / "o").iterdir())
    r = prepare(*command)
    assert r.returncode == 0 and byte_documents(tmp_path / "o") == make_documents(3000), r.stderr
    assert "3000 documents" in r.stdout and "6000 empty or bad documents skipped (0 bad)" in r.stdout, r.stdout


def test_special_tokens_in_documents_are_text(tmp_path):
    documents = ["one <|endoftext|> two", *make_documents(300)]
    write_jsonl(tmp_path / "in.jsonl", documents)
    for place in ("before", "after"):
        r = prepare(
            tmp_path / "in.jsonl",
            "--out",
            tmp_path / place,
            "--train-bpe",
            400,
            "--val-tokens",
            2000,
            "--separator-place",
            place,
        )
        assert r.returncode == 0, r.stderr
        tokens, corpus = read_corpus(tmp_path / place)
        separator = corpus["separator"]["token"]
        assert int((tokens == separator).sum()) == len(documents), ("separators:", int((tokens == separator).sum()))
        assert tokens[0 if place == "before" else -1] == separator and corpus["separator"]["place"] == place, place
        tokenizer = Tokenizer.from_file(str(tmp_path / place / "tokenizer.json"))
        pieces = np.split(tokens, np.flatnonzero(tokens == separator))
        texts = [tokenizer.decode([t for t in p.tolist() if t != separator], skip_special_tokens=False) for p in pieces]
        assert [t for t in texts if t] == documents, "the documents do not come back"


def test_the_trainer_reads_a_corpus_and_generates_its_text(tmp_path):
    trainer = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
    write_jsonl(tmp_path / "in.jsonl", make_documents(2000))
    for name, choice in (("bpe", ("--train-bpe", 500)), ("bytes", ("--tokenizer", "bytes"))):
        r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / name, *choice, "--val-tokens", 3000)
        assert r.returncode == 0, r.stderr
        run_directory = tmp_path / f"run_{name}"
        options = "--doc-mask --steps 3 --sample-every 3 --seq-len 64 --batch-size 2".split()
        command = [
            trainer,
            "--train-data",
            tmp_path / name,
            "--val-data",
            tmp_path / name,
            *options,
            "--prompt",
            "the naïve",
        ]
        r = subprocess.run([*command, "--out", run_directory], capture_output=True, text=True)
        assert r.returncode == 0 and "the naïve" in r.stdout, (r.stderr, r.stdout[-300:])
        checkpoint = run_directory / "checkpoints/step_00000003"
        r = subprocess.run(
            [trainer, "--init", checkpoint, "--generate", "5", "--prompt", "don't  数学"],
            capture_output=True,
            text=True,
        )
        assert r.returncode == 0 and r.stdout.startswith("don't  数学"), (r.stderr, r.stdout)


def test_shards_are_printed_and_verified(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", make_documents(500))
    r = prepare(tmp_path / "in.jsonl", "--out", tmp_path / "o", *SMALL)
    assert r.returncode == 0, r.stderr
    r = run("inspect", tmp_path / "o", "--tokens", 40, "--verify")
    count = json.loads((tmp_path / "o/corpus.json").read_text())["documents"]
    found = sum(
        int(line.split(" of them separators")[0].rsplit(" ", 1)[1])
        for line in r.stdout.splitlines()
        if "separators" in line
    )
    assert r.returncode == 0 and found == count and repr(make_documents(1)[0][:20])[1:-1] in r.stdout, (
        r.stdout[:500],
        r.stderr,
    )
    largest = max(len(text.encode()) + 1 for text in byte_documents(tmp_path / "o"))
    assert f"{largest} (largest); 0% in documents of 1024 or more, 0%" in r.stdout, (largest, r.stdout[:500])
    corpus = json.loads((tmp_path / "o/corpus.json").read_text())
    (tmp_path / "o/corpus.json").write_text(json.dumps({**corpus, "vocab_size": 100}))
    r = run("inspect", tmp_path / "o", "--verify")
    assert r.returncode == 1 and "the vocabulary has 100" in r.stdout, r.stdout
    (tmp_path / "o/corpus.json").write_text(json.dumps(corpus))
    assert run("inspect", tmp_path / "o", "--tokens", 0).stdout.count("ends:") == 0, "--tokens 0 prints tokens"
    (tmp_path / "o/train_000001.bin").rename(tmp_path / "o/train_000009.bin")
    r = run("inspect", tmp_path / "o", "--verify")
    words = ("train_000001.bin: is missing", "train_000009.bin: is not in corpus.json")
    assert r.returncode == 1 and all(w in r.stdout for w in words), (r.stdout, r.stderr)
    (tmp_path / "o/corpus.json").write_text("[]")
    r = run("inspect", tmp_path / "o")
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "corpus.json is damaged" in r.stderr, r.stderr
    (tmp_path / "short.bin").write_bytes((tmp_path / "o/val_000000.bin").read_bytes()[:-2])
    r = run("inspect", tmp_path / "short.bin")
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "of its header" in r.stderr, r.stderr


def test_megatron_corpora_are_converted(tmp_path):
    rng = np.random.default_rng(1)
    for kind, dtype in ((8, "<u2"), (4, "<i4")):
        sequences = [rng.integers(0, 1000, rng.integers(0, 60)).astype(dtype) for _ in range(300)]
        starts = [0, *sorted(rng.choice(np.arange(1, 300), 120, replace=False).tolist()), 300]
        lengths = np.array([len(s) for s in sequences], "<i4")
        places = np.concatenate([[0], np.cumsum(lengths.astype("<i8"))[:-1]]) * np.dtype(dtype).itemsize
        prefix = tmp_path / f"m{kind}"
        Path(f"{prefix}.bin").write_bytes(b"".join(s.tobytes() for s in sequences))
        index = (
            b"MMIDIDX\0\0"
            + struct.pack("<QBQQ", 1, kind, 300, len(starts))
            + lengths.tobytes()
            + places.astype("<i8").tobytes()
            + np.array(starts, "<i8").tobytes()
        )
        Path(f"{prefix}.idx").write_bytes(index)
        documents = [np.concatenate(sequences[a:b]) for a, b in zip(starts[:-1], starts[1:])]
        expected = np.concatenate([np.append(x, 999) for x in documents if len(x)])
        options = "--vocab 1000 --separator 999 --add-separator --val-tokens 500 --shard-tokens 2000".split()
        r = run("megatron_to_shards.py", prefix, "--out", tmp_path / f"o{kind}", *options)
        assert r.returncode == 0, r.stderr
        tokens, corpus = read_corpus(tmp_path / f"o{kind}")
        assert np.array_equal(tokens, expected) and corpus["separator"] == {"token": 999, "place": "after"}, (
            "the tokens differ"
        )
        r = run("megatron_to_shards.py", prefix, "--out", tmp_path / "small", "--vocab", 900)
        assert r.returncode == 1 and "outside --vocab 900" in r.stderr and not list((tmp_path / "small").iterdir()), (
            r.stderr
        )
        (tmp_path / "no.json").write_text('{"model": {"type": "Unigram"}}')
        r = run(
            "megatron_to_shards.py",
            prefix,
            "--out",
            tmp_path / "no",
            "--vocab",
            1000,
            "--tokenizer",
            tmp_path / "no.json",
        )
        assert r.returncode == 1 and "only BPE" in r.stderr and not list((tmp_path / "no").iterdir()), r.stderr
        (tmp_path / "no/progress.json").write_text("{}")  # of an unfinished corpus
        r = run("megatron_to_shards.py", prefix, "--out", tmp_path / "no", "--vocab", 1000)
        assert r.returncode == 1 and "a part of one" in r.stderr and len(list((tmp_path / "no").iterdir())) == 1, (
            r.stderr
        )
        shutil.rmtree(tmp_path / "no")
        assert not (tmp_path / f"o{kind}/progress.json").exists(), "progress.json remains"
        r = run("megatron_to_shards.py", prefix, "--out", tmp_path / f"d{kind}", "--vocab", 1000)
        corpus = json.loads((tmp_path / f"d{kind}/corpus.json").read_text())
        assert r.returncode == 0 and 80 <= corpus["val_tokens"] < 500, (
            "one percent of",
            sum(map(len, sequences)),
            "is",
            corpus["val_tokens"],
        )
        Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-100])
        r = run("megatron_to_shards.py", prefix, "--out", tmp_path / "short", "--vocab", 1000)
        assert r.returncode == 1 and "truncated" in r.stderr, r.stderr
        for size in (0, 20, 33, 400, len(index) - 1):
            Path(f"{prefix}.idx").write_bytes(index[:size])
            r = run("megatron_to_shards.py", prefix, "--out", tmp_path / "short", "--vocab", 1000)
            assert r.returncode == 1 and len(r.stderr.splitlines()) == 1, (size, r.stderr)


def test_output_files_may_be_links_and_devices_and_change_no_other_file(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_text("old")
    (tmp_path / "link").symlink_to("in/file")
    (tmp_path / "link.tmp").write_text("the user's")
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    for name in ("link", "pipe"):
        with open_output(tmp_path / name) as f:
            f.write(b"new")
    assert reader.communicate()[0] == b"new" and (tmp_path / "pipe").is_fifo(), "the pipe"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "in/file").read_text() == "new", "the link"
    try:
        with open_output(tmp_path / "link") as f:
            f.write(b"half")
            raise ValueError
    except ValueError:
        assert (tmp_path / "in/file").read_text() == "new", "what failed was written"
    assert (tmp_path / "link.tmp").read_text() == "the user's" and os.listdir(tmp_path / "in") == ["file"], os.listdir(
        tmp_path / "in"
    )
