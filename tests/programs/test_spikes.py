"""Runs with spikes, uneven losses, or losses that are not finite: skipped updates, records, checkpoints, messages."""

import shutil
from collections import Counter

import numpy as np
import pytest
from program import FAILED, SMALL, Random, all_records, checkpoint, expect_same, overwrite, read_json, run_trainer
from program import saved, tensors, train

DIVERGING = "--lr 1e30"  # one update, and the next loss or gradient overflows; of the weights themselves none does


def steps_and_events(run):
    """The train records, and the number of events of each kind. An event is one of the step of the record before it."""
    steps, events = [], Counter()
    for record in all_records(run):
        if record["kind"] == "train":
            steps.append(record)
        elif record["kind"] == "event":
            events[record["what"]] += 1
            if record["what"] == "spike":
                value, z = ("loss", "loss_z") if record["of"] == "loss" else ("grad_norm", "grad_z")
                assert (record["value"], record["z"]) == (steps[-1][value], steps[-1][z])
        assert record["kind"] not in ("train", "event") or record["step"] == len(steps)
    return steps, events


def resume(run, *options):
    return run_trainer("--out", run, "--resume --threads 2", *options)


def last_line(result):
    return result.err.splitlines()[-1] if result.err else ""


def expect_finite_weights(run, step):
    for name, values in tensors(checkpoint(run, step) / "model.safetensors").items():
        assert np.isfinite(values).all(), name


# ---- spikes


def z_scores(values):
    """The z-score of each value by its definition, from the 128 values before it; None if there are fewer."""
    scores = 128 * [None]
    for i in range(128, len(values)):
        window = sorted(values[i - 128 : i])
        scores.append((values[i] - window[64]) / (window[96] - window[64]) * 0.6744897501960817)
    return scores


@pytest.mark.parametrize("skips", [False, True], ids=["plain", "skips"])
def test_skip_options(corpus, tmp_path, skips):
    """a run skips steps as its options specify, and logs them"""
    run = tmp_path / "run"
    result = train(corpus, run, "--steps 260 --lr 1e-1", skips * "--skip-loss-z 0.1 --skip-grad-z 2").done()
    steps, events = steps_and_events(run)
    for key, z in (("loss", "loss_z"), ("grad_norm", "grad_z")):
        for step, score in zip(steps, z_scores([step[key] for step in steps]), strict=True):
            assert (step[z] is None) == (score is None), step
            assert score is None or abs(step[z] - score) < 1e-6 * (1 + abs(score)), step
    judged = steps[128:]
    by_loss, by_grad = ([skips and s[z] >= least for s in judged] for z, least in (("loss_z", 0.1), ("grad_z", 2)))
    assert [step["skipped"] for step in steps] == 128 * [False] + [a or b for a, b in zip(by_loss, by_grad)]
    skipped = sum(step["skipped"] for step in steps)
    loss, grad = (sum(step[z] >= 7 for step in judged) for z in ("loss_z", "grad_z"))
    assert len(steps) == 260 and events["not_finite"] == 0
    assert (events["skipped"], events["spike"]) == (skipped, loss + grad)
    if skips:
        only = [a - b for a, b in zip(by_loss, by_grad)]
        assert 1 in only and -1 in only and skipped < 100
    assert result.err.count("\n") == result.err.count("skipped") == skipped
    share = lambda count: f"{count / 1.32:.2f}% ({count} of 132 steps)"
    updates = f"updates skipped: {skipped} as spikes, 0 not finite"
    assert f"\nspikes: loss {share(loss)}, gradient norm {share(grad)}; {updates}\n" in result.out
    assert int(read_json(checkpoint(run, 260) / "trainer_state.json")["updates"]) == 260 - skipped


# ---- divergence


def test_diverged_run(corpus, tmp_path):
    """a diverged run stops after 10 steps and names the last valid checkpoint"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 5").done()
    shutil.copytree(checkpoint(run, 5), tmp_path / "saved")
    # the checkpoints of the broken weights must not push the good one out
    result = resume(run, "--steps 60 --checkpoint-every 1 --keep 2", DIVERGING)
    assert result.status == FAILED
    assert result.err.count("\n") == 11 and result.err.count("in a row") == 10
    last = result.err[result.err.index("the run is stopped") :]
    assert "--lr" in last and "run/checkpoints/step_00000005\n" in last
    steps, events = steps_and_events(run)
    assert events["not_finite"] == 10 and events["stopped"] == 1 and 16 <= len(steps) < 60
    for step in steps:
        finite = None not in (step["loss"], step["grad_norm"])
        assert finite == (step["step"] <= len(steps) - 10) and step["skipped"] == (not finite), step
    expect_same(checkpoint(run, 5), tmp_path / "saved")
    assert saved(run) == [5, 6]
    expect_finite_weights(run, 6)
    # the good one can be gone on with
    shutil.rmtree(checkpoint(run, 6))
    resume(run, "--steps 8 --lr 1e-3").done()


def test_divergence_count(corpus, tmp_path):
    """a checkpoint contains the number of consecutive steps that are not finite"""
    # The row goes on over a resume, and a checkpoint within it is not called good.
    run = tmp_path / "run"
    result = train(corpus, run, "--steps 6 --weight-decay 0", DIVERGING)
    assert (
        result.status == FAILED
        and "spikes: no step has a score, which requires 128 earlier finite steps; " in result.out
    )
    before = result.err.count("in a row")
    assert before >= 3
    expect_finite_weights(run, 6)
    result = resume(run, "--steps 60")
    assert result.status == FAILED and "last good checkpoint: none" in result.err
    assert result.err.count("in a row") == 10 - before
    steps, events = steps_and_events(run)
    assert len(steps) == 6 + 10 - before and events["not_finite"] == 10
    # without --out there is none to name; samples of a broken model are no reason to stop earlier
    result = run_trainer("--train-data", corpus / "train.bin", SMALL, "--steps 60 --lr 1e300 --sample-every 1")
    assert result.status == FAILED and "last good checkpoint: none" in result.err
    assert result.err.count("in a row") == 10
    assert "logits are not finite" in result.out


def test_final_loss(corpus, tmp_path):
    """a run whose final loss is far above its first reports it in the last line"""
    for options, diverged in [
        ("--steps 20 --lr 1e-3", False),
        ("--steps 40 --lr 3 --grad-clip 0 --weight-decay 0 --stop-after 30 --resume", True),
        ("--steps 40 --lr 3 --resume", True),
        ("--steps 43 --lr 0 --resume", True),  # no worse than its own start
    ]:
        result = train(corpus, tmp_path / "run", options).done()
        assert ("the run has diverged; try a lower --lr" in last_line(result)) == diverged, options


def test_uneven_losses(corpus, tmp_path):
    """a run whose steps have uneven losses is not called diverged"""
    # Windows of 16 tokens, by chance of one letter or of any of 8: the losses of single steps differ by 2.
    shutil.copy(corpus / "train.bin", tmp_path)
    random, tokens = Random(3), []
    for _ in range(12000):
        letters = 8 if random.below(2) else 1
        tokens += [ord("a") + random.below(letters) for _ in range(16)]
    overwrite(tmp_path / "train.bin", 1024, np.array(tokens, "<u2").tobytes())
    model = SMALL.replace("--batch-size 4", "--batch-size 1").replace("--warmup 2 --threads 2", "--threads 1")
    run, first, more = tmp_path / "run", 150, 5
    run_trainer("--train-data", tmp_path / "train.bin", model, f"--lr 1e-2 --steps {first} --out", run).done()
    for i in range(1, 7):
        result = run_trainer("--out", run, f"--resume --steps {first + more * i} --threads 1")
        assert result.done().err == "", i
    steps, _ = steps_and_events(run)
    assert len(steps) == first + 6 * more
    starts = [steps[i : i + more] for i in range(first, len(steps), more)]
    assert any(start[-1]["loss"] > start[0]["loss"] + 1 for start in starts), "none ended 1 above its first loss"
    # unlike this one, though it is no worse than an untrained model
    result = run_trainer("--out", run, f"--resume --steps {len(steps) + 20} --threads 1 --lr 0.3 --warmup 0")
    assert "above the mean at the start" in last_line(result), result


def test_final_loss_not_finite(corpus, tmp_path):
    """a run fails if its last step is not finite, and other modes fail if their loss is not finite"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 2 --lr 1e-3").done()
    # also one that ends before its last step, and its checkpoint pushes no good one out
    for options, step in [("--steps 9 --stop-after 5", 5), ("--steps 6", 6)]:
        result = train(corpus, run, options, "--keep 1 --resume", DIVERGING)
        assert result.status == FAILED
        assert f"the run ends at step {step} with a loss or gradient that is not finite" in last_line(result)
        assert step == 6 or last_line(result).endswith("step_00000002")
    steps, events = steps_and_events(run)
    assert len(steps) == 6 and events["stopped"] >= 1
    result = train(corpus, run, "--resume --steps 6")
    assert result.status == FAILED and "nothing to do" in result.out and "step 6 is not finite" in last_line(result)
    assert saved(run) == [2, 5, 6]

    init = checkpoint(run, 2)
    (init / "trainer_state.json").unlink()
    overwrite(init / "model.safetensors", -4, np.array([np.nan], "<f4").tobytes())
    data = ["--val-data", corpus / "val.bin", "--train-data", corpus / "train.bin", "--threads 2"]
    for mode in ("--eval --eval-out eval", "--dump-grads grads", "--generate 5"):
        run_trainer("--init", init, *data, mode, cwd=tmp_path).one_line(FAILED, "not finite: ")
    assert (tmp_path / "eval").exists() and (tmp_path / "grads").exists()


def test_finite_weights(corpus, tmp_path):
    """weights that are not finite are never saved"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 2").done()
    # the rate itself is beyond what a float holds, so one update breaks the weights
    result = resume(run, "--steps 4 --lr 1e300")
    assert result.status == FAILED
    assert "are not saved" in result.err and "run/checkpoints/step_00000002\n" in result.err
    assert saved(run) == [2]
    expect_finite_weights(run, 2)
