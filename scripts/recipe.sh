# recipe.sh: what the recipes run_SIZE.sh have in common; they set `name`, `ranks` and `settings` and source this.
# Starts the run, or resumes it where its directory has a run.json:
#   in a Slurm job     with srun, on all of the job's tasks. Stopped by a signal (--signal of sbatch before the time
#                      limit, scancel --signal=USR1, preemption), the trainer saves a checkpoint and ends with status 3,
#                      and the job puts itself back into the queue. Slurm itself requeues after the failure of a node.
#                      Any other status ends the job: nothing that fails is started again and again.
#   on one machine     with mpirun; SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 save a checkpoint; Ctrl-C twice does not.
# A first start has the recipe's settings, and arguments take the place of settings of the same name. A resumed run has
# the options it was started with, and the arguments given now.
# Exit status: the trainer's: 0 done, 1 failed, 2 usage, 3 stopped by a signal after saving a checkpoint.
#
# Each start draws a secret, DIFFV2_SECRET, by which ranks that srun starts without MPI know each other. It is only in
# the environment of this job's processes.
#
# Variables
#   TRAIN_DIFFV2   the program (./train_diffv2cu; ./train_diffv2 for CPUs)
#   RANKS          processes on one machine (its GPUs that CUDA_VISIBLE_DEVICES leaves; the recipe's number where
#                  nvidia-smi finds none)
#   LAUNCH         the launcher and its flags, instead of mpirun or srun: LAUNCH='mpirun --hostfile hosts -np 64'
#   SLURM_MPI_TYPE how srun starts MPI (none for a program named ...cu: its ranks meet by Slurm's variables; else pmix)
# shellcheck shell=bash disable=SC2154 # name, ranks and settings are the recipe's
set -uo pipefail

fail() { # text, status
    echo "run_$name.sh: $1" >&2
    exit "${2:-1}"
}

# How many GPUs the program will see. CUDA_VISIBLE_DEVICES lists them, by index or UUID, up to the first invalid entry.
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

# Splits the arguments: where the run is, and the names of the options that are given.
out=runs/$name given=' ' arguments=() without_init=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        sed -n '2,/^#SBATCH/{/^#SBATCH/!s/^# \{0,1\}//p}' "$0"
        echo "The options are those of train_diffv2 --help."
        exit 0
        ;;
    --resume | --no-resume | --resume=*) fail "$1: the recipe resumes where there is a run, and starts one where there is none; leave it out" 2 ;;
    --out)
        [ $# -ge 2 ] || fail "--out needs a directory" 2
        out=$2
        shift
        ;;
    --out=*) out=${1#--out=} ;;
    *)
        option=${1%%=*}
        option=${option#--}
        [[ $1 != --* ]] || given+="${option#no-} "
        arguments+=("$1")
        [[ $1 != --init* ]] || { # only a first start has it: a resumed run has weights of its own
            [[ $1 == --init=* || $# -eq 1 ]] || { arguments+=("$2") && shift; }
            shift
            continue
        }
        without_init+=("$1")
        ;;
    esac
    shift
done

# The settings that no argument replaces.
kept=()
for word in "${settings[@]}"; do
    if [[ $word == --* ]]; then
        option=${word#--}
        [[ $given == *" ${option#no-} "* ]] && keep=no || keep=yes
    fi
    [ "$keep" = no ] || kept+=("$word")
done

program=${TRAIN_DIFFV2:-./train_diffv2cu}
[ -x "$program" ] || fail "there is no program $program: make ${program##*/}, or name another with TRAIN_DIFFV2"
if [ -n "${SLURM_JOB_ID-}" ]; then
    [[ $program == *cu ]] && mpi=none || mpi=pmix
    # srun does not take over --cpus-per-task by itself
    launcher=(srun --mpi="${SLURM_MPI_TYPE:-$mpi}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1)
else
    gpus=$(visible_gpus)
    [ "$gpus" -eq 0 ] || ranks=$gpus
    ranks=${RANKS:-$ranks}
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || fail "RANKS '$ranks': a number of processes from 1 is wanted" 2
    # A rank has a GPU of its own, so the number of cores is no limit. mpirun runs as root, as containers do, only when told.
    launcher=(mpirun -q -np "$ranks" --bind-to none --oversubscribe)
    [ "$ranks" -gt 1 ] || launcher=()
    [ "$(id -u)" -ne 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
[ -z "${LAUNCH-}" ] || read -ra launcher <<<"$LAUNCH"
[ "${#launcher[@]}" -eq 0 ] || command -v "${launcher[0]}" >/dev/null || fail "there is no ${launcher[0]} here: install it, or name another launcher with LAUNCH"

command=(${launcher[@]+"${launcher[@]}"} "$program" --out "$out")
if [ -e "$out/run.json" ]; then
    command+=(--resume ${without_init[@]+"${without_init[@]}"})
else
    command+=("${kept[@]}" ${arguments[@]+"${arguments[@]}"})
fi

# Of this start alone; never printed
DIFFV2_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')
[ "${#DIFFV2_SECRET}" -eq 32 ] || fail "cannot read 16 bytes from /dev/urandom"
export DIFFV2_SECRET

# The launcher gets SIGUSR1, which it passes on; at SIGTERM mpirun would end the ranks before they have saved. In a
# Slurm job SIGTERM comes to the ranks from Slurm itself, and a second signal would end them at once.
child='' asked='' began=$(date +%s.%N)
# shellcheck disable=SC2317 # called by the traps
pass_on() { # a launcher that is still starting its processes loses what it gets; the log tells that they are there
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
        [[ $1 == TERM && -n ${SLURM_JOB_ID-} ]] || [ -z "$child" ] || pass_on
    elif [[ $1 == INT && -n $child ]]; then # a second Ctrl-C: at once
        kill -TERM "$child" 2>/dev/null
    fi
}
for signal in USR1 TERM INT HUP; do
    # shellcheck disable=SC2064 # expanded now
    trap "stop $signal" "$signal"
done

echo "+ ${command[*]}"
setsid "${command[@]}" & # in a session of its own: Ctrl-C comes here, and only here
child=$!
[ -z "$asked" ] || pass_on
status=127
while :; do # a signal ends `wait` early
    interrupted=no
    wait "$child"
    ended=$?
    [ "$ended" -eq 127 ] || status=$ended
    [ "$interrupted" = yes ] || break
done

# Stopped: with a checkpoint, or so early that the trainer did not catch signals yet.
stopped=no
if [ "$status" -eq 3 ] || [ "$status" -eq $((128 + 10)) ] || { [ -n "$asked" ] && [ "$status" -gt 128 ]; }; then stopped=yes; fi
if [ "$stopped" = yes ] && [ -n "${SLURM_JOB_ID-}" ]; then
    # A job that was cancelled stays so, one that Slurm preempts is requeued by Slurm, and one of salloc has no queue.
    state=$(scontrol --oneliner show job "$SLURM_JOB_ID")
    if [[ $state =~ JobState=(RUNNING|TIMEOUT)\  && $state == *' BatchFlag=1 '* ]]; then
        echo "run_$name.sh: stopped by a signal; job $SLURM_JOB_ID goes back into the queue and resumes $out"
        scontrol requeue "$SLURM_JOB_ID" || echo "run_$name.sh: it could not be requeued: submit it again to go on" >&2
    fi
fi
exit "$status"
