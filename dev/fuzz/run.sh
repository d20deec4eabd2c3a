#!/usr/bin/env bash
# run.sh: gives damaged and hostile files to the readers of llmc/, with libFuzzer. For each target: regressions and
# seeds, then large inputs under limits of time and memory, then mutations. Requires clang with libFuzzer
# (scripts/install_deps.sh --with-fuzzer); without it all targets are skipped. All output is in build/fuzz; the corpus
# there grows from run to run. The last line is "N passed, N failed", and ", N skipped" without libFuzzer.
# Exit status: 0 nothing failed, 1 something did, 2 usage.
#
# Usage: dev/fuzz/run.sh [TARGET...] [-OPTION=VALUE...]
#   TARGET           config, index, prompts, safetensors, shards, state, tokenizer (all)
#   -OPTION=VALUE    options of libFuzzer, for example -runs=1000000 (-max_total_time=20)
# FUZZ_SHOW=1 build/fuzz/TARGET FILE runs one file and prints the messages of the reader.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

targets=() options=()
for argument; do
    case "$argument" in
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' dev/fuzz/run.sh
        exit 0
        ;;
    -*=*) options+=("$argument") ;;
    *) targets+=("$argument") ;;
    esac
    [[ $argument == -*=* || -e dev/fuzz/fuzz_$argument.c ]] || {
        echo "run.sh: there is no target '$argument': usage: dev/fuzz/run.sh [TARGET...] [-OPTION=VALUE...]" >&2
        exit 2
    }
done
[ ${#targets[@]} -gt 0 ] || targets=(config index prompts safetensors shards state tokenizer)
[ ${#options[@]} -gt 0 ] || options=(-max_total_time=20)
missing=$(scripts/install_deps.sh --check --with-fuzzer) || {
    echo "skip fuzzing: $missing (scripts/install_deps.sh --with-fuzzer)"
    echo "0 passed, 0 failed, ${#targets[@]} skipped"
    exit 0
}

out=build/fuzz passed=0 failed=0
mkdir -p $out/crashes || exit 1
memory=/dev/shm # inputs become files: in memory where possible
[ -w "$memory" ] || memory=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$memory/diffv2_fuzz_run_XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
ASAN_OPTIONS=detect_leaks=0:handle_abort=1:allocator_may_return_null=0:max_allocation_size_mb=256
export ASAN_OPTIONS+=:malloc_context_size=4:quarantine_size_mb=16 # both for speed: inputs are short-lived
export UBSAN_OPTIONS=print_stacktrace=1:abort_on_error=1

# Without OpenMP: its threads would outlive the input, and their order varies. Calls of exit, _exit, open and close go
# to fuzz.h.
flags=(-std=c11 -O2 -g1 -fno-omit-frame-pointer -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all
    -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -Wl,--wrap=exit,--wrap=_exit,--wrap=open,--wrap=close)
read -ra packages <<<"$(pkg-config --cflags openblas libcjson libxxhash) $(pkg-config --libs libcjson libxxhash)"

report() { # ok or FAIL, text
    echo "$1 $2"
    if [ "$1" = FAIL ]; then failed=$((failed + 1)); else passed=$((passed + 1)); fi
}
limits=(-timeout=5 -rss_limit_mb=512 -malloc_limit_mb=32)
fuzz() { # target, arguments of libFuzzer...: fails with the end of its output
    local program=$out/$1
    shift
    "$program" -detect_leaks=0 -print_final_stats=1 "$@" >"$TMPDIR/log" 2>&1 && return
    grep -vE '^#[0-9]+.*(NEW|REDUCE|pulse|RELOAD)' "$TMPDIR/log" | tail -n 60
    return 1
}
stat() { sed -n "s/^stat::$1: *//p" "$TMPDIR/log"; }

run_files() { # target, directories...
    local files
    mapfile -t files < <(find "${@:2}" -type f)
    if fuzz "$1" "${limits[@]}" "${files[@]}"; then
        report "ok  " "$1: regressions and seeds, $(grep -c '^Executed ' "$TMPDIR/log") files"
    else
        report FAIL "$1: FUZZ_SHOW=1 $out/$1 $(sed -n 's/^Running: //p' "$TMPDIR/log" | tail -n 1)"
    fi
}

# Each in its own process, with at most 15 s of CPU time and 600 MiB, which include the needs of the sanitizers.
run_large() { # target, files...
    local target=$1 file largest=0 start=$SECONDS
    shift
    for file; do
        if ! (ulimit -t 15 && fuzz "$target" -timeout=60 -rss_limit_mb=600 -malloc_limit_mb=256 "$file"); then
            report FAIL "$target: large input $file: FUZZ_SHOW=1 $out/$target $file"
            return
        fi
        [ "$(stat peak_rss_mb)" -le "$largest" ] || largest=$(stat peak_rss_mb)
        rm "$file"
    done
    if [ "$largest" -gt 600 ]; then
        report FAIL "$target: a large input takes $largest MiB, and the limit is 600"
    else
        report "ok  " "$target: large inputs, $#, up to $largest MiB ($((SECONDS - start)) s)"
    fi
}

explore() { # target, directories...
    mkdir -p "$out/corpus_$1" || exit 1
    if fuzz "$1" "${limits[@]}" -max_len=16384 -artifact_prefix="$out/crashes/$1-" "${options[@]}" \
        "$out/corpus_$1" "${@:2}"; then
        report "ok  " "$1: $(stat number_of_executed_units) inputs, $(stat average_exec_per_sec) per second,$(
            sed -nE 's/.*(cov: [0-9]+).*(corp: [0-9]+).*/ \1, \2/p' "$TMPDIR/log" | tail -n 1
        )"
    else
        report FAIL "$1: FUZZ_SHOW=1 $out/$1 $(sed -n 's/.*Test unit written to //p' "$TMPDIR/log" | tail -n 1)"
    fi
}

for target in "${targets[@]}"; do
    seeds=$out/seeds_$target known=("$out/seeds_$target")
    rm -rf "$seeds"{,.large} && mkdir "$seeds"{,.large} || exit 1
    if ! clang "${flags[@]}" -o "$out/$target" "dev/fuzz/fuzz_$target.c" "${packages[@]}" -lpthread -lm; then
        report FAIL "$target: dev/fuzz/fuzz_$target.c does not build"
        continue
    elif ! FUZZ_SEEDS=$seeds "$out/$target" >"$TMPDIR/log" 2>&1; then
        cat "$TMPDIR/log"
        report FAIL "$target: FUZZ_SEEDS=$seeds $out/$target"
        continue
    fi
    [ ! -d "dev/fuzz/regressions/$target" ] || known+=("dev/fuzz/regressions/$target")
    run_files "$target" "${known[@]}"
    compgen -G "$seeds.large/*" >/dev/null && run_large "$target" "$seeds.large"/*
    explore "$target" "${known[@]}"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
