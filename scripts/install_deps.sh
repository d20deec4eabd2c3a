#!/usr/bin/env bash
# install_deps.sh: installs the missing dependencies of the build with the system's package manager: a C and a C++
# compiler, make, pkg-config, OpenBLAS (its OpenMP build), oneDNN, cJSON, xxHash. Prints the commands that it runs; does
# nothing if nothing is missing. Exit status: 0 all dependencies are installed, 1 not, 2 usage.
#
# Usage: scripts/install_deps.sh [[--check] [--with-mpi | --with-fuzzer] | --with-cuda-python]
#   --check             only prints what is missing
#   --with-mpi          also OpenMPI, for runs of several processes
#   --with-fuzzer       also clang with libFuzzer and omp.h, for dev/fuzz
#   --with-cuda-python  also the missing dependencies of the CUDA build: NVIDIA's Python packages, into build/python.
#                       The cuDNN frontend has a few MB; cuDNN, NCCL, NVRTC or a whole toolkit have gigabytes. Fails
#                       if the driver is older than their CUDA version
set -euo pipefail

fail() {
    echo "install_deps.sh: $1" >&2
    exit "${2:-1}"
}

check_only=no with_fuzzer=no with_mpi=no with_cuda=no
[ "${1-}" != --check ] || { check_only=yes && shift; }
case "$#:${1-}:$check_only" in
0::*) ;;
1:--with-fuzzer:*) with_fuzzer=yes ;;
1:--with-mpi:*) with_mpi=yes ;;
1:--with-cuda-python:no) with_cuda=yes ;;
1:--help:* | 1:-h:*)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
*) fail "unexpected argument '$1'; scripts/install_deps.sh --help prints the usage" 2 ;;
esac

has_program() { command -v "$1" >/dev/null 2>&1; }
has_library() { pkg-config --exists "$1" 2>/dev/null; }
has_header() { echo "#include <$1>" | cc -E -x c - >/dev/null 2>&1; }

# Debian has several builds of OpenBLAS; update-alternatives selects the one that pkg-config, the linker and the loader
# use. The OpenMP build shares its threads with the trainer. The others compete with them.
has_openmp_openblas() {
    has_library openblas || return 1
    has_program apt-get || return 0                                          # only Debian's names tell the build
    [[ $(pkg-config --variable=libdir openblas) == /usr/lib/* ]] || return 0 # not Debian's package
    compgen -G '/usr/lib/*/openblas-openmp/libopenblas.so' >/dev/null
}

# Sets `missing` to names that package_of translates.
find_missing() {
    missing=()
    local program
    for program in gcc g++ make pkg-config; do has_program "$program" || missing+=("$program"); done
    has_openmp_openblas || missing+=(openblas)
    has_header dnnl.h || missing+=(onednn)
    has_library libcjson || missing+=(cjson)
    has_library libxxhash || missing+=(xxhash)
    if [ "$with_mpi" = yes ]; then has_library ompi-c || has_library ompi || missing+=(openmpi); fi
    if [ "$with_mpi" = yes ]; then has_program mpirun || missing+=(mpirun); fi
    if [ "$with_fuzzer" = yes ]; then
        has_program clang || missing+=(clang)
        echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' \
            | clang -fsanitize=fuzzer,address,undefined -o /dev/null -x c - 2>/dev/null || missing+=(compiler-rt)
        echo '#include <omp.h>' | clang -E -x c - >/dev/null 2>&1 || missing+=(openmp)
    fi
    # Debian's gcc does not depend on the headers of the C library
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
    apt-get:compiler-rt) echo libclang-rt-dev ;;
    apt-get:openmp) echo libomp-dev ;;
    apt-get:libc-dev) echo libc6-dev ;;
    dnf:g++) echo gcc-c++ ;;
    dnf:pkg-config) echo pkgconf-pkg-config ;;
    dnf:mpirun) echo openmpi ;;
    dnf:openmp) echo libomp-devel ;;
    dnf:openmpi | dnf:openblas | dnf:onednn | dnf:cjson | dnf:xxhash) echo "$2-devel" ;;
    pacman:g++) echo gcc ;;
    pacman:pkg-config) echo pkgconf ;;
    pacman:mpirun) echo openmpi ;;
    *) echo "$2" ;;
    esac
}

# Runs a command as root, or fails with the commands that root must run.
as_root() {
    local sudo=()
    if [ "$(id -u)" -ne 0 ]; then
        has_program sudo || fail "not root, and sudo is missing; run as root: $all_commands"
        sudo=(sudo)
    fi
    echo "+ ${sudo[*]}${sudo:+ }$*"
    "${sudo[@]}" "$@"
}

# Fails if the linker or the loader uses another build of OpenBLAS than the OpenMP one.
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
    fail "the OpenMP build of OpenBLAS is not selected, and attention requires it; run as root: ${commands# && }"
}

# Sets `wanted` to the packages that scripts/find_cuda.sh does not find, and `major` to their CUDA version.
find_missing_cuda() {
    local found
    found=$(mktemp) || fail "cannot create a temporary file"
    wanted=()
    if "$here/scripts/find_cuda.sh" "$found" 2>/dev/null; then
        major=$(sed -n 's/^CUDA_MAJOR := //p' "$found")
        local suffix=
        [ "$major" -ge 13 ] || suffix=-cu$major
        ! grep -q "cuDNN frontend" "$found" || wanted+=(nvidia-cudnn-frontend)
        ! grep -q "cuDNN 9 not found\|older than cuDNN 9" "$found" \
            || wanted+=("nvidia-cudnn-cu$major")
        ! grep -q "NVRTC not found" "$found" || wanted+=("nvidia-cuda-nvrtc$suffix")
        grep -q "^NCCL_LIBS" "$found" || wanted+=("nvidia-nccl-cu$major")
    else
        major=13
        wanted=(nvidia-cuda-{nvcc,crt,cccl,runtime,nvrtc} nvidia-nvvm nvidia-cublas)
        wanted+=(nvidia-cudnn-cu13 nvidia-cudnn-frontend nvidia-nccl-cu13)
    fi
    rm -f "$found"
}

# Prints the pinned versions and hashes of packages.
pinned() { # packages...
    local file=scripts/cuda_python/requirements.txt package
    for package; do
        grep -q "^$package==" "$here/$file" \
            || fail "$file has no $package: install it with pip, or add it to requirements.in and\
 run scripts/pin_packages.sh"
        awk -v name="$package==" 'index($0, name) == 1 { on = 1 } on { print } !/\\$/ { on = 0 }' "$here/$file"
    done
}

# Programs for CUDA 13 require a driver for CUDA 13 (release 580 or newer), which also runs programs for CUDA 12.
check_driver() {
    local driver
    driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9]*\.[0-9]*\).*/\1/p' | head -n 1) || true
    [ -n "$driver" ] || {
        echo "no driver found (nvidia-smi): installs packages for CUDA $major"
        return 0
    }
    [ "${driver%.*}" -ge "$major" ] \
        || fail "the driver supports CUDA $driver, and the toolkit is CUDA $major: update the driver,\
 or install the toolkit of CUDA $driver and specify CUDA=DIRECTORY"
}

install_cuda() {
    local python=${PYTHON:-python3}
    [[ $here != *[[:space:]]* ]] || fail "'$here' contains a space, which the CUDA build does not support: move it"
    find_missing_cuda
    [ "${#wanted[@]}" -gt 0 ] || return 0
    check_driver
    has_program "$python" || fail "python3 is missing; it is required to install ${wanted[*]}"
    pins=$(mktemp) || fail "cannot create a temporary file"
    # pip would replace the whole directory nvidia/ of its target, with all packages in it
    new=$here/build/python.new
    trap 'rm -rf "$pins" "$new"' EXIT
    pinned "${wanted[@]}" >"$pins"
    echo "+ pip install --target build/python ${wanted[*]} (versions: scripts/cuda_python/requirements.txt)"
    rm -rf "$new"
    "$python" -m pip install -q --no-deps --require-hashes --only-binary :all: \
        --target "$new" -r "$pins" || fail "pip install failed: see its output above"
    mkdir -p "$here/build/python" && cp -rlf "$new/." "$here/build/python" || fail "cannot write $here/build/python"
    find_missing_cuda
    [ "${#wanted[@]}" -eq 0 ] \
        || fail "still missing after the installation: ${wanted[*]}; scripts/find_cuda.sh - prints the reason"
}

here=$(cd "$(dirname "$0")/.." && pwd)
[ "$with_cuda" = no ] || install_cuda
find_missing
if [ "${#missing[@]}" -eq 0 ]; then
    check_openblas_build
    echo "dependencies: all installed"
    exit 0
fi
detect_manager
packages=()
for word in "${missing[@]}"; do packages+=("$(package_of "$manager" "$word")"); done
if [ "$check_only" = yes ]; then
    echo "dependencies: missing: ${packages[*]}"
    exit 1
fi
[ "$manager" = none ] || echo "installing with $manager: ${packages[*]}"
case "$manager" in
apt-get)
    all_commands="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
    as_root apt-get update -q || fail "apt-get update failed: see its output above; the network may be unavailable"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" \
        || fail "apt-get install failed: see its output above"
    ;;
dnf)
    all_commands="dnf install -y ${packages[*]}"
    as_root dnf install -y "${packages[@]}" || fail "dnf install failed: see its output above"
    ;;
pacman)
    all_commands="pacman -S --needed --noconfirm ${packages[*]}"
    as_root pacman -S --needed --noconfirm "${packages[@]}" || fail "pacman failed: see its output above"
    ;;
*) fail "no apt-get, dnf or pacman: install with the system's package manager: ${missing[*]} (OpenBLAS with OpenMP)" ;;
esac
find_missing
[ "${#missing[@]}" -eq 0 ] || fail "still missing after the installation: ${missing[*]}"
check_openblas_build
echo "dependencies: all installed"
