#!/usr/bin/env bash
# find_cuda.sh: locates CUDA and its libraries, and writes assignments that the Makefile includes. For each library it
# searches the directory that the caller specifies, or DEPS, the toolkit, the system, and the nvidia-* Python packages.
# Libraries are given as files, since those packages contain no libNAME.so. It prints one line on stderr for each
# missing requirement. Exit status: 0 the trainer can be built (cuDNN, NCCL and MPI are optional), 1 it cannot, 2 usage.
#
# Usage: scripts/find_cuda.sh FILE | -
#   FILE   writes the assignments to FILE, unless they are unchanged: objects that depend on FILE are rebuilt otherwise
#   -      prints them
# Variables: CUDA, CUDNN, CUDNN_FRONTEND, NVRTC, NCCL (a directory, or for all but CUDA "no": build without it), NVCC,
#            ARCHS, MPI (no), DEPS (a directory with include/ and lib/), PYTHON (python3), SYSTEM_ROOT (for tests)
# Assigns: NVCC CUDA_MAJOR CUDA_CFLAGS CUDA_LIBS CUDA_ARCHS,
#          CUDNN_CFLAGS CUDNN_LIBS (with its frontend and NVRTC), NCCL_CFLAGS NCCL_LIBS: empty if the library is missing
set -uo pipefail
shopt -s nullglob

if [ $# -ne 1 ] || [[ $1 == -?* || -z $1 ]]; then
    echo "find_cuda.sh: unexpected arguments '$*': usage: scripts/find_cuda.sh FILE | -" >&2
    exit 2
fi
file=$1
for name in CUDA NVCC CUDNN CUDNN_FRONTEND NVRTC NCCL DEPS; do
    [[ ${!name-} != *[[:space:]]* ]] || {
        echo "train_diffv2cu: error: $name '${!name}' contains a space: specify a link without spaces" >&2
        exit 1
    }
done
root=${SYSTEM_ROOT-} here=$(cd "$(dirname "$0")/.." && pwd) machine=$(uname -m)
missing=() notes=() assignments=() python_toolkit=no
OLDEST=12050 # CUDART_VERSION
say() { assignments+=("$1 := $2"); }

# Directories of Python packages: build/python (scripts/install_deps.sh --with-cuda-python), then the interpreter's.
mapfile -t python_packages < <(
    [ -n "$root" ] || echo "$here/build/python"
    "${PYTHON:-python3}" -c 'import site, sysconfig
places = [sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]
print(*dict.fromkeys(places), sep="\n")' 2>/dev/null
)

# Installation directories to search, in order. A package that has only versions for other CUDA versions is left out.
places_of() { # directory that the caller specified, names of Python packages below nvidia/
    local directory package versions
    if [ -n "$1" ]; then # no other directory is searched
        echo "$1"
        return
    fi
    [ -z "${DEPS-}" ] || echo "$DEPS"
    echo "$toolkit"
    [ "$python_toolkit" = yes ] || printf '%s\n' "$root/usr/local" "$root/usr"
    for directory in ${python_packages[@]+"${python_packages[@]}"}; do
        for package in "${@:2}"; do
            versions=("$directory/nvidia_${package}_cu"*.dist-info)
            [[ ${#versions[@]} -eq 0 || ${versions[*]} == *"_cu$cuda_major-"* ]] || continue
            echo "$directory/nvidia/$package"
        done
        echo "$directory" # its include/ has the frontend
    done
    # last: the libraries of a Python toolkit are beside it
    [ "$python_toolkit" = no ] || printf '%s\n' "$root/usr/local" "$root/usr"
}

find_header() { # name, place: the include directory
    local directory
    for directory in "$2/include" "$2" "$2/include/$machine-linux-gnu"; do
        [ ! -e "$directory/$1" ] || { echo "$directory" && return; }
    done
    return 1
}
find_library() { # name, place: the file libNAME.so, or the newest libNAME.so.*
    local directory files
    for directory in "$2/"{lib64,lib,"lib/$machine-linux-gnu"} "$2"; do
        [ ! -e "$directory/lib$1.so" ] || { echo "$directory/lib$1.so" && return; }
        files=("$directory/lib$1".so.[0-9]*)
        [ ${#files[@]} -eq 0 ] || { printf '%s\n' "${files[@]}" | sort -V | tail -n 1 && return; }
    done
    return 1
}
# Sets `header` and `library` to those of the first place that has both.
find_first() { # header, library or "", as places_of...
    local place
    while read -r place; do
        header=$(find_header "$1" "$place") || continue
        [ -z "$2" ] || library=$(find_library "$2" "$place") || continue
        return 0
    done < <(places_of "${@:3}")
    return 1
}

defined() { # macro, header: the number that the header defines
    sed -n "s/^ *# *define *$1 *\([0-9][0-9]*\).*/\1/p" "$2" 2>/dev/null | head -n 1
}
is_system() { # whether compiler, linker and loader search the directory
    local directory=${1#"$root"}
    [[ ${directory#/usr} =~ ^/(include|lib|lib64)(/$machine-linux-gnu)?$ ]]
}
include_flags() { # directories
    local directory flags=' '
    for directory; do
        is_system "$directory" || [[ $flags == *" -isystem $directory "* ]] || flags+="-isystem $directory "
    done
    echo "$flags"
}
# The files, and a run path, so that the loader finds them and the libraries beside them.
link_flags() { # library files...
    local library directory flags=''
    for library; do
        directory=$(cd "$(dirname "$library")" && pwd)
        flags+="$library "
        is_system "$directory" || [[ $flags == *"-rpath,$directory "* ]] || flags+="-Wl,-rpath,$directory "
    done
    echo "$flags"
}

# Sets `toolkit` to the first one that is new enough, and `version` to its CUDART_VERSION.
find_toolkit() {
    local candidate directory header old='' why candidates
    why="CUDA: no nvcc found: install the CUDA toolkit (12.8 or newer) from NVIDIA or the system's packages,\
 run scripts/install_deps.sh --with-cuda-python, or specify CUDA=DIRECTORY"
    if [ -n "${CUDA-}" ]; then
        candidates=("$CUDA")
        why="CUDA: $CUDA has no bin/nvcc or no cuda_runtime.h: CUDA=DIRECTORY specifies the toolkit's directory"
    else
        candidates=("${CUDA_HOME-}" "${CUDA_PATH-}")
        nvcc=$(command -v "${NVCC:-nvcc}") && candidates+=("$(readlink -f "$nvcc" | sed 's|/[^/]*/[^/]*$||')")
        candidates+=("$root/usr/local/cuda" "$root/opt/cuda")
        mapfile -t -O ${#candidates[@]} candidates < <(printf '%s\n' "$root"/usr/local/cuda-* | sort -rV)
        for directory in ${python_packages[@]+"${python_packages[@]}"}; do
            candidates+=("$directory"/nvidia/cu[0-9]*)
        done
    fi
    for candidate in "${candidates[@]}"; do
        [ -n "$candidate" ] && nvcc=${NVCC:-$candidate/bin/nvcc} && command -v "$nvcc" >/dev/null \
            && header=$(find_header cuda_runtime.h "$candidate") || continue
        toolkit=$candidate version=$(defined CUDART_VERSION "$header/cuda_runtime_api.h")
        [ "${version:-0}" -lt $OLDEST ] || return 0
        [ -n "$old" ] || old="CUDA: $toolkit is version $((${version:-0} / 1000)).$((${version:-0} % 1000 / 10)),\
 12.5 or newer is required; CUDA=DIRECTORY specifies another"
    done
    missing+=("${old:-$why}")
    return 1
}

find_cuda() { # cuBLASLt and the runtime
    local header library pair includes=() libraries=()
    for pair in cublasLt.h:cublasLt cuda_runtime.h:cudart; do
        if find_first "${pair%:*}" "${pair#*:}" '' "cu$cuda_major"; then
            includes+=("$header") libraries+=("$library")
        else
            missing+=("lib${pair#*:}, ${pair%:*}: not in $toolkit: install the toolkit's libraries and headers, or\
 python3 -m pip install nvidia-cublas nvidia-cuda-runtime")
        fi
    done
    say NVCC "$nvcc"
    say CUDA_MAJOR "$cuda_major"
    say CUDA_CFLAGS "$(include_flags ${includes[@]+"${includes[@]}"})"
    say CUDA_LIBS "$(link_flags ${libraries[@]+"${libraries[@]}"})"
}

find_cudnn() {
    local without='attention: built-in kernels, without cuDNN' why=() found='not found' suffix=-cu$cuda_major
    local header='' library='' frontend='' major='' minor='' cudnn cudnn_header
    if [ "${CUDNN-}" = no ] || [ "${CUDNN_FRONTEND-}" = no ]; then
        notes+=("$without, as requested")
        return
    fi
    local cudnn_help="python3 -m pip install nvidia-cudnn-cu$cuda_major, or CUDNN=DIRECTORY"
    if ! find_first cudnn.h cudnn "${CUDNN-}" cudnn; then
        why+=("cuDNN 9 not found ($cudnn_help)")
    elif [ "$(defined CUDNN_MAJOR "$header/cudnn_version.h")" -lt 9 ] 2>/dev/null; then
        why+=("$library is older than cuDNN 9 ($cudnn_help)")
    fi
    cudnn=$library cudnn_header=$header
    if find_first cudnn_frontend.h '' "${CUDNN_FRONTEND-}" cudnn_frontend; then
        major=$(defined CUDNN_FRONTEND_MAJOR_VERSION "$header/cudnn_frontend_version.h")
        minor=$(defined CUDNN_FRONTEND_MINOR_VERSION "$header/cudnn_frontend_version.h")
        frontend=$header found="is version $major.$minor, 1.16 or newer is required"
    fi
    [ "$((${major:-0} * 100 + ${minor:-0}))" -ge 116 ] \
        || why+=("cuDNN frontend $found (scripts/install_deps.sh --with-cuda-python,\
 python3 -m pip install nvidia-cudnn-frontend, or CUDNN_FRONTEND=DIRECTORY)")
    [ "$cuda_major" -lt 13 ] || suffix=
    find_first nvrtc.h nvrtc "${NVRTC-}" cuda_nvrtc "cu$cuda_major" \
        || why+=("NVRTC not found (python3 -m pip install nvidia-cuda-nvrtc$suffix, or NVRTC=DIRECTORY)")
    if [ ${#why[@]} -gt 0 ]; then
        notes+=("$without: $(printf '%s; ' "${why[@]}" | sed 's/; $//')")
        return
    fi
    notes+=("attention: cuDNN, $cudnn, frontend $major.$minor in $frontend")
    say CUDNN_CFLAGS "-DUSE_CUDNN$(include_flags "$cudnn_header" "$frontend" "$header")"
    say CUDNN_LIBS "$(link_flags "$cudnn" "$library")"
}

find_nccl() {
    local without='GPUs: one, without NCCL' header library
    local launch="Slurm; OpenMPI not found (scripts/install_deps.sh --with-mpi)"
    [ "${MPI-no}" = no ] || launch="MPI or Slurm"
    if [ "${NCCL-}" = no ]; then
        notes+=("$without, as requested")
    elif find_first nccl.h nccl "${NCCL-}" nccl; then
        notes+=("GPUs: many, with NCCL, $library; started by $launch")
        say NCCL_CFLAGS "-DUSE_NCCL$(include_flags "$header")"
        say NCCL_LIBS "$(link_flags "$library")"
    else
        notes+=("$without: not found (python3 -m pip install nvidia-nccl-cu$cuda_major, the system's libnccl-dev,\
 or NCCL=DIRECTORY)")
    fi
}

# Architectures such as "80 90 100": the caller's, else those of the GPUs, else all that nvcc supports.
find_archs() {
    local known arch found archs=()
    known=$("$nvcc" --list-gpu-arch 2>/dev/null)
    # without a driver nvidia-smi prints an error on stdout
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
        | sed -n 's/^ *\([0-9]*\)\.\([0-9]*\) *$/\1\2/p' | sort -un | tr '\n' ' ')
    if [ -n "${ARCHS-}" ]; then
        for arch in ${ARCHS//,/ }; do
            arch=${arch#sm_} arch=${arch/./}
            [[ $arch =~ ^[0-9]{2,3}[af]?$ ]] \
                || missing+=("ARCHS: '$arch' is not an architecture; specify numbers, such as \"80 90\"")
            archs+=("$arch")
        done
    elif [ -n "$found" ]; then
        for arch in $found; do
            [ "$arch" -ge 80 ] && archs+=("$arch") || notes+=("no code for sm_$arch: 80 or newer is required")
        done
        [ ${#archs[@]} -gt 0 ] \
            || missing+=("ARCHS: this machine's GPUs are of sm_${found% }; 80 or newer is required\
 (ARCHS=\"...\" compiles for other machines)")
    else
        for arch in 80 89 90 100 120; do [[ -n $known && $known != *compute_$arch* ]] || archs+=("$arch"); done
        notes+=("no GPU detected: compiles for sm_${archs[*]} (ARCHS=\"90\" compiles for H100 and H200 only,\
 in a fifth of the time)")
    fi
    say CUDA_ARCHS "${archs[*]-}"
}

if find_toolkit; then
    cuda_major=$((version / 1000))
    if [[ $toolkit == */nvidia/cu[0-9]* ]]; then
        python_toolkit=yes
        python_packages=("${toolkit%/nvidia/*}" ${python_packages[@]+"${python_packages[@]}"})
    fi
    find_cuda
    find_cudnn
    find_nccl
    find_archs
fi
if [ ${#missing[@]} -gt 0 ]; then
    printf 'train_diffv2cu: error: %s\n' "${missing[@]}" >&2
    exit 1
fi
text=$(printf '%s\n' "${assignments[@]}" && printf '$(info train_diffv2cu: %s)\n' "${notes[@]}")
if [ "$file" = - ]; then
    echo "$text"
elif [ "$text" != "$(cat "$file" 2>/dev/null)" ] && ! { echo "$text" >"$file.$$" && mv -T "$file.$$" "$file"; }; then
    echo "train_diffv2cu: error: cannot write $file: see the line above" >&2
    exit 1
fi
