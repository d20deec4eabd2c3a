#!/usr/bin/env python3
"""update_scale.py: writes docs/scale.md from the trainer's predictions for GPUs (--dry-run --device). Requires no GPU.

Usage: scripts/update_scale.py [--check]
  --check   write nothing; fail if docs/scale.md is not up to date
Variables: TRAIN_DIFFV2 (./train_diffv2)
Exit status: 0 docs/scale.md is up to date, 1 failed, or with --check not up to date, 2 usage.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
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
FOUNDRY = "--vocab 50368 --seq-len 2048 --ranks 8 --zero 2 --total-batch 1048576"
QWEN_1_5B = f"{QWEN} {shape(28, 1536, 12, 2, 128, 8960)} --batch-size 16"
# program and model, number of GPUs, device, published tokens/s of all GPUs, options
PUBLISHED = [
    ("llm.c, GPT-2 124M", 8, "A100", 1.75e6, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    ("llm.c, GPT-2 124M", 8, "H100", 8 * 468e3, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    (
        "llm.c, GPT-2 1558M",
        8,
        "H100",
        381e3,
        f"{GPT2} {shape(48, 1600, 25, 25, 64, 4267)} --batch-size 16 --total-batch 1048576",
    ),
    ("llmq, Qwen2.5 0.5B", 1, "H100", 150e3, f"{QWEN} {shape(24, 896, 14, 2, 64, 4864)} --batch-size 32"),
    ("llmq, Qwen2.5 1.5B", 1, "H100", 58.9e3, QWEN_1_5B),
    ("llmq, Qwen2.5 1.5B", 8, "H100", 457e3, f"{QWEN_1_5B} --ranks 8 --zero 1"),
    ("llmq, Qwen2.5 3B", 1, "H100", 30.9e3, f"{QWEN} {shape(36, 2048, 16, 2, 128, 11008)} --batch-size 8"),
    (
        "llmq, Qwen2.5 7B",
        1,
        "H100",
        13.8e3,
        f"--vocab 152064 --no-tie-embeddings --seq-len 1024 {shape(28, 3584, 28, 4, 128, 18944)} --batch-size 4",
    ),
    ("llm-foundry, 1.3B", 8, "H100", 8 * 45.5e3, f"{FOUNDRY} {shape(24, 2048, 16, 16, 128, 5461)} --batch-size 16"),
    ("llm-foundry, 6.66B", 8, "H100", 8 * 10.6e3, f"{FOUNDRY} {shape(32, 4096, 32, 32, 128, 10922)} --batch-size 4"),
    ("DIFF V1's Transformer, 3B", 1, "H100", 7247, "--preset 3b --batch-size 4 --total-batch 8192"),
]


@functools.lru_cache(maxsize=None)
def ask(device, options):
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [*PROGRAM, "--dry-run", "--threads", "1", "--device", device, "--dry-run-out", out.name]
        words += options.split()
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"update_scale.py: {' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
        with open(out.name) as file:
            return json.load(file)


def sequence(size):
    return 1024 if size in ("124m", "350m") else 2048


def predict(device, size, ranks, B, zero, recompute, batch):
    micro_step = B * sequence(size) * ranks
    total = max(1, batch // micro_step) * micro_step
    return ask(
        device,
        f"{SIZES[size]} --batch-size {B} --ranks {ranks} --zero {zero} --recompute {recompute} --total-batch {total}",
    )


def best(device, size, ranks, batch):
    """(the fastest plan that fits, its B, zero, recompute) of three values of B, with recomputation only if 4 sequences
    do not fit otherwise. None: no plan fits."""
    found = None
    for recompute in range(3):
        for zero in range(4):
            for B in (16, 4, 1):
                if B > 1 and B * sequence(size) * ranks > batch:
                    continue
                p = predict(device, size, ranks, B, zero, recompute, batch)
                if p["fits"]:
                    if found is None or p["tokens_per_s"] > 1.005 * found[0]["tokens_per_s"]:
                        found = (p, B, zero, recompute)
                    break
        if found and found[1] >= 4:
            break
    return found


def largest_size(device, ranks, zero):
    for size in reversed(SIZES):
        if predict(device, size, ranks, 1, zero, 2, 0)["fits"]:
            return size
    return "-"


def largest_B(device, size, recompute):
    for B in (64, 32, 16, 8, 4, 2, 1):
        if predict(device, size, 8, B, 1, recompute, 0)["fits"]:
            return str(B)
    return "-"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def count(x):
    for unit in ("", "k", "M", "G"):
        if x < 999.5 or unit == "G":
            return f"{x:.3g}{unit}"
        x /= 1000


def percent(x):
    return f"{100 * x:.0f}%"


def sizes_on_devices():
    def row(size):
        cells = []
        for device in DEVICES:
            found = best(device, size, 8, 1 << 19)
            if found:
                p, B, zero, recompute = found
                share = percent(p["share_of_peak"])
                cells.append(f"{share}, {count(p['tokens_per_s'])}, B{B} z{zero} r{recompute}")
            else:
                cells.append("-")
        return [size, *cells]

    return row, list(SIZES)


def zero_levels():
    def row(case):
        return [f"`--zero {case[0]}`", str(case[1]), *(largest_size(device, case[1], case[0]) for device in DEVICES)]

    return row, [(0, 8)] + [(zero, ranks) for zero in (1, 2, 3) for ranks in (8, 64, 4096)]


RECOMPUTING = [(device, recompute) for device in ("RTX 5090", "H100", "H200") for recompute in range(3)]


def recompute_levels():
    def row(size):
        return [size, *(largest_B(device, size, recompute) for device, recompute in RECOMPUTING)]

    return row, list(SIZES)[:-2]


def scaling():
    def row(case):
        size, ranks, batch = case
        found = best("H200", size, ranks, batch)
        if not found:
            return [size, str(ranks), "none fits", *["-"] * 6]
        p, B, zero, recompute = found
        exposed = p["classes"]["communication, exposed"] / p["step_ms"]
        tokens = p["micro_steps"] * B * sequence(size) * ranks
        return [
            size,
            str(ranks),
            f"B{B} z{zero} r{recompute}",
            count(tokens),
            f"{p['step_ms']:.0f}",
            percent(p["share_of_peak"]),
            count(p["tokens_per_s"]),
            percent(exposed),
            f"{p['latency_ms']:.0f}",
        ]

    cases = [(8, 1 << 22), (64, 1 << 22), (512, 1 << 22), (4096, 1 << 22), (4096, 1 << 25)]
    return row, [(size, *case) for size in ("1.4b", "6.8b", "13.1b", "32b") for case in cases]


def published():
    def row(case):
        what, ranks, device, tokens, options = case
        if "--total-batch" not in options:
            options += " --total-batch 524288"
        p = ask(device, f"--attention baseline --no-deterministic {options}")
        predicted = p["tokens_per_s"]
        return [what, f"{ranks} x {device}", count(tokens), count(predicted), f"{predicted / tokens:.2f}"]

    return row, PUBLISHED


def assumed():
    p = ask("H200", f"{SIZES['1.4b']} --batch-size 16 --ranks 64 --zero 1")
    return [
        [
            a["what"],
            f"{a['value']:g} {a['unit']}",
            f"{100 * a['ms_when_a_tenth_worse'] / p['step_ms']:+.1f}%",
            a["source"],
        ]
        for a in p["assumptions"]
    ]


TEXT = """# Model sizes and GPUs

`scripts/update_scale.py` writes this page from the trainer's predictions (`--dry-run --device NAME`). Nothing here is
measured: the rates are assumed (last table), and `dev/gpu_check.sh` compares them with measured times. All models are
DIFF V2 in bf16 with a deterministic backward. *B* is the number of sequences per GPU and micro-step, *z* is `--zero`,
*r* is `--recompute`.

## Eight GPUs of one machine

Share of the dense bf16 peak, tokens/s of all eight GPUs, and the fastest plan that fits, at 0.5M tokens per update;
`-`: none fits. The last two sizes are the shapes of Qwen2.5-32B and Llama-3.1-70B.

{sizes}

## Limits of --zero and --recompute

The largest size that fits with one sequence per GPU and `--recompute 2`. With `--zero 0` a GPU holds 18 bytes per
parameter. `--zero 1` shards 12 of them, the optimizer states and master weights. `--zero 2` also shards the 4 bytes of
gradients, except those of two layers and the embedding, and `--zero 3` the 2 bytes of parameters with the same
exception.

{zero}

Up to `--zero 2` every GPU holds the 2 bytes of all parameters. When they alone fill its memory, the model does not fit
on any number of GPUs.

The most sequences per GPU on eight GPUs with `--zero 1`, by `--recompute` level: level 1 recomputes norms and MLP
activations, level 2 stores only the input of each block.

{recompute}

## Up to 4096 GPUs

H200, eight per machine, a network of 400 Gbit/s per GPU, at 4M tokens per update or one sequence per GPU. *Exposed* is
the share of a step that waits for communication; *latency* is the latency of all ring hops of a step, in ms.

{scaling}

The latency of a ring grows with the number of ranks and occurs once per bucket, so the bucket size grows with the
ranks (`llmc/model/sharding.h`). On 4096 GPUs computation does not hide the rings even at 32M tokens per update (the last
line of each size); this would require hierarchical reduction, within machines and then between them.

## Predicted and published speeds

Other programs at their own sizes, predicted as if this program did the same work, without activation recomputation and
with a nondeterministic backward. llm.c and llmq are CUDA programs of the same kind; the others run in PyTorch.

{published}

Sources: figures that llm.c, llmq and llm-foundry publish; arXiv 2410.05258 for the last line, whose code was not
tuned. Some batch sizes are guesses.

## Assumptions

For 1.4b on 64 H200. *Effect* is the increase of a step's time when the value is 10% worse.

{assumed}
"""


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    with ThreadPoolExecutor(2) as pool:

        def rows(part):
            row, cases = part
            return list(pool.map(row, cases))

        text = TEXT.format(
            sizes=table(["size", *DEVICES], rows(sizes_on_devices())),
            zero=table(["", "GPUs", *DEVICES], rows(zero_levels())),
            recompute=table(
                ["size", *(f"{device}, {level}" for device, level in RECOMPUTING)], rows(recompute_levels())
            ),
            scaling=table(
                ["size", "GPUs", "plan", "tokens per update", "ms", "of peak", "tokens/s", "exposed", "latency"],
                rows(scaling()),
            ),
            published=table(
                ["program and model", "GPUs", "published tokens/s", "predicted", "ratio"], rows(published())
            ),
            assumed=table(["assumption", "value", "effect", "source"], assumed()),
        )
    path = ROOT / "docs/scale.md"
    if sys.argv[1:]:
        if not path.exists() or path.read_text() != text:
            sys.exit("update_scale.py: docs/scale.md is not up to date: run scripts/update_scale.py")
        return 0
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
