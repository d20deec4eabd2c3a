"""tables.py: the tables of a report: losses and gaps, spikes, learning rates, layers, positions, recall, seed noise."""

import math
from statistics import median

from . import long_context, low_bit, mechanisms, option_history, stats, synthetic, tasks
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


def pooled_noise(study, lr):
    """The stats.Pool of the losses at a rate; None without several seeds of several arms."""
    return stats.pooled_deviation({arm: final_losses(study, arm, lr) for arm in study.arms}, study.reference)


def gap(study, arm, lr, pooled):
    """The gaps of an arm to the reference as JSON: with its own deviation, and with the pooled one."""
    if arm == study.reference:
        return None, None
    losses = {a: final_losses(study, a, lr) for a in (arm, study.reference)}
    estimates = stats.paired_gap(*losses.values()), stats.pooled_gap(losses, *losses, pooled)
    return tuple(map(stats.as_json, estimates))


def summary(study):
    """One row per arm and rate, with the gap to the reference at the same rate."""
    rows, pooled = [], {lr: pooled_noise(study, lr) for lr in study.rates()}
    for arm, label in study.arms.items():
        for lr in study.rates():
            runs = study.runs_of(arm, lr)
            if not runs:
                continue
            losses = final_losses(study, arm, lr)
            own, with_pool = gap(study, arm, lr, pooled[lr])
            speeds = [s for run in runs if (s := run.tokens_per_s)]
            done = [x for x in losses.values() if x is not None]
            rows.append(
                {
                    "arm": arm,
                    "label": label,
                    "lr": lr,
                    "rate": rate_of(runs),
                    "parameters": runs[0].parameters,
                    "active_parameters": runs[0].active_parameters,
                    "flops_per_token": runs[0].flops_per_token,
                    "tokens_per_s": median(speeds) if speeds else None,
                    "speed": speed(runs),
                    "tokens": runs[0].tokens,
                    "states": {
                        state: sum(run.state == state for run in runs) for state in sorted({run.state for run in runs})
                    },
                    "losses": {str(seed): loss for seed, loss in losses.items()},
                    "loss": stats.as_json(stats.t_interval(done)),
                    "gap": own,
                    "gap_pooled": with_pool,
                }
            )
    adjusted = stats.holm([(row["gap"] or {}).get("p") for row in rows])
    for row, p in zip(rows, adjusted):
        if row["gap"]:
            row["gap"]["p_holm"] = p
    return rows


def spikes(run, what):
    """stats.spikes() of the losses or the gradient norms of all steps, with and without an update."""
    key = {"grad": "grad_norm"}.get(what, what)
    return stats.spikes(stats.z_scores([r.get(key) for r in run.train]))


def spike_rows(study):
    rows = []
    for arm, label in study.arms.items():
        for lr in study.rates():
            runs = [run for run in study.runs_of(arm, lr) if run.train]
            if not runs:
                continue
            row = {
                "arm": arm,
                "label": label,
                "lr": lr,
                "rate": rate_of(runs),
                "runs": len(runs),
                "diverged": sum(run.state == "diverged" for run in runs),
            }
            for what in ("loss", "grad"):
                counts = [spikes(run, what) for run in runs]
                judged, found = sum(c[1] for c in counts), sum(len(c[0]) for c in counts)
                row[what] = {
                    "spikes": found,
                    "judged": judged,
                    "score": 100 * found / judged if judged else None,
                    "by_run": stats.as_json(stats.t_interval([c[2] for c in counts if c[2] is not None])),
                }
            rows.append(row)
    return rows


def ladder_rows(study):
    """For arms with several rates: the best and the largest stable rate, and the sensitivity of the loss."""
    by_eval, rows = study.by_eval(), []
    for arm, label in study.arms.items():
        ladder = {}
        for lr in study.rates():
            ended = [run for run in study.runs_of(arm, lr) if run.state in ("done", "diverged")]
            if ended:
                ladder[lr] = [run.final_loss(by_eval) for run in ended]
        if len(ladder) < 2:
            continue
        starts = [run.val[0] for run in study.runs if run.arm == arm and stats.finite(run.val.get(0))]
        stable, open_end = stats.largest_stable(ladder)
        means = {lr: stats.mean(x) for lr, x in ladder.items() if all(map(stats.finite, x))}
        by_seed = []
        for seed in sorted({run.seed for run in study.runs if run.arm == arm}):
            one = {
                lr: [
                    run.final_loss(by_eval)
                    for run in study.runs_of(arm, lr)
                    if run.seed == seed and run.state in ("done", "diverged")
                ]
                for lr in ladder
            }
            if all(one.values()):
                by_seed.append(stats.largest_stable(one)[0])
        rows.append(
            {
                "arm": arm,
                "label": label,
                "ladder": {f"{lr:g}": x for lr, x in ladder.items()},
                "best": min(means, key=means.get) if means else None,
                "stable": stable,
                "bounded_by_ladder": open_end,
                "stable_by_seed": by_seed,
                "sensitivity": stats.sensitivity(ladder, stats.mean(starts)) if starts else None,
            }
        )
    return rows


STATS_KEYS = (
    "lambda_mean lambda_min lambda_max context_rms_mean context_rms_min context_rms_max first_mass_map0 "
    "first_mass_map1 first_mass_effective logit_max residual_max residual_median grad_norm "
    "expert_load_max expert_load_min router_entropy router_logit_max"
).split()
EVAL_KEYS = (
    "first_mass_map0 first_mass_map1 first_mass_effective sink_rate_map0 sink_rate_map1 sink_rate_effective "
    "logit_max logit_median hidden_max hidden_median"
).split()


def layer_table(study, lr):
    """{arm: {"stats" and "eval": {key: one value per layer, the mean over seeds}}} of the last checkpoint."""
    table = {}
    for arm in study.arms:
        runs = study.runs_of(arm, lr)
        last = [run.layers[max(run.layers)] for run in runs if run.layers and run.state in ("done", "diverged")]
        measured = [run.eval["attention"]["layers"] for run in runs if run.eval and run.eval.get("attention")]
        table[arm] = {"seeds": len(last), "stats": {}, "eval": {}}
        for key in STATS_KEYS if last else ():
            table[arm]["stats"][key] = [
                stats.mean_or_none([layers[l].get(key) for layers in last if l in layers]) for l in sorted(last[0])
            ]
        for key in EVAL_KEYS if measured else ():
            table[arm]["eval"][key] = [
                stats.mean_or_none([layers[l].get(key) for layers in measured]) for l in range(min(map(len, measured)))
            ]
    return table


LATE = 0.75  # share of the steps after which statistics are late


def late_gradient(run, layer=None):
    """The geometric mean of the gradient norms of a layer, or of all layers, over the statistics late in a run."""
    norms = [
        record.get("grad_norm")
        for step, layers in run.layers.items()
        if step > LATE * run.steps
        for record in layers.values()
        if layer in (None, record["layer"])
    ]
    logs = [math.log(x) for x in norms if stats.finite(x) and x > 0]
    return math.exp(stats.mean(logs)) if logs else None


def late_gradients(study):
    """One row per arm and rate: the late gradient norm of each layer, and of all layers the logarithm of the ratio to
    the reference's, paired by seed. Empty with fewer than 4 late statistics per run."""
    rows, reference = [], study.reference
    done = [run for run in study.runs if run.state == "done"]
    if not done or min(sum(step > LATE * run.steps for step in run.layers) for run in done) < 4:
        return []
    for arm, label in study.arms.items():
        for lr in study.rates():
            runs = [run for run in study.runs_of(arm, lr) if run.state == "done"]
            logs = lambda runs: {run.seed: math.log(x) for run in runs if (x := late_gradient(run))}
            other = [run for run in study.runs_of(reference, lr) if run.state == "done"]
            layers = sorted({layer for run in runs for layers in run.layers.values() for layer in layers})
            rows.append(
                {
                    "arm": arm,
                    "label": label,
                    "lr": lr,
                    "seeds": len(runs),
                    "layers": [stats.mean_or_none([late_gradient(run, layer) for run in runs]) for layer in layers],
                    "all": stats.mean_or_none([late_gradient(run) for run in runs]),
                    "ratio": None if arm == reference else stats.as_json(stats.paired_gap(logs(runs), logs(other))),
                }
            )
    return rows


def evaluated(study, arm, lr, get):
    """{seed: get(eval)} of the evaluated runs of an arm, if it is a finite number."""
    values = {run.seed: get(run.eval) for run in study.runs_of(arm, lr) if run.eval}
    return {seed: x for seed, x in values.items() if stats.finite(x)}


def position_bins(T):
    bins, begin = [], 0
    while begin < T:
        end = min(T, 2 * begin if begin else 1)
        bins.append((begin, end))
        begin = end
    return bins


def by_position(study, lr):
    """{arm: rows (begin, end, loss, gap)} of positions in powers of two."""
    lengths = {len(run.eval["loss_by_position"]) for run in study.runs if run.eval and run.eval.get("loss_by_position")}
    if len(lengths) != 1:
        return {}
    table = {}
    for arm in study.arms:
        rows = []
        for begin, end in position_bins(next(iter(lengths))):
            get = lambda e: stats.mean_or_none(e["loss_by_position"][begin:end])
            mine, other = evaluated(study, arm, lr, get), evaluated(study, study.reference, lr, get)
            if mine:
                rows.append(
                    {
                        "begin": begin,
                        "end": end,
                        "loss": stats.as_json(stats.t_interval(list(mine.values()))),
                        "gap": None if arm == study.reference else stats.as_json(stats.paired_gap(mine, other)),
                    }
                )
        if rows:
            table[arm] = rows
    return table


def recall(study, lr):
    """{arm: rows} of the cells of the recall task."""
    cells = next(
        (
            [(c["pairs"], c["noise"]) for c in run.eval["recall"]]
            for run in study.runs
            if run.eval and run.eval.get("recall")
        ),
        [],
    )
    table = {}
    for arm in study.arms:
        rows = []
        for pairs, noise in cells:
            row = {"pairs": pairs, "noise": noise}
            for key in ("exact", "among_values", "loss"):
                get = lambda e: next(
                    (c[key] for c in e.get("recall", []) if (c["pairs"], c["noise"]) == (pairs, noise)), None
                )
                mine, other = evaluated(study, arm, lr, get), evaluated(study, study.reference, lr, get)
                row[key] = stats.as_json(stats.t_interval(list(mine.values())))
                row[f"{key}_gap"] = None if arm == study.reference else stats.as_json(stats.paired_gap(mine, other))
            if row["exact"] and row["among_values"]:
                rows.append(row)
        if rows:
            table[arm] = rows
    return table


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


def results(study):
    """All tables as JSON."""
    lr = main_rate(study)
    first = study.runs[0]
    return {
        "title": study.title,
        "plan": study.plan,
        "question": study.question,
        "reference": study.reference,
        "arms": study.arms,
        "main_lr": lr,
        "confidence": stats.CONFIDENCE,
        "loss_of": study.loss_of(),
        "model": {
            k: first.options.get(k)
            for k in ("preset", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "seq-len", "vocab")
        },
        "training": {
            k: first.options.get(k)
            for k in ("total-batch steps warmup schedule min-lr-ratio weight-decay beta1 beta2 grad-clip gemm").split()
        },
        "data": {
            which: [{k: v for k, v in source.items() if k != "path"} for source in sources]
            for which, sources in (first.info.get("data") or {}).items()
        },
        "data_fingerprint": first.info.get("data_fingerprint"),
        "tokens": first.tokens,
        "revisions": sorted(set().union(*(run.values_of("revision") for run in study.runs))),
        "devices": sorted({", ".join(run.info.get("devices", [])) for run in study.runs}),
        "runs": [
            {
                "name": run.name,
                "arm": run.arm,
                "lr": run.lr,
                "seed": run.seed,
                "gemm": run.options["gemm"],
                "state": run.state,
                "steps": len(run.train),
                "changes": run.changes,
                "final_loss": run.final_loss(study.by_eval()),
                "last_validation": run.val.get(run.steps),
                "tokens_per_s": run.tokens_per_s,
            }
            for run in study.runs + study.others
        ],
        "missing": study.missing,
        "notes": study.notes,
        "summary": summary(study),
        "spikes": spike_rows(study),
        "ladder": ladder_rows(study),
        "layers": layer_table(study, lr),
        "by_position": by_position(study, lr),
        "recall": recall(study, lr),
        "noise": noise(study),
        "late_gradients": late_gradients(study),
        "probes": mechanisms.tables(study, lr),
        "groups": study.groups,
        "tasks": tasks.tables(study, lr),
        "synthetic": synthetic.tables(study, lr),
        "low_bit": low_bit.tables(study, lr),
        "long_context": long_context.tables(study, lr),
    }
