"""stats.py: the statistics of the report, as functions of numbers.

A gap is a paired difference: arm minus reference at the same seed, hence with the same data in the same order, and the
same initial weights of tensors with equal shapes. Its interval is Student's t over the seeds, with n - 1 degrees of
freedom; it assumes that the differences are independent and approximately normal. One seed has no interval.
All pairing is by seed, in paired().
"""

import math
from collections import deque
from statistics import fmean as mean
from statistics import stdev

import python_environment

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


def t_interval(xs):
    """The estimate of the mean of independent values: {mean, half, n, sd, p, df}. half: half the width of the interval;
    p: two-sided, of mean 0; df: degrees of freedom. One value has a mean alone. None without values."""
    if not xs:
        return None
    n, m = len(xs), mean(xs)
    if n == 1:
        return dict(mean=m, half=None, n=n, sd=None, p=None, df=None)
    sd = stdev(xs)
    error = sd / math.sqrt(n)
    p = 2 * float(special.stdtr(n - 1, -abs(m) / error)) if error else float(m == 0)
    half = float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    return dict(mean=m, half=half, n=n, sd=sd, p=p, df=n - 1)


def paired(arm, reference):
    """{seed: arm minus reference} of two {seed: value}, over the seeds with two finite values, in order."""
    seeds = sorted(s for s in arm if s in reference and finite(arm[s]) and finite(reference[s]))
    return {s: arm[s] - reference[s] for s in seeds}


def paired_gap(arm, reference):
    return t_interval(list(paired(arm, reference).values()))


def holm(ps):
    """Holm's adjusted p of several comparisons, in their order. None stays None."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    adjusted, largest = list(ps), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        adjusted[i] = largest
    return adjusted


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


def spikes(zs):
    """(indices of spikes, number of values with a z) of z scores."""
    judged = [i for i, z in enumerate(zs) if z is not None]
    return [i for i in judged if zs[i] >= SPIKE_Z], len(judged)


def largest_stable(ladder):
    """(the largest rate up to which the final loss of every run is within STABLE_TOLERANCE of the best mean, or None;
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
        if rate not in means or max(ladder[rate]) > best + STABLE_TOLERANCE:
            return stable, False
        stable = rate
    return stable, True


def sensitivity(ladder, initial):
    """Mean over the rates of min(loss, initial loss), minus the best (Wortsman et al. 2023). A diverged run has the
    initial loss. None for fewer than two rates."""
    means = [mean([min(x, initial) if finite(x) else initial for x in losses]) for losses in ladder.values() if losses]
    return mean(means) - min(means) if len(means) >= 2 else None
