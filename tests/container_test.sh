#!/usr/bin/env bash
# container_test.sh: builds the image of the Containerfile for CPUs in a root that has nothing but apt, and runs its
# programs as another user; asks pip whether the packages for GPUs are there for x86-64 and aarch64, without installing
# them. Installs mmdebstrap and buildah with apt-get if they are missing. Requires root and 3 GB in TMPDIR. The last
# line is "N passed, N failed". Exit status: 0 nothing failed, 1 something failed or the tools are not available.
#
# Usage: tests/container_test.sh [--check]
#   --check   only checks that the tools are available
cd "$(dirname "$0")/.." || exit 1
source tests/shell_tests.sh
PATH=$PATH:/usr/sbin:/sbin
require_programs 'mmdebstrap buildah' mmdebstrap buildah
[ "${1-}" != --check ] || exit 0

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
suite=$(sed -n 's/^FROM debian://p' Containerfile)
container=trial
export BUILDAH_ISOLATION=chroot
builds() { buildah --root "$work/storage" --runroot "$work/run" "$@"; } # arguments of buildah...
inside() { builds run --user nobody "$container" -- sh -ec "$1" >"$work/out" 2>&1 || fail "$(tail -n 5 "$work/out")"; }

test_the_image_is_built_from_a_clean_root() {
    local base
    mmdebstrap --variant=apt "$suite" "$work/base.tar" 2>"$work/out" || fail "$(tail -n 5 "$work/out")"
    base=$(builds from scratch)
    builds add -q "$base" "$work/base.tar" / >"$work/out"
    builds commit -q "$base" "debian:$suite" >"$work/out"
    builds bud --pull-never -t diffv2 . >"$work/out" 2>&1 || fail "$(tail -n 20 "$work/out")"
    builds from --pull-never --name "$container" diffv2 >"$work/out"
}
test_installed_programs_train_with_two_ranks_as_another_user() {
    inside 'cd "$(mktemp -d)" && text_to_shards --out text /opt/diffv2/README.md && mpirun --oversubscribe -np 2 \
        train_diffv2 --preset tiny --layers 1 --train-data text --seq-len 64 --batch-size 1 --steps 3 --threads 1'
    contains "$work/out" 'step 3'
}
test_installed_scripts_start() {
    inside 'cd "$(mktemp -d)" && diffv2-lab run smoke --dry-run --data none && diffv2-watch --help'
    contains "$work/out" diff_v2.lr0.002.seed1
}
test_pip_has_the_packages_for_gpus_for_both_processors() {
    local machine package
    while read -r package; do
        for machine in x86_64 aarch64; do
            python3 -m pip index versions --only-binary :all: --platform "manylinux_2_28_$machine" \
                --platform "manylinux_2_27_$machine" --platform "manylinux_2_17_$machine" \
                --platform "manylinux2014_$machine" "${package%==*}" >"$work/out" 2>&1 \
                || fail "$(tail -n 3 "$work/out")"
            grep -qE " ${package#*==}(,|$)" "$work/out" || fail "no $package for $machine: $(tail -n 3 "$work/out")"
        done
    done < <(sed -n '/-cu12==/!s/^\(nvidia-[^ ]*==[^ ]*\).*/\1/p' scripts/cuda_python/requirements.txt)
}

for test in $(tests_in_order); do run_test "$test" container; done
finish
