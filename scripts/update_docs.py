#!/usr/bin/env python3
"""update_docs.py: writes the generated parts of the documents: the text of --help in options.md, the tables of
sizing.md, scale.md and cluster.md, and the figures of scripts/recipes. The figures are those of --dry-run --device,
which requires no GPU.

Usage: scripts/update_docs.py [--check] [DOCUMENT...]
  --check   write nothing; name the documents that differ from what this program would write
  DOCUMENT  only these, such as docs/scale.md
Variables: TRAIN_DIFFV2 (./train_diffv2, which is built first when the variable is not set)
Exit status: 0 the documents are up to date, 1 failed, or with --check not up to date, 2 usage.
"""

import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRAIN_DIFFV2", "./train_diffv2").split()


def fail(text, status=1):
    print(f"update_docs.py: {text}", file=sys.stderr)
    sys.exit(status)


def run(*words, **variables):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode != 0:
        fail(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def replace(document, name, text):
    """The document with `text` between its markers <!-- NAME: begin ... --> and <!-- NAME: end -->."""
    pattern = re.compile(rf"(<!-- {name}: begin[^\n]*\n).*?(<!-- {name}: end -->)", re.S)
    if len(pattern.findall(document)) != 1:
        fail(f"a document lacks the markers <!-- {name}: begin and <!-- {name}: end -->")
    return pattern.sub(lambda m: m[1] + text + m[2], document)


@functools.lru_cache(maxsize=None)
def dry_run(options, program=tuple(PROGRAM), **variables):
    """What --dry-run prints, and its prediction for a GPU. With one thread it does not depend on this machine."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [*program, "--dry-run", "--threads", "1", "--dry-run-out", out.name]
        text = run(*words, *shlex.split(options), **variables)
        return text, json.loads(pathlib.Path(out.name).read_text(encoding="utf-8"))


def found(pattern, text, what):
    """The group of a pattern in what --dry-run prints."""
    match = re.search(pattern, text, re.M)
    if not match:
        fail(f"--dry-run does not print {what}")
    return match[1]


def count(x):
    for unit in ("", "K", "M", "G"):
        if x < 999.5:
            return f"{x:.3g}{unit}"
        x /= 1000
    return f"{x:.3g}T"


def percent(x):
    return f"{100 * x:.0f}%"


def span(prediction, value, text=count):
    """A value of both ends of a prediction, the lower first: 47 to 59%. `value`: a key, or a function of an end."""
    get = value if callable(value) else lambda end: end[value]
    low, high = map(text, sorted(get(prediction[end]) for end in ("fast", "slow")))
    unit = low.lstrip("0123456789.")
    return high if low == high else f"{low.removesuffix(unit) if high.endswith(unit) else low} to {high}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def options():
    return f"```\n{run(*PROGRAM, '--help')}```\n"


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


def fastest(options, device, ranks, batch, zeros, sizes):
    """(prediction, B, zero, recompute) of the fastest plan that fits, with recomputation only if 4 sequences do not fit
    otherwise. None: no plan fits."""
    best, sequence = None, 1024 if re.search("124m|350m", options) else 4096 if "30b" in options else 2048
    for recompute in range(3):
        for zero in zeros:
            for B in sizes:
                micro = B * sequence * ranks
                if B > 1 and micro > batch:
                    continue
                plan = f"--ranks {ranks} --zero {zero} --recompute {recompute} --batch-size {B}"
                total = max(1, batch // micro) * micro
                prediction = dry_run(f"--device '{device}' {options} {plan} --total-batch {total}")[1]
                if prediction["fits"]:
                    if best is None or prediction["tokens_per_s"] > 1.005 * best[0]["tokens_per_s"]:
                        best = prediction, B, zero, recompute
                    break
        if best and best[1] >= 4:
            break
    return best


# ---- sizing.md

MACHINES = [("RTX 5090", 1), ("H100", 1), ("H100", 8), ("B200", 8)]
TOKENS_PER_PARAMETER = 20
EPOCHS = 4


def parameters(options):
    """Of the model, and of its embedding."""
    text, prediction = dry_run(f"--device H100 {options}")
    return prediction["parameters"], int(found(r"^ +embedding +(\d+)$", text, "the parameters of the embedding"))


def settings():
    rows = []
    for name, options, lr, batch, source in SIZES:
        total, embedding = parameters(options)
        tokens = TOKENS_PER_PARAMETER * total
        law_lr, law_batch = 1.79 * (total - embedding) ** -0.713 * tokens**0.307, 0.58 * tokens**0.571
        in_range = total > 60e6  # the smallest model that the law was fitted to
        law = f"{law_lr:.2g}, {law_batch / 1e3:.0f}K" if in_range else "-"
        counts = map(count, (total, tokens, tokens / EPOCHS))
        rows.append([f"`{options}`", *counts, f"{lr:g}, {batch}", source, law])
    head = ["model", "parameters", "tokens", "unique tokens", "`--lr`, `--total-batch`", "used in", "Step Law"]
    return table(head, rows)


def hours():
    rows = []
    for name, options, _, batch, _ in SIZES[1:]:
        row, tokens = [name], TOKENS_PER_PARAMETER * parameters(options)[0]
        for device, ranks in MACHINES:
            plan = fastest(options, device, ranks, batch, [int(ranks > 1)], (32, 16, 8, 4, 2, 1))
            if not plan:
                row.append("-")
                continue
            h = tokens / plan[0]["tokens_per_s"] / 3600
            unit, scale = (" min", 60) if h < 1 else (" h", 1) if h < 72 else (" days", 1 / 24)
            duration = span(
                plan[0], lambda end: tokens / end["tokens_per_s"] / 3600, lambda x: f"{x * scale:.2g}{unit}"
            )
            row.append(f"{duration}, B{plan[1]} r{plan[3]}")
        rows.append(row)
    return table(["size", *(f"{ranks} x {device}" for device, ranks in MACHINES)], rows)


LAYERS = ["", "--window 1024 --full-every 4", "--window 1024 --yoco"]


def contexts():
    rows = []
    for length in (4096, 16384, 65536):
        for layers in LAYERS:
            model = f"--preset 1.4b --kv-heads 8 --seq-len {length} --batch-size 1 --recompute 1 {layers}"
            text, prediction = dry_run(f"--device H200 --sample-every 1 {model}")
            memory = r"^ +keys and values for samples +([0-9.]+) MiB$"
            cache = float(found(memory, text, "the memory of keys and values"))
            hours = span(prediction, lambda end: 1e9 / end["tokens_per_s"] / 3600, "{:.1f}".format)
            row = [f"{cache:.0f} MiB", f"{prediction['memory_bytes'] / 2**30:.0f} GiB", hours]
            rows.append([f"{length // 1024}K", f"`{layers}`" if layers else "full attention", *row])
    return table(["context", "layers", "cache", "training", "hours per 1G tokens"], rows)


# ---- scale.md

DEVICES = ["A100", "H100", "H200", "B200", "RTX 5090"]
LLAMA = "--vocab 128256 --no-tie-embeddings"
SHAPE = "--layers {} --hidden {} --heads {} --kv-heads {} --head-dim {} --ffn {}"
BEYOND = {  # the presets: the shapes of Qwen2.5-32B and Llama-3.1-70B
    "32b": f"{SHAPE.format(64, 5120, 40, 8, 128, 27648)} --vocab 152064 --seq-len 2048 --no-tie-embeddings",
    "70b": f"{SHAPE.format(80, 8192, 64, 8, 128, 28672)} {LLAMA} --seq-len 2048",
}
GPT2 = "--vocab 50257 --seq-len 1024 --ranks 8 --zero 1"
QWEN = "--vocab 151936 --tie-embeddings --seq-len 1024"
QWEN_1_5B = f"{QWEN} {SHAPE.format(28, 1536, 12, 2, 128, 8960)} --batch-size 16"
QWEN_7B = f"--vocab 152064 --no-tie-embeddings --seq-len 1024 {SHAPE.format(28, 3584, 28, 4, 128, 18944)}"
# Tokens/s of all GPUs that llm.c (GPT-2) and llmq (Qwen2.5) publish: device, tokens/s, options. Some batch sizes are
# guesses.
PUBLISHED = [
    ("A100", 1.75e6, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    ("H100", 8 * 468e3, f"{GPT2} --preset 124m --kv-heads 12 --batch-size 64"),
    ("H100", 381e3, f"{GPT2} {SHAPE.format(48, 1600, 25, 25, 64, 4264)} --batch-size 16 --total-batch 1048576"),
    ("H100", 150e3, f"{QWEN} {SHAPE.format(24, 896, 14, 2, 64, 4864)} --batch-size 32"),
    ("H100", 58.9e3, QWEN_1_5B),
    ("H100", 457e3, f"{QWEN_1_5B} --ranks 8 --zero 1"),
    ("H100", 30.9e3, f"{QWEN} {SHAPE.format(36, 2048, 16, 2, 128, 11008)} --batch-size 8"),
    ("H100", 13.8e3, f"{QWEN_7B} --batch-size 4"),
]


def in_turns(function, items):
    """The results of a function of each item, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, items))


def plans():
    def row(size):
        cells = []
        for device in DEVICES:
            p, *plan = fastest(size[1], device, 8, 1 << 19, range(4), (16, 4, 1)) or ({},)
            shape = "B{} z{} r{}".format(*plan) if p else ""
            speed = p and f"{span(p, 'share_of_peak', percent)}, {span(p, 'tokens_per_s')}, {shape}"
            cells.append(speed or "-")
        return [size[0], *cells]

    return table(["size", *DEVICES], in_turns(row, [*SIZES[1:], *BEYOND.items()]))


def comparisons():
    def ratio(case):
        device, tokens, options = case
        options += "" if "--total-batch" in options else " --total-batch 524288"
        prediction = dry_run(f"--device '{device}' --attention baseline --no-deterministic {options}")[1]
        return [prediction[end]["tokens_per_s"] / tokens for end in ("slow", "fast")]

    def share(ranks):
        plan = fastest("--preset 13.1b --kv-heads 20", "H200", ranks, 1 << 22, range(4), (16, 4, 1))
        return span(plan[0], "share_of_peak", percent)

    ratios, shares = in_turns(ratio, PUBLISHED), in_turns(share, (64, 512, 4096))
    inside = sum(slow < 1 < fast for slow, fast in ratios)
    slow, fast = (sorted(ends) for ends in zip(*ratios))
    text = (
        f"llm.c and llmq, CUDA programs of the same kind, publish {len(ratios)} speeds on A100 and H100 GPUs; for the "
        f"same work {inside} of them lie in the predicted range. Its slow ends are {slow[0]:.2f} to {slow[-1]:.2f} "
        f"times, its fast ends {fast[0]:.2f} to {fast[-1]:.2f} times the published speeds. On 64, 512 and 4096 H200 "
        "GPUs, with a network of 400 Gbit/s per GPU and 4M tokens per update or one sequence per GPU, 13.1b reaches "
        "{}, {} and {} of the peak.".format(*shares)
    )
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def groups():
    """By size and number of H200 GPUs: the share of the peak with one group of ranks, and with groups of a machine."""
    machines = (8, 64, 512, 4096)

    def cell(case):
        model, ranks = case
        plan = [fastest(f"{model} --zero-group {n}", "H200", ranks, 1 << 22, range(4), (16, 4, 1)) for n in (0, 8)]
        return " / ".join(f"{span(p[0], 'share_of_peak', percent)} z{p[2]}" if p else "-" for p in plan)

    names = ("1.4b", "3b", "13.1b", "30b-a3b")
    models = {**{size[0]: size[1] for size in SIZES}, "30b-a3b": "--preset 30b-a3b"}
    cells = in_turns(cell, [(models[name], ranks) for name in names for ranks in machines])
    rows = [[name, *cells[i * len(machines) :][: len(machines)]] for i, name in enumerate(names)]
    return table(["size", *(f"{ranks} GPUs" for ranks in machines)], rows)


def lengths():
    """By size and device: the longest sequence that fits one GPU, a power of two, at the least memory of a rank."""
    sizes = {size[0]: size[1] for size in SIZES if size[0] in ("1.4b", "13.1b")}
    sizes |= {
        "30b-a3b": "--preset 30b-a3b",
        "70b": BEYOND["70b"].replace("--seq-len 2048", ""),
        "405b": f"{SHAPE.format(126, 16384, 128, 8, 128, 53248)} {LLAMA}",
    }

    def cell(case):
        device, model, length = *case, 2048
        plan = f"--device {device} {model} --ranks 512 --zero 3 --recompute 2 --batch-size 1 --seq-len"
        while dry_run(f"{plan} {length}")[1]["fits"]:
            length *= 2
        return f"{length // 2048}K" if length > 2048 else "-"

    devices = ("H100", "H200", "B200")
    cells = in_turns(cell, [(device, model) for model in sizes.values() for device in devices])
    return table(["size", *devices], [[name, *cells[3 * i : 3 * i + 3]] for i, name in enumerate(sizes)])


# ---- gpu.md


def sdpa():
    kernels = ("cudnn", "own")
    step = "--preset 1.4b --kv-heads 8 --batch-size 16"
    rows = []
    for device in DEVICES:
        predictions = [dry_run(f"--device '{device}' {step} --sdpa {kernel}")[1] for kernel in kernels]
        rows.append([device, *(span(p, "step_ms", "{:.0f} ms".format) for p in predictions)])
    return table(["", "cuDNN", "`--sdpa own`"], rows)


# ---- cluster.md


def fits():
    """A row for each --zero level that --dry-run knows: whether 30b-a3b fits, the memory of a rank, and hours."""
    machines = [(device, ranks) for ranks in (8, 64) for device in ("H100", "H200")]
    rows = {}
    for device, ranks in machines:
        model = "--preset 30b-a3b --batch-size 1 --recompute 2 --total-batch 4194304"
        text = dry_run(f"--device '{device}' {model} --ranks {ranks}")[0]
        fit = r"([\d.]+) to ([\d.]+) ms +(fits|too little by ([\d.]+) MiB)"
        levels = re.findall(rf"^  (\d) +([\d.]+) MiB .* {fit}$", text, re.M)
        if not levels:
            fail("--dry-run does not print the memory by --zero level")
        for level, memory, *ms, fit, missing in levels:
            hours = " to ".join(f"{1e9 / 4194304 * float(end) / 3600e3:.2g}" for end in ms)
            short = f"fits, {hours} h" if fit == "fits" else f"{float(missing) / 1024:.1f} GiB too much"
            rows.setdefault(f"`--zero {level}`", []).append(f"{float(memory) / 1024:.1f} GiB: {short}")
    head = ["", *(f"{ranks} x {device}" for device, ranks in machines)]
    return table(head, [[level, *cells] for level, cells in rows.items()])


# ---- scripts/recipes, and their table in cluster.md

RECIPES = ROOT / "scripts/recipes"
DEVICE = "H100"  # of the predicted hours


def recipe(row):
    """The figures of a recipe, of one rank, as scripts/recipes has them: {name: text}."""
    name, nodes, gpus, _, total, steps, _, _, _, zero, *_ = row.split()
    ranks, heads = int(nodes) * int(gpus), re.search(" --kv-heads [0-9]+", row)
    text, p = dry_run(
        f"--ranks {ranks} --device {DEVICE} --val-every 0 --out build/none",
        ("scripts/recipe.sh", name),
        RANKS="1",
        TRAIN_DIFFV2=" ".join(PROGRAM),
    )
    sent = float(found(rf"^  {zero} +[\d.]+ MiB +([\d.]+) MiB", text, "the bytes that a rank sends")) / 1024
    peak = found(r"^expected step .*\(([\d.]+) TFLOP/s", text, "the peak of the GPU")
    number = lambda x: float(x[:-1]) * 1000 ** " kMGTPE".index(x[-1])  # of 855M
    per_token, flops = (number(found(rf"^  {of} +(\S+)$", text, "the FLOPs")) for of in ("per token", "of the run"))
    short = lambda x: f"{x:.2g}" if x < 100 else f"{x:.0f}"
    active = f", {p['active_parameters']} active in a token" if p["active_parameters"] != p["parameters"] else ""
    delay = f"delays the step by {span(p, lambda end: end['classes']['communication, exposed'], short)} ms"
    return {
        "tokens": f"{int(total) * int(steps) / 1e9:.3g}G",
        "model": f"--preset {name}{heads[0] if heads else ''}, {p['parameters']} parameters{active}",
        "GPUs": f"{ranks}, on {'one machine' if nodes == '1' else f'{nodes} machines with {gpus} each'}",
        "memory per GPU": f"{p['memory_bytes'] / 2**30:.3g} GiB; sends {sent:.3g} GiB per step, which {delay}",
        "FLOPs": f"{flops:.3g} ({per_token:.3g} per token)",
        "expected hours": f"{span(p, 'hours', short)} on {DEVICE} at {span(p, 'share_of_peak', percent)} of {peak} "
        f"TFLOP/s: predicted by --dry-run --device {DEVICE}, not measured",
    }


def recipe_file():
    lines = []
    for line in RECIPES.read_text().splitlines():
        if not line.startswith(" ") or line.split()[0] == "settings":
            lines.append(line)
        if not line.startswith((" ", "#")):
            lines += [f"    {key:<15} {value}" for key, value in recipe(line).items()]
    return "\n".join(lines) + "\n"


def recipe_table():
    first = lambda figures, key: re.match("[^ ,]+( to [^ ]+)?", figures[key])[0]
    keys = ("GPUs", "tokens", "FLOPs", "expected hours")
    rows = []
    for row in RECIPES.read_text().splitlines():
        if not row.startswith((" ", "#")):
            figures = recipe(row)
            rows.append([f"`{row.split()[0]}`", *(first(figures, key) for key in keys)])
    return table(["recipe", "GPUs", "tokens", "FLOPs", "hours, predicted"], rows)


# document -> marker -> function that returns the text between the markers, or, for "", the whole document
GENERATED = {
    "docs/options.md": {"help": options},
    "docs/gpu.md": {"sdpa": sdpa},
    "docs/cluster.md": {"recipes": recipe_table, "fits": fits},
    "docs/sizing.md": {"settings": settings, "hours": hours, "contexts": contexts},
    "docs/scale.md": {"plans": plans, "comparisons": comparisons, "groups": groups, "lengths": lengths},
    "scripts/recipes": {"": recipe_file},
}


def main():
    names = sys.argv[1:]
    if names in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return 0
    check = "--check" in names
    names = [name for name in names if name != "--check"]
    if wrong := [name for name in names if name not in GENERATED]:
        fail(f"unexpected argument '{wrong[0]}': usage: scripts/update_docs.py [--check] [DOCUMENT...]", 2)
    if "TRAIN_DIFFV2" not in os.environ:
        run("make", "-s", "train_diffv2")
    stale = []
    for name in names or GENERATED:
        path = ROOT / name
        old = text = path.read_text(encoding="utf-8")
        for marker, write in GENERATED[name].items():
            text = replace(text, marker, write()) if marker else write()
        if text != old:
            stale.append(name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        fail(f"{', '.join(stale)} not up to date: run scripts/update_docs.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
