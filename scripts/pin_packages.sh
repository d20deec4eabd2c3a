#!/usr/bin/env bash
# pin_packages.sh: writes the requirements.txt files of Python packages from the requirements.in files beside them: the exact
# version of each package and of what it needs, with the hashes of its files, for Python 3.10 and later. Versions that are not
# given are the newest. pip installs nothing else from them, and runs no code to build a package. Needs uv.
#
# Usage: scripts/pin_packages.sh
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || {
    echo "pin_packages.sh: unexpected argument '$1': it takes none" >&2
    exit 2
}
command -v uv >/dev/null || {
    echo "pin_packages.sh: uv is missing: python3 -m pip install uv" >&2
    exit 1
}

pin() { # directory, further options...
    local directory=$1 pins
    shift
    pins=$(uv pip compile -q --universal --python-version 3.10 --generate-hashes --only-binary :all: --no-header --no-annotate "$@" "$directory/requirements.in")
    {
        echo "# Written by scripts/pin_packages.sh from requirements.in."
        echo "--require-hashes"
        echo "--only-binary :all:"
        echo "$pins"
    } >"$directory/requirements.txt"
}
pin data
pin data/gpt2_ranks --no-deps
pin scripts/lab
pin scripts/cuda_python --no-deps
pin dev/format --no-deps
