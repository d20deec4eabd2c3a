"""
The model for the transformers library (4.57 or later). It opens checkpoints of train_diffv2, with all attention
variants. Importing it registers model_type "diffv2", after which

  AutoModelForCausalLM.from_pretrained("out/checkpoints/step_00001000", trust_remote_code=True)

works. A directory that opens without the import (export_hub.py writes one) contains this file, which therefore depends
on no other file. Equations and legend are those of model.py; S is the number of keys, those of the cache included.

  attention  one call per layer for all query heads, signal and noise, with the masks of the library and the
             implementation that attn_implementation names. sdpa gets a sink as one more key (sink_column); flash
             attention has no sinks, and is refused. Where values are wider than keys, zeros widen queries and keys.
  cache      rotated keys and values of the layers before YOCO's; YOCO's shared ones once, as those of layer L/2. Its
             argument is `cache` from transformers 5.24 on, and was `past_key_values`: both names are accepted
  numerics   parameters and activations have the dtype of the loaded model; angles are float64; softmax of eager
             attention and loss at least float32
"""

import inspect
import math
from collections import namedtuple
from itertools import repeat
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForQuestionAnswering
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel, __version__
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForSequenceClassification
from transformers.modeling_layers import GenericForTokenClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import can_return_tuple

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.utils.output_capturing import OutputRecorder, capture_outputs
except ImportError:  # transformers 4
    from transformers.utils.generic import OutputRecorder, check_model_inputs as capture_outputs


class Variant(NamedTuple):
    signals: int  # output heads that share a noise head, whose map is subtracted from theirs; 0: no noise heads
    key_sets: int  # 2: noise heads have keys of their own; 1: signal and noise heads read the same keys
    merge: int  # neighbouring heads merged into one output head of width merge*D
    split: int  # query and key heads have width D/split
    noise: str  # a noise head comes after its signal heads ("next"), or after all of them ("last")
    lambda_: str  # origin of the number l of an output head, see Attention.factor
    factor: str  # of the noise head, as a function of l
    norm: str  # rmsnorm before o_proj: over each head's DV with an epsilon of its own, or over all NH*D
    gate: str  # sigmoid gate on the heads before o_proj: per head, or per element
    sink: str  # extra logit in each softmax, whose column is dropped: 0, or its own per head, learned


# tests/variants_test.py compares these tables with llmc/model/config_json.h and variants.h.
LAYER_TYPES = ("sliding_attention", "full_attention")  # with a window, without
VARIANTS = {
    # signals key_sets merge split noise lambda_ factor norm gate sink
    "baseline": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "none", "none"),
    "diff_v2": Variant(1, 1, 1, 1, "next", "input", "sigmoid", "none", "none", "none"),
    "diff_v2_cross_group": Variant(1, 1, 1, 1, "last", "input", "sigmoid", "none", "none", "none"),
    "diff_v2_no_lambda": Variant(1, 1, 1, 1, "next", "one", "linear", "none", "none", "none"),
    "diff_v2_no_sigmoid": Variant(1, 1, 1, 1, "next", "input", "linear", "none", "none", "none"),
    "diff_v2_layer_lambda": Variant(1, 1, 1, 1, "next", "layer", "sigmoid", "none", "none", "none"),
    "diff_v2_gated_head": Variant(1, 1, 1, 1, "next", "input", "sigmoid", "none", "head", "none"),
    "diff_v2_gated_elem": Variant(1, 1, 1, 1, "next", "input", "sigmoid", "none", "elem", "none"),
    "diff_v2_norm": Variant(1, 1, 1, 1, "next", "input", "sigmoid", "head", "none", "none"),
    "diff_grouped_2": Variant(2, 1, 1, 1, "next", "input", "sigmoid", "none", "none", "none"),
    "diff_grouped_4": Variant(4, 1, 1, 1, "next", "input", "sigmoid", "none", "none", "none"),
    "diff_v1": Variant(1, 2, 2, 1, "next", "exp", "linear", "head", "none", "none"),
    "diff_v1_no_norm": Variant(1, 2, 2, 1, "next", "exp", "linear", "none", "none", "none"),
    "diff_scalar": Variant(1, 2, 1, 2, "next", "layer", "linear", "all", "none", "none"),
    "off_by_one": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "none", "zero"),
    "sink": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "none", "learned"),
    "gated_head": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "head", "none"),
    "gated_elem": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "elem", "none"),
}

MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters  # not the same in all versions
CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on, and before
KNOWN_NAMES = MASK_ARGUMENTS.keys() & MoeModelOutputWithPast.__annotations__.keys()
CACHE = next((name for name in CACHE_NAMES if name in KNOWN_NAMES), None)
if CACHE is None:
    raise ImportError(f"transformers {__version__} calls the cache neither {' nor '.join(CACHE_NAMES)}: install 5.24")
HEAD_NORM_EPS = 1e-5  # of norm "head"

# H heads after the subtraction, NQ NK NV heads of width DQ, DQ and DV; always H*DV = NH*D
Shape = namedtuple("Shape", "H NQ NK NV DQ DV")


class DiffV2Config(PretrainedConfig):
    """config.json of a checkpoint. That of a Llama, Ministral or Qwen3 has no key `attention`; a Qwen3 has QK-norm."""

    model_type = "diffv2"
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    @property
    def base_model_tp_plan(self):
        """Of the modules that the model has. Heads are shared out where no parameter belongs to all of them."""
        v, plan = VARIANTS[self.attention], {}
        if v.lambda_ in ("none", "one", "input") and v.noise != "last" and v.norm == "none" and v.sink != "learned":
            names = ["q", "k", "v"] + ["lambda"] * (v.lambda_ == "input") + ["gate"] * (v.gate != "none")
            plan = {f"layers.*.self_attn.{n}_proj": "colwise" for n in names}
            plan |= {f"layers.*.self_attn.{n}_norm": "replicated_with_grad_allreduce" for n in "qk"}
            if self.yoco:
                plan |= {k.replace("layers.*.self_attn", "yoco"): p for k, p in plan.items() if k[-6] in "kv"}
            plan["layers.*.self_attn.o_proj"] = "rowwise"
        if self.num_shared_experts or self.num_dense_layers or not self.num_local_experts:
            mlp = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
            plan |= {f"layers.*.mlp.{n}_proj": p for n, p in mlp.items()}
        if self.num_local_experts:
            experts = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}
            plan |= {f"layers.*.block_sparse_moe.experts.*.{n}": p for n, p in experts.items()}
        return plan

    def __init__(
        self,
        attention="baseline",
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=352,
        max_position_embeddings=256,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        sliding_window=None,
        layer_types=None,
        yoco=False,
        use_qk_norm=None,
        num_local_experts=None,
        num_experts_per_tok=None,
        num_shared_experts=0,
        num_dense_layers=0,
        dense_intermediate_size=None,
        router_bias=False,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        use_cache=True,
        initializer_range=0.02,
        **others,
    ):
        if attention not in VARIANTS or others.get("rope_parameters") or others.get("rope_scaling"):
            raise ValueError(f"attention must be one of {', '.join(VARIANTS)}, and rope_theta at the top")
        if others.get("sparse_blocks"):
            raise ValueError("block-sparse attention (sparse_blocks) is not supported: use train_diffv2")
        self.attention = attention
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.max_position_embeddings = num_hidden_layers, max_position_embeddings
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.rope_theta, self.rms_norm_eps = head_dim, rope_theta, rms_norm_eps
        qwen3 = others.get("model_type") == "qwen3"
        self.use_qk_norm = qwen3 if use_qk_norm is None else use_qk_norm
        windows = others.get("use_sliding_window") and layer_types  # without it, max_window_layers would tell
        if qwen3 and (not self.use_qk_norm or (sliding_window and not windows)):
            raise ValueError("a qwen3 has QK-norm, and a window with use_sliding_window true and layer_types")
        # None: no layer has a window. Without layer_types, all layers have it, but those of YOCO's upper half
        self.sliding_window, self.yoco = sliding_window, yoco
        sliding, full = LAYER_TYPES
        lower = num_hidden_layers // 2 if yoco else num_hidden_layers
        kinds = [full if sliding_window is None else sliding] * lower + [full] * (num_hidden_layers - lower)
        self.layer_types = layer_types or kinds
        if set(self.layer_types) - set(LAYER_TYPES) or len(self.layer_types) != num_hidden_layers:
            raise ValueError(f"layer_types must be one of {LAYER_TYPES} for each layer, not {layer_types}")
        if sliding_window is None and sliding in self.layer_types:
            raise ValueError(f"layer_types has {sliding}, but there is no sliding_window")
        if yoco and (num_hidden_layers % 2 or sliding in self.layer_types[lower:]):
            raise ValueError(f"yoco needs an even number of layers, of which the upper half is {full}")
        # intermediate_size is the width of an expert, and with experts that of the MLP of dense layers is another key
        self.num_local_experts, self.num_experts_per_tok = num_local_experts, num_experts_per_tok
        self.num_shared_experts, self.num_dense_layers = num_shared_experts, num_dense_layers
        self.dense_intermediate_size, self.router_bias = dense_intermediate_size, router_bias
        if num_local_experts and not 1 <= (num_experts_per_tok or 0) <= num_local_experts:
            raise ValueError(f"num_experts_per_tok must be 1 to {num_local_experts}, not {num_experts_per_tok}")
        self.output_router_logits, self.router_aux_loss_coef = output_router_logits, router_aux_loss_coef
        self.use_cache, self.initializer_range = use_cache, initializer_range
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # which the library reads
        super().__init__(tie_word_embeddings=tie_word_embeddings, **special | others)


def shape_of(config):
    v, D = VARIANTS[config.attention], config.head_dim
    NH, NKV = config.num_attention_heads, config.num_key_value_heads
    H, NV = NH // v.merge, NKV // v.merge
    noise = H // v.signals if v.signals else 0
    s = Shape(H, H + noise, v.key_sets * NV, NV, D // v.split, D * v.merge)
    wrong = NH % NKV or NKV % v.merge or s.DQ % 2 or (v.signals and NH // NKV % v.signals)
    if wrong or (v.noise == "last" and NKV == 1):
        raise ValueError(f"{config.attention} cannot have {NH} heads, {NKV} key/value heads of dimension {D}")
    return s


def wide(x):
    return x.float() if x.itemsize == 2 else x


def rope_table(config, position_ids, like):
    """position_ids (B,T) -> cos and sin (B,T,1,DQ/2) of t * theta^(-2i/DQ), for every head."""
    half, device = shape_of(config).DQ // 2, position_ids.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    frequency = config.rope_theta ** (-torch.arange(half, dtype=dtype, device=device) / half)
    angle = position_ids[..., None, None] * frequency
    return angle.cos().to(like), angle.sin().to(like)


def rotate(x, cos, sin):
    """x (B,T,heads,DQ): element i < DQ/2 rotates with i + DQ/2."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def given_cache(cache, past_key_values, others):
    """The cache of a forward pass, under its new or its old name. Under another name it would have no effect, and
    generate() would give other tokens."""
    unknown = [name for name, value in others.items() if isinstance(value, Cache)]
    if unknown:
        raise ValueError(f"{unknown[0]} is a cache, but this class has no such argument: give it as {CACHE}")
    if cache is not None and past_key_values is not None:
        raise ValueError(f"{' and '.join(CACHE_NAMES)} are names of one argument: give only {CACHE}")
    return past_key_values if cache is None else cache


def attention_masks(config, x, attention_mask, cache, cache_position, position_ids):
    """By layer type, what the attention implementation takes: None, or for eager and sdpa a mask (B,1,T,S)."""
    arguments = {
        "config": config,
        "inputs_embeds": x,
        "input_embeds": x,  # of older versions, as is cache_position
        "attention_mask": attention_mask,
        "cache_position": cache_position,
        CACHE: cache,
        "position_ids": position_ids,
    }
    arguments = {n: a for n, a in arguments.items() if n in MASK_ARGUMENTS}
    create = dict(zip(LAYER_TYPES, (create_sliding_window_causal_mask, create_causal_mask)))
    return {kind: create[kind](**arguments) for kind in set(config.layer_types)}


def eager_attention(module, query, key, value, mask, scaling, s_aux=None, **unused):
    """The arguments and results of the implementations of the library: query (B,NQ,T,DQ), key and value
    (B,heads,S,width), additive mask, s_aux (NQ,): an extra logit per head, whose column is dropped -> outputs
    (B,T,NQ,DV), weights (B,NQ,T,S)."""
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = wide(query @ key.transpose(2, 3) * scaling)
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        scores = torch.cat((scores, wide(s_aux)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


def sink_column(key, value, mask, sink, T):
    """An extra logit as one more key: it and its value are 0, so that the score is the mask's column: the sink."""
    S = key.shape[2]
    if mask is None:  # causal: a single query, or keys that begin where the queries do
        mask = torch.ones(T, S, dtype=torch.bool, device=key.device).tril(S if T == 1 else 0)[None, None]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=key.dtype).masked_fill(~mask, -math.inf)
    shape = (mask.shape[0], sink.shape[0], T)
    column = sink.to(key.dtype)[:, None, None].expand(*shape, 1)
    mask = torch.cat((mask[..., :S].expand(*shape, S), column), -1)
    return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask


class KeysValues(nn.Module):
    """Of the layers from L/2, with YOCO (arXiv 2405.05254)."""

    def __init__(self, config):
        super().__init__()
        self.shape, s, C = shape_of(config), shape_of(config), config.hidden_size
        self.layer_idx = config.num_hidden_layers // 2
        self.norm = nn.RMSNorm(C, eps=config.rms_norm_eps)
        self.k_proj = nn.Linear(C, s.NK * s.DQ, bias=False)
        self.v_proj = nn.Linear(C, s.NV * s.DV, bias=False)
        self.k_norm = head_norm(config)

    def forward(self, x, cos, sin, cache, cache_position):
        """x (B,T,C), the output of layer L/2-1 -> as keys_and_values"""
        return keys_and_values(self, self.norm(x), cos, sin, cache, cache_position)


def head_norm(config):
    """QK-norm, of each query or key head (B,T,heads,DQ)."""
    return nn.RMSNorm(shape_of(config).DQ, eps=config.rms_norm_eps) if config.use_qk_norm else nn.Identity()


def keys_and_values(owner, x, cos, sin, cache, cache_position):
    """x (B,T,C) after its norm -> keys (B,NK,S,DQ) and values (B,NV,S,DV), of the cache too. In the cache, a value head
    of DV is DV/DQ heads of DQ: caches expect the shape of the keys."""
    s = owner.shape
    value = owner.v_proj(x)
    key = rotate(owner.k_norm(owner.k_proj(x).unflatten(-1, (-1, s.DQ))), cos, sin).to(value.dtype)
    key, value = key.transpose(1, 2), value.unflatten(-1, (-1, s.DQ)).transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, owner.layer_idx, {"cache_position": cache_position})
    return key, value.unflatten(1, (-1, s.DV // s.DQ)).transpose(2, 3).flatten(3)


class EffectiveMaps(nn.Identity):
    """The maps (B,H,T,S) of the output heads of a layer, where the library records them."""


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, True  # the library's implementations read these
        self.layer_type = config.layer_types[layer]
        self.window = config.sliding_window if self.layer_type == LAYER_TYPES[0] else None
        self.cross = config.yoco and layer >= config.num_hidden_layers // 2  # reads the keys of YOCO
        self.variant, self.shape = v, s = VARIANTS[config.attention], shape_of(config)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        C, NH, D = config.hidden_size, config.num_attention_heads, config.head_dim
        self.num_key_value_groups = s.NQ // s.NK
        self.q_proj = nn.Linear(C, s.NQ * s.DQ, bias=False)
        if not self.cross:
            self.k_proj = nn.Linear(C, s.NK * s.DQ, bias=False)
            self.v_proj = nn.Linear(C, s.NV * s.DV, bias=False)
            self.k_norm = head_norm(config)
        self.q_norm, self.effective = head_norm(config), EffectiveMaps()
        self.o_proj = nn.Linear(NH * D, C, bias=False)
        if v.lambda_ == "input":
            self.lambda_proj = nn.Linear(C, NH, bias=False)
        if v.lambda_ == "exp":
            for name in ("q1", "k1", "q2", "k2"):
                self.register_parameter("lambda_" + name, nn.Parameter(torch.empty(D)))
        if v.lambda_ == "layer":  # the name is a keyword of Python
            self.register_parameter("lambda", nn.Parameter(torch.empty(1)))
        if v.gate != "none":
            self.gate_proj = nn.Linear(C, NH if v.gate == "head" else NH * D, bias=False)
        if v.norm != "none":
            eps = HEAD_NORM_EPS if v.norm == "head" else config.rms_norm_eps
            self.subln = nn.RMSNorm(s.DV if v.norm == "head" else NH * D, eps=eps)
        if v.sink == "learned":
            self.sinks = nn.Parameter(torch.empty(NH))

    def start(self):
        """Initial values of the parameters that are not those of a layer of PyTorch."""
        for name, parameter in self.named_parameters(recurse=False):
            if name in ("lambda", "sinks"):
                from_layer = name == "lambda" and self.variant.factor == "linear"
                nn.init.constant_(parameter, self.lambda_init if from_layer else 0.0)
            else:
                nn.init.normal_(parameter, std=0.1)

    def factor(self, x):
        """The factor of each output head's noise map: (B,T,H,1) when projected from x, else (1) or ()."""
        kind = self.variant.lambda_
        if kind == "input":
            l = self.lambda_proj(x)[..., None]
        elif kind == "exp":
            first, second = self.lambda_q1 @ self.lambda_k1, self.lambda_q2 @ self.lambda_k2
            l = first.exp() - second.exp() + self.lambda_init
        else:
            l = x.new_ones(()) if kind == "one" else getattr(self, "lambda")
        return l if self.variant.factor == "linear" else torch.sigmoid(l)

    def attend(self, query, key, value, mask, **kwargs):
        """query (B,NQ,T,DQ), key (B,NK,S,DQ), value (B,NK,S,DV) -> (B,T,NQ,DV), weights (B,NQ,T,S) or None"""
        v, s, implementation = self.variant, self.shape, self.config._attn_implementation
        kwargs.update(scaling=s.DQ**-0.5, dropout=0.0, sliding_window=self.window)
        paged = kwargs.pop("paged", None)
        if paged is not None and CACHE == "cache":
            key, value = paged.update(key, value, self.layer_idx, kwargs)
        elif paged is not None:  # attention implementations of older versions update it
            kwargs["cache"] = paged
        if kwargs.get("attention_instances") is not None:
            return self.attend_served(query, key, value, **kwargs)
        sink = {"none": None, "zero": query.new_zeros(query.shape[1]), "learned": getattr(self, "sinks", None)}[v.sink]
        if sink is not None and ("flash" in implementation or (v.sink == "zero" and implementation == "paged|eager")):
            raise ValueError(f"{implementation} has no sinks: open {self.config.attention} with sdpa attention")
        if implementation == "eager":
            function = eager_attention
        else:
            function = ALL_ATTENTION_FUNCTIONS[implementation]
            if s.DV > s.DQ:  # kernels for one width
                query, key = F.pad(query, (0, s.DV - s.DQ)), F.pad(key, (0, s.DV - s.DQ))
        if sink is not None and implementation == "sdpa":
            key, value, mask = sink_column(key, value, mask, sink, query.shape[2])
        elif sink is not None:
            kwargs["s_aux"] = sink
        return function(self, query, key, value, mask, **kwargs)

    def attend_served(self, query, key, value, **kwargs):
        """attend() in vLLM and SGLang, whose instance of attention has NH query heads in every layer and returns
        (T,NH*D). Signal and noise heads are two calls, which store the same keys and values at the same place."""
        v, s, implementation = self.variant, self.shape, self.config._attn_implementation
        if v.signals > 1 or v.noise == "last" or s.DV != s.DQ or v.sink != "none":
            raise ValueError(f"{implementation} cannot run attention {self.config.attention}: open it with sdpa")
        function, kinds = ALL_ATTENTION_FUNCTIONS[implementation], v.signals + 1
        parts = [function(self, query[:, kind::kinds], key, value, None, **kwargs)[0] for kind in range(kinds)]
        parts = [part.view(query.shape[0], query.shape[2], -1, s.DV) for part in parts]
        return torch.stack(parts, 3).flatten(2, 3), None

    def subtract(self, x, a):
        """Outputs or weights of the query heads (B,T,NQ,any) -> of the output heads (B,T,H,any), without noise."""
        v, s = self.variant, self.shape
        if not v.signals:
            return a
        if v.noise == "last":
            o, noise = a[:, :, : s.H], a[:, :, s.H :]
        else:  # blocks of signal heads and their noise head
            blocks = a.unflatten(2, (-1, v.signals + 1))
            o, noise = blocks[:, :, :, :-1].flatten(2, 3), blocks[:, :, :, -1]
        return o - self.factor(x) * noise.repeat_interleave(v.signals, 2)

    def forward(
        self,
        x,
        *shared,
        cos,
        sin,
        masks,
        past_key_values=None,
        cache_position=None,
        output_effective_attentions=False,
        cache=None,
        **kwargs,
    ):
        """x (B,T,C) after its norm; shared: the keys and values of YOCO -> (B,T,C); weights (B,NQ,T,S) in the order of
        the query heads, or None if attention is not eager"""
        v, s = self.variant, self.shape
        query = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, s.DQ))), cos, sin)
        cache = given_cache(cache, past_key_values, kwargs)
        key, value = shared or keys_and_values(self, x, cos, sin, cache, cache_position)
        mask = masks[self.layer_type]
        if self.window and mask is not None:  # with a window of 1, the cache returns keys that are not in the mask
            key, value = key[:, :, -mask.shape[-1] :], value[:, :, -mask.shape[-1] :]

        # Query head j of a value head reads its key head j % key_sets. Eager attention gets the keys of each query
        # head. Others map groups of query heads to a key head: j / key_sets and j % key_sets change places
        NV = value.shape[1]
        swap = lambda t, dim, *sizes: t.unflatten(dim, (NV, *sizes)).transpose(dim + 1, dim + 2).flatten(dim, dim + 2)
        eager = self.config._attn_implementation == "eager"
        if eager:
            key = key.unflatten(1, (NV, 1, -1)).expand(-1, -1, s.NQ // s.NK, -1, -1, -1).flatten(1, 3)
        else:
            query = swap(query, 2, -1, v.key_sets)
            value = value[:, :, None].expand(-1, -1, v.key_sets, -1, -1).flatten(1, 2)
        a, weights = self.attend(query.transpose(1, 2).to(value.dtype), key, value, mask, **kwargs)
        o = self.subtract(x, a if eager else swap(a, 2, v.key_sets, -1))  # (B,T,H,DV)
        if eager and output_effective_attentions:
            if v.noise == "last":
                raise ValueError(f"{self.config.attention} has no effective maps: noise heads read other values")
            self.effective(self.subtract(x, weights.transpose(1, 2)).transpose(1, 2))
        if v.norm == "head":
            o = self.subln(o) * (1 - self.lambda_init)
        if v.norm == "all":
            o = self.subln(o.flatten(2)).view_as(o)
        if v.gate != "none":  # (B,T,H,1) or (B,T,H,D)
            o = o * torch.sigmoid(self.gate_proj(x)).unflatten(-1, (o.shape[2], -1))
        return self.o_proj(o.flatten(2)), weights


class MLP(nn.Module):
    def __init__(self, C, F_):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, F_, bias=False), nn.Linear(C, F_, bias=False)
        self.down_proj = nn.Linear(F_, C, bias=False)

    def forward(self, y):
        return self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Expert(nn.Module):
    """An MLP with the names of Mixtral."""

    def __init__(self, C, width):
        super().__init__()
        self.w1 = nn.Linear(C, width, bias=False)
        self.w3 = nn.Linear(C, width, bias=False)
        self.w2 = nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    """x (N,C) -> logits (N,experts), at least in float32."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, config.hidden_size))
        if config.router_bias:  # balances the experts in training
            self.register_buffer("e_score_correction_bias", torch.zeros(config.num_local_experts))

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


def is_plain(linear, device):
    """Whether its weight is all that it computes with: no adapter, quantization, shard or offloading."""
    weight = linear.weight
    return type(linear) is nn.Linear and type(weight) is nn.Parameter and weight.device == device


class Experts(nn.Module):
    """The weighted sum of the experts with the largest logits; logits and weights at least in float32. By default a
    loop over layers. experts_implementation="grouped_mm" or "batched_mm" of the library read all experts from one
    tensor; checkpoints, adapters and quantization have a layer for each. So every forward pass copies the weights into
    one; it then never waits for the device."""

    def __init__(self, config):
        super().__init__()
        self.config, C, self.active = config, config.hidden_size, config.num_experts_per_tok
        self.gate = Router(config)
        self.experts = nn.ModuleList(Expert(C, config.intermediate_size) for _ in range(config.num_local_experts))

    def forward(self, x):
        y = x.flatten(0, -2)
        logits = self.gate(y)
        bias = getattr(self.gate, "e_score_correction_bias", None)
        scores = logits if bias is None else logits.softmax(-1) + bias.to(logits.dtype)
        chosen = scores.topk(self.active, -1).indices  # (N,K)
        weights = logits.gather(-1, chosen).softmax(-1).to(x.dtype)  # those of the K alone, p / (sum of their p)
        implementation = getattr(self.config, "_experts_implementation", None)  # None: transformers 4
        if implementation == "eager" and torch.compiler.is_compiling():  # whose graphs cannot contain the loop
            implementation = "grouped_mm"
        linears = [e.get_submodule(n) for e in self.experts for n in ("w1", "w3", "w2")]
        if implementation not in (None, "eager") and all(map(is_plain, linears, repeat(y.device))):
            return ALL_EXPERTS_FUNCTIONS[implementation](self.stacked(), y, chosen, weights).view_as(x)
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()  # waits for the device once
        rows = order // self.active
        parts = [expert(part) for expert, part in zip(self.experts, y[rows].split(counts))]
        out = torch.cat(parts) * weights.flatten()[order, None]
        return torch.zeros_like(y).index_add(0, rows, out).view_as(x)

    def stacked(self):
        """What the library's implementations read: w1 and w3 of all experts (E,2FE,C), and w2 (E,C,FE)."""
        return SimpleNamespace(
            gate_up_proj=torch.stack([torch.cat((e.w1.weight, e.w3.weight)) for e in self.experts]),
            down_proj=torch.stack([e.w2.weight for e in self.experts]),
            num_experts=len(self.experts),
            has_gate=True,
            has_bias=False,
            has_post_expert_norm=False,
            is_transposed=False,
            _is_expert_parallel=False,
            _apply_gate=lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        )


class Block(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(C, eps=eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(C, eps=eps)
        experts = config.num_local_experts and layer >= config.num_dense_layers
        width = config.num_shared_experts * config.intermediate_size if experts else config.intermediate_size
        if config.dense_intermediate_size and not experts:
            width = config.dense_intermediate_size
        self.mlp = MLP(C, width) if width else None  # with experts: the shared ones
        self.block_sparse_moe = Experts(config) if experts else None

    def forward(self, x, *shared, **kwargs):
        """Tensors with gradients are positional, which checkpoints require."""
        x = x + self.self_attn(self.input_layernorm(x), *shared, **kwargs)[0]
        y = self.post_attention_layernorm(x)
        parts = (part(y) for part in (self.mlp, self.block_sparse_moe) if part is not None)
        return x + sum(parts)


class DiffV2PreTrainedModel(PreTrainedModel):
    config_class = DiffV2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block", "KeysValues"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # what output_... = True adds to the results
        "hidden_states": Block,
        "attentions": OutputRecorder(Attention, index=1),
        "effective_attentions": OutputRecorder(EffectiveMaps, index=0),
        "router_logits": OutputRecorder(Router, index=0),
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Router):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            for bias in module.buffers():
                nn.init.zeros_(bias)
        if isinstance(module, Attention):
            module.start()

    @classmethod
    def _can_set_attn_implementation(cls):
        return True  # the library would search the source for a phrase of its own models

    _can_set_experts_implementation = _can_set_attn_implementation

    def get_correct_experts_implementation(self, requested_experts):
        return super().get_correct_experts_implementation(requested_experts or "eager")


class DiffV2Model(DiffV2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        if config.yoco:
            self.yoco = KeysValues(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cache_position=None,
        cache=None,
        **kwargs,
    ):
        """input_ids (B,T) or inputs_embeds (B,T,C) -> last_hidden_state (B,T,C), after the norm. attention_mask (B,S):
        0 for padding, on either side."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config = self.config
        use_cache = config.use_cache if use_cache is None else use_cache
        cache = given_cache(cache, past_key_values, kwargs)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None and cache.get_seq_length():
                raise ValueError("gradient checkpointing cannot continue a cache: disable it, or give all tokens")
            use_cache, cache = False, None
        if type(cache).__name__ == "PagedAttentionCache":  # of continuous batching: attend() passes it on
            kwargs["paged"], cache = cache, None

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B,T,C)
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        if cache_position is None:
            past = 0 if cache is None else cache.get_seq_length()
            cache_position = torch.arange(x.shape[1], device=x.device) + past
        position_ids = cache_position[None] if position_ids is None else position_ids
        masks = attention_mask  # a dictionary when generate() has made them
        if not isinstance(masks, dict):
            masks = attention_masks(config, x, attention_mask, cache, cache_position, position_ids)
        cos, sin = rope_table(config, position_ids, like=x)

        cached = {"cache": cache, "cache_position": cache_position}
        shared = ()
        for block in self.layers:
            if block.self_attn.cross and not shared:
                shared = self.yoco(x, cos, sin, cache, cache_position)
            x = block(x, *shared, cos=cos, sin=sin, masks=masks, position_ids=position_ids, **cached, **kwargs)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: cache if use_cache else None})


class DiffV2ForCausalLM(DiffV2PreTrainedModel, GenerationMixin):
    _tp_plan = {"lm_head": "colwise_rep"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = DiffV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def loss_function(self, logits, labels, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **unused):
        """logits (B,T,V), labels (B,T): the inputs. Mean cross-entropy in nats of logits t and label t+1, or the sum
        divided by num_items_in_batch."""
        targets = F.pad(labels, (0, 1), value=ignore_index)[:, 1:] if shift_labels is None else shift_labels
        how = {"ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum"}
        loss = F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten().to(logits.device), **how)
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        cache_position=None,
        output_router_logits=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        """As DiffV2Model -> logits (B,T,V), or of the last logits_to_keep positions. With labels (B,T), the inputs or
        -100 for tokens to ignore, also the loss: windows of T+1 tokens give the trainer's loss over T. With
        output_router_logits, experts add router_aux_loss_coef * aux_loss, which is K if all are used equally."""
        config = self.config
        routers = config.output_router_logits if output_router_logits is None else output_router_logits
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache_position=cache_position,
            cache=cache,
            output_router_logits=routers,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = aux_loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=config.vocab_size, **kwargs)
        if output.router_logits:
            experts = (config.num_local_experts, config.num_experts_per_tok)
            aux_loss = load_balancing_loss_func(output.router_logits, *experts, attention_mask)
            loss = None if loss is None else loss + config.router_aux_loss_coef * aux_loss
        result = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            router_logits=output.router_logits or None,
            **{CACHE: output.get(CACHE)},
        )
        if "effective_attentions" in output:
            result["effective_attentions"] = output.effective_attentions
        return result


class DiffV2ForSequenceClassification(GenericForSequenceClassification, DiffV2PreTrainedModel):
    """A score of the last token that is not padding, from DiffV2Model."""


class DiffV2ForTokenClassification(GenericForTokenClassification, DiffV2PreTrainedModel):
    """Scores of every token."""


class DiffV2ForQuestionAnswering(GenericForQuestionAnswering, DiffV2PreTrainedModel):
    """For every token, logits of the begin and the end of an answer."""


AutoConfig.register("diffv2", DiffV2Config, exist_ok=True)
AutoModel.register(DiffV2Config, DiffV2Model, exist_ok=True)
AutoModelForCausalLM.register(DiffV2Config, DiffV2ForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(DiffV2Config, DiffV2ForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(DiffV2Config, DiffV2ForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(DiffV2Config, DiffV2ForQuestionAnswering, exist_ok=True)
