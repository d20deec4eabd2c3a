#!/usr/bin/env bash
# soak.sh: short runs on 1 to 4 ranks, each with a random fault, and then resumed; every third has 4 ranks in 2 groups.
# The last checkpoint must be bitwise equal to that of an uninterrupted run on as many ranks. Faults: a rank is killed,
# stopped, signalled, or killed while it saves; all ranks or the launcher are signalled or killed. A program without MPI
# is tested on one rank. Prints one row per round; the last line is "N passed, N failed". Exit status: 0 nothing failed,
# 1 something failed, 2 usage.
#
# Usage: tests/soak.sh [--rounds N] [--seed S] [--ranks N] [--keep]
#   --rounds N   rounds (5)
#   --seed S     seed of ranks, faults and moments (1); the same seed and number give the same round
#   --ranks N    maximum number of ranks (4)
#   --keep       keeps the scratch directory, and prints its name
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh

usage() {
    echo "soak.sh: $1: usage: tests/soak.sh [--rounds N] [--seed S] [--ranks N] [--keep]" >&2
    exit 2
}
rounds=5 seed=1 most=4 keep=no
while [ $# -gt 0 ]; do
    case $1 in
    --rounds | --seed | --ranks)
        [[ ${2-} =~ ^[1-9][0-9]{0,5}$ ]] || usage "$1 '${2-}' must be a number, at least 1"
        case $1 in --rounds) rounds=$2 ;; --seed) seed=$2 ;; *) most=$2 ;; esac
        shift
        ;;
    --keep) keep=yes ;;
    --help | -h)
        sed -n '2,/^cd/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
    *) usage "unexpected argument '$1'" ;;
    esac
    shift
done
make_scratch
has_mpi && command -v mpirun >/dev/null || most=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

launcher=''
kill_round() { # kills the remaining processes of the current round
    local pids
    [ -n "$launcher" ] || return 0
    mapfile -t pids < <(ranks_of)
    kill -KILL "$launcher" "${pids[@]}" 2>/dev/null
    launcher=''
}
end() {
    kill_round
    wait 2>/dev/null
    if [ "$keep" = yes ]; then echo "kept: $scratch"; else rm -rf "$scratch"; fi
}
trap end EXIT
trap 'exit 1' INT TERM HUP

steps=24 timeout=15
options=(--preset tiny --layers 2 --seq-len 64 --batch-size 2 --total-batch 1536 --steps "$steps" --warmup 3 --threads 1
    --train-data "$data" --checkpoint-every 3 --timeout "$timeout")

# name            | signal | to                                | expected statuses | with one rank
faults=(
    "kill_rank      | KILL   | rank                              | 1 137 | 137"
    "stop_rank      | STOP   | rank                              | 1     | 0"
    "term_rank      | TERM   | rank                              | 3     | 3"
    "usr1_rank      | USR1   | rank                              | 3     | 3"
    "usr1_all       | USR1   | all                               | 3     | 3"
    "term_all       | TERM   | all                               | 3     | 3"
    "usr1_launcher  | USR1   | launcher                          | 3     | 3"
    "term_launcher  | TERM   | launcher                          | 1 3 137 143 | 3"
    "kill_launcher  | KILL   | launcher                          | 137   | 137"
    "kill_all       | KILL   | all                               | 1 137 | 137"
    "save_kill_rank | KILL   | rank                              | 1 137 | 137"
    "save_kill_all  | KILL   | all                               | 1 137 | 137"
    "save_stop_rank | STOP   | rank                              | 1     | 0"
    "save_term_rank | TERM   | rank                              | 3     | 3"
)

start() { # run directory, ranks, options...: starts it in the background; `launcher` is its process
    local out=$1 count=$2 command=()
    shift 2
    [ "$count" -eq 1 ] || command=(mpirun -q -np "$count" --bind-to none --oversubscribe)
    setsid "${command[@]}" "$program" --out "$out" "$@" >>"$out.out" 2>>"$out.err" &
    launcher=$!
}
# Prints the processes of the ranks in order: the children of the launcher, or itself.
ranks_of() {
    local pid
    if [ "$ranks" -eq 1 ]; then
        echo "$launcher"
        return
    fi
    for pid in $(pgrep -P "$launcher"); do
        tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n "s/^OMPI_COMM_WORLD_RANK=\(.*\)/\1 $pid/p"
    done | sort -n | sed 's/^[0-9]* //'
}
launcher_ended() { ! kill -0 "$launcher" 2>/dev/null; }
saving() { # run directory, step: waits until a later checkpoint is being written
    local file
    while ! launcher_ended; do
        for file in "$1"/checkpoints/*.tmp; do
            [ ! -e "$file" ] || [ $((10#$(basename "$file" .tmp | tr -cd 0-9))) -le "$2" ] || return 0
        done
    done
    return 1
}

# The uninterrupted run, which the first comparison creates.
whole() { # ranks, ZeRO level, group
    reference=$scratch/whole_$1_$2_$3
    [ -e "$reference" ] && return 0
    start "$reference" "$1" "${options[@]}" --zero "$2" --zero-group "$3"
    wait "$launcher"
}

# Causes the fault when the run has reached the step. Fails if the run ended before.
inflict() { # run directory, fault name, signal, to, step, victim
    local pids=()
    until at_step "$1" "$5" || launcher_ended; do sleep 0.02; done
    [[ $2 != save_* ]] || saving "$1" "$5" || return 1
    ! launcher_ended || return 1
    mapfile -t pids < <(ranks_of)
    case $4 in
    rank) pids=("${pids[$6]-}") ;;
    launcher) pids=("$launcher") ;;
    esac
    [ -n "${pids[0]-}" ] && kill "-$3" "${pids[@]}" 2>/dev/null || return 1
    [ "$3" != STOP ] || [ "$ranks" -gt 1 ] || { sleep 0.5 && kill -CONT "${pids[@]}"; } # no peer detects it
}

round() { # number: sets the fields of its row
    local run=$scratch/run_$1 row signal to right alone status start_ms
    ranks=$((RANDOM % most + 1)) zero=$((RANDOM % 4)) row=${faults[RANDOM % ${#faults[@]}]} group=0
    [ "$most" -lt 4 ] || [ $(($1 % 3)) -ne 0 ] || ranks=4 group=2
    at=$((RANDOM % (steps - 6) + 2)) victim=$((RANDOM % ranks))
    [ "$ranks" -gt 1 ] || zero=0
    IFS='|' read -r fault signal to right alone <<<"$row"
    fault=${fault// /} signal=${signal// /} to=${to// /}
    [ "$ranks" -gt 1 ] || right=$alone
    status=- ended_after=- resumed=- why=''
    [ "$to" = rank ] || victim=-
    whole "$ranks" "$zero" "$group" || {
        why="the uninterrupted run failed: $(tail -n 1 "$reference.err")"
        return 1
    }
    start "$run" "$ranks" "${options[@]}" --zero "$zero" --zero-group "$group"
    inflict "$run" "$fault" "$signal" "$to" "$at" "${victim/-/0}" || fault="$fault(missed)"
    start_ms=$(date +%s%3N)
    await $((timeout + 30)) launcher_ended || {
        why="did not end within $((timeout + 30)) s"
        return 1
    }
    wait "$launcher"
    status=$?
    ended_after=$(($(date +%s%3N) - start_ms))ms
    outcome=$status
    await 10 no_process_of "$run" || {
        why="processes remain"
        return 1
    }
    if [[ $fault == *missed* ]]; then right="0 $right"; fi
    [[ " $right " == *" $status "* ]] || {
        why="status $status, not one of $right: $(tail -n 1 "$run.err")"
        return 1
    }
    resume "$run"
}
no_process_of() { ! pgrep -f -- "--out $1 " >/dev/null; }

resume() { # run directory
    local difference
    resumed=$(newest_checkpoint "$1")
    resumed=${resumed##*_} resumed=$((10#${resumed:-0}))
    if [ -e "$1/run.json" ]; then
        start "$1" "$ranks" --resume --threads 1 --timeout "$timeout"
    else
        start "$1" "$ranks" "${options[@]}" --zero "$zero" --zero-group "$group"
    fi
    wait "$launcher" || {
        why="status $? of the resumed run: $(tail -n 1 "$1.err")"
        return 1
    }
    ! grep -q 'skipping checkpoint' "$1.err" || {
        why="an incomplete checkpoint remained: $(grep -m 1 'skipping checkpoint' "$1.err")"
        return 1
    }
    difference=$(same_end "$reference" "$1") || {
        why=$difference
        return 1
    }
    [ "$(grep -c '"train"' "$1/log.jsonl")" -eq "$steps" ] || {
        why="the log has $(grep -c '"train"' "$1/log.jsonl") train records, not $steps"
        return 1
    }
    launcher=''
    rm -rf "$1"
}

RANDOM=$seed
format='%-5s %5s %4s %5s %-24s %6s %7s %6s %9s %12s  %s\n'
# shellcheck disable=SC2059
printf "$format" round ranks zero group fault victim at-step status ended resumed-from result
for ((number = 1; number <= rounds; number++)); do
    outcome=-
    if round "$number" 2>>"$scratch/shell.err"; then # the shell's messages about killed processes
        result=same passed=$((passed + 1))
    else
        result="FAIL $why" failed=$((failed + 1))
        kill_round
    fi
    # shellcheck disable=SC2059
    printf "$format" "$number" "$ranks" "$zero" "$group" "$fault" "$victim" "$at" "$outcome" "$ended_after" "$resumed" \
        "$result"
done
finish
