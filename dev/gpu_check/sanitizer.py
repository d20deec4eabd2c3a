"""The parts `memcheck` and `sanitizer`: operations under compute-sanitizer, a few early and all at the end.

A case that reaches its time limit is not finished: the part is unfinished, and the next run repeats the case.
"""

import os
import re

from tools import find_tool, last_line
from runner import OutOfTime, Skip, Unfinished

SHORT = [("memcheck", "unaligned"), ("memcheck", "smallest")]  # small cases, first those at unaligned addresses
LONG = [
    ("memcheck", word)
    for word in ("attention", "rmsnorm", "cross_entropy", "embedding", "adamw", "diff_combine", "exclusive", "matmul")
]
LONG += [
    ("racecheck", word)
    for word in ("rmsnorm", "head_norm", "cross_entropy", "sum_of_squares", "attention", "embedding", "sink")
]
LONG += [("synccheck", "rmsnorm"), ("memcheck", "")]
SHORT_LIMIT, LONG_LIMIT, LEAST = 60, 240, 20  # seconds per case; 15 times as many without --minutes


def memcheck(check, part):
    run_cases(check, part, SHORT, SHORT_LIMIT)


def sanitizer(check, part):
    """Memory errors of all operations; races of those with shared memory, which take longest."""
    run_cases(check, part, LONG, LONG_LIMIT)


def run_cases(check, part, cases, limit):
    tool = os.environ.get("COMPUTE_SANITIZER") or (None if check.pretend else find_tool("compute-sanitizer"))
    if not tool:
        raise Skip(
            "no device; scripts/test.sh runs the kernels under AddressSanitizer"
            if check.pretend
            else "compute-sanitizer is not installed"
        )
    limit = float(os.environ.get("SANITIZER_SECONDS") or (limit if check.ends else 15 * limit))
    stopped = []
    for kind, word in cases:
        name = f"{kind} {word or 'all'}"
        if not part.pending(name):
            continue
        if check.left() < min(LEAST, limit):
            raise OutOfTime  # the case would not finish
        status, found = run_case(check, part, tool, kind, word, limit)
        if status is None and not found:
            stopped.append(name)
        else:
            part.end(name)
    if stopped:
        raise Unfinished(f"stopped after {limit:g} s without findings: {', '.join(stopped)}")


def run_case(check, part, tool, kind, word, limit):
    """(exit status, findings). Status None: stopped at the limit."""
    words = ["--one-process", *([word] if word else [])]  # the tool checks only the process that it starts
    program = check.commands["TEST_DIFFV2CU"]
    status, text = check.run([tool, "--tool", kind, "--error-exitcode", "9", *program, *words], limit)
    if re.search(r"Device not supported|not supported on this|Unable to (?:initialize|attach)", text):
        raise Skip(f"compute-sanitizer fails on this machine: {last_line(text)}")
    lines = [line.replace("=", "").strip() for line in text.splitlines() if line.startswith("===")]
    found = [line for line in lines if re.match(r"(Invalid|Error: |Race|Warning: Race|Barrier|Program hit)", line)]
    summary = [line for line in lines if "SUMMARY" in line]
    if status is not None or found:
        part.check(
            f"compute-sanitizer, {kind} {word or 'all'}",
            status == 0 and not found,
            "; ".join(found[:3] + summary[:1]) or last_line(text),
        )
    return status, found
