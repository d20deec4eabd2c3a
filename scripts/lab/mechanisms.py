"""mechanisms.py: the probes of checkpoints (--probe), as tables: by layer at the last step, and by training step.

    adjacent, closest   cos(W_O of a head, minus W_O of the next, or of the closest head of its K/V group); `permuted`:
                        the same for permuted weights; `beyond`: layers whose value permutations rarely reach
    correlation         of the two maps of a pair
    cancelled           share of the attention that the subtraction cancels; negative: share of it that is negative
    effective_rank      of the effective map, of the signal maps and of the noise maps
    lambda              the factor, by class of token

Values are means over the seeds with their 95% t intervals.
"""

from . import stats

RARE = 0.05  # p of a permutation test
NUMBERS = {  # name -> path in a layer of probe.json
    "adjacent": ("subtraction", "adjacent"),
    "adjacent_permuted": ("subtraction", "adjacent_permuted", "mean"),
    "closest": ("subtraction", "closest"),
    "closest_permuted": ("subtraction", "closest_permuted", "mean"),
    **{name: ("maps", name) for name in ("correlation", "cancelled", "negative", "effective_rank")},
    "effective_rank_signal": ("maps", "effective_rank_signal"),
    "effective_rank_noise": ("maps", "effective_rank_noise"),
    **{f"lambda_{of}": ("lambda", of, "mean") for of in ("all", "first", "punctuation", "rare", "other")},
}


def number(layer, path):
    """The number at a path of keys; None if a part of it is null or missing."""
    for key in path:
        layer = layer.get(key) if isinstance(layer, dict) else None
    return layer if stats.finite(layer) else None


def mean_over_layers(probe, name):
    return stats.mean_or_none([number(layer, NUMBERS[name]) for layer in probe["layers"]])


def interval(values):
    return stats.as_json(stats.t_interval([x for x in values if stats.finite(x)]))


def beyond(probes, key):
    """(layers of all seeds with p < RARE, layers with a p)."""
    ps = [number(layer, ("subtraction", key)) for probe in probes for layer in probe["layers"]]
    ps = [p for p in ps if p is not None]
    return [sum(p < RARE for p in ps), len(ps)]


def tables(study, lr):
    """{"layers": {arm: {name: one interval per layer}}, "steps": {arm: [{"step", name: interval}]}, "beyond": ...}
    of the runs at a rate; names without values are left out. None without probes."""
    found = {"layers": {}, "steps": {}, "beyond": {}}
    for arm in study.arms:
        runs = [run for run in study.runs_of(arm, lr) if run.probes]
        last = [run.probes[run.steps] for run in runs if run.steps in run.probes]
        if not last:
            continue
        depth = min(len(probe["layers"]) for probe in last)
        rows = {
            name: [interval([number(probe["layers"][l], path) for probe in last]) for l in range(depth)]
            for name, path in NUMBERS.items()
        }
        found["layers"][arm] = {name: row for name, row in rows.items() if any(row)}
        steps = sorted(set.intersection(*(set(run.probes) for run in runs)))
        found["steps"][arm] = [
            {
                "step": step,
                **{name: interval([mean_over_layers(run.probes[step], name) for run in runs]) for name in rows},
            }
            for step in steps
        ]
        for row in found["steps"][arm]:
            for name in [name for name, value in row.items() if value is None]:
                del row[name]
        found["beyond"][arm] = {key: beyond(last, f"{key}_p") for key in ("adjacent", "closest")}
    return found if found["layers"] else None
