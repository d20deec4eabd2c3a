"""Resumed runs are the same runs; starts and resumes that are refused."""

import fcntl
import shutil

import pytest
from program import FAILED, SMALL, USAGE, WEIGHTS, all_records, checkpoint, differing, expect_same, lose_checkpoints
from program import read_json, records, resume, run_trainer, train


def test_seed(corpus, tmp_path):
    """equal seeds give equal bits, and different seeds do not"""
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        train(corpus, tmp_path / name, f"--steps 6 --seed {seed}").done()
    expect_same(tmp_path / "one/checkpoints", tmp_path / "two/checkpoints")
    one, other = (checkpoint(tmp_path / name, 6) for name in ("one", "other"))
    assert differing(one, other, ["model.safetensors"]), "another seed gave the same weights"


@pytest.mark.parametrize(
    "model",
    [
        "",
        "--window 9 --full-every 2 --qk-norm --attention diff_v2_layer_lambda",
        "--window 9 --yoco --qk-norm --attention diff_v2",
        "--attention diff_v2_layer_lambda --optimizer normuon",
        "--optimizer muon --checkpoint-every 1",
    ],
    ids=["baseline", "windows", "yoco", "normuon", "muon in the background"],
)
def test_resume_equals_uninterrupted(corpus, tmp_path, model):
    """a resumed run equals an uninterrupted one; of a finished run only the files of killed saves are removed"""
    whole, parts, before = (tmp_path / name for name in ("whole", "parts", "before"))
    train(corpus, whole, "--steps 7 --total-batch 128", model).done()
    train(corpus, parts, "--steps 3 --total-batch 128", model).done()
    for steps in (5, 7):
        assert "option --steps:" in resume(parts, f"--steps {steps} --threads 2").done().out
    expect_same(checkpoint(whole, 7), checkpoint(parts, 7))
    found = records(parts, "train")
    assert len(found) == 7 and found[-1]["step"] == 7
    shutil.copytree(parts, before, symlinks=True)
    for name in ("step_00000009.tmp", "step_00000003.old.tmp"):
        (parts / "checkpoints" / name).mkdir()
        (parts / "checkpoints" / name / "config.json").write_text("{")
    assert "nothing to do" in resume(parts).done().out
    expect_same(parts, before)


def test_parametrization(corpus, tmp_path):
    """completep at the base shape is standard bit for bit; elsewhere it is another run, which resumes only as such"""
    base = "--parametrization completep --base-width {} --base-depth 2"
    options = "--steps 3 --attention diff_v2 --qk-norm"
    for name, more in (("standard", ""), ("base", base.format(24)), ("wider", base.format(6))):
        train(corpus, tmp_path / name, options, more).done()
    standard, same, wider = (checkpoint(tmp_path / name, 3) for name in ("standard", "base", "wider"))
    assert not differing(standard, same, WEIGHTS)
    assert differing(standard, wider, ["model.safetensors"]), "the base width has no effect"
    assert "option --steps:" in resume(tmp_path / "wider", "--steps 4").done().out
    refused = resume(tmp_path / "wider", "--steps 5 --base-width 12")
    refused.one_line(USAGE, "--base-width: 6 in the checkpoint, 12 now; a resumed run cannot change this option")


def test_match_params_resume(corpus, tmp_path):
    """a resume keeps the parameters of --match-params and does not match them again"""
    # A resume, which sees the width that was asked for again, gets the same model.
    whole, parts, again = (tmp_path / name for name in ("whole", "parts", "again"))
    matched = "--match-params: MLP 34 (baseline: 40)"
    assert matched in train(corpus, whole, "--match-params --steps 3").done().out
    train(corpus, parts, "--match-params --steps 2").done()
    train(corpus, parts, "--match-params --steps 3 --resume").done()  # the command line of the start
    expect_same(checkpoint(whole, 3), checkpoint(parts, 3))
    shutil.copytree(parts, again, symlinks=True)
    lose_checkpoints(again)
    assert "from step 0" in resume(again, "--threads 2").done().out  # from run.json alone
    assert read_json(checkpoint(again, 2) / "config.json")["intermediate_size"] == 34
    resume(parts, "--no-match-params").one_line(USAGE, "--match-params: yes in the checkpoint, no now")

    dry_run = ["--init", checkpoint(parts, 3), "--dry-run"]
    assert "MLP 34," in run_trainer(*dry_run).done().out
    result = run_trainer(*dry_run, "--match-params")
    assert "MLP 34," in result.one_line(0, "--match-params: using the loaded model's MLP width 34").out
    assert matched in run_trainer(*dry_run, "--match-params --ffn 40").done().out
    result = run_trainer(*dry_run, "--match-params --ffn 34")
    result.one_line(USAGE, "--match-params with --ffn 34 requires an MLP width of 28; the loaded model has 34")


def test_init_with_selected_blocks(corpus, tmp_path):
    """--init with --sparse-blocks starts from weights of full attention; a resume before a checkpoint does too"""
    train(corpus, tmp_path / "full", "--steps 3").done()
    base, losses = checkpoint(tmp_path / "full", 3), []
    for blocks in (0, 6, 1):  # 6 of 8 blocks between the first and its own: all keys
        out = tmp_path / f"run{blocks}"
        options = f"--sparse-blocks {blocks} --sparse-block-size 2" if blocks else ""
        validation = ("--steps 2 --val-every 1 --val-data", corpus / "train.bin")
        train(corpus, out, options, *validation, "--init", base).done()
        losses.append(records(out, "val")[0]["loss"])
        found = read_json(checkpoint(out, 2) / "config.json")
        assert (found.get("sparse_blocks") or 0) == blocks, found
    assert abs(losses[1] - losses[0]) < 1e-6 and abs(losses[2] - losses[0]) > 1e-5, losses
    lose_checkpoints(tmp_path / "run1")
    run_trainer("--out", tmp_path / "run1", "--resume --threads 2").done()
    assert records(tmp_path / "run1", "val")[0]["loss"] == losses[2]


def test_dump_grads_of_checkpoint(corpus, tmp_path):
    """--dump-grads --resume uses the weights of the newest checkpoint"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 2 --qk-norm --attention diff_v2_layer_lambda").done()
    resume(run, "--threads 2 --dump-grads", tmp_path / "resumed").done()
    init = ["--train-data", corpus / "train.bin", SMALL, "--init", checkpoint(run, 2)]
    run_trainer(*init, "--dump-grads", tmp_path / "init").done()
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "init").read_bytes()


def test_resume_locks_first(corpus, tmp_path):
    """a resume locks the run before it reads its files"""
    # Otherwise it could read a checkpoint, wait until another process has trained further, and undo its steps.
    run = tmp_path / "run"
    train(corpus, run, "--steps 2").done()
    shutil.rmtree(checkpoint(run, 2))
    checkpoint(run, 2).mkdir()
    with (run / "run.json").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        result = resume(run, "--steps 3").one_line(FAILED, "another process is running this run")
    assert result.out == ""
    result = resume(run, "--steps 3")
    assert result.status == FAILED and "no valid checkpoint" in result.err


def options_after(options, starts):
    return options | {change["name"]: change["new"] for start in starts for change in start.get("changed", ())}


def expect_steps_follow_starts(run, steps):
    """The starts of run.json, and those of the log, each give the rate, the tokens and the threads of every step.

    The schedule is constant after two steps.
    """
    described = read_json(run / "run.json")
    options, starts = described["options"], described["starts"]
    events, step, tokens = [], 0, 0
    for record in all_records(run):
        if record["kind"] == "event":
            events.append(record)
            continue
        step += 1
        last = max(i for i, start in enumerate(starts) if start["step"] < step)
        logged = {"lr": record["lr"], "total-batch": record["tokens"] - tokens}
        tokens = record["tokens"]
        assert [event for event in events if event["what"] == "start"][-1]["threads"] == starts[last]["threads"]
        for found in (options_after(options, starts[: last + 1]), options_after(options, events)):
            assert found["total-batch"] == logged["total-batch"], step
            assert found["lr"] == logged["lr"] or step <= 2, step
    assert step == steps


def test_recorded_options(corpus, tmp_path):
    """run.json and the log record the options in force at each step"""
    run = tmp_path / "run"
    train(corpus, run, "--steps 4 --lr 0.001 --total-batch 64").done()
    expect_steps_follow_starts(run, 4)
    for threads, steps, options, removed in [
        # a start that leaves no checkpoint: the next one has the options of the checkpoint again
        (1, 6, "--lr 0.002 --total-batch 128", (6,)),
        (2, 8, "", ()),
        # an older checkpoint, from before a change that the next start makes as well
        (1, 10, "--lr 0.003 --total-batch 128", (10, 8)),
        (2, 9, "--lr 0.003 --total-batch 128", ()),
    ]:
        resume(run, f"--threads {threads} --steps {steps}", options).done()
        expect_steps_follow_starts(run, steps)
        for step in removed:
            shutil.rmtree(checkpoint(run, step))
    described = read_json(run / "run.json")
    starts = described["starts"]
    assert [start["step"] for start in starts] == [0, 4, 4, 8, 4]
    assert described["options"]["threads"] == starts[0]["threads"] and starts[1]["threads"] == 1
    for key in ("command_line", "revision", "host", "ranks", "threads"):
        assert described[key] == starts[0][key]
    assert described["options"]["lr"] == 0.001
    assert starts[4]["command_line"][-1] == "128"
