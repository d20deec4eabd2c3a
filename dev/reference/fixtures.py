#!/usr/bin/env python3
"""
The format of the fixtures: one safetensors file for each case.

  NAME             F32, a weight under its name in a checkpoint
  grad.NAME        F64, its gradient
  loss             F64 [1]
  tokens           U16 [B*T + 1]
  __metadata__     config: the text of config.json; batch_size: B; seq_len: T

Requires nothing but Python. As a program, it unpacks a fixture into a directory that train_diffv2 reads: config.json
and model.safetensors for --init, tokens.bin for --train-data. It prints the batch size.

Usage: dev/reference/fixtures.py FIXTURE DIRECTORY
"""

import json
import struct
import sys
from pathlib import Path


def safetensors_bytes(tensors, metadata):
    """A file of {name: (dtype, shape, data)}: 8 bytes header length, the header padded to a multiple of 8, the data."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def safetensors_read(file):
    """{name: (dtype, shape, data)} in the order of the data, and the metadata."""
    (size,) = struct.unpack_from("<Q", file)
    header, data = json.loads(file[8 : 8 + size]), file[8 + size :]
    metadata = header.pop("__metadata__", {})
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in entries}, metadata


def is_weight(name):
    return name not in ("loss", "tokens") and not name.startswith("grad.")


def token_shard_bytes(data):
    """A shard of the uint16 layout: magic, version, count, 253 zeros; the tokens."""
    return struct.pack("<3i", 20240520, 1, len(data) // 2).ljust(1024, b"\0") + data


def unpack(path, directory):
    """Writes config.json, model.safetensors and tokens.bin. Returns the metadata."""
    tensors, metadata = safetensors_read(Path(path).read_bytes())
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(metadata["config"])
    weights = {name: tensor for name, tensor in tensors.items() if is_weight(name)}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(weights, {"format": "pt"}))
    (directory / "tokens.bin").write_bytes(token_shard_bytes(tensors["tokens"][2]))
    return metadata


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: fixtures.py FIXTURE DIRECTORY", file=sys.stderr)
        sys.exit(2)
    print(unpack(*sys.argv[1:])["batch_size"])
