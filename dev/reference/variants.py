"""
The attention variants of llmc/model/variants.h. tests/variants_test.py compares the tables of modeling_diffv2.py with
the headers. Requires nothing but Python.

  from variants import VARIANTS      {name: Variant}, in the order of the header

Variant has the fields of the C struct AttentionVariant. Enumerators become lower-case words without
their prefix: NOISE_NEXT is "next". The field `lambda` is `lambda_`, since lambda is a Python keyword.
"""

import ast
import re
from collections import namedtuple
from pathlib import Path

HEADER = Path(__file__).resolve().parent.parent.parent / "llmc/model/variants.h"


def value_of(text):
    if re.fullmatch(r"[A-Z]+_[A-Z]+", text):
        return text.split("_")[1].lower()
    return ast.literal_eval(text)


def variants_of_header(text):
    """The table attention_variants."""
    struct = re.search(r"typedef struct \{([^}]*)\} AttentionVariant;", text)[1]
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", struct))
    Variant = namedtuple("Variant", [n + "_" if n == "lambda" else n for n in names[1:]])  # without the name
    table = re.search(r"attention_variants\[\] = \{(.*?)\n\};", text, re.DOTALL)[1]
    rows = [[value_of(cell.strip()) for cell in row.split(",")] for row in re.findall(r"\{([^}]*)\}", table)]
    return {name: Variant(*traits) for name, *traits in rows}


VARIANTS = variants_of_header(HEADER.read_text())
