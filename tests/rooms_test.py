"""rooms.py finds planted violations, and none in this checkout."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev"))
import rooms

GOOD = {
    "llmc/base/common.h": "typedef int Number;\n",
    "llmc/ops/ops.h": '#include "../base/common.h"\ntypedef float real;\n'
    "static inline Number one(void) { return 1; }\nstatic inline void clear(real *x);\n",
    "llmc/ops/clear.cuh": '#include "ops.h"\n#define OPERATION() ((void)0)\n'
    "static inline void clear(real *x) {\n    OPERATION();\n    x[0] = 0;\n}\n",
    "tests/calls.h": "static void call(real *x) { clear(x); }\n",
    "llmc/ops/calls.h": "static int by_table(int x) {\n    return x;\n}\n"
    "static int (*const table[])(int) = {by_table};\n",
    "train_diffv2.c": '#include "llmc/ops/ops.h"\n#include "llmc/ops/calls.h"\n'
    "#define CALL one\nint main(void) { return table[0](CALL()); }\n",
}
PLANTED = [
    ("an include of a higher room", {"llmc/base/up.h": '#include "../ops/ops.h"\n'}, "base does not lie above ops"),
    (
        "an include of another room of the same layer",
        {"llmc/data/a.h": '#include "../text/b.h"\n', "llmc/text/b.h": ""},
        "data does not lie above text",
    ),
    (
        "an include of dev/ by the product",
        {"llmc/ops/dev.h": '#include "../../dev/x.h"\n', "dev/x.h": ""},
        "nothing of dev/",
    ),
    (
        "an include of tests/ by the trainer",
        {"train_diffv2.c": '#include "tests/x.h"\n', "tests/x.h": ""},
        "nothing of tests/",
    ),
    (
        "an include of predictions by the trainer",
        {"train_diffv2.c": '#include "dev/predict/x.h"\n', "dev/predict/x.h": ""},
        "predict lies above the trainer",
    ),
    ("a header outside the rooms", {"llmc/ops/hall.h": '#include "../hall.h"\n', "llmc/hall.h": ""}, "in no room"),
    (
        "a header that does not include what it uses",
        {"llmc/ops/late.h": "static Number two;\n"},
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
        {"llmc/ops/ops.h": GOOD["llmc/ops/ops.h"] + "static inline void alone(void) {}\n"},
        "llmc/ops/ops.h: nothing calls alone",
    ),
    (
        "a function that only tests call",
        {
            "llmc/ops/ops.h": GOOD["llmc/ops/ops.h"] + "static inline void alone(void) {}\n",
            "tests/alone.h": "static void call_alone(void) { alone(); }\n",
        },
        "llmc/ops/ops.h: nothing calls alone",
    ),
    ("an operation that no test calls", {"tests/calls.h": "// clear(x)\n"}, "no test calls clear"),
    (
        "a CUDA operation without OPERATION()",
        {"llmc/ops/clear.cuh": GOOD["llmc/ops/clear.cuh"].replace("OPERATION();", "real y; (void)y;")},
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
    found = found_in({**GOOD, **files}, tmp_path)
    assert text in "; ".join(found) and len(found) == 1 + text.count("; "), found


def test_this_checkout_has_no_violations_that_its_text_shows():
    assert not [*rooms.wrong_includes(ROOT), *rooms.hidden_exits(ROOT), *rooms.untested_operations(ROOT)]


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
