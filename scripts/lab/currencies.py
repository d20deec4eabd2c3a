"""currencies.py: the gap of each pair of arms at equal tokens, FLOPs and seconds, each arm at its own best rate.

A token costs an arm 1, its FLOPs (their mean over the phases of a run), or the seconds of its median tokens/s if both
arms ran on one machine. Those of the base of a run (init-from) cost what they cost the base. If two runs differ in cost
by at most 1% their final losses are compared ("by design"). Otherwise the loss of the more expensive run is read from
its validations at the cost of the other, linear over log tokens ("interpolated"), and compared with the last validation
of the other. There its learning rate has not decayed as far, so its loss is above that of a run that ends there: an
interpolated gap favours the cheaper arm. Gaps are paired by seed, intervals are Student's t.
"""

import itertools
import math
from dataclasses import replace
from statistics import median

from . import stats, suggest
from .table import Cell, Table, arm_cell, difference

SAME = 0.01
CURRENCIES = ("tokens", "FLOPs", "seconds")
PAIRS = 10  # a page has all pairs of up to five arms, else those with the reference; results.json has all


def own_runs(study, arm):
    """{seed: finished run} of an arm at its best rate, without the seeds that chose the rate if there are others."""
    points = suggest.sweep(study, arm)
    if not points:
        return {}
    best = min(points, key=lambda point: point[1])[0]
    runs = {run.seed: run for run in study.runs_of(arm, best) if run.state == "done"}
    chosen = set(study.of_labs("sweep-seeds"))
    return {seed: run for seed, run in runs.items() if seed not in chosen} or runs


def at_own_rates(study):
    """The study, with the runs of each arm at its own rate alone, if a sweep chose the rates or each arm has one. For
    tables of one rate they have that of the reference."""
    single = len({(run.arm, run.lr) for run in study.runs}) == len(study.arms) and len(study.rates()) > 1
    own = {arm: own_runs(study, arm) for arm in study.arms} if study.of_labs("sweep-seeds") else {}
    runs = [run for found in own.values() for run in found.values()] or (study.runs if single else [])
    rate = next((run.lr for run in runs if run.arm == study.reference), None)
    if not rate:
        return study
    return replace(study, runs=[replace(run, lr=rate) for run in runs])


def prices_alone(runs):
    """{currency: (what a token costs, on what)}; a currency without a price is left out."""
    found, speeds = {"tokens": (1, "")}, [run.tokens_per_s for run in runs if run.tokens_per_s]
    costs = {run.flops_per_token for run in runs}
    if len(costs) == 1 and None not in costs:
        found["FLOPs"] = (costs.pop(), "")
    machines = {(run.machine, run.options.get("threads")) for run in runs}
    if speeds and len(machines) == 1:
        found["seconds"] = (1 / median(speeds), machines.pop())
    return found


def prices(runs):
    """{currency: (what a token costs, what one of the runs cost from which these start, on what)}"""
    own, bases = prices_alone(runs), [run.base for run in runs if run.base]
    base = prices_alone(bases) if bases else {currency: (0, where) for currency, (_, where) in own.items()}
    same = [currency for currency in own if currency in base and base[currency][1] == own[currency][1]]
    return {currency: (own[currency][0], *base[currency]) for currency in same}


def loss_at(run, tokens):
    """The validation loss after so many tokens; None outside of the validations."""
    points = sorted(run.validated.items())
    for (t0, y0), (t1, y1) in zip(points, points[1:]):
        if t0 <= tokens <= t1:
            return y0 + (y1 - y0) * math.log(tokens / t0) / math.log(t1 / t0)
    return None


def gap(one, other, each, by_eval):
    """(the estimate of the loss of one minus other at equal cost, whether all its pairs are equal by design). each:
    their prices of a token, and of one of the base"""
    found, designed = {}, True
    for seed in one.keys() & other.keys():
        pair = one[seed], other[seed]
        begin = [run.before * base for run, (_, base) in zip(pair, each)]
        costs = [b + (run.tokens - run.before) * price for run, b, (price, _) in zip(pair, begin, each)]
        losses = [run.final_loss(by_eval) for run in pair]
        if abs(costs[0] / costs[1] - 1) > SAME:
            least, designed = min(costs), False
            tokens = [run.before + (least - b) / price for run, b, (price, _) in zip(pair, begin, each)]
            at = lambda run, tokens, cost: run.last_validation if cost == least else loss_at(run, tokens)
            losses = [at(*x) for x in zip(pair, tokens, costs)]
        if None not in losses:
            found[seed] = losses[0] - losses[1]
    return stats.as_json(stats.t_interval([found[seed] for seed in sorted(found)])), designed


def rows(study):
    """One row per pair of arms, the later minus the earlier, as JSON."""
    runs = {arm: found for arm in study.arms if (found := own_runs(study, arm))}
    cost, by_eval, result = {arm: prices(found.values()) for arm, found in runs.items()}, study.by_eval(), []
    for other, arm in itertools.combinations(runs, 2):
        rates = [next(iter(runs[a].values())).lr for a in (arm, other)]
        row = {"arm": arm, "label": study.arms[arm], "other": other, "other_label": study.arms[other], "rates": rates}
        for currency in CURRENCIES:
            (*price, where), (*price_other, where_other) = (cost[a].get(currency, (None, "")) for a in (arm, other))
            known = price[0] and price_other[0] and where == where_other
            e, designed = gap(runs[arm], runs[other], (price, price_other), by_eval) if known else (None, None)
            row[currency] = {"gap": e, "designed": designed, "price": price[0] / price_other[0] if known else None}
        result.append(row)
    return result


def table(found, reference):
    """The rows as a table."""
    shown = found if len(found) <= PAIRS else [row for row in found if row["other"] == reference]
    cells = []
    for row in shown:
        cells.append([arm_cell(row), row["other_label"], " and ".join(f"{rate:g}" for rate in row["rates"])])
        for currency in CURRENCIES:
            of = row[currency]
            cell, how = difference(of["gap"]), ", by design" if of["designed"] else ", interpolated"
            cells[-1].append(Cell(cell.text + how, cell.kind) if of["gap"] and currency != "tokens" else cell)
        cells[-1].append(" and ".join(f"{x:.2f}" if (x := row[c]["price"]) else "–" for c in CURRENCIES[1:]))
    head = ["arm", "minus", "rates", *(f"gap at equal {currency}" for currency in CURRENCIES)]
    caption = (
        "Each arm at its own best rate, paired by seed. An interpolated gap reads the more expensive run before the "
        "end of its schedule, which favours the cheaper arm. Seconds are of the median tokens/s, of arms on one "
        "machine."
    )
    return Table("currencies", [*head, "cost of a token: FLOPs and seconds, ratio"], cells, caption)
