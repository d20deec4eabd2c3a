#!/usr/bin/env python3
"""
Write fixtures/<variant>_<a|b|c>/ from model.py, or with --check compare what is there with it.

Each is a checkpoint directory (config.json, model.safetensors) that also holds one batch
(tokens.bin, batch.json) and its loss and gradients in double precision (grads.safetensors).
"""

import json
import math
import struct
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

import model

FIXTURES = Path(__file__).resolve().parent / "fixtures"
TOLERANCE = 1e-12  # of a tensor's largest gradient; double precision in another order of summation
DTYPES = {"F32": "<f4", "F64": "<f8"}

# a: nothing divides anything, untied head. b: widths that are multiples of 8, tied head, T past a
# 64-wide tile of keys (65 is one past it), one KV head or as many as query heads. c: another rms_norm_eps,
# which diff_scalar's norm before o_proj follows and diff_v1's does not.
COLUMNS = ("B", "T", "L", "C", "F", "V", "NH", "NKV", "D")
SHAPES = {
    #                                B   T  L   C   F   V  NH NKV  D
    ("baseline", "a"): (3, 7, 2, 12, 10, 37, 6, 2, 8),
    ("baseline", "b"): (2, 65, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2", "a"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("diff_v2", "b"): (2, 72, 2, 16, 8, 40, 2, 1, 16),
    ("diff_v2_cross_group", "a"): (3, 7, 2, 12, 10, 37, 6, 3, 8),  # odd NKV: unequal groups
    ("diff_v2_cross_group", "b"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2_no_lambda", "a"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v2_no_lambda", "b"): (2, 65, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2_no_sigmoid", "a"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v2_no_sigmoid", "b"): (2, 65, 2, 16, 8, 40, 2, 1, 16),
    ("diff_v1", "a"): (2, 13, 2, 12, 10, 37, 8, 4, 8),  # 2 key pairs, each read twice
    ("diff_v1", "b"): (2, 72, 3, 16, 8, 40, 2, 2, 16),  # lambda_init of 3 layers
    ("diff_scalar", "a"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("diff_scalar", "b"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("off_by_one", "a"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("off_by_one", "b"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("sink", "a"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("sink", "b"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("gated_head", "a"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("gated_head", "b"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("gated_elem", "a"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("gated_elem", "b"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("diff_v1", "c"): (2, 13, 2, 12, 10, 37, 8, 4, 8),
    ("diff_scalar", "c"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
}
Size = namedtuple("Size", "tied theta eps")
SIZES = {"a": Size(False, 10000.0, 1e-5), "b": Size(True, 500.0, 1e-5), "c": Size(False, 10000.0, 0.02)}


def make_config(attention, size, T, L, C, F, V, NH, NKV, D):
    llama = attention == "baseline"  # the format writes a baseline as the Llama that it is
    kind = (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        if llama
        else {"architectures": ["DiffV2ForCausalLM"], "model_type": "diffv2", "attention": attention}
    )
    rest = (
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": None, "eos_token_id": None}
        if llama
        else {}
    )
    return {
        **kind,
        "vocab_size": V,
        "hidden_size": C,
        "num_hidden_layers": L,
        "num_attention_heads": NH,
        "num_key_value_heads": NKV,
        "head_dim": D,
        "intermediate_size": F,
        "max_position_embeddings": T,
        "rope_theta": size.theta,
        "rms_norm_eps": size.eps,
        "tie_word_embeddings": size.tied,
        "torch_dtype": "float32",
        **rest,
    }


def safetensors_bytes(tensors, dtype):
    """8 bytes header length, JSON header padded with spaces to a multiple of 8, then the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    arrays = [np.ascontiguousarray(t.detach().numpy(), DTYPES[dtype]) for t in tensors.values()]
    for name, array in zip(tensors, arrays):
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays)


def safetensors_arrays(data):
    """The arrays of such a file by name, in order of their data."""
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        raw = data[8 + size + begin : 8 + size + end]
        arrays[name] = np.frombuffer(raw, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def token_shard_bytes(tokens):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)  # magic, version of the uint16 layout, count
    return header.tobytes() + tokens.astype("<u2").tobytes()


def gradients(config, weights, tokens, targets):
    """`loss` [1], then the gradient of every tensor under its name."""
    weights = {name: t.clone().requires_grad_() for name, t in weights.items()}
    value = model.loss(config, weights, tokens, targets)
    value.backward()
    return {"loss": value.reshape(1), **{name: t.grad for name, t in weights.items()}}


def make_fixture(seed, variant, size, shape):
    """The files of one fixture: {file name: bytes}."""
    shape = dict(zip(COLUMNS, shape))
    B, T = shape.pop("B"), shape["T"]
    config = make_config(variant, SIZES[size], **shape)
    weights = model.init(config, seed)
    stream = np.random.RandomState(1000 + seed).random_sample(B * T + 1)
    stream = (stream * config["vocab_size"]).astype(np.int64)
    tokens = torch.from_numpy(stream[:-1].reshape(B, T))
    targets = torch.from_numpy(stream[1:].reshape(B, T))
    grads = gradients(config, weights, tokens, targets)
    for name, grad in grads.items():  # a gradient that is lost in rounding would test nothing
        assert grad.abs().max() > 1e-3, f"{variant}_{size}: {name} has too small a gradient"
    dump = lambda value: (json.dumps(value, indent=2) + "\n").encode()
    return {
        "config.json": dump(config),
        "model.safetensors": safetensors_bytes(weights, "F32"),
        "tokens.bin": token_shard_bytes(stream),
        "batch.json": dump({"batch_size": B, "seq_len": T}),
        "grads.safetensors": safetensors_bytes(grads, "F64"),
    }


def relative_difference(data, expected):
    """The largest difference of two gradient files, relative to each tensor's largest element."""
    header_bytes = len(expected) - sum(a.nbytes for a in safetensors_arrays(expected).values())
    if len(data) != len(expected) or data[:header_bytes] != expected[:header_bytes]:
        return math.inf
    found, wanted = safetensors_arrays(data), safetensors_arrays(expected)
    # numpy's max, because Python's may drop a NaN
    return np.max([np.max(np.abs(found[n] - a)) / np.max(np.abs(a)) for n, a in wanted.items()])


def check_fixture(directory, files):
    """What is wrong with the committed files, one line each, and their relative difference."""
    present = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else []
    if present != sorted(files):
        return [f"{directory.name}: has {present}, expected {sorted(files)}"], math.nan
    faults = [
        f"{directory.name}/{name}: differs"
        for name, expected in files.items()
        if name != "grads.safetensors" and (directory / name).read_bytes() != expected
    ]
    difference = relative_difference((directory / "grads.safetensors").read_bytes(), files["grads.safetensors"])
    if not difference <= TOLERANCE:
        faults.append(f"{directory.name}/grads.safetensors: differs by {difference:.1e}")
    return faults, difference


def main(arguments):
    if arguments not in ([], ["--check"]):
        print("usage: make_fixtures.py [--check]", file=sys.stderr)
        return 2
    faults, total_bytes = [], 0
    for seed, ((variant, size), shape) in enumerate(SHAPES.items(), 1):
        directory = FIXTURES / f"{variant}_{size}"
        files = make_fixture(seed, variant, size, shape)
        if arguments:
            found, difference = check_fixture(directory, files)
            faults += found
            note = f"difference {difference:.1e}"
        else:
            directory.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (directory / name).write_bytes(data)
            note = "written"
        total_bytes += sum(map(len, files.values()))
        print(f"{directory.name:24}", " ".join(f"{n}={x}" for n, x in zip(COLUMNS, shape)), note)
    known = {f"{variant}_{size}" for variant, size in SHAPES}
    strays = {p.name for p in FIXTURES.iterdir()} - known if FIXTURES.is_dir() else set()
    faults += [f"{name}: no such fixture in the table" for name in sorted(strays)]
    for line in faults:
        print(line, file=sys.stderr)
    print(f"{len(SHAPES)} fixtures, {total_bytes} bytes, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
