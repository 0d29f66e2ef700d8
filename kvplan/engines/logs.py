"""Start-up logs: lines without what terminals and processes add, figures as they were printed, and what became of them.

A printed figure stands for every value that rounds to it: 3.81 GiB is all from 3.805 to 3.815.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvplan.core.allocation import Setup

_ESCAPES: Final = re.compile(
    r"(?:\x1b|\^\[|#033)?\[\d{0,3}(?:;\d{1,3}){0,9}m|\x1b\[[0-9;?]{0,40}[A-Za-z]|\x1b\][^\x07]{0,999}\x07|\^M"
)
_UNITS: Final = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log; one that a carriage return overwrote has the number of those it shares the place with."""

    number: int
    text: str


def clean_lines(text: str) -> tuple[Line, ...]:
    """Return the lines of *text* without colours and carriage returns, in whichever of their spellings.

    >>> [line.text for line in clean_lines("^[[1;36m(Worker pid=1)^[[0;0m a^M" + chr(10) + "x" + chr(13) + "y")]
    ['(Worker pid=1) a', 'x', 'y']
    """
    found: list[Line] = []
    for number, line in enumerate(text.split("\n"), start=1):
        for part in line.split("\r"):
            plain = _ESCAPES.sub("", part).strip()
            if plain:
                found.append(Line(number, plain))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Printed:
    """A figure as it was printed, with all that it may stand for.

    Attributes:
        low: The least value that is printed so.
        high: The most.
        text: The figure with its unit.
        line: Of the log.
        rank: Whose it is, where the line says so.
    """

    value: float
    low: float
    high: float
    text: str
    line: int
    rank: str = ""

    def holds(self, value: float) -> bool:
        """Whether *value* is printed so; ties of rounding either way."""
        return self.low <= value <= self.high

    def meets(self, low: float, high: float) -> bool:
        """Whether any value from *low* to *high* is printed so."""
        return low <= self.high and high >= self.low


def printed(number: str, unit: str, line: int, *, scale: float | None = None, rank: str = "") -> Printed:
    """Return the figure *number* in *unit* of *line*.

    Args:
        number: As printed, commas between thousands or not; its last digit is as exact as it is.
        unit: As printed.
        line: Of the log.
        scale: What one of the unit is, where it does not say: an engine's GB may be 2^30 bytes.
        rank: Whose it is.

    >>> printed("3.81", "GiB", 1).holds(3.8149 * 2**30)
    True
    """
    plain = number.replace(",", "")
    factor = _UNITS.get(unit, 1) if scale is None else scale
    decimals = len(plain.partition(".")[2])
    half = 0.5 * 10.0**-decimals if decimals else 0.0
    value = float(plain)
    shown = f"{number} {unit}".strip()
    return Printed(value * factor, (value - half) * factor, (value + half) * factor, shown, line, rank)


class Verdict(StrEnum):
    """What became of a printed figure."""

    AGREES = "agrees"
    EXPLAINED = "explained"
    """It differs from what the same word means elsewhere, and a term says why."""
    MISLEADS = "misleads"
    """It is what the engine prints, and does not mean what it seems to."""
    UNEXPLAINED = "unexplained"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One figure of a log, held against what follows from the model and the setting.

    Attributes:
        line: Of the log; 0 where it is of no one line.
        recomputed: In the figure's unit; empty where nothing could be computed.
        reason: The term that makes the difference, or why it was not checked.
        needs_model: Whether it is computed from the model's geometry; others are sums of the log's own figures.
    """

    line: int
    what: str
    printed: str
    recomputed: str = ""
    verdict: Verdict
    reason: str = ""
    needs_model: bool = False


def held_against_model(findings: Iterable[Finding]) -> bool:
    """Whether any figure was computed from the model's geometry: sums of a log's own figures say nothing of it."""
    return any(finding.needs_model and finding.verdict is not Verdict.NOT_CHECKED for finding in findings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What only a run can tell of a rank's memory, as its log printed it.

    Attributes:
        usable: What the engine may use.
        activations: The peak of one forward pass.
        context: What the process takes beside tensors.
        graphs: What captured graphs take.
        graphs_within: Whether graphs are taken from the usable memory before the pool is.
        pool: What was left for the cache.
        taken: All that was not cache at the peak, of a log that does not say what it was.
    """

    usable: Printed | None = None
    weights: Printed | None = None
    activations: Printed | None = None
    context: Printed | None = None
    graphs: Printed | None = None
    graphs_within: bool = False
    pool: Printed | None = None
    taken: Printed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFacts:
    """What a log says.

    Attributes:
        engine: By kvplan's name.
        version: Its release; empty where the log does not say.
        model: As the engine was given it; empty where the log does not say.
        format: What the cache is in, by the engine's word; empty where the log does not say.
        setup: What the engine was told; the context is 0 where the log does not say.
        stated: The fields of setup that the log says.
        figures: By name, in the order of the log.
        measured: What only a run can tell.
        hint: How to make the engine print its figures, where it printed none.
    """

    engine: str
    version: str = ""
    model: str = ""
    format: str = ""
    setup: Setup = field(default_factory=lambda: Setup(context_tokens=0))
    stated: frozenset[str] = frozenset()
    figures: Mapping[str, tuple[Printed, ...]]
    measured: Measured = field(default_factory=Measured)
    hint: str = ""

    def last(self, name: str) -> Printed | None:
        """Return the last figure of a name: what an engine says twice, it settled the second time."""
        found = self.figures.get(name, ())
        return found[-1] if found else None

    def least(self, name: str) -> Printed | None:
        """Return the least figure of a name: that of the rank that binds."""
        return min(self.figures.get(name, ()), key=lambda figure: figure.value, default=None)


@dataclass(frozen=True, slots=True)
class Pattern:
    """How one figure stands in a log.

    Attributes:
        name: Of the figure.
        regex: With groups `number` and perhaps `unit`, and perhaps `rank`.
        unit: Where the line has none.
        scale: What one of the unit is, where that is not what it says.
    """

    name: str
    regex: re.Pattern[str]
    unit: str = ""
    scale: float | None = None


def literal_of(regex: re.Pattern[str]) -> str:
    r"""Return the longest text that stands in every match of *regex*, as far as is plain to see; else nothing.

    Looking for it first is a tenth of the work: most lines of a log have no figure.

    >>> literal_of(re.compile(r"# (?:GPU|cuda) blocks: (\d+)")), literal_of(re.compile("a|b"))
    (' blocks: ', '')
    >>> literal_of(re.compile("ab{0,500}c"))
    'a'
    """
    depth, run, found = 0, "", [""]
    characters = iter(regex.pattern)
    for character in characters:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "|" and depth == 0:
            return ""
        if character in "?*{":
            run = run[:-1]  # what it stands behind need not be there
        escaped = next(characters, "") if character == "\\" else ""
        if depth == 0 and not escaped and character not in "()[]?*+{}.^$|":
            run += character
            continue
        found.append(run)
        run = ""
    return "" if regex.flags & re.IGNORECASE else max([*found, run], key=len)


def find_figures(lines: Iterable[Line], patterns: Sequence[Pattern], rank: re.Pattern[str]) -> dict[str, list[Printed]]:
    """Return every figure that *patterns* find, by name; *rank* finds whose line it is."""
    found: dict[str, list[Printed]] = {}
    words = [(pattern, literal_of(pattern.regex)) for pattern in patterns]
    for line in lines:
        for pattern in [pattern for pattern, word in words if word in line.text]:
            for match in pattern.regex.finditer(line.text):
                groups = match.groupdict()
                whose = rank.search(line.text[: match.start()])
                figure = printed(
                    groups["number"], groups.get("unit") or pattern.unit, line.number, scale=pattern.scale,
                    rank=whose[0] if whose else "",
                )  # fmt: skip
                found.setdefault(pattern.name, []).append(figure)
    return found
