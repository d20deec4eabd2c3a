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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MinistralConfig, MinistralForCausalLM
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM
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


def save(model, path, dtype="float32", shards="1GB"):
    """Saves a model, none of whose gradients is negligible. Returns config.json."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shards)
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


# Llama directories that transformers writes.
LLAMAS = [
    # dtype      tied   NH NKV  D theta     shards    rope_theta is   why
    ("float32", False, 4, 4, 8, 10000.0, "1GB", "as saved"),  # the plainest
    ("float32", True, 4, 2, 8, 500.0, "8KB", "as saved"),  # no lm_head in any shard
    ("bfloat16", False, 4, 1, 16, 5e5, "4KB", "as saved"),  # NH*D is not C
    ("bfloat16", True, 8, 2, 32, 500.0, "1GB", "at the top"),
    ("float16", False, 4, 2, 16, 500.0, "8KB", "at the top"),
    ("float16", True, 2, 1, 8, 10000.0, "2KB", "absent"),  # older files leave the default out
]


def llama_directory(path, dtype="float32", tied=False, NH=4, NKV=2, D=8, theta=500.0, shards="1GB", **more):
    """A model of the class, which transformers saves. Returns config.json."""
    heads = dict(num_hidden_layers=2, num_attention_heads=NH, num_key_value_heads=NKV, head_dim=D)
    config = LlamaConfig(**{**MINISTRAL, **heads, "rope_theta": theta, "tie_word_embeddings": tied, **more})
    return save(LlamaForCausalLM(config), path, dtype, shards)


@pytest.mark.slow
def test_llama_directories_of_transformers_load_as_baseline_with_its_loss_and_gradients():
    for number, (*case, place) in enumerate(LLAMAS):
        path = directory(f"llama/{number}")
        config = llama_directory(path, *case)
        if place != "as saved":
            for key in ("rope_parameters", "rope_theta", "rope_scaling"):
                config.pop(key, None)
            if place == "at the top":
                config.update(rope_theta=case[5], torch_dtype=config.pop("dtype"))
            (path / "config.json").write_text(json.dumps(config))
        expected = gradients_of_model(open_model(path))
        expect_close(gradients_of_program(path), expected, torch.float32, f"Llama {case} {place}")


# What the class does: a window of 1, with which its cache is wrong. tests/config_json.h has what is refused.
@pytest.mark.slow
def test_windows_of_ministral_are_those_of_the_program():
    model = MinistralForCausalLM(MinistralConfig(**MINISTRAL, sliding_window=3))
    assert model.config.layer_types == ["sliding_attention"] * 4, "without layer_types, all layers have the window"
    for number, (window, types) in enumerate(WINDOWS):
        path = directory(f"ministral/{number}")
        types = types and [f"{t}_attention" for t in types]
        config = MinistralConfig(**MINISTRAL, sliding_window=window, layer_types=types)
        config = save(MinistralForCausalLM(config), path)
        if types is None:
            del config["layer_types"]  # as older files
            (path / "config.json").write_text(json.dumps(config))
        expected = gradients_of_model(open_model(path))
        found = gradients_of_program(path)
        if window == 1:  # one key: queries and keys have no gradient
            found, expected = ({"loss": g["loss"]} for g in (found, expected))
        expect_close(found, expected, torch.float32, f"Ministral {window} {types}")
        again = train(f"ministral/{number}", "--init", path, "--lr 1e-9")  # as the program writes it
        full = types == ["full_attention"] * 4  # then no layer has a window
        wanted = DiffV2ForCausalLM if window == 1 else LlamaForCausalLM if full else MinistralForCausalLM
        assert same_class(open_model(again), wanted), f"window {window}: written as {type(open_model(again))}"


MINISTRAL = dict(
    vocab_size=V, hidden_size=32, intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
SOME_FULL = ["sliding_attention", "full_attention"] * 2
WINDOWS = [  # layer_types as the class, or an older file, has them
    (5, None),
    (5, ["sliding", "full", "sliding", "full"]),
    (3, ["sliding", "sliding", "full", "sliding"]),
    (1, None),
    (64, None),
    (7, ["full"] * 4),
]


# What the class does: a window only with use_sliding_window, in the layers of layer_types, or else in those from
# max_window_layers.
ALL_SLIDING = dict(sliding_window=5, use_sliding_window=True, max_window_layers=0)
QWEN3S = [  # dtype, what the configuration has, what is left out of the file, the class that the program writes
    ("float32", dict(), (), Qwen3ForCausalLM),
    ("float32", dict(tie_word_embeddings=True, rms_norm_eps=0.02), (), Qwen3ForCausalLM),
    ("bfloat16", dict(num_key_value_heads=1, head_dim=16), (), Qwen3ForCausalLM),
    ("float32", dict(sliding_window=5), (), Qwen3ForCausalLM),  # a window that the switch turns off
    ("float32", ALL_SLIDING, (), Qwen3ForCausalLM),
    ("float32", ALL_SLIDING, ("layer_types",), Qwen3ForCausalLM),
    ("float32", dict(sliding_window=5, use_sliding_window=True), ("layer_types",), Qwen3ForCausalLM),  # from layer 28
    ("float32", dict(sliding_window=3, use_sliding_window=True, layer_types=SOME_FULL), (), Qwen3ForCausalLM),
    ("float32", dict(sliding_window=1, use_sliding_window=True, max_window_layers=0), (), DiffV2ForCausalLM),
]


def qwen3_directory(path, dtype="float32", shards="1GB", **changes):
    """A model of the class, which transformers saves. Returns config.json."""
    model = Qwen3ForCausalLM(Qwen3Config(**{**MINISTRAL, "rms_norm_eps": 1e-5, **changes}))
    return save(model, path, dtype, shards)


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
        config = qwen3_directory(path, "bfloat16", shards, tie_word_embeddings=tied, rope_theta=1e6)
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


@pytest.mark.slow
def test_qwen3_directories_of_transformers_load_as_baseline_with_qk_norm_and_are_written_as_such():
    for number, (dtype, changes, missing, wanted) in enumerate(QWEN3S):
        path = directory(f"qwen3/{number}")
        config = qwen3_directory(path, dtype, **changes)
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in missing}))
        what, model = f"Qwen3 {changes} without {missing}", open_model(path)
        assert type(model) is Qwen3ForCausalLM, type(model)
        found, expected = gradients_of_program(path), gradients_of_model(model)
        if changes.get("sliding_window") == 1 and changes.get("use_sliding_window"):
            found, expected = ({"loss": g["loss"]} for g in (found, expected))  # one key: no gradients of queries
        expect_close(found, expected, torch.float32, what)
        again = train(f"qwen3/{number}", "--init", path, "--lr 1e-9")
        written = open_model(again)
        assert same_class(written, wanted), f"{what}: written as {type(written)}"
        expect_same_logits(written, model.float(), what)


# Mixtral directories that transformers writes. No window by default; theta 1e6 and rms_norm_eps 1e-5, unlike a Llama.
MIXTRALS = [  # dtype, what the configuration has, size of the shards, the class that the program writes
    ("float32", dict(), "1GB", MixtralForCausalLM),
    ("bfloat16", dict(tie_word_embeddings=True, rope_theta=5e4), "1GB", MixtralForCausalLM),
    ("bfloat16", dict(num_key_value_heads=1, head_dim=16, sliding_window=None), "8KB", MixtralForCausalLM),
    ("float32", dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=5), "1GB", MixtralForCausalLM),
    ("float32", dict(num_local_experts=2, num_experts_per_tok=1, rms_norm_eps=0.02), "4KB", MixtralForCausalLM),
    ("float32", dict(sliding_window=1), "1GB", DiffV2ForCausalLM),
]


def mixtral_directory(path, dtype="float32", shards="1GB", **changes):
    """A model of the class, which transformers saves. Returns config.json."""
    theta = changes.pop("rope_theta", None)
    rope = {} if theta is None else {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    model = MixtralForCausalLM(MixtralConfig(**{**MINISTRAL, "num_local_experts": 4, **changes, **rope}))
    written = save(model, path, dtype, shards)
    found = written.get("rope_parameters", written)["rope_theta"]
    assert found == (theta or 1e6), f"rope_theta is {found}, not {theta}"
    return written


@pytest.mark.slow
def test_mixtral_directories_of_transformers_load_with_their_loss_and_gradients_and_are_written_as_such():
    for number, (dtype, changes, shards, wanted) in enumerate(MIXTRALS):
        path = directory(f"mixtral/{number}")
        mixtral_directory(path, dtype, shards, **changes)
        what, model = f"Mixtral {changes}", open_model(path)
        assert type(model) is MixtralForCausalLM, type(model)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == bool(changes.get("tie_word_embeddings")), f"{what}: tied {tied}"
        found, expected = gradients_of_program(path), gradients_of_model(model)
        if changes.get("sliding_window") == 1:
            found, expected = ({"loss": g["loss"]} for g in (found, expected))  # one key: no gradients of queries
        if changes.get("num_experts_per_tok") == 1:  # its weight is 1: the router has no gradient
            routed = [{n: a for n, a in g.items() if not n.endswith(".gate.weight")} for g in (found, expected)]
            found, expected = routed
        expect_close(found, expected, torch.float32, what)
        expect_evaluated_loss(path, model, what)
        again = train(f"mixtral/{number}", "--init", path, "--lr 1e-9")
        written = open_model(again)
        assert same_class(written, wanted), f"{what}: written as {type(written)}"
        expect_same_logits(written, model, what)


def test_converted_directories_as_the_hub_has_them_keep_the_logits_of_their_model():
    pairs, twice = "--attention diff_v2", "--heads 8"
    cases = ((llama_directory, pairs), (llama_directory, twice), (qwen3_directory, pairs), (mixtral_directory, pairs))
    for number, (write, model) in enumerate(cases):
        path = directory(f"converted/{number}/base")
        out = path.with_name("out")
        write(path)
        run(sys.executable, HERE.parent.parent / "scripts/export/convert.py", path, model, out).done()
        again = train(f"converted/{number}", "--init", out, "--lr 1e-9")
        expect_same_logits(open_model(again), open_model(path), f"{write.__name__} with {model}")


# What a model with experts may have beside them: more than one shared expert, dense layers, a bias, windows.
EXPERTS = "--experts 5 --experts-active 2 --expert-ffn 12"
OWN_EXPERTS = [
    "--shared-experts 2",
    "--shared-experts 3 --dense-layers 1 --router-bias --router-bias-rate 0.01",
    "--dense-layers 2 --attention diff_v1 --window 5 --full-every 2",
]


@pytest.mark.slow
def test_models_with_experts_that_the_program_trains_open_with_its_loss_and_gradients():
    sizes = f"--layers 3 --hidden 24 --heads 4 --kv-heads 2 --head-dim 8 --ffn 20 --vocab {V}"
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
