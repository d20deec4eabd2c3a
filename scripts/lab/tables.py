"""tables.py: the tables of a report: losses and gaps, spikes, learning rates, seed noise; and of other modules."""

import math
from statistics import median

from . import evaluations, layers, long_context, measurements, metrics, option_history, preconditions, stats
from . import currencies, upcycling
from .compare import correct, estimate
from .study import speed


def main_rate(study):
    """The rate that figures show first: the reference's best, among the rates with the most finished runs."""
    by_eval = study.by_eval()

    def quality(lr):
        losses = [x for run in study.runs_of(study.reference, lr) if (x := run.final_loss(by_eval)) is not None]
        done = sum(run.state == "done" for run in study.runs if run.lr == lr)
        return (-done, stats.mean(losses) if losses else float("inf"), lr)

    return min(study.rates(), key=quality)


def rate_of(runs):
    """The learning rate in words, with changes by a resume."""
    changed = next((run for run in runs if len(option_history.values(run.history, "lr")) > 1), None)
    return changed.over_time("lr") if changed else f"{runs[0].lr:g}"


def final_losses(study, arm, lr):
    """{seed: final loss or None}"""
    by_eval = study.by_eval()
    return {run.seed: run.final_loss(by_eval) for run in study.runs_of(arm, lr)}


def gap(study, arm, lr):
    """The gap of an arm to the reference as JSON."""
    if arm == study.reference:
        return None
    return stats.as_json(stats.paired_gap(*(final_losses(study, a, lr) for a in (arm, study.reference))))


def summary(study):
    """One row per arm and rate, with the gap to the reference at the same rate."""
    rows = []
    for arm, label, lr, runs in study.cells():
        losses, speeds = final_losses(study, arm, lr), [s for run in runs if (s := run.tokens_per_s)]
        states = [run.state for run in runs]
        row = {"arm": arm, "label": label, "lr": lr, "rate": rate_of(runs)}
        row |= {key: getattr(runs[0], key) for key in ("parameters", "active_parameters", "flops_per_token")}
        row |= {"tokens_per_s": median(speeds) if speeds else None, "speed": speed(runs), "tokens": runs[0].tokens}
        row |= {"states": {state: states.count(state) for state in sorted(set(states))}}
        row |= {"losses": {str(seed): loss for seed, loss in losses.items()}}
        row |= {"loss": estimate({seed: loss for seed, loss in losses.items() if loss is not None})}
        row["gap"] = gap(study, arm, lr)
        rows.append(row)
    correct(row["gap"] for row in rows)
    return rows


def headline(study, rows, pairs):
    """Of the rows of summary() one per arm, of its own best rate, with the gap to the reference at its own. pairs: of
    currencies.rows()"""
    by_eval, found = study.by_eval(), []
    own = {arm: currencies.own_runs(study, arm) for arm in study.arms}
    losses = {arm: {seed: run.final_loss(by_eval) for seed, run in runs.items()} for arm, runs in own.items()}
    rate = lambda arm: next((run.lr for run in own[arm].values()), None)
    for arm in study.arms:
        mine = [row for row in rows if row["arm"] == arm]
        row = dict(next((row for row in mine if row["lr"] == (rate(arm) or rate(study.reference))), mine[0]))
        if own[arm] and own[study.reference]:
            row["losses"] = {str(seed): x for seed, x in losses[arm].items()}
            row["loss"] = estimate({seed: x for seed, x in losses[arm].items() if x is not None})
            gap = None if arm == study.reference else stats.paired_gap(losses[arm], losses[study.reference])
            row["gap"] = stats.as_json(gap)
        elif row["lr"] != rate(study.reference):
            row["gap"] = None
        pair = next((pair for pair in pairs if (pair["arm"], pair["other"]) == (arm, study.reference)), None)
        for key, gap in (("gap", row["gap"]), ("gap_flops", pair and pair["FLOPs"]["gap"])):
            row[key] = gap and dict(gap)
        found.append(row)
    for key in ("gap", "gap_flops"):
        correct(row[key] for row in found)
    return found


def spike_rows(study):
    rows = []
    for arm, label, lr, runs in study.cells(having=lambda run: run.train):
        row = {"arm": arm, "label": label, "lr": lr, "rate": rate_of(runs), "runs": len(runs)}
        row["diverged"] = sum(run.state == "diverged" for run in runs)
        for what in ("loss", "grad"):
            counts = [metrics.spikes(run, what) for run in runs]
            found, judged = sum(len(c[0]) for c in counts), sum(c[1] for c in counts)
            row[what] = {"spikes": found, "judged": judged, "score": 100 * found / judged if judged else None}
        rows.append(row)
    return rows


def ladder_rows(study):
    """For arms with several rates: the best and the largest stable rate, and the sensitivity of the loss."""
    by_eval, rows, arms = study.by_eval(), [], {}
    for arm, _, lr, runs in study.cells("done", "diverged"):
        arms.setdefault(arm, {})[lr] = [(run.seed, run.final_loss(by_eval)) for run in runs]
    for arm, ended in arms.items():
        if len(ended) < 2:
            continue
        ladder = {lr: [loss for _, loss in found] for lr, found in ended.items()}
        starts = [run.val[0] for run in study.runs if run.arm == arm and stats.finite(run.val.get(0))]
        stable, open_end = stats.largest_stable(ladder)
        means = {lr: stats.mean(x) for lr, x in ladder.items() if all(map(stats.finite, x))}
        by_seed = []
        for seed in sorted({run.seed for run in study.runs if run.arm == arm}):
            one = {lr: [loss for s, loss in found if s == seed] for lr, found in ended.items()}
            by_seed += [stats.largest_stable(one)[0]] if all(one.values()) else []
        row = {"arm": arm, "label": study.arms[arm], "ladder": {f"{lr:g}": x for lr, x in ladder.items()}}
        row |= {"best": min(means, key=means.get) if means else None, "stable": stable, "bounded_by_ladder": open_end}
        row |= {"stable_by_seed": by_seed}
        row |= {"sensitivity": stats.sensitivity(ladder, stats.mean(starts)) if starts else None}
        rows.append(row)
    return rows


LEAST_TOKENS = 1  # per parameter


def no_verdict(study):
    """Why no gap of the study has a direction, or None."""
    lengths = [run.tokens / run.parameters for run in study.runs if run.parameters]
    if not lengths or max(lengths) >= LEAST_TOKENS:
        return None
    return f"No verdict: the runs have {max(lengths):.2g} tokens per parameter, and a verdict requires {LEAST_TOKENS}."


def withdraw(value):
    """Takes the direction of all gaps in results."""
    if isinstance(value, dict) and "shown" in value:
        value["shown"] = False
    for x in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        withdraw(x)


EFFECT = 0.015  # nats: the smallest difference of interest
POWER = 0.8


def noise_rows(losses, reference):
    """Of {arm: {seed: loss}}: deviations over seeds of losses and of paired gaps, and the seeds that a gap requires: of
    0.02 until its interval is narrower on each side, and of EFFECT to be shown with probability POWER, with the arm's
    own deviation and with the pooled one."""
    rows, pool = [], stats.pooled_deviation(losses, reference)
    needed = lambda sd, gap, **more: None if sd is None else stats.seeds_needed(sd, gap, **more)
    for arm, by_seed in losses.items():
        values = [x for x in by_seed.values() if stats.finite(x)]
        gap = stats.paired_gap(by_seed, losses[reference]) if arm != reference else None
        own = gap.sd if gap else None
        both = math.sqrt(2) * pool.sd if pool and gap else None
        row = {"arm": arm, "sd": stats.deviation(values), "gap_sd": own, "pooled_gap_sd": both}
        row |= {"pooled_df": pool and pool.df, "pooled_arms": pool and len(pool.cells)}
        row |= {"in_pool": bool(pool) and arm in pool.cells, "seeds_for_0.02": needed(own, 0.02)}
        row["seeds_for_effect"] = needed(own, EFFECT, power=POWER)
        row["seeds_pooled"] = needed(both, EFFECT, power=POWER, arms=len(pool.cells) if pool else 2)
        rows += [row] * (len(values) > 1)
    return rows


def noise(study):
    """noise_rows() at each rate."""
    found = [(lr, {arm: final_losses(study, arm, lr) for arm in study.arms}) for lr in study.rates()]
    return [
        {**row, "label": study.arms[row["arm"]], "lr": lr}
        for lr, losses in found
        for row in noise_rows(losses, study.reference)
    ]


def run_row(study, run):
    row = {key: getattr(run, key) for key in ("name", "arm", "lr", "seed")}
    row |= {"gemm": run.options["gemm"], "state": run.state, "steps": run.last, "changes": run.changes}
    row |= {"final_loss": run.final_loss(study.by_eval()), "last_validation": run.last_validation}
    return row | {"tokens_per_s": run.tokens_per_s}


MODEL = "preset layers hidden heads kv-heads head-dim ffn seq-len vocab".split()
TRAINING = "total-batch steps warmup schedule min-lr-ratio weight-decay beta1 beta2 grad-clip gemm".split()


def results(study):
    """All tables as JSON. Those of a study that is too short have no gap with a direction."""
    own, first = currencies.at_own_rates(study), study.runs[0]
    lr = main_rate(own)
    sources = (first.info.get("data") or {}).items()
    found = {
        **{key: getattr(study, key) for key in ("title", "plan", "question", "reference", "arms")},
        "main_lr": lr,
        "confidence": stats.CONFIDENCE,
        "loss_of": study.loss_of(),
        "model": {key: first.options.get(key) for key in MODEL},
        "training": {key: first.options.get(key) for key in TRAINING},
        "data": {which: [{k: v for k, v in s.items() if k != "path"} for s in found] for which, found in sources},
        "data_fingerprint": first.info.get("data_fingerprint"),
        "tokens": first.tokens - first.before,
        "upcycling": upcycling.tables(study, lr),
        "revisions": sorted(set().union(*(run.values_of("revision") for run in study.runs))),
        "devices": sorted({", ".join(run.info.get("devices", [])) for run in study.runs}),
        "runs": [run_row(study, run) for run in study.runs],
        "missing": study.missing,
        "notes": study.notes,
        "summary": summary(study),
        "spikes": spike_rows(study),
        "ladder": ladder_rows(study),
        "layers": layers.layer_table(own, lr),
        "by_position": evaluations.by_position(own, lr),
        "by_frequency": evaluations.by_frequency(own, lr),
        "by_source": evaluations.by_source(own, lr),
        "recall": evaluations.recall(own, lr),
        "noise": noise(own),
        "late_gradients": layers.late_gradients(own),
        "probes": layers.probe_tables(own, lr),
        "tasks": evaluations.choices(own, lr),
        "synthetic": evaluations.synthetic(own, lr),
        "currencies": currencies.rows(study),
        "ngrams": study.ngrams,
        "preconditions": [row for m in measurements.of_study(study, "")[:1] for row in preconditions.rows(m)],
        "long_context": long_context.tables(own, lr),
        "no_verdict": no_verdict(study),
    }
    found["best"] = headline(study, found["summary"], found["currencies"])
    if found["no_verdict"]:
        withdraw(found)
    return found
