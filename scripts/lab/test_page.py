"""test_page.py: tests of the page."""

import contextlib
import io
import itertools
import json
import math
import re
import subprocess
import sys
from types import SimpleNamespace

from . import figures, one_run, page, report, study as studies, test_report as made
from .table import engineering
from .testing import HERE, expect_error, has


def lines_up_to(log, step):
    return "".join(line for line in log.read_text().splitlines(True) if json.loads(line)["step"] <= step)


def called(main, program, *words):
    """Runs a program's main() in this process."""
    out, err, old = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [program, *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main()
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = old
    return subprocess.CompletedProcess(words, status or 0, out.getvalue(), err.getvalue())


def reported(*words):
    return called(lambda: report.main(list(map(str, words))), "lab")


def last_point(data, figure, name):
    t = next(t for f in data["figures"] if f["id"] == figure for t in f["views"][0]["traces"] if t["name"] == name)
    return t["x"][-1], t["y"][-1]


def test_the_page_of_one_run_has_its_sections_and_follows_a_log_that_grows_and_shrinks(tmp_path):
    run, whole, out = tmp_path / "run", tmp_path / "whole/log.jsonl", tmp_path / "out"

    def page_now():
        """The page without its scripts, and the data of its figures."""
        done = reported(run, "--out", out, "--no-png")
        assert done.returncode == 0, done
        text = (out / "report.html").read_text()
        assert len(text) < 1e6
        body, _, script = text.partition("<script>const D = ")
        return body, json.loads(script.partition(";\n")[0].replace("<\\/", "</"))

    made.made_run(whole.parent, "diff_v2", 0.001, 1, 2.0)
    made.made_run(run, "diff_v2", 0.001, 1, 2.0, steps=100)
    page, _ = page_now()
    has(page, "<td>100/200 (50.0%)</td>", "<td>0.001; 0.001 at the last step</td>", "log.jsonl'>log</a>")
    has(page, "5k [5k, 5k] on CPU: 1 threads on 2 cores of h.")
    assert not re.search("<th>(arm|gap|seeds)</th>|reference|one seed", page)
    headings = re.findall("<h2 id=([a-z]+)>", page)
    assert headings == "result loss stability speed layers settings runs".split(), headings
    log = run / "log.jsonl"
    lines = lines_up_to(whole, 160)
    log.write_text(lines[:-5])  # its last line is being written
    page, data = page_now()
    has(page, "159/200")
    assert last_point(data, "loss", "training")[0] == 159 and last_point(data, "norms", "spike") == (150, 9.0)
    log.write_text(lines)
    _, data = page_now()
    assert last_point(data, "loss", "training")[0] == 160 and last_point(data, "loss", "validation")[0] == 150
    log.write_text(lines_up_to(whole, 60))  # resumed from step 60
    page, data = page_now()
    has(page, "60/200")
    assert last_point(data, "loss", "training")[0] == 60 and last_point(data, "loss", "validation")[0] == 50
    train = json.loads(lines_up_to(whole, 61).splitlines()[-1])
    more = [{**train, "loss": 1.25}, {"kind": "sample", "step": 61, "text": "<script>a & b"}]
    made.write_log(run, [*more, {"kind": "event", "step": 61, "what": "stopped", "why": "signal"}], "a")
    page, data = page_now()
    assert last_point(data, "loss", "training") == (61, 1.25), last_point(data, "loss", "training")
    has(page, "<h3>step 61</h3><pre>&lt;script&gt;a &amp; b</pre>", "<td>stopped</td><td>why signal</td>")
    (run / "run.json").write_text("{")
    expect_error(reported(run, "--out", out, "--no-png"), 1, "run.json: not JSON", lines=1)


def test_numbers_have_the_largest_unit_below_them():
    shown = [engineering(x) for x in (0.5, 999.7, 1e3, 12345, 0)]
    assert shown == ["0.5", "1k", "1k", "12.3k", "–"], shown


def test_the_end_of_a_run_is_predicted_from_its_last_steps(tmp_path):
    run = tmp_path / "run"
    made.made_run(run, "baseline", 0.001, 1, 2.0, steps=120)
    one = studies.load([run]).runs[0]
    for r in one.train:
        r["ms"] = 6e5 if r["step"] % 10 else 12e5
    assert one_run.prediction(one, 0) == ""  # no process trains it
    one.state = "running"
    said = one_run.prediction(one, 0)  # 80 steps of 10 minutes, or 20
    assert said.startswith("in 13 h 20 min [13 h 20 min, 13 h 20 min], about 1970-01-01 "), said
    for r in one.train[-50:]:
        r["ms"] = 12e5
    assert "[13 h 20 min, 26 h 40 min]" in one_run.prediction(one, 0)


def test_named_runs_are_compared_with_a_table_of_their_options(tmp_path):
    one, many, out = tmp_path / "one", tmp_path / "many", tmp_path / "out"
    made.made_run(one, "baseline", 0.001, 1, 2.0)
    for seed in (2, 3):
        more = {"total-batch": 2000, "weight-decay": 0.2}
        made.made_run(many / f"seed{seed}", "baseline", 0.001, seed, 1.9 + seed / 10, **more)
    done = reported(f"plain={one}", f"more decay={many}", "--out", out, "--no-png")
    assert done.returncode == 0 and not done.stderr, done
    r, said = made.results_of(out), (out / "results.md").read_text()
    assert r["arms"] == {"plain": "plain", "more decay": "more decay"}, r["arms"]
    assert [row["losses"] for row in r["summary"]] == [{"1": 2.0}, {"2": 2.1, "3": 2.2}], r["summary"]
    rows = [line for line in said.splitlines() if line.startswith("| --")]
    assert rows == ["| --total-batch | 1000 | 2000 |", "| --weight-decay | 0.1 | 0.2 |"], rows
    page = (out / "report.html").read_text()
    assert "Differs between runs: --total-batch: 1000 in one, 2000 in seed2" in page
    for words, text in (
        ((f"a={one}", many), "NAME=DIR: give every directory a name, or none"),
        ((f"a={one}", f"a={many}"), "a=DIR: the name is used more than once"),
    ):
        expect_error(reported(*words), 2, text, lines=1)
    expect_error(reported(f"a={tmp_path}/none"), 1, f"{tmp_path}/none: no such directory", lines=1)
    one.rename(tmp_path / "x=y")  # a directory that exists is no name
    done = reported(tmp_path / "x=y", "--out", out, "--no-png")
    assert done.returncode == 0 and made.results_of(out)["arms"] == {"baseline": "baseline"}, done


def lab_color(rgb):
    """CIE L*a*b* of linear sRGB."""
    to_xyz = (0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)
    xyz = [sum(m * c for m, c in zip(row, rgb)) / white for row, white in zip(to_xyz, (0.9505, 1, 1.089))]
    x, y, z = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz]
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def linear(hexadecimal):
    values = [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


SEEN = {  # linear sRGB as it appears with a colour vision deficiency (Machado et al. 2009, severity 1)
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


def test_a_figure_has_eight_lines_until_more_are_asked_for():
    arms = [f"arm{i}" for i in range(11)]
    lines = lambda names, **more: [figures.trace(name, name, [0, 1], [1.0, 2.0], 0.001, **more) for name in names]
    views = lambda *traces: [{"views": [figures.view("v", "x", "y", [t for part in traces for t in part])]}]
    study = SimpleNamespace(single=False, reference="arm9")
    hidden, single = page.at_first(study, views(lines(arms), lines(arms, faint=True)), "0.001")
    assert hidden == ["arm10", "arm7", "arm8"] and not single  # the reference is one of the eight
    assert page.at_first(study, views(lines(arms[:2]), lines(arms[:2] * 3, faint=True)), "0.001") == ([], True)
    assert page.at_first(study, views(lines(arms)), "0.002") == ([], True)
    study = SimpleNamespace(single=True, reference="x")
    assert page.at_first(study, views(lines(arms)), "all") == (["arm2", "arm5", "arm8"], True)  # evenly spaced


def test_colours_are_distinguishable_in_both_themes():
    def seen(color, by):
        rgb = linear(color)
        return lab_color([max(0, min(1, sum(m * c for m, c in zip(row, rgb)))) for row in SEEN[by]] if by else rgb)

    panels = re.findall("--panel: (#[0-9a-f]{6})", (HERE / "page.css").read_text())  # what figures are drawn on
    for theme, background in zip(("light", "dark"), panels, strict=True):
        colors = page.PALETTE[theme]
        luminance = lambda color: sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(color)))
        for color in colors:
            dark, light = sorted((luminance(color), luminance(background)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (theme, color, (light + 0.05) / (dark + 0.05))
        for by, count, least in ((None, 10, 25), ("protanopia", 6, 20), ("deuteranopia", 6, 20)):
            for a, b in itertools.combinations(colors[:count], 2):
                apart = math.dist(seen(a, by), seen(b, by))
                assert apart >= least, (theme, by, a, b, apart)
