"""One target held against one setting: fits only when the upper bound does, over only when the estimate is."""

from collections.abc import Sequence
from typing import Final

from kvplan.core.latency import TimeEstimate
from kvplan.core.memory import MemoryPlan
from kvplan.core.plans import Gap, Quantity, Status, Verdict
from kvplan.core.quality_bounds import Bound, QualityBounds, trials_needed
from kvplan.core.specs import Evidence
from kvplan.core.workloads import QualityBudget
from kvplan.units import format_bytes, format_seconds

REASON_QUALITY_ABSENT: Final = "quality was not measured"


def memory_verdict(memory: MemoryPlan) -> Verdict:
    """Return whether the need is within the memory; as sure as the least sure of its terms."""
    predicted = any(term.evidence is Evidence.PREDICTED for term in memory.terms)
    need, limit = memory.need_bytes, memory.limit_bytes
    reason = "" if memory.fits else f"needs {format_bytes(need)}, {format_bytes(limit)} may be used"
    return Verdict(
        quantity=Quantity.MEMORY,
        status=Status.FITS if memory.fits else Status.OVER,
        limit=limit,
        value=need,
        bound=need,
        evidence=Evidence.PREDICTED if predicted else Evidence.EXACT,
        reason=reason,
    )


def time_verdict(quantity: Quantity, percent: int, limit_ms: float, estimate: TimeEstimate) -> Verdict:
    """Return whether a time's bounds are within *limit_ms*."""
    limit_s, value_s = limit_ms / 1000, estimate.value_s
    if value_s is None:
        return Verdict(
            quantity=quantity,
            status=Status.UNDECIDED,
            limit=limit_s,
            percent=percent,
            gap=Gap.MISSING if estimate.attainable else Gap.NONE,
            reason=estimate.reason,
        )
    status, gap, reason = (
        Status.UNDECIDED,
        Gap.SPREAD,
        (f"{format_seconds(estimate.low_s)} to {format_seconds(estimate.high_s)} against {format_seconds(limit_s)}"),
    )
    if estimate.high_s <= limit_s:
        status, gap, reason = Status.FITS, Gap.NONE, ""
    elif estimate.disturbed:
        gap, reason = Gap.MISSING, f"measured while disturbed, {estimate.disturbed}"
    elif estimate.low_s > limit_s:
        status, gap = Status.OVER, Gap.NONE
        reason = f"{format_seconds(value_s)} against {format_seconds(limit_s)}"
    return Verdict(
        quantity=quantity,
        status=status,
        limit=limit_s,
        value=value_s,
        bound=estimate.high_s,
        percent=percent,
        evidence=estimate.evidence,
        gap=gap,
        reason=reason,
    )


def quality_verdicts(budget: QualityBudget, quality: QualityBounds | None, quantized: bool) -> tuple[Verdict, ...]:
    """Return a verdict for each limit of the budget; 16 bits is what is compared with, and costs nothing."""
    return tuple(
        _quality_verdict(quantity, limit, bound, quality, budget.confidence)
        if quantized
        else Verdict(quantity=quantity, status=Status.FITS, limit=limit, value=0.0, bound=0.0, evidence=Evidence.EXACT)
        for quantity, limit, bound in _quality_limits(budget, quality)
    )


def _quality_limits(
    budget: QualityBudget, quality: QualityBounds | None
) -> Sequence[tuple[Quantity, float, Bound | None]]:
    limits = {
        Quantity.PERPLEXITY: budget.max_perplexity_increase,
        Quantity.KL: budget.max_kl,
        Quantity.FLIPS: budget.max_top1_flips,
        Quantity.RETRIEVAL: budget.max_retrieval_drop,
    }
    return [
        (quantity, limit, quality_bound(quality, quantity)) for quantity, limit in limits.items() if limit is not None
    ]


def quality_bound(quality: QualityBounds | None, quantity: Quantity) -> Bound | None:
    """Return the bound of a quality figure; None where it was not measured."""
    if quality is None:
        return None
    return {
        Quantity.PERPLEXITY: quality.perplexity_increase,
        Quantity.KL: quality.kl,
        Quantity.FLIPS: quality.top1_flips,
        Quantity.RETRIEVAL: quality.retrieval_drop,
    }.get(quantity)


def _quality_verdict(
    quantity: Quantity, limit: float, bound: Bound | None, quality: QualityBounds | None, confidence: float
) -> Verdict:
    if bound is None:
        reason = f"{quantity} was not measured" if quality else REASON_QUALITY_ABSENT
        return Verdict(quantity=quantity, status=Status.UNDECIDED, limit=limit, gap=Gap.MISSING, reason=reason)
    estimate, upper = bound.estimate, bound.upper
    status, gap, reason = Status.UNDECIDED, Gap.SPREAD, bound.reason
    if estimate > limit:
        status, gap = Status.OVER, Gap.NONE
        reason = f"{quality_text(quantity, estimate)} of {limit_text(quantity, limit)}"
    elif upper is not None and upper <= limit:
        status, gap = Status.FITS, Gap.NONE
    elif upper is not None:
        reason = f"{quality_text(quantity, estimate)}, at most {quality_text(quantity, upper)}"
        reason += f" of {limit_text(quantity, limit)}"
        needed = trials_needed(limit, confidence)
        if quantity is Quantity.RETRIEVAL and quality and quality.trials < needed:
            reason += f"; {quality.trials} trials are too few, {needed} without a loss would do"
    return Verdict(quantity=quantity, status=status, limit=limit, value=estimate, bound=upper, gap=gap, reason=reason)


def quality_text(quantity: Quantity, value: float) -> str:
    """Return a quality figure as people read it: a signed share, or nats.

    >>> quality_text(Quantity.PERPLEXITY, 0.0123)
    '+1.2%'
    """
    if quantity is Quantity.KL:
        return f"{value:.2g}"
    if quantity is Quantity.FLIPS:
        return f"{100 * value:.1f}%"
    return f"{100 * value:+.1f}%"


def limit_text(quantity: Quantity, limit: float) -> str:
    """Return a quality limit as people write it."""
    return f"{limit:.2g}" if quantity is Quantity.KL else f"{100 * limit:.1f}%"
