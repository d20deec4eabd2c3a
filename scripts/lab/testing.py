"""testing.py: what the tests of the lab share."""

import contextlib
import tempfile
from pathlib import Path


class Tests(list):
    """The tests of a file: `test = Tests()` is their decorator. A test gets an empty directory for each parameter."""

    def __call__(self, function):
        self.append(function)
        return function


def call(test):
    with contextlib.ExitStack() as stack:
        new = lambda: Path(stack.enter_context(tempfile.TemporaryDirectory()))
        test(*[new() for _ in range(test.__code__.co_argcount)])


class Skip(Exception):
    """A requirement of the test that this machine does not meet."""


def expect_error(done, status, text, lines=None):
    """A finished program has this exit status, and on stderr the text, in this number of lines."""
    assert done.returncode == status and text in done.stderr, (done.args, done.returncode, done.stderr)
    assert lines is None or done.stderr.count("\n") == lines, (done.args, done.stderr)


def has(text, *parts):
    missing = [part for part in parts if part not in text]
    assert parts and not missing, (missing, text[:3000])
