"""Repeats into cells: every sample kept, each repeat a process of its own."""

from dataclasses import replace
from typing import Final

from kvplan.core.figures import FIGURES
from kvplan.core.records import Cell, CellKey, CellStatus, Figure
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.measure.cells import exact_figures
from kvplan.measure.environment import TOLERANCE, disturbance
from kvplan.measure.jobs import Measured

FINAL: Final = (CellStatus.OUT_OF_MEMORY, CellStatus.UNSUPPORTED, CellStatus.FAILED)
"""Ends that no further repeat changes."""


def repeats_of(cell: Cell | None) -> int:
    """Return how many repeats a cell holds."""
    return len(cell.conditions) if cell is not None else 0


def with_repeat(cell: Cell | None, measured: Measured, spec: ModelSpec, tolerance: float = TOLERANCE) -> Cell:
    """Return *cell*, or a new one, with one more repeat; disturbed where a repeat was beyond *tolerance*."""
    exact = exact_figures(measured.key, spec)
    if measured.status is not CellStatus.OK or measured.conditions is None:
        return Cell(key=measured.key, status=measured.status, reason=measured.reason, figures=exact)
    old = cell.figures if cell is not None else {}
    figures = dict(exact)
    for name, samples in measured.figures.items():
        before = old[name].repeats if name in old else ()
        figures[name] = Figure.measured(FIGURES[name].unit, (*before, samples))
    for name, reason in measured.missing.items():
        kept = old.get(name)
        figures[name] = (
            kept if kept is not None and kept.repeats
            else Figure.absent(FIGURES[name].unit, Evidence.MEASURED, reason)
        )  # fmt: skip
    before_conditions = cell.conditions if cell is not None else ()
    conditions = (*before_conditions, measured.conditions)
    found = Cell(key=measured.key, status=CellStatus.OK, figures=figures, conditions=conditions)
    found_at = (disturbance(one, tolerance) for one in conditions)
    disturbed = [f"repeat {rank}: {what}" for rank, what in enumerate(found_at, start=1) if what]
    return replace(found, status=CellStatus.DISTURBED, reason=disturbed[0]) if disturbed else found


def failed(key: CellKey, status: CellStatus, reason: str, spec: ModelSpec) -> Cell:
    """Return a cell that came to nothing, with what arithmetic says of it."""
    return Cell(key=key, status=status, reason=reason, figures=exact_figures(key, spec))


def least_disturbed(attempts: list[Measured]) -> Measured:
    """Return the attempt that others disturbed least."""
    return min(attempts, key=_disturbed_share)


def _disturbed_share(measured: Measured) -> float:
    conditions = measured.conditions
    return 0.0 if conditions is None else conditions.foreign_cpu_share + conditions.steal_share
