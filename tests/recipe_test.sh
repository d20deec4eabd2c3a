#!/usr/bin/env bash
# recipe_test.sh: the recipes on one machine: which options a start, a resume and an argument make, what signals do, and
# that the recipe's status is the program's, whichever rank it comes from. Slurm has a test of its own, tests/slurm_test.sh.
# The last line is "N passed, N failed". Exit status: 0 nothing failed, 1 something did, 2 usage.
#
# Usage: tests/recipe_test.sh
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...), TRAIN_DIFFV2CU (build/oncpu/test_trainer --trainer; without it the
#            recipes' figures are not compared, and that is said)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh
[ $# -eq 0 ] || {
    echo "recipe_test.sh: unexpected argument '$1': it takes none" >&2
    exit 2
}
make_scratch
child=''
end() {
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
    wait
    rm -rf "$scratch"
}
trap end EXIT
trap 'exit 1' INT TERM HUP

ranks=1
! has_mpi || ranks=2
recipe=scripts/run_124m.sh steps=40
tiny=(--preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --steps "$steps" --warmup 5 --threads 1 --train-data "$data" --val-every 0)

# Runs a recipe; what it prints is in $scratch/out and $scratch/err. 1, with `why`: its status is another.
expect() { # status, command...
    local right=$1 status
    shift
    "$@" >"$scratch/out" 2>"$scratch/err"
    status=$?
    [ "$status" -eq "$right" ] || {
        why="status $status, not $right: $(tail -n 1 "$scratch/err")"
        return 1
    }
}
one_line() { # pattern: stderr has one line, with it
    [ "$(wc -l <"$scratch/err")" -eq 1 ] && grep -qE -- "$1" "$scratch/err" || {
        why="stderr: $(head -c 300 "$scratch/err")"
        return 1
    }
}
command_has() { # words...: they are in the command that the recipe printed
    local word line
    line=$(grep -m 1 '^+ ' "$scratch/out")
    for word; do [[ " $line " == *" $word "* ]] || {
        why="no '$word' in: $line"
        return 1
    }; done
}
command_lacks() {
    local word
    for word; do ! command_has "$word" || {
        why="'$word' in: $(grep -m 1 '^+ ' "$scratch/out")"
        return 1
    }; done
}

export TRAIN_DIFFV2CU=${TRAIN_DIFFV2CU:-build/oncpu/test_trainer --trainer}
the_figures_of_the_recipes_are_those_of_the_program() { expect 0 scripts/update_recipes.sh --check; }
a_first_start_has_the_settings_and_arguments_take_their_place() {
    RANKS=$ranks expect 0 "$recipe" "${tiny[@]}" --stop-after 10 --out="$scratch/run" \
        && command_has '--preset tiny' '--lr 6e-4' "--out $scratch/run" && command_lacks --resume '--preset 124m' '--steps 19073'
}
a_second_start_resumes_with_the_options_of_the_first() {
    cp -r "$scratch/run" "$scratch/run.first"
    RANKS=$ranks expect 0 "$recipe" --out "$scratch/run" --threads 1 --stop-after 20 --init nowhere && command_has --resume '--stop-after 20' \
        && command_lacks --init nowhere --lr --steps && grep -q 'training from step 10 to 40' "$scratch/out"
}
a_run_that_is_done_stays_done() {
    RANKS=$ranks expect 0 "$recipe" --out "$scratch/run" --threads 1 && same_end "$scratch/whole" "$scratch/run" \
        && RANKS=$ranks expect 0 "$recipe" --out "$scratch/run" --threads 1 && grep -q 'nothing to do' "$scratch/out"
}
# Starts a run, sends it a signal at step 5, and sets `status` to how it ends. As from a terminal, with job control: so that the
# recipe does not ignore SIGINT, also when these tests were started by something that does, in the background of a script
# or under nohup.
signal_a_run() { # signal
    local heeds=(env --default-signal=INT,HUP)
    "${heeds[@]}" true 2>/dev/null || heeds=(env) # an older env
    rm -rf "${scratch:?}/$1"
    set -m
    RANKS=$ranks "${heeds[@]}" "$recipe" "${tiny[@]}" --out "$scratch/$1" >"$scratch/out" 2>"$scratch/err" &
    child=$!
    set +m
    await 60 at_step "$scratch/$1" 5
    if [ "$1" = INT ]; then kill -INT -- "-$child"; else kill "-$1" "$child"; fi # Ctrl-C goes to the whole group
    wait "$child"
    status=$? child=''
}
a_signal_to_the_recipe_saves_and_a_start_goes_on_bitwise() {
    local signal status
    for signal in USR1 TERM INT HUP; do
        signal_a_run "$signal"
        [ "$status" -ne 0 ] || signal_a_run "$signal" # on a busy machine the run may be over before the signal has come to its ranks
        [ "$status" -eq 3 ] || {
            why="SIG$signal: status $status, not 3: $(tail -n 1 "$scratch/err")"
            return 1
        }
        RANKS=$ranks expect 0 "$recipe" --out "$scratch/$signal" --threads 1 && command_has --resume || return 1
        why=$(same_end "$scratch/whole" "$scratch/$signal") || {
            why="SIG$signal: $why"
            return 1
        }
    done
}
# A program of which one rank ends as it is told to, and the others wait for it.
a_rank_that_fails_ends_the_recipe_with_its_status() {
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
            FAKE_RANK=$rank FAKE_STATUS=$status TRAIN_DIFFV2=$scratch/fake RANKS=$ranks expect "$status" "$recipe" --out "$scratch/none" \
                || {
                    why="rank $rank: $why"
                    return 1
                }
        done
    done
}
# A program that writes its secret to a file.
each_start_has_a_secret_of_its_own_that_is_not_printed() {
    local i file
    printf '#!/bin/sh\nprintf %%s "$DIFFV2_SECRET" >%q.$$\n' "$scratch/secret" >"$scratch/fake"
    chmod +x "$scratch/fake"
    for i in 1 2; do # not even one that is set
        DIFFV2_SECRET=$i TRAIN_DIFFV2=$scratch/fake RANKS=1 expect 0 "$recipe" --out "$scratch/none" || return 1
    done
    [[ $(cat "$scratch"/secret.*) =~ ^[0-9a-f]{64}$ ]] || {
        why="secrets: $(cat "$scratch"/secret.*)"
        return 1
    }
    for file in "$scratch"/secret.*; do
        ! grep -qf "$file" "$scratch/out" "$scratch/err" || {
            why="it was printed: $(head -c 300 "$scratch/out")"
            return 1
        }
    done
    ! cmp -s "$scratch"/secret.* || {
        why='two starts have the same'
        return 1
    }
}
there_is_a_rank_for_each_gpu_that_is_visible() {
    mkdir -p "$scratch/bin"
    printf '#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: Some GPU (UUID: GPU-$i)"; done\n' >"$scratch/bin/nvidia-smi"
    printf '#!/bin/sh\n' | tee "$scratch/bin/mpirun" >"$scratch/fake"
    chmod +x "$scratch"/bin/* "$scratch/fake"
    visible_case() { # ranks, variable
        expect 0 env -u RANKS ${2+"CUDA_VISIBLE_DEVICES=$2"} PATH="$scratch/bin:$PATH" TRAIN_DIFFV2="$scratch/fake" "$recipe" --out "$scratch/none" \
            && command_has "mpirun -q -np $1" || {
            why="CUDA_VISIBLE_DEVICES=${2-}: $why"
            return 1
        }
    }
    visible_case 4 && visible_case 2 2,3 && visible_case 3 GPU-1,MIG-2,0 && visible_case 2 0,1,-1,2 && visible_case 2 1,0,4,3
}
srun_starts_the_program_for_gpus_without_mpi() {
    mkdir -p "$scratch/bin"
    printf '#!/bin/sh\n' | tee "$scratch/bin/srun" "$scratch/bin/fakecu" >"$scratch/bin/fake"
    chmod +x "$scratch"/bin/*
    srun_case() { # MPI, program, assignments...
        local mpi=$1 started=$scratch/bin/$2
        shift 2
        expect 0 env -u SLURM_MPI_TYPE PATH="$scratch/bin:$PATH" SLURM_JOB_ID=1 TRAIN_DIFFV2="$started" "$@" "$recipe" --out "$scratch/none" \
            && command_has "srun --mpi=$mpi" || {
            why="$started $*: $why"
            return 1
        }
    }
    srun_case none fakecu && srun_case pmix fake && srun_case pmi2 fakecu SLURM_MPI_TYPE=pmi2
}
a_failure_of_the_program_is_that_of_the_recipe() {
    RANKS=1 expect 2 "$recipe" --no-such-option 1 && one_line no-such-option && RANKS=1 expect 1 "$recipe" "${tiny[@]}" --init "$scratch/nothing" && one_line nothing
}
mistakes_are_one_line() {
    expect 2 "$recipe" --resume && one_line --resume && RANKS=none expect 2 "$recipe" && one_line "RANKS 'none'" \
        && TRAIN_DIFFV2=$scratch/nothing expect 1 "$recipe" && one_line nothing && expect 2 "$recipe" --out && one_line --out \
        && RANKS=2 LAUNCH=no_such_launcher expect 1 "$recipe" && one_line no_such_launcher \
        && SLURM_SUBMIT_DIR=$scratch expect 2 "$recipe" && one_line 'directory of the repository'
}

RANKS=$ranks "$recipe" "${tiny[@]}" --out "$scratch/whole" >"$scratch/out" 2>&1 || {
    tail -n 3 "$scratch/out" >&2
    exit 1
}
for name in the_figures_of_the_recipes_are_those_of_the_program \
    a_first_start_has_the_settings_and_arguments_take_their_place \
    a_second_start_resumes_with_the_options_of_the_first \
    a_run_that_is_done_stays_done \
    a_signal_to_the_recipe_saves_and_a_start_goes_on_bitwise \
    a_rank_that_fails_ends_the_recipe_with_its_status \
    each_start_has_a_secret_of_its_own_that_is_not_printed \
    there_is_a_rank_for_each_gpu_that_is_visible \
    srun_starts_the_program_for_gpus_without_mpi \
    a_failure_of_the_program_is_that_of_the_recipe \
    mistakes_are_one_line; do
    why=''
    if [[ $name == the_figures* && ! -x ${TRAIN_DIFFV2CU%% *} ]]; then
        report skip "recipes: there is no ${TRAIN_DIFFV2CU%% *} to compare their figures with: make build/oncpu/test_trainer"
        continue
    fi
    if "$name"; then report ok "recipes, $ranks ranks: ${name//_/ }"; else report FAIL "recipes, $ranks ranks: ${name//_/ }: $why"; fi
done
finish
