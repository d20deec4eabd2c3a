"""
Tests of modeling_diffv2.py as a class of the transformers library: caches, padding, attention implementations,
training and the library's tools. test_hub.py compares the class with the program.

  tolerance  float64 1e-10 of the largest element: order of summation, as in test_hub.py. Logits are compared with those
             of model.py for each row alone, gradients with those of eager attention, which test_hub.py compares.
  requires   PyTorch 2.6, transformers 5.23, accelerate, peft and numpy, or later; not train_diffv2
"""

import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

WORK = tempfile.TemporaryDirectory(prefix="diffv2_class_")

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification, DynamicCache

import export_hub
import model as reference
import modeling_diffv2
from modeling_diffv2 import VARIANTS, DiffV2Config, DiffV2ForCausalLM, DiffV2ForSequenceClassification
from modeling_diffv2 import eager_attention, rope_table, rotate

V, T, L, PAD = 37, 20, 4, 36
TOLERANCE = 1e-10
WIDTHS = dict(
    vocab_size=V, hidden_size=12, intermediate_size=16, num_hidden_layers=L, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rope_theta=500.0, rms_norm_eps=0.02,
    tie_word_embeddings=False,
)  # fmt: skip
UPPER_FULL = ["sliding_attention"] * 2 + ["full_attention"] * 2
LAYERS = {
    "full": dict(use_qk_norm=False),
    "sliding": dict(sliding_window=5, layer_types=["sliding_attention"] * L),
    "mixed": dict(sliding_window=5, layer_types=UPPER_FULL[1:] + UPPER_FULL[:1], use_qk_norm=True),
    "own": dict(sliding_window=1, layer_types=UPPER_FULL),  # with a window of 1, the cache of the library keeps all
    "yoco": dict(sliding_window=5, layer_types=UPPER_FULL, yoco=True, use_qk_norm=True),
    "experts": dict(num_local_experts=5, num_experts_per_tok=2),
    "shared": dict(num_local_experts=4, num_experts_per_tok=3, num_shared_experts=2, router_bias=True),
}
LAYERS["shared"] |= dict(num_dense_layers=1, dense_intermediate_size=9)
KINDS = [(variant, "yoco") for variant in VARIANTS] + [
    (v, k) for v in ("diff_v1", "sink") for k in LAYERS if k != "yoco"
]
EXPERTS = [("sink", "experts"), ("diff_v1", "shared")]
SOME = [
    (v, "yoco") for v in ("diff_v2_cross_group", "diff_grouped_2", "diff_v2_norm", "diff_v1", "diff_scalar", "sink")
]


def make(variant, layers, implementation="eager"):
    """The model in float64, and the logits (T,V) of model.py for a row of tokens."""
    config = {**WIDTHS, **LAYERS[layers], "attention": variant}
    weights = reference.init(config, 3)
    model = DiffV2ForCausalLM(DiffV2Config(**config, attn_implementation=implementation)).double().eval()
    model.load_state_dict(weights)
    model.generation_config.pad_token_id = PAD
    return model, lambda row: reference.forward(config, weights, row[None])[0]


def tokens(*shape, seed=1):
    return torch.randint(0, PAD, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(lengths, halves=(0, 1, 2)):
    """Rows of these lengths; ids (B,T) and mask, padded on the right (0), both sides (1) or the left (2), in turn."""
    rows, ids, mask = [tokens(n, seed=n) for n in lengths], [], []
    for i, row in enumerate(rows):
        left = (T - len(row)) * halves[i % len(halves)] // 2
        pad = (left, T - len(row) - left)
        ids.append(F.pad(row, pad, value=PAD))
        mask.append(F.pad(torch.ones_like(row), pad))
    return rows, torch.stack(ids), torch.stack(mask)


def expect_equal(found, wanted, what, tolerance=TOLERANCE):
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    difference = float(((found - wanted).abs().max() / wanted.abs().max()).detach())
    assert difference <= tolerance, f"{what}: differs by {difference:.1e}"


def expect_error(kind, word, call):
    with pytest.raises(kind) as found:
        call()
    assert word in str(found.value) and "\n" not in str(found.value), f"'{word}': {found.value}"


def in_chunks(model, ids, mask, sizes, cache):
    """Logits of a batch whose columns come in chunks."""
    logits, end = [], 0
    for size in sizes:
        start, end = end, end + size
        seen = None if mask is None else mask[:, :end]
        output = model(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    assert end == ids.shape[1]
    return torch.cat(logits, 1)


def compare_with_reference(model, logits_of, what):
    """A batch with padding, without a cache and with those of the library."""
    rows, ids, mask = batch_of([T, 6, 11, 13, 2])
    results = {
        "no cache": model(ids, attention_mask=mask, use_cache=False).logits,
        "cache": in_chunks(model, ids, mask, (9, 1, 10), DynamicCache(config=model.config)),
        "cache without windows": in_chunks(model, ids, mask, (19, 1), DynamicCache()),
    }
    for how, logits in results.items():
        for found, row in zip(logits[mask.bool()].split([len(r) for r in rows]), rows):
            expect_equal(found, logits_of(row), f"{what}, {how}, row of {len(row)}")
    alone = in_chunks(model, ids[:1], None, (1, 7, 1, 11), DynamicCache(config=model.config))
    expect_equal(alone[0], logits_of(rows[0]), f"{what}, cache and no mask")


def compare_packed(model, logits_of, what):
    """Two rows in one, which position_ids separate."""
    rows = [tokens(n, seed=n) for n in (12, 8)]
    positions = torch.cat([torch.arange(len(r)) for r in rows])[None]
    packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0].split([12, 8])
    for found, row in zip(packed, rows):
        expect_equal(found, logits_of(row), f"{what}, packed by position_ids")


@torch.no_grad()
def test_every_variant_has_the_logits_of_the_reference_with_padding_and_caches():
    for variant, layers in KINDS:
        model, logits_of = make(variant, layers)
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            assert model.model.config._attn_implementation == implementation
            compare_with_reference(model, logits_of, f"{variant} {layers}, {implementation}")


@torch.no_grad()
def test_flex_attention_has_the_logits_of_the_reference_and_refuses_sinks_on_a_cpu():
    for variant, layers in SOME[:-1] + [("baseline", "mixed")]:
        compare_with_reference(*make(variant, layers, "flex_attention"), f"{variant} {layers}, flex")
    expect_error(ValueError, "sinks", lambda: make("sink", "yoco", "flex_attention")[0](tokens(1, T)))


def flash_attention(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False
):
    """Stands in for flash_attn_func: (B,T,heads,width). Refuses what it refuses; float64 is for these tests."""
    if any(t.dtype != q.dtype or t.dtype not in (torch.float16, torch.bfloat16, torch.float64) for t in (q, k, v)):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 or q.shape[2] % k.shape[2] or k.shape != v.shape:
        raise RuntimeError(f"FlashAttention forward: shapes {q.shape}, {k.shape}, {v.shape}")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    # The last query is beside the last key
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance >= 0) if causal else seen
    seen &= (distance <= window_size[0]) if window_size[0] >= 0 else seen
    a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return a.transpose(1, 2)


def flash_attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), deterministic=False,
):  # fmt: skip
    """Stands in for flash_attn_varlen_func: the rows of the batch one after another."""
    ends = zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:])
    row = lambda a, b, c, d: flash_attention(
        q[None, a:b], k[None, c:d], v[None, c:d], dropout_p, softmax_scale, causal, window_size
    )
    return torch.cat([row(*e)[0] for e in ends])


@torch.no_grad()
def test_flash_attention_is_called_with_what_it_accepts_and_refused_for_sinks():
    library = transformers.modeling_flash_attention_utils
    fake, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    fake.flash_attn_func, fake.flash_attn_varlen_func = flash_attention, flash_attention_varlen
    fake.flash_attn_with_kvcache = None
    padding.pad_input, padding.unpad_input = library._pad_input, library._unpad_input
    sys.modules.update({"flash_attn": fake, "flash_attn.bert_padding": padding})
    library.is_flash_attn_2_available = lambda: True
    for variant, layers in SOME[:-1] + [("baseline", "mixed"), ("diff_v1", "own")]:
        model, logits_of = make(variant, layers)
        model.config._attn_implementation = "flash_attention_2"  # which the library allows on a GPU only
        compare_with_reference(model, logits_of, f"{variant} {layers}, flash")
        compare_packed(model, logits_of, f"{variant} {layers}, flash")
        half = model.bfloat16()(tokens(1, T)).logits
        assert half.dtype == torch.bfloat16 and half.isfinite().all()
        expect_error(RuntimeError, "fp16", lambda: model.float()(tokens(1, T)))
    for variant in ("sink", "off_by_one"):
        model = make(variant, "full")[0]
        model.config._attn_implementation = "flash_attention_2"
        expect_error(ValueError, "has no sinks", lambda: model(tokens(1, T)))


def labelled_batch(**sides):
    """Three rows of tokens with labels. A first token has none, since padding would predict it."""
    _, ids, mask = batch_of([T, 6, 11], **sides)
    targets = (mask * F.pad(mask, (1, 0))[:, :-1]).bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~targets, -100)}


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return torch.cat([loss[None], *(p.grad.flatten() for p in model.parameters())]).detach()


def test_gradients_are_the_same_in_every_way_of_training():
    for variant, layers in SOME + EXPERTS:
        model = make(variant, layers)[0].train()
        batch = labelled_batch()
        ids = batch["input_ids"]
        wanted, what = gradients(model, **batch), f"{variant} {layers}"
        expect_equal(gradients(model, **batch, position_ids=torch.arange(T)[None] + 7), wanted, f"{what}, shifted")
        embedded = {**batch, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids)}
        expect_equal(gradients(model, **embedded), wanted, f"{what}, inputs_embeds")
        count = int((batch["labels"][:, 1:] != -100).sum())
        part = gradients(model, **batch, num_items_in_batch=torch.tensor(4 * count))
        expect_equal(4 * part, wanted, f"{what}, num_items_in_batch")
        shifted = {**batch, "labels": ids, "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
        expect_equal(gradients(model, **shifted), wanted, f"{what}, shift_labels")
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            calls = []
            handle = model.model.layers[3].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
            found = gradients(model, **batch, use_cache=True)  # which the second forward pass would extend
            expect_equal(found, wanted, f"{what}, checkpoints, reentrant {reentrant}")
            handle.remove()
            assert len(calls) == 2, f"{what}: {len(calls)} forward passes of a layer"
        model.gradient_checkpointing_disable()
        model.set_attn_implementation("sdpa")
        expect_equal(gradients(model, **batch), wanted, f"{what}, sdpa")
        for implementation in ("batched_mm", "grouped_mm") if (variant, layers) in EXPERTS else ():
            model.float().set_experts_implementation(implementation)  # grouped_mm has no float64
            expert = model.model.layers[3].block_sparse_moe.experts[0]
            handle = expert.register_forward_hook(lambda *_: calls.clear())
            expect_equal(gradients(model, **batch), wanted.float(), f"{what}, {implementation}", 1e-5)
            assert calls, f"{what}, {implementation}: a loop"
            handle.remove()


@torch.no_grad()
def test_experts_compile_into_one_graph():
    model, ids = make("sink", "shared")[0].float(), tokens(1, T)
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"), torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        expect_equal(compiled(ids, use_cache=False).logits, model(ids).logits, "compiled", 1e-5)


def test_gradients_are_those_of_the_reference():
    for variant, layers in SOME + EXPERTS:
        model, row = make(variant, layers)[0].train(), tokens(T)
        weights = {name: w.detach().clone().requires_grad_() for name, w in model.named_parameters()}
        config = {**WIDTHS, **LAYERS[layers], "attention": variant}
        loss = F.cross_entropy(reference.forward(config, {**model.state_dict(), **weights}, row[None])[0, :-1], row[1:])
        wanted = torch.autograd.grad(loss, list(weights.values()))
        wanted = torch.cat([loss[None], *(g.flatten() for g in wanted)]).detach()
        expect_equal(gradients(model, input_ids=row[None], labels=row[None]), wanted, f"{variant} {layers}")


def test_padding_adds_nothing_to_the_gradients_of_experts():
    for variant, layers in EXPERTS:
        model = make(variant, layers)[0].train()
        rows = [tokens(n, seed=n) for n in (T, 6, 11)]
        count = sum(len(row) - 1 for row in rows)
        alone = sum(gradients(model, input_ids=r[None], labels=r[None]) * (len(r) - 1) / count for r in rows)
        for side in (0, 1, 2):  # padded on the right, both sides, the left
            batch = labelled_batch(halves=[side])
            for checkpoints in (False, True):
                if checkpoints:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
                found = gradients(model, **batch)
                expect_equal(found, alone, f"{variant} {layers}, side {side}, checkpoints {checkpoints}")
            model.gradient_checkpointing_disable()


@torch.no_grad()
def test_packed_sequences_and_requested_outputs():
    for variant, layers in SOME:
        model, logits_of = make(variant, layers)
        ids, what = tokens(1, T), f"{variant} {layers}"
        compare_packed(model, logits_of, what)
        output = model(ids, output_attentions=True, output_hidden_states=True, logits_to_keep=3)
        expect_equal(output.logits[0], logits_of(ids[0])[-3:], f"{what}, logits_to_keep")
        assert len(output.hidden_states) == L + 1 and len(output.attentions) == L
        expect_equal(model.lm_head(output.hidden_states[-1])[0, -3:], output.logits[0], f"{what}, hidden_states")
        heads = reference.shape_of({**WIDTHS, "attention": variant}).NQ
        for weights in output.attentions:
            assert weights.shape == (1, heads, T, T) and not weights.triu(1).any(), f"{what}: {weights.shape}"
            sums = weights.sum(-1)
            assert (sums < 1 - 1e-6).all() if variant == "sink" else (sums - 1).abs().max() < 1e-12, what
        # Weights of the first layer, of positions within its window, are those of each query head and its key head
        x = model.model.layers[0].input_layernorm(output.hidden_states[0])[:, :5]
        a, angles = model.model.layers[0].self_attn, rope_table(model.config, torch.arange(5)[None], like=x)
        parts = ((a.q_norm, a.q_proj), (a.k_norm, a.k_proj))
        q, k = (rotate(norm(part(x).unflatten(-1, (-1, a.shape.DQ))), *angles)[0] for norm, part in parts)
        sets, later = VARIANTS[variant].key_sets, torch.ones(5, 5, dtype=torch.bool).triu(1)
        for j in range(heads):
            key = j // (heads // a.shape.NV) * sets + j % sets
            scores = (q[:, j] @ k[:, key].T / a.shape.DQ**0.5).masked_fill(later, -torch.inf)
            if variant == "sink":
                scores = torch.cat((scores, a.sinks[j].expand(5, 1)), -1)
            wanted = scores.softmax(-1)[:, :5]
            expect_equal(output.attentions[0][0, j, :5, :5], wanted, f"{what}, weights of head {j}")
        model.set_attn_implementation("sdpa")
        assert not model(ids, output_attentions=True).attentions, "maps of sdpa"  # as the library's classes
        assert model(ids, return_dict=False)[0].shape == (1, T, V)


def test_maps_are_those_that_the_outputs_depend_on_and_effective_maps_give_the_output_heads():
    more = dict(output_attentions=True, output_effective_attentions=True, use_cache=False)
    model = make("diff_v2_cross_group", "full")[0]
    expect_error(ValueError, "no effective maps", lambda: model(tokens(1, T), **more))
    for variant, layers in SOME[1:] + [("baseline", "full"), ("diff_v2", "mixed")]:
        model, what = make(variant, layers)[0], f"{variant} {layers}"
        first, seen = model.model.layers[0].self_attn, {}
        if hasattr(first, "subln"):  # the heads before the norm
            first.subln.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0]))
        else:
            first.o_proj.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0]))
        first.v_proj.register_forward_hook(lambda _, args, out: seen.update(values=out))
        output = model(tokens(1, T), **more)
        for weights in output.attentions:
            weights.retain_grad()
        output.logits.sum().backward()
        for weights in output.attentions:
            assert weights.grad is not None and weights.grad.any(), f"{what}: the logits do not depend on the maps"
        s, map_ = first.shape, output.effective_attentions[0]
        assert map_.shape == (1, s.H, T, T) and len(output.effective_attentions) == L, f"{what}: {map_.shape}"
        values = seen["values"].unflatten(-1, (s.NV, s.DV)).transpose(1, 2).repeat_interleave(s.H // s.NV, 1)
        heads = (map_ @ values).transpose(1, 2)
        expect_equal(heads.flatten(2), seen["heads"].flatten(2), f"{what}, heads of the effective maps")


@torch.no_grad()
def test_the_configuration_has_the_keys_that_the_library_reads():
    model, ids = make("sink", "shared")[0], tokens(2, T)
    config = model.config
    assert config.use_cache and model(ids).past_key_values is not None
    config.use_cache = False
    assert model(ids).past_key_values is None
    assert "use_cache" in config.to_dict() and "base_model_tp_plan" not in config.to_dict()
    assert not model(ids).router_logits
    config.output_router_logits = True
    output = model(ids, labels=ids)
    assert [logits.shape for logits in output.router_logits] == [(2 * T, 4)] * (L - 1), "the first layer is dense"
    plain = model(ids, labels=ids, output_router_logits=False)
    expect_equal(output.loss, plain.loss + 0.001 * output.aux_loss, "loss with that of the routers")
    # E sum_e f_e P_e over all layers with experts, f_e the choices of e per token
    p = torch.cat(output.router_logits).softmax(-1)
    f = F.one_hot(p.topk(3).indices, 4).sum(1).double().mean(0)
    expect_equal(output.aux_loss, 4 * (f * p.mean(0)).sum(), "loss of the routers", 1e-6)
    assert torch.equal(model(ids, output_hidden_states=True).hidden_states[-1], model.model(ids).last_hidden_state)
    for variant, layers in (("sink", "shared"), ("diff_v2_gated_head", "yoco")):
        model = make(variant, layers)[0].model
        names = {re.sub(r"\.\d+", ".*", n) for n, m in model.named_modules()}
        plan = model.config.base_model_tp_plan
        linear = {re.sub(r"\.\d+", ".*", n) for n, m in model.named_modules() if type(m) is torch.nn.Linear}
        missing = {n for n in linear - set(plan) if "self_attn" not in n or variant != "sink"}
        assert not missing and set(model.config.base_model_pp_plan) <= names, f"{variant}: no plan for {missing}"
        assert set(plan) <= names, f"{variant}: a plan for {set(plan) - names}"


TENSOR_PARALLEL = """
import sys, torch, transformers, modeling_diffv2
from transformers.distributed.configuration_utils import DistributedConfig
model = modeling_diffv2.DiffV2ForCausalLM.from_pretrained(
    sys.argv[1], distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"), dtype=torch.float64)
shapes = [model.model.layers[1].self_attn.q_proj.weight.to_local().shape[0]]
logits = model(torch.arange(20)[None]).logits.detach()
if torch.distributed.get_rank() == 0:
    torch.save((shapes, logits), sys.argv[1] + "/logits.pt")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_with_the_tensor_parallel_plan_compute_the_same():
    for variant, layers in (("diff_v2", "mixed"), ("diff_grouped_2", "yoco"), ("off_by_one", "experts")):
        path, script = Path(WORK.name) / f"parallel/{variant}", Path(WORK.name) / "parallel.py"
        model, logits_of = make(variant, layers)
        model.save_pretrained(path)
        script.write_text(TENSOR_PARALLEL)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", script, path]
        more = {"PYTHONPATH": str(Path(modeling_diffv2.__file__).parent), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **more})
        assert done.returncode == 0, done.stderr[-2000:]
        shapes, logits = torch.load(path / "logits.pt")
        s = reference.shape_of({**WIDTHS, "attention": variant})
        assert shapes == [s.NQ * s.DQ // 2], f"{variant}: {shapes}"
        expect_equal(logits[0], logits_of(torch.arange(20)), f"{variant} {layers}, two processes")


def generate(model, ids, count=12, **options):
    return model.generate(ids, max_new_tokens=count, do_sample=False, **options)


def expect_tokens(found, wanted, what):
    assert torch.equal(found, wanted), f"{what}: {found} instead of {wanted}"


@pytest.mark.slow
def test_generation_with_a_cache_gives_the_tokens_without_it():
    helper = make("baseline", "full")[0]
    for variant, layers in SOME + EXPERTS + [("baseline", "own"), ("diff_v1", "mixed"), ("diff_v2", "full")]:
        model = make(variant, layers, "sdpa")[0]
        rows, ids, mask = batch_of([T, 6, 11], halves=[2])
        for options in (dict(), dict(num_beams=3)):
            alone = [generate(model, r[None], use_cache=False, **options)[0, len(r) :] for r in rows]
            found = generate(model, ids, attention_mask=mask, **options)[:, T:]
            expect_tokens(found, torch.stack(alone), f"{variant} {layers} {options}")
        prompt, greedy = rows[0][None], generate(model, rows[0][None], use_cache=False)
        for options in (dict(assistant_model=helper), dict(prompt_lookup_num_tokens=3, eos_token_id=V)):
            expect_tokens(generate(model, prompt, **options), greedy, f"{variant} {layers}, assisted")
        expect_tokens(generate(model, prompt, cache_implementation="static"), greedy, f"{variant} {layers}, static")


def test_generation_continues_embeddings():
    model, row = make("diff_v1", "yoco", "sdpa")[0], tokens(1, T)
    found = generate(model, None, inputs_embeds=model.get_input_embeddings()(row))
    assert torch.equal(found, generate(model, row, use_cache=False)[:, T:]), found


@torch.no_grad()
def test_softmax_and_loss_of_half_precision_are_computed_in_float32():
    query, key, value = (torch.randn(1, 2, T, 8, generator=torch.Generator().manual_seed(i)) * 2 for i in range(3))
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    weights = eager_attention(None, query, key, value, None, 1.0)[1]
    scores = query @ key.transpose(2, 3)
    assert torch.equal(weights, scores.float().softmax(-1).bfloat16()) and weights.dtype == torch.bfloat16
    model, row = make("diff_v2", "yoco")[0].bfloat16(), tokens(1, T)
    output = model(row, labels=row)
    wanted = F.cross_entropy(output.logits[0, :-1].float(), row[0, 1:])
    assert output.logits.dtype == torch.bfloat16 and torch.equal(output.loss, wanted), f"{output.loss}, not {wanted}"


def test_the_shared_keys_of_yoco_are_cached_once():
    model = make("diff_v1", "yoco")[0]
    cache = model(tokens(2, T)).past_key_values
    sizes = [0 if layer.get_seq_length() == 0 else layer.keys.shape[2] for layer in cache.layers]
    assert sizes == [4, 4, T, 0], sizes
    model.train().gradient_checkpointing_enable()
    assert model(tokens(2, T), use_cache=True).past_key_values is None, "checkpoints keep a cache"


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"w{PAD}", padding_side="left")


def test_pipelines_generate_for_batches_with_padding():
    model, prompts = make("diff_v2", "yoco", "sdpa")[0], ["w1 w2 w3 w4 w5", "w9", "w7 w8 w3"]
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
    options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    together = [o[0]["generated_text"] for o in pipe(prompts, batch_size=3, **options)]
    for prompt, found in zip(prompts, together):
        ids = torch.tensor([[int(w[1:]) for w in prompt.split()]])
        tokens_alone = generate(model, ids, 8, use_cache=False)[0, ids.shape[1] :].tolist()
        wanted = " ".join(f"w{i}" for i in tokens_alone if i != PAD)  # which the pipeline omits
        assert found.strip() == wanted, f"{prompt}: {found} instead of {wanted}"


def test_sequence_classification_scores_the_last_token_of_each_row():
    model = make("diff_v1", "yoco")[0]
    path = Path(WORK.name) / "classified"
    model.save_pretrained(path)
    opened = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, dtype=torch.float64)
    assert type(opened) is DiffV2ForSequenceClassification, type(opened)
    rows, ids, mask = batch_of([T, 6, 11])
    expect_error(ValueError, "padding token", lambda: opened(ids, attention_mask=mask))
    opened.config.pad_token_id = PAD
    output = opened(ids, attention_mask=mask, labels=torch.tensor([0, 2, 1]))
    base = AutoModel.from_pretrained(path, dtype=torch.float64)
    wanted = torch.stack([opened.score(base(r[None]).last_hidden_state[0, -1]) for r in rows])
    expect_equal(output.logits, wanted, "scores")
    expect_equal(output.loss, F.cross_entropy(wanted, torch.tensor([0, 2, 1])), "loss", 1e-6)


def test_tokens_are_classified_and_answers_found():
    model, logits_of = make("diff_v2", "yoco")
    path = Path(WORK.name) / "heads"
    model.save_pretrained(path)
    ids, open_as = tokens(2, T), lambda auto, **more: auto.from_pretrained(path, dtype=torch.float64, **more).eval()
    states = model.model(ids).last_hidden_state
    tagger, labels = open_as(AutoModelForTokenClassification, num_labels=3), tokens(2, T) % 3
    output = tagger(ids, labels=labels)
    expect_equal(output.logits, tagger.score(states), "scores of tokens")
    expect_equal(output.loss, F.cross_entropy(tagger.score(states).flatten(0, 1), labels.flatten()), "loss", 1e-6)
    reader = open_as(AutoModelForQuestionAnswering)
    output = reader(ids, start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))
    both = torch.stack((output.start_logits, output.end_logits), -1)
    expect_equal(both, reader.qa_outputs(states), "logits of begin and end")
    output.loss.backward()
    names = ["DiffV2ForTokenClassification", "DiffV2ForQuestionAnswering"]
    assert [type(tagger).__name__, type(reader).__name__] == names


ELSEWHERE = """
import sys, torch, transformers
exported, again, V = sys.argv[1], sys.argv[2], int(sys.argv[3])
open_path = lambda path: transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto")
model = open_path(exported)
model.resize_token_embeddings(V + 3, mean_resizing=False)
model.save_pretrained(again)
last = open_path(again)
assert last.config.vocab_size == V + 3 and last.config._attn_implementation == "sdpa" and last.dtype == torch.float64
assert type(last).__module__.startswith("transformers_modules"), type(last).__module__
last.generate(torch.tensor([[V + 1]]), max_new_tokens=2)
transformers.AutoModelForSequenceClassification.from_pretrained(exported, trust_remote_code=True)
torch.save(last(torch.arange(20)[None]).logits.detach()[0, :, :V], again + "/logits.pt")
"""


@pytest.mark.slow
def test_what_is_saved_after_an_export_opens_elsewhere_with_its_code_and_a_larger_vocabulary():
    first, exported, again = (Path(WORK.name) / n for n in ("first", "exported", "again"))
    model, logits_of = make("diff_v2_norm", "mixed")
    model.save_pretrained(first)
    assert export_hub.main([str(first), str(exported)]) == 0
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, exported, again, str(V)], cwd=WORK.name, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (again / "modeling_diffv2.py").exists(), sorted(again.iterdir())
    expect_equal(torch.load(again / "logits.pt"), logits_of(torch.arange(20)), "saved again")


def test_the_trainer_of_the_library_learns_from_padded_batches():
    model = make("diff_v2", "yoco", "sdpa")[0].float()
    rows = [{"input_ids": tokens(n, seed=n)} for n in (T, 6, 11, 9)]
    arguments = transformers.TrainingArguments(
        Path(WORK.name) / "trainer", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, gradient_checkpointing=True, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_strategy="no", prediction_loss_only=False,
    )  # fmt: skip
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    trainer = transformers.Trainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)
    trainer.args.per_device_eval_batch_size = 1
    found, row = trainer.evaluate(rows[:1])["eval_loss"], rows[0]["input_ids"]
    wanted = F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum").item()
    wanted /= T - 1
    assert abs(found - wanted) < 1e-5, f"{found} instead of {wanted}"
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.5, f"loss {before} before, {after} after training"


def test_lora_adapters_train_generate_and_merge():
    from peft import LoraConfig, PeftModel, get_peft_model

    for variant, layers in [("diff_v2", "yoco"), ("diff_v1", "shared")]:
        base, logits_of = make(variant, layers, "sdpa")
        base.set_experts_implementation("batched_mm")  # which does not read adapters: experts become a loop
        config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
        model, row = get_peft_model(base, config), tokens(T)
        expect_equal(model(input_ids=row[None]).logits[0], logits_of(row), "before training")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=row[None], labels=row[None]).loss.backward()
            optimizer.step()
        changed = {n for n, p in model.named_parameters() if p.grad is not None}
        assert changed == {n for n, _ in model.named_parameters() if "lora_" in n}, changed
        model.eval()
        trained, text = model(input_ids=row[None]).logits, generate(model, row[None, :5])
        assert (trained[0] - logits_of(row)).abs().max() > 1e-3, "the adapters learn nothing"
        model.save_pretrained(Path(WORK.name) / "adapters" / variant)
        opened = PeftModel.from_pretrained(make(variant, layers, "sdpa")[0], Path(WORK.name) / "adapters" / variant)
        expect_equal(opened(input_ids=row[None]).logits, trained, "opened again")
        merged = model.merge_and_unload()
        expect_equal(merged(row[None]).logits, trained, "merged")
        assert torch.equal(generate(merged, row[None, :5], use_cache=False), text)


@torch.no_grad()
def test_layers_on_disk_and_automatic_placement_compute_the_same():
    path = Path(WORK.name) / "placed"
    model, logits_of = make("diff_v1", "yoco")
    model.save_pretrained(path)
    parts = ("model.embed_tokens", "model.yoco", "model.norm", "lm_head")
    places = {**dict.fromkeys(parts, "cpu"), **{f"model.layers.{i}": "disk" for i in range(L)}}
    for device_map in (places, "auto"):
        opened = DiffV2ForCausalLM.from_pretrained(
            path, device_map=device_map, offload_folder=Path(WORK.name) / "offload", dtype=torch.float64
        )
        row = tokens(T)
        expect_equal(opened(row[None]).logits[0], logits_of(row), f"device_map {device_map}")
        found = generate(opened, row[None])
        assert torch.equal(found, generate(model, row[None], use_cache=False)), device_map
