"""Two profiles compared: exact figures exactly, times as ratios to the 16-bit kernel of the same run, quality paired.

A time has regressed when it lies above the margin and its rise is no noise: the median shift over all pairs of repeats
exceeds the margin, and a t test against "no rise", corrected by Holm over all figures, is significant. Few repeats say
little of a cell's own spread, so its variance is averaged with that of the same figure in all cells, each with its
degrees of freedom, at most as many as the cell's own (after Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). A time is
undecided when its interval crosses the margin and is wide. A time whose 16-bit reference fits beside it in neither run
is compared as it is. Quality is held to a tenth of the baseline's own damage, or twice the noise of 16 bits against
16 bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Final

from kvplan.core.compare_quality import compare_quality
from kvplan.core.comparisons import LEVEL, Comparison, FigureVerdict, Standing, Suspect, decide
from kvplan.core.figures import FIGURES, FigureKind
from kvplan.core.records import Cell, CellKey, CellStatus, Figure, Profile
from kvplan.core.setups import versions_difference
from kvplan.core.specs import DeviceKind
from kvplan.core.stats import shift, student_above, student_quantile

MARGINS: Final = {DeviceKind.CPU: 0.10, DeviceKind.CUDA: 0.05}
WIDE: Final = 2.0
"""Margins to either side from which an interval that crosses the margin says next to nothing."""
_RELATIVE_ROUNDING: Final = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """Ratios of one time in two profiles, not yet tested.

    Attributes:
        ours: Logarithms, a repeat each.
        theirs: The baseline's.
    """

    verdict: FigureVerdict
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the spread; 0 or less where there is none."""
        return len(self.ours) + len(self.theirs) - 2 if min(len(self.ours), len(self.theirs)) > 1 else 0

    @property
    def squares(self) -> float:
        """Squares of deviations from each side's mean, summed."""
        return sum((x - fmean(side)) ** 2 for side in (self.ours, self.theirs) for x in side)


def compare_profiles(current: Profile, baseline: Profile, margin: float | None = None) -> Comparison:
    """Return the verdict on every figure of *baseline*."""
    allowed = MARGINS[current.device.kind] if margin is None else margin
    if current.model.digest != baseline.model.digest:
        reason = f"another model: {current.model.name}, the baseline has {baseline.model.name}"
        verdicts: list[FigureVerdict | Suspect] = [
            FigureVerdict(cell="profile", figure="model", standing=Standing.NOT_COMPARABLE, reason=reason),
            *_failures(current, seen=set()),
        ]
    else:
        difference = profile_difference(current, baseline)
        verdicts = weigh(list(_cell_verdicts(current, baseline, difference, allowed)), allowed)
        verdicts += compare_quality(current, baseline, difference)
    return Comparison(decide(verdicts), f"the baseline of {baseline.created}", allowed)


def profile_difference(current: Profile, baseline: Profile) -> str:
    """Return what keeps times and quality of two profiles from being compared; empty where nothing does."""
    if current.device.uuid != baseline.device.uuid:
        return f"another device: {current.device.name}, the baseline has {baseline.device.name}"
    return versions_difference(current, baseline)


def _shape(key: CellKey, *, counted: bool = True) -> tuple[object, ...]:
    """Return what a cell asks, whoever answers it; without the number of sequences where not *counted*."""
    loads = tuple(
        (load.bucket.prompt_tokens, load.bucket.generate_tokens, load.sequences if counted else None)
        for load in key.loads
    )
    return (key.format, key.block_tokens, loads, key.prefill, key.cold)


def _cell_verdicts(
    current: Profile, baseline: Profile, difference: str, margin: float
) -> Iterable[FigureVerdict | Rise]:
    seen: set[int] = set()
    for base in baseline.cells:
        if base.status not in (CellStatus.OK, CellStatus.DISTURBED):
            continue
        cell = _counterpart(base, current.cells)
        if cell is None:
            yield _without_counterpart(base, current.cells)
            continue
        seen.add(id(cell))
        if cell.status in (CellStatus.OK, CellStatus.DISTURBED):
            yield from _figures(cell, base, difference, margin)
        else:
            reason = f"the cell ended {cell.status}: {cell.reason}"
            yield FigureVerdict(cell=base.key.label, figure="cell", standing=Standing.REGRESSED, reason=reason)
    yield from _failures(current, seen)


def _failures(current: Profile, seen: set[int]) -> list[FigureVerdict]:
    """Return a verdict for each failed cell that the baseline does not speak of."""
    return [
        FigureVerdict(
            cell=cell.key.label, figure="cell", standing=Standing.REGRESSED, reason=f"the cell failed: {cell.reason}"
        )
        for cell in current.cells
        if cell.status is CellStatus.FAILED and id(cell) not in seen
    ]


def _counterpart(base: Cell, cells: Sequence[Cell]) -> Cell | None:
    """Return the cell that asks the same; one with the same threads where there are several."""
    found = [cell for cell in cells if _shape(cell.key) == _shape(base.key)]
    return max(found, key=lambda cell: (cell.key.threads == base.key.threads, cell.key == base.key), default=None)


def _without_counterpart(base: Cell, cells: Sequence[Cell]) -> FigureVerdict:
    for cell in cells:
        if _shape(cell.key, counted=False) == _shape(base.key, counted=False):
            reason = f"measured with other numbers of sequences: {cell.key.label}"
            return FigureVerdict(cell=base.key.label, figure="cell", standing=Standing.NOT_COMPARABLE, reason=reason)
    return FigureVerdict(
        cell=base.key.label, figure="cell", standing=Standing.REGRESSED, reason="the cell is missing from the profile"
    )


def _figures(cell: Cell, base: Cell, difference: str, margin: float) -> Iterable[FigureVerdict | Rise]:
    obstacle = difference or _cell_difference(cell, base)
    for name, spec in FIGURES.items():
        if name not in base.figures or base.figures[name].value is None:
            continue
        if spec.kind is FigureKind.EXACT:
            yield _exact(name, cell, base)
        elif spec.kind is FigureKind.TIME and spec.reference is not None:
            yield _time(name, spec.reference, cell, base, obstacle, margin)


def _cell_difference(cell: Cell, base: Cell) -> str:
    for what, ours, theirs in (
        ("threads", cell.key.threads, base.key.threads),
        ("kernel", cell.key.kernel, base.key.kernel),
        ("device", cell.key.device_uuid, base.key.device_uuid),
        ("kvplan", cell.key.kvplan_version, base.key.kvplan_version),
    ):
        if ours != theirs:
            return f"another {what}: {ours}, the baseline has {theirs}"
    for who, measured in (("this profile", cell), ("the baseline", base)):
        if measured.status is CellStatus.DISTURBED:
            return f"{who} measured it while disturbed: {measured.reason}"
    return ""


def _exact(name: str, cell: Cell, base: Cell) -> FigureVerdict:
    ours, theirs = cell.figures.get(name), base.figures[name].value
    verdict = FigureVerdict(
        cell=base.key.label, figure=name, standing=Standing.HELD, unit=FIGURES[name].unit, baseline=theirs
    )
    if ours is None or ours.value is None:
        reason = ours.reason if ours is not None else "absent"
        return replace(verdict, standing=Standing.REGRESSED, reason=f"the figure is missing: {reason}")
    assert theirs is not None
    worse = ours.value > theirs * (1 + _RELATIVE_ROUNDING)
    return replace(verdict, current=ours.value, standing=Standing.REGRESSED if worse else Standing.HELD)


def _time(name: str, reference: str, cell: Cell, base: Cell, obstacle: str, margin: float) -> FigureVerdict | Rise:
    verdict = FigureVerdict(cell=base.key.label, figure=name, standing=Standing.HELD, unit=f"of {reference}")
    if obstacle:
        return replace(verdict, standing=Standing.NOT_COMPARABLE, reason=obstacle)
    if name not in cell.figures or cell.figures[name].value is None:
        reason = cell.figures[name].reason if name in cell.figures else "absent"
        return replace(verdict, standing=Standing.REGRESSED, reason=f"the figure is missing: {reason}")
    ours, theirs = ratios(cell, name, reference), ratios(base, name, reference)
    if not ours and not theirs:  # a 16-bit cache beside this one did not fit in either run
        verdict = replace(verdict, unit="s")
        ours, theirs = _seconds(cell, name), _seconds(base, name)
    if not ours or not theirs:
        reason = f"no {reference} of the same run to divide by"
        return replace(verdict, standing=Standing.NOT_COMPARABLE, reason=reason)
    if set(ours) == set(theirs) == {1.0}:
        return replace(verdict, current=1.0, baseline=1.0)  # it is its own reference
    return Rise(
        verdict=replace(verdict, current=median(ours), baseline=median(theirs)),
        ours=tuple(map(log, ours)),
        theirs=tuple(map(log, theirs)),
    )


def weigh(verdicts: Sequence[FigureVerdict | Rise], margin: float) -> list[FigureVerdict | Suspect]:
    """Return *verdicts* with every rise tested, its variance averaged with that of its figure in all cells."""
    rises = [verdict for verdict in verdicts if isinstance(verdict, Rise) and verdict.freedom > 0]
    pooled = {
        name: _pooled_variance([rise for rise in rises if rise.verdict.figure == name])
        for name in {rise.verdict.figure for rise in rises}
    }
    return [_test(v, pooled.get(v.verdict.figure), log(1 + margin)) if isinstance(v, Rise) else v for v in verdicts]


def _pooled_variance(rises: Sequence[Rise]) -> tuple[float, int]:
    """Return the variance of one repeat and its degrees of freedom, over all *rises*."""
    freedom = sum(rise.freedom for rise in rises)
    return sum(rise.squares for rise in rises) / freedom, freedom


def _test(rise: Rise, pooled: tuple[float, int] | None, allowed: float) -> Suspect:
    point, _ = shift(rise.ours, rise.theirs)
    if pooled is None or rise.freedom <= 0:
        return Suspect(verdict=rise.verdict, above=point > allowed, unclear=True, p_value=1.0)
    borrowed = min(pooled[1] - rise.freedom, rise.freedom)
    freedom = rise.freedom + borrowed
    variance = (rise.squares + borrowed * pooled[0]) / freedom
    error = sqrt(variance * (1 / len(rise.ours) + 1 / len(rise.theirs)))
    reach = student_quantile(1 - LEVEL / 2, freedom) * error
    low, high = point - reach, point + reach
    step = fmean(rise.ours) - fmean(rise.theirs)
    return Suspect(
        verdict=replace(rise.verdict, low=exp(low), high=exp(high)),
        above=point > allowed,
        unclear=low >= allowed or (low < allowed < high and reach > WIDE * allowed),
        p_value=student_above(step / error, freedom) if error > 0 else float(step <= 0),
    )


def ratios(cell: Cell, name: str, reference: str) -> list[float]:
    """Return the figure over its reference, a repeat each; both come from the same process."""
    ours, theirs = _repeats(cell.figures.get(name)), _repeats(cell.figures.get(reference))
    return [
        median(a) / median(b) for a, b in zip(ours, theirs, strict=False) if a and b and min(median(a), median(b)) > 0
    ]


def _seconds(cell: Cell, name: str) -> list[float]:
    return [median(samples) for samples in _repeats(cell.figures.get(name)) if samples and median(samples) > 0]


def _repeats(figure: Figure | None) -> tuple[tuple[float, ...], ...]:
    return figure.repeats if figure is not None else ()
