#!/usr/bin/env python3
"""
Draws spikes.png from spike-plants.csv and spike-replays.csv. Requires matplotlib.

Usage: dev/results/draw_spikes.py [PLANTED [RUN...]]
  PLANTED   --basetemp of tests/programs/test_spike_causes.py, whose searches first replace the two tables
  RUN       runs with --clip-update-norm, which measures every update: first replace spike-leads.csv. One directory for
            each setting, with a run for each seed
The tables are those of spikes.md, whose text has the commands.
"""

import json
import math
import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from pages import HERE, PLANTED, SPIKE, read, write

BEFORE, APART, LARGE_UPDATE, FIRST = 8, 16, 4.0, 257  # FIRST: every window has its values from there on
COLORS = {"keeps": "#bbbbbb", "reduces": "#c08a1a", "removes": "#2a8a3e", "": "black"}  # "": the log


def store_planted(directory):
    plants, replays = [], []
    for plant in PLANTED:
        (path,) = Path(directory).glob(f"test_{plant}0/run/spike_*/spike.json")
        found = json.loads(path.read_text())
        cause = re.sub(r"\S*/(?=train\.bin)", "", found["cause"])
        cause = re.sub(r", tokens (\d+) to (\d+).*", r", tokens \1 to \2", cause, flags=re.S)
        keys = ("step", "checkpoint", "first_large_update", "first_large_loss")
        plants.append({"plant": plant, **{key: found[key] for key in keys}, "cause": cause})
        for x in [{"name": "log", "losses": found["log"], "verdict": "", "rise": math.nan}, *found["replays"]]:
            losses = {int(step): loss for step, loss in x["losses"].items()}
            numbers = " ".join("nan" if y is None else f"{y:.4f}" for _, y in sorted(losses.items()))
            name = x["name"].replace(f"step {found['step']} ", "S ").replace(f"step {found['step'] - 1} ", "S - 1 ")
            outside = plant == "outside" and x["verdict"]  # the unchanged replay has no spike
            verdict = "removes" if outside else x["verdict"]
            row = {"plant": plant, "replay": name, "verdict": verdict, "rise": f"{x['rise']:.4f}"}
            replays.append({**row, "first": min(losses), "losses": numbers})
    write("spike-plants.csv", plants)
    write("spike-replays.csv", replays)


def lead_row(run):
    """What precedes spikes of the loss in a run: `large` updates and gradient norms among the BEFORE steps before."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    train = {r["step"]: r for r in records if r["kind"] == "train"}
    above = lambda key, z: {s for s, r in train.items() if s >= FIRST and (r[key] or 0) >= z}
    begins = lambda steps: [s for s in sorted(steps) if not steps & set(range(s - APART, s))]
    after = lambda steps, s: bool(steps & set(range(s - BEFORE, s)))
    high, updates, gradients = above("loss_z", SPIKE), above("update_z", LARGE_UPDATE), above("grad_z", SPIKE)
    spikes, row = begins(high), {"setting": run.parent.name, "seed": run.name}
    first = [min(updates & set(range(s - BEFORE, s)), default=None) for s in spikes]
    row |= {"judged": len(train) - FIRST + 1, "spikes": len(spikes)}
    row["leads"] = " ".join(str(s - u) for s, u in zip(spikes, first) if u)
    for name, large in (("update", updates), ("gradient", gradients)):
        row[f"after_{name}"] = sum(after(large, s) for s in spikes)
        row[f"steps_after_{name}"] = sum(after(large, s) for s in train if s >= FIRST)
        row[f"{name}_rises"] = len(begins(large))
        row[f"{name}_rises_before"] = sum(bool(high & set(range(s + 1, s + 1 + BEFORE))) for s in begins(large))
    last = [r["loss"] for r in train.values()][-1000:]
    return {**row, "last_loss": f"{sum(last) / len(last):.4f}"}


def draw(path):
    plants = {row["plant"]: row for row in read("spike-plants.csv")}
    replays = read("spike-replays.csv")
    figure, axes = plt.subplots(2, 3, figsize=(9, 5))
    for plot, (plant, title) in zip(axes.flat, PLANTED.items()):
        mine = [row for row in replays if row["plant"] == plant]
        for row in sorted(mine, key=lambda row: list(COLORS).index(row["verdict"])):
            losses = [float(x) for x in row["losses"].split()]
            steps = range(int(row["first"]), int(row["first"]) + len(losses))
            plot.plot(steps, losses, color=COLORS[row["verdict"]], linewidth=1 if row["verdict"] else 1.6)
        plot.axvline(int(plants[plant]["step"]), color="black", linewidth=0.6, linestyle=":")
        plot.set_title(title, fontsize=9)
        plot.xaxis.get_major_locator().set_params(integer=True)
    shown = [plt.Line2D([], [], color=color) for color in reversed(COLORS.values())]
    names = ["the run", "a replay that removes the spike", "reduces it", "keeps it"]
    figure.legend(shown, names, loc="outside lower center", ncols=4, frameon=False)
    figure.supylabel("training loss, nats", fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 100})
    plt.rcParams["figure.constrained_layout.use"] = True
    if len(sys.argv) > 1:
        store_planted(sys.argv[1])
    if len(sys.argv) > 2:
        write("spike-leads.csv", [lead_row(Path(run)) for run in sys.argv[2:]])
    draw(HERE / "spikes.png")
