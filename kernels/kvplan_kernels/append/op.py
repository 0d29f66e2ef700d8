"""The append operation and its implementations."""

from typing import Final, Protocol

from torch import Tensor

from kvplan_kernels.append import cpu, gpu, reference
from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.cases import all_cases
from kvplan_kernels.gpu import targets
from kvplan_kernels.native import loader
from kvplan_kernels.op import Implementation, Op, nothing_missing


class AppendCall(Protocol):
    """What every implementation of append takes."""

    def __call__(self, cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> int:
        """Store new tokens; return the poisoned groups."""
        ...


APPEND: Final[Op[AppendCall]] = Op(
    reference=reference.append,
    implementations={
        "reference": Implementation(call=reference.append, missing=nothing_missing),
        "cpu": Implementation(call=cpu.append, missing=loader.missing, kernel="cpu"),
        "triton": Implementation(call=gpu.append, missing=targets.missing),
    },
    cases=all_cases,
)
