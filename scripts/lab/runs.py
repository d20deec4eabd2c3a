"""runs.py: what a run's directory says: run.json, log.jsonl, checkpoints (the formats are the trainer's)."""
import fcntl
import json
import os
import struct
from pathlib import Path

# of run.json's options: what must agree between runs for their losses to be compared
COMPARED = (
    "train-data", "val-data", "doc-mask", "separator", "seq-len", "vocab", "total-batch", "steps", "min-lr-ratio", "warmup", "schedule",
    "weight-decay", "beta1", "beta2", "eps", "grad-clip", "skip-loss-z", "skip-grad-z", "val-steps", "gemm", "init",
)
PATHS = ("train-data", "val-data")  # where the data lie does not matter when the fingerprint agrees


class RunError(Exception):
    """A directory that is no run, or a damaged one; one line."""


def read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise RunError(f"{path}: not there") from None
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise RunError(f"{path}: {error}") from None


def write_atomic(path, text):
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def read_log(path):
    """The records of a log.jsonl, in order. A torn last line is passed over; so are steps that a resume wrote again."""
    records = []
    try:
        with open(path, "rb") as f:
            lines = f.read().split(b"\n")
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # torn, or being written
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def tail(path, size=1 << 16):
    """The whole records in the last `size` bytes of a log."""
    try:
        with open(path, "rb") as f:
            f.seek(0, os.SEEK_END)
            f.seek(max(0, f.tell() - size))
            lines = f.read().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            pass
    return [r for r in records if isinstance(r, dict) and isinstance(r.get("step"), int)]


def checkpoint(directory, step):
    return Path(directory) / "checkpoints" / f"step_{step:08d}"


LOCK_LAYOUT = "hhqqi4x"  # struct flock: type, whence, start, length, process


def lock(file):
    """Takes a file for this process, as the trainer takes run.json; OSError when another has it."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def locked(directory, name="run.json"):
    """Whether a process has the run; with "lab.lock" the lab."""
    try:
        with open(Path(directory) / name, "r+b") as f:
            answer = fcntl.fcntl(f, fcntl.F_OFD_GETLK, struct.pack(LOCK_LAYOUT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return struct.unpack(LOCK_LAYOUT, answer)[0] != fcntl.F_UNLCK
    except OSError:
        return False


def state(directory, steps):
    """What has become of a run of `steps` steps: (state, last step); state is new, begun, diverged or done."""
    directory = Path(directory)
    if not (directory / "run.json").exists():
        return "new", 0
    records = tail(directory / "log.jsonl")
    last = max((r["step"] for r in records if r.get("kind") == "train"), default=0)
    if any(r.get("kind") == "event" and r.get("what") == "stopped" and r.get("why") == "not_finite" for r in records[-3:]):
        return "diverged", last
    done = last >= steps and (checkpoint(directory, steps) / "trainer_state.json").exists()
    return ("done" if done else "begun"), last


def differences(a, b, names=("one run", "the other")):
    """What keeps two run.json from being comparable, a line each."""
    found = []
    one, other = a.get("options", {}), b.get("options", {})
    for key in COMPARED:
        x, y = one.get(key), other.get(key)
        same_data = key in PATHS and a.get("data_fingerprint") == b.get("data_fingerprint") is not None
        if x != y and not same_data:
            found.append(f"--{key}: {shown(x)} in {names[0]}, {shown(y)} in {names[1]}")
    x, y = a.get("data_fingerprint"), b.get("data_fingerprint")
    if x is not None and y is not None and x != y:
        found.append(f"the training data: fingerprint {x} in {names[0]}, {y} in {names[1]}")
    return found


def shown(value):
    return "none" if value is None else "yes" if value is True else "no" if value is False else str(value)
