"""rate_sweeps.py: what optimizers.md and transfer.md say about the runs of their plans."""

import math

from lab import stats, suggest

EFFECT = 0.015  # nats: the smallest difference of interest (scripts/lab/claims)


def swept(measured, rates=True):
    """The runs of the sweep of rates; or the longer ones at the best rates."""
    longest = max(row["tokens"] for row in measured.rows)
    return [row for row in measured.rows if (row["tokens"] < longest) == rates]


def whole(rows):
    """{arm: {seed: {rate: loss}}} of the seeds that have ended at all rates of the arm, those of any width."""
    found, most = {}, {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        found.setdefault(row["arm"], {}).setdefault(row["seed"], {})[row["rate"]] = row["loss"]
    of = lambda arm: arm.split(".w")[0]
    for arm, seeds in found.items():
        most[of(arm)] = max(most.get(of(arm), 0), *map(len, seeds.values()))
    ended = {arm: {s: x for s, x in seeds.items() if len(x) == most[of(arm)]} for arm, seeds in found.items()}
    return {arm: seeds for arm, seeds in ended.items() if seeds}


def losses_over_rates(rows):
    """{arm: [(rate, mean loss over the seeds)]}, without the rates at which a run diverged."""
    found = {}
    for arm, seeds in whole(rows).items():
        at = {rate: [x[rate] for x in seeds.values()] for rate in next(iter(seeds.values()))}
        found[arm] = [(rate, stats.mean(losses)) for rate, losses in at.items() if None not in losses]
    return found


def optimizer_gaps(measured):
    """{arm: {seed: loss}} and {what: {seed: difference}} of the runs at the best rates."""
    losses = {arm: {} for arm in measured.arms}
    for row in swept(measured, rates=False):
        losses[row["arm"]][row["seed"]] = row["loss"]
    less = lambda a, b: stats.paired(losses[a], losses[b])
    adamw, muon = less("diff_v2", "baseline"), less("diff_v2-muon", "baseline-muon")
    pair = less("diff_v2-muon-pair", "baseline-muon")
    return losses, {
        "DIFF V2 minus Transformer, AdamW": adamw,
        "DIFF V2 minus Transformer, Muon": muon,
        "DIFF V2, Muon by pair, minus Transformer, Muon": pair,
        "that gap with Muon minus that with AdamW": stats.paired(muon, adamw),
        "that gap with Muon by pair minus that with AdamW": stats.paired(pair, adamw),
        "Muon by pair minus Muon, DIFF V2": less("diff_v2-muon-pair", "diff_v2-muon"),
        "Muon minus AdamW, Transformer": less("baseline-muon", "baseline"),
        "Muon minus AdamW, DIFF V2": less("diff_v2-muon", "diff_v2"),
    }


def survival(adamw, muon, wanted):
    """The verdict by the rules of optimizers.plan, on two gaps and a number of seeds."""
    n = min(adamw.n, muon.n)
    if n < wanted:
        return f"Undecided: {n} of {wanted} seeds have ended."
    if adamw.high >= 0:
        return "Undecided: with AdamW the interval is not below 0, so there is no gap here that could survive."
    if muon.high < 0:
        return "The gap of DIFF V2 survives Muon at this size."
    return "The gap of DIFF V2 vanishes with Muon." if muon.low > -EFFECT else "Undecided at this size."


def optima(measured):
    """{arm: {width: {seed: rate}}}: the minima of the parabolas; None: the best rate is the first or last."""
    found = {}
    for arm, seeds in whole(measured.rows).items():
        name, _, width = arm.rpartition(".w")
        for seed, at in seeds.items():
            rate, loss = suggest.minimum([point for point in at.items() if point[1] is not None])
            found.setdefault(name, {}).setdefault(int(width), {})[seed] = None if loss is None else rate
    return found


def factors(by_width, width):
    """The estimate of log(optimum at a width / optimum at the smallest) over the seeds that have both."""
    logs = [{seed: rate and math.log(rate) for seed, rate in by_width[w].items()} for w in (width, min(by_width))]
    return stats.paired_gap(*logs)
