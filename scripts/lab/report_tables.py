"""report_tables.py: the tables of a comparison and their sections, which report.html and results.md have in common."""

import math
import re

from . import claims, currencies, long_context, one_run, preconditions, stats
from .compare import LEAST_SEEDS
from .option_history import shown
from .table import (
    Cell,
    Table,
    arm_cell,
    as_markdown,
    difference,
    engineering,
    interval,
    number,
    parameters_text,
    speed_cells,
)

SHOWN = f"A gap is shown, and coloured, if p is below {1 - stats.CONFIDENCE:.2g} with {LEAST_SEEDS} seeds or more."
MOST_SENTENCES = 16  # of more gaps only those that are shown are told


def row_name(r, row):
    """The arm, and its rate if there are several."""
    return row["label"] + (f", rate {row['rate']}" if len({x["rate"] for x in r["summary"]}) > 1 else "")


def sentence(r, row):
    """The conclusion from a row of the summary."""
    gap, name, reference = row["gap"], row_name(r, row), r["arms"][r["reference"]]
    if not gap["shown"]:
        few = f": {gap['n']} of at least {LEAST_SEEDS} seeds" if gap["n"] < LEAST_SEEDS else ""
        return f"{name}: no difference from {reference} is shown{few}."
    side = "lower" if gap["mean"] < 0 else "higher"
    return f"{name}: the loss is {side} than that of {reference}, by {abs(gap['mean']):.4f} nats per token."


def conclusions(r):
    """The result in words, after correction for the number of gaps."""
    told = [row for row in r["best"] if row["gap"]]
    if r["no_verdict"] and told:
        return [r["no_verdict"]]
    if told and all(row["gap"]["n"] < LEAST_SEEDS for row in told):
        return [f"No verdict: every gap is of fewer than {LEAST_SEEDS} seeds."]
    if len(told) > MOST_SENTENCES:
        shown = [row for row in told if row["gap"]["shown"]]
        return [sentence(r, row) for row in shown] or [f"None of {len(told)} differences is shown."]
    return [sentence(r, row) for row in told]


def percent(estimate):
    """An estimate of results(), of a share, in percent."""
    return estimate and {key: x and 100 * x if key in ("mean", "half", "sd") else x for key, x in estimate.items()}


def gap_cells(r, row, key="gap", **style):
    """The cells of the gap of a row, in the style of difference(), and of its adjusted p."""
    reference = Cell("reference" if row["arm"] == r["reference"] else "–")
    return [difference(row[key], **style) if row[key] else reference, number((row[key] or {}).get("p_holm"), 3)]


def summary(r, every=False):
    """One row per arm, of its best rate; or one per arm and rate."""
    rows, of = [], r["summary" if every else "best"]
    speeds, machine = speed_cells([row["speed"] for row in of])
    whole = all(set(row["states"]) == {"done"} for row in of)
    flops = not every and any(row["gap_flops"] for row in of)
    for row, speed in zip(of, speeds):
        rows.append([Cell(row_name(r, row), arm=row["arm"]), *gap_cells(r, row)])
        rows[-1] += [difference(row["gap_flops"])] if flops else []
        rows[-1] += [interval(row["loss"]), row["loss"]["n"] if row["loss"] else 0]
        rows[-1] += [] if whole else [", ".join(f"{n} {s}" for s, n in row["states"].items())]
        rows[-1] += [parameters_text(row["parameters"], row["active_parameters"])]
        rows[-1] += [engineering(row["flops_per_token"]), speed]
    head = ["arm", "gap", "p (Holm)", *(["gap at equal FLOPs"] if flops else []), "loss", "seeds"]
    caption = (
        "Gap: loss of the arm minus that of the reference at the same seed, each at its own best rate. Loss: nats per "
        f"token, of the {r['loss_of']}, mean over seeds. Square brackets: {100 * r['confidence']:.0f}% t intervals "
        f"over seeds. p: two-sided, of gap 0, adjusted by Holm's method for the gaps in the table. {SHOWN} Tokens/s: "
        f"median and 10% to 90% of the steps of all runs{machine}; other load on the machine lowers it."
    )
    return Table(
        "rates" if every else "summary",
        [*head, *(() if whole else ("runs",)), "parameters", "FLOPs/token", "tokens/s"],
        rows,
        "All rates: as above, but for the gap: to the reference at the same rate and seed." if every else caption,
        lines=[] if every else conclusions(r),
        fold="All rates" if every else "",
    )


def options(study, r):
    """The options that differ between arms, those in the table of arms excepted."""
    ignored = {"out", "seed", "command_line"} | set(SHAPE)
    first = {arm: next(run for run in study.runs if run.arm == arm) for arm in study.arms}
    names = sorted({name for run in first.values() for name in run.options if name not in ignored})
    value = lambda run, name: shown(run.options.get(name)) if len(run.history) == 1 else run.over_time(name)
    differing = [n for n in names if len({value(run, n) for run in first.values()}) > 1] if len(first) > 1 else []
    rows = [[f"--{n}", *(value(run, n) for run in first.values())] for n in differing]
    caption = "Other options that differ between the arms, of the first run of each."
    return Table("options", ["option", *study.arms.values()], rows, caption, wrap=True)


def spikes(r):
    score = lambda x: f"{x['spikes']} of {x['judged']}" + (f" ({x['score']:.2f}%)" if x["score"] is not None else "")
    rows = [
        [arm_cell(row), row["rate"], row["runs"], row["diverged"], score(row["grad"]), score(row["loss"])]
        for row in r["spikes"]
    ]
    head = ["arm", "rate", "runs", "diverged", "spikes of the gradient norm", "spikes of the loss"]
    caption = (
        f"A spike is a step at least {stats.SPIKE_Z:g} standard deviations above the mean of the last "
        f"{stats.SPIKE_WINDOW} steps, from {stats.SPIKE_LEAST} steps on. The score is their percentage of the judged "
        "steps, over all seeds (OLMo 2, arXiv 2501.00656)."
    )
    return Table("spikes", head, rows, caption)


def ladder(r):
    rows, rates = [], list(dict.fromkeys(lr for row in r["ladder"] for lr in row["ladder"]))
    for row in r["ladder"]:
        stable = "none" if row["stable"] is None else f"{row['stable']:g}" + " or more" * row["bounded_by_ladder"]
        losses = lambda lr: ", ".join(f"{x:.3f}" if stats.finite(x) else "diverged" for x in row["ladder"].get(lr, ()))
        rows.append([arm_cell(row), "–" if row["best"] is None else f"{row['best']:g}", stable])
        rows[-1] += [", ".join("none" if x is None else f"{x:g}" for x in row["stable_by_seed"]) or "–"]
        rows[-1] += [number(row["sensitivity"]), *(losses(lr) or "–" for lr in rates)]
    return Table(
        "ladder",
        ["arm", "best rate", "largest stable rate", "by seed", "sensitivity", *(f"losses at {lr}" for lr in rates)],
        rows,
        "The largest stable rate: up to it, from the best rate on, no run diverged or ended more than "
        f"{stats.STABLE_TOLERANCE:g} nats above the best mean of the arm. Sensitivity: mean over the rates of the loss "
        "(at most the initial loss), minus the best (Wortsman et al. 2023).",
    )


def verdicts(r):
    """The claims that the arms test."""
    rows, kinds = [], {"supported": "good", "effect excluded": "bad", "opposite shown": "bad"}
    for c in r["claims"]:
        said = Cell(c["verdict"] + (f": {c['remark']}" if c["remark"] else ""), kinds.get(c["verdict"], "open"))
        rows.append([claims.told(c), said, interval(c["estimate"], True), number(c.get("p_holm"), 3)])
        rows[-1] += [c["estimate"]["n"] if c["estimate"] else "–", f"{c['metric']} of {' - '.join(c['arms'])}"]
        rows[-1] += [f"{c['expect']}, {c['effect']:g}", c["source"]]
    return Table(
        "claims",
        ["claim", "verdict", "value", "p (Holm)", "seeds", "difference", "expected, smallest effect", "source"],
        rows,
        "Claims of scripts/lab/claims; scripts/lab/claims.py defines their rules. Square brackets: single 95% "
        "intervals; the verdicts are corrected for the number of claims in this table (Holm). Differences of "
        "magnitudes are logarithms of ratios; the effect 0.1 is then a factor of 1.1. A verdict holds for these tokens "
        "and parameters.",
        wrap=True,
    )


def layer_heads(rows):
    """The heads of the columns of layers, and the rows with "–" in those that a shorter model lacks."""
    depth = max((len(layers) for _, layers, _ in rows), default=0)
    return [f"layer {i}" for i in range(depth)], [
        [*begin, *layers, *["–"] * (depth - len(layers)), *end] for begin, layers, end in rows
    ]


def late_gradients(r):
    def ratio(e):
        ends = [math.exp(e["mean"] + sign * e["half"]) for sign in (-1, 1)] if e and e["half"] is not None else []
        return f"{math.exp(e['mean']):.2f} [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "–"

    short = lambda x: "–" if x is None else f"{x:.3g}"
    row = lambda x: ([arm_cell(x), f"{x['lr']:g}"], list(map(short, x["layers"])), [short(x["all"]), ratio(x["ratio"])])
    heads, rows = layer_heads(list(map(row, r["late_gradients"])))
    caption = (
        "Gradient norms of the layers in the last quarter of the steps, before clipping: geometric means over "
        "statistics and the seeds. Ratio: of all layers to the reference, paired by seed."
    )
    return Table("late-gradients", ["arm", "rate", *heads, "all", "ratio"], rows, caption)


def probes(r):
    part = r["probes"]
    heads, rows = layer_heads(
        [
            ([arm_cell({"arm": arm, "label": r["arms"][arm]}), name], [interval(e, False, 3) for e in layers], [])
            for arm, numbers in part["layers"].items()
            for name, layers in numbers.items()
        ]
    )
    lines = [
        f"{r['arms'][arm]}: {of['adjacent'][0]} of {of['adjacent'][1]} layers (all seeds) have a cos(W_O, minus W_O "
        f"of the next head) that permuted weights rarely reach (p < 0.05); {of['closest'][0]} with the closest head."
        for arm, of in part["beyond"].items()
        if of["adjacent"][1]
    ]
    caption = "Probes of the last checkpoints, mean over seeds. scripts/lab/layers.py describes the numbers."
    tables = [Table("probes", ["arm", "number", *heads], rows, caption, lines=lines)]
    for arm, steps in part["steps"].items():
        names = [name for name in steps[0] if name != "step"]
        cells = [[row["step"], *(interval(row.get(name), True, 3) for name in names)] for row in steps]
        if len(steps) > 1:
            caption = f"Probes of {r['arms'][arm]}, by step, mean over the layers."
            tables.append(Table(f"probes-{len(tables)}", ["step", *names], cells, caption))
    return tables


def noise(r):
    rows = [
        [arm_cell(row), f"{row['lr']:g}", number(row["sd"]), number(row["gap_sd"])]
        + [row[key] or "–" for key in ("seeds_for_0.02", "seeds_for_effect", "seeds_pooled")]
        for row in r["noise"]
    ]
    return Table(
        "noise",
        ["arm", "rate", "deviation of the loss", "deviation of the paired gap", "seeds for a gap of 0.02"]
        + ["for 0.015 with power 0.8", "the same, pooled"],
        rows,
        "Standard deviations over seeds. Seeds for a gap of 0.02: the interval of a gap is narrower than 0.02 nats on "
        "each side, with this deviation. Then: a true gap of 0.015 has an interval without 0 with probability 0.8, "
        "with this deviation, and with the one pooled over all arms.",
    )


def recall(r):
    head, rows = [], []
    for arm, cells in r["recall"].items():
        head = head or [f"{c['pairs']} pairs" + (f", {c['noise']} noise" if c["noise"] else "") for c in cells]
        values = [f"{100 * c['exact']['mean']:.1f} / {100 * c['among_values']['mean']:.1f}" for c in cells]
        rows.append([arm_cell({"arm": arm, "label": r["arms"][arm]}), *values])
    caption = "Exact match / best of the shown values, percent, mean over seeds. By chance the second is 100 / pairs."
    return Table("recall", ["arm", *head], rows, caption)


def sources(r):
    rows = [
        [arm_cell({"arm": arm, "label": r["arms"][arm]}), row["source"], interval(row["loss"]), difference(row["gap"])]
        for arm, places in r["by_source"].items()
        for row in places
    ]
    return Table("sources", ["arm", "validation shard", "loss", "gap"], rows, "All validation windows of each source.")


def windows(r):
    """What windows, YOCO and selected blocks cost each variant, and what they save."""
    part, confidence = r["long_context"], f"{100 * r['confidence']:.0f}%"
    first = next((row for row in part["arms"] if row["arm"] == r["reference"]), part["arms"][0])
    whats, arms, costs = list(first["values"]), [], []
    for row in part["arms"]:
        arms.append([arm_cell(row), long_context.caches(row), f"{row['cache_numbers']:,}"])
        arms[-1] += [f"{100 * row['cache_numbers'] / first['cache_numbers']:.0f}%"]
        arms[-1] += [engineering(row["flops_per_token"]), *(interval(row["values"][what]) for what in whats)]
    for row in part["costs"]:
        costs.append([row["what"], f"{row['change']} against {row['base']}", arm_cell(row)])
        for key in ("cost", "gap"):
            costs[-1] += [difference(row[key]), number((row[key] or {}).get("p_holm"), 3)]
        costs[-1] += [row["cost"]["n"]]
    return [
        Table(
            "caches",
            ["arm", "caches x positions", "numbers in a cache", "of the reference", "FLOPs/token", *whats],
            arms,
            "Cache: keys and values of one sequence of the full context, as generation keeps them. Losses: nats per "
            f"token, mean over seeds with {confidence} t intervals. A last column below 0: positions far beyond the "
            "window are predicted better than those before its end.",
        ),
        Table(
            "windows-costs",
            ["value", "change", "arm", "cost", "p (Holm)", "gap", "p (Holm)", "seeds"],
            costs,
            "Cost: the arm minus the arm of the same variant that the change is compared with, at the same seed. Gap: "
            f"the cost minus that of the same change in the reference's variant. Square brackets: {confidence} t "
            "intervals over seeds. p: adjusted by Holm's method for the costs, and for the gaps, of one value. "
            + SHOWN,
        ),
    ]


def upcycled(r):
    """Losses and statistics of arms that start from the last checkpoint of another."""
    part, confidence = r["upcycling"], f"{100 * r['confidence']:.0f}%"
    rows = [
        [f"{row['tokens']:,}", arm_cell(row), interval(row["loss"]), *gap_cells(r, row), row["loss"]["n"]]
        for row in part["losses"]
    ]
    changes = [
        [arm_cell(row), row["what"], interval(row["before"]), interval(row["after"]), interval(row["change"], True)]
        + [number((row["change"] or {}).get("p_holm"), 3)]
        for row in part["changes"]
    ]
    return [
        Table(
            "upcycling",
            ["tokens in total", "arm", "validation loss", "gap", "p (Holm)", "seeds"],
            rows,
            "Tokens in total: those of the base and of the arm. Gap: arm minus reference at as many tokens and the same"
            f" seed. Square brackets: {confidence} t intervals over seeds. p: adjusted by Holm's method for the gaps.",
        ),
        Table(
            "before-after",
            ["arm", "statistic", "base", "arm", "change", "p (Holm)"],
            changes,
            "Statistics (scripts/lab/metrics.py) of the last checkpoint of the base and of the arm, and their "
            f"difference at the same seed. Square brackets: {confidence} t intervals over seeds. p: adjusted for the "
            "changes.",
        ),
    ]


def score_heads(count, over):
    return ["task", "arm", count, "chance", "accuracy, %", over, "against chance", "gap", "p (Holm)"]


def score_cells(r, row, count, over, gap):
    """The cells below score_heads(). over: half or whole of the interval over questions; gap: the key of the gap."""
    said, shares = row["against_chance"], row | {gap: percent(row[gap])}
    verdict = Cell(said or "–", "open" if said == "at chance" else "")
    return [
        *(row["task"], arm_cell(row), row[count], f"{100 * row['chance']:.1f}"),
        *(interval(percent(row["accuracy"]), digits=1), over, verdict),
        *gap_cells(r, shares, gap, digits=1, better=1, undecided=""),
    ]


def task_scores(r):
    """The scores of multiple-choice tasks by arm."""
    rows = []
    for row in r["tasks"]:
        half, norm = row["half_over_examples"], interval(percent(row["accuracy_norm"]), digits=1)
        rows.append(score_cells(r, row, "examples", number(half and 100 * half, 1), "accuracy_gap"))
        rows[-1] += [interval(row["bits_per_byte"]), *gap_cells(r, row, "bits_per_byte_gap", undecided="")]
        rows[-1] += [norm + (" by tokens" if row["norm"] == "tokens" and row["accuracy_norm"] else "")]
        rows[-1] += [len(row["seeds"])]
    return Table(
        "tasks",
        score_heads("examples", "± over examples")
        + ["bits per byte", "gap", "p (Holm)", "normalized accuracy, %", "seeds"],
        rows,
        "Scores of the last step, mean over seeds. Gap: arm minus reference at the same seed. Square brackets: "
        f"{100 * r['confidence']:.0f}% t intervals over seeds. Over examples: half the interval that the number of "
        "examples causes, which more seeds do not reduce. At chance: the wider of both intervals contains chance. Bits "
        "per byte of the correct completion. Normalised: by characters of the completion. p: adjusted by Holm's method "
        "for the gaps of the column.",
    )


def synthetic(r):
    """The scores of needles by arm."""
    rows = []
    for row in r["synthetic"]:
        rows.append(score_cells(r, row, "questions", f"[{100 * row['low']:.1f}, {100 * row['high']:.1f}]", "gap"))
        rows[-1] += [interval(percent(row["exact"]), digits=1), len(row["seeds"])]
    return Table(
        "synthetic",
        score_heads("questions", "over questions") + ["most likely of all, %", "seeds"],
        rows,
        "Pairs of tokens in text, of which some are asked for. The answer is the most likely candidate. Mean over "
        f"seeds; square brackets: {100 * r['confidence']:.0f}% t intervals over seeds. Over questions: Wilson's "
        "interval, which more seeds do not reduce. At chance: the wider of both intervals contains chance. p: adjusted "
        "by Holm's method for the gaps.",
    )


SHAPE = ("attention", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn")


def mlp_width(run):
    """The width of the MLP, or "experts x width": --ffn sets that of dense layers alone."""
    of = lambda key: int(run.options.get(key) or 0)
    if not of("experts"):
        return of("ffn")
    dense = f", {of('ffn')} in {of('dense-layers')} dense" if of("dense-layers") else ""
    return f"{of('experts')} x {of('expert-ffn')}{dense}"


def fairness(study, r):
    """The settings that are equal, as a list, and those that differ between arms; of one run all."""
    first = study.runs[0]
    said = lambda key: shown(first.options.get(key)) + (
        f" ({first.over_time(key)})" if f"{shown(first.options.get(key))}" != first.over_time(key) else ""
    )
    read = first.read[-1][1]
    equal = "Equal in all runs, as checked in run.json and log.jsonl:"
    other = "The settings of the first run; the differences of others are listed at the top:"
    same = [] if study.single else [other if study.problems else equal]
    same += [
        f"{r['tokens'] / 1e6:.4g}M tokens in {said('steps')} steps of {said('total-batch')}",
        f"schedule {said('schedule')}, {said('warmup')} steps of warmup, decay to {said('min-lr-ratio')} of the rate",
        f"AdamW with betas {said('beta1')} and {said('beta2')}, weight decay {said('weight-decay')}, clipping at "
        f"{said('grad-clip')}; matrix products in {said('gemm')}",
        f"training data with fingerprint {r['data_fingerprint']}, in an order that depends only on the seed",
        "no validation data"
        if not read
        else f"validation on the first {read[0]} windows of data with fingerprint {shown(read[1])}",
        "initial values that depend on (seed, tensor name, element)"
        + ("" if study.single else ": equal for tensors with the same shape in two arms"),
        f"context of {said('seq-len')} tokens, vocabulary of {said('vocab')}",
    ]
    rows = []
    for arm, label in study.arms.items():
        run = next(x for x in study.runs if x.arm == arm)
        shape = [run.options[k] if isinstance(run.options[k], str) else int(run.options[k]) for k in SHAPE[:-1]]
        shape.append(mlp_width(run))
        parameters = parameters_text(run.parameters, run.active_parameters)
        rows.append([arm_cell({"arm": arm, "label": label}), *shape, parameters])
        rows[-1] += [engineering(run.flops_per_token)]
        rows[-1] += [" ".join(map(str, sorted({run.seed for run in study.runs if run.arm == arm})))]
    caption = "" if study.single else "Differences between arms. "
    caption += "FLOPs: forward and backward, including attention."
    return Table("arms", ["arm", *SHAPE, "parameters", "FLOPs/token", "seeds"], rows, caption, lines=same)


def runs(study, r, links):
    rows, (speeds, machine) = [], speed_cells([run.speed for run in study.runs])
    for run, row, speed in zip(study.runs, r["runs"], speeds):
        name = Cell(run.name, arm=None if study.single else run.arm, links=links(run))
        rows.append([name, row["seed"], row["state"], f"{row['steps']}/{run.steps}", number(row["final_loss"])])
        rows[-1] += [speed, shown(run.info.get("revision"))]
    head = ["run", "seed", "state", "steps", "loss", "tokens/s", "revision"]
    return Table("runs", head, rows, f"Tokens/s{machine}." if machine else "")


def per_cost(r):
    return currencies.table(r["currencies"], r["reference"])


def required(r):
    return preconditions.table(r["preconditions"], r["ngrams"], r["arms"])


def sections(study, r, links=lambda run: ()):
    """[(id, heading, tables)]. links(run): [(text, path)] of its files."""
    part = lambda key, make: [make(r)] if r[key] else []
    one = study.runs[0] if study.single else None
    results = [summary(r)] + [summary(r, every=True)] * (len(r["summary"]) > len(r["best"]))
    found = [
        ("result", "Result", [one_run.status(one, r["summary"][0]["rate"])] if one else results),
        ("currencies", "Per token, FLOP and second", part("currencies", per_cost)),
        ("preconditions", "Preconditions", [] if one else part("preconditions", required)),
        ("claims", "Claims", [] if one else part("claims", verdicts)),
        ("windows", "Windows, YOCO and selected blocks", windows(r) if r["long_context"] else []),
        ("upcycling", "From another arm", upcycled(r) if r["upcycling"] else []),
        ("tasks", "Tasks", part("tasks", task_scores)),
        ("loss", "Loss", [*part("noise", noise), *part("by_source", sources)]),
        ("stability", "Stability", [*part("ladder", ladder), spikes(r), *part("late_gradients", late_gradients)]),
        ("speed", "Rate and throughput", []),
        ("samples", "Samples", []),
        ("layers", "Layers", probes(r) if r["probes"] else []),
        ("context", "Use of context", [*part("synthetic", synthetic), *part("recall", recall)]),
        ("attention", "Attention maps", []),
        ("settings" if one else "fairness", "Settings" if one else "Fairness", [fairness(study, r), options(study, r)]),
        ("events", "Events", [one_run.events(one)] if one else []),
        ("runs", "Runs", [runs(study, r, links)]),
    ]
    found = [(name, heading, [t for t in tables if t.rows or t.lines]) for name, heading, tables in found]
    for t in (t for *_, tables in found for t in tables if one):
        leave_out_arms(t)
    return found


def leave_out_arms(t):
    """Of a table of one run: the columns and sentences that compare arms, and repeat its rate."""
    kept = [i for i, head in enumerate(t.head) if head not in ("arm", "rate", "runs", "gap", "p (Holm)", "seeds")]
    t.head = [t.head[i] for i in kept]
    t.rows = [[row[i] for i in kept] for row in t.rows]
    t.rows = [[x.removesuffix(", one seed") if isinstance(x, str) else x for x in row] for row in t.rows]
    t.caption = re.sub(r"(^|(?<=\. ))(Gap|p|Square brackets): [^.]*\.\s*", "", t.caption).replace(
        ", mean over seeds", ""
    )


def markdown(study, r):
    """The tables of the report as Markdown (results.md)."""
    t = r["training"]
    steps = f"{int(t['steps'])} steps of {int(t['total-batch'])}{' at the end' if r['runs'][0]['changes'] else ''}"
    parts = [
        f"# {r['title']}\n",
        f"{r['tokens'] / 1e6:.4g}M tokens per run, {steps}. Reference: {r['arms'][r['reference']]}.\n",
        *(f"* {note}\n" for note in r["notes"]),
    ]
    for name, heading, tables in sections(study, r):
        if tables and name != "runs":
            parts.append(f"## {heading}\n")
            parts += [as_markdown(table) + (f"\n{table.caption}\n" if table.caption else "") for table in tables]
    return "\n".join(parts)
