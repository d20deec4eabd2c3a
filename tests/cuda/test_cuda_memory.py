"""Device memory, planned and used; the peak and the times of a device."""

import re

import pytest
from device import DATA, EVEN, FP32, ODD, TRAIN_ODD, on_device
from program import DONE, FAILED, read_json, records

MIB = 2**20


def total_of_dry_run(directory, *options, env=""):
    """The total that --dry-run prints, in MiB."""
    out = on_device(directory, "--dry-run", *options, env=env).done().out
    return float(re.search(r"memory of this process.*?  total +(\S+) MiB", out, re.S)[1])


@pytest.mark.bf16
def test_out_of_memory(odd):
    """an out-of-memory error of the device names the buffer and options that require less, by what --dry-run says"""
    shape = ODD.replace("--batch-size 3", "--total-batch 10400 --steps 1 --attention-kernel own")
    options, memory = "--batch-size 800 --out run --no-memory-check", 40  # MiB: enough to measure the peak
    result = on_device(odd, DATA, shape, options, env=f"CUDA_ON_CPU_MEMORY={memory}")
    error = result.one_line(FAILED, "out of device memory: ").err
    assert "MiB for activations" in error and "of 40.0 MiB free" in error
    needed = float(re.search(r"the run needs (\S+) MiB: parameters", error)[1])
    assert abs(needed - total_of_dry_run(odd, shape, "--batch-size 800")) < 0.11, error
    for offer in ("--recompute 1", "--recompute 2", "--batch-size 400"):
        saved = float(re.search(rf"{offer} \((\S+) MiB\)", error)[1])
        batch = "" if "batch" in offer else "--batch-size 800"
        rest = total_of_dry_run(odd, shape, batch, offer)
        assert saved > 1 and abs(needed - saved - rest) < 0.21, (offer, needed, saved, rest)
    assert "--zero" not in error, "it is offered to one rank"
    assert not (odd / "run").exists(), "a run that could not start left a directory"


@pytest.mark.bf16
def test_out_of_memory_in_library(odd):
    """an out-of-memory error in a library names the library"""
    # the device has memory for the run, but not for the workspace of matrix products
    options = "--steps 1 --attention-kernel own --no-memory-check"
    result = on_device(odd, TRAIN_ODD, options, env="CUDA_ON_CPU_MEMORY=20")
    assert "the run needs " in result.one_line(FAILED, "for cuBLASLt's workspace").err


@pytest.mark.bf16
def test_memory_of_other_processes(even):
    """memory of other processes does not count as free, and the advice calls no library"""
    # The run needs 33 MiB of buffers, most of them the workspace of matrix products, and an estimate of 560 MiB for
    # CUDA. The free memory, whether it is enough, and what a run says.
    too_small = "MiB needed without CUDA's own memory, {}.0 of {}.0 MiB free; the run needs "
    for memory, others, free, enough, status, said in [
        (4096, 0, 4096, "enough", DONE, ""),
        (4096, 4070, 26, "too little until other processes end", FAILED, too_small.format(26, 4096)),
        (500, 0, 500, "too little", DONE, "device memory may be too little: "),
        (20, 0, 20, "too little", FAILED, too_small.format(20, 20)),
    ]:
        env = f"CUDA_ON_CPU_MEMORY={memory} CUDA_ON_CPU_OTHERS={others}"
        line = f"this device has {memory}.0 MiB, of which {free}.0 MiB are free now: {enough}\n"
        assert line in on_device(even, EVEN, "--dry-run", env=env).done().out
        result = on_device(even, DATA, EVEN, "--steps 1", env=env)
        assert result.status == status and result.err.count("\n") == bool(said) and said in result.err, result
        if status == FAILED:
            assert "--batch-size 1 (" in result.err and "--no-memory-check starts" in result.err
    result = on_device(even, DATA, EVEN, "--steps 1 --no-memory-check", env="CUDA_ON_CPU_MEMORY=20")
    result.one_line(FAILED, "out of device memory")


@pytest.mark.parametrize(
    "options",
    [
        "--recompute 1 --sample-every 3",
        "--recompute 2 --doc-mask --separator 0 --val-data data.bin --val-steps 1",
        "--attention diff_v1 --stats-every 1 --total-batch 78",
        "--matmul-dtype fp8 --val-data data.bin --val-steps 1",
        "--optimizer normuon --experts 5 --experts-active 3 --expert-ffn 24",
    ],
)
def test_dry_run_memory(odd, options):
    """a dry run predicts the allocated memory to the byte"""
    # the bytes that cudaMalloc returned are those of the plan without its estimates of CUDA's own memory
    out = on_device(odd, TRAIN_ODD, options, "--steps 1 --out run").done().out
    _, memory, _ = records(odd / "run", "event")  # between the start's and the checkpoint's
    keys = ("used_bytes", "total_bytes", "at_start_bytes", "planned_bytes", "estimated_bytes")
    used, _, at_start, planned, estimated = logged = [memory[key] for key in keys]
    assert used - at_start == planned - estimated and used > 0 and estimated > 0, memory
    line = r"device memory: (\S+) of (\S+) MiB in use, (\S+) MiB of it before the first buffer; planned: (\S+) MiB, "
    printed = re.search(line + r"(\S+) MiB of it estimated", out).groups()
    assert all(abs(a / MIB - float(b)) < 0.06 for a, b in zip(logged, printed)), (memory, printed)
    assert abs(total_of_dry_run(odd, TRAIN_ODD, options, "--steps 1") - planned / MIB) < 0.06


@pytest.mark.bf16
def test_dry_run_without_device(tmp_path):
    """a dry run prints the same with and without a device"""
    # Most of the memory is cuDNN's workspace, whose size cannot be queried without a device.
    model = (
        "--layers 1 --hidden 64 --heads 4 --head-dim 16 --ffn 96 --vocab 256 --seq-len 1030 --batch-size 1 "
        "--tie-embeddings --kv-heads"
    )
    totals = {}
    for options in ("4", "2", "2 --attention diff_v1", "4 --no-deterministic"):
        totals[options] = total_of_dry_run(tmp_path, model, options)
        assert totals[options] == total_of_dry_run(tmp_path, model, options, env="CUDA_ON_CPU_DEVICES=0")
    # 8 query heads of dS, (1088, 1152) in bf16, against dQ, (1030, 16) in fp32
    more = 8 * (1088 * 1152 * 2 - 1030 * 16 * 4) / MIB
    assert abs(totals["4"] - totals["4 --no-deterministic"] - more) < 0.21, (totals, more)


# ---- the peak and predicted times


@pytest.mark.parametrize(
    ("name", "measured"), [("NVIDIA B200", FP32), ("NVIDIA B2000", True), ("NVIDIA B300 SXM6 AC MIG 1g.34gb", True)]
)
def test_device_peak(odd, name, measured):
    """the peak of a listed device is the vendor's, and that of another device is measured"""
    word, source = ("rate", "measured") if measured else ("peak", "HGX B200")
    out = on_device(odd, TRAIN_ODD, "--steps 1 --out run", env=f"CUDA_ON_CPU_NAME='{name}'").done().out
    printed, rest = re.search(r"; (\S+) GFLOP/s: (.*)", out, re.S).groups()
    assert source in rest and f"% of {word}" in out, out
    assert float(printed) > 0 if measured else float(printed) == 2250e3
    assert abs(read_json(odd / "run/run.json")["peak"]["gflops"] - float(printed)) <= 0.5
    (step,) = records(odd / "run", "train")
    assert step["flops_util"] > 0
