"""measurements.py: the numbers of runs that claims are about: one line for each run, from labs or from a CSV file.

    study          PLAN-SIZE of a lab, with the precision if the plan has several
    arm, rate, seed, state, steps, tokens, parameters, active_parameters, flops_per_token     of the run
    windows        validation windows of its loss (study.by_eval)
    loss, ...      METRICS; empty: not measured

`scoreboard LAB... --store FILE` writes the file, and `scoreboard FILE` judges from it alone.
"""

import csv
import math
from dataclasses import dataclass
from functools import cached_property

from . import metrics, run_directory, stats

METRICS = metrics.METRICS["claims"]

KEY = ("study", "arm", "rate", "seed")
OF_RUN = ("steps", "tokens", "parameters", "active_parameters", "flops_per_token", "windows")
COLUMNS = (*KEY, "state", *OF_RUN, *METRICS)


@dataclass
class Measurements:
    """The runs of one study."""

    study: str
    rows: list  # of dictionaries with the keys COLUMNS

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
        """{seed: mean over the rates} of the seeds with a value at each rate; of magnitudes the logarithms."""
        found, ratio = {}, METRICS[metric].ratio
        for row in self.rows:
            x = row[metric]
            if row["arm"] == arm and row["state"] == "done" and x is not None and not (ratio and x <= 0):
                found.setdefault(row["seed"], {})[row["rate"]] = math.log(x) if ratio else x
        return {seed: stats.mean(list(at.values())) for seed, at in found.items() if sorted(at) == self.rates}

    def table(self, metric="loss"):
        """{arm: {seed: value}}"""
        return {arm: self.by_seed(arm, metric) for arm in self.arms}

    @cached_property
    def pool(self):
        """The stats.Pool of the losses."""
        return stats.pooled_deviation(self.table(), self.reference)


def row_of(name, run, by_eval):
    row = dict.fromkeys(COLUMNS) | {"study": name, "arm": run.arm, "rate": run.lr, "seed": run.seed, "state": run.state}
    row |= {key: getattr(run, key) for key in OF_RUN[:-1]} | {"windows": run.windows(by_eval)}
    for metric, what in METRICS.items():
        x = what.of(run) if what.of else run.final_loss(by_eval)
        row[metric] = x if stats.finite(x) else None
    return row


def of_study(study, name):
    """The Measurements of the runs that have ended; those at other precisions are studies of their own."""
    found, by_eval = {}, study.by_eval()
    for run in study.runs + study.others:
        own = f"{name}-{run.options['gemm']}" if study.others else name
        if run.state in ("done", "diverged"):
            found.setdefault(own, []).append(row_of(own, run, by_eval))
    return [Measurements(own, rows) for own, rows in found.items()]


NAMES = ("study", "arm", "state")


def number(text, whole):
    return None if not text else int(text) if whole else float(text)


def read(path):
    """The Measurements of a CSV file, in its order."""
    found = {}
    try:
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                if tuple(line) != COLUMNS:
                    raise ValueError(f"the columns must be {','.join(COLUMNS)}")
                row = {key: number(x, key == "seed" or key in OF_RUN) for key, x in line.items() if key not in NAMES}
                found.setdefault(line["study"], []).append({**{key: line[key] for key in NAMES}, **row})
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        raise run_directory.RunError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return [Measurements(study, rows) for study, rows in found.items()]


def store(path, new):
    """Replaces the runs with the same KEY in a CSV file, adds the others, and keeps the rest."""
    rows = {}
    for measured in [*(read(path) if path.exists() else []), *new]:
        for row in measured.rows:
            key = tuple(row[key] for key in KEY)
            if rows.get(key, row)["tokens"] != row["tokens"]:
                raise run_directory.RunError(
                    f"{path}: {', '.join(map(str, key))}: has {rows[key]['tokens']} tokens, and the new run "
                    f"{row['tokens']}: specify another file, or plan and size"
                )
            rows[key] = row
    studies = list(dict.fromkeys(key[0] for key in rows))
    shown = lambda x: "" if x is None else f"{x:.7g}" if isinstance(x, float) else str(x)
    lines = [",".join(COLUMNS)]
    for row in sorted(rows.values(), key=lambda row: studies.index(row["study"])):
        lines.append(",".join(shown(row[key]) for key in COLUMNS))
    run_directory.write_atomic(path, "\n".join(lines) + "\n")
