"""The output of the Python tests: of tests, data, scripts/lab, dev/bench, dev/emulator/ptx and dev/reference.

A test's sentence is the first line of its docstring, or its name; its subject is the name of its file. One line is
printed per test, and one per case of a parametrised test:

    ok   SUBJECT: SENTENCE [CASE] (SECONDS s)        or FAIL after what pytest says of the failure, or skip

The last line is "N passed, N failed", and ", N skipped" if tests were skipped. -k also selects by a part of the
sentence, with underscores for spaces. pyproject.toml names this file as a plugin, by its path from the root, where
pytest runs. `python3 scripts/python_environment.py tests` prints an interpreter that has
pytest; tests/export_test.py requires that of `export-tests`, and dev/bench and dev/reference that of `hub`.
"""

import signal

import pytest


class Lines:
    """Prints a line per test instead of pytest's own report."""

    def __init__(self):
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.seconds = 0.0

    def add(self, result, line, details=""):
        self.counts[result] += 1
        if details:
            print("    " + details.replace("\n", "\n    "))
        print({"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}[result], line, flush=True)

    def pytest_runtest_logreport(self, report):
        self.seconds = report.duration + (0 if report.when == "setup" else self.seconds)
        if report.when == "call" or not report.passed:  # the setup and the end of a test: only what goes wrong
            line = f"{dict(report.user_properties)['line']} ({self.seconds:.2f} s)"
            if report.skipped:
                self.add("skipped", f"{line}: {report.longrepr[2].removeprefix('Skipped: ')}")
            else:
                output = [report.longreprtext, *(text[-2000:] for _, text in report.sections)]
                self.add(report.outcome, line, "\n".join(output) if report.failed else "")

    def pytest_collectreport(self, report):
        if report.failed:
            self.add("failed", f"{report.nodeid} cannot be read", report.longreprtext)

    def pytest_unconfigure(self):
        text = f"{self.counts['passed']} passed, {self.counts['failed']} failed"
        print(text + (f", {self.counts['skipped']} skipped" if self.counts["skipped"] else ""), flush=True)


def pytest_configure(config):
    # tests send these to programs, which would inherit that nohup, or a shell in the background, ignores them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Lines())


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report):
    return report.outcome, "", ""  # no letter of pytest's own; pyproject.toml silences the rest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A mark with cases_from=N is not one of the first N cases of a parametrised test."""
    for item in items:
        if hasattr(item, "callspec"):
            case = max(item.callspec.indices.values())
            item.own_markers = [mark for mark in item.own_markers if case >= mark.kwargs.get("cases_from", 0)]


def pytest_itemcollected(item):
    words = item.function.__doc__ or item.originalname.removeprefix("test_").replace("_", " ")
    sentence = words.splitlines()[0].rstrip(".")
    subject = item.path.stem.removeprefix("test_").removesuffix("_test").replace("_", " ")
    case = f" [{item.callspec.id}]" if hasattr(item, "callspec") else ""
    item.user_properties.append(("line", f"{subject}: {sentence}{case}"))
    item.extra_keyword_matches.add(sentence.replace(" ", "_"))
