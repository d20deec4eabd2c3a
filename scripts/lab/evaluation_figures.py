"""evaluation_figures.py: figures of evaluations: loss by position and by token frequency, associative recall,
multiple-choice tasks, needles."""

from . import evaluations, stats
from .figures import figure, line, trace, view

OVER_SEEDS = f"{100 * stats.CONFIDENCE:.0f}% t intervals over seeds"


def curves(study, points, chance=None):
    """The lines of {arm: [(x, estimate, ...)]} = points(rate), and that of chance: a number, or a function of x."""
    traces = []
    for lr in study.rates():
        found = {arm: own for arm, own in points(lr).items() if own}
        for arm, own in found.items():
            text = {"text": [t for _, _, t in own]} if own[0][2:] else {}
            traces.append(line(arm, study.arms[arm], [p[0] for p in own], [p[1] for p in own], lr, **text))
        if found and chance is not None:
            x = sorted({p[0] for own in found.values() for p in own})
            x, y = (x, list(map(chance, x))) if callable(chance) else ([x[0], x[-1]], [chance, chance])
            traces.append(trace(None, "by chance", x, y, lr, dash=True))
    return traces


def losses(study, x, points):
    """The views of gaps and losses over x. points(key, rate): of curves()"""
    of = lambda key: curves(study, lambda lr: points(key, lr))
    return [
        view("gap", x, "gap, nats", of("gap"), xlog=2, zero=True),
        view("loss", x, "loss, nats", of("loss"), xlog=2),
    ]


def position_figure(study):
    def points(key, lr):  # x: the last position of a bin, counted from 1: a power of two
        found = evaluations.by_position(study, lr).items()
        text = lambda row: f"positions {row['begin'] + 1} to {row['end']}"
        return {arm: [(row["end"], row[key], text(row)) for row in rows if row[key]] for arm, rows in found}

    note = (
        "Validation loss of the last checkpoint, by position, counted from 1. A point is the mean of the positions "
        f"after the point before it, up to its own; {OVER_SEEDS}. A model that uses context better is lower at the "
        "right."
    )
    return figure("position", "context", "Loss by position in the context", note, losses(study, "position", points))


def frequency_figure(study):
    def points(key, lr):
        found = evaluations.by_frequency(study, lr).items()
        text = lambda row: f"{row['tokens']} tokens, {row['targets']:,} targets"
        return {arm: [(row["share"], row[key], text(row)) for row in rows if row[key]] for arm, rows in found}

    note = (
        "Validation loss of the last checkpoint, of the targets whose token makes up this share of all targets, up to "
        f"twice as much; {OVER_SEEDS}."
    )
    views = losses(study, "share of the targets", points)
    return figure("frequency", "context", "Loss by token frequency", note, views)


def recall_figure(study):
    def points(key, noisy, lr):
        found = evaluations.recall(study, lr).items()
        return {arm: [(row["pairs"], row[key]) for row in rows if (row["noise"] > 0) == noisy] for arm, rows in found}

    views = []
    for key, name, chance in (
        ("among_values", "best of values", lambda pairs: 1 / pairs),
        ("exact", "exact match", None),
    ):
        for noisy in (False, True):
            traces = curves(study, lambda lr: points(key, noisy, lr), chance)
            views.append(view(name + ", with noise" * noisy, "pairs", "share correct", traces, xlog=2))
    note = (
        "Pairs of tokens, then each key again; the model predicts its value. Exact match: the value is the likeliest "
        "of all tokens. Best of values: the likeliest of the tokens that followed a key (dashed: by chance). With "
        f"noise: other tokens between pairs and queries fill the context. {OVER_SEEDS}."
    )
    return figure("recall", "context", "Associative recall", note, views)


def task_figure(study):
    """The accuracy and the bits per byte of each task, by step."""
    views = []
    for name in evaluations.choice_names(study):
        record = next(r for run in study.runs for r in run.choices.get(name, {}).values())
        for key, label, title, chance in (
            ("accuracy", name, "accuracy", record["chance"]),
            ("bits_per_byte", f"{name}, bits per byte", "bits per byte", None),
        ):
            traces = curves(study, lambda lr: evaluations.by_step(study, lr, name, key), chance)
            views.append(view(label, "step", title, traces))
    note = (
        "Multiple-choice tasks at each validation: means over the seeds with "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals. Bits per byte: of the correct completion, lower is better."
    )
    return figure("tasks", "tasks", "Tasks: accuracy by step", note, views)


def needle_figure(study):
    """A map of each arm: accuracy by depth (rows) and length (columns)."""
    views, found = [], {lr: rows for lr in study.rates() if (rows := evaluations.synthetic(study, lr))}
    for lr, rows in found.items():
        for row in rows:
            cells = sorted(row["cells"], key=lambda c: (c["depth"], c["length"]))
            shares = [c["accuracy"]["mean"] for c in cells]
            half = lambda c: "" if (h := c["accuracy"]["half"]) is None else f" ± {100 * h:.0f}"
            star = lambda c: "*" * (c["against_chance"] == "at chance")
            text = [f"{100 * x:.0f}{half(c)}{star(c)}" for x, c in zip(shares, cells)]
            label = row["label"] + (f", rate {lr:g}" if len(found) > 1 else "")
            if cells:
                places = [c["length"] for c in cells], [100 * c["depth"] for c in cells]
                traces = [trace(row["arm"], row["label"], *places, z=shares, text=text)]
                views.append(view(label, "length of the context", "depth, %", traces, heat=True))
    note = (
        "The share of the asked pairs of tokens whose value is the most likely of all values, in percent, by the "
        f"length of the context and the share of the text before the pair. ±: {OVER_SEEDS}. *: at chance. "
        "A model that prefers late values is above chance at the bottom, and below at the top."
    )
    return figure("needles", "context", "Retrieval of needles", note, views)


def all_figures(study):
    of_losses = [position_figure(study), frequency_figure(study)]
    return [*of_losses, needle_figure(study), recall_figure(study), task_figure(study)]
