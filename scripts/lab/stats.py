"""stats.py: the statistics of the report, as functions of numbers.

A gap is a paired difference: arm minus reference at the same seed, hence with the same data in the same order, and the
same initial weights of tensors with equal shapes. Its interval is Student's t over the seeds, with n - 1 degrees of
freedom; it assumes that the differences are independent and approximately normal. One seed has no interval.
A pooled interval takes the deviation of all arms, which it assumes to be equal, and has more degrees of freedom; it is
used unless a test of equal variances rejects (pooled_gap). All pairing is by seed, in paired().
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean as mean
from statistics import stdev

import python_environment

np = python_environment.Later("numpy")
special = python_environment.Later("scipy.special")
CONFIDENCE = 0.95
SPIKE_Z = 7.0  # standard deviations above the mean of the last SPIKE_WINDOW values: the spike score of OLMo 2
SPIKE_WINDOW = 1000
SPIKE_LEAST = 32  # values before the first that is judged, so that the end of a short warmup is
STABLE_TOLERANCE = 0.1  # nats: a stable learning rate has a final loss up to this much above the best one


def finite(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def mean_or_none(xs):
    """The mean of the finite values; None if there are none."""
    good = [x for x in xs if finite(x)]
    return mean(good) if good else None


def deviation(xs):
    """Standard deviation with n - 1; None for fewer than two values."""
    return stdev(xs) if len(xs) > 1 else None


def t_cdf(t, df):
    return float(special.stdtr(df, t))


def t_quantile(p, df):
    """t with t_cdf(t, df) = p."""
    return float(special.stdtrit(df, p))


def normal_quantile(p):
    return float(special.ndtri(p))


def f_p(x, df1, df2):
    """The probability that the ratio of two estimates of one variance is above x."""
    return float(special.fdtrc(df1, df2, x))


@dataclass
class Estimate:
    mean: float
    half: float | None  # half the width of the interval; None: no interval
    n: int
    sd: float | None
    p: float | None = None  # two-sided, of mean 0
    df: int | None = None  # degrees of freedom of sd
    pooled: bool = False  # whether sd is that of a Pool
    p_variances: float | None = None  # of the test of equal variances that decides about it; None: not testable

    @property
    def low(self):
        return None if self.half is None else self.mean - self.half

    @property
    def high(self):
        return None if self.half is None else self.mean + self.half

    @property
    def decided(self):
        """Whether the interval excludes 0."""
        return self.half is not None and abs(self.mean) > self.half

    def limits(self, level):
        """The interval that misses the true mean with this probability."""
        half = t_quantile(1 - level / 2, self.df) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def p_of(self, value):
        """Two-sided p of this mean."""
        error, distance = self.sd / math.sqrt(self.n), abs(self.mean - value)
        return 2 * t_cdf(-distance / error, self.df) if error else float(distance == 0)


def as_json(e):
    return None if e is None else dict(vars(e))


def estimate(m, n, sd, df, confidence=CONFIDENCE):
    e = Estimate(m, t_quantile((1 + confidence) / 2, df) * sd / math.sqrt(n), n, sd, None, df)
    e.p = e.p_of(0)
    return e


def t_interval(xs, confidence=CONFIDENCE):
    """Mean and interval of independent values; None without values."""
    if not xs:
        return None
    n, m, sd = len(xs), mean(xs), deviation(xs)
    return Estimate(m, None, n, None) if sd is None else estimate(m, n, sd, n - 1, confidence)


def paired(arm, reference):
    """{seed: arm minus reference} of two {seed: value}, over the seeds with two finite values, in order."""
    seeds = sorted(s for s in arm if s in reference and finite(arm[s]) and finite(reference[s]))
    return {s: arm[s] - reference[s] for s in seeds}


def paired_gap(arm, reference, confidence=CONFIDENCE):
    return t_interval(list(paired(arm, reference).values()), confidence)


EQUAL_VARIANCES_P = 0.05
OUTLIER_P = 0.01


def pooled_gap(table, arm, reference, pool):
    """The estimate of the paired difference of two arms of {arm: {seed: value}}, with the deviation of the table's Pool
    (or None). Their differences have their own deviation if it is larger than that of the rest of the Pool (F test,
    one-sided, 5%), if one of the two is no arm of the Pool, or if the Pool has no rest."""
    own = paired_gap(table[arm], table[reference])
    if not own or not own.sd or not pool:
        return own
    inside = {arm, reference} <= set(pool.cells)
    squares, df = own.sd**2 / 2 * (own.n - 1), own.n - 1
    rest, rest_df = (pool.sd**2 * pool.df - squares, pool.df - df) if inside else (pool.sd**2 * pool.df, pool.df)
    if rest_df < 1 or rest <= 1e-12 * squares:
        return own
    own.p_variances = f_p((squares / df) / (rest / rest_df), df, rest_df)
    if own.p_variances < EQUAL_VARIANCES_P or not inside:
        return own
    e = estimate(own.mean, own.n, math.sqrt(2) * pool.sd, pool.df)
    e.pooled, e.p_variances = True, own.p_variances
    return e


@dataclass
class Pool:
    """The error in value = arm + seed + error. A paired difference of two arms has the deviation sqrt(2) sd."""

    sd: float
    df: int
    cells: dict  # {arm: {seed: value}} without the arms that deviate more


def residual_squares(cells):
    """(sum of the squared residuals of the least-squares fit value = arm + seed, its degrees of freedom)."""
    seeds = sorted(set().union(*cells.values()))
    places = [(i, len(cells) + seeds.index(seed)) for i, row in enumerate(cells.values()) for seed in row]
    values = np.array([x for row in cells.values() for x in row.values()])
    design = np.zeros((len(values), len(cells) + len(seeds)))
    for line, columns in zip(design, places):
        line[list(columns)] = 1
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    return float(((values - design @ fit) ** 2).sum()), len(values) - int(rank)


def pooled_deviation(table, reference):
    """The Pool of {arm: {seed: value}}; None without degrees of freedom. It leaves out seeds that the reference lacks
    and, the largest first, arms that deviate more than the others together (F test, 1% divided by their number)."""
    seeds = sorted(s for s, x in table.get(reference, {}).items() if finite(x))
    cells = {arm: {s: row[s] for s in seeds if finite(row.get(s))} for arm, row in table.items()}
    cells = {arm: row for arm, row in cells.items() if row}
    while seeds:
        everything, df = residual_squares(cells)
        if df < 1:
            return None
        p = {}
        for arm in [arm for arm in cells if arm != reference]:
            squares, rest = residual_squares({a: row for a, row in cells.items() if a != arm})
            if rest > 0 and df > rest and squares > 0:
                p[arm] = f_p((everything - squares) / (df - rest) / (squares / rest), df - rest, rest)
        worst = min(p, key=p.get, default=None)
        if worst is None or p[worst] >= OUTLIER_P / len(cells):
            return Pool(math.sqrt(everything / df), df, cells)
        del cells[worst]
    return None


def seeds_needed(sd, gap, confidence=CONFIDENCE, limit=1000, power=0.5, arms=2):
    """The fewest seeds with which a true difference `gap`, of deviation sd, has an interval without 0 with probability
    `power`; at 0.5 the interval is narrower than the gap on each side. The deviation is that of 2 arms, or pooled over
    more. None: more than the limit."""
    # quantiles of the normal distribution are below those of t
    least = ((normal_quantile((1 + confidence) / 2) + normal_quantile(power)) * sd / gap) ** 2
    for n in range(max(2, math.floor(min(least, limit + 1))), limit + 1):
        df = (arms - 1) * (n - 1)
        if (t_quantile((1 + confidence) / 2, df) + t_quantile(power, df)) * sd / math.sqrt(n) < abs(gap):
            return n
    return None


def holm(ps):
    """Holm's adjusted p of several comparisons, in their order. None stays None."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted, largest = list(ps), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = largest
    return adjusted


def holm_levels(ps, alpha=1 - CONFIDENCE):
    """The significance level at which Holm's method tests each p, in their order. Those after the first that it does
    not reject have the level of that one."""
    levels, level, rejecting = [0.0] * len(ps), alpha, True
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        level = alpha / (len(ps) - rank) if rejecting else level
        levels[i], rejecting = level, rejecting and ps[i] < level
    return levels


def look_levels(looks, alpha=1 - CONFIDENCE):
    """{number of seeds: share of the level} of looks at growing numbers of seeds. Up to the share t of the seeds

        a(t) = 2 - 2 Phi(z / sqrt(t)),  z = the quantile of Phi at 1 - alpha / 2

    of the level is spent (Lan and DeMets 1983, their function that is like the bounds of O'Brien and Fleming), and a
    look has what it adds. The sum is alpha, so that with at most that probability any look errs, however the looks
    depend on each other; with their joint normal distribution the last look would get more."""
    z, spent, levels = normal_quantile(1 - alpha / 2), 0.0, {}
    for n in sorted(looks):
        total = 2 * float(special.ndtr(-z / math.sqrt(n / max(looks))))
        levels[n], spent = (total - spent) / alpha, total
    return levels


def smooth(ys, window):
    """Centred running mean over up to `window` finite values; None without finite values."""
    half, sums, counts = window // 2, [0.0], [0]
    for y in ys:
        good = finite(y)
        sums.append(sums[-1] + (y if good else 0))
        counts.append(counts[-1] + good)
    result = []
    for i in range(len(ys)):
        low, high = max(0, i - half), min(len(ys), i + half + 1)
        n = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / n if n else None)
    return result


def thin(xs, most):
    """Indices of at most `most` evenly spaced values, including the first and the last."""
    n = len(xs)
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def z_scores(values):
    """Of each value its distance from the mean of the last SPIKE_WINDOW finite values before it, in their standard
    deviations; None for a value that is not finite, or with fewer than SPIKE_LEAST values before it."""
    window, total, squares, zs = deque(), 0.0, 0.0, []
    for x in values:
        n, z = len(window), None
        if finite(x) and n >= SPIKE_LEAST:
            m = total / n
            variance = squares / n - m * m
            if variance > 1e-12 * m * m:  # less is rounding of equal values
                z = (x - m) / math.sqrt(variance)
            else:
                z = 0.0 if abs(x - m) <= 1e-6 * abs(m) else math.copysign(math.inf, x - m)
        zs.append(z)
        if finite(x):
            window.append(x)
            total, squares = total + x, squares + x * x
        if len(window) > SPIKE_WINDOW:
            old = window.popleft()
            total, squares = total - old, squares - old * old
            if old * old > 1e6 * squares:  # its rounding errors would remain in the sums
                total, squares = math.fsum(window), math.fsum(y * y for y in window)
    return zs


def spikes(zs, limit=SPIKE_Z):
    """(indices of spikes, number of values with a z, score in percent or None) of z scores."""
    judged = [i for i, z in enumerate(zs) if z is not None]
    found = [i for i in judged if zs[i] >= limit]
    return found, len(judged), 100 * len(found) / len(judged) if judged else None


def largest_stable(ladder, tolerance=STABLE_TOLERANCE):
    """(the largest rate up to which the final loss of every run is within `tolerance` of the best mean, or None;
    whether that is the last rate) of {rate: [final losses, None of a diverged run]}."""
    means = {rate: mean(losses) for rate, losses in ladder.items() if losses and all(finite(x) for x in losses)}
    if not means:
        return None, False
    best, stable = min(means.values()), None
    rates = sorted(rate for rate in ladder if ladder[rate])
    first = min(means, key=means.get)  # below the best rate a high loss is slow learning, not instability
    for rate in rates:
        if rate < first:
            if rate in means:
                stable = rate
            continue
        if rate not in means or max(ladder[rate]) > best + tolerance:
            return stable, False
        stable = rate
    return stable, True


def sensitivity(ladder, initial):
    """Mean over the rates of min(loss, initial loss), minus the best (Wortsman et al. 2023). A diverged run has the
    initial loss. None for fewer than two rates."""
    means = [mean([min(x, initial) if finite(x) else initial for x in losses]) for losses in ladder.values() if losses]
    return mean(means) - min(means) if len(means) >= 2 else None
