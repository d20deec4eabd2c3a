"""evaluations.py: what evaluations measure, by arm: the loss by position, by token frequency and by source,
associative recall, multiple-choice tasks (--eval-choices, from the records "choices" of the logs), and retrieval of
needles (synthetic.py).

A score is the mean over the seeds, and a gap the paired difference to the reference's by seed, with t intervals over
seeds. Seeds answer the same questions, whose selection causes an error that further seeds do not reduce: a score is
compared with chance by the wider of its intervals over seeds and over questions, which is normal for multiple-choice
tasks and Wilson's for needles.
"""

import re

from . import stats
from .compare import by_seed, compared, correct, estimate, shown_seeds


def evaluated(study, arm, lr, get):
    """{seed: get(eval)} of the evaluated runs of an arm, if it is a finite number."""
    return by_seed([run for run in study.runs_of(arm, lr) if run.eval], lambda run: get(run.eval))


def position_bins(T):
    ends = [0] + [1 << i for i in range(T.bit_length()) if 1 << i < T] + [T]
    return list(zip(ends, ends[1:]))


def by_place(study, lr, places, scores, get, needed):
    """{arm: rows}: a row has the keys of a place, and the estimate and the gap of get(evaluation, place, key) for each
    {key: name of its gap} of scores. Rows without an estimate of the keys `needed` are left out."""
    table = {}
    for arm in study.arms:
        for place in places:
            row = dict(place)
            for key, gap in scores.items():
                of = lambda e: get(e, place, key)
                row |= compared(study, arm, lambda arm: evaluated(study, arm, lr, of), key, gap)
            if all(row[key] for key in needed):
                table.setdefault(arm, []).append(row)
    return table


def by_position(study, lr):
    """{arm: rows (begin, end, loss, gap)} of positions in powers of two."""
    lengths = {len(run.eval["loss_by_position"]) for run in study.runs if run.eval and run.eval.get("loss_by_position")}
    bins = position_bins(*lengths) if len(lengths) == 1 else []
    losses = lambda e, place: (e.get("loss_by_position") or [])[place["begin"] : place["end"]]
    get = lambda e, place, _: stats.mean_or_none(losses(e, place))
    return by_place(study, lr, [{"begin": a, "end": b} for a, b in bins], {"loss": "gap"}, get, ["loss"])


def by_frequency(study, lr):
    """{arm: rows (share, tokens, targets, loss, gap)} of tokens by their share of the targets, in powers of two."""
    groups = next(
        (run.eval["loss_by_frequency"] for run in study.runs if (run.eval or {}).get("loss_by_frequency")), []
    )
    places = [{key: group[key] for key in ("share", "tokens", "targets")} for group in groups]
    share = lambda group: f"{group['share']:.4g}"  # archives have seven digits
    of = lambda e: {share(group): group["loss"] for group in e.get("loss_by_frequency") or ()}
    return by_place(study, lr, places, {"loss": "gap"}, lambda e, place, _: of(e).get(share(place)), ["loss"])


def by_source(study, lr):
    """{arm: rows (source, loss, gap)} of the validation shards of sources, val_NNNNNN_SOURCE.bin."""
    shard = re.compile(r"val_\d+_(.+)\.bin")
    of = lambda e: {m[1]: s["loss"] for s in e.get("loss_by_shard") or () if (m := shard.fullmatch(s["file"]))}
    names = dict.fromkeys(name for run in study.runs for name in of(run.eval or {}))
    get = lambda e, place, _: of(e).get(place["source"])
    return by_place(study, lr, [{"source": name} for name in names], {"loss": "gap"}, get, ["loss"])


def recall(study, lr):
    """{arm: rows} of the cells of the recall task."""
    of = lambda e: {(c["pairs"], c["noise"]): c for c in e.get("recall") or ()}
    cells = next((list(of(run.eval)) for run in study.runs if run.eval and run.eval.get("recall")), [])
    get = lambda e, place, key: of(e).get(tuple(place.values()), {}).get(key)
    scores = {key: f"{key}_gap" for key in ("exact", "among_values", "loss")}
    places = [{"pairs": pairs, "noise": noise} for pairs, noise in cells]
    return by_place(study, lr, places, scores, get, ["exact", "among_values"])


def against_chance(estimate, chance, over_questions):
    """at chance, above chance or below chance; None without an interval. over_questions: (low, high), or None"""
    ends = [(estimate.low, estimate.high)] * (estimate.half is not None) + [over_questions] * bool(over_questions)
    if not ends:
        return None
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    return "above chance" if low > chance else "below chance" if high < chance else "at chance"


# ---- multiple-choice tasks

SCORES = ("accuracy", "accuracy_norm", "bits_per_byte")


def choice_names(study):
    """The tasks of all runs, in the order of the logs."""
    return list(dict.fromkeys(name for run in study.runs for name, records in run.choices.items() if records))


def scores(study, arm, lr, name, key, step=None):
    """{seed: score} of the runs of an arm at a step; None: of the finished runs at their last step."""
    runs = [run for run in study.runs_of(arm, lr) if step is not None or run.state == "done"]
    at = lambda run: run.choices.get(name, {}).get(run.steps if step is None else step, {})
    return by_seed(runs, lambda run: at(run).get(key))


def choice_row(study, arm, lr, name):
    """The scores of an arm in a task; None without a finished run."""
    of = lambda key: lambda arm: scores(study, arm, lr, name, key)
    own = {key: of(key)(arm) for key in (*SCORES, "accuracy_se")}
    if not own["accuracy"]:
        return None
    done = [run for run in study.runs_of(arm, lr) if run.state == "done"]
    record = next(r for run in done if (r := run.choices.get(name, {}).get(run.steps)))
    errors, accuracy = list(own["accuracy_se"].values()), stats.t_interval(list(own["accuracy"].values()))
    half = stats.normal_quantile((1 + stats.CONFIDENCE) / 2) * stats.mean(errors) if errors else None
    over_examples = (accuracy.mean - half, accuracy.mean + half) if errors else None
    row = {"task": name, "arm": arm, "label": study.arms[arm], "examples": record["examples"], "norm": record["norm"]}
    row |= {key: estimate(own[key]) for key in SCORES}
    row |= {"chance": record["chance"], "half_over_examples": half}
    row |= {"against_chance": against_chance(accuracy, record["chance"], over_examples)}
    for key in ("accuracy", "bits_per_byte"):
        row |= compared(study, arm, of(key), key, f"{key}_gap")
    return row | {"seeds": shown_seeds(own["accuracy"])}


def rows_of(study, names, row_of, gaps):
    """One row per task and arm, with p adjusted over the gaps of a score; None without scores."""
    rows = [row for name in names for arm in study.arms if (row := row_of(arm, name))]
    for gap in gaps:
        correct(row[gap] for row in rows)
    return rows or None


def choices(study, lr):
    row_of = lambda arm, name: choice_row(study, arm, lr, name)
    return rows_of(study, choice_names(study), row_of, ("accuracy_gap", "bits_per_byte_gap"))


def by_step(study, lr, name, key):
    """{arm: [(step, estimate)]} over the seeds that have the step, from the steps that all runs of the arm have."""
    found = {}
    for arm in study.arms:
        steps = [set(run.choices[name]) for run in study.runs_of(arm, lr) if name in run.choices]
        values = {step: scores(study, arm, lr, name, key, step) for step in sorted(set.intersection(*steps or [set()]))}
        found[arm] = [(step, estimate(own)) for step, own in values.items() if own]
    return {arm: points for arm, points in found.items() if points}


# ---- needles


def needles_of(run):
    """{name: scores} of the evaluation of a run."""
    name = lambda t: f"{t['asked']} of {t['needles']} needles, up to {max(c['length'] for c in t['cells'])} positions"
    task = (run.eval or {}).get("needles")
    return {name(task): task} if task and task["cells"] else {}


def score_of(found):
    """What a task and a cell have, of {seed: scores}."""
    low, high, chance = (stats.mean([s[key] for s in found.values()]) for key in ("low", "high", "chance"))
    accuracy = stats.t_interval([s["accuracy"] for s in found.values()])
    shown = {"accuracy": stats.as_json(accuracy), "low": low, "high": high, "chance": chance}
    return shown | {"against_chance": against_chance(accuracy, chance, (low, high))}


def cells(found):
    """The cells that all seeds have, by length and depth."""
    every = {seed: {(c["length"], c["depth"]): c for c in task["cells"]} for seed, task in found.items()}
    common = sorted(set.intersection(*map(set, every.values())))
    own = lambda place: {seed: of[place] for seed, of in every.items()}
    return [{"length": place[0], "depth": place[1], **score_of(own(place))} for place in common]


def synthetic_row(study, arm, lr, name):
    """The scores of an arm in a task; None without a run that has them."""
    found = {run.seed: task for run in study.runs_of(arm, lr) if (task := needles_of(run).get(name))}
    if not found:
        return None
    of = lambda key: lambda arm: by_seed(study.runs_of(arm, lr), lambda run: needles_of(run).get(name, {}).get(key))
    first, accuracies = next(iter(found.values())), of("accuracy")
    row = {"task": name, "arm": arm, "label": study.arms[arm]}
    row |= {"questions": first["questions"], **score_of(found)}
    row |= {"exact": estimate(of("exact")(arm)), **compared(study, arm, accuracies, "accuracy")}
    return row | {"seeds": shown_seeds(accuracies(arm)), "cells": cells(found)}


def synthetic(study, lr):
    names = list(dict.fromkeys(name for run in study.runs for name in needles_of(run)))
    return rows_of(study, names, lambda arm, name: synthetic_row(study, arm, lr, name), ("gap",))
