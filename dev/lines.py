#!/usr/bin/env python3
"""
Counts the lines of code of each room and ring, in files that git tracks, and compares the rings with their limits. Lock
files, fixtures, results and documents do not count.

Usage: dev/lines.py
Exit status: 0 no ring is above its limit, 1 one is, 2 usage. A commit that raises a limit says what for.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUFFIX = re.compile(r"\.(c|h|cu|cuh|cpp|py|sh|j2|awk|mk|plan)$")
WITHOUT_SUFFIX = {"Makefile", ".ci/run", "data/inspect"}
TEST = re.compile(r"^tests/|(^|/)(test_\w+|conftest)\.\w+$|(^|/)testing\.py$")
LIMITS = {"ring 1": 31810, "ring 2": 25800, "tests": 28140}
AIMS = {"ring 1": 30000, "ring 2": 25000, "tests": 29000}
LEVELS = {"llmc/ops": 3, "llmc": 2, "dev": 2, "scripts": 2}  # folders whose folders are rooms, and the depth of these


def place(path):
    """(ring, room) of a path."""
    if TEST.search(path):
        return "tests", "tests" if path.startswith("tests/") else "tests elsewhere"
    folders = path.split("/")[:-1]
    depth = next((n for name, n in LEVELS.items() if path.startswith(f"{name}/")), 1)
    room = "/".join(folders[:depth])
    if path.startswith("train_diffv2."):
        return "ring 1", "the trainer"
    return "ring 1" if path.startswith("llmc/") else "ring 2", room or "Makefile"


def counts():
    """{ring: {room: lines}}"""
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    found = {ring: {} for ring in LIMITS}
    for name in names:
        if (name in WITHOUT_SUFFIX or SUFFIX.search(name)) and (ROOT / name).exists():
            ring, room = place(name)
            found[ring][room] = found[ring].get(room, 0) + (ROOT / name).read_bytes().count(b"\n")
    return found


def above(found):
    """A line for each ring above its limit."""
    lines = {ring: sum(rooms.values()) for ring, rooms in found.items()}
    return [
        f"{ring} has {lines[ring]} lines, and its limit in dev/lines.py is {limit}: remove some, or say in a commit "
        "what the limit is raised for"
        for ring, limit in LIMITS.items()
        if lines[ring] > limit
    ]


def main():
    if len(sys.argv) > 1:
        print(f"lines.py: unexpected argument '{sys.argv[1]}': usage: dev/lines.py", file=sys.stderr)
        return 2
    found = counts()
    for ring, rooms in found.items():
        print(f"{ring:20}{sum(rooms.values()):8} of {LIMITS[ring]}, aim {AIMS[ring]}")
        for room, lines in sorted(rooms.items()):
            print(f"  {room:18}{lines:8}")
    total = sum(sum(rooms.values()) for rooms in found.values())
    print(f"{'all':20}{total:8} of {sum(LIMITS.values())}, aim {sum(AIMS.values())}")
    print("\n".join(above(found)), end="\n" if above(found) else "")
    return 1 if above(found) else 0


if __name__ == "__main__":
    sys.exit(main())
