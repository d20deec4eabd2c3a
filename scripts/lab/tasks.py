"""tasks.py: the scores of multiple-choice tasks (--eval-choices) by arm, from the records "choices" of the logs.

A score is that of the last step, and a gap the paired difference to the reference's by seed, with t intervals over
seeds as those of the loss. Seeds share the examples of a task, whose selection causes an error that further seeds do
not reduce: a score is compared with chance by the larger of its intervals over seeds and over examples.
"""

from . import stats

SCORES = ("accuracy", "accuracy_norm", "bits_per_byte")
COMPARED = ("accuracy", "bits_per_byte")  # with the reference


def percent(estimate):
    """An estimate of results(), of a share, in percent."""
    return estimate and {key: x and 100 * x if key in ("mean", "half", "sd") else x for key, x in estimate.items()}


def names(study):
    """The tasks of all runs, in the order of the logs."""
    return list(dict.fromkeys(name for run in study.runs for name in run.choices))


def scores(study, arm, lr, name, key, step=None):
    """{seed: score} of the runs of an arm at a step; None: of the finished runs at their last step."""
    found = {}
    for run in study.runs_of(arm, lr):
        if step is not None or run.state == "done":
            found[run.seed] = run.choices.get(name, {}).get(run.steps if step is None else step, {}).get(key)
    return {seed: x for seed, x in found.items() if stats.finite(x)}


def over_examples(errors):
    """Half the width of the normal interval over examples, from the standard errors of several runs."""
    return stats.special().ndtri((1 + stats.CONFIDENCE) / 2) * stats.mean(errors) if errors else None


def against_chance(estimate, half, chance):
    """at chance, above chance or below chance; None without an interval"""
    halves = [x for x in (estimate.half, half) if x is not None]
    if not halves:
        return None
    far = estimate.mean - chance
    return "at chance" if abs(far) <= max(halves) else "above chance" if far > 0 else "below chance"


def row_of(study, arm, lr, name):
    """The scores of an arm in a task; None without a finished run."""
    own = {key: scores(study, arm, lr, name, key) for key in SCORES}
    if not own["accuracy"]:
        return None
    first = next(
        run for run in study.runs_of(arm, lr) if run.state == "done" and run.steps in run.choices.get(name, {})
    )
    record = first.choices[name][first.steps]
    accuracy = stats.t_interval(list(own["accuracy"].values()))
    half = over_examples(list(scores(study, arm, lr, name, "accuracy_se").values()))
    row = {"task": name, "arm": arm, "label": study.arms[arm], "examples": record["examples"], "norm": record["norm"]}
    row |= {key: stats.as_json(stats.t_interval(list(own[key].values()))) for key in SCORES}
    row |= {"chance": record["chance"], "half_over_examples": half}
    row |= {"against_chance": against_chance(accuracy, half, record["chance"])}
    for key in COMPARED:
        gap = None
        if arm != study.reference:
            gap = stats.as_json(stats.paired_gap(own[key], scores(study, study.reference, lr, name, key)))
        row[f"{key}_gap"] = gap
    return row | {"seeds": {str(seed): x for seed, x in own["accuracy"].items()}}


def tables(study, lr):
    """One row per task and arm with p adjusted over the gaps of a score, or None without a finished run with tasks."""
    rows = [row for name in names(study) for arm in study.arms if (row := row_of(study, arm, lr, name))]
    for key in COMPARED:
        gaps = [row[f"{key}_gap"] for row in rows if row[f"{key}_gap"]]
        for gap, p in zip(gaps, stats.holm([gap["p"] for gap in gaps])):
            gap["p_holm"] = p
    return rows or None


def by_step(study, lr, name, key):
    """{arm: [(step, estimate)]} over the seeds that have the step, from the steps that all runs of the arm have."""
    found = {}
    for arm in study.arms:
        steps = [set(run.choices[name]) for run in study.runs_of(arm, lr) if name in run.choices]
        points = (
            [(step, scores(study, arm, lr, name, key, step)) for step in sorted(set.intersection(*steps))]
            if steps
            else []
        )
        found[arm] = [(step, stats.t_interval(list(values.values()))) for step, values in points if values]
    return {arm: points for arm, points in found.items() if points}


def chance_of(study, name):
    return next(r["chance"] for run in study.runs if name in run.choices for r in run.choices[name].values())


def differences(runs):
    """The tasks that have one name and several files, in words."""
    found, seen = [], {}
    for run in runs:
        for name, records in run.choices.items():
            for record in records.values():
                first, fingerprint = seen.setdefault(name, (run, record["fingerprint"]))
                if fingerprint != record["fingerprint"]:
                    found.append(
                        f"task {name}: fingerprint {fingerprint} in {first.name}, {record['fingerprint']} in {run.name}"
                    )
    return found
