"""option_history.py: the options of a run step by step, and the differences that prevent a comparison of two runs."""

from .schema import TYPES

RENAMED = {"gemm": "matmul-dtype", "sdpa": "attention-kernel"}  # options of earlier trainers
# options of the update that the arms of a plan may vary, with their values in runs of trainers that lacked them
UPDATE = {
    "optimizer": "adamw",
    "parametrization": "standard",
    "base-width": 0,
    "base-depth": 0,
    "z-loss": 0,
    "schedule": "cosine",
    "rollback": None,
}
# options that are the same in all runs of an arm: of its size, and others of the model and of its routers
SHAPE = "layers hidden heads kv-heads head-dim ffn expert-ffn".split()
MODEL = (
    "attention experts experts-active shared-experts dense-layers router-bias router-aux router-z router-bias-rate "
    "rope-theta tie-embeddings window full-every yoco sparse-blocks sparse-block-size qk-norm"
).split()
# options that must be equal for the losses of two runs to be comparable; validation data is compared separately
COMPARED = (
    "train-data doc-mask separator seq-len vocab total-batch steps min-lr-ratio warmup "
    "decay-steps weight-decay beta1 beta2 eps grad-clip skip-loss-z skip-grad-z matmul-dtype init"
).split() + list(UPDATE)
SHARES = ("warmup", "decay-steps")  # those of COMPARED that are a number of steps
REPORTED = ("lr", *COMPARED, "rope-theta", "batch-size", "val-data", "val-steps")  # the report lists their changes


def renamed(options):
    """The same options by the names that they have now."""
    return {RENAMED.get(name, name): value for name, value in options.items()}


def history(info):
    """[(step, options)]: the options that apply after each step. A resume changes the options of its checkpoint, and
    discards later steps with their changes."""
    found = [(0, renamed(info["options"]))]
    for start in info.get("starts", []):
        step, before = start["step"], [entry for entry in found if entry[0] < start["step"]]
        base = before[-1][1] if before else renamed(info["options"])
        found = before + [(step, {**base, **changed_by(start)})]
    return found


def by_start(info, get):
    """[(step, value)] of what run.json and its later starts have, as changes()."""
    found = [(0, get(info))]
    for start in info.get("starts", []):
        if get(start) is not None:
            found = [pair for pair in found if pair[0] < start["step"]] + [(start["step"], get(start))]
    return changes(found)


def fingerprints(info):
    return by_start(info, lambda start: start.get("data_fingerprint"))


def changed_by(start):
    """{option: new value} of a start."""
    return renamed({change["name"]: change["new"] for change in start["changed"]})


def changes(pairs):
    """[(step, value)] without repetitions of the same value."""
    return [pair for i, pair in enumerate(pairs) if i == 0 or pairs[i - 1][1] != pair[1]]


def values(entries, key):
    """[(step, value)] of an option in a history."""
    return changes([(step, options.get(key, UPDATE.get(key))) for step, options in entries])


def over_time(pairs, when="after step"):
    """The values of changes() in words: "0.1", or "0.1 then 0.5 after step 40"."""
    return " then ".join(shown(value) + (f" {when} {step}" if step else "") for step, value in pairs)


def same_share(key, options):
    """Whether an option is the same share of the steps of two runs, within a step, or the default of both."""
    begins = [o.get(key) for o in options]
    if not all(map(TYPES["non-negative integer"], begins)):
        return False
    steps = [int(o["steps"]) for o in options]
    shares = [x / n for x, n in zip(begins, steps)]
    default = key == "warmup" and begins == [min(100, n // 10) for n in steps]
    return default or abs(shares[0] - shares[1]) <= 1 / min(steps)


def differences(a, b, names=("one run", "the other"), ignored=()):
    """The differences that prevent a comparison, one line each. Initial learning rates may differ, changes not."""
    found, one, other = [], history(a), history(b)
    x, y = map(fingerprints, (a, b))
    known = None not in [fingerprint for _, fingerprint in x + y]
    told = lambda key: [f"{over_time(values(of, key))} in {name}" for of, name in zip((one, other), names)]
    both = lambda key: f"--{key}: {', '.join(told(key))}"
    for key in COMPARED:
        same_data = key == "train-data" and known and x == y  # the path does not matter
        of_steps = "steps" in ignored and key in SHARES and len(values(one, key)) == len(values(other, key)) == 1
        same = same_data or (of_steps and same_share(key, (one[-1][1], other[-1][1])))
        if values(one, key) != values(other, key) and not same and key not in ignored:
            found.append(both(key))
    if values(one, "lr")[1:] != values(other, "lr")[1:]:
        found.append(both("lr"))
    if known and x != y:
        told = [f"{over_time(pairs)} in {name}" for pairs, name in zip((x, y), names)]
        found.append(f"the training data: fingerprint {', '.join(told)}")
    return found


# ---- validation data


def validations(info, log):
    """[(step, {windows, fingerprint})] of the validations of a run's log, as changes(); {} before the first one, None
    without validation data."""
    entries, found = history(info), []
    for record in (r for r in log if r["kind"] == "val"):
        fingerprint = record.get("data_fingerprint")
        read = {"windows": record.get("windows"), "fingerprint": None if fingerprint is None else str(fingerprint)}
        found.append((record["step"] if found else 0, read))
    return changes(found) or [(0, None if entries[-1][1].get("val-data") is None else {})]


def validation_differences(one, other, names):
    """The differences in data or windows between two validations(), one line each."""
    reads = [read for _, read in one + other]
    if {} in reads:
        return []
    if None in reads:
        facts = [("--val-data", lambda read: "none" if read is None else "given")]
    else:
        facts = [
            ("fingerprint of the validation data", lambda read: read["fingerprint"]),
            ("windows of validation (--val-steps times --batch-size)", lambda read: read["windows"]),
        ]
    found = []
    for what, get in facts:
        x, y = (changes([(step, get(read)) for step, read in pairs]) for pairs in (one, other))
        if x != y:
            found.append(f"{what}: {over_time(x, 'at step')} in {names[0]}, {over_time(y, 'at step')} in {names[1]}")
    return found


def shown(value):
    return "none" if value is None else "yes" if value is True else "no" if value is False else str(value)
