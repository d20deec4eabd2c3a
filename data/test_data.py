#!/usr/bin/env python3
"""Tests of the scripts in data/ on small generated inputs. The last line is "N passed, N failed".

test_data.py [WORD...]  only tests whose name contains one of the words
"""

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
import tempfile
import time
import traceback
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

import chat
import numpy as np
import pyarrow
import pyarrow.parquet
import shards
import test_choices
import test_synthetic
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


def check(condition, *what):
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


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
    check(corpus["tokenizer"] == "bytes" and tokens[0] == 0, "a byte corpus begins with", tokens[:3])
    return bytes(tokens.astype(np.uint8)).decode().split("\0")[1:]


def digests(directory):
    return {p.name: shards.file_digest(p) for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".json")}


SMALL = ("--tokenizer", "bytes", "--val-tokens", "3000", "--shard-tokens", "20000")


def all_formats_give_the_same_documents(d):
    documents = make_documents(400)
    write_jsonl(d / "in/a.jsonl", documents[:80])
    write_jsonl(d / "in/b.jsonl.gz", documents[80:160])
    write_jsonl(d / "in/c.json.zst", documents[160:240])
    write_parquet(d / "in/d.parquet", documents[240:320])
    (d / "in/e.txt").write_text("\f".join(documents[320:390]))
    (d / "in/f.txt.gz").write_bytes(gzip.compress("\f".join(documents[390:]).encode()))
    (d / "in/ignored.bin").write_bytes(b"\0")
    r = prepare(d / "in", "--out", d / "out", *SMALL, "--delimiter", "\\f")
    check(r.returncode == 0, r.stderr)
    check(byte_documents(d / "out") == documents, "the documents differ")
    corpus = json.loads((d / "out/corpus.json").read_text())
    check(
        corpus["documents"] == 400 and corpus["text_bytes"] == sum(len(t.encode()) for t in documents),
        corpus["documents"],
        corpus["text_bytes"],
    )
    check(
        all(shards.file_digest(d / "out" / s["file"]) == s["xxh64"] for s in corpus["shards"]),
        "a digest does not agree",
    )
    check(
        3000 <= corpus["val_tokens"] < 4000 and len(corpus["shards"]) > 3, corpus["val_tokens"], len(corpus["shards"])
    )


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
        check(shards.file_digest(mask) == shard["mask"], "the digest of a mask differs")
        bits = np.unpackbits(np.fromfile(mask, np.uint8)[1024:], bitorder="little")[: shard["tokens"]].astype(bool)
        found.append(shards.open_shard(directory / shard["file"])[bits])
    return np.concatenate(found)


def chats_become_tokens_of_which_those_of_the_assistant_count(d):
    chats = list(chat_lines(60))
    (d / "in.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in chats))
    (d / "chatml.jinja").write_text(CHATML)
    template = ("--chat-template", d / "chatml.jinja")
    r = prepare("--chat", d / "in.jsonl", "--out", d / "bytes", *SMALL, *template)
    check(r.returncode == 0, r.stderr)
    render = lambda m: "".join(f"<|im_start|>{x['role']}\n{x['content']}<|im_end|>\n" for x in m)
    check(byte_documents(d / "bytes") == [render(m) for m in chats], "the texts differ")
    said = [f"{x['content']}<|im_end|>\n" for m in chats for x in m if x["role"] == "assistant"]
    check(bytes(counted_tokens(d / "bytes").astype(np.uint8)).decode() == "".join(said), "other tokens count")
    check(run("inspect", d / "bytes", "--verify").returncode == 0, "inspect --verify")
    trainer = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
    options = "--doc-mask --steps 2 --seq-len 64 --batch-size 2 --out".split()
    r = subprocess.run([trainer, "--train-data", d / "bytes", *options, d / "run"], capture_output=True, text=True)
    check(r.returncode == 0 and f"{len(counted_tokens(d / 'bytes', 'train'))} of them count" in r.stdout, r.stderr)
    r = run("../dev/reference/export_hub.py", d / "run/checkpoints/step_00000002", d / "hub")
    check(r.returncode == 0 and (d / "hub/chat_template.jinja").read_text() == CHATML, r.stderr)
    (d / "bytes/train_000001.bin.mask").unlink()
    r = subprocess.run([trainer, "--train-data", d / "bytes", *options, d / "run2"], capture_output=True, text=True)
    check(r.returncode == 1 and "train_000001.bin.mask is missing" in r.stderr and not (d / "run2").exists(), r.stderr)
    # a tokenizer.json whose special tokens the template writes, with the template beside it
    write_jsonl(d / "text.jsonl", make_documents(200))
    r = prepare(d / "text.jsonl", "--out", d / "bpe", "--train-bpe", 300, "--val-tokens", 500)
    check(r.returncode == 0, r.stderr)
    tokenizer = Tokenizer.from_file(str(d / "bpe/tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (d / "model").mkdir()
    tokenizer.save(str(d / "model/tokenizer.json"))
    settings = {
        "chat_template": "{{ bos_token }}" + CHATML,
        "bos_token": {"content": "<bos>"},
        "eos_token": "<|im_end|>",
    }
    (d / "model/tokenizer_config.json").write_text(json.dumps(settings))
    command = ("--chat", d / "in.jsonl", "--out", d / "out", "--tokenizer", d / "model/tokenizer.json")
    r = prepare(*command, "--val-tokens", 500)
    check(r.returncode == 0, r.stderr)
    stored = {"bos_token": "<bos>", "eos_token": "<|im_end|>", "turn_end": tokenizer.token_to_id("<|im_end|>")}
    check(read_corpus(d / "out")[1]["chat"] == stored, read_corpus(d / "out")[1])
    check(tokenizer.decode(counted_tokens(d / "out").tolist(), False) == "".join(said), "other tokens count")
    check((d / "out/chat_template.jinja").read_text() == settings["chat_template"], "the template is not kept")
    r = run("chat_prompts.py", d / "out", d / "in.jsonl")
    check(r.returncode == 0 and not r.stderr, r.stderr)
    tokens = json.loads(r.stdout.splitlines()[1])["tokens"]
    separator = read_corpus(d / "out")[1]["separator"]["token"]
    options = "--doc-mask --steps 1 --seq-len 64 --batch-size 2 --out".split()
    subprocess.run([trainer, "--train-data", d / "out", *options, d / "run3"], capture_output=True, check=True)
    with open(d / "run3/log.jsonl", "a") as f:
        f.write('{"kind": "val", "st\n')  # a broken line
    r = run("../dev/reference/export_hub.py", d / "run3/checkpoints/step_00000001", d / "hub3")
    check(r.returncode == 0 and not r.stderr, r.stderr)
    about = json.loads((d / "hub3/tokenizer_config.json").read_text())
    texts = about["bos_token"], about["eos_token"], about["pad_token"]
    check(texts == ("<bos>", "<|im_end|>", "<|endoftext|>") and "add_bos_token" not in about, about)
    ends = json.loads((d / "hub3/generation_config.json").read_text())["eos_token_id"]
    check(ends == [separator, stored["turn_end"]], ends)
    check(tokens[0] == separator, "the prompt does not follow a separator")
    check(tokenizer.decode(tokens[1:], False) == f"<bos>{render(chats[1])}<|im_start|>assistant\n", "another prompt")
    (d / "model/tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<s>"}))
    r = prepare(*command, "--val-tokens", 500)
    check(r.returncode == 1 and "started with chat_tokens" in r.stderr, r.stderr)
    # a corpus of an earlier version, which did not store the tokens of the template
    (d / "model/tokenizer_config.json").write_text(json.dumps(settings))
    state, corpus = (json.loads((d / "out" / name).read_text()) for name in ("progress.json", "corpus.json"))
    del corpus["chat"], state["options"]["chat_tokens"], state["options"]["tokenizer_xxh64"]
    for name, value in (("progress.json", state), ("corpus.json", corpus)):
        (d / "out" / name).write_text(json.dumps(value))
    r = prepare(*command, "--val-tokens", 500)
    check(r.returncode == 0 and "is finished" in r.stdout, r.stderr)
    r = run("chat_prompts.py", d / "out", d / "in.jsonl")
    check(r.returncode == 0 and "did not store bos_token and eos_token" in r.stderr, r.stderr)


def bad_chats_are_refused_with_one_line(d):
    say = lambda role, text: {"role": role, "content": text}
    (d / "chatml.jinja").write_text(CHATML)
    for value, words in (
        ({"messages": [{"content": "a"}]}, "line 2 has no role in message 1"),
        ({"messages": [say("user", "a"), say("robot", "b")]}, "line 2 has the unknown role 'robot'"),
        ({"messages": [say("user", "a"), say("assistant", None)]}, "line 2 has no text as content of message 2"),
        ({"messages": [say("user", "a")]}, "line 2 has no message of the assistant"),
        ({"text": "a"}, "line 2 has no list of messages"),
    ):
        good = {"messages": [say("user", "a"), say("assistant", "b")]}
        (d / "in.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(value) + "\n")
        r = prepare("--chat", d / "in.jsonl", "--out", d / "out", *SMALL, "--chat-template", d / "chatml.jinja")
        check(r.returncode == 1 and r.stderr.count("\n") == 1 and words in r.stderr, words, r.stderr)
        check(not list((d / "out").glob("*.bin*")), "a shard was written")
        shutil.rmtree(d / "out")
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
            check(not value.conversation(messages), "accepted:", words)
        except ValueError as error:
            check(words in str(error), error)
    value = chat.Chat("{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}", {})
    message = say("user", "'<é")
    check(value.render([message, {}], False) == json.dumps(message, ensure_ascii=False), "tojson is another")
    for error, words in ((hub_errors.LocalEntryNotFoundError("offline"), "offline"), (OSError("refused"), "refused")):
        with unittest.mock.patch.object(chat, "hub") as hub:
            hub.return_value.hf_hub_download.side_effect = error
            try:
                check(not chat.find_chat("owner/name", d / "chatml.jinja"), "without the tokenizer's settings")
            except BadInput as error:
                check(f"tokenizer_config.json of --tokenizer owner/name on the Hub: {words}" in str(error), error)
    r = prepare("--chat", d / "in.jsonl", "--out", d / "none", *SMALL)
    check(r.returncode == 1 and "has no chat template: give --chat-template FILE" in r.stderr, r.stderr)
    (d / "last.jinja").write_text("{% for m in messages %}{{ m.content if loop.last else 'x' }}{% endfor %}")
    (d / "in.jsonl").write_text(json.dumps({"messages": [say(r, "abc") for r in ("user", "assistant") * 2]}) + "\n")
    r = prepare("--chat", d / "in.jsonl", "--out", d / "out", *SMALL, "--chat-template", d / "last.jinja")
    check(r.returncode == 1 and "is written differently by the chat template" in r.stderr, r.stderr)


def the_tokenizer_is_checked_before_the_documents_are_read(d):
    write_jsonl(d / "in.jsonl", make_documents(50))
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="the"))
    tokenizer.save(str(d / "t.json"))
    command = (d / "in.jsonl", "--out", d / "o", "--val-tokens", 100, "--tokenizer", d / "t.json")
    expect_error(prepare(*command), d / "o", "no known separator")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(d / "t.json"))
    expect_error(prepare(*command), d / "o", "its model is WordLevel; only BPE is supported")
    check(not list((d / "o").glob("*.bin")), "the documents were tokenized before")
    expect_error(prepare(*command[:-1], d / "o/tokenizer.json", "--force"), d / "o", "is inside --out")
    check((d / "o/tokenizer.json").exists(), "--force removed the tokenizer")
    for damaged in ("[]", '{"shards": [], "options": 1}', "[" * 99999):
        (d / "o/progress.json").write_text(damaged)
        expect_error(prepare(*command), d / "o", "progress.json is damaged: --force")


def corpora_of_the_hub_are_read_by_their_layout(d):
    documents = make_documents(150)
    names = {
        "fineweb": "sample/10BT/00{}_00000.parquet",
        "fineweb-edu": "sample/10BT/00{}_00000.parquet",
        "tinystories": "data/train-0000{}-of-00004.parquet",
        "dclm": "global-shard_01_of_10/local-shard_0_of_10/shard_0000000{}_processed.jsonl.zst",
        "c4": "en/c4-train.0000{}-of-01024.json.gz",
    }
    check(set(names) == set(HUB), "a corpus has no test")
    for name, pattern in names.items():
        for i in range(3):
            path = d / name / pattern.format(i)
            (write_parquet if path.suffix == ".parquet" else write_jsonl)(path, documents[50 * i : 50 * i + 50])
        (d / name / "README.md").write_text("no document")
        r = prepare(name, "--source-dir", d / name, "--out", d / f"out_{name}", *SMALL, "--max-tokens", 1e6)
        check(r.returncode == 0, name, r.stderr)
        check(byte_documents(d / f"out_{name}") == documents, name, "the documents differ")
    r = prepare("c4", "--source-dir", d / "fineweb", "--out", d / "none", *SMALL)
    check(r.returncode == 1 and "allenai/c4" in r.stderr, r.stderr)


def the_number_of_workers_does_not_change_the_corpus(d):
    write_jsonl(d / "in.jsonl", make_documents(3000))
    for workers in (1, 2, 5):
        options = f"--train-bpe 600 --workers {workers} --val-tokens 5000 --shard-tokens 20000".split()
        r = prepare(d / "in.jsonl", "--out", d / str(workers), *options)
        check(r.returncode == 0, r.stderr)

    def plain(n):
        found = digests(d / str(n))
        del found["corpus.json"], found["progress.json"]  # these contain the directory
        return found

    check(plain(1) == plain(2) == plain(5) and len(plain(1)) > 4, plain(1), plain(2))


def a_killed_run_resumes_to_the_same_corpus(d):
    write_jsonl(d / "a.jsonl", make_documents(6000))
    write_parquet(d / "b.parquet", make_documents(3000, 2))
    options = "--tokenizer bytes --val-tokens 3000 --shard-tokens 100000 --out".split()
    command = [d / "a.jsonl", d / "b.parquet", *options]
    begin = time.monotonic()
    r = prepare(*command, d / "whole/c")
    whole = time.monotonic() - begin
    check(r.returncode == 0, r.stderr)
    killed = partial = 0
    for i in range(12):
        if (d / "c/corpus.json").exists():
            break
        process = subprocess.Popen(
            [sys.executable, str(HERE / "prepare.py"), *map(str, command), str(d / "c")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        time.sleep(whole * (0.3 + 0.06 * i))
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        killed += process.returncode == -9
        partial += (d / "c/progress.json").exists() and not (d / "c/corpus.json").exists()
        check(process.returncode in (-9, 0), err)
    check(killed >= 2, "only", killed, "runs were killed")
    r = prepare(*command, d / "c")
    check(r.returncode == 0 and not list((d / "c").glob("*.tmp")), r.stderr, list((d / "c").iterdir()))
    check(digests(d / "c") == digests(d / "whole/c"), "the corpora differ;", partial, "partial ones")
    r = prepare(*command, d / "c")
    check(r.returncode == 0 and "finished" in r.stdout, r.stdout, r.stderr)
    r = prepare(*command[:-2], "90000", "--out", d / "c")
    check(r.returncode == 1 and "shard_tokens 100000" in r.stderr, r.stderr)
    with open(d / "c/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        r = prepare(*command, d / "c")
        check(r.returncode == 1 and "another prepare.py" in r.stderr, r.stderr)
    before = (d / "a.jsonl").stat()
    os.utime(d / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    r = prepare(*command, d / "c")
    check(r.returncode == 1 and "started with inputs" in r.stderr and len(r.stderr) < 1000, r.stderr)
    os.utime(d / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    with open(d / "c/train_000002.bin", "r+b") as f:
        f.seek(5000)
        f.write(b"\xff")
    r = prepare(*command, d / "c")
    check(r.returncode == 1 and "train_000002.bin has changed" in r.stderr, r.stderr)
    r = prepare(*command, d / "c", "--force")
    check(r.returncode == 0 and digests(d / "c") == digests(d / "whole/c"), "after --force", r.stderr)


def expect_error(r, out, words):
    lines = r.stderr.strip().splitlines()
    check(r.returncode in (1, 2) and words in r.stderr, "status", r.returncode, r.stderr)
    check(len(lines) == 1 or r.returncode == 2, "not one line:", r.stderr)
    if out.exists():
        check(not (out / "corpus.json").exists() and not list(out.glob("*.tmp")), "left:", list(out.iterdir()))
        for path in [*out.glob("train_*.bin"), *out.glob("val_*.bin")]:
            shards.open_shard(path)


def invalid_input_is_a_one_line_error(d):
    good = make_documents(200)
    write_jsonl(d / "good.jsonl", good)
    lines = (d / "good.jsonl").read_bytes().splitlines()
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
        (d / name).write_bytes(data)
        expect_error(
            prepare(d / name, "--out", d / f"o_{name}", *SMALL, "--max-document", 1e6, "--delimiter", "\\f"),
            d / f"o_{name}",
            words,
        )
    write_parquet(d / "cut.parquet", good)
    whole = (d / "cut.parquet").read_bytes()
    (d / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    expect_error(prepare(d / "cut.parquet", "--out", d / "o1", *SMALL), d / "o1", "damaged or truncated")
    write_parquet(d / "field.parquet", good, "body")
    expect_error(prepare(d / "field.parquet", "--out", d / "o2", *SMALL), d / "o2", "--text-field")
    for name in "utf8.jsonl json.jsonl deep.jsonl field.jsonl surrogate.jsonl long.jsonl nul.jsonl".split():
        r = prepare(d / name, "--out", d / f"s_{name}", *SMALL, "--max-document", 1e6, "--skip-bad")
        check(
            r.returncode == 0 and byte_documents(d / f"s_{name}") == good and "(1 bad)" in r.stdout,
            name,
            r.stderr,
            r.stdout[-200:],
        )
    expect_error(prepare(d / "good.jsonl", "--out", d / "o3", *SMALL[:2], "--val-tokens", 1e7), d / "o3", "all")
    expect_error(prepare(d / "nothing", "--out", d / "o4", *SMALL), d / "o4", "does not exist")
    ranks = prepare(d / "good.jsonl", "--out", d / "o8", "--gpt2-ranks", d / "good.jsonl")
    expect_error(ranks, d / "o8", "is not a token in base64 and its rank")
    expect_error(
        prepare(d / "good.jsonl", "--out", d / "o5", "--tokenizer", d / "good.jsonl"), d / "o5", "not a tokenizer.json"
    )
    expect_error(prepare(d / "good.jsonl", "--out", d / "o6", "--val-tokens", "0"), d / "o6", "--val-tokens 0")
    expect_error(
        prepare(d / "good.jsonl", "--out", d / "o6", "--delimiter", "\\x"), d / "o6", "use \\xHH for each byte"
    )
    expect_error(prepare(d / "good.jsonl", "--out", d / "good.jsonl", *SMALL), d / "o7", "good.jsonl")


def a_small_corpus_has_one_percent_of_validation_documents(d):
    documents = make_documents(2000)
    write_jsonl(d / "in.jsonl", documents)
    r = prepare(d / "in.jsonl", "--out", d / "o", "--tokenizer", "bytes")
    check(r.returncode == 0, r.stderr)
    corpus = json.loads((d / "o/corpus.json").read_text())
    share = corpus["val_tokens"] / (corpus["val_tokens"] + corpus["train_tokens"])
    check(0.005 < share < 0.02 and byte_documents(d / "o") == documents, "validation has", share)
    r = prepare(d / "in.jsonl", "--out", d / "o", "--tokenizer", "bytes")
    check(r.returncode == 0 and "finished" in r.stdout, "the same command again:", r.stdout, r.stderr)
    # two documents are enough; a single one is an error before anything is written
    for name in "ab":
        (d / f"two/{name}.txt").parent.mkdir(exist_ok=True)
        (d / f"two/{name}.txt").write_text(f"{name} document\n")
    r = prepare(d / "two", "--out", d / "o2", "--train-bpe", 300)
    check(r.returncode == 0 and json.loads((d / "o2/corpus.json").read_text())["documents"] == 2, r.stderr)
    expect_error(prepare(d / "two/a.txt", "--out", d / "o3"), d / "o3", "--delimiter")
    check(not (d / "o3").exists(), "a directory was made")
    r = prepare(d / "two/a.txt", "--out", d / "o3", "--tokenizer", "bytes", "--delimiter", " ")
    check(r.returncode == 0 and byte_documents(d / "o3") == ["a", "document\n"], r.stderr)
    write_jsonl(d / "one.jsonl", documents[:1])
    expect_error(
        prepare(d / "one.jsonl", "--out", d / "o4", "--tokenizer", "bytes"), d / "o4", "only one document: add others"
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


def a_corpus_of_packages_has_no_repetitions_and_validation_shards_by_source(d):
    once = [" ".join(f"{word}{i}" for word in WORDS) * 8 for i in range(40)]
    license = "This is the text of a license, which is the same in all documents, and longer than a short heading.\n\n"
    (d / "debs").mkdir()
    make_package(d / "debs", "git-doc", [license + text for text in once] + [once[0], "short"])
    words = ["--sources", "git", "--debs", d / "debs", "--tokenizer", "bytes", "--workers", 1]
    r = run("offline_corpus.py", "--out", d / "one", *words)
    check(r.returncode == 0 and "git-doc 1:2-3" in r.stdout, r.stdout + r.stderr)
    files = [s["file"] for s in json.loads((d / "one/corpus.json").read_text())["shards"]]
    check(files == ["val_000000_all.bin", "val_000001_git.bin", "train_000002.bin"], files)
    documents = byte_documents(d / "one")
    check(sorted(t.removeprefix(license) for t in documents) == sorted(once), "documents are lost or repeated")
    check(sum(t.startswith(license) for t in documents) == 1, "a license is repeated")
    about = json.loads((d / "one/sources.json").read_text())
    check(about["sources"]["git"]["packages"] == {"git-doc": ["1:2-3", "GPL-2"]}, about)
    check(f"fingerprint {about['fingerprint'][:16]}" in r.stdout, r.stdout)
    check(run("offline_corpus.py", "--out", d / "two", *words).returncode == 0, "a second time")
    same = [(d / name / "corpus.json").read_text().replace(name, "") for name in ("one", "two")]
    check(same[0] == same[1], "the same packages give another corpus")
    r = run("offline_corpus.py", "--out", d / "two", "--sources", "prose")
    check(r.returncode == 1 and "two.jsonl has the sources git: remove it, or " in r.stderr, r.stderr)
    r = run("offline_corpus.py", "--out", d / "three", "--sources", "got")
    check(r.returncode == 2 and "'got' is not one of prose, " in r.stderr, r.stderr)


def skipped_files_are_listed(d):
    (d / "in").mkdir()
    for name in ("a.txt", "b.TXT", "notes.rst", "data.csv", "odd\n.x"):
        (d / "in" / name).write_text(f"text of {name[:1]}")
    r = prepare(d / "in", "--out", d / "o", "--tokenizer", "bytes")
    check(r.returncode == 0 and byte_documents(d / "o") == ["text of a", "text of b"], r.stderr)
    check(
        len(r.stderr.splitlines()) == 1 and all(n in r.stderr for n in ("notes.rst", "data.csv", "odd\\n.x")), r.stderr
    )
    for i in range(30):
        (d / f"in/{i}.log").write_text("")
    r = prepare(d / "in", "--out", d / "p", "--tokenizer", "bytes")
    check(r.returncode == 0 and len(r.stderr) < 1000 and "and 25 more" in r.stderr, r.stderr)
    (d / "in/links").mkdir()
    (d / "in/links/dead.txt").symlink_to("nowhere")
    expect_error(prepare(d / "in", "--out", d / "r", "--tokenizer", "bytes"), d / "r", "dead.txt is a link to nowhere")
    shutil.rmtree(d / "in/links")
    if os.geteuid():
        (d / "in/locked").mkdir(mode=0)
        expect_error(prepare(d / "in", "--out", d / "r", "--tokenizer", "bytes"), d / "r", "locked: Permission denied")
        (d / "in/locked").rmdir()
    inside = (d / "in", "--out", d / "in/corpus", "--tokenizer", "bytes")  # whose files are no input
    check(prepare(*inside).returncode == 0 and "is finished" in prepare(*inside).stdout, "--out inside of the input")
    expect_error(prepare(d / "in", "--out", d / "in"), d / "in", "is also --out")
    shutil.rmtree(d / "in/corpus")
    for name in ("a.txt", "b.TXT"):
        (d / "in" / name).unlink()
    r = prepare(d / "in", "--out", d / "q", "--tokenizer", "bytes")
    expect_error(r, d / "q", "has no files that end in")
    check("0.log" in r.stderr, r.stderr)


def mistakes_are_found_before_packages_are_installed_and_notes_are_printed_once(d):
    (d / "in").mkdir()
    (d / "in/a.rst").write_text("text")
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
    ):
        r = subprocess.run([*without_packages, "--out", d / "o", *arguments], capture_output=True, text=True, cwd=d)
        expect_error(r, d / "o", words)
    for name in "bc":
        (d / f"in/{name}.txt").write_text(f"{name} document\n")
    base = getattr(sys, "_base_executable", sys.executable)  # which has no packages, and starts that which has them
    command = [base, HERE / "prepare.py", "--out", d / "o", "--tokenizer", "bytes", "in"]
    r = subprocess.run(command, capture_output=True, text=True, cwd=d)
    check(r.returncode == 0 and r.stderr.count("skipped") == 1 and r.stderr.count("\n") == 1, r.stderr)


def a_line_of_a_gigabyte_requires_little_memory(d):
    with open(d / "long.jsonl", "wb") as f:
        f.write(b'{"text": "')
        f.truncate(1_000_000_000)  # a hole: zeros

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    begin = time.monotonic()
    r = prepare(d / "long.jsonl", "--out", d / "o", *SMALL, preexec_fn=limit)
    expect_error(r, d / "o", "--max-document")
    check(time.monotonic() - begin < 60, "that took", time.monotonic() - begin, "s")


def disk_space_is_checked_before_reading(d):
    with open(d / "huge.txt", "wb") as f:
        f.truncate(shutil.disk_usage(d).free * 3)  # a hole
    r = prepare(d / "huge.txt", "--out", d / "o", *SMALL, "--delimiter", ".")
    expect_error(r, d / "o", "free disk space")
    with open(d / "huge.txt", "wb") as f:
        f.write("".join(make_documents(400)).encode())
    r = prepare(d / "huge.txt", "--out", d / "o", *SMALL, "--delimiter", ".")
    check(r.returncode == 0, r.stderr)
    # a start that wrote only its tokenizer does not affect the next one
    write_jsonl(d / "in.jsonl", make_documents(100))
    r = prepare(d / "in.jsonl", "--out", d / "p", "--train-bpe", 300, "--separator", "none")
    check(r.returncode == 1 and (d / "p/tokenizer.json").exists(), r.stderr)
    r = prepare(d / "in.jsonl", "--out", d / "p", "--train-bpe", 280, "--val-tokens", 1000)
    check(r.returncode == 0 and json.loads((d / "p/corpus.json").read_text())["vocab_size"] == 280, r.stderr)


def a_run_resumes_from_its_complete_shards_after_a_full_disk(d):
    write_jsonl(d / "in.jsonl", make_documents(3000))

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # smaller than the second shard

    options = "--tokenizer bytes --val-tokens 3000 --shard-tokens 100000 --out".split()
    command = (d / "in.jsonl", *options, d / "o")
    r = prepare(*command, preexec_fn=limit)
    expect_error(r, d / "o", "continues")
    check([p.name for p in (d / "o").glob("*.bin")] == ["val_000000.bin"], list((d / "o").iterdir()))
    r = prepare(*command)
    check(r.returncode == 0 and byte_documents(d / "o") == make_documents(3000), r.stderr)


def special_tokens_in_documents_are_text(d):
    documents = ["one <|endoftext|> two", *make_documents(300)]
    write_jsonl(d / "in.jsonl", documents)
    for place in ("before", "after"):
        r = prepare(
            d / "in.jsonl", "--out", d / place, "--train-bpe", 400, "--val-tokens", 2000, "--separator-place", place
        )
        check(r.returncode == 0, r.stderr)
        tokens, corpus = read_corpus(d / place)
        separator = corpus["separator"]["token"]
        check(int((tokens == separator).sum()) == len(documents), "separators:", int((tokens == separator).sum()))
        check(tokens[0 if place == "before" else -1] == separator and corpus["separator"]["place"] == place, place)
        tokenizer = Tokenizer.from_file(str(d / place / "tokenizer.json"))
        pieces = np.split(tokens, np.flatnonzero(tokens == separator))
        texts = [tokenizer.decode([t for t in p.tolist() if t != separator], skip_special_tokens=False) for p in pieces]
        check([t for t in texts if t] == documents, "the documents do not come back")


def the_trainer_reads_a_corpus_and_generates_its_text(d):
    trainer = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
    write_jsonl(d / "in.jsonl", make_documents(2000))
    for name, choice in (("bpe", ("--train-bpe", 500)), ("bytes", ("--tokenizer", "bytes"))):
        r = prepare(d / "in.jsonl", "--out", d / name, *choice, "--val-tokens", 3000)
        check(r.returncode == 0, r.stderr)
        run_directory = d / f"run_{name}"
        options = "--doc-mask --steps 3 --sample-every 3 --seq-len 64 --batch-size 2".split()
        command = [trainer, "--train-data", d / name, "--val-data", d / name, *options, "--prompt", "the naïve"]
        r = subprocess.run([*command, "--out", run_directory], capture_output=True, text=True)
        check(r.returncode == 0 and "the naïve" in r.stdout, r.stderr, r.stdout[-300:])
        checkpoint = run_directory / "checkpoints/step_00000003"
        r = subprocess.run(
            [trainer, "--init", checkpoint, "--generate", "5", "--prompt", "don't  数学"],
            capture_output=True,
            text=True,
        )
        check(r.returncode == 0 and r.stdout.startswith("don't  数学"), r.stderr, r.stdout)


def shards_are_printed_and_verified(d):
    write_jsonl(d / "in.jsonl", make_documents(500))
    r = prepare(d / "in.jsonl", "--out", d / "o", *SMALL)
    check(r.returncode == 0, r.stderr)
    r = run("inspect", d / "o", "--tokens", 40, "--verify")
    count = json.loads((d / "o/corpus.json").read_text())["documents"]
    found = sum(
        int(line.split(" of them separators")[0].rsplit(" ", 1)[1])
        for line in r.stdout.splitlines()
        if "separators" in line
    )
    check(
        r.returncode == 0 and found == count and repr(make_documents(1)[0][:20])[1:-1] in r.stdout,
        r.stdout[:500],
        r.stderr,
    )
    largest = max(len(text.encode()) + 1 for text in byte_documents(d / "o"))
    check(f"{largest} (largest); 0% in documents of 1024 or more, 0%" in r.stdout, largest, r.stdout[:500])
    corpus = json.loads((d / "o/corpus.json").read_text())
    (d / "o/corpus.json").write_text(json.dumps({**corpus, "vocab_size": 100}))
    r = run("inspect", d / "o", "--verify")
    check(r.returncode == 1 and "the vocabulary has 100" in r.stdout, r.stdout)
    (d / "o/corpus.json").write_text(json.dumps(corpus))
    check(run("inspect", d / "o", "--tokens", 0).stdout.count("ends:") == 0, "--tokens 0 prints tokens")
    (d / "o/train_000001.bin").rename(d / "o/train_000009.bin")
    r = run("inspect", d / "o", "--verify")
    words = ("train_000001.bin: is missing", "train_000009.bin: is not in corpus.json")
    check(r.returncode == 1 and all(w in r.stdout for w in words), r.stdout, r.stderr)
    (d / "o/corpus.json").write_text("[]")
    r = run("inspect", d / "o")
    check(r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "corpus.json is damaged" in r.stderr, r.stderr)
    (d / "short.bin").write_bytes((d / "o/val_000000.bin").read_bytes()[:-2])
    r = run("inspect", d / "short.bin")
    check(r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "of its header" in r.stderr, r.stderr)


def megatron_corpora_are_converted(d):
    rng = np.random.default_rng(1)
    for kind, dtype in ((8, "<u2"), (4, "<i4")):
        sequences = [rng.integers(0, 1000, rng.integers(0, 60)).astype(dtype) for _ in range(300)]
        starts = [0, *sorted(rng.choice(np.arange(1, 300), 120, replace=False).tolist()), 300]
        lengths = np.array([len(s) for s in sequences], "<i4")
        places = np.concatenate([[0], np.cumsum(lengths.astype("<i8"))[:-1]]) * np.dtype(dtype).itemsize
        prefix = d / f"m{kind}"
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
        r = run("megatron_to_shards.py", prefix, "--out", d / f"o{kind}", *options)
        check(r.returncode == 0, r.stderr)
        tokens, corpus = read_corpus(d / f"o{kind}")
        check(
            np.array_equal(tokens, expected) and corpus["separator"] == {"token": 999, "place": "after"},
            "the tokens differ",
        )
        r = run("megatron_to_shards.py", prefix, "--out", d / "small", "--vocab", 900)
        check(r.returncode == 1 and "outside --vocab 900" in r.stderr and not list((d / "small").iterdir()), r.stderr)
        (d / "no.json").write_text('{"model": {"type": "Unigram"}}')
        r = run("megatron_to_shards.py", prefix, "--out", d / "no", "--vocab", 1000, "--tokenizer", d / "no.json")
        check(r.returncode == 1 and "only BPE" in r.stderr and not list((d / "no").iterdir()), r.stderr)
        (d / "no/progress.json").write_text("{}")  # of an unfinished corpus
        r = run("megatron_to_shards.py", prefix, "--out", d / "no", "--vocab", 1000)
        check(r.returncode == 1 and "a part of one" in r.stderr and len(list((d / "no").iterdir())) == 1, r.stderr)
        shutil.rmtree(d / "no")
        check(not (d / f"o{kind}/progress.json").exists(), "progress.json remains")
        r = run("megatron_to_shards.py", prefix, "--out", d / f"d{kind}", "--vocab", 1000)
        corpus = json.loads((d / f"d{kind}/corpus.json").read_text())
        check(
            r.returncode == 0 and 80 <= corpus["val_tokens"] < 500,
            "one percent of",
            sum(map(len, sequences)),
            "is",
            corpus["val_tokens"],
        )
        Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-100])
        r = run("megatron_to_shards.py", prefix, "--out", d / "short", "--vocab", 1000)
        check(r.returncode == 1 and "truncated" in r.stderr, r.stderr)
        for size in (0, 20, 33, 400, len(index) - 1):
            Path(f"{prefix}.idx").write_bytes(index[:size])
            r = run("megatron_to_shards.py", prefix, "--out", d / "short", "--vocab", 1000)
            check(r.returncode == 1 and len(r.stderr.splitlines()) == 1, size, r.stderr)


def output_files_may_be_links_and_devices_and_change_no_other_file(d):
    (d / "in").mkdir()
    (d / "in/file").write_text("old")
    (d / "link").symlink_to("in/file")
    (d / "link.tmp").write_text("the user's")
    os.mkfifo(d / "pipe")
    reader = subprocess.Popen(["cat", d / "pipe"], stdout=subprocess.PIPE)
    for name in ("link", "pipe"):
        with open_output(d / name) as f:
            f.write(b"new")
    check(reader.communicate()[0] == b"new" and (d / "pipe").is_fifo(), "the pipe")
    check((d / "link").is_symlink() and (d / "in/file").read_text() == "new", "the link")
    try:
        with open_output(d / "link") as f:
            f.write(b"half")
            raise ValueError
    except ValueError:
        check((d / "in/file").read_text() == "new", "what failed was written")
    check((d / "link.tmp").read_text() == "the user's" and os.listdir(d / "in") == ["file"], os.listdir(d / "in"))


TESTS = (
    output_files_may_be_links_and_devices_and_change_no_other_file,
    all_formats_give_the_same_documents,
    corpora_of_the_hub_are_read_by_their_layout,
    the_number_of_workers_does_not_change_the_corpus,
    a_killed_run_resumes_to_the_same_corpus,
    invalid_input_is_a_one_line_error,
    a_small_corpus_has_one_percent_of_validation_documents,
    a_corpus_of_packages_has_no_repetitions_and_validation_shards_by_source,
    skipped_files_are_listed,
    mistakes_are_found_before_packages_are_installed_and_notes_are_printed_once,
    a_line_of_a_gigabyte_requires_little_memory,
    disk_space_is_checked_before_reading,
    a_run_resumes_from_its_complete_shards_after_a_full_disk,
    chats_become_tokens_of_which_those_of_the_assistant_count,
    bad_chats_are_refused_with_one_line,
    the_tokenizer_is_checked_before_the_documents_are_read,
    special_tokens_in_documents_are_text,
    the_trainer_reads_a_corpus_and_generates_its_text,
    shards_are_printed_and_verified,
    megatron_corpora_are_converted,
    *test_choices.TESTS,
    *test_synthetic.TESTS,
)


def main():
    passed = failed = 0
    names = {test: test.__name__.replace("_", " ") for test in TESTS}
    for word in sys.argv[1:]:
        if not any(word in name for name in names.values()):
            sys.exit(f"test_data.py: no test's name contains '{word}'")
    for test, name in names.items():
        begin = time.monotonic()
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        directory = Path(tempfile.mkdtemp(prefix="diffv2_data_"))
        try:
            test(directory)
            passed += 1
            print(f"ok   data scripts: {name} ({time.monotonic() - begin:.1f} s)", flush=True)
        except Exception as error:
            failed += 1
            frame = traceback.extract_tb(error.__traceback__)[
                1 if len(traceback.extract_tb(error.__traceback__)) > 1 else 0
            ]
            print(
                f"     line {frame.lineno}: {type(error).__name__}: {str(error)[:800]}\nFAIL data scripts: {name}",
                flush=True,
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


main()
