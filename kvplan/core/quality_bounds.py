"""What a format costs in quality, with upper bounds that hold at a stated confidence.

Documents are the independent units: positions of one document are not. A figure is a ratio of sums over documents, so
its bound is the larger of a t bound on the linearized ratio (Cochran, Sampling Techniques, 6.4) and, from eight
documents on, a bootstrap-t bound over documents (Efron and Tibshirani, An Introduction to the Bootstrap, ch. 12), which
follows the skew that divergences have. Fewer documents do not show their skew: their t bound is allowed half the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, sqrt
from typing import Final

from kvplan.core.records import DocumentScore, Quality, RetrievalTrial
from kvplan.core.stats import binomial_lower, binomial_upper, percentile, student_quantile

BOOTSTRAP_DOCUMENTS: Final = 8
"""Fewer documents leave too few distinct resamples: of n documents, n^(1-n) of the resamples repeat one document."""
_RESAMPLES: Final = 1999
_SEED: Final = 20240731
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
        kl: Mean divergence of a position, in nats.
        kl_p99: The 99th percentile of positions; None where no positions were kept.
        retrieval_drop: Keys lost minus keys gained over trials; None without trials.
    """

    confidence: float
    documents: int
    positions: int
    quantized_positions: int
    trials: int
    perplexity_16bit: float
    perplexity_increase: Bound
    kl: Bound
    top1_flips: Bound
    kl_p99: float | None
    retrieval_drop: Bound | None


def bound_quality(quality: Quality, confidence: float) -> QualityBounds:
    """Return the bounds of one result, each one-sided at *confidence*."""
    documents = quality.documents
    positions = [document.positions for document in documents]
    total = sum(positions)
    increase = _ratio_bound([d.nll - d.nll_16bit for d in documents], positions, confidence)
    values = [value for document in documents for value in document.kl_values]
    return QualityBounds(
        confidence=confidence,
        documents=len(documents),
        positions=total,
        quantized_positions=sum(document.quantized_positions for document in documents),
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


def retrieval_bound(trials: Sequence[RetrievalTrial], confidence: float) -> Bound:
    """Return the drop in keys found over paired trials; the bound is conservative, and exact for each of its parts."""
    count = len(trials)
    lost = sum(trial.hit_16bit and not trial.hit for trial in trials)
    gained = sum(trial.hit and not trial.hit_16bit for trial in trials)
    allowed = 1 - confidence
    upper = binomial_upper(lost, count, 1 - allowed * _LOST_PART)
    upper -= binomial_lower(gained, count, 1 - allowed * (1 - _LOST_PART)) if gained else 0.0
    return Bound((lost - gained) / count, upper)


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
    error = sqrt(sum(residual**2 for residual in residuals) * count / (count - 1)) / total
    many = count >= BOOTSTRAP_DOCUMENTS
    upper = ratio + student_quantile(confidence if many else (1 + confidence) / 2, count - 1) * error
    if many and error > 0:
        upper = max(upper, ratio + _bootstrap_t(amounts, positions, confidence) * error)
    return Bound(ratio, upper)


def _bootstrap_t(amounts: Sequence[float], positions: Sequence[int], confidence: float) -> float:
    """Return how many standard errors above the ratio the bound lies, by resampling documents."""
    import numpy as np

    amount, number = np.asarray(amounts, dtype=np.float64), np.asarray(positions, dtype=np.float64)
    count = len(amount)
    ratio = amount.sum() / number.sum()
    drawn = np.random.default_rng(_SEED).integers(0, count, size=(_RESAMPLES, count))
    amounts_drawn, numbers_drawn = amount[drawn], number[drawn]
    totals = numbers_drawn.sum(axis=1)
    ratios = amounts_drawn.sum(axis=1) / totals
    residuals = amounts_drawn - ratios[:, None] * numbers_drawn
    errors = np.sqrt((residuals**2).sum(axis=1) * count / (count - 1)) / totals
    steps = np.where(errors > 0, (ratios - ratio) / np.where(errors > 0, errors, 1), 0.0)
    return float(-np.quantile(steps, 1 - confidence))
