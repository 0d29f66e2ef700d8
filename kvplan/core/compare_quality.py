"""The quality of two profiles, paired by document and by trial."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import expm1
from typing import Final

from kvplan.core.comparisons import FigureVerdict, Standing, Suspect
from kvplan.core.plans import Quantity
from kvplan.core.quality_bounds import flaw
from kvplan.core.records import DocumentScore, Profile, Quality, QualityKey
from kvplan.core.stats import mean_above_zero, sign_test_above

ALLOWED_PART: Final = 0.10
"""Of the baseline's own damage, that the damage may grow by."""
NOISE_FACTOR: Final = 2.0
"""How often the noise of 16 bits against 16 bits the damage may grow by."""
RETRIEVAL_ALLOWED: Final = 0.02
"""Of all trials, that may be lost: one in fifty."""


@dataclass(frozen=True, slots=True)
class _Measure:
    """A figure that is a ratio of sums over documents.

    Attributes:
        amount: What a document adds to the numerator.
        floor: A difference this small is rounding.
        finish: From the ratio to the figure.
    """

    quantity: Quantity
    amount: Callable[[DocumentScore], float]
    floor: float
    finish: Callable[[float], float]

    def figure(self, documents: Sequence[DocumentScore]) -> float:
        """Return the figure over *documents*."""
        return self.finish(sum(map(self.amount, documents)) / sum(document.positions for document in documents))


_MEASURES: Final = (
    _Measure(Quantity.PERPLEXITY, lambda d: d.nll - d.nll_16bit, 1e-4, expm1),
    _Measure(Quantity.KL, lambda d: d.kl, 1e-6, float),
    _Measure(Quantity.FLIPS, lambda d: float(d.flips), 5e-4, float),
)


def compare_quality(current: Profile, baseline: Profile, difference: str) -> list[FigureVerdict | Suspect]:
    """Return a verdict on every quality figure of *baseline*; *difference* is what keeps them apart, if anything."""
    noise = next((q for q in baseline.quality if q.key.format in ("bf16", "fp16") and _sound(q)), None)
    found: list[FigureVerdict | Suspect] = []
    for base in baseline.quality:
        score = next((q for q in current.quality if _question(q.key) == _question(base.key)), None)
        obstacle = difference or ("" if score is None else _obstacle(score, base))
        if score is None:
            found.append(_missing(base.key))
        elif obstacle:
            found.append(
                FigureVerdict(
                    cell=_label(base.key), figure="quality", standing=Standing.NOT_COMPARABLE, reason=obstacle
                )
            )
        else:
            found += _paired(score, base, noise)
    return found


def _sound(quality: Quality) -> bool:
    return bool(quality.documents) and not any(map(flaw, quality.documents))


def _question(key: QualityKey) -> tuple[object, ...]:
    return (key.format, key.block_tokens, key.prefill, key.chunk_tokens)


def _label(key: QualityKey) -> str:
    return f"{key.format}/b{key.block_tokens}/quality"


def _missing(key: QualityKey) -> FigureVerdict:
    reason = "the quality result is missing from the profile"
    return FigureVerdict(cell=_label(key), figure="quality", standing=Standing.REGRESSED, reason=reason)


def _obstacle(score: Quality, base: Quality) -> str:
    for quality in (score, base):
        if problem := next(filter(None, map(flaw, quality.documents)), ""):
            return problem
    if score.key.data_digest != base.key.data_digest or len(score.documents) != len(base.documents):
        return "other text was scored"
    if score.key.kernel != base.key.kernel:
        return f"another kernel: {score.key.kernel}, the baseline has {base.key.kernel}"
    if score.key.kvplan_version != base.key.kvplan_version:
        return f"another version: kvplan {score.key.kvplan_version}, the baseline has {base.key.kvplan_version}"
    return ""


def _paired(score: Quality, base: Quality, noise: Quality | None) -> Iterator[FigureVerdict | Suspect]:
    for measure in _MEASURES:
        if base.documents:
            yield _document_suspect(measure, score, base, noise)
    if base.trials:
        yield _trial_verdict(score, base)


def _document_suspect(measure: _Measure, score: Quality, base: Quality, noise: Quality | None) -> Suspect:
    ours, theirs = measure.figure(score.documents), measure.figure(base.documents)
    allowed = max(measure.floor, ALLOWED_PART * abs(theirs))
    if noise is not None:
        allowed = max(allowed, NOISE_FACTOR * abs(measure.figure(noise.documents)))
    rises = [
        measure.amount(mine) - measure.amount(other)
        for mine, other in zip(score.documents, base.documents, strict=True)
    ]
    verdict = FigureVerdict(
        cell=_label(base.key), figure=str(measure.quantity), standing=Standing.HELD, current=ours, baseline=theirs,
        unit="nats" if measure.quantity is Quantity.KL else "share",
    )  # fmt: skip
    above = ours - theirs > allowed
    return Suspect(verdict=verdict, above=above, unclear=above, p_value=mean_above_zero(rises))


def _trial_verdict(score: Quality, base: Quality) -> FigureVerdict | Suspect:
    count = len(base.trials)
    verdict = FigureVerdict(
        cell=_label(base.key), figure=str(Quantity.RETRIEVAL), standing=Standing.HELD, unit="share",
        baseline=_drop(base), current=_drop(score) if score.trials else None,
    )  # fmt: skip
    if len(score.trials) != count:
        reason = f"{len(score.trials)} trials, the baseline has {count}"
        return replace(verdict, standing=Standing.REGRESSED, reason=reason)
    pairs = list(zip(score.trials, base.trials, strict=True))
    lost = sum(other.hit and not mine.hit for mine, other in pairs)
    gained = sum(mine.hit and not other.hit for mine, other in pairs)
    above = lost - gained > RETRIEVAL_ALLOWED * count
    return Suspect(verdict=verdict, above=above, unclear=above, p_value=sign_test_above(lost, gained))


def _drop(quality: Quality) -> float:
    return sum(trial.hit_16bit - trial.hit for trial in quality.trials) / len(quality.trials)
