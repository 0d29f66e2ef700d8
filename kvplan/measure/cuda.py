"""A GPU that CUDA runs on: timed by its own events, its calls recorded in graphs, watched through NVML."""

import gc
import resource
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from kvplan.core.specs import DeviceInfo, DeviceKind
from kvplan.errors import NotRecordedError, UnsupportedFormatError
from kvplan.measure.device import CpuDevice, MemoryFigures, Readings, Usage
from kvplan.measure.faults import told
from kvplan.measure.nvml import GpuState, open_nvml

CAPABILITY_MIN: Final = (8, 0)
"""bf16 matrix products, on which every kernel here rests, begin with compute capability 8.0."""
CLEARED_CACHES: Final = 4
"""L2 caches that are cleared ahead of what is timed: some 50 us of work, several times what a launch takes."""
_CAPTURE: Final = "captur"
"""Part of what CUDA and torch say of whatever a graph cannot record."""
_NVML_FIGURES: Final = {
    "device_used_bytes": "memory_used_bytes",
    "own_device_bytes": "own_memory_bytes",
}
"""Figures that are readings of NVML, by their names there."""


def cuda_missing() -> str | None:
    """Return why nothing can be measured on a GPU here, or None."""
    if find_spec("torch") is None:
        return "torch is not installed; pip install 'kvplan[profile]'"
    import torch

    if torch.version.hip is not None:
        return "torch is built for AMD, whose GPUs kvplan compiles kernels for but does not measure on"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        with open_nvml() as nvml:
            return f"torch finds no GPU here{': ' + nvml.reason if nvml.reason else ''}"
    return None


def cuda_count() -> int:
    """Return how many GPUs torch finds; CUDA_VISIBLE_DEVICES hides the others."""
    if cuda_missing():
        return 0
    import torch

    return int(torch.cuda.device_count())


class CudaDevice:
    """A GPU, by the number that torch gives it.

    Raises:
        UnsupportedFormatError: It is too old for the kernels.
    """

    def __init__(self, number: int = 0, kernel_variant: str = "") -> None:
        import torch

        self._torch: Any = torch
        self._name = f"cuda:{number}"
        self._host = CpuDevice()
        properties: Any = torch.cuda.get_device_properties(number)
        capability = (properties.major, properties.minor)
        if capability < CAPABILITY_MIN:
            raise UnsupportedFormatError(
                f"{properties.name} has compute capability {capability[0]}.{capability[1]}; the kernels need "
                f"8.0, which multiplies bf16"
            )
        self._info = DeviceInfo(
            name=properties.name,
            uuid=_nvml_uuid(str(properties.uuid)),
            kind=DeviceKind.CUDA,
            cores=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            last_level_cache_bytes=properties.L2_cache_size,
            kernel_variant=kernel_variant or f"sm_{capability[0]}{capability[1]}",
        )
        self._keeper: Any = None
        self._cleared: Any = None

    @property
    def info(self) -> DeviceInfo:
        """What the GPU is; its cores are its multiprocessors."""
        return self._info

    @property
    def torch_name(self) -> str:
        """What torch calls it, as cuda:0."""
        return self._name

    @property
    def records(self) -> bool:
        """One graph holds a whole rotation over a bed's copies."""
        return True

    def now(self) -> float:
        """Return the host's performance counter."""
        return time.perf_counter()

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds between two events of the device's own clock, around all that *call* starts.

        The device is given other work first: while it clears a buffer of four L2 caches, which leaves nothing of the
        call's bytes in them, the host launches what is timed.
        """
        cuda = self._torch.cuda
        with cuda.device(self._name):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda.synchronize()
            self._clear_cache()
            start.record()
            call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return the replay of a CUDA graph, as engines launch a decode step: nothing waits for the host.

        It is replayed once here, since the first launch of a graph uploads it. Where recording fails, the stream that
        was current is again, which torch leaves to whoever catches the error.

        Raises:
            NotRecordedError: The call reads something back from the device, or does else what no graph holds.
        """
        cuda = self._torch.cuda
        with cuda.device(self._name):
            graph, stream = cuda.CUDAGraph(), cuda.current_stream()
            try:
                with cuda.graph(graph, pool=self._shared_pool()):
                    for _ in range(times):
                        call()
            except RuntimeError as error:
                cuda.set_stream(stream)
                self._keeper = None  # what an abandoned recording holds of the pool is never given back
                if _CAPTURE not in str(error).lower():
                    raise  # an error of what ran before, or of memory
                raise NotRecordedError(f"a CUDA graph cannot hold the call: {told(error)}") from error
            graph.replay()
        return graph.replay  # type: ignore[no-any-return]

    def _clear_cache(self) -> None:
        if self._cleared is None:
            size = CLEARED_CACHES * self._info.last_level_cache_bytes
            self._cleared = self._torch.empty(size, dtype=self._torch.uint8, device=self._name)
        self._cleared.zero_()

    def _shared_pool(self) -> Any:
        """Return the memory that all graphs of a cell take their temporaries from, one after another.

        A graph is kept for it: torch refuses a pool whose graphs are all gone (CUDACachingAllocator counts its users).
        """
        cuda = self._torch.cuda
        if self._keeper is None:
            keeper = cuda.CUDAGraph()
            with cuda.graph(keeper):
                self._torch.zeros(1, device=self._name)
            self._keeper = keeper
        return self._keeper.pool()

    def available_bytes(self) -> int:
        """Return what the device has free, and what torch holds of it without using it."""
        from kvplan.runtime.memory import available_bytes

        return available_bytes(self._name)

    def resident_bytes(self) -> int:
        """Return the bytes of the tensors that this process has on the device."""
        return int(self._torch.cuda.memory_allocated(self._name))

    def memory(self) -> MemoryFigures:
        """Return what torch's allocator and NVML say, and what lies between them.

        Outside the allocator are the context, the kernels' code, workspaces of libraries and, where NVML does not tell
        processes apart, other processes.
        """
        cuda = self._torch.cuda
        reserved = float(cuda.memory_reserved(self._name))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {
            "process_peak_bytes": float(peak),
            "allocator_peak_bytes": float(cuda.max_memory_allocated(self._name)),
            "allocator_reserved_bytes": reserved,
        }
        readings = self._state().readings
        missing = {name: readings[of].reason for name, of in _NVML_FIGURES.items() if readings[of].number is None}
        figures |= {name: number for name, of in _NVML_FIGURES.items() if (number := readings[of].number) is not None}
        held = figures.get("own_device_bytes", figures.get("device_used_bytes"))
        if held is None:
            missing["outside_allocator_bytes"] = missing["device_used_bytes"]
        else:
            figures["outside_allocator_bytes"] = held - reserved
        return MemoryFigures(figures=figures, missing=missing)

    def start_cell(self) -> None:
        """Give back what earlier cells left, and count the peak anew."""
        self._keeper = None
        gc.collect()
        self._torch.cuda.empty_cache()
        self._torch.cuda.reset_peak_memory_stats(self._name)

    def usage(self) -> Usage:
        """Return the host's: its cores start what the device runs."""
        return self._host.usage()

    def load_average(self) -> float:
        """Return the host's."""
        return self._host.load_average()

    @property
    def poll_s(self) -> float | None:
        """Heat and the power supply hold clocks down only under load."""
        return 0.5

    def readings(self) -> Readings:
        """Return what NVML tells of the multiprocessors' clock, what holds it down, and the power of the whole GPU."""
        found = self._state().readings
        throttle = found["throttle"].value
        return Readings(
            clock_hz=found["sm_clock_hz"].number,
            throttle=throttle if isinstance(throttle, tuple) else (),
            power_w=found["power_w"].number,
        )

    def _state(self) -> GpuState:
        with open_nvml() as nvml:
            return nvml.find(self._info.uuid)


def _nvml_uuid(uuid: str) -> str:
    """Return *uuid* as NVML has it, a whole GPU's or a MIG device's; CUDA leaves out the prefix that says which."""
    with open_nvml() as nvml:
        found = nvml.find(uuid).uuid
    return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
