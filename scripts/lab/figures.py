"""figures.py: the figures of the report as data, which the page (page_plot.js) and the PNG files (matplotlib) draw.

A figure is {id, section, title, note, views: [{label, x, y, xlog, ylog, traces}]}; xlog is the base of the ticks. A
trace is {arm, name, who, lr, x, y} and optionally mode (lines, markers), smooth (a running mean that the reader of the
page chooses), faint (thin, not in the legend), dash, low and high (a band), error (per point), text (per point, on
hover), symbol. None in y is a gap. `who` names the seeds, on hover. A view with `heat` has one trace, whose points are
cells with a share z and a text.
"""

from . import currencies, metrics, stats, tables
from .compare import difference, estimate

POINTS = 300  # per line at most
SMOOTH = 0.02  # share of a line that a running mean covers unless the reader of the page changes it


def short(values):
    return [float(f"{v:.6g}") if isinstance(v, float) and stats.finite(v) else v for v in values]


def trace(arm, name, x, y, lr=None, **more):
    lists = {key: short(more[key]) for key in ("low", "high", "error", "xerror") if more.get(key)}
    lr = None if lr is None else f"{lr:g}"
    return {"arm": arm, "name": name, "x": short(x), "y": short(y), "lr": lr, **more, **lists}


def line(arm, name, x, estimates, lr=None, **more):
    """A line of estimates, as JSON, with their intervals."""
    error = [e["half"] or 0 for e in estimates]
    return trace(arm, name, x, [e["mean"] for e in estimates], lr, mode="lines+markers", error=error, **more)


def seed(run):
    return f"seed {run.seed}"


def over(runs):
    return seed(runs[0]) if len(runs) == 1 else f"mean of {len(runs)} seeds"


def binned(values, most=POINTS):
    """The means of `most` consecutive parts, or the values if there are fewer."""
    n = len(values)
    if n <= most:
        return list(values)
    ends = [i * n // most for i in range(most + 1)]
    return [stats.mean_or_none(values[a:b]) for a, b in zip(ends, ends[1:])]


def smoothed(t, share=SMOOTH):
    """The y of a trace as the page shows them."""
    return stats.smooth(t["y"], round(share * len(t["y"])) | 1) if t.get("smooth") else t["y"]


def view(label, x, y, traces, **more):
    return {"label": label, "x": x, "y": y, "traces": traces, **more}


def figure(name, section, title, note, views):
    has_data = lambda t: any(stats.finite(value) for axis in "xy" for value in t[axis] if t[axis] is not None)
    views = [v for v in views if any(stats.finite(y) for t in v["traces"] for y in t["y"])] or (
        [v for v in views if v.get("category") and any(map(has_data, v["traces"]))]
    )
    return {"id": name, "section": section, "title": title, "note": note, "views": views} if views else None


def window(study):
    return max(1, study.runs[0].steps // 50) | 1


AXES = (("tokens", "tokens"), ("FLOPs", "FLOPs (forward and backward)"), ("time", "hours in steps"))


def axis(run, records, which):
    """The x of records on one of AXES. Time is the sum of the step times, without validation and checkpoints."""
    if which == "time":
        hours, total = [], 0.0
        for r in records:
            total += (r.get("ms") or 0) / 3.6e6
            hours.append(total)
        return hours
    scale = lambda run: (run.flops_per_token or 0) if which == "FLOPs" else 1
    before = run.before * scale(run.base) if run.base else 0
    return [before + r["tokens"] * scale(run) for r in records]


def loss_curves(study):
    views = []
    for which, title in AXES:
        traces = []
        for arm, label, lr, runs in study.cells(having=lambda run: run.train):
            lines = [(axis(run, run.train, which), [r.get("loss") for r in run.train]) for run in runs]
            for run, (x, y) in zip(runs, lines) if len(runs) > 1 else ():
                traces.append(trace(arm, run.name, binned(x), binned(y), lr, who=seed(run), faint=True, smooth=True))
            n = min(len(x) for x, _ in lines)
            average = [stats.mean([x[i] for x, _ in lines]) for i in range(n)]
            means = [stats.mean_or_none([y[i] for _, y in lines]) for i in range(n)]
            traces.append(trace(arm, label, binned(average), binned(means), lr, who=over(runs), smooth=True))
        views.append(view(which, title, "training loss, nats per token", traces, focus=True))
    note = (
        "Running mean over the share of the steps that the slider sets. Thick: the mean over seeds, up to the last "
        "step of the shortest run; thin: single runs. The axis of tokens compares models on equal data, the axis of "
        "FLOPs on equal compute. Time depends on the machine and its other load."
    )
    return figure("loss", "loss", "Training loss", note, views)


def focus(view, traces):
    """The range of y without the first 5% of the axis, where lines are steep."""
    at = [x for t in traces for x in t["x"]] if view.get("focus") else []
    start = min(at) + 0.05 * (max(at) - min(at)) if at else 0
    late = [y for t in traces for x, y in zip(t["x"], smoothed(t)) if at and x >= start and stats.finite(y)]
    margin = 0.03 * (max(late) - min(late)) if late else 0
    return [min(late) - margin, max(late) + margin] if late else None


def gap_curves(study):
    """The paired difference to the reference during training, with its interval for two or more seeds."""
    half, traces, marks = window(study), [], []
    for arm, label, lr, runs in study.cells():
        other = {run.seed: run for run in study.runs_of(study.reference, lr) if run.train}
        pairs = [(run, other[run.seed]) for run in runs if run.train and run.seed in other]
        if arm == study.reference or not pairs:
            continue
        losses = {id(r): {r.before + x["tokens"]: x.get("loss") for x in r.train} for pair in pairs for r in pair}
        at = sorted(set.intersection(*map(set, losses.values())))  # equal tokens in total
        if len(at) > half:
            gaps = lambda a, b: [difference(losses[id(a)][t], losses[id(b)][t]) for t in at]
            curves = [stats.smooth(gaps(a, b), 2 * half + 1) for a, b in pairs]
            keep = [i for i in stats.thin(range(len(at)), POINTS) if all(stats.finite(c[i]) for c in curves)]
            found = [stats.t_interval([c[i] for c in curves]) for i in keep]
            x, y = [at[i] for i in keep], [e.mean for e in found]
            band = {"low": [e.low for e in found], "high": [e.high for e in found]} if pairs[1:] else {}
            traces.append(trace(arm, label, x, y, lr, who=over([a for a, _ in pairs]), **band))
        losses = {id(r): r.validated for pair in pairs for r in pair}
        at = sorted(set.intersection(*map(set, losses.values())))
        if at:
            found = [estimate({a.seed: losses[id(a)][t] - losses[id(b)][t] for a, b in pairs}) for t in at]
            text = [f"n = {e['n']}" for e in found]
            marks.append(line(arm, label, at, found, lr, text=text))
    note = (
        f"At equal tokens in total. In training: running means over {2 * half + 1} steps. Arm minus "
        f"{study.arms[study.reference]} at the same seed, "
        f"hence on the same batches; below 0 the arm is better. Band and bars: "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals over seeds at each point, not of the curve."
    )
    views = [
        view("validation", "tokens", "gap, nats", marks, zero=True),
        view("training", "tokens", "gap of the running mean, nats", traces, zero=True),
    ]
    views = views if any(len(t["x"]) > 1 for t in marks) else views[::-1]
    return figure("gap", "loss", "Gap during training", note, views)


def final_gaps(study, rows):
    traces = []
    for row in rows:
        if e := row["gap"]:
            who = f"mean of {e['n']} seeds" if e["half"] is not None else "one seed: no interval"
            place = row["arm"], row["label"], [e["mean"]], [row["label"]], row["lr"]
            traces.append(trace(*place, mode="markers", xerror=[e["half"] or 0], who=who))
    for lr in study.rates():
        losses = {arm: tables.final_losses(study, arm, lr) for arm in study.arms}
        for arm, label in study.arms.items():
            single = stats.paired(losses[arm], losses[study.reference])
            if arm != study.reference and len(single) > 1:
                style = {"mode": "markers", "faint": True, "symbol": "x", "text": [f"seed {s}" for s in single]}
                traces.append(trace(arm, label, list(single.values()), [label] * len(single), lr, **style))
    x = f"final loss minus that of {study.arms[study.reference]}, nats"
    note = f"Dot and bar: mean and {100 * stats.CONFIDENCE:.0f}% t interval of the paired gaps; crosses: seeds."
    views = [view("gap", x, "", traces, zero_x=True, category=True)]
    return figure("final", "loss", "Gap at the end", note, views)


def spike_traces(study, key):
    """Lines of a value of all runs, and marks at its spikes."""
    traces, marks = [], []
    for run in study.runs:
        if not run.train:
            continue
        x, y = axis(run, run.train, "tokens"), [r.get(key) for r in run.train]
        zs = stats.z_scores(y)
        found, _, _ = stats.spikes(zs)
        keep = sorted(set(stats.thin(x, 600)) | set(found))
        first = run.seed == min(r.seed for r in study.runs_of(run.arm, run.lr))
        label = study.arms[run.arm]
        points = [x[i] for i in keep], [y[i] for i in keep]
        traces.append(trace(run.arm, label, *points, run.lr, who=seed(run), faint=not first))
        if found:
            text = [f"spike at step {run.train[i]['step']}, z {zs[i]:.1f}" for i in found]
            style = {"who": seed(run), "mode": "markers", "symbol": "triangle-up", "unnamed": True}
            points = [x[i] for i in found], [y[i] for i in found]
            marks.append(trace(run.arm, f"{label}: spikes", *points, run.lr, text=text, **style))
    return traces + marks


def gradient_norms(study):
    note = (
        f"Before clipping. Triangles: spikes of all seeds, at least {stats.SPIKE_Z:g} standard deviations above the "
        f"mean of the last {stats.SPIKE_WINDOW} steps (at the start fewer, at least {stats.SPIKE_LEAST}). Thick: the "
        "first seed."
    )
    views = [
        view("gradient norm", "tokens", "gradient norm", spike_traces(study, "grad_norm"), ylog=10),
        view("loss", "tokens", "training loss, nats", spike_traces(study, "loss")),
    ]
    return figure("norms", "stability", "Gradient norm and loss of every step", note, views)


def ladder(study, rows):
    traces = []
    for row in rows:
        arm, label, losses = row["arm"], row["label"], [(float(lr), xs) for lr, xs in row["ladder"].items()]
        means = [(lr, estimate(dict(enumerate(xs)))) for lr, xs in losses if xs and all(map(stats.finite, xs))]
        points = [(lr, x) for lr, xs in losses for x in xs if stats.finite(x)]
        broken = [lr for lr, xs in losses for x in xs if not stats.finite(x)]
        traces.append(line(arm, label, [lr for lr, _ in means], [e for _, e in means]))
        x, y = [lr for lr, _ in points], [y for _, y in points]
        traces.append(trace(arm, label, x, y, mode="markers", faint=True, symbol="x"))
        if broken:
            style = {"mode": "markers", "symbol": "star", "unnamed": True, "text": ["diverged"] * len(broken)}
            traces.append(trace(arm, f"{label}: diverged", broken, [max(y, default=1.0)] * len(broken), **style))
    note = (
        f"Crosses: single runs; line: means with {100 * stats.CONFIDENCE:.0f}% t intervals over seeds; "
        "stars: runs without a finite final loss."
    )
    views = [view("rates", "learning rate", "final loss, nats", traces, xlog=10)]
    return figure("ladder", "stability", "Final loss by learning rate", note, views)


def figures_of_layers(views, remark=""):
    """The figures of numbers of layers, as metrics.py lists them. views(key): [(label, axis, traces, more)]"""
    found = []
    for key, (unit, title, note, log) in metrics.FIGURES.items():
        drawn = [view(label, x, unit, traces, ylog=10 * log, **more) for label, x, traces, more in views(key)]
        found.append(figure(key.removesuffix("_mean"), "layers", title, note + remark, drawn))
    return found


def layer_figures(study):
    def views(key):
        by_layer, over_time = [], []
        for arm, label, lr, runs in study.cells(having=lambda run: run.layers):
            last = [run.layers[max(run.layers)] for run in runs]
            layers = sorted(set.intersection(*[set(x) for x in last]))
            values = lambda l: {run.seed: x for run, of in zip(runs, last) if stats.finite(x := of[l].get(key))}
            points = [(l, estimate(values(l))) for l in layers if values(l)]
            by_layer.append(line(arm, label, [l for l, _ in points], [e for _, e in points], lr, who=over(runs)))
            steps = sorted(set.intersection(*[set(run.layers) for run in runs]))
            means = [stats.mean_or_none([r.get(key) for run in runs for r in run.layers[s].values()]) for s in steps]
            over_time.append(trace(arm, label, [runs[0].tokens_at(s) for s in steps], means, lr, who=over(runs)))
        return ("by layer", "layer", by_layer, {"integers": True}), ("mean over layers", "tokens", over_time, {})

    return figures_of_layers(views, f" Bars: {100 * stats.CONFIDENCE:.0f}% t intervals over seeds.")


ROUTER_LOSSES = (("router_aux", "balance"), ("router_z", "z"))


def router_figure(axis, traces):
    """traces(key, name): the lines of a loss of the routers by tokens, or of one run by step."""
    note = (
        "Without their weights --router-aux and --router-z; means over the layers with experts. The loss of balance is "
        "1 if all experts have equally many tokens. The training loss does not include them."
    )
    views = [view(name, axis, f"{name} loss", traces(key, name)) for key, name in ROUTER_LOSSES]
    return figure("router_losses", "stability", "Losses of the routers", note, views)


def router_losses(study):
    def traces(key, _):
        found = []
        has_losses = lambda run: any(stats.finite(r.get(key)) for r in run.train)
        for arm, label, lr, runs in study.cells(having=has_losses):
            n = min(len(run.train) for run in runs)
            x = axis(runs[0], runs[0].train[:n], "tokens")
            y = [stats.mean_or_none([run.train[i].get(key) for run in runs]) for i in range(n)]
            found.append(trace(arm, label, binned(x), binned(y), lr, who=over(runs), smooth=True))
        return found

    return router_figure("tokens", traces)


def comparison(study, results):
    """The figures of several runs; those of one rate at that of each arm if a sweep chose it."""
    own = currencies.at_own_rates(study)
    return [
        loss_curves(own),
        final_gaps(own, results["summary"] if own is study else tables.summary(own)),
        gap_curves(own),
        ladder(study, results["ladder"]),
        gradient_norms(own),
        *layer_figures(own),
        router_losses(own),
    ]
