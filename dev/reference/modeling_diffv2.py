"""
The model for the transformers library. It opens checkpoints of train_diffv2, with all attention variants.
Importing it registers model_type "diffv2", after which

  AutoModelForCausalLM.from_pretrained("out/checkpoints/step_00001000", trust_remote_code=True)

works. A directory that opens without the import (export_hub.py writes one) contains this file, which therefore depends
on no other file. Equations and legend are those of model.py. Attention computes a T x T matrix per head and map, and
there is no cache: generate() computes the whole text for each token.

  numerics  parameters and activations have the dtype of the loaded model; angles are float64; softmax, norms and loss
            at least float32
"""

import math
from collections import namedtuple
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class Variant(NamedTuple):
    signals: int  # output heads that share a noise head, whose map is subtracted from theirs; 0: no noise heads
    key_sets: int  # 2: noise heads have keys of their own; 1: signal and noise heads read the same keys
    merge: int  # neighbouring heads merged into one output head of width merge*D
    split: int  # query and key heads have width D/split
    noise: str  # a noise head comes after its signal heads ("next"), or after all of them ("last")
    lambda_: str  # origin of the number l of an output head, see Attention.factor
    factor: str  # of the noise head, as a function of l
    xsa: bool  # the component of an output head along the value of its own position is removed
    norm: str  # rmsnorm before o_proj: over each head's DV with an epsilon of its own, or over all NH*D
    gate: str  # sigmoid gate on the heads before o_proj: per head, or per element
    sink: str  # extra logit in each softmax, whose column is dropped: 0, or learned per head


# dev/reference/variants.py compares these tables with llmc/model/config_json.h and variants.h.
LAYER_TYPES = ("sliding_attention", "full_attention")  # with a window, without
VARIANTS = {
    # signals key_sets merge split noise lambda_ factor xsa norm gate sink
    "baseline": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "none", "none"),
    "diff_v2": Variant(1, 1, 1, 1, "next", "input", "sigmoid", False, "none", "none", "none"),
    "diff_v2_cross_group": Variant(1, 1, 1, 1, "last", "input", "sigmoid", False, "none", "none", "none"),
    "diff_v2_no_lambda": Variant(1, 1, 1, 1, "next", "one", "linear", False, "none", "none", "none"),
    "diff_v2_no_sigmoid": Variant(1, 1, 1, 1, "next", "input", "linear", False, "none", "none", "none"),
    "diff_v2_signed": Variant(1, 1, 1, 1, "next", "input", "tanh", False, "none", "none", "none"),
    "diff_v2_head_lambda": Variant(1, 1, 1, 1, "next", "head", "sigmoid", False, "none", "none", "none"),
    "diff_v2_layer_lambda": Variant(1, 1, 1, 1, "next", "layer", "sigmoid", False, "none", "none", "none"),
    "diff_v2_gated_head": Variant(1, 1, 1, 1, "next", "input", "sigmoid", False, "none", "head", "none"),
    "diff_v2_gated_elem": Variant(1, 1, 1, 1, "next", "input", "sigmoid", False, "none", "elem", "none"),
    "diff_v2_xsa": Variant(1, 1, 1, 1, "next", "input", "sigmoid", True, "none", "none", "none"),
    "diff_grouped_2": Variant(2, 1, 1, 1, "next", "input", "sigmoid", False, "none", "none", "none"),
    "diff_grouped_4": Variant(4, 1, 1, 1, "next", "input", "sigmoid", False, "none", "none", "none"),
    "diff_v1": Variant(1, 2, 2, 1, "next", "exp", "linear", False, "head", "none", "none"),
    "diff_scalar": Variant(1, 2, 1, 2, "next", "layer", "linear", False, "all", "none", "none"),
    "off_by_one": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "none", "zero"),
    "sink": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "none", "learned"),
    "gated_head": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "head", "none"),
    "gated_elem": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "elem", "none"),
    "xsa": Variant(0, 1, 1, 1, "none", "none", "linear", True, "none", "none", "none"),
}

HEAD_NORM_EPS = 1e-5  # of norm "head"
OWN_VALUE_LEAST = 1e-24  # squared length of a value below which XSA removes nothing

# H heads after the subtraction, NQ NK NV heads of width DQ, DQ and DV; always H*DV = NH*D
Shape = namedtuple("Shape", "H NQ NK NV DQ DV")


class DiffV2Config(PretrainedConfig):
    """config.json of a checkpoint. That of a Llama, Ministral or Qwen3 has no key `attention`; a Qwen3 has QK-norm."""

    model_type = "diffv2"

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
        **others,
    ):
        if attention not in VARIANTS or others.get("rope_parameters") or others.get("rope_scaling"):
            raise ValueError(f"attention must be one of {', '.join(VARIANTS)}, and rope_theta at the top")
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
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


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


def rope_table(config, T, like):
    """cos and sin (T,1,DQ/2) of t * theta^(-2i/DQ), for every head."""
    half = shape_of(config).DQ // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angle = torch.arange(T, dtype=torch.float64, device="cpu")[:, None, None] * frequency
    return angle.cos().to(like), angle.sin().to(like)


def rotate(x, cos, sin):
    """x (B,T,heads,DQ): element i < DQ/2 rotates with i + DQ/2."""
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def causal_softmax(scores, sink, window):
    """scores (B,H,T,T); sink None or (H,): an extra logit per head, whose column is dropped; window None, or W:
    position t sees t-W+1 .. t."""
    t = torch.arange(scores.shape[-1], device=scores.device)
    distance = t[:, None] - t
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def map_heads(v, H, device):
    """The query heads of the H signal maps, and with noise heads those of the noise maps."""
    if v.signals == 0:
        return [torch.arange(H, device=device)]
    heads = torch.arange(H + H // v.signals, device=device)
    if v.noise == "last":
        return [heads[:H], heads[H:]]
    heads = heads.view(-1, v.signals + 1)  # blocks of signal heads and their noise head
    return [heads[:, :-1].flatten(), heads[:, -1]]


def without_own_value(o, value):
    """XSA (arXiv 2603.09078). o (B,T,H,DV) without its component along value (B,T,NV,DV)."""
    o = o.unflatten(2, (value.shape[2], -1))  # (B,T,NV,H/NV,DV)
    v = value[:, :, :, None]
    square = wide(v).square().sum(-1, keepdim=True)
    along = (wide(o) * wide(v)).sum(-1, keepdim=True) / square.clamp(min=OWN_VALUE_LEAST)
    along = along * (square >= OWN_VALUE_LEAST)
    return (wide(o) - along * wide(v)).to(o.dtype).flatten(2, 3)


class KeysValues(nn.Module):
    """Of the layers from L/2, with YOCO (arXiv 2405.05254)."""

    def __init__(self, config):
        super().__init__()
        self.shape, s, C = shape_of(config), shape_of(config), config.hidden_size
        self.norm = nn.RMSNorm(C, eps=config.rms_norm_eps)
        self.k_proj = nn.Linear(C, s.NK * s.DQ, bias=False)
        self.v_proj = nn.Linear(C, s.NV * s.DV, bias=False)
        self.k_norm = head_norm(config)

    def forward(self, x, cos, sin):
        """x (B,T,C), the output of layer L/2-1 -> (B,T,NK,DQ), (B,T,NV,DV)"""
        return keys_and_values(self, self.norm(x), cos, sin)


def head_norm(config):
    """QK-norm, of each query or key head (B,T,heads,DQ)."""
    return nn.RMSNorm(shape_of(config).DQ, eps=config.rms_norm_eps) if config.use_qk_norm else nn.Identity()


def keys_and_values(owner, x, cos, sin):
    s, (B, T, _) = owner.shape, x.shape
    key = owner.k_norm(owner.k_proj(x).view(B, T, s.NK, s.DQ))
    return rotate(key, cos, sin), owner.v_proj(x).view(B, T, s.NV, s.DV)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.window = config.sliding_window if config.layer_types[layer] == LAYER_TYPES[0] else None
        self.cross = config.yoco and layer >= config.num_hidden_layers // 2  # reads the keys of YOCO
        self.variant, self.shape = v, s = VARIANTS[config.attention], shape_of(config)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        C, NH, D = config.hidden_size, config.num_attention_heads, config.head_dim
        self.q_proj = nn.Linear(C, s.NQ * s.DQ, bias=False)
        if not self.cross:
            self.k_proj = nn.Linear(C, s.NK * s.DQ, bias=False)
            self.v_proj = nn.Linear(C, s.NV * s.DV, bias=False)
            self.k_norm = head_norm(config)
        self.q_norm = head_norm(config)
        self.o_proj = nn.Linear(NH * D, C, bias=False)
        if v.lambda_ == "input":
            self.lambda_proj = nn.Linear(C, NH, bias=False)
        if v.lambda_ == "exp":
            for name in ("q1", "k1", "q2", "k2"):
                self.register_parameter("lambda_" + name, nn.Parameter(0.1 * torch.randn(D)))
        if v.lambda_ in ("layer", "head"):  # the name is a keyword of Python
            start = self.lambda_init if v.factor == "linear" else 0.0
            self.register_parameter("lambda", nn.Parameter(torch.full((NH if v.lambda_ == "head" else 1,), start)))
        if v.gate != "none":
            self.gate_proj = nn.Linear(C, NH if v.gate == "head" else NH * D, bias=False)
        if v.norm != "none":
            eps = HEAD_NORM_EPS if v.norm == "head" else config.rms_norm_eps
            self.subln = nn.RMSNorm(s.DV if v.norm == "head" else NH * D, eps=eps)
        if v.sink == "learned":
            self.sinks = nn.Parameter(torch.zeros(NH))

    def factor(self, x):
        """The factor of each output head's noise map: (B,T,H,1) when projected from x, else (H,1), (1,1) or ()."""
        kind = self.variant.lambda_
        if kind == "input":
            l = self.lambda_proj(x)[..., None]
        elif kind == "exp":
            first, second = self.lambda_q1 @ self.lambda_k1, self.lambda_q2 @ self.lambda_k2
            l = first.exp() - second.exp() + self.lambda_init
        else:
            l = x.new_ones(()) if kind == "one" else getattr(self, "lambda")[:, None]
        return {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "linear": lambda l: l}[self.variant.factor](l)

    def forward(self, x, cos, sin, shared):
        """x (B,T,C) after its norm -> (B,T,C); shared: the keys and values of YOCO, else None"""
        v, s, (B, T, _) = self.variant, self.shape, x.shape
        query = rotate(self.q_norm(self.q_proj(x).view(B, T, s.NQ, s.DQ)), cos, sin)
        key, value = shared if self.cross else keys_and_values(self, x, cos, sin)

        sink = {"none": None, "zero": x.new_zeros(s.H), "learned": getattr(self, "sinks", None)}[v.sink]
        outputs = []
        for m, q in enumerate(map_heads(v, s.H, x.device)):
            g = q // (s.NQ // s.NV)  # its value head
            k = g * v.key_sets + m % v.key_sets  # its key head
            scores = torch.einsum("bthd,bshd->bhts", query[:, :, q], key[:, :, k]) / math.sqrt(s.DQ)
            a = causal_softmax(wide(scores), sink if sink is None else wide(sink), self.window).to(x.dtype)
            outputs.append(torch.einsum("bhts,bshd->bthd", a, value[:, :, g]))

        o = outputs[0]  # (B,T,H,DV)
        if v.signals:
            o = o - self.factor(x) * outputs[1].repeat_interleave(v.signals, 2)
        if v.xsa:
            o = without_own_value(o, value)
        if v.norm == "head":
            o = self.subln(o) * (1 - self.lambda_init)
        if v.norm == "all":
            o = self.subln(o.flatten(2)).view_as(o)
        if v.gate != "none":  # (B,T,H,1) or (B,T,H,D)
            o = o * torch.sigmoid(self.gate_proj(x)).view(B, T, s.H, -1)
        return self.o_proj(o.flatten(2))


class MLP(nn.Module):
    def __init__(self, C, F_):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, F_, bias=False), nn.Linear(C, F_, bias=False)
        self.down_proj = nn.Linear(F_, C, bias=False)

    def forward(self, y):
        return self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(C, eps=eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(C, eps=eps)
        self.mlp = MLP(C, config.intermediate_size)

    def forward(self, x, cos, sin, shared):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, shared)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        if config.yoco:
            self.yoco = KeysValues(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)  # (B,T,C)
        cos, sin = rope_table(self.config, x.shape[1], like=x)
        shared = None
        for block in self.layers:
            if block.self_attn.cross and shared is None:
                shared = self.yoco(x, cos, sin)
            x = block(x, cos, sin, shared)
        return self.norm(x)


class DiffV2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = DiffV2Config
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _no_split_modules = ["Block"]

    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, return_dict=None):
        """input_ids (B,T) -> logits (B,T,V). With labels (B,T), the inputs or -100 for tokens to ignore, also the mean
        cross-entropy of logits t and label t+1 in nats: windows of T+1 tokens give the trainer's loss over T."""
        if attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.all())):
            raise ValueError("attention_mask masks tokens, but padding is not supported: use sequences of one length")
        logits = self.lm_head(self.model(input_ids))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(wide(logits[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        output = CausalLMOutput(loss=loss, logits=logits)
        return output if return_dict in (None, True) else output.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **unused):
        return {"input_ids": input_ids, "attention_mask": attention_mask}


AutoConfig.register("diffv2", DiffV2Config, exist_ok=True)
AutoModelForCausalLM.register(DiffV2Config, DiffV2ForCausalLM, exist_ok=True)
