"""The part `fp8`: --gemm fp8 beside bf16: the time of a step, alternating, and the loss of a short run."""

import shutil
import statistics

from benchmarks import target
from runner import Skip
from tools import last_line
from torch_comparison import ROUNDS, StepServer
from training import steps_of

# (preset, attention, key/value heads, batch sizes to try, T): two models at a time are in the device's memory
MODEL, TINY = ("1.4b", "diff_v2", 8, (8, 4, 2), 2048), ("tiny", "diff_v2", 2, (1,), 16)
STEPS, TINY_STEPS = 200, 10
LAST = 20  # steps whose mean loss is compared
TARGET = 1.2  # milliseconds of a step in bf16, relative to fp8


def fp8(check, part):
    corpus = check.corpus()
    status, text = check.run([*check.commands["BENCH_CUDA"], "--gemm", "fp8", "facts"], 60)
    if status != 0:
        raise Skip(last_line(text))
    model = TINY if check.pretend else MODEL
    if part.pending("step"):
        compare_steps(check, part, model)
        part.end("step")
    if part.pending("loss"):
        if corpus:
            compare_losses(check, part, model, corpus)
        else:
            part.fact("loss in fp8 beside bf16", "no corpus: specify --bundle, or run scripts/corpus.sh")
        part.end("loss")


def compare_steps(check, part, model):
    """Alternates steps in bf16 and fp8 at the largest batch size with which both fit."""
    preset, attention, NKV, sizes, T = model
    why = ""
    for B in sizes:
        turns = ["turns", preset, attention, NKV, B, T]
        servers = [StepServer(check, [*check.commands["BENCH_CUDA"], *gemm, *turns]) for gemm in ([], ["--gemm", "fp8"])]
        try:
            if all(s.read_line(120) is not None and s.step(120) is not None and s.step(60) is not None for s in servers):
                times = [tuple(s.step(60) for s in servers) for _ in range(2 if check.pretend else ROUNDS)]
                if all(None not in pair for pair in times):
                    return record_steps(check, part, f"{preset} {attention}, B {B} T {T}", times)
            why = next((s.why() for s in servers if s.process.poll() is not None), "a step did not end in time")
        finally:
            for s in servers:
                s.close()
    return part.check(f"alternating steps of {preset} {attention} in bf16 and fp8", False, why)


def record_steps(check, part, of, times):
    ratios = [bf16 / fp8_ms for bf16, fp8_ms in times]
    record = {"table": "fp8", "of": of, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    record.update(zip(("bf16", "fp8"), (statistics.median(ms) for ms in zip(*times))))
    part.record(record)
    part.check(f"steps of {of} run in bf16 and fp8", True)
    if not check.pretend:
        target(part, f"{of}: a step in bf16 relative to fp8", record["ratio"], TARGET, lambda x: f"{x:.3f}")


def compare_losses(check, part, model, corpus):
    """Two runs that differ in --gemm alone. Their losses are recorded; that both are finite and decrease is checked."""
    preset, attention, NKV, sizes, T = model
    steps = TINY_STEPS if check.pretend else STEPS
    words = f"--preset {preset} --attention {attention} --kv-heads {NKV} --batch-size {min(4, sizes[0])} --seq-len {T} "
    words += f"--steps {steps} --warmup {steps // 10} --lr {'3e-3' if check.pretend else '3e-4'}"
    words += "" if check.pretend else " --vocab 50257"
    losses = {}
    for gemm in ("bf16", "fp8"):
        run = check.work / f"fp8-{gemm}"
        shutil.rmtree(run, ignore_errors=True)
        command = [*check.commands["TRAIN_DIFFV2CU"], *words.split(), "--train-data", corpus, "--out", run]
        status, text = check.run([*command, "--gemm", gemm], 500)
        losses[gemm] = [loss for _, (loss, _) in sorted(steps_of(run).items())] if status == 0 else []
        shutil.rmtree(run, ignore_errors=True)
        ok = len(losses[gemm]) == steps and None not in losses[gemm]
        part.check(f"{preset} trains for {steps} steps in {gemm}", ok, "" if status == 0 else last_line(text))
        if not ok:
            return
        part.check(f"the loss in {gemm} decreases", losses[gemm][-1] < losses[gemm][0])
    part.check("the losses in fp8 are not those of bf16", losses["fp8"] != losses["bf16"])
    for step in sorted({1, *(steps * i // 4 for i in range(1, 5))}):
        record_loss(part, f"step {step}", *(losses[g][step - 1] for g in ("bf16", "fp8")))
    last = min(LAST, steps // 2)
    record_loss(part, f"mean of the last {last}", *(statistics.fmean(losses[g][-last:]) for g in ("bf16", "fp8")))


def record_loss(part, what, bf16, in_fp8):
    part.record({"table": "fp8_loss", "what": what, "bf16": bf16, "fp8": in_fp8, "difference": in_fp8 - bf16})
