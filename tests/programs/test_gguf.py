"""Files of dev/reference/export_gguf.py, and of llama.cpp's converter, in llama.cpp, as the xllamacpp wheel has it."""

import json
import re
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from program import FAILED, ROOT, checkpoint, program, run, run_trainer, tensors
from python_environment import locked

xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp has a wheel for x86-64 only")

SHAPE = "--layers 2 --hidden 48 --heads 4 --kv-heads 2 --head-dim 16 --ffn 96 --seq-len 64"  # C is not NH D
TRAINING = f"{SHAPE} --batch-size 4 --lr 0.01 --threads 1"
EXPERTS = "--experts 4 --experts-active 2 --expert-ffn 32"
MODELS = {
    "llama": "",
    "llama, untied": "--no-tie-embeddings",
    "qwen3": "--qk-norm",
    "granite_swa": "--window 12 --full-every 2",
    "granite_swa, all layers": "--window 20",
    "llama, experts": EXPERTS,
    "granite_swa, experts": f"{EXPERTS} --window 16",
    "qwen3moe": f"{EXPERTS} --qk-norm",
}
OF_CONVERTER = {"llama": "", "qwen3": "--qk-norm", "llama, experts": EXPERTS}
T, LENGTH, NEW = 64, 38, 20  # context; characters of prompts, beyond the windows; tokens that continue them
PROMPTS = [(ROOT / "docs/training.md").read_text().replace("\n", " ")[at : at + LENGTH] for at in (0, 3000, 6100)]
LLAMA_CPP = """
import json, sys, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.n_ctx, p.warmup, p.n_parallel, p.cpuparams.n_threads = sys.argv[1], 256, False, 1, 1
p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
p.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
server, tokens, *prompts = xllamacpp.Server(p), *map(json.loads, sys.argv[2:])
for prompt, count in [(tokens, 1)] + [(text, int(NEW)) for text in prompts]:
    answer = server.handle_completions({"prompt": prompt, "n_predict": count, "temperature": 0, "logprobs": 8})
    print(json.dumps(answer["choices"][0]))
"""
BACKEND = f"""
import pathlib
def prepare_metadata_for_build_wheel(directory, *unused):
    (place := pathlib.Path(directory, "xllamacpp.dist-info")).mkdir()
    text = "Metadata-Version: 2.1\\nName: xllamacpp\\nVersion: {xllamacpp.__version__}\\n"
    (place / "METADATA").write_text(text)
    return place.name
"""
TEXTS = [ROOT / f"docs/{name}.md" for name in ("training", "options", "lab", "gpu")]


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """Documentation as bytes."""
    directory = tmp_path_factory.mktemp("gguf") / "bytes"
    run(*program("TEXT_TO_SHARDS", "./text_to_shards"), "--out", directory, *TEXTS).done()
    return directory


@pytest.fixture(scope="module")
def of_bpe(tmp_path_factory):
    """Documentation as tokens of a BPE."""
    directory = tmp_path_factory.mktemp("gguf") / "bpe"
    run(ROOT / "data/prepare.py", *TEXTS, "--train-bpe 400 --out", directory).done()
    return directory


@pytest.fixture(scope="module")
def of_gpt2(tmp_path_factory):
    """Documentation as tokens of GPT-2."""
    directory = tmp_path_factory.mktemp("gguf") / "gpt2"
    run(ROOT / "data/prepare.py", *TEXTS, "--tokenizer gpt2 --out", directory).done()
    return directory


def download(place):
    pinned = re.search(r"^xllamacpp==(.*\\\n)+.*", (ROOT / "tests/requirements.txt").read_text(), re.M)[0]
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        work = Path(name)
        (work / "pinned.txt").write_text(pinned)
        (work / "setuptools").mkdir()  # the package's build backend, which tells pip its name: builds nothing
        (work / "setuptools/__init__.py").touch()
        (work / "setuptools/build_meta.py").write_text(BACKEND)
        pip = "-m pip download --require-hashes --quiet --no-deps --no-build-isolation --no-binary :all:"
        run(sys.executable, pip, "-d", work, "-r", work / "pinned.txt", env={"PYTHONPATH": name}).done()
        with tarfile.open(work / f"{place.name}.tar.gz") as file:
            wanted = re.compile(r"[^/]+/thirdparty/llama\.cpp/(conversion/|gguf-py/|convert_hf_to_gguf\.py)")
            file.extractall(work, [m for m in file if wanted.match(m.name)])
        (work / place.name).rename(place)


@pytest.fixture(scope="module")
def converter():
    """The command of llama.cpp's converter, from the source distribution of the wheel; its hash is pinned with it."""
    place = ROOT / f"build/xllamacpp-{xllamacpp.__version__}"
    with locked(place):
        if not place.exists():
            download(place)
    found = run("python3", ROOT / "scripts/python_environment.py", "hub")
    if found.status:
        pytest.skip(found.err.splitlines()[-1])
    return found.out.strip(), place / "thirdparty/llama.cpp/convert_hf_to_gguf.py"


def trained(place, corpus, options, steps):
    options = options if "--attention" in options else f"--attention baseline {options}"
    run_trainer("--train-data", corpus, TRAINING, options, "--steps", steps, "--out", place).done()
    return checkpoint(place, steps)


def export(*arguments):
    return run(sys.executable, ROOT / "dev/reference/export_gguf.py", *arguments)


def continued(checkpoint, prompt):
    options = "--prompt", shlex.quote(prompt), "--generate", NEW, "--temperature 0"
    text = run_trainer("--init", checkpoint, *options).done().out
    assert text.startswith(prompt), text
    return text[len(prompt) :].removesuffix("\n")


def log_probabilities(checkpoint, corpus, place):
    """Tokens, and the log-probabilities of all that may follow them."""
    shard = min(corpus.glob("train_*.bin"))
    data = "--train-data", shard, "--batch-size 1 --seq-len", T, "--dump-activations", place / "activations"
    run_trainer("--init", checkpoint, "--threads 1", *data).done()
    logits = tensors(place / "activations")["logits"][T - 2].astype(np.float64)
    tokens = np.fromfile(shard, "<u2", T - 1, offset=1024)  # the context has room for one more
    return tokens.tolist(), logits - np.log(np.exp(logits).sum())


def expect_texts(place, corpus, options, steps):
    saved = trained(place / "run", corpus, options, steps)
    export(saved, place / "model.gguf").done()
    expect_same(place, corpus, saved)


def expect_same(place, corpus, saved):
    """llama.cpp has the probabilities of train_diffv2, and continues the prompts as it does."""
    tokens, expected = log_probabilities(saved, corpus, place)
    words = [LLAMA_CPP.replace("NEW", str(NEW)), str(place / "model.gguf"), *map(json.dumps, (tokens, *PROMPTS))]
    first, *others = map(json.loads, run(sys.executable, "-c", *map(shlex.quote, words)).done().out.splitlines())
    found = {one["id"]: one["logprob"] for one in first["logprobs"]["content"][0]["top_logprobs"]}
    errors = [value - expected[token] for token, value in found.items()]
    of_sum = len(expected) * 2**-24  # llama.cpp adds exponentials of all tokens as floats: an error that is the same
    assert max(errors) - min(errors) < 2e-5 and max(map(abs, errors)) < 2e-5 + of_sum, errors
    assert [answer["text"] for answer in others] == [continued(saved, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("steps", [150, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_texts(of_bytes, tmp_path, name, steps):
    """llama.cpp continues texts as the program does, whatever it calls the model"""
    expect_texts(tmp_path, of_bytes, MODELS[name], steps)
    assert name.partition(",")[0].encode() in (tmp_path / "model.gguf").read_bytes()[:200]


def test_texts_of_bpe(of_bpe, tmp_path):
    """llama.cpp splits and continues texts of a BPE as the program does"""
    expect_texts(tmp_path, of_bpe, "", 150)


def convert(converter, saved, place):
    run(sys.executable, ROOT / "dev/reference/export_hub.py", saved, place / "hub").done()
    (place / "sentencepiece.py").write_text("SentencePieceProcessor = None")  # is imported for every tokenizer
    more = {"PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run(*converter, place / "hub", "--outtype f32 --outfile", place / "model.gguf", env=more)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_CONVERTER)
def test_converted(of_gpt2, converter, tmp_path, name):
    """llama.cpp continues texts as the program does, after its own converter"""
    saved = trained(tmp_path / "run", of_gpt2, OF_CONVERTER[name], 250)
    convert(converter, saved, tmp_path).done()
    expect_same(tmp_path, of_gpt2, saved)
    assert name.partition(",")[0].encode() in (tmp_path / "model.gguf").read_bytes()[:200]


@pytest.mark.slow
def test_not_converted(of_gpt2, of_bpe, converter, tmp_path):
    """llama.cpp's converter refuses windows, other attention and own tokenizers"""
    cases = (
        (of_gpt2, "--window 12", "MinistralForCausalLM is not supported"),
        (of_gpt2, "--attention diff_v2", "DiffV2ForCausalLM is not supported"),
        (of_bpe, "", "BPE pre-tokenizer was not recognized"),
    )
    for number, (corpus, options, words) in enumerate(cases):
        place = tmp_path / f"{number}"
        result = convert(converter, trained(place / "run", corpus, options, 1), place)
        assert result.status and words in result.err and not (place / "model.gguf").exists(), result


def test_refused(of_bytes, tmp_path):
    """a model that llama.cpp does not compute is refused with one line, and so is a file that is there"""
    file = tmp_path / "model.gguf"
    cases = (
        ("--attention diff_v2", "llama.cpp has no attention diff_v2"),
        ("--attention sink", "llama.cpp has no attention sink"),
        ("--window 12 --qk-norm", "windows together with QK-norm"),
        ("--yoco --window 12", "YOCO"),
        (f"{EXPERTS} --shared-experts 1", "shared experts"),
        (f"{EXPERTS} --router-bias", "a bias of the router"),
    )
    for number, (options, words) in enumerate(cases):
        export(trained(tmp_path / f"{number}", of_bytes, options, 1), file).one_line(FAILED, words)
    saved = trained(tmp_path / "run", of_bytes, "", 1)
    export(saved, file, "--separator 256").one_line(FAILED, "the separator is 256")
    export(tmp_path, file).one_line(FAILED, "config.json")
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    other = {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}, "model": model}
    (saved / "tokenizer.json").write_text(json.dumps(other))
    export(saved, file).one_line(FAILED, "splits text otherwise than GPT-2")
    other = {"pre_tokenizer": {"type": "ByteLevel"}, "model": {**model, "vocab": {"a": 300}}}
    (saved / "tokenizer.json").write_text(json.dumps(other))
    export(saved, file).one_line(FAILED, "has token 300; the model has a vocabulary of 256")
    (saved / "tokenizer.json").unlink()
    assert not file.exists()
    file.touch()
    export(saved, file).one_line(FAILED, "File exists")


def test_damaged(of_bytes, tmp_path):
    """a checkpoint that is truncated, or of a model that the class of the Hub does not compute, is not exported"""
    saved, hub = trained(tmp_path / "run", of_bytes, "", 1), ROOT / "dev/reference/export_hub.py"
    data = (saved / "model.safetensors").read_bytes()
    as_hub = lambda place, *options: run(sys.executable, hub, place, tmp_path / "out", *options)
    for damaged, words in (
        (data[:-1], f"has {len(data) - 1} bytes, expected {len(data)}: it is truncated or damaged"),
        (data.replace(b'"shape":[256,48]', b'"shape":[255,48]', 1), "is damaged: "),
        (data[:8] + b"[" * (len(data) - 8), "is not a checkpoint: "),
    ):
        assert damaged != data
        (saved / "model.safetensors").write_bytes(damaged)
        as_hub(saved).one_line(FAILED, words)
        export(saved, tmp_path / "out").one_line(FAILED, words)
    sparse = json.loads((saved / "config.json").read_text()) | {"sparse_blocks": 4}
    (saved / "config.json").write_text(json.dumps(sparse))
    as_hub(saved).one_line(FAILED, "no block-sparse attention (sparse_blocks is 4)")
    saved = trained(tmp_path / "diff", of_bytes, f"--attention diff_v1 {EXPERTS}", 1)
    as_hub(saved, "--as diffllama").one_line(FAILED, "the model has experts (num_local_experts is 4)")
    assert not (tmp_path / "out").exists()
