"""rooms.py finds planted violations, and none in this checkout; no ring is above its limit; atomics of registers.py."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))
import lines
import registers
import rooms

CONTRACT = "llmc/ops/rows/operations.h"
GOOD = {
    "llmc/base/common.h": "typedef int Number;\n",
    CONTRACT: '#include "../../base/common.h"\ntypedef float real;\n'
    "static inline Number one(void) { return 1; }\nstatic inline void clear(real *x);\n",
    "llmc/ops/rows/clear.cuh": '#include "operations.h"\n#define OPERATION() ((void)0)\n'
    "static inline void clear(real *x) {\n    OPERATION();\n    x[0] = 0;\n}\n",
    "tests/calls.h": "static void call(real *x) { clear(x); }\n",
    "llmc/ops/calls.h": "static int by_table(int x) {\n    return x;\n}\n"
    "static int (*const table[])(int) = {by_table};\n",
    "train_diffv2.c": '#include "llmc/ops/rows/operations.h"\n#include "llmc/ops/calls.h"\n'
    "#define CALL one\nint main(void) { return table[0](CALL()); }\n",
}
PLANTED = [
    (
        "an include of a higher room",
        {"llmc/base/up.h": '#include "../ops/calls.h"\n'},
        "base does not lie above llmc/ops",
    ),
    (
        "an include of another room of the same layer",
        {"llmc/data/a.h": '#include "../cuda/b.h"\n', "llmc/cuda/b.h": ""},
        "llmc/data does not lie above llmc/cuda",
    ),
    (
        "an include of another folder of operations",
        {"llmc/ops/rows/a.h": '#include "../attention/b.h"\n', "llmc/ops/attention/b.h": ""},
        "llmc/ops/rows does not lie above llmc/ops/attention",
    ),
    (
        "an include of the second ring by the first",
        {"llmc/ops/dev.h": '#include "../../dev/bench/x.h"\n', "dev/bench/x.h": ""},
        "llmc/ops does not lie above dev/bench",
    ),
    (
        "an include of the emulator without quotes",
        {"llmc/cuda/device.h": "#include <emulator/x.h>\n", "dev/emulator/x.h": ""},
        "llmc/cuda does not lie above dev/emulator; device.h does not compile alone",
    ),
    (
        "an include of tests by the trainer",
        {"train_diffv2.c": '#include "tests/x.h"\n', "tests/x.h": ""},
        "train_diffv2 does not lie above tests",
    ),
    (
        "an import of a higher room",
        {"scripts/lab/run.py": "def main():\n    import publish\n", "scripts/export/publish.py": ""},
        "scripts/lab does not lie above scripts/export",
    ),
    (
        "an import of a test",
        {"data/shards.py": "from test_data import rows\n", "data/test_data.py": "rows = 1\n"},
        "data does not lie above programs and tests",
    ),
    (
        "a circle of imports",
        {"scripts/lab/a.py": "from . import b\n", "scripts/lab/b.py": "from .a import c\n"},
        "a.py includes scripts/lab/b.py includes scripts/lab/a.py: a circle",
    ),
    (
        "a circle of includes",
        {"llmc/base/a.h": '#pragma once\n#include "b.h"\n', "llmc/base/b.h": '#pragma once\n#include "a.h"\n'},
        "llmc/base/b.h includes llmc/base/a.h: a circle",
    ),
    (
        "a header outside the rooms",
        {"llmc/ops/hall.h": '#include "../hall.h"\n', "llmc/hall.h": ""},
        "one is in no room",
    ),
    (
        "a header that does not include what it uses",
        {"llmc/ops/late.h": "static Number two;\n"},
        "llmc/ops/late.h does not compile alone",
    ),
    (
        "a header that calls a function of no header that it includes",
        {"llmc/ops/late.h": "static inline int late(void) { return clear_all(1); }\n"},
        "llmc/ops/late.h does not compile alone",
    ),
    (
        "a call of exit outside program_exit",
        {"llmc/ops/ends.h": "#include <stdlib.h>\nstatic void end(void) { exit(1); } // exit(2)\n"},
        "llmc/ops/ends.h calls exit",
    ),
    (
        "a call of atexit",
        {"train_diffv2.c": "#include <stdlib.h>\nvoid f(void);\nint main(void) { return atexit(f); }\n"},
        "train_diffv2.c calls atexit",
    ),
    (
        "a function that is never called",
        {CONTRACT: GOOD[CONTRACT] + "static inline void alone(void) {}\n"},
        f"{CONTRACT}: nothing calls alone",
    ),
    (
        "a function that only tests call",
        {
            CONTRACT: GOOD[CONTRACT] + "static inline void alone(void) {}\n",
            "tests/alone.h": "static void call_alone(void) { alone(); }\n",
        },
        f"{CONTRACT}: nothing calls alone",
    ),
    ("an operation that no test calls", {"tests/calls.h": "// clear(x)\n"}, "no test calls clear"),
    (
        "a CUDA operation without OPERATION()",
        {"llmc/ops/rows/clear.cuh": GOOD["llmc/ops/rows/clear.cuh"].replace("OPERATION();", "real y; (void)y;")},
        "clear does not begin with OPERATION();",
    ),
]


def found_in(files, root):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return rooms.offenders(root)


@pytest.mark.full
def test_a_valid_tree_has_no_violations(tmp_path):
    assert not found_in(GOOD, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("files, text", [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED])
def test_a_violation_is_found(files, text, tmp_path):
    found, wanted = found_in({**GOOD, **files}, tmp_path), text.split("; ")
    assert len(found) == len(wanted) and all(any(part in line for line in found) for part in wanted), found


def test_this_checkout_has_no_violations_that_its_text_shows():
    found = [*rooms.wrong_includes(ROOT), *rooms.circles(ROOT), *rooms.hidden_exits(ROOT)]
    assert not [*found, *rooms.untested_operations(ROOT)]


def test_the_tests_that_the_list_of_bugs_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "dev/bugs.md").read_text(encoding="utf-8")))
    files = list(ROOT.glob("tests/**/*.h"))
    for folder in ("tests", "scripts", "data", "dev"):
        files += ROOT.glob(f"{folder}/**/*.py")
    functions = {name for path in files for name in re.findall(r"\b(test_\w+)\(", path.read_text(encoding="utf-8"))}
    assert named and not sorted(named - functions)


def test_no_ring_is_above_its_limit_of_lines():
    assert not lines.above(lines.counts())


def test_a_ring_above_its_limit_is_reported():
    at_limit = {ring: {"a": limit - 1, "b": 1} for ring, limit in lines.LIMITS.items()}
    assert not lines.above(at_limit)
    found = lines.above(at_limit | {"ring 2": {"a": lines.LIMITS["ring 2"], "b": 1}})
    assert len(found) == 1 and found[0].startswith("ring 2 has ")


def test_atomics_of_device_memory_whose_result_nothing_reads_are_counted():
    add, fields = "ATOMG.E.ADD.F32.FTZ.RN.STRONG.GPU PT", "desc[UR4][R2.64], R7 ;"
    code = [f"{add}, RZ, {fields}", f"@P0 ATOM.E.ADD.STRONG.GPU P0, RZ, {fields}", f"{add}, R4, {fields}"]
    code += [f"REDG.E.ADD.STRONG.GPU {fields}", "ATOMS.ADD RZ, [R4], R3 ;", f"ATOMG.E.CAS.STRONG.GPU PT, RZ, {fields}"]
    text = ["arch = sm_90", "arch = sm_90a", "\t\tFunction : a", *(f"  /*0070*/  {c}  /* 0x7 */" for c in code)]
    assert registers.unread([*text, "arch = sm_100", "\t\tFunction : a"]) == {("a", 90): 2, ("a", 100): 0}


@pytest.mark.slow
def test_headers_of_this_checkout_compile_alone():
    assert not rooms.not_alone(ROOT)


@pytest.mark.slow  # it compiles nine programs
def test_every_function_of_this_checkout_is_called():
    assert not rooms.dead(ROOT)


def test_block_names_its_tensors():
    """a line of a block names tensors: nothing in it looks them up"""
    text = (ROOT / "train_diffv2.c").read_text(encoding="utf-8")
    names = r"(?:block|heads|combined|qk_norm|lambda|subnorm|yoco)_\w+"
    blocks = dict(re.findall(rf"^static \w+ ({names})\([^;]*?\) {{\n(.*?)^}}", text, re.M | re.S))
    assert {"block_forward", "block_forward_attention", "block_recompute", "block_backward"} <= set(blocks)
    lookups = r"(?<![\w>.])(param|grad|linear_of|experts_of|tensor_of|linear_max|input_max|output_max)\("
    assert {name: re.findall(lookups, body) for name, body in blocks.items()} == {name: [] for name in blocks}
