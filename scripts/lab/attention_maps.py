"""attention_maps.py: reads the file of --dump-attention, and packs maps for the page."""

import base64
import json
import math
import re
import struct
from array import array
from pathlib import Path

from . import stats
from .run_directory import RunError

TENSOR_NAME = re.compile(r"layer\.[0-9]+\.head\.[0-9]+\.(a1|a2|lambda)")


def read(path):
    """The tensors {name: (shape, array)} of a file. Raises RunError if it is not a file of attention maps."""
    try:
        data = Path(path).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        tensors = {}
        for name, t in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            tensors[name] = t["shape"], array("f", data[8 + size + begin : 8 + size + end])
            if (
                t["dtype"] != "F32"
                or 4 * math.prod(t["shape"]) != end - begin
                or len(tensors[name][1]) != math.prod(t["shape"])
            ):
                raise ValueError(name)
        n = len(tensors["tokens"][1])
        for name, (shape, _) in tensors.items():
            wanted = {"tokens": [n], "a1": [n, n], "a2": [n, n], "lambda": [n]}[name.rpartition(".")[2]]
            if shape != wanted or (name != "tokens" and not TENSOR_NAME.fullmatch(name)):
                raise ValueError(name)
        return tensors
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise RunError(f"{path}: damaged, or not attention maps") from None


def pack(values, n):
    """The lower triangle of a map: the square roots as bytes, base64."""
    return base64.b64encode(
        bytes(round(255 * math.sqrt(min(1.0, max(0.0, values[t * n + j])))) for t in range(n) for j in range(t + 1))
    ).decode()


def entropy(values, n):
    return sum(
        -values[t * n + j] * math.log(values[t * n + j])
        for t in range(1, n)
        for j in range(t + 1)
        if values[t * n + j] > 0
    ) / (n - 1)


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
    n, heads, sharp = tensors["tokens"][0][0], [], {}
    for name in names:
        a1 = tensors[f"{name}.a1"][1]
        sharp[short[name]] = entropy(a1, n)
        layer, head = short[name].split(":")
        item = {"name": short[name], "title": f"layer {layer}, head {head}", "a1": pack(a1, n)}
        if f"{name}.a2" in tensors:
            item["a2"], item["lambda"] = (
                pack(tensors[f"{name}.a2"][1], n),
                [round(x, 5) for x in tensors[f"{name}.lambda"][1]],
            )
        heads.append(item)
    if not heads:
        return None
    return {
        "arm": arm,
        "label": label,
        "tokens": [token_text(int(t)) for t in tensors["tokens"][1]],
        "heads": heads,
        "sharpest": min(sharp, key=sharp.get),
    }


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
