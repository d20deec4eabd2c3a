"""--qk-clip scales the queries and keys of heads whose largest logit was above the limit."""

import numpy as np
import pytest
from program import checkpoint, read_json, records, run_trainer, tensors, train, train_in_parts
from ranks import EXPERTS, train_ranks


def logged(run):
    return [(r["qk_clipped"], r["qk_logit_max"]) for r in records(run, "train")]


@pytest.mark.parametrize("heads", ["--heads 2 --kv-heads 1", "--heads 2 --kv-heads 2 --attention baseline"])
def test_limit(corpus, tmp_path, heads):
    """the largest logit of a batch is the limit after an update that changes nothing else"""
    data = ("--train-data", corpus / "train.bin", "--steps 1 --lr 0 --batch-size 4 --seq-len 16 --threads 1")
    shape = f"--layers 1 --hidden 24 --head-dim 8 --ffn 40 {heads}"

    def largest(name, limit, *model):
        run_trainer(*data, *model, "--qk-clip", limit, "--out", tmp_path / name).done()
        return logged(tmp_path / name)[0]

    count, first = largest("first", 1e-3, shape)
    assert count > 0 and first > 2e-3
    limit = 0.7 * first
    count, same = largest("clipped", limit, shape)
    assert count > 0 and same == first
    clipped = ("--init", checkpoint(tmp_path / "clipped", 1))
    count, again = largest("again", 0.9 * limit, *clipped)
    assert count > 0 and np.isclose(again, limit, rtol=1e-5)
    assert largest("below", 1.01 * limit, *clipped)[0] == 0


@pytest.mark.parametrize("model", [EXPERTS, "--attention diff_v1 --window 5 --yoco"])
@pytest.mark.full
def test_ranks(short, model):
    """ranks and --zero do not change a bit of the maxima and of the scaled weights"""
    options = f"--steps 3 --lr 0 --total-batch 192 --batch-size 2 --qk-clip 0.002 {model}"
    found = {}
    for ranks, zero in [(1, 0), (2, 0), (3, 1), (2, 3)]:
        run = short / f"run{ranks}{zero}"
        train_ranks(run, ranks, options, f"--zero {zero} --check-ranks-every 1").done()
        found[ranks, zero] = logged(run), tensors(checkpoint(run, 3) / "model.safetensors")
    one, weights = found.pop((1, 0))
    assert one[0][0] > 0
    for key, (other, theirs) in found.items():
        assert other == one, key
        for name, w in weights.items():
            assert (w == theirs[name]).all(), (key, name)


@pytest.mark.full
def test_optimizers(corpus, tmp_path):
    """the optimizer does not matter, and a resumed run has the same bits"""
    weights = []
    for optimizer in ("adamw", "muon", "normuon"):
        run = tmp_path / optimizer
        train(corpus, run, f"--steps 2 --lr 0 --qk-clip 0.002 --optimizer {optimizer}").done()
        weights.append(tensors(checkpoint(run, 2) / "model.safetensors"))
        assert logged(run)[0][0] > 0
    for name, w in weights[0].items():
        assert (w == weights[1][name]).all() and (w == weights[2][name]).all(), name
    whole, parts = train_in_parts(corpus, tmp_path, 6, "--qk-clip 0.01 --lr 1e-2")
    assert logged(whole) == logged(parts)


def test_prediction(tmp_path):
    """a prediction has the operations of --qk-clip, a maximum of each layer and micro-step"""
    options = "--preset 124m --batch-size 8 --total-batch 16384 --qk-clip 100"
    run_trainer("--dry-run --device H200", options, "--dry-run-out", tmp_path / "out").done()
    calls = {r["name"]: r["calls"] for r in read_json(tmp_path / "out")["operations"]}
    assert (calls["largest_logits"], calls["clip_heads"]) == (24, 12)
