"""Compares `text_to_shards --bpe` with the `tokenizers` library and token_table.py."""

import filecmp
import json
import os
import random
from pathlib import Path

import pytest
import shards
import token_table
from test_tokenizer import SPACES, WORDS, filter_in_c, strings, train_bpe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from program import SHAPE, read_json, read_table, run

ROOT = Path(__file__).resolve().parent.parent

CONVERTER = Path(os.environ.get("TEXT_TO_SHARDS", ROOT / "build/text_to_shards")).resolve()
TRAINER = Path(os.environ.get("TRAIN_DIFFV2", ROOT / "build/train_diffv2")).resolve()
SEPARATOR = "<|endoftext|>"


def library(size, documents):
    """As train_bpe of prepare.py."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return train_bpe(tokenizer, size, documents, [SEPARATOR])


def convert(directory, size, documents, *options):
    """The corpus of documents (text or bytes), each in a file, without validation. Named files may have NUL bytes."""
    out, files = directory / "out", []
    for number, text in enumerate(documents):
        files.append(directory / f"{number:06d}")
        files[-1].write_bytes(text.encode() if isinstance(text, str) else text)
    run(CONVERTER, "--force --val-tokens 0 --out", out, f"--bpe {size}", *options, *files).done()
    return out


def documents_of(out):
    """The tokens of each document."""
    tokens = [token for path in sorted(out.glob("train_*.bin")) for token in shards.open_shard(path).tolist()]
    begins = [i for i, token in enumerate(tokens) if token == 0] + [len(tokens)]
    assert begins[0] == 0
    return [tokens[begin + 1 : end] for begin, end in zip(begins, begins[1:])]


def languages():
    rng = random.Random(1)
    for _ in range(40):
        yield "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(300))
    yield f"a {SEPARATOR}b {SEPARATOR}{SEPARATOR} <|endoftext| "
    for text in strings(80):
        yield text[:1000] or "."  # pieces of more than 1024 bytes are counted in parts


def sources():
    yield (ROOT / "train_diffv2.c").read_text(encoding="utf-8")
    yield (ROOT / "data/prepare.py").read_text(encoding="utf-8")


def two_letters(seed):
    """Words over two letters have many ties, and runs that overlap themselves."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 40))) for _ in range(rng.choice([20, 300]))]
    yield " ".join(rng.choice(words) for _ in range(rng.choice([30, 1000])))


def different_counts():
    for k in range(26):
        yield " ".join([chr(ord("a") + k) + chr(ord("A") + k)] * (100 + k))


TEXTS = {
    "languages": (1500, languages),
    "sources": (4000, sources),
    "different counts": (512, different_counts),
    **{f"two letters {seed}": (512 + 100 * seed, lambda seed=seed: two_letters(seed)) for seed in range(4)},
}


@pytest.mark.parametrize("name", TEXTS)
def test_merges_and_tokens_are_those_of_the_library(name, tmp_path):
    size, documents = TEXTS[name][0], list(TEXTS[name][1]())
    out = convert(tmp_path, size, documents)
    trained = library(size, documents)
    mine, theirs = read_json(out / "tokenizer.json"), json.loads(trained.to_str())
    merges = list(zip(mine["model"]["merges"], theirs["model"]["merges"]))
    assert not [pair for pair in enumerate(merges) if pair[1][0] != pair[1][1]][:1]
    assert (mine == theirs) is True
    loaded = Tokenizer.from_file(str(out / "tokenizer.json"))
    loaded.encode_special_tokens = True
    texts = [text for text in documents if text]
    for text, theirs, found in zip(texts, loaded.encode_batch(texts), documents_of(out), strict=True):
        assert theirs.ids == found, text[:80]


def test_a_document_that_is_read_in_parts_has_the_same_pieces(tmp_path):
    pieces, part = ["q", "'re", " ", " z", "\U0001f600"], 1 << 18
    documents = ["".join(pieces)]
    for inside in range(len(documents[0].encode())):  # so many bytes of these pieces are in the first part
        lines, rest = divmod(part - inside, 1000)
        documents.append(lines * ("x" * 999 + "\n") + (rest - 1) * "x" + "\n" + documents[0])
    out = convert(tmp_path, 1500, documents)
    tokens, _ = read_table(out / "tokenizer.bin")
    found = [[tokens[token].decode() for token in document] for document in documents_of(out)]
    assert found[0] == pieces  # each is a token
    for document, text in zip(found, documents, strict=True):
        assert document[-len(pieces) :] == pieces and len("".join(document)) == len(text)


def test_the_corpus_has_every_byte_of_the_text(tmp_path):
    rng = random.Random(1)
    parts = b"\xe2\x82\xac|\xe2\x82|\x82|\xff|\0|caf\xe9 |a| |'re|\xed\xa0\x80|\xf0\x9f".split(b"|")
    text = b"The first 256 KiB decide whether a file is text. " * 5500
    documents = [text + b"".join(rng.choice(parts) for _ in range(10000)) for _ in range(2)]
    documents += [b"\0", text + bytes(range(256)) + rng.randbytes(300_000), text + b"\xe2\x82"]
    out = convert(tmp_path, 600, documents)
    tokens, separator = read_table(out / "tokenizer.bin")
    assert separator == 0 and len(tokens) == 600
    found = [b"".join(tokens[token] for token in document) for document in documents_of(out)]
    assert not [i for i, pair in enumerate(zip(found, documents, strict=True)) if pair[0] != pair[1]]


def test_the_table_is_that_of_token_table(tmp_path):
    out = convert(tmp_path, 4000, sources())
    token_table.write_table(str(out / "tokenizer.json"), str(tmp_path / "table.bin"), 0)
    assert filecmp.cmp(out / "tokenizer.bin", tmp_path / "table.bin", shallow=False)


def test_the_trainer_reads_the_corpus_and_encodes_prompts(tmp_path):
    documents = [*languages(), *sources()]
    out = convert(tmp_path, 1500, documents)
    loaded = Tokenizer.from_file(str(out / "tokenizer.json"))
    texts = [f"{text[:200]}{SEPARATOR}{text[-20:]}" for text in documents]
    found = filter_in_c(out / "tokenizer.bin", "--bytes", texts)
    for text, encoded, mine in zip(texts, loaded.encode_batch(texts), found, strict=True):
        assert mine == (encoded.ids, text.encode())
    options = f"{SHAPE} --batch-size 2 --steps 1 --sample-every 1 --doc-mask"
    done = run(TRAINER, options, "--train-data", out, "--out", tmp_path / "run").done()
    assert "--vocab 1500" in done.out and "--- sample after step 1" in done.out
    done = run(TRAINER, "--out", tmp_path / "run", "--resume --generate 3 --prompt 'na\u00efve \u6570'").done()
    assert "\nna\u00efve \u6570" in done.out
