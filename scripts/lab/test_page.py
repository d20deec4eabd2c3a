"""test_page.py: tests of the page in Chromium, and of watch.py. test_lab.py --report and --browser run them."""

import fcntl
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from . import browser, run_directory
from . import test_report as made
from .testing import expect_error

tests, browser_tests = [], []


def test(function):
    tests.append(function)
    return function


def browser_test(function):
    browser_tests.append(function)
    return function


def wait_for(page, expression, seconds=20):
    deadline = time.time() + seconds
    while time.time() < deadline:
        try:
            if page.run(expression):
                return
        except RuntimeError:
            pass  # while a page loads there is no context
        time.sleep(0.1)
    raise AssertionError(f"timed out: {expression}")


OVERLAP = """all('.plot').flatMap(p => ['.xaxislayer-above .xtick', '.yaxislayer-above .ytick'].flatMap(s => {
  const boxes = all(s, p).map(e => e.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right && a.top < b.bottom
    && b.top < a.bottom)).map(() => p.id + s);
}))"""


@browser_test
def the_page_works_offline_in_a_browser():
    with tempfile.TemporaryDirectory() as place:
        lab = made.made_lab(place)
        done = made.report(lab, "--no-png")
        assert done.returncode == 0, done.stderr
        with browser.Browser() as b:
            b.open(lab / "report/report.html")
            wait_for(b, "document.querySelectorAll('.plot .main-svg').length >= 2 * D.figures.length")
            outside = [r for r in b.requests if not r.startswith(("file:", "data:", "blob:"))]
            assert not b.errors and not outside, (b.errors, outside)
            assert not b.run("document.documentElement.scrollWidth > document.documentElement.clientWidth"), (
                "the page is wider than the window"
            )
            # every figure and table can be saved, and every table sorted
            saved = "(async () => { const texts = []; window.download = () => 0; URL.createObjectURL = b => texts.push(b.text());"
            for kind in ("CSV", "LaTeX"):
                saved += f"all('.tools button').filter(b => b.textContent === '{kind}').forEach(b => b.click());"
            texts = b.run(saved + " return Promise.all(texts); })()")
            assert len(texts) == 2 * b.run("D.figures.length + all('.table').length"), len(texts)
            assert any('Transformer,0.001,"1,000",6k,"2.2000 [1.9516, 2.4484]",reference,' in t for t in texts), texts
            assert any("DIFF V2 & baseline" not in t and "\\begin{tabular}" in t and "Transformer & 0.001" in t for t in texts)
            assert any("\\begin{axis}[xlabel={position}" in t and "xmode=log" in t and "(16," in t for t in texts)
            assert any("line,of,rate,position,\"gap, nats\",low,high,note\nDIFF V2" in t for t in texts)
            svg = b.run("(async () => { let url; window.download = (name, u) => { url = u; };"
                " await saveSvg(current('gap')); return decodeURIComponent(url); })()")
            assert svg.startswith("data:image/svg+xml,<svg") and "nats" in svg, svg[:200]
            first = "document.querySelector('#table-runs tbody tr').innerText"
            b.click("#table-runs th:nth-child(5) button")
            assert b.run(first).startswith("diff_v2.lr0.001.seed1"), b.run(first)  # the lowest loss
            b.click("#table-runs th:nth-child(5) button")
            assert b.run(first).startswith("baseline.lr0.001.seed3"), b.run(first)  # the highest; the diverged run is last
            assert "diverged" in b.run("document.querySelector('#table-runs tbody tr:last-child').innerText")
            # smoothing: without it a line has its own values
            line = "document.querySelector('#plot-loss').data.slice(-1)[0].y"
            smooth = b.run(line)
            b.run("(s => { s.value = 0; s.dispatchEvent(new Event('input')); })(of('smoothing'))")
            own = "viewOf(current('loss')).traces.filter(visible).slice(-1)[0].y"
            assert b.run(line) == b.run(own) != smooth
            # round ticks that do not overlap, and hovers with units and the seed
            ticks = b.run("all('.plot').map(p => [p.id, p._fullLayout.xaxis.tickvals, p._fullLayout.yaxis.tickvals])")
            by = {name: (x, y) for name, x, y in ticks}
            assert by["plot-position"][0] == [1, 2, 4, 8, 16] and by["plot-ladder"][0][:2] == [0.001, 0.002], by
            assert by["plot-norms"][1] == [1, 2, 5, 10] and by["plot-recall"][0][0] == 1, by
            overlap = b.run(OVERLAP)
            assert overlap == [], overlap
            hover = b.run("document.querySelector('#plot-loss').data.find(t => t.opacity < 1).hovertemplate")
            assert "seed 1<br>tokens: " in hover and "training loss, nats per token: %{y" in hover, hover
            # views
            assert b.run("document.querySelector('#plot-loss').layout.xaxis.title.text") == "tokens"
            b.click("#views-loss button[data-view='1']")
            wait_for(b, "document.querySelector('#plot-loss').layout.xaxis.title.text.startsWith('FLOPs')")
            assert (
                b.run(
                    "Math.max(...document.querySelector('#plot-loss').data.filter(t => t.x).map(t => Math.max(...t.x)))"
                )
                == made.STEPS * made.BATCH * 6e3
            )
            # arms
            before = b.run("document.querySelector('#plot-loss').data.length")
            b.click("#legend button[data-of='diff_v2']")
            wait_for(b, f"document.querySelector('#plot-loss').data.length < {before}")
            b.click("#legend button[data-of='diff_v2']")
            wait_for(b, f"document.querySelector('#plot-loss').data.length === {before}")
            # rates
            b.run(
                "(s => { s.value = '0.004'; s.dispatchEvent(new Event('change')); })(document.querySelector('#rate'))"
            )
            wait_for(b, f"document.querySelector('#plot-loss').data.length < {before}")
            b.run(
                "(s => { s.value = '0.001'; s.dispatchEvent(new Event('change')); })(document.querySelector('#rate'))"
            )
            # maps: a pair has three; hovering over one prints its values
            assert b.run("document.querySelectorAll('#maps canvas').length") == 3
            assert b.run(
                "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height)"
                ".data.some((v, i) => i % 4 === 0 && v < 128))(document.querySelector('#maps canvas'))"
            )
            x, y = b.middle("#maps canvas:nth-of-type(1)")
            left = b.run("document.querySelector('#maps canvas').getBoundingClientRect().left")
            b.mouse(left + 8, y + 30)  # the first column, where the second map is 1
            wait_for(b, "document.querySelector('#pointed').textContent.includes('A1 - s A2')")
            said = b.run("document.querySelector('#pointed').textContent")
            values = [float(word.rstrip(",")) for word in said.split() if word.count(".") == 1]
            assert len(values) == 3 and values[1] > 0.9 and abs(values[0] - made.LAMBDA * values[1] - values[2]) < 2e-2, said
            b.run(
                "(s => { s.value = 'baseline'; s.dispatchEvent(new Event('change')); })"
                "(document.querySelector('#map-arm'))"
            )
            wait_for(b, "document.querySelectorAll('#maps canvas').length === 1")
            # themes: the system's, then the button's, which survives a reload
            assert b.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            b.color_scheme(True)
            wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
            b.color_scheme(False)
            wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
            b.click("#theme")
            wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
            b.open(lab / "report/report.html")
            assert b.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
            wait_for(b, "document.querySelector('#plot-loss').layout.xaxis.title.text.startsWith('FLOPs')")
            assert not b.errors, b.errors
        with browser.Browser(width=400, height=800) as b:
            b.open(lab / "report/report.html")
            wait_for(b, "document.querySelectorAll('.plot .main-svg').length >= 2 * D.figures.length")
            assert b.run("document.querySelector('header').offsetHeight / innerHeight") < 0.15
            assert b.run(OVERLAP) == []
            assert not b.run("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"), (
                "a narrow window scrolls sideways"
            )


@browser_test
def a_watched_report_follows_a_run_to_its_end():
    import fcntl

    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        made.made_run(run, "baseline", 0.001, 1, 2.0, steps=100)
        trainer = open(run / "run.json", "r+b")
        fcntl.fcntl(
            trainer, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        )  # as a running trainer does
        out = Path(place) / "out"
        process = made.report(
            run, "--out", out, "--watch", "1", "--no-png", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        page = out / "report.html"
        deadline = time.time() + 60
        while not page.exists() and time.time() < deadline:
            time.sleep(0.2)
        assert '"watch":1' in page.read_text() and "100/200" in page.read_text()
        whole = Path(place) / "whole"
        made.made_run(whole, "baseline", 0.001, 1, 2.0)
        with browser.Browser() as b:
            b.open(page)
            (run / "log.jsonl").write_text((whole / "log.jsonl").read_text())
            wait_for(b, "document.body.innerText.includes('200/200')", 60)  # the page has reloaded
        os.rename(whole / "checkpoints", run / "checkpoints")
        trainer.close()
        assert process.wait(timeout=60) == 0, process.stderr.read()
        assert '"watch":0' in page.read_text() and "<td>done</td>" in page.read_text()
