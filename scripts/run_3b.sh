#!/usr/bin/env bash
# run_3b.sh: pretrains a DIFF V2 of 3b on 105G tokens. Written by scripts/update_recipes.sh.
#   model           --preset 3b --kv-heads 12, 3481218048 parameters
#   GPUs            64, on 8 machines with 8 each
#   memory per GPU  46.3 GiB; sends 19.1 GiB per step, which delays the step by 21 ms
#   FLOPs           2.41e+21 (2.3e+10 per token)
#   expected hours  18 on H100 at 58% of 989.4 TFLOP/s: predicted by --dry-run --device H100, not measured
#   settings from   the 3B model of arXiv 2410.05258, but 12 key/value heads; its 1T tokens are --steps 238419
#
# Usage: scripts/run_3b.sh --train-data DATA [--val-data DATA] [OPTION...]          one machine, mpirun
#        sbatch scripts/run_3b.sh --train-data DATA [--val-data DATA] [OPTION...]   Slurm
# Start it from the root of the repository. Starting it again resumes the run, which is runs/3b, or --out DIR.
# scripts/recipe.sh describes signals, failures and environment variables.
#SBATCH --job-name=diffv2-3b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
name=3b ranks=8
settings=(
    --preset 3b
    --kv-heads 12
    --attention diff_v2
    --batch-size 4
    --total-batch 4194304
    --steps 25000
    --lr 3.2e-4
    --warmup 1000
    --zero 1
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
