"""
Tests of model.py: identities between variants, and a second formulation of attention.

All use double precision and the shapes of the fixtures. Values are of order 1 and sums have fewer than 200 terms, so
two correct formulations agree to about 1e-14; the tolerance is 1e-12.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model
from fixtures import is_weight
from make_fixtures import COLUMNS, FIXTURES, ROUTER_AUX, ROUTER_Z, SEEDS, SHAPES, SIZES
from make_fixtures import arrays_of, check_fixture, make_config, make_fixture

TOLERANCE = 1e-12
WORST = [0.0]  # largest difference of any passed comparison
remark = lambda: f"largest relative difference of the comparisons {WORST[0]:.1e}"


def case(variant, size, **changes):
    """config, weights, tokens and targets of one row of SHAPES; `changes` override columns."""
    shape = {**dict(zip(COLUMNS, SHAPES[variant, size])), **changes}
    B, T = shape.pop("B"), shape["T"]
    config = make_config(variant, SIZES[size]._replace(theta=10000.0), **shape)
    stream = torch.from_numpy(np.random.RandomState(5).randint(0, config["vocab_size"], B * T + 1))
    return config, model.init(config, 7), stream[:-1].view(B, T), stream[1:].view(B, T)


def normal(*shape, generator=None):
    generator = generator or torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def expect_close(a, b, what):
    difference = float((a - b).abs().max() / b.abs().max())
    assert a.shape == b.shape and difference <= TOLERANCE, f"{what}: relative difference {difference:.1e}"
    WORST[0] = max(WORST[0], difference)


def expect_different(a, b, what):
    difference = float((a - b).abs().max() / b.abs().max())
    assert difference > 1e-3, f"{what}: should differ, relative difference is {difference:.1e}"


def expect_same_logits(config, weights, others, tokens, what, **changes):
    """A model has the logits of one with other weights, and with these changes of its configuration."""
    expected = model.forward({**config, **changes}, others, tokens)
    expect_close(model.forward(config, weights, tokens), expected, what)


def attention_by_loops(config, w, x, layer, z):
    """x (T,C) -> (T,C): attention with loops over heads and queries, independent of model.py. Keys and values are
    projections of z (T,C)."""
    name = config.get("attention", "baseline")
    NH, NKV, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    group, T, w = NH // NKV, len(x), {n: t.numpy() for n, t in w.items()}
    g = int(name[-1]) if name.startswith("diff_grouped") else 1  # signal heads of a noise head
    q, k, v = (y @ w[f"self_attn.{p}_proj.weight"].T for p, y in zip("qkv", (x, z, z)))
    sliding = config.get("layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
    window = config["sliding_window"] if sliding else T
    DQ = D // 2 if name == "diff_scalar" else D
    DV = 2 * D if name.startswith("diff_v1") else D
    sigmoid = lambda z: 1 / (1 + np.exp(-z))

    def rotated(row, head, t, p):  # element i and i + DQ/2 as one complex number
        z = row[head * DQ : (head + 1) * DQ]
        if f"self_attn.{p}_norm.weight" in w:
            z = z / np.sqrt((z * z).mean() + config["rms_norm_eps"]) * w[f"self_attn.{p}_norm.weight"]
        z = z[: DQ // 2] + 1j * z[DQ // 2 :]
        return z * np.exp(1j * t * config["rope_theta"] ** (-2 * np.arange(DQ // 2) / DQ))

    def selected(t, head):
        """The blocks that a query head attends to. Of g + 1 heads the last is a noise head."""
        K, size = config["sparse_blocks"], config["sparse_block_size"]
        noise, of = lambda h: name != "baseline" and h % (g + 1) == g, len(q[0]) * DV // len(v[0]) // DQ
        voters = range(head // of * of, (head // of + 1) * of)
        key = lambda h: 2 * (h // of) + noise(h) if name.startswith("diff_v1") else h // of
        mean = lambda j, h: sum(rotated(k[u], key(h), u, "k") for u in range(j * size, (j + 1) * size)) / size
        vote = lambda j: sum((rotated(q[t], h, t, "q") * mean(j, h).conj()).real.sum() for h in voters)
        earlier = range(max(1, max(0, t - window + 1) // size), t // size)
        return {0, t // size, *sorted(earlier, key=vote, reverse=True)[:K]}

    def one_map(t, query_head, key_head, value_head, sink=None):
        a = rotated(q[t], query_head, t, "q")
        seen = [u for u in range(t + 1) if t - window < u]
        if config.get("sparse_blocks"):
            blocks = selected(t, query_head)
            seen = [u for u in seen if u // config["sparse_block_size"] in blocks]
        e = [math.exp((a * rotated(k[u], key_head, u, "k").conj()).real.sum() / math.sqrt(DQ)) for u in seen]
        total = sum(e) + (0 if sink is None else math.exp(sink))
        return sum(p / total * v[u, value_head * DV : (value_head + 1) * DV] for p, u in zip(e, seen))

    def mean_square_normed(row, eps):
        return row / np.sqrt((row * row).mean() + eps) * w["self_attn.subln.weight"]

    out, init = np.zeros((T, NH * D)), 0.8 - 0.6 * math.exp(-0.3 * layer)
    for t in range(T):
        for i in range(NH // 2 if name.startswith("diff_v1") else NH):
            if name.startswith(("diff_v2", "diff_grouped")):
                if name == "diff_v2_cross_group":
                    first, second = i, i + NH
                else:  # blocks of g + 1 heads
                    first, second = i // g * (g + 1) + i % g, i // g * (g + 1) + g
                kv1, kv2 = (j // ((NH + NH // g) // NKV) for j in (first, second))
                if name == "diff_v2_no_lambda":
                    s = 1
                elif name == "diff_v2_layer_lambda":
                    s = sigmoid(w["self_attn.lambda"][0])
                else:
                    s = w["self_attn.lambda_proj.weight"][i] @ x[t]
                    s = s if name == "diff_v2_no_sigmoid" else sigmoid(s)
                o = one_map(t, first, kv1, kv1) - s * one_map(t, second, kv2, kv2)
            elif name.startswith("diff_v1"):
                p = i // ((NH // 2) // (NKV // 2))
                dot = lambda n: w["self_attn.lambda_q" + n] @ w["self_attn.lambda_k" + n]
                s = math.exp(dot("1")) - math.exp(dot("2")) + init
                o = one_map(t, 2 * i, 2 * p, p) - s * one_map(t, 2 * i + 1, 2 * p + 1, p)
            elif name == "diff_scalar":
                g = i // group
                s = w["self_attn.lambda"][0]
                o = one_map(t, 2 * i, 2 * g, g) - s * one_map(t, 2 * i + 1, 2 * g + 1, g)
            else:
                sink = {"off_by_one": 0.0, "sink": w.get("self_attn.sinks", np.zeros(NH))[i]}.get(name)
                o = one_map(t, i, i // group, i // group, sink)
            if name in ("diff_v1", "diff_v2_norm"):
                o = mean_square_normed(o, 1e-5) * (1 - init)  # as published, whatever the other norms have
            out[t, i * DV : (i + 1) * DV] = o
        if name == "diff_scalar":
            out[t] = mean_square_normed(out[t], config["rms_norm_eps"])
        if "gated" in name:
            gate = sigmoid(w["self_attn.gate_proj.weight"] @ x[t])
            out[t] *= np.repeat(gate, D) if name.endswith("gated_head") else gate
    return out @ w["self_attn.o_proj.weight"].T


def test_attention_equals_the_table_written_as_loops():
    for variant, size in SHAPES:
        T = 28 if SIZES[size].sparse else 11
        config, weights, _, _ = case(variant, size, T=T, L=4)
        x, z = np.random.RandomState(3).standard_normal((2, T, config["hidden_size"]))
        for layer in (0, 3):  # diff_v1 depends on the layer
            w, shared = model.part(weights, f"model.layers.{layer}."), None
            if config.get("yoco") and layer == 3:
                assert "self_attn.k_proj.weight" not in w and "self_attn.v_proj.weight" not in w
                yoco = model.part(weights, "model.yoco.")
                w |= {"self_attn." + n: t for n, t in yoco.items() if n != "norm.weight"}
                shared = model.keys_and_values(config, yoco, torch.from_numpy(z)[None])
            expected = torch.from_numpy(attention_by_loops(config, w, x, layer, x if shared is None else z))
            got = model.attention(config, w, torch.from_numpy(x)[None], layer, shared)[0]
            expect_close(got, expected, f"{variant} {size} layer {layer}")


def test_baseline_attention_equals_the_library_kernel():
    if not hasattr(F, "scaled_dot_product_attention"):  # since PyTorch 2.0
        pytest.skip("this PyTorch has none")
    for size in "ab":
        config, weights, _, _ = case("baseline", size)
        w = {n[15:]: t for n, t in weights.items() if n.startswith("model.layers.0.")}
        x = normal(2, 9, config["hidden_size"])
        q, k, v = (x @ w[f"self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (t.unflatten(-1, (-1, config["head_dim"])) for t in (q, k, v))
        q, k = model.rope(q, config["rope_theta"]), model.rope(k, config["rope_theta"])
        repeats = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        expect_close(model.attention(config, w, x, 0), o @ w["self_attn.o_proj.weight"].T, size)


def test_a_token_changes_its_own_logits_and_no_earlier_ones():
    for variant, size in SHAPES:
        config, weights, tokens, _ = case(variant, size)
        t = tokens.shape[1] // 2
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % config["vocab_size"]
        a, b = model.forward(config, weights, tokens), model.forward(config, weights, changed)
        expect_close(b[:, :t], a[:, :t], f"{variant} {size} before")
        expect_different(b[:, t], a[:, t], f"{variant} {size} at t")
        expect_different(b[:, t + 1 :], a[:, t + 1 :], f"{variant} {size} after")


def with_types(config, window, types):
    return {**config, "sliding_window": window, "layer_types": [f"{t}_attention" for t in types]}


def test_a_window_of_all_positions_is_full_attention_and_full_layers_have_none():
    for variant, size in (v for v in SHAPES if v[1] in "wfv"):
        config, weights, tokens, _ = case(variant, size)
        L, T = config["num_hidden_layers"], config["max_position_embeddings"]
        full = {n: x for n, x in config.items() if n not in ("sliding_window", "layer_types")}
        expected = model.forward(full, weights, tokens)
        expect_close(model.forward(with_types(full, T, ["sliding"] * L), weights, tokens), expected, "window T")
        expect_close(model.forward(with_types(full, 1, ["full"] * L), weights, tokens), expected, "full layers")
        expect_different(model.forward(config, weights, tokens), expected, f"{variant} {size}")
        one = {**full, "sliding_window": 3}  # without layer_types, all layers have the window
        expected = model.forward(with_types(full, 3, ["sliding"] * L), weights, tokens)
        expect_close(model.forward(one, weights, tokens), expected, "no layer_types")


def test_a_token_reaches_the_positions_of_the_windows_of_all_layers():
    for variant, size in (v for v in SHAPES if v[1] == "w"):
        W, L = 4, 2
        config, weights, tokens, _ = case(variant, size, T=13, L=L)
        changed = tokens.clone()
        changed[:, 2] = (changed[:, 2] + 1) % config["vocab_size"]
        a, b = (model.forward(with_types(config, W, ["sliding"] * L), weights, x) for x in (tokens, changed))
        last = 2 + L * (W - 1)  # each layer passes it W-1 positions on
        expect_different(b[:, last], a[:, last], f"{variant} at {last}")
        expect_close(b[:, last + 1 :], a[:, last + 1 :], f"{variant} after {last}")


def shared_and_own(weights, config):
    """Weights of a YOCO model, and the same as those of a model without. Layers from L/2 have the norm of the shared
    keys and values. Layer L/2 adds nothing, such that the layer after it has the same input."""
    L, shared = config["num_hidden_layers"], dict(weights)
    for name in (f"model.layers.{L // 2}.{n}.weight" for n in ("self_attn.o_proj", "mlp.down_proj")):
        shared[name] = torch.zeros_like(shared[name])
    own = {}
    for prefix in (f"model.layers.{layer}." for layer in range(L // 2, L)):
        shared[prefix + "input_layernorm.weight"] = weights["model.yoco.norm.weight"]
        yoco = model.part(weights, "model.yoco.").items()
        own |= {f"{prefix}self_attn.{n}": t for n, t in yoco if n != "norm.weight"}
    return shared, {**{n: t for n, t in shared.items() if "yoco" not in n}, **own}


def test_yoco_is_a_plain_model_where_all_upper_layers_have_the_input_of_the_first():
    for variant, size in (v for v in SHAPES if v[1] in "yk"):
        config, weights, tokens, _ = case(variant, size, L=4)
        shared, own = shared_and_own(weights, config)
        expect_same_logits(config, shared, own, tokens, variant, yoco=False)
        # Layer 3 reads keys and values of the output of layer 1, not of layer 2
        name = "model.layers.2.mlp.down_proj.weight"
        shared[name] = own[name] = weights[name]
        expected = model.forward({**config, "yoco": False}, own, tokens)
        expect_different(model.forward(config, shared, tokens), expected, f"{variant}, layer 2 adds something")


def test_rope_equals_interleaved_pairs_after_a_permutation_of_rows():
    x = normal(2, 9, 3, 8)
    order = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7: pairs side by side
    pairs = torch.view_as_complex(x[..., order].view(2, 9, 3, 4, 2))
    frequency = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    angle = torch.arange(9, dtype=torch.float64)[:, None] * frequency
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(3)
    expect_close(model.rope(x, 10000.0)[..., order], turned, "rope")


def test_rope_makes_scores_depend_on_the_distance_only():
    q, k = normal(16).expand(1, 12, 1, 16), normal(2, 16)[1].expand(1, 12, 1, 16)
    scores = torch.einsum("bthd,bshd->ts", model.rope(q, 500.0), model.rope(k, 500.0))
    expect_close(scores[1:, 1:], scores[:-1, :-1], "shifted by one")
    expect_different(scores[1:, 0], scores[:-1, 0], "another distance")


def test_sink_at_zero_is_off_by_one_and_at_minus_infinity_baseline():
    for size in "ab":
        config, weights, tokens, _ = case("sink", size)
        names = ("off_by_one", "baseline")
        expected = [model.forward({**config, "attention": name}, weights, tokens) for name in names]
        expect_different(*expected, "off_by_one, baseline")
        for name, logit, wanted in zip(names, (0.0, -1e4), expected):
            w = {n: torch.full_like(t, logit) if n.endswith("sinks") else t for n, t in weights.items()}
            expect_close(model.forward(config, w, tokens), wanted, f"{name} {size}")


def with_projection(weights, name, logit):
    """Weights of a one-layer model in which projection `name` gives `logit` (a number, or one per
    row) for every token: embeddings have mean square 1 and first element 1, so that the first
    element after the norm is the same for all, and the projection reads no other."""
    w = dict(weights)
    e = w["model.embed_tokens.weight"].clone()
    C = e.shape[1]
    e[:, 1:] *= ((C - 1) / e[:, 1:].pow(2).sum(-1, keepdim=True)).sqrt()
    e[:, 0] = 1
    w["model.embed_tokens.weight"] = e
    first = w["model.layers.0.input_layernorm.weight"][0] / math.sqrt(1 + 1e-5)
    name = f"model.layers.0.self_attn.{name}_proj.weight"
    if name in w:
        w[name] = torch.zeros_like(w[name])
        w[name][:, 0] = logit / first
    return w


def test_an_open_gate_is_baseline_and_a_zero_gate_logit_halves_attention():
    for variant, size in (v for v in SHAPES if v[0].startswith("gated") and v[1] in "ab"):
        config, weights, tokens, _ = case(variant, size, L=1)
        o_proj = "model.layers.0.self_attn.o_proj.weight"
        for logit, share in ((50.0, 1.0), (0.0, 0.5)):
            w = with_projection(weights, "gate", logit)
            scaled = {**w, o_proj: w[o_proj] * share}
            expect_same_logits(config, w, scaled, tokens, f"{variant} {size}", attention="baseline")


def test_lambda_at_zero_leaves_the_first_map_as_a_baseline():
    for variant, size in (v for v in SHAPES if v[0] in ("diff_v2", "diff_v2_no_sigmoid") and v[1] in "abwf"):
        config, weights, tokens, _ = case(variant, size, L=1)
        w = with_projection(weights, "lambda", -50.0 if variant == "diff_v2" else 0.0)
        q_proj = "model.layers.0.self_attn.q_proj.weight"
        heads = w[q_proj].view(-1, config["head_dim"], config["hidden_size"])
        first = {**w, q_proj: heads[0::2].flatten(0, 1)}
        expect_same_logits(config, w, first, tokens, f"{variant} {size}", attention="baseline")


def test_lambda_at_one_is_no_lambda():
    for size in "ab":
        config, weights, tokens, _ = case("diff_v2", size, L=1)
        w = with_projection(weights, "lambda", 50.0)
        expect_same_logits(config, w, w, tokens, size, attention="diff_v2_no_lambda")


def test_no_sigmoid_is_diff_v2_when_its_logits_are_the_sigmoids():
    for size in "ab":
        config, weights, tokens, _ = case("diff_v2", size, L=1)
        logits = torch.linspace(-1, 2, config["num_attention_heads"], dtype=torch.float64)
        w, same = (with_projection(weights, "lambda", x) for x in (logits, torch.sigmoid(logits)))
        expect_same_logits(config, w, same, tokens, size, attention="diff_v2_no_sigmoid")


def test_grouped_noise_heads_are_diff_v2_with_copies_of_the_noise_heads():
    for variant, size in (v for v in SHAPES if v[0].startswith("diff_grouped")):
        config, weights, tokens, _ = case(variant, size)
        if config.get("sparse_blocks"):
            continue  # copies of a head count twice in the scores of its group
        g, w = int(variant[-1]), dict(weights)
        for name in (n for n in weights if n.endswith("q_proj.weight")):
            blocks = weights[name].view(-1, g + 1, config["head_dim"], config["hidden_size"])
            pairs = torch.stack((blocks[:, :g], blocks[:, g:].expand(-1, g, -1, -1)), 2)  # [block][signal][map]
            w[name] = pairs.reshape(-1, config["hidden_size"])
        expect_same_logits(config, weights, w, tokens, f"{variant} {size}", attention="diff_v2")


def test_an_own_lambda_is_that_of_a_projection_that_gives_the_same_number_for_every_token():
    config, weights, tokens, _ = case("diff_v2_layer_lambda", "a", L=1)
    weights = with_projection(weights, "lambda", 0)  # embeddings only
    own, NH = weights["model.layers.0.self_attn.lambda"], config["num_attention_heads"]
    weight = torch.zeros(NH, config["hidden_size"], dtype=torch.float64)
    projected = {**weights, "model.layers.0.self_attn.lambda_proj.weight": weight}
    projected = with_projection(projected, "lambda", own.expand(NH))
    expect_same_logits(config, weights, projected, tokens, "diff_v2_layer_lambda", attention="diff_v2")


def test_qk_norm_makes_attention_independent_of_the_length_of_queries_and_keys():
    for variant, size in (v for v in SHAPES if v[1] in "qvk"):
        config, weights, tokens, _ = case(variant, size)
        config["rms_norm_eps"] = 0.0
        longer = {n: t * (7.0 if n.endswith(("q_proj.weight", "k_proj.weight")) else 1.0) for n, t in weights.items()}
        expected = model.forward(config, weights, tokens)
        expect_close(model.forward(config, longer, tokens), expected, f"{variant} {size}")
        for p in "qk":
            longer = {n: t * (1.5 if n.endswith(p + "_norm.weight") else 1.0) for n, t in weights.items()}
            expect_different(model.forward(config, longer, tokens), expected, f"{variant} {size}, {p}_norm")


def test_cross_group_with_its_query_heads_reordered_differs_only_by_the_second_maps_group():
    for size in "ab":
        config, weights, tokens, _ = case("diff_v2_cross_group", size, L=1)
        q_proj, NH = "model.layers.0.self_attn.q_proj.weight", config["num_attention_heads"]
        heads = weights[q_proj].view(2, NH, config["head_dim"], -1)  # [map][head]
        w = {**weights, q_proj: heads.transpose(0, 1).flatten(0, 2)}  # [head][map]
        got, other = model.forward(config, weights, tokens), {**config, "attention": "diff_v2"}
        expect_different(got, model.forward(other, w, tokens), size)
        # With the same keys and values in every group, groups do not matter.
        for p in "kv":
            name = f"model.layers.0.self_attn.{p}_proj.weight"
            block = weights[name][: config["head_dim"]].repeat(config["num_key_value_heads"], 1)
            weights[name] = w[name] = block
        expect_close(model.forward(config, weights, tokens), model.forward(other, w, tokens), size)


def test_gradients_equal_a_central_difference_along_a_random_direction():
    for variant, size in SHAPES:
        config, weights, tokens, targets = case(variant, size)
        for t in weights.values():
            t.requires_grad_()
        total = lambda w: sum(model.loss(config, w, tokens, targets, ROUTER_AUX, ROUTER_Z, SIZES[size].z_loss))
        total(weights).backward()
        generator = torch.Generator().manual_seed(4)
        direction = {n: normal(*t.shape, generator=generator) for n, t in weights.items()}
        slope = sum(float((t.grad * direction[n]).sum()) for n, t in weights.items() if t.grad is not None)
        moved = lambda h: {n: t.detach() + h * direction[n] for n, t in weights.items()}
        value = lambda h: float(total(moved(h)))
        h = 1e-6  # fourth order: truncation h^4, rounding 1e-16/h; so small that no token goes to other experts
        numeric = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
        # A slope over thousands of weights is of order 1 and far from 0.
        assert abs(numeric - slope) <= 1e-7 * max(1, abs(slope)), f"{variant} {size}: {numeric} and {slope}"


def test_what_has_no_meaning_is_refused():
    for variant, changes in (
        ("diff_v2_cross_group", {"NKV": 1}),
        ("diff_v1", {"NH": 3, "NKV": 3}),
        ("diff_grouped_4", {"NH": 6, "NKV": 1}),
        ("baseline", {"NH": 3, "NKV": 2}),
        ("baseline", {"L": 3}),
    ):
        with pytest.raises(ValueError):
            case(variant, "y" if "L" in changes else "a", **changes)


HEAD_NORM = 'w[of + "_norm.weight"]'
NORM_THEN_ROPE = """
        y = rmsnorm(y, w[of + "_norm.weight"], config["rms_norm_eps"])
    return"""
ROPE_THEN_NORM = """
        return rmsnorm(rope(y, config["rope_theta"]), w[of + "_norm.weight"], config["rms_norm_eps"])
    return"""
WINDOW, NOISE = 'return config.get("sliding_window")', "(v.signals + 1) + v.signals]"

# Faults in model.py that the fixtures of these variants, "" for all, and sizes must show.
PLANTED = [
    ("a window longer by one", WINDOW, 'return config["sliding_window"] + 1', "", "wfyvk"),
    ("a window shorter by one", WINDOW, 'return config["sliding_window"] - 1', "", "wfyvk"),
    ("windows in full layers", 'types[layer] == "sliding_attention"', "True", "", "fyvk"),
    ("shared keys of each layer's input", " and shared is None", "", "", "y"),
    ("shared keys with the layer's norm", 'yoco["norm.weight"]', 'w["input_layernorm.weight"]', "", "yk"),
    ("shared keys with another epsilon", 'yoco["norm.weight"], eps', 'yoco["norm.weight"], 1e-5', "", "yk"),
    ("QK-norm after the rotation", NORM_THEN_ROPE, ROPE_THEN_NORM, "", "qvk"),
    ("QK-norm with another epsilon", HEAD_NORM + ', config["rms_norm_eps"]', HEAD_NORM + ", 1e-5", "", "qvk"),
    ("QK-norm without the weight of queries", HEAD_NORM, f'(1 if of == "q" else {HEAD_NORM})', "", "qvk"),
    ("QK-norm without the weight of keys", HEAD_NORM, f'(1 if of == "k" else {HEAD_NORM})', "", "qvk"),
    ("the noise head before its signal heads", NOISE, "(v.signals + 1)]", "diff_grouped", "aby"),
    ("a bias that does not select", "logits if bias is None else p + bias", "logits", "", "e"),
    ("a bias in the weights", "weight = p * picked", "weight = (p + (0 if bias is None else bias)) * picked", "", "e"),
    ("weights of experts that do not sum to 1", " / (p * picked).sum(-1, keepdim=True)", "", "", "mxe"),
    ("no shared experts", "        if mlp_width(config", "        if not has_experts(config", "", "x"),
]


def test_the_fixtures_equal_those_that_are_made_now():
    faults = []
    for seed, ((variant, size), shape) in zip(SEEDS, SHAPES.items()):
        data = make_fixture(seed, variant, size, shape)
        faults += check_fixture(FIXTURES / f"{variant}_{size}.safetensors", data)[0]
    assert not faults, f"{len(faults)} faults; the first: {faults[0]}"


def test_the_fixtures_show_planted_faults():
    source = Path(model.__file__).read_text()
    for what, old, new, variants, sizes in PLANTED:
        assert source.count(old) == 1, old
        faulty = {}
        exec(source.replace(old, new), faulty)
        for variant, size in (v for v in SHAPES if v[1] in sizes and variants in v[0]):
            arrays = arrays_of((FIXTURES / f"{variant}_{size}.safetensors").read_bytes())
            config = make_config(variant, SIZES[size], **dict(zip(COLUMNS[1:], SHAPES[variant, size][1:])))
            weights = {n: torch.from_numpy(a.astype(np.float64)) for n, a in arrays.items() if is_weight(n)}
            tokens = torch.from_numpy(arrays["tokens"].astype(np.int64))
            batch = [t.view(-1, config["max_position_embeddings"]) for t in (tokens[:-1], tokens[1:])]
            expected = float(arrays["loss"][0])
            difference = abs(float(faulty["loss"](config, weights, *batch)[0]) / expected - 1)
            assert difference > 1e-6, f"{variant}_{size}, {what}: the loss differs by {difference:.1e} only"
            assert abs(float(model.loss(config, weights, *batch)[0]) / expected - 1) < TOLERANCE, f"{variant}_{size}"
