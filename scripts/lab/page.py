"""page.py: the report as one offline HTML page: tables as HTML, figures as data that page_plot.js draws.

A page has sections of tables and figures; those without data are absent. Arms have colours, and dashes where there are
more arms than colours; on paper every line has a dash. page.js draws, and saves tables and figures as files.
"""

import json
import time
from pathlib import Path

from . import attention_maps, one_run, report_tables, stats
from .table import as_html, escape, swatch

HERE = Path(__file__).resolve().parent
# distinguishable in both themes, the first six also with colour vision deficiencies: test_page.py measures it
PALETTE = {
    "light": "#30363d #0f39a5 #830405 #0a8f6a #904d8e #cd4c18 #1581b9 #d05369 #3d8401 #8d5c40".split(),
    "dark": "#e6e9ed #68afe7 #ff6b3a #22bf8a #8c55d3 #fce718 #78e3f2 #f47cb2 #98d41a #bc925f".split(),
}
SCRIPTS = ("page_plot.js", "page_files.js", "page_maps.js", "page.js")
DASHES = ["solid", "dash", "dot", "dashdot"]
MOST_LINES = 8  # of a figure, unless the reader asks for more


def figure_html(f):
    buttons = "".join(
        f"<button data-figure={f['id']} data-view={i}>{escape(v['label'])}</button>" for i, v in enumerate(f["views"])
    )
    return (
        f"<figure id=figure-{f['id']}><h3>{escape(f['title'])}</h3>"
        f"<div class=views id=views-{f['id']}>{buttons if len(f['views']) > 1 else ''}</div>"
        f"<div class=plot id=plot-{f['id']}></div><figcaption>{escape(f['note'])}</figcaption></figure>"
    )


def rate_select(study):
    rates = study.rates()
    if len(rates) < 2:
        return ""
    options = "".join(f"<option value='{x:g}'>{x:g}</option>" for x in rates)
    return f"<label>learning rate <select id=rate>{options}<option value=all>all</option></select></label>"


def arm_button(arm, label):
    return (
        f"<button data-of=\"{escape(arm)}\" title='show or hide in all figures'>{swatch(arm)}{escape(label)}</button>"
    )


def header(study, names, arms, figures):
    links = "".join(f"<a href=#{name}>{name.capitalize()}</a>" for name in names)
    traces = [t for f in figures for v in f["views"] for t in v["traces"]]
    smooth = any(t.get("smooth") for t in traces)
    slider = "<label>smoothing <input type=range id=smoothing min=0 max=7> <output></output></label>" if smooth else ""
    legend = "".join(arm_button(arm, label) for arm, label in arms.items())
    if not study.single and any(t.get("faint") and not t.get("mode") for t in traces):
        legend += "<label><input type=checkbox id=single> single seeds</label>"
    legend = f"<details id=arms><summary>{len(arms)} lines</summary><div id=legend>{legend}</div></details>"
    return (
        f"<header class=bar><nav>{links}</nav>{rate_select(study)}{slider}"
        f"<button id=theme aria-label='change the theme'>dark</button>{legend if len(arms) > 1 else ''}</header>"
    )


def notes_html(study, watch):
    notes, total = list(study.notes), len(study.runs) + len(study.missing)
    unfinished = sum(run.state not in ("done", "diverged") for run in study.runs) + len(study.missing)
    if unfinished and total > 1:
        notes.append(f"{unfinished} of {total} runs are not finished; the results are of the finished ones.")
    written = f"<p class=note>Written {time.strftime('%Y-%m-%d %H:%M')}{', while runs continue' if watch else ''}.</p>"
    return written + "".join(f"<p class=warning>{escape(n)}</p>" for n in notes)


def arms_of(study, figures):
    """{arm: label} of the lines: the arms of the study, or what the lines of one run show."""
    if not study.single:
        return study.arms
    lines = {t["arm"]: t["arm"] for f in figures for v in f["views"] for t in v["traces"] if t["arm"] is not None}
    return {arm: "this run" if arm in study.arms else arm for arm in lines}


def at_first(study, figures, rate):
    """(the arms without lines, whether single runs have lines) until the reader asks for more."""
    views = [v for f in figures for v in f["views"] if not v.get("category") and not v.get("heat")]
    lines = [[t for t in v["traces"] if t["lr"] in (None, rate) or rate == "all"] for v in views]
    hidden = set()
    for of in lines:
        arms = sorted({t["arm"]: 0 for t in of if t["arm"] is not None}, key=lambda arm: arm != study.reference)
        chosen = stats.thin(arms, MOST_LINES) if study.single else range(min(len(arms), MOST_LINES))
        hidden |= set(arms) - {arms[i] for i in chosen}
    few = all(sum(t["arm"] not in hidden and not t.get("mode") for t in of) <= MOST_LINES for of in lines)
    return sorted(hidden), few or study.single


def first_rate(study, r):
    """The learning rate that figures show first: all, if no arm has several."""
    several = any(len({run.lr for run in study.runs if run.arm == arm}) > 1 for arm in study.arms)
    return f"{r['main_lr']:g}" if several or len(study.rates()) == 1 else "all"


def content(study, r, figures, maps=(), links=lambda run: (), watch=0):
    """(data for page.js, [(id, heading, tables as HTML, figures as HTML)])"""
    hidden, single = at_first(study, figures, first_rate(study, r))
    data = {
        "id": study.title,
        "hidden": hidden,
        "single": single,
        "notes": notes_html(study, watch),
        "figures": figures,
        "maps": list(maps),
        "arms": arms_of(study, figures),
        "palette": PALETTE,
        "dashes": DASHES,
        "main_rate": first_rate(study, r),
        "watch": watch,
    }
    found = []
    for name, heading, tables in report_tables.sections(study, r, links):
        text = "".join(map(as_html, tables))
        text += one_run.samples(study.runs[0]) if name == "samples" and study.single else ""
        drawn = "".join(figure_html(f) for f in figures if f["section"] == name)
        drawn = f"<div class=grid>{drawn}</div>" if drawn and name in ("layers", "context", "speed") else drawn
        drawn += attention_maps.maps_html(maps) if name == "attention" else ""
        if text or drawn:
            found.append((name, heading, text, drawn))
    return data, found


def build(study, data, sections):
    """The page of content()."""
    packed = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    names = [name for name, *_ in sections]
    scripts = "".join((HERE / name).read_text() for name in SCRIPTS)
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(study.title)}</title><link rel=icon href='data:,'>",
        f"<style>{(HERE / 'page.css').read_text()}</style></head><body>",
        header(study, names, data["arms"], data["figures"]),
        f"<main><h1>{escape(study.title)}</h1><p>{escape(study.question)}</p>",
        data["notes"],
        *(f"<h2 id={name}>{heading}</h2><div>{tables}</div>{drawn}" for name, heading, tables, drawn in sections),
        f"</main><script>const D = {packed};\n{scripts}</script></body></html>\n",
    ]
    return "".join(parts)
