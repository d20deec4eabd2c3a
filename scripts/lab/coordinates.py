"""coordinates.py: the coordinate check: how activations, and their changes by the first updates, depend on the shape.

For each run of a plan with `coordinates = STEPS`: the activations (--dump-activations) of one batch at the start and
after these steps. Of each kind of activation, over all layers, of the residual stream the last:

  rms      root mean square
  change   root mean square of the difference to the start
  slope    of log(change) over log(width) or log(depth), least squares; 0: it keeps its size

Writes OUT/coordinates.json (per run, kind and step: rms, change; slopes) and OUT/coordinates.png. With completep all
slopes of the last step must be within BOUNDS of 0, else the exit status is 1. norm_final has the multiplier 1/width of
the logits: its slope over width is -1. Over depth q and k of the first layers change less, because fewer layers precede
them, and their mean grows a little up to 4 layers.
"""

import json
import math
import shutil
import subprocess

from . import plan as plans
from . import run_directory
from .run_directory import RunError
from .tensors import Tensors

BOUNDS = {"width": 0.2, "depth": 0.35}
AXES = {"w": "width", "d": "depth"}


def train(trainer, *words):
    done = subprocess.run([trainer.path, *words], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RunError(f"{trainer.path.name}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")


def kinds(tensors):
    """{kind: names of its tensors}: q, k, .. of all layers, and the residual stream after the last."""
    found = {}
    for name in tensors.header:
        layer, _, kind = name.removeprefix("layer.").partition(".")
        of_layer = name.startswith("layer.")
        if of_layer and kind in ("x", "x_mid"):
            found[kind] = [name]  # layers are in order: the last remains
        else:
            found.setdefault(kind if of_layer else name, []).append(name)
    return found


def rms(arrays):
    return math.sqrt(sum(float((x.astype("f8") ** 2).sum()) for x in arrays) / sum(x.size for x in arrays))


def measure(run, trainer, folder, steps):
    """{kind: {step: [rms, change]}}. The files of the run are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {key: value for key, value in run.options.items() if key != "val-data"}
    options = plans.arguments(options | {"threads": str(run.threads or 1)})
    start, now, found = folder / "start", folder / "now", {}
    train(trainer, *options, "--dump-activations", start)
    first = Tensors(start)
    for step in sorted(steps):
        resumed = ["--resume"] if step > min(steps) else []
        train(trainer, *options, "--out", folder / "run", *resumed, "--stop-after", str(step))
        train(trainer, "--out", folder / "run", "--resume", "--dump-activations", now)
        last = Tensors(now)
        for kind, names in kinds(first).items():
            pairs = [(last.read(name), first.read(name)) for name in names]
            found.setdefault(kind, {})[step] = [rms([x for x, _ in pairs]), rms([x - y for x, y in pairs])]
    shutil.rmtree(folder)
    return found


def slope(points):
    """Of log y over log x; None without two different x, or where a y is 0 or not finite."""
    if len({x for x, _ in points}) < 2 or not all(0 < y < math.inf for _, y in points):
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mx, my = (sum(values) / len(logs) for values in zip(*logs))
    return sum((x - mx) * (y - my) for x, y in logs) / sum((x - mx) ** 2 for x, _ in logs)


def fit(measured):
    """{arm: {axis: {kind: {step: slope}}}} of {name of a scaled arm: kinds}."""
    curves = {}
    for name, found in measured.items():
        arm, _, scale = name.rpartition(".")
        for kind, steps in found.items():
            for step, (_, change) in steps.items():
                of_axis = curves.setdefault(arm, {}).setdefault(AXES[scale[0]], {}).setdefault(kind, {})
                of_axis.setdefault(step, []).append((int(scale[1:]), change))
    return {
        arm: {
            axis: {kind: {s: slope(p) for s, p in of.items()} for kind, of in of_axis.items()}
            for axis, of_axis in x.items()
        }
        for arm, x in curves.items()
    }


def outside(slopes, arms):
    """The slopes of the last step that are out of bounds, one line each."""
    found = []
    for arm, axis, kind in [(a, x, k) for a in arms for x in slopes[a] for k in slopes[a][x]]:
        of = slopes[arm][axis][kind]
        last, wanted = of[max(of)], -1 if (axis, kind) == ("width", "norm_final") else 0
        if last is None or abs(last - wanted) > BOUNDS[axis]:
            shown = "none" if last is None else f"{last:+.2f}"
            found.append(f"{arm}: slope of {kind} over {axis}: {shown}, must be {wanted} within {BOUNDS[axis]}")
    return found


def print_slopes(slopes):
    for axis in AXES.values():
        arms = [arm for arm in slopes if axis in slopes[arm]]
        rows = dict.fromkeys(kind for arm in arms for kind in slopes[arm][axis])
        print(f"\nslope of the change over {axis}, last step\n{'':<12}" + "".join(f"{arm:>22}" for arm in arms))
        for kind in rows:
            of = [slopes[arm][axis].get(kind, {}) for arm in arms]
            cells = [(x[max(x)] if x else None) for x in of]
            print(f"{kind:<12}" + "".join(f"{'-' if c is None else f'{c:+.2f}':>22}" for c in cells))


def draw(measured, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = list(dict.fromkeys(name.rpartition(".")[0] for name in measured))
    colors = {
        kind: f"C{i % 10}" for i, kind in enumerate(dict.fromkeys(k for found in measured.values() for k in found))
    }
    size = (3.2 * len(arms) + 1, 6)
    figure, axes = plt.subplots(2, len(arms), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for row, (letter, axis) in enumerate(AXES.items()):
        for panel, arm in zip(axes[row], arms):
            shapes = [name for name in measured if name.startswith(f"{arm}.{letter}")]
            xs = [int(name.rpartition(".")[2][1:]) for name in shapes]
            for i, (kind, color) in enumerate(colors.items()):
                ys = [of[max(of)][1] for name in shapes if (of := measured[name].get(kind))]
                if ys and ys[0]:
                    panel.loglog(xs, [y / ys[0] for y in ys], "o-" if i < 10 else "s--", c=color, ms=3, label=kind)
            panel.set_title(arm, fontsize=9)
            panel.set_xlabel(f"{axis} / base", fontsize=9)
            panel.set_xticks(xs, [str(x) for x in xs])
            panel.minorticks_off()
        axes[row][0].set_ylabel("change / base")
    lines = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
    figure.legend(lines.values(), lines, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)


def check(plan, runs, trainer, out):
    """Measures all runs, prints the slopes, writes the files. The exit status."""
    import python_environment

    python_environment.ensure("lab")
    measured, done = {}, {}
    for run in runs:
        key = tuple(plans.arguments(run.options))
        if key not in done:
            done[key] = measure(run, trainer, out / run.name, plan.common["coordinates"])
            print(f"{run.name} measured", flush=True)
        measured[run.arm] = done[key]
    slopes = fit(measured)
    print_slopes(slopes)
    completep = [run.arm for run in runs if run.options.get("parametrization") == "completep"]
    scaled = list(dict.fromkeys(arm.rpartition(".")[0] for arm in completep))
    wrong = outside(slopes, scaled)
    run_directory.write_atomic(
        out / "coordinates.json", json.dumps({"runs": measured, "slopes": slopes}, indent=1) + "\n"
    )
    draw(measured, out / "coordinates.png")
    print("\n" + "\n".join(wrong or [f"all slopes of {', '.join(scaled) or 'no arm'} are within the bounds"]))
    return 1 if wrong else 0
