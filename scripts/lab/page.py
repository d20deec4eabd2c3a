"""page.py: the report as one HTML page that needs no network: tables as HTML, figures as data for plotly, which is in it."""

import base64
import html
import json
import math
import time
from pathlib import Path

from . import stats
from .option_history import shown

HERE = Path(__file__).resolve().parent
# told apart in both themes and, the first four, by those who see fewer colours (after Okabe and Ito)
PALETTE = {
    "light": [
        "#4d5661",
        "#0b62c4",
        "#c4570b",
        "#0a7d4f",
        "#9b3fb5",
        "#a8780b",
        "#0e8fa3",
        "#c2255c",
        "#6b7a00",
        "#7048c8",
    ],
    "dark": [
        "#aab4bf",
        "#6cb2ff",
        "#ff9f5a",
        "#5cd6a0",
        "#d99bf0",
        "#f0c75a",
        "#5fd3e3",
        "#ff8fb3",
        "#c5d34d",
        "#b39dff",
    ],
}


def number(x, digits=4):
    return "–" if not stats.finite(x) else f"{x:.{digits}f}"


def engineering(x):
    if not stats.finite(x) or x <= 0:
        return "–"
    power = min(5, int(math.log10(x) // 3))
    return f"{x / 1000**power:.3g}{['', 'k', 'M', 'G', 'T', 'P'][power]}"


def interval(e, sign=False, digits=4):
    """'mean [low, high]' of an estimate as results() has it."""
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
    """What one row of the summary says, no more than its interval allows."""
    gap, name = row["gap"], escape(row["label"])
    if not gap:
        return None
    if gap["half"] is None:
        return f"{name}, rate {row['rate']}: {gap['mean']:+.4f} nats on one seed, which shows nothing yet."
    side = "lower" if gap["mean"] < 0 else "higher"
    if decided(gap):
        return (
            f"{name}, rate {row['rate']}: loss {side} than {reference} by {abs(gap['mean']):.4f} nats, {100 * confidence:.0f}% interval "
            f"[{gap['mean'] - gap['half']:+.4f}, {gap['mean'] + gap['half']:+.4f}], {gap['n']} seeds."
        )
    return f"{name}, rate {row['rate']}: no difference shown: {gap['mean']:+.4f} nats, interval [{gap['mean'] - gap['half']:+.4f}, {gap['mean'] + gap['half']:+.4f}], {gap['n']} seeds."


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
        f"Loss: nats per token, of the {r['loss_of']}, mean over seeds. Gap: arm minus reference at the same rate and seed. Square brackets: "
        f"{100 * r['confidence']:.0f}% t intervals over seeds; coloured where the interval leaves out 0. p: of the gap being 0, two-sided, adjusted by Holm's "
        "method for the number of gaps in the table. Tokens/s: median over steps."
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
        f"A spike is a step at least {stats.SPIKE_Z:g} standard deviations above the mean of the last 1000 accepted ones; the score is the percentage of steps judged (all seeds together). "
        "The published definition: OLMo 2, arXiv 2501.00656.",
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
        f"Stable up to a rate: no run of it, nor of a smaller one from the best on, diverged or ended more than {stats.STABLE_TOLERANCE:g} nats above the best mean of the arm's ladder. "
        "Sensitivity: mean over the ladder of the loss (at most the initial loss) minus the best (Wortsman et al. 2023).",
    )


def noise_table(r):
    rows = [
        [
            arm_cell(row),
            f"{row['lr']:g}",
            number(row["sd"]),
            number(row["gap_sd"]),
            "–" if row["seeds_for_0.02"] is None else str(row["seeds_for_0.02"]),
        ]
        for row in r["noise"]
    ]
    return table(
        ["arm", "rate", "deviation of the loss", "deviation of the paired gap", "seeds for a gap of 0.02"],
        rows,
        "Standard deviations over seeds. The last column: with how many seeds the interval of a gap would be narrower than 0.02 nats to each side, were the deviation this one.",
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
        "Exact match / likeliest of the shown values, percent, mean over seeds; by chance the second is 100 / pairs.",
    )


def published_table(rows):
    cells = [
        [escape(claim), escape(published), escape(source), escape(here), escape(scale)]
        for claim, published, source, here, scale in rows
    ]
    return table(["what", "published", "by", "here", "how far they compare"], cells, "", "text")


def fairness(study, r):
    """What is the same, and what differs, in words and a table."""
    first = study.runs[0]
    said = lambda key: shown(first.options.get(key)) + (
        f" ({first.over_time(key)})" if f"{shown(first.options.get(key))}" != first.over_time(key) else ""
    )
    read = first.read[-1][1]
    same = [
        f"{r['tokens'] / 1e6:.4g}M tokens in {said('steps')} steps of {said('total-batch')}, schedule {said('schedule')}, {said('warmup')} steps of warmup, down to {said('min-lr-ratio')} of the rate",
        f"AdamW with betas {said('beta1')} and {said('beta2')}, weight decay {said('weight-decay')}, clipping at {said('grad-clip')}; products in {said('gemm')}",
        f"training data with fingerprint {r['data_fingerprint']}, in an order that follows from the seed alone",
        "no validation data"
        if not read
        else f"validation on the first {read[0]} windows of data with fingerprint {shown(read[1])}",
        "initial values that follow from (seed, name of the tensor, element): equal wherever two arms have a tensor of the same shape",
        f"context of {said('seq-len')} tokens, vocabulary of {said('vocab')}",
    ]
    head = (
        "Of the first run; what others have instead is named at the top"
        if study.problems
        else "The same in all runs, checked from run.json and log.jsonl"
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
            "What differs. FLOPs: forward and backward, attention included.",
        )
    )


def runs_table(study, r):
    rows = []
    for run, row in zip(study.runs, r["runs"]):
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
    """The lower triangle of a map as bytes of the square root."""
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
    """What the page shows of an arm's attention.safetensors; `chosen`: 'layer:head' to show, else up to `limit` evenly spread."""
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
        return "<p class=note>No run has attention.safetensors: the lab writes it for the first seed of each arm, when the trainer has --dump-attention.</p>"
    return (
        "<figure><div class=views><label>arm <select id=map-arm></select></label><label>head <select id=map-head></select></label></div><div class=maps id=maps></div>"
        "<div id=pointed></div><figcaption>First validation window, first 64 tokens, last checkpoint of the first seed. Rows: the token that reads; columns: what it reads. "
        "Shades go with the square root, each map up to its own largest value; in A1 - s A2 the second colour is below 0. Shown first: the head with the sharpest first map (lowest mean entropy of a row). "
        "Point at a map for its values.</figcaption></figure>"
    )


def build(study, r, figures, maps, published, plotly_js, watch=0):
    curves = [f for f in figures if f["id"] in ("loss", "final", "gap")]
    stability = [f for f in figures if f["id"] in ("ladder", "norms")]
    use = [f for f in figures if f["id"] in ("position", "recall")]
    layers = [f for f in figures if f not in curves + stability + use]
    rates = sorted({run.lr for run in study.runs})
    select = (
        (
            "<label>learning rate <select id=rate>"
            + "".join(f"<option value='{x:g}'>{x:g}</option>" for x in rates)
            + "<option value=all>all</option></select></label>"
        )
        if len(rates) > 1
        else ""
    )
    legend = "".join(
        f'<button data-of="{escape(arm)}" title=\'show or hide in all figures\'><span class=swatch data-arm="{escape(arm)}"></span>{escape(label)}</button>'
        for arm, label in study.arms.items()
    )
    sentences = [s for row in r["summary"] if (s := sentence(row, escape(r["arms"][r["reference"]]), r["confidence"]))]
    open_runs = sum(run.state not in ("done", "diverged") for run in study.runs) + len(study.missing)
    notes = list(study.notes) + (
        [f"{open_runs} of {len(study.runs) + len(study.missing)} runs are not done: what follows is of those that are."]
        if open_runs
        else []
    )
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
        "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(study.title)}</title><link rel=icon href='data:,'><style>{(HERE / 'page.css').read_text()}</style></head><body>",
        f"<header class=bar><nav><a href=#result>Result</a><a href=#loss>Loss</a><a href=#stability>Stability</a><a href=#layers>Layers</a><a href=#maps-of>Attention</a>"
        f"<a href=#published>Published</a><a href=#fairness>Fairness</a><a href=#runs>Runs</a></nav>{select}<button id=theme aria-label='change the theme'>dark</button><div id=legend>{legend}</div></header><main>",
        f"<h1>{escape(study.title)}</h1><p>{escape(study.question)}</p><p class=note>Made {time.strftime('%Y-%m-%d %H:%M')}{', while runs go on' if watch else ''}.</p>",
        *(f"<p class=warning>{escape(n)}</p>" for n in notes),
        "<h2 id=result>Result</h2><ul>" + "".join(f"<li>{s}</li>" for s in sentences) + "</ul>",
        summary_table(r),
        "<h2 id=loss>Loss</h2>",
        *map(figure_html, curves),
        noise_table(r) if r["noise"] else "",
        "<h2 id=stability>Stability</h2>",
        ladder_table(r) if r["ladder"] else "",
        *map(figure_html, stability),
        spike_table(r),
        "<h2 id=layers>Inside the layers</h2><div class=grid>",
        *map(figure_html, layers),
        "</div>",
        "<h2 id=context>Use of the context</h2><div class=grid>" if use else "",
        *map(figure_html, use),
        "</div>" if use else "",
        recall_table(r) if r["recall"] else "",
        "<h2 id=maps-of>Attention maps</h2>",
        maps_html(maps),
        "<h2 id=published>Beside what is published</h2>",
        published_table(published),
        "<h2 id=fairness>Fairness</h2>",
        fairness(study, r),
        "<h2 id=runs>Runs</h2>",
        runs_table(study, r),
        f"</main><script>{plotly_js}</script><script>const D = {packed};\n{(HERE / 'page.js').read_text()}</script></body></html>\n",
    ]
    return "".join(parts)
