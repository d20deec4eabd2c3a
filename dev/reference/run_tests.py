"""
Runs the functions of a module that are called test_..., and with --all those called slow_test_... A test fails by an
AssertionError; what it returns is printed. scripts/test.sh reads the last line.

Usage: MODULE.py [--all] [WORD...]   tests whose name contains one of the words (default: all)
"""

import sys
import time

import torch
import transformers


def run_tests(functions, remark=None):
    """The exit status. remark(): a text for the line before the last."""
    arguments = sys.argv[1:]
    words, passed, failed = [a for a in arguments if a != "--all"], 0, 0
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, test in list(functions.items()):
        slow = name.startswith("slow_test_") and "--all" in arguments
        if not (slow or name.startswith("test_")) or (words and not any(w in name for w in words)):
            continue
        start = time.monotonic()
        try:
            note, verdict, passed = test(), "ok  ", passed + 1
        except AssertionError as error:
            note, verdict, failed = str(error), "FAIL", failed + 1
        title = name.partition("test_")[2].replace("_", " ")
        print(f"{verdict} {title}{f': {note}' if note else ''} ({time.monotonic() - start:.1f} s)", flush=True)
    more = f", {remark()}" if remark else ""
    print(f"     PyTorch {torch.__version__}, transformers {transformers.__version__}{more}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0
