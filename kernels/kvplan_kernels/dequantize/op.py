"""The dequantize operation and its implementations."""

from typing import Final, Protocol

from torch import Tensor

from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.cases import all_cases
from kvplan_kernels.dequantize import cpu, gpu, reference
from kvplan_kernels.gpu import targets
from kvplan_kernels.native import loader
from kvplan_kernels.op import Implementation, Op, nothing_missing


class DequantizeCall(Protocol):
    """What every implementation of dequantize takes."""

    def __call__(self, cache: LayerCache, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return dense K and V."""
        ...


DEQUANTIZE: Final[Op[DequantizeCall]] = Op(
    reference=reference.dequantize,
    implementations={
        "reference": Implementation(call=reference.dequantize, missing=nothing_missing),
        "cpu": Implementation(call=cpu.dequantize, missing=loader.missing, kernel="cpu"),
        "triton": Implementation(call=gpu.dequantize, missing=targets.missing),
    },
    cases=all_cases,
)
