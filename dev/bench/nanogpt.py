"""Trains nanoGPT and this trainer on one text for the same minutes, in turns, and compares bits per byte of held-out
text (bench_peers.py --nanogpt).

The text is that of a corpus of `text_to_shards`: its documents, joined by newlines, are nanoGPT's training and held-out
text, by characters. nanoGPT is trained from a copy of its checkout with another seed. It has no limit of time: the
median of some iterations gives the number of iterations, as --minutes does for this trainer. Both are measured on all
windows of the held-out text that do not overlap, of the length of their context; the time of measurements is not
counted.
"""

import json
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../data"))
from shards import open_shard
from token_table import byte_alphabet

# of its README, for a CPU
README = "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128"
ALWAYS = "--device=cpu --compile=False --dropout=0.0 --dataset=text --log_interval=1 --eval_iters=1"
PERIOD = 80  # iterations that are timed, without the first 20

# Run by nanoGPT's Python in its checkout: the mean loss of a checkpoint, in nats per character.
MEASURE = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load(sys.argv[1], map_location="cpu", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
model.eval()
T = saved["model_args"]["block_size"]
data = torch.from_numpy(np.fromfile("data/text/val.bin", np.uint16).astype(np.int64))
rows = (len(data) - 1) // T
x, y = data[: rows * T].view(rows, T), data[1 : rows * T + 1].view(rows, T)
with torch.no_grad():
    losses = [model(x[i : i + 64], y[i : i + 64])[1].item() * len(x[i : i + 64]) for i in range(0, rows, 64)]
print(sum(losses) / rows)
"""


def fail(text):
    sys.exit(f"bench_peers.py: {text}")


def read_text(corpus, about, split):
    """The documents of a split as one text."""
    shards = [open_shard(os.path.join(corpus, s["file"])) for s in about["shards"] if s["file"].startswith(split)]
    ids = np.concatenate(shards)
    table = {i: bytes([i]) for i in range(256)}
    if about["tokenizer"] != "bytes":
        with open(os.path.join(corpus, "tokenizer.json"), encoding="utf-8") as f:
            vocabulary = json.load(f)["model"]["vocab"]
        alphabet = byte_alphabet()
        table = {i: bytes(alphabet[c] for c in text if c in alphabet) for text, i in vocabulary.items()}
    table[about["separator"]["token"]] = b"\n"
    return b"".join(table[i] for i in ids.tolist())[1:].decode()


class Ours:
    def __init__(self, name, options, corpus, about, minutes):
        self.name, self.options, self.corpus, self.minutes = name, options, corpus, minutes
        self.tokens_per_byte = about["val_tokens"] / about["val_text_bytes"]

    def run(self, seed, scratch):
        out = os.path.join(scratch, f"ours-{seed}")
        command = ["./train_diffv2", *self.options.split(), "--train-data", self.corpus, "--val-data", self.corpus]
        command += ["--val-steps", "1000000", "--minutes", str(self.minutes), "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(out, "log.jsonl"), encoding="utf-8") as f:
            records = [json.loads(line) for line in f]
        steps = [r["ms"] for r in records if r["kind"] == "train"]
        loss = [r["loss"] for r in records if r["kind"] == "val"][-1]
        shutil.rmtree(out)
        return loss * self.tokens_per_byte / math.log(2), len(steps), sum(steps) / 1000


class NanoGPT:
    def __init__(self, name, options, checkout, python, minutes):
        self.name, self.options, self.checkout, self.python, self.minutes = name, options, checkout, python, minutes

    def train(self, out, iterations, *more):
        command = [self.python, "train.py", "config/train_shakespeare_char.py", *ALWAYS.split(), *self.options.split()]
        command += [f"--out_dir={out}", f"--max_iters={iterations}", f"--lr_decay_iters={iterations}", *more]
        done = subprocess.run(command, cwd=self.checkout, capture_output=True, text=True)
        if done.returncode:
            fail(f"nanoGPT failed: {done.stderr.strip().splitlines()[-1]}")
        return [float(ms) / 1000 for ms in re.findall(r"^iter \d+: loss \S+, time (\S+)ms", done.stdout, re.M)]

    def run(self, seed, scratch):
        path, out = os.path.join(self.checkout, "train.py"), os.path.join(scratch, f"nanogpt-{seed}")
        with open(path, encoding="utf-8") as f:
            source, found = re.subn(r"torch\.manual_seed\(\d+", f"torch.manual_seed({seed}", f.read())
        if found != 1:
            fail(f"{path} does not set a seed as expected")
        with open(path, "w", encoding="utf-8") as f:
            f.write(source)
        update = statistics.median(self.train(out, PERIOD, "--eval_interval=1000000")[20:])
        iterations = round(60 * self.minutes / update)
        times = self.train(out, iterations, f"--eval_interval={iterations}", "--always_save_checkpoint=True")
        command = [self.python, "-c", MEASURE, os.path.join(out, "ckpt.pt")]
        printed = subprocess.run(command, cwd=self.checkout, check=True, capture_output=True, text=True).stdout
        loss = float(printed.split()[-1])  # after what model.py prints
        shutil.rmtree(out)
        # the first and the last iteration contain the evaluations
        return loss / math.log(2), len(times), sum(times[1:-1])


def quickstart_options():
    with open("scripts/quickstart.sh", encoding="utf-8") as f:
        found = re.search(r"^settings=\((.*?)--train-data", f.read(), re.M | re.S)
    return " ".join(found[1].split()) + " --matmul-dtype bf16"


def compare(checkout, python, corpus, minutes, seeds, settings, own):
    """checkout: of nanoGPT. settings: [(name, options of its train.py)]. own: options of ./train_diffv2; None: those
    of the quick start."""
    own = own or quickstart_options()
    python = os.path.abspath(shutil.which(python) or fail(f"--torch {python} is not a program"))
    with open(os.path.join(corpus, "corpus.json"), encoding="utf-8") as f:
        about = json.load(f)
    if "val_text_bytes" not in about:
        fail(f"{corpus}/corpus.json has no val_text_bytes: make the corpus again with text_to_shards")
    with tempfile.TemporaryDirectory(prefix="bench_nanogpt_") as scratch:
        copy = os.path.join(scratch, "nanoGPT")
        shutil.copytree(checkout, copy)
        os.makedirs(os.path.join(copy, "data/text"), exist_ok=True)
        texts = {split: read_text(corpus, about, split) for split in ("train", "val")}
        characters = sorted(set("".join(texts.values())))
        number = {c: i for i, c in enumerate(characters)}
        for split, text in texts.items():
            np.array([number[c] for c in text], np.uint16).tofile(os.path.join(copy, f"data/text/{split}.bin"))
        with open(os.path.join(copy, "data/text/meta.pkl"), "wb") as f:
            pickle.dump({"vocab_size": len(characters)}, f)
        # losses of characters become losses of bytes
        share = len(texts["val"]) / len(texts["val"].encode())
        players = [Ours("diffv2.c", own, corpus, about, minutes)]
        players += [NanoGPT(f"nanoGPT, {name}", text, copy, python, minutes) for name, text in settings]
        found = {p.name: [] for p in players}
        print(f"{'seed':>4} {'':24} {'bits/byte':>9} {'updates':>8} {'training':>9} {'wall':>7}")
        for seed in range(1, seeds + 1):
            for p in players[::-1] if seed % 2 == 0 else players:
                begin = time.monotonic()
                bits, updates, seconds = p.run(seed, scratch)
                bits *= share if isinstance(p, NanoGPT) else 1
                found[p.name].append(bits)
                wall = time.monotonic() - begin
                print(f"{seed:4} {p.name:24} {bits:9.4f} {updates:8} {seconds:7.1f} s {wall:5.0f} s", flush=True)
        ours = statistics.mean(found["diffv2.c"])
        for p in players:
            mean, values = statistics.mean(found[p.name]), found[p.name]
            less = "" if p is players[0] else f"ours has {100 * (1 - ours / mean):.1f}% fewer; "
            print(f"mean {p.name:24} {mean:9.4f} ({min(values):.4f} to {max(values):.4f})  {less}{p.options}")
