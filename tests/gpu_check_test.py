"""Parts of dev/gpu_check alone: the comparison of gradients, with constructed ones, and the length of issue.txt.
tests/gpu_check_test.sh runs the whole check."""

import struct
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "dev/gpu_check"), str(ROOT / "dev/reference")]
import fixtures
import gradient_comparison
import results

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


def test_issue_txt_fits_into_an_issue_with_the_counts_at_its_end():
    rows = [{"verdict": "FAIL", "case": f"case {i}", "note": "x" * 300} for i in range(2000)]
    rows += [{"verdict": "missed", "case": f"target {i}", "measured": 1, "note": "y" * 300} for i in range(300)]
    part = {"status": "failed", "why": "", "seconds": 1, "done": [], "rows": rows}
    text = results.table({"commit": "c", "device": "d", "driver": "r", "parts": {"ops": part}}, results.CHARACTERS)
    assert 0.9 * results.CHARACTERS < len(text) < results.CHARACTERS < 65536 and text.startswith("commit c")
    assert "more lines: results.json has all" in text and text.endswith("\n0 passed, 2000 failed")
