"""Tests scripts/export/convert.py: what it writes, through the trainer, and what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import convert
from program import FAILED, USAGE, checkpoint, fixtures, lose_checkpoints, read_json, run_trainer, tensors

ROOT = Path(__file__).resolve().parent.parent

EXACT = [name for name, start in convert.STARTS.items() if not isinstance(start, str)]
BASES = "odd window_full qk_norm_yoco experts qk_norm sparse qk_norm_window window yoco".split()
TRAIN = "--threads 1 --warmup 0"


def unpack(name, directory):
    """A baseline. Returns the options that train it."""
    about = fixtures.unpack(ROOT / f"dev/reference/fixtures/baseline.{name}.safetensors", directory)
    return f"{TRAIN} --train-data {directory}/tokens.bin --batch-size {about['batch_size']}"


@pytest.fixture
def place(tmp_path):
    """A directory with a Llama of 6 heads of width 8, base."""
    unpack("odd", tmp_path / "base")
    return tmp_path


def gradients(model, options):
    run_trainer("--init", model, options, "--dump-grads", model / "gradients").done()
    return tensors(model / "gradients")


@pytest.fixture
def refuse(place, monkeypatch, capsys):
    """Runs the program there, which ends with this status and one line on stderr that contains the words."""

    def refuse(arguments, status, words):
        with monkeypatch.context() as here, pytest.raises(SystemExit) as ended:
            here.chdir(place)
            here.setattr(sys, "argv", ["convert.py", *arguments.split()])
            convert.main()
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n")) == (status, 1) and words in error, error

    return refuse


def cosines(values):
    """Of the query weights of the heads of each pair of layer 0."""
    a, b = values["model.layers.0.self_attn.q_proj.weight"].astype(float).reshape(6, 2, -1).swapaxes(0, 1)
    return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


@pytest.mark.parametrize(
    "attention, base", [(name, "odd") for name in EXACT] + [("diff_v2", base) for base in BASES[1:]]
)
def test_the_loss_is_that_of_the_base_and_each_tensor_has_a_gradient(tmp_path, attention, base):
    options = unpack(base, tmp_path / "base")
    convert.convert(tmp_path / "base", tmp_path / "out", attention, None)
    wanted, found = gradients(tmp_path / "base", options)["loss"], gradients(tmp_path / "out", options)
    assert abs(found["loss"] / wanted - 1) < (0.01 if attention == "sink" else 1e-6)
    assert not [name for name, gradient in found.items() if not gradient.any() and "bias" not in name]


@pytest.mark.parametrize("attention", ["diff_v2", "diff_v2_no_sigmoid", "sink", "baseline"])
def test_a_run_moves_what_was_filled_in_and_separates_the_pairs(place, attention):
    convert.convert(place / "base", place / "out", attention, None)
    options = "--batch-size 2 --train-data base/tokens.bin --init out --out run --steps 4 --lr 1e-2"
    run_trainer(TRAIN, options, cwd=place).done()
    before, after = (tensors(path / "model.safetensors") for path in (place / "out", checkpoint(place / "run", 4)))
    new = set(before) - set(tensors(place / "base/model.safetensors"))
    assert new or attention == "baseline"
    assert all((abs(after[name] - before[name]) > 1e-4).mean() > 0.9 for name in new)
    assert attention == "sink" or (cosines(after) < 1 - 1e-6).all()


def test_types_of_the_base_are_kept_and_shards_are_read(place):
    """bf16 weights in two files become bf16 weights; the loss is that of the base."""
    weights = tensors(place / "base/model.safetensors")
    halves = {name: ("BF16", a.shape, (a.view("<u4") >> 16).astype("<u2").tobytes()) for name, a in weights.items()}
    names = sorted(halves)
    for shard in range(2):
        part = fixtures.safetensors_bytes({name: halves[name] for name in names[shard::2]}, {})
        (place / f"base/model-{shard}.safetensors").write_bytes(part)
    index = {"weight_map": {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}}
    (place / "base/model.safetensors.index.json").write_text(json.dumps(index))
    (place / "base/model.safetensors").unlink()
    options = f"{TRAIN} --batch-size 2 --train-data {place}/base/tokens.bin"
    for attention in ("diff_v2_gated_elem", "baseline"):
        convert.convert(place / "base", place / attention, attention, None)
        data = (place / attention / "model.safetensors").read_bytes()
        found, _ = fixtures.safetensors_read(data)
        assert found["model.layers.0.self_attn.q_proj.weight"][0] == "BF16"
        assert int.from_bytes(data[:8], "little") % 8 == 0, (
            "a program that maps the file cannot use its tensors in place"
        )
        losses = [gradients(place / model, options)["loss"] for model in ("base", attention)]
        assert abs(losses[1] / losses[0] - 1) < 1e-6


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(place, refuse):
    before = sorted(place.iterdir())
    config = read_json(place / "base/config.json")
    cases = {  # arguments, changes of config.json: exit status and words
        "base --attention diff_v1 out": ({}, FAILED, "no exact start from a baseline: it normalizes the heads before"),
        "base --attention off_by_one out": ({}, FAILED, "its softmax has an extra logit of 0"),
        "base --attention diff_v3 out": ({}, USAGE, "invalid choice: 'diff_v3'"),
        "base --heads 18 out": ({}, FAILED, "--heads 18: base has 6 heads; use --heads 12"),
        "base out": ({}, USAGE, "specify one of --attention NAME and --heads 2NH"),
        "base --attention sink base": ({}, FAILED, "base exists: remove it, or specify another OUT"),
        "none --attention sink out": ({}, FAILED, "none/config.json: No such file or directory"),
        "base --attention diff_v2 out": ({"attention": "sink"}, FAILED, "base has the attention sink: only a baseline"),
        "base --attention gated_head out": ({"head_dim": 4}, FAILED, "config.json has 6 heads of 4"),
        "base --attention gated_elem out": ({"sliding_window": 4}, FAILED, "sliding_window is 4, but model_type is"),
        "base --attention sink out": ({"model_type": "qwen2"}, FAILED, "model_type is 'qwen2'; supported are llama, "),
    }
    for arguments, (changes, status, words) in cases.items():
        (place / "base/config.json").write_text(json.dumps(config | changes))
        refuse(arguments, status, words)
        assert sorted(place.iterdir()) == before, arguments


def test_a_damaged_checkpoint_is_refused(place, refuse):
    run_trainer(TRAIN, "--batch-size 2 --train-data base/tokens.bin --init base --out run --steps 1", cwd=place).done()
    saved = checkpoint(place / "run", 1)
    convert.convert(saved, place / "out", "baseline", 12)
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    refuse(f"{saved} --heads 12 again", FAILED, f"{weights} does not match its checksum")
    weights.write_bytes(weights.read_bytes()[:-1])
    (saved / "trainer_state.json").unlink()
    refuse(f"{saved} --heads 12 again", FAILED, "is not a checkpoint: ValueError")
    assert not list(place.glob("again*"))


def test_the_trainer_names_the_command(place):
    options = f"{TRAIN} --batch-size 2 --train-data base/tokens.bin --init base --steps 1"
    for model in ("--attention diff_v2", "--heads 12"):
        words = f"convert it with scripts/export/convert.py base {model} OUT, and use --init OUT"
        run_trainer(options, model, cwd=place).one_line(USAGE, words)
    run_trainer(options, "--out run", cwd=place).done()  # as earlier versions converted it
    lose_checkpoints(place / "run")
    about = place / "run/run.json"
    about.write_text(about.read_text().replace('"attention": "baseline"', '"attention": "diff_v2"'))
    run_trainer("--resume --out run", cwd=place).one_line(USAGE, "the model of --init base is a baseline")
