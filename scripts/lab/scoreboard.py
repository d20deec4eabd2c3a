"""scoreboard.py: the command `scoreboard`: the verdicts of the claims (scripts/lab/claims) as Markdown.

    python3 scripts/lab scoreboard runs/family-cpu runs/late-gradients-cpu [--out dev/results/scoreboard.md]

Labs of one plan and size are read together, such as labs of other seeds. Runs that are not comparable are an error.
Exit status: 0 done; 1 failed, or a file was left out; 2 usage, or the runs are not comparable.
"""

import math
import sys
import textwrap
from pathlib import Path

from . import claims, cli, run_directory, study as studies, tables
from .table import Table, as_markdown

VERDICTS = ("supported", "contradicted", "not shown", "not measured", "measured elsewhere")


def fail(message, status=1):
    cli.fail("lab scoreboard", message, status)


def table(head, rows):
    return as_markdown(Table("", head, rows))


def parse_arguments(words):
    parser = cli.Parser(prog="lab scoreboard", description="Prints the verdicts of the claims that labs test.")
    parser.add_argument("paths", nargs="+", metavar="LAB", help="directory of a lab (lab.json)")
    parser.add_argument("--claims", default=str(claims.FILE), help="file of the claims (default: scripts/lab/claims)")
    parser.add_argument("--out", help="Markdown file to write (default: standard output)")
    return parser.parse_args(words)


def read_labs(paths):
    """[(plan, size, study)] of the labs, in the order of their first paths."""
    groups = {}
    for path in map(Path, paths):
        lab = run_directory.read_lab(path)
        if not lab:
            raise run_directory.RunError(f"{path}: no lab.json: a verdict requires the runs of a plan")
        groups.setdefault((lab["plan"].removesuffix(".plan"), lab["size"]), []).append(path)
    found = []
    for (plan, size), group in groups.items():
        study = studies.load(group)
        studies.check(study)
        for line in study.left_out:
            print(f"lab scoreboard: {line}; left out", file=sys.stderr)
        if study.problems:
            fail(f"the runs of {plan} are not comparable: {study.problems[0]}", 2)
        found.append((plan, size, study))
    return found


def in_unit(x, claim):
    return f"{math.exp(x):.3g}" if claims.METRICS[claim.metric].ratio else f"{x:+.4f}"


def shown_estimate(row, claim):
    """Mean and interval in the unit of the metric; of a magnitude the ratio."""
    e = row["estimate"]
    if not e:
        return "–"
    unit = "ratio" if claims.METRICS[claim.metric].ratio and len(claim.arms) > 1 else claims.METRICS[claim.metric].unit
    low, high = (in_unit(e["mean"] + sign * e["half"], claim) if e["half"] is not None else "–" for sign in (-1, 1))
    return f"{in_unit(e['mean'], claim)} [{low}, {high}] {unit}".rstrip()


def expected(claim):
    effect = f"{claim.effect:g}"
    if claims.METRICS[claim.metric].ratio:
        effect = f"a factor of {1 + claim.effect:g}"
    return f"{claim.metric}, {claim.expect}, {effect}"


def row_of(claim, row):
    parameters = " and ".join(f"{n:,}" if n else "–" for n in row.get("parameters", []))
    n = f"{row['estimate']['n']}{', pooled' if row['pooled'] else ''}" if row["estimate"] else "–"
    remarks = [row["remark"]] * bool(row["remark"])
    if row.get("diverged"):
        remarks.append(f"{row['diverged']} runs diverged")
    verdict = f"**{row['verdict']}**" if row["verdict"] in VERDICTS[:2] else row["verdict"]
    return [
        claim.claim,
        f"`{' - '.join(claim.arms)}` {expected(claim)}",
        shown_estimate(row, claim),
        verdict + (f": {'; '.join(remarks)}" if remarks else ""),
        n,
        parameters,
    ]


def power(study):
    """Seeds that the smallest effect of interest requires, by arm, and their tokens."""
    lr = tables.main_rate(study)
    rows = [row for row in tables.noise(study) if row["lr"] == lr]
    shown = lambda n: "more than 1000" if n is None else n
    cells = [
        [row["label"], f"{row['sd']:.4f}"]
        + (
            [f"{row['gap_sd']:.4f}", shown(row["seeds_for_effect"]), shown(row["seeds_pooled"])]
            if row["gap_sd"]
            else ["–"] * 3
        )
        for row in rows
    ]
    if not rows or not rows[0]["pooled_df"]:
        return "Two or more seeds of two or more arms are required.\n"
    pooled = next((row["pooled_gap_sd"] for row in rows if row["pooled_gap_sd"]), None)
    outside = [row["label"] for row in rows if not row["in_pool"]]
    tokens = study.runs[0].tokens * len(study.arms)
    return (
        f"Seeds with which a difference of {tables.EFFECT:g} nats is shown with probability {tables.POWER:g}: with the "
        f"deviation of the arm's own paired gaps, and with the one that is pooled over {rows[0]['pooled_arms']} arms"
        + (f", {pooled:.4f} with {rows[0]['pooled_df']} degrees of freedom" if pooled else "")
        + (f" (without {', '.join(outside)}, which deviate more)" if outside else "")
        + f". A seed of all arms takes {tokens / 1e6:.4g}M tokens.\n\n"
        + table(["arm", "deviation of the loss", "of the paired gap", "seeds, own", "seeds, pooled"], cells)
    )


def lab_section(plan, size, study, found):
    """The verdicts of one plan at one size: [(claim, row)]."""
    first, rates = study.runs[0], ", ".join(f"{lr:g}" for lr in study.rates())
    numbers = sorted({run.parameters for run in study.runs if run.parameters})
    parts = [
        f"## {plan}, {size}\n",
        f"At {first.tokens / 1e6:.4g}M tokens per run, {numbers[0]:,} to {numbers[-1]:,} parameters, "
        if numbers
        else f"At {first.tokens / 1e6:.4g}M tokens per run, ",
    ]
    parts[-1] += f"learning rate{'s' if len(study.rates()) > 1 else ''} {rates}. No verdict holds beyond this scale.\n"
    if study.missing:
        parts.append(f"{len(study.missing)} planned runs have not started.\n")
    head = [
        "claim",
        "arms, metric, expected, smallest effect",
        "difference [95% interval]",
        "verdict",
        "seeds",
        "parameters",
    ]
    for source in dict.fromkeys(claim.source for claim, _ in found):
        rows = [row_of(claim, row) for claim, row in found if claim.source == source]
        parts += [f"### {source}\n", table(head, rows)]
    return parts + [f"### Power: {plan}, {size}\n", power(study)]


def page(all_claims, labs):
    sections, counts, of_plan = [], {}, {}
    for plan, size, study in labs:
        mine = [claim for claim in all_claims if claim.plan == plan and claim.metric != "elsewhere"]
        found = [(claim, claims.judge(claim, study)) for claim in mine]
        of_plan[plan] = True
        for _, row in found:
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
        sections += lab_section(plan, size, study, found)
    rest = [(c, claims.judge(c, None)) for c in all_claims if c.metric == "elsewhere" or c.plan not in of_plan]
    for _, row in rest:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if v in counts)
    decided = sum(counts.get(v, 0) for v in VERDICTS[:3])
    parts = [
        "# Scoreboard of claims\n",
        f"{told}. `scripts/lab/claims` lists the claims, `scripts/lab/claims.py` defines the verdicts. "
        f"Intervals are not adjusted for the number of claims: of {decided} intervals about "
        f"{decided / 20:.0f} miss the true value.\n",
        *sections,
    ]
    if rest:
        cells = [[f"{c.claim} ({c.source})", row["verdict"], row["remark"]] for c, row in rest]
        parts += ["## Without a verdict\n", table(["claim", "", "where"], cells)]
    return wrapped("\n".join(parts))


def wrapped(text):
    """The text with lines of at most 120 columns, except those of tables."""
    fill = lambda line: line if line.startswith("|") else textwrap.fill(line, 120, break_on_hyphens=False)
    return "\n".join(map(fill, text.splitlines())) + "\n"


def main(words):
    a = parse_arguments(words)
    try:
        labs = read_labs(a.paths)
        text = page(claims.read(a.claims), labs)
        if a.out:
            run_directory.write_atomic(a.out, text)
        else:
            print(text, end="")
    except run_directory.RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    return 1 if any(study.left_out for _, _, study in labs) else 0
