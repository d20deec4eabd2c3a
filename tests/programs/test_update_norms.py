"""The norms of updates (--stats-every), and --change."""

import numpy as np
import pytest
from program import DONE, USAGE, checkpoint, records, resume, tensors, train


def norm(x):
    return np.linalg.norm(x.astype(float))


def arrays(run, step, file):
    return tensors(checkpoint(run, step) / f"{file}.safetensors")


CHANGE = "'--change=3:lr@model.layers.0.mlp=0 3:lr@model.layers.1.self_attn.q_proj.weight[1:3]=0.25'"
MODELS = [CHANGE, "--experts 3 --experts-active 2 --expert-ffn 16 --no-tie-embeddings", "--optimizer muon"]


@pytest.mark.parametrize("model", MODELS)
def test_update_norms_of_layers(corpus, tmp_path, model):
    """the update norms of the layers and of the step are those of the changes that AdamW makes"""
    options = "--weight-decay 0 --steps 3 --checkpoint-every 1 --keep 0 --stats-every 3"
    train(corpus, tmp_path / "run", model, options).done()
    before, after = (arrays(tmp_path / "run", step, "model") for step in (2, 3))
    moments = arrays(tmp_path / "run", 3, "optimizer")
    squares = {}
    for name in before:
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        if f"exp_avg_sq.{name}" in moments:  # else a matrix of Muon
            squares[layer] = squares.get(layer, 0) + norm(after[name].astype(float) - before[name]) ** 2
        else:
            assert model == "--optimizer muon" and name.endswith("_proj.weight")
    found = {r["layer"]: r["update_norm"] for r in records(tmp_path / "run", "stats", step=3)}
    assert {*found, None} == {*squares} and len(found) == 2
    for layer, update_norm in found.items():
        assert np.isclose(update_norm, squares[layer] ** 0.5, rtol=2e-3), layer
    (step,) = records(tmp_path / "run", "train", step=3)
    assert np.isclose(step["update_norm"], sum(squares.values()) ** 0.5, rtol=1e-4) and step["update_scale"] == 1


def test_changed_update_norms(corpus, tmp_path):
    """--change update-norm scales an update down to a norm, and no update up"""
    options = "--steps 3 --checkpoint-every 1 --keep 0 --weight-decay 0 --change=2:update-norm=1e-3 3:update-norm=1e9"
    train(corpus, tmp_path / "run", options.replace("--change=", "'--change=") + "'").done()
    weights = [arrays(tmp_path / "run", step, "model") for step in (1, 2, 3)]
    before, small, usual = (np.concatenate([x[name].ravel().astype(float) for name in x]) for x in weights)
    steps = {r["step"]: r for r in records(tmp_path / "run", "train")}
    assert "update_norm" not in steps[1] and steps[3]["update_scale"] == 1
    assert np.isclose(norm(small - before), 1e-3, rtol=1e-3)
    assert np.isclose(steps[2]["update_norm"] * steps[2]["update_scale"], 1e-3)
    assert np.isclose(norm(usual - small), steps[3]["update_norm"], rtol=1e-3)


def test_changes_of_a_resumed_run(corpus, tmp_path):
    """a resume refuses changes of steps that are done, and warns of changes after its end"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 4 --stop-after 2").done()
    before = (run / "run.json").read_bytes(), (run / "log.jsonl").read_bytes()
    resume(run, "--change '3:lr=0.5 2:lr=0'").one_line(USAGE, "--change 2:lr=0: this start has the steps 3 to 4")
    assert before == ((run / "run.json").read_bytes(), (run / "log.jsonl").read_bytes())
    resume(run, "--stop-after 3 --change 4:lr=0").one_line(DONE, "4:lr=0 has no effect: this start ends after")
    resume(run, "--change 4:lr=0").done()
    assert "nothing to do" in resume(run, "--change 4:lr=0").done().out


def test_overlapping_changes(corpus, tmp_path):
    """rates of overlapping changes multiply, and a window that is replaced is not reordered, in any order"""

    def weights(change):
        run = tmp_path / change
        train(corpus, run, "--steps 3 --total-batch 128", f"'--change={change}'").done()
        return hash((checkpoint(run, 3) / "model.safetensors").read_bytes())

    assert weights("2:lr=0.5 1-2:lr=0.5") == weights("2:lr=0.25 1:lr=0.5")
    both = weights("2:replace=0-0 2:order=reverse")
    assert both == weights("2:order=reverse 2:replace=0-0") and both != weights("2:order=reverse")
