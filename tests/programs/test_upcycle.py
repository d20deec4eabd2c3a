"""--init of a baseline with another --attention, or with twice the heads."""

import fixtures
import numpy as np
import pytest
from program import ROOT, USAGE, WEIGHTS, checkpoint, differing, lose_checkpoints, read_json, run_trainer, tensors

TRAINS = "--init base --train-data base/tokens.bin --batch-size 2 --threads 1 --steps 2 --warmup 0 --seed 3"


@pytest.fixture
def place(tmp_path):
    """A directory with a Llama of 6 heads of width 8, base."""
    fixtures.unpack(ROOT / "dev/reference/fixtures/baseline_a.safetensors", tmp_path / "base")
    return tmp_path


def cosines(directory):
    """Of the query weights of the heads of each pair of layer 0."""
    heads = tensors(directory / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].reshape(6, 2, -1)
    a, b = heads[:, 0].astype(float), heads[:, 1].astype(float)
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


@pytest.mark.parametrize("model", ["--attention diff_v2", "--attention baseline --heads 12"])
def test_upcycled_runs(place, model):
    """an upcycled run states its base, separates its pairs, and resumes with and without a checkpoint"""
    train = lambda *options: run_trainer(*options, cwd=place).done().out
    assert "becomes" in train(TRAINS, model, "--out whole --checkpoint-every 1")
    steps = [checkpoint(place / "whole", step) for step in (1, 2)]
    for about in (read_json(steps[1] / "config.json"), read_json(place / "whole/run.json")["model"]):
        assert about["upcycled_from"] == "base"
    first, second = map(cosines, steps)
    assert (second < first).all() and (first < 1 - 1e-9).all() and (first > 0.999).all(), (first, second)
    train(TRAINS, model, "--out part --stop-after 1")
    part = checkpoint(place / "part", 2)
    train("--out part --resume --threads 1")
    for _ in range(2):
        assert not differing(part, steps[1], ["config.json", *WEIGHTS])
        lose_checkpoints(place / "part")
        train("--out part --resume --threads 1")  # from the base once more
    again = train(TRAINS.replace("--init base", "--init whole/checkpoints/step_00000002"), "--out again")
    assert "becomes" not in again
    assert read_json(checkpoint(place / "again", 2) / "config.json")["upcycled_from"] == "base"


def test_refused(place):
    """what has no exact start is refused with the reason"""
    for options, words in {
        "--attention diff_v1": "no exact start from the baseline of --init base: it normalizes the heads before o_proj",
        "--attention diff_v2_no_lambda": "with factor 1 a pair of equal heads gives 0",
        "--attention diff_v2 --heads 12": "--heads 12 contradicts the loaded model, which has 6",
        "--attention baseline --heads 18": "--heads 18 contradicts the loaded model, which has 6",
        "--attention diff_v2 --match-params --ffn 10": "requires an MLP width of",
    }.items():
        run_trainer(TRAINS, options, cwd=place).one_line(USAGE, words)
    config = place / "base/config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"attention": "sink"'))
    words = "--attention diff_v2 contradicts the loaded model, which has sink"
    run_trainer(TRAINS, "--attention diff_v2", cwd=place).one_line(USAGE, words)
