"""outputs.py: files that are complete or absent."""

import contextlib
import json
import os
from pathlib import Path


@contextlib.contextmanager
def replace(path, temporary=None):
    """A binary file that becomes `path` when the block ends, and is removed when it fails. After a kill the next write
    replaces it. A link in its place is not followed."""
    temporary = temporary or Path(f"{path}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with replace(path) as f:
        f.write(f"{json.dumps(value, indent=2)}\n".encode())


@contextlib.contextmanager
def open_output(path):
    """The same of a file that a user names. Links are followed; a device or a pipe is written directly."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as f:
            yield f
        return
    with replace(path, path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")) as f:
        yield f
