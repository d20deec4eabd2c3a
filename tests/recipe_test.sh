#!/usr/bin/env bash
# recipe_test.sh: tests the recipes on one machine: the options of a start, of a resume and of arguments, signals, and
# the exit status. tests/slurm_test.sh tests them under Slurm. The last line is "N passed, N failed[, N skipped]". Exit
# status: 0 nothing failed, 1 something failed, 2 usage.
#
# Usage: tests/recipe_test.sh
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS, FAULTY_DIFFV2 (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh
no_arguments "$@"
make_scratch
trap 'wait; rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM HUP

faulty_program=$(realpath "${FAULTY_DIFFV2:-build/faulty_diffv2}")
ranks=1
! has_mpi || ranks=2
recipe=(scripts/recipe.sh 124m) steps=40
tiny=(--preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --steps "$steps" --warmup 5 --threads 1
    --train-data "$data" --val-every 0)
export RANKS=$ranks

ends() { # exit status, command...: stdout is in $scratch/out, stderr in $scratch/err
    local status=0
    "${@:2}" >"$scratch/out" 2>"$scratch/err" || status=$?
    [ "$status" -eq "$1" ] || fail "${*:2}: status $status, not $1: $(tail -n 1 "$scratch/err")"
}
one_line() { # pattern, of the only line of stderr
    [ "$(wc -l <"$scratch/err")" -eq 1 ] && grep -qE -- "$1" "$scratch/err" \
        || fail "stderr: $(head -c 300 "$scratch/err")"
}
refuses() { # exit status, pattern of the only line of stderr, command...
    ends "$1" "${@:3}"
    one_line "$2"
}
command_has() { # words of the command that the recipe printed...
    local word line
    line=$(grep -m 1 '^+ ' "$scratch/out")
    for word; do [[ " $line " == *" $word "* ]] || fail "no '$word' in: $line"; done
}
command_lacks() { # words...
    local word line
    line=$(grep -m 1 '^+ ' "$scratch/out")
    for word; do [[ " $line " != *" $word "* ]] || fail "'$word' in: $line"; done
}
same_as_whole() { # run directory
    local difference
    difference=$(same_end "$scratch/whole" "$1") || fail "${1##*/}: $difference"
}

test_the_figures_of_each_recipe_are_those_of_a_dry_run() {
    local name machines gpus total steps zero figures place row
    while read -r name machines gpus _ total steps _ _ _ zero _; do
        ends 0 env RANKS=1 scripts/recipe.sh "$name" --dry-run --ranks $((machines * gpus)) --device H100 \
            --val-every 0 --threads 1 --out "$scratch/none"
        figures=$(awk -v zero="$zero" -v tokens=$((total * steps)) '
            function number(text) { return text * 1000 ^ (index(" kMGTPE", substr(text, length(text))) - 1) }
            /^  total .* MiB$/ { memory = $2 / 1024 }
            $1 == zero && $3 == "MiB" { sent = $4 / 1024 }
            /^  total +[0-9]+$/ { model = $2 " parameters" }
            /^  active in a token/ { model = model ", " $5 " active in a token" }
            /^  per token/ { per_token = number($3) }
            /^  of the run/ { flops = number($4) }
            END {
                printf "%.3gG\n%s\n%.3g GiB; sends %.3g GiB per step\n", tokens / 1e9, model, memory, sent
                printf "%.3g (%.3g per token)\n", flops, per_token
            }' "$scratch/out")
        [ "$machines" -eq 1 ] && place='one machine' || place="$machines machines with $gpus each"
        ends 0 scripts/recipe.sh "$name" --help
        equal "$(sed -nE 's/^    (tokens|memory per GPU|FLOPs|model +--preset [^,]*,) +//p' "$scratch/out")" "$figures"
        contains "$scratch/out" "    GPUs            $((machines * gpus)), on $place"
        row="| \`$name\` | $((machines * gpus)) | ${figures%%$'\n'*} | $(sed -n '$s/ .*//p' <<<"$figures") |"
        contains docs/cluster.md "$row"
    done < <(grep '^[^ #]' scripts/recipes)
}
test_a_first_start_has_the_settings_and_arguments_override_them() {
    ends 0 "${recipe[@]}" "${tiny[@]}" --stop-after 10 --out="$scratch/run"
    command_has '--preset tiny' '--lr 6e-4' "--out $scratch/run"
    command_lacks --resume '--preset 124m' '--steps 19073'
    ends 2 "${recipe[@]}" --preset tiny --batch-schedule x --out "$scratch/none"
    command_lacks --total-batch
}
test_a_second_start_resumes_with_the_options_of_the_first() {
    ends 0 "${recipe[@]}" --out "$scratch/run" --threads 1 --stop-after 20 --init nowhere
    command_has --resume '--stop-after 20'
    command_lacks --init nowhere --lr --steps
    contains "$scratch/out" 'training from step 10 to 40'
}
test_a_finished_run_stays_finished() {
    ends 0 "${recipe[@]}" --out "$scratch/run" --threads 1
    same_as_whole "$scratch/run"
    ends 0 "${recipe[@]}" --out "$scratch/run" --threads 1
    contains "$scratch/out" 'nothing to do'
}
# Starts a run, sends it a signal at step 5, and sets `status` to its exit status. Job control and env make sure that
# the recipe does not ignore SIGINT, even if the caller does, as a script in the background or nohup.
signal_a_run() { # signal
    local environment=(env --default-signal=INT,HUP) child
    "${environment[@]}" true 2>/dev/null || environment=(env) # an older env
    rm -rf "${scratch:?}/$1"
    set -m
    "${environment[@]}" "${recipe[@]}" "${tiny[@]}" --out "$scratch/$1" >"$scratch/out" 2>"$scratch/err" &
    child=$!
    set +m
    # shellcheck disable=SC2064 # expanded now
    trap "kill -TERM $child 2>/dev/null" EXIT
    await 60 at_step "$scratch/$1" 5 || true
    local receiver=$child
    [ "$1" != INT ] || receiver=-$child # Ctrl-C signals the whole group
    kill "-$1" -- "$receiver" || true
    status=0
    wait "$child" || status=$?
    trap - EXIT
}
test_a_signal_to_the_recipe_saves_and_the_next_start_is_bitwise_equal() {
    local signal
    for signal in USR1 TERM INT HUP; do
        signal_a_run "$signal"
        [ "$status" -ne 0 ] || signal_a_run "$signal" # on a busy machine the run may end before the signal arrives
        [ "$status" -eq 3 ] || fail "SIG$signal: status $status, not 3: $(tail -n 1 "$scratch/err")"
        ends 0 "${recipe[@]}" --out "$scratch/$signal" --threads 1
        command_has --resume
        same_as_whole "$scratch/$signal"
    done
}
test_a_rank_that_fails_ends_the_recipe_with_its_status() {
    local status rank
    program "$scratch/fake" '[ "${OMPI_COMM_WORLD_RANK-0}" -eq "$FAKE_RANK" ] || exec sleep 30
[ "$FAKE_STATUS" -lt 128 ] || kill "-$((FAKE_STATUS - 128))" $$
exit "$FAKE_STATUS"'
    for status in 1 2 3 137; do
        for ((rank = 0; rank < ranks; rank++)); do
            ends "$status" env FAKE_RANK=$rank FAKE_STATUS=$status TRAIN_DIFFV2="$scratch/fake" \
                "${recipe[@]}" --out "$scratch/none"
        done
    done
}
# A trainer whose start number N has the planned fault (tests/planned_faults.h) of line N of $scratch/faults; "-": none.
# Sets `faulty` to the options of a run that saves every 8 steps.
plan_faults() { # faults...
    [ "$ranks" -gt 1 ] || skip 'it requires a program with MPI'
    [ -x "$faulty_program" ] || skip "no $faulty_program: make build/faulty_diffv2"
    printf '%s\n' "$@" >"$scratch/faults"
    rm -rf "$scratch"/starts.* "$scratch/again"
    program "$scratch/faulty" "starts=$scratch/starts.\$OMPI_COMM_WORLD_RANK
echo >>\$starts
FAULT=\$(sed -n \"\$(wc -l <\$starts)p\" $scratch/faults)
FAULT=\$FAULT exec $faulty_program \"\$@\""
    faulty=(env TRAIN_DIFFV2="$scratch/faulty" "${recipe[@]}" "${tiny[@]}" --checkpoint-every 8 --timeout 4)
    faulty+=(--out "$scratch/again")
}
starts_are() { equal "$(wc -l <"$scratch/starts.0") starts" "$1 starts"; } # number
test_a_run_whose_ranks_die_goes_on_and_ends_bitwise_equal() {
    local difference host
    host=$(hostname)
    plan_faults -
    ends 0 "${faulty[@]}"
    mv "$scratch/again" "$scratch/undisturbed"
    # in turn: killed before the first checkpoint, killed, stopped while the others wait, killed while it saves
    plan_faults kill:1:3:forward kill:0:11:update stop:1:14:backward kill:1:16:write
    ends 0 "${faulty[@]}"
    difference=$(same_end "$scratch/undisturbed" "$scratch/again") || fail "$difference"
    equal "$(grep -c '"train"' "$scratch/again/log.jsonl") train records" "$steps train records"
    starts_are 5
    equal "$(grep -c '^recipe.sh: ' "$scratch/err") lines" '4 lines'
    grep -qE "^recipe.sh: rank 1 on $host failed at step 2, status [0-9]+: restart 1 of 10 from step 0\$" \
        "$scratch/err" \
        && grep -qE "rank 0 on $host failed at step 1[01], .*: restart 2 of 10 from step 8\$" "$scratch/err" \
        && grep -qE "rank 1 on $host failed at step 1[34], .*: restart 3 of 10 from step 8\$" "$scratch/err" \
        && grep -qE "rank 1 on $host failed at step 1[56], .*: restart 4 of 10 from step 8\$" "$scratch/err" \
        || fail "$(grep '^recipe.sh: ' "$scratch/err")"
}
fails_after() { # starts, text of the last line of the recipe, "" if it prints none
    local status=0
    "${faulty[@]}" >"$scratch/out" 2>"$scratch/err" || status=$?
    [ "$status" -ne 0 ] || fail 'it did not fail'
    starts_are "$1"
    [ -n "$2" ] || lacks "$scratch/err" 'recipe.sh: '
    [[ $(grep '^recipe.sh: ' "$scratch/err" | tail -n 1) == *"$2" ]] || fail "no '$2' in: $(cat "$scratch/err")"
}
test_a_run_that_fails_at_the_same_step_again_is_not_restarted() {
    plan_faults kill:1:11:forward kill:1:11:forward
    fails_after 2 'not restarted, because it got no further than at the failure before'
    plan_faults kill:1:1:forward # before the first step
    fails_after 1 ''
}
test_restarts_are_bounded() {
    plan_faults kill:1:3:forward kill:1:5:forward kill:1:7:forward
    faulty=(env RESTARTS=2 "${faulty[@]}")
    fails_after 3 'not restarted, because RESTARTS allows 2'
    plan_faults kill:1:3:forward
    faulty=(env RESTARTS=0 "${faulty[@]}")
    fails_after 1 ''
}
test_a_run_that_ended_by_itself_is_not_restarted() {
    plan_faults "$(printf 'nan:0:%d,' {9..40})"
    fails_after 1 ''
    contains "$scratch/err" 'had no finite loss'
    plan_faults broken:0:16,broken:1:16
    fails_after 1 ''
    contains "$scratch/err" 'are not finite and are not saved'
    plan_faults signal:1:9:1
    fails_after 1 ''
}
# A job of three nodes, one of them spare: a stand-in for srun, which ends as srun does when a task of node b is killed,
# and which refuses what srun refuses.
test_a_failed_node_of_a_slurm_job_is_replaced_by_a_spare_one() {
    mkdir -p "$scratch/bin"
    cat >"$scratch/bin/srun" <<'END'
#!/usr/bin/env bash
nodes=$SLURM_JOB_NUM_NODES tasks=$SLURM_NTASKS left=(a b c)
while [[ $1 == --* ]]; do
    case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks=*) tasks=${1#*=} ;;
    --exclude=*)
        excluded=,${1#*=}, left=()
        [[ $excluded != */* ]] || { echo 'srun: error: Invalid node list' >&2 && exit 1; }
        for node in a b c; do [[ $excluded == *",$node,"* ]] || left+=("$node"); done
        ;;
    esac
    shift
done
if [ "$nodes" -gt "${#left[@]}" ] || [ "$tasks" -ne $((nodes * SLURM_NTASKS_PER_NODE)) ]; then
    echo 'srun: error: Unable to create step for job 1: Requested node configuration is not available' >&2
    exit 1
fi
echo "${left[*]::nodes}" >>"$JOB_NODES"
if [[ " ${left[*]::nodes} " == *' b '* ]]; then
    eval "$FAILURE"
    exit 137
fi
END
    chmod +x "$scratch/bin/srun"
    program "$scratch/bin/scontrol" \
        '[ "$2" = job ] || [ "$3" = job ] && echo " JobState=RUNNING " || printf "a\nb\nc\n"'
    program "$scratch/bin/fakecu" true
    slurm() { # spare nodes, what srun does
        rm -f "$scratch/nodes"
        env PATH="$scratch/bin:$PATH" JOB_NODES="$scratch/nodes" FAILURE="$2" SPARES="$1" SLURM_JOB_ID=1 \
            SLURM_JOB_NUM_NODES=3 SLURM_JOB_NODELIST='[a-c]' SLURM_NTASKS=6 SLURM_NTASKS_PER_NODE=2 \
            TRAIN_DIFFV2="$scratch/bin/fakecu" "${recipe[@]}" --out "$scratch/none" >"$scratch/out" 2>"$scratch/err"
    }
    local report='echo "diffv2: rank 3 (b.some.domain) has ended without a message (killed?); last state" >&2' other
    local killed='echo "srun: error: b: task 3: Killed" >&2'
    other='echo "srun: error: a: task 0: Exited with exit code 1" >&2'
    for failure in "$report;$other" "$killed;$other" "${report/b.some/unknown.some};$killed"; do
        slurm 1 "$failure" || fail "$failure: $(cat "$scratch/err")"
        equal "$(tr '\n' ' ' <"$scratch/nodes")" 'a b a c '
        contains "$scratch/err" 'rank 3 on b failed at step 0, status 137: restart 1 of 10 from step 0, without b'
    done
    slurm 1 "echo 'srun: error: Node failure on b' >&2; $other" || fail "$(cat "$scratch/err")"
    contains "$scratch/err" 'node b failed at step 0, status 137: restart 1 of 10 from step 0, without b'
    # the controller does not answer once
    sed -i "2i [ \"\$2\" != show ] || [ -e $scratch/tried ] || { : >$scratch/tried && exit 1; }" "$scratch/bin/scontrol"
    slurm 1 "$killed" || fail "$(cat "$scratch/err")"
    [ -e "$scratch/tried" ]
    ! slurm 0 "$report" || fail 'no spare node, and it did not fail'
    equal "$(cat "$scratch/nodes")" 'a b c'
}
test_each_visible_gpu_has_a_rank() {
    program "$scratch/bin/nvidia-smi" 'for i in 0 1 2 3; do echo "GPU $i: Some GPU (UUID: GPU-$i)"; done'
    program "$scratch/bin/mpirun" true
    program "$scratch/fake" true
    starts() { # ranks, CUDA_VISIBLE_DEVICES
        ends 0 env -u RANKS ${2+"CUDA_VISIBLE_DEVICES=$2"} PATH="$scratch/bin:$PATH" TRAIN_DIFFV2="$scratch/fake" \
            "${recipe[@]}" --out "$scratch/none"
        command_has "mpirun -q -np $1"
    }
    starts 4
    starts 2 2,3
    starts 3 GPU-1,MIG-2,0
    starts 2 0,1,-1,2
    starts 2 1,0,4,3
}
test_the_help_of_a_recipe_has_its_figures() {
    ends 0 "${recipe[@]}" --help
    contains "$scratch/out" '    FLOPs           8.55e+18 (8.55e+08 per token)' '    settings from   the batch of GPT-2'
    ! grep -q 30b-a3b "$scratch/out" || fail 'it has those of another recipe'
}
test_srun_starts_the_gpu_program_without_mpi() {
    local name
    for name in srun fakecu fake; do program "$scratch/bin/$name" true; done
    starts() { # type of MPI, program, assignments...
        ends 0 env -u SLURM_MPI_TYPE PATH="$scratch/bin:$PATH" SLURM_JOB_ID=1 TRAIN_DIFFV2="$scratch/bin/$2" "${@:3}" \
            "${recipe[@]}" --out "$scratch/none"
        command_has "srun --mpi=$1"
    }
    starts none fakecu
    starts pmix fake
    starts pmi2 fakecu SLURM_MPI_TYPE=pmi2
    [ ! -s "$scratch/err" ] || fail "stderr: $(cat "$scratch/err")"
    recipe=(scripts/recipe.sh 3b)
    starts none fakecu SLURM_JOB_NUM_NODES=7
    one_line '3b is for 8 machines: sbatch --nodes=8 scripts/recipe.sh 3b'
}
test_the_recipe_fails_with_the_status_and_message_of_the_program() {
    refuses 2 no-such-option env RANKS=1 "${recipe[@]}" --no-such-option 1
    refuses 1 nothing env RANKS=1 "${recipe[@]}" "${tiny[@]}" --init "$scratch/nothing"
}
test_usage_errors_are_one_line() {
    refuses 2 "no recipe '12': specify one of 124m, 350m," scripts/recipe.sh 12 --train-data "$data"
    refuses 2 --resume "${recipe[@]}" --resume
    refuses 2 'a restart would decay again' "${recipe[@]}" --decay-now --decay-steps 4
    refuses 2 "RANKS 'none'" env RANKS=none "${recipe[@]}"
    refuses 2 "RESTARTS '-1'" env RESTARTS=-1 "${recipe[@]}"
    refuses 2 "SPARES '1'" env SPARES=1 "${recipe[@]}"
    refuses 1 nothing env TRAIN_DIFFV2="$scratch/nothing" "${recipe[@]}"
    refuses 2 --out "${recipe[@]}" --out
    refuses 1 no_such_launcher env RANKS=2 LAUNCH=no_such_launcher "${recipe[@]}"
    refuses 127 'env: .*in_a_container' env LAUNCH=env TRAIN_DIFFV2=in_a_container "${recipe[@]}" # not on this machine
    refuses 2 'from the root of the repository' env SLURM_SUBMIT_DIR="$scratch" "${recipe[@]}"
}

"${recipe[@]}" "${tiny[@]}" --out "$scratch/whole" >"$scratch/out" 2>&1 || {
    tail -n 3 "$scratch/out" >&2
    exit 1
}
for test in $(tests_in_order); do run_test "$test" "recipes, $ranks ranks"; done
finish
