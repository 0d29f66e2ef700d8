"""GPUs as their makers describe them: what a kernel's prediction is made for. Every figure is reported."""

from dataclasses import dataclass
from typing import Final

REGISTERS_PER_MULTIPROCESSOR: Final = 65536
REGISTER_UNIT: Final = 256
"""Registers of a warp are handed out in multiples of this (CUDA C++ Programming Guide, compute capabilities)."""
LANES_PER_CLOCK: Final = 128
"""Lanes that a multiprocessor issues an instruction for in a clock: four schedulers of 32."""
PROGRAMS_MAX: Final = 32
SHARED_RESERVED_BYTES: Final = 1024
"""Of each program, taken by the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU that stands for its architecture.

    Attributes:
        arch: Compute capability, as sm_90.
        clock_hz: Boost clock.
        bandwidth_bytes_per_s: Of its memory.
        shared_bytes: Shared memory of a multiprocessor.
        warps: The most that a multiprocessor holds.
    """

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    bandwidth_bytes_per_s: float
    shared_bytes: int
    warps: int

    def occupancy(self, *, registers: int, shared_bytes: int, warps: int) -> float:
        """Return the part of a multiprocessor's warps that programs of *warps* warps fill.

        Args:
            registers: Of a thread.
            shared_bytes: Of a program.
            warps: Of a program.
        """
        of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS_PER_MULTIPROCESSOR // (of_warp * warps)
        by_shared = self.shared_bytes // (shared_bytes + SHARED_RESERVED_BYTES)
        programs = min(by_registers, by_shared, self.warps // warps, PROGRAMS_MAX)
        return programs * warps / self.warps


_KIB: Final = 1024
_ALL: Final = (
    Gpu(
        name="A100 SXM 80 GB", arch="sm_80", multiprocessors=108, clock_hz=1.41e9, bandwidth_bytes_per_s=2.04e12,
        shared_bytes=164 * _KIB, warps=64,
    ),
    Gpu(
        name="H200 SXM", arch="sm_90", multiprocessors=132, clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12,
        shared_bytes=228 * _KIB, warps=64,
    ),
    Gpu(
        name="B200", arch="sm_100", multiprocessors=148, clock_hz=1.98e9, bandwidth_bytes_per_s=7.7e12,
        shared_bytes=228 * _KIB, warps=64,
    ),
    Gpu(
        name="RTX 5090", arch="sm_120", multiprocessors=170, clock_hz=2.41e9, bandwidth_bytes_per_s=1.79e12,
        shared_bytes=100 * _KIB, warps=48,
    ),
)  # fmt: skip
GPUS: Final = {gpu.arch: gpu for gpu in _ALL}
