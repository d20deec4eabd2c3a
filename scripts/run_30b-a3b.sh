#!/usr/bin/env bash
# run_30b-a3b.sh: pretrains a DIFF V2 of 30b-a3b on 105G tokens. Written by scripts/update_recipes.sh.
#   model           --preset 30b-a3b, 30937909248 parameters, 3758819328 active in a token
#   GPUs            64, on 8 machines with 8 each
#   memory per GPU  34.9 GiB; sends 443 GiB per step, which delays the step by 257 ms
#   FLOPs           3.18e+21 (3.04e+10 per token)
#   expected hours  50 on H100 at 28% of 989.4 TFLOP/s: predicted by --dry-run --device H100, not measured
#   settings from   the shape of Qwen3-30B-A3B; rate and schedule of 124m, batch of 3b
#
# Usage: scripts/run_30b-a3b.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_30b-a3b.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/30b-a3b, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-30b-a3b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=30b-a3b ranks=8
settings=(
    --preset 30b-a3b
    --attention diff_v2
    --batch-size 8
    --total-batch 4194304
    --steps 25000
    --lr 6e-4
    --warmup 1000
    --zero 3
    --recompute 2
    --checkpoint-every 250
    --val-every 250
    --check-ranks-every 250
)
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit 1
[ -e scripts/recipe.sh ] || {
    echo "run_$name.sh: no scripts/recipe.sh in $PWD: start it from the root of the repository" >&2
    exit 2
}
source scripts/recipe.sh
