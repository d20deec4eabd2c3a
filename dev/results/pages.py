#!/usr/bin/env python3
"""
Writes the tables between `<!-- NAME -->` and `<!-- end -->` in the pages of this folder from runs.csv.

Usage: dev/results/pages.py [--check]
  --check   write nothing. Exit status 1 with a line for each page whose tables do not follow from runs.csv, and for
            each `m ± h` and `m [low, high]` with four decimals in its text that neither they nor scoreboard.md have
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "scripts"))
from lab import measurements, stats
from lab.scoreboard import table
from lab.table import parameters_text

PLANS = HERE.parent.parent / "scripts/plans"


def studies():
    """{name: Measurements} of runs.csv"""
    return {measured.study: measured for measured in measurements.read(HERE / "runs.csv")}


def named(plan, key="label"):
    """{arm: value of a key} of a plan."""
    arms = re.findall(r"^\[arm (\S+)\]\n((?:[^[].*\n)*)", (PLANS / f"{plan}.plan").read_text(), re.M)
    found = {arm: re.search(rf"^{key} = (.*)$", keys, re.M) for arm, keys in arms}
    return {arm: value[1] for arm, value in found.items() if value}


def interval(e, sign=""):
    return f"{e.mean:{sign}.4f}" + (f" ± {e.half:.4f}" if e.half is not None else "")


def gap(measured, arm, reference):
    losses = measured.table()
    return stats.pooled_gap(losses, arm, reference, measured.pool)


def gaps(measured, plan):
    """All arms of a study: its loss, and its gap to the reference."""
    head = ["arm", "parameters", "FLOPs/token", "loss", "gap to the Transformer", "deviation", "p, Holm"]
    names, losses, reference = named(plan), measured.table(), measured.reference
    found = {arm: gap(measured, arm, reference) for arm in losses if arm != reference}
    p = dict(zip(found, stats.holm([e.p for e in found.values()])))
    rows = []
    for arm, by_seed in losses.items():
        of = lambda key: measured.of([arm], key)[0]
        row = [names[arm], parameters_text(of("parameters"), of("active_parameters")), f"{of('flops_per_token'):,}"]
        row.append(interval(stats.t_interval(list(by_seed.values()))))
        e = found.get(arm)
        row += [interval(e, "+"), "pooled" if e.pooled else "own", f"{p[arm]:.2g}"] if e else ["", "", ""]
        rows.append(row)
    return table(head, rows)


def by_rate(measured, plan):
    """The loss of the reference by rate, and the gaps of the other arms at the same rate."""
    names, rows = named(plan), []
    arms = [arm for arm in measured.arms if arm != measured.reference]
    for rate in measured.rates:
        at = measurements.Measurements(measured.study, [row for row in measured.rows if row["rate"] == rate])
        base = stats.t_interval(list(at.by_seed(at.reference, "loss").values()))
        rows.append([f"{rate:g}", f"{base.mean:.4f}", *(interval(gap(at, arm, at.reference), "+") for arm in arms)])
    seeds = ", ".join(map(str, sorted({row["seed"] for row in measured.rows})))
    return table(["rate", names[measured.reference], *(names[arm] for arm in arms)], rows) + f"\nSeeds: {seeds}.\n"


def equal(family, flops):
    """DIFF V2 minus the Transformer at equal tokens, parameters, FLOPs and time."""
    longer = stats.paired_gap(flops.by_seed("baseline-flops", "loss"), family.by_seed("baseline", "loss"))
    rows = []
    for what, measured, arm, reference in (
        ("tokens", family, "diff_v2", "baseline"),
        ("tokens and parameters", family, "diff_v2-p", "baseline"),
        ("parameters and FLOPs", flops, "diff_v2-p", "baseline-flops"),
    ):
        e, facts = gap(measured, arm, reference), []
        for one in (reference, arm):
            n, steps, cost, tokens = (
                measured.of([one], key)[0] for key in ("parameters", "steps", "flops_per_token", "tokens")
            )
            facts.append(f"{n:,}; {steps} steps; {cost * tokens / 1e12:.2f}T FLOPs")
        each = stats.paired(measured.by_seed(arm, "loss"), measured.by_seed(reference, "loss"))
        rows.append([what, *facts, interval(e, "+"), ", ".join(f"{x:+.4f}" for x in each.values())])
    rows.append(["time", "about 792 steps", "586 steps", "not measured", ""])
    said = f"The Transformer with 675 steps instead of 586: {interval(longer, '+')} nats.\n"
    return table(["equal", "Transformer", "DIFF V2", "difference", "seeds"], rows) + "\n" + said


def tables(of):
    return {
        "family": lambda: gaps(of["family-cpu"], "family"),
        "moe": lambda: gaps(of["moe-cpu"], "moe"),
        "equal": lambda: equal(of["family-cpu"], of["equal-flops-cpu"]),
        "late-gradients": lambda: by_rate(of["late-gradients-cpu"], "late-gradients"),
    }


def written(text, made):
    """The text of a page with its tables replaced."""
    new = lambda found: f"{found[1]}\n{made[found[2]]()}{found[3]}"
    return re.sub(r"(<!-- ([a-z-]+) -->)\n.*?(<!-- end -->)", new, text, flags=re.S)


def intervals(text):
    """Those with four decimals, as (mean, ends in order) without signs, which a text writes either way."""
    four = r"[+-]?(\d+\.\d{4})"
    found = re.findall(rf"{four} (?:± {four}|\[{four}, {four}\])", " ".join(text.split()))
    return {(mean, *sorted(ends)) for mean, *ends in found}


def main(words):
    made, wrong, board = tables(studies()), [], intervals((HERE / "scoreboard.md").read_text())
    for path in sorted(HERE.glob("*.md")):
        text = path.read_text()
        new = written(text, made)
        if "--check" not in words:
            path.write_text(new)
            continue
        if new != text:
            wrong.append(f"{path.name}: the tables do not follow from runs.csv: run dev/results/pages.py")
        if "<!-- end -->" in text:
            shown = intervals("".join(re.findall(r"<!-- [a-z-]+ -->\n(.*?)<!-- end -->", text, re.S)))
            wrong += [f"{path.name}: no table has {', '.join(x)}" for x in sorted(intervals(text) - shown - board)]
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
