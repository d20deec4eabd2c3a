#!/usr/bin/env python3
"""check.py: builds, tests and benchmarks the CUDA trainer on this machine's GPU. dev/gpu_check.sh starts it.

Parts:
    probe      describes this machine: device, driver, compilers, libraries, Python packages
    build      compiles trainer, tests and benchmark for bf16 and fp32, and the CPU trainer; or uses a bundle's
    profile    the operations' shares of a step beside the prediction, the loss of 12 steps, counters by ncu
    ops        compares every CUDA operation with its C twin, on the device
    gradients  compares the model's gradients with the CPU trainer's: every variant, fp32, bf16, some in fp8
    steps      a step of 1.4b with --gemm fp8, --tune-gemm and --no-deterministic, each beside the default, alternating
    attention  a layer's attention by cuDNN and by the built-in kernels, alternating: the table of --sdpa auto
    experts    gradients and losses of models with experts, --recompute, a resumed run; the time of their operations
    train      3 steps in fp32; 100 steps of 124m, the same again, stopped and resumed: all three bitwise equal
    sizes      compares operations at the shapes of 1.4b: libraries with our kernels, others with C twins on samples
    memcheck   runs small cases under compute-sanitizer: memory
    models     tokens/s of baseline, diff_v1, diff_v2 and a baseline with the query heads of diff_v2, at four sizes
    peer       the same models in PyTorch (dev/bench/bench_torch.py), alternating step by step
    fp8        the loss of 200 steps of 1.4b with --gemm fp8 beside bf16
    kernels    time of each operation, and its share of the rate of a copy or of a matmul
    decode     a token after 1K to 64K positions at batch sizes 1 and 8, of each variant; attention with a window
    sanitizer  runs all operations under compute-sanitizer: memory and races
SCHEDULE is their order, the most valuable first. A part at its time limit is unfinished, which is no failure: it
continues after the others. After an interruption the same command continues: finished parts are not repeated,
unfinished ones continue after their last case. --out holds results.txt, results.json, log.txt and issue.txt, which are
written after every case.

Environment variables name programs, with arguments: TRAIN_DIFFV2CU, TRAIN_DIFFV2CU_FP32, TEST_DIFFV2CU,
TEST_DIFFV2CU_FP32, BENCH_CUDA, TRAIN_DIFFV2; TORCH_PYTHON: a Python that has torch (default: python3);
COMPUTE_SANITIZER: that program; LIMIT_SECONDS: an upper bound of all time limits.
Exit status: 0 all parts passed (or were skipped, with the reason); 1 some failed; 2 usage; 3 out of time: run it again
with the same --out.
"""

import argparse
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import attention
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
from results import Store, StoreError, failed
from runner import Check, Part, Skip, Unfinished

PARTS = {  # name: (its cases, programs that it requires)
    "probe": (probe.probe, []),
    "build": (build.build, []),
    "profile": (speed.profile, ["BENCH_CUDA", "TRAIN_DIFFV2CU"]),
    "ops": (operations.ops, ["TEST_DIFFV2CU"]),
    "gradients": (gradients.gradients, ["TRAIN_DIFFV2CU", "TRAIN_DIFFV2"]),
    "steps": (fp8.steps, ["BENCH_CUDA", "TRAIN_DIFFV2CU"]),
    "attention": (attention.attention, ["BENCH_CUDA"]),
    "experts": (experts.experts, ["TRAIN_DIFFV2CU", "TRAIN_DIFFV2", "BENCH_CUDA"]),
    "train": (train.train, ["TRAIN_DIFFV2CU"]),
    "sizes": (operations.sizes, ["TEST_DIFFV2CU"]),
    "memcheck": (operations.memcheck, ["TEST_DIFFV2CU"]),
    "models": (speed.models, ["BENCH_CUDA"]),
    "peer": (peer.peer, ["BENCH_CUDA"]),
    "fp8": (fp8.fp8, ["TRAIN_DIFFV2CU"]),
    "kernels": (speed.kernels, ["BENCH_CUDA"]),
    "decode": (decode.decode, ["BENCH_CUDA"]),
    "sanitizer": (operations.sanitizer, ["TEST_DIFFV2CU"]),
}
ALL, NO_LIMIT = ".*", None
# (part, a pattern of its cases, their time limit in seconds). After two minutes the speed is known, after eight each
# subject has one result; the rest has no other limit than those of its cases.
SCHEDULE = [
    ("probe", ALL, 60),
    ("build", ALL, NO_LIMIT),
    ("profile", "first|loss", 60),
    ("ops", "first", 60),
    ("gradients", "diff_v2", 30),
    ("steps", ALL, 60),
    ("attention", "1.4b .* T 2048", 40),
    ("experts", "products 1", 30),
    ("train", "first|second", 60),
    ("sanitizer", "racecheck (expert|router).*", 60),
    *[(name, ALL, NO_LIMIT) for name in PARTS],
]
LEAST = 2  # seconds: with less time left, no part starts


def fail(message, status=1):
    print(f"gpu_check.sh: {message}", file=sys.stderr)
    sys.exit(status)


def run_part(check, name, chosen, cap):
    store = check.store
    part, started, why = Part(check, name), time.monotonic(), ""
    store.say(f"{name}: {'continues' if part.state['done'] else 'starts'}{f', {cap} s' if cap else ''}")
    check.begin(cap)
    try:
        part.run(PARTS[name][0](check, part), chosen)
        status = "failed" if failed(part.state["rows"]) else "passed"
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
    check.begin(NO_LIMIT)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the options", 2)


def parse_arguments():
    parser = Parser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    inside = ROOT.parent if (ROOT.parent / "CONTENTS").exists() else None  # these are the sources of a bundle
    out = inside / "results" if inside else ROOT / "runs/gpu_check"
    parser.add_argument("--out", type=Path, default=out, help="directory of the results (default: %(default)s)")
    parser.add_argument(
        "--bundle",
        type=Path,
        default=inside,
        help="output of dev/gpu_check/bundle.sh, for machines without the small dependencies or without a compiler "
        "(default: the bundle that contains this program)",
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # programs are ended first
    try:
        store = Store(options.out, commit_of(options.bundle), list(PARTS))
        check = Check(options, store)
    except (StoreError, OSError) as error:
        fail(str(error))
    if options.again:
        for name in options.parts:
            store.forget(name)
    # a skipped part runs again, because its corpus or package may now exist
    finished = lambda name: store.part(name)["status"] in ("passed", "failed")
    todo = [n for n in options.parts if not finished(n)]
    # the results may come from another machine, whose programs are not here
    if "build" not in todo and any(check.programs.missing(PARTS[n][1]) for n in todo):
        store.forget("build")
        todo.insert(0, "build")
    for name in todo:
        store.part(name)["why"] = ""
    for name, chosen, cap in SCHEDULE:
        if name not in todo or finished(name):
            continue
        missing = check.programs.missing(PARTS[name][1])
        if check.left() < LEAST:
            store.part(name)["why"] = "out of time" if store.part(name)["done"] else "not started: out of time"
        elif missing:
            store.part(name)["why"] = f"not built: {', '.join(missing)}"
        else:
            run_part(check, name, chosen, cap)
    store.save()
    print(open(options.out / "results.txt").read(), end="")
    print(f"{options.out}/issue.txt: to be pasted into an issue of the template 'GPU results'")
    asked = {*options.parts, *todo}
    states = [store.part(n)["status"] for n in asked]
    wrong = any(failed(store.part(n)["rows"]) for n in asked)
    sys.exit(1 if wrong or "failed" in states else 3 if "unfinished" in states else 0)


if __name__ == "__main__":
    main()
