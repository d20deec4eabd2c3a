#!/usr/bin/env python3
"""
The library's own tests of a model, tests/test_modeling_common.py, with a diff_v2 of modeling_diffv2.py. They are not
part of this repository: pip downloads the source distribution of the installed version, whose hash is in
requirements.txt, and the tests are kept in build/. It has no tests of generate() and of exports.

Usage: library_tests.py
"""

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

sys.path.insert(0, str(HERE.parent.parent / "scripts/export"))
import modeling_diffv2 as ours

CLASSES = {  # by the table where the library's tests look for their names
    "MODEL_MAPPING_NAMES": ours.DiffV2Model,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": ours.DiffV2ForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": ours.DiffV2ForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": ours.DiffV2ForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": ours.DiffV2ForQuestionAnswering,
}
SKIPPED = {  # test of the library: why it does not apply
    "test_eager_matches_batched_and_grouped_inference": "no experts",
    "test_bc_cache_name_forward": "both names of the cache remain, without a warning: test_versions.py",
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
                sys.exit(f"library_tests.py: cannot download the source of transformers {version}")
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
        return ours.DiffV2Config(**sizes, attention="diff_v2", pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(0, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def library_case():
    from tests.generation.test_utils import GenerationTesterMixin
    from tests.test_modeling_common import ModelTesterMixin

    class Case(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
        all_model_classes, all_generative_model_classes = tuple(CLASSES.values()), (ours.DiffV2ForCausalLM,)
        model_tester_class, has_attentions = Tester, True

        def setUp(self):
            self.model_tester, self.config_tester = Tester(self), None

    for test in dir(Case):
        for name, reason in SKIPPED.items():
            if test.startswith(name):
                setattr(Case, test, unittest.skip(reason)(lambda self: None))
    return Case


def main():
    sys.path.insert(0, str(downloaded()))
    for table, model in CLASSES.items():
        getattr(modeling_auto, table)["diffv2"] = model.__name__
    start, result = time.monotonic(), unittest.TestResult()
    unittest.TestLoader().loadTestsFromTestCase(library_case()).run(result)
    name_of = lambda test: getattr(test, "test_case", test)._testMethodName  # of a subTest too
    bad = {name_of(test): trace for test, trace in result.failures + result.errors}
    skipped = {name_of(test) for test, _ in result.skipped} - bad.keys()
    for test, trace in bad.items():
        print(f"FAIL {test}: {trace.strip().splitlines()[-1]}")
    print(f"     {len(skipped)} do not apply to this model or machine ({time.monotonic() - start:.0f} s)")
    print(f"{result.testsRun - len(bad) - len(skipped)} passed, {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_default_handler()  # some tests read warnings, for which they have their own
    transformers.utils.logging.add_handler(logging.NullHandler())
    sys.exit(main())
