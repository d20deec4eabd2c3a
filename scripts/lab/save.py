"""save.py: the command `save`: the runs of studies in one file, a line of JSON each (saved.py), which is kept.

    python3 scripts/lab save runs/stability-cpu [MORE...] results/stability.jsonl

`report` reads it like a run directory. RUNS may be such a file: with new runs it makes a larger one. Exit status: 0
done; 1 failed, or a file was left out; 2 usage, or the runs are not comparable.
"""

import sys

from . import cli, run_directory, saved
from . import study as studies
from .run_directory import RunError


def main(words):
    parser = cli.Parser(prog="lab save", description="Writes the runs of studies into one file.")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="directories of labs, or saved files")
    parser.add_argument("file", metavar="FILE.jsonl", help="file to write; RUNS may have it")
    a = parser.parse_args(words)
    fail = lambda message, status=1: cli.fail("lab save", message, status)
    try:
        found, left_out = studies.load(a.runs)
        for line in left_out:
            print(f"lab save: {line}; left out", file=sys.stderr)
        for study in found:
            if not study.lab:
                fail(f"{study.name}: the runs are not of a plan, so they have no arms and no reference", 2)
            if study.problems:
                fail(f"the runs of {study.name} are not comparable: {study.problems[0]}", 2)
        count = sum(run.state in ("done", "diverged") for study in found for run in study.runs)
        if not count:
            fail("no run has ended")
        text = saved.text_of(found)
        run_directory.write_atomic(a.file, text)
    except RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or a.file}: {error.strerror}")
    print(f"{a.file}: {count} runs, {len(text) // count} bytes each")
    return 1 if left_out else 0
