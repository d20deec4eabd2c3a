"""Masks of loss: shards in which not all tokens count as targets."""

import shutil

import numpy as np
import pytest
import ranks
import xxhash
from program import FAILED, SMALL, WEIGHTS, all_records, checkpoint, differing, expect_same, read_json, records
from program import run_trainer, tensors, trainer, write_grammar, write_shard

TRAINS = f"--train-data train.bin --val-data val.bin {SMALL} --threads 1".replace("--threads 2 ", "")


def write_mask(shard, counts):
    bits = np.packbits(counts, bitorder="little").tobytes()
    header = np.zeros(256, "<i4")
    header[:3] = 20261126, 1, len(counts)
    header[4:6] = np.frombuffer(xxhash.xxh64_intdigest(bits).to_bytes(8, "little"), "<i4")
    shard.with_name(f"{shard.name}.mask").write_bytes(header.tobytes() + bits)


@pytest.fixture
def place(tmp_path):
    """train.bin and val.bin with 40 windows of 16 targets each, and the numbers of their tokens."""
    for seed, name in enumerate(("train.bin", "val.bin")):
        write_grammar(tmp_path / name, 40 * 16 + 1, seed + 1)
    return tmp_path


def spans(seed):
    """Whether each token counts: in spans, in sum about a third."""
    random = np.random.RandomState(seed)
    return np.repeat(random.rand(200) < 1 / 3, random.randint(1, 30, 200))[: 40 * 16 + 1]


def test_masked_runs(place):
    """a masked run is the same when it resumes, with other micro-steps and with more ranks"""
    write_mask(place / "train.bin", spans(1))
    write_mask(place / "val.bin", spans(2))
    steps = "--steps 6 --total-batch 128 --doc-mask --separator 0 --val-every 3"
    start = lambda options: run_trainer(TRAINS, steps, options, cwd=place).done()
    start("--out one")
    start("--out parts --stop-after 2")
    run_trainer("--out parts --resume --stop-after 6 --threads 1", cwd=place).done()
    expect_same(checkpoint(place / "one", 6), checkpoint(place / "parts", 6))
    run_trainer(TRAINS.replace("--batch-size 4", "--batch-size 2"), steps, "--out two", cwd=place).done()
    ranks.mpirun("-n 2", *trainer(), TRAINS, steps, "--out three", cwd=place).done()
    one = records(place / "one", "train")
    assert sum(r["targets"] for r in one[:5]) == spans(1)[1:].sum()  # an epoch
    for other in ("two", "three"):
        for kind in ("train", "val"):
            a, b = (np.array([r["loss"] for r in records(place / run, kind)]) for run in ("one", other))
            assert len(a) == (6 if kind == "train" else 3) and np.abs(a / b - 1).max() < ranks.TOLERANCE, (a, b)
        assert [r["targets"] for r in records(place / other, "train")] == [r["targets"] for r in one]


def test_gradient_of_counted(place):
    """targets that do not count do not change the loss and the gradient of those that do"""
    tokens = np.fromfile(place / "train.bin", "<u2")[512:]
    for name, count in (("few", 65), ("all", 129), ("masked", 129)):  # one batch of all windows of 16
        write_shard(place / f"{name}.bin", tokens[:count])
    write_mask(place / "masked.bin", np.arange(129) < 65)
    step = {}
    for name, batch in (("few", 64), ("all", 128), ("masked", 128)):
        data = TRAINS.replace("train.bin", f"{name}.bin")
        run_trainer(data, f"--steps 2 --total-batch {batch} --out {name}", cwd=place).done()
        step[name] = records(place / name, "train")[0]
    for key in ("loss", "grad_norm"):
        few, whole, masked = (step[name][key] for name in ("few", "all", "masked"))
        assert abs(masked / few - 1) < 1e-4 < abs(whole / few - 1), step


def test_mean_of_parts(place):
    """the losses of complementary masks are the parts of the loss of all targets"""
    run_trainer(TRAINS, "--steps 2 --out run", cwd=place).done()

    def loss():
        options = "--val-data val.bin --eval-out eval --batch-size 4 --threads 1"
        run_trainer("--init run/checkpoints/step_00000002 --eval", options, cwd=place).done()
        return read_json(place / "eval")["loss"]

    whole, counts = loss(), spans(3)
    parts = []
    for mask in (counts, ~counts):
        write_mask(place / "val.bin", mask)
        parts.append((loss(), mask[1:].sum()))
    assert abs(sum(x * n for x, n in parts) / 640 - whole) < 1e-5 < abs(parts[0][0] - whole)
    write_mask(place / "val.bin", counts | True)
    assert loss() == whole


def test_no_target(place):
    """a step without a target that counts changes nothing, and its loss is null"""
    write_mask(place / "train.bin", np.arange(641) == 100)
    steps = "--steps 5 --total-batch 128 --checkpoint-every 1 --keep 9 --no-checkpoint-background"
    result = run_trainer(TRAINS, steps, "--out run", cwd=place).done()
    found = records(place / "run", "train")
    assert sorted(r["targets"] for r in found) == [0, 0, 0, 0, 1]
    events = [r.get("what") for r in all_records(place / "run")]
    assert result.err == "" and "skipped" not in events and "not_finite" not in events
    for r in found[1:]:
        changed = differing(*(checkpoint(place / "run", r["step"] - k) for k in (1, 0)), WEIGHTS)
        assert len(changed) == 2 * r["targets"] and (r["loss"] is None) == r["skipped"] == (r["targets"] == 0)
    assert all(np.isfinite(x).all() for x in tensors(checkpoint(place / "run", 5) / "model.safetensors").values())


def test_bad_masks(place):
    """a mask that is not of its shard is refused with one line"""
    mask = place / "train.bin.mask"
    refused = lambda words: run_trainer(TRAINS, "--steps 2", cwd=place).one_line(FAILED, words)
    write_mask(place / "train.bin", spans(1)[:-1])
    refused("train.bin.mask is a mask of 640 tokens in 1104 bytes, and its shard has 641 tokens")
    write_mask(place / "train.bin", spans(1))
    good = mask.read_bytes()
    mask.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refused("train.bin.mask is damaged: its checksum is another")
    mask.write_bytes(b"x" + good[1:])
    refused("train.bin.mask is not a mask of loss")
    mask.write_bytes(good[:99])
    refused("train.bin.mask is not a mask of loss: it has 99 bytes")
    write_mask(place / "train.bin", spans(1) & False)
    refused("train.bin has masks of loss in which no token counts")
    write_mask(place / "train.bin", spans(1))
    shutil.copy(mask, place / "val.bin.mask")
    write_mask(place / "val.bin", np.arange(641) > 600)
    run_trainer(TRAINS, "--steps 2 --val-steps 1", cwd=place).one_line(FAILED, "none of the targets of its first 4 win")
