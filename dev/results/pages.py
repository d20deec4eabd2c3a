#!/usr/bin/env python3
"""
Writes the tables between `<!-- NAME -->` and `<!-- end -->` in the pages of this folder from the tables of runs.

Usage: dev/results/pages.py [--check]
  --check   write nothing. Exit status 1 with a line for each page whose tables do not follow from the runs, and for
            each `m ± h` and `m [low, high]` with three or more decimals, also of the README of the repository, that is
            neither in a table of the page, nor an estimate of its SOURCES, nor in scoreboard.md. Between
            `<!-- no data -->` and `<!-- data -->` are numbers of which the runs were not kept
"""

import csv
import fnmatch
import functools
import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "scripts")]
import python_environment

python_environment.ensure("lab")
import rate_sweeps
from lab import archive, currencies, evaluations, fit, long_context, measurements, metrics, preconditions, stats
from lab import upcycling
from lab.scoreboard import table
from lab.study import load
from lab.table import as_markdown, engineering, parameters_text

PLANS = HERE.parent.parent / "scripts/plans"
SOURCES = {  # page: the archives, of which * matches several, and the files that its intervals are of
    "README.md": "",
    "context-rot.md": "context-rot-cpu",
    "family.md": "family-cpu family-rerun-cpu equal-flops-cpu late-gradients-cpu mechanisms.csv",
    "moe.md": "moe-cpu",
    "optimizers.md": "optimizers-cpu",
    "spikes.md": "",
    "scaling.md": "scaling-*",
    "sparse.md": "sparse-cpu",
    "stability.md": "stability-cpu",
    "three-arms.md": "three-arms-cpu",
    "three-arms-ablations.md": "three-arms-ablations-cpu three-arms-cpu",
    "transfer.md": "transfer-cpu",
    "upcycle.md": "upcycle-cpu",
    "yoco.md": "yoco-cpu yoco.csv",
    "../../README.md": "optimizers-cpu three-arms-cpu three-arms-ablations-cpu context-rot-cpu",
}
PLANTED = {  # of spikes.md: name of the test, what was planted
    "rate": "the rate jumps from 0.01 to 0.3",
    "data": "a corrupt region of a shard",
    "moment": "flipped bits in first moments",
    "head": "a head with 1000 times the rate",
    "precision": "an outlier under --gemm fp8",
    "outside": "the same bits, flipped in memory",
}
SHOWN = []  # (mean, half width) of the intervals in the tables of a page
SPIKE = 7.0  # deviations of a loss or gradient norm, as in the trainer


def read(name):
    with open(HERE / name, newline="") as file:
        return list(csv.DictReader(file))


def write(name, rows):
    with open(HERE / name, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def archives(name):
    return sorted([*HERE.glob(f"runs/{name}.jsonl"), *HERE.glob(f"sweeps/{name}.jsonl")])


def studies():
    """{name: Measurements} of all archives."""
    found = {}
    for header, entries in map(archive.read, archives("*")):
        new = measurements.of_numbers(header, entries)
        old = found.setdefault(new.study, measurements.Measurements(new.study, [], new.ngrams, [], new.looks))
        old.rows.extend(new.rows)
        old.sweep.extend(new.sweep)
    return found


def runs_of(name):
    return load(archives(name))


def expanded(sources, of):
    """The names of sources."""
    return [name for source in sources.split() for name in fnmatch.filter(of, source) or [source]]


def named(plan):
    """{arm: label} of a plan."""
    return dict(re.findall(r"^\[arm (\S+)\]\nlabel = (.*)$", (PLANS / f"{plan}.plan").read_text(), re.M))


def interval(e, sign=""):
    SHOWN.extend([(e.mean, e.half)] * (e.half is not None))
    return f"{e.mean:{sign}.4f}" + (f" ± {e.half:.4f}" if e.half is not None else "")


def limits(e, sign="", digits=4):
    SHOWN.append((e.mean, e.half))
    return f"{e.mean:{sign}.{digits}f} [{e.low:{sign}.{digits}f}, {e.high:{sign}.{digits}f}]"


def at_rates(measured, rates):
    """The runs at some rates, as a study."""
    return replace(measured, rows=[row for row in measured.rows if row["rate"] in rates])


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
        at = at_rates(measured, [rate])
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


def ladder(measured):
    """The loss of each arm over rates, in italics where it is more than 0.1 above its best."""
    names, cells = named("stability"), {}
    for arm in names:
        found = {rate: at_rates(measured, [rate]).by_seed(arm, "loss") for rate in measured.rates}
        means = {rate: stats.t_interval(list(losses.values())) for rate, losses in found.items()}
        best = min(e.mean for e in means.values())
        cells[arm] = {rate: f"*{x}*" if e.mean > best + 0.1 else x for rate, e in means.items() if (x := interval(e))}
    return table(
        ["rate", *names.values()], [[f"{rate:g}", *(cells[arm][rate] for arm in names)] for rate in measured.rates]
    )


def ratio(e):
    low, mean, high = map(math.exp, (e.low, e.mean, e.high))
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


GRADIENTS = {"grad_growth": "growth", "grad_deviation": "deviation", "late_grad_norm": "level"}


def ladder_gaps(measured):
    """Differences of losses, and ratios of numbers of gradient norms; means over all rates."""
    names, rows = named("stability"), []
    pairs = ["diff_v1 diff_v1_no_norm", "diff_v2_norm diff_v2", "diff_v1 baseline", "diff_v2 baseline"]
    for arm, other in (*map(str.split, pairs), ("diff_v1_no_norm", "baseline")):
        paired = lambda key: stats.paired_gap(measured.by_seed(arm, key), measured.by_seed(other, key))
        rows.append(
            [
                f"{names[arm]} against {names[other]}",
                limits(paired("loss"), "+", 3),
                *(ratio(paired(key)) for key in GRADIENTS),
            ]
        )
    return table(["arms", "loss", *(f"{what} of the gradient norm, ratio" for what in GRADIENTS.values())], rows)


def ladder_stability(measured):
    """Of each arm: the largest stable rate of each seed, spikes in all judged steps, diverged runs."""
    names, rows = named("stability"), []
    for arm, label in names.items():
        mine = [row for row in measured.rows if row["arm"] == arm]
        seeds, stable = sorted({row["seed"] for row in mine}), []
        for seed in seeds:
            one = {row["rate"]: [row["loss"]] for row in mine if row["seed"] == seed}
            stable.append(stats.largest_stable(one)[0])
        spikes = [
            limits(stats.t_interval(list(measured.by_seed(arm, f"{x}_spikes").values())), digits=3)
            for x in ("loss", "grad")
        ]
        diverged = sum(row["state"] == "diverged" for row in mine)
        rows.append([label, ", ".join(f"{rate:g}" for rate in stable), f"{diverged} of {len(mine)}", *spikes])
    head = ["arm", "largest stable rate of each seed", "diverged", "spikes of the loss, %", "of the gradient norm, %"]
    return table(head, rows)


def planted():
    """What `lab spike` prints of each planted cause."""
    rows, replays = [], [x["plant"] for x in read("spike-replays.csv") if x["verdict"]]
    for row in read("spike-plants.csv"):
        plant, count = row["plant"], replays.count(row["plant"])
        large = row["first_large_update"] or "none"
        at = row["first_large_loss"] if plant != "outside" else ""
        rows.append([PLANTED[plant], f"{row['step']} ({row['checkpoint']})", row["cause"], count, large, at])
    return table(["planted", "S (checkpoint)", "cause", "replays", "first large update", "first large loss"], rows)


def changed():
    """The rise of the loss for each planted cause and change of the whole model."""
    replays, plants = read("spike-replays.csv"), [plant for plant in PLANTED if plant != "outside"]
    part = lambda x: not x["verdict"] or ":" in x["replay"] or " to " in x["replay"] or x["plant"] == "outside"
    found = {(x["replay"], x["plant"]): x for x in replays if not part(x)}
    show = lambda x: f"{float(x['rise']):.3f}" + (f", {x['verdict']}" if x["verdict"] != "keeps" else "")
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        rows.append([name, *(show(found[name, plant]) if (name, plant) in found else "" for plant in plants)])
    return table(["change", *plants], rows)


def leads():
    """How often large updates and gradients precede spikes of the loss."""
    rows, total = [], lambda mine, key: sum(int(x[key]) for x in mine)
    for setting in dict.fromkeys(x["setting"] for x in read("spike-leads.csv")):
        mine = [x for x in read("spike-leads.csv") if x["setting"] == setting]
        for what in ("update", "gradient"):
            chance = total(mine, f"steps_after_{what}") / total(mine, "judged")
            before, spikes = total(mine, f"after_{what}"), total(mine, "spikes")
            of = f"{total(mine, f'{what}_rises_before')} of {total(mine, f'{what}_rises')}"
            rows.append([setting, what, f"{before} of {spikes}", f"{100 * chance:.1f}%", of])
    head = ["clipping", "sign", "spikes with the sign in the 8 steps before", "any step", "signs before a spike"]
    return table(head, rows)


def over_rates(found, names):
    """The losses of {arm: [(rate, loss)]}, those of the best rates bold."""
    rows = []
    for rate in sorted({rate for points in found.values() for rate, _ in points}):
        at = [(dict(points).get(rate), min(loss for _, loss in points)) for points in map(found.get, names)]
        rows.append([f"{rate:g}", *("" if x is None else f"**{x:.4f}**" if x == y else f"{x:.4f}" for x, y in at)])
    return table(["rate", *names.values()], rows)


def optimizers(measured):
    names, rows, losses = named("optimizers"), [], rate_sweeps.losses_at_best(measured)
    for arm, row in {row["arm"]: row for row in rate_sweeps.swept(measured, rates=False)}.items():
        n, cost = (measured.of([arm], key)[0] for key in ("parameters", "flops_per_token"))
        e = stats.t_interval(list(losses[arm].values()))
        cells = [f"{row['rate']:g}", f"{n:,}", f"{cost / 1e3:.0f}K", f"{e.n}", f"{row['windows']}", interval(e)]
        rows.append([names[arm], *cells])
    text = table(["arm", "rate", "parameters", "FLOPs/token", "seeds", "windows", "loss"], rows)
    found = [
        {w: stats.t_interval([*x.values()]) for w, x in part.items()} for part in rate_sweeps.optimizer_gaps(measured)
    ]
    p = dict(zip(found[0], stats.holm([e.p for e in found[0].values()])))
    rows = [[what, limits(e, "+"), f"{p[what]:.3f}" if what in p else ""] for part in found for what, e in part.items()]
    text += "\n" + table(["difference", "mean", "p, Holm"], rows)
    adamw, muon = (found[0][f"DIFF V2 minus Transformer, {name}"] for name in ("AdamW", "Muon"))
    wanted = re.search(r"^seeds = (.*)$", (PLANS / "optimizers.plan").read_text(), re.M)[1].split()
    return f"{text}\n**{rate_sweeps.survival(adamw, muon, len(wanted))}**\n"


def against_adamw():
    names, rows = named("optimizers"), []
    for arm, (tokens, seconds, price, reached) in rate_sweeps.against_adamw(runs_of("optimizers-cpu")).items():
        cells = [limits(tokens, "+"), limits(seconds, "+"), f"{price:.2f}", limits(reached, digits=3)]
        rows.append([names[arm], *cells])
    head = ["arm", "at equal tokens", "at equal time", "time of a token, relative", "tokens to AdamW's loss, relative"]
    return table(head, rows)


def transfer(measured):
    names, found, rows = named("transfer"), rate_sweeps.optima(measured), []
    widths = sorted({width for by_width in found.values() for width in by_width})
    for arm, by_width in found.items():
        row = [names[arm]]
        for at in (by_width.get(width, {}) for width in widths):
            inside = [math.log(rate) for rate in at.values() if rate]
            cell = [f"{math.exp(stats.mean(inside)):.2g}"] if inside else []
            cell += [f"{len(at) - len(inside)} of {len(at)} at the edge"] if len(inside) < len(at) else []
            row.append("; ".join(cell))
        for e in (rate_sweeps.factors(by_width, width) if width in by_width else None for width in widths[1:]):
            ends = f" [{math.exp(e.low):.2f}, {math.exp(e.high):.2f}]" if e and e.half is not None else ""
            row.append(f"{math.exp(e.mean):.2f}{ends}" if e else "")
        rows.append(row)
    head = [f"optimum at width {64 * width}" for width in widths]
    return table(["arm", *head, *(f"{64 * width} / 64" for width in widths[1:])], rows)


def upcycled():
    study = runs_of("upcycle-cpu")
    found, arms = upcycling.tables(study, study.rates()[0])["losses"], ["continued", "diff_v2", "baseline-2h"]
    rows, gaps = {}, {}
    for tokens in sorted({row["tokens"] for row in found}):
        at = {row["arm"]: row for row in found if row["tokens"] == tokens}
        gaps[tokens] = {arm: estimate(at[arm], "gap") for arm in arms if arm in at and at[arm]["gap"]}
        cells = [limits(gaps[tokens][arm], "+") if arm in gaps[tokens] else "" for arm in arms[1:]]
        rows[f"{tokens / 1e6:.2f}M"] = [f"{at['continued']['loss']['mean']:.4f}", *cells]
    head = ["tokens in total", study.arms[arms[0]], *(f"{study.arms[arm]}, minus that" for arm in arms[1:])]
    text = table(head, [[tokens, *cells] for tokens, cells in rows.items()])
    ours = [tokens for tokens in gaps if tokens > min(gaps)]
    below = [tokens for tokens in ours if all(gaps[t]["diff_v2"].high < 0 for t in ours if t >= tokens)]
    last = gaps[max(ours)]["diff_v2"]
    verdict = f"The gap takes {(below[0] - min(gaps)) / 1e6:.2f}M tokens" if below else "Undecided"
    verdict = "There is no gap" if not below and last.low > -rate_sweeps.EFFECT else verdict
    by_eval = study.by_eval()
    final = lambda arm: {run.seed: run.final_loss(by_eval) for run in study.runs if run.arm == arm}
    e = stats.paired_gap(final("diff_v2"), final("scratch"))
    return f"{text}\n**{verdict}. From the base minus from random weights, at the end: {limits(e, '+')}.**\n"


def estimate(row, key):
    """The Estimate of which a row has the JSON."""
    return stats.Estimate(**{name: x for name, x in row[key].items() if name not in ("p_holm", "shown")})


def changes_of_upcycled():
    study = runs_of("upcycle-cpu")
    rows = []
    for row in upcycling.tables(study, study.rates()[0])["changes"]:
        of = [estimate(row, key) for key in ("before", "after", "change")]
        shown = f"{row['change']['p_holm']:.3f}" if row["change"]["p_holm"] is not None else ""
        rows.append(
            [row["label"], f"`{row['what']}`", *(f"{e.mean:.3g}" for e in of[:2]), limits(of[2], "+", 3), shown]
        )
    return table(["arm", "statistic", "base", "at the end", "change", "p, Holm"], rows)


def with_p(row, key):
    return f"{limits(estimate(row, key), '+')}, p {row[key]['p_holm']:.2g}" if row[key] else ""


SCALE = {"tokens_per_parameter": ".1f", "minus_5_gram": "+.2f"}  # of preconditions.rows(): how the overview shows it


def overview(of):
    """The studies of the pages: their size, and how many arms meet the preconditions of a verdict."""
    rows, seen = [], set()
    for page, source in ((page, source) for page, sources in SOURCES.items() for source in expanded(sources, of)):
        if source not in of or source in seen:
            continue
        seen.add(source)
        longest = {arm: max(of[source].of([arm], "tokens"), default=None) for arm in of[source].arms}
        rows_of = [row for row in of[source].rows if row["tokens"] == longest[row["arm"]]]
        measured, found = of[source], preconditions.rows(replace(of[source], rows=rows_of))
        ends = lambda values: (min(values), max(values)) if (values := [x for x in values if x is not None]) else ()
        span = lambda values, form: " to ".join(dict.fromkeys(format(x, form) for x in ends(values))) or "–"
        title = (HERE / page).read_text().split("\n")[0].lstrip("# ")
        cells = [f"[{title}]({page})", source, len(measured.rows + measured.sweep)]
        cells.append(len({row["seed"] for row in measured.rows}))
        cells.append(span([x / 1e6 for x in measured.of(measured.arms, "parameters")], ".2f"))
        cells += [span([row[key] for row in found], form) for key, form in SCALE.items()]
        met = sum(not row["unmet"] for row in found)
        rows.append((-met / len(found), [*cells, f"{met} of {len(found)}"]))
    head = ["page", "study", "runs", "seeds", "million parameters", "tokens per parameter", "loss minus the 5-gram's"]
    return table([*head, "arms that meet the preconditions"], [cells for _, cells in sorted(rows)])


def losses(measured, plan):
    """All arms of a study: its loss, and what the preconditions require."""
    names, rows = named(plan), []
    for row in preconditions.rows(measured):
        of = lambda key: measured.of([row["arm"]], key)[0]
        loss = interval(stats.t_interval(list(measured.by_seed(row["arm"], "loss").values())))
        cells = [f"{of('parameters'):,}", f"{of('flops_per_token') / 1e6:.2f}M", loss]
        cells += [f"{row['minus_5_gram']:+.3f}", limits(estimate(row, "context"), "+", 3)]
        rows.append([names[row["arm"]], *cells])
    return table(["arm", "parameters", "FLOPs/token", "loss", "minus the 5-gram", "late minus early"], rows)


def sparse_costs(reference):
    """{(base, arm): row} of the losses of long_context.costs()."""
    study = runs_of("sparse-cpu")
    study.reference = reference
    found = long_context.costs(study, study.rates()[0])
    return {(row["base"], row["arm"]): row for row in found if row["what"] == "loss"}


def sparse():
    of, rows = {arm: sparse_costs(arm) for arm in ("baseline", "baseline-2h")}, []
    for k in (2, 4, 8):
        paid = [of["baseline"]["neither", f"{arm}-k{k}"] for arm in ("baseline", "baseline-2h", "diff_v2")]
        gaps = [found["neither", f"diff_v2-k{k}"] for found in of.values()]
        rows.append([f"{k}", *(with_p(row, "cost") for row in paid), *(with_p(row, "gap") for row in gaps)])
    head = ["K", "Transformer", "2 NH heads", "DIFF V2", "DIFF V2 minus Transformer", "DIFF V2 minus 2 NH heads"]
    return table(head, rows)


def agreement(run):
    """Of the last statistics: the mean over the layers."""
    return stats.mean([record["selection_agreement"] for record in run.layers[max(run.layers)].values()])


def sparse_scores():
    study, found, rows = runs_of("sparse-cpu"), sparse_costs("baseline"), []
    options = study.runs[0].options
    earlier = int(options["seq-len"]) // int(options["sparse-block-size"]) - 2  # of the last query, without the first
    for k, score in itertools.product((2, 4, 8), ("signal", "apart")):
        arm = f"diff_v2-k{k}-{score}"
        e = estimate(found[long_context.BLOCKS["group"], arm], "cost")
        effect = rate_sweeps.EFFECT
        said = "better" if e.high < 0 else "worse" if e.low > 0 else ""
        said = said or ("as good" if -effect < e.low and e.high < effect else "undecided")
        row = [f"{k}", score, limits(e, "+"), said]
        if score == "apart":
            chance = stats.mean([k / n for n in range(k, earlier + 1)])
            agreed = stats.t_interval([agreement(run) for run in study.runs if run.arm == arm])
            row += [limits(agreed, digits=3), f"{chance:.2f}"]
        rows.append(row + [""] * (6 - len(row)))
    return table(["K", "score", "minus that of the group", "", "agreement", "by chance"], rows)


def positions_of(name, arms):
    """The loss of the reference by position, and the gaps of arms, without the first 8."""
    study = currencies.at_own_rates(runs_of(name))
    found, rows = evaluations.by_position(study, study.rates()[0]), []
    for at, first in ((i, row) for i, row in enumerate(found[study.reference]) if row["begin"] >= 8):
        cells = [f"{first['begin']} to {first['end'] - 1}", f"{first['loss']['mean']:.4f}"]
        rows.append(cells + [limits(estimate(found[arm][at], "gap"), "+") for arm in arms])
    return table(["positions", study.arms[study.reference], *(f"{study.arms[arm]}, minus that" for arm in arms)], rows)


def common(rows):
    """The rows of by_frequency() that have at least 0.05% of the targets."""
    return [row for row in rows if row["targets"] >= 5e-4 * sum(row["targets"] for row in rows)]


def frequencies_of(name, arms):
    """The loss of the reference by the share of a token of the targets, and the gaps of arms."""
    study = currencies.at_own_rates(runs_of(name))
    found, rows = evaluations.by_frequency(study, study.rates()[0]), []
    all_targets = sum(row["targets"] for row in found[study.reference])
    found = {arm: common(groups) for arm, groups in found.items()}
    for at, first in enumerate(found[study.reference]):
        share = f"{100 * first['targets'] / all_targets:.2f}%"
        cells = [f"1/{1 / first['share']:,.0f}", f"{first['tokens']}", share, f"{first['loss']['mean']:.4f}"]
        rows.append(cells + [limits(estimate(found[arm][at], "gap"), "+") for arm in arms])
    head = ["share of a token, from", "tokens", "of the targets", study.arms[study.reference]]
    return table([*head, *(f"{study.arms[arm]}, minus that" for arm in arms)], rows)


def pairs_of_arms(name):
    """The gaps of all pairs of three arms, or of more to the reference, in three currencies."""
    study, rows = runs_of(name), []
    for row in currencies.rows(study):
        if len(study.arms) > 3 and study.reference not in (row["arm"], row["other"]):
            continue
        costs = [f"{row[key]['price']:.2f}" for key in currencies.CURRENCIES[1:]]
        gaps = [limits(estimate(row[key], "gap"), "+") for key in currencies.CURRENCIES]
        rows.append([f"{row['label']} minus {row['other_label']}", *gaps, *costs])
    head = ["arms", *(f"gap at equal {key}" for key in currencies.CURRENCIES), "FLOPs of a token", "seconds of a token"]
    return table(head, rows)


OVER_TIME = {  # numbers of the statistics: name, how those of the layers are combined
    "first_mass_effective": ("mass on position 0", stats.mean),
    "logit_max": ("largest logit", max),
    "residual_max": ("largest activation", max),
    "context_rms_mean": ("context RMS, mean", stats.mean),
    "context_rms_min": ("context RMS, smallest", min),
    "context_rms_max": ("context RMS, largest", max),
    "lambda_mean": ("lambda", stats.mean),
}


def times_of(name, arms, keys):
    """{(key, arm): {tokens: Estimate}} of the statistics of runs."""
    study, found = currencies.at_own_rates(runs_of(name)), {}
    for key, arm in itertools.product(keys, arms):
        for run in (run for run in study.runs if run.arm == arm):
            for step, layers in run.layers.items():
                value = metrics.combined(layers.values(), key, OVER_TIME[key][1])
                if value is not None:
                    found.setdefault((key, arm), {}).setdefault(run.tokens_at(step), []).append(value)
    return {at: {t: stats.t_interval(values) for t, values in by.items()} for at, by in found.items()}


def seeds_of_arms(measured, plan):
    """The loss of each seed, and its use of context."""
    names, rows = named(plan), []
    for seed in sorted({row["seed"] for row in measured.rows}):
        at = lambda arm: next(row for row in measured.rows if (row["arm"], row["seed"]) == (arm, seed))
        rows.append([seed, *(f"{at(arm)['loss']:.4f} ({at(arm)['context_use']:+.2f})" for arm in names)])
    return table(["seed", *names.values()], rows)


def over_time(name, arms, keys=OVER_TIME):
    found, names = times_of(name, arms, keys), runs_of(name).arms
    tokens = sorted({t for by in found.values() for t in by})
    SHOWN.extend((e.mean, e.half) for by in found.values() for e in by.values())
    shown = lambda e: f"{e.mean:.3g} ± {e.half:.2g}"
    rows = [[OVER_TIME[key][0], names[arm], *(shown(by[t]) for t in tokens)] for (key, arm), by in found.items()]
    return table(["", "arm", *(f"{t / 1e6:.2g}M tokens" if t > 1e5 else "first step" for t in tokens)], rows)


def rot():
    """The gaps by position, and the gap late in the context minus that within the context before the extension."""
    study = runs_of("context-rot-cpu")
    at = lambda arm, *place: {run.seed: long_context.at(run, *place) for run in study.runs if run.arm == arm}
    gap = lambda arm, *place: stats.paired(at(arm, *place), at(study.reference, *place))
    of = {arm: stats.paired_gap(gap(arm, 2048, 4096), gap(arm, 256, 512)) for arm in study.arms}
    said = [f"* {study.arms[arm]}: {limits(e, '+')}\n" for arm, e in of.items() if arm != study.reference]
    text = positions_of("context-rot-cpu", [arm for arm in of if arm != study.reference])
    return f"{text}\nThe gap at 2048 to 4095 minus that at 256 to 511:\n\n{''.join(said)}"


def rot_tasks():
    study, rows = runs_of("context-rot-cpu"), []
    for row in evaluations.synthetic(study, study.rates()[0]):
        gap = f"{limits(estimate(row, 'gap'), '+', 3)}, p {row['gap']['p_holm']:.2g}" if row["gap"] else ""
        accuracy = limits(estimate(row, "accuracy"), digits=3)
        rows.append([row["task"], row["label"], accuracy, f"{row['chance']:.3f}", row["against_chance"], gap])
    return table(["task", "arm", "accuracy", "chance", "", "minus the Transformer"], rows)


@functools.cache
def scaled():
    """The study of the plan `scaling`, and the laws of its arms: the arguments of fit.tables()."""
    study = runs_of("scaling-*")
    return study, *fit.fitted(study)


def scaled_losses(of):
    """Each arm at each size and length: its rate and loss, and what the preconditions require."""
    rows = []
    for name in fnmatch.filter(of, "scaling-*"):
        for row in preconditions.rows(of[name]):
            best = of[name].at_best_rate(row["arm"])
            cells = [named("scaling")[row["arm"]], f"{best[0]['parameters']:,}", f"{best[0]['tokens'] / 1e6:.1f}M"]
            cells += [f"{row['rate']:g}", len(best), interval(stats.t_interval([x["loss"] for x in best]))]
            rows.append([*cells, f"{row['minus_5_gram']:+.3f}", limits(estimate(row, "context"), "+", 3)])
    head = ["arm", "parameters", "tokens", "rate", "seeds", "loss", "minus the 5-gram", "late minus early"]
    return table(head, rows)


def scaled_costs(of):
    """The gap at each size and length if both arms have as many FLOPs, and hence DIFF V2 fewer tokens."""
    rows = []
    for name in fnmatch.filter(of, "scaling-*"):
        study = currencies.at_own_rates(runs_of(name))
        (row,) = currencies.rows(study)
        size = next(run for run in of[name].rows if run["arm"] == row["arm"])
        cells = [engineering(size["parameters"]), f"{size['tokens'] / size['parameters']:.0f}"]
        rows.append([*cells, f"{row['FLOPs']['price']:.2f}", limits(estimate(row["FLOPs"], "gap"), "+")])
    return table(["parameters", "tokens per parameter", "FLOPs of a token", "gap at equal FLOPs"], rows)


def compared(of, prefix, plan, over=tuple(OVER_TIME)):
    """The tables of a plan that sweeps the rate of each arm. over: numbers whose course is shown"""
    name, arms = f"{plan}-cpu", of[f"{plan}-cpu"]
    others = [arm for arm in arms.arms if arm != arms.reference]
    made = {
        "sweep": lambda: over_rates({arm: arms.losses_by_rate(arm) for arm in arms.arms}, named(plan)),
        "losses": lambda: losses(arms, plan),
        "seeds": lambda: seeds_of_arms(arms, plan),
        "gaps": lambda: pairs_of_arms(name),
        "positions": lambda: positions_of(name, others),
        "frequencies": lambda: frequencies_of(name, others),
        "time": lambda: over_time(name, arms.arms, over),
    }
    return {f"{prefix}-{part}": function for part, function in made.items()}


def tables(of):
    sweep = lambda name: over_rates({arm: of[name].losses_by_rate(arm) for arm in of[name].arms}, named("scaling"))
    scaling = {f"scaling-{t.id}": lambda t=t: as_markdown(t) for t in fit.tables(*scaled())}
    return {
        **scaling,
        "scaling-losses": lambda: scaled_losses(of),
        "scaling-flops": lambda: scaled_costs(of),
        "scaling-rates": lambda: sweep("scaling-0.1m-20"),
        "scaling-rates-longer": lambda: sweep("scaling-0.1m-60"),
        **compared(of, "arms", "three-arms"),
        **compared(of, "ablations", "three-arms-ablations", ("context_rms_min", "context_rms_max", "lambda_mean")),
        "overview": lambda: overview(of),
        "ladder": lambda: ladder(of["stability-cpu"]),
        "ladder-gaps": lambda: ladder_gaps(of["stability-cpu"]),
        "ladder-stability": lambda: ladder_stability(of["stability-cpu"]),
        "family": lambda: gaps(of["family-cpu"], "family"),
        "moe": lambda: gaps(of["moe-cpu"], "moe"),
        "equal": lambda: equal(of["family-cpu"], of["equal-flops-cpu"]),
        "late-gradients": lambda: by_rate(of["late-gradients-cpu"], "late-gradients"),
        "spike-planted": planted,
        "spike-changes": changed,
        "spike-leads": leads,
        "sweep": lambda: over_rates(
            rate_sweeps.losses_over_rates(rate_sweeps.swept(of["optimizers-cpu"])), named("optimizers")
        ),
        "optimizers": lambda: optimizers(of["optimizers-cpu"]),
        "against-adamw": against_adamw,
        "sparse-losses": lambda: losses(of["sparse-cpu"], "sparse"),
        "sparse": sparse,
        "sparse-scores": sparse_scores,
        "sparse-positions": lambda: positions_of("sparse-cpu", ["baseline-k2", "diff_v2", "diff_v2-k2"]),
        "rot-losses": lambda: losses(of["context-rot-cpu"], "context-rot"),
        "rot": rot,
        "rot-tasks": rot_tasks,
        "upcycle": upcycled,
        "upcycle-changes": changes_of_upcycled,
        "transfer": lambda: transfer(of["transfer-cpu"]),
    }


def written(text, made):
    """The text of a page with its tables replaced, and the tables."""
    found = []

    def new(match):
        found.append(made[match[2]]())
        return f"{match[1]}\n{found[-1]}{match[3]}"

    return re.sub(r"(<!-- ([a-z-]+) -->)\n.*?(<!-- end -->)", new, text, flags=re.S), "".join(found)


def intervals(text):
    """{the text of an interval with three or more decimals: its numbers without signs: mean, half width or two ends}"""
    x = r"[+-]?(\d+\.\d{3,})"
    found = re.finditer(rf"{x}(?: nats)? (?:± {x}|\[{x}, {x}\])", " ".join(text.split()))
    return {match[0]: [text for text in match.groups() if text] for match in found}


def estimates(of, sources):
    """(mean, half width) of everything that an interval can be of."""
    for source in expanded(sources, of):
        for row in read(source) if source.endswith(".csv") else ():
            for mean, half in (("mean", "half"), ("gap", "gap_half"), ("loss", "loss_half")):
                if row.get(mean) and row.get(half):
                    yield float(row[mean]), float(row[half])
        for e in of_study(of[source]) if source in of else ():
            if e and e.half is not None:
                yield e.mean, e.half


def of_study(measured):
    """The losses of its arms and their differences, at each rate and over all."""
    for some in [measured.rates, *([rate] for rate in measured.rates)]:
        part = at_rates(measured, some)
        losses = part.table()
        yield from (stats.t_interval(list(by_seed.values())) for by_seed in losses.values())
        for arm, other in itertools.combinations(losses, 2):
            yield stats.paired_gap(losses[arm], losses[other])
            yield stats.pooled_gap(losses, arm, other, part.pool)
    if measured.study == "moe-cpu":  # the difference of the gaps with experts and with one MLP
        losses = measured.table()
        with_experts = stats.paired(losses["diff_v2-moe"], losses["baseline-moe"])
        yield stats.paired_gap(with_experts, stats.paired(losses["diff_v2"], losses["baseline"]))
    if measured.study == "equal-flops-cpu":
        losses = measured.table()["baseline-flops"]
        yield stats.paired_gap(losses, studies()["family-cpu"].table()["baseline"])


def fits(numbers, mean, half):
    """Whether an estimate has these numbers when rounded."""
    exact = [mean, half] if len(numbers) == 2 else [mean, mean - half, mean + half]
    shown = numbers[:1] + sorted(numbers[1:], key=float)
    exact = [abs(mean), *sorted(map(abs, exact[1:]))]
    return all(abs(float(x) - y) <= 0.5000001 * 10.0 ** -len(x.split(".")[1]) for x, y in zip(shown, exact))


def unsupported(text, known, board):
    """The intervals of a page that are no known estimate, and not of the board: the scoreboard or a table."""
    text = re.sub(r"<!-- no data -->.*?<!-- data -->", "", text, flags=re.S)
    listed = [(x[0], *sorted(x[1:])) for x in board.values()]
    return [
        shown
        for shown, x in intervals(text).items()
        if (x[0], *sorted(x[1:])) not in listed and not any(fits(x, *e) for e in known)
    ]


def main(words):
    of, wrong, board = studies(), [], intervals((HERE / "scoreboard.md").read_text())
    made = tables(of)
    for name, sources in SOURCES.items():
        path = HERE / name
        text = path.read_text()
        SHOWN.clear()
        new, shown = written(text, made)
        if "--check" not in words:
            path.write_text(new)
            continue
        if new != text:
            wrong.append(f"{name}: the tables do not follow from the runs: run dev/results/pages.py")
        wrong += [
            f"{name}: no data have {x}"
            for x in unsupported(text, [*estimates(of, sources), *SHOWN], board | intervals(shown))
        ]
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
