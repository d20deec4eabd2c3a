"""test_tasks.py: tests of the tables and figures of multiple-choice tasks. test_lab.py --report runs them."""

import json
import math
import tempfile
from pathlib import Path

from . import test_report as made
from .testing import expect_error

tests = []
HALF = 4.302652730 / math.sqrt(3)  # of a 95% t interval over 3 seeds, by their deviation
NORMAL = 1.959963985


def test(function):
    tests.append(function)
    return function


def add_scores(run, name, scores, **more):
    """Adds records of a task to a log: {step: accuracy}."""
    log = run / "log.jsonl"
    record = {"kind": "choices", "name": name, "examples": 400, "accuracy_se": 0.01, "chance": 0.25}
    record |= {"accuracy_norm": 0.5, "bits_per_byte": 1.5, "norm": "characters", "fingerprint": "5"}
    records = [{**record, "step": step, "accuracy": score, **more} for step, score in scores.items()]
    log.write_text("".join(json.dumps(r) + "\n" for r in records) + log.read_text())


def scored_lab(place):
    """three: the baseline is above chance, DIFF V2 0.04 better. coin: all runs have 0.26. word: no chance."""
    lab = made.made_lab(place)
    for seed in (1, 2, 3):
        accuracy = 0.28 + 0.02 * seed
        for arm, gap in (("baseline", 0), ("diff_v2", {1: 0.03, 2: 0.05, 3: 0.04}[seed])):
            run = lab / f"{arm}.lr0.001.seed{seed}"
            bits = 1.5 + 0.1 * seed - (0.2 if gap else 0)
            add_scores(run, "three", {0: 0.2, 100: 0.3, made.STEPS: accuracy + gap}, bits_per_byte=bits)
            add_scores(run, "coin", {made.STEPS: 0.26}, accuracy_se=0.02, accuracy_norm=0.24, norm="tokens")
            more = {"chance": 0, "accuracy_norm": None, "bits_per_byte": 3 - gap}
            add_scores(run, "word", {made.STEPS: 0.4 - gap}, **more)
    return lab


@test
def scores_of_tasks_have_gaps_by_seed_and_are_compared_with_chance():
    with tempfile.TemporaryDirectory() as place:
        page, results, said = made.whole_report(scored_lab(place))
        rows = {(row["task"], row["arm"]): row for row in results["tasks"]}
        assert [*rows] == [(task, arm) for task in ("word", "coin", "three") for arm in ("baseline", "diff_v2")], [
            *rows
        ]
        row = rows["three", "baseline"]
        made.near(row["accuracy"]["mean"], 0.32)
        made.near(row["accuracy"]["half"], 0.02 * HALF)
        made.near(row["half_over_examples"], 0.01 * NORMAL)
        assert row["accuracy_gap"] is None and row["against_chance"] == "above chance", row
        row = rows["three", "diff_v2"]
        made.near(row["accuracy_gap"]["mean"], 0.04)
        made.near(row["accuracy_gap"]["half"], 0.01 * HALF)
        made.near(row["bits_per_byte_gap"]["mean"], -0.2)
        assert row["examples"] == 400 and row["seeds"].keys() == {"1", "2", "3"}, row
        ps = [rows[task, "diff_v2"]["accuracy_gap"] for task in ("word", "coin", "three")]
        made.near(ps[0]["p_holm"], 3 * ps[0]["p"])  # the smallest of three, with that of "three"
        for arm in ("baseline", "diff_v2"):  # the seeds agree, but 400 examples do not show a difference of 0.01
            row = rows["coin", arm]
            assert row["accuracy"]["half"] == 0 and row["against_chance"] == "at chance", row
        assert rows["word", "diff_v2"]["accuracy_norm"] is None
        line = "| three | DIFF V2 | 400 | 25.0 | 36.0 [29.4, 42.6] |"
        assert line in said and "| above chance | +4.0 [+1.5, +6.5] |" in said and "| 50.0 [50.0, 50.0] |" in said, said
        assert "| 26.0 [26.0, 26.0] |" in said and "| at chance | reference |" in said, said
        assert "<h2 id=tasks>" in page and "24.0 [24.0, 24.0] by tokens" in page and "<a href=#tasks>" in page


@test
def the_figure_of_tasks_has_the_means_by_step_and_the_line_of_chance():
    from . import evaluation_figures
    from . import study as studies

    with tempfile.TemporaryDirectory() as place:
        lab = scored_lab(place)
        shown = evaluation_figures.task_figure(studies.load([lab]))
        views = {view["label"]: view["traces"] for view in shown["views"]}
        assert [*views] == [f"{t}{more}" for t in ("word", "coin", "three") for more in ("", ", bits per byte")], [
            *views
        ]
        baseline, other, chance = views["three"]
        assert (baseline["x"], other["arm"]) == ([0, 100, made.STEPS], "diff_v2"), (baseline, other)
        for y, wanted in zip(baseline["y"] + other["y"][-1:], (0.2, 0.3, 0.32, 0.36), strict=True):
            made.near(y, wanted)
        made.near(baseline["error"][2], 0.02 * HALF)
        assert (chance["name"], chance["x"], chance["y"]) == ("by chance", [0, made.STEPS], [0.25, 0.25]), chance


@test
def a_run_that_continues_has_the_figure_of_tasks_and_no_scores():
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        made.made_run(run, "baseline", 0.001, 1, 2.0, steps=100)
        add_scores(run, "three", {0: 0.2, 100: 0.3, made.STEPS: 0.4})  # its last checkpoint is not complete
        page, results, said = made.whole_report(run)
        assert results["tasks"] is None and "## Tasks" not in said and "Tasks: accuracy by step" in page
        whole = Path(place) / "whole"
        made.made_run(whole, "baseline", 0.001, 1, 2.0)
        add_scores(whole, "three", {made.STEPS: 0.265})
        add_scores(whole, "low", {made.STEPS: 0.2})
        low, row = made.whole_report(whole)[1]["tasks"]
        assert row["accuracy"]["half"] is None and row["against_chance"] == "at chance", row  # by its 400 examples
        assert low["against_chance"] == "below chance", low
        (whole / "log.jsonl").write_text((whole / "log.jsonl").read_text().replace('"accuracy_se": 0.01, ', ""))
        assert made.whole_report(whole)[1]["tasks"][1]["against_chance"] is None  # no interval


@test
def tasks_of_other_files_are_not_compared():
    with tempfile.TemporaryDirectory() as place:
        lab = scored_lab(place)
        add_scores(lab / "diff_v2.lr0.001.seed2", "three", {50: 0.2}, fingerprint="6")
        done = made.report(lab, "--no-png")
        expect_error(
            done, 2, "task three: fingerprint 5 in baseline.lr0.001.seed1, 6 in diff_v2.lr0.001.seed2", lines=1
        )
