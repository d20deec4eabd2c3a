#!/usr/bin/env bash
# run_1.4b.sh: pretrains a DIFF V2 of 1.4b on 10.5G tokens. Written by scripts/update_recipes.sh.
#   model           --preset 1.4b --kv-heads 8, 1420527616 parameters
#   GPUs            8, on one machine
#   memory per GPU  40 GiB; sends 6.95 GiB per step, which delays the step by 6.2 ms
#   FLOPs           1.02e+20 (9.73e+09 per token)
#   expected hours  6.8 on H100 at 52% of 989.4 TFLOP/s: predicted by --dry-run --device H100, not measured
#   settings from   the runs of that size in arXiv 2410.05258, but 8 key/value heads, as in 1.4b-1.5h and 1.4b-2h
#
# Usage: scripts/run_1.4b.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_1.4b.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/1.4b, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-1.4b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=1.4b ranks=8
settings=(
    --preset 1.4b
    --kv-heads 8
    --attention diff_v2
    --batch-size 8
    --total-batch 262144
    --steps 40000
    --lr 1.5e-3
    --warmup 375
    --schedule linear
    --beta2 0.98
    --weight-decay 0.05
    --zero 1
    --checkpoint-every 1000
    --val-every 1000
    --check-ranks-every 1000
)
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit 1
[ -e scripts/recipe.sh ] || {
    echo "run_$name.sh: no scripts/recipe.sh in $PWD: start it from the root of the repository" >&2
    exit 2
}
source scripts/recipe.sh
