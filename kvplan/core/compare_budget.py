"""One profile held against a budget file."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Final

from kvplan.core.budget import Budget, Limits
from kvplan.core.compare import MARGINS, ratios
from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.core.formats import read_format
from kvplan.core.plans import Quantity, Status
from kvplan.core.quality_bounds import bound_quality
from kvplan.core.records import Cell, CellStatus, Profile
from kvplan.core.stats import median_bounds, percentile
from kvplan.core.tiered_memory import runtime_memory
from kvplan.core.verdicts import quality_verdicts
from kvplan.core.workloads import Bucket, Target, Workload
from kvplan_kernels.layout import order_of

_STANDINGS: Final = {
    Status.FITS: Standing.HELD, Status.OVER: Standing.REGRESSED, Status.UNDECIDED: Standing.UNDECIDED,
}  # fmt: skip


def compare_budget(current: Profile, budget: Budget, margin: float | None = None) -> Comparison:
    """Return the verdict on every limit; 16-bit formats have neither a decode ratio nor quality to lose."""
    allowed = MARGINS[current.device.kind] if margin is None else margin
    verdicts: list[FigureVerdict] = []
    for cell in current.cells:
        verdicts += _cell_verdicts(cell, current, budget, allowed)
    verdicts += _quality_verdicts(current, budget)
    measured = {cell.key.format for cell in current.cells}
    for name in budget.formats:
        if name not in measured:
            reason = "the budget limits this format and no cell measured it"
            verdicts.append(FigureVerdict(cell=name, figure="cell", standing=Standing.REGRESSED, reason=reason))
    return Comparison(tuple(verdicts), "the budget", allowed)


def _cell_verdicts(cell: Cell, current: Profile, budget: Budget, margin: float) -> Iterator[FigureVerdict]:
    limits = budget.limits(cell.key.format)
    blank = FigureVerdict(cell=cell.key.label, figure="cell", standing=Standing.HELD)
    if cell.status is CellStatus.FAILED:
        yield replace(blank, standing=Standing.REGRESSED, reason=f"the cell failed: {cell.reason}")
        return
    if limits.max_bytes_per_sequence is not None:
        yield _bytes_verdict(cell, limits.max_bytes_per_sequence, blank)
    # What no kernel lays out has no figures; what is only not timed has those of its bytes.
    if limits.min_sessions is not None and (cell.status is not CellStatus.UNSUPPORTED or cell.figures):
        yield _sessions_verdict(cell, current, budget, limits.min_sessions, blank)
    if limits.max_decode_ratio is not None and read_format(cell.key.format).quantized:
        named = replace(blank, figure="decode_fused_s over decode_16bit_s", unit="share")
        values = ratios(cell, "decode_fused_s", "decode_16bit_s")
        yield _spread_verdict(named, cell, values, limits.max_decode_ratio, margin)
    for percent, limit_ms in limits.max_tpot_ms.items():
        figure = cell.figures.get("tpot_s")
        values = [percentile(samples, percent) for samples in figure.repeats] if figure else []
        named = replace(blank, figure=f"tpot_s p{percent}", unit="s")
        yield _spread_verdict(named, cell, values, limit_ms / 1000, margin)


def _bytes_verdict(cell: Cell, limit: int, blank: FigureVerdict) -> FigureVerdict:
    figure = cell.figures.get("allocated_bytes_per_sequence")
    verdict = replace(blank, figure="allocated_bytes_per_sequence", unit="bytes", baseline=float(limit))
    if figure is None or figure.value is None:
        return replace(verdict, standing=Standing.UNDECIDED, reason=cell.reason or "the figure is missing")
    standing = Standing.REGRESSED if figure.value > limit else Standing.HELD
    return replace(verdict, current=figure.value, standing=standing)


def _sessions_verdict(cell: Cell, current: Profile, budget: Budget, limit: int, blank: FigureVerdict) -> FigureVerdict:
    total = sum(load.sequences for load in cell.key.loads)
    buckets: tuple[Bucket, ...] = tuple(replace(load.bucket, share=load.sequences / total) for load in cell.key.loads)
    assert budget.memory_bytes is not None
    workload = Workload(
        model=current.model.name, buckets=buckets, target=Target(concurrency=total), memory_bytes=budget.memory_bytes,
        memory_utilization=budget.memory_utilization, prefill=cell.key.prefill,
    )  # fmt: skip
    form, order = read_format(cell.key.format), order_of(cell.key.kernel)
    memory = runtime_memory(form, cell.key.block_tokens, workload, current.model, budget.memory_bytes, order)
    sessions = memory.sessions()
    standing = Standing.HELD if sessions >= limit else Standing.REGRESSED
    return replace(blank, figure="sessions", unit="count", current=sessions, baseline=limit, standing=standing)


def _spread_verdict(
    verdict: FigureVerdict, cell: Cell, values: list[float], limit: float, margin: float
) -> FigureVerdict:
    """Hold the median over repeats against *limit*; undecided where its interval crosses it and is wide."""
    verdict = replace(verdict, baseline=limit)
    if cell.status is not CellStatus.OK:
        reason = f"the cell ended {cell.status}: {cell.reason}"
        return replace(verdict, standing=Standing.NOT_COMPARABLE, reason=reason)
    if not values:
        return replace(verdict, standing=Standing.UNDECIDED, reason="the figure is missing")
    low, high = median_bounds(values)
    verdict = replace(verdict, current=median(values), low=low / limit, high=high / limit)
    if low <= limit < high and high - low > margin * limit:
        return replace(verdict, standing=Standing.UNDECIDED, reason="too noisy to tell; measure more repeats")
    return replace(verdict, standing=Standing.HELD if median(values) <= limit else Standing.REGRESSED)


def _quality_verdicts(current: Profile, budget: Budget) -> Iterator[FigureVerdict]:
    measured = dict.fromkeys(cell.key.format for cell in current.cells)
    scored = [quality.key.format for quality in current.quality]
    for name in measured | dict.fromkeys(scored):
        limits: Limits = budget.limits(name)
        if not limits.quality.constrains or not read_format(name).quantized:
            continue
        if name not in scored:
            reason = "quality was not measured"
            yield FigureVerdict(cell=name, figure="quality", standing=Standing.UNDECIDED, reason=reason)
    for quality in current.quality:
        limits = budget.limits(quality.key.format)
        if not read_format(quality.key.format).quantized:
            continue
        bounds = bound_quality(quality, limits.quality.confidence)
        for verdict in quality_verdicts(limits.quality, bounds, quantized=True):
            yield FigureVerdict(
                cell=f"{quality.key.format}/b{quality.key.block_tokens}/quality", figure=str(verdict.quantity),
                standing=_STANDINGS[verdict.status], baseline=verdict.limit,
                current=verdict.bound if verdict.bound is not None else verdict.value,
                reason=verdict.reason, unit="nats" if verdict.quantity is Quantity.KL else "share",
            )  # fmt: skip
