"""test_claims.py: tests of the claims, of their statistics, and of probes, on constructed runs with known
numbers."""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import archive, claims, currencies, evaluations, figures, layers, measurements, metrics, ngrams
from . import option_history, plan as plans, preconditions, report as report_command, report_tables, run as lab_run
from . import run_directory, scheduler, stats
from . import study as studies, tables
from .measurements import METRICS
from .run_directory import RunError
from .table import as_html
from .test_report import NGRAMS, STEPS, edit, made_run, near, read_log, write_log
from .test_tasks import add_scores, measured as needle_scores
from .testing import HERE, ROOT, expect_error, has, raises, rewrite, run_lab, write_shard
from .trainer import Cost

scoreboard, archived = partial(run_lab, "scoreboard"), partial(run_lab, "archive")

CLAIMS = """source = S
needs = one rate
metric = loss
effect = 0.02
seeds = 4
[claim lower]
claim = a is below baseline
arms = a - baseline
expect = below
[claim higher]
claim = a is above baseline
arms = a - baseline
expect = above
[claim same]
claim = b is as good as baseline
arms = b - baseline
expect = equal
[claim wide]
claim = c is below baseline
arms = c - baseline
expect = below
[claim missing]
claim = d is below baseline
arms = baseline - d
expect = above
[claim few]
claim = e is below baseline
arms = baseline - e
expect = above
[claim sinks]
claim = a has fewer sinks
metric = sink_rate
arms = a - baseline
expect = below
effect = 1
requires = baseline 20
[claim other]
claim = at several rates
needs = several rates
arms = a - baseline
expect = below
[claim unequal]
claim = with other parameters
needs = unequal parameters
arms = a - baseline
expect = below
[claim equal]
claim = the first arms do not exist
needs = equal parameters
arms = x - baseline | a - baseline
expect = below
[claim flops]
claim = with equal FLOPs
needs = equal FLOPs
arms = a - baseline
expect = below
[claim speed]
claim = as fast
metric = elsewhere
measured = a file
"""
NOISE = (0.001, -0.001, 0.0015, -0.0015)  # of the seeds 1 to 4: sums to 0
WIDE = (0.06, -0.06, 0.05, -0.05)


def made_lab(place, arms, plan="p.plan", change=None):
    """A lab of {arm: {seed: loss}}."""
    lab, runs = Path(place) / "lab", []
    for arm, losses in arms.items():
        for seed, loss in losses.items():
            name = f"{arm}.lr0.001.seed{seed}"
            made_run(lab / name, arm, 0.001, seed, loss)
            if change:
                change(lab / name, arm, seed)
            runs.append({"name": name, "arm": arm})
    lab_json = {"plan": plan, "size": "cpu", "title": "L", "reference": "baseline", "runs": runs}
    lab_json["arms"] = {arm: {"label": arm.upper()} for arm in arms}
    (lab / "lab.json").write_text(json.dumps(lab_json))
    (lab / "ngrams.json").write_text(NGRAMS)
    return lab


def known_arms():
    """a is 0.05 below the baseline, b 0.002 above, c uncertain; e lacks a seed, f deviates like c."""
    base = {s: 2 + s / 10 for s in range(1, 5)}
    shifted = lambda by, noise: {s: base[s] + by + noise[s - 1] for s in base}
    e = shifted(-0.05, NOISE)
    del e[3]
    return {
        "baseline": base,
        "a": shifted(-0.05, NOISE),
        "b": shifted(0.002, NOISE[::-1]),
        "c": shifted(-0.01, WIDE),
        "e": e,
    }


def measured(lab):
    return measurements.of_study(studies.load([lab]), "p-cpu")


def judged(file, lab):
    """{claim: its row} of the claims of a file in a lab."""
    return {row["id"]: row for row in claims.judge(claims.read(file), measured(lab))}


def test_a_verdict_follows_from_the_interval_and_the_effect():
    e = 1.0
    regions = {  # below, above, equal, not above, not below: Supported, Excluded, Opposite or - (not shown)
        (-3.0, -2.0): "SOOSO",
        (-2.0, -0.5): "SO-S-",
        (-0.5, -0.1): "EOSSS",
        (-0.5, 0.5): "EESSS",
        (0.1, 0.5): "OESSS",
        (0.5, 2.0): "OS--S",
        (2.0, 3.0): "OSOOS",
        (-2.0, 0.5): "-E-S-",
        (-0.5, 2.0): "E---S",
        (-2.0, 2.0): "-----",
    }
    words = {"S": "supported", "E": "effect excluded", "O": "opposite shown", "-": "not shown"}
    for (low, high), wanted in regions.items():
        for expect, letter in zip(claims.EXPECT, wanted):
            got = claims.verdict(expect, low, high, e)
            assert got == words[letter], (low, high, expect, got)
            mirrored = {"below": "above", "above": "below", "not above": "not below", "not below": "not above"}
            assert claims.verdict(mirrored.get(expect, expect), -high, -low, e) == got, (low, high, expect)


def test_the_scoreboard_has_the_known_verdicts(tmp_path):
    lab, file = made_lab(tmp_path, known_arms()), tmp_path / "claims"
    planned = CLAIMS.replace("claim = a is below baseline", "claim = a is below baseline\nplan = p s")
    file.write_text(planned + "[plan p s]\nsize = 1M, 2M tokens\nhours = 3\n")
    rows = judged(file, lab)
    got = {name: row["verdict"] for name, row in rows.items()}
    assert got == {
        "lower": "supported",
        "higher": "opposite shown",
        "same": "supported",
        "wide": "not shown",
        "missing": "not measured",
        "few": "not shown",
        "sinks": "not shown",
        "other": "not measured",
        "unequal": "not measured",
        "equal": "supported",
        "flops": "supported",
        "speed": "measured elsewhere",
    }, got
    near(rows["lower"]["estimate"]["mean"], -0.05)
    assert rows["few"]["remark"] == "3 of at least 4 seeds" and rows["missing"]["remark"] == (
        "no study has baseline - d (one rate)"
    )
    assert rows["sinks"]["remark"].startswith("not testable here: baseline has 10"), rows["sinks"]
    assert rows["lower"]["parameters"] == [1000, 1000] and rows["equal"]["arms"] == ("a", "baseline")
    # c deviates more than the others: it leaves the pool, and has its own interval with 3 degrees of freedom
    assert rows["lower"]["estimate"]["pooled"] and not rows["wide"]["estimate"]["pooled"]
    assert rows["lower"]["estimate"]["p_variances"] > 0.05 > rows["wide"]["estimate"]["p_variances"]
    sd = math.sqrt(sum(x * x for x in WIDE) / 3)
    near(rows["wide"]["estimate"]["half"], 3.1824463 * sd / 2, 1e-6)
    out = tmp_path / "scoreboard.md"
    done = scoreboard(lab, "--claims", file, "--out", out)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = re.sub(r"(?<!\|)\n(?=\w)", " ", out.read_text())
    assert "4 supported, 1 opposite shown, 3 not shown, 3 not measured, 1 measured elsewhere" in said, said
    assert "0.2M tokens per run; 1,000 to 1,000 parameters; learning rate 0.001" in said, said
    assert "corrected for the 6 tests of this page" in said, said
    assert "| a is below baseline | `a - baseline` loss, below, 0.02 | -0.0500 [" in said, said
    assert "nats | **supported** | 1.3e-10 | 4 | pooled, 0.74 | 1,000 and 1,000 | 1.00 |" in said, said
    has(said, "(without c, which deviate more)", "| at several rates (S) | loss | not measured |")
    has(said, "| `lower` | a is below baseline | `p s`: 1M, 2M tokens | 3 | 1 supported |")


def test_a_claim_has_no_verdict_without_the_preconditions(tmp_path):
    lab, file = made_lab(tmp_path, known_arms()), tmp_path / "claims"
    file.write_text(CLAIMS)
    first = judged(file, lab)
    # the baseline ends at 2.25 and a at 2.2 on average
    (lab / "ngrams.json").write_text(NGRAMS.replace("9.0]", "2.24]"))
    rows = judged(file, lab)
    assert {rows[name]["verdict"] for name in ("lower", "higher", "same", "wide", "equal")} == {"no verdict"}, rows
    assert rows["lower"]["remark"] == "baseline is not below the 5-gram (2.250, 2.240)", rows["lower"]
    assert rows["lower"]["estimate"] == first["lower"]["estimate"] and rows["few"]["verdict"] == "not shown"
    (lab / "ngrams.json").unlink()
    assert judged(file, lab)["lower"]["remark"] == "the loss of the 5-gram is not known"
    (lab / "ngrams.json").write_text(NGRAMS)
    for seed, use in enumerate((-0.1, -0.1, 0.1, 0.1), 1):
        losses = [2.0] * 8 + [2.0 + use] * 8
        rewrite(lab / f"a.lr0.001.seed{seed}/eval.json", lambda found: found.update(loss_by_position=losses))
    assert judged(file, lab)["lower"]["remark"] == "a is not shown to use its context (+0.000 ± 0.184)", judged(
        file, lab
    )["lower"]
    done = scoreboard(lab, "--claims", file)
    has(done.stdout, "### Preconditions: p-cpu", "| baseline | 200.0 | 0.001 | one rate | 2.2500 | -6.7500 | -1.1500 [")
    has(done.stdout, "-1.1500] | met |", "] | not met |", "Losses of n-gram models of 9 tokens", "4 no verdict")


def test_gaps_are_at_equal_tokens_flops_and_seconds(tmp_path):
    def change(run, arm, seed):
        edit(run, lambda info: info["model"].update(flops_per_token=6e3 * (1.25 if arm == "a" else 1)))
        edit(run, lambda info: info.update(host="other" if arm == "b" else "h"))

    arms = known_arms()
    study = studies.load([made_lab(tmp_path, {arm: arms[arm] for arm in ("baseline", "a", "b")}, change=change)])
    rows = {(row["arm"], row["other"]): row for row in currencies.rows(study)}
    assert list(rows) == [("a", "baseline"), ("b", "baseline"), ("b", "a")]
    of = lambda *pair: {name: rows[pair][name] for name in currencies.CURRENCIES}
    found = of("a", "baseline")
    near(found["tokens"]["gap"]["mean"], -0.05)
    # at 1.25 times the FLOPs a has 160 of 200 steps, between the validations of 150 and 200
    later = 3 * math.exp(-150 / 30) * (1 - math.log(160 / 150) / math.log(200 / 150))
    near(found["FLOPs"]["gap"]["mean"], later - 0.05, 1e-6)
    assert (found["FLOPs"]["designed"], found["FLOPs"]["price"], found["seconds"]["designed"]) == (False, 1.25, True)
    near(of("b", "a")["FLOPs"]["gap"]["mean"], 0.052 - later, 1e-6)
    assert of("b", "baseline")["FLOPs"]["designed"] and of("b", "baseline")["seconds"]["gap"] is None, "other machines"
    for run in study.runs:  # of a that starts from the baseline, at the price of which its first validation is
        run.base = study.runs_of("baseline", 0.001)[run.seed - 1] if run.arm == "a" else None
    near(currencies.rows(study)[0]["FLOPs"]["gap"]["mean"], 5.5 - 2.25)
    cells = [c.text if isinstance(c, tuple) else c for c in currencies.table(list(rows.values()), "baseline").rows[0]]
    has(" | ".join(cells), "A | BASELINE | 0.001 and 0.001 | -0.0500 [", "interpolated | -0.0500 [", "by design | 1.25")


SWEPT = """sweep-seeds = 9
seeds = 1 2 3 4
lr = 1e-3 2e-3 4e-3 8e-3 1.6e-2
looks = 4 8
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
        (" 1.6e-2", "", "p.plan:1: sweep-seeds: [arm baseline] has 4 rates, at least 5 are required"),
        ("= 9", "= 9 3", "p.plan:1: sweep-seeds: seed 3 is also in seeds: a rate must not be chosen by the seeds"),
    ):
        with raises(plans.PlanError, said):
            plans.expand(plans.parse(SWEPT.replace(old, new), "p.plan", {"train-data": "value"}), {})
    lab = tmp_path / "lab"
    rates, best = plan.common["lr"], {"baseline": 0.002, "a": 0.004}
    runs = [(arm, lr, 9, 2 + abs(math.log(lr / best[arm]))) for arm in best for lr in rates]
    runs += [(arm, best[arm], s, 2 + s / 10 - 0.05 * (arm == "a") + NOISE[s - 1]) for arm in best for s in range(1, 5)]
    for arm, lr, seed, loss in runs:
        made_run(lab / f"{arm}.lr{lr:g}.seed{seed}", arm, lr, seed, loss)
    plan.path = tmp_path / "p.plan"
    costs = {f"{arm}.lr{lr:g}.seed{seed}": Cost(1, 1, 1, 1, 1) for arm, lr, seed, _ in runs}
    planned = [*plans.expand(plan, {}), *plans.expand(plan, {}, rates=best)]
    lab_run.write_lab(lab, plan, "cpu", planned, costs, {"lr": rates})
    (lab / "ngrams.json").write_text(NGRAMS)
    assert lab_run.best_rates(lab, best) == best
    # the rate follows from the evaluations of the sweep, while a later run is not evaluated yet
    (lab / "a.lr0.004.seed1/eval.json").rename(tmp_path / "eval.json")
    rewrite(lab / "a.lr0.002.seed9/eval.json", lambda found: found.update(loss=1.0))
    assert lab_run.best_rates(lab, best) == best | {"a": 0.002}
    rewrite(lab / "a.lr0.002.seed9/eval.json", lambda found: found.update(loss=2 + math.log(2)))
    (tmp_path / "eval.json").rename(lab / "a.lr0.004.seed1/eval.json")
    study = studies.load([lab])
    row = currencies.rows(study)[0]
    assert row["rates"] == [0.004, 0.002] and row["tokens"]["gap"]["n"] == 4
    near(row["tokens"]["gap"]["mean"], -0.05)
    r, figures = report_command.compute(study)
    for row in (r["by_position"]["a"][-1], r["by_frequency"]["a"][0]):  # at its own rate
        assert row["gap"]["n"] == 4, row
        near(row["gap"]["mean"], -0.05)
    assert r["main_lr"] == 0.002 and [row["lr"] for row in r["noise"]] == [0.002, 0.002], r["noise"]
    final = next(f for f in figures if f["id"] == "final")["views"][0]["traces"]
    assert [(len(t["x"]), t["lr"]) for t in final] == [(1, "0.002"), (4, "0.002")], final
    first, second = r["best"]
    assert (first["lr"], first["gap"], second["lr"], second["gap"]["n"]) == (0.002, None, 0.004, 4), r["best"]
    near(second["gap"]["mean"], -0.05)
    near(second["gap_flops"]["mean"], -0.05)
    shown = report_tables.sections(study, r)[0][2]
    assert [(len(t.rows), t.fold) for t in shown] == [(2, ""), (10, "All rates")], shown
    has(as_html(shown[1]), "<details><summary>All rates</summary><div class=table id=table-rates>")
    study.runs_of("a", 0.004)[0].eval["loss"] = None  # not finite
    assert tables.results(study)["best"][1]["loss"]["n"] == 3
    m = measured(lab)[0]
    assert {row["seed"] for row in m.rows} == {1, 2, 3, 4}
    near(preconditions.rows(m)[1]["of_best_rate"], 1.0)
    m.rows = [row | {"state": "diverged"} if row["arm"] == "a" else row for row in m.rows]
    assert preconditions.rows(m)[1]["of_best_rate"] == "not known"
    m = measured(lab)[0]
    m.rows += [row | {"rate": 0.001, "loss": 9.0} for row in m.rows if row["arm"] == "a"]  # of an earlier choice
    near(m.by_seed("a", "loss")[1], 2.05 + NOISE[0])
    m.sweep += [row | {"state": "diverged"} for row in m.sweep if (row["arm"], row["rate"]) == ("a", 0.004)]
    assert 0.004 not in dict(m.losses_by_rate("a")), "a seed diverged there"
    m = measured(lab)[0]
    archived(lab, "--out", tmp_path / "archive")
    again = measurements.of_numbers(*archive.read(tmp_path / "archive"))
    assert (len(again.rows), len(again.sweep), again.looks) == (len(m.rows), len(m.sweep), [4, 8])
    expect_error(archived(lab, "--out", tmp_path / "x", "--numbers"), 2, "--numbers: the plan has sweep-seeds", 1)
    claim = claims.Claim("x", "x", "S", "loss", (("a", "baseline"),), ("one rate",), "below", 0.015, 4)
    row = claims.judge([claim], [m])[0]
    # the first of two looks: 2 - 2 Phi(1.96 / sqrt 0.5) = 0.00557 of 0.05
    near(row["share"], 0.00557450 / 0.05, 1e-5)
    near(row["p"], row["share"] ** -1 * claims.p_value("below", stats.Estimate(**row["estimate"]), 0.015))
    m.looks = [3, 8]
    assert claims.judge([claim], [m])[0]["remark"] == "4 seeds: the looks are at [3, 8]"
    near(sum(stats.look_levels([4, 8, 12, 16]).values()), 1)
    # what was fixed, and what was changed
    assert "Registered before the first run, " in study.notes[0] and "not committed, with --lr [0.001" in study.notes[0]
    lab_run.write_lab(lab, plan, "cpu", planned, costs, {"lr": rates})
    assert len(studies.load([lab]).notes) == 1
    longer = replace(plan, text=SWEPT.replace("looks = 4 8", "looks = 4 12"))
    lab_run.write_lab(lab, longer, "cpu", planned, costs, {"lr": rates})
    has(studies.load([lab]).notes[1], "Changed after the first run, ", "lines -looks = 4 8; +looks = 4 12.")


def test_n_grams_are_interpolated_by_their_definition(tmp_path):
    random.seed(5)
    draw = lambda windows, kinds: [[random.randrange(kinds) for _ in range(7)] for _ in range(windows)]
    train, val, vocab = draw(20, 4), draw(6, 5), 6

    def p(context, word):
        before = lambda row, i: tuple(row[i - len(context) : i]) if i >= len(context) else None
        after = [row[i] for row in train for i in range(len(row)) if before(row, i) == context]
        lower = p(context[1:], word) if context else 1 / vocab
        types = len(set(after))
        return (after.count(word) + types * lower) / (len(after) + types) if after else lower

    for order, loss in enumerate(ngrams.losses(train, val, vocab), 1):
        each = [-math.log(p(tuple(row[max(0, i - order + 1) : i]), row[i])) for row in val for i in range(1, 7)]
        near(loss, stats.mean(each), 1e-9)
    for name, tokens in (("train_0", range(10)), ("train_1", range(10, 25)), ("val_0", range(30, 40))):
        write_shard(tmp_path / f"{name}.bin", tokens)
    found = lambda split, *words: ngrams.windows_of(ngrams.shards_of(tmp_path, split), *words)
    windows = lambda *words: [[int(x) for x in row] for row in found(*words)]
    assert windows("train", 4, 9, True) == [list(range(b, b + 5)) for b in (0, 4, 10, 14, 18)]
    assert windows("train", 4, 2, True) == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert windows("val", 4, 1, False) == [[30, 31, 32, 33, 34]]
    options = {
        "train-data": str(tmp_path),
        "val-data": str(tmp_path),
        "steps": 10,
        "total-batch": 2,
        "seq-len": 2,
        "vocab": 40,
    }
    options |= {"lr": 0.1, "seed": 1, "attention": "baseline"}
    phases = [{"step": 5, "changed": [{"name": "seq-len", "new": 4}]}]  # the windows are those of the last phase
    (tmp_path / "lab/run").mkdir(parents=True)
    run = studies.new_run(tmp_path / "lab/run", info={"options": options, "phases": phases})
    run.state, run.read = "done", [(0, (2, "fingerprint"))]
    counted = SimpleNamespace(runs=[run], ngrams=None, by_eval=lambda: False)
    ngrams.count(counted)
    assert (counted.ngrams["tokens"], counted.ngrams["windows"]) == (5 * 4, 2)
    assert counted.ngrams["losses"] == ngrams.losses(*(found(w, 4, 5, True) for w in ("train", "val")), 40)
    assert not (tmp_path / "lab/ngrams.json").exists(), "runs that are no lab share it"
    run.read = [(0, (1, "fingerprint"))]
    ngrams.count(counted)
    assert counted.ngrams["windows"] == 1, "counted again for other windows"
    # of another corpus
    for source, known in (({}, True), ({"tokens": 11}, False)):
        run.info["data"], counted.ngrams = {"val": [{"tokens": 10} | source]}, None
        ngrams.count(counted)
        assert bool(counted.ngrams) == known
    (tmp_path / "val_0.bin").write_bytes(b"no shard")
    ngrams.count(counted)
    assert counted.ngrams is None


def test_verdicts_are_corrected_for_the_number_of_claims():
    # One claim whose p is 0.02 is supported alone, and not among 10 claims without an effect.
    rows = []
    for arm, shift in (("baseline", 0.0), ("a", -0.02), ("b", 0.0)):
        for seed, noise in enumerate((0.010, -0.012, 0.013, -0.011, 0.0), 1):
            row = dict.fromkeys(measurements.COLUMNS) | {"study": "s", "arm": arm, "rate": 1e-3, "seed": seed}
            own = 0.0 if arm == "baseline" else noise
            row |= {"state": "done", "loss": 2.0, "context_use": -1.0}
            rows.append(row | {"sink_rate": 2 + seed / 10 + shift + own})
    study = measurements.Measurements("s", rows, json.loads(NGRAMS))
    claim = claims.Claim("x", "x", "S", "sink_rate", (("a", "baseline"),), (), "below", 0.015)
    other = claims.Claim("y", "y", "S", "sink_rate", (("b", "baseline"),), (), "above", 0.005)
    alone = claims.judge([claim], [study])[0]
    near(alone["p"], 2 * stats.t_cdf(-0.02 * math.sqrt(5) / stats.deviation([0.010, -0.012, 0.013, -0.011, 0.0]), 4))
    assert alone["verdict"] == "supported" and 0.01 < alone["p"] == alone["p_holm"] < 0.05, alone
    many = claims.judge([claim, *[other] * 9], [study])[0]
    assert many["verdict"] == "not shown" and many["remark"] == "supported if it were the only claim", many
    near(many["p_holm"], 10 * alone["p"])
    # an opposite difference of two tests whose level is 0.025: shown alone, and then only excludes the effect
    wide = claims.Claim("x", "x", "S", "sink_rate", (("baseline", "a"),), (), "below", 0.005)
    both = claims.judge([wide, other], [study])[0]
    assert both["verdict"] == "opposite shown", both
    both = claims.judge([wide, *[other] * 3], [study])[0]
    assert (both["verdict"], both["remark"]) == ("effect excluded", "opposite shown if it were the only claim"), both
    # the p of a claim is the level at which its interval gets a verdict
    random.seed(3)
    for _ in range(40):
        e = stats.t_interval([random.gauss(random.choice((-1.5, -0.5, 0, 0.5, 1.5)), 1) for _ in range(4)])
        for expect in claims.EXPECT:
            p = claims.p_value(expect, e, 1.0)
            if 1e-6 < p < 0.99:
                got = [claims.verdict(expect, *e.limits(level), 1.0) for level in (p * 0.999, min(1, p * 1.001))]
                assert got[0] == "not shown" != got[1], (expect, e, p, got)
    assert stats.holm_levels([0.04, 0.001, 0.03], 0.05) == [0.025, 0.05 / 3, 0.025]
    assert stats.holm_levels([0.04, 0.001, 0.02], 0.05) == [0.05, 0.05 / 3, 0.025]


def test_seeds_are_paired_by_number_where_an_arm_lacks_one(tmp_path):
    # Losses differ by seed far more than by arm, and an arm lacks seed 2 of 4: paired by position, gaps would be of
    # whole nats. Of a lab with windows, whose costs also differ by seed, and another arm lacks another seed.
    base, paid = {1: 2.0, 2: 7.0, 3: 3.0, 4: 5.0}, {1: 0.5, 2: 3.0, 3: 1.0, 4: 2.0}
    shift = {"baseline": 0.0, "a": -0.05, "b": 0.01, "baseline-w": -0.02, "a-w": -0.06}
    arms = {arm: {s: x + by for s, x in base.items()} for arm, by in shift.items()}
    arms["a"] = {s: x + NOISE[s - 1] for s, x in arms["a"].items()}
    arms |= {arm: {s: x + paid[s] for s, x in row.items()} for arm, row in arms.items() if arm.endswith("-w")}
    del arms["a"][2], arms["baseline-w"][3]

    def change(run, arm, seed):
        edit_options(run, attention=arm.removesuffix("-w"), window=4 * arm.endswith("-w"))
        found = json.loads((run / "eval.json").read_text())
        found["recall"] = [cell | {"exact": base[seed] / 10} for cell in found["recall"]]
        for layer in found["attention"]["layers"]:
            layer["hidden_max"] = math.exp(base[seed])
        needle_scores(found, base[seed] / 10, 0.25)
        add_scores(run, "task", {STEPS: base[seed] / 10})
        (run / "eval.json").write_text(json.dumps(found))

    lab, file = made_lab(tmp_path, arms, change=change), tmp_path / "claims"
    study = studies.load([lab])
    expected = -0.05 + stats.mean([NOISE[0], NOISE[2], NOISE[3]])
    r = tables.results(study)
    row = next(row for row in r["summary"] if row["arm"] == "a")
    near(row["gap"]["mean"], expected, 1e-9)
    assert row["gap"]["n"] == 3, row
    noise = next(row for row in r["noise"] if row["arm"] == "a")
    near(noise["gap_sd"], stats.deviation([NOISE[0], NOISE[2], NOISE[3]]), 1e-9)
    assert [round(row["gap"]["mean"], 9) for row in r["by_position"]["a"]] == [round(expected, 9)] * 5
    same = [row["exact_gap"] for row in r["recall"]["a"]]
    same += [row.get("gap") or row["accuracy_gap"] for row in r["tasks"] + r["synthetic"] if row["arm"] == "a"]
    assert [(gap["mean"], gap["n"]) for gap in same] == [(0, 3)] * 4, same
    costs = {row["arm"]: row for row in r["long_context"]["costs"] if row["what"] == "loss"}
    near(costs["baseline-w"]["cost"]["mean"], -0.02 + (0.5 + 3 + 2) / 3, 1e-9)
    near(costs["a-w"]["cost"]["mean"], -0.06 - expected + (0.5 + 1 + 2) / 3, 1e-9)
    near(costs["a-w"]["gap"]["mean"], -0.04 + 0.05 - (NOISE[0] + NOISE[3]) / 2, 1e-9)
    counts = {(arm, key): costs[arm][key]["n"] for arm in costs for key in ("cost", "gap") if costs[arm][key]}
    assert counts == {("baseline-w", "cost"): 3, ("a-w", "cost"): 3, ("a-w", "gap"): 2}, counts
    traces = [t for view in figures.final_gaps(study, r["summary"])["views"] for t in view["traces"]]
    of_a = [x for t in traces if t["arm"] == "a" for x in t["x"]]
    assert len(of_a) == 4 and all(abs(x) < 0.1 for x in of_a), "the figure of the gaps"
    curve = next(view for view in figures.gap_curves(study)["views"] if view["label"] == "validation")["traces"]
    near(next(t for t in curve if t["arm"] == "a")["y"][-1], expected, 1e-4)
    file.write_text(CLAIMS.replace("seeds = 4", "seeds = 3"))
    lower = judged(file, lab)["lower"]["estimate"]
    near(lower["mean"], expected, 1e-9)
    assert lower["n"] == 3
    hidden = claims.difference(measured(lab)[0], "hidden_max", ("a", "baseline"))
    near(hidden.mean, 0)
    assert hidden.n == 3
    said = scoreboard(lab, "--claims", file).stdout
    assert f"| {expected:+.4f} [" in said, said


def test_metrics_are_of_the_steps_and_records_that_their_names_say(tmp_path):
    def change(run, arm, seed):
        kept = read_log(run)
        for r in kept:
            if r["kind"] == "train":
                late = r["step"] > 150
                norm = (2.6 if late else 2.0) * (1.1 if r["step"] % 2 else 0.9)
                r |= {"grad_norm": norm, "grad_z": 50.0, "loss_z": None, "loss": 3.0 + r["step"] % 2 / 10}
                if r["step"] == 40:  # the trainer's z begins later
                    r |= {"loss": 9.0, "loss_z": None, "skipped": True}
        first = [{"kind": "stats", "step": 1, "layer": l, "context_rms_mean": 0.1 + l / 10} for l in range(2)]
        write_log(run, [kept[0], *first, *kept[1:]])

    lab = made_lab(tmp_path, {"baseline": {1: 2.0}}, change=change)
    run = studies.load([lab]).runs[0]
    of = lambda name: METRICS[name].of(run)
    near(of("initial_context_rms"), 0.15)
    near(of("context_rms_min"), 0.1)
    near(of("context_rms_max"), 0.9)
    near(of("grad_growth"), 1.3)
    near(of("grad_deviation"), 0.1 * math.sqrt(50 / 49))
    near(of("loss_spikes"), 100 / (STEPS - stats.SPIKE_LEAST))
    assert of("grad_spikes") == 0
    plain = made_lab(tmp_path / "plain", {"baseline": {1: 2.0}})
    assert METRICS["initial_context_rms"].of(studies.load([plain]).runs[0]) is None, "no record of step 1"


def test_z_scores_are_of_the_values_before():
    random.seed(2)
    xs = [random.gauss(5, 1) for _ in range(1500)]
    xs[3], xs[700] = 1e9, math.nan  # leaves the window, with its rounding errors
    zs = stats.z_scores(xs)
    assert zs[: stats.SPIKE_LEAST] == [None] * stats.SPIKE_LEAST and zs[700] is None
    for i in (32, 500, 1003, 1004, 1005, 1499):
        before = [x for x in xs[:i] if x == x][-stats.SPIKE_WINDOW :]
        m = stats.mean(before)
        near(zs[i], (xs[i] - m) / math.sqrt(stats.mean([(x - m) ** 2 for x in before])), 1e-6)
    assert stats.spikes(stats.z_scores([1.1] * 40 + [1.2, 1.1]))[:2] == ([40], 10)


def test_the_final_loss_is_of_the_most_windows(tmp_path):
    def change(run, arm, seed):
        rewrite(run / "eval.json", lambda found: found.update(loss=9.0, windows=windows))
        edit_options(run, **{"val-steps": 5, "batch-size": 4})

    for windows, loss, where in ((10, 2.0, "last validation, 20 windows"), (20, 9.0, "evaluation, 20 windows")):
        lab = made_lab(tmp_path / str(windows), {"baseline": {1: 2.0, 2: 2.0}}, change=change)
        study = studies.load([lab])
        assert study.loss_of() == where, study.loss_of()
        assert [(row["loss"], row["windows"]) for row in measured(lab)[0].rows] == [(loss, 20)] * 2
    (lab / "baseline.lr0.001.seed1/eval.json").unlink()
    assert studies.load([lab]).loss_of() == "last validation, 20 windows"


@pytest.mark.slow
def test_an_archive_gives_the_scoreboard_and_the_tables_of_the_runs(tmp_path):
    lab, file, kept = made_lab(tmp_path, known_arms()), tmp_path / "claims", tmp_path / "kept.jsonl"
    file.write_text(CLAIMS)
    assert f"{kept}: 19 runs, " in archived(lab, "--out", kept).stdout
    assert kept.stat().st_size < 19 * 4000, kept.stat().st_size
    first, again = scoreboard(lab, "--claims", file), scoreboard(kept, "--claims", file)
    assert (first.returncode, again.returncode, first.stdout) == (0, 0, again.stdout), again.stdout + again.stderr
    assert archived(lab, "--out", tmp_path / "numbers.jsonl", "--numbers").returncode == 0
    assert (tmp_path / "numbers.jsonl").stat().st_size < 19 * 600, "numbers only"
    assert scoreboard(tmp_path / "numbers.jsonl", "--claims", file).stdout == first.stdout
    tables_of = lambda path: tables.results(studies.load([path]))
    for key, found in tables_of(lab).items():
        same(found, tables_of(kept)[key], key)
    text = kept.read_text()
    assert "command_line" not in text, "it has paths of the machine"
    assert archived(kept, "--out", kept).returncode == 0 and kept.read_text() == text, "an archive of an archive"
    more = made_lab(tmp_path / "more", {"baseline": {9: 2.0}, "a": {9: 1.9}})
    joined = {"sweep-seeds": [7], "looks": [4, 8]}
    joined["registration"] = [{"sha256": "0", "time": "t", "commit": "", "changed": [], "options": {}}]
    rewrite(more / "lab.json", lambda found: found.update(joined))
    assert archived(kept, more, "--out", tmp_path / "both.jsonl").returncode == 0
    header, entries = archive.read(tmp_path / "both.jsonl")
    assert {key: header["lab"][key] for key in joined} == joined, header["lab"]
    run = studies.load([kept]).runs[0]
    run.eval["loss_by_frequency"] = [{"share": 2.0**-11, "tokens": 1, "targets": 1, "loss": 1.0}]
    study = replace(studies.load([lab]), runs=[run, replace(run, seed=2, eval=archive.unpack(archive.pack(run.eval)))])
    assert evaluations.by_frequency(study, 0.001)["baseline"][0]["loss"]["n"] == 2, "of runs and of archives"
    both = scoreboard(tmp_path / "both.jsonl", "--claims", file).stdout
    assert both == scoreboard(kept, more, "--claims", file).stdout and "| 5 | own" in both, both
    expect_error(archived(kept, lab, "--out", tmp_path / "x"), 2, "are both arm baseline with rate 0.001 and seed 1", 1)
    other = made_lab(tmp_path / "other", known_arms(), change=lambda run, *_: edit_options(run, warmup=99))
    expect_error(scoreboard(kept, other), 2, "not comparable: --warmup: 10 in ", 1)
    damaged = tmp_path / "damaged.jsonl"
    for old, new, said in (
        ('"archive":1', '"archive":2', "damaged.jsonl: not an archive of this lab: version 2 of the format, must be 1"),
        ('"state":"done"', '"state":1', "damaged.jsonl:2: numbers.state is not a text"),
        (
            '"info":{',
            '"info":{"phases":[{"step":1,"changed":[{"name":"total-batch","new":"x"}]}],',
            "options after step 1",
        ),
        ('"columns"', '"column"', "damaged.jsonl:2: log.val is not a list"),
        ("{", "", "damaged.jsonl: not an archive: "),
    ):
        damaged.write_text(text.replace(old, new, 1))
        with raises(RunError, said):
            archive.read(damaged)


def same(one, other, where):
    """Equal but for rounding to seven digits. The log of an archive has few steps."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (where, one.keys(), other.keys())
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), (where, one, other)
        for x, y in zip(one, other):
            same(x, y, where)
    elif isinstance(one, float) and not where.endswith((".speed.low", ".speed.high", ".speed.median")):
        assert other is not None and abs(one - other) <= 1e-6 * abs(one) + 1e-5, (where, one, other)
    else:
        assert one == other, (where, one, other)


def test_what_is_no_lab_or_not_comparable_has_no_verdict(tmp_path):
    change = lambda run, arm, seed: edit_options(run, warmup=99) if (arm, seed) == ("a", 2) else None
    lab = made_lab(tmp_path, known_arms(), change=change)
    expect_error(scoreboard(lab), 2, "lab scoreboard: the runs of p are not comparable: --warmup: 10", 1)
    expect_error(scoreboard(lab / "a.lr0.001.seed1"), 1, "no lab.json", 1)
    expect_error(scoreboard(lab, "--claims", tmp_path / "none"), 2, "not comparable", 1)
    expect_error(scoreboard(), 2, "lab scoreboard: the following arguments are required: LAB", 1)


def problems(lab):
    study = studies.load([lab])
    studies.check(study)
    return study.problems


def set_fact(lab, arm, **facts):
    """The facts of an arm in lab.json, as `lab run` copies them from the plan."""
    rewrite(lab / "lab.json", lambda found: found["arms"][arm].update(facts))


def test_an_arm_with_its_own_tokens_is_compared_at_equal_flops(tmp_path):
    def change(run, arm, seed):
        """Arm a: twice the steps, each with half the FLOPs."""
        if arm == "a":
            edit_options(run, steps=2 * STEPS)
            edit(run, lambda info: info["model"].update(flops_per_token=3e3))
            run_directory.checkpoint(run, STEPS).rename(run_directory.checkpoint(run, 2 * STEPS))
            write_log(run, [r | {"step": 2 * STEPS} for r in read_log(run) if r["step"] == STEPS], "a")

    claim = next(c for c in claims.parse(CLAIMS) if c.id == "flops")
    lab = made_lab(tmp_path, {arm: known_arms()[arm] for arm in ("baseline", "a")}, change=change)
    assert [line[:12] for line in problems(lab)] == ["--steps: 200"] * 4
    set_fact(lab, "a", tokens=2 * STEPS * 1000)
    assert not problems(lab)
    row = claims.judge([claim], measured(lab))[0]
    assert (row["verdict"], row["flops"]) == ("supported", 1), row
    edit_options(lab / "a.lr0.001.seed2", steps=2 * STEPS + 1)
    assert problems(lab) == ["--steps: 400 in a.lr0.001.seed1, 401 in a.lr0.001.seed2, both of arm a"]
    edit_options(lab / "a.lr0.001.seed2", steps=2 * STEPS)
    for run in lab.glob("*.seed*"):  # shares of the steps, within a step
        steps = (10, 40, "50:lr=1") if run.name.startswith("baseline") else (20, 80, "101:lr=1")
        edit_options(run, **dict(zip(option_history.SHARES, steps)))
    assert not problems(lab)
    edit_options(lab / "a.lr0.001.seed2", phase="104:lr=1")
    assert problems(lab) == ["--phase: 50:lr=1 in baseline.lr0.001.seed1, 104:lr=1 in a.lr0.001.seed2"]
    edit_options(lab / "a.lr0.001.seed2", phase="101:lr=1")
    for run in lab.glob("a.*/run.json"):
        run.write_text(run.read_text().replace("3000.0", "3100.0"))
    assert claims.judge([claim], measured(lab))[0]["remark"] == "no study has a - baseline (equal FLOPs)"


def test_an_arm_of_a_plan_may_have_its_own_optimizer(tmp_path):
    lab = made_lab(tmp_path, {arm: known_arms()[arm] for arm in ("baseline", "a")})
    for run in lab.glob("a.*"):
        edit_options(run, optimizer="muon", lr=0.002)
    assert problems(lab)[0] == "--optimizer: adamw in baseline.lr0.001.seed1, muon in a.lr0.001.seed1"
    set_fact(lab, "a", optimizer="muon")
    assert not problems(lab)
    study = studies.load([lab])  # each arm has a rate of its own
    near(tables.results(study)["by_position"]["a"][-1]["gap"]["mean"], -0.05)
    assert [run.lr for run in currencies.at_own_rates(study).runs] == [0.001] * 8
    edit_options(lab / "a.lr0.001.seed2", optimizer="normuon")
    assert problems(lab) == ["--optimizer: muon in a.lr0.001.seed1, normuon in a.lr0.001.seed2, both of arm a"]
    edit_options(lab / "a.lr0.001.seed2", optimizer="muon", **{"qk-norm": True})
    assert not problems(lab)  # trainers of the other runs did not record it
    edit_options(lab / "a.lr0.001.seed1", **{"qk-norm": False})
    assert problems(lab) == ["--qk-norm: False in a.lr0.001.seed1, True in a.lr0.001.seed2, both of arm a"]
    edit_options(lab / "a.lr0.001.seed2", **{"qk-norm": False, "decay-shape": "1-sqrt"})
    assert problems(lab)[0] == "--decay-shape: linear in baseline.lr0.001.seed1, 1-sqrt in a.lr0.001.seed2"


def edit_options(directory, **options):
    edit(directory, lambda info: info["options"].update(options))


def test_errors_of_the_claims_have_the_line_number():
    for text, words in (
        ("seeds = 4\n[claim x]\n", "claims:2: [claim x]: has no 'claim'"),
        (CLAIMS.replace("metric = sink_rate", "metric = sink_rat"), "did you mean sink_rate?"),
        (CLAIMS.replace("expect = equal", "expect = same"), "claims:14: [claim same]: expect = same: must be one of"),
        (CLAIMS.replace("arms = c - baseline", "arms = c -baseline"), "[claim wide]: arms = c -baseline: must be ARM"),
        (CLAIMS.replace("effect = 1\n", "effect = 0\n"), "effect must be a positive number"),
        (CLAIMS.replace("needs = one rate", "needs = a rate"), "needs = a rate: must be of one rate, several rates"),
        (CLAIMS.replace("seeds = 4", "seeds = 1"), "seeds an integer of at least 2"),
        (CLAIMS.replace("requires = baseline 20", "requires = baseline"), "requires = baseline: must be ARM NUMBER"),
        (CLAIMS + "[claim lower]\n", "[claim lower] is already specified"),
        (CLAIMS + "claim = twice\n", "'claim' is already specified"),
        ("color = red\n", "claims:1: 'color = red': must be [claim NAME], [plan NAME SIZE] or KEY = VALUE"),
        (
            CLAIMS.replace("seeds = 4", "seeds = 4\nplan = a b"),
            "[claim lower]: plan = a b: no [plan a b] with 'size' and",
        ),
        ("[arm x]\n", "claims:1: '[arm x]': must be [claim NAME]"),
        (CLAIMS.replace("measured = a file\n", ""), "[claim speed]: has no 'measured'"),
    ):
        with raises(RunError, words):
            claims.parse(text)


def plans_of_the_repository():
    for path in (HERE.parent / "plans").glob("*.plan"):
        text = path.read_text()
        names = {line.split("=")[0].strip() for line in text.splitlines() if "=" in line and line[0] != "#"}
        yield plans.parse(text, path.stem, dict.fromkeys(names, "value"))


def test_every_claim_of_the_repository_can_be_judged_by_a_plan():
    found, known = claims.read(), list(plans_of_the_repository())
    assert len(found) > 40 and len({(c.claim, c.metric) for c in found}) == len(found)
    for claim in (c for c in found if c.metric != "elsewhere"):
        assert claim.requires or not claim.metric.endswith("_spikes"), f"{claim.id}: without spikes it cannot be tested"
        for arms in claim.arms:
            of = [plan for plan in known if {*arms, *claim.requires[:1]} <= set(plan.arms)]
            assert any(len(plan.common["seeds"]) >= claim.seeds for plan in of), (claim.id, arms)
            if claim.metric in ("wo_adjacent", "wo_closest"):
                assert any(size.get("probes") == "last" for plan in of for size in plan.sizes.values()), claim.id


def test_every_plan_with_the_arms_of_a_claim_is_judged_whatever_its_name():
    for plan in plans_of_the_repository():
        if any("lr" in keys for keys in plan.arms.values()):
            continue  # a claim requires rates that its arms have in common
        size, rows = next(iter(plan.sizes.values())), []
        rates = size.get("lr") or plan.common["lr"]
        for arm, keys in plan.arms.items():
            # with a narrower MLP as many parameters as the baseline
            count = 1000 if arm == "baseline" or "match" in keys else 1100
            row = dict.fromkeys(measurements.COLUMNS) | {"study": "any name", "arm": arm, "state": "done", "loss": 2.0}
            row |= {"parameters": count, "active_parameters": count}
            rows += [row | {"rate": lr, "seed": s} for lr in rates for s in plan.common["seeds"]]
        found = claims.judge(claims.read(), [measurements.Measurements("any name", rows)])
        got = {row["id"] for row in found if row["study"]}
        needed = {"diff_v2", "baseline"} <= set(plan.arms)
        matched = "match" in plan.arms.get("diff_v2", ())
        wanted = {"large-rates" if len(rates) > 1 else "gap-parameters" if matched else "gap"}
        assert not needed or wanted <= got, (plan.name, wanted, got)


def test_quantiles_of_f_match_the_tables():
    for df1, df2, x, p in ((1, 4, 7.7086, 0.95), (6, 7, 3.8660, 0.95), (4, 120, 3.4795, 0.99), (10, 10, 1.0, 0.5)):
        near(stats.f_p(x, df1, df2), 1 - p, 2e-5)
    near(stats.f_p(2.7764451**2, 1, 4), 0.05, 1e-7)  # t squared


def test_the_pooled_deviation_is_that_of_the_two_way_layout():
    random.seed(4)
    table = {a: {s: random.gauss(0, 0.02) + s + a for s in range(5)} for a in range(6)}
    of_arm = {a: stats.mean(list(row.values())) for a, row in table.items()}
    of_seed = {s: stats.mean([row[s] for row in table.values()]) for s in range(5)}
    middle = stats.mean(list(of_arm.values()))
    squares = [(table[a][s] - of_arm[a] - of_seed[s] + middle) ** 2 for a in table for s in range(5)]
    pool = stats.pooled_deviation(table, 0)
    near(pool.sd, math.sqrt(sum(squares) / 20), 1e-10)
    assert (pool.df, list(pool.cells)) == (20, list(range(6)))
    # two arms: the deviation of the paired difference is sqrt(2) sd, with n - 1 degrees of freedom
    two = {a: table[a] for a in (0, 1)}
    paired = stats.paired_gap(two[1], two[0])
    pool = stats.pooled_deviation(two, 0)
    near(math.sqrt(2) * pool.sd, paired.sd, 1e-10)
    assert pool.df == 4
    own = stats.pooled_gap(two, 1, 0, pool)
    assert not own.pooled and own.p_variances is None, "no other arm to compare variances with"
    near(own.half, paired.half, 1e-9)
    # missing cells: a value that only one arm and seed explain changes nothing but the degrees of freedom
    del table[3][2], table[5][0]
    pool = stats.pooled_deviation(table, 0)
    assert pool.df == 18
    again = stats.pooled_deviation({**table, 9: {0: 7.0}, 10: {99: 1.0}}, 0)
    near(again.sd, pool.sd, 1e-10)
    assert again.df == 18 and 10 not in again.cells
    assert stats.pooled_deviation({0: {1: 1.0}, 1: {1: 2.0}}, 0) is None
    wild = stats.pooled_deviation({**table, 7: {s: 3 * (-1) ** s for s in range(5)}}, 0)
    assert 7 not in wild.cells
    near(wild.sd, pool.sd, 1e-10)


def test_pooled_intervals_contain_the_true_difference_in_95_percent_of_cases():
    random.seed(11)
    hits, cases, wide = 0, 400, 0
    for _ in range(cases):
        table = {a: {s: random.gauss(0, 1) for s in range(4)} for a in range(8)}
        pool = stats.pooled_deviation(table, 0)
        estimate = stats.pooled_gap(table, 1, 0, pool)
        hits += estimate.low <= 0 <= estimate.high
        wide += not estimate.pooled
    # 3 standard deviations of a binomial count; the selection by the F test at 5% moves the level by less
    assert abs(hits / cases - 0.95) < 3 * math.sqrt(0.95 * 0.05 / cases) + 0.005, hits / cases
    assert 0.02 < wide / cases < 0.09, wide


def test_arms_that_deviate_more_are_not_pooled():
    # As with experts: their deviation is twice that of the others, which is not enough to leave the pool.
    random.seed(9)
    sds = {"baseline": 0.01, "a": 0.01, "b": 0.01, "x": 0.02, "y": 0.02}
    table = {arm: {s: s / 10 + random.gauss(0, sd) for s in range(10)} for arm, sd in sds.items()}
    pool = stats.pooled_deviation(table, "baseline")
    assert list(pool.cells) == list(sds)
    wide, narrow = stats.pooled_gap(table, "x", "y", pool), stats.pooled_gap(table, "a", "b", pool)
    assert not wide.pooled and wide.p_variances < 0.05 and wide.df == 9, wide
    assert narrow.pooled and narrow.p_variances > 0.05 and narrow.df == pool.df == 36, narrow
    # p is that of the ratio of the two mean squares, of 9 and 27 degrees of freedom
    rest = (pool.sd**2 * 36 - wide.sd**2 / 2 * 9) / 27
    near(wide.p_variances, stats.f_p(wide.sd**2 / 2 / rest, 9, 27))


def test_the_seeds_for_a_power_show_the_effect_that_often():
    random.seed(5)
    for sd, gap, arms in ((0.02, 0.015, 2), (0.02, 0.015, 21)):
        n = stats.seeds_needed(sd, gap, power=0.8, arms=arms)
        df, shown, cases = (arms - 1) * (n - 1), 0, 1500
        for _ in range(cases):
            m = random.gauss(gap, sd / math.sqrt(n))
            own = sd * math.sqrt(random.gammavariate(df / 2, 2) / df)
            shown += abs(m) > stats.t_quantile(0.975, df) * own / math.sqrt(n)
        assert 0.8 - 0.04 < shown / cases < 0.8 + 0.06, (n, arms, shown / cases)
    assert stats.seeds_needed(0.02, 0.015, power=0.8, arms=21) < stats.seeds_needed(0.02, 0.015, power=0.8)
    assert stats.seeds_needed(1, 0.01) is None


# ---- probes


def probe_of(adjacent, cancelled=None, step=STEPS):
    """Two layers: the second has 0.1 more."""
    layer = lambda l: {
        "layer": l,
        "subtraction": adjacent
        and {
            "heads_in_group": 2,
            "adjacent": adjacent + l / 10,
            "adjacent_permuted": {"mean": 0.01, "low": -0.1, "high": 0.1},
            "adjacent_p": 0.5 - 0.49 * l,
            "closest": None,
            "closest_permuted": None,
            "closest_p": None,
        },
        "maps": {"correlation": None, "cancelled": cancelled, "negative": None, "effective_rank": 3.0 + l},
        "lambda": cancelled and {"all": {"mean": 0.5, "sd": 0.1, "count": 9}, "first": None},
    }
    return json.dumps({"attention": "x", "step": step, "layers": [layer(0), layer(1)]})


def test_probes_are_averaged_by_layer_and_step(tmp_path):
    def change(run, arm, seed):
        for step in (50, STEPS) + (100,) * (seed == 1) if arm == "baseline" else (STEPS,):
            text = probe_of(0.2 + seed / 100 + step / 1000, None, step) if arm == "baseline" else probe_of(None, 0.25)
            (run / run_directory.probe_name(step, STEPS)).write_text(text)

    arms = {arm: {s: 2.0 for s in range(1, 4)} for arm in ("baseline", "a")}
    lab = made_lab(tmp_path, arms, change=change)
    study = studies.load([lab])
    assert not study.left_out, study.left_out
    found = layers.probe_tables(study, 0.001)
    adjacent = found["layers"]["baseline"]["adjacent"]
    near(adjacent[0]["mean"], 0.2 + 0.02 + 0.2)
    near(adjacent[1]["mean"], 0.1 + 0.2 + 0.02 + 0.2)
    near(adjacent[0]["half"], 4.3026527 * 0.01 / math.sqrt(3), 1e-6)
    steps = found["steps"]["baseline"]
    assert [row["step"] for row in steps] == [50, STEPS] and "cancelled" not in steps[0]
    near(steps[0]["adjacent"]["mean"], 0.2 + 0.02 + 0.05 + 0.05)
    assert found["beyond"] == {
        "baseline": {"adjacent": [3, 6], "closest": [0, 0]},
        "a": {"adjacent": [0, 0], "closest": [0, 0]},
    }
    near(found["layers"]["a"]["cancelled"][0]["mean"], 0.25)
    assert "lambda_first" not in found["layers"]["a"] and "adjacent" not in found["layers"]["a"]
    near(METRICS["wo_adjacent"].of(study.runs_of("baseline", 0.001)[0]), 0.2 + 0.01 + 0.2 + 0.05 - 0.01)
    assert METRICS["wo_adjacent"].of(study.runs_of("a", 0.001)[0]) is None
    # a damaged file is left out with one line
    (lab / "a.lr0.001.seed1/probe.json").write_text('{"layers": [{"layer": 0, "maps": 3}]}')
    (lab / "a.lr0.001.seed2/probe.json").write_text("{")
    left = studies.load([lab]).left_out
    assert len(left) == 2 and "layers[0].maps is not an object" in left[0] and "not JSON" in left[1], left


def queue_of(out, probes, **more):
    """The queue of one finished run."""
    options = {"val-data": "c", "seed": "1", "steps": str(STEPS)}
    run = plans.PlannedRun("r", "a", 1e-3, 1, STEPS, 1, options, probes=probes)
    known = argparse.Namespace(path="t", options={"eval-out": "value", "dump-qkv": "value"})
    words = argparse.Namespace(**{"gpus": 0, "threads": 0, "no_eval": False, "minutes": 0, **more})
    return scheduler.Queue(out, [run], {"r": Cost(1, 1, 1.0, 1)}, known, 1, words, 0)


def test_checkpoints_are_probed_as_the_plan_says(tmp_path):
    text = "tokens = 1K\ntotal-batch = 100\ntrain-data = d\nlr = 1\nprobes = last\n[arm a]\n[arm b]\nprobes = all\n"
    known = dict.fromkeys(("train-data", "total-batch"), "value")
    runs = plans.expand(plans.parse(text, "x.plan", known), known)
    assert [(run.probes, run.options["keep"]) for run in runs] == [("last", "1"), ("all", "0")], runs
    made_run(tmp_path / "r", "a", 1e-3, 1, 2.0)
    for step in (50, 100):
        run_directory.checkpoint(tmp_path / "r", step).mkdir(parents=True)
        (run_directory.checkpoint(tmp_path / "r", step) / "trainer_state.json").write_text("{}")
    run_directory.checkpoint(tmp_path / "r", 150).mkdir()  # incomplete
    for probes, files in (
        ("none", []),
        ("last", ["probe.json"]),
        ("all", ["probe.json", "probe-00000100.json", "probe-00000050.json"]),
    ):
        queue, made = queue_of(tmp_path, probes), []
        while queue.remaining(queue.jobs[0]):
            state, dump, command = queue.remaining(queue.jobs[0])
            said = command(queue.jobs[0])
            assert state == "probing" and said[said.index("--dump-qkv") + 1].endswith(f"r/{dump}"), said
            (tmp_path / "r" / dump).write_text("")
            _, file, command = queue.remaining(queue.jobs[0])
            step = run_directory.probed_step(file, STEPS)
            assert said[said.index("--init") + 1].endswith(f"step_{step:08d}"), said
            said = command(queue.jobs[0])
            assert said[said.index("--out") + 1].endswith(f"r/{file}") and said[3].endswith(f"r/{dump}"), said
            assert said[said.index("--checkpoint") + 1].endswith(f"step_{step:08d}"), said
            made.append(file)
            run_directory.remove_dumps(tmp_path / "r")
            queue.jobs[0].ended |= {file, dump}
        assert made == files, (probes, made)
    for words in ({"gpus": 1}, {"no_eval": True}):  # a probe uses the CPU
        queue = queue_of(tmp_path, "all", **words)
        assert queue.remaining(queue.jobs[0]) is None, words
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(io.StringIO()):
        assert queue.work() == 0
    assert signal.getsignal(signal.SIGTERM) == before, "a signal between two queues ends the lab"
    (tmp_path / "r/eval.json").unlink()
    queue = queue_of(tmp_path, "last")
    assert queue.remaining(queue.jobs[0])[:2] == ("evaluating", "eval.json")


def test_late_gradients_are_geometric_means_of_the_last_quarter(tmp_path):
    def change(run, arm, seed):
        kept = [record for record in read_log(run) if record["kind"] != "stats"]
        for step in range(10, STEPS + 1, 10):
            for layer, norm in ((0, 1.0), (1, 4.0)):
                late = step > 150
                value = norm * (3 if arm == "a" else 1) * math.exp(seed / 10) if late else 1000.0
                kept.append({"kind": "stats", "step": step, "layer": layer, "grad_norm": value})
        write_log(run, kept)

    arms = {"baseline": dict.fromkeys((1, 2, 3), 2.0), "a": dict.fromkeys((1, 3), 2.0)}
    study = studies.load([made_lab(tmp_path, arms, change=change)])
    base, a = layers.late_gradients(study)
    near(base["layers"][1] / base["layers"][0], 4)
    near(a["ratio"]["mean"], math.log(3))
    near(a["ratio"]["half"], 0, 1e-9)
    near(metrics.late_gradient(study.runs_of("a", 0.001)[0]), 3 * 2 * math.exp(0.1))
    near(metrics.late_gradient(study.runs_of("a", 0.001)[0], 0), 3 * math.exp(0.1))
    assert layers.late_gradients(studies.load([made_lab(tmp_path / "x", arms)])) == [], "too few statistics"


@pytest.mark.full
def test_the_committed_scoreboard_follows_from_the_committed_runs():
    results = ROOT / "dev/results"
    done = scoreboard(*sorted((results / "runs").glob("*.jsonl")))
    assert done.returncode == 0 and done.stdout == (results / "scoreboard.md").read_text(), (
        "python3 scripts/lab scoreboard dev/results/runs/*.jsonl --out dev/results/scoreboard.md"
    )
    done = subprocess.run(
        [sys.executable, results / "pages.py", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def module_of_results(name):
    found = importlib.util.spec_from_file_location(name, ROOT / f"dev/results/{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_a_gap_survives_an_optimizer_by_the_rules_of_the_plan():
    rate_sweeps = module_of_results("rate_sweeps")
    e = lambda mean, half, n=8: stats.Estimate(mean, half, n, None)
    for adamw, muon, said in (
        (e(-0.03, 0.02), e(-0.02, 0.01), "survives"),
        (e(-0.03, 0.02), e(-0.02, 0.01, 7), "7 of 8 seeds"),
        (e(-0.03, 0.04), e(-0.02, 0.01), "no gap here"),
        (e(-0.03, 0.02), e(0.0, 0.01), "vanishes"),
        (e(-0.03, 0.02), e(-0.01, 0.02), "Undecided at this size"),
    ):
        assert said in rate_sweeps.survival(adamw, muon, 8), (adamw, muon)
    row = lambda seed, rate, loss: {"arm": "a.w2", "seed": seed, "rate": rate, "loss": loss}
    rows = [row(1, 1, 3.0), row(1, 2, 2.0), row(1, 4, 3.0), row(2, 1, 2.0), row(2, 2, 3.0), row(3, 1, 9.0)]
    rows += [row(2, 4, None)]
    assert rate_sweeps.losses_over_rates(rows) == {"a.w2": [(1, 2.5), (2, 2.5)]}, "seed 3 has not ended at all rates"
    found = rate_sweeps.optima(measurements.Measurements("x", rows))["a"][2]
    assert abs(found[1] - 2) < 1e-9 and found[2] is None and list(found) == [1, 2], found
    estimate = rate_sweeps.factors({1: {1: 1.0, 2: 4.0}, 2: {1: 2.0, 2: 2.0}}, 2)
    assert (estimate.n, round(estimate.mean, 9)) == (2, 0.0), estimate


def test_an_interval_that_the_committed_runs_do_not_have_is_found():
    pages = module_of_results("pages")
    known, board = [(-0.0376487, 0.0228804), (2.0, 0.25)], pages.intervals("at +0.0256 [+0.0101, +0.0410] nats")
    right = ("0.0376 [0.0148, 0.0605]", "-0.038 nats [-0.061,\n  -0.015]", "0.0376 ± 0.0229")
    right += ("0.0256 [0.0101, 0.0410]", "-0.0256 [-0.0410, -0.0101]")
    assert not pages.unsupported(", ".join(right), known, board)
    wrong = ("0.0376 [0.0148, 0.0606]", "-0.038 nats [-0.060, -0.015]", "0.0377 ± 0.0229", "0.0256 [0.0101, 0.0411]")
    for text in wrong:
        assert pages.unsupported(f"{right[0]}, {text}", known, board) == [" ".join(text.split())], text
    assert not pages.unsupported(f"<!-- no data -->\n{wrong[0]}\n<!-- data -->", known, board)
