#!/usr/bin/env bash
# update_recipes.sh: writes the recipes scripts/run_SIZE.sh and their table in docs/cluster.md from the table below. The
# figures, including the hours, come from --dry-run --device of the CUDA trainer (bf16), which requires no GPU.
# Exit status: 0 the recipes are up to date, 1 failed, or with --check not up to date, 2 usage.
#
# Usage: scripts/update_recipes.sh [--check]
#   --check   writes nothing; prints which recipe is out of date
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
read -ra program <<<"$program"
[ -x "${program[0]}" ] || fail "no program ${program[0]}: run make build/oncpu/train_diffv2, or set TRAIN_DIFFV2CU"

device=H100 # of the predicted hours
# Sources of the settings
from_gpt2='the batch of GPT-2 reproductions of that size'
from_diff='the runs of that size in arXiv 2410.05258, but 8 key/value heads, as in 1.4b-1.5h and 1.4b-2h'
from_3b='the 3B model of arXiv 2410.05258, but 12 key/value heads; its 1T tokens are --steps 238419'

from_moe='the shape of Qwen3-30B-A3B; rate and schedule of 124m, batch of 3b'

diff_update='--lr 1.5e-3 --warmup 375 --schedule linear --beta2 0.98 --weight-decay 0.05'
# name | machines | GPUs of each | sequences per GPU and micro-step | tokens per update | updates | validate and save
# every N updates | model | update | source of the settings | --zero, more options
rows=(
    "124m|1|8|32|524288|19073|1000|--preset 124m|--lr 6e-4 --warmup 700|$from_gpt2|1"
    "350m|1|8|16|524288|57220|1000|--preset 350m|--lr 3e-4 --warmup 700|$from_gpt2|1"
    "1.4b|1|8|8|262144|40000|1000|--preset 1.4b --kv-heads 8|$diff_update|$from_diff|1"
    "3b|8|8|4|4194304|25000|250|--preset 3b --kv-heads 12|--lr 3.2e-4 --warmup 1000|$from_3b|1"
    "30b-a3b|8|8|8|4194304|25000|250|--preset 30b-a3b|--lr 6e-4 --warmup 1000|$from_moe|3 --recompute 2"
)

# Prints the figures of --dry-run as assignments: of one rank, in GiB and ms. With one thread they do not depend on this
# machine.
ask() { # options...
    local text
    text=$("${program[@]}" --dry-run --threads 1 "$@") || fail "${program[*]} --dry-run failed"
    grep -q 'master weights' <<<"$text" || fail "${program[*]} is not a bf16 build: make it with PRECISION=bf16"
    awk -v level="$zero" '
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
        }' <<<"$text" || fail "cannot parse the output of ${program[*]} --dry-run"
}

# Prints one line per option and value, as in the script.
settings_lines() { # options...
    local line='' word
    for word; do
        if [[ $word == --* && -n $line ]]; then
            echo "    $line"
            line=''
        fi
        line+="${line:+ }$word"
    done
    echo "    $line"
}

recipe() { # row
    local name nodes gpus B total steps every model update from sharding
    IFS='|' read -r name nodes gpus B total steps every model update from sharding <<<"$1"
    local options ranks=$((nodes * gpus)) where='one machine' zero=${sharding%% *} facts billions active
    local parameters memory per_token tokens flops sent exposed share hours peak
    read -ra options <<<"$model --attention diff_v2 --batch-size $B --total-batch $total --steps $steps"
    read -ra options <<<"${options[*]} $update --zero $sharding"
    [ "$nodes" -eq 1 ] || where="$nodes machines with $gpus each"
    facts=$(ask "${options[@]}" --ranks "$ranks" --device "$device")
    eval "$facts"
    billions=$(awk "BEGIN { printf \"%.3g\", $tokens / 1e9 }")
    cat <<END
#!/usr/bin/env bash
# run_$name.sh: pretrains a DIFF V2 of $name on ${billions}G tokens. Written by scripts/update_recipes.sh.
#   model           $model, $parameters parameters$active
#   GPUs            $ranks, on $where
#   memory per GPU  $memory GiB; sends $sent GiB per step, which delays the step by $exposed ms
#   FLOPs           $flops ($per_token per token)
#   expected hours  $hours on $device at $share% of $peak TFLOP/s: predicted by --dry-run --device $device, not measured
#   settings from   $from
#
# Usage: scripts/run_$name.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_$name.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/$name, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=$gpus
#SBATCH --gpus-per-node=$gpus
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=$name ranks=$gpus
settings=(
$(settings_lines "${options[@]}" --checkpoint-every "$every" --val-every "$every" \
        --check-ranks-every "$every")
)
cd "\${SLURM_SUBMIT_DIR:-\$(dirname "\$0")/..}" || exit 1
[ -e scripts/recipe.sh ] || {
    echo "run_\$name.sh: no scripts/recipe.sh in \$PWD: start it from the root of the repository" >&2
    exit 2
}
source scripts/recipe.sh
END
}

# Writes a file; with --check compares it.
put() { # file, text, mode
    if [ "$check" = yes ]; then
        [ "$2" = "$(cat "$1")" ] || fail "$1 is out of date (${program[*]}): run scripts/update_recipes.sh"
    else
        echo "$2" >"$1.tmp"
        chmod "$3" "$1.tmp"
        mv "$1.tmp" "$1"
    fi
}

table='| recipe | GPUs | tokens | FLOPs | hours, predicted |
|---|---:|---:|---:|---:|'
for row in "${rows[@]}"; do
    file=scripts/run_${row%%|*}.sh
    text=$(recipe "$row")
    put "$file" "$text" 755
    table+=$(awk -v file="$file" '
        /^# run_/ { tokens = $(NF - 4) }
        /^#   GPUs/ { gpus = $3 + 0 }
        /^#   FLOPs/ { flops = $3 }
        /^#   expected hours/ { hours = $4 }
        END { printf "\n| `%s` | %d | %s | %s | %s |", file, gpus, tokens, flops, hours }' <<<"$text")
done
page=docs/cluster.md
document=$(table=$table awk '
    /<!-- recipes: end -->/ { inside = 0; ends++ }
    !inside { print }
    /<!-- recipes: begin/ { inside = 1; print ENVIRON["table"] }
    END { exit ends != 1 || inside }' "$page") \
    || fail "$page lacks the markers <!-- recipes: begin and <!-- recipes: end -->"
put "$page" "$document" 644
