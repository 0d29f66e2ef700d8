"""The settings that a plan chooses among: a format and a block size, what they take, and what was measured of them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvplan.core.memory import DeviceMemory
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Workload
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import Order

MemoryOf = Callable[[Workload, ModelSpec, int, Order], DeviceMemory]
"""From workload, model, bytes of the device and the order of codes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        format: As the engine names it.
        bits: Of a code of K and of V, the mean of all layers.
        measured_as: kvplan's format whose times and quality are looked up; None where nothing here stands for it.
        own: Whether it is of kvplan's own runtime, whose kernels must have been among the measured ones.
        needs: What the device must have, where it is not known whether it has it.
        note: What stands between what was measured and this format; empty where they hold the same bits.
    """

    format: str
    block_tokens: int
    bits: tuple[float, float]
    measured_as: ModelFormat | None
    memory_of: MemoryOf
    own: bool = True
    note: str = ""
    needs: str = ""

    @property
    def quantized(self) -> bool:
        """Whether anything takes fewer than 16 bits."""
        return min(self.bits) < 16

    @property
    def measured_block_tokens(self) -> int | None:
        """The block size whose times are looked up; None where pages of any size stand for the engine's."""
        return self.block_tokens if self.own else None
