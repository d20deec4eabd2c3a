"""Multiple-choice files (llmc/data/choices.h): llm.c's format, and the same with words of 32 bits.

A header of 256 int32 (20240522, version, number of examples, longest example in bytes), then per example, in words of
16 bits (version 1, the format of llm.c) or 32 bits (2):

    the largest word, bytes of the example with these words, index, label, number of completions,
    length and tokens of the context, then the length and tokens of each completion
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outputs import open_output
from sources import BadInput

MAGIC, HEADER = 20240522, 256


@dataclass
class Example:
    context: list
    completions: list  # of lists of tokens
    label: int

    @property
    def longest(self):
        """Tokens of the context and the longest completion."""
        return len(self.context) + max(map(len, self.completions))


def words_of(example, index):
    """The words of an example after the first two."""
    words = [index, example.label, len(example.completions), len(example.context), *example.context]
    for tokens in example.completions:
        words += [len(tokens), *tokens]
    return words


def write_choices(path, examples, vocab_size):
    """Writes the file atomically; returns its version."""
    rows = [words_of(e, i) for i, e in enumerate(examples)]
    wide = vocab_size > 65535 or any(max(*row, 2 * len(row) + 4) > 65535 for row in rows)
    dtype, version = np.dtype("<u4" if wide else "<u2"), 1 + wide
    parts = [np.array([np.iinfo(dtype).max, (len(row) + 2) * dtype.itemsize, *row], dtype) for row in rows]
    header = np.zeros(HEADER, "<i4")
    header[:4] = MAGIC, version, len(parts), max(part.nbytes for part in parts)
    with open_output(path) as f:
        f.write(header.tobytes())
        for part in parts:
            f.write(part.tobytes())
    return version


def read_choices(path):
    """(version, examples) of a file that write_choices() or llm.c wrote."""
    data = Path(path).read_bytes()
    header = np.frombuffer(data, "<i4", HEADER) if len(data) >= 4 * HEADER else np.zeros(4, "<i4")
    version = int(header[1])
    if header[0] != MAGIC or version not in (1, 2):
        raise BadInput(f"{path} is not a multiple-choice file: it begins with {header[0]}, version {version}")
    dtype = np.dtype("<u2" if version == 1 else "<u4")
    words, at, examples = np.frombuffer(data, dtype, offset=4 * HEADER).tolist(), 0, []

    def take(count):
        nonlocal at
        at += count
        return words[at - count : at]

    for index in range(header[2]):
        begin = at
        _, size, _, label, count, length = take(6)
        context, completions = take(length), [take(*take(1)) for _ in range(count)]
        if (at - begin) * dtype.itemsize != size or at > len(words):
            raise BadInput(f"{path}: example {index} is damaged")
        examples.append(Example(context, completions, label))
    if at != len(words):
        raise BadInput(f"{path}: {len(words) - at} words follow the last example")
    return version, examples
