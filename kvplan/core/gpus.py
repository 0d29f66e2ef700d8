"""GPUs as their makers describe them: what a kernel's prediction is made for. Every figure is reported.

Sources, of NVIDIA but where another is named; dense rates are half of what a data sheet gives with sparsity:

* A100: A100 80GB data sheet (2,039 GB/s, 312 TFLOPS); A100 architecture white paper (108 multiprocessors, 1,410 MHz).
* H100, H200: data sheets (3.35 and 4.8 TB/s, 1,979 TFLOPS with sparsity); H100 architecture white paper (132
  multiprocessors, 1,980 MHz, of which tensor cores reach 1,830).
* B200: HGX B200 data sheet (7.7 TB/s, 4.5 PFLOPS with sparsity). Its 148 multiprocessors are those that its driver
  tells (pytorch/ao, pull request 4002), its clock is that of reviews: the data sheet names neither.
* RTX 5090: RTX Blackwell architecture white paper (170 multiprocessors, 2,407 MHz, 1,792 GB/s, 209.5 TFLOPS of bf16
  with sums in fp32).
* L40S: data sheet (864 GB/s, 362 TFLOPS); 142 multiprocessors and 2,520 MHz are those of the Ada white paper's AD102.
* RTX 4090: Ada architecture white paper (128 multiprocessors, 2,520 MHz, 1,008 GB/s, 165.2 TFLOPS of bf16).
* Shared memory, warps and registers of a multiprocessor: CUDA C++ Programming Guide, compute capabilities.
"""

import re
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
LAUNCH_S: Final = 0.5e-6
"""What a kernel in a CUDA graph takes beside its work, at the least: a chain of kernels of 2.9 us took 3.4 us each on a
V100 (NVIDIA, Getting Started with CUDA Graphs, 2019). Launched one by one they took 3.8 us, so 0.9 us beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU that stands for its architecture.

    Attributes:
        driver_name: What its driver calls it: parts of one name differ in memory and multiprocessors.
        arch: Compute capability, as sm_90.
        clock_hz: Boost clock.
        bandwidth_bytes_per_s: Of its memory.
        dense_flops: Of bf16 matrix products summed in fp32, without sparsity, with the fastest instructions it has.
        shared_bytes: Shared memory of a multiprocessor.
        warps: The most that a multiprocessor holds.
    """

    name: str
    driver_name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    bandwidth_bytes_per_s: float
    dense_flops: float
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
ALL: Final = (
    Gpu(
        name="A100 SXM 80 GB", driver_name="NVIDIA A100-SXM4-80GB",
        arch="sm_80", multiprocessors=108, clock_hz=1.41e9, bandwidth_bytes_per_s=2.039e12,
        dense_flops=312e12, shared_bytes=164 * _KIB, warps=64,
    ),
    Gpu(
        name="L40S", driver_name="NVIDIA L40S",
        arch="sm_89", multiprocessors=142, clock_hz=2.52e9, bandwidth_bytes_per_s=0.864e12,
        dense_flops=362e12, shared_bytes=100 * _KIB, warps=48,
    ),
    Gpu(
        name="RTX 4090", driver_name="NVIDIA GeForce RTX 4090",
        arch="sm_89", multiprocessors=128, clock_hz=2.52e9, bandwidth_bytes_per_s=1.008e12,
        dense_flops=165.2e12, shared_bytes=100 * _KIB, warps=48,
    ),
    Gpu(
        name="H200 SXM", driver_name="NVIDIA H200",
        arch="sm_90", multiprocessors=132, clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12,
        dense_flops=989.4e12, shared_bytes=228 * _KIB, warps=64,
    ),
    Gpu(
        name="H100 SXM", driver_name="NVIDIA H100 80GB HBM3",
        arch="sm_90", multiprocessors=132, clock_hz=1.98e9, bandwidth_bytes_per_s=3.35e12,
        dense_flops=989.4e12, shared_bytes=228 * _KIB, warps=64,
    ),
    Gpu(
        name="B200", driver_name="NVIDIA B200",
        arch="sm_100", multiprocessors=148, clock_hz=1.98e9, bandwidth_bytes_per_s=7.7e12,
        dense_flops=2250e12, shared_bytes=228 * _KIB, warps=64,
    ),
    Gpu(
        name="RTX 5090", driver_name="NVIDIA GeForce RTX 5090",
        arch="sm_120", multiprocessors=170, clock_hz=2.407e9, bandwidth_bytes_per_s=1.792e12,
        dense_flops=209.5e12, shared_bytes=100 * _KIB, warps=48,
    ),
)  # fmt: skip


def of_arch(arch: str) -> tuple[Gpu, ...]:
    """Return the GPUs of *arch*; the first stands for it where one must."""
    return tuple(gpu for gpu in ALL if gpu.arch == arch)


GPUS: Final = {arch: of_arch(arch)[0] for arch in dict.fromkeys(gpu.arch for gpu in ALL)}
"""One GPU of each architecture."""


_CAPABILITIES: Final = (
    (r"GB?300", 103), (r"G?B[12]00", 100), (r"G?H[12]00", 90), (r"GB10|DGX Spark", 121), (r"Thor", 110), (r"Orin", 87),
    (r"RTX 50\d\d|RTX PRO \d{4}", 120), (r"RTX 40\d\d|L40S?|L4|L20|RTX \d{4} Ada", 89),
    (r"RTX 30\d\d|A40|A10G?|A16|A2|RTX A\d{4}", 86), (r"A100|A800|A30", 80), (r"RTX 20\d\d|T4|Quadro RTX \d{4}", 75),
    (r"V100|TITAN V", 70),
)  # fmt: skip
"""Words of a product's name and its compute capability (NVIDIA, "CUDA GPUs", read 2026-11-30)."""


def capability_of(device: str) -> int | None:
    """Return the compute capability of a device by its name, as 90 for 9.0; None where it is not known here.

    >>> [capability_of(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "a laptop")]
    [90, 80, 89, None]
    """
    for words, capability in _CAPABILITIES:
        if re.search(rf"\b(?:{words})\b", device):
            return capability
    return None
