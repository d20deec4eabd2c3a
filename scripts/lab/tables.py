"""tables.py: the results as a reader sees them: the summary in three sentences, and tables of texts. The page
has all tables; the Markdown file leaves out the long ones, whose numbers the figures show."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from . import stats
from .results import LEAST_SEEDS, LEAST_TOKENS
from .runs import LAYERS

MOST_NAMES = 4  # of arms without a difference, in a sentence


class Cell(NamedTuple):
    text: str
    kind: str = ""  # lower or higher: a difference that is shown


@dataclass
class Table:
    title: str
    head: list
    rows: list  # of lists of texts or Cells, which become Cells
    caption: str = ""
    long: bool = False  # not in the Markdown file

    def __post_init__(self):
        self.rows = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in self.rows]


# ---- texts of numbers


def number(x):
    return f"{x:.4f}" if stats.finite(x) else "–"


def engineering(x):
    """A count with three digits and the largest unit below it."""
    if not stats.finite(x) or x <= 0:
        return "–"
    power = min(5, max(0, int(math.log10(float(f"{x:.3g}")) // 3)))
    return f"{x / 1000**power:.3g}{['', 'k', 'M', 'G', 'T', 'P'][power]}"


def interval(e, sign=""):
    """'mean [low, high]' of an estimate."""
    if not e:
        return "–"
    form = f"{sign}.4f"
    if e["half"] is None:
        return f"{e['mean']:{form}}, one seed"
    return f"{e['mean']:{form}} [{e['mean'] - e['half']:{form}}, {e['mean'] + e['half']:{form}}]"


def difference(e):
    if not e:
        return "–"
    kind = ("lower" if e["mean"] < 0 else "higher") if e.get("shown") else ""
    return Cell(interval(e, "+") + " *" * bool(kind), kind)


def parameters(row):
    if not row["parameters"]:
        return "–"
    active = row["active_parameters"]
    return f"{row['parameters']:,}" + (f", {active:,} active" if active != row["parameters"] else "")


def score(of):
    return "–" if of["score"] is None else f"{of['score']:.3f}% ({of['spikes']} of {of['judged']})"


# ---- the summary


def listed(studies, key, want):
    """'LABEL (SIZE: estimate)' of the arms whose difference is lower, higher or not shown; SIZE only of several."""
    kind = lambda e: ("lower" if e["mean"] < 0 else "higher") if e["shown"] else "not shown"
    rows = [(row, s) for s in studies for row in s["arms"] if row[key] and kind(row[key]) == want]
    numbers = lambda e: [f"{interval(e, '+')}, p {e['p_holm']:.2g}"] if want != "not shown" else []
    facts = [(row["label"], ": ".join([s["name"]] * (len(studies) > 1) + numbers(row[key]))) for row, s in rows]
    return [f"{label} ({fact})" if fact else label for label, fact in facts]


def conclusion(studies, key, where):
    """The sentence on the differences of a kind."""
    differences = [row[key] for s in studies for row in s["arms"] if row[key]]
    if not differences:
        tokens = " and as many tokens" if key == "difference" else ""
        return f"{where}, no difference can be computed: it requires finished runs of two arms with one seed{tokens}."
    references = {s["labels"][s["reference"]] for s in studies}
    reference = references.pop() if len(references) == 1 else "the reference"
    parts = []
    for want, words in (
        ("lower", f"a lower loss than {reference} is shown for"),
        ("higher", f"a higher loss than {reference} is shown for"),
        ("not shown", f"no difference from {reference} is shown for"),
    ):
        names = listed(studies, key, want)
        if want == "not shown" and len(names) > MOST_NAMES:
            names = [f"{'the other' if parts else 'any of'} {len(names)} comparisons"]
        parts += [f"{words} {', '.join(names)}"] if names else []
    text = "; ".join(parts)
    if all(e["n"] < LEAST_SEEDS for e in differences):
        text += f" (every difference has fewer than {LEAST_SEEDS} seeds)"
    elif (longest := max((s["tokens_per_parameter"] or LEAST_TOKENS) for s in studies)) < LEAST_TOKENS:
        text += f" (the runs have {longest:.2g} tokens per parameter, and a direction requires {LEAST_TOKENS})"
    return f"{where}, {text}."


def counted(n, what):
    return f"{n} {what}{'' if n == 1 else 's'}"


def what_ran(studies):
    """The sentence on the size of the comparison and on what is missing."""
    runs = [run for s in studies for run in s["runs"]]
    states = {state: sum(run["state"] == state for run in runs) for state in ("done", "diverged")}
    open_runs = len(runs) - sum(states.values()) + sum(len(s["missing"]) for s in studies)
    sizes = sorted(row["parameters"] for s in studies for row in s["arms"] if row["parameters"])
    lengths = sorted({run["tokens"] for run in runs})
    span = lambda values: " to ".join(dict.fromkeys(engineering(x) for x in (values[0], values[-1])))
    text = f"{counted(states['done'], 'finished run')}, {states['diverged']} diverged, {open_runs} not finished"
    of = f": {counted(len({row['arm'] for s in studies for row in s['arms']}), 'arm')}"
    of += f" of {span(sizes)} parameters" if sizes else ""
    return f"{text}{of}, {span(lengths)} tokens a run." if lengths else f"{text}{of}."


def summary(studies):
    """Three sentences."""
    return [
        conclusion(studies, "difference", "At equal tokens"),
        conclusion(studies, "difference_flops", "At equal FLOPs"),
        what_ran(studies),
    ]


# ---- tables


def of_arms(studies):
    """[a table with one row per arm, at its own rate]; of several sizes, a long one, and one of the differences."""
    several, rows = len(studies) > 1, []
    for s in studies:
        for row in s["arms"]:
            seeds = row["loss"]["n"] if row["loss"] else 0
            reference = row["arm"] == s["reference"]
            cells = [s["name"]] * several + [row["label"], f"{row['rate']:g}", interval(row["loss"]), str(seeds)]
            cells += ["reference" if reference else difference(row["difference"])]
            cells += [number((row["difference"] or {}).get("p_holm"))]
            flops = "–" if reference or not row["difference_flops"] else difference(row["difference_flops"])
            if row["flops_by_design"] and isinstance(flops, Cell):
                flops = flops._replace(text=flops.text + " †")
            cells += [flops, number((row["difference_flops"] or {}).get("p_holm"))]
            cells += [parameters(row), engineering(row["flops_per_token"])]
            rows.append([*cells, engineering((row["speed"] or {}).get("median"))])
    machines = " and ".join(sorted({run["machine"] for s in studies for run in s["runs"]}))
    head = ["rate", "loss", "seeds", "difference", "p", "at equal FLOPs", "p"]
    swept = any(s["sweep_seeds"] for s in studies)
    own = f"Each arm has its own best rate, chosen by {'a sweep with other seeds' if swept else 'the same seeds'}. "
    several_rates = any(len(s["rates"]) > len(s["arms"]) for s in studies)
    caption = (
        f"{own if several_rates else ''}Loss: nats per token, mean over seeds, of the "
        f"{' or '.join(sorted({s['loss_of'] for s in studies}))}. Difference: arm minus reference at the same seed; "
        "negative is a lower loss. Square brackets: 95% t intervals over seeds. At equal FLOPs: unless a cross says "
        "that the runs are equal by design, the more expensive run is read before the end of its schedule, which "
        "favours the cheaper arm. p: two-sided, adjusted by Holm's method for all differences of the report. A star "
        f"marks a difference that is shown: p is below 0.05, with {LEAST_SEEDS} seeds or more and {LEAST_TOKENS} token "
        f"per parameter. Tokens/s: median of the steps, on {machines}; other load on the machine lowers it."
    )
    head = ["size"] * several + ["arm", *head, "parameters", "FLOPs/token", "tokens/s"]
    found = [Table("Arms", head, rows, caption, long=several)]
    if several:
        columns = 0, 1, 9, 4, 3, 5, 7  # size, arm, parameters, seeds, loss, differences
        short = [[row[i] for i in columns] for row in (head, *(row for row in rows if row[5] != "reference"))]
        found.append(Table("Arms by size", short[0], short[1:]))
    return found


SPIKE = (
    f"A spike is a step at least {stats.SPIKE_Z:g} standard deviations above the mean of the last {stats.SPIKE_WINDOW} "
    f"steps, from {stats.SPIKE_LEAST} steps on (OLMo 2, arXiv 2501.00656)."
)


def of_rates(s):
    rows = []
    for row in s["rates"]:
        states = " and ".join(f"{n} {state}" for state, n in row["runs"].items())
        reference = row["arm"] == s["reference"]
        cells = [row["label"], f"{row['rate']:g}", interval(row["loss"]), states]
        cells += ["reference" if reference else difference(row["difference"])]
        cells += [number((row["difference"] or {}).get("p_holm"))]
        rows.append([*cells, score(row["spikes"]["grad_norm"]), score(row["spikes"]["loss"])])
    caption = "All runs of each rate, including the sweep. Difference: to the reference at the same rate and seed. "
    caption += f"{SPIKE} The spike score is their percentage of the judged steps of all seeds."
    head = ["arm", "rate", "loss", "runs", "difference", "p", "spikes of the gradient norm", "of the loss"]
    return Table("Loss by rate", head, rows, caption, long=True)


def of_stability(s):
    rows = []
    for row in s["stability"]:
        rate = lambda x: "none" if x is None else f"{x:g}"
        largest = rate(row["stable"]) + " or more" * row["bounded_by_ladder"]
        each = ", ".join(map(rate, row["stable_by_seed"])) or "–"
        spikes = [r["spikes"]["grad_norm"] for r in s["rates"] if r["arm"] == row["arm"]]
        count = " of ".join(f"{sum(x[key] for x in spikes)}" for key in ("spikes", "judged"))
        rows.append([row["label"], rate(row["best"]), largest, each, number(row["sensitivity"]), count])
    caption = (
        "The largest stable rate: up to it, from the best rate on, no run diverged or ended more than "
        f"{stats.STABLE_TOLERANCE:g} nats above the best mean of the arm. Sensitivity: mean over the rates of the loss "
        f"(at most the initial loss), minus the best (Wortsman et al. 2023). Spikes: of the steps at all rates. {SPIKE}"
    )
    head = ["arm", "best rate", "largest stable rate", "by seed", "sensitivity", "spikes of the gradient norm"]
    return Table("Stability over rates", head, rows, caption)


def of_positions(s):
    arms = {arm: {(p["begin"], p["end"]): p for p in places} for arm, places in s["positions"].items() if places}
    rows = []
    for place in dict.fromkeys(place for places in arms.values() for place in places):
        name = f"{place[0]}" if place[1] == place[0] + 1 else f"{place[0]} to {place[1] - 1}"
        cells = []
        for arm, places in arms.items():
            key = "loss" if arm == s["reference"] else "difference"
            e = places.get(place, {}).get(key)
            cells.append(interval(e, "" if key == "loss" else "+"))
        rows.append([name, *cells])
    head = [s["labels"][arm] + (", loss" if arm == s["reference"] else ", difference") for arm in arms]
    caption = "Evaluation of the last checkpoints, by position in the window. 95% t intervals over seeds."
    return Table("Loss by position", ["position", *head], rows, caption, long=True)


def of_layers(s, key):
    arms = s["layers"].get(key, {})
    depth = max((len(of["layers"]) for of in arms.values()), default=0)
    rows = []
    for arm, of in arms.items():
        cells = [f"{e['mean']:.3g}" + (f" ± {e['half']:.2g}" if e["half"] is not None else "") if e else "–"
                 for e in of["layers"]]  # fmt: skip
        rows.append([s["labels"][arm], *cells, *["–"] * (depth - len(cells))])
    caption = f"{LAYERS[key].note} At the last measured step: mean over seeds ± half of the 95% t interval."
    return Table(LAYERS[key].title, ["arm", *(f"layer {i}" for i in range(depth))], rows, caption, long=True)


def of_settings(s):
    rows = [[f"--{name}", *(row[arm] for arm in s["labels"])] for name, row in s["settings"]["differ"].items()]
    common = " ".join(f"--{name} {value}" for name, value in s["settings"]["common"].items())
    return Table("Options that differ", ["option", *s["labels"].values()], rows, f"The same in all arms: {common}.")


def of_runs(s):
    """The runs that are not finished or were resumed under other options, and those that have not started."""
    rows = []
    for run in s["runs"]:
        if run["state"] != "done" or run["changes"] or len(s["runs"]) == 1:
            step = f"{run['step']}/{run['steps']}"
            rows.append([run["name"], run["state"], step, number(run["loss"]), "; ".join(run["changes"]) or "–"])
    rows += [[name, "not started", "–", "–", "–"] for name in s["missing"]]
    return Table("Runs with a remark", ["run", "state", "step", "loss", "changes"], rows)


def of_study(s):
    """The tables of one study."""
    found = [of_rates(s), of_stability(s), of_positions(s)]
    found += [of_layers(s, key) for key in s["layers"]] + [of_settings(s), of_runs(s)]
    return [table for table in found if table.rows]
