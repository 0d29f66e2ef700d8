"""Which implementation of the cache operations a runtime calls: chosen by name, never by what happens to work."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvplan.errors import MissingPartError
from kvplan.runtime.dense import LayerAttention, attend_masked
from kvplan_kernels.append.gpu import append_counting
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.dequantize.gpu import dequantize_tokens
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.gpu.targets import INTERPRET, interpreted, missing
from kvplan_kernels.layout import KVLayout, Order, order_of


class Kernel(StrEnum):
    """An implementation of the cache operations."""

    CPU = "cpu"
    TRITON = "triton"
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
        lse: bool = False,
    ) -> DecodeResult:
        """Attend to a layer's cache."""


class AppendCounting(Protocol):
    """Append as `Append` does, and tell the number of poisoned groups to a tensor, so that nothing is read back."""

    def __call__(
        self,
        cache: LayerCache,
        batch: Batch,
        key: Tensor,
        value: Tensor,
        counts: Tensor,
        poisons: Tensor,
        /,
        *,
        most: int | None = None,
    ) -> None:
        """Quantize new K and V into a layer's cache; add the poisoned groups to *poisons*, int32 [1].

        *most* is the largest of the counts, for who knows it.
        """


Dequantize = Callable[[LayerCache, Batch], tuple[Tensor, Tensor]]
DequantizeTokens = Callable[[LayerCache, Batch, int], tuple[Tensor, Tensor]]
"""The same with the length of the longest sequence given, so that nothing is read back."""

INTERPRETER: Final = "interpreter"
"""The path of Triton kernels that run in its interpreter: right, and thousands of times too slow to be timed."""

QUERIES_MAX: Final = 32
"""Query tokens of one sequence that one decode call takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The operations of one implementation.

    Attributes:
        name: Implementation and path, such as cpu/avx512_vnni; what records call the kernel.
        device: Where its caches and tensors lie, as torch names it.
    """

    name: str
    append: Append
    append_counting: AppendCounting
    decode: Decode
    dequantize: Dequantize
    dequantize_tokens: DequantizeTokens
    device: str = "cpu"

    @property
    def order(self) -> Order:
        """How codes lie in the caches that it takes."""
        return order_of(self.name)

    def lay(self, layout: KVLayout) -> KVLayout:
        """Return *layout* with codes in the order that it takes."""
        return replace(layout, order=self.order)


def load_ops(kernel: Kernel | str, threads: int | None = None, device: str = "cpu") -> Ops:
    """Return the operations of *kernel*.

    Args:
        kernel: An implementation.
        threads: Threads of a CPU implementation; None is torch's own count.
        device: Where it runs, as torch names it.

    Raises:
        MissingPartError: The implementation is not built on this machine, or does not run on *device*.
    """
    kernel = Kernel(kernel)
    _check_device(kernel, device)
    append, decode, dequantize = (
        getattr(import_module(f"kvplan_kernels.{op}.{_MODULES[kernel]}"), op)
        for op in ("append", "decode", "dequantize")
    )
    if kernel is Kernel.CPU:
        append, decode, dequantize = (partial(call, threads=threads) for call in (append, decode, dequantize))
    return Ops(
        name=_PATHS[kernel](device),
        append=append,
        append_counting=append_counting if kernel is Kernel.TRITON else _counting(append),
        decode=decode,
        dequantize=dequantize,
        dequantize_tokens=dequantize_tokens if kernel is Kernel.TRITON else _given(dequantize),
        device=device,
    )


def _counting(append: Append) -> AppendCounting:
    def call(*given: Any, most: int | None = None) -> None:
        *arguments, poisons = given
        poisons += append(*arguments)

    return call


def _given(dequantize: Dequantize) -> DequantizeTokens:
    return lambda cache, batch, _: dequantize(cache, batch)


_MODULES: Final = {Kernel.CPU: "cpu", Kernel.TRITON: "gpu", Kernel.REFERENCE: "reference"}
"""The module of an operation that holds the implementation."""


def default_kernel(device: str) -> Kernel:
    """Return the implementation made for *device*, as torch names it."""
    return Kernel.TRITON if device.startswith("cuda") else Kernel.CPU


def _check_device(kernel: Kernel, device: str) -> None:
    """Refuse a device that the kernel does not run on."""
    if kernel is not Kernel.TRITON and device.startswith("cuda"):
        raise MissingPartError(
            f"the {kernel} kernels run on the processor, not on {device}", hint="use --kernel triton"
        )
    if kernel is Kernel.TRITON and (reason := missing()):
        raise MissingPartError(f"the Triton kernels cannot run: {reason}", hint="use --device cpu --kernel cpu")
    if kernel is Kernel.TRITON and not device.startswith("cuda") and not interpreted():
        raise MissingPartError(f"the Triton kernels run on a GPU, not on {device}", hint="use --kernel cpu")


def require_compiled(ops: Ops) -> None:
    """Refuse operations whose times would say nothing: Triton's interpreter computes right, thousands of times slower.

    Raises:
        MissingPartError: They run in it.
    """
    if ops.name.endswith(f"/{INTERPRETER}"):
        raise MissingPartError("the Triton kernels run in Triton's interpreter", hint=f"unset {INTERPRET}")


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
        lse: bool = False,
    ) -> DecodeResult:
        if received or lse:
            raise ValueError("torch's attention tells nothing but its output")
        key, value = ops.dequantize(cache, batch)
        if positions is None:
            queries = torch.arange(query.shape[1], device=query.device)
            positions = batch.lengths[:, None] - query.shape[1] + queries
        token = torch.arange(key.shape[2], device=key.device)
        allowed = (token <= positions[..., None]) & (token < batch.lengths[:, None, None])
        if options.window is not None:
            allowed &= token > positions[..., None] - options.window
        attention = LayerAttention(options=options, sink_logits=sink_logits)
        output = attend_masked(
            query.transpose(1, 2), key.to(query.dtype), value.to(query.dtype), allowed[:, None], attention
        )
        return DecodeResult(output=output.transpose(1, 2).float())

    return replace(ops, name=f"torch-sdpa+{ops.name}", decode=decode)


def _gpu_variant(device: str) -> str:
    """Return the compute capability that kernels are compiled for, as sm_90; AMD's name of its own there."""
    if not device.startswith("cuda"):
        return INTERPRETER
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _cpu_variant() -> str:
    from kvplan_kernels.native.loader import chosen_variant

    try:
        return chosen_variant()
    except UnsupportedError as error:
        raise MissingPartError(str(error)) from error


_PATHS: Final[dict[Kernel, Callable[[str], str]]] = {
    Kernel.CPU: lambda _: f"cpu/{_cpu_variant()}",
    Kernel.TRITON: lambda device: f"triton/{_gpu_variant(device)}",
    Kernel.REFERENCE: lambda _: "reference",
}
"""What records call the implementation on a device."""


def wait(device: str) -> None:
    """Wait until everything started on *device*, as torch names it, is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
