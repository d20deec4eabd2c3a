# stages.sh: runs the stages of scripts/test.sh side by side, and counts their tests. scripts/test.sh sources it.
#
# A stage is a function and a name. It runs in a process of its own, in the order of the list, as many at once as
# run_stages is told. Its output is a file, which is printed whole and in the order of the list; that of the first
# unfinished stage is printed as it grows. Of a stage, $scratch is its own directory, and $all that of all of them.
# shellcheck shell=bash
passed=0 failed=0 skipped=0
stage_names=() stage_functions=() workers=()

pass() {
    echo "ok   $1"
    passed=$((passed + 1))
}
fail() {
    echo "FAIL $1"
    failed=$((failed + 1))
}
skip() {
    echo "skip $1"
    skipped=$((skipped + 1))
}
finish() {
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ]
    exit
}

# Builds targets. A failed build is a failed test. Two stages never build in one directory (BUILD) at once.
build() { # name, arguments of make...
    local name=$1 start=$SECONDS directory=build
    shift
    [[ " $* " =~ \ BUILD=([^ ]+) ]] && directory=${BASH_REMATCH[1]}
    if flock "$all/${directory//\//_}.lock" make -s -j2 "$@" >"$scratch/build" 2>&1; then
        pass "build: $name ($((SECONDS - start)) s)"
    else
        cat "$scratch/build"
        fail "build: $name"
        return 1
    fi
}

# Runs a test program and adds the counts of its last line, "N passed, N failed[, N skipped]". A program fails if it
# prints no such line, if it runs and skips nothing, or if its exit status contradicts the line.
run() { # name, command...
    local name=$1 status last
    shift
    "$@" 2>&1 | tee "$scratch/tests"
    status=${PIPESTATUS[0]}
    last=$(tail -n 1 "$scratch/tests")
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed(,\ ([0-9]+)\ skipped)?$ ]]; then
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        skipped=$((skipped + ${BASH_REMATCH[4]:-0}))
        if [ $((BASH_REMATCH[1] + BASH_REMATCH[2] + ${BASH_REMATCH[4]:-0})) -eq 0 ]; then
            fail "$name ran no test"
        elif [ $((status != 0)) -ne $((BASH_REMATCH[2] != 0)) ]; then
            fail "$name ended with status $status, which contradicts '$last'"
        fi
    else
        passed=$((passed + $(grep -c '^ok ' "$scratch/tests")))
        failed=$((failed + $(grep -c '^FAIL ' "$scratch/tests")))
        fail "$name ended with status $status before its last test"
    fi
}

stage() { # function, name
    stage_functions+=("$1")
    stage_names+=("$2")
}
run_stage() { # index
    scratch=$all/$1 passed=0 failed=0 skipped=0
    local start=$SECONDS
    echo "== ${stage_names[$1]}"
    "${stage_functions[$1]}"
    echo "     ${stage_names[$1]}: $((SECONDS - start)) s"
    echo "$passed $failed $skipped" >"$scratch/counts"
}
# Runs the next stage that no other worker has taken, until there is none.
worker() {
    local i
    while i=$(flock "$all/next" sh -c 'i=$(cat "$1"); echo $((i + 1)) >"$1"; echo "$i"' - "$all/next") \
        && [ "$i" -lt ${#stage_names[@]} ]; do
        mkdir "$all/$i"
        (run_stage "$i") >"$all/$i/output" 2>&1
        : >"$all/$i/ended"
    done
}
print_new_output() { # file, number of bytes that are printed already: sets `printed`
    local size
    size=$(stat -c %s "$1" 2>/dev/null) || return
    [ "$size" -le "$2" ] || tail -c "+$(($2 + 1))" "$1" | head -c $((size - $2))
    printed=$size
}
run_stages() { # number of stages at once, all at least one
    local i counts printed
    echo 0 >"$all/next"
    trap 'stop_stages; exit 130' INT TERM HUP PIPE
    set -m # without job control, processes in the background ignore SIGINT, which tests send
    for ((i = 0; i < $1; i++)); do
        worker </dev/null &
        workers+=($!)
    done
    set +m
    for i in "${!stage_names[@]}"; do
        printed=0
        while [ ! -e "$all/$i/ended" ] && kill -0 "${workers[@]}" 2>/dev/null; do
            sleep 0.5
            print_new_output "$all/$i/output" "$printed"
        done
        print_new_output "$all/$i/output" "$printed"
        if read -ra counts 2>/dev/null <"$all/$i/counts"; then
            passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
        else
            fail "the stage ${stage_names[i]} ended before its last test"
        fi
    done
}
processes_of() { # process: itself and all that it started
    local child
    echo "$1"
    for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do processes_of "$child"; done
}
stop_stages() {
    local processes
    mapfile -t processes < <(for i in "${workers[@]}"; do processes_of "$i"; done)
    kill "${processes[@]}" 2>/dev/null
    wait
}
