"""The results of a check in one directory: results.json (the state, replaced atomically after every case), results.txt
(the same as tables), issue.txt (results.txt, shortened to CHARACTERS) and log.txt (the output of all programs).

    {"format": 2, "commit": C, "device": D, "driver": R, "parts": {NAME: {"status": S, "seconds": X, "why": TEXT,
     "done": [CASE, ...], "rows": [ROW, ...]}}}

The status S is passed, failed, skipped or unfinished. An unfinished part continues after the cases in `done`. Every
finding is a row, in one format for all parts and for the lines of bench_cuda. A key that has no value may be missing:

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
import time

FORMAT = 2
CHARACTERS = 60000  # of issue.txt: GitHub allows 65,536 in an issue, and its template has other fields
NARROW = 24  # columns of its tables: a longer text moves the rest of its line
ENDED = ("passed", "failed", "skipped")
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


class StoreError(Exception):
    pass


class Store:
    def __init__(self, folder, commit, order):
        self.folder, self.order = folder, order
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.json"
        self.all = {"format": FORMAT, "commit": commit, "device": None, "driver": None, "parts": {}}
        if self.path.exists():
            try:
                self.all = json.loads(self.path.read_text())
                if self.all["format"] != FORMAT or not isinstance(self.all["parts"], dict):
                    raise KeyError
                other = self.all["commit"]
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self.path} has an invalid format: choose another --out")
            if other != commit:
                raise StoreError(
                    f"{self.path} has results of commit {other}, and this is {commit}: choose another --out"
                )
        self.log = open(folder / "log.txt", "a", buffering=1, errors="replace")

    def part(self, name):
        new = {"status": "unfinished", "seconds": 0, "why": "", "done": [], "rows": []}
        return self.all["parts"].setdefault(name, new)

    def forget(self, name):
        self.all["parts"].pop(name, None)

    def save(self):
        self.all["parts"] = {n: self.all["parts"][n] for n in self.order if n in self.all["parts"]}
        texts = {"results.json": json.dumps(self.all, indent=1), "results.txt": table(self.all)}
        for name, text in {**texts, "issue.txt": table(self.all, CHARACTERS)}.items():
            path = self.folder / name
            new = path.with_suffix(".new")
            new.unlink(missing_ok=True)  # a link is not followed
            with open(new, "x") as f:
                f.write(text + "\n")
                f.flush()
                os.fsync(f.fileno())
            os.replace(new, path)

    def say(self, text):
        print(text, flush=True)
        self.log.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


def failed(rows):
    return [row for row in rows if row.get("verdict") == "FAIL"]


def sentence(row):
    """A row without a number."""
    return f"  {row.get('verdict') or '':4} {row['case']}{': ' + row['note'] if row.get('note') else ''}"


def measurements(rows, most):
    """The rows with numbers as one table, without the columns that are empty."""
    columns = []
    for key, (title, form) in COLUMNS.items():
        values = [row.get(key) for row in rows]
        cells = [title, *("" if value is None else format(value, form) for value in values)]
        width = min(max(map(len, cells)), most and NARROW or 1000)
        if any(cells[1:]):
            columns.append([c.ljust(width) if form == "s" else c.rjust(width) for c in cells])
    return ["    " + "  ".join(cells).rstrip() for cells in zip(*columns)]


def table(everything, most=None):
    """The results as text: of each part its status, checks and measurements, those that fit into `most` characters."""
    parts = everything["parts"]
    lines = [f"commit {everything['commit']}"]
    lines += [f"{what} {everything[what] or 'not detected yet'}" for what in ("device", "driver")]
    for name, part in parts.items():
        lines += ["", f"{name}: {part['status']}{': ' + part['why'] if part['why'] else ''} ({part['seconds']:.0f} s)"]
        lines += [sentence(row) for row in part["rows"] if row.get("measured") is None]
        lines += measurements([row for row in part["rows"] if row.get("measured") is not None], most)
    rows = [row for part in parts.values() for row in part["rows"]]
    targets = [row for row in rows if row.get("verdict") in ("reached", "missed")]
    end = ["", "targets:", *measurements(targets, most)] if targets else []
    end += ["", "failed:", *map(sentence, failed(rows))] if failed(rows) and most else []
    end = [*shorten(end, most and most // 2), ""]
    for what in ("skipped", "unfinished"):
        names = [n for n, p in parts.items() if p["status"] == what]
        end += [f"{what}: {', '.join(names)}"] if names else []
    end.append(f"{sum(row.get('verdict') == 'ok' for row in rows)} passed, {len(failed(rows))} failed")
    return "\n".join([*shorten(lines, most and most - len("\n".join(end)) - 2), *end])


def shorten(lines, most):
    """The first lines that have `most` characters, and how many others there are."""
    kept, room = [], most - 80 if most else 1e9
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            return [*kept, f"... {len(lines) - len(kept)} more lines: results.json has all findings"]
        kept.append(line)
    return kept
