#!/usr/bin/env python3
"""
The Python tables of attention variants and layer types equal those of llmc/model. The last line is "N passed, N
failed".

Usage: tests/variants_test.py
Exit status: 0 nothing failed, 1 something did.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dev/reference"))
import variants

HEADER, CONFIG, MODELING = (p.read_text() for p in (variants.HEADER, variants.CONFIG, variants.MODELING))
ROW = '    "sink": Variant(0, 1, 1, 1, "none", "none", "linear", False, "none", "none", "own"),\n'
PLANTED = [
    ("a trait that differs", "1, 2, 1, 2", "1, 2, 1, 1", "diff_scalar: split is 1, in variants.h 2"),
    (
        "a truth value that differs",
        '"sigmoid", True',
        '"sigmoid", False',
        "diff_v2_xsa: xsa is False, in variants.h True",
    ),
    ("a missing variant", ROW, "", "sink is missing"),
    ("an unknown variant", ROW, ROW + ROW.replace('"sink"', '"other"'), "other is not in variants.h"),
    (
        "a layer type of another name",
        '"full_attention")',
        '"cross_attention")',
        "the layer types are ('sliding_attention', ",
    ),
    (
        "layer types in another order",
        '("sliding_attention", "full',
        '("full_attention", "full',
        "the layer types are (",
    ),
    ("a field of another name", "    merge: int", "    mergers: int", "the fields are signals, key_sets, mergers"),
]


def main():
    cases = [("modeling_diffv2.py has the tables of llmc/model", variants.differences(HEADER, CONFIG, MODELING), None)]
    for what, old, new, line in PLANTED:
        assert MODELING.count(old) == 1, old
        found = variants.differences(HEADER, CONFIG, MODELING.replace(old, new))
        cases.append((f"{what} is reported", found, line))
    failed = 0
    for what, found, expected in cases:
        good = not found if expected is None else len(found) == 1 and found[0].startswith(expected)
        failed += not good
        print(f"ok   {what}" if good else f"FAIL {what}: " + ("; ".join(found) or "nothing is reported"))
    print(f"{len(cases) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
