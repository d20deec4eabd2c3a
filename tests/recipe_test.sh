#!/usr/bin/env bash
# recipe_test.sh: tests the names and figures of the recipes, and runs on CPUs. tests/slurm_test.sh tests them under
# Slurm. The last line is "N passed, N failed[, N skipped]". Exit status: 0 nothing failed, 1 something failed, 2 usage.
#
# Usage: tests/recipe_test.sh
# Variables: TRAIN_DIFFV2, PREDICT_DIFFV2, TEXT_TO_SHARDS (build/...)
cd "$(dirname "$0")/.." || exit 1
source tests/runs.sh
no_arguments "$@"
make_scratch
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM HUP

ends() { # exit status, command...: stdout is in $scratch/out, stderr in $scratch/err
    local status=0
    "${@:2}" >"$scratch/out" 2>"$scratch/err" || status=$?
    [ "$status" -eq "$1" ] || fail "${*:2}: status $status, not $1: $(tail -n 1 "$scratch/err")"
}

test_help_and_errors_have_the_names_of_all_recipes() {
    local names
    names=$(sed -nE 's/^([^ #]+) .*/\1/p' scripts/recipes | paste -sd , | sed 's/,/, /g')
    ends 0 scripts/recipe.sh --help
    contains "$scratch/out" "Recipes: $names"
    ends 2 scripts/recipe.sh 12 --train-data "$data"
    equal "$(cat "$scratch/err")" "recipe.sh: no recipe '12': specify one of $names"
}
test_the_figures_of_each_recipe_are_those_of_a_prediction() {
    local name machines gpus total steps zero figures place row
    while read -r name machines gpus _ total steps _ _ _ zero _; do
        ends 0 env RANKS=1 TRAIN_DIFFV2="${PREDICT_DIFFV2:-build/predict_diffv2}" scripts/recipe.sh "$name" \
            --ranks $((machines * gpus)) --device H100
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
test_a_run_on_cpus_has_the_settings_and_arguments_and_a_second_start_resumes_it() {
    local recipe=(scripts/recipe.sh 124m --out "$scratch/run" --threads 1) ranks=1
    ! has_mpi || ranks=2
    export RANKS=$ranks
    ends 0 "${recipe[@]}" --preset tiny --layers 2 --seq-len 128 --batch-size 2 --total-batch 2048 --steps 20 \
        --warmup 5 --train-data "$data" --val-every 0 --stop-after 10
    grep -m 1 '^+ ' "$scratch/out" >"$scratch/command"
    contains "$scratch/command" '--preset tiny' '--lr 6e-4' "--out $scratch/run"
    lacks "$scratch/command" --resume '--preset 124m' '--steps 19073'
    ends 0 "${recipe[@]}" --stop-after 20
    grep -m 1 '^+ ' "$scratch/out" >"$scratch/command"
    contains "$scratch/command" --resume '--stop-after 20'
    lacks "$scratch/command" --lr --steps
    contains "$scratch/out" 'training from step 10 to 20'
    ends 0 "${recipe[@]}"
    contains "$scratch/out" 'nothing to do'
}

# Three phases with the borders 4 and 24; a step takes about 40 ms. The trainer is started by a script, which first
# writes its process and that of the recipe, and runs the commands of $scratch/before.
make_phases() { # once; also makes `whole`, an uninterrupted run
    [ ! -e "$scratch/whole" ] || return 0
    "${TEXT_TO_SHARDS:-build/text_to_shards}" --out "$scratch/more" scripts >/dev/null
    file "$scratch/phases" "# the borders are steps 4 and 24
--train-data 'one=$data:1 more=$scratch/more:3' --stop-after=4

--lr \"5e-4\" --weight-decay 0.2 --stop-after 24
  # the end
--seq-len 128 --rope-theta 5e4 --no-deterministic --train-data 'one=$data:1 more=$scratch/more:1' --steps 28"
    program "$scratch/trainer" "echo \$\$ >$scratch/trainer_process
echo \$PPID >$scratch/recipe_process
. $scratch/before
exec $program \"\$@\""
    file "$scratch/before"
    ends 0 in_phases whole
    cp "$scratch/out" "$scratch/whole.out"
}
in_phases() { # name, arguments...
    RANKS=1 TRAIN_DIFFV2=$scratch/trainer scripts/recipe.sh 124m --preset tiny --layers 1 --seq-len 64 \
        --batch-size 16 --total-batch 2048 --steps 40 --warmup 2 --lr 3e-3 --weight-decay 0 --deterministic \
        --train-data nothing --val-every 0 --threads 1 --phases "$scratch/phases" --out "$scratch/$1" "${@:2}"
}
signal_in_phases() { # name, step, signal, trainer or recipe: sends the signal after the step; sets `status`
    status=0
    in_phases "$1" >"$scratch/$1.out" 2>&1 &
    await 60 at_step "$scratch/$1" "$2" || fail "it did not reach step $2: $(tail -n 1 "$scratch/$1.out")"
    kill "-$3" "$(cat "$scratch/$4_process")"
    wait $! || status=$?
}
starts() { # name: prints the step of each start and the options that it changed, with @ for the scratch directory
    python3 - "$scratch/$1/run.json" "$scratch" <<'END'
import json, sys
for start in json.load(open(sys.argv[1]))["starts"]:
    changed = [f"{change['name']}={change['new']}".replace(sys.argv[2], "@") for change in start["changed"]]
    print(start["step"], *changed)
END
}
first=0 second='4 lr=0.0005 weight-decay=0.2' third="24 rope-theta=50000 seq-len=128"
third+=" train-data=one=@/corpus:1 more=@/more:1 steps=28 deterministic=False"
test_a_run_in_three_phases_has_the_options_of_each_line() {
    make_phases
    equal "$(starts whole)" "$first"$'\n'"$second"$'\n'"$third"
    contains "$scratch/whole.out" "--train-data 'one=$data:1 more=$scratch/more:3'"
    sed -n 's/^+ .* --threads 1 //p' "$scratch/whole.out" >"$scratch/lines"
    equal "$(cat "$scratch/lines")" "--train-data one=$data:1 more=$scratch/more:3 --stop-after=4
--lr 5e-4 --weight-decay 0.2 --stop-after 24
--seq-len 128 --rope-theta 5e4 --no-deterministic --train-data one=$data:1 more=$scratch/more:1 --steps 28"
    equal "$(grep -c '"kind": "train"' "$scratch/whole/log.jsonl") steps" '28 steps'
    ends 0 in_phases whole
    contains "$scratch/out" 'nothing to do'
}
test_a_failed_phase_continues_before_and_after_its_first_step() {
    make_phases
    # the first start of the second phase fails before it has opened the log
    file "$scratch/before" "case \"\$*\" in *' --stop-after 24') ! mkdir $scratch/once 2>/dev/null || exit 1 ;; esac"
    signal_in_phases failed 8 KILL trainer
    file "$scratch/before"
    equal "$status" 0
    contains "$scratch/failed.out" 'restart 1 of 10 from step 4' 'restart 2 of 10 from step 4'
    equal "$(starts failed)" "$first"$'\n'"$second"$'\n'"$second"$'\n'"$third"
    equal "$(same_end "$scratch/whole" "$scratch/failed")" ''
}
test_the_newest_checkpoint_selects_the_phase_not_the_log() {
    make_phases
    cp -a "$scratch/whole" "$scratch/lost"
    rm -r "$scratch"/lost/checkpoints/step_000000{24,28}
    ends 0 in_phases lost
    equal "$(sed -n 's/^+ .* --stop-after /until /p' "$scratch/out")" 'until 24'
    equal "$(same_end "$scratch/whole" "$scratch/lost")" ''
}
test_after_a_signal_in_a_phase_or_between_two_the_next_start_continues() {
    make_phases
    signal_in_phases stopped 8 USR1 recipe
    equal "$status" 3
    # the next signal arrives after the last step of the second phase
    file "$scratch/before" "case \"\$*\" in *' --stop-after 24')
    trap '' USR1; $program \"\$@\"; kill -USR1 \$PPID; sleep 0.3; exit 0 ;; esac"
    ends 3 in_phases stopped
    file "$scratch/before"
    contains "$scratch/out" 'stopped after step 24 of 40 (--stop-after)'
    equal "$(grep -c '^+ ' "$scratch/out") starts" '1 starts'
    ends 0 in_phases stopped
    equal "$(starts stopped | sed -E 's/^([89]|1.|2[0-3])$/in the second/')" \
        "$first"$'\n'"$second"$'\nin the second\n'"$third"
    equal "$(same_end "$scratch/whole" "$scratch/stopped")" ''
}
test_a_phase_that_ends_before_its_last_step_ends_the_recipe() {
    make_phases
    sed 's/--lr "5e-4"/& --steps 6/' "$scratch/phases" >"$scratch/short_phases"
    ends 1 in_phases short --phases "$scratch/short_phases"
    equal "$(tail -n 1 "$scratch/err")" "recipe.sh: --phases $scratch/short_phases: phase 2 ended at step 6, before its\
 --stop-after 24, and the next one is not started: specify larger --steps"
    equal "$(grep -c '^+ ' "$scratch/out") starts" '2 starts'
    ends 0 in_phases none --dry-run
    equal "$(grep -c '^+ ' "$scratch/out") starts" '1 starts'
}
test_mistakes_in_the_file_of_phases_are_refused_before_the_start() {
    local text message file=$scratch/wrong
    while IFS='|' read -r text message; do
        printf '# comment\n%b\n' "$text" >"$file"
        ends 2 scripts/recipe.sh 124m --train-data "$data" --out "$scratch/none" --phases="$file"
        equal "$(cat "$scratch/out" "$scratch/err")" "recipe.sh: --phases $file: $message"
    done <<'END'
\n|has no line of options
--lr 1\n\n--lr 2|line 2 requires --stop-after STEP, because another phase follows
--stop-after 5\n--stop-after=5\n--lr 2|line 3: --stop-after 5: must be above 5, that of the line before
--stop-after 9\n--lr 1\n--stop-after 10|line 3 requires --stop-after STEP, because another phase follows
--stop-after 9\n--stop-after 8|line 3: --stop-after 8: must be above 9, that of the line before
--stop-after 1e3\n--lr 2|line 2: --stop-after '1e3': must be a step, 1 or more
--lr 1 --stop-after|line 2: --stop-after '': must be a step, 1 or more
--lr '1 --stop-after 5|line 2 has an unbalanced quote: --lr '1 --stop-after 5
--stop-after 5 --out x\n--lr 2|line 2: --out is not allowed in a phase
--stop-after 5\n--no-resume|line 3: --no-resume is not allowed in a phase
--init=x|line 2: --init=x is not allowed in a phase
END
    ends 2 scripts/recipe.sh 124m --train-data "$data" --out "$scratch/none" --phases "$scratch/absent"
    equal "$(cat "$scratch/err")" "recipe.sh: --phases: cannot read '$scratch/absent' in $PWD"
    file "$file" '--steps 5'
    ends 2 scripts/recipe.sh 124m --stop-after 5 --out "$scratch/none" --phases "$file"
    equal "$(cat "$scratch/err")" "recipe.sh: --stop-after is not allowed with --phases: specify it in $file"
    [ ! -e "$scratch/none" ] || fail 'a run has begun'
}
test_words_of_a_phase_are_not_expanded() {
    file "$scratch/literal" "--prompt \"\$(touch $scratch/ran) \`touch $scratch/ran\` * \$HOME\" --dry-run"
    ends 0 env RANKS=1 scripts/recipe.sh 124m --train-data "$data" --out "$scratch/none" --phases "$scratch/literal"
    contains "$scratch/out" "--prompt \$(touch $scratch/ran) \`touch $scratch/ran\` * \$HOME --dry-run"
    [ ! -e "$scratch/ran" ] || fail 'it has run a command'
}

for test in $(tests_in_order); do run_test "$test" recipes; done
finish
