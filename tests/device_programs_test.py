"""The programs that measure a GPU, compiled for the CPU: what a check requires of them besides right numbers.

Requires build/oncpu/test_diffv2 and build/oncpu/bench_cuda.
"""

import json
import pathlib
import re
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEST, BENCH = "build/oncpu/test_diffv2", "build/oncpu/bench_cuda"
CASES = ("swiglu", "-expert_swiglu")


def run(*command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def case_lines(text):
    """The lines of cases without their times."""
    return [
        re.sub(r" \(\d+\.\d\d s\)", "", line) for line in text.splitlines() if line[:5] in ("ok   ", "FAIL ", "skip ")
    ]


def test_operations_continue_where_they_were_stopped():
    """each case prints one complete line, and --after continues a program that was stopped"""
    whole = run(TEST, *CASES)
    lines = case_lines(whole.stdout)
    assert whole.returncode == 0 and len(lines) > 8 and whole.stdout.endswith(f"{len(lines)} passed, 0 failed\n")
    with subprocess.Popen([TEST, *CASES], cwd=ROOT, stdout=subprocess.PIPE, text=True) as stopped:
        begin = [stopped.stdout.readline() for _ in range(4)]
        stopped.send_signal(signal.SIGTERM)
        text = "".join(begin) + stopped.stdout.read()
    done = case_lines(text)
    assert stopped.returncode == -signal.SIGTERM and text.endswith("\n") and 3 <= len(done) < len(lines)
    rest = run(TEST, "--after", str(len(done)), *CASES)
    assert rest.returncode == 0 and done + case_lines(rest.stdout) == lines
    assert rest.stdout.endswith(f"{len(lines) - len(done)} passed, 0 failed\n")


def test_shards_have_all_cases():
    """the cases of all shards are those of one program, and a shard continues after its last case"""
    whole = case_lines(run(TEST, *CASES).stdout)
    shards = [case_lines(run(TEST, "--shard", f"{i}/3", *CASES).stdout) for i in range(3)]
    assert all(shards) and sorted(sum(shards, [])) == sorted(whole)
    rest = run(TEST, "--after", "1", "--shard", "2/3", *CASES)
    assert rest.returncode == 0 and case_lines(rest.stdout) == shards[2][1:]


def bench(*options):
    """What bench_cuda says of a model: tokens of a step, parameters and bytes, by case."""
    r = run(BENCH, "--tiny", *options, "model", "tiny", "16", "diff_v2,2,1")
    rows = [json.loads(line) for line in r.stdout.splitlines()]
    models = {x["case"]: (x["of"], *map(int, re.findall(r"(\d+) (?:parameters|bytes)", x["note"]))) for x in rows}
    return r, {name: row for name, row in models.items() if len(row) == 3}


def test_forward_and_backward_without_an_optimizer():
    """--no-update measures forward and backward without the memory of the optimizer, --batch with B sequences"""
    _, trained = bench("--batch", "3")
    r, rows = bench("--batch", "3", "--no-update")
    assert r.returncode == 0 and list(rows) == ["forward and backward", "forward"], r
    of, parameters, count = rows["forward and backward"]
    assert of == trained["training"][0] == "tiny diff_v2, B 3 T 16" and rows["forward"] == trained["forward"]
    states = trained["training"][2] - count  # of fp32: two moments and master weights
    assert 12 * parameters <= states <= 12.1 * parameters
