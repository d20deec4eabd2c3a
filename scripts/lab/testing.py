"""testing.py: what the tests of the lab share."""


def expect_error(done, status, text, lines=None):
    """A finished program has this exit status, and on stderr the text, in this number of lines."""
    assert done.returncode == status and text in done.stderr, (done.args, done.returncode, done.stderr)
    assert lines is None or done.stderr.count("\n") == lines, (done.args, done.stderr)


def has(text, *parts):
    missing = [part for part in parts if part not in text]
    assert parts and not missing, (missing, text[:3000])
