from typing import Any

import pytest

from kvplan.core.latency import TimeEstimate
from kvplan.core.plans import Gap, Quantity, Status
from kvplan.core.quality_bounds import Bound, bound_quality
from kvplan.core.verdicts import quality_verdicts, time_verdict
from kvplan.core.workloads import QualityBudget


@pytest.mark.parametrize(
    ("low", "value", "high", "status", "gap"),
    [
        (0.008, 0.009, 0.010, Status.FITS, Gap.NONE),
        (0.008, 0.009, 0.011, Status.UNDECIDED, Gap.SPREAD),
        (0.009, 0.011, 0.012, Status.UNDECIDED, Gap.SPREAD),
        (0.0101, 0.011, 0.012, Status.OVER, Gap.NONE),
    ],
)
def test_a_time_fits_by_its_upper_bound_and_is_over_by_its_lower(
    low: float, value: float, high: float, status: Status, gap: Gap
) -> None:
    verdict = time_verdict(Quantity.TPOT, 95, 10.0, TimeEstimate(value_s=value, low_s=low, high_s=high))
    assert (verdict.status, verdict.gap) == (status, gap)


def test_an_absent_time_is_missing_with_its_reason() -> None:
    verdict = time_verdict(Quantity.TTFT, 95, 10.0, TimeEstimate(reason="not measured"))
    assert (verdict.status, verdict.gap, verdict.reason) == (Status.UNDECIDED, Gap.MISSING, "not measured")


@pytest.mark.parametrize(
    ("part", "status", "gap"),
    [(1.5, Status.FITS, Gap.NONE), (1.0, Status.UNDECIDED, Gap.SPREAD), (0.5, Status.OVER, Gap.NONE)],
)
def test_quality_fits_by_its_upper_bound_and_is_over_by_its_estimate(
    make: Any, part: float, status: Status, gap: Gap
) -> None:
    bounds = bound_quality(make.quality("int4"), 0.95)
    budget = QualityBudget(max_kl=bounds.kl.estimate * part)
    (verdict,) = quality_verdicts(budget, bounds, quantized=True)
    assert (verdict.status, verdict.gap) == (status, gap)
    assert bounds.kl.upper is not None
    assert bounds.kl.estimate < bounds.kl.upper < bounds.kl.estimate * 1.5


def test_a_single_document_never_proves_that_a_budget_is_kept(make: Any) -> None:
    bounds = bound_quality(make.quality("int8", documents=1), 0.95)
    assert bounds.kl == Bound(bounds.kl.estimate, None, bounds.kl.reason)
    (verdict,) = quality_verdicts(QualityBudget(max_kl=10.0), bounds, quantized=True)
    assert verdict.status is Status.UNDECIDED


def test_16_bits_cost_nothing(make: Any) -> None:
    budget = QualityBudget(max_kl=0.0, max_perplexity_increase=0.0, max_retrieval_drop=0.0)
    assert {verdict.status for verdict in quality_verdicts(budget, None, quantized=False)} == {Status.FITS}


def test_too_few_trials_say_how_many_would_do(make: Any) -> None:
    bounds = bound_quality(make.quality("int8", trials=16), 0.95)
    (verdict,) = quality_verdicts(QualityBudget(max_retrieval_drop=0.05), bounds, quantized=True)
    assert (verdict.status, verdict.gap) == (Status.UNDECIDED, Gap.SPREAD)
    assert "63 without a loss would do" in verdict.reason
    enough = bound_quality(make.quality("int8", trials=63), 0.95)
    (verdict,) = quality_verdicts(QualityBudget(max_retrieval_drop=0.05), enough, quantized=True)
    assert verdict.status is Status.FITS
    short = bound_quality(make.quality("int8", trials=62), 0.95)
    assert quality_verdicts(QualityBudget(max_retrieval_drop=0.05), short, quantized=True)[0].status is Status.UNDECIDED
