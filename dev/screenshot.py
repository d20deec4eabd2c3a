#!/usr/bin/env python3
"""Writes a PNG file of a page of scripts/lab, as Chromium shows it.

Usage: dev/screenshot.py PAGE OUT.png [WIDTH HEIGHT]
  PAGE           report.html
  WIDTH HEIGHT   of the window in pixels (default: 1280 900)
Requires Chromium (scripts/install_deps.sh --with-browser).
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

DRAWN = "document.querySelectorAll('.plot svg').length >= D.figures.length"


def main():
    if len(sys.argv) not in (3, 5) or not all(word.isdigit() for word in sys.argv[3:]):
        sys.exit("usage: dev/screenshot.py PAGE OUT.png [WIDTH HEIGHT]")
    python_environment.ensure("tests")
    from lab import browser
    from PIL import Image  # of matplotlib

    page, out, width, height = *sys.argv[1:3], *(map(int, sys.argv[3:] or (1280, 900)))
    with browser.Browser(width, height) as b:
        b.open(page)
        while not b.run(DRAWN):
            time.sleep(0.1)
        b.screenshot(out)
    Image.open(out).convert("RGB").save(out, optimize=True)


if __name__ == "__main__":
    main()
