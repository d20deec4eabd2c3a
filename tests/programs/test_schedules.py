"""What a resume changes: the decay of the learning rate, the data, the lengths and the batch; and --minutes."""

import os
import re
import shutil

import pytest
from program import FAILED, SHAPE, SIGNALLED, USAGE, Started, all_records, checkpoint, expect_same, has_open, overwrite
from program import read_json, records, resume, run_trainer, trainer, without_times
from ranks import EXPERTS, SMALL_OF_RANKS, resume_ranks, run_ranks

BATCH = "--batch-size 4 --warmup 2 --lr 1e-3 --threads 2"


def start(corpus, out, *options):
    return run_trainer("--train-data", corpus / "train.bin", SHAPE, BATCH, "--out", out, *options)


def start_events(run):
    return [record for record in all_records(run) if record.get("what") == "start"]


# ---- the learning rate


@pytest.mark.parametrize(("stable", "now"), [("wsd-sqrt --steps 1000", ""), ("constant --steps 7", "wsd-sqrt")])
def test_decay_branches_off(corpus, tmp_path, stable, now):
    """a decay that branches off a stable checkpoint equals the run that decays there, also when it is interrupted"""
    whole, trunk, branch = (tmp_path / name for name in ("whole", "trunk", "branch"))
    options = "--schedule wsd-sqrt --steps 10 --decay-steps 4"
    start(corpus, whole, options).done()
    rates = [record["lr"] for record in records(whole, "train")]
    assert rates[4:] == pytest.approx([1e-3, 1e-3, 5.5e-4, 3.636e-4, 2.206e-4, 1e-4], 1e-3)
    planned = run_trainer("--dry-run", BATCH, options).done().out
    assert "wsd-sqrt: warmup to step 2, constant to step 6, decay to step 10\n" in planned
    start(corpus, trunk, "--schedule", stable, "--stop-after 6").done()
    shutil.copytree(trunk, branch, symlinks=True)
    decay = "--decay-steps 4 --steps 10 --stop-after 8 --threads 2"
    result = resume(branch, decay, *(["--schedule", now] if now else [])).done()
    assert "\nthe learning rate falls from 0.001 to 0.00055 at step 7\n" in result.out
    assert start_events(branch)[-1]["rates"] == pytest.approx([1e-3, 5.5e-4])
    assert "the learning rate" not in resume(branch, "--threads 2").done().out
    expect_same(checkpoint(whole, 10), checkpoint(branch, 10))
    resume(trunk, "--stop-after 7").done()
    assert records(trunk, "train")[-1]["lr"] == 1e-3
    extended = resume(branch, "--steps 20").done()
    assert "\nthe learning rate rises from 0.0001 to 0.001 at step 11\n" in extended.out


def test_defaults_are_derived_again(corpus, tmp_path):
    """defaults follow from the new options, unless a start was given them"""
    options = SHAPE.replace("--warmup 2", "")
    options += " --total-batch 1K --steps 600 --stop-after 2 --out"
    run_trainer("--train-data", corpus / "train.bin", options, tmp_path / "run").done()
    shutil.copytree(tmp_path / "run", tmp_path / "given", symlinks=True)
    result = resume(tmp_path / "run", "--steps 20 --stop-after 3").done()
    assert "option --warmup: 60 before, 2 now\n" in result.out
    result = resume(tmp_path / "run", "--seq-len 256 --stop-after 4").done()
    assert "option --batch-size: 8 before, 4 now\n" in result.out
    assert [record["tokens"] for record in records(tmp_path / "run", "train")] == [1024, 2048, 3072, 4096]
    changed = start_events(tmp_path / "run")[-1]["changed"]
    assert [(item["name"], item["new"]) for item in changed] == [("seq-len", 256), ("batch-size", 4)]
    resume(tmp_path / "given", "--warmup 30 --batch-size 4 --stop-after 3").done()
    resume(tmp_path / "given", "--steps 20").one_line(USAGE, "--warmup 30 is more than --steps 20")
    resume(tmp_path / "given", "--seq-len 512").one_line(
        USAGE, "is not a multiple of --batch-size 4 times --seq-len 512"
    )


# ---- phases


def phases_of(corpus):
    """The options of three starts, with the last step of each."""
    mixture = f"a={corpus / 'train.bin'}:3 b={corpus / 'val.bin'}:1"
    first = ("--val-every 2 --val-steps 2 --sample-every 6 --steps 9 --val-data", corpus / "val.bin")
    second = ("--seq-len 32 --rope-theta 50000 --batch-size 2 --lr 0.0005",)
    third = ("--total-batch 128 --schedule wsd --decay-steps 2 --doc-mask --separator 32 --train-data", f"'{mixture}'")
    return [(3, first), (5, second), (9, third)]


def run_phases(corpus, out, stops=()):
    """Runs them, with additional stops."""
    for last, options in phases_of(corpus):
        for stop in sorted({stop for stop in (*stops, last) if stop <= last}):
            if not (out / "run.json").exists():
                start(corpus, out, *options, f"--stop-after {stop}").done()
            elif not checkpoint(out, stop).exists():
                resume(out, *options, f"--stop-after {stop} --threads 2").done()


@pytest.mark.full
def test_phases(corpus, tmp_path):
    """phases are resumes with other options, and resume bit for bit inside of a phase, with its options and without"""
    whole = tmp_path / "whole"
    run_phases(corpus, whole)
    steps = records(whole, "train")
    assert [step["tokens"] for step in steps] == [64, 128, 192, 256, 320, 448, 576, 704, 832]
    config = read_json(checkpoint(whole, 9) / "config.json")
    assert (config["max_position_embeddings"], config["rope_theta"]) == (32, 50000)
    state = read_json(checkpoint(whole, 9) / "trainer_state.json")
    assert [corpus["tokens"] for corpus in state["data_opened_at"]] == [320]
    assert state["options"]["seq-len"] == 32 and state["next_window"] == (832 - 320) // 32
    starts = read_json(whole / "run.json")["starts"]
    assert [item["name"] for item in starts[1]["changed"]] == "rope-theta seq-len batch-size lr".split()
    assert [len(start["data"]["train"]) for start in starts] == [1, 1, 2]
    costs = [start["model"]["flops_per_token"] for start in starts]
    assert costs[0] < costs[1] == costs[2]
    run_phases(corpus, tmp_path / "stopped", (2, 4, 7))
    resume(tmp_path / "stopped", "--eval --val-steps 1").done()  # with the length of the last phase
    expect_same(checkpoint(whole, 9), checkpoint(tmp_path / "stopped", 9))
    assert without_times(records(tmp_path / "stopped", "train")) == without_times(steps)
    run_phases(corpus, tmp_path / "plain", (4,))  # a start without options has those of the checkpoint
    shutil.rmtree(checkpoint(tmp_path / "plain", 9))
    shutil.rmtree(checkpoint(tmp_path / "plain", 5))
    resume(tmp_path / "plain", "--stop-after 5 --threads 1").done()
    expect_same(checkpoint(whole, 5), checkpoint(tmp_path / "plain", 5))


def test_start_without_change(corpus, tmp_path):
    """a resume that opens the same data and the same model again changes no bit of the training"""
    plain, again, moved = (tmp_path / name for name in ("plain", "again", "moved.bin"))
    shutil.copy(corpus / "train.bin", moved)
    start(corpus, plain, "--steps 6").done()
    start(corpus, again, "--steps 6 --stop-after 2").done()
    resume(again, f"--train-data {moved} --seq-len 16 --rope-theta 10000 --stop-after 4").done()
    resume(again, f"--train-data 'only={moved}:1'").done()
    assert without_times(records(plain, "train")) == without_times(records(again, "train"))


def test_copies_of_a_corpus(corpus, tmp_path):
    """two copies of a corpus under two names have two orders and two positions"""
    names = [tmp_path / name for name in ("a", "b")]
    for name in names:
        shutil.copy(corpus / "train.bin", name)
    mixture = lambda weight: f"--train-data 'a={names[0]}:1 b={names[1]}:{weight}'"
    run_trainer("--train-data", names[0], SHAPE, BATCH, "--steps 12 --stop-after 3 --out", tmp_path / "run").done()
    for stop, weight in ((6, 1), (9, 3), (12, 1)):
        resume(tmp_path / "run", mixture(weight), f"--stop-after {stop}").done()
        opened = read_json(checkpoint(tmp_path / "run", stop) / "trainer_state.json")["data_opened_at"]
        assert len({item["order"] for item in opened}) == len(opened) == (1 if stop == 6 else 2)
        assert sum(item["tokens"] for item in opened) == 64 * (stop - 3)


def test_modified_data(corpus, tmp_path):
    """other tokens under the path of a run are refused, and an edit between the tokens that are compared is noticed"""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for name in ("train_0.bin", "val_0.bin"):
        shutil.copy(corpus / "train.bin", data / name)
    (data / "corpus.json").write_text('{"format": 1, "vocab_size": 256}')
    run_trainer("--train-data", data, SHAPE, BATCH, "--steps 4 --stop-after 1 --out", run).done()
    assert not resume(run, "--stop-after 2").done().err
    shard, size = data / "train_0.bin", (data / "train_0.bin").stat().st_size
    gap = 1024 + (size - 1024 - 4096) // 15
    assert gap > 1024 + 4096 + 64, "the shard has tokens between the blocks of its fingerprint"
    overwrite(shard, gap - 32, b"\1\0")
    result = resume(run, "--stop-after 3").done()
    assert f"--train-data {data}: shards or corpus.json were modified or copied since the last start" in result.err
    assert start_events(run)[-1]["modified"] == [str(data)]
    assert not resume(run, "--stop-after 3").done().err
    overwrite(shard, 1024, b"\1\0\1\0")
    refused = "not the data that {} was trained on: it had different tokens"
    resume(run).one_line(FAILED, refused.format(run))
    resume(run, "--train-data", data).one_line(FAILED, refused.format(run))
    os.rename(data, tmp_path / "other")
    resume(run, "--train-data", tmp_path / "other").done()


def test_a_start_without_a_checkpoint(corpus, tmp_path):
    """a resume prints the options that the last start had, if it saved no checkpoint and they are not given again"""
    start(corpus, tmp_path / "run", "--steps 6 --stop-after 2").done()
    resume(tmp_path / "run", "--lr 0.5 --grad-clip 3 --stop-after 3").done()
    shutil.rmtree(checkpoint(tmp_path / "run", 3))
    result = resume(tmp_path / "run", "--grad-clip 3 --stop-after 3").done()
    assert re.findall("^option .*", result.out, re.M) == [
        "option --grad-clip: 1 in the checkpoint, 3 now",
        "option --lr: 0.5 before, 0.001 now",
    ]


# ---- the trial of --minutes

TRIAL = "--minutes 0.001 --batch-size 2 --val-data train.bin --val-every 8"  # 60 ms


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, f"{EXPERTS} --router-bias --optimizer muon --sample-every 10 --stats-every 6 --init start"),
        (2, "--zero 3 --matmul-dtype bf16 --checkpoint-every 10"),
    ],
)
def test_minutes(short, ranks, options):
    """the run of --minutes is bit for bit the run of the --steps that it prints and saves"""
    model = "--train-data train.bin " + SMALL_OF_RANKS
    run_ranks(1, model, EXPERTS, "--router-bias --steps 2 --out first", cwd=short).done()
    (short / "first/checkpoints/step_00000002").rename(short / "start")
    first = run_ranks(ranks, model, TRIAL, options, "--out trial", cwd=short).done().out
    steps = int(re.search(r"^--minutes 0.001: an update took .* ms, the median of \d+: --steps (\d+)$", first, re.M)[1])
    assert steps >= 20
    saved, described = checkpoint(short / "trial", steps), read_json(short / "trial/run.json")["options"]
    assert read_json(saved / "trainer_state.json")["options"]["steps"] == steps == described["steps"]
    assert described["minutes"] == 0.001
    same = re.sub("--minutes [0-9.]+", f"--steps {steps}", TRIAL)
    run_ranks(ranks, model, same, options, "--out whole", cwd=short).done()
    expect_same(saved, checkpoint(short / "whole", steps))
    for kind in "train", "val", "sample", "layer":
        assert without_times(records(short / "trial", kind)) == without_times(records(short / "whole", kind))
    run_ranks(ranks, model, TRIAL, "--out trial", cwd=short).one_line(FAILED, "already contains a run")
    resume_ranks(short / "trial", ranks, f"--steps {steps + 1}").done()


def test_signal_in_a_trial(short):
    """a signal in the trial ends it with status 3 and one line, and nothing is written"""
    with Started(*trainer(), "--train-data train.bin --minutes 5 --out run", SMALL_OF_RANKS, cwd=short) as process:
        process.wait_until(lambda: has_open(process.pid, "/train.bin")).terminate()
        process.end().one_line(SIGNALLED, "ended before the first step; nothing is lost")
    assert not (short / "run").exists()
