# stages.sh: runs the stages of scripts/test.sh side by side, and counts their tests. scripts/test.sh sources it.
#
# A stage is a function and a name. It runs in a process of its own, in the order of the list, as many at once as
# run_stages is told. Its output is printed when it ends. $scratch is a directory of the stage, $all the directory of
# all stages.
#
# A stage that ends leaves in $records, under its tier and function, the line "revision date seconds CPU-seconds passed
# failed skipped". continue_stages leaves out the stages that are recorded at this revision, so that stages that do not
# fit into one sitting are run in several.
# shellcheck shell=bash
passed=0 failed=0 skipped=0 cpu=0 records=build/stages
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
    local line="$passed passed, $failed failed" i
    print_slowest
    for i in "${!stage_names[@]}"; do # once more at the end, where they are found
        [ "$failed" -eq 0 ] || sed -n "s/^FAIL /failed in ${stage_names[i]}: /p" "$all/$i/output" 2>/dev/null
    done
    [ "$skipped" -eq 0 ] || line="$line, $skipped skipped"
    echo "$line"
    [ "$failed" -eq 0 ]
    exit
}

# Builds targets, and prints each file that it compiles or links. A failed build is a failed test. Two stages never
# build in one directory (BUILD) at once.
build() { # name, arguments of make...
    local name=$1 start=$SECONDS directory=build
    shift
    [[ " $* " =~ \ BUILD=([^ ]+) ]] && directory=${BASH_REMATCH[1]}
    if flock "$all/${directory//\//_}.lock" make --no-print-directory -j2 "$@" 2>&1 | tee "$scratch/build" \
        | sed -un 's/^[^ ]*\(cc\|++\|nvcc\).* -o \([^ ]*\).*/     \2/p'; then
        pass "build: $name ($((SECONDS - start)) s)"
    else
        tail -n 40 "$scratch/build"
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

# Adds a stage if it belongs to the chosen tier, and with --changed if one of its paths has changed since HEAD.
stage() { # tiers, function, name, paths...
    [[ $1 == *$tier* ]] && has_changed "${@:4}" || return 0
    stage_functions+=("$2")
    stage_names+=("$3")
}
has_changed() { # paths
    [ -n "${changed_files-all}" ] || return
    [ -z "${changed_files+set}" ] || [ "$1" = . ] || grep -q "${@/#/-e^}" <<<"$changed_files"
}
count_cpu() { # sets `cpu` to the seconds of CPU time of this shell and its children
    times >"$scratch/times"
    cpu=$(tr 'ms ' '  \n' <"$scratch/times" | awk 'NF { sum += 60 * $1 + $2 } END { printf "%.0f\n", sum }')
}
run_stage() { # index
    scratch=$all/$1 passed=0 failed=0 skipped=0
    local start=$SECONDS at seconds
    at=$(revision)
    echo "== ${stage_names[$1]}"
    "${stage_functions[$1]}"
    seconds=$((SECONDS - start))
    count_cpu
    echo "     ${stage_names[$1]}: $seconds s, $cpu s of CPU"
    echo "$passed $failed $skipped $cpu" >"$scratch/counts"
    mkdir -p "$records"
    echo "$at $(date +%FT%R) $seconds $cpu $passed $failed $skipped" >"$records/$tier.${stage_functions[$1]}"
}
# That of the files as they are: with "+" if some are not committed. Without git each call is another one.
revision() {
    local at
    at=$(git rev-parse --short HEAD 2>/dev/null) || at=$$
    [ -z "$(git status --porcelain 2>&1)" ] || at+=+
    echo "$at"
}
# Keeps only these stages. Sets `missing` to one that there is not.
select_stages() { # functions...
    local i functions=() names=()
    for missing; do
        for i in "${!stage_functions[@]}"; do
            [ "${stage_functions[i]}" != "$missing" ] || break
        done
        [ "${stage_functions[i]}" = "$missing" ] || return
        functions+=("$missing") names+=("${stage_names[i]}")
    done
    stage_functions=("${functions[@]}") stage_names=("${names[@]}")
}
# Sets `record` to what the stage left, and `state` to "fresh" (nothing failed, at this revision), "stale" (at another
# one, or with files that were not committed), "failed" or "never".
stage_state() { # function, revision
    record=() state=never
    read -ra record 2>/dev/null <"$records/$tier.$1" || return
    state=stale
    [ "${record[0]}" != "$2" ] || [[ $2 == *+ ]] || state=fresh
    [ "${record[5]}" -eq 0 ] || state=failed
}
list_stages() {
    local i at
    at=$(revision)
    printf '%-26s %-6s %-10s %-16s %7s %7s  %s\n' stage state revision date seconds CPU result
    for i in "${stage_functions[@]}"; do
        stage_state "$i" "$at"
        [ ${#record[@]} -gt 0 ] && record[4]="${record[4]} passed, ${record[5]} failed, ${record[6]} skipped"
        printf '%-26s %-6s %-10s %-16s %7s %7s  %s\n' "$i" "$state" "${record[@]:0:5}"
    done
}
# Leaves out the stages that are fresh, and counts their tests. The others run in this order: never, failed, stale.
continue_stages() {
    local i at wanted functions=() names=()
    at=$(revision)
    for wanted in fresh never failed stale; do
        for i in "${!stage_functions[@]}"; do
            stage_state "${stage_functions[i]}" "$at"
            if [ $state != $wanted ]; then
                :
            elif [ $state = fresh ]; then
                echo "== ${stage_names[i]}: of ${record[1]}, in ${record[2]} s"
                passed=$((passed + record[4])) skipped=$((skipped + record[6]))
            else
                functions+=("${stage_functions[i]}") names+=("${stage_names[i]}")
            fi
        done
    done
    stage_functions=(${functions[@]+"${functions[@]}"}) stage_names=(${names[@]+"${names[@]}"})
}
# Runs the next stage that no other worker has taken, until there is none.
worker() {
    local i
    while i=$(flock "$all/next" sh -c 'i=$(cat "$1"); echo $((i + 1)) >"$1"; echo "$i"' - "$all/next") \
        && [ "$i" -lt ${#stage_names[@]} ]; do
        mkdir "$all/$i"
        echo "-- ${stage_names[i]} begins"
        (run_stage "$i") >"$all/$i/output" 2>&1
        flock "$all/next" cat "$all/$i/output"
    done
}
print_slowest() { # of all tests and builds
    local slowest
    slowest=$(cat "$all"/*/output 2>/dev/null | sed -n 's/^ok   \(.*\) (\([0-9.]*\) s)$/\2 s  \1/p' | sort -rn \
        | head -n 5)
    [ -z "$slowest" ] || printf 'the slowest:\n%s\n' "$slowest"
}
run_stages() { # number of stages at once, all at least one
    local i counts
    echo 0 >"$all/next"
    trap 'stop_stages; exit 130' INT TERM HUP PIPE
    set -m # without job control, processes in the background ignore SIGINT, which tests send
    for ((i = 0; i < $1; i++)); do
        worker </dev/null &
        workers+=($!)
    done
    set +m
    wait "${workers[@]}"
    for i in "${!stage_names[@]}"; do
        if read -ra counts 2>/dev/null <"$all/$i/counts"; then
            passed=$((passed + counts[0])) failed=$((failed + counts[1])) skipped=$((skipped + counts[2]))
            cpu=$((cpu + counts[3]))
        else
            fail "${stage_names[i]} ended before its last test"
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
    cat "$all"/*/output 2>/dev/null | grep '^FAIL '
}
