"""The programs that measure a GPU, compiled for the CPU: what a check requires of them besides right numbers.

Requires build/oncpu/test_diffv2 and build/oncpu/bench_cuda.
"""

import json
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEST, BENCH = "build/oncpu/test_diffv2", "build/oncpu/bench_cuda"
CASES = ("head_norm",)


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def case_lines(text):
    """The lines of cases without their times."""
    return [
        re.sub(r" \(\d+\.\d\d s\)", "", line) for line in text.splitlines() if line[:5] in ("ok   ", "FAIL ", "skip ")
    ]


def test_shards_have_all_cases():
    """the cases of all shards are those of one program"""
    whole = case_lines(run(TEST, *CASES).stdout)
    shards = [case_lines(run(TEST, "--shard", f"{i}/3", *CASES).stdout) for i in range(3)]
    assert all(shards) and sorted(sum(shards, [])) == sorted(whole)


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
