"""compare.py: the values of runs by seed, their estimates, and the gaps of an arm to the reference, paired by seed. The
results are JSON. Pages tell the direction of a gap only if its key "shown" is true."""

from . import stats

LEAST_SEEDS = 5  # of a gap with a direction


def by_seed(runs, read):
    """{seed: value} of the runs of which read() has a finite number."""
    found = {run.seed: read(run) for run in runs}
    return {seed: x for seed, x in found.items() if stats.finite(x)}


def estimate(values):
    """The mean of {seed: value} and its interval."""
    return stats.as_json(stats.t_interval(list(values.values())))


def compared(study, arm, values, value="value", gap="gap"):
    """{value: the estimate of an arm, gap: that of its gap}. values(arm): {seed: value}."""
    mine = values(arm)
    paired = None if arm == study.reference else stats.paired_gap(mine, values(study.reference))
    return {value: estimate(mine), gap: stats.as_json(paired)}


def correct(gaps):
    """Adds to gaps their p, adjusted for the number of gaps (Holm), and whether it shows a difference."""
    gaps = [gap for gap in gaps if gap]
    for gap, p in zip(gaps, stats.holm([gap["p"] for gap in gaps])):
        gap |= {"p_holm": p, "shown": p is not None and p < 1 - stats.CONFIDENCE and gap["n"] >= LEAST_SEEDS}


def shown_seeds(values):
    return {str(seed): x for seed, x in values.items()}


def difference(a, b):
    return a - b if stats.finite(a) and stats.finite(b) else None
