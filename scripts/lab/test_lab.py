"""test_lab.py: tests of plans, of the scheduler and of whole runs."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab import option_history, plan as plans, run_directory, runs, spike, stats
from lab.testing import HERE, ROOT, TRAINER, expect_error, near, raises, rewrite, text_shard, wait_until
from lab.trainer import Trainer

NAMES = "attention preset train-data val-data total-batch lr out seed steps ffn ranks threads warmup"
OPTIONS = {**dict.fromkeys(NAMES.split(), "value"), "tie-embeddings": "flag"}


def refused(text, words):
    with raises(plans.PlanError, words):
        plans.parse(text, "x.plan", OPTIONS)


GOOD = """# a comment
title = T
seeds = 1 2   # and another
tokens = 1.5K
total-batch = 1000
train-data = a b
lr = 1e-3 2e-3
[size s]
preset = tiny
[size big]
preset = small
tokens = 1M
[arm one]
attention = baseline
[arm two]
attention = diff_v2
preset = {preset}-1.5h
match = one
tie-embeddings = no
"""


# ---- plans


def test_a_plan_lists_its_runs_by_seed():
    plan = plans.parse(GOOD, "x.plan", OPTIONS)
    assert plan.common["reference"] == "one"
    runs = plans.expand(plan, OPTIONS)
    assert [r.name for r in runs] == (
        "one.lr0.001.seed1 one.lr0.002.seed1 two.lr0.001.seed1 two.lr0.002.seed1 one.lr0.001.seed2 "
        "one.lr0.002.seed2 two.lr0.001.seed2 two.lr0.002.seed2"
    ).split()
    run = runs[3]
    assert (run.steps, run.tokens, run.match) == (2, 2000, "one"), run
    assert run.options["preset"] == "tiny-1.5h" and run.options["lr"] == "0.002" and run.options["seed"] == "1"
    words = plans.arguments(run.options)
    after = lambda option: words[words.index(option) + 1]
    assert "--no-tie-embeddings" in words and (after("--total-batch"), after("--train-data")) == ("1000", "a b"), words
    big = plans.expand(plan, OPTIONS, "big", ["two"])
    assert len(big) == 4 and big[0].steps == 1000 and big[0].options["preset"] == "small-1.5h"
    ranks = plans.parse(GOOD.replace("title = T", "ranks = 4\nthreads = 2"), "x.plan", OPTIONS)
    ranked = plans.expand(ranks, OPTIONS)[0]  # the trainer's --ranks is another
    assert (ranked.ranks, ranked.threads) == (4, 2) and not {"ranks", "threads"} & set(ranked.options), ranked
    assert len(plans.expand(plan, OPTIONS, None, ["one"], {"seeds": [7], "tokens": 500})) == 2


def test_errors_of_a_plan_have_the_line_number():
    refused("title = x\nlearning-rat = 3\n[arm a]\n", "x.plan:2: unknown key 'learning-rat'")
    refused("attentio = x\n[arm a]\n", "x.plan:1: unknown key 'attentio': did you mean 'attention'?")
    refused("gemm = bf16\n[arm a]\n", "x.plan:1: unknown key 'gemm': did you mean 'matmul-dtype'?")
    refused("title = x\ntitle = y\n[arm a]\n", "x.plan:2: 'title' is already specified in line 1")
    refused("\n[arm a]\n[arm a]\n", "x.plan:3: [arm a] is already specified in line 2")
    refused("[arm a]\nseeds = 1\n", "x.plan:2: 'seeds' is not allowed in an [arm ...]: all arms have the same")
    refused("[size s]\ntitle = x\n[arm a]\n", "x.plan:2: 'title' must precede the first section")
    refused("match = a\n[arm a]\n", "x.plan:1: 'match' is only allowed in an [arm ...]")
    refused("[arm a]\nseed = 1\n", "x.plan:2: 'seed' cannot be set in a plan: seeds sets it")
    refused("[arm a]\nout = 1\n", "x.plan:2: 'out' cannot be set in a plan")
    refused("tokens = 1.5\n[arm a]\n", "x.plan:1: 'tokens = 1.5': must be a positive integer")
    refused("tokens =\n[arm a]\n", "x.plan:1: 'tokens = ': must be a non-empty value")
    refused("lr = 1e-3 0\n[arm a]\n", "x.plan:1: 'lr = 1e-3 0'")
    refused("lr = 1e-3 0.001\n[arm a]\n", "x.plan:1: 'lr = 1e-3 0.001'")
    refused("seeds = 1 01\n[arm a]\n", "x.plan:1: 'seeds = 1 01': must be different integers, separated by spaces")
    refused("[armoury]\n", "x.plan:1: [armoury] is neither")
    refused("[arm a/b]\n", "x.plan:1: [arm a/b] is neither")
    refused("[arm a\n", "x.plan:1: '[arm a' has no closing ]")
    refused("[arm a]\nattention baseline\n", "x.plan:2: 'attention baseline' is not 'key = value'")
    refused("title = x\n", "no [arm ...]")
    refused("reference = b\n[arm a]\n", "x.plan:1: reference = b: no [arm b]")
    refused("[arm a]\nmatch = b\n", "x.plan:2: match = b: that arm does not exist")
    refused("init = x\n[arm a]\n", "x.plan:1: 'init' cannot be set in a plan: nothing, all runs start from random")
    refused("[arm a]\nmatch = a\n", "x.plan:2: match = a: that arm is itself matched")
    plan = plans.parse("[arm a]\n", "x.plan", OPTIONS)
    for size, arms, words in (("s", None, "no [size s]"), (None, ["b"], "no [arm b]"), (None, None, "has no 'tokens'")):
        with raises(plans.PlanError, words):
            plans.expand(plan, OPTIONS, size, arms)


def test_counts_accept_suffixes_and_exponents():
    known = {"2000": 2000, "2K": 2000, "1.5M": 1500000, "10B": 10**10, "3t": 3 * 10**12, "1e6": 10**6}
    for text, value in known.items():
        assert plans.parse_count(text) == value, text
    for text in ("", "0", "-1", "1.5", "K", "1 M", "1e-3", "1e400", "nan", "0x10"):
        assert plans.parse_count(text) is None, text


# ---- statistics


def test_a_paired_interval_matches_a_manual_calculation():
    gap = stats.paired_gap({1: 2.0, 2: 2.2, 3: 2.1, 5: 9.0}, {1: 2.1, 2: 2.25, 3: 2.25, 4: 1.0})
    near(gap["mean"], -0.1)
    near(gap["sd"], 0.05)
    near(gap["half"], 4.302652729911275 * 0.05 / math.sqrt(3), 1e-9)
    assert (gap["n"], gap["df"]) == (3, 2)
    near(gap["p"], 0.0741799, 1e-5)
    assert stats.paired_gap({1: 1.0}, {1: 2.0}) == dict(mean=-1, half=None, n=1, sd=None, p=None, df=None)
    assert stats.paired_gap({1: 1.0}, {2: 2.0}) is None
    assert stats.paired_gap({1: 1.0, 2: None, 3: float("nan")}, {1: 2.0, 2: 2.0, 3: 2.0})["n"] == 1
    same = stats.paired_gap({1: 1.0, 2: 2.0}, {1: 1.5, 2: 2.5})
    assert same["half"] == 0 and same["p"] == 0
    # pairing removes what seeds have in common: the deviation of the losses is 100 times that of the differences
    wide = stats.t_interval([1.0, 2.0, 3.0])
    assert stats.paired_gap({1: 1.0, 2: 2.01, 3: 3.0}, {1: 1.1, 2: 2.1, 3: 3.1})["half"] < wide["half"] / 100


def test_holms_correction_counts_the_comparisons_that_remain():
    for got, wanted in zip(stats.holm([0.01, None, 0.04, 0.03]), [0.03, None, 0.06, 0.06]):
        assert got == wanted or abs(got - wanted) < 1e-12
    assert stats.thin(range(5), 10) == [0, 1, 2, 3, 4]
    assert stats.thin(range(1001), 3) == [0, 500, 1000]


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
    assert stats.spikes(stats.z_scores([1.1] * 40 + [1.2, 1.1])) == ([40], 10)


def test_spikes_are_counted_among_values_with_a_z_score():
    assert stats.spikes([None, None, 1.0, 7.0, 6.99, 100.0, None, -9.0]) == ([3, 5], 5)
    assert stats.spikes([None]) == ([], 0)
    records = [{"kind": "stats", "layer": 1, "logit_max": x} for x in (None, 2.0, 8.0)]
    search = SimpleNamespace(records={"unchanged": records})
    grown = lambda part: spike.Search.growth_of_logits(search, part)
    assert grown("model.layers.1.self_attn.k_proj.weight").endswith("goes from 2 to 8")
    assert grown("model.layers.0.self_attn.k_proj.weight") == grown("model.yoco.k_proj.weight") == ""


def test_the_largest_stable_rate_is_below_the_first_unstable_one():
    ladder = {
        1e-3: [2.5, 2.5],
        2e-3: [2.0, 2.02],
        4e-3: [1.98, 2.0],
        8e-3: [2.05, 2.04],
        1.6e-2: [2.0, 2.3],
        3.2e-2: [None, 2.0],
    }
    # one seed of 1.6e-2 ends too high; slow small rates are stable
    assert stats.largest_stable(ladder) == (8e-3, False)
    assert stats.largest_stable({1e-3: [2.0], 2e-3: [1.9]}) == (2e-3, True)
    assert stats.largest_stable({1e-3: [2.0], 2e-3: [None]}) == (1e-3, False)
    assert stats.largest_stable({1e-3: [None]}) == (None, False)
    assert stats.largest_stable({1e-3: [None], 2e-3: [2.0]}) == (2e-3, True)
    near(stats.sensitivity({1: [2.0], 2: [3.0], 3: [None]}, 5.0), (2 + 3 + 5) / 3 - 2)
    near(stats.sensitivity({1: [2.0], 2: [9.0]}, 5.0), 3.5 - 2)
    assert stats.sensitivity({1: [2.0]}, 5.0) is None


# ---- runs


def made_run(directory, steps, **options):
    directory.mkdir(parents=True)
    info = {"options": {"steps": steps, "lr": 0.1, **options}, "data_fingerprint": "5"}
    (directory / "run.json").write_text(json.dumps(info))


def test_the_state_of_a_run_follows_from_its_directory(tmp_path):
    run = tmp_path / "r"
    assert run_directory.state(run, 5) == ("new", 0)
    made_run(run, 5)
    assert run_directory.state(run, 5) == ("begun", 0)
    log = run / "log.jsonl"
    log.write_text('{"kind": "train", "step": 4, "tokens": 4, "loss": 1}\n{"kind": "train", "step": 5, "lo')
    assert run_directory.state(run, 5) == ("begun", 4)
    log.write_text('{"kind": "train", "step": 5, "tokens": 5, "loss": 1}\n')
    assert run_directory.state(run, 5) == ("begun", 5)  # its checkpoint is not there yet
    with open(log, "a") as f:  # the records of many layers follow the step
        f.write(('{"kind": "stats", "step": 5, "layer": 1, "logit_max": 1}\n') * 2000)
    assert run_directory.state(run, 5) == ("begun", 5)
    run_directory.checkpoint(run, 5).mkdir(parents=True)
    (run_directory.checkpoint(run, 5) / "trainer_state.json").write_text("{}")
    assert run_directory.state(run, 5) == ("done", 5)
    with open(log, "a") as f:
        f.write('{"kind": "event", "step": 5, "what": "stopped", "why": "Terminated"}\n')
    assert run_directory.state(run, 5) == ("begun", 5)  # its last validation was abandoned
    with open(log, "a") as f:
        f.write('{"kind": "event", "step": 5, "what": "start", "changed": []}\n{"kind": "val", "step": 5, "loss": 1}\n')
    assert run_directory.state(run, 5) == ("done", 5)
    log.write_text(
        '{"kind": "train", "step": 3, "tokens": 3, "loss": null}\n'
        '{"kind": "event", "step": 3, "what": "stopped", "why": "not_finite"}\n'
    )
    assert run_directory.state(run, 5) == ("diverged", 3)
    with open(log, "a") as f:
        f.write('{"kind": "event", "step": 3, "what": "start", "changed": []}\n')
    assert run_directory.state(run, 5) == ("begun", 3)  # it was resumed
    assert not run_directory.locked(run)


def resumed(first, *starts):
    """run.json of a run with later starts (step, {option: new value})."""
    entries = [{"step": 0, "changed": []}] + [
        {"step": step, "changed": [{"name": k, "old": None, "new": v} for k, v in new.items()]} for step, new in starts
    ]
    return {"options": first, "data_fingerprint": "5", "starts": entries}


def test_the_option_history_follows_from_the_starts():
    run = resumed({"steps": 5, "lr": 0.1}, (3, {"lr": 0.2}), (7, {"steps": 9}))
    assert option_history.history(run) == [
        (0, {"steps": 5, "lr": 0.1}),
        (3, {"steps": 5, "lr": 0.2}),
        (7, {"steps": 9, "lr": 0.2}),
    ]
    assert option_history.values(option_history.history(run), "lr") == [(0, 0.1), (3, 0.2)]
    # a start without a checkpoint is discarded with its changes
    run = resumed({"steps": 5, "lr": 0.1}, (3, {"lr": 0.2}), (6, {"lr": 0.3}), (3, {"lr": 0.1}))
    assert option_history.values(option_history.history(run), "lr") == [(0, 0.1)]
    run = resumed({"steps": 5, "lr": 0.1}, (0, {"lr": 0.2}), (0, {}))
    assert option_history.values(option_history.history(run), "lr") == [(0, 0.1)]
    run = resumed({"steps": 5, "lr": 0.1}, (0, {"lr": 0.2}))
    assert option_history.history(run) == [(0, {"steps": 5, "lr": 0.2})]
    run = resumed({"steps": 5, "gemm": "bf16"}, (3, {"gemm": "fp8"}), (4, {"matmul-dtype": "fp32"}))  # earlier names
    entries = option_history.history(run)
    assert option_history.values(entries, "matmul-dtype") == [(0, "bf16"), (3, "fp8"), (4, "fp32")]
    first = {"steps": 10, "total-batch": 4, "lr": 0.1, "seed": 1, "attention": "baseline"}
    run = runs.Run("run", "baseline", 1, 0.1, resumed(first, (6, {"total-batch": 16})))
    assert [run.tokens_at(step) for step in (6, 7, 10)] == [24, 40, 88]


def test_a_start_with_other_data_is_a_difference_and_another_length_costs_its_own():
    options = {"steps": 10, "train-data": "a", "total-batch": 4}
    moved = resumed(options, (6, {"train-data": "b"}), (8, {"train-data": "c"}))
    other = resumed(options, (6, {"train-data": "b"}), (8, {"train-data": "c"}))
    for run, prints in ((moved, "112"), (other, "122")):
        run["data_fingerprint"], starts = prints[0], run["starts"]
        for start, fingerprint, flops in zip(starts, prints, (10, 20, 30)):
            start.update(data_fingerprint=fingerprint, model={"flops_per_token": flops})
    assert option_history.differences(moved, moved) == []
    assert option_history.differences(moved, other, ("A", "B"))[-1] == (
        "the training data: fingerprint 1 then 2 after step 8 in A, 1 then 2 after step 6 in B"
    )
    renamed = resumed(options, (6, {"train-data": "x"}), (8, {"train-data": "y"}))
    for start, of in zip((renamed, *renamed["starts"]), (moved, *moved["starts"])):
        start["data_fingerprint"] = of["data_fingerprint"]
    assert option_history.differences(moved, renamed) == []
    moved["model"] = {"flops_per_token": 10}
    assert runs.Run("run", "baseline", 1, 0.1, moved).flops_per_token == 0.6 * 10 + 0.2 * 20 + 0.2 * 30
    moved["starts"].append({"step": 6, "changed": [], "model": {"flops_per_token": 50}})
    assert runs.Run("run", "baseline", 1, 0.1, moved).flops_per_token == 0.6 * 10 + 0.4 * 50


def test_a_changed_option_is_a_difference_with_its_step():
    plain = resumed({"steps": 9, "lr": 0.1, "beta2": 0.9})
    both = [resumed({"steps": 9, "lr": lr, "beta2": 0.9}, (4, {"beta2": 0.99})) for lr in (0.1, 0.2)]
    assert option_history.differences(plain, both[0], ("A", "B")) == [
        "--beta2: 0.9 in A, 0.9 then 0.99 after step 4 in B"
    ]
    assert option_history.differences(*both) == []  # the same change in both; another rate is no difference
    lowered = resumed({"steps": 9, "lr": 0.1, "beta2": 0.9}, (4, {"lr": 0.05}))
    assert option_history.differences(plain, lowered, ("A", "B")) == ["--lr: 0.1 in A, 0.1 then 0.05 after step 4 in B"]
    later = resumed({"steps": 9, "lr": 0.1, "beta2": 0.9}, (5, {"lr": 0.05}))
    assert option_history.differences(lowered, later, ("A", "B")) == [
        "--lr: 0.1 then 0.05 after step 4 in A, 0.1 then 0.05 after step 5 in B"
    ]


def validated(*windows, fingerprint="7", path="d"):
    """option_history.validations() of a run with validations of so many windows, five steps apart."""
    val = [{"kind": "val", "step": 5 * i, "windows": n, "data_fingerprint": fingerprint} for i, n in enumerate(windows)]
    return option_history.validations({"options": {"val-data": path}}, val)


WINDOWS = "windows of validation (--val-steps times --batch-size)"


def test_validations_with_other_windows_are_not_compared():
    same = lambda a, b: option_history.validation_differences(a, b, ("A", "B"))
    assert same(validated(8), validated(8, path="elsewhere")) == []
    assert same(validated(8), validated(8, fingerprint="6")) == ["fingerprint of the validation data: 7 in A, 6 in B"]
    assert same(validated(8), validated(16)) == [f"{WINDOWS}: 8 in A, 16 in B"]
    assert same(validated(8), validated()) == []  # it has just started
    assert same(validated(8), validated(path=None)) == ["--val-data: given in A, none in B"]
    assert same(validated(path=None), validated(path=None)) == []
    assert same(validated(8), validated(8, 8, 16)) == [f"{WINDOWS}: 8 in A, 8 then 16 at step 10 in B"]


def test_differences_that_prevent_a_comparison_are_listed():
    a = {"options": {"train-data": "x", "steps": 5, "beta2": 0.95}, "data_fingerprint": "5"}
    same = {"options": {"train-data": "y", "steps": 5, "beta2": 0.95, "lr": 1}, "data_fingerprint": "5"}
    assert option_history.differences(a, same) == []
    other = {"options": {"train-data": "x", "steps": 6, "beta2": 0.95}, "data_fingerprint": "6"}
    found = option_history.differences(a, other, ("A", "B"))
    assert found == ["--steps: 5 in A, 6 in B", "the training data: fingerprint 5 in A, 6 in B"], found
    short, long = ({"options": {"steps": n, "warmup": min(100, n // 10)}} for n in (500, 2000))
    assert option_history.differences(short, long, ignored={"steps"}) == []  # the default of both
    for name, default in (("optimizer", "adamw"), ("base-width", 0), ("z-loss", 0), ("rollback", None)):
        same, other = ({"options": {**a["options"], name: value}} for value in (default, 9))
        assert option_history.differences(a, same) == [], name  # an older trainer did not record it
        assert option_history.differences(a, other, ("A", "B")) == [
            f"--{name}: {option_history.shown(default)} in A, 9 in B"
        ]


# ---- the runner, with the trainer


@pytest.fixture
def place(tmp_path):
    """A directory with a small corpus."""
    (tmp_path / "corpus").mkdir()
    text_shard(tmp_path / "corpus/train_000000.bin", 60000, 1)
    text_shard(tmp_path / "corpus/val_000000.bin", 6000, 7000)
    (tmp_path / "corpus/corpus.json").write_text('{"format": 1, "vocab_size": 256}')
    return tmp_path


SMALL = """title = small
seeds = 1 2
tokens = 20K
total-batch = 128
lr = 1e-2
train-data = corpus
val-data = corpus
layers = 2
hidden = 32
heads = 2
kv-heads = 1
head-dim = 16
ffn = 48
seq-len = 64
batch-size = 2
warmup = 2
val-steps = 4
validations = 4
statistics = 2
checkpoints = 4
[arm baseline]
attention = baseline
[arm diff_v2]
attention = diff_v2
match = baseline
"""
ONE_SEED = SMALL.replace("seeds = 1 2", "seeds = 1")
ONE_ARM = ONE_SEED.partition("[arm diff_v2]")[0]


def lab(place, *words, plan=SMALL, jobs="2", **popen):
    (place / "small.plan").write_text(plan)
    defaults = {"--trainer": TRAINER, "--out": place / "out", "--jobs": jobs}
    more = [word for option, value in defaults.items() if option not in words for word in (option, value)]
    command = list(map(str, [sys.executable, HERE, "run", place / "small.plan", *more, *words]))
    if popen:
        return subprocess.Popen(command, cwd=place, text=True, **popen)
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)


def program(place, text):
    """An executable file."""
    path = place / "program"
    path.write_text(text)
    path.chmod(0o755)
    return path


def in_background(place, *words, **more):
    return lab(place, *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)


def train_steps(directory):
    return [r["step"] for r in run_directory.read_log(directory / "log.jsonl") if r["kind"] == "train"]


def test_a_plan_runs_once_and_every_run_is_evaluated(place):
    plan = SMALL
    done = lab(place, plan=plan)
    assert done.returncode == 0, done.stderr + done.stdout
    out = place / "out"
    names = [f"{arm}.lr0.01.seed{seed}" for seed in (1, 2) for arm in ("baseline", "diff_v2")]
    for name in names:
        assert train_steps(out / name) == list(range(1, 158)), name
        measured = json.loads((out / name / "eval.json").read_text())
        assert len(measured["loss_by_position"]) == 64, name
    said = [json.loads((out / n / "run.json").read_text())["model"]["parameters"] for n in names[:2]]
    assert abs(said[0] - said[1]) <= 3 * 32 * 2 / 2, said  # matched to half of the cost of one MLP unit
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != "lab.lock"}
    again = lab(place, plan=plan)
    assert again.returncode == 0 and {p: p.stat().st_mtime_ns for p in before} == before
    # a changed plan does not modify the existing runs
    for other, said in (
        (plan.replace("warmup = 2", "warmup = 3"), "was started with --warmup 2, and the plan has 3"),
        (plan.replace("warmup = 2\n", ""), "was started with --warmup 2, and the plan has none"),
        (SMALL.replace("diff_v2", "diff_v3"), "small.plan:23: [arm diff_v3]: --attention"),
    ):
        expect_error(lab(place, plan=other), 2, said, lines=1)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_a_lab_that_is_killed_at_any_time_continues_bitwise(place, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole")
    random.seed(time.time_ns())
    plan = ONE_SEED.replace("20K", "60K")
    shutil.copytree(place / "corpus", whole / "corpus")
    assert lab(whole, "--no-eval", plan=plan).returncode == 0
    moments, log = [], place / "out" / "diff_v2.lr0.01.seed1" / "log.jsonl"

    def starts():
        return sum(
            line.startswith("+ ") for path in (place / "out").glob("*.out") for line in path.read_text().splitlines()
        )

    for attempt in range(4):
        before = starts()
        process = in_background(place, "--no-eval", plan=plan)
        # a step of one of the two runs; later ones follow a checkpoint
        moments.append(100 * attempt + random.randrange(20, 100))
        deadline = time.time() + 60
        # the log may already be beyond this step; the lab handles signals after it has started a run
        while (
            (len(train_steps(log.parent)) < moments[-1] or starts() == before)
            and process.poll() is None
            and time.time() < deadline
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL if attempt % 2 else signal.SIGTERM)
        assert process.wait() in (0, 3, -9), (process.returncode, moments)
    done = lab(place, "--no-eval", plan=plan)
    assert done.returncode == 0, done.stderr
    for name in ("baseline.lr0.01.seed1", "diff_v2.lr0.01.seed1"):
        assert train_steps(place / "out" / name) == list(range(1, 470)), (name, moments)
        mine, wanted = (
            run_directory.checkpoint(Path(p) / "out" / name, 469) / "model.safetensors" for p in (place, whole)
        )
        assert mine.read_bytes() == wanted.read_bytes(), (name, moments)


@pytest.mark.slow
def test_a_lab_with_a_time_limit_stops_in_time_and_continues_by_seed(place):
    plan, words = SMALL.replace("20K", "200K"), ["--seeds", "1,2"]
    windows, ends, said, minutes = 0, [], "", 0.12
    while windows < 30:
        started = time.time()
        done = lab(place, *words, "--minutes", f"{minutes:.2f}", plan=plan, jobs="1")
        assert time.time() - started < 60 * minutes + 60, done.stdout
        windows, said, minutes = windows + 1, done.stdout, 1.2 * minutes  # on a busy machine no step fits at first
        if done.returncode == 0:
            break
        said += done.stderr
        assert done.returncode == 3 and " of 2 seeds have all arms; the same command continues" in said, said
    assert done.returncode == 0 and windows > 1, (windows, said)
    for seed in (1, 2):
        for arm in ("baseline", "diff_v2"):
            run = place / "out" / f"{arm}.lr0.01.seed{seed}"
            assert train_steps(run) == list(range(1, 1564)) and (run / "eval.json").exists(), run
            ends.append((run / "run.json").stat().st_ctime)
    assert ends == sorted(ends), ends  # one seed's arms, then the next's


def test_a_failed_run_does_not_stop_the_others_and_is_repeated(place):
    blocked = place / "out" / "baseline.lr0.01.seed1"
    blocked.mkdir(parents=True)
    (blocked / "log.jsonl").write_text("")  # a directory that the trainer rejects
    done = lab(place, plan=ONE_SEED)
    expect_error(done, 1, "baseline.lr0.01.seed1 failed")
    assert "without a run.json" in done.stderr, done.stderr
    assert train_steps(blocked.parent / "diff_v2.lr0.01.seed1") == list(range(1, 158))
    (blocked / "log.jsonl").unlink()
    done = lab(place, plan=ONE_SEED)
    assert done.returncode == 0 and train_steps(blocked) == list(range(1, 158)), done.stderr
    (blocked / "eval.json").unlink()
    (run_directory.checkpoint(blocked, 157) / "model.safetensors").write_bytes(b"")
    expect_error(lab(place, plan=ONE_SEED), 1, "baseline.lr0.01.seed1 failed: evaluating: diffv2: ", lines=1)


def test_runs_that_fail_for_the_same_reason_are_one_line(place):
    done = lab(place, "--data", "nowhere")
    expect_error(done, 1, ".seed1 and 3 more failed: diffv2: no file matches 'nowhere'", lines=1)


def test_a_run_that_diverges_is_a_result(place):
    plan = ONE_ARM.replace("lr = 1e-2", "lr = 1e30")
    done = lab(place, plan=plan)
    assert done.returncode == 0 and "1 diverged" in done.stdout, done.stdout + done.stderr
    steps = train_steps(place / "out" / "baseline.lr1e+30.seed1")
    again = lab(place, plan=plan)
    assert again.returncode == 0 and train_steps(place / "out" / "baseline.lr1e+30.seed1") == steps


@pytest.mark.slow
def test_gpus_are_allocated_and_released(place, monkeypatch):
    program(
        place,
        f'#!/bin/sh\necho "$(date +%s%N) begin $CUDA_VISIBLE_DEVICES" >>{place}/used\nshift 6\n"$@"\nstatus=$?\n'
        f'echo "$(date +%s%N) end $CUDA_VISIBLE_DEVICES" >>{place}/used\nexit $status\n',
    ).rename(place / "mpirun")
    plan = SMALL.replace("[arm baseline]", "ranks = 2\n[arm baseline]")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        patch.setenv("CUDA_VISIBLE_DEVICES", "9,7,5,3,GPU-1")
        done, few = (lab(place, "--gpus", count, plan=plan) for count in ("5", "6"))
    assert done.returncode == 0, done.stderr
    expect_error(few, 2, "--gpus 6: CUDA_VISIBLE_DEVICES has only 5: specify --gpus 5 or fewer", lines=1)
    held, most, begun = set(), 0, 0
    for line in sorted((place / "used").read_text().splitlines()):
        _, what, gpus = line.split()
        gpus = set(gpus.split(","))
        if what == "begin":
            assert len(gpus) == 2 and not gpus & held and gpus <= {*"9753", "GPU-1"}, line
            held, begun = held | gpus, begun + 1
            most = max(most, len(held))
        else:
            held -= gpus
    assert begun == 4 and most == 4 and not held, (begun, most, held)
    expect_error(lab(place, "--gpus", "1", plan=plan), 2, "requires 2 GPUs, and --gpus is 1")


RANKS = ONE_ARM.replace("[arm", "ranks = 2\n[arm").replace("batch-size = 2", "batch-size = 1")


def trainers_of(directory):
    """Processes with the directory in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            pass  # it has ended
    return found


@pytest.mark.full
def test_a_lab_of_two_ranks_saves_its_last_step_when_stopped_or_killed(place, tmp_path_factory):
    whole = tmp_path_factory.mktemp("whole")
    if not shutil.which("mpirun"):
        pytest.skip("no mpirun")
    shutil.copytree(place / "corpus", whole / "corpus")
    # only the last checkpoint, and those of signals
    plan = RANKS.replace("20K", "1500K").replace("checkpoints = 4", "checkpoints = 1")
    small = lab(whole, "--no-eval", plan=RANKS.replace("20K", "2K"))
    assert small.returncode == 0, small.stderr + small.stdout
    said = json.loads((whole / "out/baseline.lr0.01.seed1/run.json").read_text())
    if said["ranks"] == 1:
        pytest.skip("the trainer was built without MPI")
    run, last = place / "out" / "baseline.lr0.01.seed1", 0
    for number, status in ((signal.SIGTERM, 3), (signal.SIGKILL, -9), (signal.SIGTERM, 3)):
        process = in_background(place, "--no-eval", plan=plan)
        try:
            wait_until(lambda: len(train_steps(run)) > last + 20)
            process.send_signal(number)
            assert process.wait(timeout=130) == status, process.returncode
            wait_until(lambda: not trainers_of(place))  # after SIGKILL the kernel signals the launcher
        finally:
            process.kill()
        steps = train_steps(run)
        last = max(steps)
        assert last < 11719 and steps == list(range(1, last + 1)), (number, last)
        kept = sorted(p.name for p in run.glob("checkpoints/*"))
        assert run_directory.checkpoint(run, last).exists(), (number, last, kept)


def test_a_missing_mpirun_is_reported_before_any_run_starts(place, monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    expect_error(lab(place, plan=RANKS), 2, "mpirun, which starts the ranks of a run, is missing", lines=1)
    assert not (place / "out").exists()


def test_a_dry_run_predicts_the_hours_of_all_ranks(place):
    hours = []
    for words in (("--seeds", "1"), ("--seeds", "1,2"), ("--seeds", "1", "--device", "A100-SXM4-80GB")):
        done = lab(place, "--dry-run", "--arms", "baseline", *words)
        found = re.search(r"^GPU hours on \S+: (\S+) to (\S+), predicted", done.stdout, re.M)
        hours.append(list(map(float, found.groups())))
        assert done.returncode == 0 and not (place / "out").exists() and 0 < hours[-1][0] < hours[-1][1], done.stdout
    assert all(abs(two / one - 2) < 0.02 and slow > one for one, two, slow in zip(*hours)), hours


@pytest.mark.full
def test_errors_are_one_line(place):
    file, out = place / "file", place / "out"
    file.write_text("text")
    for words, status, said in (
        (("--out", file), 1, "is a file, must be a directory"),
        (("--out", file / "below"), 1, "Not a directory"),
        (("--out", ""), 2, "--out '': the value is empty"),
        (("--seeds", "1,1"), 2, "--seeds 1,1: must be different integers, separated by commas"),
        (("--seeds", "3", "--seeds", "4"), 2, "--seeds is specified more than once"),
        (("--arms", ""), 2, "--arms '': the value is empty"),
        (("--dry-run", "--device", "H900"), 2, "--device 'H900' is unknown"),
        (("--trainer", place), 2, "Permission denied"),
        (("--trainer", program(place, "\x7fno program\n\0")), 2, "Exec format error"),
    ):
        expect_error(lab(place, *words), status, said, lines=1)
        assert not out.exists() and file.read_text() == "text"
    for name, text, said in (
        ("lab.json", "{", "lab.json: not JSON"),
        ("lab.json", "[]", "lab.json: it is not an object"),
        ("lab.json", "{}", "lab.json: it has no plan"),
        ("baseline.lr0.01.seed1/run.json", "", "run.json: not JSON"),
        ("baseline.lr0.01.seed1/run.json", '{"options": 3}', "options is not an object"),
    ):
        shutil.rmtree(out, ignore_errors=True)
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(text)
        expect_error(lab(place), 1, said, lines=1)
        assert (out / name).read_text() == text


def test_a_run_that_was_resumed_with_other_options_is_an_error(place):
    plan = ONE_SEED.replace("20K", "2K")
    assert lab(place, "--no-eval", "--arms", "baseline", plan=plan).returncode == 0
    path = place / "out/baseline.lr0.01.seed1/run.json"
    changed = [{"name": "lr", "old": 0.01, "new": 0.5}]
    starts = [{"step": 0, "changed": []}, {"step": 8, "changed": changed}]
    rewrite(path, lambda info: info.update(starts=starts))
    done = lab(place, "--no-eval", "--arms", "baseline", plan=plan)
    expect_error(done, 2, "was resumed after step 8 with --lr 0.5, and the plan has 0.01")


def test_two_labs_cannot_share_a_directory(place):
    first = in_background(place, plan=SMALL.replace("20K", "10M"))
    wait_until(lambda: (place / "out/lab.lock").exists() and (place / "out/lab.json").exists())
    second = lab(place, plan=SMALL.replace("20K", "10M"))
    expect_error(second, 1, "another lab is running in it")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=130) == 3


@pytest.mark.full
def test_the_plans_of_the_repository_are_valid_at_every_size():
    trainer = Trainer(TRAINER)
    for path in sorted((ROOT / "scripts/lab/plans").glob("*.plan")):
        plan = plans.parse(path.read_text(), path.name, trainer.options)
        for size in plan.sizes:
            runs = plans.expand(plan, trainer.options, size)
            by_arm = {run.arm: run for run in runs}
            for arm, run in by_arm.items():
                options = run.options
                if run.match:
                    wanted = trainer.dry_run(by_arm[run.match].options).active
                    options = trainer.match(options, wanted)
                    got = trainer.dry_run(options).active
                    assert abs(got / wanted - 1) < 2e-3, (path.name, size, arm, got, wanted)
                trainer.dry_run(options)


def test_the_lab_matches_parameters_as_the_trainer_does():
    trainer = Trainer(TRAINER)
    base = {"preset": "tiny", "attention": "baseline", "train-data": "x"}
    mine = trainer.match({**base, "attention": "diff_v2"}, trainer.dry_run(base).active)
    theirs = trainer.dry_run({**base, "attention": "diff_v2", "match-params": True}).active
    assert trainer.dry_run(mine).active == theirs


def test_experts_are_matched_by_their_width_and_active_parameters():
    trainer = Trainer(TRAINER)
    dense = trainer.dry_run({"preset": "tiny", "attention": "baseline"})
    assert dense.active == dense.parameters
    experts = {"preset": "moe-tiny", "attention": "diff_v2", "expert-ffn": "300"}
    matched = trainer.match(experts, dense.active)
    cost = trainer.dry_run(matched)
    assert {key for key in matched if matched[key] != experts[key]} == {"expert-ffn"}, matched
    assert abs(cost.active - dense.active) <= 4 * 2 * 3 * 128 / 2, (cost, dense)  # 4 layers, 2 experts, half a unit
    assert cost.parameters > 2 * cost.active
