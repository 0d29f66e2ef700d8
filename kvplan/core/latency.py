"""Times of a setting at a concurrency: read from the cell that measured it, else predicted from cells near it.

The model of one step: what is not attention grows with the batch, a + b x sequences; attention grows with sequences
and with the tokens they hold, c x sequences + d x tokens. The coefficients are the non-negative least squares of
relative errors over the cells of one format and block size. Its error is the worst of predicting each cell from the
others. Nothing is predicted beyond twice what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from kvplan.core.records import Cell, CellStatus, Figure, Load
from kvplan.core.specs import Evidence
from kvplan.core.stats import median_bounds, percentile
from kvplan.core.workloads import Bucket

REACH: Final = 2.0
"""How far beyond the largest, or below the smallest, measured batch or length a prediction is made."""
_USED: Final = (CellStatus.OK, CellStatus.DISTURBED)
CELLS_MIN: Final = 2
"""Fewer cells leave none to hold out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """A time with its bounds.

    Attributes:
        low_s: One-sided lower bound, over repeats where measured, by the held-out error where predicted.
        high_s: One-sided upper bound likewise.
        error: Of a predicted time: the worst relative error on held-out cells.
        reason: Why there is no time.
        attainable: Whether a measurement would give it.
        disturbed: What disturbed the measurement; other work only slows, so the time is then an upper limit.
    """

    value_s: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    evidence: Evidence = Evidence.MEASURED
    error: float | None = None
    reason: str = ""
    attainable: bool = True
    disturbed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShares:
    """Where one decode step's time goes, as shares of it.

    Attributes:
        rest: Reading the weights and everything else of the model.
        slowdown: The step's time over that with a 16-bit cache, interleaved; None where not measured.
    """

    attention: float
    append: float
    rest: float
    slowdown: float | None


def mix(buckets: Sequence[Bucket], concurrency: int) -> tuple[Load, ...]:
    """Return the loads of a workload at *concurrency*."""
    return tuple(
        Load(bucket=bucket, sequences=bucket.sequences(concurrency))
        for bucket in buckets
        if bucket.sequences(concurrency)
    )


def _shape(loads: Sequence[Load]) -> tuple[tuple[int, int], ...]:
    counts: dict[int, int] = {}
    for load in loads:
        counts[load.bucket.total_tokens] = counts.get(load.bucket.total_tokens, 0) + load.sequences
    return tuple(sorted(counts.items()))


def _sequences(loads: Sequence[Load]) -> int:
    return sum(load.sequences for load in loads)


def _tokens(loads: Sequence[Load]) -> int:
    return sum(load.sequences * load.bucket.total_tokens for load in loads)


def _value(cell: Cell, name: str) -> float | None:
    figure = cell.figures.get(name)
    return figure.value if figure else None


def _with(cells: Sequence[Cell], name: str, status: CellStatus) -> list[Cell]:
    return [cell for cell in cells if cell.status is status and _value(cell, name) is not None]


def _disturbed(cell: Cell) -> str:
    return (cell.reason or "other work ran") if cell.status is CellStatus.DISTURBED else ""


def _measured(figure: Figure, percent: float, confidence: float) -> TimeEstimate:
    values = [percentile(samples, percent) for samples in figure.repeats]
    if not values:
        assert figure.value is not None
        return TimeEstimate(value_s=figure.value, low_s=figure.value, high_s=figure.value, evidence=figure.evidence)
    low, high = median_bounds(values, confidence)
    return TimeEstimate(value_s=median(values), low_s=low, high_s=high, evidence=figure.evidence)


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The cells of one format and block size.

    Attributes:
        cells: All of them, whatever came of them.
        others: Cells of quantized formats, whose interleaved 16-bit times stand in for absent 16-bit cells.
        confidence: Of the bounds over repeats.
        untimed: Why none of its cells is ever timed; empty for most.
    """

    cells: tuple[Cell, ...]
    others: tuple[Cell, ...] = ()
    confidence: float = 0.95
    untimed: str = ""

    def tpot(self, loads: Sequence[Load], percent: float) -> TimeEstimate:
        """Return the *percent*-th percentile of one decode step with *loads*.

        Measured where a cell held these loads, be it disturbed: an upper limit seen says more than a prediction.
        """
        if self.untimed:
            return TimeEstimate(reason=self.untimed, attainable=False)
        for status in _USED:
            measured = self._measured_step(loads, percent, status)
            if measured is not None:
                return measured
        predicted = self._predict(loads, percent)
        return predicted if predicted.value_s is not None else self._why_absent(loads, predicted)

    def _measured_step(self, loads: Sequence[Load], percent: float, status: CellStatus) -> TimeEstimate | None:
        for cells, name in ((self.cells, "tpot_s"), (self.others, "tpot_16bit_s")):
            for cell in _with(cells, name, status):
                if _shape(cell.key.loads) == _shape(loads):
                    estimate = _measured(cell.figures[name], percent, self.confidence)
                    if cell.status is CellStatus.DISTURBED:
                        # Other work only slows: what was seen is an upper limit by itself, and no lower one.
                        estimate = replace(estimate, low_s=0.0, high_s=estimate.value_s or 0.0)
                    return replace(estimate, disturbed=_disturbed(cell))
        return None

    def ttft(self, buckets: Sequence[Bucket], percent: float) -> TimeEstimate:
        """Return the *percent*-th percentile of prefill and pack over requests; time spent queueing is not in it."""
        if self.untimed:
            return TimeEstimate(reason=self.untimed, attainable=False)
        found = [self._prompt_cell(bucket) for bucket in buckets]
        parts: list[tuple[float, tuple[tuple[float, ...], ...]]] = []
        for bucket, cell in zip(buckets, found, strict=True):
            if cell is None:
                return TimeEstimate(reason=f"no cell measured a prompt of {bucket.prompt_tokens} tokens")
            parts.append((bucket.share, cell.figures["ttft_s"].repeats))
        values = [
            _weighted_percentile([(share, repeats[i]) for share, repeats in parts], percent)
            for i in range(min(len(repeats) for _, repeats in parts))
        ]
        low, high = median_bounds(values, self.confidence)
        disturbed = next((text for cell in found if cell and (text := _disturbed(cell))), "")
        return TimeEstimate(value_s=median(values), low_s=low, high_s=high, disturbed=disturbed)

    def shares(self, loads: Sequence[Load]) -> StepShares | None:
        """Return where a measured step's time goes; None where no cell measured these loads."""
        for cell in [cell for status in _USED for cell in _with(self.cells, "tpot_s", status)]:
            total, attention = _value(cell, "tpot_s"), _value(cell, "decode_fused_s")
            if _shape(cell.key.loads) != _shape(loads) or not total or attention is None:
                continue
            append = _value(cell, "append_s") or 0.0
            whole = _value(cell, "tpot_16bit_s")
            return StepShares(
                attention=attention / total,
                append=append / total,
                rest=max(0.0, 1 - (attention + append) / total),
                slowdown=total / whole if whole else None,
            )
        return None

    def _prompt_cell(self, bucket: Bucket) -> Cell | None:
        for status in _USED:
            for cell in _with(self.cells, "ttft_s", status):
                prompts = {load.bucket.prompt_tokens for load in cell.key.loads}
                if prompts == {bucket.prompt_tokens} and cell.figures["ttft_s"].repeats:
                    return cell
        return None

    def _why_absent(self, loads: Sequence[Load], estimate: TimeEstimate) -> TimeEstimate:
        for cell in self.cells:
            if _shape(cell.key.loads) == _shape(loads) and cell.status is not CellStatus.OK:
                return TimeEstimate(reason=f"the cell ended {cell.status}: {cell.reason}")
        return estimate

    def _predict(self, loads: Sequence[Load], percent: float) -> TimeEstimate:
        timed = _with(self.cells, "tpot_s", CellStatus.OK)
        cells = [cell for cell in timed if _value(cell, "decode_fused_s") is not None]
        if len(cells) < CELLS_MIN:
            return TimeEstimate(reason="not measured" if not cells else "one cell is too few to predict from")
        if reason := _out_of_reach(cells, loads):
            return TimeEstimate(reason=reason)
        error = max(
            abs(_step_s(cells[:i] + cells[i + 1 :], cell.key.loads) / _known(cell, "tpot_s") - 1)
            for i, cell in enumerate(cells)
        )
        tail = (
            median(
                percentile([s for samples in cell.figures["tpot_s"].repeats for s in samples], percent)
                / _known(cell, "tpot_s")
                for cell in cells
                if cell.figures["tpot_s"].repeats
            )
            if all(cell.figures["tpot_s"].repeats for cell in cells)
            else 1.0
        )
        value = _step_s(cells, loads) * tail
        return TimeEstimate(
            value_s=value,
            low_s=value * max(0.0, 1 - error),
            high_s=value * (1 + error),
            evidence=Evidence.PREDICTED,
            error=error,
        )


def _known(cell: Cell, name: str) -> float:
    value = _value(cell, name)
    assert value is not None
    return value


def _out_of_reach(cells: Sequence[Cell], loads: Sequence[Load]) -> str:
    batches = [_sequences(cell.key.loads) for cell in cells]
    lengths = [load.bucket.total_tokens for cell in cells for load in cell.key.loads]
    asked = [("sequences", _sequences(loads), batches)]
    asked += [("tokens a sequence", load.bucket.total_tokens, lengths) for load in loads]
    for what, value, measured in asked:
        if not min(measured) / REACH <= value <= max(measured) * REACH:
            return f"{value} {what} is too far from the {min(measured)} to {max(measured)} measured"
    return ""


def _step_s(cells: Sequence[Cell], loads: Sequence[Load]) -> float:
    """Return one step's time predicted from *cells*."""
    attention = [(_tokens(c.key.loads), _sequences(c.key.loads), _known(c, "decode_fused_s")) for c in cells]
    rest = [(1, _sequences(c.key.loads), max(_known(c, "tpot_s") - _known(c, "decode_fused_s"), 1e-9)) for c in cells]
    per_token, per_sequence = _fit(attention)
    fixed, per_batch = _fit(rest)
    sequences = _sequences(loads)
    return fixed + (per_batch + per_sequence) * sequences + per_token * _tokens(loads)


def _fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return non-negative (p, q) that make p x a + q x b nearest to y in relative terms, over rows (a, b, y).

    Where several do as well, as with one row, all is given to a.
    """
    scaled = [(a / y, b / y) for a, b, y in rows]
    aa, bb = sum(a * a for a, _ in scaled), sum(b * b for _, b in scaled)
    ab, a1, b1 = sum(a * b for a, b in scaled), sum(a for a, _ in scaled), sum(b for _, b in scaled)
    determinant = aa * bb - ab * ab
    candidates = [(a1 / aa, 0.0), (0.0, b1 / bb)]
    if determinant > 1e-9 * aa * bb:
        both = ((a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant)
        if min(both) >= 0:
            return both
    return min(candidates, key=lambda pq: sum((pq[0] * a + pq[1] * b - 1) ** 2 for a, b in scaled))


def _weighted_percentile(parts: Sequence[tuple[float, Sequence[float]]], percent: float) -> float:
    """Return the percentile of samples whose groups weigh their share, however many samples each has."""
    weighted = sorted((value, share / len(samples)) for share, samples in parts for value in samples)
    goal, seen = percent / 100 * sum(weight for _, weight in weighted), 0.0
    for value, weight in weighted:
        seen += weight
        if seen >= goal * (1 - 1e-12):
            return value
    return weighted[-1][0]
