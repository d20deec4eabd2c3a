"""metrics.py: the table of the numbers of runs: where each is read, its unit, and what shows it. Tables, figures,
claims and the CSV file walk it.

SOURCES    where a run has the records of its layers
LAYERS     the numbers of a layer in results.json, and the figures that show them; PROBES: those of probe.json
METRICS    the numbers of a run, from all of its layers or steps
"""

import math
from typing import NamedTuple

from . import stats
from .compare import difference

SOURCES = {  # the records of the layers of a run, in order
    "first": lambda run: run.layers.get(1, {}).values(),  # statistics of the log at step 1
    "last": lambda run: run.layers.get(max(run.layers, default=0), {}).values(),
    "attention": lambda run: ((run.eval or {}).get("attention") or {}).get("layers", []),  # of the evaluation
    "probe": lambda run: run.probes[run.steps]["layers"] if run.steps in run.probes else [],
}


# ---- numbers of a layer


class Figure(NamedTuple):
    """What a figure of a number says, by layer and by step."""

    unit: str
    title: str
    note: str
    log: bool = False


EXPERTS = "of layers with experts."
LAYERS = {  # in results.json: the source, and its numbers
    "stats": (
        "last",
        {
            "lambda_mean": Figure(
                "lambda",
                "Factor of the second map",
                "Mean over tokens and heads, after the sigmoid if the variant has one.",
            ),
            **dict.fromkeys(("lambda_min", "lambda_max")),
            "context_rms_mean": Figure(
                "context RMS",
                "Context RMS",
                "Root mean square of each head's output before o_proj, mean over tokens and heads.",
                True,
            ),
            **dict.fromkeys(("context_rms_min", "context_rms_max", "first_mass_map0", "first_mass_map1")),
            "first_mass_effective": Figure(
                "mass",
                "Attention mass on the first position",
                "Of the effective map |A1 - s A2|, normalized; of A for variants with one map.",
            ),
            "logit_max": Figure(
                "largest |logit|", "Largest attention logit", "On sampled query rows, both maps.", True
            ),
            "residual_max": Figure(
                "largest |activation|", "Largest activation", "Of the residual stream after the layer.", True
            ),
            "residual_median": None,
            "grad_norm": Figure("gradient norm", "Gradient norm by layer", "Before clipping.", True),
            "expert_load_max": Figure(
                "largest load",
                "Load of the busiest expert",
                f"Tokens of the expert that has most of them, relative to an equal share; {EXPERTS}",
            ),
            "expert_load_min": Figure(
                "smallest load",
                "Load of the least used expert",
                f"Tokens of the expert that has fewest of them, relative to an equal share; {EXPERTS}",
            ),
            "router_entropy": Figure(
                "entropy, nats",
                "Entropy of the router",
                f"Of the probabilities of the experts, mean over the tokens; {EXPERTS}",
            ),
            "router_logit_max": Figure("largest |logit|", "Largest logit of the router", EXPERTS.capitalize(), True),
            "selection_agreement": Figure(
                "share of the blocks",
                "Agreement of selected blocks",
                "Share of the blocks that signal heads and noise heads select which both have; of block-sparse "
                "attention that selects apart.",
            ),
        },
    ),
    "eval": (
        "attention",
        dict.fromkeys(
            "first_mass_map0 first_mass_map1 first_mass_effective sink_rate_map0 sink_rate_map1 sink_rate_effective "
            "entropy_map0 entropy_map1 entropy_effective logit_max logit_median hidden_max hidden_median".split()
        ),
    ),
}
FIGURES = {key: shown for _, numbers in LAYERS.values() for key, shown in numbers.items() if shown}
PROBES = {  # name -> path in a layer of probe.json
    "adjacent": "subtraction.adjacent",
    "adjacent_permuted": "subtraction.adjacent_permuted.mean",
    "closest": "subtraction.closest",
    "closest_permuted": "subtraction.closest_permuted.mean",
    **{name: f"maps.{name}" for name in ("correlation", "cancelled", "negative", "effective_rank")},
    **{name: f"maps.{name}" for name in ("effective_rank_signal", "effective_rank_noise")},
    **{f"lambda_{of}": f"lambda.{of}.mean" for of in ("all", "first", "punctuation", "rare", "other")},
}


def number(layer, path):
    """The number at a path of keys, "subtraction.adjacent"; None if a part of it is null or missing."""
    for key in path.split("."):
        layer = layer.get(key) if isinstance(layer, dict) else None
    return layer if stats.finite(layer) else None


# ---- readers of a run


def combined(layers, path, combine=stats.mean):
    """The combination of the number at a path over the layers that have it; None if none has."""
    values = [x for layer in layers if (x := number(layer, path)) is not None]
    return combine(values) if values else None


def reader(source, path, combine=stats.mean):
    """A function of a run: combined() of its layers."""
    return lambda run: combined(SOURCES[source](run), path, combine)


def beyond_permuted(name):
    """A function of a run: a similarity of the weights beyond that of permuted weights."""
    found, chance = reader("probe", PROBES[name]), reader("probe", PROBES[f"{name}_permuted"])
    return lambda run: difference(found(run), chance(run))


def spikes(run, what):
    """stats.spikes() of the losses or the gradient norms of all steps, with and without an update."""
    if run.numbers:
        score, judged = run.numbers.get(f"{what}_spikes"), run.numbers.get(f"{what}_judged", 0)
        return [None] * round((score or 0) * judged / 100), judged, score
    key = {"grad": "grad_norm"}.get(what, what)
    return stats.spikes(stats.z_scores([r.get(key) for r in run.train]))


LATE = 0.75  # share of the steps after which statistics are late


def geometric_mean(values):
    logs = [math.log(x) for x in values if stats.finite(x) and x > 0]
    return math.exp(stats.mean(logs)) if logs else None


def late_gradient(run, layer=None):
    """The geometric mean of the gradient norms of a layer, or of all layers, over the statistics late in a run."""
    late = [records for step, records in run.layers.items() if step > LATE * run.steps]
    return geometric_mean(r.get("grad_norm") for records in late for l, r in records.items() if layer in (None, l))


def norms(run, begin, end):
    """The positive gradient norms of the whole model in a share of the steps."""
    part = [r.get("grad_norm") for r in run.train if begin * run.steps < r["step"] <= end * run.steps]
    return [x for x in part if stats.finite(x) and x > 0]


def growth(run):
    """The geometric mean of the gradient norms of the last quarter of the steps, relative to that of the second."""
    early, late = norms(run, 0.25, 0.5), norms(run, LATE, 1)
    return geometric_mean(late) / geometric_mean(early) if early and late else None


def relative_deviation(run):
    """The deviation of the gradient norms of the last quarter of the steps, relative to their mean."""
    late = norms(run, LATE, 1)
    return stats.deviation(late) / stats.mean(late) if len(late) > 1 else None


def context_use(run):
    """The mean loss in the last half of the window, minus that of the second of its 32 parts."""
    losses = (run.eval or {}).get("loss_by_position") or []
    begin, end = len(losses) // 32, max(len(losses) // 16, 1)
    return difference(*(stats.mean_or_none(part) for part in (losses[len(losses) // 2 :], losses[begin:end])))


# ---- numbers of a run


class Metric(NamedTuple):
    of: object  # function of a run; None: the final loss, which depends on the study
    unit: str = ""
    ratio: bool = False  # positive magnitudes, compared by their logarithms


METRICS = {  # and the columns of the CSV file
    "loss": Metric(None, "nats"),
    "context_use": Metric(context_use, "nats"),
    "grad_spikes": Metric(lambda run: spikes(run, "grad")[2], "% of the steps"),
    "loss_spikes": Metric(lambda run: spikes(run, "loss")[2], "% of the steps"),
    "late_grad_norm": Metric(late_gradient, "", True),
    "grad_growth": Metric(growth, "", True),
    "grad_deviation": Metric(relative_deviation, "", True),
    "logit_max": Metric(reader("attention", "logit_max", combine=max), "", True),
    "logit_median": Metric(reader("attention", "logit_median"), "", True),
    "hidden_max": Metric(reader("attention", "hidden_max", combine=max), "", True),
    "first_mass": Metric(reader("attention", "first_mass_effective"), "of the attention"),
    "sink_rate": Metric(reader("attention", "sink_rate_effective"), "% of the heads"),
    "attention_entropy": Metric(reader("attention", "entropy_effective"), "nats"),
    "initial_context_rms": Metric(reader("first", "context_rms_mean"), "", True),
    "context_rms_min": Metric(reader("last", "context_rms_min", combine=min), "", True),
    "context_rms_max": Metric(reader("last", "context_rms_max", combine=max), "", True),
    "lambda": Metric(reader("last", "lambda_mean")),
    "wo_adjacent": Metric(beyond_permuted("adjacent")),
    "wo_closest": Metric(beyond_permuted("closest")),
}
