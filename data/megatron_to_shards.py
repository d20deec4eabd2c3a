#!/usr/bin/env python3
"""Converts a corpus in Megatron's indexed format (PREFIX.bin and PREFIX.idx) to a corpus directory.

  data/megatron_to_shards.py PREFIX --out DIR --vocab V [options]

  --vocab V          vocabulary size; larger ids are an error
  --separator ID     the token between documents
  --separator-place  before or after each document (after: Megatron's end-of-document token)
  --add-separator    inserts separators (default: the tokens already have them)
  --tokenizer FILE   the tokenizer.json of the tokens, copied to the directory
  --val-tokens N, --shard-tokens N   as for data/prepare.py

The index has 9 bytes "MMIDIDX\\0\\0", a uint64 version (1), a byte for the token type (4: int32, 8: uint16; also 1, 2,
3, 5), uint64 counts of sequences and documents, then int32 lengths of the sequences, their int64 offsets in bytes, and
the int64 index of the first sequence of each document.
"""

import argparse
import os
import shutil
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

import numpy as np
import token_table
from outputs import write_json
from shards import append_shard, token_type, write_corpus

STATE = "progress.json"  # makes a directory an unfinished corpus
MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Damaged(Exception):
    pass


def read_index(path):
    """(dtype of the tokens, lengths, offsets, first sequences of documents)"""
    data = Path(path).read_bytes()
    if len(data) < 34 or data[:9] != MAGIC:
        raise Damaged(f"{path} is not a Megatron index: it does not start with {MAGIC!r}")
    version, kind, sequences, documents = struct.unpack_from("<QBQQ", data, 9)
    if version != 1 or kind not in TYPES:
        raise Damaged(f"{path} has version {version} and token type {kind}: supported are 1 and {sorted(TYPES)}")
    if len(data) < 34 + 12 * sequences + 8 * documents:
        counts = f"{sequences} sequences and {documents} documents"
        raise Damaged(f"{path} has {len(data)} bytes, too few for the {counts} of its header")
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    places = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    starts = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    if documents < 1 or starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any() or (lengths < 0).any():
        raise Damaged(f"{path} is damaged: its documents do not cover its sequences")
    return np.dtype(TYPES[kind]), lengths, places, starts


def documents_of(prefix):
    """Yields the tokens of each document."""
    dtype, lengths, places, starts = read_index(f"{prefix}.idx")
    size = os.path.getsize(f"{prefix}.bin")
    if len(lengths) and ((places < 0).any() or (places > size - lengths.astype(np.int64) * dtype.itemsize).any()):
        raise Damaged(f"{prefix}.bin has {size} bytes, and the index has offsets beyond them: it is truncated")
    data = np.memmap(f"{prefix}.bin", np.uint8, "r") if size else np.zeros(0, np.uint8)
    for begin, end in zip(starts[:-1], starts[1:]):
        parts = [data[places[i] : places[i] + lengths[i] * dtype.itemsize].view(dtype) for i in range(begin, end)]
        yield np.concatenate(parts) if parts else np.zeros(0, dtype)


def convert(options):
    if options.val_tokens is None:
        _, lengths, _, _ = read_index(f"{options.prefix}.idx")
        options.val_tokens = max(1, min(1_000_000, int(lengths.sum(dtype=np.int64)) // 100))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.bin")) or any((out / name).exists() for name in ("corpus.json", "tokenizer.json", STATE)):
        raise Damaged(f"{out} already has a corpus, or a part of one: use another --out")
    if options.tokenizer:
        token_table.read_tokenizer(options.tokenizer)  # exits if it is damaged
    dtype = token_type(options.vocab)
    separator = np.array([options.separator or 0], dtype)
    shards, parts, count, documents = [], [], 0, 0

    try:
        write_json(out / STATE, {"source": f"Megatron {options.prefix}"})  # the trainer refuses the unfinished corpus
        for document in documents_of(options.prefix):
            if len(document) == 0:
                continue
            if int(document.max()) >= options.vocab or int(document.min()) < 0:
                worst = int(document.max()) if int(document.max()) >= options.vocab else int(document.min())
                raise Damaged(f"document {documents + 1} has token {worst}, outside --vocab {options.vocab}")
            tokens = document.astype(dtype)
            if options.add_separator:
                parts += [separator, tokens] if options.separator_place == "before" else [tokens, separator]
            else:
                parts.append(tokens)
            count += len(tokens) + options.add_separator
            documents += 1
            if count >= (options.shard_tokens if shards else options.val_tokens):
                append_shard(out, shards, parts)
                parts, count = [], 0
        if count:
            append_shard(out, shards, parts)
        if len(shards) < 2:
            tokens = shards[0]["tokens"] if shards else 0
            raise Damaged(f"all {tokens} tokens are for validation: lower --val-tokens {options.val_tokens}")
        if options.tokenizer:
            shutil.copyfile(options.tokenizer, out / "tokenizer.json")
            token_table.write_table(options.tokenizer, str(out / "tokenizer.bin"), options.separator)
        known = None if options.separator is None else {"token": options.separator, "place": options.separator_place}
        train, val = write_corpus(
            out,
            shards,
            source=f"Megatron {options.prefix}",
            vocab_size=options.vocab,
            tokenizer=options.tokenizer,
            separator=known,
            documents=documents,
        )
        (out / STATE).unlink()
    except BaseException:
        names = [*(shard["file"] for shard in shards), "tokenizer.json", "tokenizer.bin", "corpus.json", STATE]
        for name in names:  # no incomplete corpus
            (out / name).unlink(missing_ok=True)
        raise
    print(f"{out}: {documents} documents, {train} tokens for training and {val} for validation")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--vocab", required=True, type=int, metavar="V")
    parser.add_argument("--separator", type=int, metavar="ID")
    parser.add_argument("--separator-place", choices=("before", "after"), default="after")
    parser.add_argument("--add-separator", action="store_true")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--val-tokens", type=float, metavar="N")
    parser.add_argument("--shard-tokens", type=float, default=1e8, metavar="N")
    options = parser.parse_args()
    options.prefix = options.prefix.removesuffix(".bin").removesuffix(".idx")
    if options.add_separator and options.separator is None:
        parser.error("--add-separator requires --separator ID")
    if options.vocab < 1 or not 0 <= (options.separator or 0) < options.vocab:
        parser.error(f"--separator {options.separator}: must be a token below --vocab {options.vocab}")
    for name, value in (("val-tokens", options.val_tokens), ("shard-tokens", options.shard_tokens)):
        if value is not None and not 1 <= value < 2**32:
            parser.error(f"--{name} {value:g}: must be from 1 to 2^32 - 1")
    try:
        convert(options)
    except Damaged as error:
        sys.exit(f"megatron_to_shards.py: {error}")
    except OSError as error:
        sys.exit(f"megatron_to_shards.py: {error.filename or options.out}: {error.strerror or error}")


if __name__ == "__main__":
    main()
