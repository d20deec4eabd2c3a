#!/usr/bin/env python3
"""Virtual environments for the Python packages of this repository, installed from pinned versions on first use.

    python3 scripts/python_environment.py NAME    installs if necessary, and prints the path of that Python interpreter

A script calls ensure(NAME) before it imports such packages. ensure() returns if the current interpreter can import
them. Otherwise it creates build/venv-NAME, installs the packages there, and restarts the script with that interpreter.
"""

import contextlib
import fcntl
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {  # name: (requirements, the modules that its scripts import; none: always use the virtual environment)
    "data": (
        "data/requirements.txt",
        ("huggingface_hub", "numpy", "pyarrow", "tiktoken", "tokenizers", "xxhash", "zstandard"),
    ),
    "lab": ("scripts/lab/requirements.txt", ("jinja2", "matplotlib", "numpy", "scipy")),
    "tests": ("tests/requirements.txt", ()),
    "export": ("scripts/export/requirements.txt", ("tensorboard", "wandb")),
    "export-tests": ("scripts/export/requirements.txt", ()),
    "format": ("dev/format/requirements.txt", ()),
    "sass": ("dev/sass/requirements.txt", ()),
    "hub": ("dev/reference/requirements.txt", ()),
    "hub-previous": ("dev/reference/previous/requirements.txt", ()),
    "hub-oldest": ("dev/reference/oldest/requirements.txt", ()),
}
# an environment also has the packages of its bases, unless it has other versions
BASES = {"tests": ("data", "lab"), "export-tests": ("tests",), "hub-previous": ("hub",), "hub-oldest": ("hub",)}
COMPLETED_BY = {"hub": "dev/reference/absent_cuda.py"}  # run in the environment after its installation


def place_of(name):
    """The directory of a virtual environment."""
    return ROOT / f"build/venv-{name}"


def fail(message):
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def run(command, what):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        reason = (done.stdout.strip().splitlines() or ["no message"])[-1]
        fail(f"{what} failed: {reason}")


@contextlib.contextmanager
def locked(place):
    """One process at a time installs into a directory."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(name):
    """The interpreter of the virtual environment, which is created or updated if its requirements have changed."""
    with locked(place_of(name)):
        return install_alone(name)


def install_alone(name):
    requirements, place = ROOT / ENVIRONMENTS[name][0], place_of(name)
    python, installed, wanted = place / "bin/python", place / "requirements.txt", requirements.read_text()
    bases = [Path(install(base)).parent.parent for base in BASES.get(name, ())]
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing Python packages into {os.path.relpath(place)} (once)", file=sys.stderr, flush=True)
        run([sys.executable, "-m", "venv", str(place)], "creating a virtual environment")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run(
            [*pip, "--no-compile", "--require-hashes", "--only-binary", ":all:", "-r", str(requirements)], "pip install"
        )
        packages = "lib/python{}.{}/site-packages".format(*sys.version_info)
        (place / packages / "base.pth").write_text("".join(f"{base / packages}\n" for base in bases))
        if name in COMPLETED_BY:
            run([str(python), str(ROOT / COMPLETED_BY[name])], COMPLETED_BY[name])
        installed.write_text(wanted)
    return str(python)


def interpreter(name):
    """The current interpreter if it can import the modules of an environment, else that of the virtual environment."""
    if sys.version_info < (3, 10):
        fail(f"Python {sys.version.split()[0]} is too old: 3.10 or later is required")
    modules = ENVIRONMENTS[name][1]
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if modules and not missing:
        return sys.executable
    if missing and Path(sys.prefix) == place_of(name):
        fail(f"cannot import {', '.join(missing)} after installing {ENVIRONMENTS[name][0]}; remove {sys.prefix}")
    return install(name)


def ensure(name):
    python = interpreter(name)
    if python != sys.executable:
        os.execv(python, [python, *sys.argv])


class Later:
    """A module that is imported on its first use, after ensure(): --help of a command does not require it."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, key):
        setattr(self, key, getattr(importlib.import_module(self._name), key))
        return vars(self)[key]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ENVIRONMENTS:
        sys.exit(f"usage: scripts/python_environment.py {'|'.join(ENVIRONMENTS)}")
    print(interpreter(sys.argv[1]))
