"""layers.py: tables of the numbers of layers, which metrics.py lists: statistics, evaluations, probes of checkpoints.

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
from .compare import by_seed
from .metrics import LATE, LAYERS, PROBES, SOURCES, combined, late_gradient, number

# ---- statistics and evaluations


def layer_table(study, lr):
    """{arm: {"stats" and "eval": {key: one value per layer, the mean over seeds}}} of the last checkpoint."""
    table = {}
    for arm in study.arms:
        runs = study.runs_of(arm, lr)
        ended = [run for run in runs if run.layers and run.state in ("done", "diverged")]
        table[arm] = {"seeds": len(ended), "stats": {}, "eval": {}}
        for name, (source, numbers) in LAYERS.items():
            some = ended if name == "stats" else runs
            records = [list(layers) for run in some if (layers := SOURCES[source](run))]
            for key in numbers if records else ():
                values = [[number(layer, key) for layer in layers] for layers in records]
                table[arm][name][key] = list(map(stats.mean_or_none, zip(*values)))
    return table


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
