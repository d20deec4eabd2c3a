#!/usr/bin/env python3
"""Writes multi-needle retrieval as a multiple-choice file, for --eval-choices.

  data/needles.py N:R --val-data DATA --seq-len T --out FILE [options]

  DATA    a corpus directory, a shard, or a pattern of shards, as --val-data of the trainer; not a mixture

prompt    H tokens of text, the haystack, with N pairs "key value" in it, and then R of the keys, each followed by its
          value:  text k3 v3 text k1 v1 .. text | k1 v1 k5 -> v5. Keys and values of a prompt are distinct symbols,
          which its text does not contain. A pair has one of DEPTHS depths: 0, 1/4, .. 1 of the H tokens precede it. The
          prompts of a depth have an asked pair there; the other pairs have random depths, and pairs of one depth are in
          random order. PROMPTS for each depth and each of LENGTHS lengths, up to T.
questions Each is an example of the file, with the candidates as completions by ascending ID: the N values, except those
          that earlier questions of the prompt have shown.
chance    A model that does not look up the key is right in 1 of the candidates, whatever it prefers: over all depths of
          a length, the pairs are exchangeable. At a single depth it may differ: the last value is right at depth 1.
text      the first WINDOWS windows of T tokens of the validation data, without separators of documents
symbols   the most frequent words of the text: with a tokenizer, tokens of a space and three letters or more; where
          tokens are bytes, digits and capital letters. Where there are too few, and without a text of tokens, the most
          frequent tokens.
random    functions of the seed, as llmc/base/random.h draws them
source    Ye et al. 2024, "Differential Transformer", arXiv 2410.05258, section 3.4. There, text of several tokens is
          generated; here single tokens are compared, so that small models and any vocabulary can be measured, and the
          other needles have the depths of the asked ones, so that chance is exact.
"""

import argparse
import collections
import itertools
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

import xxhash
from choices import Example, write_choices
from shards import ShardError, validation_windows
from sources import BadInput, first_line
from token_table import read_table

NEEDLE_LIMIT, LENGTHS, DEPTHS, PROMPTS = 64, 4, 5, 50
SYMBOLS, WINDOWS, M64 = 256, 64, 2**64 - 1


def mix(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def derived(key, number):
    return mix(key + number & M64)


class Drawing:
    """The random numbers of a key, in their order."""

    def __init__(self, key):
        self.key, self.drawn = key, 0

    def below(self, count):
        self.drawn += 1
        return mix(self.key ^ mix(self.drawn * 0x9E3779B97F4A7C15 & M64)) % count

    def shuffled(self, items, count):
        """The items, of which the first `count` are a random sample in random order (Fisher-Yates)."""
        items = list(items)
        for i in range(count):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items


def corpus_facts(data):
    """(separator or None, vocabulary size or None) of a corpus directory."""
    try:
        corpus = json.loads((Path(data).expanduser() / "corpus.json").read_text(encoding="utf-8-sig"))
        return (corpus.get("separator") or {}).get("token"), corpus.get("vocab_size")
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (ValueError, AttributeError):
        raise BadInput(f"{data}/corpus.json is damaged") from None


def is_word(text):
    """Whether a token is a space and three letters or more. Bytes from 0x80 on are letters, nearly always."""
    return len(text) > 3 and text[:1] == b" " and all(b >= 0x80 or chr(b).isalpha() for b in text[1:])


def is_byte_word(token):
    return chr(token).isascii() and (chr(token).isdigit() or chr(token).isupper())


class Words:
    """The text and the symbols of prompts. wanted: symbols that the task requires"""

    def __init__(self, wanted, data, length, tokenizer=None, separator=None):
        tokens = validation_windows(data, length, WINDOWS)
        own, size = corpus_facts(data)
        beside = Path(data).expanduser() / "tokenizer.bin"
        table = Path(tokenizer) if tokenizer else beside if beside.exists() else None
        texts, last = read_table(table / "tokenizer.bin" if table.is_dir() else table) if table else (None, None)
        as_bytes = texts is None and max(tokens) < 256 and size in (None, 256)
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


def needle_questions(needles, asked, length, depth, words, key):
    """[(example, depth of its pair)] of a prompt whose pair 0 has the depth, and is asked."""
    draw, size = Drawing(key), length - 2 * needles - (2 * asked - 1)
    drawn = draw.shuffled(words.symbols, 2 * needles)[: 2 * needles]
    keys, values = drawn[:needles], drawn[needles:]
    begin = draw.below(len(words.text))
    haystack = (t for t in itertools.cycle(words.text[begin:] + words.text[:begin]) if t not in drawn)
    depths = [depth] + [draw.below(DEPTHS) for _ in range(needles - 1)]
    order, tokens, written = draw.shuffled(range(needles), needles), [], 0
    for d in range(DEPTHS):
        until = size * d // (DEPTHS - 1)
        tokens += itertools.islice(haystack, until - written)
        written = until
        for i in order:
            tokens += [keys[i], values[i]] if depths[i] == d else []
    found, candidates = [], sorted(values)
    for i in draw.shuffled(range(asked), asked):
        tokens.append(keys[i])
        found.append((Example(tokens[:], [[c] for c in candidates], candidates.index(values[i])), depths[i]))
        tokens.append(values[i])
        candidates = [c for c in candidates if c != values[i]]
    return found


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
    required = LENGTHS * (2 * needles + 2 * asked - 1 + DEPTHS - 1)
    if length < required:
        raise BadInput(f"needles {value} requires --seq-len {required} or more, and it is {length}")
    return needles, asked


def write_task(options):
    needles, asked = needles_task(options.value, options.seq_len)
    words = Words(2 * needles, options.val_data, options.seq_len, options.tokenizer, options.separator)
    examples = []
    for size in (options.seq_len * part // LENGTHS for part in range(1, LENGTHS + 1)):
        key = derived(xxhash.xxh3_64_intdigest(b"needles", options.seed), size)
        for index in range(DEPTHS * PROMPTS):
            found = needle_questions(needles, asked, size, index % DEPTHS, words, derived(key, index))
            examples += [question for question, _ in found]
    write_choices(options.out, examples, 1 + max(max(e.context) for e in examples))
    kind = "words" if words.are_words else "tokens"
    print(f"{options.out}: {len(examples)} questions of needles, of {len(words.symbols)} {kind}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("value", metavar="N:R")
    parser.add_argument("--val-data", required=True, metavar="DATA")
    parser.add_argument("--seq-len", required=True, type=int, metavar="T", help="that of the model")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.bin (default: that of the corpus, or bytes)")
    parser.add_argument("--separator", type=int, metavar="ID", help="of documents (default: the corpus's)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the prompts (default: 1)")
    options = parser.parse_args()
    if options.seq_len < 1 or not 0 <= options.seed <= M64:
        parser.error("--seq-len must be at least 1, --seed 0 to 2^64 - 1")
    try:
        write_task(options)
    except (BadInput, ShardError) as error:
        sys.exit(f"needles.py: {error}")
    except OSError as error:
        sys.exit(f"needles.py: {error.filename or options.out}: {error.strerror or first_line(error)}")


if __name__ == "__main__":
    main()
