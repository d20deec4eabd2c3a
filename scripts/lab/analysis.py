"""analysis.py: from run directories to numbers: what is compared, by how much, and how sure that is."""
import json
import struct
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import runs as rundirs
import stats
from runs import RunError


class NothingYet(RunError):
    """A lab of which no run has begun."""


@dataclass
class Run:
    directory: Path
    name: str
    arm: str
    label: str
    lr: float
    seed: int
    info: dict                                  # run.json
    state: str = ""
    train: list = field(default_factory=list)   # records, one per step
    val: dict = field(default_factory=dict)     # step -> loss
    layers: dict = field(default_factory=dict)  # step -> records of its layers
    eval: dict | None = None

    @property
    def options(self):
        return self.info["options"]

    @property
    def steps(self):
        return int(self.options["steps"])

    @property
    def tokens(self):
        return self.steps * int(self.options["total-batch"])

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


def load_run(directory, arm=None, label=None):
    directory = Path(directory)
    info = rundirs.read_json(directory / "run.json")
    options = info.get("options")
    if not isinstance(options, dict) or not isinstance(options.get("steps"), (int, float)) or not options.get("total-batch"):
        raise RunError(f"{directory}/run.json: no options of a training run in it")
    run = Run(directory, directory.name, arm or options["attention"], label or arm or options["attention"], float(options["lr"]), int(options["seed"]), info)
    by_step = {}
    for r in rundirs.read_log(directory / "log.jsonl"):
        kind, step = r.get("kind"), r["step"]
        if kind == "train":
            by_step[step] = r
        elif kind == "val":
            run.val[step] = r.get("loss")
        elif kind == "stats":
            layers = run.layers.setdefault(step, {})
            layers[r.get("layer", 0)] = r
    run.train = [by_step[s] for s in sorted(by_step)]
    run.state = rundirs.state(directory, run.steps)[0]
    if run.state == "begun" and rundirs.locked(directory):
        run.state = "running"
    if (directory / "eval.json").exists():
        run.eval = rundirs.read_json(directory / "eval.json")
    return run


@dataclass
class Study:
    """What a report is about."""
    title: str
    question: str
    reference: str
    arms: dict     # name -> label, in order
    runs: list
    missing: list  # names of planned runs that have not begun
    notes: list    # what a reader must know
    live: bool     # whether a lab or a run is at work


def load(paths, reference=None):
    """The runs below the given directories: of labs (lab.json), or runs themselves, or directories of runs."""
    arms, runs, missing, titles, questions, found_reference, live = {}, {}, [], [], [], None, False
    for path in map(Path, paths):
        lab = rundirs.read_json(path / "lab.json") if (path / "lab.json").exists() else None
        if lab:
            live = live or rundirs.locked(path, "lab.lock")
            titles.append(f"{lab['title']} ({lab['size']})")
            questions.append(lab.get("question", ""))
            found_reference = found_reference or lab["reference"]
            present = [(path / r["name"], r["arm"]) for r in lab["runs"] if (path / r["name"] / "run.json").exists()]
            missing += [r["name"] for r in lab["runs"] if not (path / r["name"] / "run.json").exists()]
            labels = {arm: lab["arms"].get(arm, {}).get("label", arm) for _, arm in present}
        elif (path / "run.json").exists():
            present, labels = [(path, None)], {}
        else:
            present, labels = [(p.parent, None) for p in sorted(path.glob("*/run.json"))], {}
            if not present:
                raise RunError(f"{path}: neither a run (run.json), nor a lab (lab.json), nor a directory of runs")
        for directory, arm in present:
            if directory.resolve() in runs:
                continue
            run = load_run(directory, arm, labels.get(arm))
            runs[directory.resolve()] = run
            arms.setdefault(run.arm, run.label)
    if not runs:
        raise NothingYet(f"{paths[0]}: no run of the plan has begun")
    chosen = reference or (found_reference if found_reference in arms else next(iter(arms)))
    if chosen not in arms:
        raise RunError(f"--reference {chosen}: there is no such arm; there is: {', '.join(arms)}")
    order = [chosen] + [a for a in arms if a != chosen]
    rank = {a: i for i, a in enumerate(order)}
    ordered = sorted(runs.values(), key=lambda r: (rank[r.arm], r.lr, r.seed))
    return Study("; ".join(dict.fromkeys(titles)) or "Comparison", " ".join(dict.fromkeys(q for q in questions if q)), chosen,
                 {a: arms[a] for a in order}, ordered, missing, [], live or any(run.state == "running" for run in ordered))


def check(study):
    """What keeps the runs from being compared, a line each; what only has to be known goes into the notes."""
    first, problems = study.runs[0], []
    for run in study.runs[1:]:
        problems += rundirs.differences(first.info, run.info, (first.name, run.name))
    seen = {}
    for run in study.runs:
        key = (run.arm, run.lr, run.seed)
        if key in seen:
            problems.append(f"{run.directory} and {seen[key].directory} are both arm {run.arm} with rate {run.lr:g} and seed {run.seed}")
        seen[key] = run
        for name in ("attention", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn"):
            other = next(r for r in study.runs if r.arm == run.arm)
            if other.options.get(name) != run.options.get(name):
                problems.append(f"--{name}: {other.options.get(name)} in {other.name}, {run.options.get(name)} in {run.name}, both of arm {run.arm}")
    for what, values in (("revisions of the trainer", {r.info.get("revision") for r in study.runs}), ("hosts", {r.info.get("host") for r in study.runs}),
                         ("devices", {", ".join(r.info.get("devices", [])) for r in study.runs})):
        if len(values) > 1:
            study.notes.append(f"The runs come from {len(values)} {what}: {', '.join(sorted(map(str, values)))}.")
    return list(dict.fromkeys(problems))


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
            rows.append({
                "arm": arm, "label": label, "lr": lr, "parameters": runs[0].parameters, "flops_per_token": runs[0].flops_per_token,
                "tokens_per_s": stats.median(speeds) if speeds else None, "tokens": runs[0].tokens,
                "states": {state: sum(run.state == state for run in runs) for state in sorted({run.state for run in runs})},
                "losses": {str(seed): loss for seed, loss in losses.items()}, "loss": estimate_json(stats.t_interval(done)),
                "gap": None if arm == study.reference else estimate_json(stats.paired_gap(losses, reference)),
            })
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
            row = {"arm": arm, "label": label, "lr": lr, "runs": len(runs), "diverged": sum(run.state == "diverged" for run in runs)}
            for what in ("loss", "grad"):
                counts = [stats.spikes([r.get(f"{what}_z") for r in run.train]) for run in runs]
                judged, found = sum(c[1] for c in counts), sum(len(c[0]) for c in counts)
                row[what] = {"spikes": found, "judged": judged, "score": 100 * found / judged if judged else None,
                             "by_run": estimate_json(stats.t_interval([c[2] for c in counts if c[2] is not None]))}
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
            one = {lr: [run.final_loss(by_eval) for run in of(study, arm, lr) if run.seed == seed and run.state in ("done", "diverged")] for lr in ladder}
            if all(one.values()):
                by_seed.append(stats.largest_stable(one)[0])
        rows.append({"arm": arm, "label": label, "ladder": {f"{lr:g}": x for lr, x in ladder.items()}, "best": min(means, key=means.get) if means else None,
                     "stable": stable, "bounded_by_ladder": open_end, "stable_by_seed": by_seed,
                     "sensitivity": stats.sensitivity(ladder, stats.mean(starts)) if starts else None})
    return rows


STATS_KEYS = ("lambda_mean", "lambda_min", "lambda_max", "context_rms_mean", "context_rms_min", "context_rms_max", "first_mass_map0",
              "first_mass_map1", "first_mass_effective", "logit_max", "residual_max", "residual_median", "grad_norm")
EVAL_KEYS = ("first_mass_map0", "first_mass_map1", "first_mass_effective", "sink_rate_map0", "sink_rate_map1", "sink_rate_effective",
             "logit_max", "logit_median", "hidden_max", "hidden_median")


def layer_table(study, lr):
    """arm -> of the last statistics and of the evaluation: key -> a value per layer, the mean over seeds."""
    table = {}
    for arm in study.arms:
        runs = of(study, arm, lr)
        last = [run.layers[max(run.layers)] for run in runs if run.layers and run.state in ("done", "diverged")]
        measured = [run.eval["attention"]["layers"] for run in runs if run.eval and run.eval.get("attention")]
        table[arm] = {"seeds": len(last), "stats": {}, "eval": {}}
        for key in STATS_KEYS if last else ():
            table[arm]["stats"][key] = [mean_or_none([layers[l].get(key) for layers in last if l in layers]) for l in sorted(last[0])]
        for key in EVAL_KEYS if measured else ():
            table[arm]["eval"][key] = [mean_or_none([layers[l].get(key) for layers in measured]) for l in range(len(measured[0]))]
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
                rows.append({"begin": begin, "end": end, "loss": estimate_json(stats.t_interval(list(mine.values()))),
                             "gap": None if arm == study.reference else estimate_json(stats.paired_gap(mine, other))})
        if rows:
            table[arm] = rows
    return table


def recall(study, lr):
    """arm -> rows of the recall task's cells."""
    cells = next(([(c["pairs"], c["noise"]) for c in run.eval["recall"]] for run in study.runs if run.eval and run.eval.get("recall")), [])
    table = {}
    for arm in study.arms:
        rows = []
        for pairs, noise in cells:
            row = {"pairs": pairs, "noise": noise}
            for key in ("exact", "among_values", "loss"):
                get = lambda e: next((c[key] for c in e.get("recall", []) if (c["pairs"], c["noise"]) == (pairs, noise)), None)
                mine, other = evaluated(study, arm, lr, get), evaluated(study, study.reference, lr, get)
                row[key] = estimate_json(stats.t_interval(list(mine.values())))
                row[f"{key}_gap"] = None if arm == study.reference else estimate_json(stats.paired_gap(mine, other))
            if row["exact"]:
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
        rows.append({"arm": row["arm"], "label": row["label"], "lr": row["lr"], "sd": stats.deviation(losses), "gap_sd": gap.get("sd"),
                     "seeds_for_0.02": stats.seeds_needed(gap["sd"], 0.02) if gap.get("sd") is not None else None})
    return rows


def read_maps(path):
    """The tensors of a safetensors file of F32: name -> (shape, array)."""
    data = Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    tensors = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            tensors[name] = t["shape"], array("f", data[8 + size + begin:8 + size + end])
    return tensors


def results(study):
    """All tables as JSON."""
    lr = main_rate(study)
    first = study.runs[0]
    return {"title": study.title, "question": study.question, "reference": study.reference, "arms": study.arms, "main_lr": lr,
            "confidence": stats.CONFIDENCE, "loss_of": "evaluation" if all_evaluated(study) else "last validation",
            "model": {k: first.options.get(k) for k in ("preset", "layers", "hidden", "heads", "kv-heads", "head-dim", "ffn", "seq-len", "vocab")},
            "training": {k: first.options.get(k) for k in ("total-batch", "steps", "warmup", "schedule", "min-lr-ratio", "weight-decay", "beta1", "beta2", "grad-clip", "gemm")},
            "data": {which: [{k: v for k, v in source.items() if k != "path"} for source in sources] for which, sources in (first.info.get("data") or {}).items()},
            "data_fingerprint": first.info.get("data_fingerprint"),
            "tokens": first.tokens, "revisions": sorted({str(run.info.get("revision")) for run in study.runs}),
            "devices": sorted({", ".join(run.info.get("devices", [])) for run in study.runs}),
            "runs": [{"name": run.name, "arm": run.arm, "lr": run.lr, "seed": run.seed, "state": run.state, "steps": len(run.train),
                      "final_loss": run.final_loss(all_evaluated(study)), "last_validation": run.val.get(run.steps), "tokens_per_s": run.tokens_per_s} for run in study.runs],
            "missing": study.missing, "notes": study.notes, "summary": summary(study), "spikes": spike_rows(study), "ladder": ladder_rows(study),
            "layers": layer_table(study, lr), "by_position": by_position(study, lr), "recall": recall(study, lr), "noise": noise(study)}
