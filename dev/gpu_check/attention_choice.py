#!/usr/bin/env python3
"""
Writes the measured times of attention into the table of llmc/ops/attention/attention_choice.h, by which
--attention-kernel auto chooses.

Usage: dev/gpu_check/attention_choice.py [--check | --print] [FILE...]
  FILE      results.json of dev/gpu_check.sh with the part `attention` (default: results/gpu-*.json). The
            last of several with one device and shape is taken
  --check   write nothing; exit status 1 if the table differs
  --print   print the rows instead
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = ROOT / "llmc/ops/attention/attention_choice.h"
DIRECTIONS = ("attention forward", "attention backward")


def rows(files):
    """The rows of the table, in C."""
    found = {}
    for path in files:
        with open(path) as file:
            part = json.load(file)["parts"].get("attention", {"rows": []})
        for row in part["rows"]:
            key = re.match(r"\{(\".*\", \d+, \d+, \d+, \d+, (?:true|false))\}", row.get("note") or "")
            if row["case"] in DIRECTIONS and key and not key[1].startswith('"unlisted"'):
                found.setdefault(key[1], {})[row["case"]] = row["expected"], row["measured"]
    times = lambda by, i: "{" + ", ".join(f"{by[d][i]:.4g}" for d in DIRECTIONS) + "}"
    return "".join(f"    {{{k}, {times(by, 0)}, {times(by, 1)}}},\n" for k, by in sorted(found.items()) if len(by) == 2)


def main(words):
    files = [w for w in words if not w.startswith("--")] or sorted(ROOT.glob("results/gpu-*.json"))
    if set(words) - set(map(str, files)) - {"--check", "--print"}:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    text = TABLE.read_text()
    new = re.sub(
        r"(    // rows: begin\n).*?(    // rows: end\n)", lambda m: m[1] + rows(files) + m[2], text, flags=re.S
    )
    if "--print" in words:
        print(rows(files), end="")
    elif "--check" not in words:
        TABLE.write_text(new)
    elif new != text:
        print(f"{TABLE.name} does not follow from the results: run dev/gpu_check/attention_choice.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
