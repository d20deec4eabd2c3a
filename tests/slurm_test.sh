#!/usr/bin/env bash
# slurm_test.sh: the Slurm recipe in a real Slurm. A controller and a node daemon of our own on loopback, with keys, ports
# and files in a scratch directory, run a recipe at a size for CPUs, stop it in all ways that Slurm has, and see it come
# back and end with the very bytes of a run that was left alone. Nothing of a Slurm that the machine may have is touched.
# Installs slurm-wlm and munge where they are missing and apt-get is there. Daemons end with this script, whatever happens.
# The last line is "N passed, N failed". Exit status: 0 nothing failed, 1 something did or Slurm is not to be had, 2 usage.
#
# Usage: tests/slurm_test.sh [--check | [--keep] [--ranks N] [WORD...]]
#   --check     only see to it that Slurm is here
#   --keep      leave the scratch directory (its name is printed)
#   --ranks N   tasks of a job (2, which need a program with MPI, or 1)
#   WORD        only tests whose names contain one of the words
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh

check=no keep=no ranks='' words=()
while [ $# -gt 0 ]; do
    case $1 in
    --check) check=yes ;;
    --keep) keep=yes ;;
    --ranks)
        [[ ${2-} =~ ^[1-9][0-9]?$ ]] || {
            echo "slurm_test.sh: --ranks '${2-}': a number from 1 to 99 is wanted" >&2
            exit 2
        }
        ranks=$2
        shift
        ;;
    --help | -h)
        sed -n '2,/^cd/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
    -*)
        echo "slurm_test.sh: unexpected argument '$1': usage: tests/slurm_test.sh [--check | [--keep] [--ranks N] [WORD...]]" >&2
        exit 2
        ;;
    *) words+=("$1") ;;
    esac
    shift
done

PATH=$PATH:/usr/sbin:/sbin
die() {
    echo "slurm_test.sh: $1" >&2
    exit 1
}
if ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null; then
    { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; } || die "slurmctld, slurmd or munged is missing: install slurm-wlm and munge"
    log=$(mktemp)
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } >"$log" 2>&1 \
        || {
            tail -n 3 "$log" >&2
            die "apt-get install slurm-wlm munge failed: look at its lines above"
        }
    rm -f "$log"
fi
[ "$check" = no ] || exit 0

make_scratch
S=$scratch/slurm daemons=()
# Before any command of Slurm, so that none ever speaks to a Slurm that this machine may have.
export SLURM_CONF=$S/slurm.conf
unset "${!SLURM_JOB@}" "${!SLURM_STEP@}" "${!SBATCH_@}"
# shellcheck disable=SC2317 # called by the trap
end() {
    local job
    for job in $(squeue --noheader --format=%A 2>/dev/null); do scancel --signal=KILL --full "$job" 2>/dev/null; done
    await 10 nothing_runs
    [ "${#daemons[@]}" -eq 0 ] || kill "${daemons[@]}" 2>/dev/null
    [ ! -e "$S/munged.pid" ] || kill "$(cat "$S/munged.pid")" 2>/dev/null
    wait
    if [ "$keep" = yes ]; then echo "left: $scratch"; else rm -rf "$scratch"; fi
}
nothing_runs() { [ -z "$(squeue --noheader 2>/dev/null)" ]; }
trap end EXIT
trap 'exit 1' INT TERM HUP

# A port that nobody listens on, chosen by chance.
free_port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 20000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || {
            echo "$port"
            return
        }
    done
}

start_slurm() {
    local host me
    host=$(hostname -s) me=$(id -un)
    mkdir -p "$S/state" "$S/spool" || return 1
    # key of our own; --force: a scratch directory is not where munge wants its files
    (umask 077 && head -c 1024 /dev/urandom >"$S/munge.key") || return 1
    munged --force --key-file="$S/munge.key" --socket="$S/munge.socket" --pid-file="$S/munged.pid" --log-file="$S/munged.log" \
        --seed-file="$S/munge.seed" || return 1
    # cred_expire is also how long a job that was requeued waits, 120 s by default
    cat >"$S/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$S/munge.socket,cred_expire=5
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool
SlurmctldPidFile=$S/slurmctld.pid
SlurmdPidFile=$S/slurmd.pid
SlurmctldLogFile=$S/slurmctld.log
SlurmdLogFile=$S/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=3600
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=$host PriorityTier=10 PreemptMode=OFF State=UP
END
    slurmctld -D >"$S/slurmctld.out" 2>&1 &
    daemons+=($!)
    slurmd -D >"$S/slurmd.out" 2>&1 &
    daemons+=($!)
    await 60 node_is_idle
}
node_is_idle() { [ "$(sinfo --noheader --format=%T --partition=low)" = idle ]; }

# A run of about 10 s that saves once in a while; `whole` is what all the others are compared with.
steps=60
shape=(--preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --warmup 5 --threads 1 --train-data "$data" --val-every 0)
tiny=("${shape[@]}" --steps "$steps" --checkpoint-every 20)

submit() { # job name, options of sbatch..., --, arguments of the recipe...
    local name=$1 flags=()
    shift
    while [ "$1" != -- ]; do
        flags+=("$1")
        shift
    done
    shift
    job=$(sbatch --parsable --job-name="$name" --ntasks-per-node="$ranks" --gpus-per-node=0 --cpus-per-task=1 --nodes=1 --time=10 \
        --output="$scratch/$name.log" "${flags[@]}" scripts/run_124m.sh "$@" --out "$scratch/$name")
}
job_field() { # job, field
    scontrol --oneliner show job "$1" | sed -n "s/.* $2=\([^ ]*\).*/\1/p"
}
job_is() { # job, states as a pattern
    [[ $(job_field "$1" JobState) =~ ^($2)$ ]]
}
ended='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL'

# The job ends as done, after it was started again as often as said, and its last checkpoint is that of the whole run.
expect_whole() { # name, restarts
    local restarts difference
    await 180 job_is "$job" "$ended" || {
        why="job $job is $(job_field "$job" JobState) after 180 s"
        return 1
    }
    job_is "$job" COMPLETED || {
        why="job $job is $(job_field "$job" JobState), status $(job_field "$job" ExitCode)"
        return 1
    }
    restarts=$(job_field "$job" Restarts)
    [ "$restarts" = "$2" ] || {
        why="it was started again $restarts times, not $2"
        return 1
    }
    difference=$(same_end "$scratch/whole" "$scratch/$1") || {
        why=$difference
        return 1
    }
    [ "$(grep -c '"train"' "$scratch/$1/log.jsonl")" -eq "$steps" ] || {
        why="the log has not one record for each step"
        return 1
    }
}
expect_saved() { # name: it was stopped by a signal, with a checkpoint, and resumed
    grep -q 'stopped after step' "$scratch/$1.log" || {
        why='the log of the job has no "stopped after step"'
        return 1
    }
    grep -q -- '--resume' "$scratch/$1.log" || {
        why='the log of the job has no --resume'
        return 1
    }
}

a_job_that_is_left_alone_runs_to_its_end() {
    submit alone -- "${tiny[@]}" && expect_whole alone 0
}
stop_by() { # name, command that stops it...
    local name=$1
    shift
    submit "$name" -- "${tiny[@]}" && await 60 at_step "$scratch/$name" 7 || {
        why='it did not come to step 7'
        return 1
    }
    "$@" "$job" && expect_saved_and_whole "$name"
}
expect_saved_and_whole() { expect_whole "$1" 1 && expect_saved "$1"; }
sigusr1_to_the_batch_script_saves_requeues_and_resumes() { stop_by batch scancel --batch --signal=USR1; }
sigusr1_to_the_tasks_saves_requeues_and_resumes() { stop_by tasks scancel --signal=USR1; }
sigusr1_to_all_of_it_at_once_saves_requeues_and_resumes() { stop_by full scancel --full --signal=USR1; }
sigusr1_while_the_job_starts_requeues_and_resumes() {
    submit early -- "${tiny[@]}" && await 60 grep -q '^+ srun' "$scratch/early.log" || {
        why='it did not start'
        return 1
    }
    scancel --batch --signal=USR1 "$job"
    expect_whole early 1
}
requeue_by_the_administrator_saves_and_resumes() { stop_by requeued scontrol requeue; }
a_job_of_a_higher_priority_preempts_it_and_it_resumes() {
    stop_by preempted preempt
}
preempt() {
    sbatch --parsable --partition=high --nodes=1 --exclusive --time=1 --job-name=urgent --output=/dev/null --wrap='sleep 3' >/dev/null
}
sigusr1_comes_before_the_time_limit() {
    # Slurm sends it up to 60 s earlier than asked for, and looks at limits every 30 s
    submit limit --time=1 --signal=B:USR1@45 -- "${shape[@]}" --steps 100000 --checkpoint-every 0 || return 1
    await 180 at_restart || {
        why="the job was not started again within 180 s"
        return 1
    }
    expect_saved limit || return 1
    scancel --batch --signal=KILL "$job"
    scancel "$job"
}
at_restart() { [ "$(job_field "$job" Restarts)" -ge 1 ] && grep -q -- --resume "$scratch/limit.log"; }
a_cancelled_job_saves_and_stays_cancelled() {
    submit cancelled -- "${tiny[@]}" && await 60 at_step "$scratch/cancelled" 7 || {
        why='it did not come to step 7'
        return 1
    }
    scancel "$job"
    await 60 job_is "$job" CANCELLED || {
        why="it is $(job_field "$job" JobState)"
        return 1
    }
    await 40 nothing_runs
    sleep 2
    job_is "$job" CANCELLED && [ "$(job_field "$job" Restarts)" = 0 ] || {
        why="it is $(job_field "$job" JobState) later"
        return 1
    }
    grep -q 'stopped after step' "$scratch/cancelled.log" || {
        why='the log of the job has no "stopped after step"'
        return 1
    }
}
a_node_that_fails_is_no_end() {
    submit node -- "${tiny[@]}" && await 60 at_step "$scratch/node" 25 || {
        why='it did not come to step 25'
        return 1
    }
    scontrol update nodename="$(hostname -s)" state=down reason=test
    # the daemon comes back to the controller by itself
    expect_whole node 1
}
failures_end_the_job_with_the_status_of_the_program() {
    local status
    submit usage -- "${tiny[@]}" --no-such-option 1 && status=2:0 && expect_failed usage "$status" || return 1
    submit missing -- "${tiny[@]}" --init "$scratch/nothing" && status=1:0 && expect_failed missing "$status"
}
expect_failed() { # name, status
    await 60 job_is "$job" "$ended"
    sleep 1
    job_is "$job" FAILED && [ "$(job_field "$job" ExitCode)" = "$2" ] && [ "$(job_field "$job" Restarts)" = 0 ] \
        || {
            why="$1: job $job is $(job_field "$job" JobState), status $(job_field "$job" ExitCode), not $2, restarts $(job_field "$job" Restarts)"
            return 1
        }
}

# The CUDA trainer where its kernels run on the CPU, as the tests build it: Slurm's variables and no MPI.
device_trainer=(build/oncpu/test_trainer --trainer)
the_cuda_trainer_is_started_without_mpi_and_its_ranks_stop_and_resume() {
    local command="srun --mpi=none --kill-on-bad-exit=1 ${device_trainer[*]} --train-data $data --layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8"
    command+=" --ffn 40 --seq-len 16 --batch-size 2 --total-batch 64 --warmup 2 --steps 12 --threads 1"
    # shellcheck disable=SC2016 # expanded by the job
    local secret='export DIFFV2_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d " "); '
    device() { # name, options...
        local out=$scratch/$1
        shift
        job=$(CUDA_ON_CPU_DEVICES=2 sbatch --parsable --nodes=1 --ntasks=2 --cpus-per-task=1 --time=10 --output="$out.log" --wrap "$secret$command --out $out $*")
        await 120 job_is "$job" "$ended" && job_is "$job" COMPLETED || {
            why="the job is $(job_field "$job" JobState): $(tail -n 1 "$out.log")"
            return 1
        }
    }
    device device_whole && device device_parts --stop-after 5 && device device_parts --resume || return 1
    grep -q '2 ranks (2 on this machine)' "$scratch/device_whole.log" || {
        why='the log does not speak of two ranks'
        return 1
    }
    why=$(diff -rq "$scratch"/device_{whole,parts}/checkpoints/step_00000012)
}

tests=(a_job_that_is_left_alone_runs_to_its_end
    sigusr1_to_the_batch_script_saves_requeues_and_resumes
    sigusr1_to_the_tasks_saves_requeues_and_resumes
    sigusr1_to_all_of_it_at_once_saves_requeues_and_resumes
    sigusr1_while_the_job_starts_requeues_and_resumes
    requeue_by_the_administrator_saves_and_resumes
    a_job_of_a_higher_priority_preempts_it_and_it_resumes
    sigusr1_comes_before_the_time_limit
    a_cancelled_job_saves_and_stays_cancelled
    a_node_that_fails_is_no_end
    failures_end_the_job_with_the_status_of_the_program)
[ ! -x "${device_trainer[0]}" ] || tests+=(the_cuda_trainer_is_started_without_mpi_and_its_ranks_stop_and_resume)

[ -n "$ranks" ] || { has_mpi && ranks=2 || ranks=1; }
start_slurm || {
    tail -n 3 "$S"/*.log "$S"/*.out >&2
    die "Slurm did not start on loopback; its last lines are above"
}
RANKS=$ranks scripts/run_124m.sh "${tiny[@]}" --out "$scratch/whole" >"$scratch/whole.out" 2>&1 \
    || {
        tail -n 3 "$scratch/whole.out" >&2
        die "the run that all are compared with failed"
    }
for word in ${words[@]+"${words[@]}"}; do
    [[ ${tests[*]} =~ $word ]] || die "no test's name contains '$word'"
done
for name in "${tests[@]}"; do
    [ "${#words[@]}" -eq 0 ] || [[ $name =~ $(IFS='|' && echo "${words[*]}") ]] || continue
    why='' start=$SECONDS
    if "$name"; then
        report ok "slurm, $ranks tasks: ${name//_/ } ($((SECONDS - start)) s)"
    else
        report FAIL "slurm, $ranks tasks: ${name//_/ }: $why"
        squeue --noheader --format=%A | xargs -r scancel --signal=KILL --full
        await 30 nothing_runs
    fi
done
finish
