#!/usr/bin/env python3
"""
The inventory of tests, dev/redesign/tests.txt: the sentence of each test before the redesign, by file. Each line is
marked:

  kept      SENTENCE               a test has this sentence, in any file
  moved     SENTENCE -> SENTENCE   a test with the second sentence replaces it, which must exist
  removed   SENTENCE -> REASON

Usage: dev/redesign/sentences.py [--write]
Prints the sentences that are marked kept or moved and have no test, and marks without a reason. Exit status: 0 none, 1
some.
  --write   adds the sentences of new tests, marked kept
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "dev/redesign/tests.txt"
STRING = r'"((?:[^"\\]|\\.)*(?:"\s*"(?:[^"\\]|\\.)*)*)"'
C = [r"\{\s*" + STRING + r",\s*test_\w+\s*\}"]
PATTERNS = {  # of the sentences in a file, by its suffix; a function's name is a sentence, or the line after it
    **dict.fromkeys((".c", ".h", ".cu", ".cuh", ".cpp"), C),
    ".py": [
        r'^def test_\w+\([^)]*\):\n    """([^\n]*)"""$',
        r"^@test[^\n]*\ndef (\w+)",
        r"^def test_(\w+)\(",
        r"^TESTS = \((.*?)^\)",
        r"\breport\(\s*" + STRING,
    ],
    ".sh": [r"^test_(\w+)\(\) \{", r'\bok "([^"]*)"'],
}


def sentences(path):
    found = []
    for pattern in PATTERNS.get(path.suffix, []):
        for match in re.findall(pattern, path.read_text(encoding="utf-8"), re.M | re.S):
            names = re.findall(r"^ +(\w+),", match, re.M) if pattern.startswith("^TESTS") else [match]
            found += [re.sub(r'"\s*"', "", n) if " " in n else n.replace("_", " ") for n in names]
    return [name for name in dict.fromkeys(found) if " " in name]


def all_sentences():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [
        n for n in names if re.search(r"^tests/|(^|/)test_\w+\.\w+$|^scripts/test\.sh$|^dev/cuda_on_cpu/\w+\.cu", n)
    ]
    return {name: sentences(ROOT / name) for name in paths if (ROOT / name).is_file()}


def read():
    """[(file, mark, sentence, what follows the arrow)]"""
    rows, file = [], None
    for line in INVENTORY.read_text().splitlines() if INVENTORY.exists() else []:
        if line.startswith("  "):
            mark, _, rest = line.strip().partition(" ")
            sentence, _, after = rest.strip().partition(" -> ")
            rows.append((file, mark, sentence, after))
        elif line:
            file = line
    return rows


def write(rows):
    files = dict.fromkeys(row[0] for row in rows)
    line = lambda row: f"  {row[1]:8} {row[2]}" + (f" -> {row[3]}" if row[3] else "")
    INVENTORY.write_text("\n".join("\n".join([f, *(line(r) for r in rows if r[0] == f)]) + "\n" for f in files))


def main():
    if sys.argv[1:] not in ([], ["--write"]):
        print("usage: sentences.py [--write]", file=sys.stderr)
        return 2
    rows, now = read(), all_sentences()
    there = {sentence for found in now.values() for sentence in found}
    if sys.argv[1:]:
        known = {row[2] for row in rows} | {row[3] for row in rows}
        rows += [(file, "kept", s, "") for file, found in now.items() for s in found if s not in known]
        write(rows)
    wrong = []
    for file, mark, sentence, after in rows:
        if mark not in ("kept", "moved", "removed") or (mark != "kept" and not after):
            wrong.append(
                f"{file}: {mark} '{sentence}': the mark must be kept, or moved or removed with what follows ->"
            )
        elif mark != "removed" and (after or sentence) not in there:
            wrong.append(f"{file}: {mark}, but no test says: {after or sentence}")
    print(*wrong, f"{len(rows)} sentences, {len(wrong)} without a test or a reason", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
