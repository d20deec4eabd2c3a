#!/usr/bin/env bash
# slurm_test.sh: tests the Slurm recipe under Slurm. Starts a controller and a node daemon on loopback, with their keys,
# ports and files in a scratch directory; runs a recipe on CPUs, stops it in all the ways that Slurm has, and compares
# the resumed run with an uninterrupted one, bitwise. Does not contact any other Slurm on this machine. Installs
# slurm-wlm and munge with apt-get if they are missing. The daemons end with this script. The last line is "N passed, N
# failed[, N skipped]". Exit status: 0 nothing failed, 1 something failed or Slurm is not available, 2 usage.
#
# Usage: tests/slurm_test.sh [--check | WORD...]
#   --check     only checks that Slurm is available
#   WORD        only tests whose names contain one of the words
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh

check=no words=()
for word; do
    case $word in
    --check) check=yes ;;
    -*)
        echo "slurm_test.sh: unexpected argument '$word': specify --check or words of names" >&2
        exit 2
        ;;
    *) words+=("$word") ;;
    esac
done

PATH=$PATH:/usr/sbin:/sbin
die() {
    echo "slurm_test.sh: $1" >&2
    exit 1
}
require_programs 'slurmctld slurmd munged' slurm-wlm munge
[ "$check" = no ] || exit 0

make_scratch
S=$scratch/slurm daemons=()
# Set before any command of Slurm, so that none contacts another Slurm on this machine.
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
    rm -rf "$scratch"
}
nothing_runs() { [ -z "$(squeue --noheader 2>/dev/null)" ]; }
trap end EXIT
trap 'exit 1' INT TERM HUP

free_port() { # prints a random port that no process listens on
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
    local host me node
    host=$(hostname -s) me=$(id -un)
    mkdir -p "$S/state" "$S"/spool.{"$host",n1,n2} || return 1
    # --force: munge rejects the permissions of a scratch directory
    (umask 077 && head -c 1024 /dev/urandom >"$S/munge.key") || return 1
    munged --force --key-file="$S/munge.key" --socket="$S/munge.socket" --pid-file="$S/munged.pid" \
        --log-file="$S/munged.log" --seed-file="$S/munge.seed" || return 1
    # cred_expire is also the delay of a requeued job, 120 s by default
    cat >"$S/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$S/munge.socket,cred_expire=5
StateSaveLocation=$S/state
SlurmdSpoolDir=$S/spool.%n
SlurmctldPidFile=$S/slurmctld.pid
SlurmdPidFile=$S/slurmd.%n.pid
SlurmctldLogFile=$S/slurmctld.log
SlurmdLogFile=$S/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=3600
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=$(nproc) State=UNKNOWN
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=$(nproc) State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=$(nproc) State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=$host PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=pair Nodes=n1,n2 PreemptMode=OFF State=UP
END
    slurmctld -D >"$S/slurmctld.out" 2>&1 &
    daemons+=($!)
    for node in "$host" n1 n2; do
        slurmd -D -N "$node" >"$S/slurmd.$node.out" 2>&1 &
        daemons+=($!)
    done
    await 60 nodes_are_idle
}
nodes_are_idle() { [ "$(sinfo --noheader --format=%T | sort -u)" = idle ]; }

# A run of about 10 s that saves every 20 steps; all tests are compared with `whole`.
steps=60
shape=(--preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --warmup 5 --threads 1
    --train-data "$data" --val-every 0)
tiny=("${shape[@]}" --steps "$steps" --checkpoint-every 20)

submit() { # job name, options of sbatch..., --, arguments of the recipe...: sets `job`
    local name=$1 flags=()
    shift
    while [ "$1" != -- ]; do
        flags+=("$1")
        shift
    done
    shift
    job=$(sbatch --parsable --job-name="$name" --ntasks-per-node="$ranks" --gpus-per-node=0 --cpus-per-task=1 \
        --nodes=1 --time=10 --output="$scratch/$name.log" "${flags[@]}" \
        scripts/recipe.sh 124m "$@" --out "$scratch/$name")
}
job_field() { # job, field
    scontrol --oneliner show job "$1" | sed -n "s/.* $2=\([^ ]*\).*/\1/p"
}
job_is() { # job, states as a pattern
    [[ $(job_field "$1" JobState) =~ ^($2)$ ]]
}
ended='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL'

# The job completes after this many restarts, and its last checkpoint is equal to that of the uninterrupted run.
expect_whole() { # name, restarts
    local difference
    await 180 job_is "$job" "$ended" || fail "job $job is $(job_field "$job" JobState) after 180 s"
    job_is "$job" COMPLETED || fail "job $job is $(job_field "$job" JobState), status $(job_field "$job" ExitCode)"
    equal "$(job_field "$job" Restarts) restarts" "$2 restarts"
    difference=$(same_end "$scratch/whole" "$scratch/$1") || fail "$difference"
    equal "$(grep -c '"train"' "$scratch/$1/log.jsonl") train records" "$steps train records"
}
# A signal stopped the job with a checkpoint, and it resumed.
expect_saved() { contains "$scratch/$1.log" 'stopped after step' --resume; } # name
reaches() {                                                                  # name, step
    await 60 at_step "$scratch/$1" "$2" || fail "it did not reach step $2"
}

test_an_uninterrupted_job_completes() {
    submit alone -- "${tiny[@]}"
    expect_whole alone 0
}
stop_by() { # name, command that stops it...
    local name=$1
    shift
    submit "$name" -- "${tiny[@]}"
    reaches "$name" 7
    "$@" "$job"
    expect_whole "$name" 1
    expect_saved "$name"
}
test_sigusr1_to_the_batch_script_saves_requeues_and_resumes() { stop_by batch scancel --batch --signal=USR1; }
test_sigusr1_to_the_tasks_saves_requeues_and_resumes() { stop_by tasks scancel --signal=USR1; }
test_sigusr1_to_script_and_tasks_saves_requeues_and_resumes() { stop_by full scancel --full --signal=USR1; }
test_sigusr1_while_the_job_starts_requeues_and_resumes() {
    submit early -- "${tiny[@]}"
    await 60 grep -q '^+ srun' "$scratch/early.log" || fail 'it did not start'
    scancel --batch --signal=USR1 "$job"
    expect_whole early 1
}
test_sigusr1_in_a_phase_requeues_and_continues_there() {
    file "$scratch/lines" "--stop-after 10
--stop-after 50
--steps $steps"
    submit phases -- "${tiny[@]}" --phases "$scratch/lines"
    reaches phases 25
    scancel --batch --signal=USR1 "$job"
    expect_whole phases 1
    expect_saved phases
    equal "$(sed -nE 's/^\+ .* --(stop-after|steps) /\1 /p' "$scratch/phases.log" | paste -sd ' ')" \
        "stop-after 10 stop-after 50 stop-after 50 steps $steps"
}
test_requeue_by_the_administrator_saves_and_resumes() { stop_by requeued scontrol requeue; }
test_a_preempted_job_resumes() { stop_by preempted preempt; }
preempt() {
    sbatch --parsable --partition=high --nodes=1 --exclusive --time=1 --job-name=urgent --output=/dev/null \
        --wrap='sleep 3' >/dev/null
}
test_sigusr1_before_the_time_limit_saves_requeues_and_resumes() {
    # Slurm sends the signal up to 60 s earlier than specified, and checks time limits every 30 s
    submit limit --time=1 --signal=B:USR1@45 -- "${shape[@]}" --steps 100000 --checkpoint-every 0
    await 180 at_restart || fail "the job did not restart within 180 s"
    expect_saved limit
    scancel --batch --signal=KILL "$job"
    scancel "$job"
}
at_restart() { [ "$(job_field "$job" Restarts)" -ge 1 ] && grep -q -- --resume "$scratch/limit.log"; }
test_a_cancelled_job_saves_and_stays_cancelled() {
    submit cancelled -- "${tiny[@]}"
    reaches cancelled 7
    scancel "$job"
    await 60 job_is "$job" CANCELLED || fail "it is $(job_field "$job" JobState)"
    await 40 nothing_runs || true
    sleep 2
    job_is "$job" CANCELLED && [ "$(job_field "$job" Restarts)" = 0 ] || fail "it is $(job_field "$job" JobState) later"
    contains "$scratch/cancelled.log" 'stopped after step'
}
test_a_job_resumes_after_the_failure_of_its_node() {
    submit node -- "${tiny[@]}"
    reaches node 25
    # the daemon registers with the controller again
    scontrol update nodename="$(hostname -s)" state=down reason=test
    expect_whole node 1
}
# Two nodes of one machine, n1 and n2, of which n2 is spare. MPI does not tell them apart: one rank.
test_a_spare_node_replaces_that_of_a_rank_that_is_killed() {
    local difference
    RANKS=1 scripts/recipe.sh 124m "${tiny[@]}" --out "$scratch/one" >"$scratch/one.out" 2>&1
    SPARES=1 submit spare --partition=pair --nodes=2 --ntasks-per-node=1 --no-kill -- "${tiny[@]}"
    reaches spare 25
    kill_trainer
    await 180 job_is "$job" "$ended" || fail "job $job is $(job_field "$job" JobState) after 180 s"
    difference=$(same_end "$scratch/one" "$scratch/spare") || fail "$difference"
    contains "$scratch/spare.log" 'rank 0 on n1 failed at step' 'restart 1 of 10 from step 20, without n1' \
        --exclude=n1
}
kill_trainer() { # of the job
    local process
    for process in $(scontrol listpids "$job" n1 | awk 'NR > 1 { print $1 }'); do
        [[ $(readlink "/proc/$process/exe") != "$program" ]] || kill -KILL "$process"
    done
}
test_failures_end_the_job_with_the_status_of_the_program() {
    submit usage -- "${tiny[@]}" --no-such-option 1
    expect_failed 2:0
    submit missing -- "${tiny[@]}" --init "$scratch/nothing"
    expect_failed 1:0
}
expect_failed() { # status
    await 60 job_is "$job" "$ended" || true
    sleep 1
    equal "$(job_field "$job" JobState) $(job_field "$job" ExitCode) restarts $(job_field "$job" Restarts)" \
        "FAILED $1 restarts 0"
}

# The CUDA trainer with its kernels on the CPU, started by Slurm's variables without MPI.
device_trainer=(build/oncpu/test_trainer --trainer)
test_the_cuda_trainer_starts_without_mpi_stops_and_resumes() {
    [ -x "${device_trainer[0]}" ] || skip "no ${device_trainer[0]}: make it"
    local command="srun --mpi=none --kill-on-bad-exit=1 ${device_trainer[*]} --train-data $data --layers 2 --hidden 24"
    command+=" --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 2 --total-batch 64 --warmup 2"
    command+=" --steps 12 --threads 1"
    device() { # name, options...
        local out=$scratch/$1
        job=$(CUDA_ON_CPU_DEVICES=2 sbatch --parsable --nodes=1 --ntasks=2 --cpus-per-task=1 --time=10 \
            --output="$out.log" --wrap "$command --out $out ${*:2}")
        await 120 job_is "$job" "$ended" && job_is "$job" COMPLETED \
            || fail "the job is $(job_field "$job" JobState): $(tail -n 1 "$out.log")"
    }
    device device_whole
    device device_parts --stop-after 5
    device device_parts --resume
    contains "$scratch/device_whole.log" '2 ranks (2 on this machine)'
    equal "$(diff -rq "$scratch"/device_{whole,parts}/checkpoints/step_00000012)" ''
}

has_mpi && ranks=2 || ranks=1
start_slurm || {
    tail -n 3 "$S"/*.log "$S"/*.out >&2
    die "Slurm did not start on loopback; see its output above"
}
RANKS=$ranks scripts/recipe.sh 124m "${tiny[@]}" --out "$scratch/whole" >"$scratch/whole.out" 2>&1 || {
    tail -n 3 "$scratch/whole.out" >&2
    die "the uninterrupted run failed"
}
for word in ${words[@]+"${words[@]}"}; do
    [[ $(tests_in_order) =~ $word ]] || die "no test's name contains '$word'"
done
for name in $(tests_in_order); do
    [ "${#words[@]}" -eq 0 ] || [[ $name =~ $(IFS='|' && echo "${words[*]}") ]] || continue
    run_test "$name" "slurm, $ranks tasks"
    if ! nothing_runs; then # after a failure
        squeue --noheader --format=%A | xargs -r scancel --signal=KILL --full
        await 30 nothing_runs
    fi
done
finish
