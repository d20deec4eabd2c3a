"""scoreboard.py: the command `scoreboard`: the verdicts of the claims (scripts/lab/claims) as Markdown.

    python3 scripts/lab scoreboard runs/family-cpu runs/late-gradients-cpu [--out scoreboard.md]
    python3 scripts/lab scoreboard dev/results/runs/*.jsonl --out dev/results/scoreboard.md

Reads labs and archives (archive.py). Those of one plan and size are read together, such as labs of other seeds. Runs
that are not comparable are an error.
Exit status: 0 done; 1 failed, or a file was left out; 2 usage, or the runs are not comparable.
"""

import math
import sys
import textwrap
from pathlib import Path

import python_environment

from . import archive, claims, cli, measurements, ngrams, preconditions, run_directory, stats, study as studies, tables
from .table import Table, as_markdown

METRICS = measurements.METRICS


def fail(message, status=1):
    cli.fail("lab scoreboard", message, status)


def table(head, rows):
    return as_markdown(Table("", head, rows))


def parse_arguments(words):
    parser = cli.Parser(prog="lab scoreboard", description="Prints the verdicts of the claims that labs test.")
    parser.add_argument("paths", nargs="+", metavar="LAB", help="directory of a lab (lab.json), or archive")
    parser.add_argument("--claims", default=str(claims.FILE), help="file of the claims (default: scripts/lab/claims)")
    parser.add_argument("--out", help="Markdown file to write (default: standard output)")
    return parser.parse_args(words)


def read_labs(paths):
    """(the Measurements of labs and archives in the order of their first paths, whether a file was left out)"""
    groups, found, left_out = {}, [], False
    for path in paths:
        header, entries = archive.read(path) if path.is_file() else ({"lab": run_directory.read_lab(path)}, [])
        lab = header.get("lab")
        if lab:
            groups.setdefault((lab["plan"].removesuffix(".plan"), lab["size"]), []).append(path)
        elif any("options" not in entry for entry in entries):
            found.append(measurements.of_numbers(header, entries))
        else:
            raise run_directory.RunError(f"{path}: no lab.json: a verdict requires the runs of a plan")
    for (plan, size), group in groups.items():
        study = studies.load(group)
        studies.check(study)
        for line in study.left_out:
            print(f"lab scoreboard: {line}; left out", file=sys.stderr)
        if study.problems:
            fail(f"the runs of {plan} are not comparable: {study.problems[0]}", 2)
        ngrams.count(study)
        found += measurements.of_study(study, f"{plan}-{size}")
        left_out = left_out or bool(study.left_out)
    return found, left_out


def in_unit(x, metric):
    return f"{math.exp(x):.3g}" if METRICS[metric].ratio else f"{x:+.4f}"


def shown_estimate(row):
    """Mean and interval in the unit of the metric; of a magnitude the ratio."""
    e, metric = row["estimate"], row["metric"]
    if not e:
        return "–"
    unit = "ratio" if METRICS[metric].ratio and len(row["arms"]) > 1 else METRICS[metric].unit
    low, high = (in_unit(e["mean"] + sign * e["half"], metric) if e["half"] is not None else "–" for sign in (-1, 1))
    return f"{in_unit(e['mean'], metric)} [{low}, {high}] {unit}".rstrip()


def expected(row):
    effect = f"a factor of {1 + row['effect']:g}" if METRICS[row["metric"]].ratio else f"{row['effect']:g}"
    return f"{row['metric']}, {row['expect']}, {effect}"


def deviation(row):
    """Whose deviation the interval has, and the p of the test of equal variances."""
    e = row["estimate"]
    if not e or len(row["arms"]) < 2 or row["metric"] != "loss":
        return "own" if e else "–"
    return ("pooled" if e["pooled"] else "own") + (f", {e['p_variances']:.2g}" if e["p_variances"] is not None else "")


def row_of(row):
    remarks = [row["remark"]] * bool(row["remark"])
    if row["diverged"]:
        remarks.append(f"{row['diverged']} runs diverged")
    verdict = f"**{row['verdict']}**" if row["verdict"] in claims.VERDICTS[:3] else row["verdict"]
    return [
        claims.told(row),
        f"`{' - '.join(row['arms'])}` {expected(row)}",
        shown_estimate(row),
        verdict + (f": {'; '.join(remarks)}" if remarks else ""),
        f"{row['p_holm']:.2g}" if row["p"] is not None else "–",
        row["estimate"]["n"] if row["estimate"] else "–",
        deviation(row),
        " and ".join(f"{n:,}" if n else "–" for n in row["parameters"]),
        f"{row['flops']:.2f}" if row["flops"] else "–",
    ]


HEAD = ["claim", "arms, metric, expected, smallest effect", "difference [95% interval]", "verdict", "p (Holm)", "seeds"]
HEAD += ["deviation", "parameters", "FLOPs, ratio"]


def power(measured):
    """Seeds that the smallest effect of interest requires, by arm, and their tokens."""
    losses = measured.table()
    rows = tables.noise_rows(losses, measured.reference)
    if not any(row["seeds_pooled"] for row in rows):
        return "Two or more seeds of two or more arms are required.\n"
    first = next(row for row in rows if row["seeds_pooled"])
    outside = [row["arm"] for row in rows if not row["in_pool"]]
    tokens = max(measured.of(measured.arms, "tokens"), default=0) * len(measured.arms)
    tokens *= 1 if measured.sweep else len(measured.rates)
    shown = lambda n: "more than 1000" if n is None else n
    gap = lambda row: [f"{row['gap_sd']:.4f}", shown(row["seeds_for_effect"]), shown(row["seeds_pooled"])]
    cells = [[row["arm"], f"{row['sd']:.4f}", *(gap(row) if row["gap_sd"] else ["–"] * 3)] for row in rows]
    return (
        f"Seeds with which a difference of {tables.EFFECT:g} nats is shown with probability {tables.POWER:g}, if it is "
        "the only claim: with the deviation of the arm's own paired gaps, and with the one that is pooled over "
        f"{first['pooled_arms']} arms, {first['pooled_gap_sd']:.4f} with {first['pooled_df']} degrees of freedom"
        + (f" (without {', '.join(outside)}, which deviate more)" if outside else "")
        + f". A seed of all arms takes {tokens / 1e6:.4g}M tokens.\n\n"
        + table(["arm", "deviation of the loss", "of the paired gap", "seeds, own", "seeds, pooled"], cells)
    )


def study_section(measured, rows):
    """The verdicts of one study."""
    values = lambda key: sorted(set(measured.of(measured.arms, key)))
    tokens, parameters, windows = values("tokens"), values("parameters"), values("windows")
    facts = [f"{' or '.join(f'{n / 1e6:.4g}M' for n in tokens)} tokens per run"] if tokens else []
    facts += [f"{parameters[0]:,} to {parameters[-1]:,} parameters"] if parameters else []
    facts.append(f"learning rate{'s' if measured.rates[1:] else ''} {', '.join(f'{lr:g}' for lr in measured.rates)}")
    facts[-1] += ", for each arm the best of its sweep" if measured.sweep else ""
    facts += [f"judged at {', '.join(map(str, measured.looks))} seeds"] if measured.looks else []
    facts += [f"losses over {' or '.join(map(str, windows))} validation windows"] if windows else []
    parts = [f"## {measured.study}\n", f"{'; '.join(facts)}. No verdict holds beyond this scale.\n"]
    required = preconditions.table(preconditions.rows(measured), measured.ngrams, {})
    parts += [f"### Preconditions: {measured.study}\n", f"{required.caption}\n", as_markdown(required)]
    for source in dict.fromkeys(row["source"] for row in rows):
        parts += [f"### {source}\n", table(HEAD, [row_of(row) for row in rows if row["source"] == source])]
    tested = any(row["p"] is not None and row["metric"] == "loss" for row in rows)
    return parts + [f"### Power: {measured.study}\n", power(measured)] * tested


def runs_needed(all_claims, rows):
    """Which runs can test a claim, and the verdicts that this page has."""
    cells = []
    for claim in {c.id: c for c in all_claims}.values():
        verdicts = [r["verdict"] for r in rows if r["id"] == claim.id and r["study"]]
        told = ", ".join(f"{verdicts.count(v)} {v}" for v in claims.VERDICTS if v in verdicts)
        where = f"`{claim.plan}`: {claim.size}" if claim.plan else claim.measured
        cells.append([f"`{claim.id}`", claim.claim, where, claim.hours or "–", told or "none"])
    head = ["id", "claim", "runs that can test it, or where it is measured", "GPU hours", "verdicts above"]
    return table(head, cells)


def page(all_claims, found):
    rows = claims.judge(all_claims, found)
    verdicts = [row["verdict"] for row in rows]
    tested = sum(row["p"] is not None for row in rows)
    untestable = sum(row["remark"].startswith("not testable") for row in rows)
    told = ", ".join(f"{verdicts.count(v)} {v}" for v in claims.VERDICTS if v in verdicts)
    parts = [
        "# Scoreboard of claims\n",
        f"{told}; of those not shown {untestable} are not testable in their study. The verdicts are corrected for the "
        f"{tested} tests of this page (Holm's method): with probability 95% all of them are right. The intervals are "
        f"single 95% intervals, of which about {tested / 20:.1f} of {tested} miss the true value.\n",
        "Differences are at equal tokens, except where a claim says FLOPs. The last column has the FLOPs of training "
        "the first arm, relative to the second. No difference is at equal time: on a CPU, DIFF V2 trains at 0.74 of "
        "the Transformer's tokens per second (`dev/BENCH.md`).\n",
        "A claim has no verdict where an arm is not below a 5-gram counted on the same data, or is not shown to use "
        "its context (`scripts/lab/preconditions.py`).\n",
        "`scripts/lab/claims` lists the claims, `scripts/lab/claims.py` defines the verdicts. Deviation: of the paired "
        "differences of the claim (own), or pooled over the arms; the number is p of the test of equal variances, "
        f"below {stats.EQUAL_VARIANCES_P:g} of which nothing is pooled. Every number follows from `runs`.\n",
    ]
    for measured in found:
        mine = [row for row in rows if row["study"] == measured.study]
        parts += study_section(measured, mine) if mine else []
    rest = [row for row in rows if not row["study"]]
    if rest:
        metric = lambda row: row["metric"] if row["metric"] in METRICS else ""
        cells = [[f"{r['claim']} ({r['source']})", metric(r), r["verdict"], r["remark"]] for r in rest]
        parts += ["## Without a verdict\n", table(["claim", "metric", "", "where"], cells)]
    parts += [
        "## Runs that can test the claims\n",
        "The smallest runs whose verdict says something about the published claim. GPU hours are predicted for H100s, "
        "for 5 seeds of all arms and rates of the plan (`lab run PLAN --size SIZE --dry-run`); `--arms` selects those "
        "of a claim. No GPU has been measured.\n",
        runs_needed(all_claims, rows),
    ]
    return wrapped("\n".join(parts))


def wrapped(text):
    """The text with lines of at most 120 columns, except those of tables."""
    fill = lambda line: line if line.startswith("|") else textwrap.fill(line, 120, break_on_hyphens=False)
    return "\n".join(map(fill, text.splitlines())) + "\n"


def main(words):
    a = parse_arguments(words)
    python_environment.ensure("lab")
    paths = list(map(Path, a.paths))
    try:
        found, left_out = read_labs(paths)
        text = page(claims.read(a.claims), found)
        if a.out:
            run_directory.write_atomic(a.out, text)
        else:
            print(text, end="")
    except run_directory.RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    return 1 if left_out else 0
