#!/usr/bin/env python3
"""Writes a corpus of more than 100 MB of text from distribution packages, with GPT-2's tokens; without the Hub.

  data/offline_corpus.py [--out DIR] [--tokenizer T] [options of data/prepare.py]

  --out        the corpus directory (corpus/offline)
  --debs DIR   use the packages *.deb in DIR instead of downloading them with apt-get

Packages are downloaded and unpacked, not installed, which requires no root. A source whose package is not available is
skipped with a message. A document is an entry of the dictionary, a page of a manual, a file of documentation, or a
chapter. Markup (troff requests, HTML tags, POD commands) is removed. The documents are shuffled in a fixed order, so
that the first tokens, for validation, are a sample of all sources.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from outputs import open_output

HERE = Path(__file__).resolve().parent


def fail(text):
    sys.exit(f"offline_corpus.py: {text}")


def read_text(path):
    """The decompressed text of a file; None if it is not UTF-8."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def files(root, pattern):
    return sorted(p for p in root.glob(pattern) if p.is_file() and not p.is_symlink())


# An entry begins at the margin after an empty line, with a pronunciation between backslashes; its text is indented.
def dictionary(root):
    sources = re.compile(
        r" *\[(1913 Webster|Webster 1913 Suppl\.|WordNet [0-9.]+|PJC|Century Dict\. 1906|AS|RP|RH)( ?\+ ?[A-Za-z]+)*\]"
    )
    for path in files(root, "usr/share/dictd/gcide.dict.dz"):
        entry, empty, begun = [], True, False
        for line in gzip.open(path, "rt", encoding="utf-8", errors="replace"):
            if empty and not line.startswith(" ") and line.count("\\") >= 2:
                if begun and entry:
                    yield "\n".join(entry)
                entry, begun = [], True
            empty = not line.strip()
            if begun:
                entry.append(sources.sub("", line).translate({ord("{"): None, ord("}"): None}).strip())
        if entry:
            yield "\n".join(entry)


# A headword is at the margin; its text is indented.
def computing(root):
    for path in files(root, "usr/share/dictd/foldoc.dict.dz"):
        for entry in re.split(r"\n(?=\S)", read_text(path) or ""):
            yield re.sub(r"^ +", "", entry, flags=re.M).translate({ord("{"): None, ord("}"): None})


def plain(pattern):
    return lambda root: (read_text(p) for p in files(root, pattern))


def manual(root):
    for path in files(root, "usr/share/man/man*/*.gz"):
        lines = []
        for line in (read_text(path) or "").splitlines():
            if line.startswith(('.\\"', "'\\\"", ".ie", ".el", ".if", ".de", ".ds", ".nr", "..", ".Dd", ".Dt", ".Os")):
                continue
            if line[:1] in (".", "'"):
                line = re.sub(r"^. *[A-Za-z]* *", "", line)
            line = (
                re.sub(r"\\f(\([A-Z]+|\[[^]]*\]|[BIRPC])|\\&|\\s[-+]?[0-9]", "", line)
                .replace("\\-", "-")
                .replace("\\(aq", "'")
                .replace("\\e", "\\")
            )
            if line:
                lines.append(line)
        yield "\n".join(lines)


def pod(root):
    for path in files(root, "usr/share/perl/*/**/*.pod"):
        text = read_text(path)
        if text:
            text = re.sub(r"^=(head\d|item) *", "", text, flags=re.M)
            text = re.sub(r"^=[a-z]+.*\n", "", text, flags=re.M)
            yield re.sub(r"\b[BCEFILSXZ]<+ ?([^<>]*?) ?>+", r"\1", text)


class Text(html.parser.HTMLParser):
    """The text of a page without its head, scripts and navigation."""

    HIDDEN = {"head", "script", "style"}
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "tr", "pre", "dt", "dd", "br", "table"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.hidden, self.navigation = [], 0, 0

    def handle_starttag(self, tag, attributes):
        if tag == "div" and (self.navigation or dict(attributes).get("class") in ("navheader", "navfooter")):
            self.navigation += 1
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.navigation -= tag == "div" and self.navigation > 0
        self.hidden -= tag in self.HIDDEN and self.hidden > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden and not self.navigation:
            self.parts.append(data)


def pages(pattern):
    def read(root):
        for path in files(root, pattern):
            page = Text()
            page.feed(read_text(path) or "")
            yield re.sub(r"\n\s*\n+", "\n\n", "".join(page.parts)).strip()

    return read


def bible(root):
    command = [root / "usr/bin/bible", "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError:  # a program for another architecture
        return
    chapter, verses = "", []
    for line in done.stdout.splitlines():
        if line.partition(":")[0] != chapter and verses:
            yield "\n".join(verses)
            verses = []
        chapter = line.partition(":")[0]
        verses.append(line)
    if verses:
        yield "\n".join(verses)


SOURCES = (  # what, packages, documents
    ("dictionary", ("dict-gcide",), dictionary),
    ("linux", ("linux-doc-6.1",), plain("usr/share/doc/linux-doc-*/html/_sources/**/*.txt")),
    ("python", ("python3.11-doc",), plain("usr/share/doc/python3.11/html/_sources/**/*.txt")),
    ("manual", ("manpages", "manpages-dev"), manual),
    ("perl", ("perl-doc",), pod),
    ("postgresql", ("postgresql-doc-15",), pages("usr/share/doc/postgresql-doc-15/html/*.html")),
    ("git", ("git-doc",), plain("usr/share/doc/git*/**/*.txt")),
    ("vim", ("vim-doc",), pages("usr/share/doc/vim/html/*.html")),
    ("sqlite", ("sqlite3-doc",), pages("usr/share/doc/sqlite3/**/*.html")),
    ("computing", ("dict-foldoc",), computing),
    ("bible", ("bible-kjv", "bible-kjv-text"), bible),
    ("handbook", ("debian-handbook",), pages("usr/share/doc/debian-handbook/html/en-US/*.html")),
)


def apt(directory, *command):
    lists = directory.parent / "apt"
    options = ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "APT::Sandbox::User="]
    if lists.exists():
        options += ["-o", f"Dir::State::lists={lists}/lists", "-o", f"Dir::Cache={lists}/cache"]
    try:
        return subprocess.run(["apt-get", *options, *command], cwd=directory, capture_output=True, text=True)
    except FileNotFoundError:
        fail("apt-get is missing: download the packages to a directory, and specify --debs")


def download(packages, directory):
    """(the .deb files of the packages, None) or (None, the reason)."""
    directory.mkdir(parents=True, exist_ok=True)
    done = apt(directory, "download", *packages)
    if (
        done.returncode and not (directory.parent / "apt").exists()
    ):  # the package lists are missing or old: download private ones
        for name in ("lists/partial", "cache/archives/partial"):
            (directory.parent / "apt" / name).mkdir(parents=True)
        apt(directory, "update")
        done = apt(directory, "download", *packages)
    if done.returncode:
        return None, (re.findall(r"^E: (.*)", done.stderr, re.M) or ["no message"])[0]
    return sorted(directory.glob("*.deb")), None


def documents(work, debs):
    total = 0
    for name, packages, read in SOURCES:
        root = work / name
        if debs:
            found = [f for p in packages for f in sorted(Path(debs).glob(f"{p}_*.deb"))]
            reason = None if len(found) == len(packages) else f"{debs} does not contain all of {', '.join(packages)}"
        else:
            found, reason = download(packages, work / f"debs_{name}")
        if reason:
            print(f"  {name:12} skipped: {reason}", flush=True)
            continue
        for deb in found:
            if subprocess.run(["dpkg-deb", "-x", deb, root], capture_output=True).returncode:
                fail(f"cannot unpack {deb}: download it again")
        texts = [t.strip() for t in read(root) if t and len(t.strip()) >= 20]
        size = sum(len(t.encode()) for t in texts)
        total += size
        print(f"  {name:12} {size / 1e6:6.1f} MB in {len(texts)} documents ({', '.join(packages)})", flush=True)
        subprocess.run(["rm", "-rf", root])
        yield from texts
    if total < 1_000_000:
        fail("no package is available: check the network, or specify --debs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE.parent / "corpus/offline"), metavar="DIR")
    parser.add_argument("--debs", metavar="DIR")
    options, rest = parser.parse_known_args()
    text = Path(f"{options.out}.jsonl")
    text.parent.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        with tempfile.TemporaryDirectory(dir=text.parent) as work:
            # sorted by a hash of the text: a shuffle that does not depend on the order of the sources
            unique = {hashlib.sha256(d.encode()).digest(): d for d in documents(Path(work), options.debs)}
            with open_output(text) as f:
                for key in sorted(unique):
                    f.write(json.dumps({"text": unique[key]}, ensure_ascii=False).encode() + b"\n")
        size = sum(len(d.encode()) for d in unique.values()) / 1e6
        print(f"{text}: {size:.1f} MB in {len(unique)} different documents", flush=True)
    os.execv(sys.executable, [sys.executable, str(HERE / "prepare.py"), str(text), "--out", options.out, *rest])


if __name__ == "__main__":
    main()
