"""Training runs of a part, their losses and their differences."""

import hashlib
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
        """That of the last step."""
        return self.path(name) / f"checkpoints/step_{self.steps:08d}"

    def remove(self, *names):
        for name in names:
            shutil.rmtree(self.path(name), ignore_errors=True)

    def train(self, name, *more, program="TRAIN_DIFFV2CU", stop_after=None):
        """Trains from the first step, after a stop in two starts. Returns the reason of a failure, or ''."""
        self.remove(name)
        command = [*self.check.commands[program], "--out", self.path(name)]
        stop = ["--stop-after", stop_after] if stop_after else []
        why = self.start([*command, *self.options, *more, *stop])
        return why or (self.start([*command, "--resume"]) if stop else "")

    def start(self, command):
        status, text = self.check.run(command, 500)
        return "" if status == 0 else last_line(text)

    def records(self, name):
        return [json.loads(line) for line in open(self.path(name) / "log.jsonl")]

    def numbers(self, name):
        """{step: (loss, gradient norm)} of the log."""
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in self.records(name) if r["kind"] == "train"}

    def losses(self, name):
        """The losses of all steps; [] if one is missing or not finite."""
        losses = [loss for _, (loss, _) in sorted(self.numbers(name).items())]
        return losses if len(losses) == self.steps and None not in losses else []

    def difference(self, a, b):
        """The first difference between two runs; '' if there is none."""
        x, y = self.numbers(a), self.numbers(b)
        for step in range(1, self.steps + 1):
            if step not in x or x.get(step) != y.get(step):
                return f"step {step}: {x.get(step)} and {y.get(step)}"
        for name in ("model.safetensors", "optimizer.safetensors"):
            if digest(self.checkpoint(a) / name) != digest(self.checkpoint(b) / name):
                return f"{name} after step {self.steps}"
        return ""


def digest(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            h.update(block)
    return h.hexdigest()


def record_losses(part, of, steps, measured, expected, against):
    """Rows of both losses after some steps."""
    for step in steps:
        a, b = measured[step - 1], expected[step - 1]
        part.row(f"loss of step {step}", of=of, measured=a, unit="nats", expected=b, against=against, ratio=b / a)
