"""low_bit.py: what low precision costs each arm: trainings at several --gemm (`precisions` of a plan), and evaluations
with rounded numbers (--quantize).

A cost is a difference of two losses of one seed. Training: the last validation of the run at that precision minus that
of the run at the first precision; also with both evaluated in the same precision. Rounding: the evaluation with rounded
numbers minus that without, of the same checkpoint. The gap of an arm is its cost minus the reference's, paired by seed.
"""

from . import stats

NAMES = {"validation": "validated at its own precision", "evaluation": "both evaluated in fp32"}


def run_at(study, arm, lr, precision):
    """{seed: run} of the finished runs."""
    return {
        run.seed: run
        for run in study.runs + study.others
        if (run.arm, run.lr, run.options["gemm"], run.state) == (arm, lr, precision, "done")
    }


def difference(a, b):
    return a - b if stats.finite(a) and stats.finite(b) else None


def rounded_loss(run, spec):
    return next((q["val_loss"] for q in (run.eval or {}).get("quantized", []) if q["spec"] == spec), None)


def rows(study, costs, **keys):
    """One row per arm, of {arm: {seed: cost}}."""
    found = []
    for arm, label in study.arms.items():
        mine = {seed: x for seed, x in costs[arm].items() if stats.finite(x)}
        if mine:
            gap = None if arm == study.reference else stats.paired_gap(mine, costs[study.reference])
            cost = stats.as_json(stats.t_interval(list(mine.values())))
            by_seed = {str(seed): x for seed, x in mine.items()}
            found.append(
                {**keys, "arm": arm, "label": label, "cost": cost, "gap": stats.as_json(gap), "seeds": by_seed}
            )
    return found


def correct(table):
    """Adds the p values of the gaps in a table, adjusted for their number."""
    for row, p in zip(table, stats.holm([(row["gap"] or {}).get("p") for row in table])):
        if row["gap"]:
            row["gap"]["p_holm"] = p
    return table


def training(study, lr, precisions):
    table = []
    losses = {"validation": lambda run: run.val.get(run.steps), "evaluation": lambda run: (run.eval or {}).get("loss")}
    for precision in precisions[1:]:
        for how, loss in losses.items():
            costs = {}
            for arm in study.arms:
                low, full = (run_at(study, arm, lr, p) for p in (precision, precisions[0]))
                costs[arm] = {s: difference(loss(low[s]), loss(full[s])) for s in low if s in full}
            table += rows(study, costs, precision=precision, how=how)
    return correct(table)


def rounding(study, lr, precisions, specs):
    table = []
    for precision in precisions:
        part = []
        for spec in specs:
            costs = {}
            for arm in study.arms:
                runs = run_at(study, arm, lr, precision).items()
                costs[arm] = {s: difference(rounded_loss(run, spec), (run.eval or {}).get("loss")) for s, run in runs}
            part += rows(study, costs, precision=precision, spec=spec)
        table += correct(part)
    return table


def missing(study, lr, precisions, specs):
    """What the tables lack, one line each."""
    lines = []
    for seed in sorted({run.seed for run in study.runs + study.others}):
        for arm in study.arms:
            for precision in precisions:
                run = run_at(study, arm, lr, precision).get(seed)
                if not run:
                    lines.append(f"{arm} in {precision}, seed {seed}: no finished run")
                elif specs and not run.eval:
                    lines.append(f"{run.name}: no evaluation")
                elif absent := [spec for spec in specs if not stats.finite(rounded_loss(run, spec))]:
                    lines.append(f"{run.name}: no loss at {', '.join(absent)}")
    return lines


def tables(study, lr):
    """The tables of the section, or None if the runs have one precision and no rounded evaluation."""
    everything = study.runs + study.others
    present = {run.options["gemm"] for run in everything}
    precisions = study.precisions or sorted(present)
    specs = list(dict.fromkeys(q["spec"] for run in everything for q in (run.eval or {}).get("quantized", [])))
    if not study.precisions and not specs:
        return None
    return {
        "precisions": precisions,
        "lr": lr,
        "training": training(study, lr, precisions),
        "rounding": rounding(study, lr, precisions, specs),
        "missing": missing(study, lr, precisions, specs),
    }
