#!/usr/bin/env python3
"""check.py: tests and measures the CUDA trainer on this machine's GPU. dev/gpu_check.sh starts it.

Parts, in the order in which they run:
    machine      finds or builds the programs; describes the device, driver, compilers, libraries, Python packages
    rates        the rates of a copy and of matrix products, with which later times are compared
    correctness  every CUDA operation beside its C twin, bf16 and fp32; gradients of every variant and of experts beside
                 the CPU trainer's, fp32, bf16, some in fp8: all at once, on all cores
    profile      the operations' shares of a step beside the prediction: 1.4b with cuDNN, with
                 --attention-kernel own, in fp8, the baseline, 124m
    peer         steps of 1.4b and 124m beside PyTorch's (dev/bench/bench_torch.py), alternating, deterministic and not
    models       forward and backward of the 3b models of DIFF V1's Table 7; training of 1.4b and 124m
    decode       a token after 1K to 64K positions at batch sizes 1 and 8, of each variant; attention with a window
    attention    a layer's attention by cuDNN and by the built-in kernels, alternating: the table of
                 --attention-kernel auto
    train        60 steps of 124m, the same again, stopped and resumed: all bitwise equal; the fp32 build
    sanitizer    small cases under compute-sanitizer: races, memory at the ends of tensors
    kernels      the time of each operation, and its share of the rate of a copy or of a product
The first pass gives each part the seconds of PARTS: all parts in ten minutes. A part at its limit is unfinished, which
is no failure: the second pass continues it. After an interruption the same command continues: finished parts are not
repeated, unfinished ones continue after their last case. --out holds results.txt, results.json and log.txt, which are
written after every case. A check of a device also writes the first two as results/gpu-DEVICE-DATE.txt and .json.

Environment variables name programs, with arguments: TRAIN_DIFFV2CU, TRAIN_DIFFV2CU_FP32, TEST_DIFFV2CU,
TEST_DIFFV2CU_FP32, BENCH_CUDA, TRAIN_DIFFV2, PREDICT_DIFFV2; TORCH_PYTHON: a Python that has torch (default: python3);
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
from itertools import zip_longest
from pathlib import Path

import attention
import decode
import gradients
import machine
import operations
import peer
import speed
import train
from programs import ROOT, sources_of
from results import Store, Refused, failed
from runner import Check, Part, Skip, Unfinished


def correctness(check):
    """Both kinds of cases in turn, so that both have begun when time is short."""
    for cases in zip_longest(operations.operations(check), gradients.gradients(check)):
        yield from filter(None, cases)


AT_ONCE = 16  # at most: GPU memory of 16 programs, and no more of their contexts on one device
PARTS = {  # name: (its cases, how many at once, seconds in the first pass)
    "machine": (machine.machine, 1, 40),
    "rates": (speed.rates, 1, 20),
    "correctness": (correctness, AT_ONCE, 150),
    "profile": (speed.profile, 1, 90),
    "peer": (peer.peer, 1, 150),
    "models": (speed.models, 1, 90),
    "decode": (decode.decode, 1, 60),
    "attention": (attention.attention, 1, 50),
    "train": (train.train, 1, 35),
    "sanitizer": (operations.sanitizer, 4, 60),
    "kernels": (speed.kernels, 1, 40),
}
NO_LIMIT = None
LEAST = 2  # seconds: with less time left, no part starts


def fail(message, status=1):
    print(f"gpu_check.sh: {message}", file=sys.stderr)
    sys.exit(status)


def run_part(check, name, cap):
    store, (cases, at_once, _) = check.store, PARTS[name]
    part, started, why = Part(check, name), time.monotonic(), ""
    store.say(f"{name}: {'continues' if part.state['rows'] else 'starts'}{f', {cap} s' if cap else ''}")
    check.begin(cap)
    early = name == "correctness" and "peer" in check.options.parts
    compiler = peer.compile_early(check) if early else None
    try:
        part.run(cases(check), min(at_once, check.workers))
        status = "failed" if failed(part.state["rows"]) else "passed"
    except Unfinished as reason:
        status, why = "unfinished", str(reason)
    except Skip as reason:
        status, why = "skipped", str(reason)
    except (ImportError, OSError, RuntimeError) as error:  # of its list of cases: it must not prevent the other parts
        store.log.write(traceback.format_exc())
        part.state["rows"].append({"verdict": "FAIL", "case": f"{name} starts", "note": str(error)})
        status = "failed"
    finally:
        if compiler:
            compiler.end()
    part.state.update(status=status, why=why, seconds=part.state["seconds"] + time.monotonic() - started)
    store.save()
    if store.all["device"]:
        store.publish(check.published)
    store.say(f"{name}: {status}{': ' + why if why else ''} ({time.monotonic() - started:.0f} s)")
    check.begin(NO_LIMIT)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; --help lists the options", 2)


def parse_arguments():
    parser = Parser(prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = ROOT / "runs/gpu_check"
    parser.add_argument("--out", type=Path, default=out, help="directory of the results (default: %(default)s)")
    parser.add_argument(
        "--bundle",
        type=Path,
        help="the programs and the corpus that dev/gpu_check/short.sh unpacks on a rented machine",
    )
    parser.add_argument("--parts", help="run only these parts, separated by commas")
    parser.add_argument("--minutes", type=float, default=0, help="end within this time (default: no limit)")
    parser.add_argument(
        "--pretend",
        action="store_true",
        help="use dev/emulator instead of a GPU, and tiny models, to test this program",
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
            parser.error(f"--bundle {o.bundle}: not a bundle (it has no CONTENTS)")
    o.out = o.out.resolve()
    return o


def commit_of(bundle):
    git = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if done and done.returncode == 0:
        return done.stdout.strip()
    revision = bundle and bundle / "revision"
    return revision.read_text().strip() if revision and revision.exists() else "unknown"


def run_parts(check):
    """Two passes over the parts; in the second there are no limits. A skipped part runs again, because its corpus or
    package may now exist. The programs are chosen at each start: the results may come from another machine."""
    store, options = check.store, check.options
    todo = [n for n in PARTS if n == "machine" or n in options.parts]
    for name in todo:
        if name == "machine":
            store.forget(name)
        store.part(name)["why"] = ""
    finished = lambda name: store.part(name)["status"] in ("passed", "failed")
    # without a bundle the programs are built first, however long it takes
    seconds = lambda name: NO_LIMIT if name == "machine" and not check.bundle else PARTS[name][2]
    for name, cap in [*((n, seconds(n)) for n in todo), *((n, NO_LIMIT) for n in todo)]:
        if finished(name) or (cap is NO_LIMIT and store.part(name)["status"] == "skipped"):
            continue
        if check.left() < LEAST:
            why = "out of time" if store.part(name)["rows"] else "not started: out of time"
            store.part(name)["why"] = store.part(name)["why"] or why
        else:
            run_part(check, name, cap)
    store.save()
    return [store.part(n) for n in todo]


def main():
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # programs are ended first
    try:
        store = Store(options.out, commit_of(options.bundle), sources_of(options.bundle), list(PARTS))
        check = Check(options, store)
        parts = run_parts(check)
    except (Refused, OSError) as error:
        fail(str(error))
    print(open(options.out / "results.txt").read(), end="")
    print(f"{options.out}/results.txt: to be attached to an issue of the template 'GPU results'")
    states = [part["status"] for part in parts]
    wrong = any(failed(part["rows"]) for part in parts)
    sys.exit(1 if wrong else 3 if "unfinished" in states else 0)


if __name__ == "__main__":
    main()
