"""outputs.py: files that a user names."""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def open_output(path):
    """A binary file that becomes `path` when the block ends, and is removed when it fails. Links are followed; a device
    or a pipe is written directly."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            yield f
        return
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
