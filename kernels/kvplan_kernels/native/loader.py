"""Find and load the compiled kernels, in the OpenMP runtime that torch has loaded, and choose their variant."""

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.native import abi

VARIANT_ENVIRONMENT: Final = "KVPLAN_CPU_VARIANT"
"""Names the variant to run, for tests and comparisons; the best one where unset."""

_STEM: Final = "_kernels"
_OPENMP_RUNTIMES: Final = ("libgomp", "libiomp5", "libomp")


def missing() -> str | None:
    """Return why the compiled kernels cannot run here, or None."""
    try:
        library()
    except UnsupportedError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """Return the loaded kernels.

    Raises:
        UnsupportedError: They were not built, or belong to another version.
    """
    path = _library_path(Path(__file__).parent)
    if path is None:
        raise UnsupportedError("fused CPU kernel missing: it was not built; reinstall kvplan with a C++ compiler")
    # Undefined OpenMP symbols bind to whatever runtime is global: torch's own, so that there is one pool of threads.
    for runtime in openmp_runtimes()[:1]:
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"fused CPU kernel missing: {error}; reinstall kvplan with a C++ compiler") from error
    version = getattr(loaded, "kvplan_abi_version", None)
    if version is None or version() != abi.ABI_VERSION:  # before any other symbol: another version may lack it
        raise UnsupportedError("fused CPU kernel missing: it was built for another version; reinstall kvplan")
    abi.declare(loaded)
    return loaded


def openmp_runtimes() -> list[str]:
    """Return the OpenMP runtimes mapped into this process."""
    torch.get_num_threads()  # a call, so that torch and with it its runtime is loaded
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/"))
    return [path for path in paths if Path(path).name.startswith(_OPENMP_RUNTIMES)]


@cache
def variants() -> tuple[str, ...]:
    """Return the names of the variants that this machine runs, the preferred one first."""
    names: list[str] = []
    while (name := library().kvplan_variant_name(len(names))) is not None:
        names.append(name.decode())
    return tuple(names)


def chosen_variant() -> str:
    """Return the name of the variant that calls run now."""
    return variants()[variant_index()]


def variant_index() -> int:
    """Return the variant that the environment names, else 0, the preferred one."""
    name = os.environ.get(VARIANT_ENVIRONMENT)
    if not name:
        return 0
    if name not in variants():
        raise UnsupportedError(f"{VARIANT_ENVIRONMENT}={name}: this build on this machine has {', '.join(variants())}")
    return variants().index(name)


def read_bytes(buffer: Tensor, threads: int) -> int:
    """Read all of *buffer*, contiguous, as the kernels do, and return the exclusive or of its 64-bit words.

    Each thread reads several streams at once with full-width loads: what memory yields to a decode kernel.
    """
    if not buffer.is_contiguous():
        raise UnsupportedError("read_bytes: a contiguous buffer is needed")
    return int(library().kvplan_read(buffer.data_ptr(), buffer.nbytes, threads, variant_index()))


def rotate_rows(values: Tensor, threads: int | None = None) -> None:
    """Rotate the heads of *values*, contiguous float32 [..., head_dim], in place; see `kvplan_kernels.rotation`."""
    dim = values.shape[-1]
    if values.dtype != torch.float32 or not values.is_contiguous():
        raise UnsupportedError("rotate_rows: contiguous float32 is needed")
    count = torch.get_num_threads() if threads is None else threads
    status = library().kvplan_rotate(values.data_ptr(), values.numel() // dim, dim, count, variant_index())
    abi.check_status("rotate", status)


def _library_path(folder: Path) -> Path | None:
    for suffix in EXTENSION_SUFFIXES:
        path = folder / (_STEM + suffix)
        if path.exists():
            return path
    return None
