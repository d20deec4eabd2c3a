"""
Tests of the exchange between train_diffv2 and the transformers library, in both directions: loss and gradients of every
parameter must agree for the same directory and the same tokens.

  tolerance  relative to the largest element of a tensor. float64 1e-10: order of summation. float32 2e-4: sums of a few
             hundred products, and gradients that are differences of larger numbers.
  requires   PyTorch 2.4, transformers 5.23 and numpy, or later, and train_diffv2 in the root of the repository
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WORK = tempfile.TemporaryDirectory(prefix="diffv2_hub_")

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import LlamaForCausalLM, MinistralForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM
from fixtures import token_shard_bytes, unpack
from make_fixtures import FIXTURES as FIXTURE_FILES
from make_fixtures import SIZES, arrays_of, gradients
from modeling_diffv2 import DiffV2ForCausalLM
from program import read_json, run, run_trainer

HERE = Path(__file__).resolve().parent
EXPORT_HUB = HERE.parent.parent / "scripts/export/export_hub.py"
os.environ.setdefault("TRAIN_DIFFV2", str(HERE.parent.parent / "train_diffv2"))
FIXTURES = Path(WORK.name) / "fixtures"  # a directory for each file


def size_of(name):
    """What the model of a fixture has."""
    return SIZES[name.split(".")[1]]


for fixture in FIXTURE_FILES.iterdir():
    if not size_of(fixture.stem).sparse:  # which the class does not have
        unpack(fixture, FIXTURES / fixture.stem)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}
WORST = {torch.float64: 0.0, torch.float32: 0.0}  # largest difference of a passed comparison
remark = lambda: f"largest differences {WORST[torch.float64]:.1e} in float64, {WORST[torch.float32]:.1e} in float32"
B, T, V = 3, 16, 37  # V: the smallest of the fixtures
BATCH = f"--batch-size {B} --seq-len {T}"


def directory(name):
    path = Path(WORK.name) / name
    path.mkdir(parents=True)
    return path


def config_of(path):
    return read_json(path / "config.json")


def succeed(*arguments):
    done = run_trainer("--threads 2", *arguments).done()
    assert not done.err
    return done.out


def tokens_and_shard():
    tokens, shard = np.random.RandomState(2).randint(0, V, 40 * T + 1), Path(WORK.name) / "tokens.bin"
    if not shard.exists():
        shard.write_bytes(token_shard_bytes(tokens.astype("<u2").tobytes()))
    return tokens, shard


def windows(tokens, batch_size, seq_len):
    """(B,T+1): windows that start every T tokens, whose shifted loss is that of B*T targets."""
    starts = np.arange(batch_size)[:, None] * seq_len
    return torch.from_numpy(np.asarray(tokens, np.int64)[starts + np.arange(seq_len + 1)])


def gradients_of_program(path):
    """`loss` and the gradient of every parameter over the first B*T + 1 tokens"""
    _, shard = tokens_and_shard()
    dump = Path(WORK.name) / "grads.safetensors"
    # without the losses of routers, which the classes do not compute
    routers = "--router-aux 0 --router-z 0" if config_of(path).get("num_local_experts") else ""
    succeed("--init", path, "--dump-grads", dump, "--train-data", shard, BATCH, routers)
    return arrays_of(dump.read_bytes())


def open_model(path, dtype=torch.float32, model_class=AutoModelForCausalLM):
    moe = config_of(path)["model_type"] == "mixtral"
    more = {"experts_implementation": "eager"} if moe else {}  # the default requires widths of 16 bytes
    model, info = model_class.from_pretrained(
        path, trust_remote_code=True, dtype=dtype, output_loading_info=True, **more
    )
    assert not any(info.values()), f"{path}: {info}"
    return model


def same_class(model, wanted):
    """By name: an exported directory has a copy of the code of the class."""
    return type(model).__name__ == wanted.__name__


def class_of(path):
    """Of a fixture, by its name."""
    size = size_of(path.name)
    if not path.name.startswith("baseline.") or size.yoco:
        return DiffV2ForCausalLM
    if size.experts:
        return MixtralForCausalLM
    return Qwen3ForCausalLM if size.qk_norm else MinistralForCausalLM if size.window else LlamaForCausalLM


def gradients_of_model(model, batch=None):
    batch = windows(tokens_and_shard()[0], B, T) if batch is None else batch
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    named = [one for n, p in model.named_parameters() for one in as_written(n, p.grad.numpy())]
    return {"loss": np.array([loss.item()]), **dict(named)}


def as_written(name, grad):
    """(name, gradient) of what a parameter is in a checkpoint: Transformers 5 joins the experts of a Mixtral."""
    moe, joined, part = name.partition("mlp.experts.")
    if not joined:
        return [(name.replace("mlp.gate.weight", "block_sparse_moe.gate.weight"), grad)]
    at = lambda e, w: f"{moe}block_sparse_moe.experts.{e}.{w}.weight"
    if part == "down_proj":
        return [(at(e, "w2"), g) for e, g in enumerate(grad)]
    return [(at(e, w), g) for e, both in enumerate(grad) for w, g in zip(("w1", "w3"), np.split(both, 2))]


def expect_close(found, expected, dtype, what):
    # the bias of a router is a buffer without gradient
    found, expected = (
        {name: array for name, array in arrays.items() if not name.endswith("e_score_correction_bias")}
        for arrays in (found, expected)
    )
    assert sorted(found) == sorted(expected), f"{what}: {sorted(set(found) ^ set(expected))} in one of them only"
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape, f"{what}: {name} has the shape {found[name].shape}"
        assert np.abs(wanted).max() > 0, f"{what}: the gradient of {name} is 0 and would show nothing"
        difference = np.abs(found[name] - wanted).max() / np.abs(wanted).max()
        assert difference <= TOLERANCE[dtype], f"{what}: {name} differs by {difference:.1e}"
        WORST[dtype] = max(WORST[dtype], difference)


def train(name, *arguments):
    """The checkpoint directory of a short run, of which the program may warn that its loss rises."""
    out, shard = directory(f"runs/{name}"), tokens_and_shard()[1]
    run_trainer("--threads 2 --steps 5 --train-data", shard, BATCH, "--out", out, *arguments).done()
    return out / "checkpoints" / "step_00000005"


def expect_evaluated_loss(path, model, what):
    """The program evaluates the loss of the model."""
    tokens, shard = tokens_and_shard()
    out = succeed("--init", path, "--eval --val-data", shard, f"--batch-size 4 --val-steps 5 --seq-len {T}")
    batch = windows(tokens, 20, T)  # the first 4 * 5 windows
    loss = model(input_ids=batch, labels=batch).loss.item()
    assert abs(float(out.split()[2]) - loss) < 1e-5, f"{what}: {loss}, but {out}"


def expect_same_logits(found, wanted, what):
    batch = windows(tokens_and_shard()[0], B, T)
    found, wanted = (m(input_ids=batch, use_cache=False).logits.detach() for m in (found, wanted))
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    assert difference < 1e-5, f"{what}: logits differ by {difference:.1e} after it was written"  # 5 steps of 1e-9


TINY = dict(
    vocab_size=V, hidden_size=32, intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip


def foreign_directory(path, kind, dtype="float32", shards="1GB", fused=False, **changes):
    """Saves a model of a model_type, none of whose gradients is negligible. Returns config.json."""
    if theta := changes.pop("theta", None):
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if kind == "mixtral":
        changes = dict(num_local_experts=4) | changes  # each expert has tokens
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY | changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shards, save_original_format=not fused)
    assert (path / "model.safetensors.index.json").exists() == (shards != "1GB")
    return config_of(path)


@pytest.mark.slow
def test_every_fixture_opens_with_its_loss_and_gradients():
    for path in sorted(FIXTURES.iterdir()):
        arrays = arrays_of((FIXTURE_FILES / f"{path.name}.safetensors").read_bytes())
        T = config_of(path)["max_position_embeddings"]
        batch = windows(arrays["tokens"], len(arrays["tokens"]) // T, T)
        expected = {n.removeprefix("grad."): a for n, a in arrays.items() if n == "loss" or n.startswith("grad.")}
        if size_of(path.name).experts or size_of(path.name).z_loss:  # without the losses of routers and logits
            config = config_of(path)
            weights = {n: torch.from_numpy(arrays[n].astype(np.float64)) for n in expected if n != "loss"}
            found = gradients(config, weights, batch[:, :-1], batch[:, 1:], 0, 0)
            expected = {n: a.detach().numpy() for n, a in found.items()}
        plain = class_of(path) is not DiffV2ForCausalLM  # and computes norms and angles in float32
        model = open_model(path)
        exact = open_model(path, torch.float64, DiffV2ForCausalLM if plain else AutoModelForCausalLM)
        assert type(model) is class_of(path), type(model)
        assert type(exact) is DiffV2ForCausalLM, type(exact)
        expect_close(gradients_of_model(model, batch), expected, torch.float32, path.name)
        expect_close(gradients_of_model(exact, batch), expected, torch.float64, path.name)


@pytest.mark.slow
def test_checkpoints_of_every_variant_open_as_written_with_the_programs_loss_and_gradients():
    for fixture in sorted(FIXTURES.iterdir()):  # no gradient is negligible
        path = train(fixture.name, "--init", fixture)
        model = open_model(path)
        assert type(model) is class_of(fixture), type(model)
        assert model.generation_config.eos_token_id is None, f"token {model.generation_config.eos_token_id} ends a text"
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == config_of(fixture)["tie_word_embeddings"], fixture.name
        expect_close(gradients_of_model(model), gradients_of_program(path), torch.float32, fixture.name)
        expect_evaluated_loss(path, model, fixture.name)
        assert config_of(path)["model_type"] == model.config.model_type, fixture.name
        normed = any(n.endswith("self_attn.q_norm.weight") for n, _ in model.named_parameters())
        assert normed == size_of(fixture.name).qk_norm, f"{fixture.name}: QK-norm {normed}"


OPEN_ELSEWHERE = """
import sys, torch, transformers
for path in sys.argv[1:]:
    moe = '"mixtral"' in open(path + "/config.json").read()
    more = {"experts_implementation": "eager"} if moe else {}  # the default requires widths of 16 bytes
    model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32, **more)
    batch = torch.arange(60).view(3, 20) % 37
    print(repr(model(input_ids=batch, labels=batch).loss.item()), type(model).__name__)
"""


@pytest.mark.slow
def test_exported_directories_open_where_the_code_was_never_imported_and_in_the_program():
    sizes = f"--layers 2 --hidden 24 --heads 7 --kv-heads 1 --head-dim 8 --ffn 20 --vocab {V}"
    odd = train("odd", "--attention baseline", sizes)  # 24 is not a multiple of 7: transformers 5 refuses such a Llama
    paths = sorted(FIXTURES.iterdir()) + [odd]
    exported = []
    for path in paths:
        exported.append(Path(WORK.name) / "exported" / path.name)
        subprocess.run([sys.executable, EXPORT_HUB, path, exported[-1]], check=True)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_ELSEWHERE, *exported], capture_output=True, text=True, cwd=WORK.name
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(paths), done.stdout
    batch = torch.arange(60).view(3, 20) % 37
    for path, out, (loss, name) in zip(paths, exported, lines):
        wanted = DiffV2ForCausalLM if path is odd else class_of(path)
        assert name == wanted.__name__, f"{path.name} is a {name}"
        for model in (
            open_model(path, model_class=DiffV2ForCausalLM if path is odd else AutoModelForCausalLM),
            open_model(out),
        ):  # in this process, which has imported the code
            assert abs(model(input_ids=batch, labels=batch).loss.item() - float(loss)) < 1e-6, path.name
        if path is odd:
            expect_close(gradients_of_model(model), gradients_of_program(out), torch.float32, "odd heads")
    again = subprocess.run([sys.executable, EXPORT_HUB, odd, exported[0]], capture_output=True, text=True)
    assert again.returncode == 1 and again.stderr.count("\n") == 1, "an existing directory was written into"


@pytest.mark.slow
def test_what_transformers_saves_of_our_models_loads_in_the_program():
    for fixture in sorted(FIXTURES.iterdir()):
        path, model = directory(f"saved/{fixture.name}"), open_model(fixture)
        model.save_pretrained(path, max_shard_size="2KB")
        assert (path / "model.safetensors.index.json").exists(), f"{fixture.name} was not saved in shards"
        expect_close(gradients_of_program(path), gradients_of_model(model), torch.float32, fixture.name)


QWEN3_ON_THE_HUB = dict(  # keys of Qwen3-0.6B, whose file also has lm_head.weight
    attention_bias=False, attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645, hidden_act="silu",
    initializer_range=0.02, max_window_layers=28, rope_scaling=None, rope_theta=1000000, sliding_window=None,
    torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True, use_sliding_window=False,
)  # fmt: skip


def store_head(path, head):
    """Adds lm_head.weight to the weights, as a shard of its own if there are shards."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        save_file(load_file(path / "model.safetensors") | {"lm_head.weight": head}, path / "model.safetensors")
        return
    save_file({"lm_head.weight": head}, path / "head.safetensors")
    files = json.loads(index.read_text())
    files["weight_map"]["lm_head.weight"] = "head.safetensors"
    index.write_text(json.dumps(files))


def expect_refusal(path, word):
    out = Path(WORK.name) / "refused.safetensors"
    done = run_trainer("--init", path, "--dump-grads", out, "--train-data", tokens_and_shard()[1], BATCH)
    assert done.status in (1, 2) and not out.exists()
    done.one_line(done.status, word)


def test_qwen3_directories_as_the_hub_has_them_load_with_their_loss_and_gradients():
    for number, (tied, shards) in enumerate([(True, "1GB"), (True, "4KB"), (False, "4KB")]):
        path = directory(f"hub/{number}")
        config = foreign_directory(path, "qwen3", "bfloat16", shards, tie_word_embeddings=tied, theta=1e6)
        for key in ("rope_parameters", "layer_types", "dtype", "pad_token_id"):
            config.pop(key, None)
        (path / "config.json").write_text(json.dumps(config | QWEN3_ON_THE_HUB))
        expected = gradients_of_model(open_model(path))
        if tied:
            head = open_model(path, torch.bfloat16).get_input_embeddings().weight.detach().clone()
            store_head(path, head)
        expect_close(gradients_of_program(path), expected, torch.float32, f"tied {tied}, shards {shards}")
        if tied:
            head[-1, -1] += 1
            store_head(path, head)
            expect_refusal(path, "lm_head.weight differs from the embedding")


def keep_only_head(path):
    """Stores the embedding of a tied model as lm_head.weight alone."""
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def read(kind, written, missing=(), edit={}, head=False, **changes):
    """A row of FOREIGN that the program reads, and writes as another class. missing, edit: keys of config.json."""
    return kind, changes, missing, edit, head, written, None


def refused(kind, words="", missing=(), edit={}, **changes):
    return kind, changes, missing, edit, False, None, words or f'model_type is "{kind}"'


def layers(types):
    return [f"{t}_attention" for t in types.split()]


ROPE = ("rope_parameters", "rope_theta", "rope_scaling")  # in older files theta is at the top, or absent
TIED = dict(tie_word_embeddings=True)
ALL_SLIDING = dict(sliding_window=5, use_sliding_window=True, max_window_layers=0)
SOME = layers("sliding full sliding full")
# Directories that transformers writes, with the defaults of their class where a row says nothing
FOREIGN = [
    read("llama", LlamaForCausalLM, theta=500.0, shards="8KB", **TIED),  # no lm_head in any shard
    read("llama", LlamaForCausalLM, rope_parameters={"rope_type": "linear", "factor": 1.0, "rope_theta": 500.0}),
    read("llama", LlamaForCausalLM, head=True, **TIED),
    read("mistral", MinistralForCausalLM, dtype="bfloat16", sliding_window=5, num_key_value_heads=1, shards="8KB"),
    read("qwen3", Qwen3ForCausalLM, ("layer_types",), **ALL_SLIDING),
    read("mixtral", MixtralForCausalLM, dtype="bfloat16", theta=5e4, **TIED),
    read("mixtral", MixtralForCausalLM, fused=True, dtype="bfloat16", num_local_experts=5, shards="16KB", **TIED),
    refused("llama", 'rope_parameters has factor = 8; supported are rope_type "default"', rope_parameters=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500.0,
        original_max_position_embeddings=32,
    )),
    refused("mixtral", "gate_up_proj has shape [4,40,32]; config.json implies [4,48,32]", fused=True,
            edit=dict(intermediate_size=24)),
    refused("qwen2"),
    # the cases from here on are of a later tier
    read("llama", LlamaForCausalLM, num_key_value_heads=4),
    read("llama", LlamaForCausalLM, dtype="bfloat16", num_key_value_heads=1, head_dim=16, theta=5e5, shards="4KB"),
    read("llama", LlamaForCausalLM, ROPE, dict(rope_theta=500, torch_dtype="float32"), theta=500.0, **TIED),
    read("llama", LlamaForCausalLM, ROPE, dtype="float16", num_attention_heads=2, num_key_value_heads=1, shards="2KB"),
    read("llama", LlamaForCausalLM, ROPE, dict(rope_theta=500, rope_scaling={"type": "linear", "factor": 1.0})),
    refused("llama", "factor = 2", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}),
    refused("llama", '"dynamic"', rope_parameters={"rope_type": "dynamic", "factor": 1.0, "rope_theta": 500.0}),
    refused("llama", "attention_bias is true", attention_bias=True),
    refused("llama", "mlp_bias is true", mlp_bias=True),
    refused("llama", 'hidden_act is "gelu"', hidden_act="gelu"),
    read("mistral", MinistralForCausalLM),  # a window of 4096
    read("mistral", LlamaForCausalLM, sliding_window=None),
    read("mistral", LlamaForCausalLM, ROPE, dict(rope_theta=1e4), head=True, sliding_window=None, **TIED),
    refused("mistral", "the key sliding_window is missing", ("sliding_window",)),
    refused("mistral", "the key num_key_value_heads is missing", ("num_key_value_heads",)),
    refused("mistral", 'model_type is "mistral", which ignores it', edit=dict(layer_types=SOME)),
    read("ministral", MinistralForCausalLM, ("layer_types",), sliding_window=5),
    read("ministral", MinistralForCausalLM, sliding_window=5, layer_types=SOME),
    read("ministral", MinistralForCausalLM, sliding_window=3, layer_types=layers("sliding sliding full sliding")),
    read("ministral", DiffV2ForCausalLM, sliding_window=1),  # its cache is wrong for a window of 1
    read("ministral", MinistralForCausalLM, sliding_window=64),
    read("ministral", LlamaForCausalLM, sliding_window=7, layer_types=layers("full full full full")),
    refused("ministral", "layer 2 does not fit", sliding_window=3, layer_types=layers("sliding full full full")),
    read("qwen3", Qwen3ForCausalLM),
    read("qwen3", Qwen3ForCausalLM, rms_norm_eps=0.02, **TIED),
    read("qwen3", Qwen3ForCausalLM, dtype="bfloat16", num_key_value_heads=1, head_dim=16),
    read("qwen3", Qwen3ForCausalLM, sliding_window=5),  # a window that the switch turns off
    read("qwen3", Qwen3ForCausalLM, **ALL_SLIDING),
    read("qwen3", Qwen3ForCausalLM, ("layer_types",), sliding_window=5, use_sliding_window=True),  # from layer 28
    read("qwen3", Qwen3ForCausalLM, sliding_window=3, use_sliding_window=True, layer_types=SOME),
    read("qwen3", DiffV2ForCausalLM, **ALL_SLIDING | dict(sliding_window=1)),
    refused("qwen3", "attention_bias is true", attention_bias=True),
    read("mixtral", MixtralForCausalLM),
    read("mixtral", MixtralForCausalLM, dtype="bfloat16", num_key_value_heads=1, head_dim=16, shards="8KB"),
    read("mixtral", MixtralForCausalLM, num_local_experts=5, num_experts_per_tok=3, sliding_window=5),
    read("mixtral", MixtralForCausalLM, num_local_experts=2, num_experts_per_tok=1, rms_norm_eps=0.02, shards="4KB"),
    read("mixtral", DiffV2ForCausalLM, sliding_window=1),
    read("mixtral", MixtralForCausalLM, fused=True),
    refused("mixtral", "the key rope_theta is missing", ROPE),
    refused("mixtral", "w1.weight has shape [20,32]", edit=dict(intermediate_size=24)),
    refused("mixtral", "gate.weight has shape [4,32]", fused=True, edit=dict(num_local_experts=8)),
    *map(refused, "cohere diffllama gemma2 glm gpt2 gpt_neox granite olmo2 phi3 qwen3_moe smollm3 starcoder2".split()),
]  # fmt: skip


@pytest.mark.slow(cases_from=10)
@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_directories_of_transformers_are_read_with_their_loss_and_gradients_or_refused(number):
    kind, changes, missing, edit, head, wanted, words = FOREIGN[number]
    path, what = directory(f"foreign/{number}"), f"{kind} {changes} {edit} without {missing}"
    config = foreign_directory(path, kind, **changes)
    config = {k: v for k, v in config.items() if k not in missing} | edit
    (path / "config.json").write_text(json.dumps(config))
    if head:
        keep_only_head(path)
    if words:
        expect_refusal(path, words)
        return
    model = open_model(path)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == changes.get("tie_word_embeddings", False), f"{what}: tied {tied}"
    found, expected = gradients_of_program(path), gradients_of_model(model)
    if wanted is DiffV2ForCausalLM:
        found, expected = ({"loss": g["loss"]} for g in (found, expected))  # one key: no gradients of queries
    if changes.get("num_experts_per_tok") == 1:  # its weight is 1: the router has no gradient
        found, expected = ({n: a for n, a in g.items() if not n.endswith(".gate.weight")} for g in (found, expected))
    expect_close(found, expected, torch.float32, what)
    expect_evaluated_loss(path, model, what)
    again = train(f"foreign/{number}", "--init", path, "--lr 1e-9")  # as the program writes it
    written = open_model(again)
    assert same_class(written, wanted), f"{what}: written as {type(written)}"
    expect_same_logits(written, model.float(), what)


def test_converted_directories_as_the_hub_has_them_keep_the_logits_of_their_model():
    pairs, fused = "--attention diff_v2", dict(fused=True)
    for number, (kind, changes, model) in enumerate([
        ("llama", {}, pairs), ("llama", {}, "--heads 8"), ("qwen3", {}, pairs), ("mixtral", {}, pairs),
        ("mixtral", fused, pairs), ("mistral", dict(tie_word_embeddings=True, sliding_window=5), pairs),
    ]):  # fmt: skip
        path = directory(f"converted/{number}/base")
        out = path.with_name("out")
        foreign_directory(path, kind, **changes)
        if kind == "mistral":
            keep_only_head(path)
        run(sys.executable, HERE.parent.parent / "scripts/export/convert.py", path, model, out).done()
        again = train(f"converted/{number}", "--init", out, "--lr 1e-9")
        expect_same_logits(open_model(again), open_model(path), f"{kind} {changes} with {model}")


# What a model with experts may have beside them: more than one shared expert, dense layers, a bias, windows.
EXPERTS = "--experts 5 --experts-active 2 --expert-ffn 12"
OWN_EXPERTS = [
    "--shared-experts 2",
    "--shared-experts 3 --dense-layers 1 --router-bias --router-bias-rate 0.01",
    "--dense-layers 2 --attention diff_v1 --window 5 --full-every 2",
]


@pytest.mark.slow
def test_models_with_experts_that_the_program_trains_open_with_its_loss_and_gradients():
    # with seed 1 a gradient of lambda is 40 times smaller than in other layers, and mostly rounding error
    sizes = f"--layers 3 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 20 --vocab {V} --seed 2"
    for number, options in enumerate(OWN_EXPERTS):
        path = train(f"experts/{number}", sizes, EXPERTS, options)
        model = open_model(path)
        assert same_class(model, DiffV2ForCausalLM), type(model)
        expect_close(gradients_of_model(model), gradients_of_program(path), torch.float32, f"experts {options}")


@pytest.mark.slow
def test_a_key_that_the_class_has_no_place_for_is_refused_and_not_ignored():
    config = config_of(FIXTURES / "diff_v2.qk_norm_yoco")
    qwen3 = config_of(FIXTURES / "baseline.qk_norm_window")
    for given in (
        {**config, "attention": "diff_v3"},
        {**config, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {**config, "layer_types": ["chunked_attention"] * 4},
        {**qwen3, "use_sliding_window": False},
        {**qwen3, "layer_types": None},
        {**qwen3, "use_qk_norm": False},
    ):
        with pytest.raises(ValueError):
            DiffV2ForCausalLM.config_class(**given)
    weights = {n for n, _ in open_model(FIXTURES / "diff_v2.qk_norm_yoco").named_parameters()}
    plain = DiffV2ForCausalLM(DiffV2ForCausalLM.config_class(**{**config, "use_qk_norm": False}))
    lost = weights - {n for n, _ in plain.named_parameters()}
    assert {n.split(".")[-2] for n in lost} == {"q_norm", "k_norm"}, lost
    assert "model.yoco.k_norm.weight" in lost and "model.layers.2.self_attn.k_norm.weight" not in lost
