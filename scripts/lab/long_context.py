"""long_context.py: what windows, YOCO and selected blocks cost each attention variant, and whether the end of the
context is used.

Arms of one family differ in windows, YOCO, selected blocks and the MLP width only. A cost is the value of an arm minus
that of another arm of its family, at the same seed: each against neither; YOCO against windows alone, which is the cost
of shared keys and values where as many layers have windows; and blocks that signal heads select, or both heads of a
pair apart, against as many blocks that the group selects. The gap of an arm is its cost minus the cost of the same
change in the family of the reference, paired by seed.
"""

import itertools

from . import stats
from .compare import by_seed, correct, difference, estimate, shown_seeds

FAMILY = "attention preset layers hidden heads kv-heads head-dim".split()
BLOCKS = {"group": "blocks", "signal": "blocks by signal heads", "apart": "blocks apart"}  # by --sparse-score
CHANGES = [(change, "neither") for change in ("windows", "YOCO", *BLOCKS.values())]
CHANGES += [("YOCO", "windows"), (BLOCKS["signal"], BLOCKS["group"]), (BLOCKS["apart"], BLOCKS["group"])]


def kind(options):
    if int(options.get("sparse-blocks") or 0):
        return BLOCKS.get(options.get("sparse-score"), BLOCKS["group"])
    return "YOCO" if options.get("yoco") else "windows" if window_of(options) else "neither"


def window_of(options):
    """Positions that a layer with a window attends to; 0: no layer has one."""
    return int(options.get("window") or 0)


def reach(options):
    """What the numbers of keys of a row depend on."""
    return window_of(options), *(int(options.get(key) or 0) for key in ("sparse-blocks", "sparse-block-size"))


def layer_windows(options):
    """Of each layer the positions whose keys and values generation keeps, as layer_window() of the trainer; with YOCO
    the upper half keeps them once."""
    T, L, window, every = (int(options.get(key) or 0) for key in ("seq-len", "layers", "window", "full-every"))
    short = min(window or T, T)
    if options.get("yoco"):
        return [short] * (L // 2) + [T]
    return [T if every and (l + 1) % every == 0 else short for l in range(L)]


def cache_numbers(options):
    """Numbers in the cache of one sequence of seq-len positions: keys and values have this width in every variant."""
    return sum(layer_windows(options)) * 2 * int(options["kv-heads"]) * int(options["head-dim"])


def measures(study):
    """{what: function of a run}: the loss, and where positions were evaluated that of the last half of the context, and
    how much lower it is than just before the end of the smallest window."""
    by_eval, T = study.by_eval(), int(study.runs[0].phased[-1][1]["seq-len"])
    window = min((window_of(run.options) for run in study.runs if window_of(run.options)), default=0)
    late = lambda run: at(run, T // 2, T)
    found = {"loss": lambda run: run.final_loss(by_eval), f"loss at positions {T // 2} to {T - 1}": late}
    if 2 <= window <= T // 2:
        early = f"{window // 2} to {window - 1}"
        found[f"that minus the loss at {early}"] = lambda run: difference(late(run), at(run, window // 2, window))
    return found


def at(run, begin, end):
    return stats.mean_or_none((run.eval or {}).get("loss_by_position", [])[begin:end])


def values(study, arm, lr, get):
    """{seed: value} of the finished runs of an arm."""
    return by_seed([run for run in study.runs_of(arm, lr) if run.state == "done"], get)


def pairs(study, lr):
    """[(change, base, arm, base arm, family)]: of several possible base arms that with the same reach, and the most
    similar number of parameters."""
    first = {arm: runs[0] for arm in study.arms if (runs := study.runs_of(arm, lr))}
    family = {arm: tuple(run.options.get(key) for key in FAMILY) for arm, run in first.items()}
    found = []
    for change, base in CHANGES:
        for arm, run in first.items():
            same = [a for a in first if family[a] == family[arm] and kind(first[a].options) == base]
            if kind(run.options) == change and same:
                unlike = lambda a: (
                    reach(first[a].options) != reach(run.options),
                    abs((first[a].parameters or 0) - (run.parameters or 0)),
                )
                found.append((change, base, arm, min(same, key=unlike), family[arm]))
    return found


def costs(study, lr):
    table, known = [], pairs(study, lr)
    own = next((family for _, _, arm, base, family in known if study.reference in (arm, base)), None)
    for what, get in measures(study).items():
        paid = {}
        for change, base, arm, other, _ in known:
            mine, theirs = (values(study, a, lr, get) for a in (arm, other))
            paid[change, base, arm] = stats.paired(mine, theirs)
        for change, base, arm, other, family in known:
            cost = paid[change, base, arm]
            same = reach(study.runs_of(arm, lr)[0].options)
            peers = [a for c, b, a, _, f in known if (c, b, f) == (change, base, own) and f != family]
            peer = next((a for a in peers if reach(study.runs_of(a, lr)[0].options) == same), None)
            if cost:
                gap = stats.paired_gap(cost, paid[change, base, peer]) if peer else None
                row = {"what": what, "change": change, "base": base, "arm": arm, "label": study.arms[arm]}
                row |= {"minus": other, "cost": estimate(cost), "gap": stats.as_json(gap), "seeds": shown_seeds(cost)}
                table.append(row)
    for what, key in itertools.product(measures(study), ("cost", "gap")):
        correct(row[key] for row in table if row["what"] == what)
    return table


def arms(study, lr):
    table = []
    for arm, label in study.arms.items():
        if runs := study.runs_of(arm, lr):
            options, each = runs[0].options, {w: values(study, arm, lr, get) for w, get in measures(study).items()}
            row = {"arm": arm, "label": label, "kind": kind(options), "window": window_of(options)}
            row |= {"layers": layer_windows(options), "cache_numbers": cache_numbers(options)}
            row |= {"flops_per_token": runs[0].flops_per_token}
            row |= {"values": {what: estimate(x) for what, x in each.items()}}
            table.append(row | {"seeds": {what: shown_seeds(x) for what, x in each.items()}})
    return table


def caches(row):
    """Positions of the caches of an arm in words: "2 x 64, 1 x 512"."""
    lengths = row["layers"]
    return ", ".join(f"{lengths.count(x)} x {x}" for x in dict.fromkeys(lengths))


def tables(study, lr):
    """The tables of the section, or None if all runs attend to all keys."""
    if all(kind(run.options) == "neither" for run in study.runs):
        return None
    return {"lr": lr, "arms": arms(study, lr), "costs": costs(study, lr)}
