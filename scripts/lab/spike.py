"""spike.py: finds the cause of a loss spike by experiment.

Replays a run from the checkpoint before a loss spike, bit for bit, then with one thing changed at a time, and prints
and draws which changes remove the spike.

Replays have the options, threads, ranks and environment of the start that ran the steps. A change that removes the
spike names the cause; where it has parts (windows of a batch, tensors of a layer, heads of a tensor) each is tried.

  rise      the largest loss of step S and the AFTER steps that follow, minus the median of the 16 steps before S
  removes   the rise is at most a third of the rise of the unchanged replay; reduces: at most two thirds
"""

import json
import math
import os
import re
import shlex
import shutil
import struct
import subprocess
from pathlib import Path
from statistics import median

import python_environment

from . import option_history, run_directory
from .cli import Parser, fail
from .run_directory import RunError
from .scheduler import AS_ROOT

np = python_environment.Later("numpy")
BEFORE, SHOWN, INFINITE = 16, 60, 1e3
OFF = "--checkpoint-every 0 --checkpoint-minutes 0 --val-every 0 --sample-every 0 --keep 0 --stats-every 1".split()
REPLACED = [word[2:] for word in OFF[::2]] + ["rollback"]  # options of a run that its replays do not take over
REPEATED = ("--no-deterministic", "--no-memory-check")  # a resume does not adopt all of their effect
OF_START = ("ranks", "threads", "environment")  # that change numbers, besides the options
MPIRUN = "mpirun --oversubscribe --bind-to none -n"  # cores bound to a rank would limit its threads
COLORS = {"removes": "green", "reduces": "orange", "keeps": "silver"}  # of each verdict
LEGEND = "black: the log; green: removes the spike; orange: reduces it; grey: keeps it"


def numbers_of(records, key="loss"):
    """{step: number} of the train records; infinite where it is null."""
    return {r["step"]: math.inf if r.get(key) is None else r[key] for r in records if r["kind"] == "train"}


def losses_before(losses, step, count=BEFORE):
    """The finite losses of the `count` steps before a step."""
    return [losses[s] for s in range(step - count, step) if math.isfinite(losses.get(s, math.inf))]


def largest_spike(losses):
    """The step whose loss is farthest above the steps before it, in median absolute deviations of those."""
    distances = {}
    for step, loss in losses.items():
        before = losses_before(losses, step, 4 * BEFORE)
        if len(before) >= 8:
            middle = median(before)
            distances[step] = min((loss - middle) / (median(abs(x - middle) for x in before) + 1e-3), INFINITE)
    step = max(distances, key=distances.get, default=None)
    if step is None or distances[step] < 6:
        raise RunError("no step has a loss far above those before it; --step S names one")
    return step


def changes_after(words, step):
    """--change of a command line, without the steps up to `step`."""
    at = words.index("--change") + 1 if "--change" in words else None
    text = words[at] if at else next((w.split("=", 1)[1] for w in words if w.startswith("--change=")), "")
    ranges = re.findall(r"(\d+)(?:-(\d+))?(:\S+)", text)
    return " ".join(f"{max(int(a), step + 1)}-{b or a}{rest}" for a, b, rest in ranges if int(b or a) > step)


class Search:
    """Replays of a run from the checkpoint of step `begin` up to step `last`, and what follows from them."""

    def __init__(self, a):
        self.a, self.run = a, Path(a.run)
        self.info = run_directory.read_run(self.run)
        self.log = run_directory.read_log(self.run / "log.jsonl")
        self.losses, self.rates = numbers_of(self.log), numbers_of(self.log, "lr")
        if not self.losses:
            raise RunError(f"{self.run}/log.jsonl has no steps")
        self.step = a.step or largest_spike(self.losses)
        if self.step not in self.losses:
            raise RunError(f"{self.run}: the log has no step {self.step}; it ends at step {max(self.losses)}")
        before = losses_before(self.losses, self.step)
        if not before:
            raise RunError(f"step {self.step} has no steps before it to compare with")
        self.level = median(before)
        steps = [int(p.name[5:]) for p in (self.run / "checkpoints").glob("step_????????")]
        self.begin = max((s for s in steps if s < self.step), default=None)
        if self.begin is None:
            have = f"the oldest is of step {min(steps)}" if steps else "it has none"
            what = f"{self.run} has no checkpoint before step {self.step}"
            raise RunError(f"{what}: {have}; --checkpoint-every N --keep 0 keeps all")
        self.last = min(self.step + a.after, max(self.losses))
        self.checkpoint = run_directory.checkpoint(self.run, self.begin)
        self.out = Path(a.out or self.run / f"spike_{self.step:08d}")
        self.done, self.records = {}, {}  # of each replay: its entry in spike.json, and its log
        steps = range(self.begin + 1, self.step + 1)
        rises = [(self.rates[s] / self.rates[s - 1], s) for s in steps if self.rates.get(s - 1) and s in self.rates]
        self.factor, self.jump = max(rises, default=(1, None))  # the largest rise of the learning rate, and its step
        self.follow_start()

    def follow_start(self):
        """Takes over what the start that ran the step chose. Replays end where a start that chose otherwise begins."""
        starts, chosen = {s["step"]: s for s in self.info.get("starts", [])}, None
        for begun, options in option_history.history(self.info):
            start = starts.get(begun, self.info)
            numbers = {key: value for key, value in options.items() if key not in REPLACED}
            choice = numbers, changes_after(start.get("command_line", []), self.begin), *map(start.get, OF_START)
            if begun < self.step:
                self.options, self.start, chosen = options, start, choice
            elif begun < self.last and choice != chosen:
                self.last = begun
                print(f"note: the run was resumed differently after step {self.last}: replays end there")
        ranks, words = self.start.get("ranks", 1), self.start.get("command_line", [])
        if ranks > 1 and not self.a.launch and not shutil.which("mpirun"):
            raise RunError(f"the run had {ranks} ranks, and there is no mpirun: specify --launch COMMAND")
        self.launch = self.a.launch or (f"{MPIRUN} {ranks}" if ranks > 1 else "")
        self.changes = changes_after(words, self.begin)
        self.words = [word for word in words if word in REPEATED]
        self.words += [f"--threads={self.start['threads']}"] if "threads" in self.start else []
        self.words += ["--rollback=1000:1000"] if self.options.get("rollback") else []  # too many for a replay
        saved = run_directory.read_json(self.checkpoint / "trainer_state.json", {"options": {}})["options"]
        for key, value in option_history.renamed(saved).items():
            now = self.options.get(key, value)
            if now not in (value, None) and key not in REPLACED:
                flag = f"--{key}" if now else f"--no-{key}"
                self.words.append(flag if isinstance(now, bool) else f"--{key}={now}")
        self.windows = self.options["total-batch"] // self.options["seq-len"]

    def replay(self, name, changes="", options=(), launch="", depth=0):
        """The entry of a replay in spike.json. If the trainer refuses a change, prints the reason and returns None."""
        directory = self.out / f"replay_{len(self.done):03d}"
        shutil.copytree(self.checkpoint, run_directory.checkpoint(directory, self.begin))
        shutil.copy(self.run / "run.json", directory)
        command = [*shlex.split(launch or self.launch), self.a.trainer, "--out", str(directory)]
        command += ["--resume", "--stop-after", str(self.last), *OFF]
        command += {word.split("=")[0]: word for word in [*self.words, *options]}.values()
        changed = f"{self.changes} {changes}".strip()
        command += ["--change", changed] if changed else []
        environment = {**os.environ, **AS_ROOT, **self.start.get("environment", {})}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        records = run_directory.read_log(directory / "log.jsonl")
        losses = numbers_of(records)
        if not losses or (done.returncode and math.isfinite(max(losses.values()))):
            shutil.rmtree(directory)
            said = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
            if not self.done:
                raise RunError(f"the replay '{name}' failed: {said}")
            print(f"{'  ' * depth}the replay '{name}' failed: {said}")
            return None
        shutil.rmtree(directory / "checkpoints")
        rise = min(max(losses.get(s, math.inf) for s in range(self.step, self.last + 1)) - self.level, INFINITE)
        entry = {"name": name, "changes": changes, "options": list(options), "rise": rise, "losses": losses}
        whole = min(self.done.setdefault("unchanged", entry)["rise"], 20)
        entry["verdict"] = "removes" if rise <= whole / 3 else "reduces" if rise <= whole * 2 / 3 else "keeps"
        self.done[name], self.records[name] = entry, records
        if name != "unchanged":
            print(f"{'  ' * depth + name:<46} rise {rise:8.4f}  {entry['verdict']} the spike")
        return entry

    def narrow(self, part, parts_of, change, verdicts, depth=1):
        """The smallest part with one of the verdicts; change(part): the name and the --change of its replay."""
        entries = {smaller: self.replay(*change(smaller), depth=depth) for smaller in parts_of(part)}
        rises = {smaller: entry["rise"] for smaller, entry in entries.items() if entry and entry["verdict"] in verdicts}
        return self.narrow(min(rises, key=rises.get), parts_of, change, verdicts, depth + 1) if rises else part

    def first_large(self):
        """The first steps, or None, of an update more than twice as large as the median of the measured ones before it,
        and of a third of the rise of the loss; and a line on them."""
        norms = numbers_of([*self.log, *self.records["unchanged"]], "update_norm")
        norms = {s: x for s, x in sorted(norms.items()) if 0 < x < math.inf}
        losses, third = self.done["unchanged"]["losses"], self.level + self.done["unchanged"]["rise"] / 3
        steps = range(self.begin + 1, self.last + 1)
        loss = next((s for s in steps if losses.get(s, math.inf) >= third), None)
        for step in steps:
            before = [norms[s] for s in norms if s < step][-4 * BEFORE :]
            if len(before) >= 4 and norms.get(step, 0) > 2 * median(before):
                times = f"{norms[step] / median(before):.3g} times the median of those before it"
                line = f"first large update: step {step}, {times}; the loss has a third of its rise at step {loss}"
                return step, loss, line
        return None, loss, "no update is more than twice as large as the median of the measured ones before it"

    def experiments(self):
        """The changes of a batch or of all tensors: (name, --change, options, launch)."""
        every, step, batch = f"{self.begin + 1}-{self.last}", self.step, self.options["batch-size"]
        yield f"windows of step {step} reordered", f"{step}:order=reverse"
        for s in range(step, max(step - 2, self.begin), -1):
            yield f"windows of step {s} replaced", f"{s}:replace=0-{self.windows - 1}"
        precisions = ("fp32", "bf16", "fp8")  # a GPU program has fp8 and one of the others
        for wider in precisions[: precisions.index(self.options.get("matmul-dtype", "fp32"))]:
            yield f"products in {wider}", "", [f"--matmul-dtype={wider}"]
        if self.factor > 1.5:
            yield "the rate before its jump", f"{self.jump}-{self.last}:lr={1 / self.factor:.9g}"
        yield "half the rate", f"{every}:lr=0.5"
        norms = numbers_of(self.records["unchanged"], "update_norm").items()
        if norms := [x for s, x in norms if s < step and 0 < x < math.inf]:
            yield "updates clipped", f"{every}:update-norm={min(norms):.9g}"
        yield "moments reset", f"{self.begin + 1}:moments=0"
        whole = self.windows % (2 * batch) == 0
        if not self.launch and shutil.which("mpirun") and (whole or batch % 2 == 0):
            yield "two ranks", "", [] if whole else [f"--batch-size={batch // 2}"], f"{MPIRUN} 2"

    def cause(self):
        """The cause in one sentence, from the experiments."""
        removed = {name for name, entry in self.done.items() if entry["verdict"] == "removes"}
        if "the rate before its jump" in removed:
            before, after = self.rates[self.jump - 1], self.rates[self.jump]
            return f"the learning rate: at step {self.jump} it rises from {before:.4g} to {after:.4g}"
        steps = [step for step in (self.step, self.step - 1) if f"windows of step {step} replaced" in removed]
        data = f"the data of step {steps[0]}: {self.data_of(steps[0])}" if steps else ""
        if wider := [name for name in ("bf16", "fp32") if f"products in {name}" in removed]:
            none = f"in {' and '.join(wider)} there is no spike" + (f"; it occurs with {data}" if data else "")
            return f"the precision of the products, --matmul-dtype {self.options['matmul-dtype']}: {none}"
        if data:
            return data
        if "moments reset" in removed:
            part = self.part_of_model("moments reset:", f"{self.begin + 1}:moments")
            return f"Adam's moments in the checkpoint of step {self.begin}" + (f", those of {part}" if part else "")
        if part := self.part_of_model("frozen:", f"{self.begin + 1}-{self.last}:lr"):
            clipped = "; clipping all updates removes the spike too" if "updates clipped" in removed else ""
            return f"the updates of {part}{self.growth_of_logits(part)}{clipped}"
        for name in ("updates clipped", "half the rate"):
            if name in removed:
                return f"the size of the updates: the spike is gone with {name}"
        none = "none of these changes removes the spike; an earlier checkpoint may be needed"
        return "rounding" if "two ranks" in removed else none

    def data_of(self, step):
        """The windows of a batch that explain the spike. The batch is halved while one half alone does."""
        halves = lambda x: [(x[0], sum(x) // 2), (sum(x) // 2 + 1, x[1])] if x[0] < x[1] else []
        change = lambda x: (f"windows {x[0]} to {x[1]} of step {step} replaced", f"{step}:replace={x[0]}-{x[1]}")
        low, high = self.narrow((0, self.windows - 1), halves, change, ["removes"])
        reordered = f"windows of step {step} reordered"  # its log names the shards
        if reordered not in self.done:
            self.replay(reordered, f"{step}:order=reverse")
        events = [x for x in self.records[reordered] if x.get("what") == "change" and x["step"] == step]
        windows = [window for event in events for window in event.get("windows", [])]
        return "; ".join(f"window {i}, {described(windows[i], self.options)}" for i in range(low, high + 1))

    def part_of_model(self, what, key):
        """The layer, tensor or head whose change reduces the spike; None if there is none."""
        with open(self.checkpoint / "model.safetensors", "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        shapes = {name: x["shape"] for name, x in header.items() if name != "__metadata__"}
        size = self.options["head-dim"]

        def parts_of(part):
            if part is None:  # layers, and the tensors outside of them
                return list(dict.fromkeys(re.sub(r"^(model\.layers\.\d+\.).*", r"\1", name) for name in shapes))
            if part.endswith("."):
                return [name for name in shapes if name.startswith(part)]
            rows = shapes[part][0] if re.search(r"[qkv]_proj\.weight$", part) else 0
            return [f"{part}[{i}:{i + size}]" for i in range(0, rows, size)] if rows > size else []

        change = lambda part: (f"{what} {part}", f"{key}@{part}=0")
        return self.narrow(None, parts_of, change, ["removes", "reduces"])

    def growth_of_logits(self, part):
        """What the largest logit of the part's layer does, if the part makes queries or keys."""
        layer = re.match(r"model\.layers\.(\d+)\..*[qk]_proj", part)  # YOCO's keys are of many layers
        stats = [x for x in self.records["unchanged"] if x["kind"] == "stats"]
        found = [x["logit_max"] for x in stats if layer and x["layer"] == int(layer[1]) and x["logit_max"] is not None]
        grow = "grow" if "[" in part else "are those of the layer: they grow"
        size = f"from {found[0]:.4g} to {max(found):.4g}" if found else ""
        return f", whose logits {grow}: the largest |logit| goes {size}" if found else ""

    def find(self):
        """Finds the cause, prints it, and writes the files."""
        if (self.out / "spike.json").exists():
            raise RunError(f"{self.out} has the result of another search; remove it, or use another --out")
        for path in self.out.glob("replay_*"):  # of a search that was interrupted
            shutil.rmtree(path)
        step, last = self.step, self.last
        log = {s: x for s, x in self.losses.items() if self.begin < s <= last}
        rise = max(x for s, x in log.items() if s >= step) - self.level
        above = f"up to step {last} at most {rise:.4f} above the {BEFORE} steps before"
        print(f"step {step}: loss {log[step]:.4f}, {above}; replays start at the checkpoint of step {self.begin}")
        if rise <= 0:
            raise RunError(f"the loss of the steps {step} to {last} is not above that of the steps before")
        left, records = self.replay("unchanged")["rise"], self.records["unchanged"]
        pairs = [[numbers_of(x, key) for x in (records, self.log)] for key in ("loss", "grad_norm")]
        differs = next((s for now, before in pairs for s in log if now.get(s) != before.get(s)), None)
        said = f"differs from the log at step {differs}" if differs else "repeats the log bit for bit"
        print(f"{'unchanged':<46} rise {left:8.4f}  {said}")
        started = run_directory.read_run(self.out / "replay_000")["starts"][-1]
        for key in ("revision", *OF_START):
            if started.get(key) != self.start.get(key):
                print(f"note: the run has {key} {self.start.get(key)}, its replays {started.get(key)}")
        large, risen, line = self.first_large()
        print(line)
        if differs and differs <= step and left <= rise / 3:
            where = f"a replay has no spike, and differs from the log from step {differs} on"
            cause = f"outside of the program: {where} (a fault of memory, of a device, or other software)"
        else:
            for change in self.experiments():
                self.replay(*change)
            tested = f"windows of step {step} replaced" in self.done
            cause = self.cause() + ("" if tested else "; the data could not be tested")
        print(f"cause: {cause}")
        finite = lambda losses: {s: x if math.isfinite(x) else None for s, x in losses.items()}
        found = {"run": str(self.run), "step": step, "checkpoint": self.begin, "level": self.level, "cause": cause}
        found |= {"first_large_update": large, "first_large_loss": risen, "log": finite(log)}
        found["replays"] = [{**x, "losses": finite(x["losses"])} for x in self.done.values()]
        self.draw(self.out / "spike.svg")
        run_directory.write_atomic(self.out / "spike.json", json.dumps(found, indent=1) + "\n")
        print(f"{self.out}: spike.json and spike.svg")

    def draw(self, path):
        """The loss curves: of the log, and of each replay in the color of its verdict."""
        from .figures import Figure, label

        log = {s: x for s, x in self.losses.items() if self.begin - BEFORE <= s <= self.last}
        curves = [(x["losses"], COLORS[x["verdict"]]) for x in self.done.values()] + [(log, "black")]
        high = max(x for losses, _ in curves for x in losses.values() if x < math.inf)
        figure = Figure("spike", "", "")
        for losses, color in curves:
            figure.panels[0].plot(losses.keys(), [min(x, high) for x in losses.values()], color=color)
        label(figure.panels[0], "step", "training loss, nats", title=LEGEND)
        run_directory.write_atomic(path, figure.text())


def described(window, options):
    """The shard of a window, its position, and its tokens, as text where they are bytes."""
    path, first, length = Path(window["file"]), window["first_token"], options["seq-len"]
    dtype = np.dtype("<u2" if np.fromfile(path, "<i4", 2)[1] == 1 else "<u4")
    tokens = np.fromfile(path, dtype, length, offset=1024 + first * dtype.itemsize).tolist()
    documents = 1 + tokens[1:].count(int(options["separator"].split(":")[0])) if options.get("separator") else 0
    count = f", {documents} document{'s' if documents > 1 else ''}" if documents else ""
    shown = bytes(tokens[:SHOWN]).decode("latin-1") if max(tokens) < 257 and 256 not in tokens[:SHOWN] else tokens[:12]
    return f"{path}, tokens {first} to {first + length - 1}{count}: {shown!r}"


def main(words):
    parser = Parser(prog="lab spike", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", metavar="RUN", help="run directory with a checkpoint before the spike")
    parser.add_argument("--step", type=int, metavar="S", help="step of the spike (default: that of the largest one)")
    parser.add_argument("--after", type=int, default=8, metavar="N", help="steps to replay after S (default: 8)")
    parser.add_argument("--trainer", default="./train_diffv2", metavar="PROGRAM", help="default: ./train_diffv2")
    launch = "starts the ranks (default: 'mpirun -n N' if the run had N > 1)"
    parser.add_argument("--launch", default="", metavar="COMMAND", help=launch)
    parser.add_argument("--out", metavar="DIR", help="for replays, spike.json and spike.svg (default: RUN/spike_S)")
    a = parser.parse_args(words)
    if a.after < 0 or (a.step is not None and a.step < 1):
        parser.error("--step must be at least 1, and --after at least 0")
    python_environment.ensure("lab")
    try:
        if not shutil.which(a.trainer):
            raise RunError(f"{a.trainer}: no such program; build it with 'make', or specify --trainer")
        Search(a).find()
    except RunError as error:
        fail("lab spike", str(error))
    except OSError as error:
        fail("lab spike", f"{error.filename}: {error.strerror}")
    return 0
