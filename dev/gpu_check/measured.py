"""The parts of a check that measure: models, PyTorch beside them, operations, where a step's time goes."""

import os
import shlex
import statistics
import subprocess
import threading

from proven import find_tool, json_lines, last_line
from runner import OutOfTime, Skip, die_with_me, end

# (preset, T, key/value heads): half of the preset's heads, so that all variants share them
SIZES = [("1.4b", 2048, 8), ("3b", 4096, 12), ("124m", 1024, 6), ("3b", 2048, 12)]
TINY = [("tiny", 16, 2)]
UTILISATION, AHEAD, BEHIND, BANDWIDTH = 0.55, 1.10, 0.95, 0.85  # the targets


def bench(check, part, limit, *arguments):
    """(the records that the benchmark has printed, whether it came to its end); that it did not is said."""
    status, text = check.run([*check.commands["BENCH_CUDA"], *arguments], limit)
    what = " ".join(str(a) for a in arguments)
    if status is None:
        part.check(f"bench_cuda {what}", False, f"stopped after {limit} s")
    elif status != 0:
        part.check(f"bench_cuda {what}", False, last_line(text))
    return json_lines(text), status == 0


def target(part, what, value, least, shown):
    """A target is a finding, not a check: missing one is no defect of the program."""
    part.record(
        {
            "table": "facts",
            "what": f"target: {what}",
            "value": f"{shown(value)}, wanted {shown(least)}: {'reached' if value >= least else 'missed'}",
        }
    )


def percent(x):
    return f"{100 * x:.1f}%"


# ---------------------------------------------------------------------------------------------------
# models


def models(check, part):
    for preset, T, NKV in TINY if check.pretend else SIZES:
        case = f"{preset} T {T}"
        if not part.pending(case):
            continue
        cases = [f"{a},{NKV},1" for a in ("baseline", "diff_v1", "diff_v2")] + [
            f"baseline,{NKV},2",
            f"diff_v2,{NKV},1,fast",
        ]
        rows, peak, left = [], None, cases
        while left:  # a model that fails ends its program: the others run without it
            found, ended = bench(check, part, 300, "model", preset, T, *left)
            peak = max((r["rate"] for r in found if r["table"] == "peaks" and r["unit"] == "TFLOP/s"), default=peak)
            new = [r for r in found if r["table"] == "models"]
            rows += new
            left = [] if ended else left[sum(r["what"] == "forward" for r in new) + 1 :]
        for r in rows:
            r["share"] = r["tflops"] / peak if peak else None
            part.record(r)
        training = {r["model"]: r for r in rows if r["what"] == "training"}
        part.check(
            f"{case}: all models ran",
            len(training) == len(cases),
            f"{len(training)} of {len(cases)}" if len(training) < len(cases) else "",
        )
        ours, twin = training.get("diff_v2"), training.get("baseline with 2 NH heads")
        if peak is not None:
            part.record({"table": "facts", "what": f"{case}: measured product, TFLOP/s", "value": f"{peak:.0f}"})
        if ours and twin:
            ratio = ours["tokens_per_s"] / twin["tokens_per_s"]
            target(part, f"{case}: tokens/s of diff_v2, of a baseline with as many query heads", ratio, BEHIND, percent)
        fast = training.get("diff_v2, not deterministic")
        if ours and fast:
            part.record(
                {
                    "table": "facts",
                    "what": f"{case}: tokens/s of diff_v2 with --no-deterministic, of the default",
                    "value": percent(fast["tokens_per_s"] / ours["tokens_per_s"]),
                }
            )
        if ours and ours["device_share"] is not None and preset == "1.4b":
            target(
                part,
                f"{case}: diff_v2, share of the device's dense bf16 peak",
                ours["device_share"],
                UTILISATION,
                percent,
            )
        part.end(case)


# ---------------------------------------------------------------------------------------------------
# peer


class Asked:
    """A program that does a step for each line on its stdin and prints its milliseconds."""

    def __init__(self, check, command):
        self.check, self.lines, self.errors = check, [], []
        words = [str(w) for w in command]
        check.store.log.write(f"$ {shlex.join(words)}\n")
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=check.root,
            env=check.environment(words),
            start_new_session=True,
            preexec_fn=die_with_me,
        )
        self.arrived = threading.Condition()
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=self.read, args=(stream, lines), daemon=True).start()

    def read(self, stream, lines):
        for line in stream:
            with self.arrived:
                lines.append(line.strip())
                self.arrived.notify_all()
            self.check.store.log.write(line)
        with self.arrived:
            lines.append(None)  # no more
            self.arrived.notify_all()

    def answer(self, limit):
        """The next line; None where the program has ended or says nothing for too long."""
        limit = min(limit, self.check.left())
        with self.arrived:
            self.arrived.wait_for(lambda: self.lines, timeout=max(limit, 0))
            line = self.lines.pop(0) if self.lines else None
        if line is None and self.check.left() <= 1:
            raise OutOfTime
        return line

    def turn(self, limit):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            return None
        line = self.answer(limit)
        try:
            return float(line)
        except (TypeError, ValueError):
            return None

    def why(self):
        said = [line for line in self.errors if line]
        return said[-1][:300] if said else "it ended, or said nothing for too long"

    def close(self):
        end(self.process)


# (preset, attention, key/value heads, B, T)
PEERS = [
    ("1.4b", "diff_v2", 8, 4, 2048),
    ("124m", "diff_v2", 6, 16, 1024),
    ("1.4b", "baseline", 8, 4, 2048),
    ("124m", "baseline", 6, 16, 1024),
]
ROUNDS = 12


def peer(check, part):
    """A step of ours, a step of PyTorch's, and so on: both see the same machine. Its compiler runs before."""
    python = os.environ.get("TORCH_PYTHON") or "python3"
    probe = "import torch; assert torch.cuda.is_available() or %d; print(torch.__version__)" % check.pretend
    status, text = check.run([python, "-c", probe], 120)
    if status != 0:
        raise Skip(f"{python} has no torch that sees a GPU: {last_line(text)} (TORCH_PYTHON=PYTHON names another)")
    script = check.root / "dev/bench/bench_torch.py"
    for preset, attention, NKV, B, T in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PEERS:
        case = f"{preset} {attention}"
        if not part.pending(case):
            continue
        theirs_options = ["--device", "cpu"] if check.pretend else ["--device", "cuda", "--compile"]
        theirs = Asked(check, [python, script, preset, attention, NKV, B, T, *theirs_options])
        ours = None
        try:
            # PyTorch first: its allocator keeps what its compiler has tried, and ours plans its memory by what is free
            about, first = theirs.answer(120), theirs.turn(420)
            if first is None:
                part.check(f"PyTorch: {case}", False, theirs.why())
            else:
                for _ in range(2):
                    theirs.turn(120)
                ours = Asked(check, [*check.commands["BENCH_CUDA"], "turns", preset, attention, NKV, B, T])
                compare_turns(
                    check,
                    part,
                    case,
                    ours,
                    theirs,
                    {"preset": preset, "attention": attention, "kv_heads": NKV, "B": B, "T": T, "torch": about},
                )
        finally:
            for program in (ours, theirs):
                if program:
                    program.close()
        part.end(case)


def compare_turns(check, part, case, ours, theirs, record):
    about = ours.answer(120)
    if about is None or ours.turn(120) is None:
        part.check(f"a step beside PyTorch: {case}", False, ours.why())
        return
    times = []
    for _ in range(2 if check.pretend else ROUNDS):
        pair = ours.turn(60), theirs.turn(60)
        if None in pair:
            part.check(f"steps in turns: {case}", False, ours.why() if pair[0] is None else theirs.why())
            return
        times.append(pair)
    ratios = [b / a for a, b in times]
    torch_words = (record["torch"] or "").split()
    record.update(
        table="peer",
        ms=statistics.median(a for a, _ in times),
        torch_ms=statistics.median(b for _, b in times),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_most=max(ratios),
        ours=about,
    )
    parameters = [words.split()[0] for words in (about, record["torch"])]
    part.check(
        f"{case}: both have the same parameters",
        parameters[0] == parameters[1],
        " and ".join(parameters) if parameters[0] != parameters[1] else "",
    )
    part.record(record)
    if torch_words and not check.pretend:
        target(part, f"{case}: tokens/s, of PyTorch's", record["ratio"], AHEAD, percent)


# ---------------------------------------------------------------------------------------------------
# kernels, profile, prediction

# (preset, key/value heads, B, T)
KERNELS = [("3b", 12, 4, 4096), ("1.4b", 8, 8, 2048), ("124m", 6, 32, 1024)]


def kernels(check, part):
    for preset, NKV, B, T in [("tiny", 2, 1, 16)] if check.pretend else KERNELS:
        if not part.pending(preset):
            continue
        found, ended = bench(check, part, 240, "kernels", preset, NKV, B, T)
        for r in found:
            part.record(r)
        bound = [r for r in found if r["table"] == "kernels" and r["unit"] == "GB/s"]
        if ended:
            part.check(
                f"{preset}: every operation was measured", len(found) > 40 and bound, f"{len(found)} measurements"
            )
        slow = sorted((r["share"], r["kernel"]) for r in bound)
        if slow:
            below = ", ".join(f"{name} {percent(share)}" for share, name in slow if share < BANDWIDTH)
            part.record(
                {
                    "table": "facts",
                    "what": f"target: {preset}: memory-bound operations at {percent(BANDWIDTH)} of a copy",
                    "value": f"below: {below or 'none'}",
                }
            )
        part.end(preset)


# (preset, attention, key/value heads, B, T)
PROFILES = [
    ("1.4b", "diff_v2", 8, 8, 2048),
    ("3b", "diff_v2", 12, 4, 4096),
    ("124m", "diff_v2", 6, 32, 1024),
    ("1.4b", "diff_v1", 8, 8, 2048),
]
COUNTERS = [
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
]


def profile(check, part):
    for case in [("tiny", "diff_v2", 2, 1, 16)] if check.pretend else PROFILES:
        name = " ".join(str(word) for word in case[:2])
        if not part.pending(name):
            continue
        found, ended = bench(check, part, 180, "profile", *case)
        for r in found:
            part.record(r)
        beside_prediction(check, part, case, found)
        if ended:
            inside = sum(r["share"] for r in found if r["operation"] not in ("step", "outside"))
            part.check(f"{name}: operations fill the step", 0 < inside < 1.05, percent(inside))
        part.end(name)
    if part.pending("ncu"):
        counters(check, part)
        part.end("ncu")


def beside_prediction(check, part, case, found):
    """Milliseconds of a step by class of work, as --dry-run --device predicts them, beside those that were measured."""
    preset, attention, NKV, B, T = case
    device = "H200" if check.pretend else (check.store.all["device"] or "unknown").split(":")[0]
    measured = {r["operation"]: r["ms"] for r in found if r["table"] == "profile" and r["operation"] != "step"}
    try:
        import predicted

        prediction = predicted.predict(
            check.commands["TRAIN_DIFFV2"],
            device,
            [
                "--preset",
                preset,
                "--attention",
                attention,
                "--kv-heads",
                NKV,
                "--batch-size",
                B,
                "--seq-len",
                T,
                "--total-batch",
                B * T,
            ],
        )
        rows = predicted.beside(prediction, measured) if measured else []
    except (ImportError, RuntimeError, OSError) as error:
        part.record({"table": "facts", "what": f"{preset} {attention}: no prediction", "value": str(error)[:300]})
        return
    for what, expected, ms in [("step", prediction["step_ms"], sum(measured.values())), *rows] if rows else []:
        part.record(
            {
                "table": "predicted",
                "of": f"{preset} {attention}, B {B} T {T}",
                "class": what,
                "predicted": expected,
                "ms": ms,
                "ratio": ms / expected if expected else None,
            }
        )


def counters(check, part):
    """What ncu counts in the operations of a layer, kernel by kernel: in log.txt, and here in short. The clocks stay as they are."""
    tool = find_tool("ncu")
    if not tool or check.pretend:
        part.record({"table": "facts", "what": "ncu", "value": "not there: events around the operations stand above"})
        return
    status, text = check.run(
        [
            tool,
            "--csv",
            "--clock-control",
            "none",
            "--metrics",
            ",".join(COUNTERS),
            *check.commands["BENCH_CUDA"],
            "--repeats",
            "1",
            "kernels",
            "1.4b",
            "8",
            "4",
            "2048",
        ],
        150,
    )
    rows = {}
    for line in text.splitlines():
        words = [w.strip('"') for w in line.split('","')]
        if len(words) > 10 and words[-3] in COUNTERS:
            rows.setdefault(words[4], {}).setdefault(words[-3], words[-1])
    if status != 0 or not rows:
        part.record({"table": "facts", "what": "ncu", "value": f"does not work here: {last_line(text)}"})
    for kernel, values in rows.items():
        part.record({"table": "ncu", "kernel": kernel[:120], **values})
