"""The start of the program: variables of the environment, re-execution, and the memory of a dry run."""

import subprocess
import time
from pathlib import Path

import pytest
from program import DONE, FAILED, SMALL, linked_with, read_json, run, run_trainer, trainer, words_of

VARIABLES = {  # name -> the error for the value 1; "": this value is accepted
    "NVIDIA_TF32_OVERRIDE": "may multiply fp32 numbers rounded to TF32",
    "CUBLAS_EMULATE_SINGLE_PRECISION": "multiplies fp32 numbers in pieces of bf16",
    "ONEDNN_DEFAULT_FPMATH_MODE": "may multiply fp32 numbers rounded to bf16 or TF32",
    "DNNL_DEFAULT_FPMATH_MODE": "may multiply fp32 numbers rounded to bf16 or TF32",
    "CUBLAS_EMULATION_STRATEGY": "",
    "CUBLASLT_HEURISTICS_LUT_FILE": "",
    "ONEDNN_MAX_CPU_ISA": "",
    "DNNL_MAX_CPU_ISA": "",
}


def test_library_variables(corpus, tmp_path):
    """environment variables that change matrix products are rejected, or recorded in run.json"""
    for name, effect in VARIABLES.items():
        result = run_trainer("--dry-run", env={name: "1"})
        if effect:
            result.one_line(FAILED, f"{name}=1 in the environment {effect}")
        else:
            result.done()
    variables = {
        "NVIDIA_TF32_OVERRIDE": "0",
        "ONEDNN_DEFAULT_FPMATH_MODE": "strict",
        "CUBLAS_EMULATION_STRATEGY": "eager",
        "DNNL_MAX_CPU_ISA": "AVX2",
    }
    data = ["--train-data", corpus / "train.bin", "--out", tmp_path / "run"]
    run_trainer(*data, SMALL, "--steps 2", env=variables).done()
    described = read_json(tmp_path / "run/run.json")
    assert described["environment"] == described["starts"][0]["environment"] == variables


def test_dry_run_allocates_nothing():
    """a dry run of the largest preset allocates nothing"""
    # The weights alone would be 49 GiB. The sanitizer's shadow is larger than any limit that would mean something.
    limit = [] if linked_with("libasan") else ["prlimit --as=4096000000"]
    result = run(*limit, *trainer(), "--preset 13.1b --attention baseline --dry-run").done()
    assert "13123015680" in result.out


# ---- re-execution


@pytest.fixture
def without_variables():
    """A command that removes the variables without which the program executes itself again."""
    if not linked_with("libgomp"):
        pytest.skip("the program does not use GCC's OpenMP")
    return "env -u GOMP_SPINCOUNT -u OMP_WAIT_POLICY"


# With this, GCC's OpenMP prints its settings before main, so once for each start of the program.
VERBOSE = "OMP_DISPLAY_ENV=verbose"


@pytest.mark.parametrize(
    ("environment", "last", "starts"),
    [
        ("", "GOMP_SPINCOUNT = '3000'", 2),
        ("GOMP_SPINCOUNT=777", "GOMP_SPINCOUNT = '777'", 1),
        ("OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT = '0'", 1),
        ("OMP_WAIT_POLICY=active", "OMP_WAIT_POLICY = 'ACTIVE'", 1),
        ("LD_PRELOAD=libvgpreload_none.so", "GOMP_SPINCOUNT = '300000'", 1),  # as valgrind sets it
    ],
    ids=["default", "count", "passive", "active", "valgrind"],
)
def test_spin_count(without_variables, environment, last, starts):
    """threads spin briefly unless the user sets otherwise, and the program re-executes at most once"""
    result = run(without_variables, VERBOSE, environment, *trainer(), "--dry-run").done()
    assert result.err.count("GOMP_SPINCOUNT = ") == starts
    assert last in result.err.split("OPENMP DISPLAY ENVIRONMENT BEGIN")[-1]


def test_arguments(without_variables, corpus, tmp_path):
    """a re-executed program has its arguments"""
    rename = 'bash -c \'exec -a "odd name" "$0" "$@"\''
    options = ["--train-data train.bin", SMALL, "--steps 2 --out", tmp_path / "a b"]
    run(without_variables, rename, *trainer(), *options, cwd=corpus).done()
    words = read_json(tmp_path / "a b/run.json")["command_line"]
    assert words == ["odd name", *map(str, words_of([*trainer()[1:], *options]))]


def test_name(without_variables, corpus, tmp_path):
    """a re-executed program keeps its name"""
    (tmp_path / "a_trainer").symlink_to(trainer()[0])
    options = ["--train-data", corpus / "train.bin", SMALL, "--steps 100000 --out run"]
    command = words_of([without_variables, "./a_trainer", *trainer()[1:], *options])
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        log, end = tmp_path / "run/log.jsonl", time.monotonic() + 20
        while time.monotonic() < end and not (log.exists() and log.stat().st_size):
            time.sleep(0.05)
        name = Path(f"/proc/{process.pid}/comm").read_text()
        process.terminate()
    assert name == "a_trainer\n"


@pytest.mark.skipif(linked_with("libasan"), reason="the sanitizer does not start without /proc")
def test_failure_without_proc(without_variables):
    """a program that cannot re-execute continues"""
    if run("unshare -rm true").status != DONE:
        pytest.skip("there are no mount namespaces here")
    hide = 'unshare -rm sh -c \'mount -t tmpfs tmpfs /proc && exec "$0" "$@"\''
    result = run(without_variables, hide, *trainer(), "--dry-run")
    assert result.one_line(DONE, "set GOMP_SPINCOUNT=3000").out


def test_start_by_the_loader(without_variables):
    """a program that the dynamic loader starts continues"""
    loaders = [*Path("/lib64").glob("ld-linux-*.so.2"), *Path("/lib").glob("ld-linux-*.so.1")]
    assert run(without_variables, *loaders[:1], *trainer(), "--dry-run").done().out
