"""A rank that is killed, stopped or whose device hangs is named. A launch that cannot start prints one line."""

import re
from time import monotonic

import pytest
from device import DEVICE, on_device
from device_ranks import HASTY, MODEL, run_ranks
from program import DONE, FAILED, SIGNALLED, USAGE, records, run
from ranks import expect_same_weights


@pytest.mark.sanitized
def test_two_devices(odd):
    """a run on two devices succeeds, and a rank ends when its peer is killed"""
    options = "--batch-size 1 --total-batch 28 --steps 2 --zero 3 --check-ranks-every 1 --checkpoint-every 1 --out run"
    run_ranks(odd, 2, MODEL, options, env=HASTY).done()
    result = run_ranks(odd, 2, "--out run --resume --steps 4 --timeout 5", env="FAULT=kill:1:3:backward")
    assert result.status != DONE and result.err.count("\n") == 1 and "rank 1 (" in result.err, result


@pytest.mark.bf16
@pytest.mark.parametrize(
    ("fault", "zero", "words"),
    [
        ("kill:1:3:backward", 0, "rank 1 ("),
        ("kill:0:3:update", 1, "rank 0 ("),
        ("stop:1:3:gradients", 2, "has been unresponsive"),
        ("hang:1:3:backward", 0, "has not reached the collective"),
    ],
)
@pytest.mark.full(cases_from=1)
def test_lost_rank(odd, fault, zero, words):
    """a lost process or device is reported by rank, and the run resumes"""
    options, begin = "--batch-size 2 --steps 6 --checkpoint-every 2 --timeout 2", monotonic()
    env = f"FAULT={fault} CUDA_ON_CPU_NCCL_ABORTS=aborts"
    result = run_ranks(odd, 2, MODEL, options, f"--zero {zero} --out run", env=env)
    assert monotonic() - begin < 20
    assert result.status != DONE and words in result.err and f"rank {fault.split(':')[1]} (" in result.err, result
    heard, now = (int(re.search(rf"{at} (\d+)", result.err)[1]) for at in ("last state at step", " is at step"))
    # a rank that has read the norm does not wait for the other's update, and may be at the next step
    assert heard <= 3 <= now <= (4 if "update" in fault else 3), result.err
    assert "rank" in (odd / "aborts").read_text()  # who has aborted the communicator
    if "hang" in fault:
        run_ranks(odd, 2, "--out run --resume").done()
        run_ranks(odd, 2, MODEL, options, "--out whole").done()
        expect_same_weights(odd / "whole", odd / "run", 6)


@pytest.mark.bf16
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.full
def test_signal_in_validation(odd, zero):
    """a signal to one rank abandons the validation of all, and a resume makes it"""
    options = f"--batch-size 2 --steps 4 --val-data data.bin --val-every 2 --val-steps 4 --zero {zero} --out"
    run_ranks(odd, 2, MODEL, options, "whole").done()
    result = run_ranks(odd, 2, MODEL, options, "run", env="FAULT=signal:1:2:3")
    assert result.status == SIGNALLED and not records(odd / "run", "val", step=2), result
    run_ranks(odd, 2, "--out run --resume").done()
    assert records(odd / "run", "val") == records(odd / "whole", "val")
    expect_same_weights(odd / "whole", odd / "run", 4)


@pytest.mark.bf16
@pytest.mark.full
def test_aborted_collective(odd):
    """the result of an aborted collective is not used"""
    # After an abort, the device continues without the result of the collective, which must not be printed.
    options = "--batch-size 2 --steps 6 --timeout 2 --zero 1 --sample-every 3"
    result = run_ranks(odd, 2, MODEL, options, env="FAULT=hang:1:3:update")
    assert result.status == FAILED and "step 3/6" in result.out, result
    assert "--- " not in result.out and "not finite" not in result.out, result.out


@pytest.mark.bf16
@pytest.mark.full
def test_unconnected(odd):
    """a wait in a call of NCCL, before ranks are connected, is limited"""
    # The host waits in the first call between two ranks, which connects them, for a rank that does not make it.
    begin, hang = monotonic(), lambda rank: f"CUDA_ON_CPU_NCCL_HANG='{'ncclReduceScatter' if rank else ''}'"
    options = "--batch-size 2 --steps 2 --timeout 2 --start-timeout 5"
    result = run_ranks(odd, 2, MODEL, options, env=hang)
    assert "step 1/" not in result.one_line(FAILED, "rank ").out
    assert monotonic() - begin < 20


@pytest.mark.bf16
@pytest.mark.full
def test_device_errors(odd):
    """an error of a device or of NCCL during a run prints one line"""
    port, on_rank_1 = "NET/IB : a port is down", lambda rank: f"CUDA_ON_CPU_FAULT={'adamw:4' if rank else ''}"
    network = "NCCL failed: remote process exited or there was a network error (in the background)"
    for env, words in [
        ("CUDA_ON_CPU_FAULT=adamw:4", "diffv2: CUDA failed: an illegal memory access was encountered ("),
        (on_rank_1, "; an earlier kernel may be the cause; CUDA_LAUNCH_BLOCKING"),
        (f"CUDA_ON_CPU_NCCL_ASYNC='1:30:{port}'", f"{network}: {port} ;"),
        (f"CUDA_ON_CPU_NCCL_ASYNC='0:30:{port}'", f"{port} ; NCCL_DEBUG=WARN"),
    ]:
        run_ranks(odd, 2, MODEL, "--batch-size 2 --steps 6 --timeout 20", env=env).one_line(FAILED, words)


ONE = "start at most one process per GPU"
JOIN = "(ncclCommInitRank(&handle, comm.ranks, nccl.id, comm.rank))"
DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
NO_MEMORY = "CUDA_ON_CPU_NCCL_INIT=\"Cuda failure 2 'out of memory'\""
TWO = "CUDA_ON_CPU_DEVICES=2"
REFUSED = [  # ranks, environment, the line
    (2, "CUDA_ON_CPU_DEVICES=1", "would share one GPU"),
    (3, TWO, "3 processes on a machine with 2 GPUs: start at most one"),
    (
        3,
        f"{TWO} CUDA_VISIBLE_DEVICES=4,5",
        f"3 processes on a machine with 2 GPUs in CUDA_VISIBLE_DEVICES='4,5': {ONE}",
    ),
    (2, "SLURM_GPUS_PER_TASK=a100:2", "srun gives each process 2 GPUs, and a rank uses one"),
    (2, "CUDA_ON_CPU_DEVICES=0", "no CUDA device"),
    (2, "CUDA_ON_CPU_NAME='NVIDIA A100-SXM4-40GB MIG 1g.5gb'", f"would share one GPU: {ONE}, also with MIG slices"),
    (2, f"CUDA_ON_CPU_NCCL_INIT='{DUPLICATE}'", f"{JOIN}: {DUPLICATE} ; NCCL_DEBUG=WARN"),
    (2, NO_MEMORY, "out of device memory: cannot allocate memory for NCCL"),
]


@pytest.mark.bf16
@pytest.mark.full
def test_refused(odd):
    """ranks that cannot start print one line"""
    options = f"{MODEL} --batch-size 2 --steps 1"
    for ranks, env, words in REFUSED:
        run_ranks(odd, ranks, options, env=env).one_line(FAILED, words)
    run_ranks(odd, 2, options, "--batch-sizes 3").one_line(USAGE, "unknown option --batch-sizes")
    result = run_ranks(odd, 2, options, lambda rank: f"--seed {rank + 1}")
    result.one_line(USAGE, "--seed is '2' here and '1' on rank 0")
    one_of_two = lambda rank: f"SLURM_GPUS_PER_TASK=1 {TWO} CUDA_ON_CPU_VISIBLE={rank}"
    assert run_ranks(odd, 2, options, env=one_of_two).done().err == ""
    alone = [DEVICE[0].parent / "single_diffv2", options]  # a program without NCCL
    assert run(*alone, cwd=odd).done().err == ""
    run(*alone, cwd=odd, env={"OMPI_COMM_WORLD_SIZE": "2"}).one_line(FAILED, "built without NCCL")


@pytest.mark.bf16
def test_launcher_variables(odd):
    """invalid variables of a launcher are reported by name"""
    rank_1, tasks = "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0", "SLURM_STEP_TASKS_PER_NODE"
    directory = (
        "srun has started 2 ranks without MPI, which find each other in a directory: specify --out or --rendezvous"
    )
    for env, words in [
        (f"SLURM_PROCID=x SLURM_LOCALID=0 {tasks}=2 SLURM_NODEID=0", "SLURM_PROCID is 'x'"),
        (f"SLURM_PROCID=0 SLURM_LOCALID=0 {tasks}=2,x SLURM_NODEID=1", f"{tasks} is '2,x'"),
        (f"{rank_1} '{tasks}=2(x-1)'", f"{tasks} is '2(x-1)'"),
        (f"{rank_1} {tasks}=2", directory),
        (f"{rank_1} {tasks}=2 SLURM_JOB_ID=a/b", "SLURM_JOB_ID 'a/b' must not contain a slash"),
        *((f"SLURM_STEP_NUM_TASKS={n}", f"SLURM_STEP_NUM_TASKS is '{n}'") for n in ("x", "0", "-2", "4294967298")),
        ("OMPI_COMM_WORLD_SIZE=two", "OMPI_COMM_WORLD_SIZE is 'two'"),
    ]:
        launched = f"SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 {env}"
        on_device(odd, MODEL, env=launched).one_line(FAILED, words)


@pytest.mark.parametrize(("option", "text"), [("--help", "Usage: "), ("--version", "train_diffv2 0.")])
def test_help(tmp_path, option, text):
    """--help and --version need neither a device nor other ranks"""
    none = "CUDA_ON_CPU_DEVICES=0"
    mpi, slurm = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=", "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID="
    for launch in ("", f"{mpi}0", f"{mpi}1", f"{slurm}0", f"{slurm}1"):
        result = run("timeout 20 env", none, launch, *DEVICE, option, cwd=tmp_path).done()
        assert result.err == "" and (result.out == "" if launch.endswith("1") else result.out.startswith(text)), launch


@pytest.mark.bf16
@pytest.mark.full
def test_rendezvous(odd):
    """starts by srun in one directory do not read each other's files"""
    # two starts at the same time, then one without its second rank
    pair = lambda rank: f"SLURM_STEP_NUM_TASKS=2 SLURM_PROCID={rank % 2} SLURM_LOCALID={rank % 2}"
    env = lambda rank: f"{pair(rank)} SLURM_RESTART_COUNT={rank // 2}"
    options = "--batch-size 2 --steps 2"
    result = run_ranks(odd, 4, MODEL, options, lambda rank: f"--out run{rank // 2}", env=env)
    assert result.done().err == ""
    expect_same_weights(odd / "run0", odd / "run1", 2)
    assert not [*odd.glob("ranks*"), *odd.glob("run*/ranks*")]
    options += " --start-timeout 2 --out alone"
    result = run_ranks(odd, 2, MODEL, options, env=lambda rank: f"SLURM_RESTART_COUNT={rank}")
    assert result.status == FAILED and result.err.count("\n") == 2, result
    assert "1 of 2 ranks (the first is rank 1) have not started within 2 s" in result.err
    assert "rank 0 has not written " in result.err


@pytest.mark.bf16
@pytest.mark.parametrize(("ranks", "options", "nvls"), [(3, "--no-deterministic", 1), (2, "", 0)])
def test_nvls(odd, ranks, options, nvls):
    """NCCL reads NCCL_NVLS_ENABLE with --no-deterministic alone"""
    size = f"--batch-size 2 --total-batch {14 * ranks} --steps 1"
    run_ranks(odd, ranks, MODEL, size, options, env="NCCL_NVLS_ENABLE=1 CUDA_ON_CPU_NCCL_JOINS=joins").done()
    assert (odd / "joins").read_text().splitlines() == ranks * [f"NCCL_NVLS_ENABLE={nvls}"]
