"""markdown.py: the main tables of the report as Markdown (results.md)."""

import math

from . import long_context, stats, tasks


def interval(e, sign=False, digits=4):
    if not e:
        return "–"
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{e['mean']:{form}}" + (
        f" [{e['mean'] - e['half']:{form}}, {e['mean'] + e['half']:{form}}]" if e["half"] is not None else ", one seed"
    )


def table(head, rows):
    return (
        "\n".join(
            [
                "| " + " | ".join(head) + " |",
                "|---|" + "---:|" * (len(head) - 1),
                *("| " + " | ".join(map(str, row)) + " |" for row in rows),
            ]
        )
        + "\n"
    )


def summary(r):
    rows = []
    for row in r["summary"]:
        if not row["loss"]:
            continue
        p = (row["gap"] or {}).get("p_holm")
        known = lambda key, form: form(row[key]) if row[key] else "–"
        rows.append(
            [
                row["label"],
                row["rate"],
                known("parameters", "{:,}".format),
                known("flops_per_token", lambda x: f"{x / 1e6:.2f}M"),
                known("tokens_per_s", "{:.0f}".format),
                interval(row["loss"]),
                interval(row["gap"], True) if row["gap"] else "reference" if row["arm"] == r["reference"] else "–",
                interval(row["gap_pooled"], True) if row["gap_pooled"] and row["gap_pooled"]["pooled"] else "–",
                f"{p:.3f}" if stats.finite(p) else "–",
                row["loss"]["n"],
            ]
        )
    return table(
        ["arm", "rate", "parameters", "FLOPs/token", "tokens/s", "loss", "gap"]
        + ["gap, pooled deviation", "p (Holm)", "seeds"],
        rows,
    )


def ladder(r):
    rows = []
    for row in r["ladder"]:
        for lr, losses in row["ladder"].items():
            rows.append([row["label"], lr, ", ".join(f"{x:.3f}" if stats.finite(x) else "diverged" for x in losses)])
        stable = (
            "none" if row["stable"] is None else f"{row['stable']:g}" + (" or more" if row["bounded_by_ladder"] else "")
        )
        rows.append(
            [
                row["label"],
                "largest stable",
                f"{stable} (by seed: {', '.join('none' if x is None else f'{x:g}' for x in row['stable_by_seed'])})",
            ]
        )
    return table(["arm", "rate", "final loss of each seed"], rows)


def spikes(r):
    return table(
        ["arm", "rate", "runs", "diverged", "spikes of the gradient norm", "of the loss"],
        [
            [
                row["label"],
                row["rate"],
                row["runs"],
                row["diverged"],
                *(f"{x['spikes']} of {x['judged']}" for x in (row["grad"], row["loss"])),
            ]
            for row in r["spikes"]
        ],
    )


def noise(r):
    number = lambda x: "–" if x is None else f"{x:.4f}"
    return table(
        ["arm", "rate", "deviation of the loss", "of the paired gap", "seeds for a gap of 0.02"]
        + ["for 0.015 with power 0.8", "with the pooled deviation"],
        [
            [row["label"], f"{row['lr']:g}", number(row["sd"]), number(row["gap_sd"])]
            + [row[key] or "–" for key in ("seeds_for_0.02", "seeds_for_effect", "seeds_pooled")]
            for row in r["noise"]
        ],
    )


def recall(r):
    cells = next(iter(r["recall"].values()))
    head = ["arm", *(f"{c['pairs']}" + (f" + {c['noise']} noise" if c["noise"] else "") for c in cells)]
    return table(
        head,
        [
            [r["arms"][arm], *(f"{100 * c['exact']['mean']:.1f} / {100 * c['among_values']['mean']:.1f}" for c in rows)]
            for arm, rows in r["recall"].items()
        ],
    )


def low_bit(r):
    part = r["low_bit"]
    decided = lambda e: e["half"] is not None and abs(e["mean"]) > e["half"]
    estimate = lambda e: interval(e, True, 5) + (" not shown" if e and not decided(e) else "")
    cells = lambda row, name: [
        row["precision"],
        row["what"],
        row["label"],
        interval(row["cost"], False, 5) if name == "measured" else estimate(row["cost"]),
        "reference" if row["arm"] == r["reference"] else estimate(row["gap"]),
        f"{row['gap']['p_holm']:.3f}" if row["gap"] and stats.finite(row["gap"]["p_holm"]) else "–",
        row["cost"]["n"],
    ]
    heads = {"training": ("losses", "cost"), "rounding": ("rounded to", "cost"), "measured": ("magnitude", "value")}
    tables = [
        table(["trained in", what, "arm", value, "gap", "p (Holm)", "seeds"], [cells(row, name) for row in part[name]])
        for name, (what, value) in heads.items()
    ]
    return "\n".join([*(f"* Missing: {line}\n" for line in part["missing"]), *tables])


def windows(r):
    part, whats = r["long_context"], list(r["long_context"]["arms"][0]["values"])
    undecided = lambda e: e["half"] is not None and abs(e["mean"]) <= e["half"]
    shown = lambda e: interval(e, True) + (" not shown" if undecided(e) else "")
    adjusted = lambda e: f"{e['p_holm']:.3f}" if e and stats.finite(e["p_holm"]) else "–"
    arms = [
        [
            row["label"],
            long_context.caches(row),
            f"{row['cache_numbers']:,}",
            f"{row['flops_per_token'] / 1e6:.2f}M" if row["flops_per_token"] else "–",
            *(interval(row["values"][what]) for what in whats),
        ]
        for row in part["arms"]
    ]
    costs = [
        [row["what"], f"{row['change']} against {row['base']}", row["label"], shown(row["cost"])]
        + [adjusted(row["cost"]), shown(row["gap"]) if row["gap"] else "–", adjusted(row["gap"]), row["cost"]["n"]]
        for row in part["costs"]
    ]
    return "\n".join(
        [
            table(["arm", "caches x positions", "numbers in a cache", "FLOPs/token", *whats], arms),
            table(["value", "change", "arm", "cost", "p (Holm)", "gap", "p (Holm)", "seeds"], costs),
        ]
    )


def tasks_table(r):
    rows = []
    for row in r["tasks"]:
        gaps = {"accuracy": (tasks.percent(row["accuracy_gap"]), 1), "bits_per_byte": (row["bits_per_byte_gap"], 4)}
        accuracy, bits = (
            "reference" if row["arm"] == r["reference"] else interval(gap, True, digits)
            for gap, digits in gaps.values()
        )
        score = interval(tasks.percent(row["accuracy"]), False, 1)
        rows.append([row["task"], row["label"], row["examples"], f"{100 * row['chance']:.1f}"])
        rows[-1] += [score + (f", {row['against_chance']}" if row["against_chance"] else ""), accuracy]
        rows[-1] += [interval(tasks.percent(row["accuracy_norm"]), False, 1), interval(row["bits_per_byte"]), bits]
        rows[-1] += [len(row["seeds"])]
    head = ["task", "arm", "examples", "chance", "accuracy, %", "gap", "normalised", "bits per byte", "gap", "seeds"]
    return table(head, rows)


def late_gradients(r):
    ratio = lambda e: "{:.2f} [{:.2f}, {:.2f}]".format(*(math.exp(e["mean"] + sign * e["half"]) for sign in (0, -1, 1)))
    rows = [
        [
            row["label"],
            f"{row['lr']:g}",
            *("–" if x is None else f"{x:.3g}" for x in (*row["layers"], row["all"])),
            ratio(row["ratio"]) if row["ratio"] and row["ratio"]["half"] is not None else "–",
            row["seeds"],
        ]
        for row in r["late_gradients"]
    ]
    layers = [f"layer {i}" for i in range(max(len(row["layers"]) for row in r["late_gradients"]))]
    return table(["arm", "rate", *layers, "all", "ratio to the reference", "seeds"], rows)


def verdicts(r):
    rows = []
    for c in r["claims"]:
        e = c["estimate"] and {**c["estimate"]}
        rows.append([c["claim"], f"{c['metric']} {' - '.join(c['arms'])}", f"{c['expect']}, {c['effect']:g}"])
        rows[-1] += [
            interval(e, True),
            c["verdict"] + (f": {c['remark']}" if c["remark"] else ""),
            e["n"] if e else "–",
        ]
    return table(["claim", "metric and arms", "expected, smallest effect", "difference", "verdict", "seeds"], rows)


def probes(r):
    part, rows = r["probes"], []
    for arm, numbers in part["layers"].items():
        for name, layers in numbers.items():
            rows.append([r["arms"][arm], name, *(f"{e['mean']:.3f}" if e else "–" for e in layers)])
    depth = max(len(row) for row in rows) - 2
    rows = [row + ["–"] * (depth + 2 - len(row)) for row in rows]
    lines = [
        f"* {r['arms'][arm]}: {of['adjacent'][0]} of {of['adjacent'][1]} layers (all seeds) have a cos(W_O, minus W_O "
        f"of the next head) that permuted weights rarely reach (p < 0.05); {of['closest'][0]} with the closest head.\n"
        for arm, of in part["beyond"].items()
        if of["adjacent"][1]
    ]
    tables = [table(["arm", "number", *(f"layer {i}" for i in range(depth))], rows)]
    for arm, steps in part["steps"].items():
        names = [name for name in steps[0] if name != "step"]
        cells = [[row["step"], *(interval(row.get(name), True, 3) for name in names)] for row in steps]
        tables += [f"{r['arms'][arm]}, by step, mean over the layers:\n", table(["step", *names], cells)] * (
            len(steps) > 1
        )
    return "\n".join([*lines, *tables])


def page(r):
    t = r["training"]
    steps = f"{int(t['steps'])} steps of {int(t['total-batch'])}{' at the end' if r['runs'][0]['changes'] else ''}"
    reference = r["arms"][r["reference"]]
    parts = [
        f"# {r['title']}\n",
        f"{r['tokens'] / 1e6:.4g}M tokens per run, {steps}. Gap: arm minus {reference} at the same rate and seed, with "
        f"its {100 * r['confidence']:.0f}% t interval over seeds. Losses of the {r['loss_of']}.\n",
        *(f"* {note}\n" for note in r["notes"]),
        summary(r),
    ]
    if r["low_bit"]:
        parts += ["## Low precision\n", low_bit(r)]
    if r["long_context"]:
        parts += ["## Windows and YOCO\n", windows(r)]
    if r["tasks"]:
        parts += ["## Tasks\n", tasks_table(r)]
    if r["claims"]:
        parts += ["## Claims: scripts/lab/claims.py has the rules; magnitudes as logarithms\n", verdicts(r)]
    if r["late_gradients"]:
        parts += ["## Gradient norms in the last quarter of the steps, geometric means\n", late_gradients(r)]
    if r["probes"]:
        parts += ["## Probes of the last checkpoints\n", probes(r)]
    if r["ladder"]:
        parts += ["## Learning rates\n", ladder(r)]
    parts += ["## Spikes\n", spikes(r)]
    if r["noise"]:
        parts += ["## Noise\n", noise(r)]
    if r["recall"]:
        parts += ["## Recall: exact match / best of values, percent\n", recall(r)]
    if r["published"]:
        parts += [
            "## Published\n",
            *(f"* {p['what']}: {p['published']} ({p['by']}); here {p['here']}. {p['scale']}\n" for p in r["published"]),
        ]
    return "\n".join(parts)
