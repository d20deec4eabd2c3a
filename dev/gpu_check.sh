#!/usr/bin/env bash
# gpu_check.sh: builds and proves the CUDA trainer on the GPU of this machine, and measures it. Needs CUDA, a C++ compiler,
# make and Python 3; no network. dev/gpu_check/check.py does it; --help says how.
set -euo pipefail
command -v python3 >/dev/null || {
    echo "gpu_check.sh: python3 is missing: its standard library is all that is needed" >&2
    exit 1
}
exec python3 "$(dirname "$0")/gpu_check/check.py" "$@"
