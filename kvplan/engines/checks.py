"""Printed figures held against what follows from a model and a setting, of which a log says only a part.

What it does not say is tried: the fewest departures from an engine's defaults that leave the fewest figures
contradicted are the explanation, and are named. Where several explain as much, all of them are. A departure under
which a figure can no longer be computed explains nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any, Final, TypeVar

from kvplan.core.allocation import Setup
from kvplan.engines.logs import Finding, LogFacts, Printed, Verdict

GIB: Final = 2.0**30
Band = tuple[float, float]
Bands = tuple[Band, ...] | None
"""What a figure may be, any of several; None where it cannot be computed."""
Choice = tuple[str, dict[str, Any]]
"""What is departed from, in words, and the fields of the setting that change with it, `format` among them."""
_Case = TypeVar("_Case")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A figure to be held against what follows.

    Attributes:
        name: Among the figures of the log.
        tokens: Of the pool that the figure is of; or slots.
        why: What keeps it from being checked, where nothing follows; no departure else may.
    """

    what: str
    name: str
    figure: Printed
    tokens: float = 0
    why: str = ""


def exact(sizes: Iterable[float]) -> tuple[Band, ...]:
    """Return the bands of figures that are known to the byte."""
    return tuple((size, size) for size in sizes)


def unchecked(check: Check, reason: str) -> Finding:
    """Return the finding of a figure that nothing is known to follow for."""
    return Finding(
        line=check.figure.line, what=check.what, printed=check.figure.text, verdict=Verdict.NOT_CHECKED, reason=reason,
        needs_model=True,
    )  # fmt: skip


def format_choices(facts: LogFacts, own: str, run: str, unsaid: Mapping[str, str]) -> list[Choice]:
    """Return the formats that a cache may be in: the one that the log names, or the engine's *own* default.

    Where that is the checkpoint's word, the type that the model *run*s in is tried too; *unsaid* are others that the
    log may leave unsaid, by name, in words.
    """
    if facts.format:
        return [("", {"format": facts.format})]
    others = {run: "the cache is in 16 bits, whatever the checkpoint says", **unsaid}
    return [("", {"format": own}), *((text, {"format": name}) for name, text in others.items() if name != own)]


def settings(
    base: Setup, choices: Sequence[Sequence[Choice]], most: int
) -> Iterator[tuple[tuple[str, ...], str, Setup]]:
    """Yield the departures, the format and the setting of every combination of *choices* with at most *most* of them.

    Options are added to those of *base*; other fields take the place of its own.
    """
    for combination in combinations(*choices):
        departures = tuple(name for name, _ in combination if name)
        if len(departures) > most:
            continue
        setup, form = base, ""
        for _, change in combination:
            form = str(change.get("format", form))
            setup = replace(setup, options=setup.options | frozenset(change.get("options", ())))
            setup = replace(setup, **{key: value for key, value in change.items() if key not in ("format", "options")})
        yield departures, form, setup


def best_case(
    cases: Sequence[tuple[tuple[str, ...], _Case]],
    checks: Sequence[Check],
    expected: Callable[[Check, _Case], Bands],
) -> tuple[_Case, list[Bands], str]:
    """Return the case that contradicts the fewest figures, its bands, and the departures that explain as much."""
    scored = [(departures, case, [expected(check, case) for check in checks]) for departures, case in cases]
    plain = min(scored, key=lambda row: len(row[0]))[2]
    scored = [row for row in scored if not _hides(checks, plain, row[2])]
    ranks = [(-_contradicted(checks, bands), -len(departures)) for departures, _, bands in scored]
    top = max(ranks)
    alike = [departures for (departures, _, _), rank in zip(scored, ranks, strict=True) if rank == top]
    _, best, bands = scored[ranks.index(top)]
    return best, bands, " or ".join(dict.fromkeys("; ".join(departures) for departures in alike))


def _hides(checks: Sequence[Check], plain: Sequence[Bands], bands: Sequence[Bands]) -> bool:
    """Whether a figure that the fewest departures make computable is not so any more."""
    return any(
        band is None and before is not None and not check.why
        for check, before, band in zip(checks, plain, bands, strict=True)
    )


def _contradicted(checks: Sequence[Check], bands: Sequence[Bands]) -> int:
    return sum(band is not None and not meets(check, band) for check, band in zip(checks, bands, strict=True))


def meets(check: Check, bands: tuple[Band, ...]) -> bool:
    """Whether the figure may be any of what follows."""
    return any(check.figure.meets(low, high) for low, high in bands)


def judge(check: Check, bands: tuple[Band, ...], departures: str) -> Finding:
    """Return the finding of a figure under a case with *departures*, in words."""
    verdict, reason = (Verdict.EXPLAINED, departures) if departures else (Verdict.AGREES, "")
    if not meets(check, bands):
        verdict, reason = Verdict.UNEXPLAINED, _difference(check, bands)
    return Finding(
        line=check.figure.line, what=check.what, printed=check.figure.text, recomputed=_shown(check, bands),
        verdict=verdict, reason=reason, needs_model=True,
    )  # fmt: skip


def _difference(check: Check, bands: tuple[Band, ...]) -> str:
    if not bands:
        return "nothing of this model is kept there"
    middle = sum(_closest(check, bands)) / 2
    return f"{check.figure.value / middle - 1:+.1%} against what follows" if middle else "nothing follows"


def _shown(check: Check, bands: tuple[Band, ...]) -> str:
    if not bands:
        return ""
    shown = [_in_unit(value, check.figure.text) for value in _closest(check, bands)]
    return shown[0] if shown[0] == shown[1] else " to ".join(shown)


def _closest(check: Check, bands: tuple[Band, ...]) -> Band:
    return min(bands, key=lambda band: abs(sum(band) / 2 - check.figure.value))


def _in_unit(value: float, text: str) -> str:
    if text.endswith("B"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:,.0f} bytes" if text.endswith("bytes") else f"{value:,.0f}"
