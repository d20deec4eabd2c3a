#!/usr/bin/env python3
"""
Draws family.png from runs/ and mechanisms.png from mechanisms.csv. Requires matplotlib.

Usage: dev/results/draw_family.py
"""

from draw import HERE, plt
from pages import gap, named, read, studies
from rate_sweeps import EFFECT

AS_IS, MATCHED = "#ee6677", "#4477aa"
# arms of mechanisms.png: color
ARMS = {
    "diff_v2": "#ee6677",
    "no_lambda": "#ccbb44",
    "no_sigmoid": "#228833",
    "signed": "#66ccee",
    "head_lambda": "#aa3377",
    "grouped_4": "#4477aa",
    "diff_v1": "#999999",
}
GROUPS = {  # of family.png
    "Transformers": "baseline-1.5h baseline-2h baseline-qk",
    "DIFF V2": "diff_v2 diff_v2-qk cross_group",
    "factor": "no_lambda no_sigmoid signed head_lambda layer_lambda",
    "grouped": "grouped_2 grouped_4",
    "gates": "gated_head gated_elem diff_v2_gated_head diff_v2_gated_elem",
    "others": "xsa diff_v2_xsa off_by_one sink diff_scalar diff_v1",
}
CLASSES = ("first", "punctuation", "rare", "other")


def draw_family(path):
    measured, labels, groups = studies()["family-cpu"], named("family"), {g: arms.split() for g, arms in GROUPS.items()}
    gaps = {arm: gap(measured, arm, "baseline") for arm in measured.arms if arm != "baseline"}
    figure, axes = plt.subplots(figsize=(9, 1.6 + 0.3 * sum(map(len, groups.values()))))
    y, names, at = 0, [], []
    for i, (group, arms) in enumerate(groups.items()):
        axes.axhspan(y - 0.5, y + len(arms) - 0.5, color="black" if i % 2 else "white", alpha=0.04, linewidth=0)
        axes.text(
            0.995, y - 0.4, group, transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=8, alpha=0.6
        )
        for arm in arms:
            both = ((gaps.get(arm), AS_IS, "o", 0), (gaps.get(f"{arm}-p"), MATCHED, "s", 0.24))
            shift = 0.12 if both[0][0] and both[1][0] else 0.24 * bool(both[1][0])
            for e, color, marker, below in both:
                if e:
                    place = y + below - shift
                    axes.errorbar(e.mean, place, xerr=e.half, fmt=marker, color=color, capsize=2, markersize=4)
            names.append(labels[arm])
            at.append(y)
            y += 1
    axes.axvspan(-EFFECT, EFFECT, color="gray", alpha=0.12, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(at, names)
    axes.set_ylim(y - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    figure.supxlabel(
        "loss minus that of the Transformer with NH heads, nats per byte: mean and 95% interval; gray: within 0.015",
        fontsize=9,
    )
    shown = [
        plt.Line2D([], [], marker="o", color=AS_IS, label="as it is"),
        plt.Line2D([], [], marker="s", color=MATCHED, label="with the parameters of the Transformer"),
    ]
    figure.legend(handles=shown, loc="outside upper center", ncols=2)
    figure.savefig(path)
    plt.close(figure)


def lines(axes, rows, table, arm, name, color, label=None, style="-", marker="o"):
    """The curve of a number of an arm, with its intervals. Returns whether there is one."""
    mine = [row for row in rows if (row["table"], row["arm"], row["name"]) == (table, arm, name)]
    x, mean = [int(row["at"]) for row in mine], [float(row["mean"]) for row in mine]
    half = [float(row["half"] or 0) for row in mine]
    if mine:
        axes.errorbar(
            x, mean, yerr=half, color=color, linestyle=style, marker=marker, markersize=3, capsize=2, label=label
        )
    return bool(mine)


def draw_subtraction(axes, rows, table, arm="baseline-2h"):
    """Whether a Transformer with as many query heads learns W_O of a head as minus W_O of another."""
    for name, color, what in (
        ("adjacent", AS_IS, "the next head"),
        ("closest", MATCHED, "the closest head of the group"),
    ):
        lines(axes, rows, table, arm, name, color, what)
        lines(axes, rows, table, arm, f"{name}_permuted", color, "the same, weights permuted", ":", "")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_ylabel("cos(W_O of a head, minus W_O of ...)", fontsize=8)


def draw_lambda(axes, rows):
    """The factor by class of token: for each arm and class a point per layer."""
    arms = [arm for arm in ARMS if any(row["arm"] == arm and row["name"] == "lambda_all" for row in rows)]
    labels = {row["arm"]: row["label"] for row in rows}
    for i, arm in enumerate(arms):
        for j, of in enumerate(CLASSES):
            mine = [
                float(row["mean"])
                for row in rows
                if (row["table"], row["arm"], row["name"]) == ("layer", arm, f"lambda_{of}")
            ]
            if mine:
                axes.plot([i + (j - 1.5) * 0.18] * len(mine), mine, ".", color=plt.cm.viridis(j / 3.5), markersize=6)
    for j, of in enumerate(CLASSES):
        axes.plot([], [], ".", color=plt.cm.viridis(j / 3.5), label=f"{of} {'position' if of == 'first' else 'tokens'}")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(arms)), [labels[arm] for arm in arms], rotation=20, ha="right", fontsize=7)
    axes.set_ylabel("factor of a layer, mean", fontsize=8)


def legend_below(row, axes, loc):
    """The legend of the lines of an axes, outside all panels of its row."""
    row.legend(*axes.get_legend_handles_labels(), loc=f"outside lower {loc}", ncols=4, fontsize=7.5, frameon=False)


def draw_mechanisms(path):
    rows = read("mechanisms.csv")
    labels = {row["arm"]: row["label"] for row in rows}
    figure = plt.figure(figsize=(10, 11))
    places = figure.subfigures(3, 1)
    axes = [place.subplots(1, 2) for place in places]
    for place, table, what in ((axes[0][0], "layer", "layer"), (axes[0][1], "step", "training step")):
        draw_subtraction(place, rows, table)
        place.set_xlabel(table, fontsize=8)
        place.set_title(f"Transformer with 2 NH heads, by {what}", fontsize=9)
    panels = (
        (axes[1][0], "correlation", "correlation of the two maps of a pair"),
        (axes[1][1], "cancelled", "share of the attention that cancels"),
        (axes[2][0], "effective_rank", "effective rank of the effective map"),
    )
    for place, name, title in panels:
        for arm in ("baseline", *ARMS):
            lines(place, rows, "layer", arm, name, ARMS.get(arm, "black"), labels.get(arm))
        place.set_xlabel("layer", fontsize=8)
        place.set_title(title, fontsize=9)
    draw_lambda(axes[2][1], rows)
    axes[2][1].set_title("factor by class of token; a point for each layer", fontsize=9)
    legend_below(places[0], axes[0][0], "center")
    legend_below(places[1], axes[2][0], "center")  # it has all arms, also those without pairs
    legend_below(places[2], axes[2][1], "right")
    for place in (*axes[0], *axes[1], axes[2][0]):
        place.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("Probes of the checkpoints: means over the seeds with 95% intervals", fontsize=10)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw_family(HERE / "family.png")
    draw_mechanisms(HERE / "mechanisms.png")
