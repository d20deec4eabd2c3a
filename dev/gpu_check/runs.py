"""Training runs of a part, and their differences."""

import filecmp
import json
import shutil

from runner import last_line


class Runs:
    """Runs with the same options in build/gpu_check/PREFIX-NAME."""

    def __init__(self, check, prefix, options, steps):
        self.check, self.prefix, self.options, self.steps = check, prefix, options, steps

    def path(self, name):
        return self.check.work / f"{self.prefix}-{name}"

    def checkpoint(self, name):
        """The checkpoint of the last step."""
        return self.path(name) / f"checkpoints/step_{self.steps:08d}"

    def remove(self, *names):
        for name in names:
            shutil.rmtree(self.path(name), ignore_errors=True)

    def train(self, name, program="TRAIN_DIFFV2CU", stop_after=None):
        """Trains from the first step, after a stop in two starts. Returns the reason of a failure, or ''."""
        self.remove(name)
        command = [*self.check.program(program), "--out", self.path(name)]
        starts = [[*self.options, *(["--stop-after", stop_after] if stop_after else [])]]
        for options in starts + [["--resume"]] * bool(stop_after):
            status, text = self.check.run([*command, *options], 500)
            if status != 0:
                return last_line(text)
        return ""

    def records(self, name, kind):
        return [r for r in map(json.loads, open(self.path(name) / "log.jsonl")) if r["kind"] == kind]

    def numbers(self, name):
        """(step, loss, gradient norm) of each step."""
        return [(r["step"], r["loss"], r["grad_norm"]) for r in self.records(name, "train")]

    def difference(self, a, b):
        """The first difference between two runs; '' if there is none."""
        for x, y in zip(self.numbers(a), self.numbers(b)):
            if x != y:
                return f"step, loss and gradient norm: {x} and {y}"
        for name in ("model.safetensors", "optimizer.safetensors"):
            if not filecmp.cmp(self.checkpoint(a) / name, self.checkpoint(b) / name, shallow=False):
                return f"{name} after step {self.steps}"
        return ""
