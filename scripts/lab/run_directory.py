"""run_directory.py: reads a run: run.json, log.jsonl, checkpoints (docs/formats.md), and its state."""

import fcntl
import json
import os
import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))
from outputs import open_output

from . import option_history
from .schema import LAB, OPTIONS, RECORDS, RUN, violation


class RunError(Exception):
    """A directory that is not a run, or a damaged file; one line."""


def no_constant(name):
    raise ValueError(f"{name} is not a JSON number")


def parse(data):
    """The value of a JSON text. Raises ValueError, also for an unpaired surrogate, which no UTF-8 file can contain."""
    value = json.loads(data, parse_constant=no_constant)
    if b"\\u" in data:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(path, shape):
    """The JSON object of a file. Raises RunError if it does not match the schema."""
    if not str(path).isprintable():  # pages and tables contain it
        raise RunError(f"{str(path)!a}: rename it: a name with unprintable characters, or not in UTF-8")
    try:
        value = parse(Path(path).read_bytes())
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON: {error}") from None
    wrong = violation(value, shape)
    if wrong:
        raise RunError(f"{path}: {wrong}")
    return value


def read_run(directory):
    """run.json, with valid options at every start."""
    path = Path(directory) / "run.json"
    info = read_json(path, RUN)
    if wrong := wrong_options(info):
        raise RunError(f"{path}: {wrong}")
    return info


def wrong_options(info):
    """What is wrong with the options of a start of run.json; None if they are valid."""
    each = option_history.history(info)
    found = (violation(o, OPTIONS, f"options after step {step}" if step else "options") for step, o in each)
    return next(filter(None, found), None)


def read_lab(directory):
    """lab.json, or None if there is none."""
    path = Path(directory) / "lab.json"
    return read_json(path, LAB) if path.exists() else None


def write_atomic(path, text):
    """The file changes as a whole or, if this fails, not at all."""
    with open_output(path) as f:
        f.write(text.encode())


def record_of(line):
    """The record of a line of log.jsonl, or None if it is invalid."""
    try:
        record = parse(line)
    except (ValueError, RecursionError):
        return None
    wrong = violation(record, {"kind": "text", "step": "non-negative integer"}) or violation(
        record, RECORDS.get(record["kind"], {})
    )
    return None if wrong else record


class Log:
    """Reads a log.jsonl as it grows. A trainer that resumes removes the records after its checkpoint."""

    def __init__(self, path, end=0, last=b""):
        self.path, self.end, self.last, self.lines = Path(path), end, last, 0  # last: the bytes before `end`

    def read(self, broken=None):
        """(the records after those of the last call, whether what was read before is gone: then they are all records).
        An incomplete last line is left for the next call; the numbers of other invalid lines are appended to
        `broken`."""
        data, gone = b"", self.end > 0
        try:
            with open(self.path, "rb") as f:
                f.seek(self.end - len(self.last))
                gone = f.read(len(self.last)) != self.last
                if gone:
                    f.seek(0)
                data = f.read()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise RunError(f"{self.path}: {error.strerror}") from None
        if gone:
            self.end, self.last, self.lines = 0, b"", 0
        complete = data[: data.rfind(b"\n") + 1]
        records = []
        for line in complete.split(b"\n")[:-1]:
            self.lines += 1
            record = record_of(line)
            if record:
                records.append(record)
            elif broken is not None:
                broken.append(self.lines)
        if complete:
            self.end, self.last = self.end + len(complete), (self.last + complete)[-4096:]
        return records, gone


def read_log(path, broken=None):
    """The records of a log.jsonl, in order."""
    return Log(path).read(broken)[0]


def tail(path, size=1 << 16):
    """The complete records in the last `size` bytes of a log, or in so many more that one is of a step."""
    try:
        with open(path, "rb") as f:
            end = f.seek(0, os.SEEK_END)
            f.seek(max(0, end - size))
            lines = f.read().split(b"\n")
    except OSError:
        return []
    records = [record for line in lines[:-1] if (record := record_of(line))]
    enough = size >= end or any(record["kind"] == "train" for record in records)
    return records if enough else tail(path, 4 * size)


def checkpoint(directory, step):
    return Path(directory) / "checkpoints" / f"step_{step:08d}"


LOCK_LAYOUT = "hhqqi4x"  # struct flock: type, whence, start, length, process


def lock(file):
    """Locks a file for this process, as the trainer locks run.json; OSError if another process holds the lock."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def locked(directory):
    """Whether a process holds the lock of the run."""
    try:
        with open(Path(directory) / "run.json", "r+b") as f:
            answer = fcntl.fcntl(f, fcntl.F_OFD_GETLK, struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return struct.unpack(LOCK_LAYOUT, answer)[0] != fcntl.F_UNLCK
    except OSError:
        return False


def state(directory, steps):
    """(state, last step) of a run of `steps` steps; state is new, begun, diverged or done."""
    directory = Path(directory)
    if not (directory / "run.json").exists():
        return "new", 0
    records = tail(directory / "log.jsonl")
    last = max((r["step"] for r in records if r.get("kind") == "train"), default=0)
    ends = [r for r in records[-3:] if r["kind"] == "event" and r.get("what") in ("start", "stopped")]
    stopped = bool(ends) and ends[-1]["what"] == "stopped"  # after the last step: its measurements are still due
    if stopped and ends[-1].get("why") == "not_finite":
        return "diverged", last
    done = not stopped and last >= steps and (checkpoint(directory, steps) / "trainer_state.json").exists()
    return ("done" if done else "begun"), last
