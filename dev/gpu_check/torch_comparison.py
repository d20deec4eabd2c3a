"""The part `peer`: training steps of this program and of PyTorch, alternating on the same machine."""

import os
import shlex
import statistics
import subprocess
import threading

from benchmarks import percent, target
from runner import OutOfTime, Skip, kill_with_parent, end
from tools import last_line


class StepServer:
    """A program that runs one step for each line on stdin, and prints its milliseconds."""

    def __init__(self, check, command):
        self.check, self.lines, self.errors = check, [], []
        words = [str(w) for w in command]
        check.store.log.write(f"$ {shlex.join(words)}\n")
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=check.root,
            env=check.environment(words),
            start_new_session=True,
            preexec_fn=kill_with_parent,
        )
        self.arrived = threading.Condition()
        streams = ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        self.readers = [threading.Thread(target=self.read, args=of, daemon=True) for of in streams]
        for reader in self.readers:
            reader.start()

    def read(self, stream, lines):
        for line in stream:
            with self.arrived:
                lines.append(line.strip())
                self.arrived.notify_all()
            self.check.store.log.write(line)
        with self.arrived:
            lines.append(None)  # end of output
            self.arrived.notify_all()

    def read_line(self, limit):
        """The next line; None if the program has ended or does not answer in time."""
        limit = min(limit, self.check.left())
        with self.arrived:
            self.arrived.wait_for(lambda: self.lines, timeout=max(limit, 0))
            line = self.lines.pop(0) if self.lines else None
        if line is None and self.check.left() <= 1:
            raise OutOfTime
        return line

    def step(self, limit, line=""):
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except OSError:
            return None
        line = self.read_line(limit)
        try:
            return float(line)
        except (TypeError, ValueError):
            return None

    def why(self):
        """The last error. Of a program that has ended, stderr is read to its end first."""
        try:
            self.process.wait(1)
            self.readers[1].join(10)
        except subprocess.TimeoutExpired:
            pass
        said = [line for line in self.errors if line]
        return said[-1][:300] if said else "it ended, or did not answer in time"

    def close(self):
        end(self.process)


# (preset, attention, key/value heads, B, T)
PEERS = [
    ("1.4b", "diff_v2", 8, 4, 2048),
    ("124m", "diff_v2", 6, 16, 1024),
    ("1.4b", "baseline", 8, 4, 2048),
    ("124m", "baseline", 6, 16, 1024),
]
ROUNDS = 12
TARGET = 1.10  # tokens/s, relative to PyTorch's


def peer(check, part):
    """Alternates steps of both programs, so that both see the same load. PyTorch compiles before."""
    python = os.environ.get("TORCH_PYTHON") or "python3"
    probe = "import torch; assert torch.cuda.is_available() or %d; print(torch.__version__)" % check.pretend
    status, text = check.run([python, "-c", probe], 120)
    if status != 0:
        raise Skip(f"{python} has no torch with a GPU: {last_line(text)} (TORCH_PYTHON=PYTHON selects another)")
    script = check.root / "dev/bench/bench_torch.py"
    for preset, attention, NKV, B, T in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PEERS:
        case = f"{preset} {attention}"
        if not part.pending(case):
            continue
        theirs_options = ["--device", "cpu"] if check.pretend else ["--device", "cuda", "--compile"]
        theirs = StepServer(check, [python, script, preset, attention, NKV, B, T, *theirs_options])
        ours = None
        try:
            # PyTorch first: its allocator keeps the memory of its compiler, and this trainer plans with the free memory
            about, first = theirs.read_line(120), theirs.step(420)
            if first is None:
                part.check(f"PyTorch runs {case}", False, theirs.why())
            else:
                for _ in range(2):
                    theirs.step(120)
                ours = StepServer(check, [*check.commands["BENCH_CUDA"], "turns", preset, attention, NKV, B, T])
                compare_turns(
                    check,
                    part,
                    case,
                    ours,
                    theirs,
                    {"preset": preset, "attention": attention, "kv_heads": NKV, "B": B, "T": T, "torch": about},
                )
        finally:
            for program in (ours, theirs):
                if program:
                    program.close()
        part.end(case)


def compare_turns(check, part, case, ours, theirs, record):
    about = ours.read_line(120)
    if about is None or ours.step(120) is None:
        part.check(f"bench_cuda runs {case} beside PyTorch", False, ours.why())
        return
    times = []
    for _ in range(2 if check.pretend else ROUNDS):
        pair = ours.step(60), theirs.step(60)
        if None in pair:
            part.check(f"alternating steps of {case}", False, ours.why() if pair[0] is None else theirs.why())
            return
        times.append(pair)
    ratios = [b / a for a, b in times]
    torch_words = (record["torch"] or "").split()
    record.update(
        table="peer",
        ms=statistics.median(a for a, _ in times),
        torch_ms=statistics.median(b for _, b in times),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        ours=about,
    )
    parameters = [words.split()[0] for words in (about, record["torch"])]
    part.check(
        f"{case}: both models have the same number of parameters",
        parameters[0] == parameters[1],
        " and ".join(parameters) if parameters[0] != parameters[1] else "",
    )
    part.record(record)
    if torch_words and not check.pretend:
        target(part, f"{case}: tokens/s relative to PyTorch", record["ratio"], TARGET, percent)
