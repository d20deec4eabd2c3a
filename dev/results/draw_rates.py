#!/usr/bin/env python3
"""
Draws optimizers.png and transfer.png from sweeps/. Requires matplotlib.

Usage: dev/results/draw_rates.py
"""

from draw import HERE, ARM_COLORS as COLORS, plt
from pages import named, stats, studies
from rate_sweeps import ARCHITECTURES, EFFECT, losses_over_rates, optimizer_gaps, swept

STYLES = {"-muon-head": "--", "-muon-pair": ":", "-normuon": "-."}


def by_rate(axes, points, label, **style):
    """Loss over rate, and a ring at the best rate."""
    rates, losses = zip(*points)
    (line,) = axes.plot(rates, losses, marker=".", label=label, **style)
    best = losses.index(min(losses))
    axes.plot(rates[best], losses[best], "o", color=line.get_color(), markersize=8, fillstyle="none")
    axes.set_xscale("log")


def draw_optimizers(path):
    measured, names = studies()["optimizers-cpu"], named("optimizers")
    figure, (first, second, right) = plt.subplots(1, 3, figsize=(13, 4), width_ratios=(1, 1, 0.8))
    for arm, points in losses_over_rates(swept(measured)).items():
        architecture = max((a for a in ARCHITECTURES if arm.startswith(a)), key=len)
        optimizer = arm.removeprefix(architecture)
        axes, style = (first, "--" if optimizer else "-") if optimizer in ("", "-muon") else (second, STYLES[optimizer])
        by_rate(axes, points, names[arm], color=COLORS[architecture], linestyle=style)
    second.sharey(first)
    for axes in (first, second):
        axes.set_xlabel("learning rate")
        axes.legend(fontsize=7, loc="upper right")
    first.set_ylabel("last validation loss of the sweep, nats per byte")
    gaps = [(what, each) for what, each in optimizer_gaps(measured)[0].items() if len(each) > 1]
    for y, (what, each) in enumerate(reversed(gaps)):
        e = stats.t_interval(list(each.values()))
        color = COLORS["diff_v2" if what.startswith("DIFF") else "baseline-2h"]
        right.errorbar(e.mean, y, xerr=e.half, fmt="o", color=color, capsize=3)
        right.plot(list(each.values()), [y + 0.25] * len(each), "x", color=color, alpha=0.5, markersize=4)
    labels = [what.replace(" minus Transformer", "") for what, _ in reversed(gaps)]
    right.set_yticks(range(len(gaps)), labels, fontsize=7)
    right.locator_params(axis="x", nbins=5)
    right.set_ylim(-0.5, len(gaps) - 0.4)
    right.axvspan(-EFFECT, EFFECT, color="gray", alpha=0.12, linewidth=0)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_xlabel("minus Transformer, nats per byte:\nmean, 95% interval, single seeds (x)", fontsize=8)
    figure.savefig(path)


def draw_transfer(path):
    found, names = losses_over_rates(studies()["transfer-cpu"].rows), named("transfer")
    figure, panels = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True)
    for axes, (arm, label) in zip(panels.T.flat, names.items()):
        for width, color in zip((1, 2, 4), ("#ccbb44", "#ee6677", "#4477aa")):
            if points := found.get(f"{arm}.w{width}"):
                by_rate(axes, points, f"width {64 * width}", color=color)
        axes.set_title(label, fontsize=9)
    for axes in panels[1]:
        axes.set_xlabel("learning rate")
    for axes in panels[:, 0]:
        axes.set_ylabel("last validation loss, nats per byte", fontsize=8)
    panels[0][0].legend(fontsize=7)
    figure.savefig(path)


if __name__ == "__main__":
    draw_optimizers(HERE / "optimizers.png")
    draw_transfer(HERE / "transfer.png")
