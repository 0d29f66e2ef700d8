"""What is known of a model on a device, and one setting held against a workload's targets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplan.core.latency import TimeEstimate, Timings, mix
from kvplan.core.memory import DeviceMemory
from kvplan.core.plans import Option, Quantity
from kvplan.core.quality_bounds import QualityBounds, bound_quality
from kvplan.core.records import Cell, Quality
from kvplan.core.settings import Setting
from kvplan.core.specs import DeviceInfo, ModelSpec
from kvplan.core.tiers import UNTIMED
from kvplan.core.verdicts import memory_verdict, quality_verdicts, time_verdict
from kvplan.core.workloads import Workload
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.layer_formats import ModelFormat, formats_refusal
from kvplan_kernels.layout import Order, order_of
from kvplan_kernels.tier_formats import TieredFormat

DEFAULT_PERCENT: Final = 95
"""The percentile shown where the workload sets no target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What is known of one model on one device; all empty without a profile."""

    cells: tuple[Cell, ...] = ()
    quality: tuple[Quality, ...] = ()
    device: DeviceInfo | None = None

    @property
    def kernels(self) -> frozenset[str]:
        """The implementations whose times are known."""
        return frozenset(cell.key.kernel for cell in self.cells)

    @property
    def order(self) -> Order:
        """How codes lie in the caches of those implementations; one profile, or several of one kernel, have one."""
        return next((order_of(kernel) for kernel in self.kernels), Order.LANES)

    def check_kernels(self, form: ModelFormat) -> None:
        """Refuse a format that none of those implementations has a kernel for.

        Raises:
            UnsupportedFormatError: With the reason.
        """
        reasons = [formats_refusal(kernel.partition("/")[0], form) for kernel in self.kernels]
        if reasons and all(reasons):
            raise UnsupportedFormatError(str(reasons[0]))

    def timings(self, form: ModelFormat, block_tokens: int | None, confidence: float) -> Timings:
        """Return the cells of one setting; those with rotated buffers and most threads where there are several.

        Without a block size they are those of the size that most cells have.
        """
        cells = [cell for cell in self.cells if cell.key.format == form.name]
        sizes = Counter(cell.key.block_tokens for cell in cells)
        chosen = block_tokens if block_tokens is not None else max(sizes, key=lambda size: sizes[size], default=0)
        own = [cell for cell in cells if cell.key.block_tokens == chosen]
        others = [] if form.quantized else [c for c in self.cells if c.key.format != form.name]
        untimed = UNTIMED if isinstance(form, TieredFormat) else ""
        return Timings(cells=_preferred(own), others=_preferred(others), confidence=confidence, untimed=untimed)

    def find_quality(self, form: ModelFormat, block_tokens: int | None, workload: Workload) -> QualityBounds | None:
        """Return the bounds of the result with most positions; pages of any size hold the same codes."""
        found = [q for q in self.quality if q.key.format == form.name and q.key.prefill is workload.prefill]
        if not found:
            return None
        best = max(
            found,
            key=lambda q: (bool(q.trials), q.key.block_tokens == block_tokens, sum(d.positions for d in q.documents)),
        )
        return bound_quality(best, workload.quality.confidence)


def _preferred(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    cold = [cell for cell in cells if cell.key.cold] or list(cells)
    threads = max((cell.key.threads for cell in cold), default=0)
    return tuple(cell for cell in cold if cell.key.threads == threads)


def assess(setting: Setting, workload: Workload, model: ModelSpec, known: Measurements) -> Option:
    """Return one setting with a verdict on every target.

    Raises:
        UnsupportedFormatError: No kernel takes it with this model.
    """
    memory_model = memory_of(setting, workload, model, known)
    memory = memory_model.plan(workload.target.concurrency)
    form, block_tokens = setting.measured_as, setting.measured_block_tokens
    confidence = workload.quality.confidence
    timings = known.timings(form, block_tokens, confidence) if form else Timings(cells=(), confidence=confidence)
    loads = mix(workload.buckets, workload.target.concurrency)
    quality = known.find_quality(form, block_tokens, workload) if form and setting.quantized else None
    ttft = {percent: timings.ttft(workload.buckets, percent) for percent in workload.target.ttft_ms}
    verdicts = [memory_verdict(memory)]
    for percent, limit in workload.target.tpot_ms.items():
        verdicts.append(time_verdict(Quantity.TPOT, percent, limit, timings.tpot(loads, percent)))
    for percent, limit in workload.target.ttft_ms.items():
        verdicts.append(time_verdict(Quantity.TTFT, percent, limit, ttft[percent]))
    verdicts += quality_verdicts(workload.quality, quality, setting.quantized)
    return Option(
        setting=setting,
        memory=memory,
        sessions=memory_model.sessions(),
        blocks=memory_model.pool_blocks(workload.target.concurrency),
        slots=sum(load.sequences for load in loads),
        effective_bits=memory_model.effective_bits(),
        residual_bytes=memory_model.residual_bytes,
        tpot=timings.tpot(loads, tpot_percent(workload)),
        ttft=ttft[max(ttft)] if ttft else TimeEstimate(reason="no target"),
        shares=timings.shares(loads),
        quality=quality,
        verdicts=tuple(verdicts),
    )


def memory_of(setting: Setting, workload: Workload, model: ModelSpec, known: Measurements) -> DeviceMemory:
    """Return the memory of one setting.

    Raises:
        InputError: Neither the workload nor a profile says how much memory the device has.
    """
    memory_bytes = workload.memory_bytes or (known.device.memory_bytes if known.device else None)
    if memory_bytes is None:
        raise InputError("the device's memory is not known", hint="add memory: 24GiB to the workload, or give -p")
    return setting.memory_of(workload, model, memory_bytes, known.order)


def tpot_percent(workload: Workload) -> int:
    """Return the percentile of TPOT that a plan shows: the highest with a target."""
    return max(workload.target.tpot_ms, default=DEFAULT_PERCENT)
