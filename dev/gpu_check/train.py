"""The part `train`: runs start, reduce the loss, and repeat and resume with the same bits."""

from runner import NO_CORPUS, Skip
from runs import Runs


def train(check):
    if not check.corpus():
        raise Skip(NO_CORPUS)
    steps, stop = (8, 3) if check.pretend else (60, 25)
    model = "tiny --batch-size 1 --seq-len 16" if check.pretend else "124m --batch-size 16 --vocab 50257"
    words = f"--preset {model} --attention diff_v2 --lr {'3e-3' if check.pretend else '6e-4'} --train-data".split()
    words += [check.corpus(), "--warmup", steps // 10, "--steps"]
    yield "bits", repeat_and_resume, Runs(check, "train", [*words, steps], steps), model.split()[0], stop
    yield "fp32", train_in_fp32, Runs(check, "train-fp32", [*words, 10], 10)


def repeat_and_resume(check, findings, runs, preset, stop):
    why = runs.train("first")
    findings.check(f"{preset} trains for {runs.steps} steps", not why, why)
    if why:
        return
    losses = [loss for _, loss, _ in runs.numbers("first")]
    falls = len(losses) == runs.steps and None not in losses and losses[-1] < losses[0] * (1 if check.pretend else 0.7)
    findings.check("the loss decreases", falls, f"{losses[0]} at step 1, {losses[-1]} at step {len(losses)}")
    for r in runs.records("first", "event"):
        if r["what"] == "device_memory":
            ratio = r["planned_bytes"] / r["used_bytes"]
            numbers = {"measured": r["used_bytes"] / 2**20, "expected": r["planned_bytes"] / 2**20, "unit": "MiB"}
            verdict, note = "reached" if abs(ratio - 1) <= 0.02 else "missed", "within 2%"
            findings.row("device memory in use", verdict, note, **numbers, against="--dry-run", ratio=ratio)
    for name, what, at in (
        ("second", "a repeated run is bitwise equal", None),
        ("resumed", f"a run that is stopped after step {stop} and resumed is bitwise equal", stop),
    ):
        why = runs.train(name, stop_after=at) or runs.difference("first", name)
        findings.check(what, not why, why)
    runs.remove("first", "second", "resumed")


def train_in_fp32(check, findings, runs):
    why = runs.train("first", program="TRAIN_DIFFV2CU_FP32")
    findings.check(f"the fp32 build trains for {runs.steps} steps", not why, why)
    runs.remove("first")
