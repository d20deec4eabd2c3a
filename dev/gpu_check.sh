#!/usr/bin/env bash
# gpu_check.sh: builds, tests and benchmarks the CUDA trainer on the GPU of this machine. Requires CUDA, a C++ compiler,
# make and Python 3; no network. --help lists the options (dev/gpu_check/check.py).
set -euo pipefail
command -v python3 >/dev/null || {
    echo "gpu_check.sh: python3 is missing; its standard library is sufficient" >&2
    exit 1
}
exec python3 "$(dirname "$0")/gpu_check/check.py" "$@"
