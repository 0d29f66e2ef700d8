"""What NVIDIA's management library (NVML) tells of a GPU. A figure that it does not give is absent, with the reason."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

Value = float | str | tuple[str, ...]
_T = TypeVar("_T")

_REASONS: Final = {
    1: "NVML is not started",
    2: "NVML refuses the question for this device",
    3: "not supported by this device",
    4: "no permission to read it",
    6: "NVML finds no such device",
    9: "the NVIDIA driver is not loaded",
    12: "NVIDIA's library libnvidia-ml.so.1 is not installed",
    13: "this NVIDIA driver cannot be asked for it",
    15: "the GPU is lost: it fell off the bus or is inaccessible",
    16: "the GPU needs a reset",
    18: "the NVIDIA driver and its library libnvidia-ml.so.1 are of different versions; restart the machine",
    25: "this NVIDIA driver does not know the version of the question",
}
"""By NVML's error code (nvmlReturn_t of nvml.h)."""
_NOT_FOUND: Final = 6

_CLOCK_EVENTS: Final = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
"""Why the clocks are below their highest, by bit (nvmlClocksEventReasons and nvmlClocksThrottleReasons of nvml.h)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure of a GPU, at the moment it was asked for.

    Attributes:
        value: A number in `unit`, a text, or words; None where it is absent.
        unit: B, W, Hz or errors; empty for texts and words.
        reason: Why it is absent; empty where it is there.
    """

    value: Value | None
    unit: str = ""
    reason: str = ""

    @property
    def number(self) -> float | None:
        """The value where it is a number."""
        return self.value if isinstance(self.value, int | float) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """What NVML tells of one GPU, or of one MIG device.

    Attributes:
        uuid: GPU-… or MIG-…; as it was asked for, or empty, where NVML does not tell it.
        readings: Every name of the table below, whether NVML gives the figure or not.
        reason: Why NVML does not open the device, so that all is absent; empty where it does.
    """

    uuid: str
    readings: dict[str, Reading]
    reason: str = ""


@dataclass(frozen=True)
class _Device:
    """One device while NVML is started; `nv` is the module pynvml, `handle` NVML's own."""

    nv: Any
    handle: Any

    @cached_property
    def whole(self) -> Any:
        """The handle of the GPU that a MIG device is a part of: all parts share its clocks and its health."""
        is_part = self.nv.nvmlDeviceGetUUID(self.handle).startswith("MIG-")
        return self.nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self.handle) if is_part else self.handle

    @cached_property
    def memory(self) -> Any:
        """Asked once, so that total, used, free and reserved are of one moment and add up."""
        return self.nv.nvmlDeviceGetMemoryInfo(self.handle, version=self.nv.nvmlMemory_v2)

    def clock_hz(self, domain: int) -> float:
        return float(self.nv.nvmlDeviceGetClockInfo(self.whole, domain)) * 1e6

    def uncorrected_errors(self) -> int:
        nv = self.nv
        kind, counter = nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC
        return int(nv.nvmlDeviceGetTotalEccErrors(self.whole, kind, counter))

    def own_bytes(self) -> int:
        processes = self.nv.nvmlDeviceGetComputeRunningProcesses(self.handle)
        if any(not Path(f"/proc/{process.pid}").exists() for process in processes):
            raise _AbsentError("NVML lists processes by ids that are not of this system, as it may in a container")
        own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        if not own:
            raise _AbsentError("this process is not among those that NVML lists on the device")
        if None in own:
            raise _AbsentError("NVML lists this process without its memory")
        return sum(own)


@dataclass(frozen=True, slots=True)
class _Figure:
    """How a figure is read, and its unit."""

    unit: str
    read: Callable[[_Device], Value]


_FIGURES: Final = {
    "uuid": _Figure("", lambda gpu: gpu.nv.nvmlDeviceGetUUID(gpu.handle)),
    "name": _Figure("", lambda gpu: gpu.nv.nvmlDeviceGetName(gpu.handle)),
    "memory_total_bytes": _Figure("B", lambda gpu: gpu.memory.total),
    "memory_used_bytes": _Figure("B", lambda gpu: gpu.memory.used),
    "memory_free_bytes": _Figure("B", lambda gpu: gpu.memory.free),
    "memory_reserved_bytes": _Figure("B", lambda gpu: gpu.memory.reserved),
    "own_memory_bytes": _Figure("B", lambda gpu: gpu.own_bytes()),
    "power_w": _Figure("W", lambda gpu: gpu.nv.nvmlDeviceGetPowerUsage(gpu.handle) / 1e3),
    "sm_clock_hz": _Figure("Hz", lambda gpu: gpu.clock_hz(gpu.nv.NVML_CLOCK_SM)),
    "memory_clock_hz": _Figure("Hz", lambda gpu: gpu.clock_hz(gpu.nv.NVML_CLOCK_MEM)),
    "throttle": _Figure("", lambda gpu: clock_events(gpu.nv.nvmlDeviceGetCurrentClocksEventReasons(gpu.whole))),
    "ecc": _Figure("", lambda gpu: _mode(gpu.nv.nvmlDeviceGetEccMode(gpu.whole)[0])),
    "uncorrected_errors": _Figure("errors", lambda gpu: gpu.uncorrected_errors()),
    "mig": _Figure("", lambda gpu: _mode(gpu.nv.nvmlDeviceGetMigMode(gpu.whole)[0])),
    "driver_version": _Figure("", lambda gpu: gpu.nv.nvmlSystemGetDriverVersion()),
    "cuda_driver_version": _Figure("", lambda gpu: _cuda_version(gpu.nv.nvmlSystemGetCudaDriverVersion_v2())),
}
"""Memory as NVML's second version counts it: used leaves out what the driver reserves for itself. Power is the mean of
a second where the GPU is newer than the A100, and of a whole GPU only. Errors are those since the driver was loaded."""


@dataclass(frozen=True, slots=True)
class Nvml:
    """NVML while it is started.

    Attributes:
        reason: Why it could not be started; empty where it was.
    """

    reason: str
    _nv: Any = None

    def gpus(self) -> list[GpuState]:
        """Return every GPU, each followed by its MIG devices; CUDA_VISIBLE_DEVICES hides none of them."""
        nv = self._nv
        if nv is None:
            return []
        count, reason = _ask(nv, nv.nvmlDeviceGetCount)
        if count is None:
            return [_absent("", reason)]
        found = []
        for index in range(count):
            handle, reason = _ask(nv, nv.nvmlDeviceGetHandleByIndex, index)
            found += [_absent("", reason)] if reason else [_state(_Device(nv, handle)), *_parts(nv, handle)]
        return found

    def find(self, uuid: str) -> GpuState:
        """Return the GPU or MIG device called *uuid*, with or without its prefix; all absent where there is none."""
        nv = self._nv
        if nv is None:
            return _absent(uuid, self.reason)
        # CUDA tells UUIDs without the prefix that says whether it is a whole GPU.
        names = (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
        handle, reason = None, ""
        for name in names:
            handle, reason = _ask(nv, nv.nvmlDeviceGetHandleByUUID, name)
            if reason != _REASONS[_NOT_FOUND]:
                break
        return _absent(uuid, reason) if reason else _state(_Device(nv, handle), uuid)


@contextmanager
def open_nvml() -> Generator[Nvml, None, None]:
    """Start NVML and stop it afterwards; where it cannot be started, say why and find nothing. Raises nothing."""
    try:
        import pynvml as nv
    except ImportError:
        yield Nvml("the package nvidia-ml-py is not installed; pip install 'kvplan[profile]'")
        return
    _, reason = _ask(nv, nv.nvmlInit)
    if reason:
        yield Nvml(reason)
        return
    try:
        yield Nvml("", nv)
    finally:
        with suppress(nv.NVMLError):
            nv.nvmlShutdown()


def clock_events(bits: int) -> tuple[str, ...]:
    """Return why the clocks are below their highest; empty where they are not.

    >>> clock_events(0x44)
    ('software power cap', 'hardware thermal slowdown')
    """
    unknown = bits & ~sum(_CLOCK_EVENTS)
    words = tuple(word for bit, word in _CLOCK_EVENTS.items() if bits & bit)
    return (*words, f"unknown {unknown:#x}") if unknown else words


class _AbsentError(Exception):
    """NVML answered, but not with the figure."""


def _ask(nv: Any, question: Callable[..., _T], *about: object) -> tuple[_T | None, str]:
    """Return the answer, or None and why there is none."""
    try:
        return question(*about), ""
    except nv.NVMLError as error:
        return None, _REASONS.get(error.value, f"NVML error {error.value}: {error}")
    except UnicodeError:
        return None, "NVML's answer is no text"
    except _AbsentError as error:
        return None, str(error)


def _state(device: _Device, uuid: str = "") -> GpuState:
    readings = {name: _reading(device, figure) for name, figure in _FIGURES.items()}
    return GpuState(uuid=str(readings["uuid"].value or uuid), readings=readings)


def _reading(device: _Device, figure: _Figure) -> Reading:
    value, reason = _ask(device.nv, figure.read, device)
    return Reading(value, figure.unit, reason)


def _absent(uuid: str, reason: str) -> GpuState:
    readings = {name: Reading(None, figure.unit, reason) for name, figure in _FIGURES.items()}
    return GpuState(uuid=uuid, readings=readings, reason=reason)


def _parts(nv: Any, gpu: Any) -> list[GpuState]:
    """Return the MIG devices of *gpu*; their places may have gaps."""
    places, _ = _ask(nv, nv.nvmlDeviceGetMaxMigDeviceCount, gpu)
    found = []
    for place in range(places or 0):
        handle, reason = _ask(nv, nv.nvmlDeviceGetMigDeviceHandleByIndex, gpu, place)
        if reason != _REASONS[_NOT_FOUND]:
            found.append(_absent("", reason) if reason else _state(_Device(nv, handle)))
    return found


def _mode(state: int) -> str:
    return {0: "off", 1: "on"}.get(state, f"unknown {state}")


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
