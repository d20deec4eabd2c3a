"""test_transfer.py: tests of plans over widths and depths, of the coordinate check and of `lab suggest`."""

import contextlib
import io
import itertools
import json
import math
import random
from types import SimpleNamespace

import pytest
from lab import coordinates, fit, plan as plans, stats, suggest
from lab.testing import TRAINER, expect_error, has, raises, run_lab, text_shard
from lab.trainer import Trainer

PLAN = """seeds = 1
tokens = 1K
total-batch = 128
batch-size = 4
seq-len = 32
lr = 4e-3
warmup = 0
schedule = constant
train-data = text.bin
vocab = 256
layers = 2
hidden = 32
heads = 2
kv-heads = 1
head-dim = 16
ffn = 88
reference = standard.w1
widths = 1 4
depths = 1 4
[arm standard]
attention = diff_v2
[arm completep]
label = C
attention = diff_v2
parametrization = completep
base-width = {hidden}
base-depth = {layers}
"""


def test_a_plan_makes_an_arm_of_each_width_and_depth():
    trainer = Trainer(TRAINER)
    plan = plans.parse(PLAN, "x.plan", trainer.options)
    runs = {run.arm: run.options for run in plans.expand(plan, trainer.options)}
    assert list(runs) == [f"{arm}.{scale}" for arm in ("standard", "completep") for scale in ("w1", "w4", "d1", "d4")]
    of = lambda arm: " ".join(runs[arm][key] for key in ("layers", "hidden", "heads", "kv-heads", "head-dim", "ffn"))
    assert of("standard.w4") == "2 128 8 4 16 352" and of("standard.d4") == "8 32 2 1 16 88", runs
    assert (runs["completep.w4"]["base-width"], runs["completep.w4"]["base-depth"]) == ("32", "2")
    assert plan.arms["completep.d4"]["label"] == "C, depth x4"
    for text, said in (("hidden = 32", "x.plan:20: widths requires whole numbers of hidden"), ("layers = 2", "depths")):
        names = "hidden heads kv-heads ffn".split() if text.startswith("hidden") else ["layers"]
        rest = PLAN.replace("{hidden}", "8").replace("{layers}", "2").splitlines()
        rest = ["# " + line if line.split(" ")[0] in names else line for line in rest]
        with raises(plans.PlanError, said):
            plans.expand(plans.parse("\n".join(rest), "x.plan", trainer.options), trainer.options)


@pytest.mark.full
def test_activations_keep_their_size_with_completep_and_grow_without(tmp_path):
    # The slopes of the parametrization's table, at widths 32 and 128 and depths 2 and 8 after 4 steps.
    text_shard(tmp_path / "text.bin", 4000)
    (tmp_path / "x.plan").write_text(PLAN.replace("seeds = 1", "seeds = 1\ncoordinates = 4"))
    done = run_lab("run", "./x.plan", "--trainer", TRAINER, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out/coordinates.png").stat().st_size > 1000
    slopes = json.loads((tmp_path / "out/coordinates.json").read_text())["slopes"]["standard"]
    for kind in ("q", "lambda", "hidden", "x", "logits"):
        assert slopes["width"][kind]["4"] > 0.4, (kind, slopes["width"][kind])
    assert slopes["depth"]["x"]["4"] > 0.3, slopes["depth"]
    (tmp_path / "x.plan").write_text(
        (tmp_path / "x.plan").read_text().replace("train-data = text.bin", "train-data = no.bin")
    )
    expect_error(
        run_lab("run", "./x.plan", "--trainer", TRAINER, "--out", tmp_path / "no", cwd=tmp_path), 1, "no.bin", 1
    )


def test_the_best_rate_is_the_minimum_of_a_parabola():
    points = [(rate, 2 + (math.log(rate) - math.log(3e-3)) ** 2) for rate in (1e-3, 2e-3, 8e-3, 16e-3)]
    rate, loss = suggest.minimum(points)
    assert abs(rate / 3e-3 - 1) < 1e-9 and abs(loss - 2) < 1e-9, (rate, loss)
    assert suggest.minimum(points[2:]) == (8e-3, None) and suggest.minimum(points[:1]) == (1e-3, None)
    assert abs(coordinates.slope([(1, 3), (2, 6), (4, 12)]) - 1) < 1e-12
    assert coordinates.slope([(1, 3), (2, 0)]) is None and coordinates.slope([(1, 3), (1, 4)]) is None


def test_a_sweep_has_the_seeds_that_have_ended_at_all_rates():
    run = lambda lr, seed, state, loss: SimpleNamespace(lr=lr, seed=seed, state=state, final_loss=lambda _: loss)
    runs = [run(1, 1, "done", 3.0), run(2, 1, "done", 2.0), run(4, 1, "diverged", None), run(1, 2, "done", 9.0)]
    runs.append(run(2, 2, "begun", None))
    study = SimpleNamespace(rates=lambda: [1, 2, 4, 8], by_eval=lambda: False, of_labs=lambda _: [])
    study.runs_of = lambda arm, lr: [run for run in runs if run.lr == lr]
    assert suggest.sweep(study, "a") == [(1, 3.0), (2, 2.0)], suggest.sweep(study, "a")
    muon = {"optimizer": "muon", "muon-split": "pair", "parametrization": "completep", "base-width": 8, "beta1": 0.8}
    shape = {"attention": "diff_v2", "hidden": 64, "layers": 2, "head-dim": 16}
    found = suggest.options_of(SimpleNamespace(options={**shape, **muon}), 0.01, "small")
    assert (found["base-width"], found["base-depth"], found["beta1"]) == ("8", "2", "0.8"), found
    assert (found["optimizer"], found["muon-split"], "z-loss" in found) == ("muon", "pair", False), found


@pytest.mark.full
def test_suggest_prints_options_that_the_trainer_accepts(tmp_path):
    text_shard(tmp_path / "text.bin", 4000)
    text_shard(tmp_path / "val.bin", 2000)
    swept = PLAN.replace("lr = 4e-3", "lr = 1e-4 1e-2 3").replace("widths = 1 4\ndepths = 1 4", "widths = 1")
    swept = swept.replace(
        "[arm standard]", "val-data = val.bin\nval-steps = 4\nvalidations = 1\ncheckpoints = 1\n[arm standard]"
    )
    (tmp_path / "x.plan").write_text(swept)
    done = run_lab(
        "run", "./x.plan", "--trainer", TRAINER, "--out", tmp_path / "out", "--no-eval", "--jobs", "1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for arm in ("standard.w1", "completep.w1"):
        command = ["suggest", tmp_path / "out", "--arm", arm, "--trainer", TRAINER]
        done = run_lab(*command, "--preset", "small")
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("--preset"))
        base = "--parametrization completep --base-width 32 --base-depth 2 --base-head-dim 16 --lr 0.0"
        assert f"--preset small --attention diff_v2 {base}" in line, line
    expect_error(run_lab(*command, "--preset", "tyni"), 1, "--preset 'tyni' is not accepted", 1)
    expect_error(run_lab("suggest", tmp_path / "out", "--preset", "small"), 2, "--preset requires --arm ARM", 1)
    expect_error(run_lab("suggest", tmp_path / "out", "--arm", "x"), 2, "--arm x: no such arm", 1)
    expect_error(run_lab("suggest", tmp_path / "nothing"), 1, "nothing: no such directory", 1)
    expect_error(run_lab("suggest"), 2, "RUNS", 1)
    run = tmp_path / "out/standard.w1.lr0.01.seed1/run.json"
    run.write_text(run.read_text().replace('"z-loss": 0', '"z-loss": 0.5'))
    expect_error(run_lab("suggest", tmp_path / "out"), 1, "not comparable: --z-loss: 0 in standard.w1.lr0.0001", 1)


LAWS = {"baseline": (1.7, 40, 0.35, 60, 0.3), "diff_v2": (1.65, 45, 0.37, 60, 0.3)}
WHOLE = "steps total-batch layers hidden heads kv-heads head-dim ffn seq-len vocab batch-size".split()
SHARED = dict.fromkeys(WHOLE, 1) | dict.fromkeys("warmup min-lr-ratio weight-decay beta1 beta2 grad-clip".split(), 0.1)
SHARED |= {"schedule": "cosine", "gemm": "fp32", "train-data": "c", "val-data": "c", "val-steps": 1, "total-batch": 100}


def made_archive(path, size, length, seeds=3, noise=0.0, **options):
    """Runs of both arms at two rates, of which the second is worse, with losses of LAWS; diff_v2 is 8% larger."""
    lines, hidden = [{"archive": 1, "study": "s"}], 32 * 2**size
    for arm, law in LAWS.items():
        parameters = round(30 * hidden**2 * (1.08 if arm == "diff_v2" else 1))
        for rate, seed in [(rate, seed) for rate in (0.01, 0.02) for seed in range(seeds)]:
            steps = length * 30 * hidden**2 // 100
            of = SHARED | {"attention": arm, "lr": rate, "seed": seed, "hidden": hidden, "steps": steps} | options
            loss = fit.loss_at(law, parameters, steps * 100) + (rate - 0.01) * 30
            for source in (f"{seed} {size} {length}", f"{seed} {size} {length} {arm}"):
                loss += random.Random(source).gauss(0, noise)
            line = {"name": f"{arm}.lr{rate}.seed{seed}", "info": {"model": {"parameters": parameters}}, "options": of}
            line["numbers"] = {"arm": arm, "rate": rate, "seed": seed, "state": "done"}
            line["log"] = {"val": [{"kind": "val", "step": steps, "loss": loss}]}
            lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def fitted(*words):
    """The cells of the tables of `lab fit`, by row."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert fit.main([*map(str, words)]) == 0
    return [line.strip("| ").split(" | ") for line in said.getvalue().splitlines() if line.startswith("| ")]


def test_trends_of_a_gap_have_the_planted_slopes_and_errors(tmp_path):
    # 2 x 2 places of two seeds, with errors of +-0.01: an orthogonal design, of which the errors are known.
    gap, arms = lambda n, each: 0.1 + 0.02 * math.log2(n) - 0.03 * math.log2(each), {"a": {}, "b": {}}
    for n, each in itertools.product((1000, 8000), (20, 40)):
        arms["a"][n, each] = (n, n * each, {1: 1.0, 2: 2.0, 3: 9.0})
        arms["b"][n, each] = (1.1 * n, n * each, {1: 1.01 + gap(n, each), 2: 1.99 + gap(n, each)})
    size, length = fit.trends(arms, "a")["b"]
    sd = math.sqrt(8 * 0.01**2 / 5)
    for found, slope, step in ((size, 0.02, 3), (length, -0.03, 1)):
        half = stats.t_quantile(0.975, 5) * sd / math.sqrt(8 * (step / 2) ** 2)
        assert abs(found.mean - slope) < 1e-9 and abs(found.half - half) < 1e-9, (found, slope, half)
    assert fit.trends({arm: dict(list(of.items())[:2]) for arm, of in arms.items()}, "a") == {}  # one size
    assert fit.trends({"a": arms["a"], "b": {(7, 7): arms["b"][1000, 20]}}, "a") == {}, "no common place"


def test_a_fit_finds_known_exponents_and_extrapolates_the_gap(tmp_path):
    fit.REPLICATES = 100
    wanted = {
        n: fit.loss_at(LAWS["diff_v2"], n, 20 * n) - fit.loss_at(LAWS["baseline"], n, 20 * n) for n in fit.TARGETS
    }
    ladder = [(size, length) for size in range(4) for length in (20, 60)]
    rows = fitted(*(made_archive(tmp_path / f"{a}-{b}.jsonl", a, b, seeds=1) for a, b in ladder))
    for arm, row in zip(LAWS, rows[1:3]):
        assert all(abs(float(x) / y - 1) < 1e-3 for x, y in zip(row[3:], LAWS[arm])), (row, LAWS[arm])
    assert row[:3] == ["diff_v2", "8", "0.00"] and len(rows) == 4 + 8 + 2 + 2, rows
    n, d = 1.08 * 30 * 32**2, 20 * 30 * 32**2 // 100 * 100
    known = fit.loss_at(LAWS["diff_v2"], n, d) - fit.loss_at(LAWS["baseline"], n / 1.08, d)
    assert rows[4][1:] == ["33.2k", "614k", "18.5", f"{known:+.4f}, one seed", f"{known:+.4f}"], rows[4]
    for row, gap in zip(rows[-4:-2], wanted.values()):
        assert row[4] == "–" and abs(float(row[5]) - gap) < 2e-4, (row, gap)
    noisy = [made_archive(tmp_path / f"{a}-{b}.jsonl", a, b, noise=0.004) for a, b in ladder]
    rows = fitted(*noisy)
    for row, gap in zip(rows[-4:-2], wanted.values()):
        low, high = map(float, row[5].partition(" ")[2].strip("[]").split(","))
        # an interval has four standard errors: the error is below four of them
        assert abs(gap - (low + high) / 2) < high - low < 0.05 and high - low > 0.005, (row, gap)
    made_archive(tmp_path / "other.jsonl", 3, 90, vocab=2)
    alone = tmp_path / "alone.jsonl"
    alone.write_text("".join(line for line in open(noisy[0]) if "diff_v2" not in line))
    for words, status, said in (
        (noisy[:4], 1, "baseline has finished runs of 2 sizes and 4 lengths, 4 in total: a fit requires 3 sizes, 3 l"),
        (noisy[::2], 1, "4 in total: a fit requires 3 sizes, 3 lengths and 6 in total"),
        ([*noisy, tmp_path / "other.jsonl"], 2, "the runs are not comparable: --vocab: 1 in "),
        ([alone], 1, "baseline is the only arm: a gap requires two"),
        ([*noisy, tmp_path / "none"], 1, "none: no such directory"),
    ):
        error = io.StringIO()
        with contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
            fit.main([*map(str, words)])
        assert ended.value.code == status and error.getvalue().count("\n") == 1, error.getvalue()
        has(error.getvalue(), said)
