#!/usr/bin/env python3
"""Writes a corpus of long documents, prose and documentation, from packages of Debian 12; without the Hub.

  data/offline_corpus.py [--out DIR] [--debs DIR] [--sources NAME,...] [options of data/prepare.py]

  --out      the corpus directory (corpora/documents)
  --debs     keep the packages in this directory, and use those that are there already
  --sources  only these sources (all)

Packages are downloaded with apt-get and unpacked, not installed, which requires no root. A document is a page of a
manual, a chapter, a file of documentation, or a book of the Bible. Markup (troff requests, HTML tags, POD commands) is
removed. Then, in the order of SOURCES,
  * a paragraph of at least PARAGRAPH characters that occurred before is removed (texts of licenses, included pages);
  * a document of fewer than SHORTEST bytes is left out.
The order of documents is that of their SHA-256. Of each source, the first with at least VALIDATION of its bytes are for
validation in a shard of all sources, which is read first, and the next in a shard of the source (prepare.py
--val-field). Without --tokenizer or --train-bpe, a BPE of 8192 tokens is trained on the documents.

The same packages give the same text, whose fingerprint (SHA-256) is printed. DIR/sources.json has the fingerprint, and
versions, licenses and sizes by source.
"""

import argparse
import gzip
import hashlib
import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outputs import open_output, write_json

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


def plain(pattern):
    return lambda root: (read_text(p) for p in files(root, pattern))


# troff requests that leave no text, and those whose arguments are set without spaces between them.
SILENT = tuple(
    '.\\" \'\\" .ie .el .if .de .ds .nr .. .Dd .Dt .Os .RS .RE .sp .in .ti .ft .nf .fi .TS .TE .ad .hy'.split()
)
JOINED = ("BI", "IB", "BR", "RB", "IR", "RI")


def manual(root):
    for path in files(root, "usr/share/man/man*/*.gz"):
        lines = []
        for line in (read_text(path) or "").splitlines():
            if line.startswith(SILENT):
                continue
            if re.match(r"\. *(SH|SS|PP?|LP|[TI]P)\b", line):
                lines.append("")
            if request := re.match(r"[.']\s*([A-Za-z]*)\s*", line):
                words = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', line[request.end() :])]
                line = ("" if request[1] in JOINED else " ").join(words)
            line = (
                re.sub(r"\\f(\([A-Z]+|\[[^]]*\]|[BIRPC])|\\&|\\s[-+]?[0-9]", "", line)
                .replace("\\-", "-")
                .replace("\\(aq", "'")
                .replace("\\e", "\\")
            )
            if line:
                lines.append(line)
        yield re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


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
    NAVIGATION = {"navheader", "navfooter", "docnav", "nosearch"}  # classes
    BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "tr", "pre", "dt", "dd", "br", "table"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.hidden, self.navigation, self.depth = [], 0, None, 0

    def handle_starttag(self, tag, attributes):
        if not self.depth and dict(attributes).get("class") in self.NAVIGATION:
            self.navigation = tag
        self.depth += tag == self.navigation
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.depth -= tag == self.navigation
        if not self.depth:
            self.navigation = None
        self.hidden -= tag in self.HIDDEN and self.hidden > 0
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden and not self.depth:
            self.parts.append(data)


def pages(pattern):
    def read(root):
        for path in files(root, pattern):
            page = Text()
            page.feed(read_text(path) or "")
            yield re.sub(r"\n\s*\n+", "\n\n", "".join(page.parts)).strip()

    return read


# A book is a document, a chapter a paragraph. Verses begin with a name such as 1Jo2:3.
def bible(root):
    command = [root / "usr/bin/bible", "-f", "-p", root / "usr/lib", "gen1:1-rev22:21"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        fail(f"bible-kjv: {error.strerror}: --debs must have the package for this machine's architecture")
    verses = [re.match(r"(.\D+)(\d+):\d+ (.*)", line).groups() for line in done.stdout.splitlines()]
    for _, book in itertools.groupby(verses, key=lambda verse: verse[0]):
        chapters = itertools.groupby(book, key=lambda verse: verse[1])
        yield "\n\n".join("\n".join(text for _, _, text in chapter) for _, chapter in chapters)


def annotations(root):
    for path in files(root, "usr/share/doc/c++-annotations/cplusplus.txt.gz"):
        yield from re.split(r"\n(?=Chapter \d+: )", read_text(path))


DOC, HTML = "usr/share/doc", "usr/share/doc/{}/html/{}*.html"
SOURCES = (  # source, packages, license of the text, documents
    ("prose", ("anarchism",), "GPL-2", pages(HTML.format("anarchism", ""))),
    ("prose", ("bible-kjv", "bible-kjv-text"), "public domain", bible),
    ("prose", ("cfi-en",), "public domain", pages(f"{DOC}/cfi-en/html/*.htm")),
    ("guides", ("c++-annotations-txt",), "GPL-2+", annotations),
    ("guides", ("gitmagic",), "GPL-3+", pages(HTML.format("gitmagic", "ch"))),
    ("guides", ("debian-handbook",), "CC-BY-SA-3.0 or GPL-2+", pages(HTML.format("debian-handbook", "en-US/"))),
    ("guides", ("debian-reference-en",), "GPL-2+", pages("usr/share/debian-reference/*.en.html")),
    ("guides", ("developers-reference",), "GPL-2+", plain("usr/share/developers-reference/_sources/*.txt")),
    ("guides", ("debian-policy",), "GPL-2+", pages(f"{DOC}/debian-policy/**/*.html")),
    ("guides", ("harden-doc",), "GPL-2+", pages(HTML.format("harden-doc", "en-US/"))),
    ("guides", ("installation-guide-amd64",), "GPL-2", pages(f"{DOC}/installation-guide-amd64/en/*.html")),
    ("linux", ("linux-doc-6.1",), "GPL-2", plain(f"{DOC}/linux-doc-*/html/_sources/**/*.txt")),
    ("python", ("python3.11-doc",), "PSF-2", plain(f"{DOC}/python3.11/html/_sources/**/*.txt")),
    ("manual", ("manpages", "manpages-dev"), "Linux-man-pages-copyleft, GPL-2+, BSD", manual),
    ("perl", ("perl-doc",), "Artistic or GPL-1+", pod),
    ("postgresql", ("postgresql-doc-15",), "PostgreSQL", pages(HTML.format("postgresql-doc-15", ""))),
    ("git", ("git-doc",), "GPL-2", plain(f"{DOC}/git*/**/*.txt")),
    ("vim", ("vim-doc",), "Vim, OPL-1+", pages(HTML.format("vim", ""))),
    ("sqlite", ("sqlite3-doc",), "public domain", pages(f"{DOC}/sqlite3/**/*.html")),
)
NAMES = list(dict.fromkeys(row[0] for row in SOURCES))
PARAGRAPH, SHORTEST, VALIDATION = 80, 1000, 0.01


def apt(lists, directory, *command):
    options = ["-qq", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "APT::Sandbox::User="]
    if lists.exists():
        options += ["-o", f"Dir::State::lists={lists}/lists", "-o", f"Dir::Cache={lists}/cache"]
    try:
        return subprocess.run(["apt-get", *options, *command], cwd=directory, capture_output=True, text=True)
    except FileNotFoundError:
        fail("apt-get is missing: download the packages elsewhere, and specify their directory with --debs")


def package_file(package, directory, work):
    """The .deb file of a package in the directory, downloaded if it is not there."""
    find = lambda: sorted(directory.glob(f"{package}_*.deb"))
    if not find():
        done = apt(work / "apt", directory, "download", package)
        if done.returncode and not (work / "apt").exists():  # no package lists, or old ones: download private ones
            for name in ("lists/partial", "cache/archives/partial"):
                (work / "apt" / name).mkdir(parents=True)
            apt(work / "apt", directory, "update")
            done = apt(work / "apt", directory, "download", package)
        if done.returncode:
            reason = (re.findall(r"^E: (.*)", done.stderr, re.M) or ["no message"])[0]
            fail(f"{package}: {reason}: check the network and that this is Debian 12, or select others with --sources")
    if len(found := find()) != 1:
        fail(f"{directory} has {len(found)} files {package}_*.deb, expected 1")
    return found[0]


def read_source(packages, read, debs, work):
    """(versions of the packages, their texts)"""
    versions, root = {}, work / "root"
    for package in packages:
        deb = package_file(package, debs, work)
        if not shutil.which("dpkg-deb"):
            fail("dpkg-deb is missing: install dpkg")
        if subprocess.run(["dpkg-deb", "-x", deb, root], capture_output=True).returncode:
            fail(f"cannot unpack {deb}: remove it")
        versions[package] = deb.name.split("_")[1].replace("%3a", ":")
    texts = [text for text in read(root) if text]
    shutil.rmtree(root)
    return versions, texts


def without_repetitions(text, seen):
    """The text without its long paragraphs that are in `seen`, to which it adds the others."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        words = " ".join(paragraph.split())
        if len(words) < PARAGRAPH or words not in seen:
            kept.append(paragraph)
        seen.add(words)
    return "\n\n".join(kept)


def size(texts):
    return sum(len(text.encode()) for text in texts)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def split(texts):
    """The documents of a source in their order: two parts for validation, and the rest."""
    texts, parts = sorted(texts, key=digest), []
    for least in (VALIDATION * size(texts), VALIDATION * size(texts)):
        count = next(n for n in range(1, len(texts) + 1) if size(texts[:n]) >= least)
        parts.append(texts[:count])
        texts = texts[count:]
    return *parts, texts


def gather(names, debs, work):
    """(lines of the corpus, description of each source)"""
    seen, texts, about = set(), {}, {}
    for name, packages, license, read in SOURCES:
        if name not in names:
            continue
        versions, found = read_source(packages, read, debs, work)
        kept = [text for t in found if len((text := without_repetitions(t, seen)).encode()) >= SHORTEST]
        if not kept:
            fail(f"{', '.join(packages)}: no documents: another version of the package? Select others with --sources")
        texts.setdefault(name, []).extend(kept)
        about.setdefault(name, {"packages": {}})["packages"] |= {p: [v, license] for p, v in versions.items()}
        print(
            f"  {name:10} {size(kept) / 1e6:5.1f} of {size(found) / 1e6:5.1f} MB in {len(kept):4} documents: ", end=""
        )
        print(", ".join(f"{package} {version}" for package, version in versions.items()), flush=True)
    shards = {"all": [], **texts, None: []}
    for name, own in texts.items():
        first, shards[name], rest = split(own)
        shards["all"] += first
        shards[None] += rest
        sizes = sorted(len(text.encode()) for text in own)
        about[name] |= {"documents": len(own), "bytes": sum(sizes)}
        about[name] |= {"document_bytes": {"median": sizes[len(sizes) // 2], "largest": sizes[-1]}}
    records = [
        {"text": text, **({"val": name} if name else {})}
        for name, own in shards.items()
        for text in sorted(own, key=digest)
    ]
    return [json.dumps(record, ensure_ascii=False) + "\n" for record in records], about


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE.parent / "corpora/documents"), metavar="DIR")
    parser.add_argument("--debs", metavar="DIR")
    parser.add_argument("--sources", default=",".join(NAMES), metavar="NAME,...")
    options, rest = parser.parse_known_args()
    names = options.sources.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--sources: '{unknown[0]}' is not one of {', '.join(NAMES)}")
    if not any(word.startswith(("--tokenizer", "--train-bpe")) for word in rest):
        rest += ["--train-bpe", "8192"]
    out = Path(options.out)
    text = Path(f"{out}.jsonl")  # also of DIR/
    out.mkdir(parents=True, exist_ok=True)
    if text.exists() and (out / "sources.json").exists():
        made = json.loads((out / "sources.json").read_text())["sources"]
        if made.keys() != set(names):
            fail(f"{text} has the sources {', '.join(made)}: remove it, or specify another --out")
    else:
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            debs = Path(options.debs or work)
            debs.mkdir(parents=True, exist_ok=True)
            lines, about = gather(names, debs.absolute(), Path(work))
        data = "".join(lines).encode()
        fingerprint = hashlib.sha256(data).hexdigest()
        write_json(out / "sources.json", {"fingerprint": fingerprint, "sources": about})
        with open_output(text) as f:
            f.write(data)
        print(f"{text}: {len(lines)} documents, {len(data) / 1e6:.1f} MB, fingerprint {fingerprint[:16]}", flush=True)
    command = [sys.executable, str(HERE / "prepare.py"), str(text), "--out", options.out, "--val-field", "val", *rest]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
