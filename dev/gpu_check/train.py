"""The part `train`: short runs start, reduce the loss, and repeat and resume bitwise."""

from results import failed
from runner import NO_CORPUS, Skip
from runs import Runs

# Three steps each of configurations that initialize differently: (case, program, options, name)
STARTS = [
    ("fp32", "TRAIN_DIFFV2CU_FP32", [], "the fp32 build"),
    ("measured peak", "TRAIN_DIFFV2CU", ["--measure-peak"], "--measure-peak"),
    ("tuned gemm", "TRAIN_DIFFV2CU", ["--tune-gemm"], "--tune-gemm"),
]
NAMES = ("first", "second", "resumed")


def train(check, part):
    corpus = check.corpus()
    if not corpus:
        raise Skip(NO_CORPUS)
    steps, stop = (8, 3) if check.pretend else (100, 40)
    model = "tiny --batch-size 1 --seq-len 16" if check.pretend else "124m --batch-size 16 --vocab 50257"
    words = f"--preset {model} --attention diff_v2 --lr {'3e-3' if check.pretend else '6e-4'}".split()
    words += ["--train-data", corpus]
    runs = Runs(check, "train", [*words, "--steps", steps, "--warmup", steps // 10], steps)
    if "first" in part.state["done"] and not (runs.path("first") / "log.jsonl").exists():
        if failed(part.state["rows"]):
            return
        part.restart()  # the run is on another machine
    for case, program, options, what in STARTS:
        yield case, start, case.replace(" ", "-"), program, [*words, "--steps", 3, "--warmup", 1, *options], what
    yield "first", train_first, runs, model.split()[0]
    yield "second", train_again, runs, "second", "a repeated run is bitwise equal", None
    what = f"a run that is stopped after step {stop} and resumed is bitwise equal"
    yield "resumed", train_again, runs, "resumed", what, stop
    if "resumed" in part.state["done"]:
        runs.remove(*NAMES)


def start(check, part, name, program, words, what):
    runs = Runs(check, "train", words, 3)
    why = f"not built: {program}" if check.programs.missing([program]) else runs.train(name, program=program)
    part.check(f"{what} trains for 3 steps", not why and runs.losses(name), why)
    runs.remove(name)


def train_first(check, part, runs, preset):
    runs.remove(*NAMES)
    why = runs.train("first")
    part.check(f"{preset} trains for {runs.steps} steps", not why, why)
    if why:
        return
    numbers = runs.numbers("first")
    first, last = numbers[1][0], numbers[runs.steps][0]
    falls = first is not None and last is not None and last < (first if check.pretend else 0.6 * first)
    part.check("the loss decreases", falls, f"{first} at step 1, {last} at step {runs.steps}")
    for r in runs.records("first"):
        if r.get("what") == "device_memory":
            used, planned = r["used_bytes"], r["planned_bytes"]
            part.row(
                "device memory planned by --dry-run, within 2%",
                "reached" if abs(planned / used - 1) <= 0.02 else "missed",
                f"{r['estimated_bytes'] / 2**20:.0f} MiB estimated",
                measured=used / 2**20,
                unit="MiB",
                expected=planned / 2**20,
                against="--dry-run",
                ratio=planned / used,
            )


def train_again(check, part, runs, name, what, stop):
    if not (runs.path("first") / "log.jsonl").exists():
        return  # it failed
    why = runs.train(name, stop_after=stop) or runs.difference("first", name)
    part.check(what, not why, why)
