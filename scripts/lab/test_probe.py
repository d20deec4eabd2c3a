"""test_probe.py: tests of the command `probe`: maps, blocks of o_proj and rows of attention whose statistics follow
from a calculation by hand, classes of tokens, and dumps of the trainer."""

import json
import math
import random
import subprocess
from functools import partial

import numpy as np
import pytest

from . import probe
from .testing import TRAINER, expect_error, run_lab, write_shard

probed = partial(run_lab, "probe")
VARIANTS = (
    "baseline diff_v2 diff_v2_cross_group diff_v2_no_lambda diff_v2_no_sigmoid diff_v2_signed diff_v2_head_lambda "
    "diff_v2_layer_lambda diff_v2_gated_head diff_v2_gated_elem diff_v2_xsa diff_v2_norm diff_grouped_2 diff_grouped_4 "
    "diff_v1 diff_v1_no_norm diff_scalar off_by_one sink gated_head gated_elem xsa"
).split()
T = 6
MEASURED = ["mean", "sd", "count"]
PERMUTED = [[4, 1, 3, 6, 0, 2, 5, 7], [4, 2, 6, 0, 5, 1, 7, 3]]  # of 8 by the trainer, seed 12345, epochs 1 and 2


def near(got, wanted, tolerance=1e-12):
    assert abs(got - wanted) <= tolerance, f"{got!r}, wanted {wanted!r}"


# ---- maps


def visible(size, window=0):
    t = np.arange(size)
    return (t <= t[:, None]) & ((t > t[:, None] - window) if window else True)


def linear_map(step, window=0):
    """Uniform rows that decay towards the past (step > 0) or the present (step < 0), within a window (0: none)."""
    map = np.zeros((T, T), np.float32)
    for t in range(T):
        first = max(0, t - window + 1) if window else 0
        n = t + 1 - first
        map[t, first : t + 1] = [1 / n + step * (j - (n - 1) / 2) / (n * n) for j in range(n)]
    return map


def of_pair(a1, a2, s, window=0):
    found = {name: probe.Mean() for name in ("correlation", "cancelled", "negative")}
    probe.pair_statistics(found, a1[None], a2[None], np.full((1, T), float(s)), visible(T, window))
    return found


def test_the_effective_rank_of_a_map_of_one_position_is_1_and_of_the_identity_t():
    maps = np.zeros((4, 64, 64))
    maps[1, :, 0], maps[2] = 1, np.eye(64) / 4  # the first is zero, and has no rank
    maps[3, 0, 0], maps[3, 1, 1] = 3, -1  # 3/4 and 1/4
    wanted = (1, 64, math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))
    ranks = probe.effective_ranks(maps)
    assert len(ranks) == 3 and np.allclose(ranks, wanted, rtol=1e-11, atol=0), ranks
    assert probe.effective_ranks(maps[:1]).size == 0 and probe.Mean().value() is None


def test_statistics_of_a_pair_of_maps_equal_a_calculation_by_hand():
    tolerance, up, down = 8 * 2.0**-24, linear_map(1), linear_map(-1)  # elements are floats
    for s in (-1.5, -0.5, 0, 0.25, 0.5, 1, 3):  # equal maps: E = (1 - s) A
        p = of_pair(up, up, s)
        near(p["correlation"].value(), 1, 1e-9)
        near(p["cancelled"].value(), 1 - abs(1 - s) / (1 + abs(s)), tolerance)
        assert (p["correlation"].count, p["cancelled"].count) == (T - 2, T), s
        assert (p["negative"].count, p["negative"].sum) == (0 if s == 1 else T, T if s > 1 else 0), s
    near(of_pair(up, down, 0.5)["correlation"].value(), -1, 1e-6)
    uniform = linear_map(0)
    uniform.ravel()[::2] = np.nextafter(uniform.ravel()[::2], np.float32(1))
    assert of_pair(up, np.where(visible(T), uniform, 0), 0.5)["correlation"].count == 0
    p = of_pair(linear_map(1, 2), linear_map(1, 2), 0.5, 2)
    assert (p["correlation"].count, p["cancelled"].count) == (0, T)
    up, down = linear_map(1, 3), linear_map(-1, 3)  # 3 visible keys: rows 1/3 + step (-1, 0, 1)/9 from row 2 on
    down[1, :2] = up[1, :2]
    p = of_pair(up, down, 2, 3)  # E = A1 - 2 A2 = (2-8, 3-6, 4-4)/9 = (-6, -3, 0)/9; in rows 0 and 1, -A1
    assert p["correlation"].count == T - 2 and p["negative"].value() == 1
    near(p["cancelled"].value(), 1 - 1 / 3, tolerance)
    p = of_pair(up, down, 0.8, 3)  # E = (2 - 3.2, 3 - 2.4, 4 - 1.6)/9 = (-1.2, 0.6, 2.4)/9
    near(p["cancelled"].value(), (2 * (1 - 0.2 / 1.8) + 4 * (1 - 4.2 / 9 / 1.8)) / 6, tolerance)
    near(p["negative"].value(), 4 * (1.2 / 4.2) / 6, tolerance)


# ---- blocks of o_proj


def blocks(heads, seed, to=0, source=0, factor=0.0):
    """o_proj of random elements; head `to` is `factor` times head `source`, unless factor is 0."""
    w = np.random.default_rng(seed).uniform(-1, 1, (40, heads, 8))
    if factor:
        w[:, to] = factor * w[:, source]
    return w.reshape(40, -1)


def test_opposite_blocks_of_o_proj_are_found_in_one_group_only():
    least, found = 1 / (1 + probe.DRAWS), probe.subtraction(blocks(2, 1, 1, 0, -0.5), 2, 1, 1)
    for name in ("adjacent", "closest"):
        near(found[name], 1, 1e-14)
        drawn = found[f"{name}_permuted"]
        assert found[f"{name}_p"] == least and drawn["low"] < drawn["mean"] < drawn["high"] < 0.5, found
    found = probe.subtraction(blocks(2, 1, 1, 0, 2), 2, 1, 1)
    near(found["adjacent"], -1, 1e-14)
    assert found["adjacent_p"] == 1 and found["heads_in_group"] == 2
    zeros = blocks(2, 1)
    zeros[:, 8:] = 0  # all draws are equal to the observed value
    found = probe.subtraction(zeros, 2, 1, 1)
    assert found["adjacent"] == 0 and found["adjacent_p"] == 1, found
    found = probe.subtraction(blocks(4, 1, 2, 1, -1), 4, 2, 1)  # opposite heads of different groups
    assert found["closest"] < 0.5 and found["adjacent"] < 0.5, found
    found = probe.subtraction(blocks(4, 1, 2, 1, -1), 4, 1, 1)  # no adjacent pair, but two of four have a closest one
    assert found["closest"] > 0.5 and found["closest_p"] == least and found["adjacent"] < 0.5, found
    found = probe.subtraction(blocks(6, 1, 2, 0, -1), 6, 2, 1)
    assert found["adjacent"] is None and found["adjacent_p"] is None and found["closest"] > 1 / 3, found
    assert found["adjacent_permuted"]["mean"] is None and probe.subtraction(blocks(2, 1), 2, 2, 1) is None


def test_random_blocks_of_o_proj_give_uniform_p_and_the_cosines_of_a_direct_calculation():
    # p is uniform without a relation: the mean of 20 has a standard deviation of 1/sqrt(240).
    ps = {"adjacent": [], "closest": []}
    for seed in range(1, 21):
        w = blocks(4, 100 + seed)
        found, heads = probe.subtraction(w, 4, 2, seed), [w[:, 8 * h : 8 * h + 8].ravel() for h in range(4)]
        cosine = lambda x, y: -(x @ y) / math.sqrt((x @ x) * (y @ y))
        wanted = (cosine(*heads[:2]) + cosine(*heads[2:])) / 2
        for name, values in ps.items():
            near(found[name], wanted, 1e-14)
            values.append(found[f"{name}_p"])
    assert all(min(p) > 2e-3 and abs(sum(p) / 20 - 0.5) < 4 / math.sqrt(240) for p in ps.values()), ps


def test_permutations_are_those_of_the_trainer():
    found = probe.permutations(8, 2**64 - 5, np.arange(1, 200))
    assert (np.sort(found, 1) == np.arange(8)).all() and len({tuple(row) for row in found}) > 190
    assert probe.permutations(8, 12345, np.arange(1, 3)).tolist() == PERMUTED, found


# ---- classes of tokens


def test_punctuation_is_ascii_punctuation_apart_from_white_space():
    for text in (b",", b" ,", b"...\n", b"}\t;"):
        assert probe.is_punctuation(text), text
    for text in (b"", b" \n", b"a.", b"\xe2\x80\xa6", b".\xc3", b"7"):
        assert not probe.is_punctuation(text), text


def test_rare_tokens_are_the_least_frequent_ones_that_are_not_punctuation():
    # 100 bytes: of them may 5 be rare. "xyz" are rare with 1 + 2 + 2; of three that occur twice, the two larger.
    for text, rare in ((b"xyyzzqqq,,;", b"xyz"), (b"uuvvwwqqq,,;", b"wv")):
        tokens = np.array([[text[t] if t < len(text) else b" e"[t % 2] for t in range(100)]])
        for V in (256, 257):
            dump = type("Dump", (), {"counts": np.bincount(tokens[0], minlength=V)})
            texts = probe.token_texts(None, V)
            assert (texts is None) == (V == 257)
            found = [probe.CLASSES[c] for c in probe.token_classes(dump, tokens, texts)[0]]
            for t in range(1, 100) if texts else ():
                c = tokens[0, t]
                assert found[t] == ("punctuation" if c in b",;" else "rare" if c in rare else "other"), (text, chr(c))
            assert found[0] == "first" and (texts or (found[len(text) - 1] == "rare" and found[99] == "other"))


# ---- rounding


def row_of(q, k, v, lse=None):
    """One query head of one window: q and k of width 1, v [T, DV]."""
    column = lambda x: np.array(x, np.float32).reshape(1, 1, -1, 1)
    lse = np.zeros((1, 1, len(q))) if lse is None else np.array(lse).reshape(1, 1, -1)
    return probe.Attention(column(q), column(k), lse, 0, [0]), np.array(v, np.float32).reshape(1, 1, len(q), -1)


def test_rounding_errors_of_attention_equal_those_of_a_calculation_by_hand():
    # one key: the output is its value, so that only the values' own rounding is an error
    attention, v = row_of([1], [1], [[1.0009765625, 2]])
    rounded, exact = probe.to_bf16(v), probe.exact_rows(attention, v, False)
    assert rounded.tolist() == [[[[1, 2]]]]
    got, same = probe.emulated_rows(attention, rounded), probe.exact_rows(attention, rounded, False)
    assert probe.errors(got, same, same).tolist() == [0]
    near(probe.errors(got, exact, exact)[0], 2.0**-10 / math.sqrt(1.0009765625**2 + 4))
    # logits 0 and -1, values 0 and 1: exp(-1) rounds to 188/512, and 188/512 / (1 + exp(-1)) to 137/512
    exact = math.exp(-1) / (1 + math.exp(-1))
    attention, v = row_of([0, -1], [0, 1], [[0], [1]], [0, math.log1p(math.exp(-1))])
    rows = probe.exact_rows(attention, v, False)
    found = probe.errors(probe.emulated_rows(attention, v), rows, rows)
    assert len(found) == 1  # the first row is zero
    near(found[0], abs(137 / 512 - exact) / exact)
    stored, rows = np.array([0, 1.25 * exact]).reshape(1, 1, 2, 1), probe.exact_rows(attention, v, True)
    near(probe.errors(stored, rows, rows)[0], 0.25, 1e-6)  # as a device may have computed it
    assert probe.to_bf16(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1e-40])).tolist()[:2] == [1, 1 + 2.0**-6]


# ---- dumps of the trainer


def trained(place, *options, seq=40):
    """(dump, checkpoint) of a model after 2 steps."""
    letters = random.Random(1).choices(b"abcdefgh ,.xyz", [9] * 11 + [1] * 3, k=3000)
    write_shard(place / "val.bin", letters)
    model = f"--layers 2 --hidden 24 --heads 8 --kv-heads 2 --head-dim 8 --ffn 20 --seq-len {seq} --batch-size 1"
    data = ["--train-data", place / "val.bin", "--val-data", place / "val.bin", "--threads", "1"]
    run(TRAINER, *model.split(), *options, *data, "--total-batch", seq, "--steps", 2, "--out", place / "run")
    checkpoint = place / "run/checkpoints/step_00000002"
    words = ["--init", checkpoint, *data[2:], "--val-steps", 3, "--batch-size", 3, "--eval-out", place / "eval.json"]
    run(TRAINER, "--eval", *words, "--dump-qkv", place / "qkv")
    return place / "qkv", checkpoint


def run(*words):
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


def expect_variant(place, variant, *options):
    """The probe and the rounding errors of a variant: ranges, counts, and what the forward has stored in the lse."""
    path, checkpoint = trained(place, "--attention", variant, *options)
    dump = probe.Dump(path)
    config = json.loads((checkpoint / "config.json").read_text())
    found, rounding = probe.probe(dump, checkpoint, config, None, 1), probe.rounding(dump, False)
    assert found["windows"] == 9 and found["positions"] == 40 and found["token_text"] and found["step"] == 2, found
    pairs = dump.noise > 0
    assert pairs == variant.startswith("diff"), variant
    for l, layer in enumerate(found["layers"]):
        maps, attention = layer["maps"], dump.attention("maps", l)
        heads = len(dump.output_heads(len(attention.q))[0])
        for head in range(len(attention.q)):  # rows of maps sum to 1, or with a sink to less
            sums = attention.maps(head).sum(2)
            assert (sums < 1 + 1e-5).all() and (variant in ("sink", "off_by_one") or (sums > 1 - 1e-5).all()), variant
        ranks = [maps[key] for key in maps if "rank" in key and maps[key] is not None]
        assert len(ranks) == (3 if pairs else 1) and all(1 <= rank <= 40 for rank in ranks), (variant, maps)
        assert (layer["subtraction"] is None) == pairs, layer
        own = rounding["layers"][l]
        assert 2.0**-12 < own["heads_mean"] < 2.0**-8 < own["heads_max"] * 4 and rounding["emulated"], own
        assert own["heads_of_inputs_mean"] > 0 and (own["combined_mean"] is None) == (not pairs), own
        if not pairs:
            assert layer["lambda"] is None and maps["cancelled"] is None
            continue
        assert -1 <= maps["correlation"] <= 1 and 0 <= maps["cancelled"] <= 1 and 0 <= maps["negative"] <= 1, maps
        assert own["heads_mean"] <= own["combined_mean"], own
        counts = {name: values["count"] for name, values in layer["lambda"].items()}
        assert counts["all"] == 9 * 40 * heads and counts["first"] == 9 * heads, counts
        assert sum(counts.values()) == 2 * counts["all"] and counts["punctuation"] > 0 and counts["rare"] > 0, counts
        s = dump.part("maps", f"layer.{l}.s")
        near(layer["lambda"]["all"]["mean"], float(np.mean(s)))
        if variant == "diff_v2_no_lambda":
            assert (s == 1).all()


@pytest.mark.full
def test_all_variants_are_probed_with_windows_yoco_and_qk_norm(tmp_path):
    for i, variant in enumerate(VARIANTS):
        options = ([], ["--window", "5", "--full-every", "2"], ["--window", "5", "--yoco", "--qk-norm"])[i % 3]
        (tmp_path / variant).mkdir()
        expect_variant(tmp_path / variant, variant, *options)


def test_the_probe_writes_json_and_adds_rounding_errors_to_an_evaluation(tmp_path):
    path, checkpoint = trained(tmp_path, "--attention", "diff_v2")
    before = json.loads((tmp_path / "eval.json").read_text())
    done = probed(path, "--checkpoint", checkpoint, "--out", tmp_path / "x.json", "--rounding", tmp_path / "eval.json")
    assert done.returncode == 0, done.stderr
    assert "parameters: the first 40 tokens of 9 windows; ranks of 9" in done.stdout, done.stdout
    assert "factor of the noise heads by token\n" in done.stdout and "rounding errors of emulated" in done.stdout
    found, after = (json.loads((tmp_path / name).read_text()) for name in ("x.json", "eval.json"))
    assert found["parameters"] == json.loads((tmp_path / "run/run.json").read_text())["model"]["parameters"], found
    assert found["attention"] == "diff_v2" and len(found["layers"]) == 2
    keys = "attention step parameters windows positions rank_windows token_text seed layers"
    assert [*found] == keys.split() and [*found["layers"][0]] == ["layer", "subtraction", "maps", "lambda"]
    assert [*found["layers"][0]["lambda"]] == [*probe.CLASSES] and [*found["layers"][0]["lambda"]["all"]] == MEASURED
    assert after.pop("attention_rounding")["tokens"] == 40 and after == before
    again = probed(path, "--checkpoint", checkpoint, "--out", tmp_path / "y.json")
    assert again.returncode == 0 and (tmp_path / "y.json").read_bytes() == (tmp_path / "x.json").read_bytes()


@pytest.mark.full
def test_the_probe_refuses_what_it_cannot_read_in_one_line(tmp_path):
    path, checkpoint = trained(tmp_path)
    expect_error(probed(path, "--checkpoint", checkpoint), 2, "--out or --rounding is required", 1)
    (tmp_path / "cut").write_bytes(path.read_bytes()[:5000])
    (tmp_path / "text").write_text("nothing")
    for name, header in (("list", b"[1]"), ("empty", b'{"w":{}}')):
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
    out = ("--out", tmp_path / "x.json")
    for name, said in (
        ("none", "No such file"),
        ("cut", ": damaged, or no tensor"),
        ("empty", ": damaged, or no tensor"),
        ("text", ": damaged, or not a safetensors file"),
        ("list", ": damaged, or not a safetensors file"),
    ):
        expect_error(probed(tmp_path / name, "--checkpoint", checkpoint, *out), 1, said, 1)
    expect_error(probed(checkpoint / "model.safetensors", "--checkpoint", checkpoint, *out), 1, "no tensor counts", 1)
    expect_error(probed(path, "--checkpoint", tmp_path, *out), 1, "config.json: No such file", 1)
    words = ("--checkpoint", checkpoint, *out, "--tokenizer")
    expect_error(probed(path, *words, tmp_path / "text"), 1, "not a tokenizer.bin, or damaged", 1)
    expect_error(probed(path, "--checkpoint", checkpoint, "--rounding", tmp_path / "text"), 1, "text: not JSON", 1)
    assert not (tmp_path / "x.json").exists()
