"""The Python tables of attention variants and layer types equal those of llmc/model."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dev/reference"))
import variants

HEADER, CONFIG, MODELING = (p.read_text() for p in (variants.HEADER, variants.CONFIG, variants.MODELING))
ROW = '    "sink": Variant(0, 1, 1, 1, "none", "none", "linear", "none", "none", "learned"),\n'
PLANTED = [
    ("a trait that differs", "1, 2, 1, 2", "1, 2, 1, 1", "diff_scalar: split is 1, in variants.h 2"),
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


def test_the_class_has_the_tables_of_the_trainer():
    assert not variants.differences(HEADER, CONFIG, MODELING)


@pytest.mark.parametrize("old, new, line", [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED])
def test_a_difference_is_reported(old, new, line):
    assert MODELING.count(old) == 1
    found = variants.differences(HEADER, CONFIG, MODELING.replace(old, new))
    assert len(found) == 1 and found[0].startswith(line), found
