"""run.py: the command `run`: performs all runs of a plan, as many concurrently as the machine allows.

After an interruption of any kind the same command continues: finished runs are not repeated, others are resumed. The
state of a run is its directory alone, so a kill loses only the steps after the last checkpoint. A failed run does not
stop the others; the next start repeats it.

    OUT/lab.json       the plan and its runs
    OUT/NAME/          a run (ARM.lrX.seedN), as the trainer writes it
    OUT/NAME/eval.json the evaluation of its last checkpoint on all validation data: the loss, by position too
    OUT/NAME.out       the output of the trainer

Exit status: 0 all runs are done (or diverged, which is a result); 1 a run or an evaluation failed; 2 usage;
3 stopped by a signal.
"""

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import python_environment

from . import cli, option_history, plan as plans, run_directory, study as studies
from .scheduler import Queue, gpus_of_environment
from .trainer import Trainer, TrainerError

OF_LAB = "out resume threads".split()  # options of a start besides those of the plan
# options that a resume may change
MAY_CHANGE = "eval-choices val-every stats-every checkpoint-every checkpoint-minutes keep batch-size".split()
ROOT = python_environment.ROOT


def fail(message, status=1):
    cli.fail("lab run", message, status)


def parse_arguments(words):
    parser = cli.Parser(
        prog="lab run", description="Runs a plan of comparisons (scripts/lab/plans/*.plan), or continues one."
    )
    parser.add_argument("plan", help="a file, or the name of a plan in scripts/lab/plans")
    parser.add_argument("--out", help="output directory (default: runs/PLAN-SIZE)")
    parser.add_argument("--size", help="[size] of the plan (default: the first)")
    parser.add_argument("--arms", help="run only these arms, separated by commas")
    parser.add_argument("--data", help="corpus directory for training and validation; overrides the plan")
    parser.add_argument("--tokens", help="tokens of each run, such as 2M; overrides the plan")
    parser.add_argument("--seeds", help="seeds, separated by commas; overrides the plan")
    parser.add_argument("--lr", help="learning rates, separated by commas; overrides the plan")
    parser.add_argument(
        "--trainer",
        default=str(ROOT / "train_diffv2"),
        help="trainer program (default: train_diffv2 of this repository)",
    )
    parser.add_argument("--jobs", type=int, help="concurrent runs (default: limited by cores or GPUs, and memory)")
    parser.add_argument(
        "--threads",
        type=int,
        default=0,
        help="threads per rank (default: the plan's, or 1; with --gpus the trainer's default)",
    )
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs, one per rank (default: 0, the CPU)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0,
        help="save and stop within this time; the same command continues (default: no limit)",
    )
    parser.add_argument("--no-eval", action="store_true", help="evaluate no checkpoints")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and their cost, then exit")
    parser.add_argument(
        "--device", default="H100", help="with --dry-run: the GPU of the predicted hours, such as B200 (default: H100)"
    )
    a = parser.parse_args(words)
    for key in ("seeds", "lr", "tokens"):
        given = getattr(a, key)
        try:
            setattr(a, key, plans.parse_value(key, given.replace(",", " ")) if given else None)
        except ValueError as wanted:
            parser.error(f"--{key} {given}: must be {wanted}".replace("spaces", "commas"))
    if not 0 <= a.minutes < float("inf"):
        parser.error(f"--minutes {a.minutes:g}: must be at least 0")
    if (a.jobs is not None and a.jobs < 1) or a.threads < 0 or a.gpus < 0:
        parser.error("--jobs must be at least 1, --threads and --gpus at least 0")
    return a


def overrides(a):
    given = {"train-data": a.data, "val-data": a.data, "tokens": a.tokens, "seeds": a.seeds, "lr": a.lr}
    return {key: value for key, value in given.items() if value}


def load_plan(a, trainer):
    path = Path(a.plan)
    if not path.exists() and "/" not in a.plan:
        path = ROOT / "scripts/lab/plans" / f"{a.plan.removesuffix('.plan')}.plan"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in (ROOT / "scripts/lab/plans").glob("*.plan")))
        fail(f"{a.plan}: no such plan; the plans are {known}", 2)
    try:
        plan = plans.parse(path.read_text(), path.name, trainer.options)
        plan.path = path.resolve()
        return plan
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: {error}", 2)


def best_rates(out, arms):
    """{arm: the rate with the lowest mean loss of its sweep}"""
    study = studies.load([out])[0][0]
    if study.problems:
        fail(f"the runs of the sweep are not comparable: {study.problems[0]}")
    for arm in arms:
        points, rate = study.sweep(arm), study.own_rate(arm)
        if not points or rate in (points[0][0], points[-1][0]):
            said = f"{rate:g}, is at its edge" if points else "does not exist"
            fail(f"the sweep of arm {arm}: the best rate, {said}: add rates with --lr to the {len(points)} that it has")
    return {arm: study.own_rate(arm) for arm in arms}


def cost_runs(plan, runs, trainer, a):
    """Computes matched widths, and the cost of each run: {name: Cost}."""
    everything = {run.arm: run for run in plans.expand(plan, trainer.options, a.size, None, overrides(a))}
    costs = {}
    for run in runs:
        try:
            if run.match:
                wanted = trainer.dry_run(everything[run.match].options).active
                run.options = trainer.match(run.options, wanted)
            costs[run.name] = trainer.dry_run(run.options)
        except TrainerError as error:
            fail(f"{plan.name}:{plan.lines[f'arm {run.arm}', None]}: [arm {run.arm}]: {error}", 2)
    return costs


def print_runs(runs, costs, jobs, trainer, device):
    """Runs and costs. GPU hours: predicted hours times ranks, without validation and evaluation."""
    print(f"{'run':<44} {'parameters':>12} {'FLOPs/token':>12} {'tokens':>9} {'steps':>7}  GPU hours on {device}")
    low = high = 0
    for run in runs:
        cost = costs[run.name]
        least, most = (run.ranks * hours for hours in trainer.hours(run, device))
        low, high = low + least, high + most
        print(f"{run.name:<44} {cost.parameters:>12,} {cost.flops:>12.3g} {run.tokens:>9.3g} {run.steps:>7}", end="  ")
        print(f"{least:.3g} to {most:.3g}")
    total = sum(costs[run.name].flops * run.tokens for run in runs)
    print(f"{len(runs)} runs, {sum(run.tokens for run in runs):.3g} tokens, {total:.3g} FLOPs; {jobs} concurrently")
    print(f"GPU hours on {device}: {low:.3g} to {high:.3g}, predicted, without validation and evaluation")


def choose_jobs(a, runs, costs):
    """The number of concurrent runs: --jobs, or the limit by cores or GPUs; at most what memory allows."""
    threads = max((a.threads or run.threads or 1) * run.ranks for run in runs)
    ranks = max(run.ranks for run in runs)
    if a.gpus and ranks > a.gpus:
        fail(f"a run of the plan requires {ranks} GPUs, and --gpus is {a.gpus}", 2)
    jobs = a.jobs or (a.gpus // ranks if a.gpus else max(1, len(os.sched_getaffinity(0)) // threads))
    room = a.gpus // ranks if a.gpus else jobs
    if not a.gpus:
        largest = max(costs[run.name].memory * run.ranks for run in runs)
        free = next(
            (int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable")),
            largest * jobs,
        )
        if largest > free:
            fail(f"a run requires {largest / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free")
        room = free // largest
    if a.jobs and room < a.jobs:
        print(f"lab run: --jobs {a.jobs}: {'GPUs' if a.gpus else 'memory'} for {room} concurrent runs", file=sys.stderr)
    return min(jobs, room)


def check_begun(run, directory):
    """Fails if the run started, or resumed, with other options than the plan's."""
    info = run_directory.read_run(directory)
    given = {w[2:].partition("=")[0].removeprefix("no-") for w in info.get("command_line", ()) if w.startswith("--")}
    planned = dict.fromkeys(sorted(given.difference(OF_LAB))) | run.options  # None: the plan has lost it
    for step, options in option_history.history(info):
        for name, value in planned.items():
            have = options.get(name)
            same = have == value or (
                isinstance(value, str) and is_number(value) and is_number(have) and float(have) == float(value)
            )
            if not same and name not in MAY_CHANGE:
                began = f"was resumed after step {step}" if step else "was started"
                fail(
                    f"{directory} {began} with --{name} {option_history.shown(have)}, and the plan has "
                    f"{option_history.shown(value)}: specify another --out, or remove that run",
                    2,
                )


def is_number(value):
    try:
        return not isinstance(value, bool) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def facts_of_arm(arm, keys):
    kept = ("match", "tokens", *option_history.UPDATE)
    return {"label": keys.get("label", arm), **{key: keys[key] for key in kept if key in keys}}


def registration(plan, given, old):
    """[what was fixed before the first run: the plan by its hash and commit, the options of the command; changes..]"""
    new = {"sha256": hashlib.sha256(plan.text.encode()).hexdigest(), "options": given}
    entries = old.get("registration", [])
    if entries and {key: entries[-1][key] for key in new} == new:
        return entries
    git = ["git", "-C", str(plan.path.parent)]
    asked = [["diff", "--quiet", "HEAD", "--", plan.path.name], ["log", "-1", "--format=%H", "--", plan.path.name]]
    answers = [subprocess.run(git + words, capture_output=True, text=True) for words in asked if shutil.which("git")]
    clean = answers and not any(done.returncode for done in answers)
    before, after = old.get("text", plan.text).splitlines(), plan.text.splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    new |= {"plan": plan.name, "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), "first": not old}
    new |= {"commit": answers[1].stdout.strip() if clean else "", "changed": [x for x in lines if x[0] in "+-"]}
    return [*entries, new]


def sweep_seeds(plan, size):
    return plan.sizes.get(size, {}).get("sweep-seeds", plan.common.get("sweep-seeds", []))


def write_lab(out, plan, size, runs, costs, given):
    """Writes lab.json: the facts for the report that are not in the runs. Keeps the runs of earlier starts."""
    old = run_directory.read_lab(out) or {}
    if old and (old["plan"], old["size"]) != (plan.name, size):
        fail(f"{out} holds the plan {old['plan']} at size {old['size']}: specify another --out", 2)
    arms = {**old.get("arms", {}), **{arm: facts_of_arm(arm, keys) for arm, keys in plan.arms.items()}}
    listed = {run["name"]: run for run in old.get("runs", [])}
    for run in runs:
        listed[run.name] = {key: getattr(run, key) for key in ("name", "arm", "lr", "seed", "steps", "tokens")}
        listed[run.name]["parameters"] = costs[run.name].parameters
    lab = {
        "plan": plan.name,
        "size": size,
        "title": plan.common.get("title", plan.name),
        "question": plan.common.get("question", ""),
        "reference": plan.common["reference"],
        "sweep-seeds": sweep_seeds(plan, size),
        "registration": registration(plan, given, old),
        "arms": arms,
        "runs": list(listed.values()),
        "text": plan.text,
    }
    text = json.dumps(lab, indent=1) + "\n"
    if not old or text != (out / "lab.json").read_text():
        run_directory.write_atomic(out / "lab.json", text)


def perform(out, plan, size, runs, costs, trainer, jobs, a, started):
    for run in runs:
        if (out / run.name / "run.json").exists():
            check_begun(run, out / run.name)
    write_lab(out, plan, size, runs, costs, overrides(a))
    return Queue(out, runs, costs, trainer, jobs, a, started).work()


def main(words):
    started = time.time()
    a = parse_arguments(words)
    try:
        trainer = Trainer(a.trainer)
        plan = load_plan(a, trainer)
        size = a.size or next(iter(plan.sizes), "default")
        expand = lambda rates=None: plans.expand(
            plan, trainer.options, a.size, a.arms.split(",") if a.arms else None, overrides(a), rates
        )
        runs = expand()
    except (plans.PlanError, TrainerError) as error:
        fail(str(error), 2)
    costs = cost_runs(plan, runs, trainer, a)
    jobs = choose_jobs(a, runs, costs)
    if a.dry_run:
        try:
            print_runs(runs, costs, jobs, trainer, a.device)
            if sweep_seeds(plan, size):
                runs = expand({run.arm: run.lr for run in runs})
                print("then each arm at the best of these rates, shown for the last of them:")
                print_runs(runs, cost_runs(plan, runs, trainer, a), jobs, trainer, a.device)
        except TrainerError as error:
            fail(str(error), 2)
        return 0
    if any(run.ranks > 1 for run in runs) and not shutil.which("mpirun"):
        fail("mpirun, which starts the ranks of a run, is missing: install it (scripts/install_deps.sh --with-mpi)", 2)
    if len(found := gpus_of_environment(a.gpus)) < a.gpus:
        fail(f"--gpus {a.gpus}: CUDA_VISIBLE_DEVICES has only {len(found)}: specify --gpus {len(found)} or fewer", 2)
    out = Path(a.out or ROOT / "runs" / f"{plan.name.removesuffix('.plan')}-{size}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / "lab.lock", "a")
    except FileExistsError:
        fail(f"--out {out}: is a file, must be a directory")
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    try:
        run_directory.lock(lock)
    except OSError:
        fail(f"{out}: another lab is running in it")
    try:
        status = perform(out, plan, size, runs, costs, trainer, jobs, a, started)
        if sweep_seeds(plan, size) and status == 0:
            runs = expand(best_rates(out, dict.fromkeys(run.arm for run in runs)))
            costs = cost_runs(plan, runs, trainer, a)
            status = perform(out, plan, size, runs, costs, trainer, jobs, a, started)
    except run_directory.RunError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or out}: {error.strerror}")
    print(f"report: python3 {ROOT / 'scripts/lab'} report {out}", flush=True)
    return status
