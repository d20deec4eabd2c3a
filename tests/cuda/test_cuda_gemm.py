"""The types and algorithms of matrix products: --gemm fp8 by device, and --tune-gemm."""

import re

import pytest
from device import FP32, ODD, PRECISION, TRAIN_ODD, on_cpu, on_device
from program import FAILED, checkpoint, differing, expect_same, lose_checkpoints, read_json

TIMED = " matrix products timed in "
STARTED = f"{TRAIN_ODD} --sdpa own --steps 3 --stop-after 1 --out run"
MOMENTS = ["optimizer.safetensors"]


def quiet(directory, *options, env=""):
    """What a start prints that has no warnings."""
    result = on_device(directory, *options, env=env).done()
    assert result.err == ""
    return result.out


def restart(directory, *changes):
    """Starts a run again before its first checkpoint, after changes of its run.json: patterns and replacements."""
    path = directory / "run/run.json"
    for pattern, replacement in changes:
        text = path.read_text()
        path.write_text(re.sub(pattern, replacement, text))
        assert path.read_text() != text, pattern
    lose_checkpoints(directory / "run")
    return quiet(directory, "--resume --out run --stop-after 1")


def test_gemm_choices(odd):
    """a resume uses the algorithms that --tune-gemm has chosen, and measures only products without one"""
    run = odd / "run"
    assert TIMED in quiet(odd, STARTED, "--tune-gemm --checkpoint-every 1 --keep 0")
    assert TIMED not in quiet(odd, "--resume --out run")
    first, last = (read_json(checkpoint(run, step) / "trainer_state.json")["gemm_choices"] for step in (1, 3))
    assert first == last and "align" in str(first)
    assert (run / "run.json").read_text().count('"gemm_choices"') == 3
    # products of other shapes, then another device
    assert TIMED in on_device(odd, "--resume --out run --steps 4 --batch-size 1 --total-batch 39").done().out
    out = on_device(odd, "--resume --out run --steps 5", env="CUDA_ON_CPU_NAME='NVIDIA A100'").done().out
    assert TIMED in out and " s on NVIDIA A100, " in out
    on_cpu(odd, TRAIN_ODD, "--tune-gemm").one_line(FAILED, "--tune-gemm requires a GPU")
    # They decide the bits: 0 is the library's first choice, and 1 begins sums with the last part. Others are invalid.
    on_device(odd, STARTED.replace("run", "without")).done()
    for algorithm, different in (("0", []), ("1", MOMENTS), ("9", None), ("null", None)):
        out = restart(odd, (r'(align [0-9 ]+": )\w+', rf"\g<1>{algorithm}"))
        if different is not None:
            assert (
                TIMED not in out and differing(checkpoint(run, 1), checkpoint(odd / "without", 1), MOMENTS) == different
            )


@pytest.mark.parametrize(
    "changes",
    [
        [('("made_for": ")', r"\1Other ")],
        [("CBLAS in", "CBLAS 2 in")],
        [("gemm_choices", "gemm_choice")],
        [(r'("made_for": .*; )[a-z0-9]+"', r'\1fp64"')],
        [('"products": ', '"product": ')],
        [(" align ", " aligned ")],
        [("gemm_choices", "gemm_choice"), ('"tune-gemm": true', '"tune-gemm": "table.json"')],
    ],
    ids=["device", "library", "choices", "type", "products", "alignment", "a version with tables"],
)
def test_gemm_choices_missing(odd, changes):
    """products without a choice for this device and library are measured again"""
    on_device(odd, STARTED, "--tune-gemm").done()
    assert TIMED in restart(odd, *changes)


def test_fp8_choices(odd):
    """the choices of --tune-gemm have the products in FP8"""
    quiet(odd, STARTED, "--gemm fp8 --tune-gemm")
    described = (odd / "run/run.json").read_text()
    assert re.search('"e4m3 . x', described) and re.search('"e5m2 . x', described)
    assert TIMED not in on_device(odd, "--resume --stop-after 2 --out run").done().out
    assert TIMED in on_device(odd, "--resume --out run --gemm", PRECISION).done().out  # other types are other products


def test_fp8_experts_by_device(odd):
    """experts compute in bf16 where FP8 is not faster"""
    # In the bf16 build, experts are in FP8 where mma.sync is faster in it. The start prints and run.json records the
    # type.
    for run, (capability, kind) in enumerate([(89, "fp8"), (90, "bf16"), (100, "bf16"), (120, "fp8")]):
        kind = "fp8" if FP32 else kind
        options = f"--experts 5 --experts-active 3 --expert-ffn 24 --gemm fp8 --steps 1 --out run{run}"
        out = on_device(odd, TRAIN_ODD, options, env=f"CUDA_ON_CPU_CAPABILITY={capability}").done().out
        assert ("--gemm fp8: experts compute in bf16, which is faster on this GPU\n" in out) == (kind == "bf16")
        assert re.search(rf'experts":\s*"{kind}', (odd / f"run{run}/run.json").read_text())
        like = f"run{'fp8 bf16'.split().index(kind)}"
        expect_same(odd / like / "checkpoints", odd / f"run{run}/checkpoints")
    weights = ["model.safetensors"]
    assert bool(differing(checkpoint(odd / "run0", 1), checkpoint(odd / "run1", 1), weights)) != FP32
    out = on_device(odd, TRAIN_ODD, "--gemm fp8 --steps 1 --out dense", env="CUDA_ON_CPU_CAPABILITY=90").done().out
    assert "experts compute in" not in out
    described = (odd / "dense/run.json").read_text()
    assert not re.search(r'experts":\s*"(fp8|bf16)', described) and "fp8: E4M3, gradients E5M2" in described


@pytest.mark.bf16
def test_fp8_refused(odd):
    """FP8 is refused by devices and libraries without it, in one line"""
    a100, ada = "CUDA_ON_CPU_CAPABILITY=80 CUDA_ON_CPU_NAME='NVIDIA A100'", "CUDA_ON_CPU_CAPABILITY=89"
    required = "capability 8.9 or higher (Ada, Hopper, Blackwell); NVIDIA A100 has 8.0"
    code = "this GPU runs the program's code for 8.0, and 8.9 or higher is required: compile with ARCHS=89"
    for env, options, error in [
        (a100, "", f"--gemm fp8: requires a GPU of compute {required}"),
        (f"{ada} CUDA_ON_CPU_CODE=80", "", f"--gemm fp8: {code}"),
        (f"{ada} CUDA_ON_CPU_GEMM=no-fp8", "--sdpa own", "cuBLASLt does not support the FP8 product 48 x "),
    ]:
        on_device(odd, TRAIN_ODD, options, "--gemm fp8 --dump-grads none", env=env).one_line(FAILED, error)
    on_device(odd, ODD, "--gemm fp8 --dry-run", env="CUDA_ON_CPU_DEVICES=0").done()
