"""trainer.py: the options of the trainer program, the cost of a model by --dry-run, and hours by predict_diffv2."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import plan as plans

UNIT = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21}


class TrainerError(Exception):
    """An error message of the trainer, in one line."""


class Cost(NamedTuple):
    parameters: int
    active: int  # parameters that a token passes: fewer with experts
    flops: float  # per token
    memory: int  # bytes


class Trainer:
    def __init__(self, path):
        self.path = Path(path).absolute()
        if not os.access(self.path, os.X_OK):
            raise TrainerError(f"{path}: no such program; build it with 'make {self.path.name}', or specify --trainer")
        try:
            done = subprocess.run([self.path, "--help", "all"], capture_output=True, text=True, errors="replace")
        except OSError as error:
            raise TrainerError(f"{path}: {error.strerror}") from None
        self.options = plans.parse_help(done.stdout)
        if done.returncode or "attention" not in self.options:
            raise TrainerError(f"{path}: --help prints no options: this is not the trainer")
        self.costs = {}

    def dry_run(self, options):
        """The cost of the model. Raises TrainerError with the trainer's message."""
        shape = {k: v for k, v in options.items() if k not in ("seed", "lr")}
        command = [str(self.path), "--dry-run", *plans.arguments(shape)]
        key = tuple(command)
        if key not in self.costs:
            done = subprocess.run(command, capture_output=True, text=True)
            totals = re.findall(r"^  total +([0-9.]+)(?: MiB)?$", done.stdout, re.M)
            flops = re.search(r"^  per token +([0-9.]+)([kMGTPEZ]?)$", done.stdout, re.M)
            if done.returncode or len(totals) != 2 or not flops:
                said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
                raise TrainerError("; ".join(line.removeprefix("diffv2: ") for line in said[:3]))
            active = re.search(r"^  active in a token +([0-9]+)$", done.stdout, re.M)
            self.costs[key] = Cost(
                int(totals[0]),
                int(active[1] if active else totals[0]),
                float(flops[1]) * UNIT[flops[2]],
                int(float(totals[1]) * 2**20),
            )
        return self.costs[key]

    @cache
    def hours_of(self, command):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise TrainerError(f"{command[0]}: {error.strerror}; make predict_diffv2 builds it") from None
        found = re.search(r"([0-9.e+-]+) to +([0-9.e+-]+) hours of the run$", done.stdout, re.M)
        if done.returncode or not found:
            raise TrainerError((done.stderr.strip().splitlines() or ["predict_diffv2 prints no hours"])[0])
        return float(found[1]), float(found[2])

    def hours(self, run, device):
        """(least, most) hours of a run on one GPU of this name for each of its ranks, predicted by the program beside
        the trainer."""
        options = plans.arguments({k: v for k, v in run.options.items() if k not in ("seed", "lr")})
        program = str(self.path.with_name("predict_diffv2"))
        return self.hours_of((program, "--device", device, "--ranks", str(run.ranks), *options))

    def match(self, options, wanted):
        """The options with the width of the MLP, or of the experts, that gives `wanted` active parameters."""
        cost = self.dry_run(options)
        width = "ffn" if cost.active == cost.parameters else "expert-ffn"
        low, high = ({**options, width: str(f)} for f in (64, 128))
        matched = plans.matched_width(wanted, 64, self.dry_run(low).active, 128, self.dry_run(high).active)
        if matched is None:
            raise TrainerError(f"no --{width} gives {wanted} parameters")
        return {**options, width: str(matched)}
