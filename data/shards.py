"""Token shards (llmc/data/shards.h): a header of 256 int32, then the tokens.

narrow   magic 20240520, version 1: uint16      for vocabularies of up to 65536
wide     magic 20240801, version 7: uint32
"""

import os

import numpy as np
import xxhash
from outputs import replace, write_json

HEADER = 256
FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}


class ShardError(Exception):
    pass


def token_type(vocab_size):
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def write_shard(path, tokens):
    """Writes a shard atomically; returns its xxh64. tokens: an array of token_type."""
    magic = next(m for m, (_, dtype) in FORMATS.items() if dtype == tokens.dtype)
    header = np.zeros(HEADER, "<i4")
    header[:2] = magic, FORMATS[magic][0]
    header[2] = np.uint32(len(tokens)).view(np.int32)
    digest = xxhash.xxh64()
    with replace(path) as f:
        for part in (header, tokens):
            data = memoryview(part).cast("B")
            f.write(data)
            digest.update(data)
    return digest.hexdigest()


def new_shard(out, name, tokens):
    """Writes a shard of a corpus. Returns its entry in corpus.json."""
    return {"file": name, "tokens": len(tokens), "xxh64": write_shard(out / name, tokens)}


def write_corpus(out, shards, **about):
    """corpus.json. Returns the numbers of tokens for training and for validation."""
    train, val = (sum(s["tokens"] for s in shards if s["file"].startswith(kind)) for kind in ("train", "val"))
    sizes = {"train_tokens": train, "val_tokens": val, "shards": shards}
    write_json(out / "corpus.json", {"format": 1, "name": out.name, **about, **sizes})
    return train, val


def file_digest(path):
    digest = xxhash.xxh64()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def open_shard(path):
    """The tokens of a shard, mapped into memory."""
    size = os.path.getsize(path)
    if size < 4 * HEADER:
        raise ShardError(f"{path} has {size} bytes, less than the header of {4 * HEADER}: it is not a token shard")
    header = np.fromfile(path, "<i4", HEADER)
    if int(header[0]) not in FORMATS:
        raise ShardError(f"{path} begins with {header[0]}: it is not a token shard")
    version, dtype = FORMATS[int(header[0])]
    if header[1] != version:
        raise ShardError(f"{path} has version {header[1]}, expected {version}")
    count = int(header[2].view(np.uint32))
    if size != 4 * HEADER + count * dtype.itemsize:
        expected = 4 * HEADER + count * dtype.itemsize
        raise ShardError(f"{path} has {size} bytes, expected {expected} for the {count} tokens of its header")
    return np.memmap(path, dtype, "r", 4 * HEADER, count) if count else np.zeros(0, dtype)
