#!/usr/bin/env bash
# aarch64_test.sh: compiles the trainer for 64-bit ARM with Debian's cross compiler and libraries, and runs it and the
# tests of the operations in qemu, which emulates a process. Installs the tools with apt-get if they are missing. The
# last line is "N passed, N failed". Exit status: 0 nothing failed, 1 something failed or the tools are not available.
#
# Usage: tests/aarch64_test.sh [--check]
#   --check   only checks that the tools are available
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
require_programs 'mmdebstrap qemu-aarch64-static aarch64-linux-gnu-gcc' \
    mmdebstrap qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
[ "${1-}" != --check ] || exit 0

build=$PWD/build/aarch64
root=$build/root
usr=$root/usr/lib/aarch64-linux-gnu
export QEMU_LD_PREFIX=$root PKG_CONFIG_SYSROOT_DIR=$root PKG_CONFIG_LIBDIR=$usr/pkgconfig OMP_WAIT_POLICY=passive
compiles() { # targets...
    make -s BUILD="$build" CC="aarch64-linux-gnu-gcc --sysroot=$root" ARCH=-march=armv8.2-a MPI=no "${@/#/$build/}" \
        >"$build/out" 2>&1 || fail "$(tail -n 20 "$build/out")"
}
emulates() { # program, arguments...
    qemu-aarch64-static "$build/$1" "${@:2}" >"$build/out" 2>&1 || fail "$(tail -n 5 "$build/out")"
}

# Unpacked, not installed: what update-alternatives would link is linked here.
test_the_libraries_are_unpacked() {
    [ ! -e "$usr/pkgconfig/openblas.pc" ] || return 0
    rm -rf "$root" && mkdir -p "$root"
    mmdebstrap --variant=extract --architectures=arm64 \
        --include=libopenblas-openmp-dev,libdnnl-dev,libcjson-dev,libxxhash-dev,libc6-dev,libgomp1 \
        "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$root" 2>"$build/out" || fail "$(tail "$build/out")"
    ln -s openblas-openmp/libopenblas.so{,.0} "$usr"
    ln -s ../openblas-openmp/pkgconfig/openblas.pc "$usr/pkgconfig"
}
test_all_operations_pass_their_tests() {
    compiles test_operations
    emulates test_operations
}
test_the_trainer_trains_and_resumes() {
    compiles train_diffv2 text_to_shards
    rm -rf "$build/corpus" "$build/run"
    emulates text_to_shards --out "$build/corpus" README.md
    local run=(train_diffv2 --out "$build/run" --threads 1 --steps)
    emulates "${run[@]}" 3 --preset tiny --layers 1 --seq-len 64 --batch-size 1 --train-data "$build/corpus"
    emulates "${run[@]}" 4 --resume
    contains "$build/out" 'training from step 3 to 4'
}

for test in $(tests_in_order); do run_test "$test" aarch64; done
finish
