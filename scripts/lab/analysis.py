"""analysis.py: from run directories to numbers: what is compared, by how much, and how sure that is."""

import json
import math
import os
import re
import struct
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from . import option_history, run_directory, schema, stats
from .run_directory import RunError


MAP_NAME = re.compile(r"layer\.[0-9]+\.head\.[0-9]+\.(a1|a2|lambda)")  # of a tensor of --dump-attention


class NothingYet(RunError):
    """A lab of which no run has begun."""


class Nowhere(RunError):
    """A path of the command line that holds no runs."""


@dataclass
class Run:
    directory: Path
    name: str
    arm: str
    label: str
    lr: float  # of the first step
    seed: int
    info: dict  # run.json
    history: list  # [(step, options)]: which hold after which step
    last: int = 0  # step of the log
    state: str = ""
    train: list = field(default_factory=list)  # records, one per step
    val: dict = field(default_factory=dict)  # step -> loss
    layers: dict = field(default_factory=dict)  # step -> records of its layers
    read: list = field(default_factory=list)  # [(step, what validation reads)]
    eval: dict | None = None

    @property
    def options(self):
        """Those of the last start."""
        return self.history[-1][1]

    @property
    def steps(self):
        """At which the run ends. The log may know of a start that an older trainer did not write down."""
        return max(int(self.options["steps"]), self.last)

    def tokens_at(self, step):
        """Tokens that the first `step` steps read."""
        ends = [begin for begin, _ in self.history[1:]] + [step]
        return sum(
            max(0, min(end, step) - begin) * int(options["total-batch"])
            for (begin, options), end in zip(self.history, ends)
        )

    @property
    def tokens(self):
        return self.tokens_at(self.steps)

    def over_time(self, key):
        """An option's values in words: "40 then 80 after step 40"."""
        return option_history.over_time(option_history.values(self.history, key))

    @property
    def changes(self):
        """What later starts changed, in words, of the options that matter to the numbers."""
        return [
            f"--{key} {self.over_time(key)}"
            for key in option_history.REPORTED
            if len(option_history.values(self.history, key)) > 1
        ]

    def said(self, key):
        """revision or host, of all starts."""
        return {str(start.get(key)) for start in (self.info, *self.info.get("starts", [])) if key in start} or {"None"}

    @property
    def parameters(self):
        return self.info.get("model", {}).get("parameters")

    @property
    def flops_per_token(self):
        return self.info.get("model", {}).get("flops_per_token")

    @property
    def tokens_per_s(self):
        rates = [r["tokens_per_s"] for r in self.train if stats.finite(r.get("tokens_per_s"))]
        return stats.median(rates) if rates else None

    def final_loss(self, by_eval):
        """Of a run that is done: of its evaluation or its last validation; None of one that diverged or goes on."""
        if self.state != "done":
            return None
        loss = (self.eval or {}).get("loss") if by_eval else self.val.get(self.steps)
        return loss if stats.finite(loss) else None


def load_run(directory, arm=None, label=None, left_out=None):
    """A run; RunError where run.json or the log cannot be read. What else is damaged is left out and named in `left_out`."""
    directory, left_out = Path(directory), [] if left_out is None else left_out
    info = run_directory.read_run(directory)
    entries = option_history.history(info)
    options = entries[0][1]
    run = Run(
        directory,
        directory.name,
        arm or options["attention"],
        label or arm or options["attention"],
        float(options["lr"]),
        int(options["seed"]),
        info,
        entries,
    )
    broken, by_step = [], {}
    log = run_directory.read_log(directory / "log.jsonl", broken)
    if broken:
        left_out.append(
            f"{directory}/log.jsonl: line {broken[0]}"
            + (f" and {len(broken) - 1} more are no records" if broken[1:] else " is no record")
        )
    for r in log:
        kind, step = r["kind"], r["step"]
        if kind == "train":
            by_step[step] = r
        elif kind == "val":
            run.val[step] = r["loss"]
        elif kind == "stats":
            layers = run.layers.setdefault(step, {})
            layers[r["layer"]] = r
    run.train = [by_step[s] for s in sorted(by_step)]
    run.last = max(by_step, default=0)
    run.read = option_history.validations(info, log)
    run.state = run_directory.state(directory, run.steps)[0]
    if run.state == "begun" and run_directory.locked(directory):
        run.state = "running"
    if (directory / "eval.json").exists():
        try:
            run.eval = run_directory.read_json(directory / "eval.json", schema.EVALUATION)
        except RunError as error:
            left_out.append(str(error))
    return run


@dataclass
class Study:
    """What a report is about."""

    title: str
    question: str
    reference: str
    arms: dict  # name -> label, in order
    runs: list
    missing: list  # names of planned runs that have not begun
    notes: list  # what a reader must know
    left_out: list  # what could not be read, a line each
    live: bool  # whether a lab or a run is at work
    problems: list = field(default_factory=list)  # what keeps the runs from being compared, a line each


def holds_run(directory):
    """Whether there is a run.json, be it one that cannot be read, which load_run() says."""
    try:
        os.stat(directory / "run.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def find_runs(path):
    """The runs below a directory of the command line: [(directory, arm or None, label or None)], and its lab.json or None."""
    lab = run_directory.read_lab(path)
    if lab:
        labels = {arm: keys.get("label", arm) for arm, keys in lab["arms"].items()}
        return [
            (path / r["name"], r["arm"], labels.get(r["arm"])) for r in lab["runs"] if holds_run(path / r["name"])
        ], lab
    if holds_run(path):
        return [(path, None, None)], None
    if not path.is_dir():
        raise Nowhere(f"{path}: " + ("not a directory" if path.exists() else "there is no such directory"))
    found = [(p, None, None) for p in sorted(path.iterdir()) if holds_run(p)]
    if not found:
        raise Nowhere(f"{path}: neither a run (run.json), nor a lab (lab.json), nor a directory of runs")
    return found, None


def load_runs(path, study):
    """Adds the runs below a directory to the study."""
    present, lab = find_runs(path)
    if lab:
        study.live = study.live or run_directory.locked(path, "lab.lock")
        begun = {directory.name for directory, _, _ in present}
        study.missing += [r["name"] for r in lab["runs"] if r["name"] not in begun]
    for directory, arm, label in present:
        if os.path.realpath(directory) in {os.path.realpath(run.directory) for run in study.runs}:
            continue
        try:
            run = load_run(directory, arm, label, study.left_out)
        except (RunError, OSError) as error:
            study.left_out.append(reason(error))
            continue
        study.runs.append(run)
        study.arms.setdefault(run.arm, run.label)
    return lab


def reason(error):
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def load(paths, reference=None):
    """The runs below the given directories: of labs (lab.json), or runs themselves, or directories of runs."""
    study, labs = Study("", "", "", {}, [], [], [], [], False), []
    for path in map(Path, paths):
        try:
            labs.append(load_runs(path, study))
        except Nowhere:
            raise
        except (RunError, OSError) as error:
            study.left_out.append(reason(error))
    if not study.runs:
        if study.left_out:
            raise RunError(study.left_out[0] + (f" (and {len(study.left_out) - 1} more)" if study.left_out[1:] else ""))
        raise NothingYet(f"{paths[0]}: no run of the plan has begun")
    labs = [lab for lab in labs if lab]
    planned = next((lab["reference"] for lab in labs), None)
    study.reference = (
        reference if reference is not None else planned if planned in study.arms else next(iter(study.arms))
    )
    if study.reference not in study.arms:
        raise RunError(f"--reference {study.reference}: there is no such arm; there is: {', '.join(study.arms)}")
    study.title = "; ".join(dict.fromkeys(f"{lab['title']} ({lab['size']})" for lab in labs)) or "Comparison"
    study.question = " ".join(dict.fromkeys(lab["question"] for lab in labs if lab.get("question")))
    study.live = study.live or any(run.state == "running" for run in study.runs)
    arrange(study)
    return study


def arrange(study):
    """Puts the reference first, and the runs in the order of the arms."""
    study.arms = {arm: study.arms[arm] for arm in sorted(study.arms, key=lambda arm: arm != study.reference)}
    rank = {arm: i for i, arm in enumerate(study.arms)}
    study.runs.sort(key=lambda r: (rank[r.arm], r.lr, r.seed))


def separate(study):
    """Runs of one arm, rate and seed become arms of their own, which have the name of where they are: rows are of
    different seeds. Runs that share a directory with such a run, and its arm, go with it."""
    seen = {}
    for run in study.runs:
        first = seen.setdefault((run.arm, run.lr, run.seed), run)
        if first is run:
            continue
        apart = first.directory.parent != run.directory.parent
        place = run.directory.parent if apart else run.directory
        arm, label = f"{run.arm} ({place})", f"{run.label} ({place})"
        for other in [
            r for r in study.runs if r.arm == run.arm and (r.directory.parent == place if apart else r is run)
        ]:
            other.arm, other.label = arm, label
            seen.setdefault((arm, other.lr, other.seed), other)
        study.arms[arm] = label
    study.arms = {arm: label for arm, label in study.arms.items() if any(run.arm == arm for run in study.runs)}
    arrange(study)


def check(study):
    """Finds what keeps the runs from being compared; what only has to be known goes into the notes."""
    first, problems = study.runs[0], []
    measured = next((run for run in study.runs if run.eval), None) if all_evaluated(study) else None
    for run in study.runs[1:]:
        names = (first.name, run.name) if first.name != run.name else (str(first.directory), str(run.directory))
        problems += option_history.differences(first.info, run.info, names)
        problems += option_history.validation_differences(first.read, run.read, names)
        problems += evaluation_differences(measured, run) if measured and run.eval else []
    seen = {}
    for run in study.runs:
        key = (run.arm, run.lr, run.seed)
        if key in seen:
            problems.append(
                f"{run.directory} and {seen[key].directory} are both arm {run.arm} with rate {run.lr:g} and seed {run.seed}"
            )
        seen.setdefault(key, run)
        for name in ("attention", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn"):
            other = next(r for r in study.runs if r.arm == run.arm)
            if other.options.get(name) != run.options.get(name):
                problems.append(
                    f"--{name}: {other.options.get(name)} in {other.name}, {run.options.get(name)} in {run.name}, both of arm {run.arm}"
                )
    study.notes += [
        f"{run.name} was resumed under other options: {'; '.join(run.changes)}." for run in study.runs if run.changes
    ]
    study.notes += [
        f"{run.name} went to step {run.last}, beyond the {int(run.options['steps'])} of its run.json: a trainer resumed it that did not write down under which options."
        for run in study.runs
        if run.last > int(run.options["steps"])
    ]
    for what, values in (
        ("revisions of the trainer", set().union(*(r.said("revision") for r in study.runs))),
        ("hosts", set().union(*(r.said("host") for r in study.runs))),
        ("devices", {", ".join(r.info.get("devices", [])) for r in study.runs}),
    ):
        if len(values) > 1:
            study.notes.append(f"The runs come from {len(values)} {what}: {', '.join(sorted(map(str, values)))}.")
    study.problems = list(dict.fromkeys(problems))


def evaluation_differences(one, other):
    """Of two eval.json; those of older trainers do not say which data they are of."""
    found = []
    for what, key in (
        ("windows of the evaluation", "windows"),
        ("fingerprint of the evaluation's data", "data_fingerprint"),
    ):
        x, y = one.eval.get(key), other.eval.get(key)
        if x is not None and y is not None and str(x) != str(y):
            found.append(f"{what}: {x} in {one.name}, {y} in {other.name}")
    return found


# ---- tables


def rates(study):
    return sorted({run.lr for run in study.runs})


def of(study, arm, lr):
    return [run for run in study.runs if run.arm == arm and run.lr == lr]


def all_evaluated(study):
    done = [run for run in study.runs if run.state == "done"]
    return bool(done) and all(run.eval for run in done)


def main_rate(study):
    """The rate that figures show first: the one at which the reference ends best, of those with most runs done."""
    by_eval = all_evaluated(study)

    def quality(lr):
        losses = [x for run in of(study, study.reference, lr) if (x := run.final_loss(by_eval)) is not None]
        done = sum(run.state == "done" for run in study.runs if run.lr == lr)
        return (-done, stats.mean(losses) if losses else float("inf"), lr)

    return min(rates(study), key=quality)


def estimate_json(e):
    return None if e is None else {"mean": e.mean, "half": e.half, "n": e.n, "sd": e.sd, "p": e.p}


def rate_of(runs):
    """In words: a start may have changed it."""
    changed = next((run for run in runs if len(option_history.values(run.history, "lr")) > 1), None)
    return changed.over_time("lr") if changed else f"{runs[0].lr:g}"


def summary(study):
    """A row for each arm and rate that has runs, with its gap to the reference at the same rate."""
    by_eval, rows = all_evaluated(study), []
    for arm, label in study.arms.items():
        for lr in rates(study):
            runs = of(study, arm, lr)
            if not runs:
                continue
            losses = {run.seed: run.final_loss(by_eval) for run in runs}
            reference = {run.seed: run.final_loss(by_eval) for run in of(study, study.reference, lr)}
            speeds = [s for run in runs if (s := run.tokens_per_s)]
            done = [x for x in losses.values() if x is not None]
            rows.append(
                {
                    "arm": arm,
                    "label": label,
                    "lr": lr,
                    "rate": rate_of(runs),
                    "parameters": runs[0].parameters,
                    "flops_per_token": runs[0].flops_per_token,
                    "tokens_per_s": stats.median(speeds) if speeds else None,
                    "tokens": runs[0].tokens,
                    "states": {
                        state: sum(run.state == state for run in runs) for state in sorted({run.state for run in runs})
                    },
                    "losses": {str(seed): loss for seed, loss in losses.items()},
                    "loss": estimate_json(stats.t_interval(done)),
                    "gap": None if arm == study.reference else estimate_json(stats.paired_gap(losses, reference)),
                }
            )
    adjusted = stats.holm([(row["gap"] or {}).get("p") for row in rows])
    for row, p in zip(rows, adjusted):
        if row["gap"]:
            row["gap"]["p_holm"] = p
    return rows


def spike_rows(study):
    rows = []
    for arm, label in study.arms.items():
        for lr in rates(study):
            runs = [run for run in of(study, arm, lr) if run.train]
            if not runs:
                continue
            row = {
                "arm": arm,
                "label": label,
                "lr": lr,
                "rate": rate_of(runs),
                "runs": len(runs),
                "diverged": sum(run.state == "diverged" for run in runs),
            }
            for what in ("loss", "grad"):
                counts = [stats.spikes([r.get(f"{what}_z") for r in run.train]) for run in runs]
                judged, found = sum(c[1] for c in counts), sum(len(c[0]) for c in counts)
                row[what] = {
                    "spikes": found,
                    "judged": judged,
                    "score": 100 * found / judged if judged else None,
                    "by_run": estimate_json(stats.t_interval([c[2] for c in counts if c[2] is not None])),
                }
            rows.append(row)
    return rows


def ladder_rows(study):
    """Of arms with several rates: the best and the largest stable rate, and how much the loss depends on the rate."""
    by_eval, rows = all_evaluated(study), []
    for arm, label in study.arms.items():
        ladder = {}
        for lr in rates(study):
            ended = [run for run in of(study, arm, lr) if run.state in ("done", "diverged")]
            if ended:
                ladder[lr] = [run.final_loss(by_eval) for run in ended]
        if len(ladder) < 2:
            continue
        starts = [run.val[0] for run in study.runs if run.arm == arm and stats.finite(run.val.get(0))]
        stable, open_end = stats.largest_stable(ladder)
        means = {lr: stats.mean(x) for lr, x in ladder.items() if all(map(stats.finite, x))}
        by_seed = []
        for seed in sorted({run.seed for run in study.runs if run.arm == arm}):
            one = {
                lr: [
                    run.final_loss(by_eval)
                    for run in of(study, arm, lr)
                    if run.seed == seed and run.state in ("done", "diverged")
                ]
                for lr in ladder
            }
            if all(one.values()):
                by_seed.append(stats.largest_stable(one)[0])
        rows.append(
            {
                "arm": arm,
                "label": label,
                "ladder": {f"{lr:g}": x for lr, x in ladder.items()},
                "best": min(means, key=means.get) if means else None,
                "stable": stable,
                "bounded_by_ladder": open_end,
                "stable_by_seed": by_seed,
                "sensitivity": stats.sensitivity(ladder, stats.mean(starts)) if starts else None,
            }
        )
    return rows


STATS_KEYS = (
    "lambda_mean",
    "lambda_min",
    "lambda_max",
    "context_rms_mean",
    "context_rms_min",
    "context_rms_max",
    "first_mass_map0",
    "first_mass_map1",
    "first_mass_effective",
    "logit_max",
    "residual_max",
    "residual_median",
    "grad_norm",
)
EVAL_KEYS = (
    "first_mass_map0",
    "first_mass_map1",
    "first_mass_effective",
    "sink_rate_map0",
    "sink_rate_map1",
    "sink_rate_effective",
    "logit_max",
    "logit_median",
    "hidden_max",
    "hidden_median",
)


def layer_table(study, lr):
    """arm -> of the last statistics and of the evaluation: key -> a value per layer, the mean over seeds."""
    table = {}
    for arm in study.arms:
        runs = of(study, arm, lr)
        last = [run.layers[max(run.layers)] for run in runs if run.layers and run.state in ("done", "diverged")]
        measured = [run.eval["attention"]["layers"] for run in runs if run.eval and run.eval.get("attention")]
        table[arm] = {"seeds": len(last), "stats": {}, "eval": {}}
        for key in STATS_KEYS if last else ():
            table[arm]["stats"][key] = [
                mean_or_none([layers[l].get(key) for layers in last if l in layers]) for l in sorted(last[0])
            ]
        for key in EVAL_KEYS if measured else ():
            table[arm]["eval"][key] = [
                mean_or_none([layers[l].get(key) for layers in measured]) for l in range(min(map(len, measured)))
            ]
    return table


def mean_or_none(xs):
    good = [x for x in xs if stats.finite(x)]
    return stats.mean(good) if good else None


def evaluated(study, arm, lr, get):
    """{seed: get(eval)} of an arm's runs that have been evaluated and where it is a number."""
    values = {run.seed: get(run.eval) for run in of(study, arm, lr) if run.eval}
    return {seed: x for seed, x in values.items() if stats.finite(x)}


def position_bins(T):
    bins, begin = [], 0
    while begin < T:
        end = min(T, 2 * begin if begin else 1)
        bins.append((begin, end))
        begin = end
    return bins


def by_position(study, lr):
    """arm -> rows (begin, end, loss, gap) of the positions in powers of two."""
    lengths = {len(run.eval["loss_by_position"]) for run in study.runs if run.eval and run.eval.get("loss_by_position")}
    if len(lengths) != 1:
        return {}
    table = {}
    for arm in study.arms:
        rows = []
        for begin, end in position_bins(next(iter(lengths))):
            get = lambda e: mean_or_none(e["loss_by_position"][begin:end])
            mine, other = evaluated(study, arm, lr, get), evaluated(study, study.reference, lr, get)
            if mine:
                rows.append(
                    {
                        "begin": begin,
                        "end": end,
                        "loss": estimate_json(stats.t_interval(list(mine.values()))),
                        "gap": None if arm == study.reference else estimate_json(stats.paired_gap(mine, other)),
                    }
                )
        if rows:
            table[arm] = rows
    return table


def recall(study, lr):
    """arm -> rows of the recall task's cells."""
    cells = next(
        (
            [(c["pairs"], c["noise"]) for c in run.eval["recall"]]
            for run in study.runs
            if run.eval and run.eval.get("recall")
        ),
        [],
    )
    table = {}
    for arm in study.arms:
        rows = []
        for pairs, noise in cells:
            row = {"pairs": pairs, "noise": noise}
            for key in ("exact", "among_values", "loss"):
                get = lambda e: next(
                    (c[key] for c in e.get("recall", []) if (c["pairs"], c["noise"]) == (pairs, noise)), None
                )
                mine, other = evaluated(study, arm, lr, get), evaluated(study, study.reference, lr, get)
                row[key] = estimate_json(stats.t_interval(list(mine.values())))
                row[f"{key}_gap"] = None if arm == study.reference else estimate_json(stats.paired_gap(mine, other))
            if row["exact"] and row["among_values"]:
                rows.append(row)
        if rows:
            table[arm] = rows
    return table


def noise(study):
    """How wide the noise is, at each rate: the scatter of losses over seeds, of paired gaps, and how many seeds a gap of 0.02 takes."""
    rows = []
    for row in summary(study):
        losses = [x for x in row["losses"].values() if x is not None]
        gap = row["gap"] or {}
        if len(losses) < 2:
            continue
        rows.append(
            {
                "arm": row["arm"],
                "label": row["label"],
                "lr": row["lr"],
                "sd": stats.deviation(losses),
                "gap_sd": gap.get("sd"),
                "seeds_for_0.02": stats.seeds_needed(gap["sd"], 0.02) if gap.get("sd") is not None else None,
            }
        )
    return rows


def read_maps(path):
    """The tensors of a safetensors file of F32: name -> (shape, array); RunError when it is no file of attention maps."""
    try:
        data = Path(path).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        tensors = {}
        for name, t in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            tensors[name] = t["shape"], array("f", data[8 + size + begin : 8 + size + end])
            if (
                t["dtype"] != "F32"
                or 4 * math.prod(t["shape"]) != end - begin
                or len(tensors[name][1]) != math.prod(t["shape"])
            ):
                raise ValueError(name)
        n = len(tensors["tokens"][1])
        for name, (shape, _) in tensors.items():
            wanted = {"tokens": [n], "a1": [n, n], "a2": [n, n], "lambda": [n]}[name.rpartition(".")[2]]
            if shape != wanted or (name != "tokens" and not MAP_NAME.fullmatch(name)):
                raise ValueError(name)
        return tensors
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError):
        raise RunError(f"{path}: damaged, or no attention maps") from None


def results(study):
    """All tables as JSON."""
    lr = main_rate(study)
    first = study.runs[0]
    return {
        "title": study.title,
        "question": study.question,
        "reference": study.reference,
        "arms": study.arms,
        "main_lr": lr,
        "confidence": stats.CONFIDENCE,
        "loss_of": "evaluation" if all_evaluated(study) else "last validation",
        "model": {
            k: first.options.get(k)
            for k in ("preset", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "seq-len", "vocab")
        },
        "training": {
            k: first.options.get(k)
            for k in (
                "total-batch",
                "steps",
                "warmup",
                "schedule",
                "min-lr-ratio",
                "weight-decay",
                "beta1",
                "beta2",
                "grad-clip",
                "gemm",
            )
        },
        "data": {
            which: [{k: v for k, v in source.items() if k != "path"} for source in sources]
            for which, sources in (first.info.get("data") or {}).items()
        },
        "data_fingerprint": first.info.get("data_fingerprint"),
        "tokens": first.tokens,
        "revisions": sorted(set().union(*(run.said("revision") for run in study.runs))),
        "devices": sorted({", ".join(run.info.get("devices", [])) for run in study.runs}),
        "runs": [
            {
                "name": run.name,
                "arm": run.arm,
                "lr": run.lr,
                "seed": run.seed,
                "state": run.state,
                "steps": len(run.train),
                "changes": run.changes,
                "final_loss": run.final_loss(all_evaluated(study)),
                "last_validation": run.val.get(run.steps),
                "tokens_per_s": run.tokens_per_s,
            }
            for run in study.runs
        ],
        "missing": study.missing,
        "notes": study.notes,
        "summary": summary(study),
        "spikes": spike_rows(study),
        "ladder": ladder_rows(study),
        "layers": layer_table(study, lr),
        "by_position": by_position(study, lr),
        "recall": recall(study, lr),
        "noise": noise(study),
    }
