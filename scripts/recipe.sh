#!/usr/bin/env bash
# recipe.sh: pretrains a DIFF V2 by a recipe of the table scripts/recipes.
#
# Usage: scripts/recipe.sh NAME --train-data DATA [--val-data DATA] [OPTION...]   on one machine, with mpirun
#        sbatch [--nodes=MACHINES] scripts/recipe.sh NAME ...                     in Slurm, with srun
#        scripts/recipe.sh NAME --help                                            GPUs, memory, FLOPs and hours
# Start it from the root of the repository. It starts the run runs/NAME, or --out DIR, or resumes it if the directory
# has a run.json:
#   in a Slurm job   on all tasks of the job. After a signal (--signal of sbatch before the time limit,
#                    scancel --signal=USR1, preemption) the trainer saves a checkpoint and exits with status 3, and the
#                    job requeues itself. Slurm requeues it after the failure of a node. Any other status ends the job,
#                    so that a run that fails is not restarted repeatedly.
#   on one machine   SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 save a checkpoint; a second Ctrl-C exits at once.
# On the first start, arguments override the recipe's settings. A resumed run has the options of its last start, which
# arguments override.
# Exit status: the trainer's: 0 done, 1 failed, 2 usage, 3 stopped by a signal after saving a checkpoint.
#
# Variables
#   TRAIN_DIFFV2   the program (./train_diffv2cu; ./train_diffv2 for CPUs)
#   RANKS          processes on one machine (default: its GPUs, as restricted by CUDA_VISIBLE_DEVICES; the recipe's
#                  number if nvidia-smi finds none)
#   LAUNCH         the launcher and its flags, instead of mpirun or srun: LAUNCH='mpirun --hostfile hosts -np 64'
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
    fi
    [ "$keep" = no ] || kept+=("$word")
done

program=${TRAIN_DIFFV2:-./train_diffv2cu}
[ -x "$program" ] || fail "no program $program: run make ${program##*/}, or set TRAIN_DIFFV2"
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

command=(${launcher[@]+"${launcher[@]}"} "$program" --out "$out")
if [ -e "$out/run.json" ]; then
    command+=(--resume ${without_init[@]+"${without_init[@]}"})
else
    command+=("${kept[@]}" ${arguments[@]+"${arguments[@]}"})
fi

# The launcher gets SIGUSR1, which it forwards: at SIGTERM mpirun kills the ranks before they have saved. In a Slurm job
# Slurm itself sends SIGTERM to the ranks, and a second signal would end them at once.
child='' asked='' began=$(date +%s.%N)
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

echo "+ ${command[*]}"
setsid "${command[@]}" & # in its own session, so that only this script gets Ctrl-C
child=$!
[ -z "$asked" ] || forward
status=127
while :; do # a signal ends `wait` early
    interrupted=no
    wait "$child"
    ended=$?
    [ "$ended" -eq 127 ] || status=$ended
    [ "$interrupted" = yes ] || break
done

# Stopped with a checkpoint, or before the trainer caught signals.
stopped=no
if [ "$status" -eq 3 ] || [ "$status" -eq $((128 + 10)) ] || { [ -n "$asked" ] && [ "$status" -gt 128 ]; }; then
    stopped=yes
fi
if [ "$stopped" = yes ] && [ -n "${SLURM_JOB_ID-}" ]; then
    # A cancelled job stays cancelled, Slurm itself requeues a preempted one, and a job of salloc cannot be requeued.
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    if [[ $state =~ JobState=(RUNNING|TIMEOUT)\  && $state == *' BatchFlag=1 '* ]]; then
        echo "recipe.sh: stopped by a signal; requeues job $SLURM_JOB_ID, which resumes $out"
        scontrol requeue "$SLURM_JOB_ID" || echo "recipe.sh: requeuing failed: submit it again to continue" >&2
    fi
fi
exit "$status"
