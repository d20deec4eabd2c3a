#!/usr/bin/env bash
# pin_packages.sh: writes each requirements.txt of Python packages from the requirements.in beside it: the exact
# versions of the packages and their dependencies, with hashes, for Python 3.10 and later, or $python. A package
# without a version in requirements.in gets the newest. pip installs only wheels from these files, so it runs no
# code to build a package. Requires uv.
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
    pins=$(uv pip compile -q --universal --python-version "${python-3.10}" --generate-hashes --only-binary :all: \
        --no-header --no-annotate "$@" "$directory/requirements.in")
    {
        echo "# Written by scripts/pin_packages.sh from requirements.in."
        echo "--require-hashes"
        echo "--only-binary :all:"
        echo "$pins"
    } >"$directory/requirements.txt"
}
for directory in data scripts/{lab,export} tests; do pin "$directory"; done
for directory in data/gpt2_ranks scripts/cuda_python dev/{format,sass}; do pin "$directory" --no-deps; done
absent=(triton cuda-bindings cuda-pathfinder cuda-toolkit
    nvidia-{cublas,cudnn-cu13,cufft,cufile,curand,cusolver,cusparse}
    nvidia-{cuda-cccl,cuda-cupti,cuda-nvrtc,cusparselt-cu13,nccl-cu13,nvjitlink,nvshmem-cu13,nvtx})
python=3.11 pin dev/reference "${absent[@]/#/--no-emit-package=}"
for directory in dev/reference/{previous,oldest}; do python=3.11 pin "$directory" --no-deps; done
