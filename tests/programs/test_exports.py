"""What the exports write, without the programs that read it; tests/export_test.py and dev/reference/test_export.py open
exports with these."""

import sys

import numpy as np
import pytest
from program import ROOT, checkpoint, read_json, run, run_trainer, tensors

EXPORT_HUB = [sys.executable, ROOT / "scripts/export/export_hub.py"]
DIFF_V1 = "--attention diff_v1 --layers 2 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 40 --seq-len 16"


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run of a DIFF V1 with a checkpoint of step 4. Tests do not write there."""
    out = tmp_path_factory.mktemp("trained") / "run"
    run_trainer(
        "--train-data", corpus / "train.bin", "--out", out, DIFF_V1, "--batch-size 4 --warmup 2 --steps 4"
    ).done()
    return out


def test_directory(corpus, trained, tmp_path):
    """export_hub.py writes a directory that the trainer opens, with the same losses"""
    run(*EXPORT_HUB, checkpoint(trained, 4), tmp_path / "hub").done()
    assert read_json(tmp_path / "hub/config.json")["architectures"] == ["DiffV2ForCausalLM"]
    found = []
    for source in (checkpoint(trained, 4), tmp_path / "hub"):
        out = tmp_path / f"eval{len(found)}"
        run_trainer("--init", source, "--eval --val-steps 2 --val-data", corpus / "val.bin", "--eval-out", out).done()
        found.append(read_json(out)["loss"])
    assert found[0] == found[1]


def test_order_of_heads(trained, tmp_path):
    """export_hub.py --as diffllama writes the first heads of all pairs, and halves of values, before the second ones"""
    run(*EXPORT_HUB, checkpoint(trained, 4), tmp_path / "llama", "--as diffllama").done()
    ours, theirs = tensors(checkpoint(trained, 4) / "model.safetensors"), tensors(tmp_path / "llama/model.safetensors")
    for kind, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
        name = f"model.layers.1.self_attn.{kind}.weight"
        pairs = ours[name].reshape(heads // 2, 2, 8, 24)
        assert np.array_equal(theirs[name], np.concatenate([pairs[:, 0], pairs[:, 1]]).reshape(theirs[name].shape))
