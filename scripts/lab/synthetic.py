"""synthetic.py: the needles of a plan, as files for --eval-choices, and their scores. data/needles.py writes the files.

    OUT/tasks/NAME.bin   the questions of a task, the same for all runs with the same data and context; NAME.bin.json:
                         what they ask

exact     the share of answers that are the most likely of all tokens
interval  Wilson's, 95 %, over questions, which are independent where a model guesses
"""

import collections
import hashlib
import json
import math
import subprocess

import python_environment

from . import run_directory

PROGRAM = python_environment.ROOT / "data/needles.py"


class SyntheticError(Exception):
    """What is wrong with a task, in one line."""


def run_program(*words):
    """Runs a Python program. Raises SyntheticError with its message."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise SyntheticError(said[-1].removeprefix("needles.py: "))


def name_of(run):
    return f"needles-{run.needles.replace(':', '-')}"


def file_of(out, run, context):
    """The file of a run; None without a task. context: of its model"""
    if not run.needles or "val-data" not in run.options:
        return None
    data = "\0".join(run.options.get(key, "") for key in ("val-data", "separator"))
    return out / "tasks" / f"{name_of(run)}-T{context}-{hashlib.sha256(data.encode()).hexdigest()[:8]}.bin"


def write(out, run, context):
    """Writes the file of a run if it does not exist. Raises SyntheticError."""
    path = file_of(out, run, context)
    if path is None or path.with_name(f"{path.name}.json").exists():
        return
    path.parent.mkdir(exist_ok=True)
    words = [run.needles, "--val-data", run.options["val-data"], "--seq-len", context, "--out", path]
    if "separator" in run.options:
        words += ["--separator", run.options["separator"].partition(":")[0]]
    run_program(python_environment.interpreter("data"), PROGRAM, *words)


def choices(run, path):
    """The value of --eval-choices for the file of a run."""
    escaped = str(path).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"{name_of(run)}={escaped}"


def score(questions):
    """The scores of [(right, exact, chance)]."""
    n, z = len(questions), 1.959963984540054  # 95 %
    accuracy, exact, chance = (sum(column) / n for column in zip(*questions))
    middle, scale = accuracy + z * z / (2 * n), 1 + z * z / n
    width = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    low, high = max(0, (middle - width) / scale), min(1, (middle + width) / scale)
    return {"accuracy": accuracy, "low": low, "high": high, "exact": exact, "chance": chance}


def scores(task, found):
    """The "needles" of an evaluation. task: what the file asks; found: the answers to it, of --eval-out"""
    rows = zip(found["answers"], found["most_likely"], task["labels"], task["candidates"], strict=True)
    questions = [(best == label, exact, 1 / candidates) for best, exact, label, candidates in rows]
    of_place = collections.defaultdict(list)
    for place, question in zip(task["places"], questions, strict=True):
        of_place[tuple(place)].append(question)
    deepest = max(depth for _, depth in of_place)
    cells = [
        {"length": length, "depth": depth / deepest, "questions": len(asked), **score(asked)}
        for (length, depth), asked in sorted(of_place.items())
    ]
    facts = {key: task[key] for key in ("needles", "asked", "symbols", "words")}
    return facts | {"questions": len(questions), **score(questions), "cells": cells}


def add_scores(path, evaluation):
    """Adds the scores of a file to an evaluation. Raises SyntheticError."""
    description = path.with_name(f"{path.name}.json")
    try:
        task, whole = (json.loads(file.read_text(encoding="utf-8")) for file in (description, evaluation))
        found = [t for t in whole.get("choices") or [] if t["fingerprint"] == task["fingerprint"] and "answers" in t]
        if not found:
            raise SyntheticError(f"{evaluation} has no answers to {path}")
        whole["needles"] = scores(task, found[0])
    except OSError as error:
        raise SyntheticError(f"{error.filename}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise SyntheticError(f"{description}: damaged, or not of {evaluation}") from None
    run_directory.write_atomic(evaluation, json.dumps(whole) + "\n")
