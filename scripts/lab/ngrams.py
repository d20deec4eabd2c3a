"""ngrams.py: the losses of n-gram models on the windows of the final losses, below which a Transformer must be to say
anything about attention. They are interpolated by Witten and Bell:

    P_n(w | c) = (count(c w) + types(c) P_n-1(w | c')) / (count(c) + types(c)),    P_0 = 1 / vocabulary

c are the n - 1 tokens before w in its window, c' those without the first, and types(c) is the number of different
tokens after c. Counted are as many windows of the training data as a run reads, evenly spaced, at most MOST tokens.
They are kept in ngrams.json of a lab, and in archives.
"""

import json
import os
from pathlib import Path

import python_environment

from . import run_directory

np = python_environment.Later("numpy")
ORDERS = 5
MOST = 1 << 24
FORMATS = {20240520: "<u2", 20240801: "<u4"}  # of shards: their magic and their tokens


def shards_of(path, split):
    """The tokens of each shard of a directory or file; files that are no shards are left out."""
    files = sorted(path.glob(f"*{split}*.bin")) if os.path.isdir(path) else [path] if os.path.exists(path) else []
    formats = [(f, FORMATS.get(next(iter(np.fromfile(f, "<i4", 1)), 0))) for f in files]
    return [np.memmap(f, format, "r", 1024) for f, format in formats if format]


def windows_of(shards, T, most, spaced):
    """At most `most` windows [n, T + 1] of shards: the first ones, or evenly spaced."""
    ends = np.cumsum([(len(shard) - 1) // T for shard in shards])
    n = min(most, int(ends[-1]))
    rows = []
    for window in np.arange(n) * int(ends[-1]) // n if spaced else range(n):
        i = int(np.searchsorted(ends, window, "right"))
        begin = (int(window) - int(ends[i - 1] if i else 0)) * T
        rows.append(shards[i][begin : begin + T + 1])
    return np.array(rows, np.int64)


def losses(train, val, vocab, orders=ORDERS):
    """The mean losses of the models of 1, 2, .. tokens on the targets of windows [n, T + 1], in nats."""
    tokens, n, found = np.concatenate([train, val]), len(train), []
    p = np.full((len(val), tokens.shape[1] - 1), 1 / vocab)
    grams = np.zeros_like(tokens[:, :1].repeat(tokens.shape[1] + 1, 1))  # of order 0: [i] ends before token i
    for order in range(1, orders + 1):
        contexts = grams[:, :-1]  # of the tokens from order - 1 on
        ids = contexts * vocab + tokens[:, order - 1 :]
        _, first, grams = np.unique(ids, return_index=True, return_inverse=True)
        grams, context_of = grams.reshape(ids.shape), contexts.reshape(-1)[first]
        count = np.bincount(grams[:n].reshape(-1), minlength=len(first))
        of_context = lambda x: np.bincount(context_of, x, minlength=int(contexts.max()) + 1)
        total, types = of_context(count), of_context(count > 0)
        begin = order == 1  # token 0 is no target
        g, c, lower = grams[n:, begin:], contexts[n:, begin:], p[:, max(order - 2, 0) :]
        known = total[c] > 0
        lower[known] = ((count[g] + types[c] * lower) / np.maximum(total[c] + types[c], 1))[known]
        found.append(float(-np.log(p).mean()))
    return found


def as_read(info, options, split, shards):
    """Whether the shards have the tokens that the run found there, as far as they are known."""
    sources = info.get("data", {}).get(split, [])
    read = [source.get("tokens") for source in sources]
    known = read and None not in read and options[f"{split}-data"] == info["options"].get(f"{split}-data")
    return not known or sum(map(len, shards)) == sum(read)


def count(study):
    """Sets ngrams of a study from its data, if they are there and it has none of so many tokens and windows."""
    done = max((run for run in study.runs if run.state == "done"), key=lambda run: run.tokens, default=None)
    if not done or not done.directory.is_dir():
        return
    o, windows = done.phased[-1][1], done.windows(study.by_eval())  # those of the last phase
    T = int(o["seq-len"])
    shards = {split: shards_of(Path(str(o.get(f"{split}-data"))), split) for split in ("train", "val")}
    if not windows or not all(found and as_read(done.info, o, split, found) for split, found in shards.items()):
        return
    most = {"train": max(1, min(done.tokens, MOST) // T), "val": windows}
    n = {split: min(most[split], sum((len(shard) - 1) // T for shard in shards[split])) for split in most}
    if study.ngrams and (study.ngrams["tokens"], study.ngrams["windows"]) == (n["train"] * T, n["val"]):
        return
    train, val = (windows_of(shards[split], T, n[split], split == "train") for split in most)
    study.ngrams = {"tokens": len(train) * T, "windows": len(val), "losses": losses(train, val, int(o["vocab"]))}
    if (done.directory.parent / "lab.json").exists():
        run_directory.write_atomic(done.directory.parent / "ngrams.json", json.dumps(study.ngrams) + "\n")
