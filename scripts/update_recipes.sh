#!/usr/bin/env bash
# update_recipes.sh: writes the recipes scripts/run_SIZE.sh and their table in README.md out of the one table below. Their
# figures are those of the CUDA trainer's --dry-run (bf16), which needs no GPU; hours come from its FLOPs and an assumed share
# of the GPUs' peak.
# Exit status: 0 the recipes are up to date, 1 failed, or with --check not up to date, 2 usage.
#
# Usage: scripts/update_recipes.sh [--check]
#   --check   write nothing, only say which recipe is not what this would write
# Variables: TRAIN_DIFFV2CU (./train_diffv2cu where that is, else the same compiled for the CPU: build/oncpu/train_diffv2, or
#            what the tests build, "build/oncpu/test_trainer --trainer")
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
[ -n "$program" ] || fail "there is no CUDA trainer: make build/oncpu/train_diffv2, or name one with TRAIN_DIFFV2CU"
read -ra program <<<"$program"
[ -x "${program[0]}" ] || fail "there is no program ${program[0]}: make build/oncpu/train_diffv2, or name another with TRAIN_DIFFV2CU"

# An H100 SXM by its datasheet: dense bf16 products; NVLink, one way; and 400 Gbit/s of InfiniBand for each GPU.
peak_tflops=989.4 nvlink_gbs=450 network_gbs=50
# What the shares of the peak are taken from: published tokens/s of Transformers of about that size on H100s, times FLOPs
# per token counted as --dry-run does. An assumption until these recipes are measured.
source_124m='llm.c, 468k tokens/s per GPU at 124M'
source_350m='between llm.c at 124M and llm-foundry at 760M, 63.1k tokens/s per GPU'
source_1b='llm-foundry, 45.5k tokens/s per GPU at 1.3B'
source_3b='llm-foundry, 24.1k tokens/s per GPU at 2.65B'
# What the settings are taken from.
from_gpt2='the batch of GPT-2 reproductions of that size'
from_diff='the runs of that size in arXiv 2410.05258, but 8 key/value heads, so that 1.4b-1.5h and -2h are baselines'
from_3b='the 3B model of arXiv 2410.05258, but 12 key/value heads; its 1T tokens are --steps 238419'

# name | machines | GPUs of each | sequences per GPU and micro-step | tokens per update | updates | validate and save every
# N updates | share of the peak, % | where it is from | model | update | where the settings are from
rows=(
    "124m|1|8|32|524288|19073|1000|38|$source_124m|--preset 124m|--lr 6e-4 --warmup 700|$from_gpt2"
    "350m|1|8|16|524288|57220|1000|35|$source_350m|--preset 350m|--lr 3e-4 --warmup 700|$from_gpt2"
    "1.4b|1|8|8|262144|40000|1000|39|$source_1b|--preset 1.4b --kv-heads 8|--lr 1.5e-3 --warmup 375 --schedule linear --beta2 0.98 --weight-decay 0.05|$from_diff"
    "3b|8|8|4|4194304|25000|250|41|$source_3b|--preset 3b --kv-heads 12|--lr 3.2e-4 --warmup 1000|$from_3b"
)

# What --dry-run says of a recipe, as assignments: of one rank, in GiB and ms. One thread, so that nothing depends on this
# machine.
ask() { # options...
    local text
    text=$("${program[@]}" --dry-run --threads 1 "$@") || fail "${program[*]} --dry-run failed"
    grep -q 'master weights' <<<"$text" || fail "${program[*]} is not a bf16 build: make it with PRECISION=bf16"
    awk -v level="$zero" '
        function number(text,  power) { # 855M and 2.59e+21 alike
            power = index("kMGTPE", substr(text, length(text)))
            return power ? substr(text, 1, length(text) - 1) * 1000 ^ power : text + 0
        }
        /^[a-zA-Z]/ { block = $1 }
        block == "by" && $1 == level { sent = $4 / 1024; time = $6 }
        block == "parameters" && $1 == "total" { parameters = $2 }
        block == "memory" && $1 == "total" { memory = $2 / 1024 }
        block == "FLOPs" && /per token/ { per_token = number($NF) }
        block == "FLOPs" && /tokens of the run/ { tokens = number($NF) }
        block == "FLOPs" && /^ *of the run/ { flops = number($NF) }
        END {
            if (!parameters || !memory || !per_token || !tokens || !flops || !sent || !time) exit 1
            printf "parameters=%.0f memory=%.3g per_token=%.3g tokens=%.3g flops=%.3g sent=%.3g time=%.3g", parameters,
                memory, per_token, tokens, flops, sent, time
        }' <<<"$text" || fail "cannot read what ${program[*]} --dry-run prints"
}

# A line for each option with its value, as the script has them.
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
    local name nodes gpus B total steps every share source model update from
    IFS='|' read -r name nodes gpus B total steps every share source model update from <<<"$1"
    local options ranks=$((nodes * gpus)) where='one machine' link=$nvlink_gbs zero=1 facts hours billions
    local parameters memory per_token tokens flops sent time
    read -ra options <<<"$model --attention diff_v2 --batch-size $B --total-batch $total --steps $steps $update --zero $zero"
    [ "$nodes" -eq 1 ] || { where="$nodes machines with $gpus each" link=$network_gbs; }
    facts=$(ask "${options[@]}" --ranks "$ranks" --link-gbs "$link")
    eval "$facts"
    hours=$(awk "BEGIN { printf \"%.2g\", $flops / ($ranks * $share / 100 * $peak_tflops * 1e12) / 3600 }")
    billions=$(awk "BEGIN { printf \"%.3g\", $tokens / 1e9 }")
    cat <<END
#!/usr/bin/env bash
# run_$name.sh: pretrains a DIFF V2 of $name on ${billions}G tokens. Written by scripts/update_recipes.sh.
#   model           $model, $parameters parameters
#   GPUs            $ranks, on $where
#   bytes per GPU   $memory GiB; sent per step $sent GiB, ${time} ms at $link GB/s
#   FLOPs           $flops ($per_token per token)
#   expected hours  $hours on H100 SXM at $share% of $peak_tflops TFLOP/s ($source): assumed, not measured
#   settings of     $from
#
# Usage: scripts/run_$name.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_$name.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it in the directory of the repository; start it again to go on: a run that is there is resumed. The run is
# runs/$name, or --out DIR. scripts/recipe.sh says what happens at signals and failures, and which variables there are.
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
[ -e scripts/recipe.sh ] || { echo "run_\$name.sh: no scripts/recipe.sh in \$PWD: submit it in the directory of the repository" >&2; exit 2; }
source scripts/recipe.sh
END
}

# Writes a file, or with --check compares it.
put() { # file, text, mode
    if [ "$check" = yes ]; then
        [ "$2" = "$(cat "$1")" ] || fail "$1 is not what the table and ${program[*]} give: run scripts/update_recipes.sh"
    else
        echo "$2" >"$1.tmp"
        chmod "$3" "$1.tmp"
        mv "$1.tmp" "$1"
    fi
}

table='| recipe | GPUs | tokens | FLOPs | hours, assumed |
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
readme=$(table=$table awk '
    /<!-- recipes: end -->/ { inside = 0; ends++ }
    !inside { print }
    /<!-- recipes: begin/ { inside = 1; print ENVIRON["table"] }
    END { exit ends != 1 || inside }' README.md) || fail "README.md lacks the markers <!-- recipes: begin and <!-- recipes: end -->"
put README.md "$readme" 644
