"""What the trainer predicts of a step on a device, beside what bench_cuda's profile has measured."""

import json
import subprocess
import tempfile


def predict(program, device, options):
    """The prediction as the program writes it: step_ms, classes {name: ms}, operations [{name, class, calls, ms}]."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [*program, "--dry-run", "--device", device, "--dry-run-out", out.name, *[str(o) for o in options]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
        with open(out.name) as file:
            return json.load(file)


def calls(prediction):
    """{operation: calls in a step}"""
    count = {}
    for op in prediction["operations"]:
        count[op["name"]] = count.get(op["name"], 0) + op["calls"]
    return count


def compare(prediction, measured):
    """[(class, predicted ms, measured ms)] for measured {operation: ms}. Classes that share an operation are one row,
    such as "block GEMMs + LM head"; operations that the prediction does not have are the last row."""
    groups = []  # of (classes, operations), joined where they meet
    for op in prediction["operations"]:
        classes, names = [op["class"]], {op["name"]}
        for group in [g for g in groups if g[1] & names or set(g[0]) & set(classes)]:
            groups.remove(group)
            classes = group[0] + [c for c in classes if c not in group[0]]
            names |= group[1]
        groups.append((classes, names))
    rows = [
        (" + ".join(classes), sum(prediction["classes"][c] for c in classes), sum(measured.get(n, 0) for n in names))
        for classes, names in groups
    ]
    known = set().union(*(names for _, names in groups))
    others = sum(ms for name, ms in measured.items() if name not in known)
    return rows + ([("others", 0.0, others)] if others else [])
