"""Runs the programs of a check within its time, and collects the findings of its parts."""

import ctypes
import os
import shlex
import signal
import subprocess
import threading
import time

from programs import ROOT, Programs
from tools import last_line

SPARE, GRACE = 6, 2  # seconds reserved for writing results; between SIGTERM and SIGKILL


libc = ctypes.CDLL(None)


def kill_with_parent():
    """Called in a child process: the kernel kills it when this process ends for any reason."""
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


class OutOfTime(Exception):
    """The time is up. The next run continues."""


class Skip(Exception):
    """The part cannot run on this machine; the reason."""


class Unfinished(Exception):
    """Cases of the part reached their time limit; which."""


class Check:
    """The context of all parts: programs, remaining time, results."""

    def __init__(self, options, store):
        self.options, self.store = options, store
        self.pretend, self.bundle = options.pretend, options.bundle
        self.root = ROOT
        self.work = ROOT / "build/gpu_check"
        self.work.mkdir(parents=True, exist_ok=True)
        self.ends = time.monotonic() + 60 * options.minutes - SPARE if options.minutes else None
        self.programs = Programs(options.bundle, options.pretend)
        self.commands = self.programs.commands

    def left(self):
        return self.ends - time.monotonic() if self.ends else 1e9

    def environment(self, words, more=None):
        return {**os.environ, **self.programs.variables_of(words), **(more or {})}

    def corpus(self):
        """The corpus directory: the bundle's or corpus/; None if there is none."""
        for place in (self.bundle and self.bundle / "corpus", ROOT / "corpus"):
            if place and list(place.glob("train_*.bin")):
                return place
        return None

    def why_no_fp8(self):
        """Why this device has no --gemm fp8; '' if it has."""
        status, text = self.run([*self.commands["TRAIN_DIFFV2CU"], *"--dry-run --preset tiny --gemm fp8".split()], 60)
        return "" if status == 0 else last_line(text)

    def run(self, command, limit=600, env=None, cwd=ROOT):
        """(exit status, output). Status None: stopped at its limit. Raises OutOfTime at the limit of the check."""
        words = [str(w) for w in command]
        limit = min(limit, self.left())
        if limit <= 0:
            raise OutOfTime
        self.store.log.write(f"$ {shlex.join(words)}\n")
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=cwd,
                env=self.environment(words, env),
                start_new_session=True,
                preexec_fn=kill_with_parent,
            )
        except OSError as error:
            self.store.log.write(f"{error}\n")
            return 127, f"cannot start {words[0]}: {error.strerror}"
        lines = []

        def read():
            for line in process.stdout:
                lines.append(line)
                self.store.log.write(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            status = process.wait(limit)
        except BaseException as error:
            end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
        reader.join(5)
        outcome = "stopped at its time limit" if status is None else f"status {status}"
        self.store.log.write(f"# {outcome}, {time.monotonic() - started:.1f} s\n")
        if status is None and self.left() <= 0:
            raise OutOfTime
        return status, "".join(lines)

    def run_all(self, commands, limit=600):
        """[(exit status, output)] of programs that run concurrently."""
        results = [None] * len(commands)

        def one(i):
            try:
                results[i] = self.run(commands[i], limit)
            except BaseException as error:
                results[i] = error

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(commands))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def end(process):
    """Ends a process group. SIGTERM comes first, so that make and compilers remove partial outputs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
    process.wait()


class Part:
    """The findings of a part. They are stored when a case ends; a case that was killed is repeated."""

    def __init__(self, check, name):
        self.check_, self.name = check, name
        self.state = check.store.part(name)
        self.checks, self.records = [], []

    def pending(self, case):
        return case not in self.state["done"]

    def check(self, what, ok, detail=""):
        self.checks.append({"what": what, "ok": bool(ok), "detail": detail})
        self.check_.store.say(f"  {'ok  ' if ok else 'FAIL'} {what}{': ' + detail if detail else ''}")

    def record(self, record):
        self.records.append(record)

    def fact(self, what, value):
        self.record({"table": "facts", "what": what, "value": str(value)})

    def restart(self):
        """Discards the findings of the part, which starts again from its first case."""
        for key in ("done", "checks", "records"):
            self.state[key] = []

    def end(self, case):
        self.state["checks"] += self.checks
        self.state["records"] += self.records
        self.state["done"].append(case)
        self.checks, self.records = [], []
        self.check_.store.save()
