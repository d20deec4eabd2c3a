"""What --eval prints and writes: its measurements, attention maps, and losses with rounding."""

import math
import shutil
from collections import Counter

import numpy as np
import pytest
from program import USAGE, beside, checkpoint, differing, expect_printed_losses, read_json, run, run_trainer
from program import same_numbers, tensors, train, trainer, write_grammar

POSITIONS = 40
MEASURE = f"--eval --val-steps 3 --batch-size 3 --seq-len {POSITIONS} --threads 1"
RECALL_SEQUENCES = 128


def test_eval_output(corpus, tmp_path):
    """--eval writes its measurements, and a second --eval writes the same"""
    train(corpus, tmp_path / "run", "--steps 2 --attention diff_v2").done()
    common = ["--init", checkpoint(tmp_path / "run", 2), MEASURE, "--val-data", corpus / "val.bin"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result = run_trainer(*common, "--eval-out eval --dump-attention maps", cwd=tmp_path / name).done()
        assert "loss by position\n" in result.out and "exact match" in result.out
        assert {path.name for path in (tmp_path / name).iterdir()} == {"eval", "maps"}
    expect_printed_losses(result.out, POSITIONS)
    assert not differing(tmp_path / "one", tmp_path / "two", ["eval", "maps"])
    found = read_json(tmp_path / "one/eval")
    assert len(found["loss_by_position"]) == POSITIONS
    assert abs(sum(found["loss_by_position"]) / POSITIONS - found["loss"]) < 1e-6
    assert found["loss_by_shard"] == [{"file": "val.bin", "loss": found["loss"]}]
    groups = found["loss_by_frequency"]
    targets, counts = (
        Counter(np.fromfile(corpus / "val.bin", "<u2", offset=1024)[1:][: found["windows"] * POSITIONS]),
        Counter(),
    )
    for count in targets.values():
        counts[2.0 ** math.floor(math.log2(count / targets.total()))] += count
    assert {group["share"]: group["targets"] for group in groups} == counts
    assert sum(group["tokens"] for group in groups) == len(targets)
    weighted = sum(group["loss"] * group["targets"] for group in groups)
    assert abs(weighted / targets.total() - found["loss"]) < 1e-6
    assert 0 <= found["recall"][1]["exact"] < 0.5, "an untrained model recalls"
    assert len(found["attention"]["layers"]) == 2
    maps = tensors(tmp_path / "one/maps")
    a2, noise = maps["layer.1.head.1.a2"].reshape(POSITIONS, POSITIONS), maps["layer.1.head.1.lambda"]
    assert abs(a2[-1].sum(dtype=float) - 1) < 1e-5 and a2[0, 1] == 0 and a2[0, 0] == 1
    assert 0 < noise.ravel()[7] < 1 and maps["tokens"].ravel()[0] >= ord("a")
    result = run_trainer("--train-data", corpus / "train.bin", "--eval-out x --dump-attention y")
    assert result.status == USAGE and result.err.count("\n") == 2 and "--eval-out requires --eval" in result.err


def test_eval_of_shards(corpus, tmp_path):
    """--eval writes the loss of each validation shard, and null for a shard that it does not read"""
    train(corpus, tmp_path / "run", "--steps 2").done()
    (tmp_path / "val").mkdir()
    for name in ("val_000000_all.bin", "val_000001_git.bin"):
        shutil.copy(corpus / "val.bin", tmp_path / "val" / name)
    common = ["--init", checkpoint(tmp_path / "run", 2), "--val-data", tmp_path / "val/*.bin"]
    for steps, read in ((1, 1), (100000, 2)):
        out = (
            run_trainer(*common, MEASURE.replace("steps 3", f"steps {steps}"), "--eval-out", tmp_path / "eval")
            .done()
            .out
        )
        found = read_json(tmp_path / "eval")
        first, second = (shard["loss"] for shard in found["loss_by_shard"])
        assert abs(first - found["loss"]) < 1e-6 and (second is None if read == 1 else abs(second - first) < 1e-6)
        assert f"  val_000000_all.bin {first:23.4f}\n" in out


@pytest.mark.parametrize(
    ("options", "full"),
    [("--window 6 --full-every 2", True), ("--window 6 --yoco --qk-norm", True), ("--window 6", False)],
    ids=["full-every", "yoco", "all"],
)
def test_eval_of_windows(corpus, tmp_path, options, full):
    """--dump-attention writes the maps of windows and YOCO"""
    train(corpus, tmp_path / "run", "--steps 2 --attention diff_v2", options).done()
    common = ["--init", checkpoint(tmp_path / "run", 2), MEASURE, "--val-data", corpus / "val.bin"]
    assert "exact match" in run_trainer(*common, "--dump-attention", tmp_path / "maps").done().out
    maps = tensors(tmp_path / "maps")
    for layer in (0, 1):
        for t, row in enumerate(maps[f"layer.{layer}.head.1.a2"].reshape(POSITIONS, POSITIONS)):
            visible = t + 1 if layer == 1 and full else min(t + 1, 6)
            assert abs(row.sum(dtype=float) - 1) < 1e-5 and (row > 0).sum() == visible, (layer, t)


def test_evaluation_batch_sizes(corpus, tmp_path):
    """an evaluation does not depend on the sizes of its batches and pieces"""
    # 20 windows and 128 recall sequences: a batch of all, of one, and two that leave a smaller last one, of which the
    # trainer in test_diffv2 computes seven rows of logits at a time (tests/small_sizes.h).
    write_grammar(tmp_path / "short.bin", 20 * POSITIONS + 1, 3)
    train(corpus, tmp_path / "run", "--steps 30 --lr 1e-2 --attention diff_v2").done()
    init = checkpoint(tmp_path / "run", 30)
    (init / "trainer_state.json").unlink()  # the trainer in test_diffv2 has checksums of other pieces

    def evaluate(program, batch_size):
        options = f"--eval --val-steps 100 --batch-size {batch_size} --seq-len {POSITIONS} --threads 1 --eval-out eval"
        run(*program, "--init", init, "--val-data short.bin", options, cwd=tmp_path).done()
        return read_json(tmp_path / "eval")

    whole = evaluate(trainer(), 20)
    assert whole["windows"] == 20 and whole["recall"][0]["answers"] == 4 * RECALL_SEQUENCES
    for program, batch_size in [(trainer(), 1), (trainer(), 3), ([beside("test_diffv2"), "--trainer"], 7)]:
        same_numbers(whole, evaluate(program, batch_size))
