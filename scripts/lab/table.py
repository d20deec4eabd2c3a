"""table.py: tables of the report as data, which become HTML and Markdown; page.js makes CSV and LaTeX of the HTML."""

import html
import math
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

from . import stats


class Cell(NamedTuple):
    text: str
    kind: str = ""  # good, bad, open: the colour
    arm: str | None = None  # has this colour as a mark
    links: tuple = ()  # (text, path) after the text


@dataclass
class Table:
    id: str
    head: list
    rows: list  # of lists: text, or Cell
    caption: str = ""
    wrap: bool = False  # long texts, in lines
    lines: list = field(default_factory=list)  # a list of remarks before the table
    fold: str = ""  # a page shows this, and the table on demand


def number(x, digits=4):
    return "–" if not stats.finite(x) else f"{x:.{digits}f}"


def engineering(x):
    if not stats.finite(x) or x <= 0:
        return "–"
    power = min(5, max(0, int(math.log10(float(f"{x:.3g}")) // 3)))
    return f"{x / 1000**power:.3g}{['', 'k', 'M', 'G', 'T', 'P'][power]}"


def interval(e, sign=False, digits=4):
    """'mean [low, high]' of an estimate of results()."""
    if not e:
        return "–"
    form = f"{'+' if sign else ''}.{digits}f"
    limits = f" [{e['mean'] - e['half']:{form}}, {e['mean'] + e['half']:{form}}]" if e["half"] is not None else None
    return f"{e['mean']:{form}}" + (limits or ", one seed")


def parameters_text(count, active):
    """The parameters of a model, and with experts those that a token passes."""
    if not count:
        return "–"
    return f"{count:,}" if active == count else f"{count:,}, {active:,} active"


def speed_text(s, machine=True):
    """Tokens/s of study.speed(): never without their interval."""
    if not s:
        return "–"
    text = f"{engineering(s['median'])} [{engineering(s['low'])}, {engineering(s['high'])}]"
    return text + (f" on {s['machine']}" if machine else "")


def speed_cells(speeds):
    """The cells of tokens/s, and " on MACHINE" for the caption, or, if the machines differ, for each cell."""
    machines = {s["machine"] for s in speeds if s}
    one = f" on {machines.pop()}" if len(machines) == 1 else ""
    return [speed_text(s, not one) for s in speeds], one


def difference(e, digits=4, better=-1, undecided=" not shown"):
    """The cell of a difference; compare.correct() makes its direction. better: its sign in a better arm."""
    if not e:
        return Cell("–")
    kind = "open" if not e.get("shown") else "good" if better * e["mean"] > 0 else "bad"
    remark = undecided if e.get("shown") is False and e["half"] is not None else ""
    return Cell(interval(e, True, digits) + remark, kind)


def arm_cell(row):
    return Cell(row["label"], arm=row["arm"])


def escape(text):
    return html.escape(str(text), quote=True)


def swatch(arm):
    return f'<svg class=swatch data-arm="{escape(arm)}" viewBox="0 0 26 10"><line x1=0 y1=5 x2=26 y2=5 /></svg>'


def html_cell(cell):
    c = cell if isinstance(cell, Cell) else Cell(str(cell))
    links = "".join(f" <a href='{quote(path)}'>{escape(text)}</a>" for text, path in c.links)
    mark = swatch(c.arm) if c.arm is not None else ""
    return (f"<td class={c.kind}>" if c.kind else "<td>") + mark + escape(c.text) + links + "</td>"


def as_html(t):
    remarks = f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in t.lines)}</ul>" if t.lines else ""
    if not t.rows:
        return remarks
    head = "".join(f"<th>{escape(h)}</th>" for h in t.head)
    rows = "".join("<tr>" + "".join(map(html_cell, row)) + "</tr>" for row in t.rows)
    shown = (
        f"{remarks}<div class=table id=table-{t.id}><div class=wide><table{' class=text' if t.wrap else ''}><thead><tr>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div><p class=note>{escape(t.caption)}</p></div>"
    )
    return f"<details><summary>{escape(t.fold)}</summary>{shown}</details>" if t.fold else shown


def as_markdown(t):
    cell = lambda c: (c.text if isinstance(c, Cell) else str(c)).replace("|", "\\|")
    lines = [f"* {line}" for line in t.lines] + [""] * bool(t.lines)
    if t.rows:
        lines += ["| " + " | ".join(t.head) + " |", "|---|" + ("---|" if t.wrap else "---:|") * (len(t.head) - 1)]
        lines += ["| " + " | ".join(map(cell, row)) + " |" for row in t.rows]
    return "\n".join([*lines, ""])
