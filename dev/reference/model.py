"""
The model as plain tensor code, the reference for all other implementations.

  block    x += Wo attention(rmsnorm(x));  x += Wdown (silu(Wgate y) * (Wup y)), y = rmsnorm(x)
  head     logits = Wlm rmsnorm(x), Wlm = the embedding when tied;  loss = mean cross-entropy, nats
  norm     rmsnorm(x) = w x / sqrt(mean(x^2) + eps)
  window   position t of a layer with a window W attends to t-W+1 .. t
  sparse   position t reads its own block of positions, the first, and the K blocks between them with the largest
           <q, mean key>, summed over the query heads of its K/V group. The window still holds
  YOCO     the layers from L/2 read one set of keys and values: K = rope(Wk z), V = Wv z, z = rmsnorm(x), x the output
           of layer L/2-1 (arXiv 2405.05254)
  QK-norm  q = rope(rmsnorm(Wq x)), k = rope(rmsnorm(Wk x)): over the width of each head, with one weight for the query
           heads of a layer and one for its key heads
  heads    a signal map each, o = a; with noise heads o_i = a_i - s_i n_(i/g), g signals for each noise head, s = 1, l,
           or sigmoid(l); then a norm, and a gate sigmoid(Wg x)
  experts  of E experts the K with the largest of l = Wrouter y; Wdown is that of x += sum of p_e / (sum of the K p)
           mlp_e(y), p = softmax(l), and of the shared experts, which are one MLP. The routers' losses join the
           gradients but not the loss: E sum_e f_e mean(p_e), f_e the share of e in all choices, without a
           gradient; mean of (log sum exp l)^2; both averaged over the layers with experts
  legend   B sequences, T positions, C hidden size, L layers, V vocabulary, F MLP width,
           D head_dim, NH num_attention_heads, NKV num_key_value_heads;
           derived per variant: H heads after the subtraction, NQ NK NV query, key and value heads,
           DQ width of queries and keys, DV width of values; always H*DV = NH*D, NQ = H + H/g with noise heads
  numerics the dtype of the weights; nothing is fused, cached or approximated
"""

import math
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F

from variants import VARIANTS


Shape = namedtuple("Shape", "H NQ NK NV DQ DV")


def variant_of(config):
    return VARIANTS[config.get("attention", "baseline")]  # the configuration of a Llama has no such key


def shape_of(config):
    v = variant_of(config)
    NH, NKV, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    H, NV = NH // v.merge, NKV // v.merge
    noise = H // v.signals if v.signals else 0
    s = Shape(H, H + noise, v.key_sets * NV, NV, D // v.split, D * v.merge)
    if NH % NKV or NKV % v.merge or s.DQ % 2 or (v.signals and NH // NKV % v.signals):
        raise ValueError(f"NH {NH}, NKV {NKV}, D {D}: heads do not divide")
    if v.noise == "last" and NKV == 1:
        raise ValueError("with one KV head both heads of a pair read the same group")
    if config.get("yoco", False) and config["num_hidden_layers"] % 2:
        raise ValueError(f"YOCO needs an even number of layers, not {config['num_hidden_layers']}")
    return s


def layer_is_cross(config, layer):
    """Whether the layer reads the keys and values of YOCO instead of its own."""
    return config.get("yoco", False) and layer >= config["num_hidden_layers"] // 2


def layer_window(config, layer):
    """The number of positions that a layer attends to; None: all. Without layer_types, all layers have the window."""
    types = config.get("layer_types", ["sliding_attention"] * config["num_hidden_layers"])
    return config.get("sliding_window") if types[layer] == "sliding_attention" else None


def hidden_blocks(config, layer, query, key):
    """(B,NQ,T,T): the keys that block-sparse attention hides from each query head; None: none."""
    v, s, (B, T, _, _) = variant_of(config), shape_of(config), query.shape
    K, size, every = (config.get(key, 0) for key in ("sparse_blocks", "sparse_block_size", "full_every"))
    if not K or (every and (layer + 1) % every == 0):
        return None
    noise = set(map_heads(v, s.H)[1].tolist()) if v.signals else set()
    window = layer_window(config, layer) or T
    means = key.detach().view(B, T // size, size, s.NK, s.DQ).mean(2)
    group = s.NQ // s.NV
    of = [h // group * v.key_sets + (h in noise) % v.key_sets for h in range(s.NQ)]  # its key head
    scores = torch.einsum("bthd,bnhd->bhtn", query.detach(), means[:, :, of])
    hidden = torch.ones(B, s.NQ, T, T, dtype=torch.bool)
    for b, h, t in np.ndindex(B, s.NQ, T):
        own, low = t // size, max(0, t - window + 1) // size
        votes = scores[b, h // group * group : (h // group + 1) * group, t].sum(0).tolist()
        best = sorted(range(max(1, low), own), key=lambda j: (-votes[j], j))[:K]
        for j in {0, own, *best}:
            hidden[b, h, t, j * size : (j + 1) * size] = False
    return hidden


def has_qk_norm(config):
    return config.get("use_qk_norm", config.get("model_type") == "qwen3")


LAMBDA_VECTORS = ("q1", "k1", "q2", "k2")


def lambda_init(layer):
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def exp_lambda(w, layer):
    q1, k1, q2, k2 = (w["self_attn.lambda_" + i] for i in LAMBDA_VECTORS)
    return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + lambda_init(layer)


# The number l of each head, from the weights w of the layer, its normed input x (B,T,C) and its index: (B,T,H,1), or
# what broadcasts to it. FACTORS: the factor of the noise map as a function of l.
LAMBDAS = {
    "input": lambda w, x, layer: (x @ w["self_attn.lambda_proj.weight"].T)[..., None],
    "one": lambda w, x, layer: 1.0,
    "exp": lambda w, x, layer: exp_lambda(w, layer),
    "layer": lambda w, x, layer: w["self_attn.lambda"],
}
FACTORS = {"sigmoid": torch.sigmoid, "linear": lambda l: l}
HEAD_NORM_EPS = 1e-5  # of a norm over each head; that over all heads has rms_norm_eps


def rmsnorm(x, weight, eps):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rope(x, theta):
    """x (B,T,heads,d): element i < d/2 and element i + d/2 rotate by t * theta^(-2i/d)."""
    T, half = x.shape[1], x.shape[3] // 2
    frequency = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * frequency  # (T,d/2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # (T,1,d/2), for every head
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def causal_softmax(scores, sink, window, hidden=None):
    """scores (B,H,T,T); sink None or (H,): an extra logit per head, whose column is dropped; window None or W; hidden
    None or (B,H,T,T)."""
    T = scores.shape[-1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or T)), -math.inf)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if sink is None:
        return scores.softmax(-1)
    column = sink[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def rotated_heads(config, w, x, of, heads):
    """x (B,T,C) -> the queries or keys (B,T,heads,DQ); of: "q" or "k" """
    y = (x @ w[of + "_proj.weight"].T).view(*x.shape[:2], heads, shape_of(config).DQ)
    if has_qk_norm(config):
        y = rmsnorm(y, w[of + "_norm.weight"], config["rms_norm_eps"])
    return rope(y, config["rope_theta"])


def keys_and_values(config, w, x):
    """x (B,T,C) after its norm -> (B,T,NK,DQ), (B,T,NV,DV)"""
    s, (B, T, _) = shape_of(config), x.shape
    key = rotated_heads(config, w, x, "k", s.NK)
    return key, (x @ w["v_proj.weight"].T).view(B, T, s.NV, s.DV)


def map_heads(v, H):
    """The query heads of the signal maps, and with noise heads those of the noise maps."""
    head = torch.arange(H)
    if v.noise == "none":
        return [head]
    block = torch.arange(H // v.signals)  # a noise head each
    if v.noise == "last":
        return [head, H + block]
    return [head + head // v.signals, block * (v.signals + 1) + v.signals]


def attention(config, w, x, layer, shared=None):
    """x (B,T,C) after its norm -> (B,T,C); w: this layer's weights by short name; shared: the keys and values of YOCO,
    or None for the layer's own."""
    v, s = variant_of(config), shape_of(config)
    B, T, _ = x.shape
    query = rotated_heads(config, part(w, "self_attn."), x, "q", s.NQ)
    key, value = shared or keys_and_values(config, part(w, "self_attn."), x)
    window, hidden = layer_window(config, layer), hidden_blocks(config, layer, query, key)

    sink = {"none": None, "zero": x.new_zeros(s.H), "learned": w.get("self_attn.sinks")}[v.sink]
    outputs = []
    for m, q in enumerate(map_heads(v, s.H)):
        g = q // (s.NQ // s.NV)  # its value head
        k = g * v.key_sets + m % v.key_sets  # its key head
        scores = torch.einsum("bthd,bshd->bhts", query[:, :, q], key[:, :, k]) / math.sqrt(s.DQ)
        p = causal_softmax(scores, sink, window, None if hidden is None else hidden[:, q])
        outputs.append(torch.einsum("bhts,bshd->bthd", p, value[:, :, g]))

    o = outputs[0]  # (B,T,H,DV)
    if v.signals:
        noise = outputs[1].repeat_interleave(v.signals, 2)
        o = o - FACTORS[v.factor](LAMBDAS[v.lambda_](w, x, layer)) * noise
    if v.norm == "head":
        o = rmsnorm(o, w["self_attn.subln.weight"], HEAD_NORM_EPS) * (1 - lambda_init(layer))
    if v.norm == "all":
        o = rmsnorm(o.flatten(2), w["self_attn.subln.weight"], config["rms_norm_eps"]).view_as(o)
    if v.gate != "none":  # (B,T,H,1) or (B,T,H,D)
        o = o * torch.sigmoid(x @ w["self_attn.gate_proj.weight"].T).view(B, T, s.H, -1)
    return o.flatten(2) @ w["self_attn.o_proj.weight"].T


def mlp(w, y, gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"):
    hidden = F.silu(y @ w[gate + ".weight"].T) * (y @ w[up + ".weight"].T)
    return hidden @ w[down + ".weight"].T


def has_experts(config, layer):
    return config.get("num_local_experts") is not None and layer >= config.get("num_dense_layers", 0)


def mlp_width(config, layer):
    """The width of the MLP that every token passes."""
    if has_experts(config, layer):
        return config.get("num_shared_experts", 0) * config["intermediate_size"]
    return config.get("dense_intermediate_size", config["intermediate_size"])


def has_router_bias(config):
    """Whether routers select by probability and a bias, which has no gradient."""
    return config.get("router_bias", False)


def experts(config, w, y):
    """y (N,C) -> the weighted sum of the chosen experts (N,C), the load-balancing loss and the z loss"""
    E, K = config["num_local_experts"], config["num_experts_per_tok"]
    logits = y @ w["gate.weight"].T
    p = logits.softmax(-1)
    bias = w.get("gate.e_score_correction_bias")
    chosen = (logits if bias is None else p + bias).topk(K, -1).indices  # (N,K)
    picked = F.one_hot(chosen, E).sum(1).to(y.dtype)  # (N,E), 0 or 1
    weight = p * picked / (p * picked).sum(-1, keepdim=True)
    out = torch.zeros_like(y)
    for e in range(E):
        rows = picked[:, e].nonzero()[:, 0]
        name = f"experts.{e}."
        own = mlp(w, y[rows], name + "w1", name + "w3", name + "w2")
        out = out.index_add(0, rows, weight[rows, e, None] * own)
    balance = E * (picked.mean(0) / K * p.mean(0)).sum()
    return out, balance, logits.logsumexp(-1).pow(2).mean()


def part(weights, prefix):
    """The weights whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix) :]: t for name, t in weights.items() if name.startswith(prefix)}


def forward_with_losses(config, weights, tokens):
    """tokens (B,T) -> logits (B,T,V), and of each layer with experts its two losses"""
    losses = []
    eps, shared = config["rms_norm_eps"], None
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[tokens]  # (B,T,C)
    for layer in range(config["num_hidden_layers"]):
        w = part(weights, f"model.layers.{layer}.")
        if layer_is_cross(config, layer) and shared is None:
            yoco = part(weights, "model.yoco.")
            shared = keys_and_values(config, yoco, rmsnorm(x, yoco["norm.weight"], eps))
        x = x + attention(config, w, rmsnorm(x, w["input_layernorm.weight"], eps), layer, shared)
        y, add = rmsnorm(x, w["post_attention_layernorm.weight"], eps), 0
        if mlp_width(config, layer):
            add = mlp(w, y)
        if has_experts(config, layer):
            out, *own = experts(config, part(w, "block_sparse_moe."), y.flatten(0, 1))
            add = add + out.view_as(y)
            losses.append(own)
        x = x + add
    return rmsnorm(x, weights["model.norm.weight"], eps) @ weights.get("lm_head.weight", embedding).T, losses


def forward(config, weights, tokens):
    return forward_with_losses(config, weights, tokens)[0]


def loss(config, weights, tokens, targets, router_aux=0.0, router_z=0.0, z_loss=0.0):
    """Mean cross-entropy over all B*T targets, in nats; and the weighted losses of the routers and of the logits."""
    logits, losses = forward_with_losses(config, weights, tokens)
    routers = sum(router_aux * balance + router_z * z for balance, z in losses) / max(1, len(losses))
    z = z_loss * logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), routers + z


def tensor_table(config):
    """(name, shape, center, deviation) of every tensor, in the order of a checkpoint. The last two are for tests, in
    which no gradient may be negligible; training starts from other values."""
    v, s = variant_of(config), shape_of(config)
    V, C, FE = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    NH, ND = config["num_attention_heads"], config["num_attention_heads"] * config["head_dim"]
    linear = lambda out, fan_in: ((out, fan_in), 0, 1.3 / math.sqrt(fan_in))
    norm = lambda width: ((width,), 1, 0.2)
    vector = ((config["head_dim"],), 0, 0.5)
    keys_values = [("k_proj.weight", *linear(s.NK * s.DQ, C)), ("v_proj.weight", *linear(s.NV * s.DV, C))]
    head_norm = [("k_norm.weight", *norm(s.DQ))] if has_qk_norm(config) else []
    moe = "block_sparse_moe."
    mlp_rows = lambda F_: [("gate_proj", linear(F_, C)), ("up_proj", linear(F_, C)), ("down_proj", linear(C, F_))]
    joined = [("w1", linear(FE, C)), ("w3", linear(FE, C))]
    expert_rows = [
        (moe + "gate.weight", linear(config.get("num_local_experts") or 0, C)),
        *[(moe + "gate.e_score_correction_bias", ((config.get("num_local_experts"),), 0, 0.05))]
        * has_router_bias(config),
        *((f"{moe}experts.{e}.{n}.weight", r) for e in range(config.get("num_local_experts") or 0) for n, r in joined),
        *((f"{moe}experts.{e}.w2.weight", linear(C, FE)) for e in range(config.get("num_local_experts") or 0)),
    ]
    layer_rows = lambda own, layer: [  # present, name, shape and values; own: the layer has keys and values of its own
        (True, "input_layernorm.weight", norm(C)),
        (True, "self_attn.q_proj.weight", linear(s.NQ * s.DQ, C)),
        *((own, "self_attn." + name, row) for name, *row in keys_values),
        (v.lambda_ == "input", "self_attn.lambda_proj.weight", linear(NH, C)),
        (v.gate == "head", "self_attn.gate_proj.weight", linear(NH, C)),
        (v.gate == "elem", "self_attn.gate_proj.weight", linear(ND, C)),
        (has_qk_norm(config), "self_attn.q_norm.weight", norm(s.DQ)),
        *((own, "self_attn." + name, row) for name, *row in head_norm),
        (True, "self_attn.o_proj.weight", linear(C, ND)),
        (v.norm == "head", "self_attn.subln.weight", norm(s.DV)),
        (v.norm == "all", "self_attn.subln.weight", norm(ND)),
        *((v.lambda_ == "exp", "self_attn.lambda_" + i, vector) for i in LAMBDA_VECTORS),
        (v.lambda_ == "layer", "self_attn.lambda", ((1,), 0.5, 0.2)),
        (v.sink == "learned", "self_attn.sinks", ((NH,), 0, 1)),
        (True, "post_attention_layernorm.weight", norm(C)),
        *(
            (mlp_width(config, layer), f"mlp.{name}.weight", row)
            for name, row in mlp_rows(mlp_width(config, layer) or 1)
        ),
        *((has_experts(config, layer), name, row) for name, row in expert_rows),
    ]
    yoco_rows = [("norm.weight", *norm(C)), *keys_values, *head_norm]
    table = [("model.embed_tokens.weight", (V, C), 0, 0.5)]
    L = config["num_hidden_layers"]
    for layer in range(L):
        cross = layer_is_cross(config, layer)
        if cross and layer == L // 2:
            table += [("model.yoco." + name, *row) for name, *row in yoco_rows]
        table += [
            (f"model.layers.{layer}.{name}", *row) for present, name, row in layer_rows(not cross, layer) if present
        ]
    table.append(("model.norm.weight", *norm(C)))
    if not config["tie_word_embeddings"]:
        table.append(("lm_head.weight", *linear(V, C)))
    return table


def init(config, seed):
    """Random float64 weights that float32 represents exactly. They are uniform, which requires exact arithmetic only:
    every machine draws the same bits."""
    random, weights = np.random.RandomState(seed), {}
    for name, shape, center, deviation in tensor_table(config):
        u = 2 * random.random_sample(shape) - 1  # deviation 1/sqrt(3)
        values = np.float32(center + deviation * math.sqrt(3) * u)
        weights[name] = torch.from_numpy(values.astype(np.float64))
    return weights
