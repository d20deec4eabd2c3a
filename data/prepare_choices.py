#!/usr/bin/env python3
"""Writes a multiple-choice file, for --eval-choices, from the records of a benchmark.

  data/prepare_choices.py TASK --tokenizer T --out FILE [options]

  TASK         hellaswag, arc_easy, arc_challenge, piqa or openbookqa
  --tokenizer  a corpus directory (its tokenizer and separator), bytes, gpt2, a tokenizer.json, or a repository of the
               Hub
  --local      local copies of the files, .parquet or .jsonl, also with .gz or .zst (default: the Hub)

Contexts, completions and labels are those of the tasks of the same names of lm-evaluation-harness 0.4, without examples
in the context. So are the tokens: of the context with the completion, from the end of the context's tokens on. The
separator of documents, if there is one, precedes the context, since documents begin so in training. The file has the
format of llm.c (data/choices.py). It appears completely or not at all.
"""

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import python_environment

python_environment.ensure("data")

import prepare
from choices import Example, write_choices
from sources import PARQUET_ROWS, BadInput, Documents, fetch, first_line, hub_inputs, json_value, kind_of, local_inputs

BATCH = 1000  # records that are encoded together
RECORD_BYTES = 1 << 20  # the largest record: the bytes of its texts and the number of its values


def at(record, path, kind, what):
    value = record
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    try:
        json.dumps(value if isinstance(value, kind) else None, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        value = None
    if not isinstance(value, kind):
        raise BadInput(f"has no {what} in '{'.'.join(path)}'")
    return value


def text(record, key):
    return at(record, (key,), str, "text")


def texts(record, *path):
    values = at(record, path, list, "list of texts")
    if not values or not all(isinstance(x, str) for x in values):
        raise BadInput(f"has no list of texts in '{'.'.join(path)}'")
    return values


def position(record, key, values):
    """The label: where the value of the key is in `values`. Splits without answers have other values."""
    value = str(record.get(key)).lstrip()
    if value not in values:
        raise BadInput(f"has '{key}' {value[:40]!r}, which is none of {', '.join(values)[:80]}")
    return values.index(value)


def counted(values, first=0):
    return [str(i + first) for i in range(len(values))]


def without_brackets(value):
    """Bracketed words mark the parts of WikiHow's articles."""
    value = re.sub(r"\[[^\]\n]*\]", "", value.strip().replace(" [title]", ". "))
    return value.replace("  ", " ")


def hellaswag(record):
    told = f"{text(record, 'ctx_a')} {text(record, 'ctx_b').capitalize()}"
    endings = texts(record, "endings")
    context = without_brackets(f"{text(record, 'activity_label')}: {told}")
    return context, [without_brackets(e) for e in endings], position(record, "label", counted(endings))


def arc(record):
    label = position(record, "answerKey", texts(record, "choices", "label"))
    return f"Question: {text(record, 'question')}\nAnswer:", texts(record, "choices", "text"), label


def piqa(record):
    solutions = [text(record, key) for key in ("sol1", "sol2")]
    return f"Question: {text(record, 'goal')}\nAnswer:", solutions, position(record, "label", counted(solutions))


def openbookqa(record):
    label = position(record, "answerKey", texts(record, "choices", "label"))
    return text(record, "question_stem"), texts(record, "choices", "text"), label


@dataclass(frozen=True)
class Task:
    repository: str
    files: str  # pattern of paths in the repository's conversion to Parquet by the Hub: CONFIGURATION/SPLIT/FILE
    read: object  # record -> (context, completions, label)
    revision: str = "refs/convert/parquet"


TASKS = {
    "hellaswag": Task("Rowan/hellaswag", "default/validation/*.parquet", hellaswag),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy/test/*.parquet", arc),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge/test/*.parquet", arc),
    "piqa": Task("baber/piqa", "*/validation/*.parquet", piqa),
    "openbookqa": Task("allenai/openbookqa", "main/test/*.parquet", openbookqa),
}


class Records(Documents):
    """Iterates over (record, share of the file that has been read)."""

    def __init__(self, path, name):
        if kind_of(name) == "text":
            raise BadInput(f"{name}: must end in .parquet, .jsonl or .json, also with .gz or .zst")
        unused = dict.fromkeys(("text_field", "delimiter", "skip_bad", "bytes"))
        super().__init__(path, name, SimpleNamespace(max_document=RECORD_BYTES, **unused))
        self.limit_text = f"{RECORD_BYTES} of a record"

    def problem(self, text):
        raise BadInput(text)

    def json_text(self, line, place):
        try:
            record = json_value(self.decode(line, place))
        except (ValueError, RecursionError):
            record = None
        return record if isinstance(record, dict) else self.problem(f"{self.name}: {place} is not a JSON object")

    def parquet(self):
        """A text that many rows or elements of lists have is in memory once, in a dictionary, until the size of their
        record is known."""
        import pyarrow.parquet

        about = pyarrow.parquet.read_metadata(self.path)
        columns = [about.schema.column(i) for i in range(about.num_columns)]
        texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY"]
        with pyarrow.parquet.ParquetFile(self.path, metadata=about, read_dictionary=texts) as file:
            seen = 0
            for group, _ in self.row_groups(about):
                for batch in file.iter_batches(PARQUET_ROWS, [group]):
                    for row in range(batch.num_rows):
                        seen += 1
                        self.too_long(f"row {seen}", sum(size_of(column[row]) for column in batch.columns))
                        try:
                            yield batch.slice(row, 1).to_pylist()[0], seen / about.num_rows
                        except (ValueError, OverflowError) as error:
                            self.problem(f"{self.name}: row {seen} has an invalid value: {first_line(error)}")


def size_of(scalar):
    """The bytes of the texts of a Parquet value, and the number of its values. Stops above RECORD_BYTES."""
    import pyarrow

    scalar = scalar.value if isinstance(scalar, pyarrow.DictionaryScalar) else scalar
    if not scalar.is_valid:
        return 1
    if hasattr(scalar, "as_buffer"):
        return 1 + scalar.as_buffer().size
    size, parts = 1, scalar.values if isinstance(scalar, pyarrow.ListScalar) else ()
    if isinstance(scalar, pyarrow.StructScalar):
        parts = (scalar[i] for i in range(len(scalar)))
    for part in parts:
        size += size_of(part)
        if size > RECORD_BYTES:
            break
    return size


def requests(task, record):
    """(context, completions, label): a completion begins with its delimiter, a space."""
    context, completions, label = task.read(record)
    if "" in completions:
        raise BadInput(f"has an empty completion {completions.index('') + 1}")
    if label >= len(completions):
        raise BadInput(f"has answer {label + 1} of {len(completions)} completions")
    if len(completions) == 1:
        raise BadInput("has one completion, and 2 or more are required")
    kept = context.rstrip()  # tokens of words begin with the space before them
    return kept, [f"{context[len(kept) :]} {completion}" for completion in completions], label


def examples_of(named, tokenizer, prefix):
    """The examples of [(place of the record, context, completions, label)]."""
    parts = list(dict.fromkeys(x for _, c, texts, _ in named for x in (c, *(c + text for text in texts))))
    ids = {part: tokens.tolist() for part, tokens in zip(parts, tokenizer.encode(parts))}
    for place, context, texts, label in named:
        completions = [ids[context + text][len(ids[context]) :] for text in texts]
        if not prefix + ids[context]:
            raise BadInput(f"{place} has no context: use a separator")
        if [] in completions:
            raise BadInput(f"{place} has no tokens of its own in {texts[completions.index([])][:40]!r}")
        yield Example(prefix + ids[context], completions, label)


def read_examples(task, inputs, directory, tokenizer, prefix, most):
    examples, named = [], []
    for source in inputs:
        for number, (record, _) in enumerate(Records(fetch(source, directory), source.name), 1):
            place = f"{source.name}: record {number}"
            try:
                named.append((place, *requests(task, record)))
            except BadInput as error:
                raise BadInput(f"{place} {error}") from None
            if len(named) == BATCH or len(examples) + len(named) == most:
                examples += examples_of(named, tokenizer, prefix)
                named = []
                if len(examples) == most:
                    return examples
    return examples + list(examples_of(named, tokenizer, prefix))


def corpus_tokenizer(directory):
    """The tokenizer and the separator of a corpus directory."""
    try:
        corpus = json.loads((directory / "corpus.json").read_text(encoding="utf-8-sig"))
        separator = (corpus["separator"] or {}).get("token")
        name, size = corpus["tokenizer"], corpus["vocab_size"]
    except FileNotFoundError:
        file = directory / "tokenizer.json"
        how = f"; its tokenizer alone is --tokenizer {file}" if file.exists() else ""
        raise BadInput(f"{directory} has no corpus.json: it is not a corpus, or unfinished{how}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise BadInput(f"{directory}/corpus.json is damaged") from None
    if name == "bytes":
        tokenizer = prepare.Bytes()
    elif (directory / "tokenizer.json").exists():
        tokenizer = prepare.Library(directory / "tokenizer.json", name, None, required=False)
    else:
        raise BadInput(f"{directory} has no tokenizer.json: specify that of its tokens with --tokenizer")
    tokenizer.vocab_size, tokenizer.separator = max(tokenizer.vocab_size, size), separator
    return tokenizer


def find_tokenizer(options, directory):
    name = options.tokenizer
    if name == "bytes" or Path(name).is_dir():
        if options.separator:
            raise BadInput(f"--separator: --tokenizer {name} specifies it")
        return prepare.Bytes() if name == "bytes" else corpus_tokenizer(Path(name))
    path = directory / "tokenizer.json"
    prepare.write_tokenizer_json(name, path)
    return prepare.Library(path, name, options.separator, required=False)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, metavar="TASK")
    parser.add_argument("--tokenizer", required=True, metavar="T", help="that of the training data")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--local", nargs="+", metavar="FILE", help="local copies of the files, in their order")
    parser.add_argument("--examples", type=int, metavar="N", help="only the first N (default: all)")
    parser.add_argument("--separator", metavar="TEXT", help="the separator (default: the tokenizer's own)")
    options = parser.parse_args()
    if options.examples is not None and options.examples < 1:
        parser.error(f"--examples {options.examples}: must be at least 1")
    return options


def run(options):
    task = TASKS[options.task]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokenizer = find_tokenizer(options, directory)
        prefix = [] if tokenizer.separator is None else [tokenizer.separator]
        inputs = local_inputs(options.local) if options.local else hub_inputs(task)
        examples = read_examples(task, inputs, directory, tokenizer, prefix, options.examples)
    if not examples:
        raise BadInput(f"{inputs[0].name} has no records")
    version = write_choices(options.out, examples, tokenizer.vocab_size)
    counts = {len(e.completions) for e in examples}
    each = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    longest = max(e.longest for e in examples)
    print(
        f"{options.out}: {len(examples)} examples of {options.task} with {each} completions, version {version}; the "
        f"longest has {longest} tokens and requires --seq-len {longest - 1}"
    )


def main():
    options = parse_arguments()
    try:
        run(options)
    except BadInput as error:
        sys.exit(f"prepare_choices.py: {error}")
    except OSError as error:
        sys.exit(f"prepare_choices.py: {error.filename or options.out}: {error.strerror or first_line(error)}")


if __name__ == "__main__":
    main()
