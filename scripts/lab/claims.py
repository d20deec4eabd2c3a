"""claims.py: the claims of scripts/lab/claims, and their verdicts from the runs of a plan.

A claim has the keys claim, source, plan, metric, arms (`A - B`, or `A` alone), expect, effect (the smallest effect of
interest), seeds (fewest for a verdict), and optionally requires (`ARM X`: the mean of the metric in that arm must be at
least X for the claim to be testable). metric = elsewhere has `measured` instead: where the numbers are.

    d = metric of A - metric of B at the same seed (mean over the rates of the plan), or the metric of A alone
    [low, high] = the two-sided 95% interval of the mean of d over the seeds;  e = effect

    expect       supported                   contradicted
    below        high < 0 and low <= -e      low > -e and high >= 0
    above        low > 0 and high >= e       high < e and low <= 0
    equal        -e < low and high < e       0 is outside [low, high], which reaches -e or e
    not above    high < e                    low > 0 and high >= e
    not below    low > -e                    high < 0 and low <= -e

Everything else is "not shown". So an interval that contains 0 and reaches the effect shows nothing, and a difference
that is shown but too small for the claim is neither supported nor contradicted.
`equal` is two one-sided tests, at 2.5% each.

The interval of a loss difference uses the deviation that is pooled over the arms of the plan (stats.pooled_interval),
unless the differences of the claim deviate more than the pool allows; all other intervals use the n - 1 degrees of
freedom of their own differences. Magnitudes are compared as logarithms; their effect 0.1 is a factor of 1.1.
A verdict holds for the tokens, parameters and data of its runs.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from . import mechanisms, stats, tables
from .plan import NAME, close
from .run_directory import RunError

FILE = Path(__file__).resolve().parent / "claims"
KEYS = "claim source plan metric arms expect effect seeds requires measured".split()
EXPECT = ("below", "above", "equal", "not above", "not below")


# ---- metrics of a run: a number, or None


def over_layers(layers, key, combine):
    values = [x for layer in layers if stats.finite(x := layer.get(key))]
    return combine(values) if values else None


def evaluated(key, combine):
    return lambda run: over_layers(((run.eval or {}).get("attention") or {}).get("layers", []), key, combine)


def logged(key, combine, first=False):
    """Of the first or the last statistics of the log."""

    def metric(run):
        steps = sorted(run.layers)
        return over_layers(run.layers[steps[0 if first else -1]].values(), key, combine) if steps else None

    return metric


def probed(name):
    """Mean over the layers of a number of probe.json."""
    return lambda run: mechanisms.mean_over_layers(run.probes[run.steps], name) if run.steps in run.probes else None


def excess(name):
    """A similarity of the weights beyond that of permuted weights."""

    def metric(run):
        found, chance = probed(name)(run), probed(f"{name}_permuted")(run)
        return None if found is None or chance is None else found - chance

    return metric


def spike_score(run):
    return stats.spikes([r.get("grad_z") for r in run.train])[2]


@dataclass
class Metric:
    of: object  # function of a run; None: the final loss, which depends on the study
    unit: str
    ratio: bool = False  # positive magnitudes, compared by their logarithms


METRICS = {
    "loss": Metric(None, "nats"),
    "spikes": Metric(spike_score, "% of the steps"),
    "late_grad_norm": Metric(lambda run: tables.late_gradient(run), "", True),
    "logit_max": Metric(evaluated("logit_max", max), "", True),
    "logit_median": Metric(evaluated("logit_median", stats.mean), "", True),
    "hidden_max": Metric(evaluated("hidden_max", max), "", True),
    "first_mass": Metric(evaluated("first_mass_effective", stats.mean), "of the attention"),
    "sink_rate": Metric(evaluated("sink_rate_effective", stats.mean), "% of the heads"),
    "early_context_rms": Metric(logged("context_rms_mean", stats.mean, True), "", True),
    "context_rms_min": Metric(logged("context_rms_min", min), "", True),
    "lambda": Metric(logged("lambda_mean", stats.mean), ""),
    "wo_adjacent": Metric(excess("adjacent"), ""),
    "wo_closest": Metric(excess("closest"), ""),
}


# ---- the file


@dataclass
class Claim:
    id: str
    claim: str
    source: str
    plan: str
    metric: str
    arms: tuple = ()  # (A,) or (A, B)
    expect: str = ""
    effect: float = 0.0
    seeds: int = 5
    requires: tuple = ()  # (arm, least mean)
    measured: str = ""


def number(text, least):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if least <= value < math.inf else None


def claim_of(name, keys):
    """The claim of a section. ValueError describes the first error."""
    elsewhere = keys.get("metric") == "elsewhere"
    for key in ("claim", "source", "plan", "metric") + (("measured",) if elsewhere else ("arms", "expect", "effect")):
        if not keys.get(key):
            raise ValueError(f"has no '{key}'")
    if elsewhere:
        return Claim(name, keys["claim"], keys["source"], keys["plan"], "elsewhere", measured=keys["measured"])
    if keys["metric"] not in METRICS:
        near = close(keys["metric"], METRICS)
        raise ValueError(f"metric = {keys['metric']}: " + (f"did you mean {near}?" if near else "no such metric"))
    arms = tuple(re.split(r"\s+-\s+", keys["arms"]))
    if len(arms) > 2 or not all(map(NAME.fullmatch, arms)):
        raise ValueError(f"arms = {keys['arms']}: must be ARM or ARM - ARM")
    if keys["expect"] not in EXPECT:
        raise ValueError(f"expect = {keys['expect']}: must be one of {', '.join(EXPECT)}")
    effect, seeds = number(keys["effect"], 1e-9), number(keys.get("seeds", "5"), 2)
    if effect is None or seeds is None or seeds != int(seeds):
        raise ValueError("effect must be a positive number, and seeds an integer of at least 2")
    requires = keys.get("requires", "").split()
    if requires and (len(requires) != 2 or number(requires[1], 0) is None):
        raise ValueError(f"requires = {keys['requires']}: must be ARM NUMBER")
    least = (requires[0], float(requires[1])) if requires else ()
    texts = [keys[key] for key in ("claim", "source", "plan", "metric")]
    return Claim(name, *texts, arms, keys["expect"], effect, int(seeds), least)


def parse(text, name="claims"):
    """The claims of a text. Raises RunError with the line of the first error."""
    common, sections, lines = {}, {}, {}
    keys = common
    for number_of_line, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        header = re.fullmatch(r"\[claim\s+(\S+)\]", line)
        key, equals, value = (part.strip() for part in line.partition("="))
        if header:
            if header[1] in sections:
                raise RunError(f"{name}:{number_of_line}: [claim {header[1]}] is already specified")
            keys = sections[header[1]] = dict(common)
            lines[header[1]], own = number_of_line, set()
            continue
        if line.startswith("[") or not equals or key not in KEYS:
            raise RunError(f"{name}:{number_of_line}: '{line}': must be [claim NAME] or KEY = VALUE, KEY one of {KEYS}")
        if keys is not common and key in own:
            raise RunError(f"{name}:{number_of_line}: '{key}' is already specified")
        if keys is not common:
            own.add(key)
        keys[key] = value
    found = []
    for section, keys in sections.items():
        try:
            found.append(claim_of(section, keys))
        except ValueError as error:
            raise RunError(f"{name}:{lines[section]}: [claim {section}]: {error}") from None
    return found


def read(path=FILE):
    try:
        return parse(Path(path).read_text(), Path(path).name)
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


# ---- verdicts


def verdict(expect, low, high, effect):
    """supported, contradicted or not shown, as the table above."""
    below, above = high < 0 and low <= -effect, low > 0 and high >= effect
    supported, contradicted = {
        "below": (below, low > -effect and high >= 0),
        "above": (above, high < effect and low <= 0),
        "equal": (-effect < low and high < effect, below or above),
        "not above": (high < effect, above),
        "not below": (low > -effect, below),
    }[expect]
    return "supported" if supported else "contradicted" if contradicted else "not shown"


def why_not_shown(expect, low, high, effect):
    if expect in ("below", "above") and -effect < low and high < effect:
        return "smaller than the smallest effect of interest"
    return "too few seeds for the smallest effect of interest"


def value_of(study, run, metric):
    of = METRICS[metric].of
    return of(run) if of else run.final_loss(study.all_evaluated())


def by_seed(study, arm, metric):
    """{seed: mean over the rates of the plan} of the seeds that have a value at each rate."""
    found, rates = {}, {run.lr for run in study.runs}
    for run in study.runs:
        if run.arm == arm and run.state == "done" and stats.finite(x := value_of(study, run, metric)):
            if not METRICS[metric].ratio or x > 0:
                found.setdefault(run.seed, {})[run.lr] = math.log(x) if METRICS[metric].ratio else x
    return {seed: stats.mean(list(at.values())) for seed, at in found.items() if set(at) == rates}


def difference(study, claim):
    """(estimate of d, whether its deviation is pooled)."""
    values = [by_seed(study, arm, claim.metric) for arm in claim.arms]
    d = [values[0][s] - (values[1][s] if len(values) > 1 else 0) for s in sorted(set.intersection(*map(set, values)))]
    if claim.metric != "loss" or len(values) < 2:
        return stats.t_interval(d), False
    everything = {arm: by_seed(study, arm, "loss") for arm in study.arms}
    return stats.pooled_interval(d, stats.pooled_deviation(everything, study.reference))


def effect_of(claim):
    return math.log1p(claim.effect) if METRICS[claim.metric].ratio else claim.effect


def judge(claim, study):
    """The verdict of a claim, with its numbers, as JSON. `study`: the runs of its plan, or None."""
    row = {key: getattr(claim, key) for key in ("id", "claim", "source", "plan", "metric", "arms", "expect", "effect")}
    row |= {"verdict": "not measured", "remark": "", "estimate": None, "pooled": False}
    if claim.metric == "elsewhere":
        return row | {"verdict": "measured elsewhere", "remark": claim.measured}
    missing = [arm for arm in claim.arms if not study or arm not in study.arms]
    if missing:
        return row | {"remark": f"no runs of {', '.join(missing)}" if study else f"plan {claim.plan} has not been run"}
    runs = [run for run in study.runs if run.arm in claim.arms]
    row |= {
        "tokens": runs[0].tokens,
        "parameters": [next(r for r in runs if r.arm == a).parameters for a in claim.arms],
    }
    row |= {"rates": study.rates(), "diverged": sum(run.state == "diverged" for run in runs)}
    estimate, row["pooled"] = difference(study, claim)
    if estimate is None:
        return row | {"remark": f"no seed has the {claim.metric} of {' and '.join(claim.arms)}"}
    row |= {"estimate": stats.as_json(estimate), "verdict": "not shown"}
    if estimate.n < claim.seeds:
        return row | {"remark": f"{estimate.n} of at least {claim.seeds} seeds"}
    if claim.requires:
        arm, least = claim.requires
        there = stats.mean_or_none([value_of(study, run, claim.metric) for run in study.runs if run.arm == arm])
        if there is None or there < least:
            has = "no value" if there is None else f"{there:.3g}"
            return row | {"remark": f"not testable here: {arm} has {has}, and the claim requires {least:g}"}
    row["verdict"] = verdict(claim.expect, estimate.low, estimate.high, effect_of(claim))
    if row["verdict"] == "not shown":
        row["remark"] = why_not_shown(claim.expect, estimate.low, estimate.high, effect_of(claim))
    return row


def judge_all(study):
    """The verdicts of the claims about the plan of a study."""
    return [judge(claim, study) for claim in read() if claim.plan == study.plan and claim.metric != "elsewhere"]
