"""Runs of several processes, which mpirun starts on this machine.

Their program is tests/faulty_diffv2.c, the trainer with planned faults: keyword arguments like FAULT="nan:2:4" are the
variables of tests/planned_faults.h.
"""

import os

import pytest
from program import WEIGHTS, beside, checkpoint, differing, linked_with, records, run, write_grammar

MODEL = "--hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16 --warmup 2 --threads 1"
SMALL_OF_RANKS = f"--layers 3 {MODEL}"
EXPERTS = "--experts 4 --experts-active 2 --expert-ffn 20"
OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMP_WAIT_POLICY": "passive",
}
MOST_ZERO = 3  # the highest --zero
# fp32 sums in a different order; twelve Adam updates, which divide by the size of a gradient, amplify the difference
TOLERANCE = 2e-4


def skip_without_mpi():
    if not linked_with("libmpi"):
        pytest.skip("this build has no MPI")


def mpirun(*arguments, cwd=None, **variables):
    """Of stderr only the lines of the trainer are kept, not those of mpirun."""
    skip_without_mpi()
    result = run("timeout 120 mpirun -q", *arguments, cwd=cwd, env={**OPENMPI, **variables})
    result.err = "".join(line for line in result.err.splitlines(True) if line.startswith("diffv2: "))
    return result


def faulty():
    return beside("faulty_diffv2")


def run_ranks(ranks, *arguments, cwd, **variables):
    return mpirun(f"-n {ranks}", faulty(), *arguments, cwd=cwd, **variables)


def write_short_epoch(directory):
    """train.bin of 40 windows of 16 tokens: an epoch ends within a run of 12 steps of 4 windows or more. All have the
    same time, as copies that keep it."""
    write_grammar(directory / "train.bin", 40 * 16 + 1, 1)
    os.utime(directory / "train.bin", (0, 0))


def write_many(directory, count):
    """Shards many/*.bin, which are links to train.bin: data that take long to open, or to read."""
    (directory / "many").mkdir()
    for i in range(count):
        (directory / f"many/{i:06d}.bin").hardlink_to(directory / "train.bin")


def train_ranks(run, ranks, *options, **variables):
    """Trains a small model on the train.bin beside the run."""
    # YOCO requires an even number of layers
    text = " ".join(options)
    layers = "" if "--layers" in text else "--layers 4" if "--yoco" in text else "--layers 3"
    start = ["--train-data train.bin", layers, MODEL, "--out", run.name]
    return run_ranks(ranks, *start, *options, cwd=run.parent, **variables)


def resume_ranks(run, ranks, *options, **variables):
    start = ["--out", run.name, "--resume --threads 1"]
    return run_ranks(ranks, *start, *options, cwd=run.parent, **variables)


def expect_losses(a, b, tolerance=TOLERANCE):
    """Two runs have the same losses and gradient norms at every step."""
    one, other = records(a, "train"), records(b, "train")
    assert len(one) == len(other) > 0
    for x, y in zip(one, other):
        for key in ("loss", "grad_norm"):
            assert abs(x[key] - y[key]) <= tolerance * abs(x[key]), (key, x, y)


def expect_same_weights(a, b, *steps):
    """The checkpoints of these steps have the same weights and moments, bit for bit."""
    for step in steps:
        assert not differing(checkpoint(a, step), checkpoint(b, step), WEIGHTS), (b, step)
