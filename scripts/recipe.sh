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
# Exit status: the trainer's: 0 done, 1 failed, 2 usage, 3 stopped by a signal, and no step is lost.
#
# Variables
#   TRAIN_DIFFV2   the program (./train_diffv2cu; ./train_diffv2 for CPUs); with LAUNCH it may be in a container
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

# Splits the arguments: the run directory, the names of the options, and the options of a resume.
out=runs/$name given=' ' arguments=() without_init=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        echo "recipe.sh $name: pretrains a DIFF V2"
        recipe_of "$name" | tail -n +2
        echo "The options are those of train_diffv2 --help. scripts/recipe.sh --help describes signals and variables."
        exit 0
        ;;
    --resume | --no-resume | --resume=*) fail "$1 is not allowed: the recipe resumes a run that exists" 2 ;;
    --decay-now*)
        fail "--decay-now is not allowed, because a restart would decay again: specify --schedule wsd, --decay-steps N,\
 and --steps with the step of the checkpoint plus N" 2
        ;;
    --out)
        [ $# -ge 2 ] || fail "--out requires a directory" 2
        out=$2
        shift
        ;;
    --out=*) out=${1#--out=} ;;
    *)
        option=${1%%=*}
        option=${option#--}
        [[ $1 != --* ]] || given+="${option#no-} "
        arguments+=("$1")
        [[ $1 != --init* ]] || { # only for a first start: a resumed run has its own weights
            [[ $1 == --init=* || $# -eq 1 ]] || { arguments+=("$2") && shift; }
            shift
            continue
        }
        without_init+=("$1")
        ;;
    esac
    shift
done

# The settings that no argument overrides.
kept=()
for word in "${settings[@]}"; do
    if [[ $word == --* ]]; then
        option=${word#--}
        [[ $given == *" ${option#no-} "* ]] && keep=no || keep=yes
        [[ $option != total-batch || $given != *' batch-schedule '* ]] || keep=no # it sets the same
    fi
    [ "$keep" = no ] || kept+=("$word")
done

program=${TRAIN_DIFFV2:-./train_diffv2cu}
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

# Starts or resumes the run and waits for its end. Sets `status`; copies stderr to $errors.
excluded=()
run() {
    local command=(${launcher[@]+"${launcher[@]}"}) copy copier ended
    if [ "$spares" -gt 0 ] && [ "${launcher[0]-}" = srun ]; then
        command+=(--nodes=$((nodes - spares)) --ntasks=$(((nodes - spares) * ${SLURM_NTASKS_PER_NODE:-1})))
        [ "${#excluded[@]}" -eq 0 ] || command+=(--exclude="$(IFS=, && echo "${excluded[*]}")")
    fi
    command+=("$program" --out "$out")
    if [ -e "$out/run.json" ]; then
        command+=(--resume ${without_init[@]+"${without_init[@]}"})
    else
        command+=("${kept[@]}" ${arguments[@]+"${arguments[@]}"})
    fi
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
    ! tail -n 1 "$out/log.jsonl" 2>/dev/null | grep -qE '"what": *"(stopped|rollback)"' || return 1
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
run
while restart_is_due; do run; done

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
