"""preconditions.py: what must hold of the arms of a study before they say anything about attention: a loss below that
of a 5-gram counted on the same data (ngrams.py), and a use of context: the loss in the last half of the window is below
the loss early in it, by an interval over the seeds. Both are taken at the best rate of the arm. Tokens per parameter,
and the rate as a ratio to the minimum of the parabola (suggest.py), are shown without a judgment.
"""

from . import stats, suggest
from .table import Table, interval, number

HEAD = ["arm", "tokens per parameter", "rate", "of the best rate", "loss", "minus the 5-gram", "late minus early", ""]
SHOWN = {"not known": "not known", "edge": "an edge of the rates", "one": "one rate"}


def rows(measured):
    """One row per arm, as JSON; `unmet`: what prevents a verdict, "" if nothing does."""
    return [row_of(measured, arm) for arm in measured.arms]


def row_of(measured, arm):
    points, mine = measured.losses_by_rate(arm), measured.at_best_rate(arm)
    five = measured.ngrams["losses"][-1] if measured.ngrams else None
    loss = stats.mean_or_none(row["loss"] for row in mine)
    context = stats.t_interval([row["context_use"] for row in mine if row["context_use"] is not None])
    tokens = [row["tokens"] / row["active_parameters"] for row in mine if row["tokens"] and row["active_parameters"]]
    row = {"arm": arm, "loss": loss, "context": stats.as_json(context), "rate": mine[0]["rate"] if mine else None}
    row["tokens_per_parameter"] = stats.mean_or_none(tokens)
    row["minus_5_gram"] = None if loss is None or five is None else loss - five
    optimum, bounded = suggest.minimum(points) if points else (None, None)
    row["of_best_rate"] = "not known" if not mine else "one" if len(points) == 1 else "edge"
    if mine and bounded is not None and len(points) > 1:
        row["of_best_rate"] = row["rate"] / optimum
    row["unmet"] = ""
    if row["minus_5_gram"] is None:
        row["unmet"] = f"the loss of {arm if loss is None else 'the 5-gram'} is not known"
    elif row["minus_5_gram"] >= 0:
        row["unmet"] = f"{arm} is not below the 5-gram ({loss:.3f}, {five:.3f})"
    elif not context or context.half is None:
        row["unmet"] = f"the use of context of {arm} is not known"
    elif context.high >= 0:
        row["unmet"] = f"{arm} is not shown to use its context ({context.mean:+.3f} ± {context.half:.3f})"
    return row


def unmet(measured, arms):
    return next(filter(None, (row_of(measured, arm)["unmet"] for arm in arms)), "")


def table(found, ngrams, labels):
    """The rows as a table. labels: {arm: name}"""
    cells = []
    for row in found:
        of_best = row["of_best_rate"]
        cells.append([labels.get(row["arm"], row["arm"]), number(row["tokens_per_parameter"], 1)])
        cells[-1] += [f"{row['rate']:g}" if row["rate"] else "–", SHOWN.get(of_best) or f"{of_best:.2f}"]
        cells[-1] += [number(row["loss"]), "–" if row["minus_5_gram"] is None else f"{row['minus_5_gram']:+.4f}"]
        cells[-1] += [interval(row["context"], True), "not met" if row["unmet"] else "met"]
    said = "The losses of n-gram models are not known: the data were not there."
    if ngrams:
        of = ", ".join(f"{n} {loss:.4f}" for n, loss in enumerate(ngrams["losses"], 1))
        said = f"Losses of n-gram models of {ngrams['tokens']:,} tokens on the same windows: {of}."
    said += " Early are the second of 32 parts of the window, late its last half. At the best rate of each arm."
    return Table("preconditions", HEAD, cells, said)
