"""The results of a check in one directory: results.json (the state, replaced atomically after every case), results.txt
(the same as tables) and log.txt (the output of all programs).

    {"format": 3, "commit": C, "sources": DIGEST, "device": D, "driver": R, "parts": {NAME: {"status": S, "seconds": X,
     "why": TEXT, "done": [CASE, ...], "rows": [ROW, ...]}}}

`sources` is the digest of the files that programs are compiled from (programs.py): results continue at any commit that
has the same. The status S is passed, failed, skipped or unfinished. An unfinished part continues after the cases in
`done`. Every finding is a row, in one format for all parts and for the lines of bench_cuda. A key that has no value may
be missing:

    verdict             ok or FAIL of a check; reached or missed of a target: a missed target is not a defect
    case, of            what was checked or measured, and the model or the shape
    measured, unit      a number: a time, a rate, an error, a loss
    expected, against   what `against` gives instead: the time of a copy, of another program, a tolerance, a target
    ratio               1 if measured is as expected, more if it is better: faster, or a smaller error. Alternating
                        measurements: the median of their rounds, with the `least` and the `most`
    note                the reason, or other numbers
"""

import json
import os
import re
import threading
import time

FORMAT = 3
COLUMNS = {  # key: (title, format)
    "verdict": ("", "s"),
    "case": ("case", "s"),
    "of": ("of", "s"),
    "measured": ("measured", ".5g"),
    "unit": ("", "s"),
    "expected": ("expected", ".5g"),
    "against": ("by", "s"),
    "ratio": ("ratio", ".3f"),
    "least": ("least", ".3f"),
    "most": ("most", ".3f"),
    "note": ("note", "s"),
}


class Refused(Exception):
    """The check cannot go on; the reason."""


class Store:
    """The results of a check. Its methods may be called by several threads."""

    def __init__(self, folder, commit, sources, order):
        self.folder, self.order, self.lock = folder, order, threading.RLock()
        self.day = time.strftime("%Y-%m-%d")  # of the start: a check that passes midnight publishes under one name
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.json"
        self.all = {"format": FORMAT, "commit": commit, "sources": sources, "device": None, "driver": None, "parts": {}}
        if self.path.exists():
            try:
                self.all = json.loads(self.path.read_text())
                if self.all["format"] != FORMAT or not isinstance(self.all["parts"], dict):
                    raise KeyError
                other, earlier = self.all["commit"], self.all["sources"]
            except (ValueError, KeyError, TypeError):
                raise Refused(f"{self.path} has an invalid format: choose another --out")
            if earlier != sources:
                differ = f"has results of the programs of {other}, and those of {commit} differ"
                raise Refused(f"{self.path} {differ}: choose another --out")
        self.log = open(folder / "log.txt", "a", buffering=1, errors="replace")

    def part(self, name):
        new = {"status": "unfinished", "seconds": 0, "why": "", "done": [], "rows": []}
        return self.all["parts"].setdefault(name, new)

    def forget(self, name):
        self.all["parts"].pop(name, None)

    def describe(self, device, driver, earlier):
        """Names the device of all results. The first time, results of the same programs on such a device are taken over
        from `earlier`, published files."""
        if self.all["device"] not in (None, device):
            raise Refused(f"{self.path} has results of {self.all['device']}, not of {device}: choose another --out")
        for path in [] if self.all["device"] else sorted(earlier):
            other = json.loads(path.read_text())
            if (other["format"], other["sources"], other["device"]) == (FORMAT, self.all["sources"], device):
                for name, part in other["parts"].items():
                    self.part(name).update(part if name != "machine" else {})
        self.all.update(device=device, driver=driver)

    def save(self):
        with self.lock:
            self.all["parts"] = {n: self.all["parts"][n] for n in self.order if n in self.all["parts"]}
            write(self.path, json.dumps(self.all, indent=1) + "\n")
            write(self.folder / "results.txt", table(self.all) + "\n")

    def publish(self, folder):
        """Copies results.json and results.txt to folder/gpu-DEVICE-DATE.*; returns the path without the suffix."""
        words = re.findall(r"[a-z]*\d[\w]*", (self.all["device"] or "device").lower())
        path = folder / f"gpu-{words[0] if words else 'device'}-{self.day}"
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".txt"):
            write(path.with_suffix(suffix), (self.folder / f"results{suffix}").read_text())
        return path

    def say(self, text):
        with self.lock:
            print(text, flush=True)
            self.log.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


def write(path, text):
    """Replaces a file atomically."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)  # a link is not followed
    with open(new, "x") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(new, path)


def failed(rows):
    return [row for row in rows if row.get("verdict") == "FAIL"]


def sentence(row):
    """A row without a number."""
    return f"  {row.get('verdict') or '':4} {row['case']}{': ' + row['note'] if row.get('note') else ''}"


def measurements(rows):
    """The rows with numbers as one table, without the columns that are empty."""
    columns = []
    for key, (title, form) in COLUMNS.items():
        values = [row.get(key) for row in rows]
        cells = [title, *("" if value is None else format(value, form) for value in values)]
        width = max(map(len, cells))
        if any(cells[1:]):
            columns.append([c.ljust(width) if form == "s" else c.rjust(width) for c in cells])
    return ["    " + "  ".join(cells).rstrip() for cells in zip(*columns)]


def table(everything):
    """The results as text: each part's status, checks and measurements; counts."""
    parts = everything["parts"]
    lines = [f"commit {everything['commit']}"]
    lines += [f"{what} {everything[what] or 'not detected yet'}" for what in ("device", "driver")]
    for name, part in parts.items():
        lines += ["", f"{name}: {part['status']}{': ' + part['why'] if part['why'] else ''} ({part['seconds']:.0f} s)"]
        lines += [sentence(row) for row in part["rows"] if row.get("measured") is None]
        lines += measurements([row for row in part["rows"] if row.get("measured") is not None])
    rows = [row for part in parts.values() for row in part["rows"]]
    lines.append("")
    for what in ("skipped", "unfinished"):
        names = [n for n, p in parts.items() if p["status"] == what]
        lines += [f"{what}: {', '.join(names)}"] if names else []
    return "\n".join([*lines, f"{sum(row.get('verdict') == 'ok' for row in rows)} passed, {len(failed(rows))} failed"])
