"""synthetic.py: the synthetic tasks of a plan, as files for --eval-choices. data/synthetic_tasks.py writes them, and
computes their scores.

    OUT/tasks/NAME.bin   the questions of a task, the same for all runs with the same data and context; NAME.bin.json:
                         what they ask
"""

import hashlib
import subprocess

import python_environment

PROGRAM = python_environment.ROOT / "data/synthetic_tasks.py"


class SyntheticError(Exception):
    """What is wrong with a task, in one line."""


def run_program(*words):
    """Runs a Python program. Raises SyntheticError with its message."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise SyntheticError(said[-1].removeprefix("synthetic_tasks.py: "))


def run_tasks(*words):
    run_program(python_environment.interpreter("data"), PROGRAM, *words)


def files(out, run, context):
    """{(task, value): file} of a run. context: of its model"""
    data = "\0".join(run.options.get(key, "") for key in ("val-data", "separator"))
    place = f"T{context}-{hashlib.sha256(data.encode()).hexdigest()[:8]}.bin"
    tasks = [("needles", run.tasks[key]) for key in ("eval-needles",) if key in run.tasks]
    tasks += [("shots", value) for value in run.tasks.get("eval-shots", "").split(",") if value]
    found = tasks if "val-data" in run.options else []
    return {(task, value): out / "tasks" / f"{task}-{value.replace(':', '-')}-{place}" for task, value in found}


def write(out, run, context):
    """Writes the files of a run that do not exist. Raises SyntheticError."""
    for (task, value), path in files(out, run, context).items():
        if path.with_name(f"{path.name}.json").exists():
            continue
        path.parent.mkdir(exist_ok=True)
        words = [task, value, "--val-data", run.options["val-data"], "--seq-len", context, "--out", path]
        if "separator" in run.options:
            words += ["--separator", run.options["separator"].partition(":")[0]]
        run_tasks(*words)


def choices(found):
    """The value of --eval-choices for files()."""
    names = [f"{task}-{value.replace(':', '-')}" for task, value in found]
    escaped = [str(path).replace("\\", "\\\\").replace(" ", "\\ ") for path in found.values()]
    return " ".join(f"{name}={path}" for name, path in zip(names, escaped))


def add_scores(found, evaluation):
    """Adds the scores of the files to an evaluation. Raises SyntheticError."""
    run_tasks("scores", evaluation, *found.values())
