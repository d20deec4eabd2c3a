"""tensors.py: reads a safetensors file: attention maps, checkpoints, and files of --dump-qkv."""

import json
import math
import struct
from pathlib import Path

import python_environment

from .run_directory import RunError

np = python_environment.Later("numpy")
DAMAGE = (struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError, MemoryError, OverflowError)


class Tensors:
    """The tensors of a file; they are read when they are used. Raises RunError."""

    TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

    def __init__(self, path):
        self.path = Path(path)
        try:
            with open(path, "rb") as f:
                self.start = 8 + struct.unpack("<Q", f.read(8))[0]
                self.header = json.loads(f.read(self.start - 8))
            self.header.pop("__metadata__", None)
        except OSError as error:
            raise RunError(f"{path}: {error.strerror}") from None
        except DAMAGE:
            raise RunError(f"{path}: damaged, or not a safetensors file") from None

    def read(self, name):
        try:
            t = self.header[name]
            begin, end = t["data_offsets"]
            x = np.fromfile(self.path, self.TYPES[t["dtype"]], offset=self.start + begin, count=math.prod(t["shape"]))
            if x.nbytes != end - begin:
                raise ValueError
            if t["dtype"] == "BF16":
                x = (x.astype("<u4") << 16).view("<f4")
            return x.reshape(t["shape"])
        except DAMAGE:
            raise RunError(f"{self.path}: damaged, or no tensor {name}") from None
