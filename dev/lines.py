#!/usr/bin/env python3
"""
Counts the lines of code of each room, in files that git tracks. Lock files, fixtures, results and documents do not
count.

Usage: dev/lines.py
Prints the lines before the redesign and now, then the total and its budget. It only reports: a number above the budget
is no error.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIX = re.compile(r"\.(c|h|cu|cuh|cpp|py|sh|j2|awk|mk|plan)$")
WITHOUT_SUFFIX = {"Makefile", ".ci/run", "data/inspect"}
TEST = re.compile(r"^tests/|(^|/)(test_\w+|conftest)\.\w+$|(^|/)testing\.py$")
BUDGET = 72000  # of the redesign
LATER_BUDGETS = {  # what each later part of the work may add, with its tests
    "compiled PTX, and the GPU check": 2600,
    "attention of pairs": 3000,
    "experts by a library, groups of ranks": 1400,
    "optimizers, scaling, spikes": 2800,
    "sparse attention, upcycling": 2200,
    "exports and pages": 1400,
    "archive and claims of the lab": 1600,
}
BEFORE = """
    Makefile 261 trainer 1763 data 3000 dev 495 dev/bench 2716 dev/emulator 3729 dev/format 45 dev/fuzz 1663
    dev/gpu_check 2325 dev/reference 2026 dev/results 501 llmc/base 1219 llmc/checkpoint 1530 llmc/comm 2072
    llmc/cuda 2008 llmc/data 1548 llmc/model 1083 llmc/ops 8529 llmc/run 8610 llmc/text 1005 scripts 3452
    scripts/lab 7403 scripts/plans 1023 tests 35274
""".split()
BEFORE = dict(zip(BEFORE[::2], map(int, BEFORE[1::2])))


def room(path):
    """The first two folders of llmc/, dev/ and scripts/, else the first; tests are one room."""
    parts = path.split("/")
    if TEST.search(path):
        return "tests"
    if len(parts) == 1:
        return "trainer" if parts[0].startswith(("predict_diffv2.", "train_diffv2.")) else "Makefile"
    if parts[0] in ("llmc", "dev", "scripts") and len(parts) > 2:
        return "/".join(parts[:2])
    return "Makefile" if parts[0] == ".ci" else parts[0]


def counts():
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    found = {}
    for name in names:
        if (name in WITHOUT_SUFFIX or SUFFIX.search(name)) and (ROOT / name).exists():
            found[room(name)] = found.get(room(name), 0) + (ROOT / name).read_bytes().count(b"\n")
    return found


def main():
    if len(sys.argv) > 1:
        print(f"lines.py: unexpected argument '{sys.argv[1]}': usage: dev/lines.py", file=sys.stderr)
        return 2
    now = counts()
    order = sorted({*now, *BEFORE}, key=lambda name: (name not in ("trainer", "Makefile"), name))
    rows = [(name, BEFORE.get(name, 0), now.get(name, 0)) for name in order]
    rows.append(("total", sum(BEFORE.values()), sum(now.values())))
    print(f"{'lines of code':20}{'before':>8}{'now':>8}{'change':>8}")
    for name, before, lines in rows:
        print(f"{name:20}{before:8}{lines:8}{lines - before:+8}")
    for name, lines in {"budget": BUDGET, **LATER_BUDGETS}.items():
        print(f"{name:37}{lines:7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
