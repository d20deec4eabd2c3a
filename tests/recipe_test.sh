#!/usr/bin/env bash
# recipe_test.sh: tests the names and figures of the recipes, and one run on CPUs. tests/slurm_test.sh tests them under
# Slurm. The last line is "N passed, N failed[, N skipped]". Exit status: 0 nothing failed, 1 something failed, 2 usage.
#
# Usage: tests/recipe_test.sh
# Variables: TRAIN_DIFFV2, TEXT_TO_SHARDS (build/...)
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

for test in $(tests_in_order); do run_test "$test" recipes; done
finish
