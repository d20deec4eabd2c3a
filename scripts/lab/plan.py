"""plan.py: parses a plan, and expands it to runs. All functions depend on their arguments only.

A plan is a text file of lines `key = value`. `#` begins a comment. Keys before the first section apply to all runs:

    title = Loss gap
    reference = baseline         the arm that the others are compared with
    seeds = 1 2 3                one run per seed
    lr = 2e-3 4e-3               and per learning rate
    tokens = 2M                  K, M, B, T: 10^3, 10^6, 10^9, 10^12
    schedule = cosine            any option of the trainer, without dashes, that does not belong to a single start

    [size cpu]                   keys of a size; --size selects one (default: the first)
    preset = tiny
    [arm baseline]               one side of the comparison
    attention = baseline
    [arm baseline-1.5h-matched]
    attention = baseline
    preset = {preset}-1.5h       {preset}: the preset of the size, and so with its other keys
    match = baseline             the width of the MLP, or of the experts, that gives as many active parameters

Keys of an arm override those of the size, which override those before the sections. Steps are tokens / total-batch,
rounded up; an arm with its own `tokens` is compared with arms of other lengths. `validations`, `statistics` and
`checkpoints` are their numbers per run.
`sweep-seeds = 1 2` runs all rates with these seeds first, then each arm with `seeds` at the best rate of its sweep.
"""

import itertools
import math
import re
from dataclasses import dataclass, field

from . import option_history

# keys of the lab: {key: type}
KEYS = {
    "title": str,
    "question": str,
    "reference": str,
    "label": str,
    "match": str,
    "seeds": "whole numbers",
    "sweep-seeds": "whole numbers",
    "lr": "numbers",
    "tokens": "count",
    "total-batch": "count",
    "validations": "count",
    "statistics": "count",
    "checkpoints": "count",
    "ranks": "count",
    "threads": "count",
}
PLAN_ONLY = ("title", "question", "reference")  # not allowed in a size or an arm
NOT_OF_ARM = ("seeds", "sweep-seeds")  # equal in all arms, whose runs are paired by seed
ARM_ONLY = ("match", "label")
# options of the trainer that a plan must not set: what sets them instead
TAKEN = {
    "out": "--out of the lab",
    "seed": "seeds",
    "steps": "tokens",
    "resume": "the lab",
    "init": "nothing, all runs start from random weights",
    "stop-after": "nothing, all runs complete",
    "val-every": "validations",
    "stats-every": "statistics",
    "checkpoint-every": "checkpoints",
    "match-params": "match",
    "keep": "the lab",
}
EVERY = {"validations": "val-every", "statistics": "stats-every", "checkpoints": "checkpoint-every"}
OWN = ("lr", "ranks", "threads")  # also names of trainer options, which a plan does not set
SWEPT = 5  # rates of a sweep, at least
NAME = re.compile(r"[a-z0-9][a-z0-9._+-]*")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class PlanError(Exception):
    """An error in a plan: one line, with the line number."""


@dataclass
class Plan:
    name: str
    text: str
    path: object = None  # of the file
    common: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)  # name -> keys
    arms: dict = field(default_factory=dict)  # name -> keys
    lines: dict = field(default_factory=dict)  # (section, key) -> line number; (section, None): of the header


@dataclass
class PlannedRun:
    name: str
    arm: str
    lr: float
    seed: int
    steps: int
    tokens: int
    options: dict  # of the trainer, name -> text, or True for a flag; without --out
    match: str = ""
    ranks: int = 1
    threads: int = 0


def parse_count(text):
    """'2M' -> 2000000; None if it is not a positive integer."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)([kmbt]?)", text.strip().lower())
    if not found:
        return None
    value = float(found[1]) * UNITS[found[2]]
    return int(value) if math.isfinite(value) and value == int(value) and value > 0 else None


def parse_value(key, text):
    """The value in the type of the key. ValueError has a description of the type."""
    kind = KEYS.get(key, str)
    if not text:
        raise ValueError("a non-empty value")
    if kind == "count":
        value = parse_count(text)
        if value is None:
            raise ValueError("a positive integer, such as 2000, 2K or 1.5M")
        return value
    if kind == "whole numbers":
        values = [int(word) for word in text.split()] if re.fullmatch(r"[0-9]+(\s+[0-9]+)*", text) else []
        if not values or len(set(values)) < len(values):
            raise ValueError("different integers, separated by spaces")
        return values
    if kind == "numbers":
        try:
            values = [float(word) for word in text.split()]
        except ValueError:
            values = []
        if not values or not all(0 < x < float("inf") for x in values) or len(set(values)) < len(values):
            raise ValueError("different positive numbers, separated by spaces")
        return values
    return text


def check_key(key, section, trainer_options):
    """The error of this key in this section, or None."""
    if key in TAKEN:
        return f"'{key}' cannot be set in a plan: {TAKEN[key]} sets it"
    if key not in KEYS and key not in trainer_options:
        near = option_history.RENAMED.get(key) or close(key, [*KEYS, *(o for o in trainer_options if o not in TAKEN)])
        return f"unknown key '{key}'" + (
            f": did you mean '{near}'?" if near else "; keys are those of the lab and the options of the trainer"
        )
    if section and key in PLAN_ONLY:
        return f"'{key}' must precede the first section"
    if section.startswith("arm ") and key in NOT_OF_ARM:
        return f"'{key}' is not allowed in an [arm ...]: all arms have the same"
    if not section.startswith("arm ") and key in ARM_ONLY:
        return f"'{key}' is only allowed in an [arm ...]"
    return None


def close(word, words):
    import difflib

    found = difflib.get_close_matches(word, words, 1)
    return found[0] if found else None


def parse_header(plan, inner, number):
    kind, _, name = inner.partition(" ")
    name = name.strip()
    if kind not in ("size", "arm") or not NAME.fullmatch(name):
        raise PlanError(
            f"{plan.name}:{number}: [{inner}] is neither [size NAME] nor [arm NAME], NAME of a-z 0-9 . _ + -"
        )
    group = plan.sizes if kind == "size" else plan.arms
    if name in group:
        raise PlanError(
            f"{plan.name}:{number}: [{kind} {name}] is already specified in line {plan.lines[f'{kind} {name}', None]}"
        )
    plan.lines[f"{kind} {name}", None] = number
    group[name] = {}
    return f"{kind} {name}", group[name]


def parse(text, name, trainer_options):
    """The plan. Raises PlanError at the first error."""
    plan = Plan(name, text)
    section, keys = "", plan.common
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        if line.startswith("["):
            if not line.endswith("]"):
                raise PlanError(f"{name}:{number}: '{line}' has no closing ]")
            section, keys = parse_header(plan, " ".join(line[1:-1].split()), number)
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            raise PlanError(f"{name}:{number}: '{line}' is not 'key = value'")
        wrong = check_key(key, section, trainer_options)
        if wrong:
            raise PlanError(f"{name}:{number}: {wrong}")
        if key in keys:
            raise PlanError(f"{name}:{number}: '{key}' is already specified in line {plan.lines[section, key]}")
        try:
            keys[key] = parse_value(key, value)
        except ValueError as wanted:
            raise PlanError(f"{name}:{number}: '{key} = {value}': must be {wanted}") from None
        plan.lines[section, key] = number
    check_plan(plan)
    return plan


def check_plan(plan):
    if not plan.arms:
        raise PlanError(f"{plan.name}: no [arm ...]: nothing to run")
    reference = plan.common.setdefault("reference", next(iter(plan.arms)))
    if reference not in plan.arms:
        raise PlanError(f"{plan.name}:{plan.lines['', 'reference']}: reference = {reference}: no [arm {reference}]")
    for arm, keys in plan.arms.items():
        other = keys.get("match")
        if other and (other not in plan.arms or "match" in plan.arms[other]):
            why = "is itself matched" if other in plan.arms else "does not exist"
            raise PlanError(f"{plan.name}:{plan.lines[f'arm {arm}', 'match']}: match = {other}: that arm {why}")


def flag_value(plan, key, value, trainer_options):
    """The value of a trainer option; True or False for a flag."""
    if trainer_options[key] != "flag":
        return str(value)
    if value not in ("yes", "no"):
        raise PlanError(f"{plan.name}: '{key} = {value}': must be yes or no")
    return value == "yes"


def expand(plan, trainer_options, size=None, arms=None, overrides=None, rates=None):
    """The runs of a plan at a size, ordered by seed, so that the first finished runs can be compared. arms: only these.
    rates: {arm: its rate} with `sweep-seeds`; without them its runs are the sweep."""
    if size and size not in plan.sizes:
        raise PlanError(f"{plan.name}: no [size {size}]; the sizes are {', '.join(plan.sizes) or 'none'}")
    size_keys = plan.sizes[size] if size else next(iter(plan.sizes.values()), {})
    for arm in arms or []:
        if arm not in plan.arms:
            raise PlanError(f"{plan.name}: no [arm {arm}]; the arms are {', '.join(plan.arms)}")
    runs = []
    for arm, arm_keys in plan.arms.items():
        if arms and arm not in arms:
            continue
        keys = {}
        for level in (plan.common, size_keys, arm_keys, overrides or {}):
            keys |= level
        base = {"preset": "tiny", **plan.common, **size_keys}
        of_size = lambda found: str(base.get(found[1], found[0]))
        keys = {k: re.sub(r"\{([a-z-]+)\}", of_size, v) if isinstance(v, str) else v for k, v in keys.items()}
        if "sweep-seeds" in keys:
            check_sweep(plan, arm, keys)
            keys |= {"seeds": keys["sweep-seeds"]} if rates is None else {"lr": [rates[arm]]}
        runs += expand_arm(plan, arm, keys, trainer_options)
    return sorted(runs, key=lambda run: run.seed)  # stable: arms and rates keep their order


def check_sweep(plan, arm, keys):
    at = f"{plan.name}: sweep-seeds"
    if len(keys.get("lr", ())) < SWEPT:
        raise PlanError(f"{at}: [arm {arm}] has {len(keys.get('lr', ()))} rates, at least {SWEPT} are required")
    if both := set(keys["sweep-seeds"]) & set(keys.get("seeds", [1])):
        raise PlanError(f"{at}: seed {min(both)} is also in seeds: a rate must not be chosen by the seeds that test it")


def expand_arm(plan, arm, keys, trainer_options):
    for wanted in ("tokens", "total-batch", "train-data", "lr"):
        if wanted not in keys:
            line = plan.lines[f"arm {arm}", None]
            raise PlanError(f"{plan.name}:{line}: [arm {arm}] has no '{wanted}', and neither has the plan or the size")
    batch = keys["total-batch"]
    steps = -(-keys["tokens"] // batch)
    options = {
        k: flag_value(plan, k, v, trainer_options) for k, v in keys.items() if k in trainer_options and k not in OWN
    }
    options["steps"] = str(steps)
    for key, option in EVERY.items():
        if key in keys and (key != "validations" or "val-data" in keys):
            options[option] = str(max(1, steps // keys[key]))
    options["keep"] = "1"
    of_arm = {key: keys[key] for key in ("match", "ranks", "threads") if key in keys}
    runs = []
    for seed, lr in itertools.product(keys.get("seeds", [1]), keys["lr"]):
        own = {**options, "lr": f"{lr:g}", "seed": str(seed)}
        runs.append(PlannedRun(f"{arm}.lr{lr:g}.seed{seed}", arm, lr, seed, steps, steps * batch, own, **of_arm))
    return runs


def arguments(options):
    """The options as words of a command line."""
    words = []
    for name, value in options.items():
        if value is True or value is False:
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", value]
    return words


def parse_help(text):
    """The options in the trainer's --help: {name: 'flag' or 'value'}."""
    found = re.findall(r"^  --(\[no-\])?([a-z0-9-]+)", text, re.M)
    return {name: "flag" if no else "value" for no, name in found}


def matched_width(wanted, low, at_low, high, at_high):
    """The width of an MLP with a parameter count nearest to `wanted`, which is linear in it; None if there is none."""
    slope = (at_high - at_low) / (high - low)
    width = round(low + (wanted - at_low) / slope)
    return width if width >= 1 else None
