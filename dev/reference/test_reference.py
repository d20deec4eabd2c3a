"""
Tests of model.py: a second formulation of attention, and the fixtures, which must be those of model.py. test_hub.py
compares them with other implementations of the whole model.

All use double precision and the shapes of the fixtures. Values are of order 1 and sums have fewer than 200 terms, so
two correct formulations agree to about 1e-14; the tolerance is 1e-12.
"""

import math

import numpy as np
import pytest
import torch

import model
import make_muon_fixture
from fixtures import safetensors_read
from make_fixtures import COLUMNS, FIXTURES, SEEDS, SHAPES, SIZES, arrays_of, make_config, make_fixture

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


def expect_close(a, b, what):
    difference = float(abs(a - b).max() / abs(b).max())
    assert a.shape == b.shape and difference <= TOLERANCE, f"{what}: relative difference {difference:.1e}"
    WORST[0] = max(WORST[0], difference)


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
        """The blocks that a query head attends to. The last of g + 1 heads is a noise head."""
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


def test_what_has_no_meaning_is_refused():
    for variant, changes in (
        ("diff_v2_cross_group", {"NKV": 1}),
        ("diff_v1", {"NH": 3, "NKV": 3}),
        ("diff_grouped_4", {"NH": 6, "NKV": 1}),
        ("baseline", {"NH": 3, "NKV": 2}),
        ("baseline", {"L": 3}),
    ):
        with pytest.raises(ValueError):
            case(variant, "yoco" if "L" in changes else "odd", **changes)


def test_the_fixtures_equal_those_that_are_made_now():
    for seed, ((variant, size), shape) in zip(SEEDS, SHAPES.items()):
        name = f"{variant}.{size}.safetensors"
        (found, metadata), (wanted, wanted_metadata) = (
            safetensors_read(data)
            for data in ((FIXTURES / name).read_bytes(), make_fixture(seed, variant, size, shape))
        )
        assert metadata == wanted_metadata and list(found) == list(wanted), f"{name}: the header differs"
        for tensor, (dtype, sizes, data) in wanted.items():
            assert found[tensor][:2] == (dtype, sizes), f"{name}: the header of {tensor} differs"
            if dtype != "F64":
                assert found[tensor][2] == data, f"{name}: {tensor} differs"
            elif any(data):  # the gradient of a bias that only selects is 0
                expect_close(*map(np.frombuffer, (found[tensor][2], data)), f"{name}: {tensor}")
            else:
                assert not any(found[tensor][2]), f"{name}: {tensor} differs"
    files = {path.name for path in FIXTURES.iterdir()}
    assert files == {f"{variant}.{size}.safetensors" for variant, size in SHAPES}


def test_the_fixture_of_muon_is_made_now_and_by_torch_within_the_rounding_of_bf16():
    stored = arrays_of(make_muon_fixture.FILE.read_bytes())
    for name, weight, grads in make_muon_fixture.matrices():
        after = make_muon_fixture.updated(weight, grads)
        moved = (after - weight).norm()
        assert (after - torch.tensor(stored[f"after.{name}"])).norm() < 1e-5 * moved, name
        assert (after - make_muon_fixture.updated_by_torch(weight, grads)).norm() < 0.05 * moved, name
