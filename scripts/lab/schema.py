"""schema.py: what run.json, log.jsonl, eval.json and lab.json must be for the report to read them.

A shape is a kind by its name, [shape] of a list, or {key: shape} of an object, in which "key?" may be absent and "*" is
any other key. Keys that a shape does not name are free.
"""

import math


KINDS = {
    "text": lambda x: isinstance(x, str),
    "number": lambda x: is_number(x) and math.isfinite(x),
    "number or null": lambda x: x is None or is_number(x),
    "whole number": lambda x: is_number(x) and x == int(x) and 0 <= x <= 2**53,
    "whole number above 0": lambda x: is_number(x) and x == int(x) and 0 < x <= 2**53,
    "64-bit number": lambda x: (is_number(x) and x == int(x) and x >= 0)
    or (isinstance(x, str) and x.isascii() and x.isdigit()),
    "value": lambda x: x is None or isinstance(x, (str, int, float)),
}
OPTIONS = {
    **{
        key: "whole number above 0"
        for key in (
            "steps",
            "total-batch",
            "layers",
            "hidden",
            "heads",
            "kv-heads",
            "head-dim",
            "ffn",
            "seq-len",
            "vocab",
        )
    },
    **{key: "number" for key in ("lr", "warmup", "min-lr-ratio", "weight-decay", "beta1", "beta2", "grad-clip")},
    **{key: "text" for key in ("attention", "schedule", "gemm")},
    "seed": "64-bit number",
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
    "fingerprint?": "64-bit number",
}
RUN = {
    "options": OPTIONS,
    "model?": {"parameters?": "whole number", "flops_per_token?": "number"},
    "data?": {"train?": [SOURCE], "val?": [SOURCE]},
    "data_fingerprint?": "64-bit number",
    "revision?": "text",
    "host?": "text",
    "devices?": ["text"],
    "ranks?": "whole number",
    "starts?": [
        {
            "step": "whole number",
            "revision?": "text",
            "host?": "text",
            "ranks?": "whole number",
            "changed": [{"name": "text", "new": "value"}],
        }
    ],
}
LAB = {
    "plan": "text",
    "size": "text",
    "title": "text",
    "question?": "text",
    "reference": "text",
    "arms": {"*": {"label?": "text"}},
    "runs": [{"name": "text", "arm": "text"}],
}
EVALUATION = {
    "loss?": "number or null",
    "loss_by_position?": ["number or null"],
    "windows?": "64-bit number",
    "data_fingerprint?": "64-bit number",
    "recall?": [
        {
            "pairs": "whole number above 0",
            "noise": "whole number",
            "exact": "number or null",
            "among_values": "number or null",
            "loss": "number or null",
        }
    ],
    "attention?": {"layers": [{"*": "number or null"}]},
}
RECORDS = {
    "train": {"tokens": "number", "*": "value"},
    "val": {"loss": "number or null", "windows?": "whole number", "data_fingerprint?": "64-bit number"},
    "stats": {"kind": "text", "layer": "whole number", "*": "number or null"},
    "event": {"what?": "text"},
}
NUMBERS = (
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "ms",
    "flops_util",
    "loss_z",
    "grad_z",
)  # of a train record, or null
RECORDS["train"].update({f"{key}?": "number or null" for key in NUMBERS})


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) <= 1e300


def misfit(value, shape, where=""):
    """What a JSON value has that its shape does not allow, in words; "" when it fits."""
    if isinstance(shape, str):
        return "" if KINDS[shape](value) else f"{where or 'it'} is no {shape}"
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        return next((wrong for i, item in enumerate(value) if (wrong := misfit(item, shape[0], f"{where}[{i}]"))), "")
    if not isinstance(value, dict):
        return f"{where or 'it'} is no object"
    for key in shape:
        if key != "*" and not key.endswith("?") and key not in value:
            return f"it has no {where + '.' if where else ''}{key}"
    for key, item in value.items():
        inner = shape.get(key) or shape.get(f"{key}?") or shape.get("*")
        wrong = misfit(item, inner, f"{where}.{key}" if where else key) if inner else ""
        if wrong:
            return wrong
    return ""
