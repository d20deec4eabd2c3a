#!/usr/bin/env python3
"""Exports runs of the trainer to TensorBoard or to Weights & Biases.

  scripts/export/export_run.py RUN... --tensorboard DIR   event files in DIR/NAME; tensorboard --logdir DIR shows them
  scripts/export/export_run.py RUN... --wandb PROJECT     one W&B run for each; offline without a key (WANDB_API_KEY)

RUN is a run directory (--out of the trainer); NAME is its last component. Each value of log.jsonl gets the name
KIND/KEY, such as train/loss, val/loss; a value of a layer stats_KEY/layer_NN, one of a multiple-choice task
choices_KEY/TASK. Events are JSON texts with the name events. null values are left out. Where a run went
back to an earlier step, the later values replace the earlier ones. An incomplete last line is not read; other lines
that are no records are counted. docs/training.md has the details.
"""

import argparse
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import python_environment
from lab import cli, option_history, run_directory
from lab.run_directory import RunError

QUIET = 60  # seconds without a new record after which an unlocked run has ended
IDENTITY = {"stats": "layer", "choices": "name"}  # what records of a step differ in


class Run:
    """A run's log as rows: step -> {name: value}, each complete when the log has a later step."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.name = self.directory.resolve().name
        self.info = run_directory.read_run(directory)
        self.changed = time.monotonic()  # when the log grew
        self.stopped = False
        self.start_over()

    def start_over(self):
        self.log = run_directory.Log(self.directory / "log.jsonl")
        self.rows = {}
        self.left_out = []  # numbers of lines that are no records
        self.written = self.last = -1  # steps

    @property
    def options(self):
        return option_history.history(self.info)[-1][1]

    def read(self):
        """Adds the new records. Returns whether rows that are written already have changed."""
        broken = []
        records, gone = self.log.read(broken)
        self.left_out = broken if gone else self.left_out + broken
        if records or gone:
            self.changed = time.monotonic()
        if any(record.get("what") == "start" for record in records):
            self.info = run_directory.read_run(self.directory)
        if gone and self.written >= 0:
            return True
        if gone:
            self.rows, self.last = {}, -1
        for record in records:
            if record["step"] <= self.written:
                return True
            self.add(record)
        return False

    def add(self, record):
        kind, step = record["kind"], int(record["step"])
        again = kind == "train" and "train/loss" in self.rows.get(step, {})
        if step < self.last or again:  # the run went back
            first = step if kind == "train" else step + 1
            self.rows = {s: row for s, row in self.rows.items() if s < first}
        self.last = step
        row = self.rows.setdefault(step, {})
        values = {key: value for key, value in record.items() if key not in ("kind", "step")}
        self.stopped = kind == "event" and record.get("what") == "stopped"
        if kind == "event":
            row["events"] = json.dumps([*json.loads(row.get("events", "[]")), values])
            return
        which = values.pop(IDENTITY.get(kind), None)
        of = f"layer_{which:02d}" if isinstance(which, int) else which
        for name, value in values.items():
            if isinstance(value, (list, dict)):
                value = json.dumps(value)
            row[f"{kind}_{name}/{of}" if of else f"{kind}/{name}"] = value

    def take(self, all_rows):
        """The rows that are complete and not written yet, in order; with all_rows also the last one."""
        steps = [step for step in sorted(self.rows) if all_rows or step < self.last]
        self.written = steps[-1] if steps else self.written
        return [(step, self.rows.pop(step)) for step in steps]

    def ended(self):
        if run_directory.locked(self.directory):  # also after the last step: its records may follow
            return False
        state, _ = run_directory.state(self.directory, int(self.options["steps"]))
        return state in ("done", "diverged") or self.stopped or time.monotonic() - self.changed > QUIET


def numbers(row):
    is_number = lambda value: isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return {name: float(value) for name, value in row.items() if is_number(value)}


def texts(row):
    return {name: value for name, value in row.items() if isinstance(value, str)}


class TensorBoard:
    """Event files, one for each run. A new one replaces those of an earlier export."""

    SUFFIX = ".diffv2"

    def __init__(self, directory):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.directory, self.writers, self.seconds = Path(directory), {}, {}
        self.events, self.summaries = event_pb2, summary_pb2
        self.hparams, self.text, self.writer = hparams_pb, text_pb, EventFileWriter

    def place(self, run):
        return self.directory / run.name

    def begin(self, run):
        old = list(self.place(run).glob(f"events.out.tfevents.*{self.SUFFIX}"))
        self.end(run)
        self.writers[run] = self.writer(str(self.place(run)), filename_suffix=self.SUFFIX)
        for path in old:
            path.unlink()
        self.seconds[run] = None
        return -1

    def add(self, run, step, summary):
        self.writers[run].add_event(self.events.Event(wall_time=self.seconds[run], step=step, summary=summary))

    def describe(self, run, step):
        """run.json, and the options for the comparison of runs."""
        self.add(run, step, self.text("run.json", f"```\n{json.dumps(run.info, indent=2)}\n```"))
        options = {name: "none" if value is None else value for name, value in run.options.items()}
        self.add(run, step, self.hparams(options, trial_id=run.name, start_time_secs=self.seconds[run]))

    def write(self, run, rows):
        if (
            rows and self.seconds[run] is None
        ):  # the log has durations, and no times: it is assumed that the run did not pause
            duration = sum(row.get("train/ms") or 0 for _, row in rows) / 1e3
            self.seconds[run] = (run.directory / "log.jsonl").stat().st_mtime - duration
            start = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writers[run].add_event(self.events.Event(wall_time=self.seconds[run], step=0, session_log=start))
            self.describe(run, 0)
        for step, row in rows:
            self.seconds[run] += (row.get("train/ms") or 0) / 1e3
            if step > 0 and '"what": "start"' in row.get("events", ""):
                self.describe(run, step)
            value = self.summaries.Summary.Value
            self.add(
                run,
                step,
                self.summaries.Summary(value=[value(tag=tag, simple_value=x) for tag, x in numbers(row).items()]),
            )
            for tag, text in texts(row).items():
                self.add(run, step, self.text(tag, text))
        self.writers[run].flush()

    def end(self, run):
        writer = self.writers.pop(run, None)
        if writer:
            writer.close()


class WeightsAndBiases:
    """One W&B run for each run. Its ID, and how much of the log it has, is in RUN/wandb.json: a later export continues
    it where W&B allows that (online, and if the run has not gone back to an earlier step)."""

    def __init__(self, project, offline):
        import wandb

        self.wandb, self.project, self.runs, self.ids, self.places = wandb, project, {}, {}, {}
        self.offline = offline or not wandb.api.api_key
        self.directory = os.environ.get("WANDB_DIR", ".")

    def place(self, run):
        return self.places.get(run, f"W&B project {self.project}")

    def state(self, run):
        return run.directory / "wandb.json"

    def begin(self, run):
        """Starts or continues the W&B run. Returns the last step that it has, or -1."""
        self.end(run)
        shape = {"id": "text", "end": "non-negative integer", "last": "text"}
        saved = run_directory.read_json(self.state(run), shape) if self.state(run).exists() else None
        if saved:
            log = run_directory.Log(run.directory / "log.jsonl", int(saved["end"]), saved["last"].encode("latin-1"))
            saved = saved if not log.read()[1] else None
        self.ids[run] = saved["id"] if saved else secrets.token_hex(4)
        self.save(run)
        settings = self.wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=True, x_disable_stats=True, x_disable_meta=True
        )
        config = {**run.options, "run": {key: value for key, value in run.info.items() if key != "options"}}
        self.runs[run] = self.wandb.init(
            project=self.project,
            dir=self.directory,
            mode="offline" if self.offline else "online",
            id=self.ids[run],
            name=run.name,
            resume=None if self.offline else "allow",
            reinit="create_new",
            config=config,
            settings=settings,
        )
        files = self.runs[run].settings.sync_dir
        self.places[run] = f"{files} (wandb sync uploads it)" if self.offline else self.runs[run].url
        return self.runs[run].step - 1

    def save(self, run):
        state = {"id": self.ids[run], "end": run.log.end, "last": run.log.last.decode("latin-1")}
        run_directory.write_atomic(self.state(run), json.dumps(state) + "\n")

    def write(self, run, rows):
        for step, row in rows:
            if step > 0 and '"what": "start"' in row.get("events", ""):
                self.runs[run].config.update(run.options, allow_val_change=True)
            self.runs[run].log(numbers(row) | texts(row), step=step)
        if rows:
            self.save(run)

    def end(self, run):
        if run in self.runs:
            self.runs.pop(run).finish()


def export(runs, target, follow, interval):
    """Writes the runs, with `follow` until they have ended."""
    going = list(runs)
    for run in runs:
        run.skip = target.begin(run)
    while going:
        for run in list(going):
            ended = not follow or run.ended()  # before the log is read
            while run.read():
                run.start_over()
                run.skip = target.begin(run)
            target.write(run, [(step, row) for step, row in run.take(ended) if step > run.skip])
            if ended:
                going.remove(run)
        if going:
            time.sleep(interval)


def parse(arguments):
    parser = cli.Parser(
        prog="export_run.py",
        usage="export_run.py RUN... (--tensorboard DIR | --wandb PROJECT [--offline]) [--follow]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory", action="extend")
    parser.add_argument("--tensorboard", metavar="DIR", help="write event files to DIR/NAME")
    parser.add_argument("--wandb", metavar="PROJECT", help="write W&B runs to this project")
    parser.add_argument("--follow", action="store_true", help="continue until the runs have ended, or Ctrl-C")
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=5, help="with --follow: time between reads"
    )
    parser.add_argument("--offline", action="store_true", help="with --wandb: write files for `wandb sync`")
    a = parser.parse_args(arguments)
    if (a.tensorboard is None) == (a.wandb is None):
        parser.error("specify one of --tensorboard DIR and --wandb PROJECT")
    if a.offline and not a.wandb:
        parser.error("--offline requires --wandb")
    if not 0.01 <= a.interval <= 1e6:
        parser.error(f"--interval {a.interval:g}: must be from 0.01 to 1e6 seconds")
    names = [Path(run).resolve().name for run in a.runs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        parser.error(f"{twice[0]}: two runs have this name, by which their values are distinguished")
    return a


def main():
    a = parse(sys.argv[1:])
    python_environment.ensure("export")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runs, target = [], None
    try:
        runs = [Run(directory) for directory in a.runs]
        target = TensorBoard(a.tensorboard) if a.tensorboard else WeightsAndBiases(a.wandb, a.offline)
        export(runs, target, a.follow, a.interval)
    except KeyboardInterrupt:
        if not a.follow:
            cli.fail("export_run.py", "interrupted", 130)
    except RunError as error:
        cli.fail("export_run.py", str(error))
    except OSError as error:
        cli.fail("export_run.py", f"{error.filename or 'output'}: {error.strerror or error}")
    finally:
        for run in runs if target else []:
            target.end(run)
    for run in runs:
        what = f"{run.name}: to step {run.written} in {target.place(run)}"
        if run.left_out:
            what += f"; lines of log.jsonl that are no records: {len(run.left_out)}, first {run.left_out[0]}"
        print(what)


if __name__ == "__main__":
    main()
