"""report.py: the command `report`: the runs of plans as one page.

    python3 scripts/lab report runs/loss-gap-cpu [MORE...] [--out DIR]

Writes report.html (one file without scripts), report.md (without the long tables) with its figures NAME.svg, and
results.json (all numbers) into DIR (default: FIRST/report, or for a saved file its name without the suffix). RUNS are
labs, runs, directories of runs, or files of the command `save`. Runs that are not comparable, since their data, tokens
or schedules differ, are an error; with names, NAME=DIR, any runs are compared, and the page lists what differs.
Exit status: 0 done; 1 failed, or something was left out; 2 usage, or the runs are not comparable.
"""

import base64
import json
import re
import shlex
import sys
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import python_environment

from . import cli, figures, results, run_directory, saved, tables
from . import study as studies

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Picture(NamedTuple):
    name: str
    title: str
    note: str
    svg: str

    @property
    def address(self):
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


def parse_arguments(words):
    parser = cli.Parser(prog="lab report", description="Writes the report of a comparison.")
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="[NAME=]RUNS",
        help="lab, run, directory of runs, or saved file; with names, any runs are compared, and the page lists the "
        "options that differ",
    )
    parser.add_argument("--out", help="output directory (default: FIRST/report)")
    a = parser.parse_args(words)
    pairs = [re.fullmatch("([^/=]+)=(.+)", path) if not Path(path).exists() else None for path in a.paths]
    a.named = all(pairs)
    if any(pairs) and not a.named:
        parser.error("NAME=DIR: give every directory a name, or none")
    names = [pair[1] for pair in pairs if pair]
    if len(set(names)) < len(names):
        parser.error(f"{next(n for n in names if names.count(n) > 1)}=DIR: the name is used more than once")
    a.paths = [(pair[1], pair[2]) if pair else path for pair, path in zip(pairs, a.paths)]
    return a


def section_of(group):
    """The title, question and contents of the studies of one plan: tables and pictures, each beside what it shows."""
    numbers = [s for s, _ in group]
    drawn = [figures.sizes(numbers)] if len(group) > 1 else figures.of_study(*group[0])
    pictures = {f.name: Picture(f.name, f.title, f.note, svg) for f in drawn if (svg := f.svg())}
    contents, shown = tables.of_arms(numbers), tables.of_study(numbers[0]) if len(group) == 1 else []
    contents += [pictures.pop(name) for name in ("sizes", "loss", "training") if name in pictures]
    for table in shown:
        contents.append(table)
        contents += [pictures.pop(name) for name in list(pictures) if pictures[name].title == table.title]
    prefix = f"{numbers[0]['plan'] or 'runs'}-"
    named = [c._replace(name=prefix + c.name) if isinstance(c, Picture) else c for c in contents]
    title = numbers[0]["title"] if len(group) == 1 else group[0][1].lab["title"]
    notes = [f"{s['name']}: {note}" if len(group) > 1 else note for s in numbers for note in s["notes"]]
    found = {"title": title, "question": numbers[0]["question"], "contents": named, "notes": notes}
    return found | {"several": len(group) > 1}


def page_of(found, numbers):
    """What the templates show."""
    pairs = list(zip(numbers["studies"], found))
    groups = [list(group) for _, group in groupby(pairs, key=lambda pair: (pair[1].plan, pair[0]["reference"]))]
    sections = [section_of(group) for group in groups]
    title = "; ".join(dict.fromkeys(section["title"] for section in sections))
    return {"title": title, "summary": numbers["summary"], "sections": sections, "left_out": numbers["left_out"]}


def for_markdown(text):
    """Text of runs in Markdown: it is neither HTML, nor the end of a cell or a line."""
    text = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(text.replace("|", "\\|").replace("`", "\\`").split())


def render(name, page):
    import jinja2

    html = name.endswith(".html.j2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=html, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["md"] = for_markdown
    environment.tests["table"] = lambda item: isinstance(item, tables.Table)
    return environment.get_template(name).render(page)


def compute(paths, named=False):
    """(results, page) of paths. Runs that are not comparable and have no names are an error."""
    found, left_out = studies.load(paths)
    for study in found if not named else ():
        if study.problems:
            more = f" (and {len(study.problems) - 1} more)" if study.problems[1:] else ""
            cli.fail(
                "lab report",
                f"the runs are not comparable: {study.problems[0]}{more}; NAME=DIR for each directory compares them "
                "nevertheless",
                2,
            )
    numbers = results.of(found)
    numbers |= {"summary": tables.summary(numbers["studies"]), "left_out": left_out}
    inside = [] if named else [Path(path).resolve() for path in paths if Path(path).resolve().is_relative_to(ROOT)]
    source = shlex.join(str(path.relative_to(ROOT)) for path in inside) or "RUNS"
    return numbers, page_of(found, numbers) | {"source": source}


def main(words):
    a = parse_arguments(words)
    python_environment.ensure("lab")
    first = Path(a.paths[0][1] if a.named else a.paths[0])
    out = Path(a.out or (first.with_suffix("") if first.is_file() else first / "report"))
    try:
        numbers, page = compute(a.paths, a.named)
        for line in numbers["left_out"]:
            print(f"lab report: {line}; left out", file=sys.stderr)
        out.mkdir(parents=True, exist_ok=True)
        run_directory.write_atomic(out / "report.html", render("page.html.j2", page))
        run_directory.write_atomic(out / "report.md", render("page.md.j2", page))
        text = json.dumps(saved.short(numbers), indent=1, allow_nan=False, ensure_ascii=False)
        run_directory.write_atomic(out / "results.json", text + "\n")
        for section in page["sections"]:
            for picture in (c for c in section["contents"] if isinstance(c, Picture)):
                run_directory.write_atomic(out / f"{picture.name}.svg", picture.svg)
    except run_directory.RunError as error:
        cli.fail("lab report", str(error))
    except OSError as error:
        cli.fail("lab report", f"{error.filename or out}: {error.strerror}")
    print(out / "report.html")
    return 1 if numbers["left_out"] else 0
