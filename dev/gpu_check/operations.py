"""The parts `ops` and `sizes`: CUDA operations against their C twins; `memcheck` and `sanitizer`: the same programs
under compute-sanitizer, a few small cases early and all operations at the end. The test programs choose the entries of
tests/operation_catalogue.h by words."""

import os
import re

from programs import ROOT
from runner import Skip, Unfinished, find_tool, last_line

# (preset, key/value heads, B, T, words of the cases); 30b-a3b: 65,536 rows of 128 experts
SIZES = [("1.4b", 8, 16, 2048), ("124m", 6, 64, 1024), ("30b-a3b", 4, 2, 4096, "router", "expert")]
TINY_SIZES = [("tiny", 2, 2, 70), ("moe-tiny", 2, 1, 16, "router", "expert")]
# Words of the cases that come first; "rope" alone with the emulation, which is slow
FIRST = ["expert", "attention_decode", "linear", "whole tiles, groups"]
# (tool, word): small cases, first those at unaligned addresses; then the operations, races of those with shared memory
SHORT = [("memcheck", "unaligned"), ("memcheck", "smallest")]
WORDS = {
    "memcheck": "attention rmsnorm cross_entropy embedding adamw diff_combine exclusive matmul expert router linear",
    "racecheck": "expert_linear expert_gather expert_group expert_swiglu router rmsnorm head_norm cross_entropy "
    "sum_of_squares attention_decode attention embedding sink matmul linear",
}
LONG = [(tool, word) for tool, words in WORDS.items() for word in words.split()]
LONG += [("synccheck", "rmsnorm"), ("synccheck", "expert_linear"), ("memcheck", "")]
SHORT_LIMIT, LONG_LIMIT, LEAST = 60, 240, 20  # seconds per case; 15 times as many without --minutes


def ops(check, part):
    # the CPU runs every thread of every block: one operation is enough to test this part
    words = ["rope"] if check.pretend else []
    what = "experts, decoding, linear layers and a shape of cuDNN are equal to their C twins, bf16"
    yield "first", run_tests, what, "TEST_DIFFV2CU", words or FIRST, 400
    for build, program in (("bf16", "TEST_DIFFV2CU"), ("fp32", "TEST_DIFFV2CU_FP32")):
        yield build, run_tests, f"operations are equal to their C twins, {build}", program, words, 400


def sizes(check, part):
    for case in TINY_SIZES if check.pretend else SIZES:
        name = " ".join(map(str, case))
        what = f"operations are correct at the shapes of {name}"
        yield name, run_tests, what, "TEST_DIFFV2CU", ["--sizes", *case], 300


def run_tests(check, part, what, program, words, limit):
    status, text = check.run([*check.commands[program], *words], limit)
    found = re.search(r"^(\d+) passed, (\d+) failed(, \d+ skipped)?$", last_line(text))
    ok = status == 0 and found and int(found[1]) > 0 and found[2] == "0"
    part.check(what, ok, ": ".join(filter(None, (last_line(text), "; ".join(failures(text)[:5])))))


def failures(text):
    """The failed cases of a test program, each with its first message."""
    found, said = [], ""
    for line in text.splitlines():
        if line.startswith("FAIL "):
            found.append(f"{line[5:100]}{': ' + said[:150] if said else ''}")
        said = "" if re.match("FAIL|ok |skip|storage", line) else said or line.strip()
    return found


def memcheck(check, part):
    return sanitized(check, SHORT, SHORT_LIMIT)


def sanitizer(check, part):
    return sanitized(check, LONG, LONG_LIMIT)


def sanitized(check, cases, limit):
    tool = os.environ.get("COMPUTE_SANITIZER") or (None if check.pretend else find_tool("compute-sanitizer"))
    if not tool:
        raise Skip(
            "no device; scripts/test.sh runs the kernels under AddressSanitizer"
            if check.pretend
            else "compute-sanitizer is not installed"
        )
    limit = limit if check.ends else 15 * limit
    for kind, word in cases:
        yield f"{kind} {word or 'all'}", run_sanitizer, tool, kind, word, limit


def run_sanitizer(check, part, tool, kind, word, limit):
    if check.left() < min(LEAST, limit):
        raise check.out_of_time()  # the case would not finish
    stopped, options = None, ["--tool", kind, "--error-exitcode", "9", "--target-processes", "all"]
    command = [tool, *options, *check.commands["TEST_DIFFV2CU"], "--one-process", *([word] if word else [])]
    try:
        status, text = check.run(command, limit, reexecution_variables())
    except Unfinished as reason:
        status, text, stopped = None, reason.output, reason
    if re.search(r"Device not supported|not supported on this|Unable to (?:initialize|attach)", text):
        raise Skip(f"compute-sanitizer fails on this machine: {last_line(text)}")
    lines = [line.replace("=", "").strip() for line in text.splitlines() if line.startswith("===")]
    found = [line for line in lines if re.match(r"(Invalid|Error: |Race|Warning: Race|Barrier|Program hit)", line)]
    if stopped and not found:
        raise stopped
    summary = [line for line in lines if "SUMMARY" in line]
    note = "; ".join(found[:3] + summary[:1]) or last_line(text)
    part.check(f"compute-sanitizer, {kind} {word or 'all'}", status == 0 and summary and not found, note)


def reexecution_variables():
    """With these variables a program does not execute itself again, so that a tool does not lose it (environment.h)."""
    table = (ROOT / "llmc/options/environment.h").read_text()
    values = dict(re.findall(r'^    \{"(\w+)", "(\w+)", \w+,', table, re.MULTILINE))
    values["OPENBLAS_CORETYPE"] = "Haswell"  # the program sets kernels for AVX-512 only on a CPU that has it
    return {name: value for name, value in values.items() if name not in os.environ}
