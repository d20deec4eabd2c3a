#!/usr/bin/env bash
# find_cuda.sh: where CUDA and what goes with it are, as assignments for make, which the Makefile includes. Looks, for each
# part, in what the caller names, then in DEPS, the toolkit, the system, and the nvidia-* packages of Python; libraries are
# named by file, since those packages have no libNAME.so. What is missing is said on stderr, all of it, one line each.
# Exit status: 0 the trainer can be built (perhaps without cuDNN, NCCL or MPI), 1 not, 2 usage.
#
# Usage: scripts/find_cuda.sh FILE | -
#   FILE   writes it, unless it has these very lines: what was compiled by them is rebuilt when it changes
#   -      prints them
# Variables: CUDA, CUDNN, CUDNN_FRONTEND, NVRTC, NCCL (a directory, or for all but CUDA "no": build without it), NVCC, ARCHS,
#            MPI (no), DEPS (a directory with include/ and lib/), PYTHON (python3), SYSTEM_ROOT (for tests: of the system)
# Assigns: CUDA_HOME NVCC CUDA_MAJOR CUDA_CFLAGS CUDA_LIBS CUDA_ARCHS,
#          CUDNN_CFLAGS CUDNN_LIBS (with its frontend and NVRTC), NCCL_CFLAGS NCCL_LIBS: empty where there is none
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

root=${SYSTEM_ROOT-}
here=$(cd "$(dirname "$0")/.." && pwd)
missing=() notes=()
machine=$(uname -m)

# ---------------------------------------------------------------------------------------------------
# Places

# Directories of Python's packages: ours (scripts/install_deps.sh --with-cuda-python), then the interpreter's.
python_packages=()
python_directories() {
    local directory
    while read -r directory; do [ -d "$directory" ] && python_packages+=("$directory"); done < <(
        [ -n "$root" ] || echo "$here/build/python"
        "${PYTHON:-python3}" -c 'import site, sysconfig
print(*dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]), sep="\n")' 2>/dev/null
    )
}

# The directories of headers, or of libraries, below one where something is installed.
includes_of() { echo "$1/include $1/targets/$machine-linux/include $1"; }
libraries_of() { echo "$1/lib64 $1/lib $1/targets/$machine-linux/lib $1/lib/$machine-linux-gnu $1"; }

# Where a part may be installed, the likeliest first.
places_of() { # what the caller named, names of Python's packages under nvidia/
    local directory package
    [ -z "$1" ] || {
        echo "$1"
        return
    } # named: there or nowhere
    [ -z "${DEPS-}" ] || echo "$DEPS"
    echo "$toolkit"
    [ "$python_toolkit" = yes ] || printf '%s\n' "$root/usr/local" "$root/usr"
    shift
    for directory in ${python_packages[@]+"${python_packages[@]}"}; do
        for package; do echo "$directory/nvidia/$package"; done
        echo "$directory" # whose include/ has the frontend
    done
    [ "$python_toolkit" = no ] || printf '%s\n' "$root/usr/local" "$root/usr" # last: what belongs to the toolkit is beside it
}

find_header() { # name, places...: the directory to include
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

find_library() { # name, places...: the file, the newest where there is no libNAME.so
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

defined() { # a number that a header defines
    sed -n "s/^ *# *define *$1 *\([0-9][0-9]*\).*/\1/p" "$2" 2>/dev/null | head -n 1
}

is_system() { case "$1" in "$root"/usr/include* | "$root"/usr/lib | "$root"/usr/lib/* | "$root"/lib | "$root"/lib/* | "$root"/usr/lib64*) true ;; *) false ;; esac }
include_flags() { # directories, each once
    local directory flags=' '
    for directory; do is_system "$directory" || [[ $flags == *" -isystem $directory "* ]] || flags+="-isystem $directory "; done
    echo "$flags"
}
# The file, and where the loader finds it and what it loads itself.
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
# Parts

find_toolkit() {
    local candidate directory
    local candidates=(${CUDA-})
    if [ -z "${CUDA-}" ]; then
        for candidate in "${CUDA_HOME-}" "${CUDA_PATH-}"; do [ -z "$candidate" ] || candidates+=("$candidate"); done
        if [ -n "${NVCC-}" ]; then candidate=$(command -v "$NVCC"); else candidate=$(command -v nvcc); fi
        [ -z "$candidate" ] || candidates+=("$(dirname "$(dirname "$(readlink -f "$candidate")")")" "$(dirname "$(dirname "$candidate")")")
        candidates+=("$root/usr/local/cuda" "$root/opt/cuda")
        while read -r directory; do candidates+=("$directory"); done < <(printf '%s\n' "$root"/usr/local/cuda-* | sort -rV)
        for directory in ${python_packages[@]+"${python_packages[@]}"}; do
            candidates+=("$directory"/nvidia/cu[0-9]* "$directory/nvidia/cuda_nvcc")
        done
    fi
    toolkit='' nvcc=''
    for candidate in ${candidates[@]+"${candidates[@]}"}; do
        [ -n "$candidate" ] || continue
        nvcc=${NVCC:-$candidate/bin/nvcc}
        if command -v "$nvcc" >/dev/null && find_header cuda_runtime.h "$candidate" >/dev/null; then
            toolkit=$candidate
            return
        fi
    done
    nvcc=''
    if [ -n "${CUDA-}" ]; then
        missing+=("CUDA: $CUDA has no bin/nvcc or no cuda_runtime.h: CUDA=DIRECTORY names the toolkit's directory")
    else missing+=("CUDA: no nvcc found: install CUDA's toolkit (12.8 or newer) from NVIDIA or this system's packages, or scripts/install_deps.sh --with-cuda-python, or say CUDA=DIRECTORY"); fi
}

# What the toolkit must have. Python's packages put each library in a directory of its own.
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
        else missing+=("lib$name: not in $toolkit: install the toolkit's libraries, or python3 -m pip install nvidia-cublas nvidia-cuda-runtime"); fi
    done
    find_header cublasLt.h "$toolkit" "${cuda_places[@]}" >/dev/null \
        || missing+=("cublasLt.h: not in $toolkit: install the toolkit's headers of cuBLAS, or python3 -m pip install nvidia-cublas")
    say CUDA_HOME "$toolkit"
    say NVCC "$nvcc"
    say CUDA_MAJOR "$cuda_major"
    [ "$cuda_major" -ge 12 ] || missing+=("CUDA: $toolkit is $((${version:-0} / 1000)).$((${version:-0} % 1000 / 10)): 12 or newer is needed; CUDA=DIRECTORY names another")
    say CUDA_CFLAGS "$(include_flags "$include" "$(find_header cublasLt.h "$toolkit" "${cuda_places[@]}")")"
    say CUDA_LIBS "$(link_flags ${libraries[@]+"${libraries[@]}"})"
}

# Whether a library of Python's packages is for another CUDA than the toolkit's.
wrong_cuda() { # package, library file
    local packages=${2%/nvidia/*} files
    [ "$packages" != "$2" ] || return 1
    files=("$packages/nvidia_$1_cu$cuda_major"-*.dist-info)
    [ ${#files[@]} -eq 0 ] || return 1
    files=("$packages/nvidia_$1_cu"*.dist-info)
    [ ${#files[@]} -gt 0 ]
}

# The first frontend that is new enough; else the version of an older one is left in frontend_version.
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
    local without='attention by the built-in kernels, without cuDNN' header library frontend frontend_version nvrtc nvrtc_header places=() why=()
    [ "${CUDNN-}" != no ] && [ "${CUDNN_FRONTEND-}" != no ] || {
        notes+=("$without, as asked for")
        return
    }
    while read -r line; do places+=("$line"); done < <(places_of "${CUDNN-}" cudnn)
    header=$(find_header cudnn.h "${places[@]}") && library=$(find_library cudnn "${places[@]}") \
        || why+=("cuDNN 9 is not found (python3 -m pip install nvidia-cudnn-cu$cuda_major, or CUDNN=DIRECTORY)")
    if [ ${#why[@]} -eq 0 ] && [ "$(defined CUDNN_MAJOR "$header/cudnn_version.h")" -lt 9 ] 2>/dev/null; then
        why+=("$library is older than cuDNN 9 (python3 -m pip install nvidia-cudnn-cu$cuda_major, or CUDNN=DIRECTORY)")
    elif [ ${#why[@]} -eq 0 ] && wrong_cuda cudnn "$library"; then why+=("$library is not for CUDA $cuda_major (python3 -m pip install nvidia-cudnn-cu$cuda_major, or CUDNN=DIRECTORY)"); fi
    places=()
    while read -r line; do places+=("$line"); done < <(places_of "${CUDNN_FRONTEND-}" cudnn_frontend)
    find_frontend "${places[@]}" \
        || why+=("its frontend is $([ -z "$frontend_version" ] && echo "not found" || echo "$frontend_version, and 1.16 or newer is needed") (scripts/install_deps.sh --with-cuda-python, python3 -m pip install nvidia-cudnn-frontend, or CUDNN_FRONTEND=DIRECTORY)")
    places=()
    while read -r line; do places+=("$line"); done < <(places_of "${NVRTC-}" cuda_nvrtc "cu$cuda_major")
    nvrtc=$(find_library nvrtc "${places[@]}") && nvrtc_header=$(find_header nvrtc.h "${places[@]}") \
        || why+=("NVRTC is not found (python3 -m pip install nvidia-cuda-nvrtc$([ "$cuda_major" -ge 13 ] || echo "-cu$cuda_major"), or NVRTC=DIRECTORY)")
    if [ ${#why[@]} -gt 0 ]; then
        notes+=("$without: $(printf '%s; ' "${why[@]}" | sed 's/; $//')")
        return
    fi
    notes+=("attention by cuDNN: $library, frontend $frontend_version in $frontend")
    say CUDNN_CFLAGS "-DUSE_CUDNN$(include_flags "$header" "$frontend" "$nvrtc_header")"
    say CUDNN_LIBS "$(link_flags "$library" "$nvrtc")"
}

find_nccl() {
    local without='for one GPU, without NCCL' header library places=()
    [ "${NCCL-}" != no ] || {
        notes+=("$without, as asked for")
        return
    }
    while read -r line; do places+=("$line"); done < <(places_of "${NCCL-}" nccl)
    if ! header=$(find_header nccl.h "${places[@]}") || ! library=$(find_library nccl "${places[@]}"); then
        notes+=("$without: it is not found (python3 -m pip install nvidia-nccl-cu$cuda_major, this system's libnccl-dev, or NCCL=DIRECTORY)")
        return
    fi
    if wrong_cuda nccl "$library"; then
        notes+=("$without: $library is not for CUDA $cuda_major (python3 -m pip install nvidia-nccl-cu$cuda_major, or NCCL=DIRECTORY)")
        return
    fi
    notes+=("many GPUs by NCCL: $library; processes started by $([ "${MPI-no}" = yes ] && echo "MPI or Slurm" || echo "Slurm alone: OpenMPI is not found (scripts/install_deps.sh --with-mpi)")")
    say NCCL_CFLAGS "-DUSE_NCCL$(include_flags "$header")"
    say NCCL_LIBS "$(link_flags "$library")"
}

# Those of the caller, else of the GPUs here, else all that we build for and this nvcc knows. Such as: 80 90 100
find_archs() {
    local known arch archs=()
    known=$("$nvcc" --list-gpu-arch 2>/dev/null)
    if [ -n "${ARCHS-}" ]; then
        archs=()
        for arch in ${ARCHS//,/ }; do
            arch=${arch#sm_} arch=${arch/./}
            [[ $arch =~ ^[0-9]{2,3}[af]?$ ]] || {
                missing+=("ARCHS: '$arch' is not an architecture: numbers such as \"80 90\" are")
                continue
            }
            archs+=("$arch")
        done
    elif [ -n "$(gpu_archs)" ]; then
        read -ra archs <<<"$(gpu_archs)"
    else
        for arch in 80 90 100 120; do [[ -n $known && $known != *compute_$arch* ]] || archs+=("$arch"); done
        notes+=("no GPU here: compiled for sm_${archs[*]} (ARCHS=\"90\" compiles for an H100 alone, in a quarter of the time)")
    fi
    for arch in "${archs[@]}"; do
        [[ -z $known || $known == *compute_${arch%[af]}* ]] \
            || missing+=("ARCHS: $nvcc does not compile for sm_$arch (it knows $(tr '\n' ' ' <<<"${known//compute_/}")): a newer toolkit, or ARCHS=\"...\"")
    done
    say CUDA_ARCHS "${archs[*]}"
}
# Without a driver nvidia-smi prints its complaint on stdout.
gpu_archs() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^ *\([0-9]*\)\.\([0-9]*\) *$/\1\2/p' | sort -un | tr '\n' ' '; }

# ---------------------------------------------------------------------------------------------------

say() { assignments+=("$1 := $2"); } # such that a later assignment of the caller's own wins
assignments=() cuda_places=() cuda_major=0 python_toolkit=no
python_directories
find_cuda
if [ -n "$toolkit" ]; then
    find_cudnn
    find_nccl
    find_archs
fi
if [ ${#missing[@]} -gt 0 ]; then
    printf 'train_diffv2cu: %s\n' "${missing[@]}" >&2
    exit 1
fi
if [ "$file" = - ]; then
    printf '%s\n' "${assignments[@]}" "${notes[@]/#/# }"
    exit
fi
[ ! -e "$file" ] || [ -f "$file" ] || {
    echo "train_diffv2cu: $file is not a file: it cannot be written" >&2
    exit 1
}
printf '%s\n' "${assignments[@]}" >"$file.$$" && printf '$(info train_diffv2cu: %s)\n' "${notes[@]}" >>"$file.$$" || {
    echo "train_diffv2cu: cannot write $file: see the line above" >&2
    exit 1
}
if cmp -s "$file.$$" "$file"; then rm "$file.$$"; else mv "$file.$$" "$file"; fi
