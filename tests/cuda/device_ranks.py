"""Runs of the CUDA trainer on several GPUs that dev/emulator emulates, one process per GPU, with NCCL.

Processes start with the variables that srun sets.
"""

import itertools
import os
import subprocess
import tempfile
from time import monotonic

import pytest
from device import DATA, DEVICE
from program import Result, text_of, words_of

# Three layers: with --zero 2 the first reuses the gradient buffer of the third.
MODEL = (
    f"{DATA} --layers 3 --hidden 20 --heads 2 --kv-heads 1 --head-dim 8 --ffn 27 --vocab 43 --seq-len 7 "
    "--no-tie-embeddings --lr 3e-3 --warmup 1"
)
LATE, HASTY = "CUDA_ON_CPU_STREAMS=late", "CUDA_ON_CPU_STREAMS=hasty"
jobs = itertools.count(1)


def run_ranks(directory, ranks, *options, env=""):
    """Runs ranks, for at most a minute. An option and `env` may be functions of the rank.

    The status is the first that is not 0; then the other ranks have 2 seconds to end, as with a launcher.
    """
    job, started = f"{os.getpid()}.{next(jobs)}", []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for rank in range(ranks):
            srun = (
                f"SLURM_JOB_ID={job} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS={ranks} SLURM_STEP_TASKS_PER_NODE={ranks} "
                f"SLURM_NODEID=0 SLURM_PROCID={rank} SLURM_LOCALID={rank} CUDA_ON_CPU_DEVICES={ranks} BUCKET=1024"
            )
            own = [x(rank) if callable(x) else x for x in (env, *options)]
            words = words_of(["env", srun, own[0], *DEVICE, *own[1:], "--threads 1 --rendezvous ."])
            started.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=directory))
        status, end = 0, monotonic() + 60
        for process in started:
            try:
                code = process.wait(max(0, end - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code and not status:
                status, end = code, monotonic() + 2
        out.seek(0)
        err.seek(0)
        result = Result(status, text_of(out.read()), text_of(err.read()))
    if "built without NCCL" in result.err:
        pytest.skip("this build has no NCCL")
    return result
