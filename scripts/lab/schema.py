"""schema.py: required types of the values in run.json, log.jsonl, eval.json and lab.json.

A schema is the name of a type, [schema] of a list, (schema,) of a value that may be null, or {key: schema} of an
object, in which "key?" is optional and "*" is any other key. Keys that are not in the schema are allowed.
"""

import math


TYPES = {
    "text": lambda x: isinstance(x, str),
    "number": lambda x: is_number(x) and math.isfinite(x),
    "positive number": lambda x: is_number(x) and 0 < x < math.inf,
    "number or null": lambda x: x is None or is_number(x),
    "share": lambda x: is_number(x) and 0 <= x <= 1,
    "non-negative integer": lambda x: is_number(x) and x == int(x) and 0 <= x <= 2**53,
    "positive integer": lambda x: is_number(x) and x == int(x) and 0 < x <= 2**53,
    "64-bit integer": lambda x: (is_number(x) and x == int(x) and x >= 0)
    or (isinstance(x, str) and x.isascii() and x.isdigit()),
    "value": lambda x: x is None or isinstance(x, (str, int, float)),
}
OPTIONS = {
    **{
        key: "positive integer"
        for key in "steps total-batch layers hidden heads kv-heads head-dim ffn seq-len vocab".split()
    },
    **{key: "number" for key in ("lr", "warmup", "min-lr-ratio", "weight-decay", "beta1", "beta2", "grad-clip")},
    **{key: "text" for key in ("attention", "schedule", "matmul-dtype")},
    "seed": "64-bit integer",
    **{key + "?": "non-negative integer" for key in ("window", "full-every", "sparse-blocks")},
    "*": "value",
}
SOURCE = {
    "name?": "text",
    "path?": "text",
    "tokens?": "number",
    "shards?": "number",
    "windows?": "number",
    "weight?": "number",
    "epochs?": "number",
    "fingerprint?": "64-bit integer",
}
CHANGED = [{"name": "text", "new": "value"}]
MODEL = {
    "parameters?": "positive integer",
    "active_parameters?": "positive integer",
    "flops_per_token?": "positive number",
}
RUN = {
    "options": {"*": "value"},  # OPTIONS, by the names that they have now: run_directory.wrong_options()
    "model?": MODEL,
    "data?": {"train?": [SOURCE], "val?": [SOURCE]},
    "data_fingerprint?": "64-bit integer",
    "revision?": "text",
    "host?": "text",
    "devices?": ["text"],
    "command_line?": ["text"],
    "ranks?": "non-negative integer",
    "threads?": "positive integer",
    "environment?": {"*": "text"},
    "starts?": [
        {
            "step": "non-negative integer",
            "revision?": "text",
            "host?": "text",
            "ranks?": "non-negative integer",
            "threads?": "positive integer",
            "environment?": {"*": "text"},
            "changed": CHANGED,
            "model?": MODEL,
            "data_fingerprint?": "64-bit integer",
        }
    ],
}
LAB = {
    "plan": "text",
    "size": "text",
    "title": "text",
    "question?": "text",
    "reference": "text",
    "sweep-seeds?": ["non-negative integer"],
    "registration?": [
        {"sha256": "text", "plan?": "text", "time": "text", "commit": "text", "changed": ["text"], "options": {}}
    ],
    "arms": {"*": {"label?": "text", "match?": "text", "tokens?": "positive integer"}},
    "runs": [{"name": "text", "arm": "text", "seed?": "non-negative integer"}],
}
EVALUATION = {
    "loss?": "number or null",
    "loss_by_position?": ["number or null"],
    "windows?": "64-bit integer",
    "data_fingerprint?": "64-bit integer",
}
RECORDS = {
    "train": {"tokens": "number", "*": "value"},
    "val": {"loss": "number or null", "windows?": "non-negative integer", "data_fingerprint?": "64-bit integer"},
    "stats": {"kind": "text", "layer": "non-negative integer", "expert_load?": ["number"], "*": "number or null"},
    "sample": {"text": ("text",), "stopped?": "text"},
    "event": {"what?": "text"},
    "choices": {
        "name": "text",
        "examples": "positive integer",
        "accuracy": "share",
        "chance": "share",
        "norm": "text",
        "fingerprint": "64-bit integer",
        **{f"{key}?": "number or null" for key in ("accuracy_se", "accuracy_norm", "accuracy_norm_se")},
        **{f"{key}?": "number or null" for key in ("bits_per_byte", "bits_per_byte_se")},
    },
}
# of a train record; may be null
NUMBERS = ("loss", "grad_norm", "lr", "tokens_per_s", "ms", "flops_util", "loss_z", "grad_z")
RECORDS["train"].update({f"{key}?": "number or null" for key in NUMBERS})


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= 1e300


def violation(value, shape, where=""):
    """The first violation of a schema, in words; "" if there is none."""
    if isinstance(shape, str):
        return "" if TYPES[shape](value) else f"{where or 'it'} is not a {shape}"
    if isinstance(shape, tuple):
        return violation(value, shape[0], where) if value is not None else ""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is not a list"
        return next(
            (wrong for i, item in enumerate(value) if (wrong := violation(item, shape[0], f"{where}[{i}]"))), ""
        )
    if not isinstance(value, dict):
        return f"{where or 'it'} is not an object"
    for key in shape:
        if key != "*" and not key.endswith("?") and key not in value:
            return f"it has no {where + '.' if where else ''}{key}"
    for key, item in value.items():
        inner = shape.get(key) or shape.get(f"{key}?") or shape.get("*")
        wrong = violation(item, inner, f"{where}.{key}" if where else key) if inner else ""
        if wrong:
            return wrong
    return ""
