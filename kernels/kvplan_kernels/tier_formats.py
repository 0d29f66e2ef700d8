"""Formats that store the tokens of one layer in several ways, by the attention they received, and their names.

Standard library only. `tiers-25-k8v4+50-k4v2` holds the newest 64 tokens, and of those before them the quarter that
received most attention, as k8v4; the next half as k4v2; and drops the rest. Every KV head has its own order of tokens,
and all have equally many in each tier, so that bytes follow from the length alone.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from kvplan_kernels.format import (
    TIERS,
    Axis,
    CacheFormat,
    Fit,
    Lesson,
    TensorFormat,
    Transform,
    UnsupportedError,
    parse,
)

WINDOW_TOKENS: Final = 64
"""What DiffKV keeps in its high tier, arXiv 2412.03131."""
WINDOW_TOKENS_MAX: Final = 9999
WHOLE: Final = "16bit"
"""In a name, a tier of the model's own 16-bit type."""
SCORE_BYTES: Final = 4
POSITION_BYTES: Final = 4
_PERCENT: Final = 100
_NAME: Final = re.compile(r"(?:(?P<score>sum|once)-)?(?:w(?P<window>[0-9]{1,4})-)?(?P<tiers>.+)")
_TIER: Final = re.compile(r"(?P<share>[0-9]{1,3})-(?P<format>.+)")
_MEND: Final = f"write {TIERS}[sum-|once-][w<window>-]<percent>-<format>[+<percent>-<format>...]"
_SIXTEEN_BITS: Final = CacheFormat(key=TensorFormat(bits=16), value=TensorFormat(bits=16))


class Score(StrEnum):
    """What tokens are ordered by; for query heads that share a KV head the largest counts."""

    MEAN = "mean"
    """The mean probability that a token received from the queries that were looked at since it came: DiffKV. Of a
    prompt these are the window's."""
    SUM = "sum"
    """The sum over all queries since it came: H2O, arXiv 2306.14048."""
    ONCE = "once"
    """The sum over the window's queries at the end of the prompt, the largest of 7 neighbours; tokens are placed then
    and never again, and all later ones stay in the first tier: SnapKV, arXiv 2404.14469."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier.

    Attributes:
        share: Percent of the tokens before the window.
        form: How they are stored.
    """

    share: int
    form: CacheFormat

    @property
    def name(self) -> str:
        """As in a format's name."""
        return f"{self.share}-{WHOLE if self.form == _SIXTEEN_BITS else self.form}"


@dataclass(frozen=True, kw_only=True)
class TieredFormat:
    """How the tokens of every layer are stored by the attention they received; made by `parse_tiers`.

    Attributes:
        tiers: From the first, which holds the window as well, to the last; what they leave over is dropped.
        window_tokens: Newest tokens that stay in the first tier.
        score: What tokens are ordered by.
    """

    tiers: tuple[Tier, ...]
    window_tokens: int = WINDOW_TOKENS
    score: Score = Score.MEAN

    @cached_property
    def parts(self) -> tuple[CacheFormat, ...]:
        """The formats in it, each once."""
        return tuple(dict.fromkeys(tier.form for tier in self.tiers))

    def of_layers(self, count: int) -> tuple[CacheFormat, ...]:
        """Refuse: a layer has no one format.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"each of the {count} layers keeps its tokens in tiers of {len(self.tiers)} formats, and this is of one"
        )

    @property
    def calibrated(self) -> tuple[Lesson, ...]:
        """Nothing: tiers hold the heads of a layer apart, and what is learned is of a layer."""
        return ()

    @property
    def kept_percent(self) -> int:
        """Percent of the tokens before the window that are not dropped."""
        return sum(tier.share for tier in self.tiers)

    @property
    def quantized(self) -> bool:
        """Whether any token is stored in fewer than 16 bits, or not at all."""
        return self.kept_percent < _PERCENT or any(form.quantized for form in self.parts)

    @property
    def note_bytes(self) -> int:
        """Bytes of score and position of a token and head, for tokens that are placed again and again."""
        return 0 if self.score is Score.ONCE else SCORE_BYTES + POSITION_BYTES

    @property
    def bits(self) -> tuple[float, float]:
        """Bits of a code of K and of V, the mean of the tokens before the window: none of a dropped one.

        >>> parse_tiers("tiers-25-k8v4+50-k4v2").bits
        (4.0, 2.0)
        """
        key = sum(tier.share * tier.form.key.bits for tier in self.tiers) / _PERCENT
        return key, sum(tier.share * tier.form.value.bits for tier in self.tiers) / _PERCENT

    def blocks(self, tokens: int, block_tokens: int, prompt_tokens: int | None = None) -> tuple[int, ...]:
        """Return the pages of *block_tokens* that hold what `lengths` says of each tier."""
        return tuple(-(-length // block_tokens) for length in self.lengths(tokens, prompt_tokens))

    def lengths(self, tokens: int, prompt_tokens: int | None = None) -> tuple[int, ...]:
        """Return how many of *tokens* tokens each tier holds, in every KV head.

        A tier takes its share of the tokens that the tiers before it leave, rounded down, so that one more token adds
        one to one tier or to none.

        Args:
            tokens: Of the sequence.
            prompt_tokens: Of them, those that were there when tokens were placed once; None for all.

        >>> parse_tiers("tiers-25-k8v4+50-k4v2").lengths(64 + 100)
        (89, 50)
        >>> parse_tiers("tiers-once-w32-25-16bit").lengths(332, prompt_tokens=232)
        (182,)
        """
        placed = tokens if prompt_tokens is None or self.score is not Score.ONCE else min(tokens, prompt_tokens)
        left = max(0, placed - self.window_tokens)
        window, rest, lengths = placed - left, _PERCENT, []
        for tier in self.tiers:
            held = left * tier.share // rest if rest else 0
            lengths.append(held)
            left, rest = left - held, rest - tier.share
        return (window + lengths[0] + tokens - placed, *lengths[1:])

    @property
    def name(self) -> str:
        """The canonical name.

        >>> parse_tiers("tiers-w64-25-k8v4+50-k4v2").name
        'tiers-25-k8v4+50-k4v2'
        """
        score = "" if self.score is Score.MEAN else f"{self.score}-"
        window = "" if self.window_tokens == WINDOW_TOKENS else f"w{self.window_tokens}-"
        return f"{TIERS}{score}{window}{'+'.join(tier.name for tier in self.tiers)}"

    def __str__(self) -> str:
        """Return the name."""
        return self.name


def parse_tiers(name: str) -> TieredFormat:
    """Return the format that *name*, which begins with `TIERS`, stands for.

    Raises:
        UnsupportedError: It cannot be read, or a format in it cannot be that of a tier.
    """
    match = _NAME.fullmatch(name.removeprefix(TIERS))
    if match is None:
        raise UnsupportedError(f"format {name!r}: no tiers; {_MEND}")
    window = WINDOW_TOKENS if match["window"] is None else int(match["window"])
    if not window:
        raise UnsupportedError(f"format {name!r}: a token is placed by what it received, so the window is 1 or more")
    tiers = tuple(_read_tier(name, text) for text in match["tiers"].split("+"))
    if any(not tier.share for tier in tiers[1:]):
        raise UnsupportedError(f"format {name!r}: a tier of 0 percent holds nothing; leave it out")
    if (kept := sum(tier.share for tier in tiers)) > _PERCENT:
        raise UnsupportedError(f"format {name!r}: shares of {kept} percent; {_PERCENT} at most")
    return TieredFormat(tiers=tiers, window_tokens=window, score=Score(match["score"] or Score.MEAN))


def _read_tier(name: str, text: str) -> Tier:
    match = _TIER.fullmatch(text)
    if match is None:
        raise UnsupportedError(f"format {name!r}: tier {text!r}; {_MEND}")
    form = _SIXTEEN_BITS if match["format"] == WHOLE else parse(match["format"])
    if (reason := _refusal(form)) is not None:
        raise UnsupportedError(f"format {name!r}: {form} cannot be a tier's format: {reason}")
    return Tier(int(match["share"]), form)


def _refusal(form: CacheFormat) -> str | None:
    """Return why tokens of *form* cannot be replaced one by one, head by head, or None."""
    if form.residual_tokens or form.sink_tokens:
        return "the window is what stays, and it is of the first tier; leave -r and -s out"
    if any(tensor.quantized and tensor.axis is Axis.CHANNEL for tensor in (form.key, form.value)):
        return "tokens of a channel share a scale, and a tier replaces them one by one"
    if Transform.PREROPE in form.transforms:
        return "what keys are turned by depends on their position, and a tier's tokens lie in no order"
    if any(
        tensor.fit is Fit.NONE and not tensor.code.is_float for tensor in (form.key, form.value) if tensor.quantized
    ):
        return "static codes want scales, which are learned of a layer's heads together, and tiers hold them apart"
    if form.calibrated:
        return "what it learns is of a layer's heads together, and tiers hold them apart"
    return None
