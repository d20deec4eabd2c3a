#!/usr/bin/env bash
# install_deps.sh: installs what the build needs and this machine lacks, with the system's package
# manager: a C and a C++ compiler, make, pkg-config, OpenBLAS (its OpenMP build), oneDNN, cJSON, xxHash.
# Says what it does; does nothing when all is there. Exit status: 0 all is there, 1 not, 2 usage.
#
# Usage: scripts/install_deps.sh [--check | --with-mpi | --with-browser | --with-cuda-python]
#   --check             only say what is missing
#   --with-mpi          also OpenMPI, for runs of many processes
#   --with-browser      also Chromium, in which the tests look at the pages of scripts/lab
#   --with-cuda-python  also what the CUDA build lacks here of NVIDIA's packages for Python, into build/python, where it looks:
#                       cuDNN's frontend (a few MB), and cuDNN, NCCL, NVRTC or a whole toolkit (gigabytes) where there are none.
#                       Refuses where the driver is older than the CUDA that they are for
set -euo pipefail

fail() {
    echo "install_deps.sh: $1" >&2
    exit "${2:-1}"
}

check_only=no with_browser=no with_mpi=no with_cuda=no
case "$#:${1-}" in
0:) ;;
1:--check) check_only=yes ;;
1:--with-browser) with_browser=yes ;;
1:--with-mpi) with_mpi=yes ;;
1:--with-cuda-python) with_cuda=yes ;;
1:--help | 1:-h)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
*) fail "unexpected argument '$1': usage: scripts/install_deps.sh [--check | --with-mpi | --with-browser | --with-cuda-python]" 2 ;;
esac

has_program() { command -v "$1" >/dev/null 2>&1; }
has_library() { pkg-config --exists "$1" 2>/dev/null; }
has_header() { echo "#include <$1>" | cc -E -x c - >/dev/null 2>&1; }

# Debian keeps several builds of OpenBLAS side by side, and pkg-config, the linker and the loader follow
# an "alternative". The OpenMP build shares its threads with the trainer instead of competing with them.
has_openmp_openblas() {
    has_library openblas || return 1
    has_program apt-get || return 0                                          # elsewhere its name does not say
    [[ $(pkg-config --variable=libdir openblas) == /usr/lib/* ]] || return 0 # somebody's own
    compgen -G '/usr/lib/*/openblas-openmp/libopenblas.so' >/dev/null
}

# What is missing, as words that package_of translates.
find_missing() {
    missing=()
    has_program gcc || missing+=(gcc)
    has_program g++ || missing+=(g++)
    has_program make || missing+=(make)
    has_program pkg-config || missing+=(pkg-config)
    has_openmp_openblas || missing+=(openblas)
    has_header dnnl.h || missing+=(onednn)
    has_library libcjson || missing+=(cjson)
    has_library libxxhash || missing+=(xxhash)
    if [ "$with_mpi" = yes ]; then has_library ompi-c || has_library ompi || missing+=(openmpi); fi
    if [ "$with_mpi" = yes ]; then has_program mpirun || missing+=(mpirun); fi
    if [ "$with_browser" = yes ]; then has_program chromium || has_program chromium-browser || has_program google-chrome || missing+=(chromium); fi
    # gcc only recommends the C library's headers
    if has_program apt-get && [ ! -e /usr/include/stdio.h ]; then missing+=(libc-dev); fi
}

detect_manager() {
    for manager in apt-get dnf pacman; do has_program "$manager" && return; done
    manager=none
}

package_of() { # manager word
    case "$1:$2" in
    apt-get:openblas) echo libopenblas-openmp-dev ;;
    apt-get:onednn) echo libdnnl-dev ;;
    apt-get:cjson) echo libcjson-dev ;;
    apt-get:xxhash) echo libxxhash-dev ;;
    apt-get:openmpi) echo libopenmpi-dev ;;
    apt-get:mpirun) echo openmpi-bin ;;
    apt-get:libc-dev) echo libc6-dev ;;
    dnf:g++) echo gcc-c++ ;;
    dnf:pkg-config) echo pkgconf-pkg-config ;;
    dnf:openmpi) echo openmpi-devel ;;
    dnf:mpirun) echo openmpi ;;
    dnf:openblas) echo openblas-devel ;;
    dnf:onednn) echo onednn-devel ;;
    dnf:cjson) echo cjson-devel ;;
    dnf:xxhash) echo xxhash-devel ;;
    pacman:g++) echo gcc ;;
    pacman:pkg-config) echo pkgconf ;;
    pacman:mpirun) echo openmpi ;;
    pacman:*) echo "$2" ;;
    *) echo "$2" ;;
    esac
}

# Runs a command as root; without a way to, says what to run.
as_root() {
    local sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        has_program sudo || fail "neither root nor sudo: as root, run: $all_commands"
        sudo=(sudo)
    fi
    echo "+ ${sudo[*]}${sudo:+ }$*"
    "${sudo[@]}" "$@"
}

# One line when the linker or the loader would take another build of OpenBLAS than the OpenMP one.
check_openblas_build() {
    has_program update-alternatives || return 0
    local name value wrong=()
    while read -r name _ value; do
        case "$name:$value" in
        libopenblas.so*:*/openblas-openmp/*) ;;
        libopenblas.so*) wrong+=("update-alternatives --set $name ${value/openblas-*\//openblas-openmp/}") ;;
        esac
    done < <(update-alternatives --get-selections 2>/dev/null)
    [ "${#wrong[@]}" -eq 0 ] && return 0
    local commands
    commands=$(printf ' && %s' "${wrong[@]}")
    fail "OpenBLAS is not its OpenMP build, which attention needs; as root, run: ${commands# && }"
}

# What scripts/find_cuda.sh does not find, as names of packages in `wanted`, for CUDA `major`.
find_missing_cuda() {
    local found
    found=$(mktemp) || fail "cannot make a temporary file"
    wanted=()
    if "$here/scripts/find_cuda.sh" "$found" 2>/dev/null; then
        major=$(sed -n 's/^CUDA_MAJOR := //p' "$found")
        local suffix=
        [ "$major" -ge 13 ] || suffix=-cu$major
        ! grep -q "its frontend is" "$found" || wanted+=(nvidia-cudnn-frontend)
        ! grep -q "cuDNN 9 is not found\|not for CUDA.*nvidia-cudnn\|older than cuDNN 9" "$found" || wanted+=("nvidia-cudnn-cu$major")
        ! grep -q "NVRTC is not found" "$found" || wanted+=("nvidia-cuda-nvrtc$suffix")
        grep -q "^NCCL_LIBS" "$found" || wanted+=("nvidia-nccl-cu$major")
    else
        major=13
        wanted=(nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime nvidia-cuda-nvrtc nvidia-cublas nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-nccl-cu13)
    fi
    rm -f "$found"
}

# The lines of packages in scripts/cuda_python/requirements.txt: version and hashes.
pinned() { # packages...
    local file=scripts/cuda_python/requirements.txt package
    for package; do
        grep -q "^$package==" "$here/$file" || fail "$file has no $package: install it with pip, or add it to requirements.in and run scripts/pin_packages.sh"
        awk -v name="$package==" 'index($0, name) == 1 { on = 1 } on { print } !/\\$/ { on = 0 }' "$here/$file"
    done
}

# Programs for CUDA 13 need a driver for CUDA 13, release 580 or newer; those for CUDA 12 run with it too.
check_driver() {
    local driver
    driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9]*\.[0-9]*\).*/\1/p' | head -n 1) || true # without one it fails
    [ -n "$driver" ] || {
        echo "no driver here (nvidia-smi): what is installed is for CUDA $major"
        return 0
    }
    [ "${driver%.*}" -ge "$major" ] \
        || fail "this driver runs CUDA $driver, and the toolkit is for CUDA $major: update the driver, or install the toolkit of CUDA $driver and say CUDA=DIRECTORY"
}

install_cuda() {
    local python=${PYTHON:-python3}
    find_missing_cuda
    [ "${#wanted[@]}" -gt 0 ] || return 0
    check_driver
    has_program "$python" || fail "no python3, whose packages were to be installed: ${wanted[*]}"
    pins=$(mktemp) || fail "cannot make a temporary file"
    trap 'rm -f "$pins"' EXIT
    pinned "${wanted[@]}" >"$pins"
    echo "+ $python -m pip install --no-deps --require-hashes --only-binary :all: --target build/python ${wanted[*]}, as scripts/cuda_python pins them"
    "$python" -m pip install -q --no-deps --require-hashes --only-binary :all: --upgrade --target "$here/build/python" -r "$pins" || fail "pip install failed: look at its lines above"
    find_missing_cuda
    [ "${#wanted[@]}" -eq 0 ] || fail "still missing after the installation: ${wanted[*]}; scripts/find_cuda.sh - says why"
}

here=$(cd "$(dirname "$0")/.." && pwd)
[ "$with_cuda" = no ] || install_cuda
find_missing
if [ "${#missing[@]}" -eq 0 ]; then
    check_openblas_build
    echo "dependencies: all there"
    exit 0
fi
detect_manager
packages=()
for word in "${missing[@]}"; do packages+=("$(package_of "$manager" "$word")"); done
if [ "$check_only" = yes ]; then
    echo "dependencies: missing: ${packages[*]}"
    exit 1
fi
case "$manager" in
apt-get)
    echo "installing with apt-get: ${packages[*]}"
    all_commands="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
    as_root apt-get update -q || fail "apt-get update failed: look at its lines above, most likely there is no network"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" \
        || fail "apt-get install failed: look at its lines above"
    ;;
dnf)
    echo "installing with dnf: ${packages[*]}"
    all_commands="dnf install -y ${packages[*]}"
    as_root dnf install -y "${packages[@]}" || fail "dnf install failed: look at its lines above"
    ;;
pacman)
    echo "installing with pacman: ${packages[*]}"
    all_commands="pacman -S --needed --noconfirm ${packages[*]}"
    as_root pacman -S --needed --noconfirm "${packages[@]}" || fail "pacman failed: look at its lines above"
    ;;
*) fail "no apt-get, dnf or pacman here: install with this system's package manager: ${missing[*]} (OpenBLAS built with OpenMP)" ;;
esac
find_missing
[ "${#missing[@]}" -eq 0 ] || fail "still missing after the installation: ${missing[*]}"
check_openblas_build
echo "dependencies: all there"
