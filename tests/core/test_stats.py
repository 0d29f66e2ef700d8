import random
from itertools import permutations
from math import comb
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.stats import (
    beta_cdf,
    binomial_lower,
    binomial_upper,
    holm,
    mean_above_zero,
    median_bounds,
    median_interval,
    percentile,
    shift,
    sign_test_above,
    student_above,
    student_quantile,
    welch_above,
)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 6.314), (4, 2.132), (8, 1.860), (30, 1.697)])
def test_student_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=5e-4)
    assert student_above(quantile, freedom) == pytest.approx(0.05, abs=2e-4)
    assert student_above(-quantile, freedom) == pytest.approx(0.95, abs=2e-4)


def test_beta_cdf_is_a_sum_of_binomials() -> None:
    share, n, k = 0.3, 12, 4
    tail = sum(comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k, n + 1))
    assert beta_cdf(share, k, n - k + 1) == pytest.approx(tail, rel=1e-12)
    assert beta_cdf(0, 2, 3) == 0
    assert beta_cdf(1, 2, 3) == 1


def test_no_loss_in_59_trials_bounds_the_share_below_five_percent() -> None:
    assert binomial_upper(0, 59, 0.95) < 0.05 < binomial_upper(0, 58, 0.95)
    assert binomial_upper(7, 7, 0.95) == 1
    assert binomial_lower(0, 7, 0.95) == 0


def test_interval_of_five_repeats_is_their_range_and_says_that_it_holds_in_94_percent() -> None:
    interval = median_interval([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (interval.low, interval.high) == (1.0, 5.0)
    assert interval.confidence == 0.9375


def test_more_repeats_cut_the_extremes() -> None:
    assert median_interval([float(i) for i in range(12)]).low == 2
    assert median_bounds([float(i) for i in range(8)]) == (1.0, 6.0)


def test_interval_of_a_median_covers_as_often_as_it_says() -> None:
    draw = random.Random(7)
    hits = 0
    for _ in range(1500):
        interval = median_interval([draw.expovariate(1.0) for _ in range(9)], 0.95)
        hits += interval.low <= 0.6931471805599453 <= interval.high
    assert hits / 1500 == pytest.approx(median_interval(range(9), 0.95).confidence, abs=0.018)


def test_interval_of_a_shift_covers_as_often_as_it_says() -> None:
    draw = random.Random(11)
    hits, confidence = 0, 0.0
    for _ in range(800):
        base = [draw.expovariate(1.0) for _ in range(5)]
        current = [0.3 + draw.expovariate(1.0) for _ in range(5)]
        _, interval = shift(current, base, 0.95)
        confidence = interval.confidence
        hits += interval.low <= 0.3 <= interval.high
    assert confidence >= 0.95
    assert hits / 800 == pytest.approx(confidence, abs=0.022)


def test_confidence_of_a_shift_is_that_of_every_order() -> None:
    _, interval = shift([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 0.8)
    covered = 0
    for order in permutations(range(6)):
        _, drawn = shift([float(v) for v in order[:3]], [float(v) for v in order[3:]], 0.8)
        covered += drawn.low < 0 < drawn.high
    assert interval.confidence == pytest.approx(covered / 720)


def test_one_wild_repeat_does_not_move_the_shift() -> None:
    base = [1.0, 1.01, 0.99, 1.0, 1.02]
    point, _ = shift([1.0, 1.01, 0.99, 1.0, 9.0], base)
    assert abs(point) <= 0.011


def test_welch_finds_a_shift_and_keeps_its_level() -> None:
    draw = random.Random(3)
    alarms = finds = 0
    for _ in range(800):
        base = [draw.gauss(0, 1) for _ in range(5)]
        alarms += welch_above([draw.gauss(0, 2) for _ in range(5)], base) < 0.05
        finds += welch_above([draw.gauss(6, 2) for _ in range(5)], base) < 0.05
    assert alarms / 800 < 0.06
    assert finds / 800 > 0.95


@pytest.mark.parametrize("few", [[], [1.0]])
def test_too_few_values_never_alarm(few: list[float]) -> None:
    assert welch_above(few, [0.0, 0.1]) == 1
    assert mean_above_zero(few) == 1


def test_values_without_spread_decide_by_sign() -> None:
    assert welch_above([2.0, 2.0], [1.0, 1.0]) == 0
    assert welch_above([1.0, 1.0], [1.0, 1.0]) == 1
    assert mean_above_zero([0.0, 0.0]) == 1


def test_holm_multiplies_the_smallest_most_and_keeps_the_order() -> None:
    assert holm([0.04, 0.01, 0.9]) == pytest.approx([0.08, 0.03, 0.9])
    assert holm([]) == []


def test_sign_test_is_exact() -> None:
    assert sign_test_above(6, 0) == 1 / 64
    assert sign_test_above(2, 2) == pytest.approx(11 / 16)
    assert sign_test_above(0, 3) == 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_a_percentile_lies_among_the_samples(samples: list[float], percent: float) -> None:
    assert min(samples) <= percentile(samples, percent) <= max(samples)
    assert percentile(samples, 50) == pytest.approx(median(samples), abs=1e-6)
