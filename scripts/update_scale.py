#!/usr/bin/env python3
"""update_scale.py: writes docs/scale.md from the trainer's predictions for GPUs (--dry-run --device). Requires no GPU.

Usage: scripts/update_scale.py [--check]
  --check   write nothing; fail if docs/scale.md is not up to date
Variables: TRAIN_DIFFV2 (./train_diffv2)
Exit status: 0 docs/scale.md is up to date, 1 failed, or with --check not up to date, 2 usage.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRAIN_DIFFV2", "./train_diffv2").split()
DEVICES = ["A100", "H100", "H200", "B200", "RTX 5090"]


def shape(layers, hidden, heads, kv_heads, head_dim, ffn):
    return (
        f"--layers {layers} --hidden {hidden} --heads {heads} --kv-heads {kv_heads} --head-dim {head_dim} --ffn {ffn}"
    )


GROUPED = {"1.4b": 8, "2.8b": 10, "3b": 12, "6.8b": 16, "13.1b": 20}  # key/value heads, half of the preset's
SIZES = {name: f"--preset {name}" for name in ("124m", "350m", "830m")}
SIZES |= {name: f"--preset {name} --kv-heads {heads}" for name, heads in GROUPED.items()}
# Beyond the presets: the shapes of Qwen2.5-32B and Llama-3.1-70B.
SIZES["32b"] = f"{shape(64, 5120, 40, 8, 128, 27648)} --vocab 152064 --seq-len 2048 --no-tie-embeddings"
SIZES["70b"] = f"{shape(80, 8192, 64, 8, 128, 28672)} --vocab 128256 --seq-len 2048 --no-tie-embeddings"

GPT2 = "--vocab 50257 --seq-len 1024 --ranks 8 --zero 1"
QWEN = "--vocab 151936 --tie-embeddings --seq-len 1024"
QWEN_1_5B = f"{QWEN} {shape(28, 1536, 12, 2, 128, 8960)} --batch-size 16"
QWEN_7B = f"--vocab 152064 --no-tie-embeddings --seq-len 1024 {shape(28, 3584, 28, 4, 128, 18944)}"
# Tokens/s of all GPUs that llm.c (GPT-2) and llmq (Qwen2.5) publish: device, tokens/s, options. Some batch sizes are
# guesses.
PUBLISHED = [
    ("A100", 1.75e6, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    ("H100", 8 * 468e3, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    ("H100", 381e3, f"{GPT2} {shape(48, 1600, 25, 25, 64, 4267)} --batch-size 16 --total-batch 1048576"),
    ("H100", 150e3, f"{QWEN} {shape(24, 896, 14, 2, 64, 4864)} --batch-size 32"),
    ("H100", 58.9e3, QWEN_1_5B),
    ("H100", 457e3, f"{QWEN_1_5B} --ranks 8 --zero 1"),
    ("H100", 30.9e3, f"{QWEN} {shape(36, 2048, 16, 2, 128, 11008)} --batch-size 8"),
    ("H100", 13.8e3, f"{QWEN_7B} --batch-size 4"),
]


def ask(device, options):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [*PROGRAM, "--dry-run", "--threads", "1", "--device", device, "--dry-run-out", out.name]
        words += options.split()
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"update_scale.py: {' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
        with open(out.name) as file:
            return json.load(file)


def best(device, size, ranks, batch):
    """(the fastest plan that fits, its B, zero, recompute) of three values of B, with recomputation only if 4 sequences
    do not fit otherwise. None: no plan fits."""
    found, tokens = None, ranks * (1024 if size in ("124m", "350m") else 2048)  # of one sequence on each GPU
    for recompute in range(3):
        for zero in range(4):
            for B in (16, 4, 1):
                total = max(1, batch // (B * tokens)) * B * tokens
                if B > 1 and total > batch:
                    continue
                plan = f"--batch-size {B} --ranks {ranks} --zero {zero} --recompute {recompute} --total-batch {total}"
                p = ask(device, f"{SIZES[size]} {plan}")
                if p["fits"]:
                    if found is None or p["tokens_per_s"] > 1.005 * found[0]["tokens_per_s"]:
                        found = (p, B, zero, recompute)
                    break
        if found and found[1] >= 4:
            break
    return found


def count(x):
    for unit in ("", "k", "M", "G"):
        if x < 999.5 or unit == "G":
            return f"{x:.3g}{unit}"
        x /= 1000


def percent(x):
    return f"{100 * x:.0f}%"


def row(size):
    cells = []
    for device in DEVICES:
        found = best(device, size, 8, 1 << 19)
        p, *plan = found or ({},)
        if p:
            cells.append("{}, {}, B{} z{} r{}".format(percent(p["share_of_peak"]), count(p["tokens_per_s"]), *plan))
        else:
            cells.append("-")
    return [size, *cells]


def share(ranks):
    return percent(best("H200", "13.1b", ranks, 1 << 22)[0]["share_of_peak"])


def ratio(case):
    device, tokens, options = case
    options += "" if "--total-batch" in options else " --total-batch 524288"
    return ask(device, f"--attention baseline --no-deterministic {options}")["tokens_per_s"] / tokens


TEXT = """# Model sizes and GPUs

`scripts/update_scale.py` writes this page from the trainer's predictions (`--dry-run --device NAME`). Share of the
dense bf16 peak, tokens/s of all eight GPUs of one machine, and the fastest plan that fits, at 0.5M tokens per update:
*B* sequences per GPU and micro-step, *z* is `--zero`, *r* is `--recompute`; `-`: none fits. All models are DIFF V2 in
bf16 with a deterministic backward. The last two sizes are the shapes of Qwen2.5-32B and Llama-3.1-70B.

{table}

"""
MORE = """Nothing here is measured. The rates are assumed: `--dry-run --device` lists them by how much longer a step
takes when one is 10% worse, and `dev/gpu_check.sh` compares them with measured times. llm.c and llmq, CUDA
programs of the same kind, publish {count} speeds on A100 and H100 GPUs; for the same work the predictions
are {low:.2f} to {high:.2f} times as high. `--zero 0` holds 18 bytes per parameter on each GPU. `--zero 1`
shards 12 of them, the optimizer states and master weights; `--zero 2` also the 4 bytes of gradients, except
those of two layers and the embedding; `--zero 3` also the 2 bytes of parameters with the same exception. A
dry run with `--ranks` prints for each level whether a rank fits. On 64, 512 and 4096 H200 GPUs, with a
network of 400 Gbit/s per GPU and 4M tokens per update or one sequence per GPU, 13.1b reaches {shares} of
the peak: the latency of a ring grows with the number of ranks and occurs once per bucket
(`llmc/model/sharding.h`). On 4096 GPUs computation does not hide the rings; this would require hierarchical
reduction, within machines and then between them.
"""


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    with ThreadPoolExecutor(2) as pool:
        rows, shares = list(pool.map(row, SIZES)), list(pool.map(share, (64, 512, 4096)))
        ratios = list(pool.map(ratio, PUBLISHED))
    lines = ["| " + " | ".join(cells) + " |" for cells in (["size", *DEVICES], *rows)]
    table = "\n".join([lines[0], "|---|" + "---:|" * len(DEVICES), *lines[1:]])
    more = MORE.format(count=len(ratios), low=min(ratios), high=max(ratios), shares="{}, {} and {}".format(*shares))
    text = TEXT.format(table=table) + textwrap.fill(" ".join(more.split()), 120, break_on_hyphens=False) + "\n"
    path = ROOT / "docs/scale.md"
    if not sys.argv[1:]:
        path.write_text(text)
    elif not path.exists() or path.read_text() != text:
        sys.exit("update_scale.py: docs/scale.md is not up to date: run scripts/update_scale.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
