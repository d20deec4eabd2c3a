#!/usr/bin/env python3
"""
Tests of modeling_diffv2.py as a class of the transformers library: caches, padding, attention implementations,
training and the library's tools. test_hub.py compares the class with the program.

  tolerance  float64 1e-10 of the largest element: order of summation, as in test_hub.py. The reference is one forward
             of each row alone, with eager attention and no cache.
  requires   PyTorch 2.6, transformers 4.57 and numpy, or later; not train_diffv2. Without accelerate, peft or
             bitsandbytes, the tests that need them are skipped, and say so.

Usage: test_modeling.py [--all] [WORD...]   tests whose name contains a word; --all: also those of compiled attention
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = tempfile.TemporaryDirectory(prefix="diffv2_class_")
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=WORK.name)  # before the import of transformers

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache

from fixtures import unpack
from make_fixtures import FIXTURES
from modeling_diffv2 import VARIANTS, DiffV2ForCausalLM, DiffV2ForSequenceClassification, DiffV2Model

HERE = Path(__file__).resolve().parent
NEW = int(transformers.__version__.split(".")[0]) >= 5
V, T = 37, 20  # V: the smallest of the fixtures
LENGTHS = [T, 13, 3]  # of the rows of a batch
TOLERANCE = 1e-10


def directory_of(name):
    path = Path(WORK.name) / "fixtures" / name
    if not path.exists():
        unpack(FIXTURES / f"{name}.safetensors", path)
    return path


def open_model(name, implementation="eager", dtype=torch.float64, model_class=DiffV2ForCausalLM, **config):
    path = directory_of(name)
    return model_class.from_pretrained(path, dtype=dtype, attn_implementation=implementation, **config).eval()


def names(sizes):
    return [f"{variant}_{size}" for variant in VARIANTS for size in sizes if (FIXTURES / f"{variant}_{size}.safetensors").exists()]


def tokens(*shape, seed=1):
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def expect_equal(found, wanted, what, tolerance=TOLERANCE):
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    difference = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    assert difference <= tolerance, f"{what}: differs by {difference:.1e}"


def expect_error(kind, word, call):
    try:
        call()
    except kind as error:
        assert word in str(error) and "\n" not in str(error), f"'{word}': {error}"
        return
    raise AssertionError(f"no error about '{word}'")


def padded(rows, side):
    """(B,T) and its mask, of rows of several lengths."""
    before = [(T - len(r)) * (side == "left") for r in rows]
    pad = lambda r, b, value: F.pad(r, (b, T - len(r) - b), value=value)
    ids = torch.stack([pad(r, b, 5) for r, b in zip(rows, before)])
    return ids, torch.stack([pad(torch.ones_like(r), b, 0) for r, b in zip(rows, before)])


def in_chunks(model, ids, mask, sizes, cache):
    """Logits of a batch whose columns come in chunks."""
    logits, at = [], 0
    for size in sizes:
        mask_so_far = None if mask is None else mask[:, : at + size]
        output = model(ids[:, at : at + size], attention_mask=mask_so_far, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        at += size
    assert at == ids.shape[1]
    return torch.cat(logits, 1)


def test_every_variant_computes_the_same_in_every_way():
    """With and without cache, padded on either side, with sdpa and flex attention."""
    rows = [tokens(n, seed=n) for n in LENGTHS]
    with torch.no_grad():
        for name in names("awyk"):
            alone = [open_model(name)(row[None], use_cache=False).logits[0] for row in rows]
            for implementation in ("eager", "sdpa"):
                model = open_model(name, implementation)
                caches = [DynamicCache(config=model.config), DynamicCache()]
                for side in ("left", "right"):
                    ids, mask = padded(rows, side)
                    results = {
                        "without cache": model(ids, attention_mask=mask, use_cache=False).logits,
                        "with cache": in_chunks(model, ids, mask, (9, 1, 4, 1, 5), caches.pop()),
                    }
                    for how, logits in results.items():
                        kept = logits[mask.bool()].split(LENGTHS)
                        for found, wanted in zip(kept, alone):
                            expect_equal(found, wanted, f"{name}, {implementation}, {side} padding, {how}")
                cached = in_chunks(model, rows[0][None], None, (1, 7, 1, 11), DynamicCache(config=model.config))
                expect_equal(cached[0], alone[0], f"{name}, {implementation}, cache without a mask")


def main(arguments):
    failed = 0
    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    words = [a for a in arguments if a != "--all"]
    for name, test in list(globals().items()):
        slow = name.startswith("slow_test_") and "--all" in arguments
        if not (slow or name.startswith("test_")) or not all(w in name for w in words):
            continue
        try:
            note = test() or "ok"
        except AssertionError as error:
            note, failed = f"FAILED: {error}", failed + 1
        print(f"{name.split('test_', 1)[1].replace('_', ' ')}: {note}", flush=True)
    print(f"{failed} failed, PyTorch {torch.__version__}, transformers {transformers.__version__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
