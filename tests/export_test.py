#!/usr/bin/env python3
"""Tests scripts/export_run.py: what it writes is read back by csv, TensorBoard's EventAccumulator and W&B's DataStore.
The expected rows are made here from the text of log.jsonl. The last line is "N passed, N failed".

Usage: tests/export_test.py [WORD...]    those whose name contains a WORD
Requires the Python packages of scripts/export_python.
Variables: TRAIN_DIFFV2 (build/train_diffv2)
Exit status: 0 all passed, 1 some failed, 2 usage.
"""

import csv
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal import datastore

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPORT = ROOT / "scripts/export_run.py"
TRAINER = (ROOT / os.environ.get("TRAIN_DIFFV2", "build/train_diffv2")).absolute()
MODEL = "--layers 2 --hidden 16 --heads 2 --kv-heads 1 --head-dim 8 --ffn 16 --seq-len 16 --batch-size 1 --threads 1"
RUN = "--steps 12 --val-every 4 --val-steps 1 --stats-every 3 --vocab 257"
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {
    "HOME": "/nonexistent",  # without a W&B key
    "WANDB_ERROR_REPORTING": "false",
}
CHOICES = {"kind": "choices", "name": "arc", "examples": 9, "accuracy": 0.5, "accuracy_norm": None, "norm": "tokens"}
CHOICES |= {"chance": 0.25, "fingerprint": "12"}
STOPPED = '{"kind": "event", "step": 14, "what": "stopped", "why": "signal"}\n'
tests = []


def test(function):
    tests.append(function)
    return function


def train(directory, *options):
    tokens = directory.parent / "tokens.bin"
    count = 1000
    tokens.write_bytes(
        struct.pack("<256i", 20240520, 1, count, *[0] * 253)
        + struct.pack(f"<{count}H", *(7 * i % 257 for i in range(count)))
    )
    words = [TRAINER, *MODEL.split(), *RUN.split(), "--train-data", tokens, "--val-data", tokens, "--out", directory]
    done = subprocess.run([*words, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        if kind in ("stats", "tensor") and (layer := values.pop("layer")) is not None:
            part += f"/layer_{layer:02d}"
        if kind in ("choices", "tensor"):
            part += f"/{values.pop('name')}"
        values = {k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in values.items() if v is not None}
        row.update({f"{kind}_{k}{part}" if part else f"{kind}/{k}": v for k, v in values.items()})
    return rows


def export(*words, status=0, text=""):
    done = subprocess.run([sys.executable, EXPORT, *words], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == status and text in done.stderr, (words, done.returncode, done.stderr, done.stdout)
    assert done.stderr.count("\n") == (status != 0), done.stderr
    return done.stdout


class Following:
    """An export with --follow, while the log changes."""

    def __init__(self, *words):
        words = [sys.executable, EXPORT, *words, "--follow", "--interval", "0.05"]
        self.process = subprocess.Popen(
            words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, reached):
        end = time.monotonic() + 300  # on a busy machine, importing wandb takes a minute
        while not reached():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "nothing happens in 300 s"
            time.sleep(0.05)

    def end(self, stop=None):
        if stop:
            self.process.send_signal(stop)
        _, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == 0 and not errors, (self.process.returncode, errors)


# ---- readers


def read_csv(path):
    """{run: {step: {name: text}}} without empty cells."""
    runs = {}
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows = runs.setdefault(row.pop("run"), {})
                step = int(row.pop("step"))
                assert step not in rows, f"step {step} is there twice"
                rows[step] = {name: text for name, text in row.items() if text}
    return runs


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


def same_csv(rows, log):
    assert rows == {s: {name: str(value) for name, value in row.items()} for s, row in expected(log).items()}


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


@test
def a_table_has_every_value_of_two_runs(scratch, log):
    other = scratch / "other"
    other.mkdir()
    (other / "run.json").write_bytes((scratch / "run/run.json").read_bytes())
    lines = record("train", 1, tokens=5, loss=2.5, lr=None) + json.dumps({**CHOICES, "step": 1}) + "\n"
    lines += record("sample", 1, text=None, tokens=4) + record("sample", 2, text='a,\n"b', tokens=4, stopped="length")
    lines += record("later", 2, number=3, flag=True, things=[1, {"a": 2}])  # of a newer trainer
    wrong = "not a record\n" + '{"kind": "train", "step": 3, "loss": NaN}\n{"kind": "train", "step": -1}\n'
    (other / "log.jsonl").write_text(lines + wrong + '{"kind": "val", "step": 2, "lo')
    said = export(scratch / "run", other, "--csv", scratch / "both.csv")
    assert "no records: 3, first 6" in said and said.count("no records") == 1, said
    runs = read_csv(scratch / "both.csv")
    assert runs.keys() == {"run", "other"}
    same_csv(runs["run"], log)
    same_csv(runs["other"], lines)
    names = {name for row in runs["run"].values() for name in row}
    assert {"train/loss", "val/loss", "events", "stats_lambda_mean/layer_01"} <= names, names
    assert {"choices_accuracy/arc", "choices_norm/arc"} < runs["other"][1].keys()


@test
def numbers_beyond_the_range_and_texts_that_no_file_can_contain_are_left_out(scratch, log):
    odd = scratch / "odd"
    odd.mkdir()
    (odd / "run.json").write_bytes((scratch / "run/run.json").read_bytes())
    lines = record("later", 1, large=10**400, small=2) + record("tensor", 1, layer=1.5, name="x", rms=1.0)  # no layer
    (odd / "log.jsonl").write_text(lines + record("event", 1, what="\ud800"))
    said = export(odd, "--tensorboard", scratch / "odd_events")
    assert "no records: 2, first 2" in said, said
    found = read_events(scratch / "odd_events/odd")[0][1]
    assert found["later/small"] == 2 and "later/large" not in found, found.keys()


@test
def where_a_run_went_back_the_later_values_count(scratch, log):
    older = scratch / "older"
    older.mkdir()
    (older / "run.json").write_bytes((scratch / "run/run.json").read_bytes())
    before = [record("train", s, tokens=s, loss=s + 0.5) for s in range(1, 9)] + [record("val", 8, loss=9)]
    after = [record("event", 3, what="start")] + [record("train", s, tokens=s, loss=s + 0.25) for s in range(4, 7)]
    (older / "log.jsonl").write_text("".join(before + after))
    wanted = "".join(before[:3] + after)
    export(older, "--csv", scratch / "older.csv")
    same_csv(read_csv(scratch / "older.csv")["older"], wanted)
    export(older, "--tensorboard", scratch / "older-events")
    rows = read_events(scratch / "older-events/older")[0]
    assert rows.pop(0).keys() == {"run.json"} and "options" in rows[3].pop("run.json"), "each start describes the run"
    near(rows, wanted, 2**-24)


@test
def a_table_follows_a_run_that_is_resumed_and_gets_new_columns(scratch, log):
    run, path = scratch / "grows", scratch / "grows.csv"
    run.mkdir()
    (run / "run.json").write_bytes((scratch / "run/run.json").read_bytes())
    lines = [x for x in log.splitlines(keepends=True) if json.loads(x)["kind"] not in ("tensor", "logits")]
    file = run / "log.jsonl"
    file.write_text("".join(lines[:9]) + lines[9][:20])
    following = Following(run, "--csv", path)
    following.until(lambda: len(read_csv(path).get("grows", ())) > 1)
    file.write_text("".join(lines[:20]))
    last = max(json.loads(line)["step"] for line in lines[:20])
    following.until(lambda: last - 1 in read_csv(path).get("grows", ()))
    back = [record("event", 2, what="start")] + [record("train", s, tokens=s, loss=77 + s) for s in range(3, 14)]
    back.append(json.dumps({**CHOICES, "step": 14}) + "\n")
    kept = "".join(line for line in lines[:20] if json.loads(line)["step"] <= 2) + "".join(back)
    file.write_text(kept)
    following.until(lambda: read_csv(path).get("grows", {}).get(13, {}).get("train/loss") == "90")
    assert 14 not in read_csv(path)["grows"], "a step is written before its last record"
    file.write_text(kept + STOPPED)
    following.end()
    same_csv(read_csv(path)["grows"], kept + STOPPED)


@test
def tensorboard_reads_every_value_once_also_after_a_second_export_and_a_restart(scratch, log):
    directory, info = scratch / "events", json.loads((scratch / "run/run.json").read_text())
    for _ in range(2):
        export(scratch / "run", "--tensorboard", directory)
        rows, events = read_events(directory / "run")
        text = rows[0].pop("run.json")
        assert json.loads(text.strip("`\n")) == info
        near(rows, log, 2**-24)
    assert len(list((directory / "run").iterdir())) == 1
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    options = hparams.parse_session_start_info_plugin_data(content).hparams
    assert options["lr"].number_value == float(info["options"]["lr"]) and options["attention"].string_value == "diff_v2"
    times = [event.wall_time for event in events.Scalars("train/loss")]
    durations = [json.loads(line)["ms"] / 1e3 for line in log.splitlines() if '"train"' in line]
    assert all(abs(b - a - d) < 1e-3 for a, b, d in zip(times, times[1:], durations[1:])), (times, durations)

    run = scratch / "events-grow"
    run.mkdir()
    (run / "run.json").write_bytes((scratch / "run/run.json").read_bytes())
    lines = "".join(record("train", s, tokens=s, loss=s + 0.5) for s in range(1, 9))
    (run / "log.jsonl").write_text(lines)
    following = Following(run, "--tensorboard", directory)
    following.until(lambda: 7 in read_events(directory / "events-grow")[0])
    lines = "".join(record("train", s, tokens=s, loss=s + (0.5 if s < 5 else 0.25)) for s in range(1, 15)) + STOPPED
    (run / "log.jsonl").write_text(lines)
    following.end()
    rows = read_events(directory / "events-grow")[0]
    assert rows.pop(0).keys() == {"run.json"}
    near(rows, lines, 2**-24)


@test
def wandb_reads_every_value_and_a_run_that_went_back_is_another_one(scratch, log):
    run, offline = scratch / "run", scratch / "offline"
    ENVIRONMENT["WANDB_DIR"] = str(offline)
    offline.mkdir()
    export(run, "--wandb", "project", "--offline")
    export(run, "--wandb", "project")  # there is no key
    info = json.loads((run / "run.json").read_text())
    (one, config, rows), (two, _, again) = read_wandb(offline)
    near(rows, log, 0)
    assert one == two and rows == again, "a second export is the same W&B run"
    assert config["attention"] == "diff_v2" and config["lr"] == info["options"]["lr"]
    assert config["run"]["model"] == info["model"]
    (run / "log.jsonl").write_text("".join(line for line in log.splitlines(keepends=True)[:-6]))
    following = Following(run, "--wandb", "project")
    following.until(lambda: len(list(offline.glob("wandb/offline-run-*/*.wandb"))) == 3)
    following.end(stop=signal.SIGINT)
    assert read_wandb(offline)[-1][0] != one, "W&B cannot take steps back: they need another run"
    (run / "log.jsonl").write_text(log)


@test
def a_run_of_the_trainer_is_followed_to_its_end(scratch, log):
    run = scratch / "live"
    train(run, "--stop-after", "6")
    (run / "log.jsonl").write_text(
        "".join(line for line in (run / "log.jsonl").read_text().splitlines(keepends=True) if '"stopped"' not in line)
    )
    following = Following(run, "--csv", scratch / "live.csv")
    following.until(lambda: 5 in read_csv(scratch / "live.csv").get("live", ()))
    train(run, "--resume")
    following.end()
    same_csv(read_csv(scratch / "live.csv")["live"], (run / "log.jsonl").read_text())


@test
def mistakes_have_one_line_and_their_status(scratch, log):
    run, out = scratch / "run", scratch / "x.csv"
    export("--csv", out, status=2, text="RUN")
    export(run, status=2, text="--tensorboard DIR, --wandb PROJECT and --csv FILE")
    export(run, "--csv", out, "--wandb", "p", status=2, text="--tensorboard DIR, --wandb PROJECT and --csv FILE")
    export(run, "--csv", out, "--offline", status=2, text="--offline requires --wandb")
    export(run, "--csv", out, "--interval", "0", status=2, text="--interval 0")
    export(run, run, "--csv", out, status=2, text="run: two runs have this name")
    export(run, "--csv", out, "--colour", status=2, text="--colour")
    export(scratch / "none", "--csv", out, status=1, text="none/run.json: No such file")
    (scratch / "unlogged").mkdir()
    (scratch / "unlogged/run.json").write_bytes((run / "run.json").read_bytes())
    assert "unlogged: to step -1" in export(scratch / "unlogged", "--csv", scratch / "empty.csv")
    export(run, "--csv", "/proc/none/x.csv", status=1, text="/proc/none/x.csv")
    export(run, "--tensorboard", "/proc/none", status=1, text="/proc/none")
    (scratch / "broken").mkdir()
    (scratch / "broken/run.json").write_text("{")
    export(scratch / "broken", "--csv", out, status=1, text="broken/run.json: not JSON")
    export(os.fsencode(scratch) + b"/r\xff", "--csv", out, status=1, text="/r\\udcff/run.json': rename it: ")
    assert not out.exists()


@test
def the_table_follows_links_and_replaces_no_device_and_no_other_file(scratch, log):
    place = scratch / "place"
    (place / "far").mkdir(parents=True)
    (place / "link.csv").symlink_to("far/file.csv")
    (place / "link.csv.tmp").write_text("mine")
    os.mkfifo(place / "pipe")
    for name in ("pipe", "null"):
        target = place / name if name == "pipe" else "/dev/null"
        export(scratch / "run", "--csv", target, status=1, text="not a regular file")
    said = export(scratch / "run", "--csv", place / "link.csv")
    assert f"in {place / 'link.csv'}" in said and (place / "pipe").is_fifo(), said
    same_csv(read_csv(place / "far/file.csv")["run"], log)
    assert sorted(path.name for path in place.rglob("*")) == ["far", "file.csv", "link.csv", "link.csv.tmp", "pipe"]
    assert (place / "link.csv").is_symlink() and (place / "link.csv.tmp").read_text() == "mine"


def main():
    words = sys.argv[1:]
    if not all(any(word in function.__name__ for function in tests) for word in words):
        print("export_test.py: a WORD is in the name of no test", file=sys.stderr)
        return 2
    passed = failed = 0
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        train(scratch / "run")
        log = (scratch / "run/log.jsonl").read_text()
        for function in tests:
            if words and not any(word in function.__name__ for word in words):
                continue
            what = f"export: {function.__name__.replace('_', ' ')}"
            try:
                function(scratch, log)
                passed += 1
                print(f"ok   {what}", flush=True)
            except Exception as error:
                failed += 1
                where = traceback.extract_tb(error.__traceback__)[-1].lineno
                print(f"FAIL {what}: line {where}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
