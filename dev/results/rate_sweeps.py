"""rate_sweeps.py: what optimizers.md and transfer.md say about the runs of their plans."""

import math

from lab import currencies, stats, suggest

ARCHITECTURES = {"baseline": "Transformer", "baseline-2h": "2 NH heads", "diff_v2": "DIFF V2"}
OPTIMIZERS = {  # what the name of an arm has after its architecture
    "": "AdamW",
    "-muon": "Muon",
    "-muon-head": "Muon by head",
    "-muon-pair": "Muon by pair",
    "-normuon": "NorMuon",
}
EFFECT = 0.015  # nats: the smallest difference of interest (scripts/lab/claims)


def swept(measured, rates=True):
    """The runs of the sweep of rates; or the longer ones at the best rates."""
    longest = max(row["tokens"] for row in measured.rows)
    return [row for row in measured.rows if (row["tokens"] < longest) == rates]


def whole(rows):
    """{arm: {seed: {rate: loss}}} of the seeds that have ended at all rates of the arm."""
    found = {}
    for row in sorted(rows, key=lambda row: row["rate"]):
        found.setdefault(row["arm"], {}).setdefault(row["seed"], {})[row["rate"]] = row["loss"]
    most = {arm: max(map(len, seeds.values())) for arm, seeds in found.items()}
    return {arm: {s: x for s, x in seeds.items() if len(x) == most[arm]} for arm, seeds in found.items()}


def losses_over_rates(rows):
    """{arm: [(rate, mean loss over the seeds)]}, without the rates at which a run diverged."""
    found = {}
    for arm, seeds in whole(rows).items():
        at = {rate: [x[rate] for x in seeds.values()] for rate in next(iter(seeds.values()))}
        found[arm] = [(rate, stats.mean(losses)) for rate, losses in at.items() if None not in losses]
    return found


def optimizer_gaps(measured):
    """{what: {seed: difference}} of the runs at the best rates, in three groups: gaps to the Transformer with the same
    optimizer, what the optimizer changes in them, and ways to orthogonalize."""
    losses, gaps = losses_at_best(measured), {}
    has = lambda architecture, optimizer: architecture + optimizer in losses
    less = lambda a, b: stats.paired(losses[a], losses[b])
    for architecture in ("diff_v2", "baseline-2h"):
        for optimizer, name in OPTIMIZERS.items():
            other = optimizer if has("baseline", optimizer) else "-muon"  # a Transformer has no pairs
            if has(architecture, optimizer):
                of = less(architecture + optimizer, "baseline" + other)
                gaps[f"{ARCHITECTURES[architecture]} minus Transformer, {name}"] = of
    changes = {}
    for what, by_seed in gaps.items():
        architecture, name = what.split(" minus Transformer, ")
        if name != "AdamW":
            with_adamw = gaps[f"{architecture} minus Transformer, AdamW"]
            changes[f"that of {architecture} with {name} minus that with AdamW"] = stats.paired(by_seed, with_adamw)
    splits = {
        f"{name} minus Muon, {label}": less(architecture + optimizer, f"{architecture}-muon")
        for optimizer, name in list(OPTIMIZERS.items())[2:]
        for architecture, label in ARCHITECTURES.items()
        if has(architecture, optimizer)
    }
    return gaps, changes, splits


def losses_at_best(measured):
    """{arm: {seed: loss}} of the runs at the best rates."""
    losses = {}
    for row in swept(measured, rates=False):
        losses.setdefault(row["arm"], {})[row["seed"]] = row["loss"]
    return losses


def tokens_to(run, loss):
    """After how many tokens the validations, linear over log tokens, first reach a loss; None: never."""
    points = sorted(run.validated.items())
    for (t0, y0), (t1, y1) in zip(points, points[1:]):
        if y1 <= loss < y0:
            return t0 * (t1 / t0) ** ((y0 - loss) / (y0 - y1))
    return None


def against_adamw(study):
    """{arm: (gap at equal tokens, at equal seconds, seconds of a token, tokens to the loss of AdamW)} with the same
    architecture and AdamW: estimates; the third is a ratio, the last an estimate of a ratio."""
    found = {}
    for row in currencies.rows(study):
        architecture = max((a for a in ARCHITECTURES if row["arm"].startswith(a)), key=len)
        if row["other"] != architecture or row["arm"] in ARCHITECTURES:
            continue
        adamw = currencies.own_runs(study, architecture)
        runs = [(run, adamw[seed]) for seed, run in currencies.own_runs(study, row["arm"]).items() if seed in adamw]
        reached = [tokens / other.tokens for run, other in runs if (tokens := tokens_to(run, other.last_validation))]
        equal = [stats.Estimate(**row[currency]["gap"]) for currency in ("tokens", "seconds")]
        found[row["arm"]] = *equal, row["seconds"]["price"], stats.t_interval(reached)
    return found


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
