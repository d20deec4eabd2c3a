#!/usr/bin/env python3
"""
Draws stability.png, three-arms.png and three-arms-ablations.png from runs/, scaling.png from sweeps/, and yoco.png
from yoco.csv. Requires matplotlib.

Usage: dev/results/draw.py
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from pages import OVER_TIME, at_rates, common, currencies, evaluations, fit, named, read, runs_of, scaled, stats
from pages import studies, times_of

HERE = Path(__file__).resolve().parent
COLORS = {"baseline": "#4477aa", "diff_v2": "#ee6677", "diff_v1": "#228833"}
ARM_COLORS = {**COLORS, "baseline-1.5h": "#66ccee", "baseline-2h": "#aa3377", "gated_elem": "#ccbb44"}
ARMS = {**ARM_COLORS, "cross_group": "#228833", "no_lambda": "#ccbb44", "no_sigmoid": "#4477aa"}
LADDER = {**COLORS, "diff_v1_no_norm": "#66ccee", "diff_v2_norm": "#aa3377"}
GROWTH = "gradient norm: last quarter / second quarter"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "savefig.dpi": 150, "figure.constrained_layout.use": True})


def draw_stability(path):
    """Loss and growth of the gradient norm over rates, of all arms."""
    measured, labels = studies()["stability-cpu"], named("stability")
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for axes, metric, name in zip(panels, ("loss", "grad_growth"), ("last validation loss, nats per byte", GROWTH)):
        for i, (arm, label) in enumerate(labels.items()):
            of = {r: list(at_rates(measured, [r]).by_seed(arm, metric).values()) for r in measured.rates}
            estimates = [stats.t_interval(values) for values in of.values()]
            turn = math.exp if metric == "grad_growth" else float
            means, ends = [turn(e.mean) for e in estimates], [(turn(e.low), turn(e.high)) for e in estimates]
            error = [[m - low for m, (low, _) in zip(means, ends)], [high - m for m, (_, high) in zip(means, ends)]]
            x = [rate * (0.94 + 0.03 * i) for rate in measured.rates]
            axes.errorbar(x, means, yerr=error, fmt="o-", markersize=3, color=LADDER[arm], capsize=2, label=label)
        axes.set_xscale("log")
        axes.set_xticks(measured.rates, [f"{rate:g}" for rate in measured.rates])
        axes.minorticks_off()
        axes.set_xlabel("learning rate")
        axes.set_ylabel(name)
    panels[0].legend(fontsize=7)
    figure.savefig(path)


def draw_arms(plan):
    """Loss over rates and tokens; gaps by position and frequency; statistics over tokens."""
    name = f"{plan}-cpu"
    study, measured = runs_of(name), studies()[name]
    own = currencies.at_own_rates(study)
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.4))
    (rates, positions, shares), (seeds, *times) = panels
    for i, (arm, label) in enumerate(study.arms.items()):
        style = {"color": ARMS[arm], "marker": "o", "markersize": 3}

        def draw(axes, x, estimates):
            mean, half = zip(*((e["mean"], e["half"]) for e in estimates))
            axes.errorbar(x, mean, yerr=half, capsize=2, **style)

        rates.plot(*zip(*measured.losses_by_rate(arm)), label=label, **style)
        for run in (run for run in own.runs if run.arm == arm):
            x, y = zip(*sorted((t / 1e6, loss) for t, loss in run.validated.items() if t > 1e6))
            seeds.plot(x, y, color=style["color"], linewidth=0.8)
        apart = 2 ** (0.08 * (i - len(study.arms) / 2))  # so that bars do not cover each other
        if arm != study.reference:
            rows = [row for row in evaluations.by_position(own, own.rates()[0])[arm] if row["begin"] >= 8]
            draw(positions, [row["end"] * apart for row in rows], [row["gap"] for row in rows])
            rows = common(evaluations.by_frequency(own, own.rates()[0])[arm])
            draw(shares, [row["share"] * apart for row in rows], [row["gap"] for row in rows])
        for axes, key in zip(times, ("context_rms_mean", "residual_max")):
            found = times_of(name, [arm], [key])[key, arm]
            draw(axes, [t / 1e6 for t in found], [stats.as_json(e) for e in found.values()])
            axes.set_ylabel(f"{OVER_TIME[key][0]}: mean, 95% interval")
    for axes, what in ((rates, "learning rate"), (positions, "position, up to"), (shares, "share of the token, from")):
        axes.set_xscale("log", base=10 if axes is rates else 2)
        axes.set_xlabel(what)
        axes.set_ylabel("loss of the sweep" if axes is rates else f"loss minus that of {study.arms[study.reference]}")
    seeds.set_ylabel("validation loss of each seed")
    for axes in panels[1]:
        axes.set_xlabel("million tokens")
    for axes in (positions, shares):
        axes.axhline(0, color="black", linewidth=0.8)
    rates.legend(fontsize=7)
    figure.savefig(HERE / f"{plan}.png")


def draw_scaling(path):
    """The losses and the laws of the arms over size, and the gap of DIFF V2 at each place, with that of the laws."""
    study, arms, laws, _, drawn = scaled()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    base = arms["baseline"]
    lengths = sorted({round(d / n, -1) for n, d, _ in base.values()})
    for arm, each in ((arm, each) for arm in arms for each in lengths):
        at = [(n, stats.mean(x.values())) for n, d, x in arms[arm].values() if round(d / n, -1) == each]
        style = {"color": COLORS[arm], "fillstyle": "full" if each == lengths[0] else "none"}
        label = f"{study.arms[arm]}, {each:g} tokens per parameter"
        left.plot(*zip(*at), linestyle="", marker="o", markersize=4, label=label, **style)
        n = np.geomspace(min(at)[0], max(at)[0])
        left.plot(n, fit.loss_at(laws[arm], n, each * n), color=COLORS[arm], linewidth=0.8)
    n = np.geomspace(1e5, max(fit.TARGETS))
    gap = lambda of: fit.loss_at(of["diff_v2"], n, lengths[0] * n) - fit.loss_at(of["baseline"], n, lengths[0] * n)
    tail = 50 * (1 - stats.CONFIDENCE)
    right.fill_between(n, *np.percentile([gap(of) for of in drawn], (tail, 100 - tail), axis=0), alpha=0.2, linewidth=0)
    right.plot(n, gap(laws), linewidth=0.8, label=f"the laws, {lengths[0]:g} tokens per parameter")
    for i, each in enumerate(lengths):
        places = [place for place, (n, d, _) in base.items() if round(d / n, -1) == each]
        found = [stats.paired_gap(arms["diff_v2"][place][2], base[place][2]) for place in places]
        x = [base[place][0] * 2 ** (0.2 * i) for place in places]
        fill, bars = "full" if i == 0 else "none", [e.half for e in found]
        marks = {"fmt": "o", "capsize": 2, "markersize": 4, "color": "#333333", "fillstyle": fill}
        right.errorbar(x, [e.mean for e in found], yerr=bars, label=f"{each:g} tokens per parameter", **marks)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("parameters")
    right.axhline(0, color="black", linewidth=0.8)
    left.set_ylabel("last validation loss, nats per byte")
    right.set_ylabel("DIFF V2 minus Transformer: mean, 95% interval")
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    figure.savefig(path)


def draw_yoco(path):
    rows = read("yoco.csv")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    costs = [row for row in rows if row["table"] == "cost" and row["what"] == "loss"]
    for y, row in enumerate(reversed(costs)):
        color = COLORS[row["arm"].split("-")[0]]
        left.errorbar(float(row["mean"]), y, xerr=float(row["half"]), fmt="o", color=color, capsize=3)
        seeds = [float(x) for key, x in row.items() if key.startswith("seed") and x]
        left.plot(seeds, [y + 0.25] * len(seeds), "x", color=color, alpha=0.5, markersize=4)
    names = [f"{row['label'].split(',')[0]}: {row['change']}" for row in reversed(costs)]
    left.set_yticks(range(len(costs)), names)
    left.axvline(0, color="black", linewidth=0.8)
    left.set_xlabel("added loss, nats per byte: mean, 95% interval, seeds (x)", fontsize=8)
    at = [row for row in rows if row["table"] == "position" and row["gap"] and int(row["what"].split()[0]) >= 4]
    for arm in dict.fromkeys(row["arm"] for row in at):
        mine = [row for row in at if row["arm"] == arm]
        x = [int(row["what"].split()[0]) for row in mine]
        style = ":" if arm.endswith("-w") else "--" if arm.endswith("-yoco") else "-"
        color = COLORS[arm.split("-")[0]]
        right.plot(x, [float(row["gap"]) for row in mine], style, color=color, marker=".", label=mine[0]["label"])
    right.set_xscale("log", base=2)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_xlabel("position in the context, in powers of two")
    right.set_ylabel("loss minus the Transformer's")
    right.set_ylim(top=0.08)
    right.legend(fontsize=7, loc="upper right")
    figure.savefig(path)


if __name__ == "__main__":
    draw_stability(HERE / "stability.png")
    draw_arms("three-arms")
    draw_arms("three-arms-ablations")
    draw_scaling(HERE / "scaling.png")
    draw_yoco(HERE / "yoco.png")
