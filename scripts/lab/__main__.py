#!/usr/bin/env python3
"""Entry point: `python3 scripts/lab COMMAND ...`. The package is not installed, so its folder is put on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lab import cli

sys.exit(cli.main())
