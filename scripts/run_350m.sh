#!/usr/bin/env bash
# run_350m.sh: pretrains a DIFF V2 of 350m on 30G tokens. Written by scripts/update_recipes.sh.
#   model           --preset 350m, 355469312 parameters
#   GPUs            8, on one machine
#   memory per GPU  18.4 GiB; sends 1.74 GiB per step, which delays the step by 1.6 ms
#   FLOPs           7.3e+19 (2.43e+09 per token)
#   expected hours  6.7 on H100 at 38% of 989.4 TFLOP/s: predicted by --dry-run --device H100, not measured
#   settings from   the batch of GPT-2 reproductions of that size
#
# Usage: scripts/run_350m.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_350m.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/350m, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-350m
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=350m ranks=8
settings=(
    --preset 350m
    --attention diff_v2
    --batch-size 16
    --total-batch 524288
    --steps 57220
    --lr 3e-4
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
