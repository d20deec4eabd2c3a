"""The packages of the report (requirements.txt), in build/venv-lab, made by data/environment.py."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
spec = importlib.util.spec_from_file_location("data_environment", ROOT / "data/environment.py")
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)


def ensure():
    shared.ensure(ROOT / "scripts/lab/requirements.txt", ("matplotlib", "plotly"), ROOT / "build/venv-lab")


if __name__ == "__main__":
    ensure()
    print(sys.executable)
