"""report.py: the command `report`: an offline HTML page and PNG files of labs, runs, or directories of runs.

    python3 scripts/lab report runs/loss-gap-cpu [MORE...] [--out DIR] [--watch SECONDS]

Writes report.html, NAME.png, results.json (all tables) and results.md (the main tables) into DIR (default:
FIRST/report). Runs that are not comparable, since their data, tokens or schedules differ, are an error.
--force compares them, prints the differences on the page, and gives runs with the same arm, rate and seed separate
rows. Unreadable runs and files are left out with a message.
Exit status: 0 done; 1 failed, or something was left out; 2 usage, or the runs are not comparable.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import python_environment

from . import attention_maps, claims, cli, currencies, evaluation_figures, figures, one_run, page
from . import ngrams, report_tables, run_directory, tables
from . import study as studies


def fail(message, status=1):
    cli.fail("lab report", message, status)


def parse_arguments(words):
    parser = cli.Parser(prog="lab report", description="Writes the report of a comparison.")
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="[NAME=]DIR",
        help="directory of a lab, of a run, or of several runs; with names, any runs are compared, and the page lists "
        "the options that differ",
    )
    parser.add_argument("--out", help="output directory (default: FIRST/report)")
    parser.add_argument(
        "--reference", help="arm that the others are compared with (default: the plan's, else the first)"
    )
    parser.add_argument("--force", action="store_true", help="compare runs that differ in data, tokens or schedule")
    parser.add_argument(
        "--heads", help="attention heads to show, such as 0:1,3:2 (layer:head; default: up to 24, evenly spaced)"
    )
    parser.add_argument("--no-png", action="store_true", help="write no PNG files")
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="update at this interval while runs continue; an open page reloads itself",
    )
    a = parser.parse_args(words)
    if a.watch is not None and not 1 <= a.watch <= 1e6:
        parser.error("--watch: must be 1 to 1,000,000 seconds")
    if a.heads is not None and not all(re.fullmatch(r"[0-9]+:[0-9]+", head) for head in a.heads.split(",")):
        parser.error(f"--heads {a.heads}: must be LAYER:HEAD, separated by commas, such as 0:1,3:2")
    pairs = [re.fullmatch("([^/=]+)=(.+)", path) if not Path(path).exists() else None for path in a.paths]
    a.named = all(pairs)
    if any(pairs) and not a.named:
        parser.error("NAME=DIR: give every directory a name, or none")
    names = [pair[1] for pair in pairs if pair]
    if len(set(names)) < len(names):
        parser.error(f"{next(n for n in names if names.count(n) > 1)}=DIR: the name is used more than once")
    a.paths = [(pair[1], pair[2]) if pair else path for pair, path in zip(pairs, a.paths)]
    a.heads = a.heads and [":".join(str(int(number)) for number in head.split(":")) for head in a.heads.split(",")]
    return a


def write_files(out, study, shown, maps, lr):
    """The PNG and PDF files; names those of a view in its `file`, for the page."""
    from . import png

    first = page.at_first(study, shown, lr)
    for figure in shown:
        for view in figure["views"]:
            name = re.sub(r"[^\w.+-]+", "-", f"{figure['id']}-{view['label']}")
            if png.figure_files(out / name, figure, view, list(page.arms_of(study, shown)), lr, first):
                view["file"] = name
    for m, tensors in maps:
        png.maps_png(out / (re.sub(r"[^\w.+-]+", "-", f"map-{m['arm']}") + ".png"), m["label"], m["sharpest"], tensors)


def compact(value):
    """JSON with 7 digits per number, and one line per innermost list or object, so that diffs are readable."""

    def shorter(x):
        if isinstance(x, dict):
            return {k: shorter(v) for k, v in x.items()}
        if isinstance(x, list):
            return list(map(shorter, x))
        return float(f"{x:.7g}") if isinstance(x, float) else x

    text = json.dumps(shorter(value), indent=1, allow_nan=False, ensure_ascii=False)
    joined = lambda m: m[1] + re.sub(r"\n\s+", " ", m[2]) + m[3]
    return re.sub(r"([\[{])\n\s+([^\[\]{}]*?)\n\s+([\]}])", joined, text) + "\n"


def load_maps(study, chosen, more_to_come):
    """[(data for the page, tensors)] of the first readable run of each arm. Each chosen head must be in one of them."""
    found, there = [], set()
    for arm, label in study.arms.items():
        paths = [run.directory / "attention.safetensors" for run in study.runs if run.arm == arm]
        for path in filter(Path.exists, paths):
            try:
                tensors = attention_maps.read(path)
            except run_directory.RunError as error:
                study.left_out.append(str(error))
                continue
            there |= set(attention_maps.heads_of(tensors).values())
            shown = attention_maps.maps_data(arm, label, tensors, chosen)
            if shown:
                found.append((shown, tensors))
            break
    unknown = [head for head in chosen or [] if head not in there]
    if unknown and not more_to_come:
        last = max(there, key=lambda head: tuple(map(int, head.split(":"))), default=None)
        fail(
            f"--heads {','.join(unknown)}: no run has maps of {'this head' if len(unknown) == 1 else 'these heads'}; "
            + (f"the last head is {last}" if last else "there are no maps"),
            2,
        )
    return found


def files_of(run, out):
    """The files of a run, relative to the directory of the page: (name, path)."""
    files = [("log", run.directory / "log.jsonl"), ("run.json", run.directory / "run.json")]
    files += [("output", run.directory.with_name(run.directory.name + ".out"))]
    return tuple((name, os.path.relpath(path, out)) for name, path in files if path.exists())


def compute(study):
    """(results, figures) of a study that has been checked."""
    ngrams.count(study)
    results = tables.results(study)
    if study.single:
        shown = one_run.all_figures(study.runs[0])
    else:
        shown = figures.comparison(study, results)
    shown = [f for f in [*shown, *evaluation_figures.all_figures(currencies.at_own_rates(study))] if f]
    results["claims"] = [] if results["no_verdict"] else claims.judge_study(study)
    return results, shown


def make(a, out, live, told):
    """Reads the runs and writes all files; returns the study. `told`: messages that have been printed."""
    study = studies.load(a.paths, a.reference)
    studies.check(study)
    studies.separate(study)
    maps = load_maps(study, a.heads, live and study.live)
    for line in study.left_out:
        if line not in told:
            print(f"lab report: {line}; left out", file=sys.stderr, flush=True)
            told.add(line)
    if study.problems and not a.force and not a.named:
        more = f" (and {len(study.problems) - 1} more)" if len(study.problems) > 1 else ""
        fail(f"the runs are not comparable: {study.problems[0]}{more}; --force compares them", 2)
    study.notes += [f"Left out: {line}." for line in study.left_out] + [
        f"Differs between runs: {p}" for p in study.problems[:20]
    ]
    results, shown = compute(study)
    out.mkdir(parents=True, exist_ok=True)
    if not a.no_png:
        write_files(out, study, shown, maps, page.first_rate(study, results))
    watch = a.watch if live and study.live else 0
    data, sections = page.content(study, results, shown, [m for m, _ in maps], lambda run: files_of(run, out), watch)
    run_directory.write_atomic(out / "report.html", page.build(study, data, sections))
    run_directory.write_atomic(out / "results.json", compact(results))
    run_directory.write_atomic(out / "results.md", report_tables.markdown(study, results))
    return study


def main(words):
    a = parse_arguments(words)
    python_environment.ensure("lab")
    path, told = Path(a.paths[0][1] if a.named else a.paths[0]), set()
    out = Path(a.out or (path.with_suffix("") if path.is_file() else path) / "report")
    study = None
    try:
        while study is None or (a.watch is not None and study.live):
            if study:
                time.sleep(a.watch)
            try:
                first, study = study is None, make(a, out, a.watch is not None, told)
                if first:
                    print(out / "report.html", flush=True)
            except studies.NothingYet:
                if a.watch is None:
                    raise
                time.sleep(a.watch)
    except run_directory.RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or out}: {error.strerror}")
    except KeyboardInterrupt:
        return 0
    return 1 if study.left_out else 0
