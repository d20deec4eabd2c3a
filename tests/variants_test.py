"""The tables of modeling_diffv2.py, which is one file and so repeats them, equal those of llmc/model."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "dev/reference"))
from variants import VARIANTS

MODELING = (ROOT / "scripts/export/modeling_diffv2.py").read_text()


def test_the_class_has_the_variants_of_the_trainer():
    body = re.search(r"^class Variant\(NamedTuple\):\n((?:    .*\n)*)", MODELING, re.M)[1]
    assert re.findall(r"^    (\w+):", body, re.M) == list(VARIANTS["baseline"]._fields)
    rows = re.findall(r'^    "(\w+)": Variant(\(.*\)),$', MODELING, re.M)
    assert {name: ast.literal_eval(traits) for name, traits in rows} == VARIANTS


def test_the_class_has_the_layer_types_of_the_trainer():
    table = re.search(r"layer_type_names\[\] = \{(.*?)\};", (ROOT / "llmc/model/config_json.h").read_text())[1]
    assert f"\nLAYER_TYPES = ({table})" in MODELING
