"""--recompute in whole runs: equal weights, moments and records. tests/cuda/test_cuda_memory.py has the memory."""

import re
import shutil

import pytest
from program import WEIGHTS, checkpoint, differing, lose_checkpoints, run_trainer

LEVELS = (0, 1, 2)


def log_without_speed(run):
    """The train and stats records of a run as text, without the measured times."""
    lines = (run / "log.jsonl").read_text().splitlines()
    lines = [line for line in lines if '"train"' in line or '"stats"' in line]
    return [re.sub(r'"tokens_per_s.*"loss_z', '"loss_z', line) for line in lines]


@pytest.mark.parametrize(
    ("attention", "options"),
    [("diff_v2", ""), ("diff_v1", ""), ("diff_v2_gated_head", "--qk-norm --matmul-dtype fp8")],
    ids=["diff_v2", "diff_v1", "diff_v2_gated_head in fp8"],
)
@pytest.mark.full(cases_from=1)
def test_recompute_runs(corpus, tmp_path, attention, options):
    """runs are equal at every level, and a resume may change the level"""
    data = ["--train-data", corpus / "train.bin"]
    model = (
        "--layers 3 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16 --batch-size 4 "
        "--schedule constant --warmup 2 --threads 2 --total-batch 128 --doc-mask --separator 10:after --stats-every 1"
    )
    for level in LEVELS:
        out = ["--out", tmp_path / str(level), f"--recompute {level} --steps 4 --attention {attention}"]
        run_trainer(*data, model, *out, options).done()
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "0", resumed)
    lose_checkpoints(resumed)
    resume = ["--out", resumed, "--resume --threads 2"]
    run_trainer(*data, *resume, "--recompute 1 --stop-after 2").done()
    result = run_trainer(*resume, "--recompute 2").done()
    assert "recompute" in result.out, "a resume does not print the change of --recompute"
    log = log_without_speed(tmp_path / "0")
    assert len(log) == 16
    for other in (tmp_path / "1", tmp_path / "2", resumed):
        assert not differing(checkpoint(tmp_path / "0", 4), checkpoint(other, 4), WEIGHTS), other
        assert log_without_speed(other) == log, other
