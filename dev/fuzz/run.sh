#!/usr/bin/env bash
# run.sh: gives damaged and hostile files to the readers of llmc/. For each target: regressions and seeds, then simple
# mutations of them, then large inputs under limits of time and memory (any compiler), then libFuzzer (requires clang,
# libclang-rt and the headers of libomp; without them it is skipped with a message). All output is in build/fuzz; the
# corpus there grows from run to run. The last line is "N passed, N failed", and ", N skipped" without libFuzzer.
# Exit status: 0 nothing failed, 1 something did, 2 usage.
#
# Usage: dev/fuzz/run.sh [--seconds N | --runs N] [--mutations N] [--show FILE] [TARGET...]
#   --seconds N    time of libFuzzer for each target (20); 0: no libFuzzer
#   --runs N       number of inputs of libFuzzer instead
#   --mutations N  mutations of the regressions and seeds (20000)
#   --show FILE    only runs FILE, and prints the messages of the reader (requires one TARGET)
#   TARGET         choices, config, corpus, index, prompts, safetensors, shards, state, tokenizer (all)
# Variables: CC (cc), FUZZ_CC (clang)
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

usage() {
    echo "run.sh: $1: usage: dev/fuzz/run.sh [--seconds N | --runs N] [--mutations N] [--show FILE] [TARGET...]" >&2
    exit 2
}
all=(choices config corpus index prompts safetensors shards state tokenizer)
targets=() seconds=20 runs='' show='' mutations=20000
while [ $# -gt 0 ]; do
    case "$1" in
    --seconds | --runs | --mutations)
        [[ ${2-} =~ ^[0-9]+$ ]] || usage "$1 needs a number"
        case "$1" in --seconds) seconds=$2 ;; --runs) runs=$2 ;; *) mutations=$2 ;; esac
        shift
        ;;
    --show)
        [ -f "${2-}" ] || usage "$1 needs a file"
        show=$2
        shift
        ;;
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' dev/fuzz/run.sh
        exit 0
        ;;
    *)
        [[ " ${all[*]} " == *" $1 "* ]] || usage "unexpected argument '$1'"
        targets+=("$1")
        ;;
    esac
    shift
done
[ ${#targets[@]} -gt 0 ] || targets=("${all[@]}")
[ -z "$show" ] || [ ${#targets[@]} -eq 1 ] || usage "--show needs one TARGET"

CC=${CC:-cc} FUZZ_CC=${FUZZ_CC:-clang}
out=build/fuzz here=dev/fuzz
passed=0 failed=0 skipped=
mkdir -p "$out/crashes" || exit 1
memory=/dev/shm # inputs become files: in memory where possible
[ -w "$memory" ] || memory=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$memory/diffv2_fuzz_run_XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
ASAN_OPTIONS=detect_leaks=0:handle_abort=1:allocator_may_return_null=0:max_allocation_size_mb=256:hard_rss_limit_mb=512
export ASAN_OPTIONS+=:malloc_context_size=4:quarantine_size_mb=16 # both for speed: inputs are short-lived
export UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1

# libFuzzer does not follow hashing, which has one path for all inputs and would take most of the time.
printf '%s\n' 'src:*xxhash.h' 'fun:XXH*' >"$TMPDIR/uncovered"

# Without OpenMP: its threads would outlive the input, and their order varies.
flags=(-std=c11 -O2 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -Wall -Wextra -Wshadow -Werror
    -Wno-unknown-pragmas)
read -ra package_flags <<<"$(pkg-config --cflags openblas libcjson libxxhash)"
# Calls of exit, _exit, open and close go to __wrap_exit, __wrap__exit, __wrap_open and __wrap_close of harness.c.
libraries=(-Wl,--wrap=exit,--wrap=_exit,--wrap=open,--wrap=close -lpthread -lm)
read -ra package_libraries <<<"$(pkg-config --libs libcjson libxxhash)"

report() { # ok or FAIL, text
    echo "$1 $2"
    if [ "$1" = FAIL ]; then failed=$((failed + 1)); else passed=$((passed + 1)); fi
}

# The reason why libFuzzer cannot be used; empty when it can.
libfuzzer_missing() {
    command -v "$FUZZ_CC" >/dev/null || {
        echo "there is no $FUZZ_CC"
        return
    }
    printf '%s\n' '#include <omp.h>' '#include <stdint.h>' '#include <stddef.h>' \
        'int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d == NULL && n; }' >"$TMPDIR/probe.c"
    "$FUZZ_CC" -fsanitize=fuzzer,address,undefined -o "$TMPDIR/probe" "$TMPDIR/probe.c" 2>"$TMPDIR/probe.err" \
        && "$TMPDIR/probe" -runs=1 >/dev/null 2>&1 \
        || echo "$FUZZ_CC cannot build with libFuzzer (requires libclang-rt and libomp-dev):" \
            "$(head -n 1 "$TMPDIR/probe.err")"
}

build() { # program, compiler, target, coverage flags of the target, last sources
    local program=$1 compiler=$2 target=$3 coverage=$4 harness
    harness=$TMPDIR/harness_${compiler##*/}.o
    shift 4
    # shellcheck disable=SC2086 # flags, or nothing
    "$compiler" "${flags[@]}" "${package_flags[@]}" -fsanitize=address,undefined $coverage -c \
        -o "$program.o" "$here/fuzz_$target.c" >"$TMPDIR/build" 2>&1 \
        && { [ -e "$harness" ] || "$compiler" "${flags[@]}" "${package_flags[@]}" -fsanitize=address,undefined -c \
            -o "$harness" "$here/harness.c" >>"$TMPDIR/build" 2>&1; } \
        && "$compiler" "${flags[@]}" -fsanitize="address,undefined${coverage:+,fuzzer}" \
            -o "$program" "$program.o" "$harness" "$@" "${libraries[@]}" "${package_libraries[@]}" \
            >>"$TMPDIR/build" 2>&1 && return
    cat "$TMPDIR/build"
    report FAIL "$target: $program does not build"
    return 1
}

# Without libFuzzer, under any compiler.
replay() { # target
    local target=$1 program=$out/replay_$1 start=$SECONDS files=() artifact
    build "$program" "$CC" "$target" "" "$here/replay.c" || return
    if [ -n "$show" ]; then
        FUZZ_SHOW=1 "$program" run 0 "$show" || report FAIL "$target: $show"
        return
    fi
    rm -rf "$out/seeds_$target" "$out/seeds_$target.dict" && mkdir "$out/seeds_$target" || exit 1
    "$program" seeds "$out/seeds_$target" || {
        report FAIL "$target: no seeds"
        return
    }
    files=("$out/seeds_$target"/*)
    [ ! -d "$here/regressions/$target" ] || files+=("$here/regressions/$target"/*)
    artifact=$out/crashes/$target-replay
    if FUZZ_ARTIFACT=$artifact "$program" run "$mutations" "${files[@]}" >"$TMPDIR/log" 2>&1; then
        report "ok  " "$target: seeds and regressions, $(tail -n 1 "$TMPDIR/log") ($((SECONDS - start)) s)"
    else
        cat "$TMPDIR/log"
        report FAIL "$target: dev/fuzz/run.sh --show $artifact $target"
    fi
    start=$SECONDS
    # the harness has its own limits for these
    if ASAN_OPTIONS=$ASAN_OPTIONS:hard_rss_limit_mb=0 FUZZ_SHOW=1 "$program" large >"$TMPDIR/log" 2>&1; then
        report "ok  " "$target: large inputs, $(tail -n 1 "$TMPDIR/log") ($((SECONDS - start)) s)"
    else
        cat "$TMPDIR/log"
        report FAIL "$target: $program large"
    fi
}

explore() { # target
    local target=$1 program=$out/fuzz_$1 log=$out/fuzz_$1.log limit=(-max_total_time="$seconds") regressions=() status
    [ -z "$runs" ] || limit=(-runs="$runs")
    build "$program" "$FUZZ_CC" "$target" \
        "-fsanitize=fuzzer-no-link -fsanitize-coverage-ignorelist=$TMPDIR/uncovered" || return
    mkdir -p "$out/corpus_$target" || exit 1
    [ ! -d "$here/regressions/$target" ] || regressions=("$here/regressions/$target")
    nice "$program" "${limit[@]}" -max_len=16384 -timeout=5 -rss_limit_mb=512 -malloc_limit_mb=256 -detect_leaks=0 \
        -print_final_stats=1 -dict="$out/seeds_$target.dict" -artifact_prefix="$out/crashes/$target-" \
        "$out/corpus_$target" "$out/seeds_$target" "${regressions[@]}" >"$log" 2>&1
    status=$?
    local inputs speed
    inputs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    speed=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
    if [ "$status" -eq 0 ] && [ -n "$inputs" ]; then
        report "ok  " "$target: libFuzzer, $inputs inputs, $speed per second,$(grep -E 'cov: ' "$log" | tail -n 1 \
            | sed -E 's/.*(cov: [0-9]+).*(corp: [0-9]+).*/ \1, \2/')"
    else
        grep -vE '^#[0-9]+.*(NEW|REDUCE|pulse|RELOAD)' "$log" | tail -n 60
        report FAIL \
            "$target: dev/fuzz/run.sh --show $(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1) $target"
    fi
}

missing=''
[ -n "$show" ] || [ "$seconds$runs" = 0 ] || missing=$(libfuzzer_missing)
[ -z "$missing" ] || {
    echo "skip libFuzzer: $missing"
    skipped=", ${#targets[@]} skipped"
}
for target in "${targets[@]}"; do
    replay "$target"
    [ -n "$show" ] || [ -n "$missing" ] || [ "$seconds$runs" = 0 ] || explore "$target"
done
[ -n "$show" ] || echo "$passed passed, $failed failed$skipped"
[ -n "$show" ] || [ $((passed + failed)) -gt 0 ] || exit 1
[ "$failed" -eq 0 ]
