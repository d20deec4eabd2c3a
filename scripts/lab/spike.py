"""spike.py: finds the cause of a loss spike by experiment.

Starts from the checkpoint before the spike, with the options, threads, ranks and environment of the start that ran the
steps. The first replay changes nothing and must repeat the log bit for bit. Every other replay changes one thing
(--change of the trainer, or an option). A change that removes the spike names the cause; where it has parts (windows of
a batch, tensors of a layer, heads of a tensor) each part is tried alone.

  rise      the largest loss of step S and the AFTER steps that follow, minus the median of the 16 steps before S
  removes   the rise is at most a third of that of the unchanged replay; reduces: at most two thirds
  large     an update whose norm is more than twice the median of the measured ones before it: of the log
            (--stats-every) and of the unchanged replay
"""

import json
import math
import os
import re
import shlex
import shutil
import statistics
import struct
import subprocess
from pathlib import Path

from . import option_history, run_directory
from .cli import Parser, fail
from .run_directory import RunError
from .tensors import Tensors

BEFORE, SHOWN, INFINITE = 16, 60, 1e3
DESCRIPTION = """Replays a run from the checkpoint before a loss spike, bit for bit, then with one thing changed at a
time, and prints and draws which changes remove the spike."""
OFF = ("--checkpoint-every 0 --checkpoint-minutes 0 --val-every 0 --sample-every 0 --keep 0 --stats-every 1").split()
TURNED_OFF = [word[2:] for word in OFF if word.startswith("--")]
REPEATED = ("--nvls", "--no-memory-check")  # options of a single start: run.json has them in its command line only
OF_START = ("ranks", "threads", "environment")  # that change numbers, besides the options


def parse_arguments(words):
    parser = Parser(prog="lab spike", description=DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="run directory with a checkpoint before the spike")
    parser.add_argument("--step", type=int, metavar="S", help="step of the spike (default: that of the largest one)")
    parser.add_argument("--after", type=int, default=8, metavar="N", help="steps to replay after S (default: 8)")
    parser.add_argument("--trainer", default="./train_diffv2", metavar="PROGRAM", help="default: ./train_diffv2")
    parser.add_argument(
        "--launch", default="", metavar="COMMAND", help="starts the ranks (default: 'mpirun -n N' if the run had N > 1)"
    )
    parser.add_argument("--out", metavar="DIR", help="for replays, spike.json and spike.svg (default: RUN/spike_S)")
    a = parser.parse_args(words)
    if a.after < 0 or (a.step is not None and a.step < 1):
        parser.error("--step must be at least 1, and --after at least 0")
    return a


def losses_of(records, key="loss"):
    """{step: value} of the train records; infinite where it is null."""
    steps = (r for r in records if r["kind"] == "train")
    return {r["step"]: math.inf if r.get(key) is None else r[key] for r in steps}


def level(losses, step):
    before = [losses[s] for s in range(step - BEFORE, step) if math.isfinite(losses.get(s, math.inf))]
    return statistics.median(before) if before else None


def largest_spike(losses):
    """The step whose loss is farthest above the steps before it, in median absolute deviations of those."""
    best, found = 0, None
    for step, loss in losses.items():
        before = [losses[s] for s in range(step - 4 * BEFORE, step) if math.isfinite(losses.get(s, math.inf))]
        if len(before) < 8:
            continue
        middle = statistics.median(before)
        deviation = statistics.median(abs(x - middle) for x in before) + 1e-3
        distance = min((loss - middle) / deviation, INFINITE)
        if distance > best:
            best, found = distance, step
    if found is None or best < 6:
        raise RunError("no step has a loss far above those before it; --step S names one")
    return found


def changes_after(words, step):
    """--change of a command line, without the steps up to `step`."""
    at = words.index("--change") + 1 if "--change" in words else None
    text = words[at] if at else next((w.split("=", 1)[1] for w in words if w.startswith("--change=")), "")
    ranges = re.findall(r"(\d+)(?:-(\d+))?(:\S+)", text)
    return " ".join(f"{max(int(a), step + 1)}-{b or a}{rest}" for a, b, rest in ranges if int(b or a) > step)


def start_of(entry):
    """A start of run.json with its threads, which earlier programs wrote among its devices only."""
    found = re.search(r"CPU: (\d+) thread", "\n".join(entry.get("devices", [])))
    return {**({"threads": int(found[1])} if found else {}), **entry}


def mpirun(ranks):
    """A launch on this machine. Ranks are not bound to cores, which would limit their threads."""
    root = " --allow-run-as-root" if os.geteuid() == 0 else ""
    return f"mpirun{root} --oversubscribe --bind-to none -n {ranks}"


class Replays:
    """Replays of a run from a checkpoint up to step `last`."""

    def __init__(self, a):
        self.a, self.run = a, Path(a.run)
        self.info = run_directory.read_run(self.run)
        records = run_directory.read_log(self.run / "log.jsonl")
        self.losses, self.norms = losses_of(records), losses_of(records, "grad_norm")
        self.rates, self.updates = losses_of(records, "lr"), losses_of(records, "update_norm")
        if not self.losses:
            raise RunError(f"{self.run}/log.jsonl has no steps")
        self.step = a.step or largest_spike(self.losses)
        if self.step not in self.losses:
            raise RunError(f"{self.run}: the log has no step {self.step}; it ends at step {max(self.losses)}")
        self.level = level(self.losses, self.step)
        if self.level is None:
            raise RunError(f"step {self.step} has no steps before it to compare with")
        steps = [int(p.name[5:]) for p in (self.run / "checkpoints").glob("step_????????")]
        self.begin = max((s for s in steps if s < self.step), default=None)
        if self.begin is None:
            have = f"the oldest is of step {min(steps)}" if steps else "it has none"
            raise RunError(
                f"{self.run} has no checkpoint before step {self.step}: {have}; --checkpoint-every N --keep 0 keeps all"
            )
        self.last = min(self.step + a.after, max(self.losses))
        self.checkpoint = run_directory.checkpoint(self.run, self.begin)
        self.saved = run_directory.read_json(self.checkpoint / "trainer_state.json", {"options": {}})["options"]
        self.out = Path(a.out or self.run / f"spike_{self.step:08d}")
        self.done, self.tried = {}, 0
        self.in_force()

    def in_force(self):
        """What the start that made the spike chose. The replays end where a start that chose otherwise begins."""
        starts, entries = self.info.get("starts", []), []
        for begun, options in option_history.history(self.info):
            start = start_of(([s for s in starts if s["step"] == begun] or [self.info])[-1])
            numbers = {key: value for key, value in options.items() if key not in TURNED_OFF}
            chosen = numbers, changes_after(start["command_line"], self.begin), *map(start.get, OF_START)
            entries.append((begun, options, start, chosen))
        begun, self.options, self.start, chosen = [entry for entry in entries if entry[0] < self.step][-1]
        later = [entry[0] for entry in entries if self.step <= entry[0] < self.last and entry[3] != chosen]
        if begun > self.begin:
            print(
                f"note: the run was resumed after step {begun}, and its checkpoint of that step is gone: what changed "
                f"there applies to the replay from step {self.begin}"
            )
        if later:
            self.last = later[0]
            print(f"note: the run was resumed differently after step {self.last}: replays end there")
        ranks = self.start.get("ranks", 1)
        self.launch = self.a.launch or (mpirun(ranks) if ranks > 1 else "")
        if not self.a.launch and ranks > 1 and not shutil.which("mpirun"):
            raise RunError(f"the run had {ranks} ranks, and there is no mpirun: specify --launch COMMAND")
        self.environment = {**os.environ, **self.start.get("environment", {})}
        self.changes = changes_after(self.start["command_line"], self.begin)
        self.words = [word for word in self.start["command_line"] if word in REPEATED]
        self.words += [f"--threads={self.start['threads']}"] if "threads" in self.start else []
        for key, value in self.saved.items():
            now = self.options.get(key, value)
            if now == value or now is None or key in (*TURNED_OFF, "rollback"):
                continue
            flag = isinstance(now, bool)
            self.words.append(f"--{'no-' if now is False else ''}{key}" if flag else f"--{key}={now}")
        if self.options.get("rollback"):
            self.words.append("--rollback=1000:1000")  # a replay does not return to its checkpoint
        self.windows = self.options["total-batch"] // self.options["seq-len"]

    def replay(self, name, changes="", options=(), launch=None):
        """The records of a replay. The rise of its loss is added to self.done."""
        directory = self.out / f"replay_{self.tried:03d}"
        self.tried += 1
        to = run_directory.checkpoint(directory, self.begin)
        to.parent.mkdir(parents=True)
        shutil.copytree(self.checkpoint, to)
        shutil.copy(self.run / "run.json", directory)
        given = {word.split("=")[0] for word in options}
        words = [w for w in self.words if w.split("=")[0] not in given]
        changed = f"{self.changes} {changes}".strip()
        command = [*shlex.split(self.launch if launch is None else launch), self.a.trainer, "--out", str(directory)]
        command += ["--resume", "--stop-after", str(self.last), *OFF, *words, *options]
        command += ["--change", changed] if changed else []
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=self.environment)
        log = directory / "log.jsonl"
        records = run_directory.read_log(log) if log.exists() else []
        losses = losses_of(records)
        if not losses or (done.returncode and math.isfinite(max(losses.values()))):
            shutil.rmtree(directory)
            said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
            raise RunError(f"the replay '{name}' failed: {said}")
        for path in (directory / "checkpoints").glob("step_*"):
            shutil.rmtree(path)
        rise = min(max(losses.get(s, math.inf) for s in range(self.step, self.last + 1)) - self.level, INFINITE)
        self.done[name] = {"name": name, "changes": changes, "options": list(options), "rise": rise, "losses": losses}
        return records

    def verdict(self, name):
        rise, whole = self.done[name]["rise"], min(self.done["unchanged"]["rise"], 20)
        return "removes" if rise <= whole / 3 else "reduces" if rise <= whole * 2 / 3 else "keeps"

    def try_change(self, name, changes="", options=(), launch=None, depth=0):
        """The records of the replay; none if the trainer refuses the change."""
        try:
            records = self.replay(name, changes, options, launch)
        except RunError as error:
            print(f"{'  ' * depth}{error}")
            return []
        print(f"{'  ' * depth + name:<46} rise {self.done[name]['rise']:8.4f}  {self.verdict(name)} the spike")
        return records

    def removes(self, name):
        return name in self.done and self.verdict(name) == "removes"


def difference(r, records):
    """The first step whose loss or gradient norm differs from the log; None if there is none."""
    for now, before in ((losses_of(records), r.losses), (losses_of(records, "grad_norm"), r.norms)):
        for step in range(r.begin + 1, r.last + 1):
            if now.get(step) != before.get(step):
                return step
    return None


def describe(window, length, separator):
    """A window: its shard, position, and its tokens as text where they are bytes."""
    path, first = Path(window["file"]), window["first_token"]
    with open(path, "rb") as f:
        wide = struct.unpack("<2i", f.read(8))[1] != 1
        f.seek(1024 + first * (4 if wide else 2))
        tokens = [t for (t,) in struct.iter_unpack("<I" if wide else "<H", f.read(length * (4 if wide else 2)))]
    documents = 1 + tokens[1:].count(int(separator.split(":")[0])) if separator else None
    shown = bytes(tokens[:SHOWN]).decode("latin-1") if max(tokens) < 257 and 256 not in tokens[:SHOWN] else tokens[:12]
    count = f", {documents} document{'s' if documents > 1 else ''}" if documents else ""
    return f"{path}, tokens {first} to {first + length - 1}{count}: {shown!r}"


def of_batch(r, step, records):
    """The windows of a batch, as the event of its change has them."""
    found = [w for x in records if x.get("what") == "change" and x["step"] == step for w in x.get("windows", [])]
    return [describe(w, r.options["seq-len"], r.options.get("separator")) for w in found]


def find_windows(r, step, low, high, depth=1):
    """The windows of the batch, halved while one half alone explains the spike."""
    while low < high:
        middle, parts = (low + high) // 2, []
        for a, b in ((low, middle), (middle + 1, high)):
            name = f"windows {a} to {b} of step {step} replaced"
            r.try_change(name, f"{step}:replace={a}-{b}", depth=depth)
            if r.removes(name):
                parts.append((r.done[name]["rise"], a, b))
        if not parts:
            break
        _, a, b = min(parts)
        low, high, depth = a, b, depth + 1
    return low, high


def find_part(r, parts, change, what):
    """The part whose change removes most of the spike; None if none removes or reduces it."""
    for part in parts:
        r.try_change(f"{what} {part}", change(part), depth=1)
    tried = [(r.done[f"{what} {part}"]["rise"], part) for part in parts if f"{what} {part}" in r.done]
    _, part = min(tried, default=(None, None))
    return part if part and r.verdict(f"{what} {part}") != "keeps" else None


def tensor_shapes(checkpoint):
    return {name: x["shape"] for name, x in Tensors(checkpoint / "model.safetensors").header.items()}


def groups_of(names):
    """The beginnings of names that make a layer, and the names of the other tensors."""
    return list(dict.fromkeys(".".join(n.split(".")[:3]) + "." if n.startswith("model.layers.") else n for n in names))


def find_tensor(r, change, what):
    """(layer or tensor, tensor, head): the smallest part whose change removes the spike; None where there is none."""
    shapes = tensor_shapes(r.checkpoint)
    group = find_part(r, groups_of(shapes), change, what)
    tensor = head = None
    if group:
        inner = [n for n in shapes if n.startswith(group)]
        tensor = inner[0] if len(inner) == 1 else find_part(r, inner, change, what)
    if tensor and tensor.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        D = json.loads((r.checkpoint / "config.json").read_text()).get("head_dim")
        rows = shapes[tensor][0]
        if D and rows % D == 0 and rows > D:
            head = find_part(r, [f"{tensor}[{i}:{i + D}]" for i in range(0, rows, D)], change, what)
    return head or tensor or group


def rate_jump(r):
    """(step, factor) of the largest rise of the learning rate between the checkpoint and the spike."""
    factors = [(r.rates[s] / r.rates[s - 1], s) for s in range(max(2, r.begin), r.step + 1) if r.rates.get(s - 1)]
    factor, step = max(factors, default=(1, None))
    return (step, factor) if factor > 1.5 else (None, 1)


def other_ranks(r):
    """A launch with two ranks, and its options; None if the batch or this machine does not allow it."""
    B = r.options["batch-size"]
    if r.launch or not shutil.which("mpirun"):
        return None
    if r.windows % (2 * B) and B % 2:
        return None
    return mpirun(2), () if r.windows % (2 * B) == 0 else (f"--batch-size={B // 2}",)


def experiments(r, records):
    """Tries each change alone. Returns the windows of the batch of the spike."""
    every, S = f"{r.begin + 1}-{r.last}", r.step
    norms = [x["update_norm"] for x in records if x["kind"] == "train" and x["step"] < S and x.get("update_norm")]
    jump, factor = rate_jump(r)
    windows = of_batch(r, S, r.try_change(f"windows of step {S} reordered", f"{S}:order=reverse"))
    for step in (S, S - 1):
        if step > r.begin:
            r.try_change(f"windows of step {step} replaced", f"{step}:replace=0-{r.windows - 1}")
    precisions = ("fp32", "bf16", "fp8")  # a GPU program has fp8 and one of the others
    for wider in precisions[: precisions.index(r.options.get("gemm", "fp32"))]:
        r.try_change(f"products in {wider}", options=[f"--gemm={wider}"])
    if jump and jump > r.begin:
        r.try_change("the rate before its jump", f"{jump}-{r.last}:lr={1 / factor:.9g}")
    r.try_change("half the rate", f"{every}:lr=0.5")
    if norms:
        r.try_change("updates clipped", f"{every}:update-norm={min(norms):.9g}")
    r.try_change("moments reset", f"{r.begin + 1}:moments=0")
    ranks = other_ranks(r)
    if ranks:
        r.try_change("two ranks", options=ranks[1], launch=ranks[0])
    return windows


def first_large(r, records):
    """The first steps, or None, of the unchanged replay: (large update, third of the rise of the loss); and a line."""
    norms = {**r.updates, **losses_of(records, "update_norm")}
    norms, losses = {s: x for s, x in sorted(norms.items()) if math.isfinite(x)}, r.done["unchanged"]["losses"]
    limit = r.level + r.done["unchanged"]["rise"] / 3
    loss = next((s for s in range(r.begin + 1, r.last + 1) if losses.get(s, math.inf) >= limit), None)
    for step in (s for s in norms if s > r.begin):
        before = [norms[s] for s in norms if s < step][-4 * BEFORE :]
        if len(before) >= 4 and norms[step] > 2 * statistics.median(before):
            times = norms[step] / statistics.median(before)
            found = f"first large update: step {step}, {times:.3g} times the median of those before it"
            return (step, loss), f"{found}; the loss has a third of its rise at step {loss}"
    return (None, loss), "no update is more than twice as large as the median of the measured ones before it"


def growth_of_logits(r, part, records):
    """What the largest logit of the part's layer does, if the part makes queries or keys."""
    layer = re.match(r"model\.layers\.(\d+)\..*[qk]_proj", part)  # YOCO's keys are of many layers
    mine = [x for x in records if x["kind"] == "stats" and layer and x["layer"] == int(layer[1])]
    found = [x["logit_max"] for x in mine if x["logit_max"] is not None]
    if not found:
        return ""
    grows = "grow" if "[" in part else "are those of the layer: they grow"
    return f", whose logits {grows}: the largest |logit| goes from {found[0]:.4g} to {max(found):.4g}"


def cause_in_data(r, windows):
    """The windows whose replacement removes the spike; None if there are none."""
    for step in (r.step, r.step - 1):
        if r.removes(f"windows of step {step} replaced"):
            low, high = find_windows(r, step, 0, r.windows - 1)
            if step != r.step:
                more = r.replay(f"windows of step {step} reordered", f"{step}:order=reverse")
                windows = of_batch(r, step, more)
            return f"the data of step {step}: " + "; ".join(f"window {i}, {windows[i]}" for i in range(low, high + 1))
    return None


def cause(r, records, windows):
    """The cause in one sentence."""
    jump, factor = rate_jump(r)
    if r.removes("the rate before its jump"):
        before, after = r.rates[jump - 1], r.rates[jump]
        return f"the learning rate: at step {jump} it rises from {before:.4g} to {after:.4g}"
    data = cause_in_data(r, windows)
    wider = [precision for precision in ("bf16", "fp32") if r.removes(f"products in {precision}")]
    if wider:
        with_data = f"; it occurs with {data}" if data else ""
        none = f"in {' and '.join(wider)} there is no spike"
        return f"the precision of the products, --gemm {r.options['gemm']}: {none}{with_data}"
    if data:
        return data
    every = f"{r.begin + 1}-{r.last}"
    if r.removes("moments reset"):
        part = find_tensor(r, lambda t: f"{r.begin + 1}:moments@{t}=0", "moments reset:")
        return f"Adam's moments in the checkpoint of step {r.begin}" + (f", those of {part}" if part else "")
    part = find_tensor(r, lambda t: f"{every}:lr@{t}=0", "frozen:")
    if part:
        clipped = "; clipping all updates removes the spike too" * r.removes("updates clipped")
        return f"the updates of {part}" + growth_of_logits(r, part, records) + clipped
    for name in ("updates clipped", "half the rate", "two ranks"):
        if r.removes(name):
            return f"the size of the updates: the spike is gone with {name}" if name != "two ranks" else "rounding"
    return "none of these changes removes the spike; an earlier checkpoint may be needed"


def draw(r, path):
    """Loss curves as SVG: the log, and each replay in the colour of its verdict."""
    width, height, left, top = 800, 420, 60, 20
    first = max(1, r.begin - BEFORE)
    values = [r.losses[s] for s in range(first, r.last + 1) if s in r.losses]
    values += [y for x in r.done.values() for y in x["losses"].values()]
    shown = list(filter(math.isfinite, values))
    low, high = min(shown), max(shown)

    def points(losses):
        return " ".join(
            f"{left + (s - first) / max(1, r.last - first) * (width - left - 20):.1f},"
            f"{top + (high - min(y, high)) / max(high - low, 1e-9) * (height - 2 * top - 20):.1f}"
            for s, y in sorted(losses.items())
            if first <= s <= r.last
        )

    colours = {"removes": "#2a8a3e", "reduces": "#c08a1a", "keeps": "#bbbbbb"}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for name, x in r.done.items():
        colour = colours[r.verdict(name)]
        lines.append(
            f'<polyline points="{points(x["losses"])}" fill="none" stroke="{colour}" stroke-width="1.5">'
            f"<title>{name}</title></polyline>"
        )
    lines.append(f'<polyline points="{points(r.losses)}" fill="none" stroke="black" stroke-width="2"/>')
    lines += [
        f'<text x="4" y="{top + 4}">{high:.3f}</text><text x="4" y="{height - 2 * top}">{low:.3f}</text>',
        f'<text x="{left}" y="{height - 8}">loss of steps {first} to {r.last}; black: the log; green: replays that '
        "remove the spike; yellow: reduce; grey: keep</text></svg>",
    ]
    path.write_text("\n".join(lines) + "\n")


def main(words):
    a = parse_arguments(words)
    try:
        if not os.path.isfile(a.trainer) or not os.access(a.trainer, os.X_OK):
            raise RunError(f"{a.trainer}: no such program; build it with 'make', or specify --trainer")
        r = Replays(a)
        if (r.out / "spike.json").exists():
            raise RunError(f"{r.out} has the result of another search; remove it, or use another --out")
        for path in r.out.glob("replay_*"):  # of a search that was interrupted
            shutil.rmtree(path)
        rise = max(r.losses[s] for s in range(r.step, r.last + 1) if s in r.losses) - r.level
        print(
            f"step {r.step}: loss {r.losses[r.step]:.4f}, up to step {r.last} at most {rise:.4f} above the {BEFORE} "
            f"steps before; replays start at the checkpoint of step {r.begin}"
        )
        if rise <= 0:
            raise RunError(f"the loss of the steps {r.step} to {r.last} is not above that of the steps before")
        records = r.replay("unchanged")
        differs = difference(r, records)
        if differs and any(record.get("what") == "mixture_epochs" for record in records):
            raise RunError(
                f"the replay differs from the log at step {differs}, because the program of the run repeated some "
                "windows of a mixture and left out others: name the program with --trainer"
            )
        said = f"differs from the log at step {differs}" if differs else "repeats the log bit for bit"
        print(f"{'unchanged':<46} rise {r.done['unchanged']['rise']:8.4f}  {said}")
        started = start_of(run_directory.read_run(r.out / "replay_000")["starts"][-1])
        for key in ("revision", *OF_START):
            if started.get(key) != r.start.get(key):
                print(f"note: the run has {key} {r.start.get(key)}, its replays {started.get(key)}")
        large, words = first_large(r, records)
        print(words)
        if differs and differs <= r.step and r.done["unchanged"]["rise"] <= rise / 3:
            found = (
                f"outside of the program: a replay has no spike, and differs from the log from step {differs} on "
                "(a fault of memory, of a device, or other software)"
            )
        else:
            found = cause(r, records, experiments(r, records))
            if f"windows of step {r.step} replaced" not in r.done:
                found += "; the data could not be tested"
        print(f"cause: {found}")
        result = {"run": str(r.run), "step": r.step, "checkpoint": r.begin, "level": r.level, "cause": found}
        result["first_large_update"], result["first_large_loss"] = large
        log = {s: x for s, x in r.losses.items() if r.begin < s <= r.last}
        result["log"] = {s: x if math.isfinite(x) else None for s, x in log.items()}
        verdicts = [{**x, "verdict": r.verdict(x["name"])} for x in r.done.values()]
        for x in verdicts:
            x["losses"] = {s: y if math.isfinite(y) else None for s, y in x["losses"].items()}
        run_directory.write_atomic(r.out / "spike.json", json.dumps({**result, "replays": verdicts}, indent=1) + "\n")
        draw(r, r.out / "spike.svg")
        print(f"{r.out}: spike.json and spike.svg")
    except RunError as error:
        fail("lab spike", str(error))
    except OSError as error:
        fail("lab spike", f"{error.filename}: {error.strerror}")
    return 0
