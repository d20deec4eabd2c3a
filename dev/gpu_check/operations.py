"""Cases of the part `correctness`: CUDA operations against their C twins; and the part `sanitizer`: small cases under
compute-sanitizer. The test program chooses the entries of tests/operations/catalogue.h by words."""

import os
import re

from runner import Skip, Unfinished, find_tool, last_line

SHARDS = (("bf16", "TEST_DIFFV2CU", 48), ("fp32", "TEST_DIFFV2CU_FP32", 8))  # a shard that is stopped is repeated
LIMIT = 400  # seconds of a shard
# Races of the operations with shared memory; memory of small cases, first those at unaligned addresses
RACES = """expert_linear attention_decode rmsnorm attention expert_gather expert_group expert_swiglu router head_norm
cross_entropy sum_of_squares embedding sink matmul linear"""
SANITIZED = [("memcheck", "unaligned"), ("memcheck", "smallest"), *[("racecheck", word) for word in RACES.split()]]
SANITIZED += [("synccheck", "rmsnorm"), ("synccheck", "expert_linear")]
SANITIZER_LIMIT, LEAST = 240, 20  # seconds of a case; with less time left, none starts


def operations(check):
    """The cases of the test programs, in shards."""
    words = ["rope"] if check.pretend else []  # the CPU runs every thread of every block: one operation is enough
    for build, program, count in SHARDS:
        count = 2 if check.pretend else count
        for i in range(count):
            yield f"{build} {i + 1}/{count}", run_tests, build, program, ["--shard", f"{i}/{count}", *words]


def run_tests(check, findings, build, program, words):
    """The failures that a program had found before it was stopped are recorded."""
    stopped = None
    try:
        status, text = check.run([*check.program(program), *words], LIMIT)
    except Unfinished as reason:
        status, text, stopped = None, reason.output, reason
    shard = f"{build} {words[1]}"
    for failure in failures(text):
        findings.check(f"operations, {shard}", False, failure)
    ran = len(re.findall("^(?:ok  |FAIL|skip) ", text, re.MULTILINE))
    if stopped:
        findings.fact(f"operations, {shard}: {ran} tests before the time limit", last_line(text))
        raise stopped
    found = re.search(r"^(\d+) passed, (\d+) failed(, \d+ skipped)?$", last_line(text))
    ok = found and (status == 0) == (found[2] == "0") and ran > 0
    findings.check(f"operations, {shard}: the test program ends", ok, last_line(text))


def failures(text):
    """The failed cases of a test program, each with its first message."""
    found, said = [], ""
    for line in text.splitlines():
        if line.startswith("FAIL "):
            found.append(f"{line[5:200]}{': ' + said[:200] if said else ''}")
        said = "" if re.match("FAIL|ok |skip|storage", line) else said or line.strip()
    return found


def sanitizer(check):
    tool = os.environ.get("COMPUTE_SANITIZER") or (None if check.pretend else find_tool("compute-sanitizer"))
    if not tool:
        raise Skip(
            "no device; scripts/test.sh runs the kernels under AddressSanitizer"
            if check.pretend
            else "compute-sanitizer is not installed"
        )
    for kind, word in SANITIZED:
        yield f"{kind} {word}", run_sanitizer, tool, kind, word


def run_sanitizer(check, findings, tool, kind, word):
    if check.left() < min(LEAST, check.most):
        raise check.out_of_time()  # the case would not finish
    # the program executes itself again with other variables: the tool would lose it without --target-processes
    stopped, options = None, ["--tool", kind, "--error-exitcode", "9", "--target-processes", "all"]
    command = [tool, *options, *check.program("TEST_DIFFV2CU"), "--one-process", word]
    try:
        status, text = check.run(command, SANITIZER_LIMIT)
    except Unfinished as reason:
        status, text, stopped = None, reason.output, reason
    if re.search(r"Device not supported|not supported on this|Unable to (?:initialize|attach)", text):
        findings.fact(f"compute-sanitizer, {kind} {word}: it fails on this machine", last_line(text))
        return
    lines = [line.replace("=", "").strip() for line in text.splitlines() if line.startswith("===")]
    found = [line for line in lines if re.match(r"(Invalid|Error: |Race|Warning: Race|Barrier|Program hit)", line)]
    if stopped and not found:
        raise stopped
    summary = [line for line in lines if "SUMMARY" in line]
    note = "; ".join(found[:3] + summary[:1]) or last_line(text)
    findings.check(f"compute-sanitizer, {kind} {word}", status == 0 and summary and not found, note)
