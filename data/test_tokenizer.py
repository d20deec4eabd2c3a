#!/usr/bin/env python3
"""The C tokenizer against the `tokenizers` library and tiktoken, on random and hostile strings.

  test_tokenizer.py [--strings N] [--seed N] [--encode_text PROGRAM]

Needs build/encode_text (make build/encode_text), and the packages of data/requirements.txt. Every known pattern is
tried with a vocabulary trained here, GPT-2's own where it can be had. The last line is "N passed, N failed".
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))
import gpt2_tokenizer
import token_table

ROOT = Path(__file__).resolve().parent.parent
WORDS = """the The THE of and don't we've I'M you'll he'd it's O'Neill naïve façade Übergröße œuvre ſtraße 'ſ 'S 'LL 'Ve 'rE '’s ’s
    数学 汉字测试 かな カタカナ 한국어 العربية עברית हिन्दी ไทย Ελληνικά Кириллица 123 4567 89012345 3.14159 1,000,000 ٣٤٥ ४५६ Ⅷ ½ ² x² ①②
    😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u0301\u0302 \u200d \u200b \ufeff \u00ad \u2028 \u2029 \u0085 \u00a0 \u3000 \u1680 \u180e \u202f \ue000 \U000f0000 \U0010ffff \ufffe
    <|endoftext|> <|endoftext <|end|> |> == != -> ... ---- // /* */ {} [] () "" `` '' ''' ' '' #include int main(void) { return 0; }
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa abababababababab \t \t\t \r \n \r\n \n\n \n\n\n \x00 \x01 \x1f \x7f \x0b \x0c \x1c \x1d \x1e""".split(" ")
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\r\n", " \n", "\n ", "\t", " \t ", "\u00a0", "\u3000", "\u2003", "\u0085", "\x0b", "\x1c", "\r", ""]
RANGES = [(0, 0x80), (0x80, 0x250), (0x250, 0x800), (0x800, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000), (0x1F000, 0x20000),
          (0x20000, 0x110000)]


def strings(count, seed):
    rng = random.Random(seed)
    for i in range(count):
        kind = i % 8
        if kind == 0:  # any code points
            yield "".join(chr(rng.randrange(*rng.choice(RANGES))) for _ in range(rng.randrange(1, 24)))
        elif kind == 1:  # one script, as words
            low, high = rng.choice(RANGES)
            yield " ".join("".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 8))) for _ in range(rng.randrange(1, 6)))
        elif kind == 2:  # the borders of the expressions
            yield "".join(rng.choice("'sStTdDmMrRvVeElL \n\r\tſK1a.") for _ in range(rng.randrange(1, 16)))
        elif kind == 3:  # spaces of all kinds
            yield "".join(rng.choice(SPACES) + rng.choice(["", "", "a", "1", ".", "é", "'s"]) for _ in range(rng.randrange(1, 12)))
        elif kind == 4:  # runs
            yield "".join(rng.choice("a1 .\n'é数") * rng.randrange(1, 40) for _ in range(rng.randrange(1, 4)))
        elif kind == 5:  # decomposed, and other normal forms
            text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
            yield unicodedata.normalize(rng.choice(["NFC", "NFD", "NFKC", "NFKD"]), text)
        else:
            yield "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randrange(1, 14)))
    yield ""
    yield "a" * 100_000
    yield "ab" * 50_000 + " " * 100_000 + "\n" * 50_000


def training_text():
    for name in sorted(ROOT.glob("llmc/*.h")) + sorted(ROOT.glob("data/*.py")):
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
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  special_tokens=["<|endoftext|>", "<|end"] if special else [])
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def whole_words(tokenizer):
    """The same with ignore_merges, and some words that merges do not reach."""
    config = json.loads(tokenizer.to_str())
    config["model"]["ignore_merges"] = True
    vocab = config["model"]["vocab"]
    for word in ("\u0120zebraqux", "zzzyx", "\u0120abababab"):
        vocab.setdefault(word, len(vocab))
    return Tokenizer.from_str(json.dumps(config))


def encode_in_c(program, table, texts):
    data = bytearray()
    for text in texts:
        raw = text.encode()
        data += len(raw).to_bytes(4, "little") + raw
    done = subprocess.run([program, table, "--bytes"], input=bytes(data), capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace").strip())
    out, at = [], 0
    answer = memoryview(done.stdout)
    for _ in texts:
        count = int.from_bytes(answer[at : at + 4], "little")
        ids = answer[at + 4 : at + 4 + 4 * count].cast("I").tolist()
        at += 4 + 4 * count
        size = int.from_bytes(answer[at : at + 4], "little")
        out.append((ids, bytes(answer[at + 4 : at + 4 + size])))
        at += 4 + size
    return out


class Results:
    passed = failed = 0

    def report(self, good, what):
        print(("ok   " if good else "FAIL ") + what, flush=True)
        if good:
            self.passed += 1
        else:
            self.failed += 1


def compare(results, options, directory, name, tokenizer, prefix_space=False, encode=None):
    path, table = directory / f"{name}.json", directory / f"{name}.bin"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    _, reason = token_table.write_table(str(path), str(table))
    if reason:
        results.report(False, f"{name}: {reason}")
        return
    encode = encode or (lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)])
    wrong, count, texts = [], 0, []
    for text in [*strings(options.strings, options.seed), None]:
        if text is not None:
            texts.append(text)
        if len(texts) == 20_000 or text is None:
            for mine, theirs, source in zip(encode_in_c(options.encode_text, str(table), texts), encode(texts), texts):
                raw = source.encode()
                if mine[0] != theirs or (mine[1] != raw and not prefix_space):
                    wrong.append((source[:60], mine[0][:12], theirs[:12]))
            count += len(texts)
            texts = []
    for source, mine, theirs in wrong[:3]:
        print(f"     {source!r}: C {mine}, library {theirs}")
    results.report(not wrong, f"{name}: {count} strings, {len(wrong)} differ")


def refusals(results, options, directory):
    """Tables that C must not encode with say so, and still decode."""
    base = json.loads(trained(token_table.GPT2).to_str())
    cases = {
        "normalizer": ({"normalizer": {"type": "NFC"}}, "normalizer is NFC"),
        "pre-tokenizer": ({"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}}, "Metaspace"),
        "lstrip": ({"added_tokens": [{**base["added_tokens"][0], "lstrip": True}]}, "spaces with them"),
    }
    for name, (change, words) in cases.items():
        path, table = directory / "refused.json", directory / "refused.bin"
        path.write_text(json.dumps({**base, **change}))
        _, reason = token_table.write_table(str(path), str(table))
        done = subprocess.run([options.encode_text, table], input=b"\1\0\0\0a", capture_output=True)
        lines = done.stderr.decode().strip().splitlines()
        good = words in reason and done.returncode == 1 and len(lines) == 1 and words in lines[0]
        results.report(good, f"a table with another {name} is refused by name" if good else f"{name}: {reason!r}, {done.returncode}, {done.stderr!r}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=20_000, help="for each tokenizer (20000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--encode_text", default=str(ROOT / "build/encode_text"))
    options = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        gpt2, cl100k, qwen2 = token_table.PATTERNS
        compare(results, options, directory, "gpt2_pattern", trained(gpt2))
        compare(results, options, directory, "gpt2_pattern_prefix_space", trained(gpt2, prefix_space=True), prefix_space=True)
        compare(results, options, directory, "cl100k_pattern", trained(cl100k))
        compare(results, options, directory, "cl100k_pattern_whole_words", whole_words(trained(cl100k)))
        compare(results, options, directory, "qwen2_pattern", trained(qwen2, special=False))
        compare(results, options, directory, "no_pattern", trained(None))
        refusals(results, options, directory)
        path = directory / "gpt2.json"
        try:
            gpt2_tokenizer.write_tokenizer(path)
        except SystemExit as error:
            print(f"     GPT-2's own vocabulary is not compared: {error}")
        else:
            compare(results, options, directory, "gpt2", Tokenizer.from_file(str(path)))
            import tiktoken

            ranks = gpt2_tokenizer.parse_ranks(gpt2_tokenizer.download_ranks())
            tik = tiktoken.Encoding("gpt2", pat_str=gpt2, mergeable_ranks=ranks, special_tokens={gpt2_tokenizer.END_OF_TEXT: len(ranks)})
            compare(results, options, directory, "gpt2_as_tiktoken", Tokenizer.from_file(str(path)),
                    encode=lambda texts: tik.encode_batch(texts, allowed_special="all"))
    print(f"{results.passed} passed, {results.failed} failed")
    sys.exit(results.failed > 0)


main()
