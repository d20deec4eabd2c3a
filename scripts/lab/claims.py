"""claims.py: the claims of scripts/lab/claims, and their verdicts from measurements of runs.

A claim has the keys claim, source, metric (one or several), arms (`A - B`, or `A` alone; `|` separates alternatives),
needs (what must hold of a study, as NEEDS lists), expect, effect (the smallest effect of interest), seeds (fewest for a
verdict), and optionally requires (`ARM X`: the mean of the metric in that arm must be at least X for the claim to be
testable). Each study that has the arms, and what the claim needs, is judged, whatever its name.
`published` is what the source measured, for the reader: other sizes, tokens and text than here.
metric = elsewhere has `measured` instead: where the numbers are, or which command measures them.
plan = PLAN SIZE names the smallest runs whose verdict says something about the published claim: the section [plan PLAN
SIZE] has their size and their GPU hours for 5 seeds, as `lab run PLAN --size SIZE --dry-run` predicts them for an H100.

    d = metric of A - metric of B at the same seed (mean over the rates of the study), or the metric of A alone
    [low, high] = the two-sided interval of the mean of d over the seeds;  e = effect

    expect       supported                   effect excluded   opposite shown
    below        high < 0 and low <= -e      low > -e          low > 0
    above        low > 0 and high >= e       high < e          high < 0
    equal        -e < low and high < e       -                 low >= e or high <= -e
    not above    high < e                    -                 low >= e
    not below    low > -e                    -                 high <= -e

"Opposite shown" precedes "effect excluded". Everything else is "not shown": an interval that contains 0 and reaches
the effect shows nothing. `equal` is two one-sided tests.

A verdict is wrong only if its interval misses the true difference. With many claims some intervals do; therefore the
level of each is that of Holm's method over all tested claims of a page: with probability 95% every verdict of the page
is right, however the claims depend on each other (they share arms). The pages show the single 95% intervals beside it.

The interval of a loss difference uses the deviation that is pooled over the arms of the study, unless a test of equal
variances rejects (stats.pooled_gap); all other intervals use the n - 1 degrees of freedom of their own differences.
If the plan has `looks`, a claim is judged at these numbers of seeds alone, each at its share of the level (stats.py).
Where an arm of the claim does not meet the preconditions (preconditions.py) there is no verdict.
Magnitudes are compared as logarithms; their effect 0.1 is a factor of 1.1.
A verdict holds for the tokens, parameters and data of its runs.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from . import preconditions, stats
from .measurements import METRICS, of_study
from .plan import NAME, close
from .run_directory import RunError

FILE = Path(__file__).resolve().parent / "claims"
KEYS = "claim source published needs metric arms expect effect seeds requires measured plan size hours".split()
EXPECT = ("below", "above", "equal", "not above", "not below")
VERDICTS = "supported, effect excluded, opposite shown, not shown, no verdict, not measured, measured elsewhere".split(
    ", "
)
UNTRAINED = ("initial_context_rms",)  # metrics that do not require the preconditions
SAME = 0.01  # active parameters, or FLOPs, within 1% are equal


def unlike(measured, arms):
    """How far the active parameters of two arms are apart; None if they are unknown."""
    counts = [measured.of([arm], "active_parameters") for arm in arms]
    return max(map(max, counts)) / min(map(min, counts)) - 1 if all(counts) else None


def flops(measured, arms):
    """The FLOPs of the training of the first arm, relative to the second; None if they are unknown."""
    counts = [[measured.of([arm], key) for key in ("flops_per_token", "tokens")] for arm in arms]
    return math.prod(map(max, counts[0])) / math.prod(map(max, counts[1])) if all(map(all, counts)) else None


NEEDS = {
    "one rate": lambda measured, arms: len(measured.rates) == 1 or bool(measured.sweep),
    "several rates": lambda measured, arms: len(measured.rates) > 1 and not measured.sweep,
    "equal parameters": lambda measured, arms: (x := unlike(measured, arms)) is not None and x <= SAME,
    "unequal parameters": lambda measured, arms: (x := unlike(measured, arms)) is not None and x > SAME,
    "equal FLOPs": lambda measured, arms: (x := flops(measured, arms)) is not None and abs(x - 1) <= SAME,
}


# ---- the file


@dataclass
class Claim:
    id: str
    claim: str
    source: str
    metric: str
    arms: tuple = ()  # alternatives: (A,) or (A, B) each
    needs: tuple = ()
    expect: str = ""
    effect: float = 0.0
    seeds: int = 5
    requires: tuple = ()  # (arm, least mean)
    measured: str = ""
    published: str = ""
    plan: str = ""
    size: str = ""
    hours: str = ""


def number(text, least):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if least <= value < math.inf else None


def claims_of(name, keys):
    """The claims of a section, one for each metric. ValueError describes the first error."""
    elsewhere = keys.get("metric") == "elsewhere"
    for key in ("claim", "source", "metric") + (("measured",) if elsewhere else ("arms", "expect", "effect")):
        if not keys.get(key):
            raise ValueError(f"has no '{key}'")
    if elsewhere:
        return [Claim(name, keys["claim"], keys["source"], "elsewhere", measured=keys["measured"])]
    for metric in keys["metric"].split():
        if metric not in METRICS:
            near = close(metric, METRICS)
            raise ValueError(f"metric = {metric}: " + (f"did you mean {near}?" if near else "no such metric"))
    arms = tuple(tuple(re.split(r"\s+-\s+", pair.strip())) for pair in keys["arms"].split("|"))
    if not all(len(pair) <= 2 and all(map(NAME.fullmatch, pair)) for pair in arms):
        raise ValueError(f"arms = {keys['arms']}: must be ARM or ARM - ARM")
    needs = tuple(need.strip() for need in keys.get("needs", "").split(",") if need.strip())
    if not set(needs) <= set(NEEDS):
        raise ValueError(f"needs = {keys['needs']}: must be of {', '.join(NEEDS)}")
    if keys["expect"] not in EXPECT:
        raise ValueError(f"expect = {keys['expect']}: must be one of {', '.join(EXPECT)}")
    effect, seeds = number(keys["effect"], 1e-9), number(keys.get("seeds", "5"), 2)
    if effect is None or seeds is None or seeds != int(seeds):
        raise ValueError("effect must be a positive number, and seeds an integer of at least 2")
    requires = keys.get("requires", "").split()
    if requires and (len(requires) != 2 or number(requires[1], 0) is None):
        raise ValueError(f"requires = {keys['requires']}: must be ARM NUMBER")
    least = (requires[0], float(requires[1])) if requires else ()
    rest = (arms, needs, keys["expect"], effect, int(seeds), least)
    return [Claim(name, keys["claim"], keys["source"], metric, *rest) for metric in keys["metric"].split()]


def parse(text, name="claims"):
    """The claims of a text. Raises RunError with the line of the first error."""
    common, sections, lines, plans = {}, {}, {}, {}
    keys = common
    for number_of_line, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        header = re.fullmatch(r"\[claim\s+(\S+)\]", line)
        key, equals, value = (part.strip() for part in line.partition("="))
        if runs := re.fullmatch(r"\[plan\s+(\S+ \S+)\]", line):
            keys, own = plans.setdefault(runs[1], {}), set()
            continue
        if header:
            if header[1] in sections:
                raise RunError(f"{name}:{number_of_line}: [claim {header[1]}] is already specified")
            keys = sections[header[1]] = dict(common)
            lines[header[1]], own = number_of_line, set()
            continue
        if line.startswith("[") or not equals or key not in KEYS:
            raise RunError(
                f"{name}:{number_of_line}: '{line}': must be [claim NAME], [plan NAME SIZE] or KEY = VALUE, "
                f"KEY one of {KEYS}"
            )
        if keys is not common and key in own:
            raise RunError(f"{name}:{number_of_line}: '{key}' is already specified")
        if keys is not common:
            own.add(key)
        keys[key] = value
    found = []
    for section, keys in sections.items():
        try:
            if (runs := keys.get("plan")) and not {"size", "hours"} <= set(plans.get(runs, ())):
                raise ValueError(f"plan = {runs}: no [plan {runs}] with 'size' and 'hours'")
            about = {"plan": runs, **plans[runs]} if runs else {}
            about["published"] = keys.get("published", "")
            found += [replace(claim, **about) for claim in claims_of(section, keys)]
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
    """The verdict of an interval, as the table above."""
    if expect in ("above", "not above"):
        expect, low, high = expect.replace("above", "below"), -high, -low
    rules = {  # in their order
        "below": (high < 0 and low <= -effect, low > 0, low > -effect),
        "equal": (-effect < low and high < effect, low >= effect or high <= -effect),
        "not below": (low > -effect, high <= -effect),
    }[expect]
    return next((VERDICTS[place] for place, holds in zip((0, 2, 1), rules) if holds), "not shown")


def p_value(expect, estimate, effect):
    """The smallest level at which the interval of an estimate has a verdict."""
    m, p = estimate.mean, estimate.p_of
    if expect in ("below", "above"):
        m, end = (m, -effect) if expect == "below" else (-m, effect)
        return min(p(0), p(end)) if m > -effect else p(0)
    if expect == "equal":
        return max(p(-effect), p(effect))
    return p(effect if expect == "not above" else -effect)


def difference(measured, metric, arms):
    """The estimate of d, with the pooled deviation if d is of losses; None without a seed."""
    if len(arms) == 1:
        return stats.t_interval(list(measured.by_seed(*arms, metric).values()))
    if metric != "loss":
        return stats.paired_gap(*(measured.by_seed(arm, metric) for arm in arms))
    return stats.pooled_gap({arm: measured.by_seed(arm, metric) for arm in arms}, *arms, measured.pool)


def effect_of(claim):
    return math.log1p(claim.effect) if METRICS[claim.metric].ratio else claim.effect


def bound(claim, measured):
    """The first alternative of the arms that have the metric in a study, and what the claim needs; None without one."""

    def there(arms):
        values = all(measured.of([arm], claim.metric) for arm in arms)
        return values and all(NEEDS[need](measured, arms) for need in claim.needs)

    return next(filter(there, claim.arms), None)


def new_row(claim, arms, **more):
    row = {key: getattr(claim, key) for key in ("id", "claim", "source", "published", "metric", "expect", "effect")}
    return row | {"arms": arms, "study": "", "verdict": "", "remark": "", "estimate": None, "p": None} | more


def told(row):
    """The text of a claim, with what its source measured."""
    return row["claim"] + (f" (published: {row['published']})" if row["published"] else "")


def test(claim, measured, arms):
    """The numbers of a claim in a study, as JSON: with p if the claim can be tested, else with the remark why not."""
    estimate = difference(measured, claim.metric, arms)
    states = measured.of(arms, "state")
    row = new_row(
        claim, arms, study=measured.study, estimate=stats.as_json(estimate), diverged=states.count("diverged")
    )
    row["parameters"] = [max(measured.of([arm], "parameters"), default=None) for arm in arms]
    row["flops"] = flops(measured, arms) if len(arms) > 1 else None
    if estimate is None or estimate.n < claim.seeds:
        return row | {"remark": f"{estimate.n if estimate else 0} of at least {claim.seeds} seeds"}
    if claim.requires:
        arm, least = claim.requires
        there = stats.mean_or_none(measured.of([arm], claim.metric))
        if there is None or there < least:
            has = "no value" if there is None else f"{there:.3g}"
            return row | {"remark": f"not testable here: {arm} has {has}, and the claim requires {least:g}"}
    why = "" if claim.metric in UNTRAINED else preconditions.unmet(measured, arms)
    if why:
        return row | {"verdict": "no verdict", "remark": why}
    levels = stats.look_levels(measured.looks)
    if levels and estimate.n not in levels:
        return row | {"verdict": "no verdict", "remark": f"{estimate.n} seeds: the looks are at {list(levels)}"}
    row["share"] = levels.get(estimate.n, 1.0)
    return row | {"p": min(1.0, p_value(claim.expect, estimate, effect_of(claim)) / row["share"])}


def decide(claim, row, level):
    """Sets the verdict of a tested claim at a level, and the remark."""
    e = stats.Estimate(**row["estimate"])
    of = lambda level: verdict(claim.expect, *e.limits(level * row["share"]), effect_of(claim))
    row["verdict"], alone = of(level), of(1 - stats.CONFIDENCE)
    e = row["estimate"]
    if alone != row["verdict"]:
        row["remark"] = f"{alone} if it were the only claim"
    elif row["verdict"] == "effect excluded" and abs(e["mean"]) > e["half"]:
        row["remark"] = "a smaller one is shown by its 95% interval"
    elif row["verdict"] == "not shown":
        wide = abs(e["mean"]) <= e["half"]
        row["remark"] = "too few seeds for the smallest effect of interest" if wide else "its size is not shown"


def judge(all_claims, studies):
    """The verdicts of the claims in the Measurements of studies, as JSON: one row per claim and study that it is bound
    to, or one row without a study."""
    rows, tested = [], []
    for claim in all_claims:
        if claim.metric == "elsewhere":
            rows.append(new_row(claim, (), verdict="measured elsewhere", remark=claim.measured))
            continue
        found = [test(claim, m, arms) for m in studies if (arms := bound(claim, m))]
        tested += [(claim, row) for row in found if row["p"] is not None]
        nowhere = f"no study has {' - '.join(claim.arms[0])} ({', '.join(claim.needs)})"
        rows += found or [new_row(claim, claim.arms[0], verdict="not measured", remark=nowhere)]
    ps = [row["p"] for _, row in tested]
    for (claim, row), level, p in zip(tested, stats.holm_levels(ps), stats.holm(ps)):
        row["p_holm"] = p
        decide(claim, row, level)
    for row in rows:
        row["verdict"] = row["verdict"] or ("not shown" if row["estimate"] else "not measured")
    return rows


def judge_study(study):
    """The verdicts of the claims that a study of runs is bound to."""
    name = study.plan or study.title
    return [row for row in judge(read(), of_study(study, name)) if row["study"]]
