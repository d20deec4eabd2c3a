"""Runs the programs under test, and reads and writes their files.

TRAIN_DIFFV2 and TEXT_TO_SHARDS name the programs, with arguments if they need any (./train_diffv2, ./text_to_shards).
Other programs of the same build are found beside the first.
"""

import filecmp
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
import fixtures
from choices import Example, write_choices

ROOT = Path(__file__).resolve().parents[2]

FIXTURE = ROOT / "dev/reference/fixtures/diff_v2.odd.safetensors"
DONE, FAILED, USAGE, SIGNALLED = 0, 1, 2, 3  # exit statuses
SECONDS = 600  # of one program
# A model of a few thousand parameters, for runs of a few milliseconds a step.
SHAPE = "--layers 2 --hidden 24 --heads 2 --kv-heads 1 --head-dim 8 --ffn 40 --seq-len 16"
WEIGHTS = ["model.safetensors", "optimizer.safetensors"]  # of a checkpoint
SMALL = f"{SHAPE} --batch-size 4 --schedule constant --warmup 2 --threads 2"


# ---- processes


@dataclass
class Result:
    status: int  # exit status; -N if signal N ended it
    out: str  # bytes that are not UTF-8 are surrogates
    err: str

    def done(self):
        """The same result, of a program that did what it was asked to do."""
        assert self.status == DONE, self.err[-2000:]
        return self

    def one_line(self, status, words):
        """Expects this exit status and one line on stderr that contains the words."""
        assert (self.status, self.err.count("\n")) == (status, 1) and words in self.err, self
        return self


def text_of(data):
    return data.decode("utf-8", "surrogateescape")


def words_of(arguments):
    """The words of arguments: strings are split as by a shell, anything else is one word."""
    return [word for a in arguments for word in (shlex.split(a) if isinstance(a, str) else [str(a)])]


def run(*command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=None, env=None):
    """Runs a command. stdin: its bytes, or a file; stdout: a file, of which the result has nothing."""
    source = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    environment = {**os.environ, **(env or {})}
    outputs = {"stdout": stdout, "stderr": subprocess.PIPE}
    done = subprocess.run(words_of(command), timeout=SECONDS, cwd=cwd, env=environment, **source, **outputs)
    return Result(done.returncode, text_of(done.stdout or b""), text_of(done.stderr))


class Started(subprocess.Popen):
    """A command that runs while a test does something to it, in a with statement. terminal: a file for all streams."""

    def __init__(self, *command, cwd=None, env=None, terminal=None):
        self.outputs = [tempfile.TemporaryFile() for _ in ("stdout", "stderr")]
        streams = [subprocess.DEVNULL, *self.outputs] if terminal is None else 3 * [terminal]
        super().__init__(words_of(command), 0, None, *streams, cwd=cwd, env={**os.environ, **(env or {})})

    def printed(self):
        """What it has printed so far: stdout, stderr."""
        return [text_of(os.pread(file.fileno(), 1 << 24, 0)) for file in self.outputs]

    def wait_until(self, condition):
        end = time.monotonic() + SECONDS
        while not condition():
            assert self.poll() is None and time.monotonic() < end, self.printed()
            time.sleep(0.01)
        return self

    def wait_for_step(self, run, step):
        """Waits for the record of a step of its run."""
        log = run / "log.jsonl"
        return self.wait_until(lambda: log.exists() and f'"step": {step},' in log.read_text())

    def end(self):
        """The result, when it has ended."""
        self.wait(SECONDS)
        return Result(self.returncode, *self.printed())

    def __exit__(self, *error):
        self.kill()
        super().__exit__(*error)


def program(variable, default):
    """The words of the command that starts a program, with its absolute path."""
    path, *arguments = shlex.split(os.environ.get(variable) or default)
    return [Path(path).resolve(strict=True), *arguments]


def trainer():
    return program("TRAIN_DIFFV2", "./train_diffv2")


@functools.cache
def linked_with(library, path=None):
    """Whether the trainer, or a program, is linked with a shared library: libgomp by GCC, libasan with sanitizers."""
    return library in run("ldd", path or trainer()[0]).out


def beside(name):
    """A program of the build under test."""
    directory = trainer()[0].parent
    for path in (directory / name, directory / "build" / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"{name} is not beside {trainer()[0]}: make build/{name}")


def run_trainer(*arguments, **more):
    return run(*trainer(), *arguments, **more)


def train(corpus, out, *options):
    """Trains the small model."""
    return run_trainer("--train-data", corpus / "train.bin", SMALL, "--out", out, *options)


def resume(run, *options, **more):
    return run_trainer("--resume --out", run, *options, **more)


def train_in_parts(corpus, directory, steps, *options):
    """Trains "whole", and "parts" with an interruption after half of the steps; their checkpoints are the same."""
    whole, parts = directory / "whole", directory / "parts"
    options = [f"--steps {steps} --checkpoint-every {steps // 2}", *options]
    train(corpus, whole, *options).done()
    train(corpus, parts, *options, f"--stop-after {steps // 2}").done()
    resume(parts, "--threads 2").done()
    expect_same(checkpoint(whole, steps), checkpoint(parts, steps))
    return whole, parts


def has_open(pid, text):
    """Whether a process has a file open whose path contains the text."""
    try:
        return any(text in os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # closed meanwhile
        return False


# ---- files


def read_json(path):
    return json.loads(path.read_text())


def all_records(run):
    lines = (run / "log.jsonl").read_text().split("\n")
    assert lines.pop() == "", "the last line of log.jsonl is not complete"
    return [json.loads(line) for line in lines]


def records(run, kind, **wanted):
    """The records of log.jsonl of a kind and with these values."""
    wanted["kind"] = kind
    return [r for r in all_records(run) if all(r.get(k) == v for k, v in wanted.items())]


def without_times(found):
    """Records without what differs between equal runs."""
    return [{k: r[k] for k in r if k not in ("tokens_per_s", "ms", "flops_util", "comm_ms")} for r in found]


def checkpoint(run, step):
    return run / f"checkpoints/step_{step:08d}"


def seal(path, text):
    """Writes a file of a run; a trainer_state.json with the checksum that this text has."""
    if '"checksum"' in text:
        body = text[: text.rindex('"checksum"')]
        text = f'{body}"checksum": "{xxhash.xxh3_64(body.encode()).hexdigest()}"\n}}\n'
    path.write_text(text)


def lose_checkpoints(run):
    """Leaves a run as if it was killed before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    lines = (run / "log.jsonl").read_text().splitlines(True)
    (run / "log.jsonl").write_text("".join(line for line in lines if '"what": "checkpoint"' not in line))


def saved(run):
    """The steps of the checkpoints of a run, and the names of what else is among them."""
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    return [int(name[5:]) if re.fullmatch(r"step_\d{8}", name) else name for name in names]


def tensors(path):
    """{name: array} of a safetensors file of F32 tensors."""
    found, _ = fixtures.safetensors_read(path.read_bytes())
    assert {dtype for dtype, _, _ in found.values()} == {"F32"}, path
    return {name: np.frombuffer(data, "<f4").reshape(shape) for name, (_, shape, data) in found.items()}


def read_table(path):
    """(texts of the tokens, separator) of a tokenizer.bin."""
    data = path.read_bytes()
    size, separator = struct.unpack_from("<8x4xI8xI", data)
    ends = itertools.accumulate(struct.unpack_from(f"<{size}I", data, 56), initial=56 + 4 * size)
    return [data[begin:end] for begin, end in itertools.pairwise(ends)], separator


def differing(a, b, names):
    """The names of files that are not the same in two directories."""
    return [name for name in names if (a / name).read_bytes() != (b / name).read_bytes()]


def expect_same(a, b, without=()):
    """The same files with the same bytes. without: names of files that may differ."""
    listing = [{path.relative_to(top) for path in top.rglob("*") if path.name not in without} for top in (a, b)]
    assert listing[0] == listing[1]
    different = [name for name in listing[0] if (a / name).is_file() and not filecmp.cmp(a / name, b / name, False)]
    assert not different


def same_numbers(a, b, key=""):
    """Two values of JSON differ only by the rounding of sums in another order.

    Rates count what is above a threshold, so a rounding may move one of them by a count.
    """
    kind = lambda value: float if type(value) is int else type(value)
    assert kind(a) is kind(b), key
    if kind(a) is float:
        rate = key in ("exact", "among_values") or key.startswith("sink")
        assert abs(a - b) <= 1e-4 * abs(a) + (5e-3 if rate else 1e-6), (key, a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for name in a:
            same_numbers(a[name], b[name], name)
    elif isinstance(a, list):
        assert len(a) == len(b), key
        for x, y in zip(a, b):
            same_numbers(x, y)


def overwrite(path, at, data):
    """Writes bytes at a place in a file, or with a negative one from its end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(data)


def expect_printed_losses(out, positions):
    """The perplexity and the losses by position fit the loss that is printed."""
    loss, perplexity = map(float, re.match(r"validation loss (\S+) \(perplexity ([\d.e+]+)[,)]", out).groups())
    rows = re.search(r"loss by position\n((?: *\d+ \.\. +\d+ +\S+\n)+)", out)[1]
    rows = [(int(begin), int(end), float(x)) for begin, end, x in re.findall(r"(\d+) \.\. +(\d+) +(\S+)", rows)]
    mean = sum((end + 1 - begin) * x / positions for begin, end, x in rows)
    assert rows[-1][1] + 1 == positions
    assert abs(mean - loss) < 1e-4 and abs(perplexity - math.exp(loss)) < 0.01
    return loss


def expect_speed(run, tokens, ranks=1):
    """The logged speed is that of a step of this many tokens. Its share of the peak is that of a rank."""
    described, last = read_json(run / "run.json"), records(run, "train")[-1]
    seconds, flops = last["ms"] / 1e3, described["model"]["flops_per_token"] * tokens
    assert abs(last["tokens_per_s"] * seconds / tokens - 1) < 1e-6, last
    peak = described["peak"]["gflops"] * 1e9
    assert abs(last["flops_util"] * peak * seconds * ranks / flops - 1) < 1e-6, (last, ranks)


# ---- data


class Random:
    """The pseudorandom sequence of tests/harness.h."""

    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = ((self.state ^ (self.state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) % n


# Sentences of one form, each of four words drawn from eight: a source whose entropy is known.
GRAMMAR = (
    ("some ", "the ", "every ", "no ", "a ", "this ", "that ", "one "),
    ("cat ", "poet ", "river ", "king ", "theorem ", "sparrow ", "engine ", "child "),
    ("sees ", "forgets ", "carries ", "proves ", "follows ", "becomes ", "hears ", "loves "),
    ("gold.\n", "music.\n", "snow.\n", "itself.\n", "nothing.\n", "bread.\n", "numbers.\n", "home.\n"),
)
ENTROPY = 4 * math.log(8) / sum(len(word) / 8 for words in GRAMMAR for word in words)  # nats per byte


def write_shard(path, tokens, wide=False):
    """A shard of tokens of 16 bits, or wide ones of 32."""
    header = struct.pack("<3I", *((20240801, 7) if wide else (20240520, 1)), len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + np.asarray(tokens, "<u4" if wide else "<u2").tobytes())


def write_corpus(directory, shards, first, described=None):
    """Training shards of 101 tokens each, counted from `first`, and one for validation; corpus.json if described."""
    directory.mkdir()
    for i in range(shards + 1):
        begin = first + i * 101
        write_shard(directory / f"{'train' if i else 'val'}_{i:06d}.bin", range(begin, begin + 101))
    if described:
        (directory / "corpus.json").write_text(json.dumps({"format": 1, **described}))


def write_grammar(path, count, seed):
    """A shard of `count` byte tokens."""
    random, text = Random(seed), bytearray()
    while len(text) < count:
        for words in GRAMMAR:
            text += words[random.below(8)].encode()
    write_shard(path, list(text[:count]))


def write_random_choices(path, count, completions, seed, wide=False, tokens=256, positions=16):
    """Ragged completions: with their contexts, the longest have positions + 1 tokens below `tokens`. wide: in words of
    32 bits."""
    random, examples = Random(seed), []
    for e in range(count):
        length, most = 1 + random.below(positions - 6), positions + 1
        context = [random.below(tokens) for _ in range(most)][:length]
        label, found = random.below(completions), []
        for c in range(completions):
            n = most - length if e == 1 else 2 + random.below(min(most - length - 1, 6))
            found.append([random.below(tokens) for _ in range(n)])
        examples.append(Example(context, found, label))
    write_choices(path, examples, 1 << 16 if wide else 256)
