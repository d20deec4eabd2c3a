"""The prediction of a step on a device by predict_diffv2."""

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
