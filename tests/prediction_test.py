#!/usr/bin/env python3
"""A prediction against the CUDA programs compiled for the CPU: every operation of a step is there as often as the
trainer calls it, for all variants, memory is that of the GPU program, and docs/scale.md is up to date. The last line is
"N passed, N failed".

Usage: tests/prediction_test.py TRAIN_DIFFV2 BENCH_CUDA TRAIN_DIFFV2CU    (with arguments: 'build/x --trainer')
Exit status: 0 nothing failed, 1 something did, 2 usage.
"""

import json
import os
import re
import subprocess
import sys

DEV = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../dev")
sys.path[:0] = [f"{DEV}/gpu_check", f"{DEV}/reference"]
from prediction import calls, compare, predict
from variants import VARIANTS

B, T = 1, 32
MEMORY = [
    "--preset 124m --batch-size 4",
    "--preset 350m --batch-size 2 --recompute 1 --ranks 8 --zero 1",
    "--preset 1.4b --kv-heads 8 --batch-size 2 --recompute 2 --ranks 64 --zero 2",
    "--preset 830m --attention diff_v1 --batch-size 2",
]
BUFFERS = [
    "parameters",
    "gradients",
    "optimizer states",
    "master weights",
    "activations",
    "gradients received from other ranks",
]


def run(words):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{words}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def operations_of(bench, variant):
    records = [json.loads(line) for line in run([*bench, "--tiny", "profile", "tiny", variant, 2, B, T]).splitlines()]
    return {
        r["operation"]: r for r in records if r.get("table") == "profile" and r["operation"] not in ("step", "outside")
    }


def same_operations(trainer, bench, variant):
    prediction = predict(
        trainer,
        "H200",
        ["--preset", "tiny", "--kv-heads", 2, "--attention", variant, "--batch-size", B, "--seq-len", T],
    )
    measured = operations_of(bench, variant)
    ours = calls(prediction)
    theirs = {name: r["calls"] for name, r in measured.items() if name != "buffer_upload"}
    if ours != theirs:
        names = sorted(n for n in set(ours) | set(theirs) if ours.get(n) != theirs.get(n))
        return "; ".join(f"{n}: {ours.get(n, 0):g} calls predicted, {theirs.get(n, 0)} made" for n in names)
    rows = compare(prediction, {name: r["ms"] for name, r in measured.items()})
    if abs(sum(r[1] for r in rows) - prediction["step_ms"]) > 1e-6:
        return f"the classes beside the measured ones have {sum(r[1] for r in rows)} ms of {prediction['step_ms']}"
    return ""


def memory_of(program, options):
    text = run([*program, "--dry-run", *options])
    return {what.strip(): float(mib) for what, mib in re.findall(r"^  (\S.*?) +([\d.]+) MiB$", text, re.M)}


def same_memory(trainer, device_trainer, options):
    """Buffers to the last digit, what cuDNN and CUDA take to 2% of the total."""
    ours, theirs = memory_of(trainer, [*options, "--device", "H200"]), memory_of(device_trainer, options)
    for part in BUFFERS:
        if ours.get(part) != theirs.get(part):
            return f"{part}: {ours.get(part)} MiB predicted, {theirs.get(part)} planned"
    if abs(ours["total"] / theirs["total"] - 1) > 0.02:
        return f"{ours['total']} MiB predicted, {theirs['total']} planned"
    return ""


def same_document(trainer):
    done = subprocess.run(
        ["scripts/update_scale.py", "--check"],
        env={**os.environ, "TRAIN_DIFFV2": " ".join(trainer)},
        capture_output=True,
        text=True,
    )
    return done.stderr.strip() or done.returncode and f"status {done.returncode}"


def main():
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    trainer, bench, device_trainer = (a.split() for a in sys.argv[1:])
    cases = [
        (
            f"a prediction has every operation of a step of {v}, as often as it is called",
            same_operations,
            trainer,
            bench,
            v,
        )
        for v in VARIANTS
    ]
    cases += [
        (
            f"the program for CPUs predicts the memory of the GPU program: {options}",
            same_memory,
            trainer,
            device_trainer,
            options.split(),
        )
        for options in MEMORY
    ]
    cases.append(("docs/scale.md is what the trainer predicts", same_document, trainer))
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
