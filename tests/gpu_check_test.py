"""Parts of dev/gpu_check alone: the comparison of gradients, with constructed ones; batch sizes; names of results.
tests/gpu_check_test.sh runs the whole check. Requires build/predict_diffv2."""

import struct
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev/gpu_check"), str(ROOT / "dev/reference")]
import fixtures
import gradient_comparison
import peer
import results
import runner
import speed

NAN = float("nan")


def compared(directory, cpu, device, variant, build):
    """What is wrong with gradients {name: numbers} of the device, and the note."""
    for name, gradients in (("cpu", cpu), ("device", device)):
        rows = {"loss": [3.0], "model.norm.weight": [1.0, 2.0], **gradients}
        shape = lambda n: [1, len(rows[n])] if "lm_head" in n or "experts" in n else [len(rows[n])]
        tensors = {n: ("F32", shape(n), struct.pack(f"<{len(row)}f", *row)) for n, row in rows.items()}
        (directory / name).write_bytes(fixtures.safetensors_bytes(tensors, {}))
    return gradient_comparison.compare(str(directory / "cpu"), str(directory / "device"), variant, build)[:2]


def vectors(factors):
    """The vectors of layers, each times the factor of its layer."""
    rows = {"lm_head.weight": [1.0, -1.0]}
    for layer, factor in enumerate(factors):
        for name, size in (("input_layernorm.weight", 2), ("self_attn.sinks", 1), ("self_attn.lambda", 0.01 + layer)):
            rows[f"model.layers.{layer}.{name}"] = [factor * size, -factor * size]
    return rows


def test_vectors_of_a_bf16_build_are_compared(tmp_path):
    right = (1.03, 0.98)
    for factors, build in product((right, (1, 1.07), (1.07, 1), (1, -1), (1, NAN)), ("bf16", "fp32")):
        wrong, note = compared(tmp_path, vectors((1, 1)), vectors(factors), "sink", build)
        assert (not wrong) == (factors is right and build == "bf16"), (factors, build, note)
        assert not wrong or ("sinks: error" in note and "layernorm.weight: error" in note)


def test_gradients_of_experts_may_differ_by_a_few_tokens_in_bf16_if_routers_select(tmp_path):
    few = [4.2, 3], [0, 0.3], [0.1, 0]  # other tokens of two experts that have few
    others = ([2, 3], [0.3, 0], [0, 0]), ([4, 3], [0.3, 0], [2, 0]), ([4, 3], [0.3, 0], [NAN, 0])
    named = lambda rows: {f"model.layers.0.block_sparse_moe.experts.{e}.w1.weight": r for e, r in enumerate(rows)}
    for experts, *case in product((few, *others), ("experts, moe-tiny", "experts, all active"), ("bf16", "fp32")):
        wrong, note = compared(tmp_path, named(([4, 3], [0.3, 0], [0, 0])), named(experts), *case)
        assert (not wrong) == (experts is few and case == ["experts, moe-tiny", "bf16"]), (experts, case, note)


def largest_batch(gib, device, *arguments, **options):
    """The batch size of a check on a device with so much free memory."""
    check = runner.Check.__new__(runner.Check)
    check.store = SimpleNamespace(all={"device": device})
    check.programs = SimpleNamespace(unusable={}, commands={"PREDICT_DIFFV2": [str(ROOT / "build/predict_diffv2")]})
    done = lambda command: subprocess.run([str(word) for word in command], capture_output=True, text=True)
    check.run = lambda command, limit: (lambda d: (d.returncode, d.stdout + d.stderr))(done(command))
    check.free_bytes = gib * 2**30
    return check.largest_batch(*arguments, **options)


def test_batch_sizes_are_those_that_fit_into_the_device():
    h100, h200 = (78.5, "NVIDIA H100 80GB HBM3"), (139, "NVIDIA H200")
    case, table = ("1.4b", "diff_v2", 8, 2048), ("3b", "diff_v2", 12, 4096)
    assert [largest_batch(*h, case, (8, 4, 2, 1), peer.BESIDE) for h in (h100, h200)] == [2, 8]
    assert largest_batch(*h100, case, (16, 8, 4), 2) is None and largest_batch(*h200, case, (8, 4), 2) == 8
    whole = [largest_batch(*h, table, (4, 2, 1)) for h in (h100, h200)]
    part = [largest_batch(*h, table, (4, 2, 1), without=speed.NO_UPDATE) for h in (h100, h200)]
    assert whole[0] in (None, 1) and part == [4, 4]


def test_the_name_of_results_is_that_of_the_device(tmp_path):
    for device, name in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Unknown", "device"),
    ):
        store = results.Store(tmp_path / name, "abc", "digest", ["rates"])
        store.describe(device, "580", [])
        store.save()
        assert store.publish(tmp_path).name.startswith(f"gpu-{name}-20")


def test_a_device_that_is_not_listed_has_no_prediction():
    rows, check = [], SimpleNamespace(device=lambda: None, store=SimpleNamespace(all={"device": "NVIDIA L4"}))
    findings = SimpleNamespace(fact=lambda what, value: rows.append((what, value)))
    speed.beside_prediction(check, findings, "1.4b", [], [{"case": "outside", "measured": 1.0}])
    assert rows == [("1.4b: no prediction", "NVIDIA L4 is not listed")]
    whole = runner.Check.__new__(runner.Check)
    whole.pretend, whole.store = False, check.store
    assert whole.device() is None


def test_a_check_that_passes_midnight_publishes_under_one_name(tmp_path, monkeypatch):
    days = iter(("2026-11-28", "2026-11-29", "2026-11-30"))
    monkeypatch.setattr(results.time, "strftime", lambda form: next(days))
    store = results.Store(tmp_path / "check", "commit", "sources", [])
    store.save()
    assert store.publish(tmp_path / "published") == store.publish(tmp_path / "published")
    assert len(list((tmp_path / "published").iterdir())) == 2
