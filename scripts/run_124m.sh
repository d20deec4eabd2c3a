#!/usr/bin/env bash
# run_124m.sh: pretrains a DIFF V2 of 124m on 10G tokens. Written by scripts/update_recipes.sh.
#   model           --preset 124m, 123661824 parameters
#   GPUs            8, on one machine
#   memory per GPU  14.5 GiB; sends 0.605 GiB per step, which delays the step by 0.89 ms
#   FLOPs           8.55e+18 (8.55e+08 per token)
#   expected hours  0.84 on H100 at 36% of 989.4 TFLOP/s: predicted by --dry-run --device H100, not measured
#   settings from   the batch of GPT-2 reproductions of that size
#
# Usage: scripts/run_124m.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_124m.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/124m, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-124m
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=124m ranks=8
settings=(
    --preset 124m
    --attention diff_v2
    --batch-size 32
    --total-batch 524288
    --steps 19073
    --lr 6e-4
    --warmup 700
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
