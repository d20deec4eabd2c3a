#!/usr/bin/env python3
"""Averages the weights of checkpoints of a run: OUT becomes a checkpoint directory for --init and --eval.

  scripts/average.py OUT CHECKPOINT CHECKPOINT...
  scripts/average.py runs/mytext/mean runs/mytext/checkpoints/step_*
  ./train_diffv2 --init runs/mytext/mean --eval --val-data mytext

The mean is computed in fp64, a tensor at a time, and rounded once to the type of the weights (F32 or BF16). OUT has
config.json, model.safetensors and the tokenizer, and appears whole or not at all; it has no optimizer state.
Exit status: 0 done, 1 failed, 2 usage.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import python_environment
from lab.run_directory import RunError
from lab.tensors import Tensors

TYPES = ("F32", "BF16")


def rounded(np, mean, dtype):
    """The bytes of numbers, rounded to the nearest of their type; to even in the middle."""
    mean = mean.astype("<f4")
    if dtype == "F32":
        return mean.tobytes()
    bits = mean.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def average(np, out, checkpoints):
    models = [Tensors(path / "model.safetensors") for path in checkpoints]
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in checkpoints]
    first = models[0]
    for model, config in zip(models[1:], configs[1:]):
        if model.header != first.header or config != configs[0]:
            raise RunError(f"{model.path} has another model than {first.path}: config.json or the tensors differ")
    with out.open("wb") as file, first.path.open("rb") as begin:
        file.write(begin.read(first.start))
        for name, tensor in first.header.items():
            mean = sum(model.read(name).astype(np.float64) for model in models) / len(models)
            if tensor["dtype"] not in TYPES:
                raise RunError(f"{first.path}: {name} is {tensor['dtype']}; it must be {' or '.join(TYPES)}")
            if not np.isfinite(mean).all():
                raise RunError(f"{name} has weights that are not finite")
            file.seek(first.start + tensor["data_offsets"][0])
            file.write(rounded(np, mean, tensor["dtype"]))
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
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        average(np, partial / "model.safetensors", arguments.checkpoints)
        for file in arguments.checkpoints[-1].iterdir():
            if file.name == "config.json" or file.name.startswith("tokenizer"):
                shutil.copy(file, partial)
        partial.rename(arguments.out)
    except (RunError, OSError, ValueError, RecursionError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        sys.exit(f"average.py: {error}")
    print(f"{arguments.out}: the mean of {len(arguments.checkpoints)} checkpoints; evaluate it by --init OUT --eval")


if __name__ == "__main__":
    main()
