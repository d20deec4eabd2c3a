"""The parts `steps`: steps with an option and without it, alternating; and `fp8`: the loss of a run beside bf16."""

import statistics

from peer import ROUNDS
from runner import NO_CORPUS, Skip, StepServers
from runs import Runs, record_losses

# (preset, attention, key/value heads, batch sizes to try, T): two models at a time are in the device's memory
MODEL, TINY = ("1.4b", "diff_v2", 8, (8, 4, 2), 2048), ("tiny", "diff_v2", 2, (1,), 16)
LAST = 20  # steps whose mean loss is compared
TARGET = 1.2  # milliseconds of a step in bf16, relative to fp8
OPTIONS = {  # case: (options of bench_cuda, the step with them, the default)
    "fp8": (["--gemm", "fp8"], "step in fp8", "bf16"),
    "tuned gemm": (["--tune-gemm"], "step with --tune-gemm", "the library's first choices"),
    "not deterministic": (["--no-deterministic"], "step, not deterministic", "deterministic"),
}


def steps(check, part):
    for case in OPTIONS:
        yield case, compare_steps, case, *(TINY if check.pretend else MODEL)


def fp8(check, part):
    why = check.why_no_fp8()
    if why:
        raise Skip(why)
    yield "loss", compare_losses, *(TINY if check.pretend else MODEL)


def compare_steps(check, part, case, preset, attention, NKV, sizes, T):
    """Alternates steps with the options and without them at the largest batch size with which both fit."""
    why = check.why_no_fp8() if case == "fp8" else ""
    if why:
        return part.fact("no steps in fp8", why)
    options, what, against = OPTIONS[case]
    for B in sizes:
        with StepServers(check) as servers:
            for more in (options, []):
                words = [*more, "turns", preset, attention, NKV, B, T]
                servers.start(*check.commands["BENCH_CUDA"], *words, first_step=120)
            times = servers.turns(1 + (2 if check.pretend else ROUNDS), 60)
        if times:
            of = f"{preset} {attention}, B {B} T {T}"
            ratio = part.rounds(what, of, times[1:], against)
            part.check(f"steps of {of} run: {case}, and {against}", True)
            if case == "fp8" and not check.pretend:
                part.target(f"{of}: a step in bf16 relative to fp8", ratio, TARGET)
            return None
    return part.check(f"alternating steps of {preset} {attention}: {case}, and {against}", False, servers.why)


def compare_losses(check, part, preset, attention, NKV, sizes, T):
    """Two runs that differ in --gemm alone. Their losses are recorded; that both are finite and decrease is checked."""
    if not check.corpus():
        return part.fact("loss in fp8 beside bf16", NO_CORPUS)
    steps, lr = (10, "3e-3") if check.pretend else (200, "3e-4 --vocab 50257")
    words = f"--preset {preset} --attention {attention} --kv-heads {NKV} --batch-size {min(4, sizes[0])} --seq-len {T} "
    words += f"--steps {steps} --warmup {steps // 10} --lr {lr}"
    runs = Runs(check, "fp8", [*words.split(), "--train-data", check.corpus()], steps)
    losses = {}
    for gemm in ("bf16", "fp8", "fp8 --fp8-fast-accum"):
        name = gemm.split(" --")[-1]
        why = runs.train(name, "--gemm", *gemm.split())
        losses[gemm] = [] if why else runs.losses(name)
        runs.remove(name)
        part.check(f"{preset} trains for {steps} steps in {gemm}", losses[gemm], why)
        if not losses[gemm]:
            return None
        part.check(f"the loss in {gemm} decreases", losses[gemm][-1] < losses[gemm][0])
    part.check("the losses in fp8 are not those of bf16", losses["fp8"] != losses["bf16"])
    quarters = sorted({1, *(steps * i // 4 for i in range(1, 5))})
    record_losses(part, preset, quarters, losses["fp8"], losses["bf16"], "bf16")
    last = min(LAST, steps // 2)
    means = {gemm: statistics.fmean(values[-last:]) for gemm, values in losses.items()}
    b = means.pop("bf16")
    for gemm, a in means.items():
        what = f"mean loss of the last {last}{gemm[3:]}"
        part.row(what, of=preset, measured=a, unit="nats", expected=b, against="bf16", ratio=b / a)
    return None
