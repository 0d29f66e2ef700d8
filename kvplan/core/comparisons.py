"""What a comparison of two profiles, or of one with a budget, says figure by figure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kvplan.core.stats import holm
from kvplan.errors import ExitStatus

LEVEL: Final = 0.05
"""Of any false alarm among all figures of a comparison."""


class Standing(StrEnum):
    """What became of a figure."""

    HELD = "held"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureVerdict:
    """One figure of one cell, or of one quality result.

    Attributes:
        cell: The cell's label, or "profile".
        current: The figure as compared: bytes, a share, or a time over the 16-bit kernel's.
        baseline: What it is held against.
        low: Lower end of the interval of current over baseline; None where the figure is exact.
        high: Upper end likewise.
        reason: Why, where the figures alone do not say it.
    """

    cell: str
    figure: str
    standing: Standing
    unit: str = ""
    current: float | None = None
    baseline: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All verdicts.

    Attributes:
        against: What the profile was held against, in words.
        margin: The part by which a time may be above the baseline's.
    """

    verdicts: tuple[FigureVerdict, ...]
    against: str
    margin: float

    def count(self, standing: Standing) -> int:
        """Return how many figures stand so."""
        return sum(verdict.standing is standing for verdict in self.verdicts)

    @property
    def status(self) -> ExitStatus:
        """A regression is 1; else anything that could not be told is 3; else 0."""
        if self.count(Standing.REGRESSED):
            return ExitStatus.NOT_MET
        if self.count(Standing.NOT_COMPARABLE) or self.count(Standing.UNDECIDED):
            return ExitStatus.UNSUPPORTED
        return ExitStatus.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        counts = ", ".join(f"{self.count(s)} {s}" for s in Standing if self.count(s))
        total = len(self.verdicts)
        return f"{total} figure{'s' * (total != 1)} against {self.against}: {counts}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A verdict that waits for the correction over all of them.

    Attributes:
        verdict: As it stands where there is no rise.
        above: Whether the rise is beyond what is allowed.
        unclear: Whether the spread is so wide that an insignificant rise says nothing.
        p_value: Of "there is no rise".
    """

    verdict: FigureVerdict
    above: bool
    unclear: bool
    p_value: float


def decide(verdicts: Sequence[FigureVerdict | Suspect]) -> tuple[FigureVerdict, ...]:
    """Return all verdicts, the suspects decided together."""
    suspects = [verdict for verdict in verdicts if isinstance(verdict, Suspect)]
    corrected = iter(holm([suspect.p_value for suspect in suspects]))
    return tuple(_settle(verdict, next(corrected)) if isinstance(verdict, Suspect) else verdict for verdict in verdicts)


def _settle(suspect: Suspect, p_value: float) -> FigureVerdict:
    if suspect.above and p_value < LEVEL:
        return replace(suspect.verdict, standing=Standing.REGRESSED)
    if suspect.unclear:
        return replace(suspect.verdict, standing=Standing.UNDECIDED, reason="too noisy to tell; measure more")
    if suspect.above:
        return replace(suspect.verdict, reason="above what is allowed, within noise")
    return suspect.verdict
