"""Tests scripts/export/export_run.py: what it writes is read back by TensorBoard's EventAccumulator and W&B's
DataStore. The expected rows are made here from the text of log.jsonl.

Requires the Python environment `export-tests`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal import datastore
import program

ROOT = Path(__file__).resolve().parent.parent

EXPORT = [sys.executable, ROOT / "scripts/export/export_run.py"]
MODEL = "--layers 2 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --seq-len 16 --batch-size 1 --threads 1"
RUN = "--steps 12 --val-every 4 --val-steps 1 --stats-every 3 --vocab 257"
CHOICES = {"kind": "choices", "name": "arc", "examples": 9, "accuracy": 0.5, "accuracy_norm": None, "norm": "tokens"}
CHOICES |= {"chance": 0.25, "fingerprint": "12"}
STOPPED = '{"kind": "event", "step": 14, "what": "stopped", "why": "signal"}\n'


@pytest.fixture(autouse=True)
def without_key(monkeypatch):
    """W&B finds no key and no settings of the user."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", "/nonexistent")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run. Tests do not write there."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    train(directory)
    return directory


@pytest.fixture(scope="session")
def log(run):
    return (run / "log.jsonl").read_text()


def train(directory, *options):
    tokens = directory.parent / "tokens.bin"
    program.write_shard(tokens, [7 * i % 257 for i in range(1000)])
    data = ["--train-data", tokens, "--val-data", tokens, "--out", directory]
    program.run_trainer(MODEL, RUN, *data, *options).done()


def copied(run, directory, text):
    """A directory with the run.json of a run and another log."""
    directory.mkdir()
    (directory / "run.json").write_bytes((run / "run.json").read_bytes())
    (directory / "log.jsonl").write_text(text)
    return directory


def record(kind, step, **values):
    return json.dumps({"kind": kind, "step": step, **values}) + "\n"


def expected(log):
    """step -> {name: value} of the text of a log in which no step is repeated."""
    rows = {}
    for line in log.splitlines():
        values = json.loads(line)
        kind, row = values.pop("kind"), rows.setdefault(values.pop("step"), {})
        if kind == "event":
            row["events"] = json.dumps([*json.loads(row.get("events", "[]")), values])
            continue
        part = ""
        if kind == "stats":
            part = f"/layer_{values.pop('layer'):02d}"
        if kind == "choices":
            part = f"/{values.pop('name')}"
        values = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in values.items() if v is not None}
        row.update({f"{kind}_{k}{part}" if part else f"{kind}/{k}": v for k, v in values.items()})
    return rows


def export(*words, status=0, text=""):
    done = program.run(*EXPORT, *words)
    assert done.status == status and text in done.err and done.err.count("\n") == (status != 0), done
    return done.out


class Following(program.Started):
    """An export with --follow, while the log changes."""

    def __init__(self, *words):
        super().__init__(*EXPORT, *words, "--follow --interval 0.05")

    def end(self):
        done = super().end().done()
        assert not done.err


# ---- readers


def read_events(directory):
    """(step -> {tag: value}, the accumulator)"""
    events, rows = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}), {}
    if not directory.exists():
        return {}, None
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            assert tag not in rows.setdefault(event.step, {}), f"{tag} of step {event.step} is there twice"
            rows[event.step][tag] = event.value
    for tag in events.Tags()["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name != "text":
            continue
        for event in events.Tensors(tag):
            rows.setdefault(event.step, {})[tag] = tensor_util.make_ndarray(event.tensor_proto).item().decode()
    return rows, events


def read_wandb(directory):
    """[(ID, configuration, step -> {key: value})] of the offline runs, in the order in which they were made."""
    runs = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        store, config, rows = datastore.DataStore(), {}, {}
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            message = wandb_internal_pb2.Record()
            message.ParseFromString(data)
            for item in message.run.config.update if message.HasField("run") else message.config.update:
                config[item.key] = json.loads(item.value_json)
            row = {
                "/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json)
                for item in message.history.item
            }
            if row:
                rows[row["_step"]] = {key: value for key, value in row.items() if key[0] != "_"}
        runs.append((path.stem.removeprefix("run-"), config, rows))
    return runs


def near(rows, log, tolerance):
    """Numbers agree relative to their size: float32 has 2^-24, and JSON all digits."""
    wanted = expected(log)
    assert rows.keys() == wanted.keys(), (rows.keys(), wanted.keys())
    for step, row in wanted.items():
        assert rows[step].keys() == row.keys(), (step, rows[step].keys() ^ row.keys())
        for name, value in row.items():
            got = rows[step][name]
            good = got == value if isinstance(value, str) else abs(got - value) <= tolerance * abs(value)
            assert good, (step, name, got, value)


# ---- tests


def test_tensorboard_has_every_value_of_two_runs(tmp_path, run, log):
    lines = record("train", 1, tokens=5, loss=2.5, lr=None) + json.dumps({**CHOICES, "step": 1}) + "\n"
    lines += record("sample", 1, text=None, tokens=4) + record("sample", 2, text='a,\n"b', tokens=4, stopped="length")
    lines += record("later", 2, number=3, flag=True, things=[1, {"a": 2}])  # of a newer trainer
    wrong = "not a record\n" + '{"kind": "train", "step": 3, "loss": NaN}\n{"kind": "train", "step": -1}\n'
    other = copied(run, tmp_path / "other", lines + wrong + '{"kind": "val", "step": 2, "lo')
    said = export(run, other, "--tensorboard", tmp_path)
    assert "no records: 3, first 6" in said and said.count("no records") == 1, said
    one, two = (read_events(tmp_path / name)[0] for name in ("run", "other"))
    assert "run.json" in one.pop(0) and two.pop(0).keys() == {"run.json"}
    near(two, lines, 2**-24)
    names = {name for row in one.values() for name in row}
    assert {"train/loss", "val/loss", "events", "stats_lambda_mean/layer_01"} <= names, names
    assert {"choices_accuracy/arc", "choices_norm/arc"} < two[1].keys()


def test_numbers_beyond_the_range_and_texts_that_no_file_can_contain_are_left_out(tmp_path, run):
    lines = record("later", 1, large=10**400, small=2) + record("stats", 1, layer=1.5, rms=1.0)  # no layer
    odd = copied(run, tmp_path / "odd", lines + record("event", 1, what="\ud800"))
    said = export(odd, "--tensorboard", tmp_path / "events")
    assert "no records: 2, first 2" in said, said
    found = read_events(tmp_path / "events/odd")[0][1]
    assert found["later/small"] == 2 and "later/large" not in found, found.keys()


def test_where_a_run_went_back_the_later_values_count(tmp_path, run):
    before = [record("train", s, tokens=s, loss=s + 0.5) for s in range(1, 9)] + [record("val", 8, loss=9)]
    after = [record("event", 3, what="start")] + [record("train", s, tokens=s, loss=s + 0.25) for s in range(4, 7)]
    older = copied(run, tmp_path / "older", "".join(before + after))
    wanted = "".join(before[:3] + after)
    export(older, "--tensorboard", tmp_path / "events")
    rows = read_events(tmp_path / "events/older")[0]
    assert rows.pop(0).keys() == {"run.json"} and "options" in rows[3].pop("run.json"), "each start describes the run"
    near(rows, wanted, 2**-24)


def test_tensorboard_reads_every_value_once_also_after_a_second_export(tmp_path, run, log):
    info = program.read_json(run / "run.json")
    for _ in range(2):
        export(run, "--tensorboard", tmp_path)
        rows, events = read_events(tmp_path / "run")
        text = rows[0].pop("run.json")
        assert json.loads(text.strip("`\n")) == info
        near(rows, log, 2**-24)
    assert len(list((tmp_path / "run").iterdir())) == 1
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    options = hparams.parse_session_start_info_plugin_data(content).hparams
    assert options["lr"].number_value == float(info["options"]["lr"]) and options["attention"].string_value == "diff_v2"
    times = [event.wall_time for event in events.Scalars("train/loss")]
    durations = [json.loads(line)["ms"] / 1e3 for line in log.splitlines() if '"train"' in line]
    assert all(abs(b - a - d) < 1e-3 for a, b, d in zip(times, times[1:], durations[1:])), (times, durations)


def test_tensorboard_reads_every_value_once_also_after_a_restart(tmp_path, run):
    events = tmp_path / "events/grows"
    grows = copied(run, tmp_path / "grows", "".join(record("train", s, tokens=s, loss=s + 0.5) for s in range(1, 9)))
    with Following(grows, "--tensorboard", events.parent) as following:
        following.wait_until(lambda: 7 in read_events(events)[0])
        assert 8 not in read_events(events)[0], "a step is written before its last record"
        losses = [s + (0.5 if s < 5 else 0.25) for s in range(15)]
        lines = "".join(record("train", s, tokens=s, loss=losses[s]) for s in range(1, 15)) + STOPPED
        (grows / "log.jsonl").write_text(lines)
        following.end()
    rows = read_events(events)[0]
    assert rows.pop(0).keys() == {"run.json"}
    near(rows, lines, 2**-24)


def test_wandb_reads_every_value_and_a_run_that_went_back_is_another_one(tmp_path, run, log, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = copied(run, tmp_path / "run", log)
    export(run, "--wandb project --offline")
    export(run, "--wandb project")  # there is no key
    info = program.read_json(run / "run.json")
    (one, config, rows), (two, _, again) = read_wandb(tmp_path)
    near(rows, log, 0)
    assert one == two and rows == again, "a second export is the same W&B run"
    assert config["attention"] == "diff_v2" and config["lr"] == info["options"]["lr"]
    assert config["run"]["model"] == info["model"]
    (run / "log.jsonl").write_text("".join(log.splitlines(keepends=True)[:-6]))
    with Following(run, "--wandb project") as following:
        following.wait_until(lambda: len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 3)
        following.send_signal(signal.SIGINT)
        following.end()
    assert read_wandb(tmp_path)[-1][0] != one, "W&B cannot take steps back: they need another run"


def test_mistakes_have_one_line_and_their_status(tmp_path, run):
    events, targets = tmp_path / "x", "--tensorboard DIR and --wandb PROJECT"
    out = ["--tensorboard", events]
    export(*out, status=2, text="RUN")
    export(run, status=2, text=targets)
    export(run, *out, "--wandb p", status=2, text=targets)
    export(run, *out, "--offline", status=2, text="--offline requires --wandb")
    export(run, *out, "--interval 0", status=2, text="--interval 0")
    export(run, run, *out, status=2, text="run: two runs have this name")
    export(run, *out, "--colour", status=2, text="--colour")
    export(tmp_path / "none", *out, status=1, text="none/run.json: No such file")
    unlogged = copied(run, tmp_path / "unlogged", "")
    (unlogged / "log.jsonl").unlink()
    assert "unlogged: to step -1" in export(unlogged, "--tensorboard", tmp_path / "empty")
    export(run, "--tensorboard /proc/none", status=1, text="/proc/none")
    (unlogged / "run.json").write_text("{")
    export(unlogged, *out, status=1, text="unlogged/run.json: not JSON")
    export(tmp_path / os.fsdecode(b"r\xff"), *out, status=1, text="/r\\udcff/run.json': rename it: ")
    assert not events.exists()
