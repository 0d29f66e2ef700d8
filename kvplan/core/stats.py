"""Medians, bounds and tests for few and noisy samples; distribution-free where the sample allows it.

Methods: order-statistic interval of a median and the Hodges-Lehmann shift with the Mann-Whitney interval (Hollander,
Wolfe and Chicken, Nonparametric Statistical Methods, ch. 3 and 4); Clopper-Pearson (Biometrika 26, 1934); Welch
(Biometrika 34, 1947); Holm (Scand. J. Statist. 6, 1979); the incomplete beta function by Lentz's continued fraction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, exp, floor, inf, lgamma, log, log1p, sqrt
from statistics import fmean, median, variance
from typing import Final

_TINY: Final = 1e-300
_STEPS: Final = 400
_BISECTIONS: Final = 60


@dataclass(frozen=True, slots=True)
class Interval:
    """Two ends, and the confidence that they really have: with few values it may be less than asked."""

    low: float
    high: float
    confidence: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the *percent*-th percentile, interpolated between samples.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return an interval for the median of what *values* were drawn from, whatever its distribution.

    >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0])
    Interval(low=1.0, high=5.0, confidence=0.9375)
    """
    ordered, count = sorted(values), len(values)
    cut = _cut(count, (1 - confidence) / 2)
    return Interval(ordered[cut], ordered[count - 1 - cut], 1 - 2 * _half_binomial(cut, count))


def median_bounds(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a lower and an upper bound of the median, each one-sided at *confidence* where the count allows it."""
    ordered, count = sorted(values), len(values)
    cut = _cut(count, 1 - confidence)
    return ordered[cut], ordered[count - 1 - cut]


def _half_binomial(successes: int, trials: int) -> float:
    """Return P(X <= successes) of *trials* fair coins."""
    return float(sum(comb(trials, k) for k in range(successes + 1)) / 2**trials)


def _cut(count: int, tail: float) -> int:
    """Return how many values may be cut from one end so that the median is beyond the rest at most with *tail*."""
    cut = 0
    while cut + 1 < (count + 1) / 2 and _half_binomial(cut + 1, count) <= tail:
        cut += 1
    return cut


def shift(values: Sequence[float], others: Sequence[float], confidence: float = 0.95) -> tuple[float, Interval]:
    """Return by how much *values* lie above *others*, and an interval: the median of all differences of pairs."""
    differences = sorted(a - b for a in values for b in others)
    counts = _mann_whitney_counts(len(values), len(others))
    total, cut, tail = sum(counts), 1, counts[0]
    while 2 * (cut + 1) <= len(differences) and tail + counts[cut] <= total * (1 - confidence) / 2:
        tail += counts[cut]
        cut += 1
    return median(differences), Interval(differences[cut - 1], differences[-cut], 1 - 2 * tail / total)


@cache
def _mann_whitney_counts(n: int, m: int) -> tuple[int, ...]:
    """Return how many orders of n and m values give each Mann-Whitney statistic 0 to n * m."""
    # the coefficients of the Gaussian binomial [n + m choose n], built one factor at a time
    counts = [1] + [0] * (n * m)
    for i in range(1, n + 1):
        for s in range(n * m, m + i - 1, -1):
            counts[s] -= counts[s - m - i]
        for s in range(i, n * m + 1):
            counts[s] += counts[s - i]
    return tuple(counts)


def welch_above(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the p-value of "the mean of *values* is not above that of *others*"; 1 with under two values a side."""
    n, m = len(values), len(others)
    if n < 2 or m < 2:
        return 1.0
    difference = fmean(values) - fmean(others)
    a, b = variance(values) / n, variance(others) / m
    if a + b == 0:
        return 0.0 if difference > 0 else 1.0
    freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (m - 1))
    return student_above(difference / sqrt(a + b), freedom)


def mean_above_zero(values: Sequence[float]) -> float:
    """Return the p-value of "the mean of *values* is not above 0"; 1 with under two values."""
    if len(values) < 2:
        return 1.0
    spread = variance(values) / len(values)
    if spread == 0:
        return 0.0 if values[0] > 0 else 1.0
    return student_above(fmean(values) / sqrt(spread), len(values) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected so that any false alarm among them all is no likelier than the level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        worst = max(worst, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = worst
    return corrected


def sign_test_above(worse: int, better: int) -> float:
    """Return the p-value of "worse is no likelier than better" among pairs that differ.

    >>> sign_test_above(5, 0)
    0.03125
    """
    return 1.0 if worse == 0 else 1 - _half_binomial(worse - 1, worse + better)


@cache
def binomial_upper(successes: int, trials: int, confidence: float) -> float:
    """Return the Clopper-Pearson upper bound of a share.

    >>> round(binomial_upper(0, 59, 0.95), 4)
    0.0495
    """
    if successes >= trials:
        return 1.0
    return _solve(lambda share: beta_cdf(share, successes + 1, trials - successes), confidence, 0, 1)


def binomial_lower(successes: int, trials: int, confidence: float) -> float:
    """Return the Clopper-Pearson lower bound of a share."""
    return 1 - binomial_upper(trials - successes, trials, confidence)


def student_above(value: float, freedom: float) -> float:
    """Return P(T > *value*) of Student's t.

    >>> round(student_above(2.132, 4), 3)
    0.05
    """
    tail = beta_cdf(freedom / (freedom + value * value), freedom / 2, 0.5) / 2
    return tail if value > 0 else 1 - tail


@cache
def student_quantile(confidence: float, freedom: float) -> float:
    """Return the t that is exceeded with probability 1 - *confidence*, for a confidence of at least a half."""
    return _solve(lambda value: 1 - student_above(value, freedom), confidence, 0, 1e4)


def _solve(rising: Callable[[float], float], goal: float, low: float, high: float) -> float:
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < goal else (low, middle)
    return high


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    return front * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of I_x(a, b) (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value, previous = d, inf
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value *= c * d
        if abs(value - previous) <= 1e-15 * abs(value):
            break
        previous = value
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
