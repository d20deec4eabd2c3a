#!/usr/bin/env python3
"""check.py: builds, tests and benchmarks the CUDA trainer on this machine's GPU. dev/gpu_check.sh starts it.

Parts, the most valuable first:
    probe      describes this machine: device, driver, compilers, libraries, Python packages
    build      compiles trainer, tests and benchmark for bf16 and fp32, and the CPU trainer; or uses a bundle's
    ops        compares every CUDA operation with its C twin, on the device
    gradients  compares the gradients of the whole model with the CPU trainer's: every variant, fp32 and bf16,
               and of two in fp8 (gradient_comparison.py states the tolerances)
    train      3 steps in fp32 and with a measured peak; 100 steps of 124m, the same again, and stopped and resumed:
               all three must be bitwise equal
    experts    the same of models with experts: gradients, the losses of a run beside the CPU trainer's, --recompute,
               and a resumed run; the time of their operations, and of the grouped products beside one dense product
    sizes      compares operations at the shapes of 1.4b: cuDNN with our attention, cuBLASLt with our matmul, the others
               with their C twins on samples
    memcheck   runs small cases under compute-sanitizer: memory
    models     tokens/s of baseline, diff_v1, diff_v2 and a baseline with the query heads of diff_v2, at four sizes;
               also diff_v2 with --no-deterministic
    peer       the same models in PyTorch (dev/bench/bench_torch.py), alternating step by step
    fp8        --gemm fp8 beside bf16 at 1.4b: the time of a step, alternating, and the loss of 200 steps
    kernels    time of each operation, and its share of the rate of a copy or of a matmul
    decode     a token after 1K to 64K positions, at batch sizes 1 and 8: attention over the cache and whole steps of
               baselines, diff_v1, diff_v2, and diff_v2 with YOCO, in turns; attention with a window
    profile    the operations' shares of a step, beside the prediction of --dry-run --device; with ncu also its counters
    sanitizer  runs all operations under compute-sanitizer: memory and races
After an interruption the same command continues: finished parts are not repeated, unfinished ones continue after their
last case. --out holds results.txt, results.json and log.txt, which are written after every case.

Environment variables name programs, with arguments: TRAIN_DIFFV2CU, TRAIN_DIFFV2CU_FP32, TEST_DIFFV2CU,
TEST_DIFFV2CU_FP32, BENCH_CUDA, TRAIN_DIFFV2; TORCH_PYTHON: a Python that has torch (default: python3);
COMPUTE_SANITIZER: that program; SANITIZER_SECONDS: the time limit of one of its cases.
Exit status: 0 all parts passed (or were skipped, with the reason); 1 some failed; 2 usage; 3 out of time: run it again
with the same --out.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

import build
import decode
import experts
import fp8
import gradients
import operations
import peer
import probe
import speed
import train
from programs import ROOT
from results import ENDED, Store, StoreError, failed
from runner import Check, OutOfTime, Part, Skip, Unfinished

PARTS = {  # name: (its cases, seconds that it needs at least, programs that it requires)
    "probe": (probe.probe, 5, []),
    "build": (build.build, 60, []),
    "ops": (operations.ops, 20, ["TEST_DIFFV2CU"]),
    "gradients": (gradients.gradients, 20, ["TRAIN_DIFFV2CU", "TRAIN_DIFFV2"]),
    "train": (train.train, 60, ["TRAIN_DIFFV2CU"]),
    "experts": (experts.experts, 60, ["TRAIN_DIFFV2CU", "TRAIN_DIFFV2", "BENCH_CUDA"]),
    "sizes": (operations.sizes, 20, ["TEST_DIFFV2CU"]),
    "memcheck": (operations.memcheck, 20, ["TEST_DIFFV2CU"]),
    "models": (speed.models, 30, ["BENCH_CUDA"]),
    "peer": (peer.peer, 45, ["BENCH_CUDA"]),
    "fp8": (fp8.fp8, 60, ["BENCH_CUDA", "TRAIN_DIFFV2CU"]),
    "kernels": (speed.kernels, 20, ["BENCH_CUDA"]),
    "decode": (decode.decode, 30, ["BENCH_CUDA"]),
    "profile": (speed.profile, 20, ["BENCH_CUDA"]),
    "sanitizer": (operations.sanitizer, 30, ["TEST_DIFFV2CU"]),
}


def fail(message, status=1):
    print(f"gpu_check.sh: {message}", file=sys.stderr)
    sys.exit(status)


def run_part(check, name):
    store = check.store
    part, started, why = Part(check, name), time.monotonic(), ""
    store.say(f"{name}: {'continues' if part.state['done'] else 'starts'}")
    try:
        part.run(PARTS[name][0](check, part))
        status = "failed" if failed(part.state["rows"]) else "passed"
    except OutOfTime:
        status, why = "unfinished", "out of time"
    except Unfinished as reason:
        status, why = "unfinished", str(reason)
    except Skip as reason:
        status, why = "skipped", str(reason)
    except Exception as error:  # an unexpected error must not prevent the other parts
        store.log.write(traceback.format_exc())
        part.check(f"{name} completes", False, f"{type(error).__name__}: {error} (log.txt has the traceback)")
        status = "failed"
    if status != "unfinished" and part.rows:
        part.end("rest")
    part.state.update(status=status, why=why, seconds=part.state["seconds"] + time.monotonic() - started)
    store.save()
    store.say(f"{name}: {status}{': ' + why if why else ''} ({time.monotonic() - started:.0f} s)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the options", 2)


def parse_arguments():
    parser = Parser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/gpu_check", help="directory of the results (default: runs/gpu_check)"
    )
    parser.add_argument(
        "--bundle", type=Path, help="output of dev/gpu_check/bundle.sh, for machines without the small dependencies"
    )
    parser.add_argument("--parts", help="run only these parts, separated by commas")
    parser.add_argument("--again", action="store_true", help="repeat finished parts")
    parser.add_argument("--minutes", type=float, default=0, help="end within this time (default: no limit)")
    parser.add_argument(
        "--pretend",
        action="store_true",
        help="use dev/cuda_on_cpu instead of a GPU, and tiny models, to test this program",
    )
    o = parser.parse_args()
    o.parts = list(dict.fromkeys(o.parts.split(","))) if o.parts else list(PARTS)
    unknown = [p for p in o.parts if p not in PARTS]
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: unknown part; the parts are {', '.join(PARTS)}")
    if o.minutes < 0 or o.minutes != o.minutes:
        parser.error(f"--minutes {o.minutes:g}: must be at least 0")
    if o.bundle:
        o.bundle = o.bundle.resolve()
        if not (o.bundle / "CONTENTS").exists():
            parser.error(f"--bundle {o.bundle}: not a bundle: dev/gpu_check/bundle.sh creates one")
    o.out = o.out.resolve()
    return o


def commit_of(bundle):
    git = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if done and done.returncode == 0:
        return done.stdout.strip()
    revision = bundle and bundle / "revision"
    return revision.read_text().strip() if revision and revision.exists() else "unknown"


def main():
    options = parse_arguments()
    try:
        store = Store(options.out, commit_of(options.bundle), list(PARTS))
    except (StoreError, OSError) as error:
        fail(str(error))
    check = Check(options, store)
    if options.again:
        for name in options.parts:
            store.forget(name)
    todo = [n for n in options.parts if store.part(n)["status"] not in ENDED]
    # the results may come from another machine, whose programs are not here
    if "build" not in todo and any(check.programs.missing(PARTS[n][2]) for n in todo):
        store.forget("build")
        todo.insert(0, "build")
    for name in todo:
        store.part(name)
    for name in todo:
        if check.left() < PARTS[name][1] / (10 if check.pretend else 1):
            store.part(name)["why"] = "not started: out of time"
            continue
        missing = check.programs.missing(PARTS[name][2])
        if missing:
            store.part(name).update(status="unfinished", why=f"not built: {', '.join(missing)}")
            continue
        run_part(check, name)
    store.save()
    print(open(options.out / "results.txt").read(), end="")
    asked = {*options.parts, *todo}
    states = [store.part(n)["status"] for n in asked]
    wrong = any(failed(store.part(n)["rows"]) for n in asked)
    sys.exit(1 if wrong or "failed" in states else 3 if "unfinished" in states else 0)


if __name__ == "__main__":
    main()
