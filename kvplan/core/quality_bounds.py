"""What a format costs in quality, with upper bounds that hold at a stated confidence.

Documents are the independent units: positions of one document are not. A figure is a ratio of sums over documents. Its
bound is the larger of a t bound on the linearized ratio (Cochran, Sampling Techniques, 6.4) and, from eight documents
on, the bound that Hall's transformation gives (J. R. Statist. Soc. B 54, 1992), which follows the skew that divergences
have. In simulation it covers as a bootstrap-t over documents does, and needs no resampling. Fewer documents do not show
their skew: their t bound is allowed half the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, copysign, exp, expm1, log, log1p, sqrt
from typing import Final

from kvplan.core.records import DocumentScore, Quality, RetrievalTrial
from kvplan.core.stats import binomial_lower, binomial_upper, percentile, student_quantile
from kvplan.errors import InputError

SKEW_DOCUMENTS: Final = 8
"""Fewer documents say too little of how skewed they are."""
_NATS_MAX: Final = 700.0
"""Of one position: e^-700 is next to the smallest number that 64 bits hold."""
_SYMMETRIC: Final = 1e-6
_LOST_PART: Final = 0.8
"""Of the error allowed to a retrieval drop, the part spent on lost keys; the rest is spent on gained ones."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An estimate and its upper bound.

    Attributes:
        upper: None where there is too little to say anything of the spread.
        reason: Why there is no bound.
    """

    estimate: float
    upper: float | None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityBounds:
    """One format's quality against 16 bits, paired. Shares are fractions.

    Attributes:
        longest_tokens: Of what was scored: the longest trial, or where there is none the positions of a document,
            which are those scored and fewer than it has.
        kl: Mean divergence of a position, in nats.
        kl_p99: The 99th percentile of positions; None where no positions were kept.
        retrieval_drop: Keys lost minus keys gained over trials; None without trials.
    """

    confidence: float
    documents: int
    positions: int
    quantized_positions: int
    longest_tokens: int
    trials: int
    perplexity_16bit: float
    perplexity_increase: Bound
    kl: Bound
    top1_flips: Bound
    kl_p99: float | None
    retrieval_drop: Bound | None


def bound_quality(quality: Quality, confidence: float) -> QualityBounds:
    """Return the bounds of one result, each one-sided at *confidence*.

    Raises:
        InputError: There are no documents, or one holds what no scoring gives.
    """
    documents = quality.documents
    positions = [document.positions for document in documents]
    total = sum(positions)
    if problem := next(filter(None, map(flaw, documents)), "" if documents else "no documents"):
        raise InputError(f"quality of {quality.key.format}: {problem}", hint="score it again")
    increase = _ratio_bound([d.nll - d.nll_16bit for d in documents], positions, confidence)
    values = [value for document in documents for value in document.kl_values]
    return QualityBounds(
        confidence=confidence,
        documents=len(documents),
        positions=total,
        quantized_positions=sum(document.quantized_positions for document in documents),
        longest_tokens=max([*positions, *(trial.context_tokens for trial in quality.trials)]),
        trials=len(quality.trials),
        perplexity_16bit=exp(sum(document.nll_16bit for document in documents) / total),
        perplexity_increase=Bound(
            expm1(increase.estimate), None if increase.upper is None else expm1(increase.upper), increase.reason
        ),
        kl=_ratio_bound([document.kl for document in documents], positions, confidence),
        top1_flips=_flips_bound(documents, confidence),
        kl_p99=percentile(values, 99) if values else None,
        retrieval_drop=retrieval_bound(quality.trials, confidence) if quality.trials else None,
    )


def flaw(document: DocumentScore) -> str:
    """Return what is impossible about a document's scores; empty where nothing is."""
    if document.positions < 1:
        return "a document without scored positions"
    if not 0 <= document.flips <= document.positions:
        return f"{document.flips} flips in {document.positions} positions"
    worst = max(abs(document.nll), abs(document.nll_16bit), abs(document.kl)) / document.positions
    return f"{worst:.3g} nats a position" if worst > _NATS_MAX else ""


def retrieval_bound(trials: Sequence[RetrievalTrial], confidence: float) -> Bound:
    """Return the drop in keys found over paired trials; the bound is conservative, and exact for each of its parts."""
    count = len(trials)
    lost = sum(trial.hit_16bit and not trial.hit for trial in trials)
    gained = sum(trial.hit and not trial.hit_16bit for trial in trials)
    allowed = 1 - confidence
    upper = binomial_upper(lost, count, 1 - allowed * _LOST_PART)
    upper -= binomial_lower(gained, count, 1 - allowed * (1 - _LOST_PART)) if gained else 0.0
    return Bound((lost - gained) / count, upper)


def trials_needed(limit: float, confidence: float) -> int:
    """Return the trials that prove a retrieval drop under *limit* when not one key is lost.

    >>> trials_needed(0.05, 0.95)
    63
    """
    return ceil(log((1 - confidence) * _LOST_PART) / log1p(-limit)) if 0 < limit < 1 else 0


def _flips_bound(documents: Sequence[DocumentScore], confidence: float) -> Bound:
    """Return the share of flips; never under the binomial bound, which speaks where no document has any."""
    flips = [document.flips for document in documents]
    positions = [document.positions for document in documents]
    bound = _ratio_bound(flips, positions, confidence)
    if bound.upper is None:
        return bound
    return Bound(bound.estimate, max(bound.upper, binomial_upper(sum(flips), sum(positions), confidence)))


def _ratio_bound(amounts: Sequence[float], positions: Sequence[int], confidence: float) -> Bound:
    """Return sum(amounts) / sum(positions) and its upper bound over documents."""
    count, total = len(amounts), sum(positions)
    ratio = sum(amounts) / total
    if count < 2:
        return Bound(ratio, None, "one document says nothing of how documents differ")
    residuals = [amount - ratio * number for amount, number in zip(amounts, positions, strict=True)]
    deviation = sqrt(sum(residual**2 for residual in residuals) / (count - 1))
    error = deviation * sqrt(count) / total
    if count < SKEW_DOCUMENTS or deviation == 0:
        return Bound(ratio, ratio + student_quantile((1 + confidence) / 2, count - 1) * error)
    steps = student_quantile(confidence, count - 1)
    third = sum((residual / deviation) ** 3 for residual in residuals) / count
    skew = third * sqrt(count * (count - 1)) / (count - 2)
    return Bound(ratio, ratio + max(steps, _hall_steps(steps, skew, count)) * error)


def _hall_steps(steps: float, skew: float, count: int) -> float:
    """Return the standard errors up to the bound, when a symmetric sample would take *steps*."""
    if abs(skew) < _SYMMETRIC:
        return steps
    root = sqrt(count)
    inner = 1 - skew / root * (steps + skew / (6 * root))
    return 3 * root / skew * (1 - copysign(abs(inner) ** (1 / 3), inner))
