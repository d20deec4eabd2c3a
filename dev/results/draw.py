#!/usr/bin/env python3
"""
Draws loss-gap.png and stability.png from runs.csv and arms.csv. Requires matplotlib.

Usage: dev/results/draw.py
"""

import csv
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
STUDENT_95 = 4.302653  # quantile of Student's t for a 95% interval of 3 values
COLORS = {"baseline": "#4477aa", "diff_v2": "#ee6677", "diff_v1": "#228833"}
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


if __name__ == "__main__":
    draw_loss_gap(HERE / "loss-gap.png")
    draw_stability(HERE / "stability.png")
