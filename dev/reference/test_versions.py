"""
Tests of exports with a version of the transformers library: scripts/test.sh runs them with each version that
model_card.TRANSFORMERS names, and newest.py with the newest release. With the oldest supported version it only runs the
test that imports the class.

  tolerance  tokens are equal. Where the two largest logits differ by less than 1e-4 of the largest, the tests fail:
             the order of summation could decide.
  requires   as test_hub.py
"""

import importlib.util
import re
from pathlib import Path
from unittest import mock

from test_export import exported
from test_hub import FIXTURES, HERE, succeed, train  # sets the environment

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import modeling_diffv2
from model_card import TRANSFORMERS
from modeling_diffv2 import CACHE, CACHE_NAMES, DiffV2Config, DiffV2ForCausalLM, rope_table

PROMPT = [5, 1, 9, 30, 2, 2, 17, 8, 11]  # longer than the windows
RUNS = (
    "diff_v2.even",
    "diff_v1.window",
    "diff_v2.yoco",
    "diff_v2.shared_experts",
)  # plain; wide values and windows; YOCO; experts


@pytest.fixture(scope="module")
def exports():
    """(checkpoint, the model of its export, with the code in there) by name of the fixture that a run began with"""
    pairs = {}
    for name in RUNS:
        checkpoint = train(f"versions/{name}", "--init", FIXTURES / name)
        out = exported(checkpoint, f"versions/{name}")
        code = get_class_from_dynamic_module("modeling_diffv2.DiffV2ForCausalLM", str(out))
        pairs[name] = checkpoint, code.from_pretrained(out).eval()
    return pairs


def test_the_class_is_imported_and_registered():
    config = transformers.AutoConfig.from_pretrained(FIXTURES / "diff_v2.even")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(config) is DiffV2Config and type(model) is DiffV2ForCausalLM, model


def by_arg_max(model, ids, count):
    """(1,T) continued by the most probable tokens, each of a forward pass over all tokens."""
    for _ in range(count):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        first, second = logits.topk(2).values
        assert first - second > 1e-4 * logits.abs().max(), "two tokens are equally probable"
        ids = torch.cat((ids, logits.argmax()[None, None]), 1)
    return ids


@torch.no_grad()
def test_exports_generate_the_tokens_of_the_program_with_and_without_a_cache(exports):
    for name, (checkpoint, model) in exports.items():
        text, ids = ",".join(map(str, PROMPT)), torch.tensor([PROMPT])
        count = min(32, model.config.max_position_embeddings - len(PROMPT))  # the program moves a full context
        written = succeed("--init", checkpoint, f"--prompt-tokens {text} --generate {count} --temperature 0")
        wanted = list(map(int, written.split()))
        assert len(set(wanted[len(PROMPT) :])) > 2, f"{name}: {wanted} would show nothing"
        assert by_arg_max(model, ids, count)[0].tolist() == wanted, f"{name}: arg max"
        for use_cache in (True, False):
            found = model.generate(ids, max_new_tokens=count, do_sample=False, use_cache=use_cache)[0].tolist()
            assert found == wanted, f"{name}, use_cache {use_cache}: {found}, not {wanted}"


@torch.no_grad()
def test_a_cache_has_its_new_or_its_old_name_and_another_is_refused(exports):
    ids = torch.tensor([PROMPT])
    for name, (_, model) in exports.items():
        wanted = model(ids, use_cache=False).logits
        for given in CACHE_NAMES:
            cache = DynamicCache(config=model.config)
            first = model(ids[:, :4], **{given: cache})
            assert first[CACHE] is cache and first.past_key_values is cache, f"{name}, {given}"
            assert model.model(ids[:, 4:6], **{given: cache})[CACHE] is cache, f"{name}, {given}"
            found = model(ids[:, 6:], **{given: cache}).logits
            difference = float((found - wanted[:, 6:]).abs().max() / wanted.abs().max())
            assert difference < 1e-5, f"{name}, {given}: logits differ by {difference:.1e}"
            x, positions = model.get_input_embeddings()(ids), torch.arange(len(PROMPT))[None]
            cos, sin = rope_table(model.config, positions, like=x)
            masks, cache = dict.fromkeys(model.config.layer_types), DynamicCache()
            model.model.layers[0](x, cos=cos, sin=sin, masks=masks, **{given: cache})
            assert cache.get_seq_length() == len(PROMPT), f"{name}: a block ignores {given}"
        for arguments, word in (
            ({"kv_cache": DynamicCache()}, "kv_cache is a cache, but"),
            (dict.fromkeys(CACHE_NAMES, DynamicCache()), "names of one argument"),
        ):
            with pytest.raises(ValueError, match=word):
                model.model(ids, **arguments)


def test_a_version_with_another_name_for_the_cache_is_refused():
    spec = importlib.util.spec_from_file_location("modeling_of_another_version", modeling_diffv2.__file__)
    renamed = lambda config, inputs_embeds, attention_mask, kv_cache: None
    with mock.patch("transformers.masking_utils.create_causal_mask", renamed):
        with pytest.raises(ImportError, match="calls the cache neither cache nor past_key_values"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_checkpoints_of_activations_do_not_change_tokens_and_refuse_to_continue_a_cache(exports):
    ids = torch.tensor([PROMPT])
    for name, (_, model) in exports.items():
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
        cache = model(ids)[CACHE]
        model.train().gradient_checkpointing_enable()
        found = model.generate(ids, max_new_tokens=8, do_sample=False)
        with pytest.raises(ValueError, match="cannot continue a cache"):
            model(ids, **{CACHE: cache})
        model.eval().gradient_checkpointing_disable()
        assert torch.equal(found, wanted), f"{name}: {found} instead of {wanted}"


@pytest.mark.slow
@torch.no_grad()
def test_continuous_batching_gives_the_tokens_of_generate(exports):
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    blocks = transformers.generation.configuration_utils.ContinuousBatchingConfig(num_blocks=64)
    model, prompts = exports["diff_v2.yoco"][1], [PROMPT, PROMPT[:5]]
    wanted = [by_arg_max(model, torch.tensor([p]), 8)[0, len(p) :].tolist() for p in prompts]
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = model.generate_batch(
            prompts, transformers.GenerationConfig(**settings), continuous_batching_config=blocks
        )
        found = [result.generated_tokens for result in found.values()]
        assert sorted(found) == sorted(wanted), f"{implementation}: {found} instead of {wanted}"
    model.set_attn_implementation("sdpa")
    sink = DiffV2ForCausalLM(DiffV2Config(attention="off_by_one"))
    sink.config._attn_implementation = "paged|eager"  # which ignores the sink
    with pytest.raises(ValueError, match="has no sinks"):
        sink(torch.tensor([PROMPT]))


def test_the_card_names_the_versions_that_the_tests_pin(exports):
    pins = [(HERE / place / "requirements.in").read_text() for place in ("previous", ".")]
    assert [re.search(r"^transformers==(.*)$", pin, re.M)[1] for pin in pins] == list(TRANSFORMERS)
    card = Path(exports["diff_v2.even"][1].name_or_path, "README.md").read_text()
    assert f"| tested with | Transformers {', '.join(TRANSFORMERS)} |" in card, card
    if transformers.__version__ not in TRANSFORMERS:  # newest.py
        pytest.skip(f"transformers {transformers.__version__} is newer than {TRANSFORMERS[-1]}")
