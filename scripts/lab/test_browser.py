"""test_browser.py: tests of the page in Chromium."""

import os
import subprocess
import sys

import pytest

from . import browser, run_directory
from . import test_report as made
from .testing import HERE, has, wait_until


def wait_for(page, expression, seconds=60):
    def holds():
        try:
            return page.run(expression)
        except browser.Failed:
            return False  # the page is loading

    wait_until(holds, seconds, expression)


TITLES = "all('#plot-loss svg > text').map(e => e.textContent)"
OVERLAP = """all('.plot').flatMap(p => ['.xticks text', '.yticks text'].flatMap(s => {
  const boxes = all(s, p).map(e => e.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right && a.top < b.bottom
    && b.top < a.bottom)).map(() => p.id + s);
}))"""


def saves_figures_and_tables(b):
    """Every figure and table can be saved."""
    saved = (
        "(async () => { const texts = []; window.download = () => 0; URL.createObjectURL = b => texts.push(b.text());"
    )
    for kind in ("CSV", "LaTeX"):
        saved += f"all('.tools button').filter(b => b.textContent === '{kind}').forEach(b => b.click());"
    texts = b.run(saved + " return Promise.all(texts); })()")
    assert len(texts) == 2 * b.run("D.figures.length + all('.table').length"), len(texts)
    assert any(
        '"Transformer, rate 0.001",reference,–,"2.2000 [1.9516, 2.4484]",3,3 done,"1,000",' in t for t in texts
    ), texts
    assert any(
        "DIFF V2 & baseline" not in t and "\\begin{tabular}" in t and "Transformer, rate 0.001 & reference" in t
        for t in texts
    )
    assert any("\\begin{axis}[xlabel={position}" in t and "xmode=log" in t and "(16," in t for t in texts)
    assert any('line,of,rate,position,"gap, nats",low,high,note\nDIFF V2' in t for t in texts)
    svg = b.run("figureSvg(current('gap'))")
    assert svg.startswith("<svg") and "nats" in svg, svg[:200]
    assert (
        b.run(
            "(t => { const d = new DOMParser().parseFromString(t, 'image/svg+xml');"
            " return !d.querySelector('parsererror') && d.querySelectorAll('text').length; })"
            "(tableSvg(of('table-summary')))"
        )
        > 20
    )


def prints(b):
    """On paper each line has a dash of its own, and a printed table is alone."""
    b.run("window.print = () => window.dispatchEvent(new Event('beforeprint'))")
    b.run("printOnly(of('table-summary'))")
    b.send("Emulation.setEmulatedMedia", media="print")
    seen = "all('.table, .plot').filter(e => e.offsetHeight).map(e => e.id)"
    assert b.run(seen) == ["table-summary"], b.run(seen)
    dashes = b.run("all('#plot-loss .line').map(e => e.getAttribute('stroke-dasharray'))")
    assert {"", "7 3"} <= set(dashes) and b.run("theme()") == "light", dashes
    b.send("Emulation.setEmulatedMedia", media="screen")
    b.run("window.dispatchEvent(new Event('afterprint'))")
    assert len(b.run(seen)) > 10 and not b.run("document.body.classList.contains('one')")


def sorts_and_smooths(b):
    """Tables are sorted by numbers; without smoothing a line has its own values; ticks and hovers."""
    first = "document.querySelector('#table-runs tbody tr').innerText"
    b.click("#table-runs th:nth-child(5) button")
    assert b.run(first).startswith("diff_v2.lr0.001.seed1"), b.run(first)  # the lowest loss
    b.click("#table-runs th:nth-child(5) button")
    assert b.run(first).startswith("baseline.lr0.001.seed3"), b.run(first)  # the highest; the diverged run is last
    assert "diverged" in b.run("document.querySelector('#table-runs tbody tr:last-child').innerText")
    # smoothing: without it a line has its own values
    line = "of('plot-loss').drawn.traces.slice(-1)[0].y"
    smooth = b.run(line)
    b.run("(s => { s.value = 0; s.dispatchEvent(new Event('input')); })(of('smoothing'))")
    own = "viewOf(current('loss')).traces.filter(t => visible(t, {})).slice(-1)[0].y"
    assert b.run(line) == b.run(own) != smooth
    # round ticks that do not overlap, and hovers with units and the seed
    ticks = b.run("all('.plot').map(p => [p.id, p.drawn.x.ticks, p.drawn.y.ticks])")
    by = {name: (x, y) for name, x, y in ticks}
    assert by["plot-position"][0] == [1, 2, 4, 8, 16] and by["plot-ladder"][0][:2] == [0.001, 0.002], by
    assert by["plot-norms"][1] == [1, 2, 5] and by["plot-recall"][0] == [4], by
    overlap = b.run(OVERLAP)
    assert overlap == [], overlap
    hover = b.run("hoverText(of('plot-loss').drawn.traces.find(t => t.faint), viewOf(current('loss')), 0)")
    assert b.run("[of('plot-final').offsetHeight, of('plot-final').drawn.height]") == [136, 136]
    has(hover, "seed 1\ntokens: ", "training loss, nats per token: ")
    assert b.run("logTicks(.2, 1.1, 2, 500, 50)") == [0.25, 0.5, 1]
    assert b.run("focus([{x: [...Array(3e5).keys()], y: Array(3e5).fill(1)}])") == [1, 1]


def chooses_views_arms_and_rates(b):
    """The buttons and the selected rate change the figure."""
    assert b.run(TITLES)[-2] == "tokens"
    b.click("#views-loss button[data-view='1']")
    wait_for(b, f"{TITLES}.some(t => t.startsWith('FLOPs'))")
    assert b.run("Math.max(...of('plot-loss').drawn.traces.flatMap(t => t.x))") == made.STEPS * made.BATCH * 6e3
    # arms
    before = b.run("all('#plot-loss .line').length")
    b.click("#legend button[data-of='diff_v2']")
    wait_for(b, f"all('#plot-loss .line').length < {before}")
    b.click("#legend button[data-of='diff_v2']")
    wait_for(b, f"all('#plot-loss .line').length === {before}")
    # rates
    b.run("(s => { s.value = '0.004'; s.dispatchEvent(new Event('change')); })(document.querySelector('#rate'))")
    wait_for(b, f"all('#plot-loss .line').length < {before}")
    b.run("(s => { s.value = '0.001'; s.dispatchEvent(new Event('change')); })(document.querySelector('#rate'))")


def shows_maps(b):
    """A pair has three maps; hovering over one prints its values."""
    assert b.run("document.querySelectorAll('#maps canvas').length") == 3
    assert b.run(
        "(c => c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data.some((v, i, d) => i % 4 === 0 && v < 128 && d[i + 3] === 255))(document.querySelector('#maps canvas'))"
    )
    x, y = b.middle("#maps canvas:nth-of-type(1)")
    left = b.run("document.querySelector('#maps canvas').getBoundingClientRect().left")
    b.mouse((left + 8, y + 30), press=False)  # the first column, where the second map is 1
    wait_for(b, "document.querySelector('#pointed').textContent.includes('A1 - s A2')")
    said = b.run("document.querySelector('#pointed').textContent")
    values = [float(word.rstrip(",")) for word in said.split() if word.count(".") == 1]
    row = int(said.split()[1])
    assert row > 0 and abs(values[0] - 1 / (row + 1)) < 0.01, said
    assert len(values) == 3 and values[1] > 0.9 and abs(values[0] - made.LAMBDA * values[1] - values[2]) < 2e-2, said
    b.run("(s => { s.value = 'baseline'; s.dispatchEvent(new Event('change')); })(document.querySelector('#map-arm'))")
    wait_for(b, "document.querySelectorAll('#maps canvas').length === 1")


def zooms(b):
    """Dragging in a figure zooms; two clicks show all again."""
    extent = "of('plot-loss').drawn.x.range"
    (low, high), (x, y) = b.run(extent), b.middle("#plot-loss svg")
    b.mouse((x - 60, y), to=(x + 60, y))
    wait_for(b, f"({extent})[0] > {low} && ({extent})[1] < {high}")
    b.run("of('plot-loss').ondblclick()")
    assert b.run(extent) == [low, high], b.run(extent)


def changes_its_theme(b, path):
    """The theme is the system's, then the button's, which survives a reload."""
    assert b.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    b.color_scheme(True)
    wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
    b.color_scheme(False)
    wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
    b.click("#theme")
    wait_for(b, "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
    b.open(path)
    assert b.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    wait_for(b, f"{TITLES}.some(t => t.startsWith('FLOPs'))")


@pytest.mark.full
def test_the_page_works_offline_in_a_browser(tmp_path):
    lab = made.made_lab(tmp_path)
    done = made.report(lab, "--no-png")
    assert done.returncode == 0, done.stderr
    with browser.Browser() as b:
        b.open(lab / "report/report.html")
        wait_for(b, "document.querySelectorAll('.plot svg').length >= D.figures.length")
        outside = [r for r in b.requests() if not r.startswith(("file:", "data:", "blob:"))]
        assert not outside, outside
        assert not b.run("document.documentElement.scrollWidth > document.documentElement.clientWidth"), (
            "the page is wider than the window"
        )
        saves_figures_and_tables(b)
        prints(b)
        sorts_and_smooths(b)
        zooms(b)
        chooses_views_arms_and_rates(b)
        shows_maps(b)
        changes_its_theme(b, lab / "report/report.html")
        assert not (errors := b.errors()), errors
    with browser.Browser(width=400, height=800) as b:
        b.open(lab / "report/report.html")
        wait_for(b, "document.querySelectorAll('.plot svg').length >= D.figures.length")
        assert b.run("document.querySelector('header').offsetHeight / innerHeight") < 0.15
        first = "(w => { w.scrollLeft = 90; const at = e => e.getBoundingClientRect().left;"
        first += (
            " return [w.scrollLeft, at(w.querySelector('td')) - at(w)]; })(document.querySelector('#result ~ * .wide'))"
        )
        assert b.run(first) == [90, 0], b.run(first)  # the first column stays
        b.run("of('map-arm').options[0].text = 'long '.repeat(40)")
        assert b.run(OVERLAP) == []
        assert not b.run("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"), (
            "a narrow window scrolls sideways"
        )


@pytest.mark.full
def test_a_watched_report_follows_a_run_to_its_end(tmp_path):
    run = tmp_path / "run"
    made.made_run(run, "baseline", 0.001, 1, 2.0, steps=100)
    trainer = open(run / "run.json", "r+b")
    run_directory.lock(trainer)  # as a running trainer does
    out = tmp_path / "out"
    command = [sys.executable, HERE, "report", run, "--out", out, "--watch", "1", "--no-png"]
    process = subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    page = out / "report.html"
    wait_until(page.exists)
    has(page.read_text(), '"watch":1', "100/200")
    whole = tmp_path / "whole"
    made.made_run(whole, "baseline", 0.001, 1, 2.0)
    with browser.Browser() as b:
        b.open(page)
        names = "all('#table-status tbody tr').map(row => row.cells[0].innerText)"
        before = b.run(names)
        b.click("#table-status th button")
        in_order = b.run(names)
        assert in_order != before
        (run / "log.jsonl").write_text((whole / "log.jsonl").read_text())
        wait_for(b, "document.body.innerText.includes('200/200')", 60)  # the page has reloaded
        assert b.run(names) == in_order
    os.rename(whole / "checkpoints", run / "checkpoints")
    trainer.close()
    assert process.wait(timeout=60) == 0, process.stderr.read()
    has(page.read_text(), '"watch":0', "<td>done</td>")
