#!/usr/bin/env python3
"""
Compares what the trainer prints with the transcripts in tests/golden: help, errors, dry runs and the keys of its files.

A transcript is a list of shell commands. The output of each follows it:

  $ COMMAND
  lines of stdout and stderr
  (exit 1)            if the exit status is not 0

All commands of a file run in order in one empty directory. They find the programs train_diffv2, predict_diffv2,
make_data (writes train.bin, val.bin, choices.bin) and keys FILE... (prints the keys of JSON files), and the repository
as $ROOT.

No transcript depends on the CPU or on variables that select its instructions (DNNL_MAX_CPU_ISA).

Masks: sizes of workspace, and totals that include them, depend on the vector width of the CPU, and the available memory
on the machine. WORKSPACE and MACHINE are these lines; the first pattern spares predictions for a GPU. Environment
variables are not keys.

Usage: tests/golden_test.py --update    writes what the program prints into the transcripts, whose commands stay
Variables: TRAIN_DIFFV2, PREDICT_DIFFV2 (build/train_diffv2, build/predict_diffv2): the commands of the programs
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/reference"))
import fixtures

PATHS = sorted((ROOT / "tests/golden").glob("*.txt"))
WORKSPACE = re.compile(r"^(  (?:workspace|total|\d)) +[\d.]+ MiB", re.M)
MACHINE = re.compile(r"^this machine has .*", re.M)


def masked(command, text):
    text = MACHINE.sub("this machine has #", text)
    return text if "predict_diffv2" in command else WORKSPACE.sub(r"\1 # MiB", text)


def blocks(text):
    """(command, output) of a transcript. Comments before its first command are kept as one block without a command."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.M)
    return [(None, parts[0])] + list(zip(parts[1::2], parts[2::2]))


def output(command, directory, environment):
    done = subprocess.run(
        ["bash", "-c", f"{{ {command}; }} 2>&1"], cwd=directory, env=environment, stdout=subprocess.PIPE, check=False
    )
    status = f"(exit {done.returncode})\n" if done.returncode else ""
    return masked(command, done.stdout.decode(errors="replace").replace(str(directory), "DIRECTORY")) + status


def run(path):
    """The blocks of a transcript with what the commands print now."""
    with tempfile.TemporaryDirectory() as temporary:
        programs, directory = Path(temporary) / "bin", Path(temporary) / "run"
        for made in (programs, directory):
            made.mkdir()
        tools = {}
        for name in ("train_diffv2", "predict_diffv2"):
            words = os.environ.get(name.upper(), f"build/{name}").split()
            tools[name] = " ".join(str(Path(w).resolve()) if Path(w).exists() else w for w in words)
        tools |= {name: f"{sys.executable} {Path(__file__).resolve()} --{name}" for name in ("make_data", "keys")}
        for name, command in tools.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (programs / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "ROOT": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        environment |= {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
        return [(c, o if c is None else output(c, directory, environment)) for c, o in blocks(path.read_text())]


def make_data():
    """Shards with tokens below 31, and choices.bin: 3 examples of 2 completions, one of which has 2 tokens."""
    for name, count, step in (("train.bin", 3000, 7), ("val.bin", 500, 11)):
        tokens = [i * step % 31 ^ i // 31 % 8 for i in range(count)]
        Path(name).write_bytes(fixtures.token_shard_bytes(struct.pack(f"<{count}H", *tokens)))
    examples = [[i, i % 2, 2, 2, 5, 6, 2, 1, 2, 2, 3, 4] for i in range(3)]
    words = [w for e in examples for w in (65535, 2 * len(e) + 4, *e)]
    header = struct.pack("<4i", 20240522, 1, 3, 2 * len(examples[0]) + 4).ljust(1024, b"\0")
    Path("choices.bin").write_bytes(header + struct.pack(f"<{len(words)}H", *words))


def objects_in(value, path):
    """(path, keys) of all objects in a JSON value."""
    if isinstance(value, dict):
        yield path, list(value)
        for key, inner in value.items():
            yield from objects_in(inner, f"{path} {key}")
    elif isinstance(value, list):
        for inner in value:
            yield from objects_in(inner, f"{path}[]")


def print_keys(paths):
    """A line for each object of a JSON file, with its keys; of JSON lines, for each kind of record."""
    for path in map(Path, paths):
        objects = {}
        for line in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            record = json.loads(line)
            name = " ".join(filter(None, (path.name, record.get("kind"), record.get("what"))))
            for inner, keys in objects_in(record, name):
                objects.setdefault(inner, {}).update({} if inner.endswith(" environment") else dict.fromkeys(keys))
        for name in sorted(objects):
            print(f"{name}:", *objects[name])


def pytest_generate_tests(metafunc):
    metafunc.parametrize("path", PATHS, ids=[path.name for path in PATHS])


def test_the_trainer_prints_what_is_in_its_transcript(path):
    printed = run(path)
    assert [f"$ {c}\n{t}" for c, t in printed] == [f"$ {c}\n{t}" for c, t in blocks(path.read_text())]


def main(arguments):
    if arguments[:1] == ["--make_data"]:
        return make_data()
    if arguments[:1] == ["--keys"]:
        return print_keys(arguments[1:])
    if arguments != ["--update"]:
        print("usage: golden_test.py --update", file=sys.stderr)
        return 2
    for path in PATHS:
        path.write_text("".join(text if command is None else f"$ {command}\n{text}" for command, text in run(path)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
