"""study.py: the runs of a report: reading them, and finding what prevents a comparison."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from . import archive, option_history, run_directory, schema, stats
from .run_directory import RunError


class NothingYet(RunError):
    """A lab without runs that have started."""


class Nowhere(RunError):
    """A path of the command line without runs."""


@dataclass
class Run:
    directory: Path
    name: str
    arm: str
    label: str
    lr: float  # at the first step
    seed: int
    info: dict  # run.json
    history: list  # [(step, options)]: the options after each step
    last: int = 0  # last step of the log
    state: str = ""
    train: list = field(default_factory=list)  # records, one per step, in order
    events: list = field(default_factory=list)  # records
    samples: list = field(default_factory=list)  # records
    val: dict = field(default_factory=dict)  # step -> loss
    layers: dict = field(default_factory=dict)  # step -> records of its layers
    choices: dict = field(default_factory=dict)  # task -> step -> record
    read: list = field(default_factory=list)  # [(step, validation data)]
    eval: dict | None = None
    probes: dict = field(default_factory=dict)  # step -> probe.json
    numbers: dict | None = None  # of a run of an archive, whose log has few steps: those that need all
    base: "Run | None" = None  # whose last checkpoint it starts from (init-from)

    @property
    def options(self):
        """The options of the last start."""
        return self.history[-1][1]

    @property
    def phased(self):
        """The history with the changes of phases."""
        return option_history.history(self.info, self.info.get("phases", ()))

    @property
    def steps(self):
        """The final step. The log may go beyond run.json, in which older trainers did not record a resume."""
        return max(int(self.options["steps"]), self.last)

    @property
    def before(self):
        """Tokens of the run from which this one started."""
        return self.base.tokens if self.base else 0

    def tokens_at(self, step):
        """Tokens of the first `step` steps, and those before."""
        phased = self.phased
        ends = [begin for begin, _ in phased[1:]] + [step]
        return self.before + sum(
            max(0, min(end, step) - begin) * int(options["total-batch"]) for (begin, options), end in zip(phased, ends)
        )

    @property
    def tokens(self):
        return self.tokens_at(self.steps)

    def over_time(self, key):
        """An option's values in words: "40 then 80 after step 40"."""
        return option_history.over_time(option_history.values(self.history, key))

    @property
    def changes(self):
        """The changes of options that affect the numbers, in words."""
        return [
            f"--{key} {self.over_time(key)}"
            for key in option_history.REPORTED
            if len(option_history.values(self.history, key)) > 1
        ]

    def values_of(self, key):
        """The values of a key, such as revision or host, of all starts."""
        return {str(start.get(key)) for start in (self.info, *self.info.get("starts", [])) if key in start} or {"None"}

    @property
    def parameters(self):
        return self.info.get("model", {}).get("parameters")

    @property
    def active_parameters(self):
        """Those that a token passes: with experts fewer than all."""
        return self.info.get("model", {}).get("active_parameters", self.parameters)

    @property
    def flops_per_token(self):
        return self.info.get("model", {}).get("flops_per_token")

    @property
    def tokens_per_s(self):
        return (self.numbers or self.speed or {}).get("tokens_per_s" if self.numbers else "median")

    @property
    def machine(self):
        return f"{', '.join(self.info.get('devices', [])) or 'an unknown device'} of {self.info.get('host')}"

    @property
    def speed(self):
        return speed([self])

    @property
    def validated(self):
        """{tokens in total: finite loss} of the validations, that of random weights excepted."""
        return {t: loss for step, loss in self.val.items() if (t := self.tokens_at(step)) > 0 and stats.finite(loss)}

    @property
    def last_validation(self):
        return self.val.get(self.steps)

    def windows(self, by_eval):
        """Validation windows of final_loss(); None if an older trainer did not record them."""
        return (self.eval or {}).get("windows") if by_eval else (self.read[-1][1] or (None,))[0]

    def final_loss(self, by_eval):
        """The loss of the evaluation or of the last validation of a finished run; None if it diverged or continues."""
        if self.state != "done":
            return None
        loss = (self.eval or {}).get("loss") if by_eval else self.last_validation
        return loss if stats.finite(loss) else None


def speed(runs):
    """Tokens/s over the steps of runs: median, 10% and 90%, and their machines; None without steps."""
    rates = sorted(r["tokens_per_s"] for run in runs for r in run.train if stats.finite(r.get("tokens_per_s")))
    at = lambda share: rates[round(share * (len(rates) - 1))]
    machine = "; ".join(dict.fromkeys(run.machine for run in runs))
    return {"median": median(rates), "low": at(0.1), "high": at(0.9), "machine": machine} if rates else None


def drop_from(run, step):
    """Forgets the records of a step and later ones, to which a resume or rollback has returned."""
    while run.train and run.train[-1]["step"] >= step:
        run.train.pop()
    for records in (run.val, run.layers, *run.choices.values()):
        for later in [s for s in records if s >= step]:
            del records[later]
    for records in (run.events, run.samples):
        records[:] = [r for r in records if r["step"] < step or r.get("what") in ("start", "rollback")]


def absorb(run, records):
    """Adds records of the log, in order."""
    for r in records:
        kind, step = r["kind"], r["step"]
        if kind == "train":
            if run.train and step <= run.train[-1]["step"]:
                drop_from(run, step)
            run.train.append(r)
        elif kind == "val":
            run.val[step] = r["loss"]
        elif kind == "stats":
            run.layers.setdefault(step, {})[r["layer"]] = r
            if r.get("expert_load"):
                r["expert_load_max"], r["expert_load_min"] = max(r["expert_load"]), min(r["expert_load"])
        elif kind == "choices":
            run.choices.setdefault(r["name"], {})[step] = r
        elif kind in ("event", "sample"):
            (run.events if kind == "event" else run.samples).append(r)
    run.last = run.train[-1]["step"] if run.train else 0


def set_state(run):
    run.state = run_directory.state(run.directory, run.steps)[0]
    if run.state == "begun" and run_directory.locked(run.directory):
        run.state = "running"


def new_run(directory, arm=None, label=None, info=None):
    """A run with its run.json, without the records of its log. Raises RunError if run.json is unreadable."""
    directory = Path(directory)
    info = info or run_directory.read_run(directory)
    entries = option_history.history(info)
    options = entries[0][1]
    arm = arm or options["attention"]
    rate, seed = float(options["lr"]), int(options["seed"])
    return Run(directory, directory.resolve().name, arm, label or arm, rate, seed, info, entries)


def load_run(directory, arm=None, label=None, left_out=None, kept=None):
    """Reads a run, or takes that of an entry of an archive. Raises RunError if run.json or the log is unreadable;
    appends other errors to `left_out`."""
    directory, left_out = Path(directory), [] if left_out is None else left_out
    if kept:
        run = new_run(directory, arm, label, kept["info"])
        archive.fill(run, kept)
        return run
    run = new_run(directory, arm, label)
    broken = []
    log = run_directory.read_log(directory / "log.jsonl", broken)
    if broken:
        left_out.append(
            f"{directory}/log.jsonl: line {broken[0]}"
            + (f" and {len(broken) - 1} more are not records" if broken[1:] else " is not a record")
        )
    absorb(run, log)
    run.read = option_history.validations(run.info, log)
    set_state(run)
    read_measurements(run, left_out)
    return run


def read_measurements(run, left_out):
    """The evaluation of the last checkpoint, and the probes of all."""
    files = [("eval.json", schema.EVALUATION, None)] if (run.directory / "eval.json").exists() else []
    files += [(path.name, schema.PROBE, path) for path in sorted(run.directory.glob("probe*.json"))]
    for name, shape, probe in files:
        try:
            found = run_directory.read_json(run.directory / name, shape)
        except RunError as error:
            left_out.append(str(error))
            continue
        if probe:
            run.probes[run_directory.probed_step(name, run.steps)] = found
        else:
            run.eval = found


@dataclass
class Study:
    """The runs of a report."""

    title: str
    question: str
    reference: str
    arms: dict  # name -> label, in order
    runs: list
    missing: list  # names of planned runs that have not started
    notes: list  # for the reader of the report
    left_out: list  # unreadable files, one line each
    live: bool  # whether a lab or a run is active
    problems: list = field(default_factory=list)  # what prevents a comparison, one line each
    own: dict = field(default_factory=dict)  # name of an arm -> compared options that the plan sets for it
    labs: list = field(default_factory=list)  # their lab.json
    ngrams: dict | None = None  # ngrams.py

    def of_labs(self, key):
        """The numbers of a key of all labs, such as sweep-seeds."""
        return sorted({x for lab in self.labs for x in lab.get(key, [])})

    @property
    def name(self):
        """PLAN-SIZE of all labs; empty if they have several."""
        names = {f"{lab['plan'].removesuffix('.plan')}-{lab['size']}" for lab in self.labs}
        return names.pop() if len(names) == 1 else ""

    @property
    def plan(self):
        """The plan of all labs, without its suffix; empty if they have several."""
        plans = {lab["plan"].removesuffix(".plan") for lab in self.labs}
        return plans.pop() if len(plans) == 1 else ""

    @property
    def single(self):
        """Whether this is one run, not a comparison."""
        return len(self.runs) == 1 and not self.missing

    def rates(self):
        return sorted({run.lr for run in self.runs})

    def runs_of(self, arm, lr):
        return [run for run in self.runs if run.arm == arm and run.lr == lr]

    def cells(self, *states, having=lambda run: True):
        """(arm, label, rate, runs) of all arms and rates with such runs: in one of the states, if any are given."""
        for arm, label in self.arms.items():
            for lr in self.rates():
                runs = [run for run in self.runs_of(arm, lr) if having(run) and (not states or run.state in states)]
                if runs:
                    yield arm, label, lr, runs

    def all_evaluated(self):
        done = [run for run in self.runs if run.state == "done"]
        return bool(done) and all(run.eval for run in done)

    def by_eval(self):
        """Whether the final losses are those of the evaluations, not of the last validations: those of more windows."""
        done = [run for run in self.runs if run.state == "done"]
        more = lambda run: (run.windows(False) or 0) > (run.windows(True) or math.inf)
        validated = all(stats.finite(run.last_validation) and more(run) for run in done)
        return self.all_evaluated() and not validated

    def loss_of(self):
        """Where the final losses come from, in words."""
        windows = {n for run in self.runs if run.state == "done" and (n := run.windows(self.by_eval()))}
        over = f", {' or '.join(map(str, sorted(windows)))} windows" if windows else ""
        return ("evaluation" if self.by_eval() else "last validation") + over


def holds_run(directory):
    """Whether there is a run.json, even an unreadable one, which load_run() reports."""
    try:
        os.stat(directory / "run.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def find_runs(path):
    """The runs of a path: [(directory, arm or None, label or None)], and its lab.json or None."""
    lab = run_directory.read_lab(path)
    if lab:
        labels = {arm: keys.get("label", arm) for arm, keys in lab["arms"].items()}
        begun = [r for r in lab["runs"] if holds_run(path / r["name"])]
        return [(path / r["name"], r["arm"], labels.get(r["arm"])) for r in begun], lab
    if holds_run(path):
        return [(path, None, None)], None
    if not path.is_dir():
        raise Nowhere(f"{path}: " + ("not a directory" if path.exists() else "no such directory"))
    found = [(p, None, None) for p in sorted(path.iterdir()) if holds_run(p)]
    if not found:
        raise Nowhere(f"{path}: not a run (run.json), a lab (lab.json), or a directory of runs")
    return found, None


def load_runs(path, study, name=None):
    """Adds the runs of a path to the study. name: of the arm that they are all seeds of."""
    kept = {}
    if path.is_file():
        header, entries = archive.read(path)
        kept, lab = archive.by_directory(path, entries), header.get("lab")
        study.ngrams = study.ngrams or header.get("ngrams")
        label = lambda arm: lab["arms"].get(arm, {}).get("label", arm) if lab else arm
        present = [(d, arm, label(arm)) for d, entry in kept.items() for arm in [entry["numbers"]["arm"]]]
    else:
        present, lab = find_runs(path)
        counted = path / "ngrams.json"
        study.ngrams = study.ngrams or (run_directory.read_json(counted, schema.NGRAMS) if counted.exists() else None)
    if name:
        present, lab = [(directory, name, name) for directory, _, _ in present], None
    if lab:
        study.live = study.live or run_directory.locked(path, "lab.lock")
        begun = {directory.name for directory, _, _ in present}
        study.missing += [r["name"] for r in lab["runs"] if r["name"] not in begun]
        may = {"tokens": "steps", "init-from": "init", **dict(zip(option_history.UPDATE, option_history.UPDATE))}
        study.own |= {arm: {may[key] for key in keys if key in may} for arm, keys in lab["arms"].items()}
    for directory, arm, label in present:
        if os.path.realpath(directory) in {os.path.realpath(run.directory) for run in study.runs}:
            continue
        try:
            run = load_run(directory, arm, label, study.left_out, kept.get(directory))
        except (RunError, OSError) as error:
            study.left_out.append(reason(error))
            continue
        planned = next((r for r in lab["runs"] if r["name"] == run.name), {}) if lab else {}
        if kept:
            planned = {"seed": kept[directory]["numbers"]["seed"], "base": kept[directory].get("base")}
        run.seed, run.base = planned.get("seed", run.seed), planned.get("base")
        study.runs.append(run)
        study.arms.setdefault(run.arm, run.label)
    for run in [run for run in study.runs if isinstance(run.base, str)]:
        beside = run.directory.with_name(run.base)
        run.base = next((r for r in study.runs if r.directory == beside), None)
        if run.base is None:
            study.left_out.append(f"{run.directory}: starts from {beside}, which is not among the runs")
    return lab


def reason(error):
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def load(paths, reference=None):
    """Reads the runs of labs (lab.json), runs, or directories of runs: paths, or (name of an arm, path)."""
    study = Study("", "", "", {}, [], [], [], [], False)
    named = [path if isinstance(path, tuple) else (None, path) for path in paths]
    for name, path in named:
        try:
            lab = load_runs(Path(path), study, name)
            study.labs += [lab] if lab else []
        except Nowhere:
            raise
        except (RunError, OSError) as error:
            study.left_out.append(reason(error))
    if not study.runs:
        if study.left_out:
            raise RunError(study.left_out[0] + (f" (and {len(study.left_out) - 1} more)" if study.left_out[1:] else ""))
        raise NothingYet(f"{named[0][1]}: no run of the plan has started")
    labs = study.labs
    planned = next((lab["reference"] for lab in labs), None)
    first = planned if planned in study.arms else next(iter(study.arms))
    study.reference = first if reference is None else reference
    if study.reference not in study.arms:
        raise RunError(f"--reference {study.reference}: no such arm; the arms are {', '.join(study.arms)}")
    study.title = "; ".join(dict.fromkeys(f"{lab['title']} ({lab['size']})" for lab in labs))
    study.title = study.title or (study.runs[0].name if study.single else "Comparison")
    study.question = " ".join(dict.fromkeys(lab["question"] for lab in labs if lab.get("question")))
    study.notes += [line for lab in labs for line in registered(lab)]
    study.live = study.live or any(run.state == "running" for run in study.runs)
    arrange(study)
    return study


def registered(lab):
    """What was fixed before the first run of a lab, and what was changed later, in words."""
    found = []
    for i, entry in enumerate(lab.get("registration", [])):
        when = "before the first run" if entry.get("first") else "after the first run"
        given = ", ".join(f"--{key} {value}" for key, value in entry.get("options", {}).items())
        commit = f"commit {entry['commit'][:12]}" if entry["commit"] else "not committed"
        facts = [f"SHA-256 {entry['sha256'][:16]}", commit]
        facts += [f"with {given}"] * bool(given) + [f"lines {'; '.join(entry['changed'])}"] * bool(entry["changed"])
        found.append(f"{'Changed' if i else 'Registered'} {when}, {entry['time']}: {lab['plan']}, {', '.join(facts)}.")
    return found


def arrange(study):
    """Sorts the reference first, and the runs in the order of the arms."""
    study.arms = {arm: study.arms[arm] for arm in sorted(study.arms, key=lambda arm: arm != study.reference)}
    rank = {arm: i for i, arm in enumerate(study.arms)}
    study.runs.sort(key=lambda r: (rank[r.arm], r.lr, r.seed))


def separate(study):
    """Splits an arm with several runs of the same rate and seed: each directory becomes an arm with its name, since a
    row must have different seeds."""
    seen = {}
    for run in study.runs:
        first = seen.setdefault((run.arm, run.lr, run.seed), run)
        if first is run:
            continue
        apart = first.directory.parent != run.directory.parent
        place = run.directory.parent if apart else run.directory
        arm, label = f"{run.arm} ({place})", f"{run.label} ({place})"
        together = lambda r: r.arm == run.arm and (r.directory.parent == place if apart else r is run)
        for other in list(filter(together, study.runs)):
            other.arm, other.label = arm, label
            seen.setdefault((arm, other.lr, other.seed), other)
        study.arms[arm] = label
    study.arms = {arm: label for arm, label in study.arms.items() if any(run.arm == arm for run in study.runs)}
    arrange(study)


def task_differences(runs):
    """The tasks that have one name and several files, in words."""
    found, seen = [], {}
    for run in runs:
        for name, records in run.choices.items():
            for record in records.values():
                first, fingerprint = seen.setdefault(name, (run, record["fingerprint"]))
                if fingerprint != record["fingerprint"]:
                    found.append(
                        f"task {name}: fingerprint {fingerprint} in {first.name}, {record['fingerprint']} in {run.name}"
                    )
    return found


def check(study, scaled=False):
    """Sets problems, which prevent a comparison, and adds notes. scaled: runs may differ in size and tokens."""
    first, problems = study.runs[0], []
    measured = next((run for run in study.runs if run.eval), None) if study.all_evaluated() else None
    for run in study.runs[1:]:
        names = (first.name, run.name) if first.name != run.name else (str(first.directory), str(run.directory))
        ignored = set(option_history.LENGTH * scaled).union(*(study.own.get(a, ()) for a in (first.arm, run.arm)))
        problems += option_history.differences(first.info, run.info, names, ignored)
        problems += option_history.validation_differences(first.read, run.read, names)
        problems += evaluation_differences(measured, run) if measured and run.eval else []
    problems += task_differences(study.runs)
    seen = {}
    for run in study.runs:
        key = (run.arm, run.lr, run.seed, scaled and (run.parameters, run.tokens))
        if key in seen:
            both = f"{run.directory} and {seen[key].directory}"
            problems.append(f"{both} are both arm {run.arm} with rate {run.lr:g} and seed {run.seed}")
        seen.setdefault(key, run)
        own = study.own.get(run.arm, set()) - {"init"}  # another of each seed
        length = set(option_history.LENGTH if scaled else ())
        for name in (*option_history.MODEL, *(() if scaled else option_history.SHAPE), *sorted(own - length)):
            other = next(r for r in study.runs if r.arm == run.arm)
            one, another = (r.options.get(name, option_history.UPDATE.get(name)) for r in (other, run))
            recorded = name in own or (name in run.options and name in other.options)  # not by older trainers
            if one != another and recorded:
                values = f"{one} in {other.name}, {another} in {run.name}"
                problems.append(f"--{name}: {values}, both of arm {run.arm}")
    study.notes += [
        f"{run.name} was resumed under other options: {'; '.join(run.changes)}." for run in study.runs if run.changes
    ]
    study.notes += [
        f"{run.name} continued to step {run.last}, beyond the {int(run.options['steps'])} of its run.json: "
        "an older trainer resumed it without recording the options."
        for run in study.runs
        if run.last > int(run.options["steps"])
    ]
    for what, values in (
        ("revisions of the trainer", set().union(*(r.values_of("revision") for r in study.runs))),
        ("hosts", set().union(*(r.values_of("host") for r in study.runs))),
        ("devices", {", ".join(r.info.get("devices", [])) for r in study.runs}),
    ):
        if len(values) > 1:
            study.notes.append(f"The runs come from {len(values)} {what}: {', '.join(sorted(map(str, values)))}.")
    study.problems = list(dict.fromkeys(problems))


def evaluation_differences(one, other):
    """The differences between two eval.json. Those of older trainers do not name their data."""
    found = []
    for what, key in (
        ("windows of the evaluation", "windows"),
        ("fingerprint of the evaluation's data", "data_fingerprint"),
    ):
        x, y = one.eval.get(key), other.eval.get(key)
        if x is not None and y is not None and str(x) != str(y):
            found.append(f"{what}: {x} in {one.name}, {y} in {other.name}")
    return found
