"""Compares predictions with the CUDA programs compiled for the CPU: a prediction has the operations of a step and their
numbers of calls; predicted memory is that of the GPU program.

Requires build/oncpu/bench_cuda and build/oncpu/test_trainer.
Variables: PREDICT_DIFFV2
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/gpu_check"))
from prediction import predict

PREDICTOR = os.environ.get("PREDICT_DIFFV2", "build/predict_diffv2").split()
BENCH, DEVICE_TRAINER = ["build/oncpu/bench_cuda"], ["build/oncpu/test_trainer", "--trainer"]
KV_HEADS, B, T = 2, 1, 32
# The calls are those of the trainer. These steps have all operations but router_balance; their twins must record them.
STEPS = [
    ("tiny", "diff_v1", "--window 8 --yoco --qk-norm --doc-mask"),
    ("tiny", "diff_v2", "--window 8 --full-every 2 --qk-norm --doc-mask"),
    ("tiny", "diff_v2_no_lambda", ""),
    ("tiny", "diff_scalar", ""),
    ("tiny", "sink", ""),
    ("tiny", "diff_v2_gated_elem", ""),
    ("tiny", "gated_head", "--matmul-dtype fp8 --window 8 --yoco"),
    ("tiny", "diff_scalar", "--attention-kernel own"),
    ("small", "diff_v2", "--attention-kernel own --yoco --window 8", "B200", "100"),
    ("moe-tiny", "diff_v2", "--shared-experts 1 --dense-layers 1 --window 8 --yoco"),
    ("moe-tiny", "baseline", "--matmul-dtype fp8 --shared-experts 2"),  # experts in bf16
    ("moe-tiny", "baseline", "--matmul-dtype fp8 --shared-experts 2", "L40S", "89"),  # in FP8
]
MEMORY = [
    "--preset 124m --batch-size 4",
    "--preset 350m --batch-size 2 --recompute 1 --ranks 8 --zero 1",
    "--preset 1.4b --kv-heads 8 --batch-size 2 --recompute 2 --ranks 64 --zero 2",
    "--preset 830m --attention diff_v1 --batch-size 2",
    "--preset 124m --batch-size 4 --matmul-dtype fp8",
    "--preset 350m --heads 15 --kv-heads 5 --head-dim 72 --ffn 1000 --batch-size 2 --seq-len 100 --matmul-dtype fp8",
    "--preset 1.4b --kv-heads 8 --batch-size 2 --recompute 2 --ranks 64 --zero 2 --matmul-dtype fp8",
    "--preset 830m --attention gated_elem --batch-size 2 --matmul-dtype fp8",
    "--preset 1.4b --kv-heads 8 --seq-len 16384 --batch-size 1 --recompute 2",
    "--preset 350m --window 256 --full-every 4 --batch-size 2 --recompute 1",
    "--preset 350m --window 256 --yoco --batch-size 2 --ranks 8 --zero 2 --recompute 2",
    "--preset 350m --window 256 --yoco --batch-size 2 --attention diff_v1 --matmul-dtype fp8",
    "--preset 124m --window 256 --full-every 4 --batch-size 2 --sample-every 1",
    "--preset 124m --window 256 --yoco --batch-size 2 --sample-every 1",
    "--preset 124m --batch-size 4 --doc-mask",
    "--preset 124m --batch-size 2 --attention diff_v2_norm --qk-norm --recompute 2",
    "--preset 350m --heads 16 --kv-heads 4 --batch-size 2 --attention diff_grouped_4 --matmul-dtype fp8",
    "--preset 350m --window 256 --yoco --qk-norm --batch-size 2 --attention diff_v2_gated_elem --sample-every 1",
    "--preset moe-small --batch-size 4",
    "--preset moe-small --batch-size 2 --recompute 1 --shared-experts 1 --dense-layers 2 --matmul-dtype fp8",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 64 --zero 2",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 8 --zero 3",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 64 --zero 3 --matmul-dtype fp8",
    "--preset 350m --batch-size 2 --recompute 1 --ranks 4 --zero 3 --matmul-dtype fp8 --no-tie-embeddings",
    "--preset 30b-a3b --batch-size 1 --seq-len 16384 --ranks 8 --zero 1 --attention baseline",
]
BUFFERS = [
    "parameters",
    "gradients",
    "optimizer states",
    "master weights",
    "rounded copies of weights",
    "activations",
    "activations for samples",
    "keys and values for samples",
    "gradients received from other ranks",
]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_ON_CPU_NAME", "NVIDIA H200")  # the emulated device: cuDNN computes documents on it


def run(*words):
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.slow(cases_from=8)
@pytest.mark.parametrize("step", STEPS, ids=[" ".join(step) for step in STEPS])
def test_a_prediction_has_the_operations_and_calls_of_a_step(step, monkeypatch):
    preset, variant, more, device, capability = (*step, "H200", "90")[:5]
    options = f"--preset {preset} --kv-heads {KV_HEADS} --attention {variant} --batch-size {B} --seq-len {T}"
    prediction = predict(PREDICTOR, device, f"{options} {more}".split())
    monkeypatch.setenv("CUDA_ON_CPU_NAME", f"NVIDIA {device}")
    monkeypatch.setenv("CUDA_ON_CPU_CAPABILITY", capability)
    profile = run(*BENCH, "--tiny", *more.split(), "profile", preset, variant, *map(str, (KV_HEADS, B, T)))
    rows = {r["case"]: r for r in map(json.loads, profile.splitlines()) if r["case"] not in ("step", "outside")}
    made = {name: int(r["note"].split()[0]) for name, r in rows.items() if name != "buffer_upload"}
    calls = lambda name: sum(op["calls"] for op in prediction["operations"] if op["name"] == name)
    assert {op["name"]: calls(op["name"]) for op in prediction["operations"]} == made
    for parts in (prediction["classes"].values(), (op["ms"] for op in prediction["operations"])):
        assert abs(sum(parts) - prediction["step_ms"]) <= 1e-6, "the parts have the time of the step"


def memory_of(program, *options):
    found = re.findall(r"^  (\S.*?) +([\d.]+) MiB$", run(*program, *options), re.M)
    return {what: float(mib) for what, mib in found}


@pytest.mark.parametrize("options", MEMORY)
def test_predict_diffv2_predicts_the_memory_of_the_gpu_program(options):
    predicted = memory_of(PREDICTOR, *options.split(), "--device", "H200")
    planned = memory_of(DEVICE_TRAINER, "--dry-run", *options.split())
    assert {part: predicted.get(part) for part in BUFFERS} == {part: planned.get(part) for part in BUFFERS}
    # the memory of cuDNN and CUDA differs by at most 2% of the total
    assert abs(predicted["total"] / planned["total"] - 1) <= 0.02
