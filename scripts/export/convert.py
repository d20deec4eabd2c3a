#!/usr/bin/env python3
"""Converts a trained baseline to another attention, or to twice the heads, with the function of the baseline.

  scripts/export/convert.py BASE --attention NAME OUT   a variant
  scripts/export/convert.py BASE --heads 2NH OUT        a baseline with twice the heads

BASE is a Llama, Mistral, Ministral, Qwen3 or Mixtral of the Hugging Face Hub, or a checkpoint of a baseline. OUT is
for --init: a new directory with config.json, model.safetensors and the tokenizer of BASE. It appears whole or not at
all.

  pairs    Both query heads of a pair have the weights of a head of BASE: a_2i = a_2i+1. Their gradients have
           opposite signs: a pair separates by itself.
  factors  Wlambda, the lambda of a layer and Wgate are 0, so that sigmoid gives 1/2, and the identity 0. o_proj is
           multiplied by a power of two, which rounds nothing.
  2 NH     Pairs; the columns of o_proj are Wo/2 + R and Wo/2 - R in F32. R is random, of deviation 0.02 / sqrt(2 L):
           with equal columns the gradients of both heads would be equal, and they would never separate.
  sinks    -4, which is not exact: a head is multiplied by 1 - 1 / (1 + exp(4 + z)), where z is the log-sum-exp of its
           logits. A lower start has a lower error, and at -20 a gradient that does not move it.
"""

import argparse
import json
import math
import os
import shutil
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import python_environment
from lab import cli

np, xxhash = python_environment.Later("numpy"), python_environment.Later("xxhash")

# New tensors of each layer: the value, and the shape of H heads of width D, and hidden size C
LAMBDAS = {"lambda_proj.weight": (0, "HC")}
HEAD_GATES, ELEMENT_GATES = {"gate_proj.weight": (0, "HC")}, {"gate_proj.weight": (0, "DC")}
# name: (whether heads become pairs, the factor of o_proj, new tensors), or the reason why there is no exact start
STARTS = {
    "baseline": (True, 0.5, {}),
    "diff_v2": (True, 2, LAMBDAS),
    "diff_v2_cross_group": "the heads of a pair read different keys and values",
    "diff_v2_no_lambda": "with factor 1 a pair of equal heads gives 0",
    "diff_v2_no_sigmoid": (True, 1, LAMBDAS),
    "diff_v2_layer_lambda": (True, 2, {"lambda": (0, "1")}),
    "diff_v2_gated_head": (True, 4, LAMBDAS | HEAD_GATES),
    "diff_v2_gated_elem": (True, 4, LAMBDAS | ELEMENT_GATES),
    "diff_v2_norm": "it normalizes the heads before o_proj",
    "diff_grouped_2": "2 signal heads share a noise head, which can equal one of them only",
    "diff_grouped_4": "4 signal heads share a noise head, which can equal one of them only",
    "diff_v1": "it normalizes the heads before o_proj",
    "diff_v1_no_norm": "the heads of a pair read different keys",
    "diff_scalar": "it normalizes the heads before o_proj",
    "off_by_one": "its softmax has an extra logit of 0",
    "sink": (False, 1, {"sinks": (-4, "H")}),
    "gated_head": (False, 2, HEAD_GATES),
    "gated_elem": (False, 2, ELEMENT_GATES),
}
# model_type: (keys that must be there, since the class has other defaults; keys of features that it has; defaults)
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
CLASSES = {
    "llama": ("", "layer_types", {}),
    "ministral": ("sliding_window num_key_value_heads", "sliding_window layer_types", {}),
    "mistral": ("sliding_window num_key_value_heads", "sliding_window", {}),
    "qwen3": ("num_key_value_heads head_dim", "sliding_window layer_types use_qk_norm", {"use_qk_norm": True}),
    "mixtral": ("num_key_value_heads rms_norm_eps rope_theta", "sliding_window num_local_experts", EXPERTS),
}
FEATURES = "sliding_window layer_types use_qk_norm yoco sparse_blocks router_bias num_local_experts"
TYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "F64": "<f8"}


def fail(message):
    cli.fail("convert.py", message)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8-sig"))


def read_config(base):
    """config.json of BASE, as that of a diffv2."""
    path = base / "config.json"
    given = read_json(path)
    config, kind = {key: value for key, value in given.items() if value is not None}, given.get("model_type")
    if config.get("attention", "baseline") != "baseline":
        fail(f"{base} has the attention {config['attention']}: only a baseline can be converted")
    if kind not in CLASSES and "attention" not in config:
        fail(f"{path}: model_type is {kind!r}; supported are {', '.join(CLASSES)}")
    required, own, defaults = ("", FEATURES, {}) if "attention" in config else CLASSES[kind]
    for key in required.split():
        if key not in given and key not in config.get("rope_parameters", {}):
            fail(f"{path}: the key {key} is missing, and model_type is {kind!r}, which requires it")
    for key in FEATURES.split():
        if config.get(key) and key not in own.split():
            fail(f"{path}: {key} is {config[key]!r}, but model_type is {kind!r}, which does not have it")
    if kind == "qwen3":
        first = 0 if "layer_types" in config else config.get("max_window_layers", 0)
        if not config.get("use_sliding_window") or first >= config["num_hidden_layers"]:
            config.pop("sliding_window", None)
        elif first:
            fail(f"{path}: max_window_layers is {first}: supported are windows in all layers, or in none")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return defaults | config


def verify(base):
    """Compares the files of a checkpoint with the checksums of its trainer_state.json."""
    state = base / "trainer_state.json"
    checksums = read_json(state)["checksums"] if state.exists() else {}
    for name in set(checksums) - {"optimizer.safetensors"}:
        with (base / name).open("rb") as file:
            found = [xxhash.xxh3_64_hexdigest(piece) for piece in iter(lambda: file.read(64 << 20), b"")]
        if found != checksums[name]["xxh3_64"]:
            fail(f"{base / name} does not match its checksum: restore it")


def read_weights(base):
    """Yields (name, type, elements) of model.safetensors, or of the files of its index. BF16 is read as 16 bits."""
    index = base / "model.safetensors.index.json"
    sharded = index.exists() and not (base / "model.safetensors").exists()
    for name in sorted(set(read_json(index)["weight_map"].values())) if sharded else ["model.safetensors"]:
        data = np.memmap(base / name, np.uint8, "r")
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        for tensor, about in header.items():
            elements = data[8 + size :][slice(*about["data_offsets"])].view(TYPES[about["dtype"]])
            yield tensor, about["dtype"], elements.reshape(about["shape"])


def converted(weights, config, attention):
    """Yields (name, type, elements) of each tensor of OUT."""
    twice, factor, new = STARTS[attention]
    H, D, C = (config[key] for key in ("num_attention_heads", "head_dim", "hidden_size"))
    shapes = {"HC": (H, C), "DC": (H * D, C), "H": (H,), "1": (1,)}
    for name, dtype, array in weights:
        query, output = (name.endswith(f"self_attn.{of}_proj.weight") for of in "qo")
        if (query or output) and array.shape != ((H * D, C) if query else (C, H * D)):
            fail(f"{name} has the shape {array.shape}, but config.json has {H} heads of {D}, hidden_size {C}")
        if query and twice:
            array = np.repeat(array.reshape(H, D, C), 2, 0).reshape(2 * H * D, C)  # each head twice
        elif output:
            numbers = (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array
            numbers = numbers * np.float32(factor)
            array = (numbers.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else numbers.astype(array.dtype)
        if output and attention == "baseline":
            random = np.random.Generator(np.random.PCG64(int(name.split(".")[2])))
            R = 0.02 / math.sqrt(2 * config["num_hidden_layers"]) * random.standard_normal(array.shape)
            heads = np.stack([numbers + R, numbers - R], 1).reshape(C, 2, H, D).swapaxes(1, 2)
            dtype, array = "F32", heads.reshape(C, 2 * H * D).astype("<f4")
        yield name, dtype, array
        for added, (value, shape) in new.items() if output else ():
            yield name.replace("o_proj.weight", added), "F32", np.full(shapes[shape], value, "<f4")


def write_weights(path, tensors, size):
    """Writes a safetensors file, with a header padded to `size` bytes, since it precedes the tensors."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    with path.open("wb") as file:
        file.seek(8 + size)
        for name, dtype, array in tensors:
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
            file.write(np.ascontiguousarray(array).data)
            end += array.nbytes
        file.seek(0)
        file.write(struct.pack("<Q", size) + json.dumps(header).encode().ljust(size))
        os.fsync(file.fileno())


def convert(base, out, attention, heads):
    if isinstance(STARTS[attention], str):
        fail(f"--attention {attention} has no exact start from a baseline: {STARTS[attention]}")
    config = read_config(base)
    wanted = config["num_attention_heads"] * (2 if attention == "baseline" else 1)
    if heads not in (None, wanted):
        fail(f"--heads {heads}: {base} has {config['num_attention_heads']} heads; use --heads {wanted}")
    if out.exists():
        fail(f"{out} exists: remove it, or specify another OUT")
    verify(base)
    weights = list(read_weights(base))
    size = sum(3 * len(json.dumps(name)) + 500 for name, _, _ in weights)  # and at most two new tensors for each
    size += -size % 8  # tensors are aligned in memory when the file is mapped
    target = {"architectures": ["DiffV2ForCausalLM"], "model_type": "diffv2", "attention": attention}
    target |= {"num_attention_heads": wanted, "upcycled_from": str(base)}
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        (temporary / "config.json").write_text(json.dumps(config | target, indent=2) + "\n", encoding="utf-8")
        for path in base.glob("tokenizer*"):
            shutil.copyfile(path, temporary / path.name)
        write_weights(temporary / "model.safetensors", converted(weights, config, attention), size)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def main():
    parser = cli.Parser(
        prog="convert.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("base", type=Path, metavar="BASE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--attention", metavar="NAME", choices=STARTS, default="baseline", help="the variant")
    parser.add_argument("--heads", type=int, metavar="2NH", help="twice the heads of BASE")
    a = parser.parse_args()
    if (a.attention == "baseline") != (a.heads is not None):
        parser.error("specify one of --attention NAME and --heads 2NH")
    python_environment.ensure("data")
    try:
        convert(a.base, a.out, a.attention, a.heads)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
        fail(f"{a.base} is not a checkpoint: {type(error).__name__}: {error}")
    print(f"{a.out} is {a.base} as {a.attention}, for train_diffv2 --init {a.out}")


if __name__ == "__main__":
    main()
