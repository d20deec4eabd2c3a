#!/usr/bin/env python3
"""update_docs.py: writes the generated parts of docs/: the text of --help in options.md.

Usage: scripts/update_docs.py [--check]
  --check   write nothing; name the documents that differ from what this program would write
Variables: TRAIN_DIFFV2 (./train_diffv2, which is built first when the variable is not set)
Exit status: 0 the documents are up to date, 1 failed, or with --check not up to date, 2 usage.
"""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("TRAIN_DIFFV2", "./train_diffv2").split()


def fail(text):
    sys.exit(f"update_docs.py: {text}")


def run(*words):
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def replace(document, name, text):
    """The document with `text` between its markers <!-- NAME: begin ... --> and <!-- NAME: end -->."""
    pattern = re.compile(rf"(<!-- {name}: begin[^\n]*\n).*?(<!-- {name}: end -->)", re.S)
    if len(pattern.findall(document)) != 1:
        fail(f"a document lacks the markers <!-- {name}: begin and <!-- {name}: end -->")
    return pattern.sub(lambda m: m[1] + text + m[2], document)


def options():
    return f"```\n{run(*PROGRAM, '--help')}```\n"


# document -> marker -> what is written between the markers
GENERATED = {"docs/options.md": {"help": options}}


def main():
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return 0
    if arguments not in ([], ["--check"]):
        print(
            f"update_docs.py: unexpected arguments {arguments}: usage: scripts/update_docs.py [--check]",
            file=sys.stderr,
        )
        return 2
    if "TRAIN_DIFFV2" not in os.environ:
        run("make", "-s", "train_diffv2")
    stale = []
    for name, parts in GENERATED.items():
        path = ROOT / name
        old = text = path.read_text(encoding="utf-8")
        for marker, write in parts.items():
            text = replace(text, marker, write())
        if text != old:
            stale.append(name)
            if not arguments:
                path.write_text(text, encoding="utf-8")
    if arguments and stale:
        fail(f"{', '.join(stale)} not up to date: run scripts/update_docs.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
