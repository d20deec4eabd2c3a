#!/usr/bin/env python3
"""Compares predictions with the CUDA programs compiled for the CPU: a prediction has the operations of a step and their
numbers of calls; predicted memory is that of the GPU program; docs/scale.md and docs/gpu.md are up to date. The last
line is "N passed, N failed".

Usage: tests/prediction_test.py TRAIN_DIFFV2 BENCH_CUDA TRAIN_DIFFV2CU     (commands; 'build/x --trainer' is one)
Exit status: 0 all passed, 1 some failed, 2 usage.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/gpu_check"))
from prediction import calls, compare, predict

KV_HEADS, B, T = 2, 1, 32
# The calls are those of the trainer. These steps have all operations but router_balance; their twins must record them.
STEPS = [
    ("tiny", "diff_v1", "--window 8 --yoco --qk-norm --doc-mask"),
    ("tiny", "diff_v2", "--window 8 --full-every 2 --qk-norm --doc-mask"),
    ("tiny", "diff_v2_no_lambda", ""),
    ("tiny", "diff_scalar", ""),
    ("tiny", "sink", ""),
    ("tiny", "diff_v2_gated_elem", ""),
    ("tiny", "xsa", "--gemm fp8 --window 8 --yoco"),
    ("tiny", "diff_scalar", "--sdpa own"),
    ("small", "diff_v2", "--sdpa own --yoco --window 8", "B200", "100"),
    ("moe-tiny", "diff_v2", "--shared-experts 1 --dense-layers 1 --window 8 --yoco"),
    ("moe-tiny", "baseline", "--gemm fp8 --shared-experts 2"),  # experts in bf16
    ("moe-tiny", "baseline", "--gemm fp8 --shared-experts 2", "L40S", "89"),  # in FP8
]
MEMORY = [
    "--preset 124m --batch-size 4",
    "--preset 350m --batch-size 2 --recompute 1 --ranks 8 --zero 1",
    "--preset 1.4b --kv-heads 8 --batch-size 2 --recompute 2 --ranks 64 --zero 2",
    "--preset 830m --attention diff_v1 --batch-size 2",
    "--preset 124m --batch-size 4 --gemm fp8",
    "--preset 350m --heads 15 --kv-heads 5 --head-dim 72 --ffn 1000 --batch-size 2 --seq-len 100 --gemm fp8",
    "--preset 1.4b --kv-heads 8 --batch-size 2 --recompute 2 --ranks 64 --zero 2 --gemm fp8",
    "--preset 830m --attention gated_elem --batch-size 2 --gemm fp8",
    "--preset 1.4b --kv-heads 8 --seq-len 16384 --batch-size 1 --recompute 2",
    "--preset 350m --window 256 --full-every 4 --batch-size 2 --recompute 1",
    "--preset 350m --window 256 --yoco --batch-size 2 --ranks 8 --zero 2 --recompute 2",
    "--preset 350m --window 256 --yoco --batch-size 2 --attention diff_v1 --gemm fp8",
    "--preset 124m --window 256 --full-every 4 --batch-size 2 --sample-every 1",
    "--preset 124m --window 256 --yoco --batch-size 2 --sample-every 1",
    "--preset 124m --batch-size 4 --doc-mask",
    "--preset 124m --batch-size 2 --attention diff_v2_xsa --qk-norm --recompute 2",
    "--preset 350m --heads 16 --kv-heads 4 --batch-size 2 --attention diff_grouped_4 --gemm fp8",
    "--preset 350m --window 256 --yoco --qk-norm --batch-size 2 --attention diff_v2_gated_elem --sample-every 1",
    "--preset moe-small --batch-size 4",
    "--preset moe-small --batch-size 2 --recompute 1 --shared-experts 1 --dense-layers 2 --gemm fp8",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 64 --zero 2",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 8 --zero 3",
    "--preset 30b-a3b --batch-size 1 --recompute 2 --ranks 64 --zero 3 --gemm fp8",
    "--preset 350m --batch-size 2 --recompute 1 --ranks 4 --zero 3 --gemm fp8 --no-tie-embeddings",
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
    *[f"sent with --zero {level}" for level in range(4)],
]


def run(words, environment=None):
    environment = {**os.environ, **(environment or {})}
    done = subprocess.run([str(w) for w in words], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{words}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def operations_of(bench, preset, variant, options, device, capability):
    command = [*bench, "--tiny", *options, "profile", preset, variant, KV_HEADS, B, T]
    emulated = {"CUDA_ON_CPU_NAME": f"NVIDIA {device}", "CUDA_ON_CPU_CAPABILITY": capability}
    records = [json.loads(line) for line in run(command, emulated).splitlines()]
    return {r["case"]: r for r in records if r["case"] not in ("step", "outside")}


def same_operations(trainer, bench, preset, variant, more, device="H200", capability="90"):
    options = f"--preset {preset} --kv-heads {KV_HEADS} --attention {variant} --batch-size {B} --seq-len {T}"
    prediction = predict(trainer, device, f"{options} {more}".split())
    measured = operations_of(bench, preset, variant, more.split(), device, capability)
    predicted = calls(prediction)
    made = {name: int(r["note"].split()[0]) for name, r in measured.items() if name != "buffer_upload"}
    if predicted != made:
        names = sorted(n for n in set(predicted) | set(made) if predicted.get(n) != made.get(n))
        return "; ".join(f"{n}: {predicted.get(n, 0):g} calls predicted, {made.get(n, 0)} made" for n in names)
    rows = compare(prediction, {name: r["measured"] for name, r in measured.items()})
    total = sum(row[1] for row in rows)
    if abs(total - prediction["step_ms"]) > 1e-6:
        return f"the classes beside the measured ones take {total} ms, the step {prediction['step_ms']} ms"
    return ""


def memory_of(program, options):
    text = run([*program, "--dry-run", *options])
    found = re.findall(r"^  (\S.*?) +([\d.]+) MiB$", text, re.M)
    sent = re.findall(r"^  (\d) +[\d.]+ MiB +([\d.]+) MiB", text, re.M)
    return {what: float(mib) for what, mib in [*found, *((f"sent with --zero {level}", mib) for level, mib in sent)]}


def same_memory(trainer, device_trainer, options):
    """Buffers and sent bytes are equal; the memory of cuDNN and CUDA agrees within 2% of the total."""
    predicted, planned = memory_of(trainer, [*options, "--device", "H200"]), memory_of(device_trainer, options)
    for part in BUFFERS:
        if predicted.get(part) != planned.get(part):
            return f"{part}: {predicted.get(part)} MiB predicted, {planned.get(part)} planned"
    if abs(predicted["total"] / planned["total"] - 1) > 0.02:
        return f"{predicted['total']} MiB predicted, {planned['total']} planned"
    return ""


def same_document(trainer):
    environment = {**os.environ, "TRAIN_DIFFV2": " ".join(trainer)}
    command = ["scripts/update_docs.py", "--check", "docs/scale.md", "docs/gpu.md"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.stderr.strip() or done.returncode and f"status {done.returncode}"


def main():
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    trainer, bench, device_trainer = (a.split() for a in sys.argv[1:])
    os.environ["CUDA_ON_CPU_NAME"] = "NVIDIA H200"  # the emulated device: cuDNN computes documents on it
    cases = [
        (
            f"a prediction has the operations and calls of a step: {' '.join(step)}",
            same_operations,
            trainer,
            bench,
            *step,
        )
        for step in STEPS
    ]
    cases += [
        (
            f"the CPU program predicts the memory of the GPU program: {m}",
            same_memory,
            trainer,
            device_trainer,
            m.split(),
        )
        for m in MEMORY
    ]
    cases.append(("docs/scale.md and docs/gpu.md are up to date", same_document, trainer))
    failed = 0
    for sentence, check, *arguments in cases:
        try:
            why = check(*arguments)
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        failed += bool(why)
        print(f"FAIL {sentence}: {why}" if why else f"ok   {sentence}", flush=True)
    print(f"{len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
