"""The parts `models`, `kernels` and `profile`: speed of models and operations, and the shares of a step."""

import prediction
from tools import find_tool, json_lines, last_line

# (preset, T, key/value heads); with half of the preset's key/value heads, every variant is valid
SIZES = [("1.4b", 2048, 8), ("3b", 4096, 12), ("124m", 1024, 6), ("3b", 2048, 12)]
TINY = [("tiny", 16, 2)]
UTILISATION, BEHIND, BANDWIDTH = 0.55, 0.95, 0.85  # targets


def bench(check, part, limit, *arguments):
    """(the records that the benchmark printed, whether it succeeded). A failure is a failed check."""
    status, text = check.run([*check.commands["BENCH_CUDA"], *arguments], limit)
    what = " ".join(str(a) for a in arguments)
    if status is None:
        part.check(f"bench_cuda {what}", False, f"stopped after {limit} s")
    elif status != 0:
        part.check(f"bench_cuda {what}", False, last_line(text))
    return json_lines(text), status == 0


def target(part, what, value, least, shown):
    """Records whether a target is reached. A missed target is not a failed check: it is not a defect."""
    part.fact(f"target: {what}", f"{shown(value)}, target {shown(least)}: {'reached' if value >= least else 'missed'}")


def percent(x):
    return f"{100 * x:.1f}%"


# ---------------------------------------------------------------------------------------------------
# models


def models(check, part):
    for preset, T, NKV in TINY if check.pretend else SIZES:
        case = f"{preset} T {T}"
        if not part.pending(case):
            continue
        cases = [f"{a},{NKV},1" for a in ("baseline", "diff_v1", "diff_v2")] + [
            f"baseline,{NKV},2",
            f"diff_v2,{NKV},1,fast",
        ]
        rows, peak, left = [], None, cases
        while left:  # a model that fails ends the program: restart it with the models after that one
            found, ended = bench(check, part, 300, "model", preset, T, *left)
            peak = max((r["rate"] for r in found if r["table"] == "peaks" and r["unit"] == "TFLOP/s"), default=peak)
            new = [r for r in found if r["table"] == "models"]
            rows += new
            left = [] if ended else left[sum(r["what"] == "forward" for r in new) + 1 :]
        for r in rows:
            r["share"] = r["tflops"] / peak if peak else None
            part.record(r)
        training = {r["model"]: r for r in rows if r["what"] == "training"}
        part.check(
            f"{case}: all models run",
            len(training) == len(cases),
            f"{len(training)} of {len(cases)}" if len(training) < len(cases) else "",
        )
        ours, twin = training.get("diff_v2"), training.get("baseline with 2 NH heads")
        if peak is not None:
            part.fact(f"{case}: measured matmul, TFLOP/s", f"{peak:.0f}")
        if ours and twin:
            ratio = ours["tokens_per_s"] / twin["tokens_per_s"]
            target(
                part,
                f"{case}: tokens/s of diff_v2 relative to a baseline with as many query heads",
                ratio,
                BEHIND,
                percent,
            )
        fast = training.get("diff_v2, not deterministic")
        if ours and fast:
            part.fact(
                f"{case}: tokens/s of diff_v2 with --no-deterministic relative to the default",
                percent(fast["tokens_per_s"] / ours["tokens_per_s"]),
            )
        if ours and ours["device_share"] is not None and preset == "1.4b":
            target(
                part,
                f"{case}: diff_v2, share of the device's dense bf16 peak",
                ours["device_share"],
                UTILISATION,
                percent,
            )
        part.end(case)


# ---------------------------------------------------------------------------------------------------
# kernels, profile, prediction

# (preset, key/value heads, B, T)
KERNELS = [("3b", 12, 4, 4096), ("1.4b", 8, 8, 2048), ("124m", 6, 32, 1024)]


def kernels(check, part):
    for preset, NKV, B, T in [("tiny", 2, 1, 16)] if check.pretend else KERNELS:
        if not part.pending(preset):
            continue
        found, ended = bench(check, part, 240, "kernels", preset, NKV, B, T)
        for r in found:
            part.record(r)
        bound = [r for r in found if r["table"] == "kernels" and r["unit"] == "GB/s"]
        if ended:
            part.check(
                f"{preset}: every operation is measured", len(found) > 40 and bound, f"{len(found)} measurements"
            )
        slow = sorted((r["share"], r["kernel"]) for r in bound)
        if slow:
            below = ", ".join(f"{name} {percent(share)}" for share, name in slow if share < BANDWIDTH)
            part.fact(
                f"target: {preset}: memory-bound operations reach {percent(BANDWIDTH)} of a copy",
                f"below: {below or 'none'}",
            )
        part.end(preset)


# (preset, attention, key/value heads, B, T)
PROFILES = [
    ("1.4b", "diff_v2", 8, 8, 2048),
    ("3b", "diff_v2", 12, 4, 4096),
    ("124m", "diff_v2", 6, 32, 1024),
    ("1.4b", "diff_v1", 8, 8, 2048),
]
COUNTERS = [
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
]


def profile(check, part):
    for case in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PROFILES:
        name = " ".join(str(word) for word in case[:2])
        if not part.pending(name):
            continue
        found, ended = bench(check, part, 180, "profile", *case)
        for r in found:
            part.record(r)
        beside_prediction(check, part, case, found)
        if ended:
            inside = sum(r["share"] for r in found if r["operation"] not in ("step", "outside"))
            part.check(f"{name}: the operations add up to the step", 0 < inside < 1.05, percent(inside))
        part.end(name)
    if part.pending("ncu"):
        counters(check, part)
        part.end("ncu")


def beside_prediction(check, part, case, found):
    """Records the milliseconds of a step by class of work: predicted by --dry-run --device, and measured."""
    preset, attention, NKV, B, T = case
    device = "H200" if check.pretend else (check.store.all["device"] or "unknown").split(":")[0]
    measured = {r["operation"]: r["ms"] for r in found if r["table"] == "profile" and r["operation"] != "step"}
    try:
        words = f"--preset {preset} --attention {attention} --kv-heads {NKV} --batch-size {B} --seq-len {T}".split()
        words += ["--total-batch", B * T]
        expected_step = prediction.predict(check.commands["TRAIN_DIFFV2"], device, words)
        rows = prediction.compare(expected_step, measured) if measured else []
    except (RuntimeError, OSError) as error:
        part.fact(f"{preset} {attention}: no prediction", str(error)[:300])
        return
    for what, expected, ms in [("step", expected_step["step_ms"], sum(measured.values())), *rows] if rows else []:
        part.record(
            {
                "table": "predicted",
                "of": f"{preset} {attention}, B {B} T {T}",
                "class": what,
                "predicted": expected,
                "ms": ms,
                "ratio": ms / expected if expected else None,
            }
        )


def counters(check, part):
    """Hardware counters of a layer's kernels, by ncu; log.txt has its full output. The clocks are not changed."""
    tool = find_tool("ncu")
    if not tool or check.pretend:
        part.fact("ncu", "not available: the times above are measured by events")
        return
    ncu = [tool, "--csv", "--clock-control", "none", "--metrics", ",".join(COUNTERS)]
    benchmark = [*check.commands["BENCH_CUDA"], *"--repeats 1 kernels 1.4b 8 4 2048".split()]
    status, text = check.run([*ncu, *benchmark], 150)
    rows = {}
    for line in text.splitlines():
        words = [w.strip('"') for w in line.split('","')]
        if len(words) > 10 and words[-3] in COUNTERS:
            rows.setdefault(words[4], {}).setdefault(words[-3], words[-1])
    if status != 0 or not rows:
        part.fact("ncu", f"fails on this machine: {last_line(text)}")
    for kernel, values in rows.items():
        part.record({"table": "ncu", "kernel": kernel[:120], **values})
