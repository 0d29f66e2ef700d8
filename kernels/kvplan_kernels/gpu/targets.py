"""What a device is to the Triton kernels: how many programs fill it, and which instructions it has."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch

from kvplan_kernels.format import CacheFormat, Code, FloatType, UnsupportedError

INTERPRET: Final = "TRITON_INTERPRET"
"""Set to 1 before Triton is imported, kernels run in its interpreter, on the CPU."""
PROGRAMS_PER_MULTIPROCESSOR: Final = 4
"""Of two warps and some 220 registers each."""
_INTERPRETED_PROGRAMS: Final = 24
GRID_MAX: Final = 65535
"""Programs along the second and third axis of a grid (CUDA C++ Programming Guide, technical specifications)."""
_CUDA: Final = "sm_"
_FIRST: Final = {Code.E4M3: 89}
"""NVIDIA's first architecture with instructions that read such codes (PTX ISA 8.1, cvt)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A kernel as a call launches it.

    Attributes:
        kernel: Triton's function.
        grid: Programs along each axis.
        arguments: Of the kernel, by name: tensors, numbers and what it is compiled for.
        options: Of the compiler: warps, stages.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A device.

    Attributes:
        programs: Programs that run at once.
        asm: Whether it takes NVIDIA's PTX.
        arch: Its architecture, such as sm_90; "" in the interpreter and where it does not matter.
        launches: Where launches are kept instead of being run; None on a real device.
    """

    programs: int
    asm: bool
    device: torch.device
    arch: str = ""
    launches: list[Launch] | None = field(default=None, compare=False)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Run *kernel* on the device, or keep the launch.

        Raises:
            UnsupportedError: The grid is more than a launch takes.
        """
        if max(grid[1:], default=0) > GRID_MAX:
            raise UnsupportedError(
                f"{max(grid[1:])} sequences times KV heads (or splits) in one call: a launch takes {GRID_MAX}"
            )
        if self.launches is None:
            with self._current():
                kernel[grid](*arguments, **named)
            return
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        options = {name: given.pop(name) for name in set(given) - set(kernel.arg_names)}
        self.launches.append(Launch(kernel=kernel, grid=grid, arguments=given, options=options))

    def _current(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the device: Triton takes the current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


_RECORDING: Final[ContextVar[Target | None]] = ContextVar("recording", default=None)


@contextmanager
def recording(*, multiprocessors: int, arch: str) -> Iterator[list[Launch]]:
    """Keep the launches of calls with tensors on torch's device meta, as a device would be handed them.

    Args:
        multiprocessors: Of the device that is played.
        arch: Its architecture, such as sm_90; NVIDIA's begin with sm_ and take its PTX.
    """
    launches: list[Launch] = []
    programs = multiprocessors * PROGRAMS_PER_MULTIPROCESSOR
    token = _RECORDING.set(Target(programs, arch.startswith(_CUDA), torch.device("meta"), arch, launches))
    try:
        yield launches
    finally:
        _RECORDING.reset(token)


def float_name(float_type: FloatType) -> Any:
    """Return Triton's type."""
    import triton.language as tl

    return {FloatType.BF16: tl.bfloat16, FloatType.FP16: tl.float16}[float_type]


def interpreted() -> bool:
    """Return whether kernels run in the interpreter."""
    return os.environ.get(INTERPRET) == "1"


def missing() -> str | None:
    """Return why the Triton kernels cannot run here, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed; install kvplan[profile] on Linux"
    if not torch.cuda.is_available() and not interpreted():
        return "torch finds no GPU here"
    return None


def target(device: torch.device) -> Target:
    """Return what *device* is.

    Raises:
        UnsupportedError: It is no GPU, and kernels are not interpreted.
    """
    recorder = _RECORDING.get()
    return recorder if recorder is not None and device.type == "meta" else _present(device)


@cache
def _present(device: torch.device) -> Target:
    if device.type == "cpu" and interpreted():
        return Target(programs=_INTERPRETED_PROGRAMS, asm=False, device=device)
    if device.type != "cuda":
        raise UnsupportedError(f"the Triton kernels take tensors on a GPU, got one on {device}")
    properties = torch.cuda.get_device_properties(device)
    programs = properties.multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR
    asm = torch.version.hip is None
    arch = f"{_CUDA}{properties.major}{properties.minor}" if asm else ""
    return Target(programs=programs, asm=asm, device=device, arch=arch)


def check_format(form: CacheFormat, arch: str) -> None:
    """Refuse a format whose codes *arch*, such as sm_90, has no instructions for.

    Raises:
        UnsupportedError: It has none.
    """
    if not arch.startswith(_CUDA):
        return  # The interpreter and AMD's devices unpack all codes with integers.
    for tensor in (form.key, form.value):
        first = _FIRST.get(tensor.code, 0)
        if tensor.quantized and int(arch.removeprefix(_CUDA)) < first:
            raise UnsupportedError(
                f"format {form} on {arch}: instructions that convert {tensor.code} start with {_CUDA}{first}"
            )


def check_devices(device: torch.device, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors that lie elsewhere than on *device*."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise UnsupportedError(f"the cache is on {device}, a tensor of the call on {tensor.device}")
