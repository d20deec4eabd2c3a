"""The packages of a requirements.txt, in a virtual environment that the scripts make themselves.

ensure() returns when they can be imported. Otherwise it makes build/venv-data, installs them there, and runs the same
program again with that Python. Other scripts name their own requirements, modules and place.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build/venv-data"
REQUIREMENTS = ROOT / "data/requirements.txt"
MODULES = ("huggingface_hub", "numpy", "pyarrow", "tiktoken", "tokenizers", "xxhash", "zstandard")


def missing(modules=MODULES):
    return [m for m in modules if importlib.util.find_spec(m) is None]


def run(command, what):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        reason = (done.stdout.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"{Path(sys.argv[0]).name}: {what} failed: {reason}")


def ensure(requirements=REQUIREMENTS, modules=MODULES, place=PLACE):
    if sys.version_info < (3, 10):
        sys.exit(f"{Path(sys.argv[0]).name}: Python {sys.version.split()[0]} is too old: 3.10 or later is needed")
    if not missing(modules):
        return
    python = place / "bin/python"
    name = requirements.relative_to(ROOT)
    if os.environ.get("DIFFV2_VENV") == str(place):
        sys.exit(
            f"{Path(sys.argv[0]).name}: {', '.join(missing(modules))} cannot be imported even after installing {name}; remove {place}"
        )
    stamp, wanted = place / "requirements.txt", requirements.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing Python packages into {place.relative_to(ROOT)} (once)", file=sys.stderr, flush=True)
        run([sys.executable, "-m", "venv", str(place)], "making a virtual environment")
        run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--require-hashes",
                "--only-binary",
                ":all:",
                "-r",
                str(requirements),
            ],
            "pip install",
        )
        stamp.write_text(wanted)
    os.environ["DIFFV2_VENV"] = str(place)
    os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    ensure()
    print(sys.executable)
