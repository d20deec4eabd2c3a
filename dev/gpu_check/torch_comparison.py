"""The part `peer`: a training step of this program and of PyTorch, in turns."""

import os
import shlex
import statistics
import subprocess
import threading

from benchmarks import percent, target
from runner import OutOfTime, Skip, die_with_me, end
from tools import last_line


class Asked:
    """A program that does a step for each line on its stdin and prints its milliseconds."""

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
            preexec_fn=die_with_me,
        )
        self.arrived = threading.Condition()
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=self.read, args=(stream, lines), daemon=True).start()

    def read(self, stream, lines):
        for line in stream:
            with self.arrived:
                lines.append(line.strip())
                self.arrived.notify_all()
            self.check.store.log.write(line)
        with self.arrived:
            lines.append(None)  # no more
            self.arrived.notify_all()

    def answer(self, limit):
        """The next line; None where the program has ended or says nothing for too long."""
        limit = min(limit, self.check.left())
        with self.arrived:
            self.arrived.wait_for(lambda: self.lines, timeout=max(limit, 0))
            line = self.lines.pop(0) if self.lines else None
        if line is None and self.check.left() <= 1:
            raise OutOfTime
        return line

    def turn(self, limit):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            return None
        line = self.answer(limit)
        try:
            return float(line)
        except (TypeError, ValueError):
            return None

    def why(self):
        said = [line for line in self.errors if line]
        return said[-1][:300] if said else "it ended, or said nothing for too long"

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
    """A step of ours, a step of PyTorch's, and so on: both see the same machine. Its compiler runs before."""
    python = os.environ.get("TORCH_PYTHON") or "python3"
    probe = "import torch; assert torch.cuda.is_available() or %d; print(torch.__version__)" % check.pretend
    status, text = check.run([python, "-c", probe], 120)
    if status != 0:
        raise Skip(f"{python} has no torch that sees a GPU: {last_line(text)} (TORCH_PYTHON=PYTHON names another)")
    script = check.root / "dev/bench/bench_torch.py"
    for preset, attention, NKV, B, T in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PEERS:
        case = f"{preset} {attention}"
        if not part.pending(case):
            continue
        theirs_options = ["--device", "cpu"] if check.pretend else ["--device", "cuda", "--compile"]
        theirs = Asked(check, [python, script, preset, attention, NKV, B, T, *theirs_options])
        ours = None
        try:
            # PyTorch first: its allocator keeps what its compiler has tried, and ours plans its memory by what is free
            about, first = theirs.answer(120), theirs.turn(420)
            if first is None:
                part.check(f"PyTorch: {case}", False, theirs.why())
            else:
                for _ in range(2):
                    theirs.turn(120)
                ours = Asked(check, [*check.commands["BENCH_CUDA"], "turns", preset, attention, NKV, B, T])
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
    about = ours.answer(120)
    if about is None or ours.turn(120) is None:
        part.check(f"a step beside PyTorch: {case}", False, ours.why())
        return
    times = []
    for _ in range(2 if check.pretend else ROUNDS):
        pair = ours.turn(60), theirs.turn(60)
        if None in pair:
            part.check(f"steps in turns: {case}", False, ours.why() if pair[0] is None else theirs.why())
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
        f"{case}: both have the same parameters",
        parameters[0] == parameters[1],
        " and ".join(parameters) if parameters[0] != parameters[1] else "",
    )
    part.record(record)
    if torch_words and not check.pretend:
        target(part, f"{case}: tokens/s, of PyTorch's", record["ratio"], TARGET, percent)
