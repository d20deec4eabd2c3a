"""test_report.py: tests of the report on constructed runs with known numbers."""

import json
import math
import random
import struct
from functools import partial

import pytest

from . import figures, long_context, page, png, report as report_command, report_tables, run_directory, tables
from . import study as studies
from .testing import expect_error, has, rewrite, run_lab

report = partial(run_lab, "report")
NGRAMS = '{"tokens": 9, "windows": 9, "losses": [9.0, 9.0, 9.0, 9.0, 9.0]}'  # worse than all runs
STEPS, BATCH, T, MAP = 200, 1000, 16, 8
LAMBDA = 0.25


def write_maps(path, pairs):
    """Uniform maps; the second map of a pair attends only to the first position."""
    uniform = [1 / (t + 1) if j <= t else 0.0 for t in range(MAP) for j in range(MAP)]
    first = [1.0 if j == 0 else 0.0 for t in range(MAP) for j in range(MAP)]
    tensors = {"tokens": ([MAP], [float(ord(c)) for c in "a map of"])}
    for name in (f"layer.{layer}.head.{head}" for layer in range(2) for head in range(2)):
        tensors[f"{name}.a1"] = [MAP, MAP], uniform
        if pairs:
            tensors |= {f"{name}.a2": ([MAP, MAP], first), f"{name}.lambda": ([MAP], [LAMBDA] * MAP)}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, values) in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


OPTIONS = {"train-data": "c", "val-data": "c", "total-batch": BATCH, "steps": STEPS, "min-lr-ratio": 0.1, "warmup": 10}
OPTIONS |= {"schedule": "cosine", "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad-clip": 1}
OPTIONS |= {"val-steps": 5, "gemm": "fp32", "init": None, "layers": 2, "hidden": 8, "heads": 2, "kv-heads": 1}
OPTIONS |= {"head-dim": 4, "ffn": 8, "seq-len": T, "vocab": 256, "preset": "tiny"}
LAYER = {"lambda_min": 0.1, "lambda_max": 0.9, "context_rms_min": 0.1, "context_rms_mean": 0.4, "context_rms_max": 0.9}
LAYER |= {"first_mass_map0": 0.2, "first_mass_map1": None, "logit_max": 8.0, "residual_max": 20.0}
LAYER |= {"residual_median": 1.0, "grad_norm": 0.3}
ATTENTION = {"first_mass_map0": 0.2, "first_mass_map1": None, "first_mass_effective": 0.2, "sink_rate_map0": 10.0}
ATTENTION |= {"sink_rate_map1": None, "sink_rate_effective": 10.0, "logit_max": 30.0, "logit_median": 1.5}
ATTENTION |= {"hidden_max": 40.0, "hidden_median": 0.5}
RECALL = {"pairs": 4, "answers": 512, "exact": 0.1, "among_values": 0.3, "loss": 4.0}


def train_record(step, loss, lr):
    spike, judged = step == 150, step > 128
    record = {"kind": "train", "step": step, "loss": loss, "grad_norm": 9.0 if spike else 1.0, "lr": lr}
    record |= {"tokens": step * BATCH, "tokens_per_s": 5000.0, "ms": 200.0, "flops_util": 0.4}
    record |= {"loss_z": 0.1 if judged else None, "grad_z": (12.0 if spike else 0.2) if judged else None}
    return record | {"skipped": False}


def evaluation_of(final):
    found = {"loss": final, "loss_by_position": [final + (T - 1) / 2 / 10 - t / 10 for t in range(T)]}
    found |= {
        "loss_by_shard": [{"file": f"val_{i:06d}_{s}.bin", "loss": final + i} for i, s in enumerate(("all", "git"))]
    }
    shares = [{"share": 2.0**-k, "tokens": k + 1, "targets": 64 >> k} for k in range(3)]
    found |= {"loss_by_frequency": [group | {"loss": final + i / 10} for i, group in enumerate(shares)]}
    found |= {"windows": 9, "seed": 1, "recall": [RECALL | {"noise": n} for n in (0, 8)]}
    layers = [{"layer": 0, **ATTENTION}, {"layer": 1, **ATTENTION, "logit_max": 50.0}]
    found |= {"attention": {"windows": 9, "tokens": MAP, "layers": layers}}
    return found


def made_run(directory, arm, lr, seed, final, steps=STEPS, ended=True, diverged=False, **options):
    """Writes a run: `steps` of STEPS steps, a loss that decays to `final`, a gradient norm spike at step 150."""
    directory.mkdir(parents=True)
    random.seed(f"{arm} {lr} {seed}")
    info = {"options": {"attention": arm, "lr": lr, "seed": seed, **OPTIONS, **options}, "data_fingerprint": "77"}
    info |= {"model": {"parameters": 1000, "flops_per_token": 6e3}, "data": {}, "revision": "abc", "host": "h"}
    (directory / "run.json").write_text(json.dumps(info | {"devices": ["CPU: 1 threads on 2 cores"]}))
    lines = [{"kind": "val", "step": 0, "loss": 5.5}]
    for step in range(1, steps + 1):
        loss = final + 3 * math.exp(-step / 30) + random.gauss(0, 0.02)
        lines.append(train_record(step, None if diverged and step > steps - 10 else loss, lr))
        if step % 50 == 0:
            lines.append({"kind": "val", "step": step, "loss": final + 3 * math.exp(-step / 30) * (step < STEPS)})
            more = {"lambda_mean": 0.5 if "diff" in arm else None}
            for layer in range(2):
                more["first_mass_effective"] = 0.1 + layer
                lines.append({"kind": "stats", "step": step, "layer": layer, **LAYER, **more})
    if diverged:
        lines.append({"kind": "event", "step": steps, "what": "stopped", "why": "not_finite"})
    write_log(directory, lines)
    if steps == STEPS and ended and not diverged:
        run_directory.checkpoint(directory, STEPS).mkdir(parents=True)
        (run_directory.checkpoint(directory, STEPS) / "trainer_state.json").write_text("{}")
        (directory / "eval.json").write_text(json.dumps(evaluation_of(final)))
        if seed == 1:
            write_maps(directory / "attention.safetensors", "diff" in arm)


# mean -0.04, deviation sqrt(3)/100: 95% half width 4.3027 0.017321 / sqrt 3 = 0.043027
GAPS = {1: -0.02, 2: -0.05, 3: -0.05}
ARMS = {"baseline": {"label": "Transformer"}, "diff_v2": {"label": "DIFF V2"}}


def write_lab(lab, runs, **more):
    """lab.json of {name: arm}."""
    lab.mkdir(exist_ok=True)
    named = [{"name": name, "arm": arm} for name, arm in runs.items()]
    found = {"plan": "p", "size": "s", "title": "L", "reference": "baseline", "arms": ARMS, "runs": named}
    (lab / "lab.json").write_text(json.dumps(found | more))
    (lab / "ngrams.json").write_text(NGRAMS)
    return lab


def made_lab(place, name="lab"):
    """Two arms, three seeds at one rate and one at another, where the baseline diverges."""
    lab, runs = place / name, {}
    for arm in ("baseline", "diff_v2"):
        for lr, seed in ((0.001, 1), (0.001, 2), (0.001, 3), (0.004, 1)):
            final = 2.0 + seed / 10 + (GAPS[seed] if arm == "diff_v2" else 0) + (lr == 0.004) * 0.05
            broken, run = arm == "baseline" and lr == 0.004, f"{arm}.lr{lr:g}.seed{seed}"
            made_run(lab / run, arm, lr, seed, final, steps=120 if broken else STEPS, diverged=broken)
            runs[run] = arm
    return write_lab(lab, runs, size="cpu", title="Made up <&>", question="Why?", text="")


def edit(directory, change):
    rewrite(directory / "run.json", change)


def read_log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def write_log(run, records, mode="w"):
    with open(run / "log.jsonl", mode) as log:
        log.writelines(json.dumps(record) + "\n" for record in records)


def results_of(out):
    return json.loads((out / "results.json").read_text())


def reported(out, *words):
    """The results of a report, which succeeds."""
    done = report(*words, "--out", out)
    assert done.returncode == 0, done.stderr
    return results_of(out)


def near(got, wanted, tolerance=1e-6):
    assert abs(got - wanted) <= tolerance, f"{got!r}, wanted {wanted!r}"


@pytest.mark.full
def test_the_report_has_the_known_numbers(tmp_path):
    lab = made_lab(tmp_path)
    r = reported(lab / "report", lab)
    row = next(x for x in r["summary"] if x["arm"] == "diff_v2" and x["lr"] == 0.001)
    near(row["gap"]["mean"], -0.04)
    near(row["gap"]["half"], 0.0430265, 1e-5)
    near(row["losses"]["2"], 2.15)
    assert row["gap"]["n"] == 3 and r["main_lr"] == 0.001, row
    alone = next(x for x in r["summary"] if x["arm"] == "diff_v2" and x["lr"] == 0.004)
    broken = next(x for x in r["summary"] if x["arm"] == "baseline" and x["lr"] == 0.004)
    assert alone["gap"] is None and broken["states"] == {"diverged": 1}
    spikes = next(x for x in r["spikes"] if x["arm"] == "diff_v2" and x["lr"] == 0.001)["grad"]
    assert (spikes["spikes"], spikes["judged"]) == (3, 3 * 168)
    near(spikes["score"], 100 / 168)
    ladder = {x["arm"]: x for x in r["ladder"]}
    assert ladder["baseline"]["stable"] == 0.001 and not ladder["baseline"]["bounded_by_ladder"], ladder
    assert ladder["diff_v2"]["stable"] == 0.004 and ladder["diff_v2"]["bounded_by_ladder"], ladder
    positions = r["by_position"]["diff_v2"]
    assert [(p["begin"], p["end"]) for p in positions] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16)]
    near(positions[-1]["loss"]["mean"], 2.16 + 0.75 - 1.15)
    near(positions[-1]["gap"]["mean"], -0.04)
    rare = r["by_frequency"]["diff_v2"][2]
    assert (rare["share"], rare["tokens"], rare["targets"]) == (0.25, 3, 16), rare
    near(rare["loss"]["mean"], 2.16 + 0.2)
    near(rare["gap"]["mean"], -0.04)
    near(r["recall"]["baseline"][0]["among_values"]["mean"], 0.3)
    git = r["by_source"]["diff_v2"][1]
    assert git["source"] == "git" and len(r["by_source"]["diff_v2"]) == 2
    near(git["loss"]["mean"] - 1, r["by_source"]["diff_v2"][0]["loss"]["mean"])
    near(git["gap"]["mean"], -0.04)
    said = (lab / "report/results.md").read_text()
    has(said, "| -0.0400 [-0.0830, +0.0030] not shown |", "| 2.100, 2.200, 2.300 | diverged |")
    text = (lab / "report/report.html").read_text()
    has(text, "<ul><li>No verdict: every gap is of fewer than 5 seeds.</li></ul>", "Made up &lt;&amp;&gt;")
    has(text, "of the steps of all runs on CPU: 1 threads on 2 cores of h; other load", "<td>5k [5k, 5k]</td>")
    has(text, "../diff_v2.lr0.001.seed1/log.jsonl'>log</a>")
    assert "<&>" not in text.split("<script>")[0]
    pngs = {p.name for p in (lab / "report").glob("*.png")}
    names = "loss-tokens loss-FLOPs loss-time final-gap gap-training ladder-rates norms-gradient-norm map-baseline "
    names += "map-diff_v2 position-gap"
    assert {f"{name}.png" for name in names.split()} <= pngs, pngs
    assert all((lab / "report" / p).read_bytes().startswith(b"\x89PNG") for p in pngs)
    pdf = (lab / "report/position-gap.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and '"file":"position-gap"' in text


NOISE = {1: 0.01, 2: -0.01, 3: 0.0}  # of a cost


def test_test_lines_without_points_are_not_in_the_legend(tmp_path):
    arms, legends, close = ["plain", "experts"], [], png.plt.close
    empty, full = (figures.trace(arm, arm, [0, 1], y) for arm, y in zip(arms, ([None, math.nan], [1.0, 2.0])))
    other = figures.trace("experts", "experts, more", [0, 1], [2.0, 3.0])
    title, view = {"title": "entropy"}, {"label": "entropy", "x": "layer", "y": "nats", "traces": [empty, full, other]}

    def look(fig):
        legends.append([t.get_text() for t in fig.axes[0].get_legend().get_texts()])
        close(fig)

    png.plt.close = look
    try:
        assert png.figure_files(tmp_path / "a", title, view, arms, "all")
        assert not png.figure_files(tmp_path / "b", title, {**view, "traces": [empty]}, arms, "all")
    finally:
        png.plt.close = close
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pdf", "a.png"]
    assert legends == [["experts", "experts, more"]], legends


def test_the_report_has_verdicts_probes_and_late_gradients(tmp_path):
    from . import test_claims as made

    def change(run, arm, seed):
        (run / "probe.json").write_text(made.probe_of(0.2, 0.25))
        record = {"kind": "stats", "layer": 0, "grad_norm": 2.0 + (arm != "baseline")}
        write_log(run, [{**record, "step": s} for s in range(160, 200)], "a")

    arms = {"baseline": 2.0, "diff_v2": 1.95, "sink": 2.001}
    losses = {
        a: {s: x + s / 10 + (made.NOISE * 2)[s] / 2 * (a != "baseline") for s in range(1, 6)} for a, x in arms.items()
    }
    lab = made.made_lab(tmp_path, losses, plan="family.plan", change=change)
    r = reported(lab / "report", lab, "--no-png")
    verdicts = {row["id"]: row["verdict"] for row in r["claims"]}
    assert verdicts["gap-parameters"] == "supported" and verdicts["extra-logit"] == "opposite shown", verdicts
    assert not {"gap", "1.5h", "decoding"} & set(verdicts), verdicts
    assert r["plan"] == "family"
    power = next(x for x in r["noise"] if x["arm"] == "diff_v2")
    assert power["pooled_df"] == 8 and power["seeds_pooled"] <= power["seeds_for_effect"], power
    near(r["probes"]["layers"]["sink"]["cancelled"][0]["mean"], 0.25)
    late = next(x for x in r["late_gradients"] if x["arm"] == "sink")
    said, page = (lab / "report/results.md").read_text(), (lab / "report/report.html").read_text()
    has(said, f"{late['all']:.3g} | 1.", "| below, 0.015 |", "| SINK | cancelled | 0.250 [")
    assert "<td>DIFF V2 reaches a lower loss than a Transformer with as many parameters" in page
    has(page, "Gradient norms of the layers in the last quarter", "Probes of the last checkpoints")


def test_a_direction_requires_a_corrected_p_and_seeds_and_tokens(tmp_path):
    # The interval of SINK excludes 0, and its p is above 0.05 after correction.
    from . import test_claims as made

    losses = {"baseline": 2.0, "diff_v2": 1.95, "sink": 2.001, "xsa": 2.0}
    noise = (made.NOISE * 2)[1:6]
    lab = made.made_lab(
        tmp_path, {a: {s: x + (a != "baseline") * n / 2 for s, n in enumerate(noise, 1)} for a, x in losses.items()}
    )

    def told(seeds=5, parameters=1000):
        study = studies.load([lab])
        study.runs = [run for run in study.runs if run.seed <= seeds]
        for run in study.runs:
            run.info["model"]["parameters"] = parameters
        r = tables.results(study)
        t = report_tables.summary(r)
        return t.lines, [row[1].kind for row in t.rows], {row["arm"]: row["gap"] for row in r["summary"]}

    lines, kinds, gaps = told()
    assert gaps["sink"]["half"] < gaps["sink"]["mean"] and gaps["sink"]["p_holm"] > 0.05, gaps
    assert lines[0] == "DIFF_V2: the loss is lower than that of BASELINE, by 0.0501 nats per token.", lines
    assert lines[1:] == [f"{arm}: no difference from BASELINE is shown." for arm in ("SINK", "XSA")], lines
    assert kinds == ["", "good", "open", "open"], kinds
    lines, kinds, gaps = told(seeds=4)
    assert gaps["diff_v2"]["p_holm"] < 0.001 and lines == ["No verdict: every gap is of fewer than 5 seeds."], lines
    assert kinds == ["", "open", "open", "open"], kinds
    lines, kinds, _ = told(parameters=400_000)
    assert lines == ["No verdict: the runs have 0.5 tokens per parameter, and a verdict requires 1."], lines
    assert kinds == ["", "open", "open", "open"], kinds


WINDOWS = {"window": 8, "full-every": 2}
LONG_ARMS = {  # arm: variant, windows, parameters, loss above the variant's own, share of NOISE in it
    "baseline": ("baseline", {}, 1000, 0, 0),
    "baseline-w": ("baseline", WINDOWS, 1000, 0.03, 1),
    "baseline-yoco": ("baseline", {"window": 8, "yoco": True}, 1000, 0.08, 0),
    "diff_v2": ("diff_v2", {}, 1300, -0.5, 0),  # has other parameters: not what the arms below are compared with
    "diff_v2-p": ("diff_v2", {}, 1000, 0, 0),
    "diff_v2-w": ("diff_v2", WINDOWS, 1000, 0.01, 0),
    "diff_v2-yoco": ("diff_v2", {"window": 8, "yoco": True}, 1000, 0.05, 0.2),
}
LATE = 0.4  # a model with YOCO loses this much more in the last half of the context


def made_long_lab(place):
    lab, runs = place / "lab", {}
    for arm, (attention, options, parameters, above, share) in LONG_ARMS.items():
        for seed, noise in NOISE.items():
            run = f"{arm}.lr0.001.seed{seed}"
            made_run(lab / run, arm, 0.001, seed, 2 + seed / 10 + above + share * noise, attention=attention, **options)
            edit(lab / run, lambda j: j["model"].update(parameters=parameters))
            late = [LATE * (t >= T // 2) * bool(options.get("yoco")) for t in range(T)]
            added = lambda j: [x + more for x, more in zip(j["loss_by_position"], late)]
            rewrite(lab / run / "eval.json", lambda j: j.update(loss_by_position=added(j)))
            runs[run] = arm
    return write_lab(lab, runs, title="Long", arms={arm: {"label": arm} for arm in LONG_ARMS})


def test_the_cost_of_windows_and_yoco_is_that_within_a_variant(tmp_path):
    lab = made_long_lab(tmp_path)
    part = reported(lab / "report", lab, "--no-png")["long_context"]
    rows = {(x["what"], x["change"], x["base"], x["arm"]): x for x in part["costs"]}
    assert len(rows) == len(part["costs"]) == 18, list(rows)
    whole, late, use = "loss", "loss at positions 8 to 15", "that minus the loss at 4 to 7"
    for key, cost, noise, gap, gap_noise in (
        ((whole, "windows", "neither", "baseline-w"), 0.03, 1, None, 0),
        ((whole, "YOCO", "neither", "baseline-yoco"), 0.08, 0, None, 0),
        ((whole, "YOCO", "windows", "baseline-yoco"), 0.05, 1, None, 0),
        ((whole, "windows", "neither", "diff_v2-w"), 0.01, 0, -0.02, 1),
        ((whole, "YOCO", "neither", "diff_v2-yoco"), 0.05, 0.2, -0.03, 0.2),
        ((whole, "YOCO", "windows", "diff_v2-yoco"), 0.04, 0.2, -0.01, 1.2),
        ((late, "YOCO", "neither", "diff_v2-yoco"), 0.05 + LATE, 0.2, -0.03, 0.2),
        ((use, "YOCO", "windows", "baseline-yoco"), LATE, 0, None, 0),
        ((use, "windows", "neither", "diff_v2-w"), 0, 0, 0, 0),
    ):
        row, half = rows[key], 4.302652730 * 0.01 / math.sqrt(3)
        near(row["cost"]["mean"], cost)
        near(row["cost"]["half"], noise * half)
        assert (row["gap"] is None) == (gap is None), row
        if gap is not None:
            near(row["gap"]["mean"], gap)
            near(row["gap"]["half"], gap_noise * half)
    assert rows[whole, "windows", "neither", "diff_v2-w"]["minus"] == "diff_v2-p"
    second = rows[whole, "YOCO", "windows", "baseline-yoco"]["cost"]  # has the second largest p of the 6 losses
    near(second["p_holm"], 2 * second["p"])
    arms = {row["arm"]: row for row in part["arms"]}
    numbers = [arms[arm]["cache_numbers"] for arm in ("baseline", "diff_v2-w", "diff_v2-yoco")]
    assert numbers == [2 * 16 * 8, (8 + 16) * 8, (8 + 16) * 8], numbers
    near(arms["baseline"]["values"][use]["mean"], -0.6)
    said = (lab / "report/results.md").read_text()
    assert "| loss | windows against neither | baseline-w | +0.0300 [+0.0052, +0.0548] not shown |" in said, said
    has(said, "-0.0200 [-0.0448, +0.0048] not shown", "| 1 x 8, 1 x 16 |")
    assert "<h2 id=windows>" in (lab / "report/report.html").read_text()


SPARSE_ARMS = {  # arm: variant, blocks, score, loss above that of the Transformer
    "baseline": ("baseline", 0, "group", 0),
    "baseline-k4": ("baseline", 4, "group", 0.02),
    "baseline-k2": ("baseline", 2, "group", 0.05),
    "diff_v2": ("diff_v2", 0, "group", -0.1),
    "diff_v2-k2": ("diff_v2", 2, "group", -0.07),
    "diff_v2-k2-apart": ("diff_v2", 2, "apart", -0.09),
}


def test_the_price_of_selected_blocks_is_that_of_as_many_within_a_variant(tmp_path):
    lab, runs = tmp_path / "lab", {}
    for arm, (attention, blocks, score, above) in SPARSE_ARMS.items():
        for seed in (1, 2):
            options = {"attention": attention, "sparse-blocks": blocks, "sparse-block-size": 2, "sparse-score": score}
            made_run(lab / f"{arm}.{seed}", arm, 0.001, seed, 2 + seed / 10 + above, **options)
            runs[f"{arm}.{seed}"] = arm
    write_lab(lab, runs, arms={arm: {"label": arm} for arm in SPARSE_ARMS})
    part = long_context.tables(studies.load([lab]), 0.001)
    mean = lambda estimate: estimate and round(estimate["mean"], 9)
    found = {(x["change"], x["base"], x["arm"]): x for x in part["costs"] if x["what"] == "loss"}
    assert {key: (x["minus"], mean(x["cost"]), mean(x["gap"])) for key, x in found.items()} == {
        ("blocks", "neither", "baseline-k4"): ("baseline", 0.02, None),
        ("blocks", "neither", "baseline-k2"): ("baseline", 0.05, None),
        ("blocks", "neither", "diff_v2-k2"): ("diff_v2", 0.03, -0.02),
        ("blocks apart", "neither", "diff_v2-k2-apart"): ("diff_v2", 0.01, None),
        ("blocks apart", "blocks", "diff_v2-k2-apart"): ("diff_v2-k2", -0.02, None),
    }
    whats = {x["what"] for x in part["costs"]}
    assert whats == {"loss", "loss at positions 8 to 15"}  # no window whose end is compared


def test_runs_that_are_not_comparable_are_an_error(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    made_run(one, "baseline", 0.001, 1, 2.0)
    made_run(other, "diff_v2", 0.001, 1, 1.9, **{"total-batch": 2000})
    out = tmp_path / "out"
    expect_error(report(one, other, "--out", out), 2, "--total-batch: 1000 in one, 2000 in other", lines=1)
    assert not out.exists()
    reported(out, one, other, "--force", "--no-png")
    has((out / "report.html").read_text(), "Differs between runs: --total-batch: 1000 in one, 2000 in other")
    made_run(tmp_path / "again", "baseline", 0.001, 1, 2.0)
    expect_error(report(one, tmp_path / "again", "--out", out), 2, "are both arm baseline with rate 0.001 and seed 1")
    for words, status, said in (
        ((tmp_path / "nothing",), 1, "no such directory"),
        ((one, "--reference", "x"), 1, "no such arm"),
        ((one, "--watch", "0"), 2, "must be 1 to 1,000,000 seconds"),
    ):
        expect_error(report(*words, "--out", out), status, said)
    (one / "run.json").write_text("{")
    done = report(one, "--out", out)
    expect_error(done, 1, "run.json")
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.full
def test_a_run_that_has_just_started_has_a_report(tmp_path):
    run = tmp_path / "run"
    made_run(run, "baseline", 0.001, 1, 2.0, steps=0)
    (run / "log.jsonl").unlink()
    done = report(run)
    assert done.returncode == 0, done.stderr
    assert "0/200" in (run / "report/report.html").read_text()
    lab = tmp_path / "lab"
    write_lab(lab, {"x": "baseline"}, arms={})
    expect_error(report(lab), 1, "no run of the plan has started", lines=1)


def test_the_report_has_active_parameters_and_loads_of_experts(tmp_path):
    dense, experts, out = tmp_path / "dense", tmp_path / "experts", tmp_path / "out"
    made_run(dense, "baseline", 0.001, 1, 2.0)
    made_run(experts, "diff_v2", 0.001, 1, 2.0)
    edit(experts, lambda j: j["model"].update(active_parameters=600))
    edit(experts, lambda j: j["options"].update({"experts": 3, "expert-ffn": 5, "dense-layers": 1}))
    records = read_log(experts)
    for record in records:
        if record["kind"] == "stats" and record["layer"] == 1:
            record |= {"expert_load": [0.5, 1.75, 0.75], "router_entropy": 0.6, "router_logit_max": 3.0}
    write_log(experts, records)
    done = report(dense, experts, "--out", out, "--no-png")
    assert done.returncode == 0 and "not records" not in done.stderr, done.stderr
    r, page = results_of(out), (out / "report.html").read_text()
    layers = r["layers"]["diff_v2"]["stats"]
    assert layers["expert_load_max"] == [None, 1.75] and layers["router_entropy"] == [None, 0.6], layers
    assert [row["active_parameters"] for row in r["summary"]] == [1000, 600]
    assert "1,000, 600 active" in page and page.count("Load of the busiest expert") and "Entropy of the router" in page
    assert page.count("<td>3 x 5, 8 in 1 dense</td>") == 1 and page.count("<td>8</td><td>1,000</td>") == 1
    assert layers["expert_load_min"] == [None, 0.5] and "least used expert" in page
    done = report(dense, "--out", out, "--no-png")
    assert done.returncode == 0 and "busiest expert" not in (out / "report.html").read_text()


def test_losses_of_routers_are_drawn_for_runs_with_experts_alone(tmp_path):
    runs = [tmp_path / name for name in ("dense", "one", "two")]
    for run, arm, number in zip(runs, ("baseline", "diff_v2", "diff_v2"), (1, 1, 2)):
        made_run(run, arm, 0.001, number, 2.0)
    for run, balance in zip(runs[1:], (1.0, 1.5)):
        records = read_log(run)
        for record in records:
            if record["kind"] == "train":
                record |= {"router_aux": balance, "router_z": record["step"] / 100}
        write_log(run, records)

    def drawn(*paths):
        study = studies.load(paths)
        studies.check(study)
        return {f["id"]: f["views"] for f in report_command.compute(study)[1]}.get("router_losses")

    assert drawn(runs[0]) is None
    balance, z = drawn(*runs)
    assert [t["arm"] for t in balance["traces"]] == ["diff_v2"] and balance["traces"][0]["y"] == [1.25] * STEPS
    assert z["traces"][0]["x"][-1] == STEPS * BATCH and z["traces"][0]["y"][-1] == STEPS / 100
    balance, z = drawn(runs[2])
    assert balance["label"] == "balance" and balance["traces"][0]["y"] == [1.5] * STEPS
    assert z["traces"][0]["x"][-1] == STEPS and z["traces"][0]["y"][49] == 0.5


def test_the_report_of_a_resumed_run_has_its_option_history(tmp_path):
    run, whole, out = tmp_path / "run", tmp_path / "whole", tmp_path / "out"
    made_run(run, "baseline", 0.001, 1, 2.0)
    made_run(whole, "diff_v2", 0.001, 1, 2.0)
    (run / "eval.json").unlink()
    changed = [
        {"name": "steps", "old": 100, "new": STEPS},
        {"name": "lr", "old": 0.001, "new": 0.5},
        {"name": "total-batch", "old": BATCH, "new": 3 * BATCH},
    ]
    start = {"command_line": [], "revision": "def", "host": "h", "ranks": 1}
    starts = [{**start, "step": 0, "changed": []}, {**start, "step": 100, "changed": changed}]
    edit(run, lambda j: (j["options"].update(steps=100), j.update(starts=starts)))
    r = reported(out, run, "--no-png")
    assert r["runs"][0]["state"] == "done" and r["runs"][0]["final_loss"] == 2.0, r["runs"]  # of step 200, not 100
    assert (r["tokens"], r["training"]["steps"]) == (100 * BATCH + 100 * 3 * BATCH, STEPS), r
    assert r["revisions"] == ["abc", "def"]
    assert r["summary"][0]["rate"] == "0.001 then 0.5 after step 100"
    page = (out / "report.html").read_text()
    has(
        page,
        "run was resumed under other options: --lr 0.001 then 0.5 after step 100; "
        "--total-batch 1000 then 3000 after step 100; --steps 100 then 200 after step 100",
        "<td>0.001 then 0.5 after step 100; ",
        "0.4M tokens in 200 (100 then 200 after step 100) steps of 3000 (1000 then 3000 after step 100)",
    )
    done = report(run, whole, "--out", out, "--no-png")
    expect_error(done, 2, "--total-batch: 1000 then 3000 after step 100 in run, 1000 in whole (and 2 more)")
    # resumed by an older trainer, which wrote no starts: the log shows the final step
    edit(run, lambda j: j.pop("starts"))
    r = reported(out, run, "--no-png")
    assert r["runs"][0]["final_loss"] == 2.0 and r["tokens"] == STEPS * BATCH, r["runs"]
    assert "run continued to step 200, beyond the 100 of its run.json" in (out / "report.html").read_text()


@pytest.mark.full
def test_losses_of_other_validation_windows_are_not_compared(tmp_path):
    one, other, out = tmp_path / "one", tmp_path / "other", tmp_path / "out"
    made_run(one, "baseline", 0.001, 1, 2.0)
    made_run(other, "diff_v2", 0.001, 1, 1.9)
    source = {"name": "", "path": "c", "tokens": 999, "shards": 1, "windows": 40}
    sources = lambda fingerprint: [source | {"fingerprint": fingerprint}]
    windows = "windows of validation (--val-steps times --batch-size)"
    for mine, its, said in (
        ({"batch-size": 2}, {"batch-size": 4}, f"{windows}: 10 in one, 20 in other"),
        ({"batch-size": 2}, {"batch-size": 2, "val-steps": 6}, "10 in one, 12 in other"),
        ({"batch-size": 2, "val-steps": 10}, {"batch-size": 4}, None),
        ({"val-data": "c"}, {"val-data": "d"}, None),
        (
            {"val-data": "c"},
            {"val-data": "d", "fingerprint": "8"},
            "fingerprint of the validation data: 7 in one, 8 in other",
        ),
    ):
        for run, options in ((one, mine), (other, its)):
            kept = {"batch-size": 2, "val-steps": 5, "val-data": "c"} | options
            data = {"val": sources(kept.pop("fingerprint", "7"))}
            edit(run, lambda j: (j["options"].update(kept), j.update(data=data)))
        done = report(one, other, "--out", out, "--no-png")
        assert done.returncode == (2 if said else 0) and (said or "") in done.stderr, (mine, its, done.stderr)
    # the final losses are of the evaluations, which must have the same data too
    edit(other, lambda j: j.update(data={"val": sources("7")}))
    rewrite(other / "eval.json", lambda j: j.update(windows=8))
    expect_error(report(one, other, "--out", out, "--no-png"), 2, "windows of the evaluation: 9 in one, 8 in other")


@pytest.mark.slow
def test_runs_with_the_same_arm_rate_and_seed_have_separate_rows(tmp_path):
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    made_run(a, "baseline", 0.001, 1, 2.0)
    made_run(b, "baseline", 0.001, 1, 1.5)
    done = report(a, b, "--out", out, "--no-png")
    assert done.returncode == 2 and str(a) in done.stderr and str(b) in done.stderr and done.stderr.count("\n") == 1, (
        done.stderr
    )
    rows = reported(out, a, b, "--force")["summary"]
    assert [(row["arm"], row["losses"]) for row in rows] == [
        ("baseline", {"1": 2.0}),
        (f"baseline ({b})", {"1": 1.5}),
    ], rows
    assert f"{b} and {a} are both arm baseline" in (out / "report.html").read_text()
    # the seeds of each lab stay together
    labs = [made_lab(tmp_path, name) for name in ("x", "y")]
    arms = reported(out, *labs, "--force", "--no-png")["arms"]
    assert list(arms) == ["baseline", "diff_v2", f"baseline ({labs[1]})", f"diff_v2 ({labs[1]})"], arms
    assert arms[f"diff_v2 ({labs[1]})"] == f"DIFF V2 ({labs[1]})"
    rows = {(row["arm"], row["lr"]): row for row in results_of(out)["summary"]}
    assert rows["baseline", 0.001]["loss"]["n"] == rows[f"baseline ({labs[1]})", 0.001]["loss"]["n"] == 3
    assert len(results_of(out)["runs"]) == 16


def without_rights():
    """For a child process: file permissions apply to root too."""
    import ctypes

    for right in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, right, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.slow
def test_damaged_files_are_skipped_with_one_line(tmp_path):
    lab, out = made_lab(tmp_path), tmp_path / "out"
    run = lab / "diff_v2.lr0.001.seed1"
    whole = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    log = whole[run / "log.jsonl"].split(b"\n")
    damages = [
        ("run.json", b"", 7, "run.json: not JSON"),
        ("run.json", b"{}", 7, "run.json: it has no options"),
        ("run.json", b"[" * 100000, 7, "run.json: not JSON"),
        ("run.json", b"\xff\xfe\xfd", 7, "run.json: not JSON"),
        (
            "run.json",
            whole[run / "run.json"].replace(b'"steps": 200', b'"steps": "many"'),
            7,
            "run.json: options.steps is not a positive integer",
        ),
        (
            "log.jsonl",
            b"\n".join(log[:50] + [b"garbage", b'{"kind": "train", "step": "x"}'] + log[50:]),
            8,
            "log.jsonl: line 51 and 1 more are not records",
        ),
        ("eval.json", b"{", 8, "eval.json: not JSON"),
        ("eval.json", b'{"recall": 3}', 8, "eval.json: recall is not a list"),
        ("attention.safetensors", b"", 8, "attention.safetensors: damaged"),
        ("attention.safetensors", whole[run / "attention.safetensors"][:900], 8, "attention.safetensors: damaged"),
    ]
    for name, data, left, said in damages:
        (run / name).write_bytes(data)
        done = report(lab, "--out", out, "--no-png")
        expect_error(done, 1, said, lines=1)
        assert str(run / name) in done.stderr, done.stderr
        r = results_of(out)
        assert len(r["runs"]) == left and said in " ".join(r["notes"]), (name, r["notes"])
        assert said in (out / "report.html").read_text()
        (run / name).write_bytes(whole[run / name])
    (run / "log.jsonl").write_bytes(b"\n".join(log[:-1]) + b'\n{"kind": "tra')  # being written
    done = report(lab, "--out", out, "--no-png")
    assert done.returncode == 0 and not done.stderr, done.stderr
    # an unreadable directory, a lab with a damaged lab.json, and no run at all
    other = tmp_path / "other"
    made_run(other, "gated_head", 0.001, 1, 2.0)
    run.chmod(0)
    for paths, left in (((lab,), 7), ((lab, other), 8)):
        done = report(*paths, "--out", out, "--no-png", preexec_fn=without_rights)
        expect_error(done, 1, f"{run}/run.json: Permission denied", lines=1)
        assert len(results_of(out)["runs"]) == left
    run.chmod(0o755)
    (lab / "lab.json").write_text("[1]")
    done = report(lab, other, "--out", out, "--no-png")
    expect_error(done, 1, "lab.json: it is not an object; left out")
    assert len(results_of(out)["runs"]) == 1, done.stderr
    expect_error(report(lab, "--out", out, "--no-png"), 1, "lab.json: it is not an object\n", lines=1)


def places(value, path=()):
    """The paths of all values in a JSON value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield path + (key,)
        yield from places(item, path + (key,))


WRONG = (None, "x", -1, 0, 1e999, [None], {}, 10**400, "gone")


def spoiled(text, path, wrong):
    """JSON with one value replaced, or removed."""
    value = inner = json.loads(text)
    for key in path[:-1]:
        inner = inner[key]
    if wrong == "gone":
        inner.pop(path[-1])
    else:
        inner[path[-1]] = wrong
    return json.dumps(value)


def whole_report(path):
    """Computes a report without writing files: (page, results, Markdown)."""
    study = studies.load([path])
    studies.check(study)
    studies.separate(study)
    results, shown = report_command.compute(study)
    json.dumps(results, allow_nan=False)
    text = page.build(study, *page.content(study, results, shown))
    return text, results, report_tables.markdown(study, results)


@pytest.mark.slow
def test_values_of_any_type_do_not_crash_the_report(tmp_path):
    from . import test_claims

    lab = tmp_path / "lab"
    run = lab / "run"
    made_run(run, "diff_v2", 0.001, 1, 2.0)
    changed = [{"name": "beta1", "old": 1, "new": 0.5}]
    starts = [{"step": 0, "changed": []}, {"step": 9, "revision": "x", "changed": changed}]
    data = {"val": [{"path": "c", "tokens": 9, "windows": 9, "fingerprint": "7"}]}
    edit(run, lambda j: j.update(starts=starts, data=data))
    lines = (run / "log.jsonl").read_text().splitlines()
    task = {"kind": "choices", "step": STEPS, "name": "piqa", "examples": 9, "accuracy": 0.4, "chance": 0.5}
    lines.insert(0, json.dumps({**task, "accuracy_se": 0.1, "norm": "tokens", "fingerprint": "9"}))
    (run / "log.jsonl").write_text("\n".join(lines[:5] + lines[-5:]) + "\n")
    arms = {"signed": {"label": "L", "match": "b"}}
    more = {"question": "Q", "reference": "signed", "arms": arms}
    write_lab(lab, {"run": "signed"}, plan="family.plan", title="T", **more)
    (run / "probe.json").write_text(test_claims.probe_of(0.2, 0.25))
    files = (run / "run.json", run / "eval.json", run / "probe.json", lab / "lab.json")
    cases = [(path, path.read_text(), "", "") for path in files]
    log, whole = run / "log.jsonl", (run / "log.jsonl").read_text().splitlines(True)
    cases += [
        (log, line, "".join(whole[:i]), "".join(whole[i + 1 :])) for i, line in enumerate(whole) if i in (0, 1, 3, 7, 9)
    ]
    for path, text, before, after in cases:
        for at in places(json.loads(text)):
            if "loss_by_position" in at and at[-1] not in (0, "loss_by_position"):
                continue
            for wrong in WRONG:
                path.write_text(before + spoiled(text, at, wrong) + ("\n" if path == log else "") + after)
                try:
                    whole_report(lab)
                except run_directory.RunError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{path.name}: {at} = {wrong!r}") from error
        path.write_text(before + text + after)


@pytest.mark.full
def test_heads_without_maps_are_an_error(tmp_path):
    lab, out = made_lab(tmp_path), tmp_path / "out"
    for words, said in (
        ("9:9", "--heads 9:9: no run has maps of this head; the last head is 1:1"),
        ("0:1,9:9,1:7", "--heads 9:9,1:7: no run has maps of these heads"),
        ("foo", "--heads foo: must be LAYER:HEAD"),
        ("", "--heads '': the value is empty"),
        ("0:1,", "must be LAYER:HEAD"),
    ):
        done = report(lab, "--out", out, "--no-png", "--heads", words)
        expect_error(done, 2, said, lines=1)
        assert not out.exists(), done.stderr
    reported(out, lab, "--no-png", "--heads", "0:1,1:0")
    text = (out / "report.html").read_text()
    assert '"title":"layer 1, head 0"' in text and '"title":"layer 1, head 1"' not in text
    done = report(lab / "baseline.lr0.001.seed2", "--out", out, "--no-png", "--heads", "0:1")
    expect_error(done, 2, "there are no maps")
    for words, said in (
        (("--reference", ""), "the value is empty"),
        (("--reference", "a", "--reference", "b"), "specified more than once"),
        (("--watch", "inf"), "must be 1 to 1,000,000 seconds"),
    ):
        expect_error(report(lab, "--out", out, "--no-png", *words), 2, said, lines=1)
