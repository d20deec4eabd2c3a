"""Compares the C tokenizer with the `tokenizers` library and tiktoken, on random and adversarial strings. Tests every
known pattern with a trained vocabulary, and GPT-2's own vocabulary if it is available. Requires build/encode_text."""

import functools
import json
import random
import subprocess
import unicodedata
from itertools import accumulate, chain, islice
from pathlib import Path

import gpt2_tokenizer
import pytest
import tiktoken
import token_table
from program import read_table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
ENCODE_TEXT = ROOT / "build/encode_text"
WORDS = """the The THE of and don't we've I'M you'll he'd it's O'Neill naïve façade Übergröße œuvre
    ſtraße 'ſ 'S 'LL 'Ve 'rE '’s ’s
    数学 汉字测试 かな カタカナ 한국어 
    العربية עברית हिन्दी ไทย Ελληνικά Кириллица 123 4567 89012345
    3.14159 1,000,000 ٣٤٥ ४५६ Ⅷ ½ ² x² ①②
    😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u0301\u0302 \u200d \u200b \ufeff \u00ad
    \u2028 \u2029 \u0085 \u00a0
    \u3000 \u1680 \u180e \u202f \ue000 \U000f0000 \U0010ffff \ufffe
    <|endoftext|> <|endoftext <|end|> |> == != -> ... ---- // /* */ {} [] () "" `` '' ''' ' ''
    #include int main(void) { return 0; }
    HTTPServer McDonald's ǅungla ʰʷ ﬁﬆ K'S ABC'll XYZ'Ve a/b// ./\n/
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababab \t \t\t \r \n \r\n
    \n\n \n\n\n \x00 \x01 \x1f \x7f \x0b \x0c \x1c \x1d \x1e""".split(" ")
# Tokens of the tokenizer with ignore_merges that merges do not produce; they are not in the training text
WHOLE_WORDS = [" zebraqux", "zzzyx", " abababab"]
SPACES = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", " \t ", "\u00a0", "\u3000", "\u2003", "\u0085",
    "\x0b", "\x1c", "\r", "",
]  # fmt: skip
RANGES = [
    (0, 0x80), (0x80, 0x250), (0x250, 0x800), (0x800, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000),
    (0x10000, 0x20000), (0x1F000, 0x20000), (0x20000, 0x110000),
]  # fmt: skip


def strings(count):
    rng = random.Random(1)
    for i in range(count):
        kind = i % 8
        if kind == 0:  # any code points
            yield "".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 24)))
        elif kind == 1:  # one script, as words
            low, high = rng.choice(RANGES)
            yield " ".join(
                "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 8)))
                for _ in range(rng.randrange(1, 6))
            )
        elif kind == 2:  # boundaries of the patterns
            yield "".join(rng.choice("'sStTdDmMrRvVeElL \n\r\tſK1a.") for _ in range(rng.randrange(1, 16)))
        elif kind == 3:  # all kinds of spaces
            after = ["", "", "a", "1", ".", "é", "'s"]
            yield "".join(rng.choice(SPACES) + rng.choice(after) for _ in range(rng.randrange(1, 12)))
        elif kind == 4:  # runs
            yield "".join(rng.choice("a1 .\n'é数") * rng.randrange(1, 40) for _ in range(rng.randrange(1, 4)))
        elif kind == 5:  # normal forms
            text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
            yield unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)
        else:
            yield "".join(
                rng.choice(WORDS if rng.random() < 0.9 else WHOLE_WORDS) + rng.choice(SPACES)
                for _ in range(rng.randrange(1, 14))
            )
    yield ""
    yield "a" * 100_000
    yield "ab" * 50_000 + " " * 100_000 + "\n" * 50_000


def code_points(every):
    """Every `every`th of the blocks of 16 code points, each beside letters, digits, quotes and spaces."""
    for block in range(0, 0x110000, 16 * every):
        if not 0xD800 <= block < 0xE000:
            yield "".join(f"{c}a{c}A{c}1 {c}'{c}\n" for c in map(chr, range(block, block + 16)))


def training_text():
    for name in sorted(ROOT.glob("llmc/*/*.h")) + sorted(ROOT.glob("data/*.py")):
        yield name.read_text(encoding="utf-8")
    rng = random.Random(1)
    for _ in range(3000):
        yield " ".join(rng.choice(WORDS) for _ in range(20))


def train_bpe(tokenizer, size, documents, special=()):
    """The tokenizer after training on documents with an alphabet of all bytes."""
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@functools.cache
def trained(expression, prefix_space=False, special=True):
    tokenizer = Tokenizer(models.BPE())
    if expression == token_table.GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    elif expression is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return train_bpe(tokenizer, 4000, training_text(), ["<|endoftext|>", "<|end"] if special else [])


def add_whole_words(config):
    """Adds ignore_merges, and words that require it."""
    config["model"]["ignore_merges"] = True
    vocab = config["model"]["vocab"]
    for word in WHOLE_WORDS:
        vocab.setdefault(word.replace(" ", "\u0120"), len(vocab))


def filter_in_c(table, mode, texts):
    """The output of encode_text for each text: numbers, and with --bytes also bytes."""
    raw = [text.encode() for text in texts]
    data = b"".join(part for r in raw for part in (len(r).to_bytes(4, "little"), r))
    done = subprocess.run([ENCODE_TEXT, table, mode], input=data, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace").strip())
    at, answer = 0, memoryview(done.stdout)

    def take(width):
        nonlocal at
        begin, at = at + 4, at + 4 + width * int.from_bytes(answer[at : at + 4], "little")
        return answer[begin:at]

    return [(take(4).cast("I").tolist(), bytes(take(1)) if mode == "--bytes" else None) for _ in texts]


def library_pieces(tokenizer, text):
    """The ends of the pieces in bytes: a byte-level piece has one character per byte."""
    return list(accumulate(len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)))


class Case:
    """A tokenizer and its table. Compares tokens and pieces: another split rarely changes the tokens, since few pieces
    are tokens."""

    def __init__(self, directory, tokenizer, prefix_space=False, pieces=True, encode=None):
        path, self.table = directory / "tokenizer.json", directory / "tokenizer.bin"
        path.write_text(tokenizer.to_str(), encoding="utf-8")
        _, reason = token_table.write_table(str(path), str(self.table))
        assert not reason
        self.prefix_space = prefix_space
        self.encode = encode or (lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)])
        self.cut = (lambda texts: [library_pieces(tokenizer, text) for text in texts]) if pieces else None

    def differences(self, texts):
        for mine, theirs, source in zip(filter_in_c(self.table, "--bytes", texts), self.encode(texts), texts):
            if mine[0] != theirs or (mine[1] != source.encode() and not self.prefix_space):
                yield "token", source, mine[0], theirs
        if self.cut:
            for mine, theirs, source in zip(filter_in_c(self.table, "--pieces", texts), self.cut(texts), texts):
                if mine[0] != theirs:
                    yield "piece", source, mine[0], theirs


def changed(tokenizer, change):
    """The tokenizer after `change` of its tokenizer.json."""
    config = json.loads(tokenizer.to_str())
    change(config)
    return Tokenizer.from_str(json.dumps(config))


def remove_what_does_not_match(config):
    config["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=True)


def tiktoken_case(directory, expression, ranks, tokenizer):
    tik = tiktoken.Encoding(
        "case", pat_str=expression, mergeable_ranks=ranks, special_tokens={gpt2_tokenizer.END_OF_TEXT: len(ranks)}
    )
    encode = lambda texts: tik.encode_batch(texts, num_threads=2, allowed_special="all")
    return Case(directory, tokenizer, pieces=False, encode=encode)


def pair_case(directory, expression):
    """tiktoken has no pieces, but if each pair of bytes is a token, the tokens show where text is split."""
    single = [bytes([b]) for b in range(256)]
    double = [a + b for a in single for b in single]
    random.Random(2).shuffle(double)
    ranks = {token: rank for rank, token in enumerate(single + double)}
    tokenizer = gpt2_tokenizer.make_tokenizer(ranks)
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    return tiktoken_case(directory, expression, ranks, tokenizer)


def gpt2_case(directory, as_tiktoken):
    """GPT-2's vocabulary, compared with one of both libraries."""
    try:
        data = gpt2_tokenizer.download_ranks()
    except SystemExit as error:
        pytest.skip(f"GPT-2's vocabulary: {error}")
    ranks = gpt2_tokenizer.parse_ranks(data)
    tokenizer = gpt2_tokenizer.make_tokenizer(ranks)
    if as_tiktoken:
        return tiktoken_case(directory, token_table.GPT2, ranks, tokenizer)
    return Case(directory, tokenizer, pieces=False)


gpt2, cl100k, qwen2, o200k = token_table.PATTERNS
CASES = {
    "gpt2_pattern": lambda d: Case(d, trained(gpt2)),
    "gpt2_pattern_prefix_space": lambda d: Case(d, trained(gpt2, prefix_space=True), prefix_space=True, pieces=False),
    "cl100k_pattern": lambda d: Case(d, changed(trained(cl100k), remove_what_does_not_match)),
    "cl100k_pattern_whole_words": lambda d: Case(d, changed(trained(cl100k), add_whole_words), pieces=False),
    "qwen2_pattern": lambda d: Case(d, trained(qwen2, special=False)),
    "o200k_pattern": lambda d: Case(d, trained(o200k)),
    "no_pattern": lambda d: Case(d, trained(None)),
    **{f"pairs_{number}": lambda d, e=e: pair_case(d, e) for e, number in token_table.PATTERNS.items()},
    "gpt2": lambda d: gpt2_case(d, False),
    "gpt2_as_tiktoken": lambda d: gpt2_case(d, True),
}


@pytest.mark.parametrize("count, every", [(1500, 64), pytest.param(125_000, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@pytest.mark.full(cases_from=1)
@pytest.mark.slow(cases_from=4)
def test_tokens_and_pieces_equal_those_of_the_library(make, count, every, tmp_path):
    case, wrong = make(tmp_path), []
    texts = chain(strings(count), code_points(every))
    while chunk := list(islice(texts, 20_000)):
        wrong += case.differences(chunk)
    for what, source, mine, theirs in wrong[:3]:
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), 0)
        found = f"C has {mine[at : at + 8]}, the library {theirs[at : at + 8]}"
        print(f"{source[:80]!r}: from {what} {at} on {found}")
    assert not wrong, f"{len(wrong)} strings differ"


def test_classes_of_code_points_are_those_of_the_library():
    assert (ROOT / "data/unicode_classes.h").read_text() == token_table.class_header()


# a table that the C program must not encode with contains the reason, and can be decoded
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
FLAGS = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
ADDED = {"id": 0, "content": "<|endoftext|>", **FLAGS}
REFUSED = {
    "normalizer": ({"normalizer": {"type": "NFC"}}, "normalizer is NFC"),
    "pre-tokenizer": ({"pre_tokenizer": METASPACE}, "Metaspace"),
    "lstrip": ({"added_tokens": [ADDED]}, "include spaces"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_tokenizer_is_refused_with_the_reason(name, tmp_path):
    change, words = REFUSED[name]
    path, table = tmp_path / "refused.json", tmp_path / "refused.bin"
    path.write_text(json.dumps({**json.loads(trained(token_table.GPT2).to_str()), **change}))
    _, reason = token_table.write_table(str(path), str(table))
    done = subprocess.run([ENCODE_TEXT, table], input=b"\1\0\0\0a", capture_output=True)
    lines = done.stderr.decode().splitlines()
    assert words in reason and done.returncode == 1 and len(lines) == 1 and words in lines[0]


def renumber_added_tokens(config):
    """Also one of the vocabulary, one that is repeated and one without text."""
    texts = enumerate(("<b>", "the", "<a>", "", "<b>", "<|end"))
    config["added_tokens"] += [{**ADDED, "lstrip": False, "id": 9000 - i, "content": text} for i, text in texts]


def repeat_merges(config):
    config["model"]["merges"] += config["model"]["merges"][:40]


@pytest.mark.parametrize("change", [renumber_added_tokens, repeat_merges])
def test_what_a_file_states_against_the_library_is_read_as_by_the_library(change, tmp_path):
    path, table = tmp_path / "tokenizer.json", tmp_path / "tokenizer.bin"
    config = json.loads(trained(token_table.GPT2).to_str())
    change(config)
    path.write_text(json.dumps(config))
    size, _ = token_table.write_table(str(path), str(table))
    library, samples = Tokenizer.from_file(str(path)), [*strings(400), "<a><b> the <|end|><|endoftext|>other"]
    found = zip(samples, filter_in_c(table, "--bytes", samples))
    assert not [text[:40] for text, (ids, _) in found if ids != library.encode(text).ids][:3]
    tokens, _ = read_table(table)
    for id_, added in library.get_added_tokens_decoder().items():
        assert tokens[id_].decode() == added.content
    assert size == max(library.get_vocab().values()) + 1
