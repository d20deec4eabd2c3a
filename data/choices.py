"""Multiple-choice files (llmc/data/choices.h): llm.c's format, and the same with words of 32 bits.

A header of 256 int32 (20240522, version, number of examples, longest example in bytes), then per example, in words of
16 bits (version 1, the format of llm.c) or 32 bits (2):

    the largest word, bytes of the example with these words, index, label, number of completions,
    length and tokens of the context, then the length and tokens of each completion
"""

from dataclasses import dataclass

import numpy as np
from outputs import open_output

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
