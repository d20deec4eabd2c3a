"""The results of a check in one directory: results.json (the state, replaced atomically after every case), results.txt
(the same as tables) and log.txt (the output of all programs).

    {"format": 1, "commit": C, "device": D, "driver": R, "parts": {NAME: {"status": S, "seconds": X, "why": TEXT,
     "done": [CASE, ...], "checks": [{"what": W, "ok": true, "detail": T}, ...], "records": [{"table": T, ...}, ...]}}}

The status S is passed, failed, skipped or unfinished. An unfinished part continues after the cases in `done`.
"""

import json
import os
import time

FORMAT = 1
ENDED = ("passed", "failed", "skipped")


class StoreError(Exception):
    pass


class Store:
    def __init__(self, folder, commit, order):
        self.folder, self.order = folder, order
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.json"
        if self.path.exists():
            try:
                self.all = json.loads(self.path.read_text())
                if self.all["format"] != FORMAT or not isinstance(self.all["parts"], dict):
                    raise KeyError
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self.path} has an invalid format: choose another --out")
            if self.all["commit"] != commit:
                other = self.all["commit"]
                raise StoreError(
                    f"{self.path} has results of commit {other}, and this is {commit}: choose another --out"
                )
        else:
            self.all = {"format": FORMAT, "commit": commit, "device": None, "driver": None, "parts": {}}
        self.log = open(folder / "log.txt", "a", buffering=1, errors="replace")

    def part(self, name):
        return self.all["parts"].setdefault(
            name, {"status": "unfinished", "seconds": 0, "why": "", "done": [], "checks": [], "records": []}
        )

    def forget(self, name):
        self.all["parts"].pop(name, None)

    def save(self):
        self.all["parts"] = {n: self.all["parts"][n] for n in self.order if n in self.all["parts"]}
        for path, text in ((self.path, json.dumps(self.all, indent=1)), (self.folder / "results.txt", table(self.all))):
            new = path.with_suffix(".new")
            with open(new, "w") as f:
                f.write(text + "\n")
                f.flush()
                os.fsync(f.fileno())
            os.replace(new, path)

    def say(self, text):
        print(text, flush=True)
        self.log.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")


# ---------------------------------------------------------------------------------------------------
# The table

COLUMNS = {  # table: [(title, key, format)]
    "peaks": [("what", "what", "s"), ("ms", "ms", ".3f"), ("rate", "rate", ".1f"), ("", "unit", "s")],
    "kernels": [
        ("operation", "kernel", "s"),
        ("shape", "shape", "s"),
        ("ms", "ms", ".4f"),
        ("rate", "rate", ".1f"),
        ("", "unit", "s"),
        ("of peak", "share", ".0%"),
    ],
    "peers": [
        ("operation", "kernel", "s"),
        ("shape", "shape", "s"),
        ("one product", "peer", "s"),
        ("ms", "ms", ".4f"),
        ("its ms", "peer_ms", ".4f"),
        ("its/ours", "ratio", ".3f"),
        ("least", "least", ".3f"),
        ("most", "most", ".3f"),
    ],
    "expert_loss": [
        ("loss", "what", "s"),
        ("CPU", "cpu", ".4f"),
        ("device", "device", ".4f"),
        ("difference", "difference", "+.4f"),
    ],
    "models": [
        ("model", "preset", "s"),
        ("", "model", "s"),
        ("T", "T", "d"),
        ("B", "B", "d"),
        ("", "what", "s"),
        ("ms", "ms", ".1f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("TFLOP/s", "tflops", ".1f"),
        ("of peak", "share", ".1%"),
        ("of device", "device_share", ".1%"),
    ],
    "peer": [
        ("model", "preset", "s"),
        ("", "attention", "s"),
        ("T", "T", "d"),
        ("B", "B", "d"),
        ("ms", "ms", ".1f"),
        ("PyTorch ms", "torch_ms", ".1f"),
        ("PyTorch/ours", "ratio", ".3f"),
        ("", "torch", "s"),
    ],
    "fp8": [
        ("step of", "of", "s"),
        ("bf16 ms", "bf16", ".1f"),
        ("fp8 ms", "fp8", ".1f"),
        ("bf16/fp8", "ratio", ".3f"),
        ("least", "least", ".3f"),
        ("most", "most", ".3f"),
    ],
    "fp8_loss": [
        ("loss", "what", "s"),
        ("bf16", "bf16", ".4f"),
        ("fp8", "fp8", ".4f"),
        ("difference", "difference", "+.4f"),
    ],
    "decode": [
        ("operation", "kernel", "s"),
        ("arm", "arm", "s"),
        ("B", "B", "d"),
        ("context", "context", "d"),
        ("ms", "ms", ".4f"),
        ("GB/s", "rate", ".0f"),
        ("of a copy", "share", ".0%"),
        ("relative to NH", "ratio", ".3f"),
        ("least", "least", ".3f"),
        ("most", "most", ".3f"),
    ],
    "decode_steps": [
        ("token of", "of", "s"),
        ("B", "B", "d"),
        ("context", "context", "d"),
        ("ms", "ms", ".3f"),
        ("tokens/s", "tokens_per_s", ".0f"),
        ("GB/s", "rate", ".0f"),
        ("of a copy", "share", ".0%"),
        ("relative to NH", "ratio", ".3f"),
        ("least", "least", ".3f"),
        ("most", "most", ".3f"),
    ],
    "profile": [
        ("of", "of", "s"),
        ("operation", "operation", "s"),
        ("calls", "calls", "d"),
        ("ms", "ms", ".3f"),
        ("of step", "share", ".1%"),
    ],
    "predicted": [
        ("of", "of", "s"),
        ("class of work", "class", "s"),
        ("predicted ms", "predicted", ".2f"),
        ("ms", "ms", ".2f"),
        ("measured/predicted", "ratio", ".2f"),
    ],
    "gradients": [
        ("variant", "variant", "s"),
        ("build", "build", "s"),
        ("matrices: worst", "matrix", "s"),
        ("", "matrix_error", ".3g"),
        ("vectors: worst", "vector", "s"),
        ("", "vector_error", ".3g"),
    ],
    "facts": [("fact", "what", "s"), ("", "value", "s")],
}


def cell(record, key, form):
    value = record.get(key)
    if value is None:
        return ""
    return str(value) if form == "s" else format(value, form)


def rows_of(records, columns):
    rows = [[title for title, _, _ in columns]] + [[cell(r, key, form) for _, key, form in columns] for r in records]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    numeric = [form != "s" for _, _, form in columns]
    return [
        "    " + "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric)).rstrip()
        for row in rows
    ]


def table(everything):
    """The results as text: for each part its status, checks and tables."""
    lines = [
        f"commit {everything['commit']}",
        f"device {everything['device'] or 'not detected yet'}",
        f"driver {everything['driver'] or 'not detected yet'}",
    ]
    for name, part in everything["parts"].items():
        lines += ["", f"{name}: {part['status']}{': ' + part['why'] if part['why'] else ''} ({part['seconds']:.0f} s)"]
        lines += [
            f"  {'ok  ' if c['ok'] else 'FAIL'} {c['what']}{': ' + c['detail'] if c['detail'] else ''}"
            for c in part["checks"]
        ]
        for kind in dict.fromkeys(r["table"] for r in part["records"]):
            if kind in COLUMNS:
                lines += rows_of([r for r in part["records"] if r["table"] == kind], COLUMNS[kind])
    checks = [c for part in everything["parts"].values() for c in part["checks"]]
    targets = [
        r
        for part in everything["parts"].values()
        for r in part["records"]
        if r["table"] == "facts" and r["what"].startswith("target: ")
    ]
    if targets:
        lines += ["", "targets:"] + rows_of(
            [dict(r, what=r["what"][8:]) for r in targets], [("", "what", "s"), ("", "value", "s")]
        )[1:]
    open_parts = [n for n, p in everything["parts"].items() if p["status"] not in ENDED]
    skipped = [n for n, p in everything["parts"].items() if p["status"] == "skipped"]
    lines.append("")
    for what, names in (("skipped", skipped), ("unfinished", open_parts)):
        if names:
            lines.append(f"{what}: {', '.join(names)}")
    lines.append(f"{sum(c['ok'] for c in checks)} passed, {sum(not c['ok'] for c in checks)} failed")
    return "\n".join(lines)
