"""test_tasks.py: tests of the tables and figures of multiple-choice tasks and needles."""

import json
import math

import pytest

from . import evaluation_figures, evaluations, study as studies, synthetic, test_report as made
from .testing import expect_error, has, rewrite

HALF = 4.302652730 / math.sqrt(3)  # of a 95% t interval over 3 seeds, by their deviation
NORMAL = 1.959963985


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


def test_scores_of_tasks_have_gaps_by_seed_and_are_compared_with_chance(tmp_path):
    page, results, said = made.whole_report(scored_lab(tmp_path))
    rows = {(row["task"], row["arm"]): row for row in results["tasks"]}
    assert [*rows] == [(task, arm) for task in ("word", "coin", "three") for arm in ("baseline", "diff_v2")], [*rows]
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
    has(said, "| 26.0 [26.0, 26.0] |", "| at chance | reference |")
    has(page, "<h2 id=tasks>", "24.0 [24.0, 24.0] by tokens", "<a href=#tasks>")


def test_the_figure_of_tasks_has_the_means_by_step_and_the_line_of_chance(tmp_path):
    lab = scored_lab(tmp_path)
    shown = evaluation_figures.task_figure(studies.load([lab]))
    views = {view["label"]: view["traces"] for view in shown["views"]}
    assert [*views] == [f"{t}{more}" for t in ("word", "coin", "three") for more in ("", ", bits per byte")], [*views]
    baseline, other, chance = views["three"]
    assert (baseline["x"], other["arm"]) == ([0, 100, made.STEPS], "diff_v2"), (baseline, other)
    for y, wanted in zip(baseline["y"] + other["y"][-1:], (0.2, 0.3, 0.32, 0.36), strict=True):
        made.near(y, wanted)
    made.near(baseline["error"][2], 0.02 * HALF)
    assert (chance["name"], chance["x"], chance["y"]) == ("by chance", [0, made.STEPS], [0.25, 0.25]), chance


def test_a_run_that_continues_has_the_figure_of_tasks_and_no_scores(tmp_path):
    run = tmp_path / "run"
    made.made_run(run, "baseline", 0.001, 1, 2.0, steps=100)
    add_scores(run, "three", {0: 0.2, 100: 0.3, made.STEPS: 0.4})  # its last checkpoint is not complete
    page, results, said = made.whole_report(run)
    assert results["tasks"] is None and "## Tasks" not in said and "Tasks: accuracy by step" in page
    whole = tmp_path / "whole"
    made.made_run(whole, "baseline", 0.001, 1, 2.0)
    add_scores(whole, "three", {made.STEPS: 0.265})
    add_scores(whole, "low", {made.STEPS: 0.2})
    low, row = made.whole_report(whole)[1]["tasks"]
    assert row["accuracy"]["half"] is None and row["against_chance"] == "at chance", row  # by its 400 examples
    assert low["against_chance"] == "below chance", low
    (whole / "log.jsonl").write_text((whole / "log.jsonl").read_text().replace('"accuracy_se": 0.01, ', ""))
    assert made.whole_report(whole)[1]["tasks"][1]["against_chance"] is None  # no interval


def test_tasks_of_other_files_are_not_compared(tmp_path):
    lab = scored_lab(tmp_path)
    add_scores(lab / "diff_v2.lr0.001.seed2", "three", {50: 0.2}, fingerprint="6")
    done = made.report(lab, "--no-png")
    expect_error(done, 2, "task three: fingerprint 5 in baseline.lr0.001.seed1, 6 in diff_v2.lr0.001.seed2", lines=1)


# ---- needles


def wilson(score, n):
    """Wilson's interval as the trainer has it: what a share of n questions has."""
    z = NORMAL
    middle, half = score + z * z / 2 / n, z * math.sqrt(score * (1 - score) / n + z * z / 4 / n / n)
    low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return {"accuracy": score, "low": max(0, low), "high": min(1, high), "exact": score / 2, "chance": 0.25}


def measured(found, near, far):
    """Writes needles of two lengths and depths, `near` at the depth 1 of the shorter one."""
    places = {(8, 0): far, (8, 1): near, (16, 0): far, (16, 1): far}
    cells = [{"length": n, "depth": d, "questions": 100, **wilson(x, 100)} for (n, d), x in places.items()]
    over = sum(places.values()) / 4
    needles = {"needles": 4, "asked": 1, "questions": 400, **wilson(over, 400), "cells": cells}
    return found.update(needles=needles)


def measured_lab(place):
    """The baseline is at chance everywhere; DIFF V2 above it in one cell."""
    lab = made.made_lab(place)
    for seed in (1, 2, 3):
        for arm, near in (("baseline", 0.25), ("diff_v2", 0.6 + 0.05 * seed)):
            rewrite(lab / f"{arm}.lr0.001.seed{seed}" / "eval.json", lambda j: measured(j, near, 0.25))
    return lab


def test_needles_are_compared_with_chance_by_the_wider_interval(tmp_path):
    page, results, said = made.whole_report(measured_lab(tmp_path))
    rows = {(row["task"], row["arm"]): row for row in results["synthetic"]}
    needles = "1 of 4 needles, up to 16 positions"
    verdicts = {key: row["against_chance"] for key, row in rows.items()}
    assert verdicts == {(needles, "baseline"): "at chance", (needles, "diff_v2"): "above chance"}, verdicts
    row = rows[needles, "diff_v2"]
    made.near(row["accuracy"]["mean"], 0.25 + 0.45 / 4)
    made.near(row["accuracy"]["half"], 0.0125 * HALF)
    made.near(row["gap"]["mean"], 0.45 / 4)
    cells = {(c["length"], c["depth"]): c["against_chance"] for c in row["cells"]}
    assert [place for place, verdict in cells.items() if verdict == "above chance"] == [(8, 1)], cells
    made.near(row["gap"]["p_holm"], row["gap"]["p"])
    line = f"| {needles} | DIFF V2 | 400 | 25.0 | 36.2 [33.1, 39.4] |"
    assert line in said and "| above chance | +11.2 [+8.1, +14.4] |" in said, said
    has(said, "| 18.1 [16.6, 19.7] | 3 |", "| at chance | reference |")
    has(page, "Retrieval of needles")


def test_intervals_of_shares_equal_those_of_wilson():
    cases = (10, 20, 0.299298, 0.700702), (0, 10, 0, 0.277533), (10, 10, 0.722467, 1), (30, 100, 0.218949, 0.395849)
    for right, asked, low, high in (*cases, (10, 100, 0.055229, 0.174366)):
        s = synthetic.score([(i < right, False, 0.25) for i in range(asked)])
        assert abs(s["low"] - low) < 1e-6 and abs(s["high"] - high) < 1e-6, (right, asked, s)
        assert s["chance"] == 0.25 and s["exact"] == 0, s


def test_a_wide_interval_over_seeds_or_questions_is_at_chance():
    def verdict(shares, n):
        return evaluations.score_of({seed: wilson(share, n) for seed, share in enumerate(shares)})["against_chance"]

    assert verdict([0.4], 1000) == "above chance" and verdict([0.1], 1000) == "below chance"
    assert verdict([0.4], 10) == "at chance"  # few questions
    assert verdict([0.3, 0.4, 0.9], 1000) == "at chance"  # few seeds, far apart
    assert verdict([0.39, 0.4, 0.41], 1000) == "above chance"
    assert verdict([0.26, 0.26, 0.26], 1000) == "at chance"  # seeds agree, questions do not show it


@pytest.mark.full
def test_the_map_of_needles_has_a_cell_for_each_length_and_depth(tmp_path):
    lab = measured_lab(tmp_path)
    study = studies.load([lab])
    shown = evaluation_figures.needle_figure(study)
    assert [view["label"] for view in shown["views"]] == ["Transformer", "DIFF V2"], shown["views"]
    (cells,) = shown["views"][1]["traces"]
    assert (cells["x"], cells["y"]) == ([8, 16, 8, 16], [0, 0, 100, 100]), cells
    made.near(cells["z"][2], 0.7)
    assert cells["text"] == ["25 ± 0*", "25 ± 0*", "70 ± 12", "25 ± 0*"], cells
    done = made.report(lab)
    written = {path.name for path in (lab / "report").glob("needles-*")}
    assert done.returncode == 0 and "needles-DIFF-V2.png" in written, (done.stderr, written)


@pytest.mark.full
def test_damaged_needles_are_left_out_with_one_line(tmp_path):
    run = measured_lab(tmp_path) / "baseline.lr0.001.seed1"
    whole = json.loads((run / "eval.json").read_text())
    for change, message in (
        (lambda j: j["needles"].update(cells=3), "needles.cells is not a list"),
        (lambda j: j["needles"]["cells"][1].update(depth=1.5), "needles.cells[1].depth is not a share"),
        (lambda j: j["needles"].update(accuracy=None), "needles.accuracy is not a share"),
        (lambda j: j["needles"].update(asked=0), "needles.asked is not a positive integer"),
        (lambda j: j["needles"]["cells"][0].pop("low"), "it has no needles.cells[0].low"),
        (lambda j: j.update(needles=[]), "needles is not an object"),
    ):
        (run / "eval.json").write_text(json.dumps(whole))
        rewrite(run / "eval.json", change)
        expect_error(made.report(run, "--no-png"), 1, f"eval.json: {message}", lines=1)
    (run / "eval.json").write_text(json.dumps(whole))
    rewrite(run / "eval.json", lambda j: j["needles"].update(cells=[]))
    assert made.report(run, "--no-png").returncode == 0  # no cells: nothing to show
