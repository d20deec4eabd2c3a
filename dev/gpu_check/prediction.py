"""The prediction of a step on a device by predict_diffv2, and its comparison with a profile of bench_cuda."""

import json
import subprocess
import tempfile


def predict(program, device, options):
    """The prediction that the program writes: step_ms, classes {name: ms}, operations [{name, class, calls, ms}]."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [*program, "--device", device, "--out", out.name, *[str(o) for o in options]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: status {done.returncode}: {done.stderr.strip()[-300:]}")
        with open(out.name) as file:
            return json.load(file)


def compare(prediction, measured):
    """[(class, predicted ms, measured ms)] for measured {operation: ms}. Classes that share an operation form one row,
    such as "block GEMMs + LM head". The last row has the operations that the prediction lacks."""
    groups = []  # of (classes, operations); groups that share a class or an operation are merged
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
