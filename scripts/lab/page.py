"""page.py: the report as one offline HTML page: tables as HTML, figures as data for plotly, which is included."""

import base64
import html
import json
import math
import time
from pathlib import Path

from . import long_context, stats, tasks
from .option_history import shown

HERE = Path(__file__).resolve().parent
# distinguishable in both themes; the first four also with colour vision deficiency (after Okabe and Ito)
PALETTE = {
    "light": "#4d5661 #0b62c4 #c4570b #0a7d4f #9b3fb5 #a8780b #0e8fa3 #c2255c #6b7a00 #7048c8".split(),
    "dark": "#aab4bf #6cb2ff #ff9f5a #5cd6a0 #d99bf0 #f0c75a #5fd3e3 #ff8fb3 #c5d34d #b39dff".split(),
}


def number(x, digits=4):
    return "–" if not stats.finite(x) else f"{x:.{digits}f}"


def engineering(x):
    if not stats.finite(x) or x <= 0:
        return "–"
    power = min(5, int(math.log10(x) // 3))
    return f"{x / 1000**power:.3g}{['', 'k', 'M', 'G', 'T', 'P'][power]}"


def interval(e, sign=False, digits=4):
    """'mean [low, high]' of an estimate of results()."""
    if not e:
        return "–"
    mean = f"{e['mean']:+.{digits}f}" if sign else f"{e['mean']:.{digits}f}"
    if e["half"] is None:
        return f"{mean} <span class=note>one seed</span>"
    show = "+" if sign else ""
    return f"{mean} [{e['mean'] - e['half']:{show}.{digits}f}, {e['mean'] + e['half']:{show}.{digits}f}]"


def decided(e):
    return bool(e) and e["half"] is not None and abs(e["mean"]) > e["half"]


def escape(text):
    return html.escape(str(text), quote=True)


def table(head, rows, caption="", kind=""):
    """rows: lists of cells; a cell is HTML, or (HTML, class)."""
    lines = [
        f"<div class=wide><table class='{kind}'><caption>{caption}</caption><thead><tr>",
        *(f"<th>{h}</th>" for h in head),
        "</tr></thead><tbody>",
    ]
    for row in rows:
        cells = [(c if isinstance(c, tuple) else (c, "")) for c in row]
        lines.append(
            "<tr>" + "".join(f"<td class='{k}'>{c}</td>" if k else f"<td>{c}</td>" for c, k in cells) + "</tr>"
        )
    return "".join(lines) + "</tbody></table></div>"


def arm_cell(row):
    return f'<span class=swatch data-arm="{escape(row["arm"])}"></span>{escape(row["label"])}'


def sentence(row, reference, confidence):
    """The conclusion from a row of the summary, as far as its interval allows."""
    gap, name = row["gap"], escape(row["label"])
    if not gap:
        return None
    if gap["half"] is None:
        return f"{name}, rate {row['rate']}: {gap['mean']:+.4f} nats with one seed, without an interval."
    side = "lower" if gap["mean"] < 0 else "higher"
    if decided(gap):
        result = f"loss {side} than {reference} by {abs(gap['mean']):.4f} nats, {100 * confidence:.0f}% interval"
    else:
        result = f"no difference shown: {gap['mean']:+.4f} nats, interval"
    limits = f"[{gap['mean'] - gap['half']:+.4f}, {gap['mean'] + gap['half']:+.4f}]"
    return f"{name}, rate {row['rate']}: {result} {limits}, {gap['n']} seeds."


def summary_table(r):
    rows = []
    for row in r["summary"]:
        gap = row["gap"]
        kind = "open" if not decided(gap) else "good" if gap["mean"] < 0 else "bad"
        states = ", ".join(f"{n} {s}" for s, n in row["states"].items())
        rows.append(
            [
                arm_cell(row),
                escape(row["rate"]),
                f"{row['parameters']:,}" if row["parameters"] else "–",
                engineering(row["flops_per_token"]),
                engineering(row["tokens_per_s"]),
                interval(row["loss"]),
                (interval(gap, True), kind) if gap else "reference" if row["arm"] == r["reference"] else "–",
                number((gap or {}).get("p_holm"), 3),
                states,
            ]
        )
    caption = (
        f"Loss: nats per token, of the {r['loss_of']}, mean over seeds. Gap: arm minus reference at the same rate and "
        f"Square brackets: {100 * r['confidence']:.0f}% t intervals over seeds, coloured if they exclude 0. p: "
        "two-sided, of gap 0, adjusted by Holm's method for the gaps in the table. Tokens/s: median over steps."
    )
    return table(["arm", "rate", "parameters", "FLOPs/token", "tokens/s", "loss", "gap", "p", "runs"], rows, caption)


def spike_table(r):
    def score(x):
        return f"{x['spikes']} of {x['judged']}" + (f" ({x['score']:.2f}%)" if x["score"] is not None else "")

    rows = [
        [
            arm_cell(row),
            escape(row["rate"]),
            str(row["runs"]),
            str(row["diverged"]),
            score(row["grad"]),
            score(row["loss"]),
        ]
        for row in r["spikes"]
    ]
    return table(
        ["arm", "rate", "runs", "diverged", "spikes of the gradient norm", "spikes of the loss"],
        rows,
        f"A spike is a step at least {stats.SPIKE_Z:g} standard deviations above the mean of the last 1000 accepted "
        "steps. The score is their percentage of the steps with a z, over all seeds (OLMo 2, arXiv 2501.00656).",
    )


def ladder_table(r):
    rows = []
    for row in r["ladder"]:
        seeds = ", ".join("none" if x is None else f"{x:g}" for x in row["stable_by_seed"]) or "–"
        stable = (
            "none" if row["stable"] is None else f"{row['stable']:g}" + (" or more" if row["bounded_by_ladder"] else "")
        )
        rows.append(
            [
                arm_cell(row),
                "–" if row["best"] is None else f"{row['best']:g}",
                stable,
                seeds,
                number(row["sensitivity"]),
            ]
        )
    return table(
        ["arm", "best rate", "largest stable rate", "by seed", "sensitivity"],
        rows,
        "The largest stable rate: up to it, from the best rate on, no run diverged or ended more than "
        f"{stats.STABLE_TOLERANCE:g} nats above the best mean of the arm. Sensitivity: mean over the rates of the loss "
        "(at most the initial loss), minus the best (Wortsman et al. 2023).",
    )


def verdict_table(r):
    """The claims that the plan tests."""
    rows = []
    for c in r["claims"]:
        kind = {"supported": "good", "contradicted": "bad"}.get(c["verdict"], "open")
        rows.append([escape(c["claim"]), escape(c["source"]), escape(f"{c['metric']} of {' - '.join(c['arms'])}")])
        rows[-1] += [f"{c['expect']}, {c['effect']:g}", interval(c["estimate"], True)]
        rows[-1] += [(escape(c["verdict"] + (f": {c['remark']}" if c["remark"] else "")), kind)]
        rows[-1] += [str(c["estimate"]["n"]) if c["estimate"] else "–"]
    return table(
        ["claim", "source", "difference", "expected, smallest effect", "value", "verdict", "seeds"],
        rows,
        "Claims of scripts/lab/claims; scripts/lab/claims.py defines their rules. Differences of magnitudes are "
        "logarithms of ratios; the effect 0.1 is then a factor of 1.1. A verdict holds for these tokens and "
        "parameters.",
    )


def late_gradient_table(r):
    def ratio(e):
        ends = [math.exp(e["mean"] + sign * e["half"]) for sign in (-1, 1)] if e and e["half"] is not None else []
        return f"{math.exp(e['mean']):.2f} [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "–"

    rows = [
        [
            arm_cell(row),
            f"{row['lr']:g}",
            *(number(x, 3) for x in row["layers"]),
            number(row["all"], 3),
            ratio(row["ratio"]),
        ]
        for row in r["late_gradients"]
    ]
    depth = max(len(row["layers"]) for row in r["late_gradients"])
    return table(
        ["arm", "rate", *(f"layer {i}" for i in range(depth)), "all", "ratio"],
        rows,
        "Gradient norms of the layers in the last quarter of the steps, before clipping: geometric means over "
        "statistics and the seeds. Ratio: of all layers to the reference, paired by seed.",
    )


def probe_table(r):
    rows = []
    for arm, names in r["probes"]["layers"].items():
        for name, layers in names.items():
            rows.append([arm_cell({"arm": arm, "label": r["arms"][arm]}), name, *(interval(e) for e in layers)])
    depth = max(len(row) for row in rows) - 2
    return table(
        ["arm", "number", *(f"layer {i}" for i in range(depth))],
        [row + ["–"] * (depth + 2 - len(row)) for row in rows],
        "Probes of the last checkpoints (--probe), mean over seeds. scripts/lab/mechanisms.py describes the numbers.",
    )


def noise_table(r):
    seeds = lambda n: "–" if n is None else str(n)
    rows = [
        [
            arm_cell(row),
            f"{row['lr']:g}",
            number(row["sd"]),
            number(row["gap_sd"]),
            *(seeds(row[key]) for key in ("seeds_for_0.02", "seeds_for_effect", "seeds_pooled")),
        ]
        for row in r["noise"]
    ]
    return table(
        ["arm", "rate", "deviation of the loss", "deviation of the paired gap", "seeds for a gap of 0.02"]
        + ["for 0.015 with power 0.8", "the same, pooled"],
        rows,
        "Standard deviations over seeds. Seeds for a gap of 0.02: the interval of a gap is narrower than 0.02 nats on "
        "each side, with this deviation. Then: a true gap of 0.015 has an interval without 0 with probability 0.8, "
        "with this deviation, and with the one pooled over all arms.",
    )


def recall_table(r):
    head, rows = None, []
    for arm, cells in r["recall"].items():
        head = head or [f"{c['pairs']} pairs" + (f", {c['noise']} noise" if c["noise"] else "") for c in cells]
        rows.append(
            [
                arm_cell({"arm": arm, "label": r["arms"][arm]}),
                *(f"{100 * c['exact']['mean']:.1f} / {100 * c['among_values']['mean']:.1f}" for c in cells),
            ]
        )
    return table(
        ["arm", *(head or [])],
        rows,
        "Exact match / best of the shown values, percent, mean over seeds. By chance the second is 100 / pairs.",
    )


def published_table(rows):
    cells = [
        [escape(claim), escape(published), escape(source), escape(here), escape(scale)]
        for claim, published, source, here, scale in rows
    ]
    return table(["what", "published", "by", "here", "limits of the comparison"], cells, "", "text")


def low_bit_rows(r, part):
    rows = []
    for row in r["low_bit"][part]:
        gap = row["gap"]
        kind = "open" if not decided(gap) else "good" if gap["mean"] < 0 else "bad"
        cost = interval(row["cost"], part != "measured", 5)
        if part != "measured" and not decided(row["cost"]):
            cost += " <span class=note>not shown</span>"
        rows.append(
            [
                escape(row["precision"]),
                escape(row["what"]),
                arm_cell(row),
                cost,
                (interval(gap, True, 5) + ("" if kind != "open" else " <span class=note>not shown</span>"), kind)
                if gap
                else "reference"
                if row["arm"] == r["reference"]
                else "–",
                number((gap or {}).get("p_holm"), 3),
                str(row["cost"]["n"]),
            ]
        )
    return rows


def low_bit_section(r):
    """What low precision costs each arm."""
    first, confidence = r["low_bit"]["precisions"][0], f"{100 * r['confidence']:.0f}%"
    missing = "".join(f"<li>{escape(line)}</li>" for line in r["low_bit"]["missing"])
    head = ["arm", "cost", "gap", "p", "seeds"]
    return (
        "<h2 id=precision>Low precision</h2>"
        + (f"<p class=warning>Missing:</p><ul>{missing}</ul>" if missing else "")
        + table(
            ["trained in", "losses", *head],
            low_bit_rows(r, "training"),
            f"Cost: loss of a run minus that of the run in {first} with the same seed, nats per token. Gap: the arm's "
            f"cost minus that of the reference at the same seed. Square brackets: {confidence} t intervals over seeds; "
            "an interval that contains 0 shows no difference. p: adjusted for the gaps of the table.",
        )
        + table(
            ["trained in", "rounded to", *head],
            low_bit_rows(r, "rounding"),
            "Evaluation with rounded numbers. Cost: loss with --quantize minus loss without, of the same checkpoint. "
            "p: adjusted for the gaps at one training precision.",
        )
        + table(
            ["trained in", "magnitude", "arm", "value", *head[2:]],
            low_bit_rows(r, "measured"),
            "Over the layers. Logits and activations: on the first 64 tokens of windows. bf16 error: of rows of "
            "attention in bf16, relative to their norm; an output is a head, or a pair after the subtraction. Gap: the "
            "arm's value minus that of the reference.",
        )
    )


def long_context_section(r):
    """What windows and YOCO cost each variant, and what they save."""
    part, confidence = r["long_context"], f"{100 * r['confidence']:.0f}%"
    first = next((row for row in part["arms"] if row["arm"] == r["reference"]), part["arms"][0])
    whats = list(first["values"])
    arms = [
        [
            arm_cell(row),
            long_context.caches(row),
            f"{row['cache_numbers']:,}",
            f"{100 * row['cache_numbers'] / first['cache_numbers']:.0f}%",
            engineering(row["flops_per_token"]),
            *(interval(row["values"][what]) for what in whats),
        ]
        for row in part["arms"]
    ]
    costs = []
    for row in part["costs"]:
        cells = [escape(row["what"]), f"{row['change']} against {row['base']}", arm_cell(row)]
        for key in ("cost", "gap"):
            e = row[key]
            kind = "open" if not decided(e) else "good" if e["mean"] < 0 else "bad"
            open_end = " <span class=note>not shown</span>" if e and e["half"] is not None and kind == "open" else ""
            cells += [(interval(e, True) + open_end, kind) if e else "–", number((e or {}).get("p_holm"), 3)]
        costs.append([*cells, str(row["cost"]["n"])])
    return (
        "<h2 id=windows>Windows and YOCO</h2>"
        + table(
            ["arm", "caches x positions", "numbers in a cache", "of the reference", "FLOPs/token", *map(escape, whats)],
            arms,
            "Cache: keys and values of one sequence of the full context, as generation keeps them. Losses: nats per "
            f"token, mean over seeds with {confidence} t intervals. A last column below 0: positions far beyond the "
            "window are predicted better than those before its end.",
        )
        + table(
            ["value", "change", "arm", "cost", "p", "gap", "p", "seeds"],
            costs,
            "Cost: the arm minus the arm of the same variant that the change is compared with, at the same seed. Gap: "
            f"the cost minus that of the same change in the reference's variant. Square brackets: {confidence} t "
            "intervals over seeds; an interval that contains 0 shows no difference. p: adjusted by Holm's method for "
            "the costs, and for the gaps, of one value.",
        )
    )


def tasks_tables(r):
    """The scores of multiple-choice tasks by arm: accuracies, and bits per byte."""

    def gap_cells(row, key, sign, digits, scale=lambda e: e):
        gap = row[f"{key}_gap"]
        kind = "open" if not decided(gap) else "good" if sign * gap["mean"] > 0 else "bad"
        reference = "reference" if row["arm"] == r["reference"] else "–"
        return [(interval(scale(gap), True, digits), kind) if gap else reference, number((gap or {}).get("p_holm"), 3)]

    accuracies, bits = [], []
    for row in r["tasks"]:
        name, half, said = [escape(row["task"]), arm_cell(row)], row["half_over_examples"], row["against_chance"]
        cells = [str(row["examples"]), f"{100 * row['chance']:.1f}", interval(tasks.percent(row["accuracy"]), digits=1)]
        cells += [number(half and 100 * half, 1), (said or "–", "open" if said == "at chance" else "")]
        norm = interval(tasks.percent(row["accuracy_norm"]), digits=1)
        by_tokens = " by tokens" if row["norm"] == "tokens" and row["accuracy_norm"] else ""
        accuracies.append([*name, *cells, *gap_cells(row, "accuracy", 1, 1, tasks.percent), norm + by_tokens])
        bits.append([*name, interval(row["bits_per_byte"]), *gap_cells(row, "bits_per_byte", -1, 4)])
    head = ["task", "arm", "examples", "chance", "accuracy, %", "± over examples", "against chance", "gap", "p"]
    return table(
        [*head, "normalised, %"],
        accuracies,
        "Scores of the last step, mean over seeds. Gap: arm minus reference at the same seed. Square brackets: "
        f"{100 * r['confidence']:.0f}% t intervals over seeds. Over examples: half the interval that the number of "
        "examples causes, which more seeds do not reduce. At chance: the wider of both intervals contains chance. "
        "Normalised: scores divided by the characters of the completion. p: adjusted by Holm's method for the gaps.",
    ) + table(["task", "arm", "bits per byte", "gap", "p"], bits, "Of the correct completion; lower is better.")


def fairness(study, r):
    """The settings that are equal, and those that differ between arms, as a list and a table."""
    first = study.runs[0]
    said = lambda key: shown(first.options.get(key)) + (
        f" ({first.over_time(key)})" if f"{shown(first.options.get(key))}" != first.over_time(key) else ""
    )
    read = first.read[-1][1]
    same = [
        f"{r['tokens'] / 1e6:.4g}M tokens in {said('steps')} steps of {said('total-batch')}",
        f"schedule {said('schedule')}, {said('warmup')} steps of warmup, decay to {said('min-lr-ratio')} of the rate",
        f"AdamW with betas {said('beta1')} and {said('beta2')}, weight decay {said('weight-decay')}, clipping at "
        f"{said('grad-clip')}; matrix products in {said('gemm')}",
        f"training data with fingerprint {r['data_fingerprint']}, in an order that depends only on the seed",
        "no validation data"
        if not read
        else f"validation on the first {read[0]} windows of data with fingerprint {shown(read[1])}",
        "initial values that depend on (seed, tensor name, element): equal for tensors with the same shape in two arms",
        f"context of {said('seq-len')} tokens, vocabulary of {said('vocab')}",
    ]
    head = (
        "The settings of the first run; the differences of others are listed at the top"
        if study.problems
        else "Equal in all runs, as checked in run.json and log.jsonl"
    )
    seeds = {arm: sorted({run.seed for run in study.runs if run.arm == arm}) for arm in study.arms}
    shape = ("attention", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn")
    rows = []
    for arm, label in study.arms.items():
        run = next(x for x in study.runs if x.arm == arm)
        rows.append(
            [
                arm_cell({"arm": arm, "label": label}),
                *(escape(run.options[k] if isinstance(run.options[k], str) else int(run.options[k])) for k in shape),
                f"{run.parameters:,}" if run.parameters else "–",
                engineering(run.flops_per_token),
                " ".join(map(str, seeds[arm])),
            ]
        )
    return (
        f"<p>{head}:</p><ul>"
        + "".join(f"<li>{escape(s)}</li>" for s in same)
        + "</ul>"
        + table(
            ["arm", *shape, "parameters", "FLOPs/token", "seeds"],
            rows,
            "Differences between arms. FLOPs: forward and backward, including attention.",
        )
    )


def runs_table(study, r):
    rows = []
    for run, row in zip(study.runs + study.others, r["runs"]):
        rows.append(
            [
                arm_cell({"arm": run.arm, "label": run.name}),
                row["state"],
                f"{row['steps']}/{run.steps}",
                number(row["final_loss"]),
                engineering(row["tokens_per_s"]),
                escape(run.info.get("revision")),
                escape(", ".join(run.info.get("devices", []))),
            ]
        )
    return table(["run", "state", "steps", "loss", "tokens/s", "revision", "devices"], rows)


def pack(values, n):
    """The lower triangle of a map: the square roots as bytes, base64."""
    return base64.b64encode(
        bytes(round(255 * math.sqrt(min(1.0, max(0.0, values[t * n + j])))) for t in range(n) for j in range(t + 1))
    ).decode()


def entropy(values, n):
    return sum(
        -values[t * n + j] * math.log(values[t * n + j])
        for t in range(1, n)
        for j in range(t + 1)
        if values[t * n + j] > 0
    ) / (n - 1)


def token_text(token):
    return json.dumps(chr(token))[1:-1] if 32 <= token < 127 or token in (9, 10) else str(token)


def heads_of(tensors):
    """name of a head's tensors -> 'layer:head'"""
    names = [name.removesuffix(".a1") for name in tensors if name.endswith(".a1")]
    return {name: "{1}:{3}".format(*name.split(".")) for name in names}


def maps_data(arm, label, tensors, chosen=None, limit=24):
    """The maps of an arm on the page: the `chosen` 'layer:head', else up to `limit` evenly spaced heads."""
    short = heads_of(tensors)
    names = list(short)
    names = [n for n in names if short[n] in chosen] if chosen else [names[i] for i in stats.thin(names, limit)]
    n, heads, sharp = tensors["tokens"][0][0], [], {}
    for name in names:
        a1 = tensors[f"{name}.a1"][1]
        sharp[short[name]] = entropy(a1, n)
        layer, head = short[name].split(":")
        item = {"name": short[name], "title": f"layer {layer}, head {head}", "a1": pack(a1, n)}
        if f"{name}.a2" in tensors:
            item["a2"], item["lambda"] = (
                pack(tensors[f"{name}.a2"][1], n),
                [round(x, 5) for x in tensors[f"{name}.lambda"][1]],
            )
        heads.append(item)
    if not heads:
        return None
    return {
        "arm": arm,
        "label": label,
        "tokens": [token_text(int(t)) for t in tensors["tokens"][1]],
        "heads": heads,
        "sharpest": min(sharp, key=sharp.get),
    }


def figure_html(f):
    buttons = (
        "".join(
            f"<button data-figure={f['id']} data-view={i}>{escape(v['label'])}</button>"
            for i, v in enumerate(f["views"])
        )
        if len(f["views"]) > 1
        else ""
    )
    return (
        f"<figure id=figure-{f['id']}><h3>{escape(f['title'])}</h3><div class=views id=views-{f['id']}>{buttons}</div>"
        f"<div class=plot id=plot-{f['id']}></div><figcaption>{escape(f['note'])}</figcaption></figure>"
    )


def maps_html(maps):
    if not maps:
        return (
            "<p class=note>No run has attention.safetensors. The lab writes it for the first seed of each arm, if the "
            "trainer has --dump-attention.</p>"
        )
    return (
        "<figure><div class=views><label>arm <select id=map-arm></select></label><label>head "
        "<select id=map-head></select></label></div><div class=maps id=maps></div><div id=pointed></div><figcaption>"
        "First validation window, first 64 tokens, last checkpoint of the first seed. Rows: queries; columns: keys. "
        "The shade is the square root of the value, relative to the maximum of each map; in A1 - s A2 the second "
        "is negative. The first head shown is the one with the sharpest first map (lowest mean entropy of a row). "
        "Hover over a map to see its values.</figcaption></figure>"
    )


def rate_select(study):
    rates = study.rates()
    if len(rates) < 2:
        return ""
    options = "".join(f"<option value='{x:g}'>{x:g}</option>" for x in rates)
    return f"<label>learning rate <select id=rate>{options}<option value=all>all</option></select></label>"


def arm_button(arm, label):
    return (
        f"<button data-of=\"{escape(arm)}\" title='show or hide in all figures'>"
        f'<span class=swatch data-arm="{escape(arm)}"></span>{escape(label)}</button>'
    )


MOST_SENTENCES = 16  # of more gaps only those are told whose interval excludes 0
SECTIONS = (
    "Result",
    "Precision",
    "Windows",
    "Tasks",
    "Loss",
    "Stability",
    "Layers",
    "Attention",
    "Published",
    "Fairness",
    "Runs",
)


def header(study, r):
    absent = [
        name
        for name, part in (("Precision", "low_bit"), ("Windows", "long_context"), ("Tasks", "tasks"))
        if not r[part]
    ]
    names = [name for name in SECTIONS if name not in absent]
    links = "".join(f"<a href=#{name.lower()}>{name}</a>" for name in names)
    legend = "".join(arm_button(arm, label) for arm, label in study.arms.items())
    return (
        f"<header class=bar><nav>{links}</nav>{rate_select(study)}<button id=theme aria-label='change the theme'>dark"
        f"</button><div id=legend>{legend}</div></header>"
    )


def build(study, r, figures, maps, published, plotly_js, watch=0):
    curves = [f for f in figures if f["id"] in ("loss", "final", "gap")]
    stability = [f for f in figures if f["id"] in ("ladder", "norms")]
    use = [f for f in figures if f["id"] in ("position", "recall")]
    task_figures = [f for f in figures if f["id"] == "tasks"]
    layers = [f for f in figures if f not in curves + stability + use + task_figures]
    told = (
        r["summary"]
        if len(r["summary"]) <= MOST_SENTENCES
        else [x for x in r["summary"] if x["gap"] and decided(x["gap"])]
    )
    sentences = [s for row in told if (s := sentence(row, escape(r["arms"][r["reference"]]), r["confidence"]))]
    everything = study.runs + study.others
    notes, total = list(study.notes), len(everything) + len(study.missing)
    unfinished = sum(run.state not in ("done", "diverged") for run in everything) + len(study.missing)
    if unfinished:
        notes.append(f"{unfinished} of {total} runs are not finished; the results are of the finished ones.")
    data = {
        "id": study.title,
        "figures": figures,
        "maps": maps,
        "arms": list(study.arms),
        "palette": PALETTE,
        "main_rate": f"{r['main_lr']:g}",
        "watch": watch,
    }
    packed = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(study.title)}</title><link rel=icon href='data:,'>",
        f"<style>{(HERE / 'page.css').read_text()}</style></head><body>{header(study, r)}<main>",
        f"<h1>{escape(study.title)}</h1><p>{escape(study.question)}</p>",
        f"<p class=note>Written {time.strftime('%Y-%m-%d %H:%M')}{', while runs continue' if watch else ''}.</p>",
        *(f"<p class=warning>{escape(n)}</p>" for n in notes),
        "<h2 id=result>Result</h2><ul>" + "".join(f"<li>{s}</li>" for s in sentences) + "</ul>",
        summary_table(r),
        verdict_table(r) if r["claims"] else "",
        low_bit_section(r) if r["low_bit"] else "",
        long_context_section(r) if r["long_context"] else "",
        "<h2 id=tasks>Tasks</h2>" if r["tasks"] or task_figures else "",
        tasks_tables(r) if r["tasks"] else "",
        *map(figure_html, task_figures),
        "<h2 id=loss>Loss</h2>",
        *map(figure_html, curves),
        noise_table(r) if r["noise"] else "",
        "<h2 id=stability>Stability</h2>",
        ladder_table(r) if r["ladder"] else "",
        *map(figure_html, stability),
        spike_table(r),
        late_gradient_table(r) if r["late_gradients"] else "",
        "<h2 id=layers>Layers</h2><div class=grid>",
        *map(figure_html, layers),
        "</div>",
        probe_table(r) if r["probes"] else "",
        "<h2 id=context>Use of context</h2><div class=grid>" if use else "",
        *map(figure_html, use),
        "</div>" if use else "",
        recall_table(r) if r["recall"] else "",
        "<h2 id=attention>Attention maps</h2>",
        maps_html(maps),
        "<h2 id=published>Published results</h2>",
        published_table(published),
        "<h2 id=fairness>Fairness</h2>",
        fairness(study, r),
        "<h2 id=runs>Runs</h2>",
        runs_table(study, r),
        f"</main><script>{plotly_js}</script>",
        f"<script>const D = {packed};\n{(HERE / 'page.js').read_text()}</script></body></html>\n",
    ]
    return "".join(parts)
