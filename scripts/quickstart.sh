#!/usr/bin/env bash
# quickstart.sh: from a fresh checkout to a small DIFF V2 language model: installs dependencies, builds, prepares a
# corpus, trains for about three minutes on this machine's CPU, prints a plot of the loss and a sample, and suggests
# next steps. Each start creates a new run, runs/quickstart-N. Exit status: 0 done, 2 usage, otherwise that of the step
# that failed.
#
# Usage: scripts/quickstart.sh [--minutes M]
#   --minutes M   of training, 0.2 to 10000 (default 3)
set -euo pipefail
export LC_ALL=C # awk may read numbers as the locale writes them
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

# The best of those measured on two cores (dev/BENCH.md). bf16 only where the processor multiplies it.
settings=(--preset tiny --attention diff_v2 --optimizer muon --lr 6e-3 --schedule linear --min-lr-ratio 0
    --train-data corpus --val-data corpus --val-steps 60)

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

echo "[4/5] training for about $minutes minutes"
bf16=(--matmul-dtype bf16)
if ! ./train_diffv2 --dry-run "${bf16[@]}" 2>&1 | grep -q 'does not multiply bf16'; then settings+=("${bf16[@]}"); fi
number=1
while [ -e "runs/quickstart-$number" ]; do number=$((number + 1)); done
run=runs/quickstart-$number
command=(./train_diffv2 "${settings[@]}" --minutes "$minutes" --val-every 500 --out "$run")
echo "sample before the first step:"
./train_diffv2 "${settings[@]}" --generate 60 2> >(grep -v 'the weights are random' >&2)
echo "+ $(show "${command[@]}")"
"${command[@]}"

echo
echo "[5/5] result"
awk -f scripts/plot_loss.awk "$run/log.jsonl"
steps=$(awk '/"kind": *"train"/ { sub(/.*"step": */, ""); sub(/,.*/, ""); step = $0 }
    END { print step }' "$run/log.jsonl")
baseline=("${settings[@]/diff_v2/baseline}")
cat <<END

More steps:
  train the baseline Transformer on the same data
    $(show ./train_diffv2 "${baseline[@]}" --steps "$steps" --out "runs/baseline-$number")
  train on your own text
    ./text_to_shards --out mytext --bpe 2048 FILE...
    ./train_diffv2 --train-data mytext --val-data mytext --minutes 10 --out runs/mytext
  print the memory and compute that a model of 124M requires
    ./train_diffv2 --preset 124m --dry-run
END
