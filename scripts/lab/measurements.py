"""measurements.py: the numbers of runs that claims are about, from labs or archives.

study          PLAN-SIZE of a lab
arm, rate, seed, state, steps, tokens, parameters, active_parameters, flops_per_token     of the run
windows        validation windows of its loss (study.by_eval)
loss, ...      METRICS; empty: not measured
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

from . import metrics, stats

METRICS = metrics.METRICS

KEY = ("study", "arm", "rate", "seed")
OF_RUN = ("steps", "tokens", "parameters", "active_parameters", "flops_per_token", "tokens_per_s")
COLUMNS = (*KEY, "state", *OF_RUN, "windows", *METRICS)


@dataclass
class Measurements:
    """The runs of one study."""

    study: str
    rows: list  # of dictionaries with the keys COLUMNS
    ngrams: dict | None = None  # ngrams.py
    sweep: list = field(default_factory=list)  # rows of `sweep-seeds`, which chose the rate of each arm
    looks: list = field(default_factory=list)  # numbers of seeds at which claims may be judged

    @property
    def arms(self):
        return list(dict.fromkeys(row["arm"] for row in self.rows))

    @property
    def rates(self):
        return sorted({row["rate"] for row in self.rows})

    @property
    def reference(self):
        return "baseline" if "baseline" in self.arms else self.arms[0]

    def of(self, arms, key):
        """The values of a column that some runs of these arms have."""
        return [x for row in self.rows if row["arm"] in arms and (x := row[key]) is not None]

    def by_seed(self, arm, metric):
        """{seed: mean over the rates} of the seeds with a value at each rate, or after a sweep at the rate that it
        chose; of magnitudes the logarithms."""
        found, ratio = {}, METRICS[metric].ratio
        own = self.own_rate(arm) if self.sweep else None
        for row in self.rows:
            x = row[metric]
            mine = row["arm"] == arm and row["state"] == "done" and own in (None, row["rate"])
            if mine and x is not None and not (ratio and x <= 0):
                found.setdefault(row["seed"], {})[row["rate"]] = math.log(x) if ratio else x
        return {
            seed: stats.mean(list(at.values())) for seed, at in found.items() if self.sweep or sorted(at) == self.rates
        }

    def table(self, metric="loss"):
        """{arm: {seed: value}}"""
        return {arm: self.by_seed(arm, metric) for arm in self.arms}

    def losses_by_rate(self, arm):
        """[(rate, mean loss of the finished runs)], without the rates at which one diverged"""
        found, mine = {}, [row for row in self.sweep or self.rows if row["arm"] == arm]
        diverged = {row["rate"] for row in mine if row["state"] == "diverged"}
        for row in mine:
            if row["state"] == "done" and row["loss"] is not None and row["rate"] not in diverged:
                found.setdefault(row["rate"], []).append(row["loss"])
        return sorted((rate, stats.mean(losses)) for rate, losses in found.items())

    def own_rate(self, arm):
        """The rate with the lowest mean loss; None without one."""
        return min(self.losses_by_rate(arm), key=lambda point: point[1], default=(None,))[0]

    def at_best_rate(self, arm):
        """The finished runs at the rate with the lowest mean loss."""
        own = self.own_rate(arm)
        return [row for row in self.rows if (row["arm"], row["rate"], row["state"]) == (arm, own, "done")]

    @cached_property
    def pool(self):
        """The stats.Pool of the losses."""
        return stats.pooled_deviation(self.table(), self.reference)


def row_of(name, run, by_eval):
    row = dict.fromkeys(COLUMNS) | {"study": name, "arm": run.arm, "rate": run.lr, "seed": run.seed, "state": run.state}
    row |= {key: getattr(run, key) for key in OF_RUN} | {"windows": run.windows(by_eval)}
    if run.base and run.flops_per_token and run.base.flops_per_token:  # the mean over its tokens and those of its base
        begin = run.before / run.tokens
        row["flops_per_token"] = begin * run.base.flops_per_token + (1 - begin) * run.flops_per_token
    for metric, what in METRICS.items():
        x = run.final_loss(by_eval) if not what.of else what.of(run) if not run.numbers else run.numbers.get(metric)
        row[metric] = x if stats.finite(x) else None
    return row


def of_study(study, name):
    """The Measurements of the runs that have ended."""
    by_eval = study.by_eval()
    rows = [row_of(name, run, by_eval) for run in study.runs if run.state in ("done", "diverged")]
    plan = {key: study.of_labs(key) for key in ("sweep-seeds", "looks")}
    return [split(name, rows, study.ngrams, plan)] if rows else []


def split(name, rows, ngrams, plan):
    """The Measurements of rows, of which the plan's `sweep-seeds` chose the rates."""
    part = lambda swept: [row for row in rows if (row["seed"] in plan.get("sweep-seeds", [])) == swept]
    return Measurements(name, part(False), ngrams, part(True), plan.get("looks", []))


def of_numbers(header, entries):
    """The Measurements of an archive, of its numbers alone."""
    name = {"study": header["study"]}
    rows = [dict.fromkeys(COLUMNS) | name | entry["numbers"] for entry in entries]
    return split(header["study"], rows, header.get("ngrams"), header.get("lab", {}))
