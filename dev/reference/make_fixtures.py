#!/usr/bin/env python3
"""
Writes fixtures/<variant>.<size>.safetensors from model.py. fixtures.py describes the format.

Usage: make_fixtures.py
"""

import json
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch

import model
from fixtures import safetensors_bytes, safetensors_read

FIXTURES = Path(__file__).resolve().parent / "fixtures"
DTYPES = {"F32": "<f4", "F64": "<f8", "U16": "<u2"}

# odd: no size divides another, untied head. even: widths that are multiples of 8, tied head, T beyond a tile of 64 keys
# (65: by one), one KV head or as many as query heads. eps: another rms_norm_eps, which applies to the norm before
# o_proj of diff_scalar and not to that of diff_v1. window: T beyond several tiles. yoco: with two layers that read its
# keys and values, and another rms_norm_eps. shared_experts: also a first layer without experts, of another width.
COLUMNS = ("B", "T", "L", "C", "F", "V", "NH", "NKV", "D")
SHAPES = {
    #                                B   T  L   C   F   V  NH NKV  D
    ("baseline", "odd"): (3, 7, 2, 12, 10, 37, 6, 2, 8),
    ("baseline", "even"): (2, 65, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2", "odd"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("diff_v2", "even"): (2, 72, 2, 16, 8, 40, 2, 1, 16),
    ("diff_v2_cross_group", "odd"): (3, 7, 2, 12, 10, 37, 6, 3, 8),  # odd NKV: unequal groups
    ("diff_v2_cross_group", "even"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2_no_lambda", "odd"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v2_no_lambda", "even"): (2, 65, 2, 16, 8, 40, 2, 2, 16),
    ("diff_v2_no_sigmoid", "odd"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v2_no_sigmoid", "even"): (2, 65, 2, 16, 8, 40, 2, 1, 16),
    ("diff_v1", "odd"): (2, 13, 2, 12, 10, 37, 8, 4, 8),  # 2 key pairs, each read twice
    ("diff_v1", "even"): (2, 72, 3, 16, 8, 40, 2, 2, 16),  # lambda_init of 3 layers
    ("diff_scalar", "odd"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("diff_scalar", "even"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("off_by_one", "odd"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("off_by_one", "even"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("sink", "odd"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("sink", "even"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("gated_head", "odd"): (3, 7, 2, 12, 10, 37, 4, 2, 8),
    ("gated_head", "even"): (2, 72, 2, 16, 8, 40, 2, 2, 16),
    ("gated_elem", "odd"): (2, 13, 2, 12, 10, 37, 6, 2, 8),
    ("gated_elem", "even"): (2, 65, 2, 16, 8, 40, 3, 1, 16),
    ("diff_v1", "eps"): (2, 13, 2, 12, 10, 37, 8, 4, 8),
    ("diff_scalar", "eps"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("baseline", "window"): (1, 200, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v2", "window"): (2, 100, 2, 12, 10, 37, 4, 2, 8),
    ("diff_v1", "window"): (2, 72, 2, 12, 10, 37, 4, 2, 8),
    ("baseline", "window_full"): (2, 13, 3, 12, 10, 37, 4, 2, 8),
    ("diff_v2", "window_full"): (3, 9, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v1", "window_full"): (2, 13, 2, 12, 10, 37, 4, 2, 8),
    ("baseline", "yoco"): (2, 13, 4, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "yoco"): (2, 72, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v2_cross_group", "yoco"): (2, 13, 4, 8, 6, 37, 2, 2, 8),
    ("diff_v2_no_lambda", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v2_no_sigmoid", "yoco"): (3, 7, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v1", "yoco"): (2, 72, 4, 12, 10, 37, 4, 2, 8),
    ("diff_scalar", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("off_by_one", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("sink", "yoco"): (2, 72, 4, 8, 6, 37, 2, 1, 8),
    ("gated_head", "yoco"): (3, 7, 4, 8, 6, 37, 2, 1, 8),
    ("gated_elem", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v2_layer_lambda", "odd"): (3, 7, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v2_layer_lambda", "even"): (2, 65, 2, 8, 8, 40, 3, 1, 16),
    ("diff_v2_layer_lambda", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v2_gated_head", "odd"): (2, 13, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v2_gated_head", "even"): (2, 72, 2, 8, 8, 40, 2, 1, 16),
    ("diff_v2_gated_head", "yoco"): (3, 7, 4, 8, 6, 37, 4, 2, 8),
    ("diff_v2_gated_elem", "odd"): (3, 7, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v2_gated_elem", "even"): (2, 65, 2, 8, 8, 40, 2, 2, 16),
    ("diff_v2_gated_elem", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("diff_grouped_2", "odd"): (2, 13, 2, 12, 6, 37, 8, 2, 8),  # two noise heads in a K/V group
    ("diff_grouped_2", "even"): (2, 65, 2, 8, 8, 40, 4, 2, 16),
    ("diff_grouped_2", "yoco"): (2, 13, 4, 8, 6, 37, 4, 1, 8),
    ("diff_grouped_4", "odd"): (2, 13, 2, 12, 6, 37, 8, 1, 8),
    ("diff_grouped_4", "even"): (2, 72, 2, 8, 8, 40, 8, 2, 8),
    ("diff_grouped_4", "yoco"): (2, 13, 4, 8, 6, 37, 4, 1, 8),
    ("baseline", "qk_norm"): (3, 7, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v2", "qk_norm"): (2, 13, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v1", "qk_norm"): (2, 13, 2, 12, 6, 37, 4, 2, 8),
    ("diff_scalar", "qk_norm"): (3, 7, 2, 12, 6, 37, 4, 2, 8),
    ("baseline", "qk_norm_window"): (2, 13, 4, 8, 6, 37, 4, 2, 8),
    ("baseline", "qk_norm_yoco"): (2, 13, 2, 12, 6, 37, 4, 2, 8),
    ("diff_v2", "qk_norm_yoco"): (2, 13, 4, 8, 6, 37, 4, 2, 8),
    ("diff_v1", "qk_norm_yoco"): (2, 13, 2, 12, 6, 37, 4, 2, 8),
    ("baseline", "experts"): (2, 13, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "experts"): (3, 7, 2, 8, 5, 37, 2, 1, 8),
    ("diff_v1", "shared_experts"): (2, 13, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "shared_experts"): (2, 13, 3, 8, 6, 37, 2, 1, 8),
    ("diff_v2", "router_bias"): (2, 13, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "z_loss"): (2, 13, 2, 8, 6, 37, 2, 1, 8),
    ("baseline", "sparse"): (2, 32, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "sparse"): (2, 32, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2", "sparse_window"): (2, 28, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v1", "sparse_window"): (2, 28, 2, 8, 6, 37, 4, 2, 8),
    ("diff_grouped_2", "sparse_yoco"): (2, 32, 4, 8, 6, 37, 8, 2, 8),
    # The norm gives small differences of maps the weight of large ones: of most shapes, weights rounded to bf16 turn
    # the gradients further than bf16 does in other variants; not of this one.
    ("diff_v2_norm", "odd"): (3, 7, 2, 12, 6, 37, 6, 2, 8),
    ("diff_v2_norm", "even"): (2, 65, 2, 8, 8, 40, 2, 1, 16),
    ("diff_v2_norm", "eps"): (2, 13, 2, 8, 6, 37, 4, 2, 8),
    ("diff_v2_norm", "yoco"): (2, 13, 4, 8, 6, 37, 2, 1, 8),
    ("diff_v1_no_norm", "odd"): (2, 13, 2, 12, 6, 37, 8, 4, 8),
    ("diff_v1_no_norm", "even"): (2, 65, 2, 8, 8, 40, 2, 2, 16),
    ("diff_v1_no_norm", "yoco"): (2, 13, 4, 8, 6, 37, 4, 2, 8),
}
# Weights and tokens are drawn from the number of a fixture. Numbers of fixtures that were removed are not used again.
UNUSED = (*range(42, 48), *range(57, 60), *range(66, 69), 73, 80)
SEEDS = [n for n in range(1, len(SHAPES) + len(UNUSED) + 1) if n not in UNUSED]
FIELDS = "tied theta eps window full_every yoco qk_norm experts z_loss sparse"
Size = namedtuple("Size", FIELDS, defaults=(0, 0, False, False, None, 0, None))
Experts = namedtuple("Experts", "count active shared dense_layers dense_width bias", defaults=(0, 0, 0, False))
SIZES = {
    "odd": Size(False, 10000.0, 1e-5),
    "even": Size(True, 500.0, 1e-5),
    "eps": Size(False, 10000.0, 0.02),
    "window": Size(False, 10000.0, 1e-5, window=6),
    "window_full": Size(True, 500.0, 1e-5, window=4, full_every=2),
    "yoco": Size(False, 500.0, 0.02, window=5, yoco=True),
    "qk_norm": Size(False, 500.0, 0.02, qk_norm=True),
    "qk_norm_window": Size(True, 500.0, 0.02, window=4, full_every=2, qk_norm=True),
    "qk_norm_yoco": Size(False, 500.0, 0.02, window=5, yoco=True, qk_norm=True),
    "z_loss": Size(True, 500.0, 1e-5, z_loss=0.25),
    "sparse": Size(False, 500.0, 0.02, sparse=(2, 4)),
    "sparse_window": Size(False, 500.0, 0.02, window=17, sparse=(1, 4)),
    "sparse_yoco": Size(False, 500.0, 0.02, window=12, yoco=True, qk_norm=True, sparse=(1, 4)),
    "router_bias": Size(False, 10000.0, 1e-5, experts=Experts(5, 2, bias=True)),
    "experts": Size(False, 10000.0, 1e-5, experts=Experts(4, 2)),
    "shared_experts": Size(
        True, 500.0, 0.02, qk_norm=True, experts=Experts(5, 3, shared=1, dense_layers=1, dense_width=7)
    ),
}
ROUTER_AUX, ROUTER_Z = 0.5, 0.1  # of fixtures with experts
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MINISTRAL = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
DIFFV2 = {"architectures": ["DiffV2ForCausalLM"], "model_type": "diffv2"}
OF_LLAMA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def layer_types(size, L):
    """Layer l, from 0, is full when l+1 is a multiple of full_every; with YOCO, when it reads the shared keys."""
    full = lambda l: (size.full_every and (l + 1) % size.full_every == 0) or (size.yoco and l >= L // 2)
    return ["full_attention" if full(l) else "sliding_attention" for l in range(L)]


def experts_config(e):
    config = {"num_local_experts": e.count, "num_experts_per_tok": e.active}
    if e.shared:
        config["num_shared_experts"] = e.shared
    if e.bias:
        config["router_bias"] = True
    if e.dense_layers:
        config |= {"num_dense_layers": e.dense_layers, "dense_intermediate_size": e.dense_width}
    return config


def make_config(attention, size, T, L, C, F, V, NH, NKV, D):
    plain = attention == "baseline" and not size.yoco and not size.sparse  # written as a class of transformers
    kind = MIXTRAL if size.experts else QWEN3 if size.qk_norm else MINISTRAL if size.window else LLAMA
    kind, rest = (kind, OF_LLAMA) if plain else ({**DIFFV2, "attention": attention}, {})
    if size.experts:
        rest = {**rest, **experts_config(size.experts)}
    if size.window:
        rest = {**rest, "sliding_window": size.window, "layer_types": layer_types(size, L)}
    if size.sparse:
        rest |= dict(zip(("sparse_blocks", "sparse_block_size"), size.sparse), full_every=size.full_every)
    if size.window and kind is QWEN3:
        rest = {**rest, "use_sliding_window": True}
    if size.yoco:
        rest = {**rest, "yoco": True}
    if size.qk_norm and not plain:
        rest = {**rest, "use_qk_norm": True}
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


def entry(array, dtype):
    array = np.ascontiguousarray(array, DTYPES[dtype])
    return dtype, array.shape, array.tobytes()


def arrays_of(file):
    """The arrays of a safetensors file by name."""
    tensors, _ = safetensors_read(file)
    return {n: np.frombuffer(data, DTYPES[dtype]).reshape(shape) for n, (dtype, shape, data) in tensors.items()}


def gradients(config, weights, tokens, targets, router_aux=ROUTER_AUX, router_z=ROUTER_Z, z_loss=0):
    """`loss` [1], then the gradient of every tensor under its name."""
    weights = {name: t.clone().requires_grad_() for name, t in weights.items()}
    value, rest = model.loss(config, weights, tokens, targets, router_aux, router_z, z_loss)
    (value + rest).backward()
    none = torch.zeros_like  # of a bias that only selects
    return {"loss": value.reshape(1), **{name: none(t) if t.grad is None else t.grad for name, t in weights.items()}}


def make_fixture(seed, variant, size, shape):
    """The bytes of one fixture."""
    shape = dict(zip(COLUMNS, shape))
    B, T = shape.pop("B"), shape["T"]
    config = make_config(variant, SIZES[size], **shape)
    weights = model.init(config, seed)
    stream = np.random.RandomState(1000 + seed).random_sample(B * T + 1)
    stream = (stream * config["vocab_size"]).astype(np.int64)
    tokens = torch.from_numpy(stream[:-1].reshape(B, T))
    targets = torch.from_numpy(stream[1:].reshape(B, T))
    tensors = {}
    for name, grad in gradients(config, weights, tokens, targets, z_loss=SIZES[size].z_loss).items():
        # a gradient that is lost in rounding would test nothing
        assert grad.abs().max() > 1e-3 or "e_score_correction_bias" in name, (
            f"{variant}.{size}: {name} has too small a gradient"
        )
        tensors[name if name == "loss" else "grad." + name] = entry(grad.detach().numpy(), "F64")
    tensors |= {name: entry(t.numpy(), "F32") for name, t in weights.items()}
    tensors["tokens"] = entry(stream, "U16")
    metadata = {"config": json.dumps(config, indent=2) + "\n", "batch_size": str(B), "seq_len": str(T)}
    return safetensors_bytes(tensors, metadata)


def main():
    if len(sys.argv) > 1:
        sys.exit("usage: make_fixtures.py")
    FIXTURES.mkdir(exist_ok=True)
    for seed, ((variant, size), shape) in zip(SEEDS, SHAPES.items()):
        (FIXTURES / f"{variant}.{size}.safetensors").write_bytes(make_fixture(seed, variant, size, shape))


if __name__ == "__main__":
    main()
