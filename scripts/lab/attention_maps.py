"""attention_maps.py: reads the file of --dump-attention, and packs maps for the page."""

import base64
import json
import re

import python_environment

from . import stats
from .run_directory import RunError
from .tensors import Tensors

np = python_environment.Later("numpy")
TENSOR_NAME = re.compile(r"layer\.[0-9]+\.head\.[0-9]+\.(a1|a2|lambda)")


def read(path):
    """The tensors {name: array} of a file. Raises RunError if it is not a file of attention maps."""
    file = Tensors(path)
    try:
        for name, t in file.header.items():
            if t["dtype"] != "F32" or not (name == "tokens" or TENSOR_NAME.fullmatch(name)):
                raise ValueError(name)
        tensors = {name: file.read(name) for name in file.header}
        n = len(tensors["tokens"])
        for name, x in tensors.items():
            if x.shape != {"tokens": (n,), "a1": (n, n), "a2": (n, n), "lambda": (n,)}[name.rpartition(".")[2]]:
                raise ValueError(name)
        return tensors
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path}: damaged, or not attention maps") from None


def pack(values):
    """The lower triangle of a map: the square roots as bytes, base64."""
    lower = values[np.tril_indices(len(values))].astype(float)
    return base64.b64encode(np.rint(255 * np.sqrt(np.clip(np.nan_to_num(lower), 0, 1))).astype(np.uint8)).decode()


def entropy(values):
    """The mean entropy of the rows after the first."""
    x = np.tril(values[1:].astype(float), 1)
    return float(-(x * np.log(x, out=np.zeros_like(x), where=x > 0)).sum() / len(x))


def token_text(token):
    return json.dumps(chr(token))[1:-1] if 32 <= token < 127 or token in (9, 10) else str(token)


def heads_of(tensors):
    """name of a head's tensors -> 'layer:head'"""
    names = [name.removesuffix(".a1") for name in tensors if name.endswith(".a1")]
    return {name: "{1}:{3}".format(*name.split(".")) for name in names}


def maps_data(arm, label, tensors, chosen=None, limit=24):
    """The maps of an arm on the page: the `chosen` 'layer:head', else up to `limit` evenly spaced heads."""
    short = heads_of(tensors)
    names = list(short)
    names = [n for n in names if short[n] in chosen] if chosen else [names[i] for i in stats.thin(names, limit)]
    heads, sharp = [], {}
    for name in names:
        a1, a2 = tensors[f"{name}.a1"], tensors.get(f"{name}.a2")
        sharp[short[name]] = entropy(a1)
        item = {"name": short[name], "title": "layer {}, head {}".format(*short[name].split(":")), "a1": pack(a1)}
        if a2 is not None:
            item |= {"a2": pack(a2), "lambda": [round(float(x), 5) for x in tensors[f"{name}.lambda"]]}
        heads.append(item)
    if not heads:
        return None
    tokens = [token_text(int(t)) for t in tensors["tokens"]]
    return {"arm": arm, "label": label, "tokens": tokens, "heads": heads, "sharpest": min(sharp, key=sharp.get)}


def maps_html(maps):
    if not maps:
        return ""
    return (
        "<figure><div class=views><label>arm <select id=map-arm></select></label><label>head "
        "<select id=map-head></select></label></div><div class=maps id=maps></div><div id=pointed></div><figcaption>"
        "First validation window, first 64 tokens, last checkpoint of the first seed. Rows: queries; columns: keys. "
        "The shade is the square root of the value, relative to the maximum of each map; in A1 - s A2 the second "
        "is negative. The first head shown is the one with the sharpest first map (lowest mean entropy of a row). "
        "Hover over a map to see its values.</figcaption></figure>"
    )
