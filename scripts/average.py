#!/usr/bin/env python3
"""Averages the weights of checkpoints of a run: OUT becomes a checkpoint directory for --init and --eval.

  scripts/average.py OUT CHECKPOINT CHECKPOINT...
  scripts/average.py runs/mytext/mean runs/mytext/checkpoints/step_*
  ./train_diffv2 --init runs/mytext/mean --eval --val-data mytext

The mean is computed in fp64 and rounded once to the type of the weights (F32 or BF16). Files are read in pieces of a
few MiB. OUT has config.json, model.safetensors and the tokenizer, and appears whole or not at all; it has no optimizer
state. Exit status: 0 done, 1 failed, 2 usage.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import python_environment

PIECE = 1 << 20  # elements at a time
WIDTHS = {"F32": 4, "BF16": 2}


class AverageError(Exception):
    pass


class Weights:
    """A model.safetensors that is read in pieces."""

    def __init__(self, checkpoint):
        self.path = checkpoint / "model.safetensors"
        self.config = (checkpoint / "config.json").read_text(encoding="utf-8")
        self.file = self.path.open("rb")
        size = int.from_bytes(self.file.read(8), "little")
        if size > self.path.stat().st_size:
            raise AverageError(f"{self.path} is not a safetensors file")
        self.header = self.file.read(size)
        try:
            tensors = json.loads(self.header)
        except ValueError as error:
            raise AverageError(f"{self.path} is not a safetensors file") from error
        tensors.pop("__metadata__", None)
        self.tensors = {name: (t["dtype"], *t["data_offsets"]) for name, t in tensors.items()}
        self.start = 8 + size

    def read(self, np, dtype, offset, count):
        """Elements as fp64. offset: in the data, in bytes."""
        self.file.seek(self.start + offset)
        data = self.file.read(count * WIDTHS[dtype])
        if len(data) != count * WIDTHS[dtype]:
            raise AverageError(f"{self.path} is truncated")
        if dtype == "F32":
            return np.frombuffer(data, "<f4").astype(np.float64)
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(np, mean, dtype):
    """The bytes of numbers, rounded to the nearest of their type; to even in the middle."""
    mean = mean.astype("<f4")
    if dtype == "F32":
        return mean.tobytes()
    bits = mean.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def average(np, out, models):
    first = models[0]
    for model in models[1:]:
        if model.tensors != first.tensors or json.loads(model.config) != json.loads(first.config):
            raise AverageError(f"{model.path} has another model than {first.path}: config.json or the tensors differ")
    with out.open("wb") as file:
        file.write(len(first.header).to_bytes(8, "little") + first.header)
        for name, (dtype, begin, end) in sorted(first.tensors.items(), key=lambda item: item[1][1]):
            if dtype not in WIDTHS:
                raise AverageError(f"{first.path}: {name} is {dtype}; it must be {' or '.join(WIDTHS)}")
            for offset in range(begin, end, PIECE * WIDTHS[dtype]):
                count = min(PIECE, (end - offset) // WIDTHS[dtype])
                mean = sum(model.read(np, dtype, offset, count) for model in models) / len(models)
                if not np.isfinite(mean).all():
                    raise AverageError(f"{name} has weights that are not finite")
                file.seek(first.start + offset)
                file.write(rounded(np, mean, dtype))
        file.flush()
        os.fsync(file.fileno())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="a directory that does not exist")
    parser.add_argument("checkpoints", metavar="CHECKPOINT", type=Path, nargs="+", help="two or more of one run")
    arguments = parser.parse_args()
    if len({path.resolve() for path in arguments.checkpoints}) < max(2, len(arguments.checkpoints)):
        parser.error("two or more different checkpoints are required")
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists: give another OUT")
    try:
        import numpy as np
    except ImportError:
        python_environment.ensure("lab")  # starts this again, with numpy
        raise
    partial = arguments.out.with_name(arguments.out.name + ".tmp")
    try:
        models = [Weights(path) for path in arguments.checkpoints]
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        average(np, partial / "model.safetensors", models)
        for file in arguments.checkpoints[-1].iterdir():
            if file.name == "config.json" or file.name.startswith("tokenizer"):
                shutil.copy(file, partial)
        partial.rename(arguments.out)
    except (AverageError, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        sys.exit(f"average.py: {error}")
    print(f"{arguments.out}: the mean of {len(models)} checkpoints; to evaluate: --init {arguments.out} --eval")


if __name__ == "__main__":
    main()
