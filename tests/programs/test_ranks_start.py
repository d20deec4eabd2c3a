"""Starts of several ranks: refused options, messages that only rank 0 prints, and the dry run of a rank."""

import re
import shutil

import pytest
from program import DONE, FAILED, USAGE, beside, linked_with, run, run_trainer, trainer
from ranks import MOST_ZERO, OPENMPI, SMALL_OF_RANKS, faulty, mpirun, run_ranks


@pytest.mark.parametrize(
    ("options", "text"), [("--lr x --help", "Usage: "), ("--version", "train_diffv2 0.")], ids=["--help", "--version"]
)
@pytest.mark.parametrize("name", ["faulty_diffv2", "single_diffv2"])
def test_help(name, options, text):
    """--help and --version are printed once by many ranks, and by a program for one process"""
    result = mpirun("-n 3", beside(name), options).done()
    assert result.out.startswith(text) and result.out.count(text) == 1
    for rank in (0, 1):  # as srun starts them
        slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank)}
        result = run("timeout 20", beside(name), options, env=slurm).done()
        assert result.err == "" and (result.out.startswith(text) if rank == 0 else result.out == "")


@pytest.mark.full
def test_different_ranks(short):
    """ranks with different builds, options or data are rejected, with the difference"""
    common = ["--train-data train.bin", SMALL_OF_RANKS, "--batch-size 2 --steps 3"]

    def pair(second, options="", both=""):  # two ranks: the command of the second, its options, and those of both
        return mpirun("-n 1", *trainer(), *common, both, ": -n 1", *second, *common, options, both, cwd=short)

    result = mpirun("-n 1", *trainer(), *common, "--lr 1e-3 : -n 1", *trainer(), *common, "--lr 2e-3", cwd=short)
    result.one_line(USAGE, "--lr is '0.002' here and '0.001' on rank 0")
    pair(trainer(), "--bogus 1").one_line(USAGE, "unknown option --bogus")
    pair(trainer(), "--start-timeout 0").one_line(USAGE, "--start-timeout '0' is not accepted")
    pair([faulty()]).one_line(USAGE, "program is '")
    result = pair(["env CUBLAS_EMULATION_STRATEGY=eager", *trainer()])
    result.one_line(USAGE, "CUBLAS_EMULATION_STRATEGY is 'eager' here and '(unset)' on rank 0")
    data = bytearray((short / "train.bin").read_bytes())
    data[1100] = ord("x")
    for name in ("other", "more"):
        (short / name).mkdir()
    (short / "other/train.bin").write_bytes(data)
    pair(["env -C other", *trainer()]).one_line(FAILED, "the-fingerprint-of-the-training-data is '")
    for name in ("val.bin", "more/train.bin"):
        shutil.copy(short / "train.bin", short / name)
    (short / "more/val.bin").write_bytes(data)
    result = pair(["env -C more", *trainer()], both="--val-data val.bin")
    result.one_line(FAILED, "the-fingerprint-of-the-validation-data is '")

    for ranks, options, words in [
        (3, "--batch-sizes 3", "unknown option --batch-sizes"),  # once, though all three say it
        (2, "--total-batch 96", "not a multiple"),
        (2, "--dump-grads x", "requires a single process, not 2 ranks"),
        (2, "--rendezvous train.bin", "--rendezvous train.bin must be a directory"),
    ]:
        mpirun(f"-n {ranks}", *trainer(), *common, options, cwd=short).one_line(USAGE, words)
    # a build without MPI, and a launcher that MPI does not support
    result = run(beside("single_diffv2"), *common, cwd=short, env={"OMPI_COMM_WORLD_SIZE": "2"})
    result.one_line(FAILED, "built without MPI")
    for name in ("single_diffv2", "faulty_diffv2"):
        result = run(beside(name), *common, cwd=short, env={"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"})
        result.one_line(FAILED, "torchrun has started 2 processes, and each would train alone")
    slurm = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    result = run(*trainer(), *common, cwd=short, env={**OPENMPI, **slurm})
    assert [line for line in result.err.splitlines() if line.startswith("diffv2: ")] == result.err.splitlines()[-1:]
    assert result.status == FAILED and "started as one of 4 processes" in result.err


def test_hidden_directory(short):
    """a start of which a rank cannot open the directory of the ranks leaves none"""
    if run("unshare -rm true").status != DONE:
        pytest.skip("there are no mount namespaces here")
    (short / "shared").mkdir()
    train = ["--train-data train.bin", SMALL_OF_RANKS, "--batch-size 2 --steps 3 --rendezvous shared"]
    hide = 'unshare -m sh -c \'mount -t tmpfs tmpfs shared && exec "$0" "$@"\''
    result = mpirun("-n 1", faulty(), *train, ": -n 1", hide, faulty(), *train, cwd=short)
    result.one_line(FAILED, "rank 1 on ")
    assert not any((short / "shared").iterdir())


def test_missing_rank(short):
    """a rank that never starts MPI cannot hang the others"""
    start = ["-n 1", faulty(), "--train-data train.bin", SMALL_OF_RANKS, "--start-timeout 1"]
    result = mpirun(*start, ": -n 1 sleep 60", cwd=short)
    result.one_line(FAILED, "rank 0: MPI has not connected the ranks within 1 s (--start-timeout)")


def test_zero_levels_of_dry_run(short):
    """a dry run offers the levels of --zero that support what ranks evaluate"""
    for tasks, level in [("--eval-choices c=choices --val-every 2", False), ("", True)]:
        dry_run = ["--dry-run --ranks 2 --train-data train.bin", SMALL_OF_RANKS, tasks]
        out = run_trainer(*dry_run, cwd=short).done().out
        assert "\n  2 " in out and ("\n  3 " in out) == level


# ---- memory and traffic


def number_after(words, text):
    return float(re.search(rf"  {re.escape(words)} +([\d.]+)", text)[1])


def test_memory(short):
    """the memory check includes all ranks of a machine"""
    # A model that takes about 60% of the available memory: one rank fits, two do not.
    model = "--preset 1.4b --vocab 256 --seq-len 8 --batch-size 1 --train-data train.bin --layers"
    outs = [run_trainer(model, layers, "--dry-run", cwd=short).done().out for layers in (1, 2)]
    one, two = (number_after("total", out[out.index("memory of this process") :]) for out in outs)
    available = float(re.search(r"this machine has ([\d.]+) MiB available", outs[0])[1])
    layers = max(1, int(0.6 * available / (two - one)))
    assert "available: enough" in run_trainer(model, layers, "--dry-run", cwd=short).done().out
    result = run_ranks(2, model, layers, cwd=short)
    assert result.status == FAILED
    assert "too little memory: " in result.err and ", 2 times on this machine;" in result.err


@pytest.mark.parametrize("zero", range(MOST_ZERO + 1), ids=lambda zero: f"--zero {zero}")
@pytest.mark.full
@pytest.mark.slow(cases_from=1)
def test_dry_run(short, zero):
    """a dry run with ranks prints the memory of a rank"""
    # enough parameters that buffers dominate the memory, and enough layers that two of them are a small part
    model = (
        "--layers 12 --hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --ffn 768 --vocab 512 --seq-len 32 "
        f"--batch-size 1 --zero {zero}"
    )
    out = run(faulty(), model, "--dry-run --ranks 2").done().out
    total = number_after("total", out[out.index("memory of one of 2 ranks") :])
    table = re.findall(r"^  (\d) +([\d.]+) MiB$", out[out.index("by --zero level") :], re.M)
    assert [int(level) for level, _ in table] == list(range(MOST_ZERO + 1))
    memory = [float(mib) for _, mib in table]
    wanted = 4 * 3 * number_after("total", out) / 2 / 2**20  # fp32 weights and moments of half of the parameters
    assert abs(number_after("copy for checkpoints, in host memory", out) - wanted) < 0.01 * wanted
    assert abs(total - memory[zero]) < 0.2
    assert memory[0] > memory[1] > memory[2] > memory[3]
    if not linked_with("libasan"):  # which more than doubles the memory of a rank
        run_ranks(2, "--train-data train.bin", model, "--threads 1 --steps 3", cwd=short, PEAK="peak").done()
        peak = max(int(kib) for kib in (short / "peak").read_text().split()) / 1024
        assert abs(peak - total) < 0.1 * total + 24
