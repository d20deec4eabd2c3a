#!/usr/bin/env python3
"""update_docs.py: writes the generated parts of docs/: the text of --help in options.md, the tables of sizing.md,
and the table of mixtures of experts in cluster.md.

Usage: scripts/update_docs.py [--check]
  --check   write nothing; name the documents that differ from what this program would write
Variables: TRAIN_DIFFV2 (./train_diffv2, which is built first when the variable is not set)
Exit status: 0 the documents are up to date, 1 failed, or with --check not up to date, 2 usage.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRAIN_DIFFV2", "./train_diffv2").split()


def fail(text):
    sys.exit(f"update_docs.py: {text}")


def run(*words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def replace(document, name, text):
    """The document with `text` between its markers <!-- NAME: begin ... --> and <!-- NAME: end -->."""
    pattern = re.compile(rf"(<!-- {name}: begin[^\n]*\n).*?(<!-- {name}: end -->)", re.S)
    if len(pattern.findall(document)) != 1:
        fail(f"a document lacks the markers <!-- {name}: begin and <!-- {name}: end -->")
    return pattern.sub(lambda m: m[1] + text + m[2], document)


def options():
    return f"```\n{run(*PROGRAM, '--help')}```\n"


# ---- the tables of sizing.md

PAPER = "arXiv 2410.05258"
# name, options, largest learning rate, tokens per update, where these two are from
SIZES = [
    ("tiny", "--preset tiny", 4e-3, 1 << 10, "`scripts/plans/loss-gap.plan`"),
    ("124m", "--preset 124m", 6e-4, 1 << 19, "`scripts/recipe.sh 124m`"),
    ("350m", "--preset 350m", 3e-4, 1 << 19, "`scripts/recipe.sh 350m`"),
    ("830m", "--preset 830m", 1.5e-3, 1 << 18, PAPER),
    ("1.4b", "--preset 1.4b --kv-heads 8", 1.5e-3, 1 << 18, "`scripts/recipe.sh 1.4b`"),
    ("2.8b", "--preset 2.8b --kv-heads 10", 1.5e-3, 1 << 18, PAPER),
    ("3b", "--preset 3b --kv-heads 12", 3.2e-4, 1 << 22, "`scripts/recipe.sh 3b`"),
    ("6.8b", "--preset 6.8b --kv-heads 16", 7.5e-4, 1 << 18, PAPER),
    ("13.1b", "--preset 13.1b --kv-heads 20", 7.5e-4, 1 << 18, PAPER),
]
MACHINES = [("RTX 5090", 1), ("H100", 1), ("H100", 8), ("B200", 8)]
TOKENS_PER_PARAMETER = 20
EPOCHS = 4


@functools.lru_cache(maxsize=None)
def dry_run(options):
    """What --dry-run prints, and its prediction for a GPU."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        text = run(*PROGRAM, "--dry-run", "--threads", "1", "--dry-run-out", out.name, *options)
        with open(out.name, encoding="utf-8") as file:
            return text, json.load(file)


def count(x):
    for unit in ("", "K", "M", "G"):
        if x < 999.5:
            return f"{x:.3g}{unit}"
        x /= 1000
    return f"{x:.3g}T"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def parameters(options):
    """Of the model, and of its embedding."""
    text, prediction = dry_run(("--device", "H100", *options.split()))
    embedding = re.search(r"^ +embedding +(\d+)$", text, re.M)
    if not embedding:
        fail("--dry-run does not print the parameters of the embedding")
    return prediction["parameters"], int(embedding[1])


def settings():
    rows = []
    for name, options, lr, batch, source in SIZES:
        total, embedding = parameters(options)
        tokens = TOKENS_PER_PARAMETER * total
        law_lr, law_batch = 1.79 * (total - embedding) ** -0.713 * tokens**0.307, 0.58 * tokens**0.571
        in_range = total > 60e6  # the smallest model that the law was fitted to
        rows.append(
            [
                f"`{options}`",
                count(total),
                count(tokens),
                count(tokens / EPOCHS),
                f"{lr:g}, {batch}",
                source,
                f"{law_lr:.2g}, {law_batch / 1e3:.0f}K" if in_range else "-",
            ]
        )
    head = ["model", "parameters", "tokens", "unique tokens", "`--lr`, `--total-batch`", "used in", "Step Law"]
    return table(head, rows)


def fastest(options, device, ranks, batch):
    """(hours per 1e9 tokens, B, recompute) of the fastest plan that fits; None: none fits."""
    found = None
    for recompute in range(3):
        for B in (32, 16, 8, 4, 2, 1):
            words = (
                f"{options} --ranks {ranks} --zero {int(ranks > 1)} --recompute {recompute} --batch-size {B}".split()
            )
            sequence = 1024 if "124m" in options or "350m" in options else 2048
            micro = B * sequence * ranks
            if B > 1 and micro > batch:
                continue
            prediction = dry_run(("--device", device, *words, "--total-batch", str(max(1, batch // micro) * micro)))[1]
            if prediction["fits"]:
                hours = 1e9 / prediction["tokens_per_s"] / 3600
                if found is None or hours < found[0]:
                    found = (hours, B, recompute)
                break
        if found and found[1] >= 4:
            break
    return found


def hours():
    rows = []
    for name, options, _, batch, _ in SIZES[1:]:
        row, tokens = [name], TOKENS_PER_PARAMETER * parameters(options)[0]
        for device, ranks in MACHINES:
            plan = fastest(options, device, ranks, batch)
            if not plan:
                row.append("-")
                continue
            h = plan[0] * tokens / 1e9
            duration = f"{60 * h:.0f} min" if h < 1 else f"{h:.3g} h" if h < 72 else f"{h / 24:.3g} days"
            row.append(f"{duration}, B{plan[1]} r{plan[2]}")
        rows.append(row)
    return table(["size", *(f"{ranks} x {device}" for device, ranks in MACHINES)], rows)


LAYERS = ["", "--window 1024 --full-every 4", "--window 1024 --yoco"]


def contexts():
    rows = []
    for length in (4096, 16384, 65536):
        for layers in LAYERS:
            words = f"--preset 1.4b --kv-heads 8 --seq-len {length} --batch-size 1 --recompute 1 {layers}".split()
            text, prediction = dry_run(("--device", "H200", "--sample-every", "1", *words))
            cache = re.search(r"^ +keys and values for samples +([0-9.]+) MiB$", text, re.M)
            if not cache:
                fail("--dry-run does not print the memory of keys and values")
            hours = 1e9 / prediction["tokens_per_s"] / 3600
            memory = prediction["memory_bytes"] / 2**30
            row = [f"{float(cache[1]):.0f} MiB", f"{memory:.0f} GiB", f"{hours:.1f}"]
            rows.append([f"{length // 1024}K", f"`{layers}`" if layers else "full attention", *row])
    return table(["context", "layers", "cache", "training", "hours per 1G tokens"], rows)


# ---- the table of cluster.md


def fits():
    """A row for each --zero level that --dry-run knows: whether 30b-a3b fits, the memory of a rank, and hours."""
    machines = [(device, ranks) for ranks in (8, 64) for device in ("H100", "H200")]
    rows = {}
    for device, ranks in machines:
        words = f"--preset 30b-a3b --batch-size 1 --recompute 2 --total-batch 4194304 --ranks {ranks}".split()
        text = dry_run(("--device", device, *words))[0]
        found = re.findall(r"^  (\d) +([\d.]+) MiB .* ([\d.]+) ms +(fits|too little by ([\d.]+) MiB)$", text, re.M)
        if not found:
            fail("--dry-run does not print the memory by --zero level")
        for level, memory, ms, fit, missing in found:
            hours = 1e9 / 4194304 * float(ms) / 3600e3
            short = f"fits, {hours:.2g} h" if fit == "fits" else f"{float(missing) / 1024:.1f} GiB too much"
            rows.setdefault(f"`--zero {level}`", []).append(f"{float(memory) / 1024:.1f} GiB: {short}")
    return table(
        ["", *(f"{ranks} x {device}" for device, ranks in machines)], [[level, *cells] for level, cells in rows.items()]
    )


# document -> marker -> what is written between the markers
GENERATED = {
    "docs/options.md": {"help": options},
    "docs/cluster.md": {"fits": fits},
    "docs/sizing.md": {"settings": settings, "hours": hours, "contexts": contexts},
}


def main():
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return 0
    if arguments not in ([], ["--check"]):
        print(
            f"update_docs.py: unexpected arguments {arguments}: usage: scripts/update_docs.py [--check]",
            file=sys.stderr,
        )
        return 2
    if "TRAIN_DIFFV2" not in os.environ:
        run("make", "-s", "train_diffv2")
    stale = []
    for name, parts in GENERATED.items():
        path = ROOT / name
        old = text = path.read_text(encoding="utf-8")
        for marker, write in parts.items():
            text = replace(text, marker, write())
        if text != old:
            stale.append(name)
            if not arguments:
                path.write_text(text, encoding="utf-8")
    if arguments and stale:
        fail(f"{', '.join(stale)} not up to date: run scripts/update_docs.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
