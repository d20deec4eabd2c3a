"""upcycling.py: arms that start from the last checkpoint of another arm (init-from): losses at equal numbers of tokens,
those of the base included, and statistics before and after. Differences are paired by seed."""

from . import metrics, stats
from .compare import by_seed, compared, correct, estimate, shown_seeds

STATISTICS = ("first_mass", "sink_rate", "logit_max", "hidden_max", "context_rms_min")


def losses(study, lr):
    """A row for each arm and each number of tokens at which it and the reference were validated."""
    at = lambda arm, tokens: by_seed(study.runs_of(arm, lr), lambda run: run.validated.get(tokens))
    points = sorted({tokens for run in study.runs_of(study.reference, lr) for tokens in run.validated})
    rows = []
    for tokens in points:
        for arm, label in study.arms.items():
            if values := at(arm, tokens):
                row = {"tokens": tokens, "arm": arm, "label": label, "seeds": shown_seeds(values)}
                rows.append(row | compared(study, arm, lambda arm: at(arm, tokens), "loss"))
    correct(row["gap"] for row in rows)
    return rows


def changes(study, lr):
    """A row for each arm with a base and each statistic: of the base, of the arm, and the difference."""
    rows = []
    for arm, label in study.arms.items():
        runs = [run for run in study.runs_of(arm, lr) if run.base and run.state == "done"]
        for name in STATISTICS:
            of = metrics.METRICS[name].of
            before, after = by_seed(runs, lambda run: of(run.base)), by_seed(runs, of)
            if before and after:
                change = stats.as_json(stats.paired_gap(after, before))
                row = {"arm": arm, "label": label, "what": name, "before": estimate(before), "after": estimate(after)}
                rows.append(row | {"change": change})
    correct(row["change"] for row in rows)
    return rows


def tables(study, lr):
    """The tables of the section, or None if no run starts from another."""
    if not any(run.base for run in study.runs):
        return None
    return {"losses": losses(study, lr), "changes": changes(study, lr)}
