"""test_page.py: tests of the page and of watch.py."""

import contextlib
import http.client
import io
import itertools
import json
import math
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import watch

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


@contextlib.contextmanager
def watching(run):
    """watch.py's server of a run in a thread: yields a function of a path, which returns (status, text, headers), and
    the address of the page."""
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


def test_the_live_page_follows_a_log_that_grows_and_shrinks(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole/log.jsonl"
    made.made_run(whole.parent, "diff_v2", 0.001, 1, 2.0)
    with watching(run) as (get, _):
        status, page, _ = get("/")
        assert status == 200 and "the run has not started" in page and "http-equiv=refresh content=2" in page, page
        made.made_run(run, "diff_v2", 0.001, 1, 2.0, steps=100)
        page = get("/")[1]
        has(page, "<td>100/200 (50.0%)</td>", '"live":true')
        assert "<td>0.001; 0.001 at the last step</td>" in page
        assert len(page) < 1e6 and not re.search(
            "<th>(arm|gap|seeds)</th>|reference|one seed", page.split("<script>")[0]
        )
        has(page, "href='log.jsonl'", "5k [5k, 5k] on CPU: 1 threads on 2 cores of h.")
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
        more = [{**train, "loss": 1.25}, {"kind": "sample", "step": 61, "text": "<script>a & b"}]
        made.write_log(run, [*more, {"kind": "event", "step": 61, "what": "stopped", "why": "signal"}], "a")
        news = json.loads(get("/data?at=x")[1])
        assert last_point(news, "loss", "training") == (61, 1.25), last_point(news, "loss", "training")
        assert "<h3>step 61</h3><pre>&lt;script&gt;a &amp; b</pre>" in news["html"]["samples"]
        assert "<td>stopped</td><td>why signal</td>" in news["html"]["events"], news["html"]["events"]
        (run / "run.json").write_text("{")
        news = json.loads(get("/data?at=x")[1])
        assert news["html"] == {} and "run.json: not JSON" in get("/")[1]


def test_the_live_page_is_for_this_machine_and_has_two_files(tmp_path):
    run = tmp_path / "run"
    made.made_run(run, "baseline", 0.001, 1, 2.0)
    with watching(run) as (get, address):
        assert get("/", Host="example.org")[0] == get("/data", Host="127.0.0.1:1")[0] == 403
        assert get("/", Host=address.split("/")[2].replace("127.0.0.1", "localhost"))[0] == 200
        status, text, headers = get("/log.jsonl")
        assert (status, text) == (200, (run / "log.jsonl").read_text()) and headers["X-Content-Type-Options"]
        assert "default-src 'none'" in headers["Content-Security-Policy"], headers
        assert [get(path)[0] for path in ("/run.json", "/eval.json", "/../run/run.json", "/x")] == [200, 404, 404, 404]
        (run / "log.jsonl").unlink()
        assert get("/log.jsonl")[0] == 404


def test_watch_writes_a_page_and_rejects_bad_options():
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as used:
        run, out, port = Path(place) / "run", Path(place) / "page.html", used.getsockname()[1]
        expect_error(called(watch.main, "watch.py", run, "--out", out), 1, f"{run}: the run has not started", lines=1)
        (Path(place) / "odd/log.jsonl").mkdir(parents=True)
        expect_error(called(watch.main, "watch.py", f"{place}/odd", "--out", out), 1, "Is a directory", lines=1)
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
