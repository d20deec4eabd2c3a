"""Helpers: the output of programs, and the location of CUDA tools."""

import json
import os
import shutil
from pathlib import Path


def last_line(text, otherwise="no output"):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else otherwise


def json_lines(text):
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


def find_tool(name):
    """The path of a CUDA tool, which is often not on PATH; None if there is none."""
    places = [shutil.which(name)] + [
        str(p)
        for pattern in ("cuda*/bin", "cuda*/compute-sanitizer")
        for p in Path("/usr/local").glob(f"{pattern}/{name}")
    ]
    places += [str(p) for p in Path("/opt/nvidia").glob(f"nsight-*/*/{name}")]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)
