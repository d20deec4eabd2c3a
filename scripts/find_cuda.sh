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
# Assigns: CUDA_HOME NVCC CUDA_MAJOR CUDA_CFLAGS CUDA_LIBS CUDA_ARCHS,
#          CUDNN_CFLAGS CUDNN_LIBS (with its frontend and NVRTC), NCCL_CFLAGS NCCL_LIBS: empty if the library is missing
set -uo pipefail
shopt -s nullglob

case "$#:${1-}" in
1:--help | 1:-h)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
1:?*) file=$1 ;;
*)
    echo "find_cuda.sh: unexpected arguments '$*': usage: scripts/find_cuda.sh FILE | -" >&2
    exit 2
    ;;
esac

for name in CUDA NVCC CUDNN CUDNN_FRONTEND NVRTC NCCL DEPS; do
    [[ ${!name-} != *[[:space:]]* ]] || {
        echo "train_diffv2cu: error: $name '${!name}' contains a space: specify a link without spaces" >&2
        exit 1
    }
done
root=${SYSTEM_ROOT-}
here=$(cd "$(dirname "$0")/.." && pwd)
missing=() notes=()
OLDEST=12050 # CUDART_VERSION
machine=$(uname -m) target=$(uname -m)-linux
[ "$machine" != aarch64 ] || target=sbsa-linux # servers

# ---------------------------------------------------------------------------------------------------
# Search paths

# Directories of Python packages: build/python (scripts/install_deps.sh --with-cuda-python), then the interpreter's.
python_packages=()
python_directories() {
    local directory
    while read -r directory; do [ -d "$directory" ] && python_packages+=("$directory"); done < <(
        [ -n "$root" ] || echo "$here/build/python"
        "${PYTHON:-python3}" -c 'import site, sysconfig
places = [sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]
print(*dict.fromkeys(places), sep="\n")' 2>/dev/null
    )
}

# The directories of headers, or of libraries, below an installation directory.
includes_of() { echo "$1/include $1/targets/$target/include $1"; }
libraries_of() { echo "$1/lib64 $1/lib $1/targets/$target/lib $1/lib/$machine-linux-gnu $1"; }

# Installation directories to search, in order.
places_of() { # directory that the caller specified, names of Python packages below nvidia/
    local directory package
    [ -z "$1" ] || {
        echo "$1"
        return
    } # no other directory is searched
    [ -z "${DEPS-}" ] || echo "$DEPS"
    echo "$toolkit"
    [ "$python_toolkit" = yes ] || printf '%s\n' "$root/usr/local" "$root/usr"
    shift
    for directory in ${python_packages[@]+"${python_packages[@]}"}; do
        for package; do echo "$directory/nvidia/$package"; done
        echo "$directory" # its include/ has the frontend
    done
    # last: the libraries of a Python toolkit are beside it
    [ "$python_toolkit" = no ] || printf '%s\n' "$root/usr/local" "$root/usr"
}

find_header() { # name, places...: the include directory
    local name=$1 place directory
    shift
    for place; do
        for directory in $(includes_of "$place") "$place/include/$machine-linux-gnu"; do
            [ -e "$directory/$name" ] && {
                echo "$directory"
                return
            }
        done
    done
    return 1
}

find_library() { # name, places...: the file libNAME.so, or the newest libNAME.so.*
    local name=$1 place directory files
    shift
    for place; do
        for directory in $(libraries_of "$place"); do
            [ -e "$directory/lib$name.so" ] && {
                echo "$directory/lib$name.so"
                return
            }
            files=("$directory/lib$name".so.[0-9]*)
            [ ${#files[@]} -eq 0 ] || {
                printf '%s\n' "${files[@]}" | sort -V | tail -n 1
                return
            }
        done
    done
    return 1
}

find_both() { # header, library, places...: sets header and library to those of the first place that has both
    local place
    for place in "${@:3}"; do
        header=$(find_header "$1" "$place") && library=$(find_library "$2" "$place") && return
    done
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

# ---------------------------------------------------------------------------------------------------
# Libraries

find_toolkit() { # the first one that is new enough, else the first
    local candidate directory header version old=''
    local candidates=(${CUDA-})
    if [ -z "${CUDA-}" ]; then
        for candidate in "${CUDA_HOME-}" "${CUDA_PATH-}"; do [ -z "$candidate" ] || candidates+=("$candidate"); done
        for candidate in $(command -v "${NVCC:-nvcc}"); do
            candidates+=("$(readlink -f "$candidate" | sed 's|/[^/]*/[^/]*$||')" "$(dirname "$(dirname "$candidate")")")
        done
        candidates+=("$root/usr/local/cuda" "$root/opt/cuda")
        mapfile -t -O ${#candidates[@]} candidates < <(printf '%s\n' "$root"/usr/local/cuda-* | sort -rV)
        for directory in ${python_packages[@]+"${python_packages[@]}"}; do
            candidates+=("$directory"/nvidia/cu[0-9]* "$directory/nvidia/cuda_nvcc")
        done
    fi
    toolkit='' nvcc=''
    for candidate in ${candidates[@]+"${candidates[@]}"}; do
        [ -n "$candidate" ] || continue
        nvcc=${NVCC:-$candidate/bin/nvcc}
        command -v "$nvcc" >/dev/null && header=$(find_header cuda_runtime.h "$candidate") || continue
        version=$(defined CUDART_VERSION "$header/cuda_runtime_api.h")
        if [ -n "${CUDA-}" ] || [ "${version:-0}" -ge $OLDEST ]; then
            toolkit=$candidate
            return
        fi
        [ -n "$old" ] || old=$candidate
    done
    toolkit=$old nvcc=${NVCC:-$old/bin/nvcc}
    [ -z "$old" ] || return
    nvcc=''
    if [ -n "${CUDA-}" ]; then
        missing+=("CUDA: $CUDA has no bin/nvcc or no cuda_runtime.h: CUDA=DIRECTORY specifies the toolkit's directory")
    else
        missing+=("CUDA: no nvcc found: install the CUDA toolkit (12.8 or newer) from NVIDIA or the system's packages,\
 run scripts/install_deps.sh --with-cuda-python, or specify CUDA=DIRECTORY")
    fi
}

# The toolkit, cuBLASLt and the runtime. Python packages have a directory per library.
find_cuda() {
    local include libraries=() library name version
    find_toolkit
    [ -n "$toolkit" ] || return
    case "$toolkit" in
    */nvidia/cu[0-9]* | */nvidia/cuda_nvcc)
        python_toolkit=yes
        python_packages=("${toolkit%/nvidia/*}" ${python_packages[@]+"${python_packages[@]}"})
        ;;
    esac
    include=$(find_header cuda_runtime.h "$toolkit")
    version=$(defined CUDART_VERSION "$include/cuda_runtime_api.h")
    cuda_major=$((${version:-0} / 1000))
    while read -r line; do cuda_places+=("$line"); done < <(places_of "" cublas cuda_runtime "cu$cuda_major")
    for name in cublasLt cudart; do
        if library=$(find_library "$name" "$toolkit" "${cuda_places[@]}"); then
            libraries+=("$library")
        else
            missing+=("lib$name: not in $toolkit: install the toolkit's libraries, or\
 python3 -m pip install nvidia-cublas nvidia-cuda-runtime")
        fi
    done
    find_header cublasLt.h "$toolkit" "${cuda_places[@]}" >/dev/null \
        || missing+=("cublasLt.h: not in $toolkit: install the toolkit's cuBLAS headers, or\
 python3 -m pip install nvidia-cublas")
    say CUDA_HOME "$toolkit"
    say NVCC "$nvcc"
    say CUDA_MAJOR "$cuda_major"
    [ "${version:-0}" -ge $OLDEST ] \
        || missing+=("CUDA: $toolkit is version $((${version:-0} / 1000)).$((${version:-0} % 1000 / 10)),\
 12.5 or newer is required; CUDA=DIRECTORY specifies another")
    say CUDA_CFLAGS "$(include_flags "$include" "$(find_header cublasLt.h "$toolkit" "${cuda_places[@]}")")"
    say CUDA_LIBS "$(link_flags ${libraries[@]+"${libraries[@]}"})"
}

# Whether a library of a Python package is for another CUDA version than the toolkit.
wrong_cuda() { # package, library file
    local packages=${2%/nvidia/*} files
    [ "$packages" != "$2" ] || return 1
    files=("$packages/nvidia_$1_cu$cuda_major"-*.dist-info)
    [ ${#files[@]} -eq 0 ] || return 1
    files=("$packages/nvidia_$1_cu"*.dist-info)
    [ ${#files[@]} -gt 0 ]
}

# Finds the first frontend that is new enough. Otherwise frontend_version is the version of an older one.
find_frontend() { # places...
    local place minor major
    frontend='' frontend_version=''
    for place; do
        frontend=$(find_header cudnn_frontend.h "$place") || continue
        major=$(defined CUDNN_FRONTEND_MAJOR_VERSION "$frontend/cudnn_frontend_version.h")
        minor=$(defined CUDNN_FRONTEND_MINOR_VERSION "$frontend/cudnn_frontend_version.h")
        frontend_version=$major.$minor
        [ "$((${major:-0} * 100 + ${minor:-0}))" -lt 116 ] || return 0
    done
    return 1
}

find_cudnn() {
    local without='attention: built-in kernels, without cuDNN' why=() places suffix=-cu$cuda_major
    local header='' library='' frontend frontend_version cudnn cudnn_header
    [ "${CUDNN-}" != no ] && [ "${CUDNN_FRONTEND-}" != no ] || {
        notes+=("$without, as requested")
        return
    }
    local cudnn_help="python3 -m pip install nvidia-cudnn-cu$cuda_major, or CUDNN=DIRECTORY"
    mapfile -t places < <(places_of "${CUDNN-}" cudnn)
    if ! find_both cudnn.h cudnn "${places[@]}"; then
        why+=("cuDNN 9 not found ($cudnn_help)")
    elif [ "$(defined CUDNN_MAJOR "$header/cudnn_version.h")" -lt 9 ] 2>/dev/null; then
        why+=("$library is older than cuDNN 9 ($cudnn_help)")
    elif wrong_cuda cudnn "$library"; then
        why+=("$library is not for CUDA $cuda_major ($cudnn_help)")
    fi
    cudnn=$library cudnn_header=$header
    mapfile -t places < <(places_of "${CUDNN_FRONTEND-}" cudnn_frontend)
    if ! find_frontend "${places[@]}"; then
        local found="not found"
        [ -z "$frontend_version" ] || found="is version $frontend_version, 1.16 or newer is required"
        why+=("cuDNN frontend $found (scripts/install_deps.sh --with-cuda-python,\
 python3 -m pip install nvidia-cudnn-frontend, or CUDNN_FRONTEND=DIRECTORY)")
    fi
    [ "$cuda_major" -lt 13 ] || suffix=
    mapfile -t places < <(places_of "${NVRTC-}" cuda_nvrtc "cu$cuda_major")
    find_both nvrtc.h nvrtc "${places[@]}" \
        || why+=("NVRTC not found (python3 -m pip install nvidia-cuda-nvrtc$suffix, or NVRTC=DIRECTORY)")
    if [ ${#why[@]} -gt 0 ]; then
        notes+=("$without: $(printf '%s; ' "${why[@]}" | sed 's/; $//')")
        return
    fi
    notes+=("attention: cuDNN, $cudnn, frontend $frontend_version in $frontend")
    say CUDNN_CFLAGS "-DUSE_CUDNN$(include_flags "$cudnn_header" "$frontend" "$header")"
    say CUDNN_LIBS "$(link_flags "$cudnn" "$library")"
}

find_nccl() {
    local without='GPUs: one, without NCCL' header library places
    local launch="Slurm; OpenMPI not found (scripts/install_deps.sh --with-mpi)"
    [ "${NCCL-}" != no ] || {
        notes+=("$without, as requested")
        return
    }
    local nccl_help="python3 -m pip install nvidia-nccl-cu$cuda_major, the system's libnccl-dev, or NCCL=DIRECTORY"
    mapfile -t places < <(places_of "${NCCL-}" nccl)
    if ! find_both nccl.h nccl "${places[@]}"; then
        notes+=("$without: not found ($nccl_help)")
        return
    fi
    if wrong_cuda nccl "$library"; then
        notes+=("$without: $library is not for CUDA $cuda_major ($nccl_help)")
        return
    fi
    [ "${MPI-no}" = no ] || launch="MPI or Slurm"
    notes+=("GPUs: many, with NCCL, $library; started by $launch")
    say NCCL_CFLAGS "-DUSE_NCCL$(include_flags "$header")"
    say NCCL_LIBS "$(link_flags "$library")"
}

# Architectures such as "80 90 100": the caller's, else those of the GPUs, else all that nvcc supports.
find_archs() {
    local known arch found archs=()
    known=$("$nvcc" --list-gpu-arch 2>/dev/null)
    if [ -n "${ARCHS-}" ]; then
        archs=()
        for arch in ${ARCHS//,/ }; do
            arch=${arch#sm_} arch=${arch/./}
            [[ $arch =~ ^[0-9]{2,3}[af]?$ ]] || {
                missing+=("ARCHS: '$arch' is not an architecture; specify numbers, such as \"80 90\"")
                continue
            }
            archs+=("$arch")
        done
    elif found=$(gpu_archs) && [ -n "$found" ]; then
        for arch in $found; do
            if [ "$arch" -ge 80 ]; then
                archs+=("$arch")
            else
                notes+=("no code for sm_$arch: 80 or newer is required")
            fi
        done
        [ ${#archs[@]} -gt 0 ] \
            || missing+=("ARCHS: this machine's GPUs are of sm_${found% }; 80 or newer is required\
 (ARCHS=\"...\" compiles for other machines)")
    else
        for arch in 80 89 90 100 120; do [[ -n $known && $known != *compute_$arch* ]] || archs+=("$arch"); done
        notes+=("no GPU detected: compiles for sm_${archs[*]} (ARCHS=\"90\" compiles for H100 and H200 only,\
 in a fifth of the time)")
    fi
    for arch in ${archs[@]+"${archs[@]}"}; do
        [[ -z $known || $known == *compute_${arch%[af]}* ]] \
            || missing+=("ARCHS: $nvcc does not support sm_$arch (it supports $(tr '\n' ' ' <<<"${known//compute_/}")):\
 install a newer toolkit, or specify ARCHS=\"...\"")
    done
    say CUDA_ARCHS "${archs[*]-}"
}
# Without a driver nvidia-smi prints an error on stdout.
gpu_archs() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
        | sed -n 's/^ *\([0-9]*\)\.\([0-9]*\) *$/\1\2/p' | sort -un | tr '\n' ' '
}

# ---------------------------------------------------------------------------------------------------

say() { assignments+=("$1 := $2"); }
assignments=() cuda_places=() cuda_major=0 python_toolkit=no
python_directories
find_cuda
if [ -n "$toolkit" ]; then
    find_cudnn
    find_nccl
    find_archs
fi
if [ ${#missing[@]} -gt 0 ]; then
    printf 'train_diffv2cu: error: %s\n' "${missing[@]}" >&2
    exit 1
fi
if [ "$file" = - ]; then
    printf '%s\n' "${assignments[@]}" "${notes[@]/#/# }"
    exit
fi
[ ! -e "$file" ] || [ -f "$file" ] || {
    echo "train_diffv2cu: error: cannot write $file: it is not a regular file" >&2
    exit 1
}
if ! printf '%s\n' "${assignments[@]}" >"$file.$$" \
    || ! printf '$(info train_diffv2cu: %s)\n' "${notes[@]}" >>"$file.$$"; then
    echo "train_diffv2cu: error: cannot write $file: see the line above" >&2
    exit 1
fi
if cmp -s "$file.$$" "$file"; then rm "$file.$$"; else mv "$file.$$" "$file"; fi
