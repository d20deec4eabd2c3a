"""option_history.py: which options were in force at which step of a run, and what keeps two runs from being compared."""

import math

from .schema import KINDS

# of run.json's options: what must agree between runs for their losses to be compared; what validation reads is apart
COMPARED = (
    "train-data",
    "doc-mask",
    "separator",
    "seq-len",
    "vocab",
    "total-batch",
    "steps",
    "min-lr-ratio",
    "warmup",
    "schedule",
    "weight-decay",
    "beta1",
    "beta2",
    "eps",
    "grad-clip",
    "skip-loss-z",
    "skip-grad-z",
    "gemm",
    "init",
)
REPORTED = ("lr", *COMPARED, "batch-size", "val-data", "val-steps")  # whose changes in a run the report names


def history(info):
    """[(step, options)]: from the first start on, which options hold after which step. A start changes options of the
    checkpoint that it goes on from: what an earlier start did after that step is gone."""
    found = [(0, info["options"])]
    for start in info.get("starts", []):
        step, before = start["step"], [entry for entry in found if entry[0] < start["step"]]
        base = before[-1][1] if before else info["options"]
        found = before + [(step, {**base, **{change["name"]: change["new"] for change in start["changed"]}})]
    return found


def changes(pairs):
    """[(step, value)] without those that repeat the value before."""
    return [pair for i, pair in enumerate(pairs) if i == 0 or pairs[i - 1][1] != pair[1]]


def values(entries, key):
    """[(step, value)] of an option in a history: the first value, and others with the steps after which they hold."""
    return changes([(step, options.get(key)) for step, options in entries])


def over_time(pairs, when="after step"):
    """What changes() gives in words: "0.1", or "0.1 then 0.5 after step 40"."""
    return " then ".join(shown(value) + (f" {when} {step}" if step else "") for step, value in pairs)


def differences(a, b, names=("one run", "the other")):
    """What keeps two run.json from being comparable, a line each. Rates may differ, but not where a start changed one."""
    found, one, other = [], history(a), history(b)
    x, y = (info.get("data_fingerprint") for info in (a, b))
    for key in COMPARED:
        same_data = key == "train-data" and x == y is not None  # where they lie does not matter
        if values(one, key) != values(other, key) and not same_data:
            found.append(
                f"--{key}: {over_time(values(one, key))} in {names[0]}, {over_time(values(other, key))} in {names[1]}"
            )
    if values(one, "lr")[1:] != values(other, "lr")[1:]:
        found.append(
            f"--lr: {over_time(values(one, 'lr'))} in {names[0]}, {over_time(values(other, 'lr'))} in {names[1]}"
        )
    if x is not None and y is not None and x != y:
        found.append(f"the training data: fingerprint {x} in {names[0]}, {y} in {names[1]}")
    return found


# ---- what validation reads


def validation(info, options, record=None):
    """(windows, fingerprint or None, path, size of the data) of a validation under these options; None without one.
    `record`: the log's, which says the first two; trainers before it did leave them to be derived."""
    record, sources = record or {}, info.get("data", {}).get("val", [])
    if options.get("val-data") is None:
        return None
    windows, fingerprint = record.get("windows"), record.get("data_fingerprint")
    if (
        windows is None
        and KINDS["whole number"](options.get("val-steps"))
        and KINDS["whole number"](options.get("batch-size"))
    ):
        there = sum(source.get("windows", math.inf) for source in sources) if sources else math.inf
        windows = min(options["val-steps"] * options["batch-size"], there)
    if fingerprint is None and len(sources) == 1 and options["val-data"] == info["options"].get("val-data"):
        fingerprint = sources[0].get("fingerprint")
    size = "; ".join(f"{shown(source.get('tokens'))} in {shown(source.get('shards'))}" for source in sources) or None
    return windows, None if fingerprint is None else str(fingerprint), options["val-data"], size


def validations(info, log):
    """[(step, what was read)] of a run's log, as changes(); before its first validation what the options ask for."""
    entries, found = history(info), []
    for record in (r for r in log if r["kind"] == "val"):
        options = [options for step, options in entries if step < record["step"] or step == 0][-1]
        found.append((record["step"] if found else 0, validation(info, options, record)))
    return changes(found) or [(0, validation(info, entries[-1][1]))]


def validation_differences(one, other, names):
    """Between two validations(), a line each: other data, or other windows of them."""
    reads = [read for _, read in one + other]
    if None in reads:
        facts = [("--val-data", lambda read: read and read[2])]
    elif None in [read[1] for read in reads]:
        facts = [
            ("--val-data", lambda read: read[2]),
            ("tokens and shards of the validation data", lambda read: read[3]),
        ]
    else:
        facts = [("fingerprint of the validation data", lambda read: read[1])]
    if None not in reads:
        facts.append(("windows of validation (--val-steps times --batch-size)", lambda read: read[0]))
    found = []
    for what, get in facts:
        x, y = (changes([(step, get(read)) for step, read in pairs]) for pairs in (one, other))
        if x != y:
            found.append(f"{what}: {over_time(x, 'at step')} in {names[0]}, {over_time(y, 'at step')} in {names[1]}")
    return found


def shown(value):
    return "none" if value is None else "yes" if value is True else "no" if value is False else str(value)
