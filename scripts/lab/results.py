"""results.py: the numbers of a report as JSON: estimates, differences and tables of numbers of each study.

An estimate is {mean, half, n, sd, p, df}: the mean over seeds and half the width of its t interval. A difference is an
estimate of arm minus reference, paired by seed; `p_holm` is its p after Holm's correction for all differences of its
kind in the report. It is `shown`, and has a direction, if p_holm is below 0.05 with 5 seeds or more, in runs of at
least one token per parameter.
"""

from statistics import median

from . import option_history, stats
from .runs import LAYERS, position_ranges
from .study import difference_at_equal_flops

LEAST_SEEDS = 5
LEAST_TOKENS = 1  # per parameter
COMMON = "preset layers hidden heads kv-heads head-dim ffn seq-len vocab total-batch steps warmup schedule min-lr-ratio"
COMMON += " optimizer weight-decay beta1 beta2 grad-clip matmul-dtype"  # options that a report states if they are equal


def estimate(values):
    """The estimate of {seed: value}, over its finite values; None without one."""
    return stats.t_interval([x for x in values.values() if stats.finite(x)])


def tokens_per_parameter(study):
    return max((run.tokens / run.parameters for run in study.runs if run.parameters), default=None)


def correct(differences):
    """Adds p_holm and `shown` to the differences [(Study, estimate)] of one kind."""
    differences = [(study, e) for study, e in differences if e]
    for (study, e), p in zip(differences, stats.holm([e["p"] for _, e in differences])):
        enough = e["n"] >= LEAST_SEEDS and (tokens_per_parameter(study) or LEAST_TOKENS) >= LEAST_TOKENS
        e |= {"p_holm": p, "shown": p is not None and p < 1 - stats.CONFIDENCE and enough}


# ---- one row per arm, or per arm and rate


def spikes(runs):
    """{loss, grad_norm: spikes, judged steps and their score in percent}"""
    found = {}
    for key in ("loss", "grad_norm"):
        count, judged = (sum(run.spikes[key][i] for run in runs) for i in (0, 1))
        found[key] = {"spikes": count, "judged": judged, "score": 100 * count / judged if judged else None}
    return found


def speed(runs):
    """Tokens/s of runs on one kind of machine: the medians of their medians and limits; None without one."""
    found = [run.speed for run in runs if run.speed]
    return {key: median([s[key] for s in found]) for key in ("median", "low", "high")} if found else None


def facts(study, arm, runs):
    states = [run.state for run in runs]
    return {
        "arm": arm,
        "label": study.arms[arm],
        "rate": runs[0].rate,
        "runs": {state: states.count(state) for state in sorted(set(states))},
        "spikes": spikes(runs),
        "speed": speed(runs),
        **{key: getattr(runs[0], key) for key in ("tokens", "parameters", "active_parameters", "flops_per_token")},
    }


def row_of(study, arm, own):
    """The row of an arm at its own rate; at the reference's if it has none."""
    by_eval, reference = study.by_eval(), own[study.reference]
    losses = {seed: run.final_loss(by_eval) for seed, run in own[arm].items()}
    same_tokens = [seed for seed, run in own[arm].items() if seed in reference and run.tokens == reference[seed].tokens]
    others = {seed: reference[seed].final_loss(by_eval) for seed in same_tokens}
    flops, designed = {}, []
    for seed in own[arm].keys() & reference.keys() if arm != study.reference else ():
        flops[seed], by_design = difference_at_equal_flops(own[arm][seed], reference[seed], by_eval)
        designed.append(by_design)
    rate = study.own_rate(arm) or study.own_rate(study.reference)
    runs = list(own[arm].values()) or study.runs_of(arm, rate) or [run for run in study.runs if run.arm == arm]
    return facts(study, arm, runs) | {
        "losses": {str(seed): loss for seed, loss in losses.items()},
        "loss": estimate(losses),
        "difference": stats.paired_gap(losses, others) if arm != study.reference else None,
        "difference_flops": estimate(flops),
        "flops_by_design": all(designed),
    }


def arms(study):
    own = {arm: study.own_runs(arm) for arm in study.arms}
    return [row_of(study, arm, own) for arm in study.arms]


def rates(study):
    """One row per arm and rate, with the difference to the reference at the same rate."""
    rows = []
    for arm in study.arms:
        for rate in study.rates():
            if runs := study.runs_of(arm, rate):
                losses = study.losses(arm, rate)
                other = study.losses(study.reference, rate) if arm != study.reference else {}
                found = {"loss": estimate(losses), "difference": stats.paired_gap(losses, other)}
                rows.append(facts(study, arm, runs) | {"losses": {str(s): x for s, x in losses.items()}} | found)
    return rows


def stability(study):
    """Of arms with several rates: the best and the largest stable rate, and the sensitivity of the loss to the rate."""
    rows = []
    for arm in study.arms:
        ended = {rate: study.losses(arm, rate) for rate in study.rates()}
        states = {(run.rate, run.seed) for run in study.runs if run.arm == arm and run.state in ("done", "diverged")}
        ended = {rate: {s: x for s, x in of.items() if (rate, s) in states} for rate, of in ended.items()}
        ladder = {rate: list(of.values()) for rate, of in ended.items() if of}
        if len(ladder) < 2:
            continue
        stable, bounded = stats.largest_stable(ladder)
        starts = [x for run in study.runs if run.arm == arm and stats.finite(x := run.validation_at(0))]
        seeds = sorted({seed for of in ended.values() for seed in of})
        each = [{rate: [ended[rate][seed]] for rate in ladder if seed in ended[rate]} for seed in seeds]
        row = {"arm": arm, "label": study.arms[arm], "best": study.own_rate(arm), "stable": stable}
        row |= {"bounded_by_ladder": bounded, "ladder": {f"{rate:g}": losses for rate, losses in ladder.items()}}
        row["stable_by_seed"] = [stats.largest_stable(one)[0] for one in each if len(one) == len(ladder)]
        row["sensitivity"] = stats.sensitivity(ladder, stats.mean(starts)) if starts else None
        rows.append(row)
    return rows


# ---- over tokens, positions and layers


def curves(study, own):
    """{arm: [{tokens, loss, difference}]} of the validations that all runs of an arm have."""
    found = {}
    for arm, runs in own.items():
        of = {seed: run.validated for seed, run in runs.items()}
        other = {seed: run.validated for seed, run in own[study.reference].items() if arm != study.reference}
        at = sorted(set.intersection(*map(set, of.values()))) if of else []
        losses = lambda which, tokens: {seed: points.get(tokens) for seed, points in which.items()}
        found[arm] = [
            {
                "tokens": t,
                "loss": estimate(losses(of, t)),
                "difference": stats.paired_gap(losses(of, t), losses(other, t)),
            }
            for t in at
        ]
    return found


def positions(study, own):
    """{arm: [{begin, end, loss, difference}]} by position in the window, in powers of two."""
    lengths = {run.options["seq-len"] for runs in own.values() for run in runs.values() if run.positions}
    ranges = position_ranges(*lengths) if len(lengths) == 1 else []
    at = lambda runs, i: {s: run.positions[i] for s, run in runs.items() if len(run.positions) == len(ranges)}
    found = {}
    for arm, runs in own.items():
        rows = []
        for i, (begin, end) in enumerate(ranges):
            other = at(own[study.reference], i) if arm != study.reference else {}
            rows.append({"begin": begin, "end": end, "loss": estimate(at(runs, i))})
            rows[-1]["difference"] = stats.paired_gap(at(runs, i), other)
        found[arm] = [row for row in rows if row["loss"]]
    return found


def layers(study, own):
    """{statistic: {arm: {"layers": an estimate for each layer at the last step, "steps": [[tokens, mean over layers and
    seeds]]}}}"""
    found = {}
    for key in LAYERS:
        for arm, runs in own.items():
            having = {seed: run for seed, run in runs.items() if run.layers.get(key)}
            depth = min((len(run.layers[key][-1]) for run in having.values()), default=0)
            last = [estimate({s: run.layers[key][-1][i] for s, run in having.items()}) for i in range(depth)]
            steps = []
            for run in having.values():
                for step, row in zip(run.layers["step"], run.layers[key]):
                    steps.append((run.tokens_at(step), stats.mean_or_none(row)))
            means = [[t, stats.mean_or_none([x for at, x in steps if at == t])] for t in sorted({t for t, _ in steps})]
            if any(last):
                found.setdefault(key, {})[arm] = {"layers": last, "steps": means}
    return found


# ---- settings and runs


def settings(study):
    """{differ: the options that differ between arms, by arm; common: some that are equal}, of the first run of each."""
    first = {arm: next(run for run in study.runs if run.arm == arm) for arm in study.arms}
    ignored = {"out", "seed", "lr", "init", "command_line"}
    names = sorted({name for run in first.values() for name in run.options} - ignored)
    value = lambda run, name: option_history.over_time(option_history.values(run.history, name))
    rows = {name: {arm: value(run, name) for arm, run in first.items()} for name in names}
    differ = {name: row for name, row in rows.items() if len(set(row.values())) > 1}
    common = {name: rows[name][study.reference] for name in COMMON.split() if name in rows and name not in differ}
    return {"differ": differ, "common": common}


def run_row(study, run):
    row = {key: getattr(run, key) for key in ("name", "arm", "rate", "seed", "state", "steps", "changes")}
    row |= {"step": run.last, "loss": run.final_loss(study.by_eval()), "last_validation": run.last_validation}
    row |= {"tokens_per_s": run.speed and run.speed["median"], "revision": run.info.get("revision")}
    return row | {"machine": run.machine, "tokens": run.tokens}


def of_study(study):
    own, first = {arm: study.own_runs(arm) for arm in study.arms}, study.runs[0]
    return {
        "name": study.name,
        "plan": study.plan,
        "title": study.title,
        "question": study.lab.get("question", ""),
        "reference": study.reference,
        "labels": study.arms,
        "loss_of": study.loss_of(),
        "tokens": first.tokens,
        "tokens_per_parameter": tokens_per_parameter(study),
        "data_fingerprint": first.info.get("data_fingerprint"),
        "sweep_seeds": sorted(study.swept),
        "arms": arms(study),
        "rates": rates(study),
        "stability": stability(study),
        "curves": curves(study, own),
        "positions": positions(study, own),
        "layers": layers(study, own),
        "settings": settings(study),
        "runs": [run_row(study, run) for run in study.runs],
        "missing": study.missing,
        "notes": study.notes + [f"Differs between runs: {line}." for line in study.problems[:20]],
    }


def of(studies):
    """The results of all studies of a report, with the corrected p of their differences."""
    found = [of_study(study) for study in studies]
    for table, key in (("arms", "difference"), ("arms", "difference_flops"), ("rates", "difference")):
        correct([(s, row[key]) for s, r in zip(studies, found) for row in r[table]])
    return {"confidence": stats.CONFIDENCE, "studies": found}
