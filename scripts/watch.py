#!/usr/bin/env python3
"""A live page of one run: loss, validation, gradient norm, spikes, rate, throughput, layers, samples, when it ends.

    scripts/watch.py runs/NAME [--port P]      serves the page at http://127.0.0.1:P until Ctrl-C
    scripts/watch.py runs/NAME --out FILE      writes the page as it is now, for reading without a server

The page follows log.jsonl, also when a resume or a rollback shortens it, and may be opened before the run starts.
`scripts/lab report runs/NAME` writes the same page with PDF files. Only this machine can read the page: it has the text
of the log. From another machine: ssh -L 8000:127.0.0.1:8000 HOST. Exit status: 0 done, 1 failed, 2 usage.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import python_environment
from lab import cli, option_history, page, report, run_directory
from lab import study as studies
from lab.table import escape

HOST = "127.0.0.1"
FILES = ("log.jsonl", "run.json")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; connect-src 'self' data: blob:; base-uri 'none'; frame-ancestors 'none'",
}


class Watched:
    """The run, read once; then only what its log has got since."""

    def __init__(self, directory):
        self.directory, self.study, self.version, self.error = Path(directory), None, 0, ""
        self.log = run_directory.Log(self.directory / "log.jsonl")
        self.seen, self.lock = None, threading.Lock()

    def fingerprint(self):
        """Changes with the files that are read whole, and with the state of the run."""
        paths = [self.directory / name for name in ("run.json", "eval.json")] + sorted(self.directory.glob("probe*"))
        stamps = [(p.name, s.st_mtime_ns, s.st_size) for p in paths if p.exists() and (s := p.stat())]
        return stamps, run_directory.locked(self.directory)

    def update(self):
        """Reads what is new; the version changes with it."""
        try:
            records, again = self.log.read()
        except run_directory.RunError as error:
            self.study, self.seen, self.error = None, None, studies.reason(error)
            return
        seen = self.fingerprint()
        if not records and not again and seen == self.seen:
            return
        self.version += 1
        whole = again or seen != self.seen or self.study is None
        self.seen, self.error = seen, ""
        try:
            if whole:
                self.load()
            else:
                run = self.study.runs[0]
                studies.absorb(run, records)
                studies.set_state(run)
        except (run_directory.RunError, OSError) as error:
            self.study, self.error = None, studies.reason(error)

    def load(self):
        self.study = None
        if not (self.directory / "run.json").exists():
            raise run_directory.RunError("the run has not started: it has no run.json")
        run = studies.new_run(self.directory)
        self.log = run_directory.Log(self.directory / "log.jsonl")
        studies.absorb(run, self.log.read()[0])
        studies.set_state(run)
        found = studies.Study(run.name, "", run.arm, {run.arm: run.label}, [run], [], [], [], False)
        studies.read_measurements(run, found.left_out)
        found.notes = [f"Left out: {line}." for line in found.left_out]
        self.study = found

    def content(self, live=True):
        run = self.study.runs[0]
        run.read = option_history.validations(run.info, [])
        results, figures = report.compute(self.study)
        return page.content(
            self.study, results, figures, links=lambda run: [(name, name) for name in FILES] if live else []
        )

    def page(self, live):
        if self.study:
            data, sections = self.content(live)
            return page.build(self.study, {**data, "version": self.version}, sections, live)
        return (
            "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=2>"
            f"<title>{escape(self.directory.name)}</title><p>{escape(self.directory)}: {escape(self.error)}"
        )

    def news(self):
        """What page.js replaces in an open page. Without a run: nothing, at which the page reloads itself."""
        if not self.study:
            return {"version": self.version, "arms": {}, "figures": [], "html": {}}
        data, sections = self.content()
        html = {"notes": data["notes"], **{name: text for name, _, text, _ in sections}}
        return {"version": self.version, "figures": data["figures"], "arms": data["arms"], "html": html}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path, _, query = self.path.partition("?")
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.answer(403, "text/plain", f"open http://{HOST}:{port}\n")  # a page of another site that names us
        elif path == "/":
            with self.server.watched.lock:
                self.server.watched.update()
                text = self.server.watched.page(live=True)
            self.answer(200, "text/html", text)
        elif path == "/data":
            with self.server.watched.lock:
                self.server.watched.update()
                same = query == f"at={self.server.watched.version}"
                text = "" if same else json.dumps(self.server.watched.news(), allow_nan=False)
            self.answer(204 if same else 200, "application/json", text)
        elif path[1:] in FILES:
            try:
                self.answer(200, "text/plain", (self.server.watched.directory / path[1:]).read_bytes())
            except OSError as error:
                self.answer(404, "text/plain", f"{path[1:]}: {error.strerror}\n")
        else:
            self.answer(404, "text/plain", "no such page\n")

    def answer(self, status, kind, text):
        data = text.encode(errors="replace") if isinstance(text, str) else text
        try:
            self.send_response(status)
            for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except ConnectionError:
            pass  # the reader has closed the page

    def log_message(self, *_):
        pass


def parse_arguments():
    parser = cli.Parser(prog="watch.py", description="A live page of one run.")
    parser.add_argument("run", help="directory of a run, which may not exist yet")
    parser.add_argument("--port", type=int, help="port on this machine (default: 8000, or any if it is in use)")
    parser.add_argument("--out", metavar="FILE", help="write the page as it is now, and exit")
    a = parser.parse_args()
    if a.port is not None and not 1 <= a.port <= 65535:
        parser.error(f"--port {a.port}: must be 1 to 65535")
    if a.port is not None and a.out is not None:
        parser.error("--port and --out exclude each other")
    return a


def start(watched, port):
    """The server, which has a port but does not serve yet."""
    try:
        server = ThreadingHTTPServer((HOST, 8000 if port is None else port), Handler)
    except OSError as error:
        if port is not None:
            cli.fail("watch.py", f"--port {port}: {error.strerror}")
        server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads, server.watched = True, watched
    return server


def main():
    a = parse_arguments()
    python_environment.ensure("lab")
    watched = Watched(a.run)
    if a.out is None:
        server = start(watched, a.port)
        print(f"http://{HOST}:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    watched.update()
    if not watched.study:
        cli.fail("watch.py", f"{a.run}: {watched.error}")
    try:
        run_directory.write_atomic(a.out, watched.page(live=False))
    except OSError as error:
        cli.fail("watch.py", f"{error.filename or a.out}: {error.strerror}")
    print(a.out)


if __name__ == "__main__":
    sys.exit(main())
