#!/usr/bin/env python3
"""rooms.py: checks the structure of llmc/: includes point downwards, and headers compile alone.

Usage: dev/rooms.py [--root DIRECTORY]
Prints one line per offender. Exit status: 0 none, 1 some, 2 usage.

  layers    an include stays in its room or points to a room of a lower layer
  product   llmc/ and the trainer include nothing of dev/ or tests/
  alone     each .h of llmc/ compiles as C, without CUDA's headers. PARTS do not: each needs what the file that includes
            it has defined. One that does compile alone must leave the list.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

LAYERS = [["base"], ["model", "data", "text", "cuda"], ["ops"], ["comm"], ["checkpoint"], ["run"]]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
PARTS = {  # of comm.h; of the trainer, whose Model they read
    "llmc/comm/comm_mpi.h",
    "llmc/run/memory_report.h",
    "llmc/run/prediction.h",
    "llmc/run/prediction_communication.h",
    "llmc/run/prediction_report.h",
}
COMPILE = ["gcc", "-std=gnu11", "-fopenmp", "-fsyntax-only", "-w", "-Werror=implicit-function-declaration", "-x", "c"]


def product(root):
    found = [p for p in (root / "llmc").rglob("*") if p.suffix in (".h", ".cuh", ".cpp")]
    return sorted(found + [p for p in root.glob("train_diffv2.*") if p.suffix in (".c", ".cu")])


def includes(path, root):
    """What a file includes, as paths below the root."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.M):
        yield os.path.relpath(os.path.normpath(path.parent / name), root)


def wrong_includes(root):
    for path in product(root):
        own = path.relative_to(root).parts
        for target in includes(path, root):
            parts = pathlib.PurePath(target).parts
            if parts[0] in ("dev", "tests"):
                yield f"{'/'.join(own)} includes {target}: the product includes nothing of {parts[0]}/"
            elif own[0] == "llmc" and (parts[0] != "llmc" or len(parts) != 3 or parts[1] not in LAYER):
                yield f"{'/'.join(own)} includes {target}, which is in no room of llmc/"
            elif own[0] == "llmc" and parts[1] != own[1] and LAYER[parts[1]] >= LAYER.get(own[1], -1):
                yield f"{'/'.join(own)} includes {target}: {own[1]} does not lie above {parts[1]}"


def alone(path, root):
    """Why a header does not compile as it should; None: it does."""
    name = str(path.relative_to(root))
    done = subprocess.run([*COMPILE, str(path)], capture_output=True, text=True, check=False)
    if name in PARTS:
        return f"{name} compiles alone: remove it from PARTS" if done.returncode == 0 else None
    if done.returncode == 0:
        return None
    error = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr[:200])
    return f"{name} does not compile alone: {error}"


def offenders(root):
    headers = [p for p in product(root) if p.suffix == ".h"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*wrong_includes(root), *filter(None, pool.map(lambda p: alone(p, root), headers))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    found = offenders(parser.parse_args().root)
    print("\n".join(found) if found else "every include points downwards, every header compiles alone")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
