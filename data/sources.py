"""Sources of documents: a table of corpora on the Hugging Face Hub, and readers of text, JSON lines and Parquet.

A reader yields one document (str) at a time. Every error is a BadInput with the file and the position.

encoding  UTF-8. A byte order mark at the beginning of a file of text or JSON lines is skipped; UTF-16 and UTF-32 are
          refused by theirs.
memory    One document, or of Parquet the rows of a batch, which have about PARQUET_BYTES or are one row, and the pages
          that they are in. A row group that has PARQUET_BYTES more than its rows may have, by the sizes that the file
          states, is refused before it is read.
"""

import codecs
import fnmatch
import gzip
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path


class BadInput(Exception):
    pass


@dataclass(frozen=True)
class HubCorpus:
    repository: str
    files: str  # pattern of paths in the repository
    field: str
    tokens: float  # by GPT-2's tokenizer, as published or from the published size of the text
    download: float  # bytes
    revision: str | None = None  # None: the newest


# sizes: from the dataset cards
HUB = {
    "fineweb": HubCorpus("HuggingFaceFW/fineweb", "sample/10BT/*.parquet", "text", 10.4e9, 30.6e9),
    "fineweb-edu": HubCorpus("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "text", 9.9e9, 28.5e9),
    "dclm": HubCorpus("mlfoundations/dclm-baseline-1.0", "global-shard_01_of_10/*.jsonl.zst", "text", 0.4e12, 0.75e12),
    "tinystories": HubCorpus("roneneldan/TinyStories", "data/train-*.parquet", "text", 0.47e9, 1.0e9),
    "c4": HubCorpus("allenai/c4", "en/c4-train.*.json.gz", "text", 156e9, 305e9),
}

SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".ndjson", ".parquet")
PACKED = (".gz", ".zst")
BLOCK = 1 << 20  # bytes of text that are read together
PARQUET_ROWS, PARQUET_BYTES = 256, 32 << 20  # of a batch


@dataclass
class Input:
    name: str  # for messages and sorting
    size: int  # bytes; 0: unknown
    path: Path | None = None  # None: a download
    repository: str | None = None
    version: str = ""  # modification time of a file, or commit of a repository


def kind_of(name):
    base = name.lower()
    for packed in PACKED:
        base = base.removesuffix(packed)
    suffix = os.path.splitext(base)[1]
    return {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}.get(suffix, "text")


def local_input(path):
    return Input(str(path), path.stat().st_size, path, version=str(path.stat().st_mtime_ns))


def some_of(paths, most=8):
    names = [repr(str(p))[1:-1] for p in paths[:most]]
    return ", ".join(names) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def files_below(root, notes, out=None):
    """The files below a directory in order, without those of `out`, of links to directories, and of names that begin
    with a dot. Prints what is left out if `notes`. Raises OSError for a directory that cannot be read."""
    found, links, hidden, rest = [], [], [], [root]
    while rest:
        for path in rest.pop().iterdir():
            if path.name.startswith("."):  # such as the copies of editors, whose text would be there twice
                hidden.append(path)
            elif path.is_file():
                found.append(path)
            elif path.is_symlink() and not path.exists():
                raise BadInput(f"{path} is a link to {os.readlink(path)}, which does not exist: remove the link")
            elif path.is_symlink() and path.is_dir():
                links.append(path)
            elif path.is_dir() and path.resolve() != out:
                rest.append(path)
    for what, paths in (("links to directories", links), ("hidden files", hidden)):
        if paths and notes:
            print(f"skipped {what}: {some_of(sorted(paths))}", file=sys.stderr, flush=True)
    return sorted(found)


def distinct(inputs):
    """The inputs. Raises BadInput if two of them are one file."""
    found = {}
    for one in inputs:
        about = one.path.stat()
        if first := found.get((about.st_dev, about.st_ino)):
            raise BadInput(f"{first} and {one.name} are one file, whose text would be there twice: specify it once")
        found[about.st_dev, about.st_ino] = one.name
    return inputs


def local_inputs(paths, notes=True, out=None):
    """The files of directories, without those of the directory `out`, and files. notes: names those of directories
    that are skipped."""
    out = out and Path(out).resolve()
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            if path.resolve() == out:
                raise BadInput(f"{path} is also --out: use another directory for the corpus")
            known, others = [], []
            suffixes = tuple(s + k for s in SUFFIXES for k in ("", *PACKED))
            for p in files_below(path, notes, out):
                (known if p.name.lower().endswith(suffixes) else others).append(p)
            names = some_of(others)
            endings = f"{', '.join(SUFFIXES)} (or these with {' or '.join(PACKED)})"
            if not known:
                raise BadInput(f"{path} has no files that end in {endings}" + (f"; it has {names}" if others else ""))
            if others and notes:
                plural = "s end" if len(others) > 1 else " ends"
                print(f"skipped, since the name{plural} in none of {endings}: {names}", file=sys.stderr, flush=True)
            found += [local_input(p) for p in known]
        elif path.is_file():
            found.append(local_input(path))
        else:
            raise BadInput(f"{path} " + ("is not a file or directory" if path.exists() else "does not exist"))
    return distinct(found)


def hub_inputs(corpus):
    """The files of a corpus of the Hub in order."""
    try:
        api, folder = hub().HfApi(), corpus.files.split("*")[0].rpartition("/")[0] or None
        commit = api.dataset_info(corpus.repository, revision=corpus.revision).sha
        about = {"repo_type": "dataset", "revision": commit, "recursive": True, "path_in_repo": folder}
        found = [
            Input(f.path, f.size or 0, None, corpus.repository, commit)
            for f in api.list_repo_tree(corpus.repository, **about)
            if fnmatch.fnmatch(f.path, corpus.files)
        ]
    except Exception as error:  # connection, authorisation, a removed repository and others
        raise BadInput(f"cannot list {corpus.repository} on the Hub: {first_line(error)}") from None
    if not found:
        raise BadInput(f"{corpus.repository} no longer has files {corpus.files}")
    return sorted(found, key=lambda f: f.name)


def hub():
    """The library of the Hub, without its messages about retries."""
    import huggingface_hub
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    return huggingface_hub


def fetch(source, directory):
    """The local file of an input. The caller may remove a download after use."""
    if source.path:
        return source.path
    try:
        return Path(
            hub().hf_hub_download(
                source.repository, source.name, repo_type="dataset", revision=source.version, local_dir=directory
            )
        )
    except Exception as error:
        raise BadInput(f"cannot download {source.name} of {source.repository}: {first_line(error)}") from None


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def json_value(text):
    """The value of a JSON text. Integers of 100 digits or more, which Python may refuse to read, become floats."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 100 else float(digits))


def unpacked(path, name):
    """Yields (decompressed data, bytes of the file that have been read). Raises EOFError for a truncated file."""
    with open(path, "rb") as raw:
        name = name.lower()
        if name.endswith(PACKED) and not os.path.getsize(path):
            raise EOFError("an empty file")
        if name.endswith(".zst"):
            import zstandard

            frame, held = None, bytearray()
            while packed := raw.read(1 << 11):  # little, since 4 bytes may hold 128 KiB
                while packed:
                    if frame is None:
                        frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
                    held += frame.decompress(packed)
                    packed = frame.unused_data if frame.eof else b""
                    if frame.eof:
                        frame = None
                while len(held) >= BLOCK:
                    yield bytes(held[:BLOCK]), raw.tell()
                    del held[:BLOCK]
            if frame is not None:
                raise EOFError("truncated frame")
            yield bytes(held), raw.tell()
            return
        stream = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
        while piece := stream.read(BLOCK):
            yield piece, raw.tell()


def text_blocks(path, name):
    """unpacked(), without a byte order mark at the beginning. Raises BadInput for another one than that of UTF-8, and
    for JSON whose first line is not a record."""
    blocks = unpacked(path, name)
    first, at = next(blocks, (b"", 0))
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        how = "convert it to UTF-8, as iconv -f UTF-16 -t UTF-8 does"
        raise BadInput(f"{name} is UTF-16 or UTF-32: it begins with {first[:2].hex(' ').upper()}: {how}")
    first = first.removeprefix(codecs.BOM_UTF8)
    if kind_of(name) == "jsonl" and (begin := re.match(rb"\s*(?:(\[)|\{[ \t\r]*\n)", first)):
        what, query = ("'[', an array", "'.[]'") if begin[1] else ("'{', an object of several lines", ".")
        place = f"{name}: line {1 + begin[0].rstrip().count(10)}"
        how = f"jq -c {query} FILE > FILE.jsonl converts it"
        raise BadInput(f"{place} is the beginning of {what}, and must be one record (JSON lines): {how}")
    yield first, at
    yield from blocks


class Documents:
    """Iterates over (document, or None for a skipped one; share of the file that has been read)."""

    def __init__(self, path, name, options):
        self.path, self.name, self.field, self.limit = path, name, options.text_field, options.max_document
        self.delimiter, self.skip_bad, self.bytes = options.delimiter, options.skip_bad, options.bytes
        self.limit_text = f"--max-document {self.limit}"
        self.bad = 0
        self.size = max(1, os.path.getsize(path))

    def __iter__(self):
        reader = {"parquet": self.parquet, "jsonl": self.jsonl, "text": self.text}[kind_of(self.name)]
        try:
            for number, (text, share) in enumerate(reader(), 1):
                if self.bytes and text and "\0" in text:
                    self.problem(f"{self.name}: document {number} has a byte 0, which separates documents")
                    text = None
                yield text, share
        except (OSError, EOFError) as error:
            raise BadInput(f"{self.name}: {first_line(error)}: the file is damaged or truncated") from None
        except Exception as error:
            if not {"ArrowException", "ZstdError", "error"} & {kind.__name__ for kind in type(error).__mro__}:
                raise
            raise BadInput(f"{self.name}: {first_line(error)}: the file is damaged or truncated") from None

    def problem(self, text):
        if not self.skip_bad:
            raise BadInput(f"{text} (--skip-bad skips such documents)")
        self.bad += 1

    def decode(self, data, place):
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.problem(f"{self.name}: {place} is not UTF-8 at its byte {error.start}")

    def too_long(self, place, size):
        """Whether a document of at least this size exceeds the limit, which is a problem."""
        if size > self.limit:
            self.problem(f"{self.name}: {place} has {size} bytes or more, and the limit is {self.limit_text}")
        return size > self.limit

    def parquet(self):
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path, buffer_size=BLOCK) as file:
            if self.field not in file.schema_arrow.names:
                columns = ", ".join(file.schema_arrow.names[:8])
                raise BadInput(f"{self.name} has no column '{self.field}' but {columns}: specify --text-field")
            rows, seen = max(1, file.metadata.num_rows), 0
            for group, size in self.row_groups(file.metadata, self.field):
                some = self.batch_rows(file.metadata, group, size)
                for batch in file.iter_batches(some, [group], [self.field]):
                    for value in batch.column(0):
                        seen += 1
                        yield self.parquet_text(value, f"row {seen}"), seen / rows

    def batch_rows(self, metadata, group, size):
        """The rows of a batch that have PARQUET_BYTES if each has the mean size of the row group, or the largest value
        of its dictionary, which any number of rows can have."""
        from pyarrow import compute, parquet

        about = metadata.row_group(group)
        largest, paths = size // about.num_rows, [about.column(i).path_in_schema for i in range(about.num_columns)]
        texts = [path for path in paths if path == self.field]  # none, if the field has columns within it
        # closed at once, since it keeps the pages of the row group
        with parquet.ParquetFile(self.path, metadata=metadata, read_dictionary=texts) as coded:
            values = next(coded.iter_batches(1, [group], [self.field])).column(0)
        if hasattr(values, "dictionary"):
            largest = max(largest, compute.max(compute.binary_length(values.dictionary)).as_py() or 0)
        return max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(1, largest)))

    def row_groups(self, metadata, field=None):
        """Yields (number, bytes of the pages of the column, or of all, as the file states them) of each row group."""
        for group in range(metadata.num_row_groups):
            about, size = metadata.row_group(group), 0
            for column in map(about.column, range(about.num_columns)):
                if field is None or f"{column.path_in_schema}.".startswith(f"{field}."):
                    size += column.total_uncompressed_size
            if size > self.limit * about.num_rows + PARQUET_BYTES:
                what = f"{self.name}: row group {group + 1} has {about.num_rows} rows of {size} bytes"
                raise BadInput(
                    f"{what}, and the limit of each is {self.limit_text}: the file is damaged, or remove them"
                )
            if about.num_rows:
                yield group, size

    def parquet_text(self, value, place):
        value = getattr(value, "value", value)  # of a dictionary
        if not hasattr(value, "as_buffer") or not value.is_valid:
            return self.problem(f"{self.name}: {place} has no text in '{self.field}'")
        data = value.as_buffer()
        return None if self.too_long(place, data.size) else self.decode(bytes(data), place)

    def lines(self, ending, unit):
        """Yields (place, bytes without the ending, or None if they exceed the limit; share of the file)."""
        rest, number, cut = b"", 1, False
        for block, at in text_blocks(self.path, self.name):
            pieces = (rest + block).split(ending)
            rest = pieces.pop()
            for piece in pieces:
                cut = cut or self.too_long(f"{unit} {number}", len(piece))
                yield f"{unit} {number}", (None if cut else piece), at / self.size
                number, cut = number + 1, False
            if cut or self.too_long(f"{unit} {number}", len(rest)):
                rest, cut = rest[-(len(ending) - 1) :] if len(ending) > 1 else b"", True
        if rest or cut:
            yield f"{unit} {number}", (None if cut else rest), 1.0

    def jsonl(self):
        for place, line, share in self.lines(b"\n", "line"):
            if line is None or line.strip():
                yield (None if line is None else self.json_text(line, place)), share

    def json_text(self, line, place):
        text = self.decode(line, place)
        if text is None:
            return None
        try:
            value = json_value(text)
        except (ValueError, RecursionError):
            return self.problem(f"{self.name}: {place} is not JSON")
        value = value.get(self.field) if isinstance(value, dict) else None
        if not isinstance(value, str):
            return self.problem(f"{self.name}: {place} has no text in '{self.field}'")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return self.problem(f"{self.name}: {place} has an unpaired surrogate")
        return value

    def text(self):
        for place, data, share in self.lines(self.delimiter or b"\0\0never", "document"):
            yield (None if data is None else self.decode(data, place)), share
