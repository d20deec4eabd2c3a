"""fit.py: the command `fit`: the loss of each arm over size and tokens, and the gap at sizes that were not trained.

    python3 scripts/lab fit runs/a runs/b.jsonl ...

    L(N, D) = E + A / N^alpha + B / D^beta      as Hoffmann et al. 2022 (arXiv 2203.15556), approach 3

N           parameters that a token passes, with embeddings, as there. In small models a count without embeddings biases
            the exponents (Pearce and Song 2024, arXiv 2406.12907).
D           tokens of the run
runs        of several sizes and lengths, of each the best rate of the arm. A place is a size (layers, hidden) and a
            length; it has the seeds that all arms have there. Arms NAME.wN and NAME.dN (plan.py) are sizes of NAME.
fit         least squares of the relative errors of the means over seeds, weighted by the seeds. For given exponents
            E, A and B >= 0 follow from linear least squares; the exponents are searched from the best of a grid.
            (Huber's loss with the limit of 1e-3 that they take is nearly the absolute error where seeds deviate by 1%.)
interval    percentiles of a bootstrap: in each place n - 1 of its n seeds are drawn with replacement, the same for all
            arms. With n - 1 the variance of a mean has no bias. One seed in any place: no intervals.
trend       of the gaps of all places and seeds, paired by seed: least squares of c + a log2(N) + b log2(D / N), with t
            intervals. It assumes straight lines and equal deviations, and no law.
Exit status: 0 done; 1 failed, or a file was left out; 2 usage, or the runs are not comparable.
"""

import math
import re
import sys
from dataclasses import replace

import python_environment

from . import cli, currencies, run_directory, stats, study as studies
from .table import Cell, Table, as_markdown, engineering, interval

np = python_environment.Later("numpy")
optimize = python_environment.Later("scipy.optimize")
BOUNDS = (0.01, 2.0)  # of the exponents
REPLICATES = 400
TARGETS = (124e6, 1.4e9)  # parameters
PER_PARAMETER = 20  # tokens at a target
FORM = ("E", "A", "alpha", "B", "beta")
LEAST = 3  # sizes, and lengths: two exponents and two factors


def base(arm):
    """The arm of a NAME.wN or NAME.dN."""
    return re.sub(r"\.[wd]\d+$", "", arm)


def places(study):
    """{arm: {place: (N, D, {seed: loss})}}, with the seeds that all arms have at the place."""
    runs, found, by_eval = {}, {}, study.by_eval()
    for run in study.runs:
        place = int(run.options["layers"]), int(run.options["hidden"]), run.tokens
        runs.setdefault((base(run.arm), place), []).append(run)
    for (arm, place), group in runs.items():
        best = currencies.own_runs(replace(study, runs=group), group[0].arm)
        losses = {seed: loss for seed, run in best.items() if (loss := run.final_loss(by_eval)) is not None}
        found.setdefault(arm, {})[place] = (group[0].active_parameters, group[0].tokens, losses)
    for place in {place for of in found.values() for place in of}:
        at = [of[place][2] for of in found.values() if place in of]
        common = set.intersection(*map(set, at))
        for losses in at:
            for seed in losses.keys() - common:
                del losses[seed]
    return {arm: {place: x for place, x in sorted(of.items()) if x[0] and x[2]} for arm, of in found.items()}


def lacking(arms):
    """What prevents a fit, or ""."""
    if len(arms) < 2:
        return f"{next(iter(arms))} is the only arm: a gap requires two"
    for arm, of in arms.items():
        sizes, lengths = ({x[i] for x in of.values()} for i in (0, 1))
        has = f"{arm} has finished runs of {len(sizes)} sizes and {len(lengths)} lengths, {len(of)} in total: "
        if min(len(sizes), len(lengths)) < LEAST or len(of) <= len(FORM):
            return f"{has}a fit requires {LEAST} sizes, {LEAST} lengths and {len(FORM) + 1} in total"
        if len(of) == len(sizes):
            return f"{has}a fit requires two lengths of a size"
    return ""


def fit(points, start=None):
    """(E, A, alpha, B, beta) of [(N, D, loss, weight)], and the root mean square of the relative errors. start: the
    exponents from which the search begins, else the best of a grid"""
    n, d, loss, weight = np.array(points, float).T
    scale, middle = np.sqrt(weight / weight.mean()), [math.exp(np.log(x).mean()) for x in (n, d)]

    def solve(exponents):
        columns = [np.ones_like(n), *((x / m) ** -e for x, m, e in zip((n, d), middle, exponents))]
        design = np.stack(columns, 1) / loss[:, None]
        factors, _ = optimize.nnls(design * scale[:, None], scale)
        return factors, (design @ factors - 1) * scale

    grid = np.geomspace(0.05, 1.6, 6)
    start = start or min(((a, b) for a in grid for b in grid), key=lambda e: (solve(e)[1] ** 2).sum())
    found = optimize.least_squares(lambda e: solve(e)[1], start, bounds=BOUNDS, x_scale=0.1)
    (e, a, b), errors = solve(found.x)
    (alpha, beta), (n0, d0) = map(float, found.x), middle
    return (float(e), a * n0**alpha, alpha, b * d0**beta, beta), float(np.sqrt((errors**2).mean()))


def loss_at(law, n, d):
    e, a, alpha, b, beta = law
    return e + a / n**alpha + b / d**beta


def bootstrap(arms, found):
    """[{arm: law}] of REPLICATES draws, near the laws that were found; empty if a place has one seed."""
    seeds = {place: sorted(losses) for of in arms.values() for place, (_, _, losses) in of.items()}
    if min(map(len, seeds.values())) < 2:
        return []
    random, laws = np.random.default_rng(1), []
    for _ in range(REPLICATES):
        drawn = {place: random.choice(all_of, len(all_of) - 1) for place, all_of in seeds.items()}
        point = lambda place, n, d, losses: (n, d, stats.mean([losses[s] for s in drawn[place]]), len(losses))
        points = {arm: [point(place, *x) for place, x in of.items()] for arm, of in arms.items()}
        laws.append({arm: fit(points[arm], found[arm][2::2])[0] for arm in arms})
    return laws


def with_ends(x, values, form):
    """A number, and the interval of its replicates if there are any."""
    tail = 50 * (1 - stats.CONFIDENCE)
    ends = np.percentile(values, (tail, 100 - tail)) if values else []
    return f"{x:{form}}" + (f" [{ends[0]:{form}}, {ends[1]:{form}}]" if values else "")


def gaps(study, arms, laws, drawn):
    """The rows of the gaps to the reference, of an arm at its places, then at the targets."""
    reference, rows = base(study.reference), []
    for arm in [arm for arm in arms if arm != reference]:
        at = [(place, *x) for place, x in arms[arm].items() if place in arms[reference]]
        at += [(None, n, PER_PARAMETER * n, {}) for n in TARGETS]
        for place, n, d, losses in at:
            n0, d0, theirs = arms[reference].get(place, (n, d, {}))
            gap = lambda laws: loss_at(laws[arm], n, d) - loss_at(laws[reference], n0, d0)
            measured = stats.as_json(stats.paired_gap(losses, theirs))
            rows.append([study.arms.get(arm, arm), engineering(n), engineering(d), f"{d / n:.3g}"])
            rows[-1] += [interval(measured, True), with_ends(gap(laws), [gap(x) for x in drawn], "+.4f")]
    return rows


def trends(arms, reference):
    """{arm: its gap per doubling of the parameters, and of the tokens per parameter, as two Estimates}."""
    found = {}
    for arm in [arm for arm in arms if arm != reference]:
        points = [(math.log2(n), math.log2(d / n), gap)
                  for place, (n, d, theirs) in arms[reference].items() if place in arms[arm]
                  for gap in stats.paired(arms[arm][place][2], theirs).values()]  # fmt: skip
        if not points:
            continue
        n, each, gap = np.array(points).T
        design, df = np.stack([np.ones_like(n), n, each], 1), len(points) - 3
        slopes, _, rank, _ = np.linalg.lstsq(design, gap, rcond=None)
        if rank < 3 or df < 1:
            continue
        variance = float(((gap - design @ slopes) ** 2).sum()) / df * np.linalg.inv(design.T @ design)
        found[arm] = [stats.estimate(float(slopes[i]), 1, math.sqrt(variance[i, i]), df) for i in (1, 2)]
    return found


def tables(study, arms, laws, errors, drawn):
    rows = []
    for arm, law in laws.items():
        rows.append([Cell(study.arms.get(arm, arm)), f"{len(arms[arm])}", f"{100 * errors[arm]:.2f}"])
        rows[-1] += [with_ends(x, [of[arm][i] for of in drawn], ".4g") for i, x in enumerate(law)]
    none = "" if drawn else " No intervals: they require two seeds or more in each place."
    head = ["arm", "places", "relative error, %", *FORM]
    form = f"L = E + A / N^alpha + B / D^beta, exponents from {BOUNDS[0]} to {BOUNDS[1]:g}."
    yield Table("laws", head, rows, form + none)
    head = ["arm", "parameters", "tokens", "tokens per parameter", "measured gap", "gap of the fits"]
    said = "Measured: paired by seed, t intervals. At the last sizes both arms have as many parameters. The intervals "
    yield Table("gaps", head, gaps(study, arms, laws, drawn), f"{said}do not contain the error of the form of L.")
    rows = [[study.arms.get(arm, arm), *(interval(stats.as_json(e), True) for e in of)]
            for arm, of in trends(arms, base(study.reference)).items()]  # fmt: skip
    head = ["arm", "gap per doubling of the parameters", "of the tokens per parameter"]
    yield Table("trends", head, rows, "Of the measured gaps, as straight lines over the logarithms.")


def fitted(study):
    """(arms, laws, errors, drawn) of a study that lacks nothing: the arguments of tables()."""
    arms = places(study)
    if wrong := lacking(arms):
        raise ValueError(wrong)
    fits = {arm: fit([(n, d, stats.mean(losses.values()), len(losses)) for n, d, losses in of.values()])
            for arm, of in arms.items()}  # fmt: skip
    laws, errors = ({arm: x[i] for arm, x in fits.items()} for i in (0, 1))
    return arms, laws, errors, bootstrap(arms, laws)


def main(words):
    parser = cli.Parser(prog="lab fit", description="Fits the loss over size and tokens, and extrapolates the gaps.")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="labs, directories of runs, or archives")
    a = parser.parse_args(words)
    python_environment.ensure("lab")
    fail = lambda message, status=1: cli.fail("lab fit", message, status)
    try:
        study = studies.load(a.runs)
    except run_directory.RunError as error:
        fail(str(error))
    studies.check(study, scaled=True)
    for line in study.left_out:
        print(f"lab fit: {line}; left out", file=sys.stderr)
    if study.problems:
        fail(f"the runs are not comparable: {study.problems[0]}: specify runs that differ in size and tokens alone", 2)
    try:
        found = fitted(study)
    except ValueError as error:
        fail(str(error))
    for table in tables(study, *found):
        print(f"{as_markdown(table)}\n{table.caption}\n")
    return 1 if study.left_out else 0
