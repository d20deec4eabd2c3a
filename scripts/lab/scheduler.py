"""scheduler.py: starts the runs of a plan, watches them, and prints their progress.

A run is a training and then, unless --no-eval, an evaluation of its last checkpoint. When this process dies, the
kernel signals the trainings, which save a checkpoint, so that none continues unobserved.

A process gets SIGTERM; the launcher of several ranks gets SIGUSR1, which mpirun forwards. At SIGTERM mpirun kills the
ranks before they have saved.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

from . import plan as plans, run_directory

POLL_S = 0.5
SAVE_S = 120  # for the checkpoint of a run that was told to stop
ESCALATE_S = 5  # then between a signal and the next stronger one
SPARE_S = 20  # of --minutes, at most a tenth: reserved for checkpoints; no run starts in the last SPARE_S before them
START_S = 5  # for a launcher to start its ranks; it loses earlier signals
PR_SET_PDEATHSIG = 1
# by default mpirun refuses to run as root
AS_ROOT = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM") if os.geteuid() == 0}
ALL = 10**6  # batches of an evaluation: all data


class Job:
    """A run of the plan. state: waiting, training, trained, evaluating, done, diverged or failed."""

    def __init__(self, run, directory, flops_per_token):
        self.run, self.directory, self.flops_per_token = run, directory, flops_per_token
        self.state, self.step, self.process, self.why = "waiting", 0, None, ""
        self.loss, self.rate, self.gpus, self.started = None, 0.0, [], 0.0
        self.evaluated = False  # in this lab: an evaluation is not repeated, even if it fails
        self.signals, self.asked = [], False  # signals to send, each stronger than the last; whether one was sent

    def send(self):
        """Sends the next signal to the process group."""
        self.asked = True
        number = self.signals.pop(0) if len(self.signals) > 1 else self.signals[0]
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # it has exited

    def handles_signals(self):
        """Whether the ranks of a launcher handle signals: the trainer opens its log after it has installed handlers."""
        try:
            return os.stat(self.directory / "log.jsonl").st_mtime > self.started
        except OSError:
            return False

    def update(self):
        """Reads the state of the run from its directory."""
        found, self.step = run_directory.state(self.directory, self.run.steps)
        self.read_tail()
        return found

    def read_tail(self):
        records = [r for r in run_directory.tail(self.directory / "log.jsonl", 1 << 14) if r.get("kind") == "train"]
        if records:
            self.step, self.loss = records[-1]["step"], records[-1].get("loss")
            ms = sorted(r["ms"] for r in records[-20:] if r.get("ms"))
            tokens = self.run.tokens / self.run.steps
            self.rate = tokens / (ms[len(ms) // 2] / 1e3) if ms else 0.0

    def flops_left(self):
        ended = self.state in ("done", "diverged", "failed")
        return 0 if ended else self.flops_per_token * self.run.tokens * (1 - self.step / self.run.steps)


def launcher_of(run):
    """The command that starts the ranks: empty for one process."""
    words = ["mpirun", "-q", "-np", str(run.ranks), "--bind-to", "none", "--oversubscribe"]  # as scripts/recipe.sh
    return words if run.ranks > 1 else []


def die_with_parent(number):
    """Returns a function for the child process: the kernel signals it when the lab dies, the terminal does not."""
    libc = ctypes.CDLL(None)

    def prepare():
        libc.prctl(PR_SET_PDEATHSIG, number)
        os.setsid()

    return prepare


def gpus_of_environment(count):
    """The names of at most `count` GPUs, of those in CUDA_VISIBLE_DEVICES if it is set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    return [name.strip() for name in listed.split(",") if name.strip()][:count]


class Queue:
    def __init__(self, out, runs, costs, trainer, jobs, arguments, started):
        self.out, self.trainer, self.places, self.arguments = out, trainer, jobs, arguments
        self.jobs = [Job(run, out / run.name, costs[run.name].flops) for run in runs]
        self.free_gpus = gpus_of_environment(arguments.gpus)
        self.evaluates = "eval-out" in trainer.options and not arguments.no_eval
        self.stopping, self.stopped_at = None, 0.0
        self.spare = min(SPARE_S, 6 * arguments.minutes)
        self.ends = started + 60 * arguments.minutes - self.spare if arguments.minutes else None
        self.shown_at, self.shown_lines = 0.0, 0

    # ---- commands

    def threads(self, run):
        return self.arguments.threads or run.threads or 1

    def training_command(self, job):
        run = job.run
        words = [str(self.trainer.path), *plans.arguments(run.options), "--out", str(job.directory)]
        if (job.directory / "run.json").exists():
            words.append("--resume")
        return launcher_of(run) + words + self.thread_words(run)

    def thread_words(self, run):
        """On GPUs the trainer's default, unless --threads is specified."""
        return [] if self.arguments.gpus and not self.arguments.threads else ["--threads", str(self.threads(run))]

    def evaluation_command(self, job):
        checkpoint = run_directory.checkpoint(job.directory, job.run.steps)
        names = ("val-data", "batch-size", "doc-mask", "separator", "matmul-dtype")
        kept = {k: v for k, v in job.run.options.items() if k in names}
        words = [str(self.trainer.path), "--eval", "--init", str(checkpoint), *plans.arguments(kept)]
        words += ["--val-steps", str(ALL), "--eval-out", str(job.directory / "eval.json"), "--seed", "1"]
        return words + self.thread_words(job.run)

    def remaining(self, job):
        """Whether a trained run requires its evaluation."""
        if not self.evaluates or job.evaluated or "val-data" not in job.run.options:
            return False
        return not (job.directory / "eval.json").exists()

    # ---- starting and collecting

    def start(self, job, state, command):
        job.gpus = [self.free_gpus.pop(0) for _ in range(self.gpus_wanted(job, state))]
        environment = os.environ | AS_ROOT
        job.signals, job.asked = [signal.SIGTERM, signal.SIGKILL], False
        if state == "training" and launcher_of(job.run):
            job.signals.insert(0, signal.SIGUSR1)
        job.state, job.started = state, time.time()
        if job.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.gpus)
        else:
            environment["OMP_NUM_THREADS"] = str(self.threads(job.run))
        with open(self.out / f"{job.run.name}.out", "a") as log:
            log.write(f"+ {' '.join(command)}\n")
            log.flush()
            job.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(job.signals[0]),
                env=environment,
            )

    def gpus_wanted(self, job, state):
        return 0 if not self.arguments.gpus else job.run.ranks if state == "training" else 1

    def start_jobs(self):
        """Starts as many jobs as there are places."""
        room = self.places - sum(job.process is not None for job in self.jobs)
        for job in self.jobs:
            if room <= 0 or self.stopping or (self.ends and time.time() > self.ends - self.spare):
                return
            if job.process or job.state not in ("waiting", "trained"):
                continue
            if self.gpus_wanted(job, "training" if job.state == "waiting" else "evaluating") > len(self.free_gpus):
                continue
            if job.state == "waiting":
                if run_directory.locked(job.directory):
                    continue  # a trainer of an earlier lab is still saving its checkpoint
                found = job.update()
                if found in ("done", "diverged"):
                    job.state = "trained" if found == "done" and self.remaining(job) else found
            if job.state == "trained":
                self.start(job, "evaluating", self.evaluation_command(job))
                room -= 1
            elif job.state == "waiting":
                self.start(job, "training", self.training_command(job))
                room -= 1

    def collect(self):
        """Handles the processes that have exited."""
        for job in self.jobs:
            if job.process is None:
                continue
            status = job.process.poll()
            if status is None:
                if job.state == "training":
                    job.read_tail()
                continue
            job.process = None
            self.free_gpus = sorted(self.free_gpus + job.gpus)
            found = job.update()
            if job.state == "evaluating":
                job.evaluated = True
                if status and not self.stopping:
                    job.why = f"{job.state}: {self.last_message(job, status)}"
            if found == "done":
                job.state = "trained" if self.remaining(job) else "done"
            elif found == "diverged":
                job.state = "diverged"
            elif status == 3 or self.stopping:
                job.state = "waiting"
            else:
                job.state, job.why = "failed", self.last_message(job, status)

    def last_message(self, job, status):
        lines = (self.out / f"{job.run.name}.out").read_text(errors="replace").replace("\r", "\n").strip().splitlines()
        said = [line for line in lines if line.startswith("diffv2:")] or lines
        return f"{said[-1] if said else 'no output'} (exit status {status})"

    # ---- signals

    def stop(self, number, _frame):
        """At the first signal every run saves a checkpoint. Each further signal sends the next stronger one."""
        again, self.stopping = self.stopping is not None, number
        self.stopped_at = self.stopped_at or time.time()
        for job in self.jobs if again else []:
            if job.process:
                job.send()
        self.send_first_signals()

    def send_first_signals(self):
        """Sends the first signal to the runs that have not got it, once they handle signals."""
        for job in self.jobs:
            if not job.process or job.asked:
                continue
            launched = job.signals[0] == signal.SIGUSR1
            if not launched or job.handles_signals() or time.time() > job.started + START_S:
                job.send()

    def work(self):
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self.stop) for number in numbers}
        try:
            while True:
                self.collect()
                self.start_jobs()
                self.show()
                busy = any(job.process for job in self.jobs)
                ended = all(job.state in ("done", "diverged", "failed") for job in self.jobs)
                if not busy and (self.stopping or ended):
                    break
                if self.ends and time.time() > self.ends and not self.stopping:
                    self.stop(signal.SIGTERM, None)
                if self.stopping:
                    self.send_first_signals()
                if self.stopping and time.time() > self.stopped_at + SAVE_S:
                    self.stop(self.stopping, None)
                    self.stopped_at += ESCALATE_S
                time.sleep(POLL_S)
        finally:
            for job in self.jobs:
                if job.process:
                    job.send()
            for number, handler in before.items():  # between two queues a signal ends the lab
                signal.signal(number, handler)
        self.show(last=True)
        for why in dict.fromkeys(job.why for job in self.jobs if job.why):
            name, *others = [job.run.name for job in self.jobs if job.why == why]
            more = f" and {len(others)} more" if others else ""
            print(f"lab run: {name}{more} failed: {why}", file=sys.stderr)
        if self.stopping:
            print(f"stopped; {self.whole_seeds()} have all arms; the same command continues")
        return 3 if self.stopping else 1 if any(job.why for job in self.jobs) else 0

    def whole_seeds(self):
        seeds = {job.run.seed for job in self.jobs}
        unfinished = {job.run.seed for job in self.jobs if job.state not in ("done", "diverged")}
        return f"{len(seeds - unfinished)} of {len(seeds)} seeds"

    # ---- progress

    def time_left(self):
        """Estimated seconds, from the current speed of the running jobs; None without one."""
        training = [job for job in self.jobs if job.state == "training" and job.rate and job.step]
        if not training:
            return None
        speed = sum(job.rate * job.flops_per_token for job in training) / len(training)
        places = min(self.places, sum(job.state in ("waiting", "training") for job in self.jobs))
        return sum(job.flops_left() for job in self.jobs) / (speed * places)

    def show(self, last=False):
        terminal = sys.stdout.isatty()
        if not last and time.time() < self.shown_at + (1 if terminal else 60):
            return
        self.shown_at = time.time()
        room = len(self.jobs) if last else shutil.get_terminal_size().lines - 2 if terminal else 0
        lines = self.table(room)
        if terminal:
            lines = [line[: shutil.get_terminal_size().columns - 1] for line in lines]  # no line may wrap
            print(f"\x1b[{self.shown_lines}F\x1b[J" if self.shown_lines else "", end="")
            self.shown_lines = len(lines)
        print("\n".join(lines), flush=True)

    def table(self, room):
        counts = Counter(job.state for job in self.jobs)
        left = self.time_left()
        head = ", ".join(f"{count} {state}" for state, count in counts.items())
        lines = [f"{time.strftime('%H:%M:%S')} {head}" + (f"; about {duration(left)} left" if left is not None else "")]
        order = dict(training=0, evaluating=1, failed=2, diverged=3, trained=4, done=5, waiting=6)
        shown = sorted((job for job in self.jobs if room or job.process), key=lambda job: order[job.state])
        wide = max(len(job.run.name) for job in self.jobs)
        for job in shown[:room] if room else shown:
            loss = f"{job.loss:.4f}" if job.loss is not None else "-"
            mine = ""
            if job.rate and job.state == "training":
                mine = f"{duration(job.run.tokens * (1 - job.step / job.run.steps) / job.rate)} left"
            lines.append(
                f"  {job.run.name:<{wide}} {job.state:<10} {job.step:>7}/{job.run.steps:<7} {loss:>8} "
                f"{job.rate:>9,.0f} tok/s {mine}".rstrip()
            )
        return lines


def duration(seconds):
    seconds = int(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d{seconds % 86400 // 3600:02d}h"
