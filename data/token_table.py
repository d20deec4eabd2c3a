#!/usr/bin/env python3
"""Writes tokenizer.bin, the token table for the C program (format: llmc/text/tokenizer_table.h).

  token_table.py TOKENIZER OUT [--separator ID]

  TOKENIZER   a tokenizer.json of the `tokenizers` library, or: bytes; or classes, which writes the classes of all code
              points as data/unicode_classes.h, for text_to_shards
  OUT         the output file
  --separator the token that separates documents (default: none)

Every table is decoded as by the library: tokens are byte-level, or pieces of text with U+2581 for a space and <0x0A>
for a byte, as those of Llama 2 and Gemma. Other decoders are refused. The C program encodes text only if its result
equals the library's: for byte-level BPE with the patterns below. Other tables contain the reason why not. The classes
of code points (letter, number, space) come from the library, so that both use the same Unicode version.
"""

import argparse
import functools
import itertools
import json
import re
import struct
import sys
import textwrap

from outputs import open_output

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
HEAD, TAIL, ENDINGS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{HEAD}*{TAIL}+{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{HEAD}+{TAIL}*{ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {GPT2: 1, CL100K: 2, CL100K.replace(r"\p{N}{1,3}", r"\p{N}"): 3, O200K: 4}
CLASSES = ((1, r"\p{L}"), (2, r"\p{N}"), (4, r"\s"))
PARTS = ((8, HEAD), (16, TAIL))  # of words; the tables of O200K have them
PREFIX_SPACE, IGNORE_MERGES, STRIP_SPACE = 1, 2, 4
PIECES = [
    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
NONE = 2**32 - 1
VOCABULARY_LIMIT = 2**24  # a file with larger ids is damaged


def byte_alphabet():
    """The character of each byte in byte-level vocabularies, as in GPT-2."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in kept]
    return {**{chr(b): b for b in kept}, **{chr(256 + i): b for i, b in enumerate(other)}}


@functools.lru_cache(maxsize=None)
def members(expression):
    """For each code point, 1 if the library's regular expression `expression` matches it, else 0."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    codes = [*range(0xD800), *range(0xE000, 0x110000)]  # without surrogates
    found = bytearray(b"\1" * len(codes))
    for _, (begin, end) in Split(Regex(expression), "removed").pre_tokenize_str("".join(map(chr, codes))):
        found[begin:end] = bytes(end - begin)
    return bytes(found[:0xD800]) + bytes(0x800) + bytes(found[0xD800:])


@functools.lru_cache(maxsize=None)
def class_ranges(parts=False):
    """[(first, last, class)] of all code points with a class, by the library's regular expressions."""
    classes = 0  # one byte per code point, as one integer
    for bit, expression in CLASSES + (PARTS if parts else ()):
        found = int.from_bytes(members(expression), "little")
        if bit <= 4 and classes & found * 0xFF:
            sys.exit(f"token_table.py: a code point of {expression} has two classes")
        classes |= found * bit
    ranges, first = [], 0
    for value, group in itertools.groupby(classes.to_bytes(0x110000, "little")):
        last = first + sum(1 for _ in group) - 1
        if value:
            ranges.append((first, last, value))
        first = last + 1
    return ranges


def class_header():
    """The text of data/unicode_classes.h."""
    from tokenizers import __version__

    ranges = " ".join(f"0x{first:X},0x{last:X},{value}," for first, last, value in class_ranges())
    return f"""// clang-format off
// unicode_classes.h: first and last code point, class (1 letter, 2 number, 4 space), ascending; others have none. From
// tokenizers {__version__}: data/token_table.py classes data/unicode_classes.h writes this file.
#pragma once
#include <stdint.h>

static const uint32_t unicode_classes[] = {{
{textwrap.fill(ranges, 120)}
}};
"""


def parts_of(config, key):
    """The parts of a pre-tokenizer or decoder, and their names."""
    parts = [config] if config and config["type"] != "Sequence" else (config or {}).get(key, [])
    return parts, " + ".join(p["type"] for p in parts) or "none"


def piece_bytes(text):
    """The bytes of a token that is a piece of text."""
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()


def pre_tokenizer(config):
    """(pattern, flags, reason) of a pre_tokenizer. The reason is None if it is supported."""
    parts, names = parts_of(config, "pretokenizers")
    last = parts[-1] if parts else {"type": ""}
    if last["type"] != "ByteLevel":
        return 0, 0, f"its pre-tokenizer is {names}, without ByteLevel at the end"
    flags = PREFIX_SPACE if last.get("add_prefix_space") else 0
    if len(parts) == 1:
        return (PATTERNS[GPT2] if last.get("use_regex", True) else 0), flags, None
    split = parts[0]
    if len(parts) > 2 or split["type"] != "Split" or last.get("use_regex", True) or flags:
        return 0, flags, f"its pre-tokenizer is {names}"
    expression = split["pattern"].get("Regex")
    # The expressions match every character, so that removing the rest is the same as isolating the matches.
    ways = (("Isolated", False), ("Removed", True))
    if expression not in PATTERNS or (split["behavior"], bool(split.get("invert"))) not in ways:
        return 0, flags, "its pre-tokenizer has an unknown expression"
    return PATTERNS[expression], flags, None


def added_ids(vocab, added):
    """{text: id} of the added tokens. The library ignores the ids of the file: a token of the vocabulary keeps its id
    there, and another one follows the last. It also ignores a token without text, and a text that occurs again."""
    ids, last = {}, len(vocab) - 1
    for text in (a["content"] for a in added):
        if text and text not in ids:
            ids[text] = vocab.get(text, last + 1)
            last = max(last, ids[text])
    return ids


def read_tokenizer(path):
    """The table of a tokenizer.json. Exits with one line if it is no such file, or has another model than BPE or an
    unknown decoder."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            return table_of(path, json.load(f))
    except OSError as error:
        sys.exit(f"token_table.py: cannot read {path}: {error.strerror}")
    except (AttributeError, KeyError, IndexError, RecursionError, TypeError, ValueError) as error:
        sys.exit(f"token_table.py: {path}: not a tokenizer.json, or damaged: {type(error).__name__}: {error}")


def table_of(path, config):
    if not isinstance(config, dict):
        sys.exit(f"token_table.py: {path}: not a tokenizer.json: it is not a JSON object")
    model = config.get("model") or {}
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        sys.exit(f"token_table.py: {path}: its model is {model.get('type')}; only BPE is supported")
    decoder, names = parts_of(config.get("decoder"), "decoders")
    before, _ = parts_of(config.get("pre_tokenizer"), "pretokenizers")
    pieces = decoder in (PIECES, [*PIECES, STRIP])
    if not pieces and [p["type"] for p in decoder or before[-1:]] != ["ByteLevel"]:
        supported = "ByteLevel, and Replace + ByteFallback + Fuse with or without Strip, as of Llama 2 and Gemma"
        sys.exit(f"token_table.py: {path}: its decoder is {names}; supported are {supported}")
    alphabet = byte_alphabet()
    vocab, added = dict(model["vocab"]), config.get("added_tokens") or []
    contents = added_ids(vocab, added)
    ids = [*vocab.values(), *contents.values()]
    if not ids or not all(type(i) is int and 0 <= i < VOCABULARY_LIMIT for i in ids):
        sys.exit(f"token_table.py: {path}: damaged: token ids must be integers from 0 to {VOCABULARY_LIMIT - 1}")
    size = max(ids) + 1
    tokens, odd = [b""] * size, 0
    for text, token in vocab.items():
        if text in contents:
            continue
        if pieces:
            tokens[token] = piece_bytes(text)
        elif all(c in alphabet for c in text):
            tokens[token] = bytes(alphabet[c] for c in text)
        else:
            tokens[token], odd = text.encode(), odd + 1
    for text, token in contents.items():
        tokens[token] = piece_bytes(text) if pieces else text.encode()
    merges = {}
    for merge in model.get("merges") or []:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if not all(text in vocab for text in (left, right, left + right)):
            wrong = f"a part or the result of the merge of {left!r} and {right!r} is not a token"
            sys.exit(f"token_table.py: {path}: damaged: {wrong}")
        pair = vocab[left], vocab[right]
        merges.pop(pair, None)  # a pair that occurs twice has the rank of the last one, as in the library
        merges[pair] = vocab[left + right]
    pattern, flags, reason = pre_tokenizer(config.get("pre_tokenizer"))
    if model.get("ignore_merges"):
        flags |= IGNORE_MERGES
    if STRIP in decoder:
        flags |= STRIP_SPACE
    missing = 256 - len({t for t in tokens if len(t) == 1})
    added = [a for a in added if a["content"]]
    spaces = any(a.get("lstrip") or a.get("rstrip") or a.get("single_word") for a in added)
    passes = len({bool(a.get("normalized")) for a in added}) > 1
    checks = (
        (pieces, "its tokens are not byte-level"),
        (reason, reason),
        (config.get("normalizer"), f"its normalizer is {(config.get('normalizer') or {}).get('type')}"),
        (spaces, "some of its added tokens include spaces or match only complete words"),
        (passes, "its added tokens are matched in two passes, before and after normalization"),
        (missing, f"{missing} of the 256 bytes have no token"),
        (odd, f"{odd} of its tokens are not in the byte-level alphabet"),
        (model.get("byte_fallback"), "its model falls back to bytes"),
        (model.get("dropout"), "its model drops merges at random"),
        (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"), "its model marks subwords"),
    )
    why = [text for found, text in checks if found]
    return {
        "kind": 1,
        "tokens": tokens,
        "pattern": pattern,
        "flags": flags,
        "merges": [(*pair, result) for pair, result in merges.items()],
        "added": list(contents.values()),
        "reason": "; ".join(why),
    }


def padded(data):
    return data + b"\0" * (-len(data) % 4)


def table_bytes(table, separator):
    import xxhash

    tokens, merges, reason = table["tokens"], table["merges"], table["reason"].encode()
    ranges = class_ranges(table["pattern"] == PATTERNS[O200K]) if table["pattern"] and not reason else []
    texts = b"".join(tokens)
    header = struct.pack(
        "<8s12I",
        b"DV2TOK\0\1",
        table["kind"],
        len(tokens),
        table["pattern"],
        table["flags"],
        NONE if separator is None else separator,
        len(merges),
        len(table["added"]),
        len(ranges),
        len(reason),
        len(texts),
        0,
        0,
    )
    flat = [n for row in merges for n in row] + list(table["added"]) + [n for row in ranges for n in row]
    data = (
        header
        + struct.pack(f"<{len(tokens)}I", *map(len, tokens))
        + padded(texts)
        + struct.pack(f"<{len(flat)}I", *flat)
        + padded(reason)
    )
    return data + struct.pack("<Q", xxhash.xxh64(data).intdigest())


def write_file(out, data):
    try:
        with open_output(out) as f:
            f.write(data)
    except OSError as error:
        sys.exit(f"token_table.py: cannot write {out}: {error.strerror}")


def write_table(tokenizer, out, separator=None):
    """Writes `out`; returns (vocabulary size, reason why the C program cannot encode text, or "")."""
    if tokenizer == "bytes":
        table = {
            "kind": 0,
            "tokens": [bytes([b]) for b in range(256)],
            "pattern": 0,
            "flags": 0,
            "merges": [],
            "added": [],
            "reason": "",
        }
    else:
        table = read_tokenizer(tokenizer)
    size = len(table["tokens"])
    if separator is not None and not 0 <= separator < size:
        sys.exit(f"token_table.py: --separator {separator} is outside the vocabulary of {size}")
    write_file(out, table_bytes(table, separator))
    return size, table["reason"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--separator", type=int, metavar="ID")
    options = parser.parse_args()
    if options.tokenizer == "classes":
        write_file(options.out, class_header().encode())
        return
    size, reason = write_table(options.tokenizer, options.out, options.separator)
    print(f"{options.out}: {size} tokens" + (f"; the C program cannot encode text with it: {reason}" if reason else ""))


if __name__ == "__main__":
    main()
