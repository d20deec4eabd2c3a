"""suggest.py: the command `suggest`: the best learning rate of each arm of a sweep, and the options for a larger model.

best rate  the minimum of the parabola of the mean loss over log(rate) through the best rate and its neighbours; a sweep
           whose best rate is its smallest or largest does not contain the minimum. Only seeds that
           have ended at all rates of the arm count
options    --parametrization completep with the shape of the sweep as the base, or with the base that the sweep had
"""

import math
import sys

from . import cli, option_history, study as studies
from .run_directory import RunError
from .trainer import Trainer, TrainerError

UPDATE = ("weight-decay", "beta1", "beta2", "eps")


def parse_arguments(words):
    parser = cli.Parser(
        prog="lab suggest",
        description="Prints the best rate of each arm of a sweep, and with --preset the options of a larger model.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="directories of `lab run`, or of runs")
    parser.add_argument("--preset", help="the larger model, a preset of the trainer")
    parser.add_argument("--arm", help="arm of the sweep (default: the only one)")
    parser.add_argument("--trainer", default="train_diffv2", help="the trainer, for --preset (default: ./train_diffv2)")
    return parser.parse_args(words)


def minimum(points):
    """(rate, loss) at the minimum of [(rate, loss)], sorted by rate; loss None: the best rate is the first or last."""
    best = min(range(len(points)), key=lambda i: points[i][1])
    if best in (0, len(points) - 1):
        return points[best][0], None
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(rate), loss) for rate, loss in points[best - 1 : best + 2])
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curve = (right - left) / (x2 - x0)
    at = (x0 + x1) / 2 - left / (2 * curve) if curve > 0 else x1
    return math.exp(at), y0 + left * (at - x0) + curve * (at - x0) * (at - x1)


def print_optima(study):
    """Prints a line per arm. Returns {arm: (rate, loss)}."""
    optima = {arm: minimum(points) for arm in study.arms if (points := study.sweep(arm))}
    print(f"{'arm':<28} {'best rate':>10} {'loss':>8}")
    for arm, (rate, loss) in optima.items():
        edge = "" if loss is not None else "  at the edge of the sweep: add rates"
        print(f"{arm:<28} {rate:>10.3g} {'-' if loss is None else f'{loss:.4f}':>8}{edge}")
    return optima


def options_of(run, rate, preset):
    """The trainer's options for a preset, {name: text}."""
    o, scaled = run.options, run.options.get("parametrization") == "completep"
    base = {"base-width": "hidden", "base-depth": "layers"}
    shape = {name: str((scaled and o.get(name)) or o[of_model]) for name, of_model in base.items()}
    norm = {"qk-norm": True} if o.get("qk-norm") in (True, "yes") else {}
    changed = {key for key, default in option_history.UPDATE.items() if o.get(key, default) != default}
    update = {name: str(o[name]) for name in (*UPDATE, *sorted(changed - {"parametrization", *base})) if name in o}
    return {"preset": preset, "attention": o["attention"], **norm, "parametrization": "completep", **shape,
            "lr": f"{rate:.3g}", **update}  # fmt: skip


def main(words):
    a = parse_arguments(words)
    fail = lambda message, status=1: cli.fail("lab suggest", message, status)
    try:
        found, left_out = studies.load(a.runs)
    except RunError as error:
        fail(str(error))
    for line in left_out:
        print(f"lab suggest: {line}; left out", file=sys.stderr)
    study = found[0]
    if len(found) > 1:
        fail(f"the runs are of {', '.join(study.name for study in found)}: specify runs of one sweep")
    if study.problems:
        more = f" (and {len(study.problems) - 1} more differences)" if study.problems[1:] else ""
        fail(f"the runs are not comparable: {study.problems[0]}{more}: specify runs of one sweep")
    if a.arm and a.arm not in study.arms:
        fail(f"--arm {a.arm}: no such arm; the arms are {', '.join(study.arms)}", 2)
    if a.preset and not a.arm and len(study.arms) > 1:
        fail(f"--preset requires --arm ARM, one of {', '.join(study.arms)}", 2)
    optima = print_optima(study)
    if not a.preset:
        return 0
    arm = a.arm or next(iter(study.arms))
    if arm not in optima or optima[arm][1] is None:
        fail(
            f"{arm}: "
            + ("the best rate is at the edge of the sweep: add rates" if arm in optima else "no finished runs")
        )
    run = study.runs_of(arm, study.sweep(arm)[0][0])[0]
    options = options_of(run, optima[arm][0], a.preset)
    try:
        head_dim = Trainer(a.trainer).dry_run(options).head_dim
    except TrainerError as error:
        fail(str(error))
    print("\n" + " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items()))
    if head_dim != (swept := int(run.options["head-dim"])):
        print(
            f"the rate is not transferred from heads of width {swept} to {head_dim}: sweep with --head-dim {head_dim}"
        )
    batch, tokens = int(run.options["total-batch"]), run.tokens
    print(f"of {tokens} tokens in batches of {batch}: the best rate also depends on these")
    return 0
