"""low_bit.py: what low precision costs each arm: trainings at several --gemm (`precisions` of a plan), and evaluations
with rounded numbers (--quantize).

A cost is a difference of two losses of one seed. Training: the loss of the run at that precision minus that of the run
at the first precision. Rounding: the loss with rounded numbers minus the loss without, of the same checkpoint. The gap
of an arm is its cost minus that of the reference, paired by seed. The magnitudes that rounding depends on are compared
in the same way.
"""

from . import stats

LOSSES = {  # of a run: what is compared, and how to get it
    "validated at its own precision": lambda run: run.last_validation,
    "both evaluated in fp32": lambda run: (run.eval or {}).get("loss"),
}
MEASURED = {  # of an evaluation: the part, the keys of a layer (the first that is not null), the function of the layers
    "largest attention logit": ("attention", ("logit_max",), max),
    "largest activation": ("attention", ("hidden_max",), max),
    "bf16 error of a head, mean": ("attention_rounding", ("heads_mean",), stats.mean),
    "bf16 error of a head, largest": ("attention_rounding", ("heads_max",), max),
    "bf16 error of an output, mean": ("attention_rounding", ("combined_mean", "heads_mean"), stats.mean),
    "bf16 error of an output, largest": ("attention_rounding", ("combined_max", "heads_max"), max),
    "bf16 error with bf16 q, k, v, mean": (
        "attention_rounding",
        ("combined_of_inputs_mean", "heads_of_inputs_mean"),
        stats.mean,
    ),
}


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
    for precision in precisions[1:]:
        for what, loss in LOSSES.items():
            costs = {}
            for arm in study.arms:
                low, full = (run_at(study, arm, lr, p) for p in (precision, precisions[0]))
                of = lambda runs: {s: loss(run) for s, run in runs.items()}
                costs[arm] = stats.paired(of(low), of(full))
            table += rows(study, costs, precision=precision, what=what)
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
            part += rows(study, costs, precision=precision, what=spec)
        table += correct(part)
    return table


def measured(study, lr, precisions):
    table = []
    for precision in precisions:
        part = []
        for what, place in MEASURED.items():
            values = {}
            for arm in study.arms:
                runs = run_at(study, arm, lr, precision).items()
                values[arm] = {s: over_layers(run.eval or {}, *place) for s, run in runs}
            part += rows(study, values, precision=precision, what=what)
        table += correct(part)
    return table


def over_layers(evaluation, part, keys, over):
    layers = evaluation.get(part, {}).get("layers", [])
    found = [next((layer[key] for key in keys if stats.finite(layer.get(key))), None) for layer in layers]
    return over(found) if found and None not in found else None


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
    done = [q["spec"] for run in everything for q in (run.eval or {}).get("quantized", [])]
    specs = list(dict.fromkeys(study.quantize + done))
    if not study.precisions and not specs:
        return None
    return {
        "precisions": precisions,
        "lr": lr,
        "training": training(study, lr, precisions),
        "rounding": rounding(study, lr, precisions, specs),
        "measured": measured(study, lr, precisions),
        "missing": missing(study, lr, precisions, specs),
    }
