#!/usr/bin/env python3
"""
Writes a checkpoint as a GGUF file, which llama.cpp and the programs built on it open. Requires nothing but Python.

    export_gguf.py CHECKPOINT OUT.gguf [--separator ID]

  models   an architecture of llama.cpp that computes the same function, with the types of the checkpoint:
             llama         baseline, with experts or without
             qwen3         QK-norm; qwen3moe: QK-norm and experts
             granite_swa   windows, in all layers or in some, with experts or without; its sinks are off
           Others are refused: llama.cpp subtracts no attention maps, gates no heads and shares no keys of layers.
  tokens   bytes, or a BPE whose tokenizer.json splits text as GPT-2 does (data/prepare.py --train-bpe, --tokenizer
           gpt2). Byte tokens are the characters that GPT-2 writes them as, without merges. The separator begins and
           ends a text, as train_diffv2 --prompt puts it.
  layout   GGUF version 3: numbers are little-endian, strings and arrays follow their lengths, tensors follow each other
           at multiples of 32 bytes, and their dimensions are listed from the last. llama and granite_swa rotate
           elements 2i and 2i + 1 of a head, which are i and i + D/2 here: rows of q_proj and k_proj are reordered.
           The experts of a layer are one tensor. Norms, routers and sinks are F32.
"""

import argparse
import json
import struct
import sys
from itertools import chain
from math import prod
from pathlib import Path

from export_hub import BYTES, BYTE_VOCABULARY, DAMAGE, BadInput, byte_tokenizer, find_separator, floats, read_header
from export_hub import read_json, table_header

ALIGNMENT = 32
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens
STORED = {"F32": 0, "BF16": 30}  # numbers of types
NO_SINK = -1e30  # a logit whose exponential is 0
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}": f"attn_{n[0]}" for n in ("q_proj", "k_proj", "v_proj")},
    **{f"self_attn.{n}": f"attn_{n}" for n in ("q_norm", "k_norm")},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    "block_sparse_moe.gate": "ffn_gate_inp",
}
OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(v):
    """The type and the value of a key."""
    if isinstance(v, bool):
        return 7, struct.pack("<?", v)
    if isinstance(v, int):
        return 4, struct.pack("<I", v)
    if isinstance(v, float):
        return 6, struct.pack("<f", v)
    if isinstance(v, str):
        return 8, text(v)
    kind = value(v[0])[0] if v else 8
    kind = 5 if kind == 4 else kind  # token_type must be signed
    return 9, struct.pack("<IQ", kind, len(v)) + b"".join(value(one)[1] for one in v)


def windows_of(config):
    """(window, whether each layer has it); (0, None): no windows"""
    window, layers = config.get("sliding_window") or 0, config["num_hidden_layers"]
    if config["model_type"] == "qwen3" and not config.get("use_sliding_window"):
        window = 0
    types = config.get("layer_types") or ["sliding_attention"] * layers
    return (window, [t == "sliding_attention" for t in types]) if window else (0, None)


def architecture(config):
    """The name of the architecture that holds a model."""
    variant = config.get("attention", "baseline")
    if variant != "baseline":
        raise BadInput(f"llama.cpp has no attention {variant}: only a baseline can be a GGUF file")
    refused = {
        "yoco": "YOCO", "sparse_blocks": "block-sparse attention", "num_shared_experts": "shared experts",
        "num_dense_layers": "dense layers before experts", "router_bias": "a bias of the router",
    }  # fmt: skip
    for key, name in refused.items():
        if config.get(key):
            raise BadInput(f"llama.cpp has no architecture for {name} ({key} is {json.dumps(config[key])})")
    normed, experts = config.get("use_qk_norm") or config["model_type"] == "qwen3", config.get("num_local_experts")
    if windows_of(config)[0]:
        if normed:
            raise BadInput("llama.cpp has no architecture for windows together with QK-norm")
        return "granite_swa"
    return ("qwen3moe" if experts else "qwen3") if normed else "llama"


def model_keys(config, arch, name):
    heads, D = config["num_attention_heads"], config["head_dim"]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": D,
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if config.get("num_local_experts"):
        keys["expert_count"], keys["expert_used_count"] = config["num_local_experts"], config["num_experts_per_tok"]
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if arch == "granite_swa":
        keys["attention.sliding_window"], keys["attention.sliding_window_pattern"] = windows_of(config)
        keys["logit_scale"] = 1.0
    return {"general.architecture": arch, "general.name": name, **{f"{arch}.{k}": v for k, v in keys.items()}}


def check_tokenizer(path, tokenizer):
    """Refuses what splits text otherwise than GPT-2's tokenizer."""
    model, before = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    same = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before.get("add_prefix_space")
    if not same or model["type"] != "BPE" or tokenizer.get("normalizer") or model.get("ignore_merges"):
        raise BadInput(
            f"{path} splits text otherwise than GPT-2: use the converter of llama.cpp on export_hub.py's OUT"
        )


def token_keys(checkpoint, config, separator):
    path, V = checkpoint / "tokenizer.json", config["vocab_size"]
    table = table_header(checkpoint)
    if path.exists():
        tokenizer = read_json(path)
        check_tokenizer(path, tokenizer)
    elif table[0] == 0 if table else V == BYTE_VOCABULARY:
        tokenizer = byte_tokenizer(None)
    else:
        raise BadInput(f"{checkpoint} has no tokenizer.json, which states the texts of tokens")
    model = tokenizer["model"]
    tokens, kinds = [f"[UNUSED{i}]" for i in range(V)], [UNUSED] * V
    found = [(token, id_, NORMAL) for token, id_ in model["vocab"].items()]
    for one in tokenizer.get("added_tokens") or []:
        found.append((one["content"], one["id"], CONTROL if one["special"] else USER_DEFINED))
    for token, id_, kind in found:
        if not 0 <= id_ < V:
            raise BadInput(f"{path} has token {id_}; the model has a vocabulary of {V}")
        tokens[id_], kinds[id_] = token, kind
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds, "merges": merges}
    keys |= dict.fromkeys(("bos_token_id", "eos_token_id", "padding_token_id"), separator) | {"add_bos_token": True}
    return {f"tokenizer.ggml.{k}": v for k, v in keys.items()}


def in_pairs(data, D, row):
    """Rows i and i + D/2 of every head beside each other"""
    rows = [data[i : i + row] for i in range(0, len(data), row)]
    order = (h + i + part for h in range(0, len(rows), D) for i in range(D // 2) for part in (0, D // 2))
    return b"".join(rows[i] for i in order)


class Weights:
    """The tensors of model.safetensors, under the names of GGUF."""

    def __init__(self, file, config, arch):  # a file that is open, config.json
        self.file, self.config, self.paired = file, config, arch in ("llama", "granite_swa")
        self.header, _, self.begin = read_header(file)
        self.sources = {}  # name: the names of its parts, of which experts have several
        for name, tensor in self.header.items():
            if tensor["dtype"] not in STORED:
                raise BadInput(f"{name} has type {tensor['dtype']}; supported are {', '.join(STORED)}")
            self.sources.setdefault(self.renamed(name), []).append(name)
        for parts in self.sources.values():
            parts.sort(key=lambda name: (len(name), name))  # expert 2 before expert 10
        self.sinks = range(config["num_hidden_layers"] if arch == "granite_swa" else 0)

    @staticmethod
    def renamed(name):
        kind = name.removesuffix(".weight")
        if kind in OF_MODEL:
            return OF_MODEL[kind] + ".weight"
        layer, _, part = kind.removeprefix("model.layers.").partition(".")
        _, of_expert, which = part.partition("experts.")
        new = OF_EXPERTS[which.partition(".")[2]] if of_expert else NAMES.get(part)
        if new is None:
            raise BadInput(f"llama.cpp has no tensor for {name}")
        return f"blk.{layer}.{new}.weight"

    def described(self):
        """(name, shape, type) of every tensor, in the order of data()"""
        for name, parts in self.sources.items():
            tensor = self.header[parts[0]]
            shape = tensor["shape"] if "_exps" not in name else [len(parts), *tensor["shape"]]
            yield name, shape, "F32" if self.wide(name, shape) else tensor["dtype"]
        for layer in self.sinks:
            yield f"blk.{layer}.attn_sinks.weight", [self.config["num_attention_heads"]], "F32"

    @staticmethod
    def wide(name, shape):
        return len(shape) == 1 or "ffn_gate_inp" in name

    def data(self):
        for name, parts in self.sources.items():
            pieces = []
            for part in parts:
                first, end = self.header[part]["data_offsets"]
                self.file.seek(self.begin + first)
                pieces.append(self.file.read(end - first))
            data, tensor = b"".join(pieces), self.header[parts[0]]
            if self.paired and name.endswith(("attn_q.weight", "attn_k.weight")):
                data = in_pairs(data, self.config["head_dim"], tensor["shape"][1] * BYTES[tensor["dtype"]])
            yield floats(data, tensor["dtype"]).tobytes() if self.wide(name, tensor["shape"]) else data
        for _ in self.sinks:
            yield struct.pack("<f", NO_SINK) * self.config["num_attention_heads"]


def padded(size):
    return -size % ALIGNMENT


def export(checkpoint, out, separator):
    config = read_json(checkpoint / "config.json")
    arch = architecture(config)
    separator = find_separator(checkpoint, config, table_header(checkpoint)) if separator is None else separator
    if separator is None:  # llama.cpp would end a text with token 11
        raise BadInput("the separator is unknown, which ends a text: give --separator ID")
    if not 0 <= separator < config["vocab_size"]:
        raise BadInput(f"the separator is {separator}; the model has a vocabulary of {config['vocab_size']}")
    keys = model_keys(config, arch, checkpoint.name) | token_keys(checkpoint, config, separator)
    with (checkpoint / "model.safetensors").open("rb") as file:
        weights, infos, offset = Weights(file, config, arch), [], 0
        for name, shape, dtype in weights.described():
            dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos.append(text(name) + dimensions + struct.pack("<IQ", STORED[dtype], offset))
            size = prod(shape) * BYTES[dtype]
            offset += size + padded(size)
        pairs = [text(key) + struct.pack("<I", value(v)[0]) + value(v)[1] for key, v in keys.items()]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs + infos)
        with out.open("xb") as f:
            try:
                for data in chain([head], weights.data()):
                    f.write(data + b"\0" * padded(len(data)))
            except BaseException:
                out.unlink()
                raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a checkpoint of train_diffv2")
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="a file that does not exist")
    parser.add_argument("--separator", type=int, metavar="ID", help="token that separates documents")
    options = parser.parse_args()
    try:
        export(options.checkpoint, options.out, options.separator)
    except (BadInput, OSError) as error:
        print(f"export_gguf.py: {error}", file=sys.stderr)
    except DAMAGE as error:
        print(
            f"export_gguf.py: {options.checkpoint} is not a checkpoint: {type(error).__name__}: {error}",
            file=sys.stderr,
        )
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
