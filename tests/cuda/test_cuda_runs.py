"""Runs of the CUDA trainer: losses and statistics against the CPU trainer's, resumes, rollbacks and checkpoints."""

import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from device import DATA, FP32, ODD, PRECISION, TRAIN_ODD, compare_records, on_cpu, on_device, run_both
from device import with_variant, write_data
from fixtures import safetensors_read
from program import FAILED, WEIGHTS, checkpoint, differing, expect_same, read_json, records, tensors
from program import write_random_choices
from variants import VARIANTS

THREE = "--steps 3 --warmup 1 --stats-every 3"


@pytest.mark.parametrize("variant", list(VARIANTS)[:: 2 if FP32 else 1])
@pytest.mark.slow(cases_from=4)
def test_losses_of_variants(odd, variant):
    """three steps of the variants have the losses, statistics and choices of the CPU trainer"""
    # With documents for every second variant, completep for some of the others and Muon for every third.
    number, traits, options = list(VARIANTS).index(variant), VARIANTS[variant], []
    if number % 2:
        options += ["--doc-mask --separator 0"]
    elif number % 4 == 2:
        options += ["--parametrization completep --base-width 16 --base-depth 1"]
    if number % 3 == 1:
        options += ["--optimizer normuon"]
    # Where a norm of each head follows, the gradient of a projected lambda is about 0 at the start, as the maps of a
    # pair are similar: AdamW makes steps of its rounding, and a small rate keeps them small.
    options += ["--lr 3e-4" if traits.lambda_ == "input" and traits.norm == "head" else "--lr 3e-3"]
    write_random_choices(odd / "three", 12, 3, seed=5, tokens=43, positions=13)
    write_random_choices(odd / "wide", 12, 2, seed=6, wide=True, tokens=43, positions=13)
    evaluation = "--val-data data.bin --val-steps 1 --eval-choices 'three=three wide=wide'"
    run_both(odd, DATA, with_variant(variant, ODD), THREE, evaluation, *options)
    compare_records(odd, "train", 3, 1e-4 if FP32 else 0.03)
    compare_records(odd, "val", 2, 1e-5 if FP32 else 0.01)
    compare_records(odd, "choices", 4, 1e-4 if FP32 else 0.05)
    compare_records(odd, "stats", 6, 2e-3 if FP32 else 0.3)


def test_sparse_runs(odd):
    """losses and text of block-sparse attention equal the CPU's"""
    # with documents, and text from a ring of keys
    model = (
        f"{DATA} --doc-mask --separator 0 --preset tiny --layers 2 --hidden 32 --heads 2 --kv-heads 1 --head-dim 8 "
        "--ffn 32 --vocab 43 --seq-len 32 --batch-size 2 --window 20 --yoco --sparse-blocks 1 --sparse-block-size 4"
    )
    run_both(odd, model, THREE, "--lr 3e-3")
    compare_records(odd, "train", 3, 1e-4 if FP32 else 0.03)
    expect_same_text(odd, "cpu", 28)


def expect_same_text(directory, run, count):
    """The greedy texts of both trainers from the checkpoint of step 3 are the same in fp32."""
    options = f"--init {run}/checkpoints/step_00000003 --generate {count} --prompt-tokens 1,2,3 --temperature 0"
    cpu, device = on_cpu(directory, options).done().out, on_device(directory, options).done().out
    assert cpu == device or not FP32


def test_lengths(odd):
    """losses of resumes with five lengths equal those of the CPU trainer"""
    # with windows in half of the layers, and a smaller last batch of each validation
    model = (
        f"{DATA} --val-data data.bin --layers 2 --hidden 20 --heads 2 --kv-heads 1 --head-dim 8 --ffn 27 --vocab 43 "
        "--window 3 --full-every 2 --seq-len 12 --batch-size 2 --total-batch 24 --steps 6 --lr 3e-3 --warmup 1"
    )
    run_both(odd, model, "--val-every 1 --stop-after 1")
    for step, options in enumerate(("6 --batch-size 4", "8 --batch-size 3", "4 --batch-size 6", "3 --batch-size 8"), 2):
        run_both(odd, f"--resume --seq-len {options} --stop-after {step}", "--rope-theta 500" if step == 5 else "")
    run_both(odd, "--resume --total-batch 48")
    compare_records(odd, "train", 6, 2e-4 if FP32 else 0.03)
    compare_records(odd, "val", 7, 2e-4 if FP32 else 0.03)


MUON = "diff_v2_cross_group --optimizer normuon"


@pytest.mark.bf16
@pytest.mark.parametrize("variant", ["diff_v2", "diff_v1", "gated_head --matmul-dtype fp8", MUON])
@pytest.mark.full(cases_from=1)
def test_resume(odd, variant):
    """a resumed run equals an uninterrupted one, bit for bit"""
    options = [TRAIN_ODD, "--attention", variant, "--total-batch 78 --steps 4 --checkpoint-every 2"]
    on_device(odd, *options, "--out whole").done()
    on_device(odd, *options, "--stop-after 2 --out parts").done()
    on_device(odd, "--resume --out parts").done()
    expect_same(odd / "whole/checkpoints", odd / "parts/checkpoints")


@pytest.mark.bf16
def test_rollback(odd):
    """a rollback restores the weights, their masters and moments, bit for bit"""
    # The update of step 3 makes the weights so large that step 4 is not finite. After the return to step 2, step 3
    # computes what a resumed run computes.
    run = odd / "run"
    options = "--matmul-dtype fp8 --attention-kernel own --steps 5 --warmup 0 --schedule constant --checkpoint-every 2"
    on_device(odd, TRAIN_ODD, options, "--rollback 1:1 --stop-after 2 --out run").done()
    shutil.copytree(checkpoint(run, 2), odd / "before")
    result = on_device(odd, "--out run --resume --lr 1e10")
    assert result.status == FAILED and "for the 4th time in a row to the checkpoint of step 2" in result.err, result
    returned = records(run, "train", step=3)[-1]
    assert not differing(odd / "before", checkpoint(run, 2), WEIGHTS)
    on_device(odd, "--out run --resume --lr 1e10 --stop-after 3").done()
    resumed = records(run, "train", step=3)[-1]
    assert all(returned[key] == resumed[key] for key in ("loss", "grad_norm")), (returned, resumed)


@pytest.mark.bf16
def test_master_weights(odd):
    """updates too small for bf16 change the master weights"""
    # bf16 has 8 bits: a step of 1e-6 changes the master weight of 0.02, but not the weight.
    name, found = "model.layers.0.mlp.down_proj.weight", []
    for steps, lr in ((1, "0"), (3, "1e-6")):
        out = f"--warmup 0 --schedule constant --out run{steps}"
        on_device(odd, TRAIN_ODD, f"--steps {steps} --lr {lr}", out).done()
        model, optimizer = (checkpoint(odd / f"run{steps}", steps) / file for file in WEIGHTS)
        masters, (dtype, _, data) = tensors(optimizer)[f"master.{name}"], safetensors_read(model.read_bytes())[0][name]
        assert dtype == "BF16" and masters.astype(ml_dtypes.bfloat16).tobytes() == data
        found.append((np.frombuffer(data, "<u2"), masters))
    moved, masters_moved = (np.count_nonzero(a != b) for a, b in zip(*found))
    assert masters_moved > 500 and moved < 100, (masters_moved, moved)


@pytest.mark.full
def test_checkpoint_on_cpu(odd):
    """the CPU trainer reads checkpoints of the device"""
    on_device(odd, TRAIN_ODD, "--steps 3 --out run").done()
    options = "--init run/checkpoints/step_00000003 --val-data data.bin --val-steps 2 --batch-size 3 --eval"
    cpu, device = (
        float(re.search(r"validation loss (\S+)", on(odd, options).done().out)[1]) for on in (on_cpu, on_device)
    )
    assert abs(cpu - device) <= (1e-6 if FP32 else 1e-2) * cpu
    expect_same_text(odd, "run", 30)


def test_run_record(odd):
    """run.json names the device and libraries, and --matmul-dtype must match the build"""
    on_device(odd, TRAIN_ODD, "--steps 1 --out run").done()
    described = read_json(odd / "run/run.json")
    assert len(described["devices"]) == 2 and "multiprocessors" in described["devices"][0]
    assert "runtime" in described["libraries"]["cuda"] and PRECISION in described["libraries"]["cuda"]
    assert described["options"]["matmul-dtype"] == PRECISION
    result = on_device(odd, TRAIN_ODD, "--steps 1 --matmul-dtype", "bf16" if FP32 else "fp32")
    result.one_line(FAILED, "PRECISION=")
    assert ("master weights" in on_device(odd, ODD, "--dry-run").done().out) != FP32


@pytest.mark.sanitized
@pytest.mark.parametrize("variant", VARIANTS)
def test_odd_shapes(tmp_path, variant):
    """a step of every variant at unaligned shapes succeeds"""
    # the other builds test the numbers
    number = list(VARIANTS).index(variant)
    shape = (
        "--layers 2 --hidden 20 --heads 4 --kv-heads 2 --head-dim 12 --ffn 27 --vocab 11 --seq-len 7 --batch-size 2 "
        f"--steps {1 if number % 4 else 3} --recompute {number % 3}"
    )
    more = "--doc-mask --separator 0" if number % 2 else "--val-data data.bin --val-steps 1"
    if number % 4 == 0:
        more += " --stats-every 3 --out run --sample-every 3"
    write_data(tmp_path, 11)
    on_device(tmp_path, DATA, with_variant(variant, shape), more).done()
