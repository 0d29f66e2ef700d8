"""Which implementation of the cache operations a runtime calls: chosen by name, never by what happens to work."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import Final, Protocol

import torch
from torch import Tensor

from kvplan.errors import MissingPartError
from kvplan.runtime.dense import LayerAttention, attend_masked
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.format import UnsupportedError


class Kernel(StrEnum):
    """An implementation of the cache operations."""

    CPU = "cpu"
    REFERENCE = "reference"


class Append(Protocol):
    """Append as `kvplan_kernels.append.reference` defines it."""

    def __call__(self, cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> int:
        """Quantize new K and V into a layer's cache; return the number of poisoned groups."""


class Decode(Protocol):
    """Decode as `kvplan_kernels.decode.reference` defines it."""

    def __call__(
        self,
        cache: LayerCache,
        batch: Batch,
        query: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
        positions: Tensor | None = None,
        received: bool = False,
    ) -> DecodeResult:
        """Attend to a layer's cache."""


Dequantize = Callable[[LayerCache, Batch], tuple[Tensor, Tensor]]

QUERIES_MAX: Final = 32
"""Query tokens of one sequence that one decode call takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The operations of one implementation.

    Attributes:
        name: Implementation and path, such as cpu/avx512_vnni; what records call the kernel.
    """

    name: str
    append: Append
    decode: Decode
    dequantize: Dequantize


def load_ops(kernel: Kernel | str, threads: int | None = None) -> Ops:
    """Return the operations of *kernel*, on *threads* threads; None is torch's own count.

    Raises:
        MissingPartError: The implementation is not built on this machine.
    """
    kernel = Kernel(kernel)
    append, decode, dequantize = (
        getattr(import_module(f"kvplan_kernels.{op}.{kernel}"), op) for op in ("append", "decode", "dequantize")
    )
    if kernel is Kernel.REFERENCE:
        return Ops(name="reference", append=append, decode=decode, dequantize=dequantize)
    return Ops(
        name=f"cpu/{_cpu_variant()}",
        append=partial(append, threads=threads),
        decode=partial(decode, threads=threads),
        dequantize=partial(dequantize, threads=threads),
    )


def unfused(ops: Ops) -> Ops:
    """Return *ops* with the decode of an engine without fusion: dequantize to a temporary, then torch's attention."""

    def decode(
        cache: LayerCache,
        batch: Batch,
        query: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
        positions: Tensor | None = None,
        received: bool = False,
    ) -> DecodeResult:
        if received:
            raise ValueError("torch's attention does not tell what each token received")
        key, value = ops.dequantize(cache, batch)
        if positions is None:
            positions = batch.lengths[:, None] - query.shape[1] + torch.arange(query.shape[1])
        token = torch.arange(key.shape[2])
        allowed = (token <= positions[..., None]) & (token < batch.lengths[:, None, None])
        if options.window is not None:
            allowed &= token > positions[..., None] - options.window
        attention = LayerAttention(options=options, sink_logits=sink_logits)
        output = attend_masked(
            query.transpose(1, 2), key.to(query.dtype), value.to(query.dtype), allowed[:, None], attention
        )
        return DecodeResult(output=output.transpose(1, 2).float())

    return replace(ops, name=f"torch-sdpa+{ops.name}", decode=decode)


def _cpu_variant() -> str:
    from kvplan_kernels.native.loader import chosen_variant

    try:
        return chosen_variant()
    except UnsupportedError as error:
        raise MissingPartError(str(error)) from error
