"""validation.py: which documents of a corpus are for validation.

  local files  The rule of text_to_shards.c, by bytes of text and a byte for each separator. Documents are taken in the
               order of a hash of their position, as long as they fit into what is left of the target; if none fits, the
               smallest. The last part of a single document, from the beginning of a character, becomes a document of
               its own. A pass over the documents reads their lengths before they are tokenized. With --max-tokens, it
               ends where these are expected to be reached, and later documents are for training.
  Hub          Its files are there one at a time, and their documents are small and many. Each is taken with the
               probability target / expected tokens, by a hash of its file and position. This requires no earlier pass,
               and validation is spread over all files.

The choice is a function of the input and the options: a later start makes the same one. The first rule requires up to
64 bytes of memory per document.
"""

import sys
from array import array

import numpy as np
from sources import BadInput, Documents

MOST_TOKENS = 1_000_000  # for validation by default, and at most 1% of the text
BYTES_PER_TOKEN = 3.5  # an estimate


def bytes_per_token(options):
    return 1 if options.bytes else BYTES_PER_TOKEN


def position_hash(z):
    """The finalizer of splitmix64, of an array of uint64."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def choose(lengths, target):
    """The documents for validation, of two or more. target: less than all lengths together."""
    order = np.argsort(position_hash(np.arange(len(lengths), dtype=np.uint64)))
    fitting, taken, left = order[lengths[order] <= target], [], target
    while len(fitting):  # a step takes those before the next that does not fit
        sums = np.cumsum(lengths[fitting])
        count = np.searchsorted(sums, left, "right")
        taken.append(fitting[:count])
        left -= sums[count - 1]
        fitting = fitting[count:][lengths[fitting[count:]] <= left]
    return np.concatenate(taken) if taken else order[[np.argmin(lengths[order])]]


def cut_of(data, target):
    """Where the last part of a text, of about `target` bytes, begins."""
    at = max(1, len(data) - target)
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at -= 1
    if not 0 < at < len(data):
        raise BadInput(f"a text of {len(data)} bytes is too short for training and validation: add text")
    return at


def checked_target(options, total, per_token):
    """The amount for validation, of `total`."""
    target = int((options.val_tokens or MOST_TOKENS) * per_token)
    if not options.val_tokens:
        target = max(1, min(target, int(0.01 * total)))
    if target >= total:
        has = f"the text has about {total / per_token:.0f} tokens"
        raise BadInput(f"--val-tokens {options.val_tokens or target} leaves nothing for training: {has}")
    return target


def warn_of(taken, total, target, unit):
    """Warns if validation is far from the amount that a user expects."""
    if taken > 0.1 * total:
        found = f"{taken} of {total} {unit}, more than 10%: split long documents with --delimiter, or use a lower "
        found += "--val-tokens"
    elif taken > 2 * target or taken < target // 2:
        found = f"{taken} {unit} instead of about {target}, since documents are long: split them with --delimiter"
    else:
        return
    print(f"prepare.py: validation has {found}", file=sys.stderr, flush=True)


class Validation:
    """A choice of documents, by chosen() of the classes below."""

    cut = 0  # where the only document is cut

    def pieces(self, file, first, texts):
        """A list of (piece of the text, whether it is for validation) for each text from `first` on in a file."""
        chosen = self.chosen(file, first, len(texts)).tolist()
        return [self.pieces_of(text, held) if text else [] for text, held in zip(texts, chosen)]

    def pieces_of(self, text, held):
        if not held or not self.cut:
            return [(text, held)]
        data = text.encode()
        return [(data[: self.cut].decode(), False), (data[self.cut :].decode(), True)]


class Sample(Validation):
    """Each document of the Hub with the same probability."""

    def __init__(self, options, expected_tokens):
        target = checked_target(options, expected_tokens, 1)
        warn_of(target, expected_tokens, target, "expected tokens")
        self.limit = target / expected_tokens * 2.0**64

    def chosen(self, file, first, count):
        positions = np.arange(first, first + count, dtype=np.uint64)
        return position_hash(positions + np.uint64(file << 40)) < self.limit


class Choice(Validation):
    """Documents of local files."""

    def __init__(self, options, inputs):
        print("reading the lengths of the documents, to choose those for validation", flush=True)
        self.begin = []  # of each file, in the mask
        lengths, text = self.read(options, inputs)
        self.mask = np.zeros(len(lengths), bool)
        documents = np.flatnonzero(lengths)
        if len(documents) == 0:
            raise BadInput("no document with text")
        lengths = lengths[documents]
        total = int(lengths.sum())
        target = checked_target(options, total, bytes_per_token(options))
        if len(documents) > 1:
            taken = choose(lengths, target)
            self.mask[documents[taken]] = True
            size = int(lengths[taken].sum())
        else:
            data = text.encode()
            self.mask[documents] = True
            self.cut = cut_of(data, target)
            size = len(data) - self.cut + 1
        warn_of(size, total, target, "bytes")

    def read(self, options, inputs):
        """The lengths of the documents with their separators, 0 for those that are skipped, and the last text."""
        most = options.max_tokens * bytes_per_token(options) or float("inf")
        lengths, last, total = array("Q"), None, 0
        for source in inputs:
            self.begin.append(len(lengths))
            for text, _ in Documents(source.path, source.name, options):
                lengths.append(len(text.encode()) + 1 if text else 0)
                last, total = text or last, total + lengths[-1]
                if total >= most:
                    return np.array(lengths, np.uint64), last
        return np.array(lengths, np.uint64), last

    def chosen(self, file, first, count):
        chosen = np.zeros(count, bool)
        if file < len(self.begin):  # others are behind the end by --max-tokens
            part = self.mask[self.begin[file] + first :][:count]
            chosen[: len(part)] = part
        return chosen
