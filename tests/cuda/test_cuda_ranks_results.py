"""Several GPUs compute what one rank computes, with every --zero."""

import re

import pytest
from device import DEVICE, FP32, compare_records, on_cpu
from device_ranks import HASTY, LATE, MODEL, run_ranks
from program import expect_same, records
from ranks import MOST_ZERO, expect_same_weights, mpirun

LEVELS = range(MOST_ZERO + 1)
THREE = "--batch-size 2 --total-batch 28 --steps 3"


@pytest.mark.parametrize("zero", [f"--zero {level}" for level in LEVELS])
def test_losses(odd, zero):
    """several devices have the losses of the CPU trainer, with every --zero"""
    on_cpu(odd, MODEL, "--batch-size 8 --steps 3 --out cpu").done()
    options = f"--batch-size 2 --total-batch 56 --steps 3 {zero} --check-ranks-every 1 --out device"
    run_ranks(odd, 2, MODEL, options).done()
    compare_records(odd, "train", 3, 1e-4 if FP32 else 0.03)
    waits = [record["comm_ms"] for record in records(odd / "device", "train")]
    assert all(0 <= ms < 60000 for ms in waits) and max(waits) > 0, waits


@pytest.mark.bf16
@pytest.mark.full
def test_zero_bits(odd):
    """--zero 0, 1, 2 and 3 give the same bits, in any order of streams"""
    # Only the waits of the step order the gathers of parameters. In one of the runs, --check-ranks-every waits for all.
    for order in (LATE, HASTY):
        for level in LEVELS:
            run = odd / f"{order}{level}"
            check = "--check-ranks-every 1" if (order, level) in ((LATE, 3), (HASTY, 2)) else ""
            run_ranks(odd, 2, MODEL, THREE, f"--zero {level} {check} --out {run.name}", env=order).done()
            expect_same_weights(odd / f"{LATE}0", run, 3)


@pytest.mark.bf16
@pytest.mark.slow
def test_groups(odd):
    """two groups of two ranks give the losses of one rank, and the same bits at every --zero"""
    on_cpu(odd, MODEL, "--batch-size 8 --steps 3 --out cpu").done()
    options = "--batch-size 2 --total-batch 56 --steps 3 --zero-group 2 --check-ranks-every 1"
    for level in LEVELS:
        run = odd / f"zero{level}" if level else odd / "device"
        more = f"--zero {level} --out {run.name}"
        run_ranks(odd, 4, MODEL, options, more, env=HASTY if level % 2 else "").done()
        expect_same_weights(odd / "device", run, 3)
    compare_records(odd, "train", 3, 0.03)


@pytest.mark.bf16
@pytest.mark.full
def test_bucket_sizes(odd):
    """results do not depend on the size of buckets"""
    # Sums of NCCL depend on the size of the buffer; its emulation sums in the order of ranks. No clipping: the norm is
    # a sum over buckets.
    for level, bucket in enumerate((512, 3000, 100000, 700)):
        options = f"--grad-clip 0 --zero {level} --out bucket{level}"
        run_ranks(odd, 2, MODEL, THREE, options, env=f"BUCKET={bucket}").done()
        expect_same_weights(odd / "bucket0", odd / f"bucket{level}", 3)


@pytest.mark.bf16
@pytest.mark.slow
def test_sample(odd):
    """a sample uses all parameters of the last update, with --zero 0, 1 and 2"""
    # With --zero 1 and 2 the gather of parameters has not ended when the sample begins.
    options, samples = "--batch-size 2 --total-batch 28 --steps 1 --sample-every 1", set()
    for level in (0, 1, 2):
        out = run_ranks(odd, 2, MODEL, options, f"--zero {level}").done().out
        samples.add(re.search(r"--- sample after step 1\n.*?\n---\n", out, re.S)[0])
    assert len(samples) == 1, samples


@pytest.mark.full
def test_resume(odd):
    """a run resumes with another number of devices"""
    options = "--total-batch 42 --steps 6"
    on_cpu(odd, MODEL, options, "--batch-size 6 --out cpu").done()
    run_ranks(odd, 2, MODEL, options, "--batch-size 1 --zero 3 --stop-after 2 --out device").done()
    run_ranks(odd, 1, "--out device --resume --zero 0 --stop-after 4").done()
    run_ranks(odd, 3, "--out device --resume --zero 3").done()
    compare_records(odd, "train", 6, 2e-4 if FP32 else 0.03)


@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), *((2, level) for level in LEVELS)])
@pytest.mark.full(cases_from=2)
def test_background_checkpoint(odd, ranks, zero):
    """a checkpoint written in the background has the weights of its step"""
    # Without a wait for the copy, streams that run late would give the writer old values.
    options = f"--batch-size 2 --total-batch 28 --steps 6 --checkpoint-every 2 --keep 0 --zero {zero}"
    order = HASTY if ranks == 2 and zero % 2 == 0 else LATE
    run_ranks(odd, ranks, MODEL, options, "--out before", env=f"NO_COPY=0 {order}").done()
    run_ranks(odd, ranks, MODEL, options, "--out beside", env=order).done()
    expect_same(odd / "before/checkpoints", odd / "beside/checkpoints")
    assert (odd / "beside/log.jsonl").read_text().count('"background": true') == 2


@pytest.mark.bf16
@pytest.mark.full
def test_mpirun(odd):
    """mpirun and srun start the same run"""
    options = "--batch-size 2 --total-batch 56 --steps 2 --zero 1"
    run_ranks(odd, 4, MODEL, options, "--out by_srun").done()
    variables = {"CUDA_ON_CPU_DEVICES": "4", "BUCKET": "1024"}
    result = mpirun("-n 4", *DEVICE, MODEL, options, "--threads 1 --out by_mpirun", cwd=odd, **variables).done()
    assert "NCCL 2." in result.out
    assert "Usage" in mpirun("-n 2", *DEVICE, "--help", cwd=odd, **variables).done().out
    expect_same_weights(odd / "by_srun", odd / "by_mpirun", 2)
