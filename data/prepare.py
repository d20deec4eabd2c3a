#!/usr/bin/env python3
"""Writes a corpus directory, for --train-data and --val-data, from documents.

  data/prepare.py CORPUS --out DIR [options]       a corpus of the Hugging Face Hub: fineweb, fineweb-edu, dclm,
                                                   tinystories, c4
  data/prepare.py PATH... --out DIR [options]      files, or directories of files: .txt .md .jsonl .parquet, also with
                                                   .gz or .zst

The directory contains val_000000.bin, train_000001.bin and so on, tokenizer.json, tokenizer.bin (the table for the C
program) and, written last, corpus.json. Documents are read in the order of the file names. The same input gives the
same bytes, with any number of workers and after any number of interruptions: the same command continues after the last
complete shard.

A text file is one document, or several with --delimiter. Documents for validation are spread over the corpus; of a
single document, it is the last part (data/validation.py). A warning says when they are more than 10% of the text. Files
of a directory with other suffixes, names in it that begin with a dot, and links to directories are skipped and listed.
A file that occurs twice, also under another name, is an error: its text could be in training and in validation. Empty
documents are skipped. Input that is not UTF-8, not JSON, has no text, or exceeds --max-document is an error, or is
skipped and counted with --skip-bad.
"""

import codecs
import fcntl
import json
import os
import queue
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

from prepare_options import checked_arguments, fail, find_inputs

if __name__ == "__main__":
    options = checked_arguments(__doc__)  # mistakes are reported before packages are installed
python_environment.ensure("data")

import numpy as np
import tokenizers
import token_table
from outputs import write_json
from shards import file_digest, new_shard, token_type, write_corpus
from sources import HUB, BadInput, Documents, fetch, first_line, hub
from validation import BYTES_PER_TOKEN, Choice, Sample, bytes_per_token

STATE = "progress.json"
VALIDATION = "validation.part"  # the tokens of val_000000.bin so far
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
BATCH_BYTES = 4 << 20
BPE_SAMPLE = 200e6


class Bytes:
    """Each byte is a token. Byte 0 separates documents, which must not contain it."""

    name, vocab_size, separator, separator_text = "bytes", 256, 0, "\\0"

    def encode(self, texts):
        out = []
        for text in texts:
            data = text.encode()
            if 0 in data:
                raise BadInput("a document has a byte 0, which separates documents: use another --tokenizer")
            out.append(np.frombuffer(data, np.uint8))
        return out


class Library:
    """A tokenizer.json. The text of a special token in a document is encoded as text."""

    def __init__(self, path, name, separator, required=True):
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception
            raise BadInput(f"{path} is not a tokenizer.json: {first_line(error)}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.name = name
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        texts = [separator] if separator else [s for s in SEPARATORS if s in vocab]
        if not texts and not required:
            texts = [None]
        if not texts or (texts[0] and texts[0] not in vocab):
            raise BadInput(
                f"the tokenizer has no token '{separator}'"
                if separator
                else "the tokenizer has no known separator of documents: specify --separator"
            )
        self.separator, self.separator_text = vocab.get(texts[0]), texts[0]

    def encode(self, texts):
        return [np.asarray(e.ids, np.uint32) for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def find_tokenizer(options, out, inputs):
    """The tokenizer. Writes its tokenizer.json into the directory."""
    path = out / "tokenizer.json"
    name = f"bpe-{options.train_bpe}" if options.train_bpe else options.tokenizer
    if name == "bytes":
        return Bytes()
    if not path.exists():
        temporary = out / "tokenizer.json.tmp"
        temporary.unlink(missing_ok=True)  # of a killed process, or a link, which is not followed
        if options.train_bpe:
            train_bpe(options, inputs, out, temporary)
        else:
            write_tokenizer_json(name, temporary)
        os.replace(temporary, path)
    tokenizer = Library(path, Path(name).name if os.path.exists(name) else name, options.separator)
    token_table.read_tokenizer(path)  # exits if the C program cannot decode: before the documents are tokenized
    return tokenizer


def write_tokenizer_json(name, path):
    """A copy of the tokenizer.json of GPT-2, a file, or a repository of the Hub."""
    if name == "gpt2":
        import gpt2_tokenizer

        gpt2_tokenizer.write_tokenizer(path)
    elif os.path.exists(name):
        path.write_bytes(Path(name).read_bytes().removeprefix(codecs.BOM_UTF8))
    else:
        try:
            shutil.copyfile(hub().hf_hub_download(name, "tokenizer.json"), path)
        except Exception as error:
            kinds = "bytes, gpt2, a file, or a reachable repository of the Hub"
            raise BadInput(f"--tokenizer {name} is not {kinds}: {first_line(error)}") from None


def train_bpe(options, inputs, out, path):
    """Trains a byte-level BPE with GPT-2's pattern on the first BPE_SAMPLE bytes of the documents."""

    def texts():
        size = 0
        for source in inputs:
            for text, _ in Documents(fetch(source, out / "downloads"), source.name, options):
                if text:
                    size += len(text.encode())
                    yield text
                if size >= BPE_SAMPLE:
                    return

    print(f"training a BPE of {options.train_bpe} tokens on up to {BPE_SAMPLE / 1e6:.0f} MB", flush=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options.train_bpe,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SEPARATORS[0]],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))


class Reader(threading.Thread):
    """Reads ahead: a queue of (texts, position after them, share of all bytes)."""

    def __init__(self, inputs, options, out, place):
        super().__init__(daemon=True)
        self.inputs, self.options, self.out, self.place = inputs, options, out, place
        self.queue, self.bad, self.empty = queue.Queue(4), 0, 0
        self.sizes = [max(1, i.size) for i in inputs]

    def run(self):
        try:
            self.read()
            self.queue.put(None)
        except BaseException as error:  # the consumer raises it again
            self.queue.put(error)

    def read(self):
        total, done = sum(self.sizes), 0
        for number, source in enumerate(self.inputs):
            if number >= self.place[0]:
                path = fetch(source, self.out / "downloads")
                self.read_file(number, source, path, done / total, self.sizes[number] / total)
                if source.path is None:
                    path.unlink(missing_ok=True)
            done += self.sizes[number]

    def read_file(self, number, source, path, before, part):
        documents = Documents(path, source.name, self.options)
        skip = self.place[1] if number == self.place[0] else 0
        texts, size, count, share = [], 0, 0, 0.0
        for text, share in documents:
            count += 1
            if count <= skip:
                continue
            texts.append(text or "")
            size += len(text or "")
            if size >= BATCH_BYTES:
                self.queue.put((texts, (number, count), before + part * min(share, 1), documents.bad))
                texts, size = [], 0
        self.queue.put((texts, (number + 1, 0), before + part, documents.bad))


class Corpus:
    """Collects tokens into shards. A later start continues from `state`."""

    def __init__(self, out, options, tokenizer, state):
        self.out, self.options, self.tokenizer, self.state = out, options, tokenizer, state
        self.dtype = token_type(tokenizer.vocab_size)
        self.parts, self.count = [], 0
        self.fresh = {"documents": 0, "text_bytes": 0, "empty": 0}
        self.done_tokens = sum(s["tokens"] for s in state["shards"])
        self.val_tokens = state["val_tokens"]  # in the file, beginning with those of earlier starts
        self.val = self.open_validation(out / VALIDATION, self.val_tokens * self.dtype.itemsize)

    def open_validation(self, path, size):
        """The file, with its first `size` bytes."""
        if size == 0:
            path.unlink(missing_ok=True)
        elif path.is_symlink() or not path.exists() or path.stat().st_size < size:
            raise BadInput(f"{path} has changed: --force starts again")
        file = open(path, "r+b" if size else "x+b")
        file.truncate(size)
        file.seek(size)
        return file

    def add(self, text, ids, for_validation):
        parts = [np.array([self.tokenizer.separator], self.dtype), ids.astype(self.dtype)]
        if for_validation:
            self.val.write(np.concatenate(parts))
            self.val_tokens += len(ids) + 1
        else:
            self.parts += parts
            self.count += len(ids) + 1
        self.fresh["documents"] += 1
        self.fresh["text_bytes"] += len(text.encode())

    def full(self):
        return self.count >= self.options.shard_tokens

    def reached(self):
        """Whether --max-tokens is reached."""
        most = self.options.max_tokens
        return bool(most) and self.done_tokens + self.count + self.val_tokens >= most

    def validated(self):
        """Whether there are documents for validation."""
        return self.val_tokens > 0 or any(s["file"].startswith("val") for s in self.state["shards"])

    def enough(self):
        return self.reached() and self.validated()

    def settle(self, place):
        """Saves that the documents before `place` are in shards or in the file for validation, or skipped."""
        self.val.flush()
        os.fsync(self.val.fileno())
        self.state["val_tokens"] = self.val_tokens
        self.state["place"] = list(place)
        for key, value in self.fresh.items():
            self.state[key] += value
            self.fresh[key] = 0
        write_json(self.out / STATE, self.state)

    def write(self, place):
        """Writes the collected tokens as a shard. The documents from `place` on follow it."""
        if self.count:
            shards = self.state["shards"]
            name = f"train_{len(shards) + 1:06d}.bin"  # val_000000.bin is written last
            shards.append(new_shard(self.out, name, np.concatenate(self.parts)))
        self.settle(place)
        self.done_tokens += self.count
        self.parts, self.count = [], 0

    def write_validation(self):
        """Writes val_000000.bin, the first shard of the list."""
        if self.val_tokens:
            tokens = np.memmap(self.val, self.dtype, "r", 0, (self.val_tokens,))
            self.state["shards"].insert(0, new_shard(self.out, "val_000000.bin", tokens))
            self.state["val_tokens"] = 0
            write_json(self.out / STATE, self.state)
        self.val.close()
        (self.out / VALIDATION).unlink()


class Progress:
    def __init__(self, share):
        self.begin, self.first, self.shown = time.monotonic(), share, 0.0

    def show(self, share, tokens, last=False):
        now = time.monotonic()
        if not last and now - self.shown < (0.5 if sys.stdout.isatty() else 10):
            return
        self.shown = now
        seconds, part = now - self.begin, share - self.first
        left = f", {seconds * (1 - share) / part:.0f} s left" if part > 0.001 and not last else ""
        end = "\n" if last or not sys.stdout.isatty() else "\033[K\r"
        speed = tokens / max(seconds, 1e-9) / 1e6
        print(f"{100 * share:5.1f}%  {tokens / 1e6:.2f}M tokens, {speed:.2f}M/s in this run{left}", end=end, flush=True)


def tokenize(corpus, inputs, validation, options, out):
    state = corpus.state
    reader = Reader(inputs, options, out, state["place"])
    progress = Progress(sum(reader.sizes[: state["place"][0]]) / sum(reader.sizes))
    reader.start()
    file_documents, file_number = (state["place"][1], state["place"][0])
    new_tokens = 0
    while True:
        batch = reader.queue.get()
        if batch is None:
            break
        if isinstance(batch, BaseException):
            raise batch
        texts, place, share, bad = batch
        whole_file = place[1] == 0
        number = place[0] - 1 if whole_file else place[0]
        if number != file_number:
            file_number, file_documents = number, 0
        pieces = validation.pieces(number, file_documents, texts)
        encoded = iter(corpus.tokenizer.encode([text for own in pieces for text, _ in own]))
        for index, own in enumerate(pieces):
            corpus.fresh["empty"] += not own
            for text, for_validation in own:
                ids = next(encoded)
                if len(ids) == 0:
                    continue
                corpus.add(text, ids, for_validation or (corpus.reached() and not corpus.validated()))
                new_tokens += len(ids) + 1
            if corpus.full() or corpus.enough():
                corpus.write((number, file_documents + index + 1))
            if corpus.enough():
                progress.show(share, new_tokens, last=True)
                return
        file_documents += len(texts)
        if whole_file:
            state["bad"][str(number)] = bad
        progress.show(share, new_tokens)
    corpus.write((len(inputs), 0))
    progress.show(1.0, new_tokens, last=True)


def expected_tokens(inputs, options, hub):
    """An estimate of the tokens of a corpus of the Hub from the published numbers."""
    text = hub.tokens * BYTES_PER_TOKEN * (sum(i.size for i in inputs) / hub.download or 1)
    tokens = max(1, int(text / bytes_per_token(options)))
    return min(tokens, options.max_tokens) if options.max_tokens else tokens


def load_state(out, wanted, force):
    """The state of an earlier start of the same command, or a new state."""
    counts = dict.fromkeys(("val_tokens", "documents", "text_bytes", "empty"), 0)
    empty = {"options": wanted, "shards": [], "place": [0, 0], **counts, "bad": {}}
    if force:
        patterns = f"train_*.bin val_*.bin {STATE} {VALIDATION} corpus.json tokenizer.json tokenizer.bin"
        for pattern in patterns.split():
            for path in out.glob(pattern):
                path.unlink(missing_ok=True)
    path = out / STATE
    if not path.exists():
        others = [p.name for p in out.glob("*") if p.suffix == ".bin" or p.name in ("corpus.json", "tokenizer.json")]
        if others:
            found = f"{out} has {others[0]} and no {STATE}"
            raise BadInput(f"{found}: it is another corpus; use another --out, or --force to replace it")
        return empty
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        was = state["options"]
        different = [k for k in wanted if was.get(k) != wanted[k]]
        if different and not state["shards"]:  # at most a tokenizer exists
            (out / "tokenizer.json").unlink(missing_ok=True)
            return empty
        if different:
            k = different[0]
            was, now = (f"{v!r}"[:200] for v in (was.get(k), wanted[k]))
            raise BadInput(f"{out} was started with {k} {was}, now {now}: use another --out, or --force to start again")
        if empty.keys() - state.keys() or [type(part) for part in state["place"]] != [int, int]:
            raise ValueError
        for i, shard in enumerate(state["shards"]):
            file, _ = out / shard["file"], shard["tokens"] + 0
            if not file.exists() or file_digest(file) != shard["xxh64"]:
                raise BadInput(f"{file} has changed (shard {i} of {len(state['shards'])}): --force starts again")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise BadInput(f"{path} is damaged: --force starts again") from None
    return state


def prepare(options):
    name, inputs = find_inputs(options)
    out = Path(options.out)
    if name:
        options.text_field = HUB[name].field if options.text_field == "text" else options.text_field
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / ".lock", "a")  # locked until the program exits
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadInput(f"another prepare.py is writing to {out}: wait for it, or use another --out") from None
    kept = ("tokenizer train_bpe separator text_field val_tokens shard_tokens max_tokens max_document skip_bad").split()
    wanted = {k: getattr(options, k) for k in kept} | {
        "delimiter": repr(options.delimiter),
        "inputs": [[i.name, i.size, i.version] for i in inputs],
    }
    wanted["tokenizer_xxh64"] = file_digest(options.tokenizer) if os.path.isfile(options.tokenizer) else None
    state = load_state(out, wanted, options.force)
    if (out / "corpus.json").exists():
        tokens = sum(s["tokens"] for s in state["shards"])
        print(f"{out} is finished: {tokens} tokens in {len(state['shards'])} shards, with correct checksums")
        return
    write_json(out / STATE, state)
    if state["shards"]:
        tokens = sum(s["tokens"] for s in state["shards"])
        print(f"continuing after {len(state['shards'])} shards with {tokens} tokens", flush=True)
    tokenizer = find_tokenizer(options, out, inputs)
    corpus = Corpus(out, options, tokenizer, state)
    if not corpus.enough():
        sample = lambda: Sample(options, expected_tokens(inputs, options, HUB[name]))
        validation = sample() if name else Choice(options, inputs)
        tokenize(corpus, inputs, validation, options, out)
    corpus.write_validation()
    finish(out, name or " ".join(options.inputs), tokenizer, options, state)


def finish(out, source, tokenizer, options, state):
    if not state["shards"]:
        raise BadInput("no document with text")
    kinds = {s["file"].partition("_")[0] for s in state["shards"]}
    if len(kinds) < 2:
        purpose, advice = ("training", "higher") if kinds == {"train"} else ("validation", "lower")
        documents = f"all {state['documents']} documents are for {purpose}"
        raise BadInput(f"{documents}: add others, or use a {advice} --val-tokens, with --force")
    _, reason = token_table.write_table(
        "bytes" if tokenizer.name == "bytes" else str(out / "tokenizer.json"),
        str(out / "tokenizer.bin"),
        tokenizer.separator,
    )
    train, val = write_corpus(
        out,
        state["shards"],
        source=source,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        separator={"token": tokenizer.separator, "text": tokenizer.separator_text, "place": "before"},
        documents=state["documents"],
        text_bytes=state["text_bytes"],
        versions={"tokenizers": tokenizers.__version__, "numpy": np.__version__},
    )
    shutil.rmtree(out / "downloads", ignore_errors=True)
    for shard in state["shards"]:
        print(f"{shard['xxh64']}  {shard['tokens']:>12}  {shard['file']}")
    bad = sum(state["bad"].values())
    skipped = f"; {state['empty']} empty or bad documents skipped ({bad} bad)" if state["empty"] else ""
    print(
        f"{out}: {state['documents']} documents, {state['text_bytes']} bytes of text, {train} tokens for training and "
        f"{val} for validation{skipped}"
    )
    if reason:
        print(f"the trainer cannot encode prompts with this tokenizer: {reason}; use --prompt-tokens")


def main(options):
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if options.workers > 1 else "false"
    try:
        prepare(options)
    except BadInput as error:
        fail(error)
    except OSError as error:
        fail(f"{error.filename or options.out}: {error.strerror or error}: the same command continues")
    except KeyboardInterrupt:
        fail("stopped: the same command continues after the last complete shard")


if __name__ == "__main__":
    main(options)
