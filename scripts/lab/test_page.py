"""test_page.py: tests of the page in Chromium, and of watch.py. test_lab.py --report and --browser run them."""

import contextlib
import fcntl
import http.client
import io
import itertools
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from . import browser
from . import test_report as made
from .testing import expect_error

tests, browser_tests = [], []


def test(function):
    tests.append(function)
    return function


def browser_test(function):
    browser_tests.append(function)
    return function


def added(log, records):
    with open(log, "a") as f:
        f.write("".join(json.dumps(record) + "\n" for record in records))


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


@contextlib.contextmanager
def watching(run):
    """watch.py's server of a run in a thread: yields a function of a path, which returns (status, text, headers), and
    the address of the page."""
    import watch

    server = watch.start(watch.Watched(run), None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def get(path, **headers):
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())

    try:
        yield get, f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def last_point(news, figure, name):
    t = next(t for f in news["figures"] if f["id"] == figure for t in f["views"][0]["traces"] if t["name"] == name)
    return t["x"][-1], t["y"][-1]


@test
def the_live_page_follows_a_log_that_grows_and_shrinks():
    with tempfile.TemporaryDirectory() as place:
        run, whole = Path(place) / "run", Path(place) / "whole/log.jsonl"
        made.made_run(whole.parent, "diff_v2", 0.001, 1, 2.0)
        with watching(run) as (get, _):
            status, page, _ = get("/")
            assert status == 200 and "the run has not started" in page and "http-equiv=refresh content=2" in page, page
            made.made_run(run, "diff_v2", 0.001, 1, 2.0, steps=100)
            page = get("/")[1]
            assert "<td>100/200 (50.0%)</td>" in page and '"live":true' in page
            assert "<td>0.001; 0.001 at the last step</td>" in page
            assert "href='log.jsonl'" in page and "5k [5k, 5k] on CPU: 1 threads on 2 cores of h." in page
            headings = re.findall("<h2 id=([a-z]+)>", page)
            assert headings == "result loss stability speed layers settings runs".split(), headings
            at = int(re.search('"version":([0-9]+)', page)[1])
            assert get(f"/data?at={at}")[:2] == (204, "")
            log = run / "log.jsonl"
            lines = lines_up_to(whole, 160)
            log.write_text(lines[:-5])  # its last line is being written
            news = json.loads(get(f"/data?at={at}")[1])
            assert news["version"] > at and "159/200" in news["html"]["result"], news["html"]["result"]
            assert last_point(news, "loss", "training")[0] == 159 and last_point(news, "norms", "spike") == (150, 9.0)
            log.write_text(lines)
            again = json.loads(get(f"/data?at={news['version']}")[1])
            assert last_point(again, "loss", "training")[0] == 160 and last_point(again, "loss", "validation")[0] == 150
            log.write_text(lines_up_to(whole, 60))  # resumed from step 60
            news = json.loads(get(f"/data?at={again['version']}")[1])
            assert "60/200" in news["html"]["result"] and last_point(news, "loss", "validation")[0] == 50
            assert last_point(news, "loss", "training")[0] == 60
            train = json.loads(lines_up_to(whole, 61).splitlines()[-1])
            added(log, [{**train, "loss": 1.25}, {"kind": "sample", "step": 61, "text": "<script>a & b"}])
            added(log, [{"kind": "event", "step": 61, "what": "stopped", "why": "signal"}])
            news = json.loads(get("/data?at=x")[1])
            assert last_point(news, "loss", "training") == (61, 1.25), last_point(news, "loss", "training")
            assert "<h3>step 61</h3><pre>&lt;script&gt;a &amp; b</pre>" in news["html"]["samples"]
            assert "<td>stopped</td><td>why signal</td>" in news["html"]["events"], news["html"]["events"]
            (run / "run.json").write_text("{")
            news = json.loads(get("/data?at=x")[1])
            assert news["html"] == {} and "run.json: not JSON" in get("/")[1]


@test
def the_live_page_is_for_this_machine_and_has_two_files():
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        made.made_run(run, "baseline", 0.001, 1, 2.0)
        with watching(run) as (get, address):
            assert get("/", Host="example.org")[0] == get("/data", Host="127.0.0.1:1")[0] == 403
            assert get("/", Host=address.split("/")[2].replace("127.0.0.1", "localhost"))[0] == 200
            status, text, headers = get("/log.jsonl")
            assert (status, text) == (200, (run / "log.jsonl").read_text()) and headers["X-Content-Type-Options"]
            assert "default-src 'none'" in headers["Content-Security-Policy"], headers
            assert [get(path)[0] for path in ("/run.json", "/eval.json", "/../run/run.json", "/x")] == [
                200,
                404,
                404,
                404,
            ]
            (run / "log.jsonl").unlink()
            assert get("/log.jsonl")[0] == 404


@test
def watch_writes_a_page_and_rejects_bad_options():
    import watch

    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as used:
        run, out, port = Path(place) / "run", Path(place) / "page.html", used.getsockname()[1]
        expect_error(called(watch.main, "watch.py", run, "--out", out), 1, f"{run}: the run has not started", lines=1)
        made.made_run(run, "diff_v2", 0.001, 1, 2.0)
        done = called(watch.main, "watch.py", run, "--out", out)
        assert (done.returncode, done.stdout) == (0, f"{out}\n"), done
        page = out.read_text()
        assert '"live":false' in page and "200/200 (100.0%)" in page and "href='log.jsonl'" not in page
        assert "<h2 id=settings>" in page and "<h2 id=published>" not in page
        for words, status, said in (
            (("--port", "0"), 2, "--port 0: must be 1 to 65535"),
            (("--port", "65536"), 2, "--port 65536: must be"),
            (("--port", "8000", "--out", "x"), 2, "--port and --out exclude each other"),
            (("--port", port), 1, f"--port {port}: Address already in use"),
            (("--out", Path(place) / "none/page.html"), 1, ".tmp: No such file or directory"),
        ):
            expect_error(called(watch.main, "watch.py", run, *words), status, said, lines=1)


@test
def the_end_of_a_run_is_predicted_from_its_last_steps():
    from . import run_tables
    from . import study as studies

    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        made.made_run(run, "baseline", 0.001, 1, 2.0, steps=120)
        one = studies.load([run]).runs[0]
        for r in one.train:
            r["ms"] = 6e5 if r["step"] % 10 else 12e5
        assert run_tables.prediction(one, 0) == ""  # no process trains it
        one.state = "running"
        said = run_tables.prediction(one, 0)  # 80 steps of 10 minutes, or 20
        assert said.startswith("in 13 h 20 min [13 h 20 min, 13 h 20 min], about 1970-01-01 "), said
        for r in one.train[-50:]:
            r["ms"] = 12e5
        assert "[13 h 20 min, 26 h 40 min]" in run_tables.prediction(one, 0)


@test
def named_runs_are_compared_with_a_table_of_their_options():
    from . import report

    with tempfile.TemporaryDirectory() as place:
        one, many, out = Path(place) / "one", Path(place) / "many", Path(place) / "out"
        made.made_run(one, "baseline", 0.001, 1, 2.0)
        for seed in (2, 3):
            more = {"total-batch": 2000, "weight-decay": 0.2}
            made.made_run(many / f"seed{seed}", "baseline", 0.001, seed, 1.9 + seed / 10, **more)
        reported = lambda *words: called(lambda: report.main(list(map(str, words))), "lab")
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
        expect_error(reported(f"a={place}/none"), 1, f"{place}/none: no such directory", lines=1)
        one.rename(Path(place) / "x=y")  # a directory that exists is no name
        done = reported(Path(place) / "x=y", "--out", out, "--no-png")
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


@test
def colours_are_distinguishable_in_both_themes():
    from . import page

    def seen(color, by):
        rgb = linear(color)
        return lab_color([max(0, min(1, sum(m * c for m, c in zip(row, rgb)))) for row in SEEN[by]] if by else rgb)

    panels = re.findall("--panel: (#[0-9a-f]{6})", (made.HERE / "page.css").read_text())  # what figures are drawn on
    for theme, background in zip(("light", "dark"), panels, strict=True):
        colors = page.PALETTE[theme]
        luminance = lambda color: sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(color)))
        for color in colors:
            dark, light = sorted((luminance(color), luminance(background)))
            assert (light + 0.05) / (dark + 0.05) >= 3, (theme, color, (light + 0.05) / (dark + 0.05))
        for by, count, least in ((None, 10, 25), ("protanopia", 6, 20), ("deuteranopia", 6, 20)):
            for a, b in itertools.combinations(colors[:count], 2):
                assert math.dist(seen(a, by), seen(b, by)) >= least, (
                    theme,
                    by,
                    a,
                    b,
                    math.dist(seen(a, by), seen(b, by)),
                )


def wait_for(page, expression, seconds=60):
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


def saves_figures_and_tables(b):
    """Every figure and table can be saved."""
    saved = (
        "(async () => { const texts = []; window.download = () => 0; URL.createObjectURL = b => texts.push(b.text());"
    )
    for kind in ("CSV", "LaTeX"):
        saved += f"all('.tools button').filter(b => b.textContent === '{kind}').forEach(b => b.click());"
    texts = b.run(saved + " return Promise.all(texts); })()")
    assert len(texts) == 2 * b.run("D.figures.length + all('.table').length"), len(texts)
    assert any('Transformer,0.001,"1,000",6k,"2.2000 [1.9516, 2.4484]",reference,' in t for t in texts), texts
    assert any("DIFF V2 & baseline" not in t and "\\begin{tabular}" in t and "Transformer & 0.001" in t for t in texts)
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
    dashes = b.run("all('#plot-loss').map(p => p.data.map(t => t.line.dash))[0]")
    assert {"solid", "dash"} <= set(dashes) and b.run("theme()") == "light", dashes
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
    assert b.run("[of('plot-final').offsetHeight, of('plot-final')._fullLayout.height]") == [136, 136]
    assert "seed 1<br>tokens: " in hover and "training loss, nats per token: %{y" in hover, hover


def chooses_views_arms_and_rates(b):
    """The buttons and the choice of the rate change what is drawn."""
    assert b.run("document.querySelector('#plot-loss').layout.xaxis.title.text") == "tokens"
    b.click("#views-loss button[data-view='1']")
    wait_for(b, "document.querySelector('#plot-loss').layout.xaxis.title.text.startsWith('FLOPs')")
    assert (
        b.run("Math.max(...document.querySelector('#plot-loss').data.filter(t => t.x).map(t => Math.max(...t.x)))")
        == made.STEPS * made.BATCH * 6e3
    )
    # arms
    before = b.run("document.querySelector('#plot-loss').data.length")
    b.click("#legend button[data-of='diff_v2']")
    wait_for(b, f"document.querySelector('#plot-loss').data.length < {before}")
    b.click("#legend button[data-of='diff_v2']")
    wait_for(b, f"document.querySelector('#plot-loss').data.length === {before}")
    # rates
    b.run("(s => { s.value = '0.004'; s.dispatchEvent(new Event('change')); })(document.querySelector('#rate'))")
    wait_for(b, f"document.querySelector('#plot-loss').data.length < {before}")
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
    b.mouse(left + 8, y + 30)  # the first column, where the second map is 1
    wait_for(b, "document.querySelector('#pointed').textContent.includes('A1 - s A2')")
    said = b.run("document.querySelector('#pointed').textContent")
    values = [float(word.rstrip(",")) for word in said.split() if word.count(".") == 1]
    row = int(said.split()[1])
    assert row > 0 and abs(values[0] - 1 / (row + 1)) < 0.01, said
    assert len(values) == 3 and values[1] > 0.9 and abs(values[0] - made.LAMBDA * values[1] - values[2]) < 2e-2, said
    b.run("(s => { s.value = 'baseline'; s.dispatchEvent(new Event('change')); })(document.querySelector('#map-arm'))")
    wait_for(b, "document.querySelectorAll('#maps canvas').length === 1")


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
    wait_for(b, "document.querySelector('#plot-loss').layout.xaxis.title.text.startsWith('FLOPs')")


@browser_test
def a_browser_starts_for_any_numbers_of_open_files():
    """Files have the numbers from 3 and are closed just before Popen opens its own pipe, which then gets them."""
    program = """
import os, sys
from lab import browser
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[1]))]
open_pipe, pipes = os.pipe, []
def pipe():
    while len(pipes) == 2 and held:
        os.close(held.pop())
    pipes.append(open_pipe())
    return pipes[-1]
os.pipe = pipe
with browser.Browser() as b:
    assert b.run("6 * 7") == 42
"""
    here = Path(__file__).parents[1]
    for count in range(5):
        done = subprocess.run(
            [sys.executable, "-c", program, str(count)], cwd=here, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, (count, done.stderr)


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
            saves_figures_and_tables(b)
            prints(b)
            sorts_and_smooths(b)
            chooses_views_arms_and_rates(b)
            shows_maps(b)
            changes_its_theme(b, lab / "report/report.html")
            assert not b.errors, b.errors
        with browser.Browser(width=400, height=800) as b:
            b.open(lab / "report/report.html")
            wait_for(b, "document.querySelectorAll('.plot .main-svg').length >= 2 * D.figures.length")
            assert b.run("document.querySelector('header').offsetHeight / innerHeight") < 0.15
            b.run("of('map-arm').options[0].text = 'long '.repeat(40)")
            assert b.run(OVERLAP) == []
            assert not b.run("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"), (
                "a narrow window scrolls sideways"
            )


@browser_test
def a_watched_report_follows_a_run_to_its_end():
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


@browser_test
def an_open_live_page_follows_its_run():
    with tempfile.TemporaryDirectory() as place:
        run, whole = Path(place) / "run", Path(place) / "whole/log.jsonl"
        made.made_run(whole.parent, "diff_v2", 0.001, 1, 2.0)
        made.made_run(run, "diff_v2", 0.001, 1, 2.0, steps=100)
        with browser.Browser(width=400, height=800) as b:
            with watching(run) as (_, address):
                b.open(address)
                wait_for(b, "document.querySelectorAll('.plot .main-svg').length >= 2 * D.figures.length")
                b.run("window.same = true")
                x, y = b.middle("#plot-rate .nsewdrag")
                b.drag((x - 60, y), (x + 60, y))  # zooms
                extent = "of('plot-rate')._fullLayout.xaxis.range.map(Math.round)"
                wait_for(b, f"({extent})[0] > 10")
                zoomed = b.run(extent)
                b.click("#table-status th button")
                (run / "log.jsonl").write_text(lines_up_to(whole, 140))
                last = "document.querySelector('#plot-loss').data.find(t => t.name === 'training').x.slice(-1)[0]"
                wait_for(b, f"{last} === 140")
                assert b.run("window.same") and "140/200" in b.run("of('table-status').innerText")
                assert b.run("document.querySelector('#table-status tbody tr').innerText").startswith("FLOPs/token")
                assert b.run(extent) == zoomed
                (run / "log.jsonl").write_text(lines_up_to(whole, 150))  # a new line: the spike
                wait_for(b, "!window.same && Object.keys(D.arms).includes('spikes')")
                wait_for(b, "document.querySelector('#plot-norms').data.slice(-1)[0].x[0] === 150")
                assert not b.errors and not b.run("document.body.classList.contains('lost')"), b.errors
                assert all(r.startswith((address, "data:", "blob:")) for r in b.requests), b.requests
            wait_for(b, "document.body.classList.contains('lost')")  # the server has ended
