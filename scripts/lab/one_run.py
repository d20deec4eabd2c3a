"""one_run.py: the report of one run: its state, events and samples, and its figures by step."""

import time
from statistics import median

from . import metrics, stats
from .figures import POINTS, binned, figure, figures_of_layers, router_figure, trace, view
from .table import Table, engineering, escape, parameters_text, speed_text

RECENT = 100  # steps
MOST_EVENTS, MOST_SAMPLES = 200, 20
HIDDEN = ("kind", "step", "what")


def duration(seconds):
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def prediction(run, now):
    """When the run ends, from the times of its last steps; "" unless it runs."""
    times = sorted(r["ms"] / 1e3 for r in run.train[-RECENT:] if stats.finite(r.get("ms")))
    if run.state != "running" or not times:
        return ""
    left = [(run.steps - run.last) * times[round(share * (len(times) - 1))] for share in (0.1, 0.5, 0.9)]
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(now + left[1]))
    return f"in {duration(left[1])} [{duration(left[0])}, {duration(left[2])}], about {end}"


def status(run, rate, now=None):
    """The state of the run as a table. now: seconds since 1970."""
    train, val = run.train, {s: x for s, x in run.val.items() if stats.finite(x)}
    recent = [x for x in [r.get("loss") for r in train[-RECENT:]] if stats.finite(x)]
    norms = [x for r in train[-RECENT:] if stats.finite(x := r.get("grad_norm"))]
    rates = [x for r in train[-1:] if stats.finite(x := r.get("lr"))]
    spikes = {what: len(metrics.spikes(run, what)[0]) for what in ("loss", "grad")}
    end = prediction(run, time.time() if now is None else now)
    rows = [
        ["state", run.state],
        ["step", f"{run.last}/{run.steps} ({100 * run.last / run.steps:.1f}%)"],
        ["end", end],
        ["tokens", f"{engineering(train[-1]['tokens'])} of {engineering(run.tokens)}" if train else ""],
        ["training loss", f"{stats.mean(recent):.4f}, mean of the last {len(recent)} steps" if recent else ""],
        ["validation loss", f"{val[max(val)]:.4f} at step {max(val)}" if val else ""],
        ["lowest validation loss", f"{min(val.values()):.4f} at step {min(val, key=val.get)}" if val else ""],
        ["gradient norm", f"{median(norms):.4g}, median of the last {len(norms)} steps" if norms else ""],
        ["spikes", f"{spikes['loss']} of the loss, {spikes['grad']} of the gradient norm" if train else ""],
        ["skipped updates", str(sum(bool(r.get("skipped")) for r in train) or "")],
        ["learning rate", rate + (f"; {rates[-1]:.3g} at the last step" if rates else "")],
        ["tokens/s", speed_text(run.speed) if run.speed else ""],
        ["parameters", parameters_text(run.parameters, run.active_parameters)],
        ["FLOPs/token", engineering(run.flops_per_token) if run.flops_per_token else ""],
    ]
    caption = (
        "End: the steps that are left take as long as the last "
        f"{RECENT} (median; 10% to 90% in brackets), without validations and checkpoints. Tokens/s: median and 10% to "
        "90% of the steps."
    )
    return Table("status", ["run", "value"], [row for row in rows if row[1]], caption, wrap=True)


def shown(value):
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(f"{c.get('name')}: {c.get('old')} to {c.get('new')}" for c in value if isinstance(c, dict))
    return str(value)


def events(run):
    values = lambda r: ", ".join(f"{k} {shown(v)}" for k, v in r.items() if k not in HIDDEN and v != [])
    rows = [[r["step"], r.get("what", "–"), values(r)] for r in run.events[: -MOST_EVENTS - 1 : -1]]
    caption = f"{len(rows)} of {len(run.events)} events, the last first. docs/formats.md describes them."
    return Table("events", ["step", "event", "values"], rows, caption, wrap=True)


def samples(run):
    """HTML: text of the log is escaped."""
    parts = []
    for r in run.samples[: -MOST_SAMPLES - 1 : -1]:
        text = r["text"] if r["text"] is not None else "(tokens without text)"
        parts.append(f"<h3>step {int(r['step'])}</h3><pre>{escape(text)}</pre>")
    return "".join(parts)


# ---- figures


def smoothable(name, x, y):
    """A thin line of the values, and one of their running mean."""
    return [trace("training", name, x, y, faint=True), trace("training", name, x, y, smooth=True)]


def loss(run):
    train, losses = [r["step"] for r in run.train], [r.get("loss") for r in run.train]
    lines, steps = smoothable("training", binned(train), binned(losses)), sorted(run.val)
    mode = "lines+markers" if steps[2:] else "markers"
    lines += [trace("validation", "validation", steps, [run.val[s] for s in steps], mode=mode)] * bool(steps)
    note = (
        f"Training, thin: each step, or the means of {POINTS} parts of a longer run; thick: the running mean over the "
        "share of the line that the slider sets."
    )
    return figure("loss", "loss", "Loss", note, [view("loss", "step", "loss, nats per token", lines, focus=True)])


def norms(run):
    zs = stats.z_scores([r.get("grad_norm") for r in run.train])
    found, _, _ = stats.spikes(zs)
    keep = sorted(set(stats.thin(run.train, 2 * POINTS)) | set(found))
    steps, values = [r["step"] for r in run.train], [r.get("grad_norm") for r in run.train]
    lines = smoothable("gradient norm", [steps[i] for i in keep], [values[i] for i in keep])
    text = [f"z {zs[i]:.1f}" for i in found]
    marks = {"mode": "markers", "symbol": "triangle-up", "text": text}
    lines += [trace(None, "spike", [steps[i] for i in found], [values[i] for i in found], **marks)] * bool(found)
    note = (
        f"Before clipping. Triangles: spikes, at least {stats.SPIKE_Z:g} standard deviations above the mean of the "
        f"last {stats.SPIKE_WINDOW} steps (at the start fewer, at least {stats.SPIKE_LEAST})."
    )
    views = [view("gradient norm", "step", "gradient norm", lines, ylog=10)]
    return figure("norms", "stability", "Gradient norm", note, views)


def by_step(run, key, name, title, unit, note, smooth=True):
    x, y = binned([r["step"] for r in run.train]), binned([r.get(key) for r in run.train])
    lines = smoothable(title.lower(), x, y) if smooth else [trace("training", title.lower(), x, y)]
    return figure(name, "speed", title, note, [view(name, "step", unit, lines)])


def router(run):
    x = binned([r["step"] for r in run.train])
    values = lambda key: binned([r.get(key) for r in run.train])
    return router_figure("step", lambda key, name: [trace(name, f"{name} loss", x, values(key), smooth=True)])


def layers(run):
    steps, numbers = sorted(run.layers), sorted({l for records in run.layers.values() for l in records})

    def views(key):
        values = lambda layer: [run.layers[s].get(layer, {}).get(key) for s in steps]
        lines = [trace(f"layer {l}", f"layer {l}", steps, values(l), mode="lines+markers") for l in numbers]
        return [("by step", "step", lines, {})]

    return figures_of_layers(views)


def all_figures(run):
    speed = "Tokens per second of each step, without validation and checkpoints: " + speed_text(run.speed) + "."
    found = [
        loss(run),
        norms(run),
        router(run),
        by_step(run, "lr", "rate", "Learning rate", "learning rate", "As the schedule sets it.", smooth=False),
        by_step(run, "tokens_per_s", "throughput", "Throughput", "tokens/s", speed),
        *layers(run),
    ]
    return [f for f in found if f]
