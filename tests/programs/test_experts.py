"""Runs of models with experts: resumes, the losses of routers, and mistakes in options."""

import math

import numpy as np
from program import FAILED, SMALL, USAGE, checkpoint, records, run_trainer, tensors, train_in_parts

FOUR = "--experts 4 --experts-active 2 --expert-ffn 16"


def gradients(corpus, path, *options):
    """What is printed, and the bytes of the file of gradients."""
    data = ["--train-data", corpus / "train.bin", SMALL]
    result = run_trainer(*data, *options, "--dump-grads", path).done()
    return result.out, path.read_bytes()


def test_router_bias_resumes(corpus, tmp_path):
    """a run with --router-bias resumes bit for bit"""
    experts = "--experts 8 --experts-active 2 --expert-ffn 16 --router-bias --router-bias-rate 0.01 --lr 2e-2"
    whole = checkpoint(train_in_parts(corpus, tmp_path, 8, experts)[0], 8)
    assert '"model_type": "diffv2"' in (whole / "config.json").read_text()  # the class that has the bias
    name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    steps = tensors(whole / "model.safetensors")[name].astype(float) / 0.01
    assert steps.shape == (8,) and (steps != 0).sum() >= 2
    # eight updates of -0.01, 0 or 0.01
    assert (abs(steps) < 8.01).all() and (abs(steps - np.round(steps)) < 1e-4).all(), steps
    result = run_trainer("--init", whole, "--no-router-bias --eval --val-data", corpus / "val.bin")
    result.one_line(USAGE, "--no-router-bias contradicts the loaded model")


def test_router_loss_options(corpus, tmp_path):
    """--router-aux and --router-z weigh losses of their own"""
    weights = ["--router-aux 0 --router-z 0", "--router-aux 0 --router-z 1", "--router-aux 1 --router-z 0"]
    found = [gradients(corpus, tmp_path / "grads", FOUR, options)[1] for options in weights]
    assert len(set(found)) == 3, "two weights give the same gradients"
    # with a bias the default of --router-aux is 0
    found = [gradients(corpus, tmp_path / "grads", FOUR, f"--router-bias {aux}")[1] for aux in ("", "--router-aux 0")]
    assert found[0] == found[1]


def test_expert_runs(corpus, tmp_path):
    """losses of routers are not part of the loss, and runs with experts resume bit for bit"""
    # The gradients and updates include the losses of the routers. A run with micro-steps is resumed.
    (text, without), (other, with_aux) = (
        gradients(corpus, tmp_path / "grads", FOUR, f"--router-aux {aux}") for aux in (0, 1)
    )
    losses = [[line.split(" ")[1:2] for line in out.splitlines()] for out in (text, other)]
    assert losses[0] and losses[0] == losses[1]
    assert without != with_aux, "--router-aux does not change the gradients"
    whole, parts = train_in_parts(corpus, tmp_path, 6, f"{FOUR} --router-aux 1 --total-batch 128")
    ((a,), (b,)) = (records(run, "train", step=6) for run in (whole, parts))
    for key in ("loss", "router_aux", "router_z"):
        assert a[key] == b[key] and a[key] > 0, key
    # of the whole update: 1 if all experts are equal, and the square of ln 4 if all logits are 0
    assert abs(a["router_aux"] - 1) < 0.2 and abs(a["router_z"] / math.log(4) ** 2 - 1) < 0.2
    val, init = ["--eval --val-data", corpus / "val.bin"], ["--init", checkpoint(whole, 6)]
    run_trainer(*init, *val).done()
    result = run_trainer(*init, "--experts 0", *val)
    result.one_line(USAGE, "--experts 0 contradicts the loaded model, which has 4")


def test_too_many_experts(corpus, tmp_path):
    """a run whose checkpoints would have more tensors than a resume reads is refused at its start"""
    shape = "--layers 30 --hidden 8 --heads 1 --kv-heads 1 --head-dim 8 --experts 1024 --experts-active 1"
    options = "--expert-ffn 1 --seq-len 16 --steps 1 --out"
    result = run_trainer("--train-data", corpus / "train.bin", shape, options, tmp_path / "run")
    result.one_line(FAILED, "tensors of optimizer state, more than --resume can read: use fewer --experts or --layers")
    assert not (tmp_path / "run").exists()
