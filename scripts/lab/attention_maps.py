"""attention_maps.py: reads the file of --dump-attention."""

import json
import math
import re
import struct
from array import array
from pathlib import Path

from .run_directory import RunError

TENSOR_NAME = re.compile(r"layer\.[0-9]+\.head\.[0-9]+\.(a1|a2|lambda)")


def read(path):
    """The tensors {name: (shape, array)} of a file. Raises RunError if it is not a file of attention maps."""
    try:
        data = Path(path).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        tensors = {}
        for name, t in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            tensors[name] = t["shape"], array("f", data[8 + size + begin : 8 + size + end])
            if (
                t["dtype"] != "F32"
                or 4 * math.prod(t["shape"]) != end - begin
                or len(tensors[name][1]) != math.prod(t["shape"])
            ):
                raise ValueError(name)
        n = len(tensors["tokens"][1])
        for name, (shape, _) in tensors.items():
            wanted = {"tokens": [n], "a1": [n, n], "a2": [n, n], "lambda": [n]}[name.rpartition(".")[2]]
            if shape != wanted or (name != "tokens" and not TENSOR_NAME.fullmatch(name)):
                raise ValueError(name)
        return tensors
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise RunError(f"{path}: damaged, or not attention maps") from None
