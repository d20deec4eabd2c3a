"""test_report.py: tests of reports and saved files, on constructed runs with known numbers."""

import base64
import html
import json
import math
import random
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from lab import option_history, plan as plans, report as command, results, run as lab_run, run_directory, saved, stats
from lab import study as studies, tables
from lab.testing import ROOT, expect_error, has, near, raises, rewrite, run_lab
from lab.trainer import Cost

report = partial(run_lab, "report")
STEPS, BATCH, T = 200, 1000, 16
OPTIONS = {"train-data": "c", "val-data": "c", "total-batch": BATCH, "steps": STEPS, "min-lr-ratio": 0.1, "warmup": 10}
OPTIONS |= {"schedule": "cosine", "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad-clip": 1}
OPTIONS |= {"val-steps": 5, "matmul-dtype": "fp32", "init": None, "layers": 2, "hidden": 8, "heads": 2, "kv-heads": 1}
OPTIONS |= {"head-dim": 4, "ffn": 8, "seq-len": T, "vocab": 256, "preset": "tiny"}
LAYER = {"context_rms_mean": 0.4, "logit_max": 8.0, "residual_max": 20.0, "grad_norm": 0.3}


def write_log(run, records, mode="w"):
    with open(run / "log.jsonl", mode) as log:
        log.writelines(json.dumps(record) + "\n" for record in records)


def read_log(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def edit(directory, change):
    rewrite(directory / "run.json", change)


def edit_options(directory, **options):
    edit(directory, lambda info: info["options"].update(options))


def made_run(directory, arm, lr, seed, final, steps=STEPS, diverged=False, flops=6e3, **options):
    """Writes a run: `steps` of STEPS steps, a loss that decays to `final`, a gradient norm spike at step 150."""
    directory.mkdir(parents=True)
    random.seed(f"{arm} {lr} {seed}")
    info = {"options": {"attention": arm, "lr": lr, "seed": seed, **OPTIONS, **options}, "data_fingerprint": "77"}
    info |= {"model": {"parameters": 1000, "flops_per_token": flops}, "data": {}, "revision": "abc", "host": "h"}
    (directory / "run.json").write_text(json.dumps(info | {"devices": ["CPU: 1 threads on 2 cores"]}))
    lines = [{"kind": "val", "step": 0, "loss": 5.5}]
    for step in range(1, steps + 1):
        excess = 3 * math.exp(-step / 30)
        loss = None if diverged and step > steps - 10 else final + excess + random.gauss(0, 0.02)
        record = {"kind": "train", "step": step, "loss": loss, "grad_norm": 9.0 if step == 150 else 1.0, "lr": lr}
        lines.append(record | {"tokens": step * BATCH, "tokens_per_s": 5000.0, "ms": 200.0})
        if step % 50 == 0:
            lines.append({"kind": "val", "step": step, "loss": final + excess * (step < STEPS)})
            for layer in range(2):
                more = {"lambda_mean": 0.5 if "diff" in arm else None, "first_mass_effective": layer + step / 1000}
                lines.append({"kind": "stats", "step": step, "layer": layer, **LAYER, **more})
    if diverged:
        lines.append({"kind": "event", "step": steps, "what": "stopped", "why": "not_finite"})
    write_log(directory, lines)
    if steps == STEPS and not diverged:
        run_directory.checkpoint(directory, STEPS).mkdir(parents=True)
        (run_directory.checkpoint(directory, STEPS) / "trainer_state.json").write_text("{}")
        positions = [final + (T - 1) / 2 / 10 - t / 10 for t in range(T)]
        found = {"loss": final, "loss_by_position": positions, "windows": 9, "seed": 1}
        (directory / "eval.json").write_text(json.dumps(found))


ARMS = {"baseline": {"label": "Transformer"}, "diff_v2": {"label": "DIFF V2"}}


def write_lab(lab, runs, **more):
    """lab.json of {name: arm}."""
    lab.mkdir(exist_ok=True)
    named = [{"name": name, "arm": arm} for name, arm in runs.items()]
    found = {"plan": "p.plan", "size": "s", "title": "L", "reference": "baseline", "arms": ARMS, "runs": named}
    (lab / "lab.json").write_text(json.dumps(found | more))
    return lab


# mean -0.04, deviation sqrt(3)/100: 95% half width 4.3027 0.017321 / sqrt 3 = 0.043027
GAPS = {1: -0.02, 2: -0.05, 3: -0.05}


def made_lab(place, name="lab"):
    """Two arms, three seeds at one rate and one at another, where the baseline diverges."""
    lab, runs = place / name, {}
    for arm in ("baseline", "diff_v2"):
        for lr, seed in ((0.001, 1), (0.001, 2), (0.001, 3), (0.004, 1)):
            final = 2.0 + seed / 10 + (GAPS[seed] if arm == "diff_v2" else 0) + (lr == 0.004) * 0.05
            broken, run = arm == "baseline" and lr == 0.004, f"{arm}.lr{lr:g}.seed{seed}"
            made_run(lab / run, arm, lr, seed, final, steps=120 if broken else STEPS, diverged=broken)
            runs[run] = arm
    return write_lab(lab, runs, size="cpu", title="Made up <&>", question="Why?")


def lab_of(place, losses, change=lambda run, arm, seed: None, **more):
    """A lab of {arm: {seed: final loss}} at one rate."""
    runs = {}
    for arm, row in losses.items():
        for seed, loss in row.items():
            name = f"{arm}.lr0.001.seed{seed}"
            made_run(place / "lab" / name, arm, 0.001, seed, loss)
            change(place / "lab" / name, arm, seed)
            runs[name] = arm
    return write_lab(place / "lab", runs, arms={arm: {"label": arm.upper()} for arm in losses}, **more)


def results_of(out):
    return json.loads((out / "results.json").read_text())


def reported(out, *words):
    """The results of a report, which succeeds."""
    done = report(*words, "--out", out)
    assert done.returncode == 0, done.stderr
    return results_of(out)


def computed(*paths):
    """The results of the first study, without a page and its figures."""
    return results.of(studies.load(paths)[0])["studies"][0]


def row_of(rows, arm, rate=None):
    return next(row for row in rows if row["arm"] == arm and rate in (None, row["rate"]))


# ---- numbers


def test_the_report_has_the_known_numbers(tmp_path):
    lab = made_lab(tmp_path)
    page = reported(lab / "report", lab)
    r = page["studies"][0]
    row = row_of(r["arms"], "diff_v2")
    near(row["difference"]["mean"], -0.04)
    near(row["difference"]["half"], 0.0430265, 1e-5)
    near(row["losses"]["2"], 2.15)
    assert (row["difference"]["n"], row["rate"], row["flops_by_design"]) == (3, 0.001, True), row
    assert row["difference_flops"]["mean"] == row["difference"]["mean"], row
    alone, broken = row_of(r["rates"], "diff_v2", 0.004), row_of(r["rates"], "baseline", 0.004)
    assert alone["difference"] is None and broken["runs"] == {"diverged": 1}
    spikes = row_of(r["rates"], "diff_v2", 0.001)["spikes"]["grad_norm"]
    assert (spikes["spikes"], spikes["judged"]) == (3, 3 * 168)
    near(spikes["score"], 100 / 168, 1e-6)
    stable = {x["arm"]: (x["stable"], x["bounded_by_ladder"]) for x in r["stability"]}
    assert stable == {"baseline": (0.001, False), "diff_v2": (0.004, True)}, stable
    positions = r["positions"]["diff_v2"]
    assert [(p["begin"], p["end"]) for p in positions] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16)]
    near(positions[-1]["loss"]["mean"], 2.16 + 0.75 - 1.15)
    near(positions[-1]["difference"]["mean"], -0.04)
    curve = r["curves"]["diff_v2"]
    assert [point["tokens"] for point in curve] == [50000, 100000, 150000, 200000]
    near(curve[0]["loss"]["mean"], 2.16 + 3 * math.exp(-50 / 30), 1e-6)
    near(curve[0]["difference"]["mean"], -0.04)
    sinks = r["layers"]["first_mass_effective"]["baseline"]
    assert [e["mean"] for e in sinks["layers"]] == [0.2, 1.2] and sinks["steps"][0] == [50000, 0.55], sinks
    assert list(r["layers"]["lambda_mean"]) == ["diff_v2"]
    said, text = (lab / "report/report.md").read_text(), (lab / "report/report.html").read_text()
    has(said, "7 finished runs, 1 diverged, 0 not finished: 2 arms of 1k parameters, 200k tokens a run.")
    has(said, "# Made up &lt;&amp;&gt; (cpu)", "| -0.0400 [-0.0830, +0.0030] |", "| 6k | 5k |", "| 4 of 672 |")
    has(said, "no difference from Transformer is shown for DIFF V2 (every difference has fewer than 5 seeds).")
    rates = ["0.004", "2.1300, one seed", "1 done", "–", "–", "0.595% (1 of 168)"]  # only in the page
    assert "one seed" not in said and "".join(f"<td>{cell}</td>" for cell in rates) in text
    has(text, "Made up &lt;&amp;&gt;", "on CPU: 1 threads on 2 cores of h; other load")
    figures = re.findall(r"!\[.*?\]\((.*?)\)", said)
    assert figures[:3] == ["p-loss.svg", "p-training.svg", "p-rates.svg"] and len(figures) == 10, figures
    drawn = [(lab / "report" / name).read_text() for name in figures]
    assert all(svg.startswith("<?xml") for svg in drawn) and "<script" not in text and "<svg" not in text
    assert [base64.b64decode(s).decode() for s in re.findall(r'"data:image/svg\+xml;base64,(.*?)"', text)] == drawn
    again = reported(tmp_path / "again", lab)  # the same bytes
    assert again == page
    for name in ("report.html", "report.md", *figures):
        assert (tmp_path / "again" / name).read_bytes() == (lab / "report" / name).read_bytes(), name


def test_a_direction_requires_a_corrected_p_and_seeds_and_tokens(tmp_path):
    # The interval of c excludes 0, and its p is above 0.05 after correction.
    noise = [0.0006, -0.0011, 0.0009, -0.0004, 0.0012]
    losses = {"baseline": 2.0, "a": 1.95, "b": 2.0, "c": 2.00055, "d": 2.05}
    row = lambda arm, x: {s: x + (arm != "baseline") * n / 2 for s, n in enumerate(noise, 1)}
    lab = lab_of(tmp_path, {arm: row(arm, x) for arm, x in losses.items()})

    def told():
        found = results.of(studies.load([lab])[0])["studies"]
        gaps = {row["arm"]: row["difference"] for row in found[0]["arms"]}
        said, of_flops, _ = tables.summary(found)
        assert of_flops == said.replace("tokens", "FLOPs", 1)  # with equal numbers
        return said, [row[4].kind for row in tables.of_arms(found)[0].rows], gaps

    said, kinds, gaps = told()
    assert gaps["c"]["half"] < gaps["c"]["mean"] and gaps["c"]["p"] < 0.05 < gaps["c"]["p_holm"], gaps
    assert said.startswith("At equal tokens, a lower loss than BASELINE is shown for A (-0.04"), said
    assert "; a higher loss than BASELINE is shown for D (+0.05" in said, said
    assert said.endswith("; no difference from BASELINE is shown for B, C."), said
    assert kinds == ["", "lower", "", "", "higher"], kinds
    for run in lab.glob("*.seed*"):
        edit(run, lambda info: info["model"].update(parameters=400_000))
    said, kinds, _ = told()
    assert said.endswith("(the runs have 0.5 tokens per parameter, and a direction requires 1)."), said
    assert kinds == [""] * 5, kinds
    for run in lab.glob("*.seed*"):
        edit(run, lambda info: info["model"].update(parameters=1000))
    for run in lab.glob("*.seed5"):
        shutil.rmtree(run)
    said, kinds, gaps = told()
    assert gaps["a"]["p_holm"] < 0.001 and "(every difference has fewer than 5 seeds)" in said, said
    assert kinds == [""] * 5, kinds


def test_seeds_are_paired_by_number_where_an_arm_lacks_one(tmp_path):
    # Losses differ by seed far more than by arm: paired by position, differences would be of whole nats.
    base, noise = {1: 2.0, 2: 7.0, 3: 3.0, 4: 5.0}, {1: 0.002, 2: 0.1, 3: -0.001, 4: 0.003}
    mine = {s: x - 0.05 + noise[s] for s, x in base.items() if s != 2}
    r = computed(lab_of(tmp_path, {"baseline": base, "a": mine}))
    expected = -0.05 + stats.mean([noise[s] for s in (1, 3, 4)])
    row = row_of(r["arms"], "a")
    for e in (row["difference"], row["difference_flops"], r["curves"]["a"][-1]["difference"]):
        near(e["mean"], expected, 1e-9)
        assert e["n"] == 3, e
    assert [round(place["difference"]["mean"], 9) for place in r["positions"]["a"]] == [round(expected, 9)] * 5


def test_differences_at_equal_flops_are_read_from_validations(tmp_path):
    losses = {"baseline": {1: 2.0, 2: 2.1}, "a": {1: 1.95, 2: 2.05}, "b": {1: 1.9, 2: 2.0}}
    cost = {"baseline": 6e3, "a": 7.5e3, "b": 6.03e3}
    change = lambda run, arm, seed: edit(run, lambda info: info["model"].update(flops_per_token=cost[arm]))
    r = computed(lab_of(tmp_path, losses, change))
    # at 1.25 times the FLOPs a has 160 of 200 steps, between the validations of 150 and 200
    later = 3 * math.exp(-150 / 30) * (1 - math.log(160 / 150) / math.log(200 / 150))
    a, b = (row_of(r["arms"], arm) for arm in "ab")
    near(a["difference_flops"]["mean"], later - 0.05)
    near(b["difference_flops"]["mean"], -0.1)
    assert (a["flops_by_design"], b["flops_by_design"]) == (False, True)


def test_an_arm_with_its_own_tokens_is_compared_at_equal_flops(tmp_path):
    def change(run, arm, seed):
        """Arm a: twice the steps, each with half the FLOPs."""
        if arm == "a":
            edit_options(run, steps=2 * STEPS)
            edit(run, lambda info: info["model"].update(flops_per_token=3e3))
            run_directory.checkpoint(run, STEPS).rename(run_directory.checkpoint(run, 2 * STEPS))
            write_log(run, [r | {"step": 2 * STEPS} for r in read_log(run) if r["step"] == STEPS], "a")

    problems = lambda: studies.load([lab])[0][0].problems
    lab = lab_of(tmp_path, {"baseline": {1: 2.0, 2: 2.1}, "a": {1: 1.9, 2: 2.0}}, change)
    assert [line[:12] for line in problems()] == ["--steps: 200"] * 2
    rewrite(lab / "lab.json", lambda found: found["arms"]["a"].update(tokens=2 * STEPS * BATCH))
    assert not problems()
    row = row_of(computed(lab)["arms"], "a")
    assert row["flops_by_design"] and row["tokens"] == 2 * STEPS * BATCH and row["difference"] is None, row
    near(row["difference_flops"]["mean"], -0.1)
    edit_options(lab / "a.lr0.001.seed2", steps=2 * STEPS + 1)
    assert problems() == ["--steps: 400 in a.lr0.001.seed1, 401 in a.lr0.001.seed2, both of arm a"]
    edit_options(lab / "a.lr0.001.seed2", steps=2 * STEPS)
    for run in lab.glob("*.seed*"):  # shares of the steps, within a step
        steps = (10, 50) if run.name.startswith("baseline") else (20, 101)
        edit_options(run, **dict(zip(option_history.SHARES, steps)))
    assert not problems()
    edit_options(lab / "a.lr0.001.seed2", **{"decay-steps": 104})
    assert problems()[0] == "--decay-steps: 50 in baseline.lr0.001.seed1, 104 in a.lr0.001.seed2"


def test_an_arm_of_a_plan_may_have_its_own_optimizer(tmp_path):
    problems = lambda: studies.load([lab])[0][0].problems
    lab = lab_of(tmp_path, {"baseline": {1: 2.0, 2: 2.1}, "a": {1: 1.95, 2: 2.05}})
    for run in lab.glob("a.*"):
        edit_options(run, optimizer="muon", lr=0.002)
    assert problems()[0] == "--optimizer: adamw in baseline.lr0.001.seed1, muon in a.lr0.001.seed1"
    rewrite(lab / "lab.json", lambda found: found["arms"]["a"].update(optimizer="muon"))
    assert not problems()
    near(computed(lab)["positions"]["a"][-1]["difference"]["mean"], -0.05)  # each arm has a rate of its own
    edit_options(lab / "a.lr0.001.seed2", optimizer="normuon")
    assert problems() == ["--optimizer: muon in a.lr0.001.seed1, normuon in a.lr0.001.seed2, both of arm a"]
    edit_options(lab / "a.lr0.001.seed2", optimizer="muon", **{"qk-norm": True})
    assert not problems()  # trainers of the other runs did not record it
    edit_options(lab / "a.lr0.001.seed1", **{"qk-norm": False})
    assert problems() == ["--qk-norm: False in a.lr0.001.seed1, True in a.lr0.001.seed2, both of arm a"]


SWEPT = """[size cpu]
sweep-seeds = 9
seeds = 1 2 3 4
lr = 1e-3 2e-3 4e-3 8e-3 1.6e-2
tokens = 10K
total-batch = 100
train-data = c
[arm baseline]
[arm a]
"""


def test_each_arm_has_the_rate_of_its_sweep(tmp_path):
    plan = plans.parse(SWEPT, "p.plan", {"train-data": "value", "total-batch": "value"})
    names = [run.name for run in plans.expand(plan, {})]
    assert len(names) == 10 and names[0] == "baseline.lr0.001.seed9", names
    names = [run.name for run in plans.expand(plan, {}, rates={"baseline": 0.002, "a": 0.004})]
    assert names[:3] == ["baseline.lr0.002.seed1", "a.lr0.004.seed1", "baseline.lr0.002.seed2"] and len(names) == 8
    for old, new, said in (
        (" 1.6e-2", "", "p.plan: sweep-seeds: [arm baseline] has 4 rates, at least 5 are required"),
        ("= 9", "= 9 3", "p.plan: sweep-seeds: seed 3 is also in seeds: a rate must not be chosen by the seeds"),
    ):
        with raises(plans.PlanError, said):
            plans.expand(plans.parse(SWEPT.replace(old, new), "p.plan", {"train-data": "value"}), {})
    lab, noise = tmp_path / "lab", {1: 0.01, 2: -0.005, 3: 0.0, 4: 0.002}
    rates, best = plan.sizes["cpu"]["lr"], {"baseline": 0.002, "a": 0.004}
    runs = [(arm, lr, 9, 2 + abs(math.log(lr / best[arm]))) for arm in best for lr in rates]
    runs += [(arm, best[arm], s, 2 + s / 10 - (0.05 + noise[s]) * (arm == "a")) for arm in best for s in range(1, 5)]
    for arm, lr, seed, loss in runs:
        made_run(lab / f"{arm}.lr{lr:g}.seed{seed}", arm, lr, seed, loss)
    plan.path = tmp_path / "p.plan"
    costs = {f"{arm}.lr{lr:g}.seed{seed}": Cost(1, 1, 1, 1) for arm, lr, seed, _ in runs}
    planned = [*plans.expand(plan, {}), *plans.expand(plan, {}, rates=best)]
    lab_run.write_lab(lab, plan, "cpu", planned, costs, {"lr": rates})
    assert lab_run.best_rates(lab, best) == best
    # the rate follows from the evaluations of the sweep, while a later run is not evaluated yet
    (lab / "a.lr0.004.seed1/eval.json").rename(tmp_path / "eval.json")
    assert lab_run.best_rates(lab, best) == best
    (tmp_path / "eval.json").rename(lab / "a.lr0.004.seed1/eval.json")
    r = computed(lab)
    row = row_of(r["arms"], "a")
    assert (row["rate"], row_of(r["arms"], "baseline")["rate"], row["difference"]["n"]) == (0.004, 0.002, 4), row
    near(row["difference"]["mean"], -0.05 - stats.mean(list(noise.values())))
    assert set(row["losses"]) == set("1234") and r["sweep_seeds"] == [9], row
    edge = lab / "a.lr0.016.seed9/eval.json"
    rewrite(edge, lambda found: found.update(loss=1.0))
    with pytest.raises(SystemExit):
        lab_run.best_rates(lab, best)


def test_a_sweep_has_the_seeds_that_have_ended_at_all_rates():
    def run(rate, seed, state, loss):
        made = SimpleNamespace(arm="a", rate=rate, seed=seed, state=state, last_validation=loss, eval=None)
        made.final_loss, made.windows = lambda _: loss, lambda _: None
        return made

    runs = [run(1, 1, "done", 3.0), run(2, 1, "done", 2.0), run(4, 1, "diverged", None), run(1, 2, "done", 9.0)]
    study = studies.Study("s", runs=[*runs, run(2, 2, "begun", None)])
    assert study.sweep("a") == [(1, 3.0), (2, 2.0)], study.sweep("a")


def test_the_final_loss_is_of_the_most_windows(tmp_path):
    def change(run, arm, seed):
        rewrite(run / "eval.json", lambda found: found.update(loss=9.0, windows=windows))
        write_log(run, [r | {"windows": 20} if r["kind"] == "val" else r for r in read_log(run)])

    for windows, loss, where in ((10, 2.0, "last validation, 20 windows"), (20, 9.0, "evaluation, 20 windows")):
        lab = lab_of(tmp_path / str(windows), {"baseline": {1: 2.0, 2: 2.0}}, change)
        r = computed(lab)
        assert r["loss_of"] == where and list(r["arms"][0]["losses"].values()) == [loss] * 2, r["arms"]
    (lab / "baseline.lr0.001.seed1/eval.json").unlink()
    assert computed(lab)["loss_of"] == "last validation, 20 windows"


def test_several_sizes_of_a_plan_are_one_section(tmp_path):
    labs = []
    for i, size in enumerate(("small", "large")):
        losses = {"baseline": {s: 2.0 - i + s / 100 for s in range(5)}, "a": {s: 1.9 - i + s / 100 for s in range(5)}}
        change = lambda run, arm, seed: edit_options(run, hidden=8 << i)
        labs.append(lab_of(tmp_path / size, losses, change, size=size, title="Sizes"))
    found, page = command.compute(labs)
    assert [s["name"] for s in found["studies"]] == ["p-small", "p-large"] and len(page["sections"]) == 1
    table, short, picture = page["sections"][0]["contents"]
    assert [row[0].text for row in table.rows] == ["p-small"] * 2 + ["p-large"] * 2 and picture.name == "p-sizes"
    assert [[cell.text for cell in row[:4]] for row in short.rows] == [
        [s, "A", "1,000", "5"] for s in ("p-small", "p-large")
    ]
    has(found["summary"][0], "is shown for A (p-small: -0.1", "A (p-large: -0.1")


# ---- runs that are not comparable, damaged or resumed


@pytest.mark.full
def test_runs_that_are_not_comparable_are_an_error(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    made_run(one, "baseline", 0.001, 1, 2.0)
    made_run(other, "diff_v2", 0.001, 1, 1.9, **{"total-batch": 2000})
    out = tmp_path / "out"
    expect_error(report(one, other, "--out", out), 2, "--total-batch: 1000 in one, 2000 in other", lines=1)
    assert not out.exists()
    made_run(tmp_path / "again", "baseline", 0.001, 1, 2.0)
    expect_error(report(one, tmp_path / "again", "--out", out), 2, "are both arm baseline with rate 0.001 and seed 1")
    for words, status, said in (
        ((tmp_path / "nothing",), 1, "no such file or directory"),
        ((tmp_path,), 2, "not comparable"),
        ((f"a={one}", other), 2, "NAME=DIR: give every directory a name, or none"),
        ((f"a={one}", f"a={other}"), 2, "a=DIR: the name is used more than once"),
        ((f"a={tmp_path}/none",), 1, f"{tmp_path}/none: no such file or directory"),
        ((), 2, "[NAME=]RUNS"),
    ):
        expect_error(report(*words, "--out", out), status, said, lines=1)
    (one / "run.json").write_text("{")
    expect_error(report(one, "--out", out), 1, "run.json: not JSON", lines=1)
    lab = write_lab(tmp_path / "lab", {"x": "baseline"}, arms={})
    expect_error(report(lab), 1, "no run of the plan has started", lines=1)


def test_named_runs_are_compared_with_a_table_of_their_options(tmp_path):
    one, many, out = tmp_path / "one", tmp_path / "many", tmp_path / "out"
    made_run(one, "baseline", 0.001, 1, 2.0)
    for seed in (2, 3):
        more = {"total-batch": 2000, "weight-decay": 0.2}
        made_run(many / f"seed{seed}", "baseline", 0.001, seed, 1.9 + seed / 10, **more)
    r = reported(out, f"plain={one}", f"more decay={many}")["studies"][0]
    said = (out / "report.md").read_text()
    assert r["labels"] == {"plain": "plain", "more decay": "more decay"}, r["labels"]
    assert [row["losses"] for row in r["arms"]] == [{"1": 2.0}, {"2": 2.1, "3": 2.2}], r["arms"]
    rows = [line for line in said.splitlines() if line.startswith("| --")]
    assert rows == ["| --total-batch | 1000 | 2000 |", "| --weight-decay | 0.1 | 0.2 |"], rows
    has(said, "Differs between runs: --total-batch: 1000 in one, 2000 in seed2")
    one.rename(tmp_path / "x=y")  # a directory that exists is no name
    assert command.parse_arguments([str(tmp_path / "x=y")]).paths == [str(tmp_path / "x=y")]


def test_a_run_that_has_just_started_has_a_report(tmp_path):
    run = tmp_path / "run"
    made_run(run, "baseline", 0.001, 1, 2.0, steps=0)
    (run / "log.jsonl").unlink()
    _, page = command.compute([run])
    has(command.render("page.md.j2", page), "0 finished runs, 0 diverged, 1 not finished", "| run | begun | 0/200 |")


def test_a_resumed_run_is_reported_with_its_changes(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    made_run(run, "baseline", 0.001, 1, 2.0)
    made_run(whole, "diff_v2", 0.001, 1, 2.0)
    (run / "eval.json").unlink()
    changed = [{"name": "steps", "old": 100, "new": STEPS}, {"name": "lr", "old": 0.001, "new": 0.5}]
    changed.append({"name": "total-batch", "old": BATCH, "new": 3 * BATCH})
    start = {"command_line": [], "revision": "def", "host": "h", "ranks": 1}
    starts = [{**start, "step": 0, "changed": []}, {**start, "step": 100, "changed": changed}]
    edit(run, lambda j: (j["options"].update(steps=100), j.update(starts=starts)))
    r = computed(run)
    assert r["runs"][0]["state"] == "done" and r["runs"][0]["loss"] == 2.0, r["runs"]  # of step 200, not 100
    assert (r["tokens"], r["runs"][0]["steps"]) == (100 * BATCH + 100 * 3 * BATCH, STEPS), r
    notes = " ".join(r["notes"])
    has(notes, "run was resumed under other options: --lr 0.001 then 0.5 after step 100; ")
    has(notes, "--total-batch 1000 then 3000 after step 100", "2 revisions of the trainer: abc, def")
    said = studies.load([run, whole])[0][0].problems[0]
    assert said == "--total-batch: 1000 then 3000 after step 100 in run, 1000 in whole", said
    # steps that a rollback repeated count once, with the later values
    lines = read_log(whole)
    write_log(whole, lines[:150] + [r | {"loss": 9.0} for r in lines if r["kind"] == "train" and r["step"] > 90])
    found = studies.load([whole])[0][0].runs[0].curve
    assert found["step"] == list(range(2, STEPS + 1, 2)), found["step"]
    assert found["loss"][-1] == 9.0 and found["loss"][30] < 9, found["loss"]


def test_losses_of_other_validation_windows_are_not_compared(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    made_run(one, "baseline", 0.001, 1, 2.0)
    made_run(other, "diff_v2", 0.001, 1, 1.9)
    problems = lambda: " ".join(studies.load([one, other])[0][0].problems)
    validate = lambda run, **of: write_log(run, [r | of if r["kind"] == "val" else r for r in read_log(run)])
    for run in (one, other):
        edit_options(run, **{"val-data": "c"})
        validate(run, windows=10, data_fingerprint="7")
    assert problems() == ""
    validate(other, windows=12)
    assert "windows of validation (--val-steps times --batch-size): 10 in one, 12 in other" in problems()
    validate(other, windows=10, data_fingerprint="8")
    assert "fingerprint of the validation data: 7 in one, 8 in other" in problems()
    validate(other, data_fingerprint="7")
    # the final losses are of the evaluations, which must have the same data too
    rewrite(other / "eval.json", lambda j: j.update(windows=8))
    assert problems() == "windows of the evaluation: 9 in one, 8 in other", problems()


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
    log, info = whole[run / "log.jsonl"].split(b"\n"), whole[run / "run.json"]
    garbage = [b"garbage", b'{"kind": "train", "step": "x"}']
    damages = [
        ("run.json", b"", 7, "run.json: not JSON"),
        ("run.json", b"{}", 7, "run.json: it has no options"),
        ("run.json", b"[" * 100000, 7, "run.json: not JSON"),
        ("run.json", b"\xff\xfe\xfd", 7, "run.json: not JSON"),
        ("run.json", info.replace(b'"steps": 200', b'"steps": "many"'), 7, "options.steps is not a positive integer"),
        ("log.jsonl", b"\n".join(log[:50] + garbage + log[50:]), 8, "log.jsonl: line 51 and 1 more are not records"),
        ("eval.json", b"{", 8, "eval.json: not JSON"),
        ("eval.json", b'{"loss_by_position": 3}', 8, "eval.json: loss_by_position is not a list"),
    ]
    for name, data, left, said in damages:
        (run / name).write_bytes(data)
        done = report(lab, "--out", out)
        expect_error(done, 1, said, lines=1)
        assert str(run / name) in done.stderr, done.stderr
        found = results_of(out)
        assert len(found["studies"][0]["runs"]) == left and said in " ".join(found["left_out"]), (name, found)
        assert html.escape(said) in (out / "report.html").read_text()
        (run / name).write_bytes(whole[run / name])
    (run / "log.jsonl").write_bytes(b"\n".join(log[:-1]) + b'\n{"kind": "tra')  # being written
    assert report(lab, "--out", out).returncode == 0
    run.chmod(0)
    done = report(lab, "--out", out, preexec_fn=without_rights)
    expect_error(done, 1, f"{run}/run.json: Permission denied", lines=1)
    run.chmod(0o755)
    (lab / "lab.json").write_text("[1]")
    expect_error(report(lab, "--out", out), 1, "lab.json: it is not an object\n", lines=1)


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


def text_results(path):
    """A report without figures."""
    found, _ = studies.load([path])
    numbers = results.of(found)
    json.dumps(numbers, allow_nan=False)
    return tables.summary(numbers["studies"]), [tables.of_study(s) for s in numbers["studies"]]


@pytest.mark.slow
def test_values_of_any_type_do_not_crash_the_report(tmp_path):
    lab = tmp_path / "lab"
    run = lab / "run"
    made_run(run, "diff_v2", 0.001, 1, 2.0)
    changed = [{"name": "beta1", "old": 1, "new": 0.5}]
    starts = [{"step": 0, "changed": []}, {"step": 9, "revision": "x", "changed": changed}]
    data = {"val": [{"path": "c", "tokens": 9, "windows": 9, "fingerprint": "7"}]}
    edit(run, lambda j: j.update(starts=starts, data=data))
    lines = (run / "log.jsonl").read_text().splitlines()
    (run / "log.jsonl").write_text("\n".join(lines[:5] + lines[-5:]) + "\n")
    write_lab(lab, {"run": "signed"}, question="Q", reference="signed", arms={"signed": {"label": "L", "match": "b"}})
    cases = [(path, path.read_text(), "", "") for path in (run / "run.json", run / "eval.json", lab / "lab.json")]
    log, whole = run / "log.jsonl", (run / "log.jsonl").read_text().splitlines(True)
    cases += [
        (log, line, "".join(whole[:i]), "".join(whole[i + 1 :])) for i, line in enumerate(whole) if i in (0, 1, 7)
    ]
    kept = tmp_path / "kept.jsonl"
    kept.write_text(saved.text_of(studies.load([lab])[0]))
    header, line = kept.read_text().splitlines(True)
    cases += [(kept, header, "", line), (kept, line, header, "")]
    for path, text, before, after in cases:
        for at in places(json.loads(text)):
            if at[-1] not in (0, "loss_by_position") and {"loss_by_position", "curve"} & set(at):
                continue
            for wrong in WRONG:
                path.write_text(before + spoiled(text, at, wrong) + ("\n" if path in (log, kept) else "") + after)
                try:
                    text_results(path if path == kept else lab)
                except run_directory.RunError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{path.name}: {at} = {wrong!r}") from error
        path.write_text(before + text + after)


# ---- saved files


def test_a_saved_file_gives_the_report_of_its_runs(tmp_path):
    lab, kept = made_lab(tmp_path), tmp_path / "kept.jsonl"
    made_run(lab / "diff_v2.lr0.004.seed2", "diff_v2", 0.004, 2, 2.0, steps=50)  # not finished: left out
    rewrite(lab / "lab.json", lambda found: found["runs"].append({"name": "diff_v2.lr0.004.seed2", "arm": "diff_v2"}))
    done = run_lab("save", lab, kept)
    assert done.returncode == 0 and done.stdout.startswith(f"{kept}: 8 runs, "), done
    assert str(tmp_path) not in kept.read_text(), "a path of the machine"
    shutil.rmtree(lab / "diff_v2.lr0.004.seed2")
    rewrite(lab / "lab.json", lambda found: found["runs"].pop())
    one, other = (command.render("page.md.j2", command.compute([path])[1]) for path in (lab, kept))
    same = one == other
    assert same, "a saved file gives another page"
    again = tmp_path / "again.jsonl"
    assert run_lab("save", kept, lab, again).returncode == 0 and again.read_bytes() == kept.read_bytes()
    lines = kept.read_text().splitlines(True)
    for text, said in (
        ("", "has no runs"),
        (lines[1], ":1: no line of a study precedes it"),
        (lines[0] + "{", ":2: "),
        (lines[0].replace('"version":1', '"version":2'), ":1: version 2 of the format, must be 1"),
        (
            lines[0] + lines[1].replace('"curve":{"step":[', '"curve":{"step":[1,'),
            ":2: its columns have several lengths",
        ),
    ):
        again.write_text(text)
        expect_error(report(again), 1, said, lines=1)
    expect_error(run_lab("save", lab / "diff_v2.lr0.001.seed1", again), 2, "are not of a plan", lines=1)
    expect_error(run_lab("save", lab), 2, "FILE.jsonl", lines=1)


def test_the_pages_follow_from_the_saved_runs(tmp_path):
    pages = sorted((ROOT / "results").glob("*.jsonl"))
    assert [path.stem for path in pages] == ["ablations", "loss-gap", "stability"], pages
    for path in pages:
        found, page = command.compute([path])
        said = command.render("page.md.j2", page)
        same = said == (path.with_suffix("") / "report.md").read_text()
        assert same, f"report.md of {path} is another: python3 scripts/lab report {path} writes it"
        figures = set(re.findall(r"\((\S+\.svg)\)", said))
        assert figures == {p.name for p in path.with_suffix("").glob("*.svg")}, path
        same = path.read_text() == saved.text_of(studies.load([path])[0])
        assert same, f"{path} is another: python3 scripts/lab save {path} {path} writes it"
        assert len(found["summary"]) == 3
