"""
Tests of export_hub.py: what it writes opens in the transformers library by itself, with the loss, gradients, tokens and
texts of train_diffv2. test_hub.py opens exported directories of every fixture.

  tolerance  as in test_hub.py. DiffLlama in float64 computes the factor of its noise heads in float32: two exponentials
             of a sum and their difference, each rounded, in every layer; 2^-22 allows for four roundings.
  requires   as test_hub.py
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from test_hub import EXPORT_HUB, FIXTURE_FILES, FIXTURES, HERE, WORK, arrays_of, config_of, directory
from test_hub import expect_close, gradients_of_model, open_model, succeed, windows  # sets the environment

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DiffLlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import export_hub
from fixtures import token_shard_bytes

import token_table

TEXT = (HERE.parent.parent / "README.md").read_text(encoding="utf-8")


def export(source, name, *options):
    """status, stderr, and the directory"""
    out = Path(WORK.name) / "exports" / name
    command = [sys.executable, EXPORT_HUB, source, out, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr, out


def exported(source, name, *options):
    status, error, out = export(source, name, *options)
    assert status == 0, f"{name}: status {status}, {error}"
    return out


def as_diff_v1(gradients, weights, L, D):
    """Gradients of a DiffLlama as those of the diff_v1 that it was written from, by the chain rule of the export."""
    found = dict(gradients)
    for prefix in (f"model.layers.{layer}.self_attn." for layer in range(L)):
        for name in (f"{prefix}{p}_proj.weight" for p in "qkv"):
            heads = found[name].reshape(2, -1, D, found[name].shape[1])  # even heads, odd heads
            found[name] = heads.swapaxes(0, 1).reshape(found[name].shape)
        norm, name = weights[f"{prefix}subln.weight"], f"{prefix}o_proj.weight"
        product = found[name].reshape(-1, len(norm)), weights[name].reshape(-1, len(norm))
        found[f"{prefix}subln.weight"] = (product[0] * product[1]).sum(0)
        found[name] = (product[0] * norm).reshape(found[name].shape)
    return found


def test_diff_v1_is_written_as_a_diffllama_with_its_loss_and_gradients():
    for name in ("diff_v1.odd", "diff_v1.even"):
        arrays = arrays_of((FIXTURE_FILES / f"{name}.safetensors").read_bytes())
        model = open_model(exported(FIXTURES / name, f"llama/{name}", "--as", "diffllama"))
        assert type(model) is DiffLlamaForCausalLM, type(model)
        c = model.config
        batch = windows(arrays["tokens"], len(arrays["tokens"]) // c.max_position_embeddings, c.max_position_embeddings)
        expected = {n.removeprefix("grad."): a for n, a in arrays.items() if n == "loss" or n.startswith("grad.")}
        found = as_diff_v1(gradients_of_model(model, batch), arrays, c.num_hidden_layers, c.head_dim)
        expect_close(found, expected, torch.float32, name)


class RMSNorm64(torch.nn.RMSNorm):
    """In float64: that of DiffLlama computes in float32."""

    def __init__(self, norm):
        super().__init__(len(norm.weight), eps=norm.variance_epsilon, dtype=torch.float64)
        self.weight = norm.weight


def in_float64(model):
    """A DiffLlama whose norms and angles are float64."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__ == "DiffLlamaRMSNorm":
                setattr(module, name, RMSNorm64(norm))
    D, theta = model.config.head_dim, config_of(Path(model.name_or_path))["rope_theta"]

    def angles(x, position_ids):
        half = torch.arange(0, D, 2, dtype=torch.float64) / D
        angle = (position_ids[..., None] * theta**-half).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    model.model.rotary_emb.forward = angles
    return model


def test_a_bf16_diff_v1_loses_nothing_as_a_diffllama():
    config = (FIXTURES / "diff_v1.even" / "config.json").read_text()
    for lambdas, tolerance in ((1, 2**-22), (0, 1e-12)):  # exp(0) is exact in float32
        path = directory(f"half/{lambdas}")  # products of two bf16 numbers are exact in F32
        weights = load_file(FIXTURES / "diff_v1.even" / "model.safetensors")
        weights = {n: w * (lambdas if ".lambda_" in n else 1) for n, w in weights.items()}
        save_file({n: w.to(torch.bfloat16) for n, w in weights.items()}, path / "model.safetensors")
        (path / "config.json").write_text(config)
        out = exported(path, f"half/{lambdas}", "--as", "diffllama")
        wide = {n.split(".")[-2] for n, w in load_file(out / "model.safetensors").items() if w.dtype is torch.float32}
        assert wide == {"o_proj"}, wide
        sdpa = dict(dtype=torch.float64, attn_implementation="sdpa")  # eager: softmax in float32
        model = in_float64(DiffLlamaForCausalLM.from_pretrained(out, **sdpa))
        batch = torch.arange(64).view(2, 32) * 7 % 37
        with torch.no_grad():
            found, expected = model(batch).logits, open_model(path, torch.float64)(input_ids=batch).logits
        difference = float((found - expected).abs().max() / expected.abs().max())
        assert difference < tolerance, f"lambdas times {lambdas}: logits differ by {difference:.1e}"


def test_what_diffllama_does_not_hold_is_refused():
    cases = [
        ("baseline.odd", {}, "requires attention diff_v1, not baseline"),
        ("diff_v2.odd", {}, "requires attention diff_v1, not diff_v2"),
        ("diff_v1.window", {}, "the model has windows"),
        ("diff_v1.odd", {"yoco": True}, "the model has YOCO"),
        ("diff_v1.qk_norm", {"rms_norm_eps": 1e-5}, "the model has QK-norm"),
        ("diff_v1.eps", {}, "rms_norm_eps is 0.02"),
        ("diff_v1.odd", {"num_local_experts": 4}, "the model has experts (num_local_experts is 4)"),
    ]
    for number, (name, changes, word) in enumerate(cases):
        path = directory(f"refused/{number}")
        (path / "model.safetensors").symlink_to(FIXTURES / name / "model.safetensors")
        (path / "config.json").write_text(
            json.dumps(json.loads((FIXTURES / name / "config.json").read_text()) | changes)
        )
        status, error, out = export(path, f"refused/{number}", "--as", "diffllama")
        assert status == 1 and word in error and error.count("\n") == 1 and not out.exists(), (
            f"{word}: {status}, {error}"
        )


def test_a_damaged_checkpoint_and_a_model_that_the_class_does_not_compute_are_not_exported():
    data = (FIXTURES / "diff_v2.odd" / "model.safetensors").read_bytes()
    config = json.loads((FIXTURES / "diff_v2.odd" / "config.json").read_text())
    shape = f'"shape":[{config["vocab_size"]},'
    cases = (
        (data[:-1], {}, f"has {len(data) - 1} bytes, expected {len(data)}: it is truncated or damaged"),
        (data.replace(shape.encode(), f'"shape":[{config["vocab_size"] - 1},'.encode()), {}, "is damaged: "),
        (data[:8] + b"[" * (len(data) - 8), {}, "is not a checkpoint: "),
        (data, {"sparse_blocks": 4}, "no block-sparse attention (sparse_blocks is 4)"),
    )
    for number, (weights, changes, word) in enumerate(cases):
        assert weights != data or changes, word
        path = directory(f"damaged/{number}")
        (path / "model.safetensors").write_bytes(weights)
        (path / "config.json").write_text(json.dumps(config | changes))
        status, error, out = export(path, f"damaged/{number}")
        found = f"{word}: {status}, {error}"
        assert status == 1 and word in error and error.count("\n") == 1 and not out.exists(), found


def run_on_text(name, ids, *options, vocab_size=256, separator=None):
    """The checkpoint of a run that learns a little of a corpus: a text, given as tokens."""
    out, corpus = directory(f"text/{name}"), directory(f"text/{name}/corpus")
    (corpus / "train_000000.bin").write_bytes(token_shard_bytes(np.asarray(ids, "<u2").tobytes()))
    known = None if separator is None else {"token": separator, "place": "before"}
    shards = [{"file": "train_000000.bin", "tokens": len(ids)}]
    description = {"format": 1, "vocab_size": vocab_size, "separator": known, "shards": shards}
    (corpus / "corpus.json").write_text(json.dumps(description))
    sizes = ("--layers", 2, "--hidden", 32, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--ffn", 64)
    data = ("--train-data", corpus, "--seq-len", 64, "--batch-size", 4, "--steps", 60, "--lr", 0.01)
    succeed(*sizes, *data, "--val-every", 0, "--out", out, *options)
    return out / "checkpoints" / "step_00000060"


def expect_texts_of_the_program(checkpoint, out):
    """pipeline() continues texts as train_diffv2 does, from the checkpoint and from the exported directory."""
    pipe = transformers.pipeline("text-generation", str(out), trust_remote_code=True, device="cpu")
    prompts = ["The ", "    scripts/"]
    bos = pipe.tokenizer.bos_token  # of other lengths, with padding
    texts = pipe([bos + p for p in prompts], batch_size=2, max_new_tokens=6, do_sample=False)
    for prompt, [written] in zip(prompts, texts):
        found = written["generated_text"].removeprefix(bos)
        for source in (checkpoint, out):
            text = succeed("--init", source, "--prompt", shlex.quote(prompt), "--generate 6 --temperature 0")
            assert text.rstrip("\n") == found.rstrip("\n"), f"{source.name}: {text!r}, not {found!r}"


def expect_special_tokens(out, tokenizer, id_):
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    written = json.loads((out / "generation_config.json").read_text())
    assert special == (id_,) * 3 == tuple(written[f"{k}_token_id"] for k in ("bos", "eos", "pad")), (special, written)
    assert tokenizer.model_max_length == 64, tokenizer.model_max_length
    model = open_model(out)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == id_
    own = "auto_map" in json.loads((out / "config.json").read_text())
    assert model.config.pad_token_id == (id_ if own else None)  # a Llama would not train the embedding of the token


def test_bytes_are_exact_in_the_exported_tokenizer_and_texts_are_those_of_the_program():
    sources = ((0, "diff_v2", (), None), (10, "baseline", (), 10), (200, "diff_v2", ("--separator", "200:after"), 10))
    for separator, attention, options, of_corpus in sources:
        options = ("--attention", attention, *options)
        checkpoint = run_on_text(f"bytes{separator}", list(TEXT.encode()), *options, separator=of_corpus)
        out = exported(checkpoint, f"bytes{separator}")
        written = json.loads((out / "generation_config.json").read_text())
        assert written["eos_token_id"] == separator, f"{written}, not {separator}"
        tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        # every byte but C0, C1, F5 ..
        text = "".join(map(chr, (*range(0x900), *range(0xFF00, 0x10500)))) + "the end\n\0"
        raw = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert raw == list(text.encode()), f"separator {separator}: a text has other tokens than its bytes"
        assert tokenizer.decode(raw) == text
        if separator < 128:
            found = dict(tokenizer(tokenizer.bos_token + "a"))
            assert found == {"input_ids": [separator, 97], "attention_mask": [1, 1]}, found
            expect_special_tokens(out, tokenizer, separator)
            expect_texts_of_the_program(checkpoint, out)


@pytest.mark.slow
def test_a_tokenizer_json_is_exported_with_its_separator_and_texts_are_those_of_the_program():
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())  # as data/prepare.py --train-bpe
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|begin|>"]
    options = dict(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    bpe.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(**options))
    nothing = tokenizers.processors.ByteLevel(trim_offsets=True)
    begin = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    both = tokenizers.processors.Sequence([nothing, begin])  # as of Llama 3
    for number, own in enumerate((None, nothing, begin, both)):
        place = directory(f"bpe/{number}")
        if own is not None:
            bpe.post_processor = own
        if own is both:
            bpe.enable_truncation(9)
            bpe.enable_padding()
        bpe.save(str(place / "tokenizer.json"))
        bpe.no_truncation()
        bpe.no_padding()
        table = token_table.table_bytes(token_table.read_tokenizer(place / "tokenizer.json"), 0)
        (place / "tokenizer.bin").write_bytes(table)
        ids = bpe.encode(TEXT, add_special_tokens=False).ids
        options = ("--attention", "diff_v2", "--tokenizer", place)
        checkpoint = run_on_text(f"bpe{number}", ids, *options, vocab_size=400)
        out = exported(checkpoint, f"bpe{number}")
        tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        before = AutoTokenizer.from_pretrained(out, trust_remote_code=True, add_bos_token=True)
        assert before("a b")["input_ids"] == [0, *bpe.encode("a b", add_special_tokens=False).ids]
        assert tokenizer(TEXT)["input_ids"] == ids and tokenizer("<|endoftext|>a")["input_ids"][0] == 0
        assert bpe.from_file(str(out / "tokenizer.json")).encode(TEXT).ids == ids, "training has not seen <|begin|>"
        same = (out / "tokenizer.json").read_bytes() == (place / "tokenizer.json").read_bytes()
        assert same == (own in (None, nothing)), "a tokenizer.json is changed without need"
        assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"]  # for llama.cpp's converter
        assert tokenizer.decode(ids) == TEXT
        expect_special_tokens(out, tokenizer, 0)
        expect_texts_of_the_program(checkpoint, out)


def test_a_tokenizer_with_pieces_and_bytes_is_exported_with_the_tokens_and_texts_of_training():
    llama = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    normal, decode = tokenizers.normalizers, tokenizers.decoders  # as of Llama 2
    llama.normalizer = normal.Sequence([normal.Prepend("\u2581"), normal.Replace(" ", "\u2581")])
    parts = [decode.Replace("\u2581", " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    llama.decoder = decode.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    options = dict(vocab_size=500, special_tokens=special + [f"<0x{b:02X}>" for b in range(256)], show_progress=False)
    llama.train_from_iterator(["the end of a run"] * 9, tokenizers.trainers.BpeTrainer(**options))
    config = json.loads(llama.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["content"] in special]
    llama = tokenizers.Tokenizer.from_str(json.dumps(config))
    llama.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    place, size = directory("llama/tokenizer"), llama.get_vocab_size()
    llama.save(str(place / "tokenizer.json"))
    table = token_table.table_bytes(token_table.read_tokenizer(place / "tokenizer.json"), 2)
    (place / "tokenizer.bin").write_bytes(table)
    ids = llama.encode(TEXT, add_special_tokens=False).ids
    for attention in ("baseline", "diff_v2"):
        options = ("--attention", attention, "--tokenizer", place)
        checkpoint = run_on_text(f"llama_{attention}", ids, *options, vocab_size=size)
        out = exported(checkpoint, f"llama_{attention}")
        tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        assert tokenizer(TEXT)["input_ids"] == ids, "training has not seen <s>"
        assert tokenizer.decode(ids) == TEXT
        for source in (checkpoint, out):
            text = succeed("--init", source, "--generate 1 --prompt-tokens", ",".join(map(str, ids[:60])))
            assert text.startswith(tokenizer.decode(ids[:60])), f"{source.name}: {text!r}"


def test_the_card_states_what_the_run_states():
    pattern = Path(WORK.name) / "text/card/corpus/train_*.bin"
    checkpoint = run_on_text("card", list(TEXT.encode()), "--val-data", pattern, "--val-steps", 2, separator=0)
    log, value = checkpoint.parent.parent / "log.jsonl", {"accuracy": 0.5, "accuracy_se": 0.1, "chance": 0.25}
    loss = [json.loads(line)["loss"] for line in log.read_text().splitlines() if '"val"' in line][-1]
    later = {"kind": "val", "step": 61, "loss": 1.0, "windows": 1}  # than the checkpoint
    with log.open("a") as f:
        for record in ({"kind": "choices", "step": 60, "name": "a|b", "examples": 9, **value}, later):
            f.write(json.dumps(record) + "\n")
    card = (exported(checkpoint, "card") / "README.md").read_text()
    run = json.loads((checkpoint.parent.parent / "run.json").read_text())
    for text in (
        f"| parameters | {run['model']['parameters']:,} |",
        "| context | 64 tokens |",
        f"`corpus`: {len(TEXT.encode()):,} tokens |",
        "| trained on | 15,360 tokens in 60 steps |",
        f"{loss:.4f} nats per token (8 windows of `train_*.bin`, step 60)",
        f"diffv2.c {run['version']}, revision {run['revision']}",
        "--lr 0.01",
        "--val-data 'train_*.bin'",
        "license_name: to-be-stated",
    ):
        assert text in card, f"{text} is not in {card}"
    assert str(WORK.name) not in card, card
    parsed = MarkdownIt().enable("table").parse(card)
    cells = [token.children[0].content for token in parsed if token.type == "inline" and token.children]
    assert cells[cells.index("a|b") + 1] == "accuracy 0.500 [0.304, 0.696] of 9 examples (chance 0.250)", cells
    alone = directory("alone")
    for name in ("config.json", "model.safetensors"):
        (alone / name).symlink_to(checkpoint / name)
    assert "| context | 64 tokens |" in (exported(alone, "alone") / "README.md").read_text()


@pytest.mark.slow
def test_the_lines_of_the_description_and_of_the_card_run_as_they_are_and_ask_nothing():
    checkpoint = Path(WORK.name) / "text/card/checkpoints/step_00000060"
    out = exported(checkpoint, "OUT")
    block = lambda text, begin: "\n".join(
        line[4:] for line in text[text.index(begin) :].splitlines()[1:] if not line or line.startswith("    ")
    )
    described = (HERE / "README.md").read_text().partition("Without `trust_remote_code`")[0]
    lines = block(described, "Then, with transformers and peft"), block((out / "README.md").read_text(), "| license |")
    code = "\n".join(lines).partition("train_diffv2")[0].replace("DIRECTORY", "OUT")
    assert "AutoTokenizer" in code and "bos_token" in code, code
    more = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "cwd": out.parent}
    done = subprocess.run([sys.executable, "-c", code], **more)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "trust_remote_code" not in said, said


class Served:
    """The instance of attention that vLLM and SGLang make of the configuration for a layer: it takes rows of tokens
    [T, heads * D] of NH query heads and NKV keys and values, and keeps what is stored for a position."""

    def __init__(self, config, layer):
        self.NH, self.NKV, self.D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.stored = None

    def forward(self, query, key, value, scaling):
        T, widths = len(query), [t.shape[1] // self.D for t in (query, key, value)]
        assert widths == [self.NH, self.NKV, self.NKV], f"heads {widths}, not {self.NH}, {self.NKV}, {self.NKV}"
        assert self.stored is None or all(map(torch.equal, self.stored, (key, value))), "another key is stored"
        self.stored = key, value
        q, k, v = (t.view(T, -1, self.D).transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(self.NH // self.NKV, 0) for t in (k, v))
        past = torch.arange(T)[:, None] - torch.arange(T)
        seen = (past >= 0) & (past < (self.window or T))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        return out.transpose(0, 1).reshape(T, -1)


def served(module, query, key, value, attention_mask, scaling, attention_instances, **unused):
    """As in vLLM and SGLang, which ignore sinks: unknown arguments."""
    rows = (t.transpose(1, 2).reshape(t.shape[2], -1) for t in (query, key, value))
    return attention_instances[module.layer_idx].forward(*rows, scaling), None


def test_vllm_and_sglang_get_what_their_attention_takes():
    ALL_ATTENTION_FUNCTIONS["served"] = served
    tokens, refused = torch.arange(40)[None] * 7 % 37, []
    chosen = ("odd", "window_full", "yoco", "qk_norm", "qk_norm_yoco")
    for path in sorted(p for p in FIXTURES.iterdir() if p.name.endswith(tuple(f".{size}" for size in chosen))):
        if "attention" not in config_of(path):
            continue  # a class of the library
        model = open_model(path, torch.float64)
        c, run = model.config, {"input_ids": tokens, "position_ids": torch.arange(40)[None], "use_cache": False}
        with torch.no_grad():
            expected = model(**run).logits
            model.set_attn_implementation("served")
            instances = {layer: Served(c, layer) for layer in range(c.num_hidden_layers)}
            try:
                found = model(**run, attention_instances=instances, return_dict=False)[0]
            except ValueError as error:
                refused.append(c.attention)
                assert f"cannot run attention {c.attention}" in str(error), error
            else:
                difference = float((found - expected).abs().max() / expected.abs().max())
                assert difference < 1e-12, f"{path.name}: logits differ by {difference:.1e}"
    others = {"diff_v1", "diff_v1_no_norm", "diff_scalar", "diff_grouped_2", "diff_grouped_4", "diff_v2_cross_group"}
    others |= {"sink", "off_by_one"}
    assert set(refused) == others, refused


def test_a_llama_that_transformers_5_refuses_is_written_as_a_diffv2():
    config = config_of(FIXTURES / "baseline.odd")
    assert export_hub.exported_config(config, False) == config
    found = export_hub.exported_config({**config, "hidden_size": 24, "num_attention_heads": 7}, False)
    assert found["attention"] == "baseline" and found["model_type"] == "diffv2" and "auto_map" in found, found


def test_the_text_of_the_separator_is_that_of_its_id_in_the_library():
    place = directory("renumbered")
    tokenizer = export_hub.byte_tokenizer(None)
    tokenizer["added_tokens"] = [export_hub.special_token(id_, text) for id_, text in ((300, "<a>"), (256, "<b>"))]
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    _, settings = export_hub.exported_tokenizer(place, config_of(FIXTURES / "diff_v2.odd"), None, 256)
    library = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    assert settings["bos_token"] == library.id_to_token(256) == "<a>"


def test_an_unknown_separator_is_reported_and_a_given_one_used():
    status, error, out = export(FIXTURES / "diff_v2.odd", "unknown")
    assert status == 0 and "--separator ID" in error and not (out / "generation_config.json").exists(), error
    assert "has no tokenizer.json" in error and not (out / "tokenizer_config.json").exists(), error
    out = exported(FIXTURES / "diff_v2.odd", "given", "--separator", 3)
    assert open_model(out).generation_config.eos_token_id == 3
    status, error, out = export(FIXTURES / "diff_v2.odd", "outside", "--separator", 37)
    assert status == 1 and "vocabulary of 37" in error and not out.exists(), f"{status}, {error}"
