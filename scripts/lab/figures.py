"""figures.py: the figures of a report, drawn by matplotlib as SVG: curves of arms with 95% t intervals over seeds."""

import io
import math

from . import stats
from .runs import LAYERS

# colors that readers with any color vision tell apart (Okabe and Ito), and marks
COLORS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
MARKS = "osD^v<>P"


class Figure:
    """A figure with a row of panels. The style of an arm is that of its place in the study."""

    def __init__(self, name, title, note, panels=1):
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams.update({"svg.hashsalt": "lab", "svg.fonttype": "none", "font.size": 9})
        from matplotlib.figure import Figure as Canvas

        self.name, self.title, self.note, self.empty = name, title, note, True
        self.canvas = Canvas(figsize=(4.6 * panels if panels > 1 else 6.4, 3.4), layout="constrained")
        self.panels = list(self.canvas.subplots(1, panels, squeeze=False)[0])
        for panel in self.panels:
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.25)

    def style(self, arms, arm, **more):
        i = list(arms).index(arm)
        return {"color": COLORS[i % len(COLORS)], "marker": MARKS[i % len(MARKS)], "markersize": 4, **more}

    def line(self, panel, x, estimates, label, bars=False, **style):
        """A line of estimates with their intervals, as a band or as bars."""
        points = [(at, e) for at, e in zip(x, estimates) if e]
        if not points:
            return
        self.empty = False
        at, means = [at for at, _ in points], [e["mean"] for _, e in points]
        low, high = ([e["mean"] + sign * (e["half"] or 0) for _, e in points] for sign in (-1, 1))
        if bars:
            panel.errorbar(at, means, [[m - l for m, l in zip(means, low)]] * 2, label=label, capsize=2, **style)
        else:
            panel.plot(at, means, label=label, **style)
            panel.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)

    def svg(self):
        """The text of the figure with its legend; None if it has no points."""
        if self.empty:
            return None
        handles = dict(reversed([(l, h) for panel in self.panels for h, l in zip(*panel.get_legend_handles_labels())]))
        if len(handles) > 1:
            order = dict.fromkeys(l for panel in self.panels for l in panel.get_legend_handles_labels()[1])
            columns = min(len(order), 3)
            self.canvas.legend([handles[l] for l in order], order, loc="outside upper center", ncols=columns, frameon=0)
        return self.text()

    def text(self):
        text = io.StringIO()
        self.canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        return text.getvalue()


def label(panel, x, y, **more):
    panel.set(xlabel=x, ylabel=y, **more)
    if x in ("tokens", "parameters"):
        from matplotlib.ticker import EngFormatter

        panel.xaxis.set_major_formatter(EngFormatter(sep=""))


def losses(s):
    """Validation losses over tokens, and the differences to the reference."""
    compared = any(point["difference"] for points in s["curves"].values() for point in points)
    note = "The loss begins after the first quarter of the tokens."
    note += " Right: arm minus reference at the same seed." * compared
    figure = Figure("loss", "Validation loss", note, panels=2 if compared else 1)
    left, right = figure.panels[0], figure.panels[-1]
    for arm, points in s["curves"].items():
        style, name = figure.style(s["labels"], arm), s["labels"][arm]
        late = [p for p in points if p["tokens"] >= points[-1]["tokens"] / 4]
        figure.line(left, [p["tokens"] for p in late], [p["loss"] for p in late], name, **style)
        figure.line(right, [p["tokens"] for p in points], [p["difference"] for p in points], name, **style)
    if compared:
        right.axhline(0, color="#888888", linewidth=0.8)
        label(right, "tokens", "difference, nats")
    label(left, "tokens", "nats per token")
    return figure


def training(s, runs):
    """Training losses and gradient norms over tokens, means over the seeds of an arm at its own rate."""
    note = "Means over seeds and over consecutive steps; the gradient norm is before clipping."
    figure = Figure("training", "Training loss and gradient norm", note, panels=2)
    for key, panel in zip(("loss", "grad_norm"), figure.panels):
        for arm, found in runs.items():
            by_tokens = {}
            for run in found.values():
                for step, value in zip(run.curve["step"], run.curve[key]):
                    by_tokens.setdefault(run.tokens_at(step), []).append(value)
            means = [(t, m) for t, xs in sorted(by_tokens.items()) if (m := stats.mean_or_none(xs)) is not None]
            if means:
                figure.empty = False
                style = figure.style(s["labels"], arm, marker="", linewidth=1.2)
                panel.plot(*zip(*means), label=s["labels"][arm], **style)
        label(panel, "tokens", "nats per token" if key == "loss" else "gradient norm")
    figure.panels[1].set_yscale("log")
    return figure


def rates(s):
    note = "Line: means over seeds; crosses: runs; triangles at the top: runs without a finite loss."
    figure = Figure("rates", "Loss by rate", note)
    panel = figure.panels[0]
    for arm in s["labels"] if s["stability"] else ():
        rows, style = [row for row in s["rates"] if row["arm"] == arm], figure.style(s["labels"], arm)
        whole = lambda row: row["loss"] if None not in row["losses"].values() else None
        figure.line(panel, [r["rate"] for r in rows], list(map(whole, rows)), s["labels"][arm], True, **style)
        for row in rows:
            good = [x for x in row["losses"].values() if x is not None]
            panel.plot([row["rate"]] * len(good), good, "x", color=style["color"], alpha=0.4, markersize=4)
            if row["runs"].get("diverged"):
                place = {"transform": panel.get_xaxis_transform(), "clip_on": False}
                panel.plot([row["rate"]], [1], marker="^", color=style["color"], **place)
    label(panel, "learning rate", "final loss, nats per token", xscale="log")
    panel.set_xticks(sorted({row["rate"] for row in s["rates"]}))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    return figure


def positions(s):
    note = "Difference to the reference by position in the window, in ranges of powers of two."
    figure = Figure("positions", "Loss by position", note)
    for arm, places in s["positions"].items():
        x = [math.sqrt(max(p["begin"], 0.7) * p["end"]) for p in places]
        figure.line(figure.panels[0], x, [p["difference"] for p in places], s["labels"][arm], True,
                    **figure.style(s["labels"], arm))  # fmt: skip
    figure.panels[0].axhline(0, color="#888888", linewidth=0.8)
    label(figure.panels[0], "position", "difference, nats", xscale="log")
    return figure


def layer(s, key):
    what = LAYERS[key]
    panels = " Left, here and below: by layer, at the last measured step. Right: mean over layers and seeds."
    note = what.note + panels * (key == next(iter(s["layers"])))
    figure = Figure(key.replace("_", "-"), what.title, note, panels=2)
    left, right = figure.panels
    for arm, of in s["layers"].get(key, {}).items():
        style, name = figure.style(s["labels"], arm), s["labels"][arm]
        figure.line(left, range(len(of["layers"])), of["layers"], name, True, **style)
        right.plot(*zip(*[(t, x) for t, x in of["steps"] if x is not None]), label=name, **style)
    for panel, x in ((left, "layer"), (right, "tokens")):
        label(panel, x, what.unit, yscale="log" if what.log else "linear")
    left.xaxis.get_major_locator().set_params(integer=True)
    return figure


def sizes(studies):
    """The differences of arms over the parameters of the reference, of several sizes of a plan."""
    note = "Arm minus reference at equal tokens, each at its own rate. A line has about equal tokens per parameter."
    figure = Figure("sizes", "Difference by size", note)
    panel, labels = figure.panels[0], studies[0]["labels"]
    for arm in (arm for arm in labels if arm != studies[0]["reference"]):
        lengths = {}
        for s in studies:
            row = next((row for row in s["arms"] if row["arm"] == arm), None)
            if row and row["parameters"]:
                lengths.setdefault(round(s["tokens_per_parameter"], -1), []).append((row["parameters"], row))
        for i, (length, rows) in enumerate(sorted(lengths.items())):
            rows.sort(key=lambda pair: pair[0])
            style = figure.style(labels, arm, linestyle=("-", "--", ":")[i % 3], marker=MARKS[i % len(MARKS)])
            name = f"{labels[arm]}, {length:g} per parameter"
            figure.line(panel, [n for n, _ in rows], [row["difference"] for _, row in rows], name, True, **style)
    panel.axhline(0, color="#888888", linewidth=0.8)
    label(panel, "parameters", "difference, nats", xscale="log")
    return figure


def of_study(s, study):
    """The figures of one study."""
    own = {arm: study.own_runs(arm) or one_of(study, arm) for arm in study.arms}
    return [losses(s), training(s, own), rates(s), positions(s), *(layer(s, key) for key in s["layers"])]


def one_of(study, arm):
    """{seed: run} of the unfinished runs of an arm at its lowest rate."""
    runs = [run for run in study.runs if run.arm == arm]
    return {run.seed: run for run in runs if run.rate == runs[0].rate}
