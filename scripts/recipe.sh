#!/usr/bin/env bash
# recipe.sh: pretrains a DIFF V2 by a recipe of the table scripts/recipes.
#
# Usage: scripts/recipe.sh NAME --train-data DATA [--val-data DATA] [OPTION...]   on one machine, with mpirun
#        sbatch [--nodes=MACHINES] scripts/recipe.sh NAME ...                     in Slurm, with srun
#        scripts/recipe.sh NAME --help                                            GPUs, memory, FLOPs and sources
# Start it from the root of the repository. It starts the run runs/NAME, or --out DIR, or resumes it if the directory
# has a run.json:
#   in a Slurm job   on all tasks of the job. After a signal (--signal of sbatch before the time limit,
#                    scancel --signal=USR1, preemption) the trainer saves a checkpoint and exits with status 3, and the
#                    job requeues itself. Slurm requeues it after the failure of a node, unless --no-kill is given.
#   on one machine   SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 save a checkpoint; a second Ctrl-C exits at once.
# When a rank dies or hangs, or the program fails, the recipe resumes the run from its last checkpoint, with one line
# that names the rank and its node. It does not after a usage error, a signal, or a run that has ended because its loss
# is not finite; nor if the run got no further than at the failure before, or after RESTARTS restarts.
# In a Slurm job with spare nodes the failed one is not used again, for example with one spare:
#   SPARES=1 sbatch --no-kill --nodes=9 scripts/recipe.sh 3b ...
# On the first start, arguments override the recipe's settings. A resumed run has the options of its last start, which
# arguments override.
# --phases FILE runs in phases: FILE has one line of options for each, which override the arguments from that phase on.
# Each line but the last has --stop-after STEP, after which the next phase resumes the run. Words may be quoted, but
# nothing is expanded; empty lines and lines that begin with # are skipped.
# Exit status: the trainer's: 0 done, 1 failed, 2 usage, 3 stopped by a signal, and no step is lost.
#
# Variables
#   TRAIN_DIFFV2   the program (./train_diffv2cu; ./train_diffv2 for CPUs); with LAUNCH it may be in a container;
#                  ./predict_diffv2 predicts the run, with RANKS=1 --ranks N --device NAME
#   RANKS          processes on one machine (default: its GPUs, as restricted by CUDA_VISIBLE_DEVICES; the recipe's
#                  number if nvidia-smi finds none)
#   LAUNCH         the launcher and its flags, instead of mpirun or srun: LAUNCH='mpirun --hostfile hosts -np 64'
#   RESTARTS       restarts after failures (10); 0: none
#   SPARES         nodes of a Slurm job that are left idle until another one has failed (0)
#   SLURM_MPI_TYPE how srun starts MPI (default: none for a program named ...cu, whose ranks find each other in
#                  the run's directory; otherwise pmix)
#SBATCH --job-name=diffv2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

fail() { # text, status
    echo "recipe.sh: $1" >&2
    exit "${2:-1}"
}

recipe_of() { # name: the row of the table, then the lines that describe it
    awk -v name="$1" '/^[^ #]/ { inside = $1 == name } inside' scripts/recipes
}

names() { # of all recipes
    awk '/^[^ #]/ { printf "%s%s", n++ ? ", " : "", $1 }' scripts/recipes
}

usage=$(sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p}' "$0")
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit 1
[ -e scripts/recipes ] || fail "no scripts/recipes in $PWD: start it from the root of the repository" 2
case ${1-} in
--help | -h)
    echo "$usage"
    echo "Recipes: $(names)"
    exit 0
    ;;
esac
name=${1-}
read -r _ machines ranks B total steps every lr warmup zero more < <(recipe_of "$name") \
    || fail "no recipe '$name': specify one of $(names)" 2
shift
read -ra settings <<<"--preset $name --attention diff_v2 --batch-size $B --total-batch $total --steps $steps --lr $lr \
--warmup $warmup --zero $zero $more --checkpoint-every $every --val-every $every --check-ranks-every $every"

# The number of GPUs that the program sees: CUDA_VISIBLE_DEVICES lists indices or UUIDs, up to the first invalid entry.
visible_gpus() {
    local gpus count=0 entry entries
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
    if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        IFS=, read -ra entries <<<"$CUDA_VISIBLE_DEVICES"
        for entry in ${entries[@]+"${entries[@]}"}; do
            [[ $entry =~ ^(GPU|MIG)- ]] || { [[ $entry =~ ^[0-9]+$ ]] && [ "$entry" -lt "$gpus" ]; } || break
            count=$((count + 1))
        done
        gpus=$count
    fi
    echo "$gpus"
}

name_of() { # word: sets `option` to its name, if it is an option
    option=${1%%=*} option=${option#--} option=${option#no-}
    [[ $1 == --* ]]
}

# Splits the arguments: the run directory, the file of the phases, and the options and their names.
out=runs/$name given=' ' arguments=()
unset file # of the environment
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        echo "recipe.sh $name: pretrains a DIFF V2"
        recipe_of "$name" | tail -n +2
        echo "The options are those of train_diffv2 --help all. scripts/recipe.sh --help has signals and variables."
        exit 0
        ;;
    --resume | --no-resume | --resume=*) fail "$1 is not allowed: the recipe resumes a run that exists" 2 ;;
    --out | --phases)
        [ $# -ge 2 ] || fail "$1 requires a path" 2
        [ "$1" = --out ] && out=$2 || file=$2
        shift
        ;;
    --out=*) out=${1#--out=} ;;
    --phases=*) file=${1#--phases=} ;;
    *)
        ! name_of "$1" || given+="$option "
        arguments+=("$1")
        ;;
    esac
    shift
done

# Each phase: its line, the step that it stops after, and the names of the options of this line and those before.
phases=('') ends=('') replaced=(' ')
words_of() { mapfile -t words < <(xargs -r printf '%s\n' <<<"$1" 2>/dev/null) && wait "$!"; } # line: sets `words`
read_phases() {
    local text line at='' number=0 end='' last names=' ' i
    text=$(cat -- "$file" 2>/dev/null) || fail "--phases: cannot read '$file' in $PWD" 2
    [[ $given != *' stop-after '* ]] || fail "--stop-after is not allowed with --phases: specify it in $file" 2
    phases=() ends=() replaced=()
    while IFS= read -r line; do
        number=$((number + 1))
        [[ ! $line =~ ^[[:space:]]*(#|$) ]] || continue
        [ -z "$at" ] || [ -n "$end" ] || fail "$at requires --stop-after STEP, because another phase follows" 2
        at="--phases $file: line $number" last=${end:-0} end=''
        words_of "$line" || fail "$at has an unbalanced quote: $line" 2
        for i in "${!words[@]}"; do
            name_of "${words[i]}" || continue
            names+="$option "
            case $option in
            out | resume | init | phases) fail "$at: ${words[i]} is not allowed in a phase" 2 ;;
            stop-after)
                [[ ${words[i]} == *=* ]] && end=${words[i]#*=} || end=${words[i + 1]-}
                [[ $end =~ ^[1-9][0-9]{0,7}$ ]] || fail "$at: --stop-after '$end': must be a step, 1 or more" 2
                [ "$end" -gt "$last" ] || fail "$at: --stop-after $end: must be above $last, that of the line before" 2
                ;;
            esac
        done
        phases+=("$line") ends+=("$end") replaced+=("$names")
    done <<<"$text"
    [ -n "$at" ] || fail "--phases $file: has no line of options" 2
}
[ -z "${file+set}" ] || read_phases

# Sets `kept` to the words without the options of these names.
without() { # names, words...
    local keep=yes word
    kept=()
    for word in "${@:2}"; do
        ! name_of "$word" || { [[ $1 == *" $option "* ]] && keep=no || keep=yes; }
        [ "$keep" = no ] || kept+=("$word")
    done
}

program=${TRAIN_DIFFV2:-./train_diffv2cu}
[[ $program != *predict_diffv2 ]] || out='' # it starts no run
[ -x "$program" ] || [ -n "${LAUNCH-}" ] || fail "no program $program: run make ${program##*/}, or set TRAIN_DIFFV2"
if [ -n "${SLURM_JOB_ID-}" ]; then
    [[ $program == *cu ]] && mpi=none || mpi=pmix
    [ "${SLURM_JOB_NUM_NODES:-$machines}" -ge "$machines" ] \
        || echo "recipe.sh: $name is for $machines machines: sbatch --nodes=$machines scripts/recipe.sh $name" >&2
    # srun does not inherit --cpus-per-task
    launcher=(srun --mpi="${SLURM_MPI_TYPE:-$mpi}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1)
else
    gpus=$(visible_gpus)
    [ "$gpus" -eq 0 ] || ranks=$gpus
    ranks=${RANKS:-$ranks}
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "RANKS '$ranks': must be a number of processes, at least 1" 2
    # Each rank has its own GPU, so there may be more ranks than cores. By default mpirun refuses to run as root.
    launcher=(mpirun -q -np "$ranks" --bind-to none --oversubscribe)
    [ "$ranks" -gt 1 ] || launcher=()
    [ "$(id -u)" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
[ -z "${LAUNCH-}" ] || read -ra launcher <<<"$LAUNCH"
[ "${#launcher[@]}" -eq 0 ] || command -v "${launcher[0]}" >/dev/null \
    || fail "${launcher[0]} is missing: install it, or specify another launcher with LAUNCH"

restarts=${RESTARTS:-10} spares=${SPARES:-0} nodes=${SLURM_JOB_NUM_NODES:-1}
[[ $restarts =~ ^[0-9]{1,6}$ ]] || fail "RESTARTS '$restarts': must be a number of restarts, 0 or more" 2
if ! [[ $spares =~ ^[0-9]{1,6}$ ]] || [ "$spares" -ge "$nodes" ]; then
    fail "SPARES '$spares': must be a number of nodes, less than those of the Slurm job ($nodes)" 2
fi
errors=$(mktemp) || exit 1
trap 'rm -f "$errors"' EXIT

# The launcher gets SIGUSR1, which it forwards: at SIGTERM mpirun kills the ranks before they have saved. In a Slurm job
# Slurm itself sends SIGTERM to the ranks, and a second signal would end them at once.
child='' asked='' began=''
# shellcheck disable=SC2317 # called by the traps
forward() { # waits for the log: a launcher that is still starting its processes loses signals
    while [ "$SECONDS" -lt 5 ] && kill -0 "$child" 2>/dev/null; do
        [ -z "$(find "$out/log.jsonl" -newermt "@$began" 2>/dev/null)" ] || break
        sleep 0.1
    done
    kill -USR1 "$child" 2>/dev/null
}
# shellcheck disable=SC2317
stop() { # signal
    interrupted=yes
    if [ -z "$asked" ]; then
        asked=$1
        [[ $1 == TERM && -n ${SLURM_JOB_ID-} ]] || [ -z "$child" ] || forward
    elif [[ $1 == INT && -n $child ]]; then # a second Ctrl-C
        kill -TERM "$child" 2>/dev/null
    fi
}
for signal in USR1 TERM INT HUP; do
    # shellcheck disable=SC2064 # expanded now
    trap "stop $signal" "$signal"
done

find_phase() { # sets `phase`: the first that stops after a later step than that of the newest checkpoint, or the last
    local step
    step=$(checkpoint_step)
    for ((phase = 0; phase < ${#phases[@]} - 1; phase++)); do
        [ "${ends[phase]}" -le "${step:-0}" ] || break
    done
}

# Starts or resumes the run and waits for its end. Sets `status` and `phase`; copies stderr to $errors.
excluded=()
run() {
    local command=(${launcher[@]+"${launcher[@]}"}) copy copier ended
    if [ "$spares" -gt 0 ] && [ "${launcher[0]-}" = srun ]; then
        command+=(--nodes=$((nodes - spares)) --ntasks=$(((nodes - spares) * ${SLURM_NTASKS_PER_NODE:-1})))
        [ "${#excluded[@]}" -eq 0 ] || command+=(--exclude="$(IFS=, && echo "${excluded[*]}")")
    fi
    find_phase
    words_of "${phases[phase]}"
    command+=("$program" ${out:+--out "$out"})
    if [ -e "$out/run.json" ]; then # it has its own weights, so without --init
        command+=(--resume)
        without " init ${replaced[phase]}" ${arguments[@]+"${arguments[@]}"}
    else
        without "$given${replaced[phase]}" "${settings[@]}"
        command+=("${kept[@]}")
        without "${replaced[phase]}" ${arguments[@]+"${arguments[@]}"}
    fi
    command+=(${kept[@]+"${kept[@]}"} ${words[@]+"${words[@]}"})
    began=$(date +%s.%N) SECONDS=0
    echo "+ ${command[*]}"
    exec {copy}> >(exec setsid tee "$errors" >&2)
    copier=$!
    setsid "${command[@]}" 2>&"$copy" {copy}>&- & # in its own session, so that only this script gets Ctrl-C
    child=$!
    exec {copy}>&-
    [ -z "$asked" ] || forward
    status=127
    while :; do # a signal ends `wait` early
        interrupted=no
        wait "$child"
        ended=$?
        [ "$ended" -eq 127 ] || status=$ended
        [ "$interrupted" = yes ] || break
    done
    child=''
    for ended in {1..20}; do # a process that is left may hold stderr open
        kill -0 "$copier" 2>/dev/null || break
        sleep 0.1
    done
}

slurm_control() { # arguments of scontrol: repeats for a minute what fails, since the controller may be restarting
    local delay
    for delay in 1 4 10 20 25; do
        scontrol "$@" && return
        sleep "$delay"
    done
    scontrol "$@"
}
job_is_running() { [[ $(slurm_control --oneliner show job "$SLURM_JOB_ID") == *' JobState=RUNNING '* ]]; }
last_step() { # of the log
    tail -n 3 "$out/log.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9]*\).*/\1/p' | tail -n 1
}
checkpoint_step() {
    find "$out/checkpoints" -maxdepth 1 -name 'step_????????' 2>/dev/null | sort | sed -n '$s/.*step_0*//p'
}
# Sets `rank` ("-": all of a node) and `node` to what the watchdog (llmc/comm/watchdog.h) reported, or srun or mpirun;
# both may be empty. A node is preferred that has a name of the job, which srun can exclude.
find_failed() {
    local found name names
    names=" $([ -z "${SLURM_JOB_NODELIST-}" ] || scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ') "
    rank='' node='' known=no
    while read -r found name; do
        [[ $names != *" ${name%%.*} "* ]] || name=${name%%.*}
        [ -n "$rank" ] || rank=$found node=$name
        [[ $names == *" $name "* ]] && node=$name known=yes && break
    done < <(
        sed -nE 's/.*diffv2: rank ([0-9]+) \(([^ )]+)\).*/\1 \2/p' "$errors"
        sed -nE -e 's/^srun: error: Node failure on ([^ ]+)$/- \1/p' \
            -e 's/^srun: error: ([^ :]+): tasks? ([0-9]+).*/\2 \1/p' \
            -e 's/.*process rank ([0-9]+) with PID [0-9]+ on node ([^ ]+) .*/\1 \2/p' "$errors"
    )
}

# Whether the run is to be started again. One line says so, or why not if the run had made progress.
count=0 reached=$(checkpoint_step)
restart_is_due() {
    local step what next=''
    [ -z "$asked" ] || return 1
    case $status in 0 | 2 | 3 | 127 | $((128 + 10))) return 1 ;; esac
    # ended by itself, and would again
    ! tail -n 1 "$out/log.jsonl" 2>/dev/null | grep -qE '"wh(y|at)": *"(not_finite|rollback)"' || return 1
    [ -z "${SLURM_JOB_ID-}" ] || job_is_running || return 1
    find_failed
    step=$(last_step)
    case $rank in
    '') what='the run' ;;
    -) what="node $node" ;;
    *) what="rank $rank on $node" ;;
    esac
    what="recipe.sh: $what failed at step ${step:-0}, status $status"
    if [ "$known" = yes ] && [ "${#excluded[@]}" -lt "$spares" ]; then
        excluded+=("$node")
        next=", without $node"
    elif [ "${step:-0}" -le "${reached:-0}" ]; then
        [ "$count" -eq 0 ] || echo "$what: not restarted, because it got no further than at the failure before" >&2
        return 1
    fi
    if [ "$count" -ge "$restarts" ]; then
        [ "$restarts" -eq 0 ] || echo "$what: not restarted, because RESTARTS allows $restarts" >&2
        return 1
    fi
    count=$((count + 1)) reached=$step
    step=$(checkpoint_step)
    echo "$what: restart $count of $restarts from step ${step:-0}$next" >&2
}

# Whether a phase has ended and the next one is to be started. Each start is of a later phase, so that this ends.
next_phase_is_due() {
    local ended=$phase
    [ "$status" -eq 0 ] && [ "$phase" -lt $((${#phases[@]} - 1)) ] \
        && [[ ! $given =~ \ (dry-run|eval|generate|dump-grads)\  ]] || return
    find_phase
    [ "$phase" -gt "$ended" ] || fail "--phases $file: phase $((ended + 1)) ended at step $(last_step), before its\
 --stop-after ${ends[ended]}, and the next one is not started: specify larger --steps"
    [ -z "$asked" ] || status=3 # a signal that came after the last step
    [ -z "$asked" ]
}
run
while restart_is_due || next_phase_is_due; do run; done

# Stopped with a checkpoint, or before the trainer caught signals.
stopped=no
if [ "$status" -eq 3 ] || [ "$status" -eq $((128 + 10)) ] || { [ -n "$asked" ] && [ "$status" -gt 128 ]; }; then
    stopped=yes
fi
if [ "$stopped" = yes ] && [ -n "${SLURM_JOB_ID-}" ]; then
    # A cancelled job stays cancelled, Slurm itself requeues a preempted one, and a job of salloc cannot be requeued.
    state=$(slurm_control --oneliner show job "$SLURM_JOB_ID")
    if [[ $state =~ JobState=(RUNNING|TIMEOUT)\  && $state == *' BatchFlag=1 '* ]]; then
        echo "recipe.sh: stopped by a signal; requeues job $SLURM_JOB_ID, which resumes $out"
        slurm_control requeue "$SLURM_JOB_ID" || echo "recipe.sh: requeuing failed: submit it again to continue" >&2
    fi
fi
exit "$status"
