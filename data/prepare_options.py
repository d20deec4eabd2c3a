"""The command line of prepare.py and its local files, which are checked with the standard library alone."""

import argparse
import os
import sys
from pathlib import Path

from sources import HUB, BadInput, hub_inputs, kind_of, local_inputs


def fail(text):
    sys.exit(f"prepare.py: {text}")


def parse_arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="CORPUS|PATH")
    add("--out", required=True, metavar="DIR")
    add("--tokenizer", default="gpt2", help="bytes, gpt2 (default), a tokenizer.json, or a repository of the Hub")
    add("--train-bpe", type=int, metavar="V", help="train a byte-level BPE of V tokens on the documents")
    add("--separator", metavar="TEXT", help="token between documents (<|endoftext|>, or the tokenizer's own)")
    add("--text-field", default="text", metavar="NAME", help="text field of JSON lines and Parquet (text)")
    add(
        "--delimiter",
        metavar="TEXT",
        help="separates the documents of a text file; escapes such as \\f and \\n are allowed",
    )
    add(
        "--val-tokens",
        type=float,
        metavar="N",
        help="about this many tokens for validation (1%% of the text, at most 1e6)",
    )
    add(
        "--shard-tokens",
        type=float,
        default=1e8,
        metavar="N",
        help="a shard ends with the document that reaches this number (1e8)",
    )
    add(
        "--max-tokens",
        type=float,
        default=0,
        metavar="N",
        help="stop after the document that reaches this number; 0: all (0)",
    )
    add("--max-document", type=float, default=64e6, metavar="BYTES", help="largest document (6.4e7)")
    add("--skip-bad", action="store_true", help="skip and count invalid documents")
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="tokenizer threads (number of cores)")
    add("--force", action="store_true", help="replace the corpus in DIR")
    options = parser.parse_args()
    for name in ("val_tokens", "shard_tokens", "max_tokens", "max_document", "workers"):
        value, least = getattr(options, name), 0 if name == "max_tokens" else 1
        most = 1e9 if name == "val_tokens" else 1e15  # one shard, whose header holds up to 2^32 tokens
        if value is None:  # computed from the input
            continue
        if not least <= value <= most or value != int(value):
            parser.error(f"--{name.replace('_', '-')} {value:g}: must be an integer from {least} to {most:g}")
        setattr(options, name, int(value))
    if options.train_bpe is not None and not 257 <= options.train_bpe <= 1 << 24:
        parser.error(f"--train-bpe {options.train_bpe}: must be 257 (bytes and a separator) to {1 << 24}")
    if options.train_bpe and options.tokenizer != "gpt2":
        parser.error("--train-bpe and --tokenizer are mutually exclusive")
    if options.shard_tokens > 2**32 - 1 - options.max_document:
        parser.error(f"--shard-tokens {options.shard_tokens}: a shard header holds up to 2^32 tokens")
    options.bytes = options.tokenizer == "bytes"
    if options.delimiter is not None:
        try:
            options.delimiter = options.delimiter.encode("utf-8").decode("unicode_escape").encode("latin-1")
        except ValueError as error:
            parser.error(f"--delimiter {options.delimiter!r}: {error}: use \\xHH for each byte of such a character")
        if not options.delimiter:
            parser.error("--delimiter is empty")
    return options


def find_inputs(options, notes=True):
    """(name of a corpus of the Hub or None, inputs in order). notes: names files that are skipped."""
    first = options.inputs[0]
    name = first if options.inputs == [first] and first in HUB and not os.path.exists(first) else None
    if name and not notes:  # to be listed by the library of the Hub
        return name, []
    inputs = hub_inputs(HUB[name]) if name else local_inputs(options.inputs, notes, options.out)
    if options.delimiter and not any(kind_of(i.name) == "text" for i in inputs):
        raise BadInput(f"{inputs[0].name}: --delimiter requires text files")
    return name, inputs


def checked_arguments(description):
    """The options. Exits if they, or local paths, are wrong."""
    options = parse_arguments(description)
    try:
        path = options.tokenizer
        if os.path.isdir(path) and path not in ("bytes", "gpt2"):
            file = Path(path) / "tokenizer.json"
            how = f"use {file}" if file.is_file() else "it has no tokenizer.json"
            raise BadInput(f"--tokenizer {path} is a directory: {how}")
        if path.endswith(".json") and not os.path.isfile(path):  # else it may be a repository of the Hub
            raise BadInput(f"--tokenizer {path} is not a file")
        if os.path.isfile(path) and Path(options.out).resolve() in Path(path).resolve().parents:
            raise BadInput(f"--tokenizer {path} is inside --out, where files are replaced: move it")
        if os.path.exists(options.out) and not os.path.isdir(options.out):
            raise BadInput(f"--out {options.out} is not a directory")
        find_inputs(options, notes=False)
    except BadInput as error:
        fail(error)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    return options
