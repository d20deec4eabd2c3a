#!/usr/bin/env python3
"""check.py: builds and proves the CUDA trainer on this machine's GPU, and measures it (dev/gpu_check.sh starts it).

Parts, in the order of what they are worth when time is short:
    probe      what this machine has: device, driver, compilers, libraries, Python packages
    build      the trainer and its tests in bf16 and fp32, the benchmark, the trainer for CPUs; or those of the bundle
    ops        every CUDA operation against its C twin, on the device
    gradients  of the whole model against the CPU trainer's, for every variant, fp32 and bf16 (gradients.py: how near)
    train      3 steps in fp32 and with a measured peak; 124m for 100 steps; the same again, and stopped and resumed, bit for bit
    sizes      operations at the shapes of 1.4b: cuDNN against our attention, cuBLASLt against our product, the rest against
               their C twins on samples
    memcheck   small cases under compute-sanitizer: memory
    models     tokens/s of baseline, diff_v1, diff_v2 and a baseline with diff_v2's query heads, at four sizes; diff_v2 without
               --deterministic
    peer       the same models in PyTorch (dev/bench/bench_torch.py), a step of each in turn
    kernels    each operation's time and share of what a copy, or a product, reaches here
    profile    where a step's time goes, beside what --dry-run --device predicts; with ncu also what its counters say
    sanitizer  all operations under compute-sanitizer: memory and races
The same command goes on where it was, whatever ended it; parts that are done are not repeated, and unfinished ones go on
behind their last case. In --out: results.txt, results.json, log.txt, written after every case.

Programs can be given by environment, as commands: TRAIN_DIFFV2CU, TRAIN_DIFFV2CU_FP32, TEST_DIFFV2CU, TEST_DIFFV2CU_FP32,
BENCH_CUDA, TRAIN_DIFFV2; TORCH_PYTHON: a Python that has torch (python3); COMPUTE_SANITIZER: that program;
SANITIZER_SECONDS: after which a case of it is stopped.
Exit status: 0 all parts passed (or were skipped, saying why); 1 some failed; 2 usage; 3 time ran out: again with the same --out.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path

import benchmarks
import build
import correctness
import probe
import sanitizer
import torch_comparison
import training
from programs import ROOT
from results import ENDED, Store, StoreError
from runner import Check, OutOfTime, Part, Skip, Unfinished

PARTS = {  # name: (what runs it, seconds without which it is not begun, programs without which it cannot be)
    "probe": (probe.probe, 5, []),
    "build": (build.build, 60, []),
    "ops": (correctness.ops, 20, ["TEST_DIFFV2CU"]),
    "gradients": (correctness.gradients, 20, ["TRAIN_DIFFV2CU", "TRAIN_DIFFV2"]),
    "train": (training.train, 60, ["TRAIN_DIFFV2CU"]),
    "sizes": (correctness.sizes, 20, ["TEST_DIFFV2CU"]),
    "memcheck": (sanitizer.memcheck, 20, ["TEST_DIFFV2CU"]),
    "models": (benchmarks.models, 30, ["BENCH_CUDA"]),
    "peer": (torch_comparison.peer, 45, ["BENCH_CUDA"]),
    "kernels": (benchmarks.kernels, 20, ["BENCH_CUDA"]),
    "profile": (benchmarks.profile, 20, ["BENCH_CUDA"]),
    "sanitizer": (sanitizer.sanitizer, 30, ["TEST_DIFFV2CU"]),
}


def fail(message, status=1):
    print(f"gpu_check.sh: {message}", file=sys.stderr)
    sys.exit(status)


def run_part(check, name):
    store = check.store
    part, started = Part(check, name), time.monotonic()
    store.say(f"{name}: {'goes on' if part.state['done'] else 'begins'}")
    try:
        PARTS[name][0](check, part)
        status, why = ("passed" if all(c["ok"] for c in part.state["checks"] + part.checks) else "failed"), ""
    except OutOfTime:
        status, why = "unfinished", "time ran out"
    except Unfinished as reason:
        status, why = "unfinished", str(reason)
    except Skip as reason:
        status, why = "skipped", str(reason)
    except Exception as error:  # what nobody thought of must not keep the other parts from running
        store.log.write(traceback.format_exc())
        part.check(f"{name} ran to its end", False, f"{type(error).__name__}: {error} (log.txt says where)")
        status, why = "failed", ""
    if status != "unfinished" and (part.checks or part.records):
        part.end("rest")
    part.state["status"], part.state["why"] = status, why
    part.state["seconds"] += time.monotonic() - started
    store.save()
    store.say(f"{name}: {status}{': ' + why if why else ''} ({time.monotonic() - started:.0f} s)")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the options", 2)


def parse_arguments():
    parser = Parser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/gpu_check", help="folder of the results (default: runs/gpu_check)"
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        help="folder that dev/gpu_check/bundle.sh has made, for machines without the small dependencies",
    )
    parser.add_argument("--parts", help="only these, with commas between them")
    parser.add_argument("--again", action="store_true", help="repeat the parts, also those that are done")
    parser.add_argument("--minutes", type=float, default=0, help="end within this time (default: when all is done)")
    parser.add_argument(
        "--pretend",
        action="store_true",
        help="no GPU: dev/cuda_on_cpu in its place and tiny models, to try this program",
    )
    o = parser.parse_args()
    o.parts = list(dict.fromkeys(o.parts.split(","))) if o.parts else list(PARTS)
    unknown = [p for p in o.parts if p not in PARTS]
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(PARTS)}")
    if o.minutes < 0 or o.minutes != o.minutes:
        parser.error(f"--minutes {o.minutes:g}: a time above 0 is wanted")
    if o.bundle:
        o.bundle = o.bundle.resolve()
        if not (o.bundle / "CONTENTS").exists():
            parser.error(f"--bundle {o.bundle}: dev/gpu_check/bundle.sh has made no bundle there")
    o.out = o.out.resolve()
    return o


def commit_of(bundle):
    done = (
        subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if (ROOT / ".git").exists()
        else None
    )
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
    # results may have come here from a machine that is gone, with the programs that it had built
    if "build" not in todo and any(check.programs.missing(PARTS[n][2]) for n in todo):
        store.forget("build")
        todo.insert(0, "build")
    for name in todo:
        store.part(name)
    for name in todo:
        if check.left() < PARTS[name][1] / (10 if check.pretend else 1):
            store.part(name)["why"] = "not begun: time ran out"
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
    failed = any(not c["ok"] for n in asked for c in store.part(n)["checks"])
    sys.exit(1 if failed or "failed" in states else 3 if "unfinished" in states else 0)


if __name__ == "__main__":
    main()
