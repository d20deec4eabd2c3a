"""saved.py: the file of the command `save`: a line for each study (STUDY below), followed by a line for each of its
runs that has ended: the fields of a Run (runs.py), with seven digits.
"""

import json

from . import run_directory, schema
from .run_directory import RunError
from .runs import LAYERS, Run

VERSION = 1
STUDY = {
    "version": "positive integer",
    "study": "text",
    **{key: schema.LAB[key] for key in ("plan", "size", "title", "question?", "reference", "arms")},
    **{key: schema.LAB[key] for key in ("sweep-seeds?", "registration?")},
}
COLUMN = ["number or null"]
READ = {"windows?": "number or null", "fingerprint?": ("text",)}
RUN = {
    **{key: "text" for key in ("name", "arm", "state")},
    "seed": "64-bit integer",
    "rate": "positive number",
    "info": schema.RUN,
    "last": "non-negative integer",
    "val": [{"step": "non-negative integer", "loss": "number or null"}],
    "reads": [{"step": "non-negative integer", "data": (READ,)}],
    "eval": (
        {**{key: schema.EVALUATION[key] for key in ("loss?", "windows?", "data_fingerprint?")}, "positions": COLUMN},
    ),
    "curve": {"step": ["positive integer"], "loss": COLUMN, "grad_norm": COLUMN},
    "spikes": {"loss": ["non-negative integer"], "grad_norm": ["non-negative integer"]},
    "speed": ({key: "positive number" for key in ("median", "low", "high")},),
    "layers": {"step": ["positive integer"], **{f"{key}?": [COLUMN] for key in LAYERS}},
}


def short(value):
    """A JSON value with seven digits."""
    if isinstance(value, dict):
        return {key: short(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(x) for x in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def compact(value):
    return json.dumps(short(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def text_of(studies):
    """The lines of a file."""
    lines = []
    for study in studies:
        lines.append(compact({"version": VERSION, "study": study.name} | study.lab))
        for run in (run for run in study.runs if run.state in ("done", "diverged")):
            lines.append(compact({key: getattr(run, key) for key in RUN}))
    return "".join(lines)


def equal_lengths(entry):
    """Whether the columns of a run have one length each."""
    table, layers = entry["curve"].values(), entry["layers"]
    rows = [row for key in LAYERS for row in layers.get(key, ())]
    return (
        len(set(map(len, table))) == 1
        and all(len(layers[key]) == len(layers["step"]) for key in LAYERS if key in layers)
        and len(set(map(len, rows))) <= 1
        and all(len(of) == 2 for key in ("loss", "grad_norm") for of in [entry["spikes"][key]])
        and entry["reads"]
    )


def run_of(entry):
    """The Run of a line. Raises ValueError."""
    wrong = schema.violation(entry, RUN) or run_directory.wrong_options(entry["info"])
    if wrong or not equal_lengths(entry):
        raise ValueError(wrong or "its columns have several lengths")
    run = Run(**{key: entry[key] for key in RUN})
    run.seed = int(run.seed)
    return run


def read(path):
    """[(header, [Run])] of a file. Raises RunError with the number of the first line that is wrong."""
    found = []
    try:
        lines = open(path, "rb").read().splitlines()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = run_directory.parse(line)
            header = isinstance(entry, dict) and "study" in entry
            if header and (wrong := schema.violation(entry, STUDY)):
                raise ValueError(wrong)
            if header and entry["version"] != VERSION:
                raise ValueError(f"version {entry['version']} of the format, must be {VERSION}")
            if header:
                found.append((entry, []))
            elif not found:
                raise ValueError("no line of a study precedes it")
            else:
                found[-1][1].append(run_of(entry))
        except (ValueError, RecursionError, OverflowError) as error:
            raise RunError(f"{path}:{number}: {error}") from None
    if not found:
        raise RunError(f"{path}: has no runs")
    return found
