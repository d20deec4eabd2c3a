#!/usr/bin/env python3
"""
test_versions.py with the newest release of the transformers library, which `pip install transformers` gives today.

A newer version than the pinned ones is installed into build/transformers-VERSION with the packages that it requires,
except PyTorch. A change of the library is no mistake of this repository: a test that fails with a newer version is
printed and counts as skipped. If the index cannot be read, that counts as skipped too.

Usage: newest.py, with the interpreter of scripts/python_environment.py hub
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build"
sys.path.insert(0, str(HERE.parent.parent / "scripts/export"))
from model_card import TRANSFORMERS


def install(*arguments):
    """What pip prints. Ends the program if it fails."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--retries", "1", "--timeout", "30", *arguments], capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stderr}skip newest transformers: pip install {arguments[-1]} failed: the lines above say why")
        print("0 passed, 0 failed, 1 skipped")
        sys.exit(0)
    return done.stdout


def main():
    report = install("--dry-run", "--no-deps", "--ignore-installed", "--report", "-", "transformers")
    version = json.loads(report)["install"][0]["metadata"]["version"]
    if version in TRANSFORMERS:
        print(f"ok   newest transformers: {version}, which requirements.in pins\n1 passed, 0 failed")
        return
    place = BUILD / f"transformers-{version}"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as work:
            install("--target", f"{work}/packages", f"transformers=={version}")
            Path(work, "packages").rename(place)
    command = [sys.executable, "-m", "pytest", HERE / "test_versions.py", "-m", "not slow"]
    more = {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | more)
    *lines, last = done.stdout.splitlines() or [""]
    counts = re.fullmatch(r"(\d+) passed, (\d+) failed(?:, (\d+) skipped)?", last)
    passed, failed, skipped = (int(n or 0) for n in counts.groups()) if counts else (0, 1, 0)
    print("\n".join(re.sub(r"^FAIL (.*)", r"skip \1: the lines above say why", line) for line in lines))
    if not counts:
        print(
            f"{last}\nskip versions: ended with status {done.returncode} before its last test: the lines above say why"
        )
    print(f"     transformers {version} is newer than {TRANSFORMERS[-1]}, the newest pinned one: failures are skipped")
    print(f"{passed} passed, 0 failed, {failed + skipped} skipped")


if __name__ == "__main__":
    main()
