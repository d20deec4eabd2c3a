"""layers.py: the numbers of the layers of a run: SOURCES says where they are, and the functions here read, average and
tabulate them.

The tables of probes (probe.py) have means over the seeds with their 95% t intervals, by layer at the last step, and by
training step:

    adjacent, closest   cos(W_O of a head, minus W_O of the next, or of the closest head of its K/V group); `permuted`:
                        the same for permuted weights; `beyond`: layers whose value permutations rarely reach
    correlation         of the two maps of a pair
    cancelled           share of the attention that the subtraction cancels; negative: share of it that is negative
    effective_rank      of the effective map, of the signal maps and of the noise maps
    lambda              the factor, by class of token
"""

import math

from . import stats
from .compare import by_seed, difference

SOURCES = {  # the records of the layers of a run, in order
    "first": lambda run: run.layers.get(1, {}).values(),  # statistics of the log at step 1
    "last": lambda run: run.layers.get(max(run.layers, default=0), {}).values(),
    "attention": lambda run: ((run.eval or {}).get("attention") or {}).get("layers", []),  # of the evaluation
    "rounding": lambda run: ((run.eval or {}).get("attention_rounding") or {}).get("layers", []),
    "probe": lambda run: run.probes[run.steps]["layers"] if run.steps in run.probes else [],
}


def number(layer, path):
    """The number at a path of keys, "subtraction.adjacent"; None if a part of it is null or missing."""
    for key in path.split("."):
        layer = layer.get(key) if isinstance(layer, dict) else None
    return layer if stats.finite(layer) else None


def combined(layers, path, combine=stats.mean):
    values = [x for layer in layers if (x := number(layer, path)) is not None]
    return combine(values) if values else None


def reader(source, path, combine=stats.mean):
    """A function of a run: the combination over its layers of the finite numbers at a path."""
    return lambda run: combined(SOURCES[source](run), path, combine)


def beyond_permuted(name):
    """A function of a run: a similarity of the weights beyond that of permuted weights."""
    found, chance = reader("probe", PROBES[name]), reader("probe", PROBES[f"{name}_permuted"])
    return lambda run: difference(found(run), chance(run))


# ---- statistics and evaluations

STATISTICS = {
    "last": (
        "lambda_mean lambda_min lambda_max context_rms_mean context_rms_min context_rms_max first_mass_map0 "
        "first_mass_map1 first_mass_effective logit_max residual_max residual_median grad_norm "
        "expert_load_max expert_load_min router_entropy router_logit_max"
    ).split(),
    "attention": (
        "first_mass_map0 first_mass_map1 first_mass_effective sink_rate_map0 sink_rate_map1 sink_rate_effective "
        "logit_max logit_median hidden_max hidden_median"
    ).split(),
}


def layer_table(study, lr):
    """{arm: {"stats" and "eval": {key: one value per layer, the mean over seeds}}} of the last checkpoint."""
    table = {}
    for arm in study.arms:
        runs = study.runs_of(arm, lr)
        ended = [run for run in runs if run.layers and run.state in ("done", "diverged")]
        table[arm] = {"seeds": len(ended), "stats": {}, "eval": {}}
        for name, source, some in (("stats", "last", ended), ("eval", "attention", runs)):
            records = [list(layers) for run in some if (layers := SOURCES[source](run))]
            for key in STATISTICS[source] if records else ():
                values = [[number(layer, key) for layer in layers] for layers in records]
                table[arm][name][key] = list(map(stats.mean_or_none, zip(*values)))
    return table


LATE = 0.75  # share of the steps after which statistics are late


def late_gradient(run, layer=None):
    """The geometric mean of the gradient norms of a layer, or of all layers, over the statistics late in a run."""
    late = [records for step, records in run.layers.items() if step > LATE * run.steps]
    norms = [r.get("grad_norm") for records in late for l, r in records.items() if layer in (None, l)]
    logs = [math.log(x) for x in norms if stats.finite(x) and x > 0]
    return math.exp(stats.mean(logs)) if logs else None


def late_gradients(study):
    """One row per arm and rate: the late gradient norm of each layer, and of all layers the logarithm of the ratio to
    the reference's, paired by seed. Empty with fewer than 4 late statistics per run."""
    done = {(arm, lr): runs for arm, _, lr, runs in study.cells("done")}
    if not done or min(sum(s > LATE * run.steps for s in run.layers) for runs in done.values() for run in runs) < 4:
        return []
    rows, logs = [], lambda runs: by_seed(runs, lambda run: (x := late_gradient(run)) and math.log(x))
    for (arm, lr), runs in done.items():
        layers = sorted({layer for run in runs for records in run.layers.values() for layer in records})
        row = {"arm": arm, "label": study.arms[arm], "lr": lr, "seeds": len(runs)}
        row["layers"] = [stats.mean_or_none([late_gradient(run, layer) for run in runs]) for layer in layers]
        row["all"] = stats.mean_or_none([late_gradient(run) for run in runs])
        other = done.get((study.reference, lr), [])
        row["ratio"] = None if arm == study.reference else stats.as_json(stats.paired_gap(logs(runs), logs(other)))
        rows.append(row)
    return rows


# ---- probes

RARE = 0.05  # p of a permutation test
PROBES = {  # name -> path in a layer of probe.json
    "adjacent": "subtraction.adjacent",
    "adjacent_permuted": "subtraction.adjacent_permuted.mean",
    "closest": "subtraction.closest",
    "closest_permuted": "subtraction.closest_permuted.mean",
    **{name: f"maps.{name}" for name in ("correlation", "cancelled", "negative", "effective_rank")},
    **{name: f"maps.{name}" for name in ("effective_rank_signal", "effective_rank_noise")},
    **{f"lambda_{of}": f"lambda.{of}.mean" for of in ("all", "first", "punctuation", "rare", "other")},
}


def interval(values):
    return stats.as_json(stats.t_interval([x for x in values if stats.finite(x)]))


def beyond(probes, key):
    """(layers of all seeds with p < RARE, layers with a p)."""
    ps = [number(layer, f"subtraction.{key}_p") for layers in probes for layer in layers]
    ps = [p for p in ps if p is not None]
    return [sum(p < RARE for p in ps), len(ps)]


def probe_tables(study, lr):
    """{"layers": {arm: {name: one interval per layer}}, "steps": {arm: [{"step", name: interval}]}, "beyond": ...}
    of the runs at a rate; names without values are left out. None without probes."""
    found = {"layers": {}, "steps": {}, "beyond": {}}
    for arm in study.arms:
        runs = [run for run in study.runs_of(arm, lr) if run.probes]
        last = [layers for run in runs if (layers := SOURCES["probe"](run))]
        if not last:
            continue
        rows = {name: [interval([number(l, path) for l in ls]) for ls in zip(*last)] for name, path in PROBES.items()}
        found["layers"][arm] = {name: row for name, row in rows.items() if any(row)}
        found["steps"][arm] = []
        for step in sorted(set.intersection(*(set(run.probes) for run in runs))):
            at = [run.probes[step]["layers"] for run in runs]
            means = {name: interval([combined(layers, path) for layers in at]) for name, path in PROBES.items()}
            found["steps"][arm].append({"step": step, **{name: e for name, e in means.items() if e}})
        found["beyond"][arm] = {key: beyond(last, key) for key in ("adjacent", "closest")}
    return found if found["layers"] else None
