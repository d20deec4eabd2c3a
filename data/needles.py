#!/usr/bin/env python3
"""Writes multi-needle retrieval as a multiple-choice file, for --eval-choices.

  data/needles.py N:R --val-data CORPUS --seq-len T --out FILE [--seed S]

  CORPUS  a corpus directory, as --val-data of the trainer

prompt    H tokens of text, the haystack, with N pairs "key value" in it, and then R of the keys, each followed by its
          value:  text k3 v3 text k1 v1 .. text | k1 v1 k5 -> v5. Keys and values of a prompt are distinct symbols,
          which its text does not contain. A pair has one of DEPTHS depths: 0, 1/4, .. 1 of the H tokens precede it. The
          prompts of a depth have an asked pair there; the other pairs have random depths, and pairs of one depth are in
          random order. PROMPTS for each depth and each of LENGTHS lengths, up to T.
questions Each is an example of the file, with the candidates as completions by ascending ID: the N values, except those
          that earlier questions of the prompt have shown.
chance    A model that does not look up the key is right in 1 of the candidates, whatever it prefers: over all depths of
          a length, the pairs are exchangeable. At a single depth it may differ: the last value is right at depth 1.
text      the first WINDOWS * T tokens of the validation data, without separators of documents
symbols   the most frequent tokens of the text after those that make up half of it, at most SYMBOLS
source    Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, section 3.4. There, text of several tokens is
          generated; here single tokens are compared, so that small models and any vocabulary can be measured, and the
          other needles have the depths of the asked ones, so that chance is exact.
"""

import argparse
import collections
import itertools
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

from choices import Example, write_choices
from shards import ShardError, open_shard
from sources import BadInput, first_line

NEEDLE_LIMIT, LENGTHS, DEPTHS, PROMPTS = 64, 4, 5, 50
SYMBOLS, WINDOWS = 256, 64


def read_text(directory, count):
    """The text of prompts, from the first `count` tokens for validation of a corpus."""
    try:
        corpus = json.loads((directory / "corpus.json").read_text(encoding="utf-8-sig"))
        separator = (corpus["separator"] or {}).get("token")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadInput(f"{directory}/corpus.json is damaged") from None
    shards = map(open_shard, sorted(directory.glob("val_*.bin")))
    tokens = itertools.chain.from_iterable(shard[:count].tolist() for shard in shards)
    return [token for token in itertools.islice(tokens, count) if token != separator]


def symbols_of(text, wanted):
    """The symbols of prompts, of which the task requires `wanted`."""
    counts = collections.Counter(text).most_common()
    before = itertools.accumulate((count for _, count in counts), initial=0)
    found = [token for (token, _), sum_before in zip(counts, before) if 2 * sum_before >= len(text)][:SYMBOLS]
    if len(found) < wanted:
        raise BadInput(
            f"{wanted} symbols are required, and the first {WINDOWS} windows of the validation data have {len(found)}: "
            "use more data, or fewer needles"
        )
    return found


def needle_questions(needles, asked, length, depth, text, symbols, draw):
    """[(example, depth of its pair)] of a prompt whose pair 0 has the depth, and is asked. draw: random numbers"""
    size = length - 2 * needles - (2 * asked - 1)
    drawn = draw.sample(symbols, 2 * needles)
    keys, values = drawn[:needles], drawn[needles:]
    begin = draw.randrange(len(text))
    haystack = (t for t in itertools.cycle(text[begin:] + text[:begin]) if t not in drawn)
    depths = [depth] + draw.choices(range(DEPTHS), k=needles - 1)
    order, tokens, written = draw.sample(range(needles), needles), [], 0
    for d in range(DEPTHS):
        until = size * d // (DEPTHS - 1)
        tokens += itertools.islice(haystack, until - written)
        written = until
        for i in order:
            tokens += [keys[i], values[i]] if depths[i] == d else []
    found, candidates = [], sorted(values)
    for i in draw.sample(range(asked), asked):
        tokens.append(keys[i])
        found.append((Example(tokens[:], [[c] for c in candidates], candidates.index(values[i])), depths[i]))
        tokens.append(values[i])
        candidates = [c for c in candidates if c != values[i]]
    return found


def needles_task(value, length):
    """(needles, asked) of N:R, where it fits into a context of `length`."""
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)
    needles, asked = map(int, found.groups()) if found else (0, 0)
    if not (2 <= needles <= NEEDLE_LIMIT and 1 <= asked < needles):
        raise BadInput(
            f"needles '{value}' is not accepted: it must be N:R, such as 4:2, with N from 2 to {NEEDLE_LIMIT}, and R "
            "from 1 to N - 1: the last question must have several candidates"
        )
    required = LENGTHS * (2 * needles + 2 * asked - 1 + DEPTHS - 1)
    if length < required:
        raise BadInput(f"needles {value} requires --seq-len {required} or more, and it is {length}")
    return needles, asked


def write_task(options):
    needles, asked = needles_task(options.value, options.seq_len)
    text, examples = read_text(options.val_data, WINDOWS * options.seq_len), []
    symbols = symbols_of(text, 2 * needles)
    for size in (options.seq_len * part // LENGTHS for part in range(1, LENGTHS + 1)):
        for index in range(DEPTHS * PROMPTS):
            draw = random.Random(f"needles {options.seed} {size} {index}")
            found = needle_questions(needles, asked, size, index % DEPTHS, text, symbols, draw)
            examples += [question for question, _ in found]
    write_choices(options.out, examples, 1 + max(max(e.context) for e in examples))
    print(f"{options.out}: {len(examples)} questions of needles, of {len(symbols)} symbols")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("value", metavar="N:R")
    parser.add_argument("--val-data", required=True, type=Path, metavar="CORPUS")
    parser.add_argument("--seq-len", required=True, type=int, metavar="T", help="that of the model")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the prompts (default: 1)")
    options = parser.parse_args()
    try:
        write_task(options)
    except (BadInput, ShardError) as error:
        sys.exit(f"needles.py: {error}")
    except OSError as error:
        sys.exit(f"needles.py: {error.filename or options.out}: {error.strerror or first_line(error)}")


if __name__ == "__main__":
    main()
