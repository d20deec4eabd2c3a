"""png.py: PNG and PDF files, with matplotlib: each view of a figure at the main learning rate, and attention maps."""

import math

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import figures, stats
from .page import DASHES, PALETTE

MARKERS = {"x": "x", "triangle-up": "^", "star": "*", None: "o"}
LINES = dict(zip(DASHES, ("-", "--", ":", "-.")))


def clean(ys):
    return [y if stats.finite(y) else math.nan for y in ys]


def has_points(t):
    """Arms with one MLP have none in the figures of routers."""
    return any(isinstance(y, str) or stats.finite(y) for y in t["y"])


def draw_trace(axes, t, color, dash, named):
    mode = t.get("mode", "lines")
    label = t["name"] if t["name"] not in named and not t.get("faint") and not t.get("unnamed") else None
    named.add(label)
    if t.get("low"):
        axes.fill_between(t["x"], clean(t["low"]), clean(t["high"]), color=color, alpha=0.15, linewidth=0)
    style = {
        "color": color,
        "label": label,
        "linewidth": 0.7 if t.get("faint") else 1.6,
        "alpha": 0.35 if t.get("faint") and mode == "lines" else 1,
        "linestyle": "none" if mode == "markers" else LINES["dash" if t.get("dash") else dash],
        "marker": None if mode == "lines" else MARKERS[t.get("symbol")],
        "markersize": 4.5,
    }
    y = t["y"] if isinstance(t["y"][0], str) else clean(figures.smoothed(t))
    axes.errorbar(t["x"], y, yerr=t.get("error"), xerr=t.get("xerror"), capsize=2, elinewidth=1, **style)


def draw_heat(axes, t):
    """A map of shares, with a text in each cell."""
    xs, ys = (sorted(set(t[key])) for key in "xy")
    rows = [[math.nan] * len(xs) for _ in ys]
    for x, y, z, text in zip(t["x"], t["y"], t["z"], t["text"]):
        rows[ys.index(y)][xs.index(x)] = z
        place = xs.index(x), ys.index(y)
        axes.text(*place, text, ha="center", va="center", color="white" if z > 0.6 else "black")
    axes.imshow(rows, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])


def round_ticks(axis, base):
    """Ticks of a logarithmic axis: powers of 2; or 1, 2, 5 times powers of 10, within a decade round numbers."""
    low, high = axis.get_view_interval()
    ticks = matplotlib.ticker
    decade = ticks.LogLocator(10, (1, 2, 5) if high / low < 1000 else (1,))
    axis.set_major_locator(
        ticks.LogLocator(2) if base == 2 else decade if high / low > 8 else ticks.MaxNLocator(6, steps=[1, 2, 5, 10])
    )
    axis.set_minor_locator(ticks.NullLocator())
    axis.set_major_formatter(ticks.FuncFormatter(lambda x, _: f"{x:g}"))


def figure_files(path, figure, view, arms, lr, first=((), True)):
    """Writes path.png and path.pdf with the lines of page.at_first(); False if the view has no data at this rate."""
    hidden = () if view.get("category") or view.get("heat") else first[0]
    chosen = lambda t: t["arm"] not in hidden and (first[1] or not t.get("faint") or t.get("mode"))
    traces = [t for t in view["traces"] if (lr == "all" or t["lr"] in (None, lr)) and has_points(t) and chosen(t)]
    if not traces:
        return False
    rows = len({y for t in traces for y in t["y"]}) if view.get("category") else 0
    fig, axes = plt.subplots(figsize=(8, 1.6 + 0.25 * rows if rows > 12 else 4.6), dpi=110)
    named = {None}
    for t in traces:
        i, colors = arms.index(t["arm"]) if t["arm"] is not None else 0, PALETTE["light"]
        color = "#888888" if t["arm"] is None else colors[i % len(colors)]
        if view.get("heat"):
            draw_heat(axes, t)
            continue
        draw_trace(axes, t, color, DASHES[i // len(colors) % len(DASHES)], named)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if view.get(f"{name}log"):
            getattr(axes, f"set_{name}scale")("log")
            round_ticks(axis, view[f"{name}log"])
    if view.get("zero"):
        axes.axhline(0, color="#555", linewidth=0.8)
    if view.get("zero_x"):
        axes.axvline(0, color="#555", linewidth=0.8)
    if view.get("category"):
        axes.invert_yaxis()
    if view.get("integers"):
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    if limits := figures.focus(view, traces):
        axes.set_ylim(*limits)
    axes.set_xlabel(view["x"])
    axes.set_ylabel(view["y"])
    title = f"{figure['title']}: {view['label']}" if view.get("heat") else figure["title"]
    axes.set_title(title + (f" (rate {lr})" if any(t["lr"] for t in traces) else ""), fontsize=10)
    axes.grid(not view.get("heat"), **({} if view.get("heat") else {"color": "#e3e6ea", "linewidth": 0.6}))
    axes.set_axisbelow(True)
    if len(named) > 2 and not view.get("category"):
        style = {"fontsize": 7.5}
        if len(named) > 9:
            style = {"loc": "upper left", "bbox_to_anchor": (1, 1.02), "fontsize": 5, "handlelength": 5}
        axes.legend(frameon=False, **style)
        fig.set_figheight(max(4.6, 0.13 * len(named)))
    if not view.get("xlog") and not view.get("category") and axes.get_xlim()[1] >= 1e5:
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    fig.tight_layout()  # once: bbox_inches="tight" would draw each file twice
    for suffix in ("png", "pdf"):
        fig.savefig(f"{path}.{suffix}")
    plt.close(fig)
    return True


def maps_png(path, label, head, tensors):
    """The maps of one head: A, or A1, A2 and their difference."""
    layer, number = head.split(":")
    name = f"layer.{layer}.head.{number}"
    panels = {"A": tensors[f"{name}.a1"]}
    if f"{name}.a2" in tensors:
        a1, a2, s = panels["A"], tensors[f"{name}.a2"], tensors[f"{name}.lambda"]
        panels = {"A1": a1, "A2": a2, "A1 - s A2": a1 - s[:, None] * a2}
    size = (4.2 * len(panels), 4.2)
    fig, all_axes = plt.subplots(1, len(panels), figsize=size, dpi=130, layout="constrained", squeeze=False)
    for axes, (title, values) in zip(all_axes[0], panels.items()):
        values = np.where(np.tri(len(values), dtype=bool), values, math.nan)
        top = np.nanmax(np.abs(values))
        cmap, norm = "Blues", matplotlib.colors.PowerNorm(0.5, 0, top)
        if "-" in title:  # a difference
            cmap, norm = "RdBu", matplotlib.colors.SymLogNorm(0.02, vmin=-top, vmax=top)
        image = axes.imshow(values, cmap=cmap, norm=norm)
        axes.set_title(title, fontsize=9)
        fig.colorbar(image, ax=axes, shrink=0.8)
    fig.suptitle(f"{label}: layer {layer}, head {number}", fontsize=10)
    fig.savefig(path)
    plt.close(fig)
