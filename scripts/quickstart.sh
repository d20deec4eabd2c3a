#!/usr/bin/env bash
# quickstart.sh: from a fresh checkout to a small DIFF V2 language model: installs dependencies, builds, prepares a
# corpus, trains for about three minutes on this machine's CPU, prints a plot of the loss and a sample, and suggests
# next steps. Each start creates a new run, runs/quickstart-N. Exit status: 0 done, 2 usage, otherwise that of the step
# that failed.
#
# Usage: scripts/quickstart.sh [--minutes M]
#   --minutes M   of training, 0.2 to 10000 (default 3)
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "quickstart.sh: $1" >&2
    exit "${2:-1}"
}

minutes=3
while [ $# -gt 0 ]; do
    case "$1" in
    --minutes)
        [ $# -ge 2 ] || fail "--minutes requires a number from 0.2 to 10000" 2
        minutes=$2
        shift 2
        ;;
    --minutes=*)
        minutes=${1#--minutes=}
        shift
        ;;
    --help | -h)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/quickstart.sh
        exit 0
        ;;
    *) fail "unexpected argument '$1': usage: scripts/quickstart.sh [--minutes M]" 2 ;;
    esac
done
if ! [[ $minutes =~ ^[0-9]{1,5}(\.[0-9]{1,3})?$ ]] \
    || ! awk "BEGIN { exit !($minutes >= 0.2 && $minutes <= 10000) }"; then
    fail "--minutes '$minutes': must be a number from 0.2 to 10000" 2
fi

# Best on two cores: small batches, hence many updates, and a high learning rate.
B=2 T=256
settings=(--preset tiny --attention diff_v2 --seq-len "$T" --batch-size "$B" --lr 4e-3 --min-lr-ratio 0.05
    --train-data 'corpus/train_*.bin' --val-data 'corpus/val_*.bin' --val-steps 80)

show() { # command: prints it with shell quoting
    local word line=
    for word; do
        if [[ $word =~ ^[A-Za-z0-9_./=-]+$ ]]; then line+=" $word"; else line+=" ${word@Q}"; fi
    done
    echo "${line# }"
}

echo "[1/5] dependencies"
scripts/install_deps.sh

echo "[2/5] build"
make -s -j2 train_diffv2 text_to_shards
echo "built ./train_diffv2 and ./text_to_shards"

echo "[3/5] corpus"
scripts/corpus.sh

echo "[4/5] training"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
./train_diffv2 "${settings[@]}" --steps 30 --out "$scratch/run" >"$scratch/out" \
    || fail "the trial of 30 steps failed"
# without the first 5 steps, which are slower
rate=$(awk '/"kind": *"train"/ && ++n > 5 { sub(/.*"ms": */, ""); sub(/,.*/, ""); ms += $0; steps++ }
    END { if (!steps) exit 1; printf "%.0f", steps * '$((B * T))' / (ms / 1000) }' "$scratch/run/log.jsonl") \
    || fail "the log of the trial has no step times"
# 6 validations of 80 batches cost as much as 160 steps: a third of a step per batch. 3% is for samples. The number of
# steps is a multiple of 20, so that quarters and fifths of it are integers.
steps=$(awk "BEGIN { n = int(($minutes * 60 * 0.97 * $rate / $((B * T)) - 160) / 20 + 0.5)
    print 20 * (n < 1 ? 1 : n) }")
number=1
while [ -e "runs/quickstart-$number" ]; do number=$((number + 1)); done
run=runs/quickstart-$number
settings+=(--steps "$steps" --val-every "$((steps / 5))")
echo "a trial of 30 steps ran at $rate tokens/s: $steps steps for about $minutes minutes"
command=(./train_diffv2 "${settings[@]}" --sample-every "$((steps / 4))" --out "$run")
echo "+ $(show "${command[@]}")"
"${command[@]}"

echo
echo "[5/5] result"
awk -f scripts/plot_loss.awk "$run/log.jsonl"
baseline=("${settings[@]/diff_v2/baseline}")
checkpoint=$(printf '%s/checkpoints/step_%08d' "$run" "$steps")
echo
echo "sample of the trained model:"
echo
./train_diffv2 --init "$checkpoint" --generate 500
awk '/"kind": *"val"/ { sub(/.*"loss": */, ""); sub(/[,}].*/, ""); loss = $0 }
    END { printf "\nvalidation loss %.4f nats per byte, %.3f bits per byte\n", loss, loss / log(2) }' "$run/log.jsonl"
cat <<END
options and machine  $run/run.json
log of every step    $run/log.jsonl
checkpoint           $checkpoint

Next steps:
  sample with another seed and a prompt
    ./train_diffv2 --init $checkpoint --generate 300 --seed 2 --prompt 'A kind of '
  continue to twice the number of steps
    ./train_diffv2 --out $run --resume --steps $((2 * steps))
  train the baseline Transformer on the same data
    $(show ./train_diffv2 "${baseline[@]}" --out "runs/baseline-$number")
  train on your own text
    ./text_to_shards --out mytext --delimiter '\n\n' FILE...
    ./train_diffv2 --train-data 'mytext/train_*.bin' --val-data 'mytext/val_*.bin' --steps 1000 --val-every 200 \\
        --out runs/mytext
  print the memory and compute that a model of 124M requires
    ./train_diffv2 --preset 124m --dry-run
END
