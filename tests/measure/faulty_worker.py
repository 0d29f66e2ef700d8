"""The measuring process with nothing to measure: a cell meets the error that KVPLAN_TEST_FAULTS has for its format.

All but the measurement itself is the product's own: its main, what it makes of an error, and how it ends.
"""

import atexit
import json
import os
import time
from collections.abc import Sequence

import torch
from triton.runtime.errors import OutOfResources

from kvplan.core.records import CellKey, CellStatus, Conditions
from kvplan.measure import worker
from kvplan.measure.jobs import Job, Measured, Started

QUIET = Conditions(load_average=1, steal_share=0.0, foreign_cpu_share=0.01)
# As PyTorch 2.13 words them, c10/cuda/CUDAException.cpp and CUDACachingAllocator.cpp.
SEARCH = (
    "Search for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
)
BLAME = """\
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1"""
DSA = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
ALLOCATOR = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 10.10 GiB is "
    "free. Including non-PyTorch memory, this process has 129.61 GiB memory in use. Of the allocated memory 128.00 GiB "
    "is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def cuda(text: str, name: str) -> Exception:
    return torch.AcceleratorError("\n".join([f"CUDA error: {text}", SEARCH.format(name), BLAME, DSA]))


ERRORS = {
    "allocator": torch.OutOfMemoryError(ALLOCATOR),
    "memory": torch.AcceleratorError(f"CUDA error: out of memory\n{DSA}"),
    "resources": OutOfResources(300000, 232448, "shared memory"),
    "illegal": cuda("an illegal memory access was encountered", "cudaErrorIllegalAddress"),
    "timeout": cuda("the launch timed out and was terminated", "cudaErrorLaunchTimeout"),
    "misaligned": cuda("misaligned address", "cudaErrorMisalignedAddress"),
    "assert": cuda("device-side assert triggered", "cudaErrorAssert"),
    "lost": RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
}
FAULTS = json.loads(os.environ["KVPLAN_TEST_FAULTS"])


def prepare(job: Job, report: worker.Report) -> None:
    if "start" in FAULTS:
        raise ERRORS[FAULTS["start"]]
    report(Started(base={}))


def measure(bench: object, group: Sequence[CellKey]) -> list[Measured]:
    for key in group:
        if key.format in FAULTS:
            raise ERRORS[FAULTS[key.format]]
    figures = {"tpot_s": (1.0,)}
    return [Measured(key=key, status=CellStatus.OK, figures=figures, conditions=QUIET) for key in group]


# A library that never finishes tidying up, as CUDA's may after an error.
atexit.register(time.sleep, 600)
worker._prepare = prepare  # type: ignore[assignment]
worker._measure = measure  # type: ignore[assignment]
worker.main()
