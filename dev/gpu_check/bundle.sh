#!/usr/bin/env bash
# bundle.sh: creates a directory with the dependencies of dev/gpu_check.sh, for a machine that has CUDA, cuDNN and NCCL
# but no network: less than 40 MB of headers, libraries and text from Debian and PyPI packages, which it downloads and
# unpacks without installing them.
#   include/, lib/  BLIS with the usual CBLAS header (instead of OpenBLAS: a third of its size, no Fortran runtime),
#                   cJSON, xxHash, the headers of cuDNN's frontend: what `make DEPS=DIRECTORY` uses
#   corpus/         4 MB of the dictionary in the package dict-gcide, as token shards
#   revision        of the sources, for machines that get them without git
#   source/         with ARCHS: the sources. source/dev/gpu_check.sh is the check, and uses this bundle
#   bin/, sources   with ARCHS: the programs, compiled on this machine (requires CUDA, cuDNN, NCCL), and the digest of
#                   their sources
#   CONTENTS        packages with their versions, and the newest glibc that a library or program requires
#   licenses/       of the packages
# With ARCHS it also writes DIRECTORY.tar.gz, for a machine that has no compiler and no clone of the repository.
# Exit status: 0 the directory is complete, 1 failed (nothing remains), 2 usage.
#
# Usage: dev/gpu_check/bundle.sh DIRECTORY [ARCHS]
#   DIRECTORY   a new one, or a bundle, which is replaced
#   ARCHS       compiles the programs for these GPU architectures, such as 90 (H100, H200) or 80,89,90
set -euo pipefail
export LC_ALL=C
root=$(cd "$(dirname "$0")/../.." && pwd)
LIMIT_MB=40 SOURCE_MB=22 PROGRAMS_MB=60 TEXT_BYTES=4000000

fail() {
    echo "bundle.sh: $1" >&2
    exit "${2:-1}"
}
case "$#:${1-}" in
1:--help | 1:-h)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
[12]:-* | 0:* | [3-9]*) fail "unexpected arguments '$*': usage: dev/gpu_check/bundle.sh DIRECTORY [ARCHS]" 2 ;;
esac
folder=$(realpath -m -- "$1") archs=${2-} # make is called in another directory
[[ $archs =~ ^([0-9]+(,[0-9]+)*)?$ ]] || fail "ARCHS '$archs': must be numbers, such as 90 or 80,90" 2
[ ! -e "$folder" ] || [ -e "$folder/CONTENTS" ] \
    || fail "$folder exists and is not a bundle (it has no CONTENTS): choose another directory"
[ "$(uname -m)" = x86_64 ] || fail "this machine is $(uname -m); bundles require x86_64"
for tool in apt-get dpkg-deb python3 unzip objdump; do
    command -v "$tool" >/dev/null \
        || fail "$tool is missing: bundle.sh requires Debian or Ubuntu, with python3, unzip and binutils"
done
[ -x "$root/text_to_shards" ] || make -s -C "$root" text_to_shards >&2 \
    || fail "make text_to_shards failed: see its output above"

parent=$(dirname "$folder")
mkdir -p "$parent" 2>/dev/null && work=$(mktemp -d "$parent/bundle.XXXXXX" 2>/dev/null) \
    || fail "cannot write to $parent: choose another directory"
trap 'rm -rf "$work"' EXIT
new=$work/new
mkdir -p "$new/include/cjson" "$new/lib" "$new/corpus" "$new/licenses" "$work/debs"

debian=(libblis4-openmp libblas-dev libcjson1 libcjson-dev libxxhash0 libxxhash-dev dict-gcide)
download_debian() {
    local apt=(apt-get -qq -o Acquire::Retries=2 -o APT::Sandbox::User=)
    if ! (cd "$work/debs" && "${apt[@]}" download "${debian[@]}") 2>"$work/apt"; then
        # the package lists are missing or old: download private ones, which requires no root
        mkdir -p "$work/lists/partial" "$work/cache"
        apt+=(-o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
        "${apt[@]}" update 2>"$work/apt" && (cd "$work/debs" && "${apt[@]}" download "${debian[@]}") 2>"$work/apt" \
            || fail "downloading packages failed: $(tail -n 1 "$work/apt")"
    fi
    local deb
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/unpacked"
        dpkg-deb -W --showformat='${Package} ${Version}\n' "$deb" >>"$new/CONTENTS"
    done
}

# The headers are the same in every wheel.
download_frontend() {
    local download=(python3 -m pip download --quiet --no-deps --require-hashes --only-binary=:all:
        --disable-pip-version-check -d "$work/wheels" -r "$work/frontend.txt")
    sed -n '/^nvidia-cudnn-frontend==/,/[^\\]$/p' "$root/scripts/cuda_python/requirements.txt" >"$work/frontend.txt"
    "${download[@]}" 2>"$work/pip" \
        || "${download[@]}" --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 2>"$work/pip" \
        || fail "downloading nvidia-cudnn-frontend failed: $(tail -n 1 "$work/pip")"
    local wheel=("$work"/wheels/nvidia_cudnn_frontend-*.whl)
    unzip -q "${wheel[0]}" 'include/*' '*/licenses/*' -d "$work/frontend" \
        || fail "${wheel[0]##*/} has no include/ or no licenses/: another version?"
    basename "${wheel[0]}" | sed 's/^nvidia_cudnn_frontend-\([^-]*\)-.*/nvidia-cudnn-frontend \1/' >>"$new/CONTENTS"
}

# For any x86-64 CPU with AVX2. LD_LIBRARY_PATH locates their libraries on the other machine (programs.py).
build_programs() {
    local program source=$new/source
    mkdir "$source"
    git -C "$root" ls-files -z | tar -C "$root" --null -T - -cf - | tar -C "$source" -xf - \
        || fail "copying the files that git lists failed: see above"
    local make=(make -C "$source" BUILD="$work/build" DEPS="$new" MPI=no ONEDNN=no ARCHS="${archs//,/ }"
        ARCH=-march=x86-64-v3 REVISION="$(cat "$new/revision")")
    local goals=(cuda_{bf16,fp32}/{train,test}_diffv2cu cuda_bf16/bench_cuda train_diffv2)
    for program in "${goals[@]}"; do
        local precision=bf16
        [[ $program != cuda_fp32/* ]] || precision=fp32
        "${make[@]}" PRECISION=$precision "$work/build/$program" >"$work/make" 2>&1 \
            || fail "building $program failed: $(grep -m 1 -i 'error\|\*\*\*' "$work/make")"
        mkdir -p "$(dirname "$new/bin/$program")"
        strip --strip-debug -o "$new/bin/$program" "$work/build/$program"
    done
    cp -L "$(${CC:-cc} -print-file-name=libgomp.so.1)" "$new/lib" # of the compiler, for a machine without one
    python3 "$source/dev/gpu_check/programs.py" >"$new/sources"
    echo "programs for sm_${archs//,/, sm_}: ${goals[*]}" >>"$new/CONTENTS"
}

echo "packages: ${debian[*]} nvidia-cudnn-frontend"
download_debian
download_frontend

usr=$work/unpacked/usr system=$work/unpacked/usr/lib/x86_64-linux-gnu
cp "$usr"/include/xxhash.h "$new/include"
cp "$(find "$usr/include" -name 'cblas*.h' ! -name '*f77*' ! -name '*mangling*' | head -n 1)" "$new/include/cblas.h"
cp "$(find "$usr/include" -name 'cblas_mangling*.h' | head -n 1)" "$new/include/cblas_mangling.h"
cp "$usr"/include/cjson/cJSON.h "$new/include/cjson"
cp -r "$work"/frontend/include/. "$new/include"
cp "$system"/blis-openmp/libblas.so.3 "$new/lib"
ln -s libblas.so.3 "$new/lib/libopenblas.so" # the name that the Makefile searches for
cp -L "$system"/libcjson.so.1 "$system"/libxxhash.so.0 "$new/lib"
for package in libblis4-openmp libcjson1 libxxhash0 dict-gcide; do
    cp "$usr/share/doc/$package/copyright" "$new/licenses/$package"
done
cp "$(find "$work/frontend" -path '*licenses*' -type f | head -n 1)" "$new/licenses/nvidia-cudnn-frontend"

# Not a pipe: zcat would fail when head ends first.
zcat "$usr"/share/dictd/gcide.dict.dz >"$work/all"
head -c "$TEXT_BYTES" "$work/all" >"$work/gcide.txt"
"$root/text_to_shards" --out "$new/corpus" --delimiter '\n\n\n' "$work/gcide.txt" >"$work/shards" 2>&1 \
    || fail "text_to_shards failed: $(tail -n 1 "$work/shards")"
git -C "$root" describe --always --dirty >"$new/revision" 2>/dev/null || echo unknown >"$new/revision"
if [ -n "$archs" ]; then
    build_programs
    LIMIT_MB=$((LIMIT_MB + SOURCE_MB + PROGRAMS_MB * $(wc -w <<<"${archs//,/ }")))
fi
newest=0
while read -r file; do
    needs=$(objdump -T "$file" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
    newest=$(printf '%s\n' "$newest" "${needs#GLIBC_}" | sort -V | tail -n 1)
done < <(find "$new/lib" "$new/bin" -type f 2>/dev/null)
echo "newest glibc that a library or program requires: $newest" >>"$new/CONTENTS"

kilobytes=$(du -sk --apparent-size "$new" | cut -f1)
[ "$kilobytes" -lt $((LIMIT_MB * 1000)) ] \
    || fail "the bundle has $((kilobytes / 1000)) MB, more than $LIMIT_MB: check which package grew"
rm -rf "$folder"
mv "$new" "$folder"
[ -z "$archs" ] || tar -C "$parent" -czf "$folder.tar.gz" "$(basename "$folder")"
cat "$folder/CONTENTS"
echo "$folder: $((kilobytes / 1000)).$((kilobytes % 1000 / 100)) MB"
