"""--change, and planted causes of spikes, which `scripts/lab spike` must name."""

import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
from program import FAILED, ROOT, SMALL, USAGE, all_records, beside, checkpoint, expect_same, overwrite, records, resume
from program import read_json, run, run_trainer, tensors, train, trainer, write_shard
from ranks import mpirun, skip_without_mpi

T, B = 32, 16
MODEL = (
    f"--layers 2 --attention baseline --hidden 32 --heads 2 --kv-heads 2 --head-dim 16 --ffn 64 --seq-len {T} "
    f"--batch-size {B} --vocab 32 --threads 1 --lr 1e-2 --warmup 5 --schedule constant --steps 140 "
    "--checkpoint-every 20 --keep 0 --stats-every 5"
)
HEAD = "model.layers.0.self_attn.q_proj.weight[0:16]"


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """A directory with a shard in which most tokens are that of three places before, so that attention matters."""
    directory, random = tmp_path_factory.mktemp("copies"), np.random.RandomState(3)
    tokens = list(random.randint(0, 16, 3))
    for fresh, token in zip(random.random_sample(B * T * 200), random.randint(0, 16, B * T * 200)):
        tokens.append(token if fresh > 0.95 else tokens[-3])
    write_shard(directory / "train.bin", tokens)
    return directory


def plant(directory, *options, program=None, **more):
    return run(*(program or trainer()), "--train-data", directory / "train.bin", MODEL, *options, **more)


def first_token(path):
    """Of window 2 of the step that the run reordered."""
    (event,) = [r for r in all_records(path) if r.get("what") == "change"]
    return event["windows"][2]["first_token"]


def change_of(text):
    """--change TEXT as one word."""
    return shlex.quote(f"--change={text}")


def spike(path, *options, program=None, **more):
    command = (sys.executable, ROOT / "scripts/lab", "spike", path, "--trainer", program or trainer()[0])
    return run(*command, *options, **more)


def expect_cause(path, words, *options, **more):
    result = spike(path, *options, **more).done()
    (line,) = [line for line in result.out.splitlines() if line.startswith("cause: ")]
    assert words in line and "repeats the log bit for bit" in result.out, result.out
    (found,) = path.glob("spike_*")
    assert json.loads((found / "spike.json").read_text())["cause"] in line
    assert "</svg>" in (found / "spike.svg").read_text()
    return result


GRAMMAR = f"{SMALL} --lr 2e-2 --checkpoint-every 20 --keep 0 --stats-every 5"


def plant_fault(corpus, path, step):
    """A run in which a cache line of first moments changes, of the embedding of the last token, the most frequent."""
    fault = {"FAULT": f"moment:0:{step}:exponent"}
    tokens = np.fromfile(corpus / "train.bin", "<u2", offset=1024)
    kinds, index, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    write_shard(path.parent / "train.bin", np.argsort(np.argsort(counts))[index])
    options = f"{GRAMMAR.replace('size 4', 'size 16')} --vocab {len(kinds)} --steps {step + 6} --out"
    run(beside("faulty_diffv2"), "--train-data", path.parent / "train.bin", options, path, env=fault).done()


@pytest.mark.full
def test_rate(copies, tmp_path):
    """a jump of the learning rate is named with its step, and the large update before the loss rises"""
    plant(copies, "--out", tmp_path / "run", "--stop-after 100").done()
    resume(tmp_path / "run", "--lr 0.3 --stop-after 120 --rollback 500:1000").done()
    result = expect_cause(tmp_path / "run", "the learning rate: at step 101 it rises from 0.01 to 0.3")
    assert "first large update: step 101, " in result.out and "a third of its rise at step 102\n" in result.out
    replays = [read_json(path)["starts"][-1] for path in (tmp_path / "run").glob("spike_*/replay_*/run.json")]
    assert replays and all("--rollback=1000:1000" in start["command_line"] for start in replays)


def replay_of_fault(path, at, *options):
    """(what lab spike prints, the start of its replay) after a loss of the log is made too large, as by a fault."""
    log = all_records(path)
    next(r for r in log if r["kind"] == "train" and r["step"] == at)["loss"] = 99
    (path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    out = spike(path, "--step", at, *options).done().out
    assert f"differs from the log from step {at} on" in out, out  # and the steps before are those of the log
    return out, read_json(path / f"spike_{at:08d}/replay_000/run.json")["starts"][-1]


@pytest.mark.full
def test_start_of_replay(corpus, tmp_path):
    """replays have threads, environment and options of the start that ran the steps, and end with its steps"""
    path, isa = tmp_path / "run", {"DNNL_MAX_CPU_ISA": "SSE41"}
    train(corpus, path, "--steps 40 --keep 0 --stop-after 20").done()
    resume(path, "--threads 1 --stop-after 30 --no-memory-check", env=isa).done()
    for stop in (33, 40):  # the first only goes on
        resume(path, f"--threads 1 --stop-after {stop}", *(["--lr 2e-3"] if stop == 40 else []), env=isa).done()
    starts = read_json(path / "run.json")["starts"]
    out, replay = replay_of_fault(path, 28)
    assert "up to step 33 " in out and "note: the run was resumed differently after step 33" in out
    for key in ("devices", "environment", "libraries"):
        assert replay[key] == starts[1][key], key
    assert replay["environment"]["DNNL_MAX_CPU_ISA"] == "SSE41"
    assert "--no-memory-check" in replay["command_line"] and replay["threads"] == 1


def test_ranks_of_replay(corpus, tmp_path):
    """replays have as many ranks as the start that ran the steps; without mpirun --launch is required"""
    skip_without_mpi()
    path, data = tmp_path / "run", ["--train-data", corpus / "train.bin", SMALL]
    mpirun("-n 2", *trainer(), *data, "--checkpoint-every 8 --steps 24 --out", path).done()
    alone = spike(path, "--step 20", env={"PATH": "/nowhere"})
    alone.one_line(FAILED, "the run had 2 ranks, and there is no mpirun: specify --launch COMMAND")
    assert replay_of_fault(path, 20)[1]["ranks"] == 2


@pytest.mark.slow
def test_data(corpus, tmp_path):
    """a corrupt region of a shard is named with its place"""
    data = (corpus / "train.bin").read_bytes()
    train(corpus, tmp_path / "where", "--steps 110 --lr 2e-2", change_of("110:order=reverse")).done()
    first = first_token(tmp_path / "where")
    (tmp_path / "train.bin").write_bytes(data)
    overwrite(tmp_path / "train.bin", 1024 + 2 * (first + 1), np.arange(200, 215, dtype="<u2").tobytes())
    run_trainer("--train-data", tmp_path / "train.bin", GRAMMAR, "--steps 116 --out", tmp_path / "run").done()
    place = f"{tmp_path}/train.bin, tokens {first} to {first + 15}"
    expect_cause(tmp_path / "run", f"the data of step 110: window 2, {place}")


@pytest.mark.slow
def test_moment(corpus, tmp_path):
    """flipped bits in moments of a checkpoint are named with their tensor"""
    plant_fault(corpus, tmp_path / "run", 100)
    words = "Adam's moments in the checkpoint of step 100, those of model.embed_tokens.weight"
    expect_cause(tmp_path / "run", words, program=beside("faulty_diffv2"))


@pytest.mark.slow
def test_head(copies, tmp_path):
    """a head whose logits grow is named"""
    plant(copies, "--out", tmp_path / "run", "--stop-after 124", change_of(f"3:lr=1 121-124:lr@{HEAD}=1000")).done()
    expect_cause(tmp_path / "run", f"the updates of {HEAD}, whose logits grow", "--step 122")


@pytest.mark.slow
def test_outside(corpus, tmp_path):
    """a spike that a replay does not have came from outside"""
    plant_fault(corpus, tmp_path / "run", 110)
    words = "cause: outside of the program: a replay has no spike, and differs from the log from step 112 on"
    assert words in spike(tmp_path / "run", program=beside("faulty_diffv2")).done().out


def test_changes(corpus, tmp_path):
    """--change freezes rows, resets moments, limits an update, and moves windows, in its steps only"""
    name = "model.layers.1.self_attn.q_proj.weight"
    options = "--steps 6 --checkpoint-every 1 --keep 0 --weight-decay 0"
    train(corpus, tmp_path / "plain", options).done()
    change = f"3:lr@{name}[8:16]=0 4:moments@model.layers.0.=0 5:update-norm=1e-4 5-6:lr@model.norm=0.5"
    train(corpus, tmp_path / "run", options, change_of(change)).done()
    expect_same(checkpoint(tmp_path / "plain", 2), checkpoint(tmp_path / "run", 2))
    w = {step: tensors(checkpoint(tmp_path / "run", step) / "model.safetensors") for step in range(2, 7)}
    frozen = (w[3][name] == w[2][name]).all(axis=1)
    assert frozen[8:16].all() and not frozen[:8].any() and not frozen[16:].any()
    plain = tensors(checkpoint(tmp_path / "plain", 3) / "model.safetensors")[name]
    assert (plain == w[3][name]).all(axis=1)[~frozen].all(), "other rows have other bits"
    m, v = (
        tensors(checkpoint(tmp_path / "run", 4) / "optimizer.safetensors")[f"{x}.model.layers.0.mlp.up_proj.weight"]
        for x in ("exp_avg", "exp_avg_sq")
    )
    assert np.allclose(m**2 * 0.05, v * 0.01, rtol=1e-3), "moments of one gradient"
    rows = {}
    for name, change in (("rows", ""), ("reset", change_of("4:moments=0"))):
        train(corpus, tmp_path / name, options, "--optimizer normuon --stop-after 4", change).done()
        saved = tensors(checkpoint(tmp_path / name, 4) / "optimizer.safetensors")
        rows[name] = saved["exp_avg_sq.model.layers.0.mlp.up_proj.weight"].sum()
    assert 0.2 < rows["reset"] / rows["rows"] < 0.4, "row moments of one step instead of four"
    moved = sum(((w[5][n].astype(float) - w[4][n]) ** 2).sum() for n in w[4])
    assert 0.5e-4 < moved**0.5 < 1.01e-4
    # windows: the first of step 3 are those of step 4
    for k, change in enumerate(["3:replace=0-3", "3:order=reverse"]):
        train(corpus, tmp_path / f"moved{k}", options, "--lr 0 --change", change).done()
    train(corpus, tmp_path / "still", options, "--lr 0").done()
    losses = [[r["loss"] for r in records(tmp_path / n, "train")] for n in ("still", "moved0", "moved1")]
    assert losses[1] == [*losses[0][:2], losses[0][3], *losses[0][3:]]
    assert np.allclose(losses[2], losses[0], rtol=1e-6)


def test_refused_changes(copies, tmp_path):
    """a change that the trainer refuses is listed with the reason, and the others are tried"""
    plant(copies, "--optimizer normuon --out", tmp_path / "run", "--stop-after 30", change_of("26:lr=50")).done()
    result = expect_cause(tmp_path / "run", "the updates of model.embed_tokens.weight", "--step 27 --after 1")
    assert re.search(r"'updates clipped' failed: diffv2: --change \S+: updates of normuon have", result.out)


def test_spike_mistakes(copies, tmp_path):
    """mistakes in the arguments of lab spike, and a run without its data, are one line each"""
    path = tmp_path / "run"
    shutil.copy(copies / "train.bin", tmp_path)
    plant(tmp_path, "--out", path, "--stop-after 30", change_of("26:lr=50")).done()
    spike(path, program="nothing").one_line(FAILED, "nothing: no such program")
    spike(tmp_path / "none").one_line(FAILED, "none/run.json: No such file or directory")
    for options, words in {
        "--step 10": "no checkpoint before step 10: the oldest is of step 20",
        "--step 99": "the log has no step 99; it ends at step 30",
        "--step 27 --launch nowhere": "nowhere: No such file or directory",
    }.items():
        spike(path, options).one_line(FAILED, words)
    spike(path, "--step 0").one_line(USAGE, "--step must be at least 1")
    (tmp_path / "train.bin").unlink()
    spike(path, "--step 27").one_line(FAILED, "the replay 'unchanged' failed: diffv2: no file matches")
    (checkpoint(path, 20) / "trainer_state.json").write_text("{")
    spike(path, "--step 27").one_line(FAILED, "trainer_state.json: not JSON")
    (path / "log.jsonl").write_text("")
    spike(path, "--step 27").one_line(FAILED, "log.jsonl has no steps")
