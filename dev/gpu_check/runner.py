"""What the parts of a check work with: the programs, the time that is left, the folder of results."""

import ctypes
import os
import shlex
import signal
import subprocess
import threading
import time

from programs import ROOT, Programs

SPARE, GRACE = 6, 2  # seconds that are kept for writing results and leaving; of a program to end


libc = ctypes.CDLL(None)


def die_with_me():
    """In a program that was just started: it is killed when this one ends, however that ends, so that it writes no more."""
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


class OutOfTime(Exception):
    """The check must end now: what is not done is for the next time."""


class Skip(Exception):
    """A part that cannot be done here, and why."""


class Unfinished(Exception):
    """A part with cases that were stopped before their end, and which."""


class Check:
    """What the parts work with: programs, time, the folder of results."""

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
        return {**os.environ, **self.programs.environment_of(words), **(more or {})}

    def corpus(self):
        """A corpus directory: the bundle's, or one that was made here."""
        for place in (self.bundle and self.bundle / "corpus", ROOT / "corpus"):
            if place and list(place.glob("train_*.bin")):
                return place
        return None

    def run(self, command, limit=600, env=None, cwd=ROOT):
        """(exit status, output). A program over its own limit is stopped: status None; over the check's: OutOfTime."""
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
                preexec_fn=die_with_me,
            )
        except OSError as error:
            self.store.log.write(f"{error}\n")
            return 127, f"{words[0]} cannot be started: {error.strerror}"
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
        self.store.log.write(
            f"# status {'stopped, too long' if status is None else status}, {time.monotonic() - started:.1f} s\n"
        )
        if status is None and self.left() <= 0:
            raise OutOfTime
        return status, "".join(lines)

    def run_all(self, commands, limit=600):
        """[(exit status, output)] of programs that run at the same time."""
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
    """Ends a program and all processes of its process group. SIGTERM comes first: make and compilers then remove partial
    outputs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
    process.wait()


class Part:
    """A part's findings. What a case has found counts once the case has ended: a killed one is repeated whole."""

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
        """Forgets what the part has found: it is done again from its first case."""
        for key in ("done", "checks", "records"):
            self.state[key] = []

    def end(self, case):
        self.state["checks"] += self.checks
        self.state["records"] += self.records
        self.state["done"].append(case)
        self.checks, self.records = [], []
        self.check_.store.save()
