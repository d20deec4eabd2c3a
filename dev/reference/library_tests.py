#!/usr/bin/env python3
"""
The library's own tests of a model, tests/test_modeling_common.py, with modeling_diffv2.py. They are not part of this
repository: pip downloads the source distribution of the installed version, whose hash is in requirements.txt, and the
tests are kept in build/. It has no tests of generate() and of exports, nor has any package: --source takes these, and
all others, from a checkout of the library.

Usage: library_tests.py [--skipped] [--source CHECKOUT] [NAME...]   models of MODELS, words in names of tests
  --skipped   also lists what is skipped, and why
"""

import argparse
import copy
import fnmatch
import logging
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto import modeling_auto

import modeling_diffv2 as ours

EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, num_shared_experts=1, num_dense_layers=1, router_bias=True)
MODELS = {
    "diff_v2": dict(attention="diff_v2"),
    "baseline": dict(attention="baseline", use_qk_norm=True),
    "diff_v1": dict(attention="diff_v1"),
    "sink": dict(attention="sink"),
    "window": dict(attention="diff_v2", sliding_window=5),
    "yoco": dict(attention="diff_v2", yoco=True),
    "experts": dict(attention="diff_v2", **EXPERTS),
}
CLASSES = {  # by the table where the library's tests look for their names
    "MODEL_MAPPING_NAMES": ours.DiffV2Model,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": ours.DiffV2ForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": ours.DiffV2ForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": ours.DiffV2ForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": ours.DiffV2ForQuestionAnswering,
}
# test of the library: (the models that run it, why others do not). --skipped lists what the library skips itself
SKIPPED = {
    "test_eager_matches_batched_and_grouped_inference*": (("experts",), "no experts"),
    "test_bc_cache_name_forward": ((), "both names of the cache remain, without a warning: test_versions.py"),
}


def downloaded():
    """The directory with the library's package `tests`, and empty classes for what the distribution lacks."""
    version = transformers.__version__
    place = HERE.parent.parent / f"build/transformers_tests-{version}"
    if not place.exists():
        pinned = re.search(r"^transformers==(.*\\\n)+.*", (HERE / "requirements.txt").read_text(), re.M)[0]
        place.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as work:
            Path(work, "pinned.txt").write_text(pinned)
            pip = [sys.executable, "-m", "pip", "download", "--require-hashes", "--quiet", "--no-deps"]
            options = ["--no-build-isolation", "--no-binary", ":all:", "-d", work, "-r", f"{work}/pinned.txt"]
            if subprocess.run([*pip, *options]).returncode:
                sys.exit(f"library_tests.py: cannot download the source of transformers {version}: use --source")
            with tarfile.open(f"{work}/transformers-{version}.tar.gz") as file:
                file.extractall(work, [m for m in file if "/tests/" in m.name])
            tests = Path(work, f"transformers-{version}/tests")
            (tests / "__init__.py").touch()
            for folder, name, mixin in (("generation", "utils", "Generation"), ("exporters", "export", "Export")):
                (tests / folder).mkdir()
                (tests / folder / f"test_{name}.py").write_text(f"class {mixin}TesterMixin: pass\n")
            tests.parent.rename(place)
    return place


class Tester:
    """What the library's tests ask about a model."""

    batch_size, seq_length, num_hidden_layers, hidden_size, num_labels, vocab_size = 3, 7, 2, 32, 3, 99
    encoder_seq_length, key_length, is_training = seq_length, seq_length, True

    def __init__(self, parent):
        self.parent = parent
        self.num_attention_heads = ours.shape_of(self.get_config()).NQ  # maps in a layer

    def get_config(self):
        sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, intermediate_size=16)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
        return ours.DiffV2Config(**sizes, **self.parent.keys, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(0, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def case_of(name):
    from tests.generation.test_utils import GenerationTesterMixin
    from tests.test_modeling_common import ModelTesterMixin

    class Case(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
        all_model_classes, all_generative_model_classes = tuple(CLASSES.values()), (ours.DiffV2ForCausalLM,)
        model_tester_class, has_attentions, keys = Tester, True, MODELS[name]

        def setUp(self):
            self.model_tester, self.config_tester = Tester(self), None

        def _check_attentions_for_generate(self, *arguments, config, **more):
            maps = copy.copy(config)
            maps.num_attention_heads = self.model_tester.num_attention_heads
            super()._check_attentions_for_generate(*arguments, config=maps, **more)

    for pattern, (models, reason) in SKIPPED.items():
        for test in fnmatch.filter(dir(Case), pattern) if name not in models else ():
            setattr(Case, test, unittest.skip(reason)(lambda self: None))
    return Case


def main():
    options = argparse.ArgumentParser(usage=__doc__[__doc__.index("Usage: ") + 7 :])
    options.add_argument("--skipped", action="store_true")
    options.add_argument("--source", type=Path)
    options.add_argument("words", nargs="*")
    options = options.parse_args()
    sys.path.insert(0, str((options.source or downloaded()).resolve()))
    for table, model in CLASSES.items():
        getattr(modeling_auto, table)["diffv2"] = model.__name__
    loader, passed, failed = unittest.TestLoader(), 0, 0
    loader.testNamePatterns = [f"*{w}*" for w in options.words if w not in MODELS] or None
    for name in [n for n in MODELS if n in options.words] or MODELS:
        start, result = time.monotonic(), unittest.TestResult()
        loader.loadTestsFromTestCase(case_of(name)).run(result)
        name_of = lambda test: getattr(test, "test_case", test)._testMethodName  # of a subTest too
        bad = {name_of(test): trace for test, trace in result.failures + result.errors}
        skipped = {name_of(test): reason for test, reason in result.skipped if name_of(test) not in bad}
        for test, trace in bad.items():
            print(f"FAIL {name}, {test}: {trace.strip().splitlines()[-1]}")
        for test, reason in skipped.items() if options.skipped else ():
            print(f"     {name}, {test}: {reason}")
        good = result.testsRun - len(bad) - len(skipped)
        passed, failed = passed + good, failed + len(bad)
        more = f"{len(bad)} failed, {len(skipped)} skipped ({time.monotonic() - start:.0f} s)"
        print(f"     {name}: {good} passed, {more}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()  # some tests read warnings, for which they have their own
    transformers.utils.logging.add_handler(logging.NullHandler())
    sys.exit(main())
