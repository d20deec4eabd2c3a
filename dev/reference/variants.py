#!/usr/bin/env python3
"""
The attention variants of llmc/model/variants.h, and the layer types of config_json.h beside it, read
from these headers.

  from variants import VARIANTS      {name: Variant}, in the order of the header

Variant has the fields of the C struct AttentionVariant. Enumerators become lower-case words without
their prefix: NOISE_NEXT is "next". The field `lambda` is `lambda_`, since lambda is a Python keyword.
Run as a program, it checks that modeling_diffv2.py, which is one file and therefore repeats the
tables, has the same rows. Requires nothing but Python.

Usage: dev/reference/variants.py
Exit status: 0 the tables are equal, 1 they differ.
"""

import ast
import re
import sys
from collections import namedtuple
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADER = HERE.parent.parent / "llmc/model/variants.h"
CONFIG = HEADER.parent / "config_json.h"
MODELING = HERE.parent.parent / "scripts/export/modeling_diffv2.py"


def value_of(text):
    if re.fullmatch(r"[A-Z]+_[A-Z]+", text):
        return text.split("_")[1].lower()
    return ast.literal_eval(text)


def variants_of_header(text):
    """The table attention_variants of variants.h."""
    struct = re.search(r"typedef struct \{([^}]*)\} AttentionVariant;", text)[1]
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", struct))
    Variant = namedtuple("Variant", [n + "_" if n == "lambda" else n for n in names[1:]])  # without the name
    table = re.search(r"attention_variants\[\] = \{(.*?)\n\};", text, re.DOTALL)[1]
    rows = [[value_of(cell.strip()) for cell in row.split(",")] for row in re.findall(r"\{([^}]*)\}", table)]
    return {name: Variant(*traits) for name, *traits in rows}


def layer_types_of_header(text):
    """The table layer_type_names of config_json.h."""
    return ast.literal_eval("(" + re.search(r"layer_type_names\[\] = \{(.*?)\};", text)[1] + ")")


def variants_of_modeling(text):
    """The table VARIANTS of modeling_diffv2.py as {name: tuple}, its fields, and LAYER_TYPES. Does not import it."""
    fields, rows, types = [], {}, ()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "Variant":
            fields = [f.target.id for f in node.body if isinstance(f, ast.AnnAssign)]
        elif isinstance(node, ast.Assign) and node.targets[0].id == "LAYER_TYPES":
            types = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and node.targets[0].id == "VARIANTS":
            for key, call in zip(node.value.keys, node.value.values):
                rows[key.value] = tuple(ast.literal_eval(argument) for argument in call.args)
    return fields, rows, types


def differences(header, config, modeling):
    """One line for each difference between the texts of the two headers and of modeling_diffv2.py."""
    expected, (fields, found, types) = variants_of_header(header), variants_of_modeling(modeling)
    wanted = list(next(iter(expected.values()))._fields)
    if fields != wanted:
        return [f"the fields are {', '.join(fields)}, in variants.h {', '.join(wanted)}"]
    lines = [f"{n} is not in variants.h" for n in found if n not in expected]
    if types != layer_types_of_header(config):
        lines.append(f"the layer types are {types}, in config_json.h {layer_types_of_header(config)}")
    for name, row in expected.items():
        if name not in found:
            lines.append(f"{name} is missing")
        else:
            pairs = zip(fields, found[name], row)
            lines += [f"{name}: {f} is {a!r}, in variants.h {b!r}" for f, a, b in pairs if a != b]
    return lines


VARIANTS = variants_of_header(HEADER.read_text())


if __name__ == "__main__":
    faults = differences(HEADER.read_text(), CONFIG.read_text(), MODELING.read_text())
    for line in faults:
        print(f"{MODELING.name}: {line}", file=sys.stderr)
    sys.exit(1 if faults else 0)
