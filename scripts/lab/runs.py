"""runs.py: a run as numbers: its options, losses, spikes, speed, cost and statistics of layers.

They come from a run directory, or from a line of a saved file (saved.py), which has the fields of a Run as JSON. A
report is made of these fields alone, so that it is the same from both.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

from . import option_history, run_directory, schema, stats
from .run_directory import RunError

POINTS = 100  # of a curve; each is the mean of as many consecutive steps
STATISTICS = 6  # steps of which the statistics of layers are kept, evenly spaced
INFO = "options model data data_fingerprint revision host devices starts".split()  # of run.json
START = "step changed revision host model data_fingerprint".split()  # of its starts


class Statistic(NamedTuple):
    title: str
    unit: str
    note: str
    log: bool = False


LAYERS = {  # the statistics of a layer that a report shows: keys of the records `stats`
    "lambda_mean": Statistic(
        "Factor of the second map", "lambda", "Mean over tokens and heads, after the sigmoid if the variant has one."
    ),
    "context_rms_mean": Statistic(
        "Context RMS",
        "RMS",
        "Root mean square of the output of a head before o_proj, mean over tokens and heads.",
        True,
    ),
    "first_mass_effective": Statistic(
        "Attention sink",
        "attention mass",
        "Attention to the first position, of the effective map |A1 - s A2|, normalized; of A for one map.",
    ),
    "logit_max": Statistic(
        "Outliers of the attention logits",
        "largest |logit|",
        "The largest |logit| on sampled query rows, of both maps.",
        True,
    ),
    "residual_max": Statistic(
        "Outliers of the hidden state",
        "largest |activation|",
        "The largest |activation| of the residual stream after the layer.",
        True,
    ),
    "grad_norm": Statistic(
        "Gradient norm by layer", "gradient norm", "The gradient norm of each layer, before clipping.", True
    ),
}


@dataclass
class Run:
    name: str
    arm: str
    seed: int
    rate: float  # at the first step
    info: dict  # of run.json: INFO
    state: str = "new"  # new, begun, running, diverged or done
    last: int = 0  # last step of the log
    val: list = field(default_factory=list)  # [{step, loss}]
    reads: list = field(default_factory=list)  # [{step, data}]: option_history.validations()
    eval: dict | None = None  # loss, windows, data_fingerprint, positions: mean losses of position_ranges()
    curve: dict = field(default_factory=dict)  # {step, loss, grad_norm: POINTS numbers}
    spikes: dict = field(default_factory=dict)  # {loss, grad_norm: [spikes, steps that have a z score]}
    speed: dict | None = None  # tokens/s: median, 10% and 90% of the steps
    layers: dict = field(default_factory=dict)  # {step: STATISTICS steps, a key of LAYERS: by step, by layer}
    directory: Path | None = None  # of a run that is not saved

    @cached_property
    def history(self):
        """[(step, options)]: the options after each start."""
        return option_history.history(self.info)

    @cached_property
    def batches(self):
        """[(step, tokens of an update)] after each start."""
        return [(step, int(options["total-batch"])) for step, options in self.history]

    @property
    def options(self):
        """The options of the last start."""
        return self.history[-1][1]

    @property
    def steps(self):
        return int(self.options["steps"])

    def tokens_at(self, step):
        """Tokens of the first `step` steps."""
        ends = [begin for begin, _ in self.batches[1:]] + [step]
        return sum(max(0, min(end, step) - begin) * batch for (begin, batch), end in zip(self.batches, ends))

    @property
    def tokens(self):
        return self.tokens_at(self.steps)

    @property
    def changes(self):
        """The changes of options that affect the numbers, in words."""
        values = {key: option_history.values(self.history, key) for key in option_history.REPORTED}
        return [f"--{key} {option_history.over_time(of)}" for key, of in values.items() if len(of) > 1]

    def values_of(self, key):
        """The values of a key, such as revision or host, of all starts."""
        return {str(start.get(key)) for start in (self.info, *self.info.get("starts", [])) if key in start} or {"None"}

    @property
    def parameters(self):
        return self.info.get("model", {}).get("parameters")

    @property
    def active_parameters(self):
        """Parameters that a token passes: with experts fewer than all."""
        return self.info.get("model", {}).get("active_parameters", self.parameters)

    @property
    def flops_per_token(self):
        """Mean of the tokens of all starts, whose lengths may differ; None if it is unknown."""
        costs = option_history.by_start(self.info, lambda start: start.get("model", {}).get("flops_per_token"))
        tokens = [self.tokens_at(step) for step, _ in costs[1:]] + [self.tokens]
        parts = [(end - begin) * (cost or 0) for (_, cost), begin, end in zip(costs, [0, *tokens], tokens)]
        return sum(parts) / self.tokens if len(costs) > 1 and self.tokens else costs[0][1]

    @property
    def machine(self):
        return f"{', '.join(self.info.get('devices', [])) or 'an unknown device'} of {self.info.get('host')}"

    @cached_property
    def validated(self):
        """{tokens: finite loss} of the validations, that of random weights excepted."""
        found = {self.tokens_at(v["step"]): v["loss"] for v in self.val if stats.finite(v["loss"])}
        return {tokens: loss for tokens, loss in found.items() if tokens > 0}

    def validation_at(self, step):
        return next((v["loss"] for v in self.val if v["step"] == step), None)

    @property
    def last_validation(self):
        return self.validation_at(self.steps)

    @property
    def positions(self):
        return (self.eval or {}).get("positions") or []

    def windows(self, by_eval):
        """Validation windows of final_loss(); None before it."""
        return (self.eval or {}).get("windows") if by_eval else (self.reads[-1]["data"] or {}).get("windows")

    def final_loss(self, by_eval):
        """The loss of the evaluation or of the last validation of a finished run; None if it diverged or continues."""
        if self.state != "done":
            return None
        loss = (self.eval or {}).get("loss") if by_eval else self.last_validation
        return loss if stats.finite(loss) else None


def position_ranges(length):
    """[(begin, end)] of positions in powers of two."""
    ends = [0] + [1 << i for i in range(length.bit_length()) if 1 << i < length] + [length]
    return list(zip(ends, ends[1:]))


# ---- from a directory


def kept_records(log):
    """The records of a log without those of steps that a resume or a rollback repeated."""
    kept, last = [], 0
    for record in log:
        if record["kind"] == "train":
            if record["step"] <= last:
                kept = [r for r in kept if r["step"] < record["step"]]
            last = record["step"]
        kept.append(record)
    return kept


def curve_of(train):
    """The means of consecutive steps, at their last step."""
    ends = [i * len(train) // POINTS for i in range(POINTS + 1)] if len(train) > POINTS else range(len(train) + 1)
    parts = [train[begin:end] for begin, end in zip(ends, ends[1:])]
    mean = lambda key: [stats.mean_or_none([r.get(key) for r in part]) for part in parts]
    return {"step": [part[-1]["step"] for part in parts], "loss": mean("loss"), "grad_norm": mean("grad_norm")}


def spikes_of(train, key):
    found, judged = stats.spikes(stats.z_scores([r.get(key) for r in train]))
    return [len(found), judged]


def speed_of(train):
    rates = sorted(r["tokens_per_s"] for r in train if stats.finite(r.get("tokens_per_s")))
    at = lambda share: rates[round(share * (len(rates) - 1))]
    return {"median": median(rates), "low": at(0.1), "high": at(0.9)} if rates else None


def layers_of(records):
    """The statistics of some of the steps that have them."""
    by_step = {}
    for r in records:
        by_step.setdefault(r["step"], {})[r["layer"]] = r
    steps = sorted(by_step)
    steps = [steps[i] for i in stats.thin(steps, STATISTICS)]
    layers = sorted(set.intersection(*(set(by_step[step]) for step in steps))) if steps else ()
    found = {key: [[by_step[step][i].get(key) for i in layers] for step in steps] for key in LAYERS}
    return {"step": steps} | {key: rows for key, rows in found.items() if any(map(any, rows))}


def evaluation_of(path):
    """What a report shows of eval.json; None without the file."""
    if not path.exists():
        return None
    found = run_directory.read_json(path, schema.EVALUATION)
    losses = found.get("loss_by_position") or []
    kept = {key: found[key] for key in ("loss", "windows", "data_fingerprint") if key in found}
    return kept | {"positions": [stats.mean_or_none(losses[a:b]) for a, b in position_ranges(len(losses))]}


def load(directory, arm=None, left_out=None):
    """Reads a run directory. Raises RunError if run.json or the log is unreadable; appends other errors to left_out."""
    directory, left_out = Path(directory), [] if left_out is None else left_out
    info = run_directory.read_run(directory)
    info = {key: info[key] for key in INFO if key in info}
    if "starts" in info:
        info["starts"] = [{key: start[key] for key in START if key in start} for start in info["starts"]]
    options, broken = option_history.history(info)[0][1], []
    records = run_directory.read_log(directory / "log.jsonl", broken)
    if broken:
        more = f"and {len(broken) - 1} more are not records" if broken[1:] else "is not a record"
        left_out.append(f"{directory}/log.jsonl: line {broken[0]} {more}")
    kept = kept_records(records)
    of = {kind: [r for r in kept if r["kind"] == kind] for kind in ("train", "val", "stats")}
    name = directory.resolve().name
    run = Run(name, arm or options["attention"], int(options["seed"]), float(options["lr"]), info, directory=directory)
    run.last = of["train"][-1]["step"] if of["train"] else 0
    losses = {r["step"]: r["loss"] for r in of["val"]}
    run.val = [{"step": step, "loss": loss} for step, loss in losses.items()]
    run.reads = [{"step": step, "data": data} for step, data in option_history.validations(info, records)]
    run.curve, run.layers, run.speed = curve_of(of["train"]), layers_of(of["stats"]), speed_of(of["train"])
    run.spikes = {key: spikes_of(of["train"], key) for key in ("loss", "grad_norm")}
    run.state = run_directory.state(directory, run.steps)[0]
    if run.state == "begun" and run_directory.locked(directory):
        run.state = "running"
    try:
        run.eval = evaluation_of(directory / "eval.json")
    except RunError as error:
        left_out.append(str(error))
    return run
