#!/usr/bin/env python3
"""Measures the loss gap of scripts/lab/plans/loss-gap.plan, size half-hour, on a GPU that is rented for minutes, over
several periods.

  dev/gpu_check/gap.py DIRECTORY MINUTES [PLAN] [OPTION of `scripts/lab run`...]

Continues PLAN (default: loss-gap --size half-hour) for MINUTES with the corpus of DIRECTORY/corpus.tar.xz, which
short.sh prepare-gap makes. Requires Python 3.10.12 or newer, without packages, and the variables TRAIN_DIFFV2CU, the
command of the trainer, and OUT, a directory for two files:

  state.tar.gz  the small files of finished runs, written after each run
  gap.txt       losses by arm and rate, and the gaps, written at the end

To continue on another machine, put state.tar.gz into DIRECTORY, beside corpus.tar.xz: finished runs are not repeated.
Unfinished runs are repeated, since their checkpoints are too large to travel. On the same machine, the next call
continues with DIRECTORY/runs. For intervals and figures, in a DIRECTORY with both archives on a machine with a network:

  mkdir corpus runs && tar -xf corpus.tar.xz -C corpus && tar -xf state.tar.gz -C runs
  python3 REPOSITORY/scripts/lab report runs

Exit status: that of `scripts/lab run`: 0 all runs are finished, 1 failed, 2 usage, 3 stopped at the limit.
"""

import lzma
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if sys.version_info < (3, 10, 12):
    sys.exit(f"gap.py: this is Python {sys.version.split()[0]}: 3.10.12 or newer is required")
sys.path.insert(0, str(ROOT / "scripts"))
from lab import run_directory, stats, study as studies

UNPACKED_MB = 256  # of an archive, at most
CORPUS = re.compile(r"(train|val)_\w+\.bin|corpus\.json|tokenizer\.(json|bin)")
NAME = "[a-z0-9][a-z0-9._+-]*"  # of a run
FINISHED = r"run\.json|log\.jsonl|eval\.json|checkpoints/step_[0-9]{8}/trainer_state\.json"
STATE = re.compile(rf"lab\.json|({NAME})(?:\.out|/(?:{FINISHED}))")


def fail(message, status=1):
    print(f"gap.py: {message}", file=sys.stderr)
    sys.exit(status)


def unpack(packed, directory, pattern):
    """Makes a directory of an archive. Rejects other files than those of the pattern, and too many bytes."""
    work, size = directory.with_name(f"{directory.name}.new"), 0
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        with tarfile.open(packed) as archive:
            for member in archive:
                size += member.size
                if not member.isreg() or not pattern.fullmatch(member.name):
                    fail(f"{packed}: it must not contain {member.name!a}: remove the archive, or copy it again")
                if size > UNPACKED_MB << 20:
                    fail(f"{packed}: its files have more than {UNPACKED_MB} MiB: remove the archive, or copy it again")
                archive.extract(member, work, filter="data")
        work.rename(directory)
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error) as error:
        fail(f"{packed}: {str(error).splitlines()[0]}: remove the archive, or copy it again")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def finished_runs(runs):
    """The names of the runs that need no further work."""
    steps = {run["name"]: run["steps"] for run in (run_directory.read_lab(runs) or {"runs": ()})["runs"]}
    begun = [path.parent for path in runs.glob("*/run.json") if path.parent.name in steps]
    states = {run: run_directory.state(run, steps[run.name])[0] for run in begun}
    evaluated = {run for run in begun if states[run] == "done" and (run / "eval.json").exists()}
    return {run.name for run in begun if run in evaluated or states[run] == "diverged"}


def pack(runs, names, out):
    """Writes state.tar.gz with the files of these runs."""
    with tempfile.TemporaryDirectory(dir=out) as work:
        with tarfile.open(Path(work, "state"), "w:gz") as archive:
            for name in sorted(str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()):
                if (found := STATE.fullmatch(name)) and found[1] in {None, *names}:
                    archive.add(runs / name, name)
        os.replace(Path(work, "state"), out / "state.tar.gz")


def table(runs, names):
    """The losses of finished runs, and the gaps of the arms to the reference, each at its own best rate."""
    study = studies.load([runs])[0][0]
    total = len(study.runs) + len(study.missing)
    study.runs = [run for run in study.runs if run.name in names]
    by_eval = study.by_eval()
    lines = [f"{study.title}: {len(names)} of {total} runs are finished. Losses: {study.loss_of()}.", ""]
    lines += [f"{'arm':<28} {'rate':>8} {'runs':>5} {'diverged':>9} {'loss':>8}"]
    for arm, label in study.arms.items():
        for rate in study.rates():
            if found := study.runs_of(arm, rate):
                loss = stats.mean_or_none(run.final_loss(by_eval) for run in found)
                diverged = sum(run.state == "diverged" for run in found)
                lines += [f"{label:<28} {rate:>8g} {len(found):>5} {diverged:>9} "]
                lines[-1] += f"{'-':>8}" if loss is None else f"{loss:>8.4f}"
    own = {arm: study.own_runs(arm) for arm in study.arms}
    losses = {arm: {seed: run.final_loss(by_eval) for seed, run in found.items()} for arm, found in own.items()}
    lines += ["", f"Arm minus {study.arms[study.reference]}, paired by seed, each arm at its own best rate:"]
    for arm, label in study.arms.items():
        gaps = stats.paired(losses[arm], losses[study.reference])
        if gaps and arm != study.reference:
            rates = " and ".join(f"{study.own_rate(a):g}" for a in (arm, study.reference))
            each = ", ".join(f"{gap:+.4f} (seed {seed})" for seed, gap in gaps.items())
            lines += [f"{label:<28} mean {stats.mean(gaps.values()):+.4f} at rates {rates}: {each}"]
    return "\n".join([*lines, ""])


def run(directory, minutes, options):
    began, runs = time.monotonic(), directory / "runs"
    if not os.environ.get("TRAIN_DIFFV2CU") or not os.environ.get("OUT"):
        fail("it requires the variables TRAIN_DIFFV2CU, the command of the trainer, and OUT, a directory", 2)
    words, out = shlex.split(os.environ["TRAIN_DIFFV2CU"]), Path(os.environ["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    if not (directory / "corpus").exists():
        if not (directory / "corpus.tar.xz").exists():
            fail(f"{directory} has no corpus.tar.xz: short.sh prepare-gap makes it")
        unpack(directory / "corpus.tar.xz", directory / "corpus", CORPUS)
    if not runs.exists() and (directory / "state.tar.gz").exists():
        unpack(directory / "state.tar.gz", runs, STATE)
    words[0] = os.path.abspath(shutil.which(words[0]) or words[0])
    trainer = directory / "trainer"  # for the lab, which requires a program without arguments
    trainer.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    trainer.chmod(0o755)
    # in the directory, so that runs of all machines have one path of the data
    plan = [] if options and not options[0].startswith("-") else ["loss-gap", "--size", "half-hour"]
    command = [sys.executable, ROOT / "scripts/lab", "run", *plan, *options, "--trainer", trainer, "--gpus", "1"]
    command += ["--data", "corpus", "--out", "runs", "--minutes"]
    left = max(0.01, minutes - (time.monotonic() - began) / 60)  # 0: without a limit
    packed, lab = set(), subprocess.Popen([*command, str(left)], cwd=directory)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: lab.terminate())
    try:
        ended = False
        while not ended:
            ended = lab.poll() is not None
            if (names := finished_runs(runs)) != packed:
                pack(runs, names, out)
                packed = names
            time.sleep(0 if ended else 1)
    finally:
        lab.terminate()
    text = table(runs, packed) if packed else "No run is finished.\n"
    (out / "gap.txt").write_text(text)
    print(f"\n{text}", end="")
    return lab.returncode


def main(words):
    try:
        if len(words) > 1 and re.fullmatch(r"0*[1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+", words[1]):
            return run(Path(words[0]).absolute(), float(words[1]), words[2:])
    except (OSError, run_directory.RunError) as error:
        fail(str(error))
    fail("usage: gap.py DIRECTORY MINUTES [PLAN] [OPTION...]", 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
