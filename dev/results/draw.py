#!/usr/bin/env python3
"""
Draws loss-gap.png and stability.png from runs.csv and arms.csv, and low-bit.png from low-bit.csv. Requires matplotlib.

Usage: dev/results/draw.py [RESULTS]
  RESULTS   results.json of a report of the plan low-bit: first replaces low-bit.csv, and its runs in runs.csv
"""

import csv
import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
STUDENT_95 = 4.302653  # quantile of Student's t for a 95% interval of 3 values
COLORS = {"baseline": "#4477aa", "diff_v2": "#ee6677", "diff_v1": "#228833"}
LOW_BIT_COLORS = {**COLORS, "baseline-1.5h": "#66ccee", "baseline-2h": "#aa3377", "gated_elem": "#ccbb44"}
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "savefig.dpi": 150, "figure.constrained_layout.use": True})


def read(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def losses(study):
    """{(arm, rate): losses in the order of the seeds}"""
    found = {}
    for run in read("runs.csv"):
        if run["study"] == study:
            found.setdefault((run["arm"], float(run["rate"])), []).append(float(run["final_loss"]))
    return found


def interval(values):
    """Mean and half width of the 95% interval of three values."""
    assert len(values) == 3, values
    mean = sum(values) / 3
    return mean, STUDENT_95 * math.sqrt(sum((x - mean) ** 2 for x in values) / 2 / 3)


def draw_loss_gap(path):
    runs, labels = losses("loss-gap"), {row["arm"]: row["label"] for row in read("arms.csv")}
    reference = runs.pop(("baseline", 0.004))
    gaps = {arm: [a - b for a, b in zip(values, reference)] for (arm, _), values in runs.items()}
    order = sorted(gaps, key=lambda arm: -sum(gaps[arm]))
    figure, axes = plt.subplots(figsize=(7, 3))
    for y, arm in enumerate(order):
        mean, half = interval(gaps[arm])
        color = next(c for name, c in COLORS.items() if arm.startswith(name))
        axes.errorbar(mean, y, xerr=half, fmt="o", color=color, capsize=3)
        axes.plot(gaps[arm], [y + 0.22] * 3, "x", color=color, alpha=0.5, markersize=4)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(order)), [labels[arm] for arm in order])
    figure.supxlabel(
        "gap to the Transformer with NH heads, nats per byte: mean, 95% interval, single seeds (x)", fontsize=9
    )
    figure.savefig(path)


def draw_stability(path):
    figure, axes = plt.subplots(figsize=(7, 3))
    runs = losses("stability")
    for arm, label in (("baseline", "Transformer"), ("diff_v2", "DIFF V2")):
        rates = sorted(rate for name, rate in runs if name == arm)
        means, halves = zip(*(interval(runs[arm, rate]) for rate in rates))
        axes.errorbar(rates, means, yerr=halves, fmt="o-", color=COLORS[arm], capsize=3, label=label)
        for rate in rates:
            axes.plot([rate * 1.06] * 3, runs[arm, rate], "x", color=COLORS[arm], alpha=0.5, markersize=4)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("last validation loss, nats per byte")
    axes.legend()
    figure.savefig(path)


def write(name, rows):
    with open(HERE / name, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def number(x):
    return "" if x is None else f"{x:.7g}"


def store_low_bit(path):
    results = json.loads(Path(path).read_text())
    runs = [run for run in read("runs.csv") if not run["study"].startswith("low-bit-")]
    for run in results["runs"]:
        kept = {key: number(run[key]) for key in ("seed", "steps", "final_loss", "last_validation")}
        runs.append({"study": f"low-bit-{run['gemm']}", "arm": run["arm"], "rate": number(run["lr"]), **kept})
    write("runs.csv", runs)
    rows, seeds = [], sorted({str(run["seed"]) for run in results["runs"]})
    for table in ("training", "rounding", "measured"):
        for row in results["low_bit"][table]:
            gap = row["gap"] or dict.fromkeys(("mean", "half", "p_holm"))
            named = {"table": table, **{key: row[key] for key in ("precision", "what", "arm")}}
            costs = {"mean": row["cost"]["mean"], "half": row["cost"]["half"]}
            gaps = {"gap": gap["mean"], "gap_half": gap["half"], "gap_p_holm": gap["p_holm"]}
            each = {f"seed{seed}": row["seeds"].get(seed) for seed in seeds}
            rows.append({**named, **{key: number(x) for key, x in (costs | gaps | each).items()}})
    write("low-bit.csv", rows)


def draw_low_bit(path):
    rows = read("low-bit.csv")
    first = [row for row in rows if row["table"] == "training" and row["what"].startswith("validated")]
    then = [row for row in rows if row["table"] == "rounding" and row["precision"] == "fp32"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), width_ratios=(1, 2))
    arms = list(LOW_BIT_COLORS)
    for axes, part, key in ((left, first, "precision"), (right, then, "what")):
        names = list(dict.fromkeys(row[key] for row in part))
        for row in part:
            x = names.index(row[key]) + (arms.index(row["arm"]) - (len(arms) - 1) / 2) * 0.13
            color, half = LOW_BIT_COLORS[row["arm"]], float(row["half"])
            axes.errorbar(x, float(row["mean"]), yerr=half, fmt="o", color=color, capsize=2, markersize=3)
        axes.set_xticks(range(len(names)), names, rotation=0 if key == "precision" else 30)
        axes.axhline(0, color="black", linewidth=0.8)
    right.set_yscale("symlog", linthresh=1e-3)
    left.set_ylabel("added loss, nats per byte: mean, 95% interval")
    left.set_title("training: minus fp32, same seed", fontsize=9)
    right.set_title("evaluation of the fp32 runs with rounded numbers", fontsize=9)
    labels = {row["arm"]: row["label"] for row in read("arms.csv")}
    shown = [plt.Line2D([], [], marker="o", linestyle="", color=LOW_BIT_COLORS[arm], label=labels[arm]) for arm in arms]
    figure.legend(handles=shown, loc="outside lower center", ncols=3)
    figure.savefig(path)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        store_low_bit(sys.argv[1])
    draw_loss_gap(HERE / "loss-gap.png")
    draw_stability(HERE / "stability.png")
    draw_low_bit(HERE / "low-bit.png")
