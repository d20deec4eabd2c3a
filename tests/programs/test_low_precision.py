"""--matmul-dtype bf16 and fp8 in whole runs: losses, resumes and samples."""

import re

import pytest
from program import WEIGHTS, all_records, checkpoint, differing, read_json, records, resume, run_trainer, train

ROUNDING = {"bf16": 2**-8, "fp8": 2**-3}  # of a gradient: the largest share of a number; E5M2 has two bits of mantissa
STEPS = 20


@pytest.fixture(scope="module")
def exact(corpus, tmp_path_factory):
    """A run in fp32. Tests do not write there."""
    run = tmp_path_factory.mktemp("exact") / "run"
    train(corpus, run, f"--steps {STEPS} --matmul-dtype fp32").done()
    return run


@pytest.mark.parametrize(("gemm", "other"), [("bf16", "fp8"), ("fp8", "bf16")], ids=["bf16", "fp8"])
def test_runs_of_types(corpus, exact, tmp_path, gemm, other):
    """--matmul-dtype bf16 and fp8 train with losses close to fp32, and a resume is bitwise"""
    val_data = ["--val-data", corpus / "val.bin", "--val-steps 2"]
    run, stopped = tmp_path / "run", tmp_path / "stopped"
    options = [*val_data, f"--steps {STEPS} --val-every {STEPS} --matmul-dtype {gemm}"]
    train(corpus, run, *options).done()
    train(corpus, stopped, *options, "--stop-after 7").done()
    assert "option --matmul-dtype:" not in resume(stopped, "--threads 2").done().out
    assert not differing(checkpoint(run, STEPS), checkpoint(stopped, STEPS), WEIGHTS)

    # rounded products change a run a little, from the first step on
    wanted, loss = (records(directory, "train")[-1]["loss"] for directory in (exact, run))
    assert loss != wanted and abs(loss - wanted) < 2 * ROUNDING[gemm] * wanted
    assert f"products of numbers rounded to {gemm}" in (run / "run.json").read_text()
    assert read_json(run / "run.json")["options"]["matmul-dtype"] == gemm

    # --eval with the same type is the run's validation; with fp32 it is not
    validated = records(run, "val")[-1]["loss"]
    for evaluated in (gemm, "fp32"):
        options = ["--eval --batch-size 4 --threads 2 --matmul-dtype", evaluated]
        result = run_trainer("--init", checkpoint(run, STEPS), *val_data, *options).done()
        found = float(re.search(r"validation loss (\S+)", result.out)[1])
        assert (abs(found - validated) < 1e-6 * validated) == (evaluated == gemm), evaluated

    # another type after a resume is printed and recorded
    result = resume(run, f"--steps {STEPS + 2} --matmul-dtype", other).done()
    assert f"option --matmul-dtype: {gemm} in the checkpoint, {other} now" in result.out
    changes = [change for record in all_records(run) for change in record.get("changed", [])]
    assert {"name": "matmul-dtype", "old": gemm, "new": other} in changes


def test_generation_of_types(exact):
    """--generate rounds nothing"""
    init = ["--init", checkpoint(exact, STEPS), "--generate 60 --seed 4 --matmul-dtype"]
    texts = [
        [line for line in run_trainer(*init, gemm).done().out.splitlines() if not line.startswith("--matmul-dtype")]
        for gemm in ("fp32", "fp8")
    ]
    assert len("\n".join(texts[0])) > 20 and texts[0] == texts[1]
