"""What changes during a run: the decay of the learning rate, the batch, and phases; and the mean of its weights."""

import re
import shutil

import pytest
from program import FAILED, SHAPE, SIGNALLED, USAGE, Started, all_records, checkpoint, expect_same, has_open, read_json
from program import records, resume, run_trainer, trainer, without_times
from ranks import EXPERTS, SMALL_OF_RANKS, expect_same_weights, resume_ranks, run_ranks, train_ranks

BATCH = "--batch-size 4 --warmup 2 --lr 1e-3 --threads 2"


def start(corpus, out, *options):
    return run_trainer("--train-data", corpus / "train.bin", SHAPE, BATCH, "--out", out, *options)


# ---- the decay of wsd


@pytest.mark.parametrize(
    ("stable", "now"), [("wsd-sqrt --steps 1000", ""), ("constant --steps 7", "--schedule wsd-sqrt")]
)
def test_decay_now(corpus, tmp_path, stable, now):
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
    result = resume(branch, f"--decay-now --decay-steps 4 {now} --stop-after 8 --threads 2").done()
    assert "decays from step 6 to the last step, 10" in result.out
    resume(branch, "--decay-now").one_line(USAGE, "the checkpoint of step 8 is in the decay")
    resume(branch, "--threads 2").done()
    expect_same(checkpoint(whole, 10), checkpoint(branch, 10))
    resume(trunk, "--stop-after 7").done()
    assert records(trunk, "train")[-1]["lr"] == 1e-3


# ---- phases


def phase_events(run):
    return [record for record in all_records(run) if record.get("what") == "phase"]


def expect_resumes(corpus, tmp_path, stops, steps, *options):
    """Runs stopped at each of these steps equal an uninterrupted run, which is returned."""
    whole = tmp_path / "whole"
    start(corpus, whole, f"--steps {steps}", *options).done()
    for stop in stops:
        run = tmp_path / f"stopped-{stop}"
        start(corpus, run, f"--steps {steps} --stop-after {stop}", *options).done()
        resume(run, "--threads 2").done()
        expect_same(checkpoint(whole, steps), checkpoint(run, steps))
        assert without_times(records(run, "train")) == without_times(records(whole, "train"))
        assert phase_events(run) == phase_events(whole)
    return whole


@pytest.mark.full
def test_batch_schedule(corpus, tmp_path):
    """--batch-schedule changes the tokens of an update, not the order of the data, and resumes bit for bit"""
    batches = "--batch-schedule 64@0,256@3,128@5 --schedule wsd --decay-steps 2"
    whole = expect_resumes(corpus, tmp_path, (3, 4), 7, batches)
    steps = records(whole, "train")
    assert [step["tokens"] for step in steps] == [64, 128, 192, 448, 704, 832, 960]
    assert [step["lr"] for step in steps[3:]] == pytest.approx([1e-3, 1e-3, 5.5e-4, 1e-4])
    assert read_json(checkpoint(whole, 7) / "trainer_state.json")["next_window"] == 960 // 16
    planned = run_trainer("--dry-run", SHAPE, BATCH, "--steps 4000 --batch-schedule 1K@0,64K@2000").done().out
    assert re.search(r"tokens of the run +133M", planned) and re.search(r"2001 to 4000 .* 65536 ", planned)


@pytest.mark.full
def test_phases(corpus, tmp_path):
    """a run of phases resumes bit for bit, inside and at the border of a phase"""
    mixture = f"'a={corpus / 'train.bin'}:3 b={corpus / 'val.bin'}:1'"
    phases = (
        f"--phase 3:seq-len=32,rope-theta=50000,batch-size=2,lr=0.0005 --phase 5:train-data={mixture},total-batch=128",
        "--phase 7:lr=0.0001 --val-data",
        corpus / "val.bin",
        "--val-every 2 --val-steps 2 --sample-every 6",
    )
    whole = expect_resumes(corpus, tmp_path, (3, 4, 5, 8), 9, *phases)
    steps = records(whole, "train")
    assert [step["tokens"] for step in steps] == [64, 128, 192, 256, 320, 448, 576, 704, 832]
    described, config = read_json(whole / "run.json"), read_json(checkpoint(whole, 9) / "config.json")
    assert [phase["step"] for phase in described["phases"]] == [3, 5, 7]
    assert described["phases"][2]["changed"] == [{"name": "lr", "old": 0.0005, "new": 0.0001}]
    assert (config["max_position_embeddings"], config["rope_theta"]) == (32, 50000)

    def flops(length):
        run, shape = tmp_path / f"of{length}", SHAPE.replace("seq-len 16", f"seq-len {length}")
        run_trainer("--train-data", corpus / "train.bin", shape, BATCH, "--steps 2 --out", run).done()
        return read_json(run / "run.json")["model"]["flops_per_token"]

    assert described["model"]["flops_per_token"] == pytest.approx((192 * flops(16) + 640 * flops(32)) / 832, 1e-9)
    state = read_json(checkpoint(whole, 9) / "trainer_state.json")
    assert [corpus["tokens"] for corpus in state["data_opened_at"]] == [320]
    assert state["options"]["seq-len"] == 16 and state["next_window"] == (832 - 320) // 32
    resume(whole, "--eval --val-steps 1").done()  # with the length of the last phase

    def memory(*options):
        planned = run_trainer("--dry-run --layers 2 --batch-size 4 --total-batch 512 --threads 1", *options).done().out
        return re.findall(r"^  (?:activations|workspace) .*", planned, re.M)

    assert memory("--seq-len 32 --phase 3:seq-len=128 --phase 9:seq-len=64") == memory("--seq-len 128")


@pytest.mark.full
def test_phases_of_ranks(short):
    """phases of several ranks resume bit for bit, with parameters sharded as well"""
    options = "--steps 6 --zero 3 --batch-size 2 --total-batch 128 --phase 2:seq-len=32 --phase 4:total-batch=256"
    train_ranks(short / "whole", 2, options).done()
    train_ranks(short / "parts", 2, options, "--stop-after 3").done()
    resume_ranks(short / "parts", 2).done()
    expect_same_weights(short / "whole", short / "parts", 6)


def test_phase_without_change(corpus, tmp_path):
    """a phase that opens the same data and the same model again changes no bit of the training"""
    plain, again = tmp_path / "plain", tmp_path / "again"
    start(corpus, plain, "--steps 6").done()
    start(corpus, again, "--steps 6 --phase 2:seq-len=16 --phase 4:rope-theta=10000").done()
    assert without_times(records(plain, "train")) == without_times(records(again, "train"))


# ---- the trial of --minutes

TRIAL = "--minutes 0.001 --batch-size 2 --val-data train.bin --val-every 8"  # 60 ms


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, f"{EXPERTS} --router-bias --optimizer muon --sample-every 10 --stats-every 6 --init start"),
        (2, "--zero 3 --gemm bf16 --checkpoint-every 10"),
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


def test_minutes_is_of_one_start(short):
    """--minutes excludes what sets the last step or changes the time of an update, other modes, and what its result
    contradicts"""
    start = "--train-data train.bin --minutes"
    for other in ("--steps 4", "--stop-after 4", "--out run --resume", "--phase 3:lr=1", "--batch-schedule 2048@0"):
        run_trainer(start, 1, other, cwd=short).one_line(USAGE, "--minutes and --" + other.split("--")[-1].split()[0])
    run_trainer(start, "1 --dry-run", cwd=short).one_line(USAGE, "--minutes is an option of training alone")
    run_trainer(start, 0, cwd=short).one_line(USAGE, "--minutes '0' is not accepted")
    result = run_ranks(1, start, "0.0001", SMALL_OF_RANKS.replace("--warmup 2", "--warmup 90000"), cwd=short)
    result.one_line(USAGE, "--warmup 90000 is more than --steps 20")


def test_signal_in_a_trial(short):
    """a signal in the trial ends it with status 3 and one line, and nothing is written"""
    with Started(*trainer(), "--train-data train.bin --minutes 5 --out run", SMALL_OF_RANKS, cwd=short) as process:
        process.wait_until(lambda: has_open(process.pid, "/train.bin")).terminate()
        process.end().one_line(SIGNALLED, "ended before the first step; nothing is lost")
    assert not (short / "run").exists()
