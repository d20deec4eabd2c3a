#!/usr/bin/env python3
"""Writes conversations as prompts of tokens, for --prompts of train_diffv2.

data/chat_prompts.py CORPUS FILE >prompts.jsonl
  CORPUS  a directory of data/prepare.py --chat, whose tokenizer and chat template are used
  FILE    JSON lines: {"messages": [{"role", "content"}, ...]}; -: stdin

A line of the output is {"tokens": [...]}: the separator of documents, if the corpus has it before them, and the
messages up to the point where the assistant answers.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

from chat import TOKENS, Chat
from prepare import Bytes, Library
from sources import BadInput


def tokens_of(directory, lines):
    """Yields the tokens of each line that is not empty."""
    try:
        corpus = json.loads((directory / "corpus.json").read_text(encoding="utf-8"))
        path, separator = directory / "tokenizer.json", corpus["separator"]
        tokenizer = Bytes() if corpus["tokenizer"] == "bytes" else Library(path, path.name, separator["text"])
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        chat = Chat(template, corpus.get("chat", {}))
        chat.special = getattr(tokenizer, "special", ())
        first = [separator["token"]] if separator["place"] == "before" else []
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise BadInput(f"{directory} is not a corpus of data/prepare.py --chat, or is damaged") from None
    if "chat" not in corpus and any(token in template for token in TOKENS):
        wrong = f"chat_prompts.py: {directory} is of an earlier data/prepare.py, which did not store"
        print(f"{wrong} {' and '.join(TOKENS)}: the template writes none", file=sys.stderr)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            text = chat.prompt(value.get("messages") if isinstance(value, dict) else None)
        except (json.JSONDecodeError, RecursionError):
            raise BadInput(f"line {number} is not JSON") from None
        except ValueError as error:
            raise BadInput(f"line {number} {error}") from None
        text.spans = [(0, len(text))]  # all of it: ids without a mark
        yield first + tokenizer.encode([text])[0].tolist()


def main():
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        print(__doc__)
        return
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        data = sys.stdin.read() if sys.argv[2] == "-" else Path(sys.argv[2]).read_text(encoding="utf-8")
        found = list(tokens_of(Path(sys.argv[1]), data.split("\n")))  # all, before any is written
    except (BadInput, OSError, ValueError) as error:
        sys.exit(f"chat_prompts.py: {error}")
    for tokens in found:
        print(json.dumps({"tokens": tokens}))


if __name__ == "__main__":
    main()
