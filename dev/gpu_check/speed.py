"""The parts `rates`, `profile`, `models` and `kernels`: speed of models and operations, and the shares of a step."""

import prediction
from runner import options_of

# (preset, attention, key/value heads, T), batch sizes to try
PROFILES = [  # and options of bench_cuda
    (("1.4b", "diff_v2", 8, 2048), (8, 4, 2, 1), []),
    (("1.4b", "diff_v2", 8, 2048), (8, 4, 2, 1), ["--attention-kernel", "own"]),
    (("1.4b", "diff_v2", 8, 2048), (8, 4, 2, 1), ["--matmul-dtype", "fp8"]),
    (("1.4b", "baseline", 8, 2048), (8, 4, 2, 1), []),
    (("124m", "diff_v2", 6, 1024), (16, 4), []),
    (("1.4b", "diff_v1", 8, 2048), (8, 4, 2, 1), []),
    (("3b", "diff_v2", 12, 4096), (4, 2, 1), []),
]
TINY = [(("tiny", "diff_v2", 2, 16), (4,), []), (("tiny", "diff_v2", 2, 16), (4,), ["--matmul-dtype", "fp8"])]
# Table 7 of DIFF V1 (arXiv 2410.05258): forward with backward, without an optimizer, and the forward alone
TABLE_7 = [("3b", 2048, 12, (8, 4, 2, 1)), ("3b", 4096, 12, (4, 2, 1))]  # preset, T, key/value heads, batch sizes
ARMS = ("baseline", "diff_v1", "diff_v2")
NO_UPDATE = ("optimizer states", "master weights")  # memory that is not allocated
TRAINING = [("1.4b", 2048, 8, (16, 8, 4, 2, 1)), ("124m", 1024, 6, (32, 16, 8))]
KERNELS = [("1.4b", 8, 8, 2048), ("3b", 12, 4, 4096), ("124m", 6, 32, 1024)]  # preset, key/value heads, B, T
UTILISATION, BEHIND, BANDWIDTH = 0.55, 0.95, 0.85  # targets


def rates(check):
    yield "rates", measure_rates


def measure_rates(check, findings):
    """The rates of a copy and of products. The word matches no operation, so bench_cuda measures only these rates."""
    shape = ("tiny", 2, 1, 16) if check.pretend else KERNELS[0]
    rows, ended = findings.bench(60, "kernels", *shape, "no operation")
    found = {r["case"] for r in rows}
    findings.check("rates of a copy and of a product", ended and {"gemm", "copy by a kernel"} <= found)


def models(check):
    """The published measurement first; the same models with the optimizer have the share of the device's peak."""
    for update, sizes in ((False, TABLE_7), (True, TRAINING)):
        for case in [("tiny", 16, 2, (2,))] if check.pretend else sizes:
            name = "{} T {}".format(*case)
            yield f"{name}{'' if update else ', no update'}", measure_models, *case, update


def measure_models(check, findings, preset, T, NKV, sizes, update):
    size, without = f"{preset} T {T}", () if update else NO_UPDATE
    cases = {f"{a},{NKV},1": a for a in ARMS}
    if update:
        cases.update(
            {f"baseline,{NKV},2": "baseline with 2 NH heads", f"diff_v2,{NKV},1,fast": "diff_v2, not deterministic"}
        )
    B = check.largest_batch((preset, "diff_v2", NKV, T), sizes, without=without)
    if not B:
        findings.fact(f"{size}: models", f"do not fit at B {sizes[-1]}")
        return
    options = ["--batch", B, *([] if update else ["--no-update"])]
    rows, left = [], [*cases]
    while left:  # a model that fails ends the program: restart it with the models after that one
        found, ended = findings.bench(300, *options, "model", preset, T, *left)
        rows += found
        left = [] if ended else left[sum(r["case"] == "forward" for r in found) + 1 :]
    training = {
        name: r for r in rows for name in cases.values() if r["case"] != "forward" and f"{preset} {name}, B" in r["of"]
    }
    ours = training.get("diff_v2")
    others = [("tokens/s of diff_v2 relative to a baseline with as many query heads", "baseline with 2 NH heads")]
    others += [] if update else [("tokens/s of diff_v2 relative to the baseline", "baseline")]
    for what, other in others:
        if ours and other in training:
            findings.target(f"{size}: {what}", ours["measured"] / training[other]["measured"], BEHIND)
    if ours and ours["ratio"] is not None and preset == "1.4b":
        findings.target(f"{size}: diff_v2, share of the device's dense bf16 peak", ours["ratio"], UTILISATION)


def kernels(check):
    for case in [("tiny", 2, 1, 16)] if check.pretend else KERNELS:
        yield case[0], measure_kernels, *case


def measure_kernels(check, findings, preset, *shape):
    rows, ended = findings.bench(240, "kernels", preset, *shape)
    bound = [r for r in rows if r["against"] == "copy"]
    if ended:
        findings.check(f"{preset}: every operation is measured", len(rows) > 40 and bound, f"{len(rows)} measurements")
    if bound:
        shares = sorted((r["ratio"], r["case"]) for r in bound)
        below = ", ".join(f"{case} {share:.1%}" for share, case in shares if share < BANDWIDTH)
        what = f"{preset}: memory-bound operations reach {BANDWIDTH:.0%} of a copy"
        findings.target(what, shares[0][0], BANDWIDTH, f"below: {below or 'none'}")


def profile(check):
    for case, sizes, options in TINY if check.pretend else PROFILES:
        yield " ".join([*case[:2], *options]), measure_profile, case, sizes, options


def measure_profile(check, findings, case, sizes, options):
    preset, attention, NKV, T = case
    gemm = options if "--matmul-dtype" in options else []
    why = check.why_no_fp8() if gemm else ""
    B = None if why else check.largest_batch(case, sizes, options=gemm)
    of = " ".join([f"{preset} {attention}, B {B} T {T}", *options])
    if not B:
        findings.fact(f"no profile of {of}", why or f"does not fit at B {sizes[-1]}")
        return
    rows, ended = findings.bench(180, *options, "profile", preset, attention, NKV, B, T)
    for row in rows:
        row["of"] = of
    if rows:
        beside_prediction(check, findings, of, [*options_of(case, B), *options], rows)
    if ended:
        measured = {r["case"]: r["measured"] or 0 for r in rows}
        share = 1 - measured["outside"] / measured["step"]
        findings.check(f"the operations of {of} add up to the step", 0 < share < 1.05, f"{share:.1%}")


def beside_prediction(check, findings, of, options, rows):
    """Adds the milliseconds that predict_diffv2 predicts to the rows of a step and of its operations."""
    if not check.device():
        findings.fact(f"{of}: no prediction", f"{check.store.all['device']} is not listed")
        return
    try:
        expected = prediction.predict(check.program("PREDICT_DIFFV2"), check.device(), options)
    except (RuntimeError, OSError) as error:
        findings.fact(f"{of}: no prediction", str(error)[:300])
        return
    predicted = {"step": expected["step_ms"]}
    for op in expected["operations"]:
        predicted[op["name"]] = predicted.get(op["name"], 0) + op["ms"]
    for row in rows:
        ms, own = predicted.get(row["case"], 0), row["measured"]
        row.update(expected=ms, against="prediction", ratio=ms / own if own else None)
