#!/usr/bin/env python3
"""Writes synthetic tasks as multiple-choice files, for --eval-choices, and computes their scores.

  data/synthetic_tasks.py needles N:R --val-data DATA --seq-len T --out FILE [options]
  data/synthetic_tasks.py shots K --val-data DATA --seq-len T --out FILE [options]
  data/synthetic_tasks.py scores EVAL FILE... [--out EVAL]

  DATA    a corpus directory, a shard, or a pattern of shards, as --val-data of the trainer; not a mixture
  scores  reads what --eval-out wrote of an evaluation with these files, prints the scores, and adds them to it

needles   H tokens of text, the haystack, with N pairs "key value" in it, and then R of the keys, each followed by its
          value:  text k3 v3 text k1 v1 .. text | k1 v1 k5 -> v5. Keys and values of a prompt are distinct symbols,
          which its text does not contain. A pair has one of DEPTHS depths: 0, 1/4, .. 1 of the H tokens precede it. The
          prompts of a depth have an asked pair there; the other pairs have random depths, and pairs of one depth are in
          random order. NEEDLE_PROMPTS for each depth and each of LENGTHS lengths, up to T.
shots     K examples and a query:  a a t2 L2 | t1 a a L1 | .. | a t2 a -> L2. An example has SHOT_WORDS tokens, of which
          one, at a random place, is a trigger; each of SHOT_CLASSES classes has a trigger and a label. The classes of
          the examples occur equally often. A set has its own triggers and labels, K examples, and a query of each
          class, which are asked after SHOT_ORDERS random orders of the same examples.
questions Each is an example of the file, with the candidates as completions by ascending ID: the N values, except those
          that earlier questions of the prompt have shown, or the labels. A completion has one character and one byte,
          so that bits_per_byte are bits per answer. FILE.json beside it says what each example asks.
chance    A model that does not look up the key, or the trigger, is right in 1 of the candidates, whatever it prefers:
          over all depths of a length, the pairs are exchangeable; triggers and labels of a set are paired at random. At
          a single depth it may differ: the last value is right at depth 1 and wrong at depth 0.
text      the first WINDOWS windows of T tokens of the validation data, without separators of documents
symbols   the most frequent words of the text: with a tokenizer, tokens of a space and three letters or more; where
          tokens are bytes, digits and capital letters. Where there are too few, and without a text of tokens, the most
          frequent tokens.
random    functions of the seed, as llmc/base/random.h draws them
exact     the share of answers that are the most likely of all tokens
interval  Wilson's, 95 %. Needles: over questions, which are independent where a model guesses. Shots: the orders of a
          query count as one, and the four queries of a set as three. Of a model that prefers a label for each trigger,
          and does not look at the examples, 1 of 4 answers of a set is right on average, with a variance of up to 1
          (the fixed points of a permutation), 4/3 of that of four independent answers.
spread    of shots, over orders: the standard deviation of the accuracy on the four queries of a set, root mean square
          over sets. spread_independent: what it would be if each order changed answers independently, with the same
          share of right answers for each query. A larger spread is an effect of the order on many queries.
source    Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, sections 3.4 and 3.5. There, text of several
          tokens is generated; here single tokens are compared, so that small models and any vocabulary can be measured,
          and the other needles have the depths of the asked ones, so that chance is exact.
"""

import argparse
import collections
import glob
import json
import math
import os
import re
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

import xxhash
from choices import Completion, Example, write_choices
from outputs import open_output
from shards import ShardError, open_shard
from sources import BadInput, first_line

NEEDLE_LIMIT, LENGTHS, DEPTHS, NEEDLE_PROMPTS = 64, 4, 5, 50
SHOT_CLASSES, SHOT_WORDS, SHOT_FILLERS, SHOT_SETS, SHOT_ORDERS = 4, 3, 4, 32, 5
SYMBOLS, WINDOWS, WORD_LETTERS, BYTES = 256, 64, 3, 256
NONE, M64 = 2**32 - 1, 2**64 - 1

# ---- random numbers (llmc/base/random.h)


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def bits(key, index):
    return mix(key ^ mix((index + 1) * 0x9E3779B97F4A7C15 & M64))


def derived(key, number):
    return mix(key + number & M64)


class Drawing:
    """The random numbers of a key, in their order."""

    def __init__(self, key):
        self.key, self.next = key, 0

    def below(self, count):
        self.next += 1
        return bits(self.key, self.next - 1) % count

    def shuffled(self, items, count):
        """The items, of which the first `count` are a random sample in random order (Fisher-Yates)."""
        items = list(items)
        for i in range(count):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items


# ---- text and symbols


def windows(data, length):
    """The tokens of the first windows of the validation data, in the order of the trainer (llmc/data/dataloader.h)."""
    path = os.path.expanduser(data)
    if re.match(r"[A-Za-z0-9_-]+=", data) and not os.path.exists(path) and ":" in data:
        raise BadInput(f"--val-data {data}: a mixture of corpora; specify one of them")
    paths = glob.glob(os.path.join(glob.escape(path), "val_*.bin")) if os.path.isdir(path) else glob.glob(path)
    found = [path] if os.path.isfile(path) else sorted(paths, key=os.fsencode)
    if not found:
        raise BadInput(f"--val-data {data}: no such shards" + (" (val_*.bin)" if os.path.isdir(path) else ""))
    tokens, left = [], WINDOWS
    for shard in map(open_shard, found):
        count = min(left, (len(shard) - 1) // length)
        tokens += shard[: count * length].tolist()
        left -= count
    if not tokens:
        raise BadInput(f"--val-data {data}: no shard has {length + 1} tokens, a window of --seq-len {length}")
    return tokens


def corpus_facts(data):
    """(separator or None, vocabulary size or None) of a corpus directory."""
    try:
        corpus = json.loads((Path(data).expanduser() / "corpus.json").read_text(encoding="utf-8"))
        return (corpus.get("separator") or {}).get("token"), corpus.get("vocab_size")
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (ValueError, AttributeError):
        raise BadInput(f"{data}/corpus.json is damaged") from None


def token_table(path):
    """(texts of the tokens, separator or None) of a tokenizer.bin (llmc/text/tokenizer_table.h)."""
    data = Path(path).read_bytes()
    try:
        size, separator = struct.unpack_from("<8x4xI8xI", data)
        lengths = struct.unpack_from(f"<{size}I", data, 56)
        if data[:8] != b"DV2TOK\0\1" or struct.unpack("<Q", data[-8:])[0] != xxhash.xxh64(data[:-8]).intdigest():
            raise ValueError
    except (struct.error, ValueError):
        raise BadInput(f"{path}: not a tokenizer.bin, or damaged") from None
    texts, at = [], 56 + 4 * size
    for length in lengths:
        texts.append(data[at : at + length])
        at += length
    return texts, None if separator == NONE else separator


def is_word(text):
    """Whether a token is a space and three letters or more. Bytes from 0x80 on are letters, nearly always."""
    return len(text) > WORD_LETTERS and text[:1] == b" " and all(b >= 0x80 or chr(b).isalpha() for b in text[1:])


def is_byte_word(token):
    return chr(token).isascii() and (chr(token).isdigit() or chr(token).isupper())


class Words:
    """The text and the symbols of prompts. wanted: symbols that the task requires"""

    def __init__(self, wanted, data, length, tokenizer=None, separator=None):
        tokens = windows(data, length)
        own, size = corpus_facts(data)
        beside = Path(data).expanduser() / "tokenizer.bin"
        table = Path(tokenizer) if tokenizer else beside if beside.exists() else None
        texts, last = token_table(table / "tokenizer.bin" if table.is_dir() else table) if table else (None, None)
        as_bytes = texts is None and max(tokens) < BYTES and size in (None, BYTES)
        first = next((s for s in (separator, own, last, 0 if as_bytes else None) if s is not None), None)
        self.text = [t for t in tokens if t not in (first, own)]
        counts = collections.Counter(self.text)
        if texts is not None and max(counts, default=0) >= len(texts):
            raise BadInput(f"{table} has {len(texts)} tokens, and the data have token {max(counts)}")
        if len(counts) <= wanted:
            raise BadInput(
                f"{wanted + 1} different tokens are required in the first {WINDOWS} validation windows, and they have "
                f"{len(counts)}: use more data, or fewer needles"
            )
        word = (lambda t: is_word(texts[t])) if texts is not None else is_byte_word if as_bytes else lambda t: False
        ordered = sorted(counts, key=lambda token: (-counts[token], token))
        words = [token for token in ordered if word(token)][:SYMBOLS]
        self.are_words = len(words) >= wanted
        self.symbols = words if self.are_words else ordered[:SYMBOLS]

    def text_from(self, place, excluded):
        """The tokens of the text from a place on, around its end, without some."""
        while True:
            token = self.text[place % len(self.text)]
            place += 1
            if token not in excluded:
                yield token


# ---- prompts


def example(context, candidates, answer):
    """A question, with its candidates by ascending ID."""
    candidates = sorted(candidates)
    completions = [Completion([c], 0, 1, 1) for c in candidates]
    return Example(context, completions, candidates.index(answer))


def needle_questions(needles, asked, length, depth, words, key):
    """[(example, depth of its pair)] of a prompt whose pair 0 has the depth, and is asked."""
    draw, size = Drawing(key), length - 2 * needles - (2 * asked - 1)
    drawn = draw.shuffled(words.symbols, 2 * needles)[: 2 * needles]
    keys, values = drawn[:needles], drawn[needles:]
    haystack = words.text_from(draw.below(len(words.text)), set(drawn))
    depths = [depth] + [draw.below(DEPTHS) for _ in range(needles - 1)]
    order, tokens, written = draw.shuffled(range(needles), needles), [], 0
    for d in range(DEPTHS):
        until = size * d // (DEPTHS - 1)
        tokens += [next(haystack) for _ in range(until - written)]
        written = until
        for i in order:
            tokens += [keys[i], values[i]] if depths[i] == d else []
    found, shown = [], set()
    for i in draw.shuffled(range(asked), asked):
        tokens.append(keys[i])
        found.append((example(tokens[:], set(values) - shown, values[i]), depths[i]))
        tokens.append(values[i])
        shown.add(values[i])
    return found


def shot_example(drawn, trigger, key):
    """The tokens of an example: fillers, and its trigger among them. drawn: triggers, labels, fillers"""
    place, fillers = bits(key, 0) % SHOT_WORDS, drawn[2 * SHOT_CLASSES :]
    tokens = [fillers[bits(key, i + 1) % len(fillers)] for i in range(SHOT_WORDS)]
    tokens[place] = drawn[trigger]
    return tokens


def shot_set(count, number, words, key):
    """The questions of a set of examples, by order and query. key: of all sets of `count` examples"""
    own = derived(key, number)
    drawn = Drawing(own).shuffled(words.symbols, len(words.symbols))
    labels, of_examples, of_queries = drawn[SHOT_CLASSES : 2 * SHOT_CLASSES], derived(own, 1), derived(own, 2)
    made = [
        [*shot_example(drawn, i % SHOT_CLASSES, derived(of_examples, i)), labels[i % SHOT_CLASSES]]
        for i in range(count)
    ]
    queries = [shot_example(drawn, q, derived(of_queries, q)) for q in range(SHOT_CLASSES)]
    for order in range(SHOT_ORDERS):
        places = Drawing(derived(derived(own, 3), order)).shuffled(range(count), count)
        context = [token for place in places for token in made[place]]
        for query, label in zip(queries, labels):
            yield example(context + query, labels, label)


# ---- tasks


def needles_task(value, length):
    """(needles, asked) of N:R, where it fits into a context of `length`."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)
    if not found:
        raise BadInput(f"needles '{value}' is not accepted: it must be N:R, such as 4:2")
    needles, asked = map(int, found.groups())
    if not 2 <= needles <= NEEDLE_LIMIT:
        raise BadInput(f"needles '{value}' is not accepted: N must be 2 to {NEEDLE_LIMIT}")
    if not 1 <= asked < needles:
        raise BadInput(
            f"needles '{value}' is not accepted: R must be 1 to N - 1: the last question must have several candidates"
        )
    required(f"needles {value}", LENGTHS * (2 * needles + 2 * asked - 1 + DEPTHS - 1), length)
    return needles, asked


def shots_task(value, length):
    """K, where it fits into a context of `length`."""
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise BadInput(f"shots '{value}' is not accepted: it must be a number of examples, such as 32")
    if int(value) < SHOT_CLASSES:
        raise BadInput(f"shots '{value}' is not accepted: K must be at least {SHOT_CLASSES}, one example per class")
    required(f"shots {value}", int(value) * (SHOT_WORDS + 1) + SHOT_WORDS, length)
    return int(value)


def required(task, context, length):
    if length < context:
        raise BadInput(f"{task} requires --seq-len {context} or more, and it is {length}")


def make_needles(value, words_of, length, seed):
    """(examples, description) of the task of needles. words_of: (symbols that are required) -> Words"""
    needles, asked = needles_task(value, length)
    words, examples, places = words_of(2 * needles), [], []
    for part in range(1, LENGTHS + 1):
        size = length * part // LENGTHS
        key = derived(xxhash.xxh3_64_intdigest(b"needles", seed), size)
        for index in range(DEPTHS * NEEDLE_PROMPTS):
            found = needle_questions(needles, asked, size, index % DEPTHS, words, derived(key, index))
            examples += [question for question, _ in found]
            places += [[size, depth] for _, depth in found]
    return examples, {"task": "needles", "needles": needles, "asked": asked, "places": places, **facts_of(words)}


def make_shots(value, words_of, length, seed):
    """(examples, description) of the task of shots."""
    count = shots_task(value, length)
    words = words_of(2 * SHOT_CLASSES + SHOT_FILLERS)
    key = derived(xxhash.xxh3_64_intdigest(b"shots", seed), count * (SHOT_WORDS + 1) + SHOT_WORDS)
    examples = [question for number in range(SHOT_SETS) for question in shot_set(count, number, words, key)]
    return examples, {"task": "shots", "examples": count, **facts_of(words)}


def facts_of(words):
    return {"symbols": len(words.symbols), "words": words.are_words}


def write_task(options):
    words_of = lambda wanted: Words(wanted, options.val_data, options.seq_len, options.tokenizer, options.separator)
    make = {"needles": make_needles, "shots": make_shots}[options.command]
    examples, description = make(options.value, words_of, options.seq_len, options.seed)
    write_choices(options.out, examples, 1 + max(max(e.context) for e in examples))
    description |= {
        "fingerprint": str(xxhash.xxh64(Path(options.out).read_bytes()).intdigest()),
        "labels": [e.label for e in examples],
        "candidates": [len(e.completions) for e in examples],
    }
    write_json(f"{options.out}.json", description)
    kind = "words" if description["words"] else "tokens"
    print(f"{options.out}: {len(examples)} questions of {options.command}, of {description['symbols']} {kind}")


def write_json(path, value):
    with open_output(path) as f:
        f.write((json.dumps(value) + "\n").encode())


# ---- scores


def score(questions, independent=None):
    """The scores of [(right, exact, chance)]. independent: the number of independent questions, if not all are"""
    n, z = independent or len(questions), 1.959963984540054  # 95 %
    accuracy, exact, chance = (sum(column) / len(questions) for column in zip(*questions))
    middle, scale = accuracy + z * z / (2 * n), 1 + z * z / n
    width = z * math.sqrt(accuracy * (1 - accuracy) / n + z * z / (4 * n * n))
    low, high = max(0, (middle - width) / scale), min(1, (middle + width) / scale)
    return {"accuracy": accuracy, "low": low, "high": high, "exact": exact, "chance": chance}


def verdict(s):
    return (
        "at chance"
        if s["low"] <= s["chance"] <= s["high"]
        else f"{'above' if s['low'] > s['chance'] else 'below'} chance"
    )


def needle_scores(task, questions):
    of_place = collections.defaultdict(list)
    for place, question in zip(task["places"], questions):
        of_place[tuple(place)].append(question)
    cells = [
        {"length": length, "depth": depth / (DEPTHS - 1), "questions": len(of_place[length, depth])}
        | score(of_place[length, depth])
        for length, depth in sorted(of_place)
    ]
    facts = {key: task[key] for key in ("needles", "asked", "symbols", "words")}
    return facts | {"questions": len(questions), **score(questions), "cells": cells}


def spreads(rights):
    """(spread, spread_independent) of the right answers of all sets, by set, order and query."""
    variance = independent = 0.0
    for first in range(0, len(rights), SHOT_ORDERS * SHOT_CLASSES):
        orders = [rights[i : i + SHOT_CLASSES] for i in range(first, first + SHOT_ORDERS * SHOT_CLASSES, SHOT_CLASSES)]
        accuracies = [sum(order) / SHOT_CLASSES for order in orders]
        mean = sum(accuracies) / SHOT_ORDERS
        variance += sum((x - mean) ** 2 for x in accuracies) / (SHOT_ORDERS - 1)
        for query in zip(*orders):
            share = sum(query) / SHOT_ORDERS
            independent += share * (1 - share) * SHOT_ORDERS / (SHOT_ORDERS - 1) / SHOT_CLASSES**2
    sets = len(rights) // (SHOT_ORDERS * SHOT_CLASSES)
    return math.sqrt(variance / sets), math.sqrt(independent / sets)


def shot_scores(task, questions):
    spread, independent = spreads([right for right, _, _ in questions])
    facts = {"classes": SHOT_CLASSES, "sets": SHOT_SETS, "queries": SHOT_SETS * SHOT_CLASSES, "orders": SHOT_ORDERS}
    scores = score(questions, SHOT_SETS * (SHOT_CLASSES - 1))
    return {"examples": task["examples"], **facts, **scores, "spread": spread, "spread_independent": independent}


def percent(s, *keys):
    return tuple(100 * s[key] for key in keys)


def print_needles(found):
    kind = "words" if found["words"] else "tokens"
    head = "".join(" %7d%% " % (100 * d / (DEPTHS - 1)) for d in range(DEPTHS))
    print(
        f"retrieval of {found['asked']} of {found['needles']} needles, of {found['symbols']} {kind}, by length and "
        f"depth; * at chance\n  {'':6}{head}"
    )
    for length in sorted({cell["length"] for cell in found["cells"]}):
        cells = [cell for cell in found["cells"] if cell["length"] == length]
        shown = (" %7.2f%%%s" % (100 * c["accuracy"], "*" if verdict(c) == "at chance" else " ") for c in cells)
        print("  %6d%s" % (length, "".join(shown)))
    print(
        "  all: %.2f%% [%.2f%%, %.2f%%], %s (%.2f%%); the most likely of all tokens %.2f%%"
        % (*percent(found, "accuracy", "low", "high"), verdict(found), *percent(found, "chance", "exact"))
    )


def print_shots(rows):
    print(
        f"classification after K examples of {SHOT_CLASSES} classes: {SHOT_SETS} sets of examples in {SHOT_ORDERS} "
        f"orders, {SHOT_CLASSES} queries each"
    )
    for row in rows:
        print(
            "  K = %d: %.2f%% [%.2f%%, %.2f%%], %s (%.2f%%); deviation over orders %.2f%% (of independent answers "
            "%.2f%%); the most likely of all tokens %.2f%%"
            % (
                row["examples"],
                *percent(row, "accuracy", "low", "high"),
                verdict(row),
                *percent(row, "chance", "spread", "spread_independent", "exact"),
            )
        )


def answers_of(evaluation, task, path):
    """[(right, exact, chance)] of the questions of a task."""
    found = [t for t in evaluation.get("choices") or [] if t["fingerprint"] == task["fingerprint"] and "answers" in t]
    if not found:
        raise BadInput(f"{path}: the evaluation has no answers to this file: give it to --eval-choices")
    rows = zip(found[0]["answers"], found[0]["most_likely"], task["labels"], task["candidates"], strict=True)
    return [(best == label, exact, 1 / candidates) for best, exact, label, candidates in rows]


def read_json(path, what):
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    except ValueError:
        pass
    raise BadInput(f"{path}: not {what}, or damaged")


def compute_scores(options):
    evaluation, shots = read_json(options.evaluation, "what --eval-out writes"), []
    for path in options.files:
        task = read_json(f"{path}.json", "the description of a task that this program wrote")
        try:
            questions = answers_of(evaluation, task, path)
            if task["task"] == "needles":
                evaluation["needles"] = needle_scores(task, questions)
                print_needles(evaluation["needles"])
            else:
                shots.append(shot_scores(task, questions))
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise BadInput(f"{path}.json: damaged, or not of {options.evaluation}") from None
    if shots:
        evaluation["shots"] = sorted(shots, key=lambda row: row["examples"])
        print_shots(evaluation["shots"])
    write_json(options.out or options.evaluation, evaluation)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, value in (("needles", "N:R"), ("shots", "K")):
        command = commands.add_parser(name, help=f"write the task of {name}")
        command.add_argument("value", metavar=value)
        command.add_argument("--val-data", required=True, metavar="DATA")
        command.add_argument("--seq-len", required=True, type=int, metavar="T", help="that of the model")
        command.add_argument("--out", required=True, metavar="FILE")
        command.add_argument(
            "--tokenizer", metavar="FILE", help="tokenizer.bin (default: that of the corpus, or bytes)"
        )
        command.add_argument("--separator", type=int, metavar="ID", help="of documents (default: the corpus's)")
        command.add_argument("--seed", type=int, default=1, metavar="S", help="of the prompts (default: 1)")
    scores = commands.add_parser("scores", help="the scores of an evaluation")
    scores.add_argument("evaluation", metavar="EVAL", help="what --eval-out wrote")
    scores.add_argument("files", nargs="+", metavar="FILE", help="a file of a task, with FILE.json beside it")
    scores.add_argument("--out", metavar="EVAL", help="where to write the evaluation with the scores (default: EVAL)")
    options = parser.parse_args()
    if options.command != "scores" and (options.seq_len < 1 or not 0 <= options.seed <= M64):
        parser.error("--seq-len must be at least 1, --seed 0 to 2^64 - 1")
    return options


def main():
    options = parse_arguments()
    try:
        compute_scores(options) if options.command == "scores" else write_task(options)
    except (BadInput, ShardError) as error:
        sys.exit(f"synthetic_tasks.py: {error}")
    except OSError as error:
        sys.exit(f"synthetic_tasks.py: {error.filename or options.out}: {error.strerror or first_line(error)}")


if __name__ == "__main__":
    main()
