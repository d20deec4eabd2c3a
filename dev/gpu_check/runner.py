"""Runs the programs of a check within its time, and collects the findings of its parts."""

import ctypes
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from programs import ROOT, Programs
from results import Refused, failed, sentence

SPARE, GRACE = 6, 2  # seconds reserved for writing results; between SIGTERM and SIGKILL
NO_MEMORY = r"out of (\w+ )?memory|too little (\w+ )?memory|does not fit in the"  # messages of devices that are small
NO_CORPUS = "no corpus: scripts/corpus.sh makes one"


libc = ctypes.CDLL(None)


def kill_with_parent():
    """Called in a child process: the kernel kills it when this process ends for any reason."""
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


class Unfinished(Exception):
    """A case reached its time limit, which is no failure: it is repeated later. `output` of the program so far."""

    output = ""


class OutOfTime(Unfinished):
    """The time of the part, or of the check, is up: no other case of the part starts."""


class Skip(Exception):
    """The part cannot run on this machine; the reason."""


def last_line(text, otherwise="no output"):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else otherwise


def find_tool(name):
    """The path of a CUDA tool, which is often not on PATH; None if there is none."""
    places = [
        *Path("/usr/local").glob(f"cuda*/bin/{name}"),
        *Path("/usr/local").glob(f"cuda*/compute-sanitizer/{name}"),
    ]
    return next((str(p) for p in [shutil.which(name), *places] if p and os.access(p, os.X_OK)), None)


class Program:
    """A running program in a process group of its own. Its output is logged and collected line by line."""

    def __init__(self, check, command, interactive=False):
        words = [str(w) for w in command]
        check.store.log.write(f"$ {shlex.join(words)}\n")
        self.check, self.lines, self.errors = check, [], []
        self.arrived, self.started = threading.Condition(), time.monotonic()
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if interactive else subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=check.environment(words),
            start_new_session=True,
            preexec_fn=kill_with_parent,
        )
        check.running.add(self)
        streams = ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        self.readers = [threading.Thread(target=self.read, args=s, daemon=True) for s in streams if s[0]]
        for reader in self.readers:
            reader.start()

    def read(self, stream, lines):
        for line in stream:
            with self.arrived:
                lines.append(line)
                self.arrived.notify_all()
            self.check.store.log.write(line)
        with self.arrived:
            lines.append(None)  # end of output
            self.arrived.notify_all()

    def end(self):
        """Ends the process group. SIGTERM comes first, so that compilers remove partial outputs. A process that a
        driver keeps after SIGKILL is left alone."""
        self.check.running.discard(self)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(GRACE)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        if self.process.poll() is None:
            self.check.store.log.write(f"# process {self.process.pid} does not end\n")


class StepServer(Program):
    """A program that runs one step for each line on stdin, and prints its milliseconds."""

    def __init__(self, check, command):
        super().__init__(check, command, interactive=True)

    def read_line(self, limit):
        """The next line; None if the program has ended or does not answer in time."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.lines, timeout=max(min(limit, self.check.left()), 0))
            line = self.lines.pop(0) if self.lines else None
        if line is None and self.check.left() <= 1:
            raise self.check.out_of_time()
        return line and line.strip()

    def step(self, limit, line=""):
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
            return float(self.read_line(limit))
        except (OSError, TypeError, ValueError):
            return None

    def why(self):
        """The last error. If the program has ended, its stderr is read to the end first."""
        try:
            self.process.wait(1)
            self.readers[1].join(10)
        except subprocess.TimeoutExpired:
            pass
        return last_line("".join(filter(None, self.errors)), "it ended, or did not answer in time")


class StepServers:
    """Step servers that run in turns, and end with the block. `why` is the reason of the first failure: nothing runs
    after it."""

    def __init__(self, check):
        self.check, self.servers, self.abouts, self.why = check, [], [], ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            server.end()

    def start(self, *command, first_step=None):
        """Starts one more, which prints a line about itself. first_step: the time limit of a step, which it runs."""
        if not self.why:
            self.servers.append(StepServer(self.check, command))
            self.abouts.append(self.servers[-1].read_line(120))
            if self.abouts[-1] is None or (first_step and self.servers[-1].step(first_step) is None):
                self.why = self.servers[-1].why()

    def turns(self, rounds, limit, line=""):
        """The milliseconds of all servers in each round; [] if one fails."""
        times = []
        while not self.why and len(times) < rounds:
            times.append([s.step(limit, line) for s in self.servers])
            if None in times[-1]:
                self.why = self.servers[times[-1].index(None)].why()
        return [] if self.why else times


class Check:
    """The context of all parts: programs, remaining time, results."""

    def __init__(self, options, store):
        self.options, self.store, self.pretend, self.bundle = options, store, options.pretend, options.bundle
        self.running = set()
        self.work = ROOT / "build/gpu_check"
        self.work.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.work / "lock", "a")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another gpu_check.sh uses {self.work}: wait for its end")
        self.ends = time.monotonic() + 60 * options.minutes - SPARE if options.minutes else None
        self.part_ends, self.closing, self.free_bytes = None, False, None
        self.most = float(os.environ.get("LIMIT_SECONDS") or 1e9)
        self.programs = Programs(options.bundle, options.pretend)
        self.workers = 2 if self.pretend else os.cpu_count() or 2  # programs that run at once, where several may
        self.published = options.out / "published" if self.pretend else ROOT / "results"
        self.threads = {}  # variables that divide the cores among them

    def begin(self, cap):
        """Starts the time of a part: `cap` seconds, or no limit but the check's. The emulation is slow."""
        self.part_ends = time.monotonic() + min(cap * (10 if self.pretend else 1), self.most) if cap else None

    def left(self):
        ends = [e for e in (self.ends, self.part_ends) if e]
        return 0 if self.closing else min(ends) - time.monotonic() if ends else 1e9

    def out_of_time(self):
        return OutOfTime("out of time" if self.ends and self.ends - time.monotonic() <= 1 else "at its time limit")

    def end_programs(self):
        """Ends all programs; no other one starts."""
        self.closing = True
        for program in [*self.running]:
            program.end()

    def program(self, name):
        """The words of a program's command. If it cannot start on this machine, the case is run again on another."""
        if name in self.programs.unusable:
            raise Unfinished(f"{name}: {self.programs.unusable[name]}")
        return self.programs.commands[name]

    def environment(self, words):
        return {**os.environ, **self.threads, **self.programs.variables_of(words)}

    def corpus(self):
        """The corpus directory: the bundle's or corpus/; None if there is none."""
        for place in (self.bundle and self.bundle / "corpus", ROOT / "corpus"):
            if place and list(place.glob("train_*.bin")):
                return place
        return None

    def why_no_fp8(self):
        """Why this device has no --matmul-dtype fp8; '' if it has."""
        words = "--dry-run --preset tiny --matmul-dtype fp8".split()
        status, text = self.run([*self.program("TRAIN_DIFFV2CU"), *words], 60)
        return "" if status == 0 else last_line(text)

    def largest_batch(self, case, sizes, programs=1, options=(), without=()):
        """The largest B of `sizes` for which the predicted totals of so many programs fit in the device's memory
        together; None if none does. case: (preset, attention, key/value heads, T). without: parts of the memory that a
        program does not allocate."""
        for B in sizes:
            words = ["--device", self.device() or "H200", *options_of(case, B), *options]
            status, text = self.run([*self.program("PREDICT_DIFFV2"), *words], 60)
            parts = re.search(r"^memory of the GPU\n((?:  .*\n)+)", text, re.MULTILINE)
            if status != 0 or not parts:
                raise RuntimeError(f"prediction of {case}: {last_line(text)}")
            mib = {name: float(x) for name, x in re.findall(r"^  (.*?) +([\d.]+) MiB$", parts[1], re.MULTILINE)}
            needed = mib["total"] - sum(mib.get(name, 0) for name in without)
            if self.free_bytes is None or programs * needed * 2**20 <= self.free_bytes:
                return B
        return None

    def device(self):
        """The name of the device for predict_diffv2; None if it is not listed. The emulation stands for an H200."""
        found = re.search(r"\b(A100|H100|H200|B200|L40S|RTX \d+)\b", self.store.all["device"] or "")
        return found[1] if found else "H200" if self.pretend else None

    def run(self, command, limit=600):
        """(exit status, output). Raises Unfinished at its limit, and OutOfTime at that of the part or the check."""
        return self.run_all([command], limit)[0]

    def run_all(self, commands, limit=600):
        """The same of programs that run concurrently."""
        limit = min(limit, self.most)
        ends = time.monotonic() + min(limit, self.left())
        if self.left() <= 0:
            raise self.out_of_time()
        programs = []
        try:
            for command in commands:
                try:
                    programs.append(Program(self, command))
                except OSError as error:
                    programs.append(f"cannot start {command[0]}: {error.strerror}")
                    self.store.log.write(f"{programs[-1]}\n")
            return [(127, p) if isinstance(p, str) else self.finish(p, ends, limit) for p in programs]
        finally:
            for program in programs:
                if not isinstance(program, str) and program.process.poll() is None:
                    program.end()

    def finish(self, program, ends, limit):
        try:
            status = program.process.wait(max(ends - time.monotonic(), 0))
            self.running.discard(program)
        except subprocess.TimeoutExpired:
            status = None
            program.end()
        program.readers[0].join(5)
        outcome = "stopped at its time limit" if status is None else f"status {status}"
        self.store.log.write(f"# {outcome}, {time.monotonic() - program.started:.1f} s\n")
        output = "".join(filter(None, program.lines))
        if status is None:
            words = " ".join(map(str, program.process.args))[-100:]
            stop = Unfinished(f"stopped after {limit:g} s: {words}: {last_line(output)}")
            stop = self.out_of_time() if self.left() <= 0 else stop
            stop.output = output
            raise stop
        return status, output


def options_of(case, B):
    """The trainer's options of (preset, attention, key/value heads, T)."""
    preset, attention, NKV, T = case
    words = f"--preset {preset} --attention {attention} --kv-heads {NKV} --batch-size {B} --seq-len {T} "
    return [*words.split(), "--total-batch", B * T]


class Findings:
    """The rows of a case."""

    def __init__(self, check):
        self.check_, self.rows = check, []

    def row(self, case, verdict="", note="", **values):
        self.rows.append({"verdict": verdict, "case": case, **values, "note": note})

    def fact(self, what, value):
        self.row(what, note=str(value))

    def check(self, what, ok, note=""):
        self.row(what, "ok" if ok else "FAIL", note)
        self.check_.store.say(sentence(self.rows[-1]))

    def failed_step(self, what, why):
        """A failed check; what does not fit into the device's memory is a fact."""
        if re.search(NO_MEMORY, why):
            self.fact(f"{what}: too little memory", why)
        else:
            self.check(what, False, why)

    def target(self, case, measured, least, note="", **values):
        """A missed target is not a failed check: it is not a defect."""
        verdict = "reached" if measured >= least else "missed"
        self.row(
            case, verdict, note, measured=measured, expected=least, against="target", ratio=measured / least, **values
        )

    def rounds(self, case, of, times, against, note=""):
        """A row of alternating measurements: [(milliseconds, those of a peer)]. Returns the ratio."""
        ratios = [peer / ms for ms, peer in times]
        ms, peer = (statistics.median(column) for column in zip(*times))
        row = {"of": of, "measured": ms, "unit": "ms", "expected": peer, "against": against}
        self.row(case, note=note, **row, ratio=statistics.median(ratios), least=min(ratios), most=max(ratios))
        return self.rows[-1]["ratio"]

    def bench(self, limit, *words):
        """(the rows of the benchmark, whether it succeeded). A failure is a failed check; too little memory is none."""
        status, text = self.check_.run([*self.check_.program("BENCH_CUDA"), *words], limit)
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        self.rows += rows
        if status != 0:
            self.failed_step(f"bench_cuda {' '.join(map(str, words))}", last_line(text))
        return rows, status == 0


class Part:
    """The findings of a part. They are stored when a case ends; a case that was killed is repeated."""

    def __init__(self, check, name):
        self.check, self.name, self.stopped = check, name, ""
        self.state = check.store.part(name)

    def run(self, cases, workers):
        """Runs the (name, function, arguments...) that are not done, so many at once: function(check, findings,
        arguments...). Raises Unfinished if some do not end."""
        todo = [case for case in cases if case[0] not in self.state["done"]]
        self.check.threads = {"OMP_NUM_THREADS": "1"} if workers > 1 else {}
        with ThreadPoolExecutor(workers) as pool:
            try:
                reasons = [*pool.map(self.run_case, todo)]
            except BaseException:  # SIGTERM
                self.check.end_programs()
                raise
        if any(reasons):
            raise Unfinished("; ".join(dict.fromkeys(filter(None, reasons))))

    def run_case(self, case):
        """Why the case did not end; '' if it did. One that has failed before its time limit is not repeated."""
        name, function, *arguments = case
        findings, why = Findings(self.check), self.stopped
        if why:
            return why
        try:
            function(self.check, findings, *arguments)
        except Unfinished as reason:
            why = str(reason)
            self.stopped = why if isinstance(reason, OutOfTime) else self.stopped
        except Refused:
            raise
        except Exception as error:  # an unexpected error must not prevent the other cases
            self.check.store.log.write(traceback.format_exc())
            findings.check(f"{name} completes", False, f"{type(error).__name__}: {error} (log.txt has the traceback)")
        if self.check.closing:
            return "interrupted"
        with self.check.store.lock:
            if failed(findings.rows) or not why:
                self.state["rows"] += findings.rows
                self.state["done"].append(name)
            self.check.store.save()
        return why
