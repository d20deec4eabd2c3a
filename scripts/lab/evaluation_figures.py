"""evaluation_figures.py: figures of evaluations: loss by position, associative recall, multiple-choice tasks."""

from . import stats, tables, tasks
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


def all_figures(study):
    return [position_figure(study), recall_figure(study), task_figure(study)]
