"""Runs of models with experts: resumes, the losses of routers, and mistakes in options."""

import math

import numpy as np
from program import SMALL, USAGE, checkpoint, differing, records, run_trainer, tensors, train

FOUR = "--experts 4 --experts-active 2 --expert-ffn 16"


def expect_resumed(corpus, tmp_path, experts, steps):
    """Trains "whole" without and "parts" with an interruption after half of the steps; their weights are the same."""
    options = f"{experts} --steps {steps} --checkpoint-every {steps // 2}"
    train(corpus, tmp_path / "whole", options).done()
    train(corpus, tmp_path / "parts", options, f"--stop-after {steps // 2}").done()
    run_trainer("--resume --out", tmp_path / "parts", f"--stop-after {steps}").done()
    whole, parts = (checkpoint(tmp_path / name, steps) for name in ("whole", "parts"))
    assert not differing(whole, parts, ["model.safetensors"])
    return whole, parts


def gradients(corpus, path, *options):
    """What is printed, and the bytes of the file of gradients."""
    data = ["--train-data", corpus / "train.bin", SMALL]
    result = run_trainer(*data, *options, "--dump-grads", path).done()
    return result.out, path.read_bytes()


def test_router_bias_resumes(corpus, tmp_path):
    """a run with --router-bias resumes bit for bit"""
    experts = "--experts 8 --experts-active 2 --expert-ffn 16 --router-bias --router-bias-rate 0.01 --lr 2e-2"
    whole, parts = expect_resumed(corpus, tmp_path, experts, 8)
    assert '"model_type": "diffv2"' in (parts / "config.json").read_text()  # the class that has the bias
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
    whole, _ = expect_resumed(corpus, tmp_path, f"{FOUR} --router-aux 1 --total-batch 128", 6)
    ((a,), (b,)) = (records(tmp_path / name, "train", step=6) for name in ("whole", "parts"))
    for key in ("loss", "router_aux", "router_z"):
        assert a[key] == b[key] and a[key] > 0, key
    # of the whole update: 1 if all experts are equal, and the square of ln 4 if all logits are 0
    assert abs(a["router_aux"] - 1) < 0.2 and abs(a["router_z"] / math.log(4) ** 2 - 1) < 0.2
    val = ["--eval --val-data", corpus / "val.bin"]
    run_trainer("--init", whole, *val, "--dump-qkv", tmp_path / "qkv").done()
    # a dense model has no experts, and a model with experts is not a dense one
    result = run_trainer("--init", whole, "--experts 0", *val)
    result.one_line(USAGE, "--experts 0 contradicts the loaded model, which has 4")
    train(corpus, tmp_path / "dense", "--steps 2").done()
    result = run_trainer("--init", checkpoint(tmp_path / "dense", 2), "--experts 4", *val)
    result.one_line(USAGE, "--experts 4 contradicts the loaded model, which has 0")
