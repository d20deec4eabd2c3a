"""--matmul-dtype fp8 by device."""

import re

import pytest
from device import FP32, ODD, TRAIN_ODD, on_device
from program import FAILED, checkpoint, differing, expect_same


@pytest.mark.full
def test_fp8_experts_by_device(odd):
    """experts compute in bf16 where FP8 is not faster"""
    # In the bf16 build, experts are in FP8 where mma.sync is faster in it. The start prints and run.json records the
    # type.
    for run, (capability, kind) in enumerate([(89, "fp8"), (90, "bf16"), (100, "bf16"), (120, "fp8")]):
        kind = "fp8" if FP32 else kind
        options = f"--experts 5 --experts-active 3 --expert-ffn 24 --matmul-dtype fp8 --steps 1 --out run{run}"
        out = on_device(odd, TRAIN_ODD, options, env=f"CUDA_ON_CPU_CAPABILITY={capability}").done().out
        assert ("--matmul-dtype fp8: experts compute in bf16, which is faster on this GPU\n" in out) == (kind == "bf16")
        assert re.search(rf'experts":\s*"{kind}', (odd / f"run{run}/run.json").read_text())
        like = f"run{'fp8 bf16'.split().index(kind)}"
        expect_same(odd / like / "checkpoints", odd / f"run{run}/checkpoints")
    weights = ["model.safetensors"]
    assert bool(differing(checkpoint(odd / "run0", 1), checkpoint(odd / "run1", 1), weights)) != FP32
    dense = "--matmul-dtype fp8 --steps 1 --out dense"
    out = on_device(odd, TRAIN_ODD, dense, env="CUDA_ON_CPU_CAPABILITY=90").done().out
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
        (a100, "", f"--matmul-dtype fp8: requires a GPU of compute {required}"),
        (f"{ada} CUDA_ON_CPU_CODE=80", "", f"--matmul-dtype fp8: {code}"),
        (f"{ada} CUDA_ON_CPU_GEMM=no-fp8", "--attention-kernel own", "cuBLASLt has no FP8 product 48 x "),
    ]:
        on_device(odd, TRAIN_ODD, options, "--matmul-dtype fp8 --dump-grads none", env=env).one_line(FAILED, error)
    on_device(odd, ODD, "--matmul-dtype fp8 --dry-run", env="CUDA_ON_CPU_DEVICES=0").done()
