"""evaluation_figures.py: figures of evaluations: loss by position, associative recall, multiple-choice and synthetic
tasks."""

from . import stats, synthetic, tables, tasks
from .figures import figure, trace, view


def position_figure(study):
    loss, gap = [], []
    for lr in study.rates():
        for arm, rows in tables.by_position(study, lr).items():
            x = [row["end"] for row in rows]  # the last position of a bin, counted from 1: a power of two
            text = [f"positions {row['begin'] + 1} to {row['end']}" for row in rows]
            for traces, key in ((loss, "loss"), (gap, "gap")):
                if rows[0][key]:
                    traces.append(
                        trace(
                            arm,
                            study.arms[arm],
                            x,
                            [row[key]["mean"] for row in rows],
                            lr,
                            mode="lines+markers",
                            error=[row[key]["half"] or 0 for row in rows],
                            text=text,
                        )
                    )
    note = (
        "Validation loss of the last checkpoint, by position, counted from 1. A point is the mean of the positions "
        "after the point before it, up to its own; "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals over seeds. A model that uses context better is lower at the right."
    )
    return figure(
        "position",
        "context",
        "Loss by position in the context",
        note,
        [
            view("gap", "position", "gap, nats", gap, xlog=2, zero=True),
            view("loss", "position", "loss, nats", loss, xlog=2),
        ],
    )


def recall_figure(study):
    views = []
    for key, title in (("among_values", "share correct"), ("exact", "share correct")):
        for noisy in (False, True):
            traces = []
            for lr in study.rates():
                chance = {}
                for arm, rows in tables.recall(study, lr).items():
                    rows = [row for row in rows if (row["noise"] > 0) == noisy]
                    chance.update({row["pairs"]: 1 / row["pairs"] for row in rows})
                    traces.append(
                        trace(
                            arm,
                            study.arms[arm],
                            [row["pairs"] for row in rows],
                            [row[key]["mean"] for row in rows],
                            lr,
                            mode="lines+markers",
                            error=[row[key]["half"] or 0 for row in rows],
                        )
                    )
                if key == "among_values" and chance:
                    traces.append(
                        trace(None, "by chance", sorted(chance), [chance[p] for p in sorted(chance)], lr, dash=True)
                    )
            views.append(
                view(
                    ("best of values" if key == "among_values" else "exact match") + (", with noise" if noisy else ""),
                    "pairs",
                    title,
                    traces,
                    xlog=2,
                )
            )
    note = (
        "Pairs of tokens, then each key again; the model predicts its value. Exact match: the value is the likeliest "
        "of all tokens. Best of values: the likeliest of the tokens that followed a key (dashed: by chance). With "
        "noise: other tokens between pairs and queries fill the context. "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals over seeds."
    )
    return figure("recall", "context", "Associative recall", note, views)


def task_figure(study):
    """The accuracy and the bits per byte of each task, by step."""
    views = []
    for name in tasks.names(study):
        for key, title in (("accuracy", "accuracy"), ("bits_per_byte", "bits per byte")):
            traces = []
            for lr in study.rates():
                found = tasks.by_step(study, lr, name, key)
                for arm, points in found.items():
                    x, y = [step for step, _ in points], [e.mean for _, e in points]
                    error = [e.half or 0 for _, e in points]
                    traces.append(trace(arm, study.arms[arm], x, y, lr, mode="lines+markers", error=error))
                if key == "accuracy" and found:
                    ends = [min(p[0][0] for p in found.values()), max(p[-1][0] for p in found.values())]
                    traces.append(trace(None, "by chance", ends, [tasks.chance_of(study, name)] * 2, lr, dash=True))
            views.append(view(name if key == "accuracy" else f"{name}, bits per byte", "step", title, traces))
    note = (
        "Multiple-choice tasks at each validation: means over the seeds with "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals. Bits per byte: of the correct completion, lower is better."
    )
    return figure("tasks", "tasks", "Tasks: accuracy by step", note, views)


def needle_figure(study):
    """A map of each arm: accuracy by depth (rows) and length (columns)."""
    views, found = [], {lr: rows for lr in study.rates() if (rows := synthetic.tables(study, lr))}
    for lr, rows in found.items():
        for row in rows:
            cells = sorted(row.get("cells", []), key=lambda c: (c["depth"], c["length"]))
            x, y, z = (
                [c["length"] for c in cells],
                [100 * c["depth"] for c in cells],
                [c["accuracy"]["mean"] for c in cells],
            )
            text = [f"{100 * c['accuracy']['mean']:.0f}{'*' * (c['against_chance'] == 'at chance')}" for c in cells]
            label = row["label"] + (f", rate {lr:g}" if len(found) > 1 else "")
            if cells:
                traces = [trace(row["arm"], row["label"], x, y, z=z, text=text)]
                views.append(view(label, "length of the context", "depth, %", traces, heat=True))
    note = (
        "The share of the asked pairs of tokens whose value is the most likely of all values, in percent, by the "
        "length of the context and the share of the text before the pair. *: at chance. A model that prefers late values is "
        "above chance at the bottom, and below at the top."
    )
    return figure("needles", "context", "Retrieval of needles", note, views)


def shots_figure(study):
    """The accuracy, and its spread over orders, by the number of examples."""
    views = {"accuracy": [], "spread": []}
    for lr in study.rates():
        rows = [row for row in synthetic.tables(study, lr) or [] if "examples" in row]
        for key, traces in views.items():
            for arm in study.arms:
                own = [(row["examples"], row[key]) for row in rows if row["arm"] == arm]
                x, y, error = [k for k, _ in own], [e["mean"] for _, e in own], [e["half"] or 0 for _, e in own]
                if own:
                    traces.append(trace(arm, study.arms[arm], x, y, lr, mode="lines+markers", error=error))
        if rows:
            ends = [min(row["examples"] for row in rows), max(row["examples"] for row in rows)]
            views["accuracy"].append(trace(None, "by chance", ends, [rows[0]["chance"]] * 2, lr, dash=True))
    note = (
        "Examples of four classes, each a few tokens with one that determines the class, and then a query. Spread: the "
        "standard deviation of the accuracy over orders of the same examples. "
        f"{100 * stats.CONFIDENCE:.0f}% t intervals over seeds."
    )
    return figure(
        "shots",
        "context",
        "Classification after many examples",
        note,
        [
            view("accuracy", "examples", "accuracy", views["accuracy"], xlog=2),
            view("spread over orders", "examples", "standard deviation of the accuracy", views["spread"], xlog=2),
        ],
    )


def all_figures(study):
    return [position_figure(study), needle_figure(study), shots_figure(study), recall_figure(study), task_figure(study)]
