#!/usr/bin/env bash
# update_recipes.sh: writes the figures of the recipes into scripts/recipes, and their table in docs/cluster.md. The
# figures, including the hours, come from --dry-run --device of the CUDA trainer (bf16), which requires no GPU.
# Exit status: 0 the figures are up to date, 1 failed, or with --check not up to date, 2 usage.
#
# Usage: scripts/update_recipes.sh [--check]
#   --check   writes nothing; prints which file is out of date
# Variables: TRAIN_DIFFV2CU (default: ./train_diffv2cu if it exists, else the CUDA trainer compiled for the CPU:
#            build/oncpu/train_diffv2, or the program of the tests, "build/oncpu/test_trainer --trainer")
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "update_recipes.sh: $1" >&2
    exit "${2:-1}"
}

check=no
case "$#:${1-}" in
0:) ;;
1:--check) check=yes ;;
1:--help | 1:-h)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
*) fail "unexpected argument '$*': usage: scripts/update_recipes.sh [--check]" 2 ;;
esac
program=${TRAIN_DIFFV2CU-}
for there in ./train_diffv2cu build/oncpu/train_diffv2 'build/oncpu/test_trainer --trainer'; do
    if [ -z "$program" ] && [ -x "${there%% *}" ]; then program=$there; fi
done
[ -n "$program" ] || fail "no CUDA trainer: run make build/oncpu/train_diffv2, or set TRAIN_DIFFV2CU"
[ -x "${program%% *}" ] || fail "no program ${program%% *}: run make build/oncpu/train_diffv2, or set TRAIN_DIFFV2CU"

device=H100 # of the predicted hours
scratch=$(mktemp -d) || fail "cannot create a temporary directory"
trap 'rm -rf "$scratch"' EXIT
printf '#!/bin/sh\nexec %s "$@"\n' "$program" >"$scratch/trainer"
chmod +x "$scratch/trainer"

# Prints the figures of a recipe as assignments: of one rank, in GiB and ms. With one thread they do not depend on this
# machine.
ask() { # name, ranks, --zero
    local text
    text=$(RANKS=1 TRAIN_DIFFV2=$scratch/trainer scripts/recipe.sh "$1" --out "$scratch/run" --dry-run --threads 1 \
        --val-every 0 --ranks "$2" --device "$device") || fail "the --dry-run of $1 failed"
    grep -q 'master weights' <<<"$text" || fail "$program is not a bf16 build: make it with PRECISION=bf16"
    awk -v level="$3" '
        function number(text,  power) { # of 855M or 2.59e+21
            power = index("kMGTPE", substr(text, length(text)))
            return power ? substr(text, 1, length(text) - 1) * 1000 ^ power : text + 0
        }
        function short(x) { return sprintf(x < 100 ? "%.2g" : "%.0f", x) }
        /^[a-zA-Z]/ { block = $1 }
        block == "by" && $1 == level { sent = $4 / 1024 }
        block == "expected" && /dense bf16 peak/ { share = $1 }
        block == "expected" && /hours of the run/ { hours = $1 }
        block == "communication" && $1 == "exposed" { exposed = $2 }
        /^expected step/ { sub(/.*\(/, ""); peak = $1 }
        block == "parameters" && $1 == "total" { parameters = $2 }
        block == "parameters" && $1 == "active" { active = ", " $NF " active in a token" }
        block == "memory" && $1 == "total" { memory = $2 / 1024 }
        block == "FLOPs" && /per token/ { per_token = number($NF) }
        block == "FLOPs" && /tokens of the run/ { tokens = number($NF) }
        block == "FLOPs" && /^ *of the run/ { flops = number($NF) }
        END {
            if (!parameters || !memory || !per_token || !tokens || !flops || !sent || !share || !hours || !peak) exit 1
            printf "parameters=%.0f memory=%.3g per_token=%.3g tokens=%.3g flops=%.3g sent=%s", parameters, memory,
                per_token, tokens, flops, sprintf(sent < 1000 ? "%.3g" : "%.0f", sent)
            printf " exposed=%s share=%.0f hours=%s peak=%s active=\"%s\"", short(exposed), share, short(hours), peak,
                active
        }' <<<"$text" || fail "cannot parse the output of $program --dry-run"
}

# Prints the lines that describe a recipe.
describe() { # row, source of the settings
    local name nodes gpus B total steps every lr warmup zero more where='one machine' facts ranks billions
    local parameters memory per_token tokens flops sent exposed share hours peak active model
    read -r name nodes gpus B total steps every lr warmup zero more <<<"$1"
    ranks=$((nodes * gpus)) model="--preset $name"
    [[ ! $more =~ --kv-heads\ [0-9]+ ]] || model+=" ${BASH_REMATCH[0]}"
    [ "$nodes" -eq 1 ] || where="$nodes machines with $gpus each"
    facts=$(ask "$name" "$ranks" "$zero")
    eval "$facts"
    billions=$(awk "BEGIN { printf \"%.3g\", $tokens / 1e9 }")
    cat <<END
    tokens          ${billions}G
    model           $model, $parameters parameters$active
    GPUs            $ranks, on $where
    memory per GPU  $memory GiB; sends $sent GiB per step, which delays the step by $exposed ms
    FLOPs           $flops ($per_token per token)
    expected hours  $hours on $device at $share% of $peak TFLOP/s: predicted by --dry-run --device $device, not measured
$2
END
}

# Writes a file; with --check compares it.
put() { # file, text
    if [ "$check" = yes ]; then
        [ "$2" = "$(cat "$1")" ] || fail "$1 is out of date ($program): run scripts/update_recipes.sh"
    else
        echo "$2" >"$scratch/new"
        cat "$scratch/new" >"$1"
    fi
}

recipes=$(grep '^#' scripts/recipes)
while IFS= read -r row; do
    from=$(awk -v row="$row" '/^[^ ]/ { inside = $0 == row } inside && /^ *settings from/' scripts/recipes)
    text=$(describe "$row" "$from")
    recipes+=$'\n'$row$'\n'$text
done < <(grep '^[^ #]' scripts/recipes)
put scripts/recipes "$recipes"

table=$(awk '
    BEGIN { print "| recipe | GPUs | tokens | FLOPs | hours, predicted |\n|---|---:|---:|---:|---:|" }
    /^[^ #]/ { name = $1 }
    $1 == "tokens" { tokens = $2 }
    $1 == "GPUs" { gpus = $2 + 0 }
    $1 == "FLOPs" { flops = $2 }
    $1 == "expected" { printf "| `%s` | %d | %s | %s | %s |\n", name, gpus, tokens, flops, $3 }' <<<"$recipes")
page=docs/cluster.md
document=$(table=$table awk '
    /<!-- recipes: end -->/ { inside = 0; ends++ }
    !inside { print }
    /<!-- recipes: begin/ { inside = 1; print ENVIRON["table"] }
    END { exit ends != 1 || inside }' "$page") \
    || fail "$page lacks the markers <!-- recipes: begin and <!-- recipes: end -->"
put "$page" "$document"
