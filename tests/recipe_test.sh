#!/usr/bin/env bash
# recipe_test.sh: tests the recipes on one machine: the options of a start, of a resume and of arguments, signals, and
# the exit status. tests/slurm_test.sh tests them under Slurm. The last line is "N passed, N failed[, N skipped]". Exit
# status: 0 nothing failed, 1 something failed, 2 usage.
#
# Usage: tests/recipe_test.sh
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh
[ $# -eq 0 ] || {
    echo "recipe_test.sh: unexpected argument '$1': it takes none" >&2
    exit 2
}
make_scratch
trap 'wait; rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM HUP

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

test_the_figures_of_the_recipes_are_up_to_date() {
    ends 0 scripts/update_docs.py --check docs/cluster.md scripts/recipes
}
test_a_first_start_has_the_settings_and_arguments_override_them() {
    ends 0 "${recipe[@]}" "${tiny[@]}" --stop-after 10 --out="$scratch/run"
    command_has '--preset tiny' '--lr 6e-4' "--out $scratch/run"
    command_lacks --resume '--preset 124m' '--steps 19073'
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
    cat >"$scratch/fake" <<'END'
#!/usr/bin/env bash
[ "${OMPI_COMM_WORLD_RANK-0}" -eq "$FAKE_RANK" ] || exec sleep 30
[ "$FAKE_STATUS" -lt 128 ] || kill "-$((FAKE_STATUS - 128))" $$
exit "$FAKE_STATUS"
END
    chmod +x "$scratch/fake"
    for status in 1 2 3 137; do
        for ((rank = 0; rank < ranks; rank++)); do
            ends "$status" env FAKE_RANK=$rank FAKE_STATUS=$status TRAIN_DIFFV2="$scratch/fake" \
                "${recipe[@]}" --out "$scratch/none"
        done
    done
}
test_each_visible_gpu_has_a_rank() {
    mkdir -p "$scratch/bin"
    printf '#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: Some GPU (UUID: GPU-$i)"; done\n' >"$scratch/bin/nvidia-smi"
    printf '#!/bin/sh\n' | tee "$scratch/bin/mpirun" >"$scratch/fake"
    chmod +x "$scratch"/bin/* "$scratch/fake"
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
    mkdir -p "$scratch/bin"
    printf '#!/bin/sh\n' | tee "$scratch/bin/srun" "$scratch/bin/fakecu" >"$scratch/bin/fake"
    chmod +x "$scratch"/bin/*
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
    ends 2 env RANKS=1 "${recipe[@]}" --no-such-option 1
    one_line no-such-option
    ends 1 env RANKS=1 "${recipe[@]}" "${tiny[@]}" --init "$scratch/nothing"
    one_line nothing
}
test_usage_errors_are_one_line() {
    ends 2 scripts/recipe.sh 12 --train-data "$data"
    one_line "no recipe '12': specify one of 124m, 350m,"
    ends 2 "${recipe[@]}" --resume
    one_line --resume
    ends 2 env RANKS=none "${recipe[@]}"
    one_line "RANKS 'none'"
    ends 1 env TRAIN_DIFFV2="$scratch/nothing" "${recipe[@]}"
    one_line nothing
    ends 2 "${recipe[@]}" --out
    one_line --out
    ends 1 env RANKS=2 LAUNCH=no_such_launcher "${recipe[@]}"
    one_line no_such_launcher
    ends 2 env SLURM_SUBMIT_DIR="$scratch" "${recipe[@]}"
    one_line 'from the root of the repository'
}

"${recipe[@]}" "${tiny[@]}" --out "$scratch/whole" >"$scratch/out" 2>&1 || {
    tail -n 3 "$scratch/out" >&2
    exit 1
}
for name in the_figures_of_the_recipes_are_up_to_date \
    a_first_start_has_the_settings_and_arguments_override_them \
    a_second_start_resumes_with_the_options_of_the_first \
    a_finished_run_stays_finished \
    a_signal_to_the_recipe_saves_and_the_next_start_is_bitwise_equal \
    a_rank_that_fails_ends_the_recipe_with_its_status \
    each_visible_gpu_has_a_rank \
    the_help_of_a_recipe_has_its_figures \
    srun_starts_the_gpu_program_without_mpi \
    the_recipe_fails_with_the_status_and_message_of_the_program \
    usage_errors_are_one_line; do
    run_test "test_$name" "recipes, $ranks ranks"
done
finish
