"""study.py: the runs of a comparison: reading them, what prevents the comparison, and each arm at its own rate."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from . import option_history, run_directory, runs as run_files, saved, stats
from .run_directory import RunError

KEPT = ("plan", "size", "title", "question", "reference", "arms", "sweep-seeds", "registration")  # of lab.json
SAME_COST = 0.01  # runs whose FLOPs differ by at most this share are equal by design


@dataclass
class Study:
    name: str  # PLAN-SIZE of a lab
    lab: dict = field(default_factory=dict)  # KEPT, of a plan
    arms: dict = field(default_factory=dict)  # name -> label, the reference first
    runs: list = field(default_factory=list)
    missing: list = field(default_factory=list)  # names of planned runs that have not started
    notes: list = field(default_factory=list)  # for the reader of the report
    problems: list = field(default_factory=list)  # what prevents a comparison, one line each
    reference: str = ""

    @property
    def title(self):
        return f"{self.lab['title']} ({self.lab['size']})" if self.lab else self.name

    @property
    def plan(self):
        return self.lab["plan"].removesuffix(".plan") if self.lab else ""

    @property
    def swept(self):
        """The seeds that choose the rates, and take no part in the comparison."""
        return set(self.lab.get("sweep-seeds", ()))

    def varied(self, arm):
        """The compared options that the plan sets for an arm."""
        keys = self.lab.get("arms", {}).get(arm, {})
        return {"steps" if key == "tokens" else key for key in keys if key in (*option_history.UPDATE, "tokens")}

    def rates(self):
        return sorted({run.rate for run in self.runs})

    def runs_of(self, arm, rate):
        return [run for run in self.runs if run.arm == arm and run.rate == rate]

    # ---- losses

    def by_eval(self):
        """Whether the final losses are those of the evaluations, not of the last validations: those of more windows."""
        done = [run for run in self.runs if run.state == "done"]
        more = lambda run: (run.windows(False) or 0) > (run.windows(True) or math.inf)
        validated = all(stats.finite(run.last_validation) and more(run) for run in done)
        return bool(done) and all(run.eval for run in done) and not validated

    def loss_of(self):
        """Where the final losses come from, in words."""
        windows = {n for run in self.runs if run.state == "done" and (n := run.windows(self.by_eval()))}
        over = f", {' or '.join(map(str, sorted(windows)))} windows" if windows else ""
        return ("evaluation" if self.by_eval() else "last validation") + over

    def losses(self, arm, rate):
        """{seed: final loss or None}"""
        by_eval = self.by_eval()
        return {run.seed: run.final_loss(by_eval) for run in self.runs_of(arm, rate)}

    # ---- the rate of each arm

    def sweep(self, arm):
        """[(rate, mean loss)] over the seeds that have ended at all rates, of a plan with `sweep-seeds` over these
        alone, without the rates at which one diverged."""
        ended, by_eval = {}, self.by_eval()
        for run in (run for run in self.runs if run.arm == arm and run.state in ("done", "diverged")):
            if not self.swept or run.seed in self.swept:
                ended.setdefault(run.rate, {})[run.seed] = run.final_loss(by_eval)
        seeds = set.intersection(*map(set, ended.values())) if ended else ()
        found = {rate: [ended[rate][seed] for seed in seeds] for rate in sorted(ended)}
        return [(rate, stats.mean(losses)) for rate, losses in found.items() if losses and None not in losses]

    def own_rate(self, arm):
        """The rate with the lowest mean loss of the sweep; None without one."""
        return min(self.sweep(arm), key=lambda point: point[1], default=(None,))[0]

    def own_runs(self, arm):
        """{seed: finished run} of an arm at its own rate, without the seeds that chose the rate if there are others."""
        found = {run.seed: run for run in self.runs_of(arm, self.own_rate(arm)) if run.state == "done"}
        return {seed: run for seed, run in found.items() if seed not in self.swept} or found


# ---- reading


def holds_run(directory):
    """Whether there is a run.json, even an unreadable one, which is reported."""
    try:
        os.stat(directory / "run.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def directories_of(path):
    """The run directories of a path that has no lab.json."""
    if holds_run(path):
        return [path]
    if not path.is_dir():
        raise RunError(f"{path}: " + ("not a directory" if path.exists() else "no such file or directory"))
    found = [p for p in sorted(path.iterdir()) if holds_run(p)]
    if not found:
        raise RunError(f"{path}: not a run (run.json), a lab (lab.json), or a directory of runs")
    return found


def merge_lab(study, header):
    """Adds what a plan says to the study. Several labs of a plan and size are one study with more seeds."""
    new = {key: header[key] for key in KEPT if key in header}
    old = study.lab or new
    for key in ("sweep-seeds", "registration"):
        both = [*old.get(key, ()), *new.get(key, ())]
        new[key] = [x for i, x in enumerate(both) if x not in both[:i]]
    study.lab = new | old | {key: new[key] for key in ("sweep-seeds", "registration")}
    study.lab["arms"] = {**new["arms"], **old["arms"]}


def add(study, directory, arm, left_out):
    try:
        run = run_files.load(directory, arm, left_out)
    except (RunError, OSError) as error:
        left_out.append(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return
    kept = {run.name for run in study.runs if not run.directory}
    present = {os.path.realpath(run.directory) for run in study.runs if run.directory}
    if run.name not in kept and os.path.realpath(directory) not in present:
        study.runs.append(run)


def add_path(found, path, name, left_out):
    """Adds the runs of a path to the studies {key: Study}. name: of the arm of all these runs."""
    if path.is_file() and not name:
        for header, runs in saved.read(path):
            study = found.setdefault((header["plan"], header["size"]), Study(header["study"]))
            merge_lab(study, header)
            have = {run.name for run in study.runs}
            study.runs += [run for run in runs if run.name not in have]
        return
    lab = run_directory.read_lab(path) if not name else None
    if not lab:
        study = found.setdefault("runs", Study("Comparison"))
        for directory in directories_of(path):
            add(study, directory, name, left_out)
        return
    study = found.setdefault((lab["plan"], lab["size"]), Study(f"{lab['plan'].removesuffix('.plan')}-{lab['size']}"))
    merge_lab(study, lab)
    for planned in lab["runs"]:
        if holds_run(path / planned["name"]):
            add(study, path / planned["name"], planned["arm"], left_out)
        else:
            study.missing.append(planned["name"])


def load(paths):
    """([Study], [a line for each unreadable file]) of labs, runs, directories of runs and saved files: paths, or
    (name of an arm, path)."""
    found, left_out = {}, []
    for name, path in (path if isinstance(path, tuple) else (None, path) for path in paths):
        try:
            add_path(found, Path(path), name, left_out)
        except RunError as error:
            left_out.append(str(error))
    studies = [study for study in found.values() if study.runs]
    if not studies and left_out:
        raise RunError(left_out[0] + (f" (and {len(left_out) - 1} more)" if left_out[1:] else ""))
    if not studies:
        raise RunError(f"{paths[0]}: no run of the plan has started")
    for study in studies:
        arrange(study)
        check(study)
    return studies, left_out


def arrange(study):
    """Sets the arms, the reference first, and sorts the runs in their order."""
    labels = {arm: keys.get("label", arm) for arm, keys in study.lab.get("arms", {}).items()}
    present = list(dict.fromkeys(run.arm for run in study.runs))
    order = [arm for arm in labels if arm in present] + [arm for arm in present if arm not in labels]
    planned = study.lab.get("reference")
    study.reference = planned if planned in order else order[0]
    order.sort(key=lambda arm: arm != study.reference)
    study.arms = {arm: labels.get(arm, arm) for arm in order}
    study.runs.sort(key=lambda run: (order.index(run.arm), run.rate, run.seed))
    if not study.lab and len(study.runs) == 1:
        study.name = study.runs[0].name


# ---- what prevents a comparison


def differences(first, run, ignored):
    """The differences in options and data between two runs, one line each."""
    apart = first.name != run.name or not (first.directory and run.directory)
    names = (first.name, run.name) if apart else (str(first.directory), str(run.directory))
    found = option_history.differences(first.info, run.info, names, ignored)
    reads = ([(read["step"], read["data"]) for read in r.reads] for r in (first, run))
    found += option_history.validation_differences(*reads, names)
    for what, key in (("windows of the evaluation", "windows"), ("data of the evaluation", "data_fingerprint")):
        x, y = ((r.eval or {}).get(key) for r in (first, run))
        if x is not None and y is not None and str(x) != str(y):
            found.append(f"{what}: {x} in {names[0]}, {y} in {names[1]}")
    return found


def differences_of_arm(study, one, other):
    """The differences between two runs of one arm, in the model or in what the plan sets for the arm."""
    found, varied = [], study.varied(one.arm)
    for name in (*option_history.MODEL, *option_history.SHAPE, *sorted(varied)):
        x, y = (run.options.get(name, option_history.UPDATE.get(name)) for run in (one, other))
        recorded = name in varied or (name in one.options and name in other.options)  # not by older trainers
        if x != y and recorded:
            found.append(f"--{name}: {x} in {one.name}, {y} in {other.name}, both of arm {one.arm}")
    return found


def check(study):
    """Sets problems, which prevent a comparison, and notes."""
    first, seen, problems = study.runs[0], {}, []
    by_arm = {run.arm: run for run in reversed(study.runs)}
    for run in study.runs:
        problems += differences(first, run, study.varied(first.arm) | study.varied(run.arm)) if run is not first else []
        problems += differences_of_arm(study, by_arm[run.arm], run)
        other = seen.setdefault((run.arm, run.rate, run.seed), run)
        if other is not run:
            both = f"{run.directory or run.name} and {other.directory or other.name}"
            problems.append(f"{both} are both arm {run.arm} with rate {run.rate:g} and seed {run.seed}")
        if run.changes:
            study.notes.append(f"{run.name} was resumed under other options: {'; '.join(run.changes)}.")
    for what, values in (
        ("revisions of the trainer", set().union(*(run.values_of("revision") for run in study.runs))),
        ("hosts", set().union(*(run.values_of("host") for run in study.runs))),
        ("devices", {", ".join(run.info.get("devices", [])) for run in study.runs}),
    ):
        if len(values) > 1:
            study.notes.append(f"The runs come from {len(values)} {what}: {', '.join(sorted(values))}.")
    study.notes += registered(study.lab)
    study.problems = list(dict.fromkeys(problems))


def registered(lab):
    """What was fixed before the first run of a lab, and what was changed later, in words."""
    found = []
    for i, entry in enumerate(lab.get("registration", [])):
        when = "before the first run" if entry.get("first") else "after the first run"
        given = ", ".join(f"--{key} {value}" for key, value in entry.get("options", {}).items())
        facts = [f"SHA-256 {entry['sha256'][:16]}"]
        facts.append(f"commit {entry['commit'][:12]}" if entry["commit"] else "not committed")
        facts += [f"with {given}"] * bool(given) + [f"lines {'; '.join(entry['changed'])}"] * bool(entry["changed"])
        facts.insert(0, entry.get("plan", lab["plan"]))
        found.append(f"{'Changed' if i else 'Registered'} {when}, {entry['time']}: {', '.join(facts)}.")
    return found


# ---- equal cost


def loss_at(run, tokens):
    """The validation loss after so many tokens, linear over their logarithm; None outside of the validations."""
    points = sorted(run.validated.items())
    for (t0, y0), (t1, y1) in zip(points, points[1:]):
        if t0 <= tokens <= t1:
            return y0 + (y1 - y0) * math.log(tokens / t0) / math.log(t1 / t0)
    return None


def difference_at_equal_flops(one, other, by_eval):
    """The loss of a run minus that of another at equal FLOPs, and whether both end there. If their FLOPs differ, the
    loss of the more expensive run is read from its validations at the FLOPs of the other, and compared with the last
    validation of the other. There its learning rate has not decayed as far, which favours the cheaper run."""
    pair = one, other
    flops = [run.tokens * (run.flops_per_token or 0) for run in pair]
    if 0 in flops:
        return None, False
    designed = abs(flops[0] / flops[1] - 1) <= SAME_COST
    if designed:
        losses = [run.final_loss(by_eval) for run in pair]
    else:
        least = min(flops)
        at = lambda run, of: run.last_validation if of == least else loss_at(run, least / run.flops_per_token)
        losses = [at(run, of) for run, of in zip(pair, flops)]
    return (losses[0] - losses[1] if all(map(stats.finite, losses)) else None), designed
