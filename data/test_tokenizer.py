#!/usr/bin/env python3
"""Compares the C tokenizer with the `tokenizers` library and tiktoken, on random and adversarial strings.

  test_tokenizer.py [--strings N] [--every N] [--seed N] [--encode_text PROGRAM]

Requires build/encode_text (make build/encode_text) and the packages of data/requirements.txt. Tests every known pattern
with a trained vocabulary, and GPT-2's own vocabulary if it is available. The last line is "N passed, N failed".
  --strings N   random strings, the same for each tokenizer (20000)
  --every N     every Nth of the blocks of 16 code points, each beside letters, digits, quotes and spaces (16; 1: all of
                Unicode)
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from itertools import accumulate, chain, islice
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))
import gpt2_tokenizer
import token_table

ROOT = Path(__file__).resolve().parent.parent
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
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "\t",
    " \t ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u0085",
    "\x0b",
    "\x1c",
    "\r",
    "",
]
RANGES = [
    (0, 0x80),
    (0x80, 0x250),
    (0x250, 0x800),
    (0x800, 0x3000),
    (0x3000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x20000),
    (0x1F000, 0x20000),
    (0x20000, 0x110000),
]


def strings(count, seed):
    rng = random.Random(seed)
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
    for block in range(0, 0x110000, 16 * every):
        if not 0xD800 <= block < 0xE000:
            yield "".join(f"{c}a{c}A{c}1 {c}'{c}\n" for c in map(chr, range(block, block + 16)))


def training_text():
    for name in sorted(ROOT.glob("llmc/*/*.h")) + sorted(ROOT.glob("data/*.py")):
        yield name.read_text(encoding="utf-8")
    rng = random.Random(1)
    for _ in range(3000):
        yield " ".join(rng.choice(WORDS) for _ in range(20))


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
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|end"] if special else [],
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def add_whole_words(config):
    """Adds ignore_merges, and words that require it."""
    config["model"]["ignore_merges"] = True
    vocab = config["model"]["vocab"]
    for word in WHOLE_WORDS:
        vocab.setdefault(word.replace(" ", "\u0120"), len(vocab))


def filter_in_c(program, table, mode, texts):
    """The output of encode_text for each text: numbers, and with --bytes also bytes."""
    raw = [text.encode() for text in texts]
    data = b"".join(part for r in raw for part in (len(r).to_bytes(4, "little"), r))
    done = subprocess.run([program, table, mode], input=data, capture_output=True)
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


class Results:
    passed = failed = skipped = 0

    def report(self, good, what):
        print(("ok   " if good else "FAIL ") + what, flush=True)
        if good:
            self.passed += 1
        else:
            self.failed += 1


class Case:
    """A tokenizer, its table, and the differences. Compares tokens and pieces: another split rarely changes the tokens,
    since few pieces are tokens."""

    def __init__(self, directory, name, tokenizer, prefix_space=False, pieces=True, encode=None):
        path, self.table = directory / f"{name}.json", directory / f"{name}.bin"
        path.write_text(tokenizer.to_str(), encoding="utf-8")
        _, self.reason = token_table.write_table(str(path), str(self.table))
        self.name, self.prefix_space, self.count, self.wrong = name, prefix_space, 0, []
        self.encode = encode or (lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)])
        self.cut = (lambda texts: [library_pieces(tokenizer, text) for text in texts]) if pieces else None

    def compare(self, program, texts):
        for mine, theirs, source in zip(filter_in_c(program, self.table, "--bytes", texts), self.encode(texts), texts):
            if mine[0] != theirs or (mine[1] != source.encode() and not self.prefix_space):
                self.wrong.append(("token", source, mine[0], theirs))
        if self.cut:
            for mine, theirs, source in zip(
                filter_in_c(program, self.table, "--pieces", texts), self.cut(texts), texts
            ):
                if mine[0] != theirs:
                    self.wrong.append(("piece", source, mine[0], theirs))
        self.count += len(texts)

    def report(self, results):
        for what, source, mine, theirs in self.wrong[:3]:
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), 0)
            found = f"C has {mine[at : at + 8]}, the library {theirs[at : at + 8]}"
            print(f"     {source[:80]!r}: from {what} {at} on {found}")
        results.report(not self.wrong, f"{self.name}: {self.count} strings, {len(self.wrong)} differ")


def compare_all(results, options, cases):
    for case in cases:
        if case.reason:
            results.report(False, f"{case.name}: {case.reason}")
    cases = [case for case in cases if not case.reason]
    texts = chain(strings(options.strings, options.seed), code_points(options.every))
    while chunk := list(islice(texts, 20_000)):
        for case in cases:
            case.compare(options.encode_text, chunk)
    for case in cases:
        case.report(results)


def refusals(results, options, directory):
    """Tables that the C program must not encode with contain the reason, and can be decoded."""
    base = json.loads(trained(token_table.GPT2).to_str())
    cases = {
        "normalizer": ({"normalizer": {"type": "NFC"}}, "normalizer is NFC"),
        "pre-tokenizer": (
            {
                "pre_tokenizer": {
                    "type": "Metaspace",
                    "replacement": "\u2581",
                    "prepend_scheme": "always",
                    "split": True,
                }
            },
            "Metaspace",
        ),
        "lstrip": ({"added_tokens": [{**base["added_tokens"][0], "lstrip": True}]}, "include spaces"),
    }
    for name, (change, words) in cases.items():
        path, table = directory / "refused.json", directory / "refused.bin"
        path.write_text(json.dumps({**base, **change}))
        _, reason = token_table.write_table(str(path), str(table))
        done = subprocess.run([options.encode_text, table], input=b"\1\0\0\0a", capture_output=True)
        lines = done.stderr.decode().strip().splitlines()
        good = words in reason and done.returncode == 1 and len(lines) == 1 and words in lines[0]
        results.report(
            good,
            f"a table with an unsupported {name} is rejected with the reason"
            if good
            else f"{name}: {reason!r}, {done.returncode}, {done.stderr!r}",
        )


def changed(tokenizer, change):
    """The tokenizer after `change` of its tokenizer.json."""
    config = json.loads(tokenizer.to_str())
    change(config)
    return Tokenizer.from_str(json.dumps(config))


def remove_what_does_not_match(config):
    config["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed", invert=True)


def own_cases(directory):
    gpt2, cl100k, qwen2, o200k = token_table.PATTERNS
    large = trained(cl100k)
    return [
        Case(directory, "gpt2_pattern", trained(gpt2)),
        Case(directory, "gpt2_pattern_prefix_space", trained(gpt2, prefix_space=True), prefix_space=True, pieces=False),
        Case(directory, "cl100k_pattern", changed(large, remove_what_does_not_match)),
        Case(directory, "cl100k_pattern_whole_words", changed(large, add_whole_words), pieces=False),
        Case(directory, "qwen2_pattern", trained(qwen2, special=False)),
        Case(directory, "o200k_pattern", trained(o200k)),
        Case(directory, "no_pattern", trained(None)),
    ]


def tiktoken_case(directory, name, expression, ranks, tokenizer):
    tik = tiktoken.Encoding(
        name, pat_str=expression, mergeable_ranks=ranks, special_tokens={gpt2_tokenizer.END_OF_TEXT: len(ranks)}
    )
    encode = lambda texts: tik.encode_batch(texts, num_threads=2, allowed_special="all")
    return Case(directory, f"{name}_as_tiktoken", tokenizer, pieces=False, encode=encode)


def pair_cases(directory):
    """tiktoken has no pieces, but if each pair of bytes is a token, the tokens show where text is split."""
    single = [bytes([b]) for b in range(256)]
    double = [a + b for a in single for b in single]
    random.Random(2).shuffle(double)
    ranks = {token: rank for rank, token in enumerate(single + double)}
    config = gpt2_tokenizer.make_tokenizer(ranks)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    for expression, number in token_table.PATTERNS.items():
        level = {**config["decoder"], "use_regex": False}
        parts = [{**split, "pattern": {"Regex": expression}}, level]
        tokenizer = Tokenizer.from_str(
            json.dumps({**config, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}})
        )
        yield tiktoken_case(directory, f"pairs_{number}", expression, ranks, tokenizer)


def gpt2_cases(directory):
    """GPT-2's vocabulary, compared with both libraries."""
    data, path = gpt2_tokenizer.download_ranks(), directory / "gpt2.json"
    (directory / "gpt2.tiktoken").write_bytes(data)
    gpt2_tokenizer.write_tokenizer(path, directory / "gpt2.tiktoken")
    tokenizer = Tokenizer.from_file(str(path))
    yield Case(directory, "gpt2", tokenizer, pieces=False)
    yield tiktoken_case(directory, "gpt2", token_table.GPT2, gpt2_tokenizer.parse_ranks(data), tokenizer)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encode_text", default=str(ROOT / "build/encode_text"))
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cases = [*own_cases(directory), *pair_cases(directory)]
        try:
            cases += gpt2_cases(directory)
        except SystemExit as error:
            print(f"skip GPT-2's vocabulary: {error}")
            results.skipped += 1
        compare_all(results, options, cases)
        refusals(results, options, directory)
    print(
        f"{results.passed} passed, {results.failed} failed"
        + (f", {results.skipped} skipped" if results.skipped else "")
    )
    sys.exit(results.failed > 0 or results.passed == 0)


main()
