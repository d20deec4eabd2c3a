"""The part `train`: short runs start, reduce the loss, and repeat and resume bitwise."""

import hashlib
import json
import shutil

from tools import last_line
from runner import Skip


def digest(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 24):
            h.update(block)
    return h.hexdigest()


def steps_of(run):
    """{step: (loss, gradient norm)} of the log."""
    steps = {}
    for line in open(run / "log.jsonl"):
        record = json.loads(line)
        if record["kind"] == "train":
            steps[record["step"]] = (record["loss"], record["grad_norm"])
    return steps


def run_difference(a, b, steps):
    """The first difference between two runs; '' if there is none."""
    x, y = steps_of(a), steps_of(b)
    for step in range(1, steps + 1):
        if step not in x or x.get(step) != y.get(step):
            return f"step {step}: {x.get(step)} and {y.get(step)}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [run / f"checkpoints/step_{steps:08d}/{name}" for run in (a, b)]
        if digest(files[0]) != digest(files[1]):
            return f"{name} after step {steps}"
    return ""


def record_memory(part, run):
    """Records the memory that --dry-run plans relative to the memory in use, which the run has logged."""
    for line in open(run / "log.jsonl"):
        record = json.loads(line)
        if record.get("what") == "device_memory":
            used, planned = record["used_bytes"], record["planned_bytes"]
            estimated = f"{record['estimated_bytes'] / 2**20:.0f} MiB estimated"
            reached = "reached" if abs(planned / used - 1) <= 0.02 else "missed"
            part.fact(
                "target: device memory planned by --dry-run relative to memory in use",
                f"{100 * planned / used:.1f}% of {used / 2**20:.0f} MiB ({estimated}), target 98% to 102%: {reached}",
            )


# Three steps each of configurations that initialize differently: (case, program, options, name)
STARTS = [
    ("fp32", "TRAIN_DIFFV2CU_FP32", [], "the fp32 build"),
    ("measured peak", "TRAIN_DIFFV2CU", ["--measure-peak"], "--measure-peak"),
    ("gemm table", "TRAIN_DIFFV2CU", ["--tune-gemm", "{out}/gemm_table"], "--tune-gemm"),
]


def starts(check, part, shape):
    for case, program, options, what in STARTS:
        if not part.pending(case):
            continue
        words = [word.format(out=check.store.folder) for word in options]
        if options and options[0].removeprefix("--") not in check.run([*check.commands[program], "--help"], 60)[1]:
            continue
        if check.programs.missing([program]):
            part.check(f"{what} trains for 3 steps", False, f"not built: {program}")
        else:
            run = check.work / f"train-{case.replace(' ', '-')}"
            shutil.rmtree(run, ignore_errors=True)
            (check.store.folder / "gemm_table").unlink(missing_ok=True)  # the run tunes again
            command = [*check.commands[program], *shape, "--steps", 3, "--warmup", 1, "--out", run, *words]
            status, text = check.run(command, 300)
            losses = steps_of(run) if status == 0 else {}
            ok = len(losses) == 3 and None not in [loss for loss, _ in losses.values()]
            part.check(f"{what} trains for 3 steps", ok, "" if len(losses) == 3 else last_line(text))
            shutil.rmtree(run, ignore_errors=True)
        part.end(case)


def train(check, part):
    corpus = check.corpus()
    if not corpus:
        raise Skip("no corpus: specify --bundle, or run scripts/corpus.sh")
    steps, stop = (8, 3) if check.pretend else (100, 40)
    shape = (
        ["--preset", "tiny", "--batch-size", "1", "--seq-len", "16"]
        if check.pretend
        else ["--preset", "124m", "--batch-size", "16", "--vocab", "50257"]
    )
    shape += ["--attention", "diff_v2", "--train-data", corpus, "--lr", "3e-3" if check.pretend else "6e-4"]
    starts(check, part, shape)
    shape += ["--steps", steps, "--warmup", steps // 10]
    program, runs = (
        check.commands["TRAIN_DIFFV2CU"],
        {n: check.work / f"train-{n}" for n in ("first", "second", "resumed")},
    )

    def go(name, *more):
        status, text = check.run([*program, *shape, "--out", runs[name], *more], 500)
        return status == 0, "" if status == 0 else last_line(text)

    if part.pending("first"):
        for run in runs.values():
            shutil.rmtree(run, ignore_errors=True)
        ok, detail = go("first")
        part.check(f"{shape[1]} trains for {steps} steps", ok, detail)
        if ok:
            losses = steps_of(runs["first"])
            first, last = losses[1][0], losses[steps][0]
            falls = first is not None and last is not None and last < (first if check.pretend else 0.6 * first)
            part.check("the loss decreases", falls, f"{first} at step 1, {last} at step {steps}")
            record_memory(part, runs["first"])
        part.end("first")
    if not (runs["first"] / "log.jsonl").exists():
        if all(c["ok"] for c in part.state["checks"]):  # the run is on another machine
            part.restart()
            return train(check, part)
        return None
    if part.pending("second"):
        shutil.rmtree(runs["second"], ignore_errors=True)
        ok, detail = go("second")
        detail = detail or run_difference(runs["first"], runs["second"], steps)
        part.check("a repeated run is bitwise equal", ok and not detail, detail)
        part.end("second")
    if part.pending("resumed"):
        shutil.rmtree(runs["resumed"], ignore_errors=True)
        ok, detail = go("resumed", "--stop-after", stop)
        if ok:
            status, text = check.run([*program, "--out", runs["resumed"], "--resume"], 500)
            ok, detail = status == 0, "" if status == 0 else last_line(text)
        detail = detail or run_difference(runs["first"], runs["resumed"], steps)
        part.check(f"a run that is stopped after step {stop} and resumed is bitwise equal", ok and not detail, detail)
        part.end("resumed")
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)
    return None
