"""low_bit.py: what low precision costs each arm: trainings at several --gemm (`precisions` of a plan), and evaluations
with rounded numbers (--quantize).

A cost is a difference of two losses of one seed. Training: the loss of the run at that precision minus that of the run
at the first precision. Rounding: the loss with rounded numbers minus the loss without, of the same checkpoint. The gap
of an arm is its cost minus that of the reference, paired by seed. The magnitudes that rounding depends on are compared
in the same way.
"""

from . import stats
from .compare import by_seed, compared, correct, difference, shown_seeds
from .metrics import METRICS


def run_at(study, arm, lr, precision):
    """{seed: run} of the finished runs."""
    return {
        run.seed: run
        for run in study.runs + study.others
        if (run.arm, run.lr, run.options["gemm"], run.state) == (arm, lr, precision, "done")
    }


def rounded_loss(run, spec):
    return next((q["val_loss"] for q in (run.eval or {}).get("quantized", []) if q["spec"] == spec), None)


def rows(study, costs, **keys):
    """One row per arm that has {seed: cost} = costs(arm)."""
    for arm, label in study.arms.items():
        row = {**keys, "arm": arm, "label": label, **compared(study, arm, costs, "cost")}
        if row["cost"]:
            yield row | {"seeds": shown_seeds(costs(arm))}


def compare(study, lr, precisions, readers):
    """The rows of functions of a run, {what: reader}, at each precision, with p adjusted over all of them."""
    table = []
    for precision in precisions:
        for what, read in readers.items():
            values = lambda arm: by_seed(run_at(study, arm, lr, precision).values(), read)
            table += rows(study, values, precision=precision, what=what)
    correct(row["gap"] for row in table)
    return table


def training(study, lr, precisions):
    def cost(loss):
        first = lambda run: run_at(study, run.arm, lr, precisions[0]).get(run.seed)
        return lambda run: difference(loss(run), loss(at_first)) if (at_first := first(run)) else None

    return compare(study, lr, precisions[1:], {what: cost(m.of) for what, m in METRICS["training"].items()})


def evaluated(study, lr, precisions, readers):
    """As compare(), with p adjusted at each precision."""
    return [row for precision in precisions for row in compare(study, lr, [precision], readers)]


def rounding(study, lr, precisions, specs):
    cost = lambda spec: lambda run: difference(rounded_loss(run, spec), (run.eval or {}).get("loss"))
    return evaluated(study, lr, precisions, {spec: cost(spec) for spec in specs})


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
        "measured": evaluated(study, lr, precisions, {what: m.of for what, m in METRICS["measured"].items()}),
        "missing": missing(study, lr, precisions, specs),
    }
