#!/usr/bin/env bash
# short.sh: tests and measures the trainer on a GPU that is rented for minutes. Everything that needs no GPU is done
# before, on a machine without one: programs and data travel as files.
#
# In a clone, on Debian or Ubuntu for x86-64, with CUDA, cuDNN, NCCL, a compiler and a network:
#   short.sh prepare [ARCHS]       makes build/short/check: this script and check.tar.gz, less than 40 MB. ARCHS: GPU
#                                  architectures (default: 90, for H100 and H200; A100: 80; RTX 40: 89; B200: 100)
#   short.sh prepare-gap [ARCHS]   makes build/short/gap: this script, gap.tar.gz with the trainer, and corpus.tar.xz
#                                  of build/short/corpus, a corpus of data/prepare.py
# On the rented machine, in a copy of that directory:
#   short.sh first                 300 seconds: is every result right? Then the time of steps, as far as time suffices
#   short.sh second SECONDS        continues: PyTorch, published models, decoding, attention, resumed runs, races
#   short.sh gap MINUTES           a period of the plan loss-gap. The next one continues after it, if state.tar.gz of
#                                  its results is put into the directory
#
# The rented machine requires a driver, Python 3.8 (gap: 3.10.12) and the libraries of CUDA, cuDNN and NCCL, of a
# toolkit or of the Python packages that PyTorch installs; no network and no compiler. Results are written to $OUT
# (default: results/ of that directory). A check writes gpu-DEVICE-DATE.json and .txt (to be committed in results/),
# failed.txt (read it first), summary.txt, log.txt.gz. A period writes gap.txt, state.tar.gz. What is unpacked stays in
# $SHORT_HOME (default: ~/diffv2_short) for later calls on the same machine. A check on another machine continues from
# results/gpu-DEVICE-*.json of the clone, if programs have the same sources.
# Exit status: 0 done; 1 something failed; 2 usage; 3 something is unfinished
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "$0")" && pwd)
LIMIT_MB=40 TEXT_BYTES=4000000
DEBIAN="libblis4-openmp libblas-dev libcjson1 libcjson-dev libxxhash0 libxxhash-dev dict-gcide"

fail() {
    echo "short.sh: $1" >&2
    exit "${2:-1}"
}
usage() { fail "$1: usage: short.sh prepare [ARCHS] | prepare-gap [ARCHS] | first | second SECONDS | gap MINUTES" 2; }
number() { [[ $1 =~ ^[0-9]{1,5}$ ]] && [ "$1" -gt 0 ] || usage "'$1' is no positive number of $2"; }

# ---------------------------------------------------------------------------------------------------
# prepare

# Headers and libraries of Debian packages and of cuDNN's frontend, in build/short/deps, unpacked without installing
# them. BLIS with the usual CBLAS header instead of OpenBLAS: a third of its size, no Fortran runtime.
dependencies() {
    local new=$work/deps usr=$work/unpacked/usr system=$work/unpacked/usr/lib/x86_64-linux-gnu deb package wheel
    [ ! -e "$short/deps/CONTENTS" ] || return 0
    mkdir -p "$new/include/cjson" "$new/lib" "$new/licenses" "$work/debs" "$work/lists/partial" "$work/cache"
    local apt=(apt-get -qq -o Acquire::Retries=2 -o APT::Sandbox::User=)
    # shellcheck disable=SC2086 # a list of packages
    if ! (cd "$work/debs" && "${apt[@]}" download $DEBIAN) 2>"$work/said"; then
        # the package lists are missing or old: download private ones, which requires no root
        apt+=(-o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
        "${apt[@]}" update 2>"$work/said" && (cd "$work/debs" && "${apt[@]}" download $DEBIAN) 2>"$work/said" \
            || fail "downloading packages failed: $(tail -n 1 "$work/said")"
    fi
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/unpacked"
        dpkg-deb -W --showformat='${Package} ${Version}\n' "$deb" >>"$new/CONTENTS"
    done
    sed -n '/^nvidia-cudnn-frontend==/,/[^\\]$/p' "$root/scripts/cuda_python/requirements.txt" >"$work/frontend.txt"
    python3 -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --disable-pip-version-check \
        --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
        -d "$work/wheels" -r "$work/frontend.txt" 2>"$work/said" \
        || fail "downloading nvidia-cudnn-frontend failed: $(tail -n 1 "$work/said")"
    wheel=("$work"/wheels/nvidia_cudnn_frontend-*.whl)
    python3 -m zipfile -e "${wheel[0]}" "$work/frontend"
    basename "${wheel[0]}" | sed 's/^nvidia_cudnn_frontend-\([^-]*\)-.*/nvidia-cudnn-frontend \1/' >>"$new/CONTENTS"
    cp -r "$work"/frontend/include/. "$usr/include/xxhash.h" "$new/include"
    cp "$(find "$usr/include" -name 'cblas*.h' ! -name '*f77*' ! -name '*mangling*' | head -n 1)" "$new/include/cblas.h"
    cp "$(find "$usr/include" -name 'cblas_mangling*.h' | head -n 1)" "$new/include/cblas_mangling.h"
    cp "$usr/include/cjson/cJSON.h" "$new/include/cjson"
    cp "$system/blis-openmp/libblas.so.3" "$new/lib"
    ln -s libblas.so.3 "$new/lib/libopenblas.so" # the name that the Makefile searches for
    cp -L "$system/libcjson.so.1" "$system/libxxhash.so.0" "$new/lib"
    cp -L "$(${CC:-cc} -print-file-name=libgomp.so.1)" "$new/lib" # the compiler's, for a machine without one
    for package in libblis4-openmp libcjson1 libxxhash0 dict-gcide; do
        cp "$usr/share/doc/$package/copyright" "$new/licenses/$package"
    done
    cp "$(find "$work/frontend" -path '*licenses*' -type f | head -n 1)" "$new/licenses/nvidia-cudnn-frontend"
    zcat "$usr"/share/dictd/gcide.dict.dz >"$work/all" # not a pipe: zcat would fail when head ends first
    head -c "$TEXT_BYTES" "$work/all" >"$work/gcide.txt"
    "$root/text_to_shards" --out "$new/corpus" --delimiter '\n\n\n' "$work/gcide.txt" >"$work/said" 2>&1 \
        || fail "text_to_shards failed: $(tail -n 1 "$work/said")"
    mv "$new" "$short/deps"
}

# Compiles programs for any x86-64 CPU with AVX2 into build/short/build, which is kept for the next call.
build() { # precision, programs...
    local precision=$1
    shift
    make -C "$root" -j"$(nproc)" BUILD="$short/build" DEPS="$short/deps" MPI=no ONEDNN=no PTX=no ARCHS="$archs" \
        PRECISION="$precision" ARCH=-march=x86-64-v3 "${@/#/$short/build/}" >"$short/make.txt" 2>&1 \
        || fail "building failed: $(grep -m 1 -i 'error\|\*\*\*' "$short/make.txt"); $short/make.txt has all of it"
}

prepare() { # check or gap
    root=$(cd "$here/../.." && pwd) short=$root/build/short
    [ "$1" = check ] || [ -e "$short/corpus/corpus.json" ] \
        || fail "$short/corpus has no corpus.json: data/prepare.py PATH... --out $short/corpus makes a corpus"
    [ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m): programs are compiled for x86-64"
    for tool in apt-get dpkg-deb git make python3 strip; do
        command -v "$tool" >/dev/null || fail "$tool is missing: short.sh prepare requires Debian or Ubuntu, with $tool"
    done
    make -s -C "$root" text_to_shards >&2 || fail "make text_to_shards failed: see its output above"
    mkdir -p "$short" && work=$(mktemp -d "$short/work.XXXXXX") || fail "cannot write to $short"
    trap 'rm -rf "$work"' EXIT
    dependencies
    local new=$work/diffv2_short bf16=(cuda_bf16/train_diffv2cu) fp32=() patterns program
    if [ "$1" = check ]; then
        bf16+=(cuda_bf16/test_diffv2cu cuda_bf16/bench_cuda train_diffv2 predict_diffv2)
        fp32=(cuda_fp32/train_diffv2cu cuda_fp32/test_diffv2cu)
        build fp32 "${fp32[@]}"
    fi
    build bf16 "${bf16[@]}"
    mkdir -p "$new/bin/cuda_bf16" "$new/bin/cuda_fp32" "$new/project"
    cp -r "$short"/deps/. "$new"
    for program in "${bf16[@]}" "${fp32[@]}"; do
        strip --strip-debug -o "$new/bin/$program" "$short/build/$program"
    done
    mapfile -t patterns < <(python3 "$root/dev/gpu_check/programs.py" --patterns)
    git -C "$root" ls-files -z -- "${patterns[@]}" | tar -C "$root" --null -T - -cf - | tar -C "$new/project" -xf - \
        || fail "copying the files that git lists failed: see above"
    python3 "$root/dev/gpu_check/programs.py" >"$new/sources"
    git -C "$root" describe --always --dirty >"$new/revision"
    echo "$archs" >"$new/archs"
    echo "programs for sm_${archs// /, sm_}: ${bf16[*]} ${fp32[*]}" >>"$new/CONTENTS"
    finish "$1" "$new"
}

finish() { # name, directory to pack
    rm -rf "${short:?}/$1" && mkdir "$short/$1"
    tar -C "$(dirname "$2")" -c "$(basename "$2")" | gzip -9 >"$short/$1/$1.tar.gz"
    cp "$root/dev/gpu_check/short.sh" "$short/$1"
    [ "$1" != gap ] \
        || (cd "$short/corpus" && tar -cJf ../gap/corpus.tar.xz corpus.json tokenizer.* train_*.bin val_*.bin)
    local bytes megabytes
    bytes=$(du -sb "$short/$1" | cut -f1)
    megabytes=$((bytes / 1000000)).$((bytes / 100000 % 10))
    [ "$bytes" -lt $((LIMIT_MB * 1000000)) ] || fail "$short/$1 has $megabytes MB, more than $LIMIT_MB"
    cat "$2/CONTENTS"
    echo "$short/$1: $megabytes MB, revision $(cat "$2/revision")"
}

# ---------------------------------------------------------------------------------------------------
# on the rented machine

unpack() { # name: into $SHORT_HOME, unless it is there
    home=${SHORT_HOME:-$HOME/diffv2_short}/$1 out=${OUT:-$here/results}
    [ -e "$here/$1.tar.gz" ] || fail "$here/$1.tar.gz is missing: copy the directory that short.sh prepare has made"
    command -v python3 >/dev/null || fail "python3 is missing: its standard library is sufficient"
    mkdir -p "$out" "$home"
    if ! cmp -s "$here/$1.tar.gz" "$home/$1.tar.gz"; then
        rm -rf "$home/diffv2_short" "$home/state"
        tar -C "$home" --no-same-owner -xzf "$here/$1.tar.gz" || fail "$here/$1.tar.gz cannot be unpacked into $home"
        cp "$here/$1.tar.gz" "$home" # complete: the last step
    fi
    bundle=$home/diffv2_short project=$home/diffv2_short/project
}

# Refuses a GPU for which the programs have no code, before its time is spent.
check_device() {
    device=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || device=
    local capability=${device##*, }
    local archs number=${capability/./}
    archs=$(cat "$bundle/archs")
    [ -z "$device" ] || [[ " $archs " == *" $number "* ]] \
        || fail "this GPU is an $device, and the programs are for sm_${archs// /, sm_}: short.sh prepare $number"
}

check() { # seconds
    local began=$SECONDS status=0
    unpack check
    check_device
    while sleep 15; do report; done >/dev/null 2>&1 & # for a machine that is taken away before the end
    local copies=$!
    # shellcheck disable=SC2086 # words
    timeout -k 5 "$1" "$project/dev/gpu_check.sh" --bundle "$bundle" --out "$home/state" ${SHORT_OPTIONS-} \
        --minutes "$(python3 -c 'import sys; print((float(sys.argv[1]) - 10) / 60)' $(($1 - SECONDS + began)))" \
        >"$home/said.txt" 2>&1 || status=$?
    kill "$copies"
    report
    [ "$status" -lt 124 ] || status=3 # stopped by timeout
    return "$status"
}

# The files of $OUT; every copy is made even if another fails.
report() {
    local state=$home/state
    cp "$project"/results/gpu-*-"$(date +%F)".* "$state"/published/gpu-* "$out" 2>/dev/null || true
    gzip -c "$state/log.txt" >"$out/log.txt.gz" || true
    grep '^  FAIL' "$state/results.txt" >"$out/failed.txt" || true
    {
        [ -s "$state/results.json" ] || cat "$home/said.txt"
        grep -A 30 '^Traceback' "$home/said.txt"
        grep -E '^[a-z]+: (passed|failed|skipped|unfinished)' "$state/results.txt"
        tail -n 3 "$state/results.txt"
    } >"$out/summary.txt" || true
    cat "$out/summary.txt"
    head -c 7000 "$out/failed.txt"
}

gap() { # minutes
    unpack gap
    check_device
    mkdir -p "$home/period"
    for file in corpus.tar.xz state.tar.gz; do [ ! -e "$here/$file" ] || cp "$here/$file" "$home/period"; done
    LD_LIBRARY_PATH=$(python3 -c 'import pathlib, sys; sys.path.insert(0, sys.argv[1]); import programs
print(programs.library_path(pathlib.Path(sys.argv[2])))' "$project/dev/gpu_check" "$bundle")
    export LD_LIBRARY_PATH OUT=$out TRAIN_DIFFV2CU=${TRAIN_DIFFV2CU:-$bundle/bin/cuda_bf16/train_diffv2cu}
    # shellcheck disable=SC2086 # words
    exec timeout -k 20 $((60 * $1 + 60)) \
        python3 "$project/dev/gpu_check/gap.py" "$home/period" "$1" ${SHORT_OPTIONS-}
}

case "$#:${1-}" in
1:--help | 1:-h) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" ;;
[12]:prepare | [12]:prepare-gap)
    archs=${2-90}
    [[ $archs =~ ^[0-9]+([,\ ][0-9]+)*$ ]] || usage "ARCHS '$archs': must be numbers, such as 90 or 80,90"
    archs=${archs//,/ }
    prepare "$([ "$1" = prepare ] && echo check || echo gap)"
    ;;
1:first) check "${FIRST_SECONDS:-300}" ;; # tests set it
2:second) number "$2" seconds && check "$2" ;;
2:gap) number "$2" minutes && gap "$2" ;;
*) usage "unexpected arguments '$*'" ;;
esac
