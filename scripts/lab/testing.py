"""testing.py: an assertion that the tests of the lab share."""


def expect_error(done, status, text, lines=None):
    """A finished program has this exit status, and on stderr the text, in this number of lines."""
    assert done.returncode == status and text in done.stderr, (done.args, done.returncode, done.stderr)
    assert lines is None or done.stderr.count("\n") == lines, (done.args, done.stderr)
