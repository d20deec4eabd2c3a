"""The parts `models`, `kernels` and `profile`: speed of models and operations, and the shares of a step."""

import re

import prediction
from runner import NO_CORPUS, find_tool, last_line

# (preset, T, key/value heads); with half of the preset's key/value heads, every variant is valid
SIZES = [("1.4b", 2048, 8), ("3b", 4096, 12), ("124m", 1024, 6), ("3b", 2048, 12)]
# (preset, key/value heads, B, T)
KERNELS = [("3b", 12, 4, 4096), ("1.4b", 8, 8, 2048), ("124m", 6, 32, 1024)]
# (preset, attention, key/value heads, B, T); the first measurement of a device: the first of these that fits
FIRST = [("1.4b", "diff_v2", 8, B, 2048) for B in (8, 4, 2, 1)] + [("124m", "diff_v2", 6, B, 1024) for B in (16, 4)]
TINY = ("tiny", "diff_v2", 2, 4, 16)
STEPS = 12  # of its run
PROFILES = [("3b", "diff_v2", 12, 4, 4096), ("124m", "diff_v2", 6, 32, 1024), ("1.4b", "diff_v1", 8, 8, 2048)]
UTILISATION, BEHIND, BANDWIDTH = 0.55, 0.95, 0.85  # targets


def models(check, part):
    for case in [("tiny", 16, 2)] if check.pretend else SIZES:
        yield "{} T {}".format(*case), measure_models, *case


def measure_models(check, part, preset, T, NKV):
    size = f"{preset} T {T}"
    cases = {f"{a},{NKV},1": a for a in ("baseline", "diff_v1", "diff_v2")}
    cases.update(
        {f"baseline,{NKV},2": "baseline with 2 NH heads", f"diff_v2,{NKV},1,fast": "diff_v2, not deterministic"}
    )
    rows, left = [], [*cases]
    while left:  # a model that fails ends the program: restart it with the models after that one
        found, ended = part.bench(300, "model", preset, T, *left)
        rows += found
        left = [] if ended else left[sum(r["case"] == "forward" for r in found) + 1 :]
    training = {
        name: r for r in rows for name in cases.values() if r["case"] == "training" and f"{preset} {name}, B" in r["of"]
    }
    missing = len(training) < len(cases)
    part.check(f"{size}: all models run", not missing, f"{len(training)} of {len(cases)}" if missing else "")
    ours, twin, fast = (training.get(n) for n in ("diff_v2", "baseline with 2 NH heads", "diff_v2, not deterministic"))
    if ours and twin:
        what = f"{size}: tokens/s of diff_v2 relative to a baseline with as many query heads"
        part.target(what, ours["measured"] / twin["measured"], BEHIND)
    if ours and fast:
        what = f"{size}: tokens/s of diff_v2 with --no-deterministic relative to the default"
        part.fact(what, f"{fast['measured'] / ours['measured']:.1%}")
    if ours and ours["ratio"] is not None and preset == "1.4b":
        part.target(f"{size}: diff_v2, share of the device's dense bf16 peak", ours["ratio"], UTILISATION)


def bandwidth_target(part, what, rows):
    """That all operations which move memory take the time of a copy, by a factor."""
    shares = sorted((r["ratio"], r["case"]) for r in rows)
    below = ", ".join(f"{case} {share:.1%}" for share, case in shares if share < BANDWIDTH)
    part.target(what, shares[0][0], BANDWIDTH, f"below: {below or 'none'}")


def kernels(check, part):
    for case in [("tiny", 2, 1, 16)] if check.pretend else KERNELS:
        yield case[0], measure_kernels, *case


def measure_kernels(check, part, preset, *shape):
    rows, ended = part.bench(240, "kernels", preset, *shape)
    bound = [r for r in rows if r["against"] == "copy"]
    if ended:
        part.check(f"{preset}: every operation is measured", len(rows) > 40 and bound, f"{len(rows)} measurements")
    if bound:
        bandwidth_target(part, f"{preset}: memory-bound operations reach {BANDWIDTH:.0%} of a copy", bound)


def profile(check, part):
    first = [FIRST[0], TINY] if check.pretend else FIRST  # the emulated device has too little memory for the first
    yield "first", measure_profile, first
    yield "loss", measure_loss, first
    for case in () if check.pretend else PROFILES:
        yield " ".join(case[:2]), measure_profile, [case]
    yield "ncu", counters


def options_of(case):
    preset, attention, NKV, B, T = case
    words = f"--preset {preset} --attention {attention} --kv-heads {NKV} --batch-size {B} --seq-len {T} "
    return [*words.split(), "--total-batch", B * T]


def first_that_fits(check, cases):
    """The first case for which the device has enough memory, by --dry-run; else the last, whose failure is reported."""
    for case in cases[:-1]:
        text = check.run([*check.commands["TRAIN_DIFFV2CU"], "--dry-run", *options_of(case)], 60)[1]
        if not re.search("^this device has .*: too little", text, re.MULTILINE):
            return case
    return cases[-1]


def measure_loss(check, part, cases):
    """The loss of a run, which writes no checkpoint, and the speed of its last step."""
    if not check.corpus():
        return part.fact("no loss", NO_CORPUS)
    case = first_that_fits(check, cases)
    words = [*options_of(case), "--train-data", check.corpus(), "--steps", STEPS, "--warmup", 2]
    words += ["--lr", "3e-3"] if check.pretend else ["--lr", "3e-4", "--vocab", 100288]
    status, text = check.run([*check.commands["TRAIN_DIFFV2CU"], *words], 180)
    lines = [line for line in text.splitlines() if line.startswith("step ")]
    losses = [float(x) for x in re.findall(r"^step .*loss +([\d.]+) ", text, re.MULTILINE)]
    trains = status == 0 and len(losses) == STEPS
    part.check(f"{' '.join(case[:2])} trains for {STEPS} steps", trains, lines[-1] if trains else last_line(text))
    if trains:
        part.check("the loss decreases", losses[-1] < losses[0], f"{losses[0]} at step 1, {losses[-1]} at step {STEPS}")
    return None


def measure_profile(check, part, cases):
    case = first_that_fits(check, cases)
    rows, ended = part.bench(180, "profile", *case)
    measured = {r["case"]: r["measured"] or 0 for r in rows}
    step = measured.pop("step", 0)
    beside_prediction(check, part, case, measured)
    if ended:
        share = 1 - measured["outside"] / step
        part.check(f"{' '.join(case[:2])}: the operations add up to the step", 0 < share < 1.05, f"{share:.1%}")


def beside_prediction(check, part, case, measured):
    """Records the milliseconds of a step by class of work: predicted by --dry-run --device, and measured."""
    preset, attention, _, B, T = case
    device = "H200" if check.pretend else (check.store.all["device"] or "unknown").split(":")[0]
    try:
        expected = prediction.predict(check.commands["TRAIN_DIFFV2"], device, options_of(case))
        rows = prediction.compare(expected, measured) if measured else []
    except (RuntimeError, OSError) as error:
        part.fact(f"{preset} {attention}: no prediction", str(error)[:300])
        return
    for what, ms, own in [("step", expected["step_ms"], sum(measured.values())), *rows] if rows else []:
        row = {"of": f"{preset} {attention}, B {B} T {T}", "unit": "ms", "against": "prediction"}
        part.row(what, measured=own, expected=ms, ratio=ms / own if own else None, **row)


COUNTERS = [
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
]


def counters(check, part):
    """Hardware counters of a layer's kernels, by ncu; log.txt has its full output. The clocks are not changed."""
    tool = find_tool("ncu")
    if not tool or check.pretend:
        part.fact("ncu", "not available: the times above are measured by events")
        return
    ncu = [tool, "--csv", "--clock-control", "none", "--metrics", ",".join(COUNTERS)]
    status, text = check.run([*ncu, *check.commands["BENCH_CUDA"], *"--repeats 1 kernels 1.4b 8 4 2048".split()], 150)
    rows = {}
    for line in text.splitlines():
        words = [w.strip('"') for w in line.split('","')]
        if len(words) > 10 and words[-3] in COUNTERS:
            rows.setdefault(words[4][:120], {}).setdefault(words[-3], words[-1])
    if status != 0 or not rows:
        part.fact("ncu", f"fails on this machine: {last_line(text)}")
    for kernel, values in rows.items():
        part.fact(f"ncu, {kernel}", ", ".join(f"{counter} {value}" for counter, value in values.items()))
