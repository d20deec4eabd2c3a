"""synthetic.py: the synthetic tasks of evaluations by arm: retrieval of needles (--eval-needles) and classification
after many examples (--eval-shots).

All evaluations of a lab have the same seed, so that runs answer the same questions. A score is the mean over the seeds
of the runs, and a gap the paired difference to the reference's. A score is at chance if chance is within the wider of
two intervals: Student's t over seeds, and Wilson's over questions, which further seeds do not reduce.
"""

from . import stats


def needles_name(task):
    return f"{task['asked']} of {task['needles']} needles, up to {max(c['length'] for c in task['cells'])} positions"


def tasks_of(run):
    """{name: scores} of the evaluation of a run."""
    evaluation = run.eval or {}
    found = {needles_name(task): task for task in [evaluation.get("needles")] if task and task["cells"]}
    return found | {f"{task['examples']} examples": task for task in evaluation.get("shots", [])}


def by_seed(study, arm, lr, name):
    """{seed: scores} of the runs of an arm that have the task."""
    found = {run.seed: tasks_of(run).get(name) for run in study.runs_of(arm, lr)}
    return {seed: task for seed, task in found.items() if task}


def names(study):
    return list(dict.fromkeys(name for run in study.runs for name in tasks_of(run)))


def estimate(scores, key="accuracy"):
    return stats.t_interval([score[key] for score in scores.values()])


def against_chance(scores):
    """at chance, above chance or below chance: {seed: scores}"""
    mean = lambda key: stats.mean([score[key] for score in scores.values()])
    over_seeds = estimate(scores)
    half, chance = over_seeds.half or 0, mean("chance")
    if min(mean("low"), over_seeds.mean - half) > chance:
        return "above chance"
    return "below chance" if max(mean("high"), over_seeds.mean + half) < chance else "at chance"


def score_of(scores):
    """What a task and a cell have."""
    low, high, chance = (stats.mean([s[key] for s in scores.values()]) for key in ("low", "high", "chance"))
    shown = {"accuracy": stats.as_json(estimate(scores)), "low": low, "high": high, "chance": chance}
    return shown | {"against_chance": against_chance(scores)}


def cells(found):
    """The cells that all seeds have, by length and depth."""
    every = {seed: {(c["length"], c["depth"]): c for c in task["cells"]} for seed, task in found.items()}
    common = set.intersection(*map(set, every.values()))
    return [
        {"length": length, "depth": depth, **score_of({seed: own[length, depth] for seed, own in every.items()})}
        for length, depth in sorted(common)
    ]


def row_of(study, arm, lr, name):
    """The scores of an arm in a task; None without a run that has them."""
    found = by_seed(study, arm, lr, name)
    if not found:
        return None
    first = next(iter(found.values()))
    row = {
        "task": name,
        "arm": arm,
        "label": study.arms[arm],
        "questions": first.get("questions", first.get("queries")),
    }
    row |= score_of(found) | {"exact": stats.as_json(estimate(found, "exact"))}
    accuracies = lambda scores: {seed: score["accuracy"] for seed, score in scores.items()}
    other = by_seed(study, study.reference, lr, name)
    gap = None if arm == study.reference else stats.paired_gap(accuracies(found), accuracies(other))
    row |= {"gap": stats.as_json(gap), "seeds": {str(seed): x for seed, x in accuracies(found).items()}}
    if "cells" in first:
        return row | {"cells": cells(found)}
    spreads = {key: stats.as_json(estimate(found, key)) for key in ("spread", "spread_independent")}
    return row | spreads | {"examples": first["examples"]}


def tables(study, lr):
    """One row per task and arm, with p adjusted over the gaps; None without tasks."""
    rows = [row for name in names(study) for arm in study.arms if (row := row_of(study, arm, lr, name))]
    gaps = [row["gap"] for row in rows if row["gap"]]
    for gap, p in zip(gaps, stats.holm([gap["p"] for gap in gaps])):
        gap["p_holm"] = p
    return rows or None
