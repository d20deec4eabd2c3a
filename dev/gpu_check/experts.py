"""The part `experts`: mixtures of experts: gradients and losses against the CPU trainer, runs with recomputation and
a resumed run, and the time of the operations."""

from gradients import compare_gradients
from runner import NO_CORPUS
from runs import Runs, record_losses
from speed import BANDWIDTH, bandwidth_target

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
LOSS_LIMIT = 0.02  # difference of the losses of a step, relative to the CPU's; gradient_comparison.py allows half of it
# (preset, key/value heads, B, T)
KERNELS = [("30b-a3b", 0, 1, 4096), ("30b-a3b", 0, 4, 4096), ("moe-small", 0, 32, 1024)]
OF_DENSE = 0.5  # target: milliseconds of one dense product of equal FLOPs, relative to a grouped product


def experts(check, part):
    batch, steps, stop, lr = (TINY_BATCH, 10, 4, "3e-3") if check.pretend else (BATCH, 40, 15, "1e-3")
    corpus, models = check.corpus(), TINY_MODELS if check.pretend else MODELS
    for name, model in models.items() if corpus else ():
        yield f"gradients {name}", compare_gradients, f"experts, {name}", model, batch
        words = f"{model} {batch} --steps {steps} --warmup 2 --seed 3 --lr {lr}".split()
        runs = Runs(check, "experts", [*words, "--train-data", corpus], steps)
        yield f"runs {name}", compare_runs, name, runs, stop
    for i, case in enumerate([("moe-tiny", 0, 1, 16)] if check.pretend else KERNELS):
        of = f"{case[0]}, {case[2]} x {case[3]}"
        yield f"products {i + 1}", measure_products, of, case
        yield f"kernels {i + 1}", measure_operations, of, case
    if not corpus:
        yield "corpus", lambda check, part: part.fact("gradients and runs with experts", NO_CORPUS)


def compare_runs(check, part, name, runs, stop):
    """A run beside the CPU's; with recomputation, and resumed, its losses and checkpoints must be bitwise equal."""
    why = runs.train("device") or runs.train("cpu", program="TRAIN_DIFFV2")
    part.check(f"{name} trains for {runs.steps} steps on the device and on the CPU", not why, why)
    if not why:
        compare_losses(part, name, runs.losses("cpu"), runs.losses("device"))
        for run, level, stopped, what in (
            ("recompute-1", 1, None, f"{name} with --recompute 1"),
            ("recompute-2", 2, None, f"{name} with --recompute 2"),
            ("resumed", 1, stop, f"{name}, stopped after step {stop} and resumed,"),
        ):
            why = runs.train(run, "--recompute", level, stop_after=stopped) or runs.difference("device", run)
            part.check(f"{what} is bitwise equal", not why, why)
    runs.remove("device", "cpu", "recompute-1", "recompute-2", "resumed")


def compare_losses(part, name, cpu, device):
    """Both programs draw the same weights and batches; the device rounds to bf16."""
    errors = [abs(b / a - 1) for a, b in zip(cpu, device)] or [float("inf")]
    worst = errors.index(max(errors))
    note = f"step {worst + 1}: {cpu[worst]} on the CPU, {device[worst]} on the device" if cpu and device else ""
    part.check(f"the losses of {name} are those of the CPU", max(errors) <= LOSS_LIMIT, f"largest difference: {note}")
    if cpu and device:
        record_losses(part, name, sorted({1, len(cpu) // 2, len(cpu)}), device, cpu, "CPU")
        part.check(f"the loss of {name} decreases", device[-1] < device[0])


def measure_products(check, part, of, case):
    """The grouped products, alternating with a dense one."""
    rows, ended = part.bench(240, "kernels", *case, "expert_linear")
    times = [r for r in rows if r["unit"] == "ms"]
    peers = [r for r in times if r["against"] == "a dense product"]
    if ended:
        complete = len(times) == 12 and len(peers) == 6
        part.check(f"{of}: every product of experts is measured", complete, f"{len(times)} rows, {len(peers)} of peers")
    if peers and not check.pretend:
        least = min(r["ratio"] for r in peers if r["case"] != "expert_linear_to_weight")
        part.target(f"{of}: one dense product relative to a grouped one, forward and dx, at least", least, OF_DENSE)


def measure_operations(check, part, of, case):
    """The other operations of routers and experts."""
    runs = [part.bench(240, "kernels", *case, w) for w in ("router", "expert_g", "expert_combine", "expert_swiglu")]
    rows = [r for found, _ in runs for r in found if r["unit"] == "ms"]
    if all(ended for _, ended in runs):
        part.check(f"{of}: every operation of experts is measured", len(rows) == 11, f"{len(rows)} rows")
    if rows and not check.pretend:
        bandwidth_target(part, f"{of}: operations on the rows of experts reach {BANDWIDTH:.0%} of a copy", rows)
