"""The part `experts`: mixtures of experts: gradients and losses against the CPU trainer, runs with recomputation and
a resumed run, and the time of the operations."""

import shutil

from benchmarks import BANDWIDTH, bench, percent, target
from correctness import compare_gradients
from tools import last_line
from training import run_difference, steps_of

# The first model has no selection, which bf16 may change (gradient_comparison.py). The last one has more experts than a
# warp has lanes, a layer without experts, and biases in its routers.
MODELS = {
    "all active": "--preset moe-tiny --experts-active 8",
    "moe-tiny": "--preset moe-tiny",
    "40 experts": "--preset moe-tiny --experts 40 --experts-active 4 --expert-ffn 64 --shared-experts 1 "
    "--dense-layers 1 --router-bias",
}
TINY = "--preset moe-tiny --layers 2 --hidden 32 --heads 4 --kv-heads 2 --head-dim 16 --experts 4 --expert-ffn 16"
TINY_MODELS = {
    "all active": f"{TINY} --experts-active 4",
    "moe-tiny": f"{TINY} --shared-experts 1 --dense-layers 1 --router-bias",
}
BATCH, TINY_BATCH = "--seq-len 256 --batch-size 4", "--seq-len 24 --batch-size 1"
STEPS, STOP, TINY_STEPS, TINY_STOP = 40, 15, 10, 4
LOSS_LIMIT = 0.02  # difference of the losses of a step, relative to the CPU's; gradient_comparison.py allows half of it
# (preset, key/value heads, B, T)
KERNELS = [("30b-a3b", 0, 1, 4096), ("30b-a3b", 0, 4, 4096), ("moe-small", 0, 32, 1024)]
OF_DENSE = 0.5  # target: milliseconds of one dense product of equal FLOPs, relative to a grouped product


def experts(check, part):
    corpus = check.corpus()
    models = TINY_MODELS if check.pretend else MODELS
    for name, model in models.items() if corpus else ():
        if part.pending(f"gradients {name}"):
            folder = check.work / "experts-gradients"
            shutil.rmtree(folder, ignore_errors=True)
            batch = TINY_BATCH if check.pretend else BATCH
            compare_gradients(check, part, f"experts, {name}", model, batch, corpus, folder)
            shutil.rmtree(folder, ignore_errors=True)
            part.end(f"gradients {name}")
        if part.pending(f"runs {name}"):
            compare_runs(check, part, name, model, corpus)
            part.end(f"runs {name}")
    for case in [("moe-tiny", 0, 1, 16)] if check.pretend else KERNELS:
        name = f"kernels {case[0]}, {case[2]} x {case[3]}"
        if part.pending(name):
            measure_operations(check, part, case)
            part.end(name)
    if not corpus and part.pending("corpus"):
        part.fact("gradients and runs with experts", "no corpus: specify --bundle, or run scripts/corpus.sh")
        part.end("corpus")


def compare_runs(check, part, name, model, corpus):
    """A run beside the CPU's; with recomputation, and resumed, its losses and checkpoints must be bitwise equal."""
    steps, stop = (TINY_STEPS, TINY_STOP) if check.pretend else (STEPS, STOP)
    words = f"{model} {TINY_BATCH if check.pretend else BATCH} --steps {steps} --warmup 2 --seed 3".split()
    words += ["--lr", "3e-3" if check.pretend else "1e-3"]
    work = {n: check.work / f"experts-{n}" for n in ("cpu", "device", "recompute-1", "recompute-2", "resumed")}
    for run in work.values():
        shutil.rmtree(run, ignore_errors=True)

    def go(run, program, *more):
        command = [*check.commands[program], *words, "--train-data", corpus, "--out", work[run], *more]
        status, text = check.run(command, 300)
        return "" if status == 0 else last_line(text)

    def resumed():
        return go("resumed", "TRAIN_DIFFV2CU", "--recompute", 1, "--stop-after", stop) or resume()

    def resume():
        command = [*check.commands["TRAIN_DIFFV2CU"], "--out", work["resumed"], "--resume"]
        status, text = check.run(command, 300)
        return "" if status == 0 else last_line(text)

    why = go("device", "TRAIN_DIFFV2CU") or go("cpu", "TRAIN_DIFFV2")
    part.check(f"{name} trains for {steps} steps on the device and on the CPU", not why, why)
    if not why:
        compare_losses(part, name, steps_of(work["cpu"]), steps_of(work["device"]), steps)
        for level in (1, 2):
            run = f"recompute-{level}"
            why = go(run, "TRAIN_DIFFV2CU", "--recompute", level)
            why = why or run_difference(work["device"], work[run], steps)
            part.check(f"{name} with --recompute {level} is bitwise equal", not why, why)
        why = resumed() or run_difference(work["device"], work["resumed"], steps)
        part.check(f"{name}, stopped after step {stop} and resumed, is bitwise equal", not why, why)
    for run in work.values():
        shutil.rmtree(run, ignore_errors=True)


def compare_losses(part, name, cpu, device, steps):
    """Both programs draw the same weights and batches; the device rounds to bf16."""
    worst = ("", 0.0)
    for step in range(1, steps + 1):
        a, b = (run.get(step, (None, None))[0] for run in (cpu, device))
        error = abs(b / a - 1) if a and b is not None else float("inf")
        if not error <= worst[1]:
            worst = (f"step {step}: {a} on the CPU, {b} on the device", error)
    part.check(f"the losses of {name} are those of the CPU", worst[1] <= LOSS_LIMIT, f"largest difference: {worst[0]}")
    for step in sorted({1, steps // 2, steps}):
        if worst[1] < float("inf"):
            a, b = cpu[step][0], device[step][0]
            record = {"table": "expert_loss", "what": f"{name}, step {step}", "cpu": a, "device": b}
            part.record({**record, "difference": b - a})
    if worst[1] < float("inf"):
        part.check(f"the loss of {name} decreases", device[steps][0] < device[1][0])


def measure_operations(check, part, case):
    """The rows of routers and experts of bench_cuda kernels, and the grouped products beside a dense one."""
    of = f"{case[0]}, {case[2]} x {case[3]}"
    rows, ended = [], True
    for word in ("router", "expert"):
        found, ended_too = bench(check, part, 240, "kernels", *case, word)
        rows += [r for r in found if r["table"] in ("kernels", "peers")]
        ended = ended and ended_too
    for r in rows:
        part.record(r)
    kernels, peers = ([r for r in rows if r["table"] == table] for table in ("kernels", "peers"))
    if ended:
        complete = len(kernels) == 17 and len(peers) == 6
        part.check(f"{of}: every operation of experts is measured", complete, f"{len(kernels)} and {len(peers)} rows")
    if kernels and not check.pretend:
        moves = sorted((r["share"], r["kernel"]) for r in kernels if not r["kernel"].startswith("expert_linear"))
        below = ", ".join(f"{kernel} {percent(share)}" for share, kernel in moves if share < BANDWIDTH)
        what = f"target: {of}: operations on the rows of experts reach {percent(BANDWIDTH)} of a copy"
        part.fact(what, f"below: {below or 'none'}")
    if peers and not check.pretend:
        least = min(r["ratio"] for r in peers if r["kernel"] != "expert_linear_to_weight")
        what = f"{of}: one dense product relative to a grouped one, forward and dx, at least"
        target(part, what, least, OF_DENSE, percent)
