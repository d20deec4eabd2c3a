#!/usr/bin/env python3
"""
Compares the speed of two checkouts of this repository, in turns in one run: a step of the CPU trainer, and its start.
Prints the medians of A and B, and the median of the ratios B / A of the rounds with the smallest and the largest.

Usage: dev/bench/compare_builds.py A B [--rounds N]
  A, B       directories with build/train_diffv2
  --rounds   of each measurement (default: 7)
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import tempfile
import time
from pathlib import Path

START = "--layers 1 --hidden 8 --heads 2 --kv-heads 1 --head-dim 8 --ffn 8 --seq-len 8 --steps 1"
STEP = "--batch-size 4 --steps 6 --warmup 0"


def run(command, directory):
    start = time.monotonic()
    subprocess.run(
        command, cwd=directory, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return 1000 * (time.monotonic() - start)


def run_ms(tree, directory, options):
    shutil.rmtree(directory / "run", ignore_errors=True)
    words = "--train-data train.bin --threads 1 --out run".split()
    return run([tree / "build/train_diffv2", *words, *options.split()], directory)


def step_ms(tree, directory, options):
    """The fastest step of a run."""
    run_ms(tree, directory, f"{STEP} {options}")
    records = map(json.loads, (directory / "run/log.jsonl").read_text().splitlines())
    return min(r["ms"] for r in records if r["kind"] == "train")


def compare(name, measure, trees, directory, argument, rounds):
    turns = [[measure(tree, directory, argument) for tree in trees] for _ in range(rounds)]
    a, b = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
    ratios = sorted(turn[1] / turn[0] for turn in turns)
    print(f"{name:24}{a:12.2f}{b:12.2f}{statistics.median(ratios):8.3f}{ratios[0]:8.3f}{ratios[-1]:8.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=lambda path: Path(path).resolve())
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"{'ms':24}{'A':>12}{'B':>12}{'B/A':>8}{'least':>8}{'most':>8}")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokens = [i * i % 251 for i in range(20000)]
        header = struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
        (directory / "train.bin").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
        compare("start", run_ms, args.trees, directory, START, args.rounds)
        for options in ("--preset tiny", "--preset tiny --matmul-dtype bf16", "--preset moe-tiny"):
            compare(f"step, {options}", step_ms, args.trees, directory, options, args.rounds)


if __name__ == "__main__":
    main()
