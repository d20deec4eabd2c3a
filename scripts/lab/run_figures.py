"""run_figures.py: the figures of one run, by step."""

from . import metrics, stats
from .figures import POINTS, binned, figure, router_figure, trace, view
from .table import speed_text


def smoothable(name, x, y):
    """A thin line of the values, and one of their running mean."""
    return [trace("training", name, x, y, faint=True), trace("training", name, x, y, smooth=True)]


def loss(run):
    train, losses = [r["step"] for r in run.train], [r.get("loss") for r in run.train]
    lines, steps = smoothable("training", binned(train), binned(losses)), sorted(run.val)
    lines += [
        trace(
            "validation",
            "validation",
            steps,
            [run.val[s] for s in steps],
            mode="lines+markers" if steps[2:] else "markers",
        )
    ] * bool(steps)
    note = (
        f"Training, thin: each step, or the means of {POINTS} parts of a longer run; thick: the running mean over the "
        "share of the line that the slider sets."
    )
    return figure("loss", "loss", "Loss", note, [view("loss", "step", "loss, nats per token", lines, focus=True)])


def norms(run):
    found, _, _ = stats.spikes([r.get("grad_z") for r in run.train])
    keep = sorted(set(stats.thin(run.train, 2 * POINTS)) | set(found))
    steps, values = [r["step"] for r in run.train], [r.get("grad_norm") for r in run.train]
    lines = smoothable("gradient norm", [steps[i] for i in keep], [values[i] for i in keep])
    text = [f"z {run.train[i]['grad_z']:.1f}" for i in found]
    marks = {"mode": "markers", "symbol": "triangle-up", "text": text}
    lines += [trace("spikes", "spike", [steps[i] for i in found], [values[i] for i in found], **marks)] * bool(found)
    note = (
        f"Before clipping. Triangles: spikes, at least {stats.SPIKE_Z:g} standard deviations above the mean of the "
        "last 1000 steps (at the start fewer, at least 128)."
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
    steps, found = sorted(run.layers), []
    for key, (unit, title, note, log) in metrics.FIGURES.items():
        lines = []
        for layer in sorted({l for records in run.layers.values() for l in records}):
            values = [run.layers[s].get(layer, {}).get(key) for s in steps]
            lines.append(trace(f"layer {layer}", f"layer {layer}", steps, values, mode="lines+markers"))
        views = [view("by step", "step", unit, lines, ylog=10 * log)]
        found.append(figure(key.removesuffix("_mean"), "layers", title, note, views))
    return found


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
