"""What --eval prints and writes."""

import math
import shutil
from collections import Counter

import numpy as np
import pytest
from program import beside, checkpoint, differing, expect_printed_losses, read_json, run, run_trainer
from program import same_numbers, train, trainer, write_grammar

POSITIONS = 40
MEASURE = f"--eval --val-steps 3 --batch-size 3 --seq-len {POSITIONS} --threads 1"
RECALL_SEQUENCES = 128


def test_eval_output(corpus, tmp_path):
    """--eval writes its measurements, and a second --eval writes the same"""
    train(corpus, tmp_path / "run", "--steps 2 --attention diff_v2").done()
    common = ["--init", checkpoint(tmp_path / "run", 2), MEASURE, "--val-data", corpus / "val.bin"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        result = run_trainer(*common, "--eval-out eval", cwd=tmp_path / name).done()
        assert "loss by position\n" in result.out and "exact match" in result.out
        assert {path.name for path in (tmp_path / name).iterdir()} == {"eval"}
    expect_printed_losses(result.out, POSITIONS)
    assert not differing(tmp_path / "one", tmp_path / "two", ["eval"])
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
    [("--window 6 --full-every 2", True), ("--window 6 --yoco", True), ("--window 6", False)],
    ids=["full-every", "yoco", "all"],
)
def test_eval_of_windows(corpus, tmp_path, options, full):
    """attention statistics are of the keys that windows and YOCO let a position see"""
    train(corpus, tmp_path / "run", "--steps 2 --attention diff_v2", options).done()
    common = ["--init", checkpoint(tmp_path / "run", 2), MEASURE, "--val-data", corpus / "val.bin"]
    assert "exact match" in run_trainer(*common, "--eval-out", tmp_path / "eval").done().out
    layers = read_json(tmp_path / "eval")["attention"]["layers"]
    for layer, found in enumerate(layers):
        visible = [t + 1 if layer == 1 and full else min(t + 1, 6) for t in range(POSITIONS)]
        entropy = sum(math.log(count) for count in visible) / POSITIONS
        # The maps of two updates are almost uniform.
        assert abs(found["entropy_map0"] - entropy) < 0.02 and abs(found["entropy_map1"] - entropy) < 0.02, layer
        assert abs(found["first_mass_map1"] - sum(1 / n for t, n in enumerate(visible) if t < n) / POSITIONS) < 0.02


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
