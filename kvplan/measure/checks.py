"""What measuring needs of a machine, and what of it is there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvplan.errors import KvplanError, MissingPartError
from kvplan.measure.device import Device
from kvplan.measure.devices import all_devices, open_device
from kvplan.measure.environment import Watch, disturbance
from kvplan.units import format_bytes

WATCHED_S: Final = 1.0
"""How long other processes are watched: a hundred ticks of Linux' accounting."""
_PACKAGES: Final = ("torch", "transformers", "safetensors", "gguf", "accelerate", "psutil")
_INSTALL: Final = "pip install 'kvplan[profile]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        found: What is there, or why it is not.
        good: Whether it is as measuring wants it.
        needed: Whether nothing can be measured without it.
    """

    name: str
    found: str
    good: bool
    needed: bool = True


def run_checks() -> list[Check]:
    """Return every check, in the order in which a person would mend them."""
    try:
        device = open_device("cpu")
    except KvplanError as error:
        return [Check(name="system", found=str(error), good=False)]
    checks = [_package(name) for name in _PACKAGES]
    if all(check.good for check in checks if check.name == "torch"):
        checks += [_kernels(), _openmp()]
    return [_processor(device), _memory(device), *checks, *_gpus(), _demo(), _quiet(device, WATCHED_S)]


def require_packages() -> None:
    """Refuse to measure where the packages for it are not installed.

    Raises:
        MissingPartError: With the command that installs them.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise MissingPartError(f"measuring needs {', '.join(missing)}", hint=_INSTALL)


def _processor(device: Device) -> Check:
    info = device.info
    cache = format_bytes(info.last_level_cache_bytes) if info.last_level_cache_bytes else "unknown"
    return Check(name="processor", found=f"{info.name}, {info.cores} cores, last-level cache {cache}", good=True)


def _memory(device: Device) -> Check:
    free, whole = device.available_bytes(), device.info.memory_bytes
    return Check(name="memory", found=f"{format_bytes(free)} of {format_bytes(whole)} available", good=True)


def _package(name: str) -> Check:
    try:
        return Check(name=name, found=version(name), good=True)
    except PackageNotFoundError:
        return Check(name=name, found=f"not installed; {_INSTALL}", good=False)


def _kernels() -> Check:
    from kvplan.runtime.ops import Kernel, load_ops

    return _tried("fused kernels", lambda: load_ops(Kernel.CPU).name)


def _gpus() -> list[Check]:
    """Look for GPUs to measure on; none is needed."""
    return [
        Check(name="GPU" if name == "cuda" else name, found=f"not measured on: {device}", good=False, needed=False)
        if isinstance(device, str)
        else Check(name=name, found=device.info.name, good=True)
        for name, device in all_devices()
        if name.startswith("cuda")
    ]


def _tried(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name=name, found=look(), good=True)
    except KvplanError as error:
        return Check(name=name, found=str(error), good=False)


def _openmp() -> Check:
    """Look for a second OpenMP runtime: two pools of threads fight for the same cores."""
    import torch

    torch.ones(2).sum()
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = ("libgomp", "libiomp", "libomp")
    paths = {line.split(maxsplit=5)[-1] for line in maps if any(f"/{name}" in line for name in names)}
    found = ", ".join(sorted(Path(path).name for path in paths)) or "none loaded"
    return Check(name="OpenMP", found=found, good=len(paths) == 1, needed=False)


def _demo() -> Check:
    from kvplan.store.models import load_model_spec

    def look() -> str:
        spec = load_model_spec("demo")
        return f"{len(spec.layers)} layers, {format_bytes(spec.weight_bytes or 0)}"

    return _tried("demo model", look)


def _quiet(device: Device, seconds: float) -> Check:
    watch = Watch(device)
    time.sleep(seconds)
    conditions = watch.conditions()
    found = disturbance(conditions) or f"other processes take {conditions.foreign_cpu_share:.0%} of the cores"
    return Check(name="quiet", found=found, good=not disturbance(conditions), needed=False)
