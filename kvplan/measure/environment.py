"""What else shaped a figure: versions, other processes, stolen time, clocks."""

import platform
from importlib.metadata import PackageNotFoundError, version
from threading import Event, Thread
from typing import Final

from kvplan import __version__
from kvplan.core.records import Conditions
from kvplan.measure.device import Device

TOLERANCE: Final = 0.10
"""Core time of other processes, as a share, above which a repeat is measured again: a tenth of the cores moves
memory-bound times by about as much as the margin that `kvplan check` allows on a CPU."""
STEAL_WEIGHT: Final = 5
"""Stolen time counts five times: it stalls one thread and with it the whole step."""

SLOWED: Final = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
"""Reasons for low clocks that are no part of a GPU's normal work; its power limit is."""

_PACKAGES: Final = ("torch", "triton", "nvidia-ml-py", "transformers", "numpy", "accelerate", "gguf", "safetensors")


def versions() -> dict[str, str]:
    """Return the version of all that takes part in measuring; packages that are not installed are left out."""
    found = {"kvplan": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Watch:
    """A stretch of time being watched, from its making until `conditions` or the end of a `with`.

    A device that says so is read by a thread meanwhile: what holds its clocks down under load is gone when it rests.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._usage = device.usage()
        self._readings = [device.readings()]
        self._over = Event()
        if device.poll_s is not None:
            Thread(target=self._poll, args=(device.poll_s,), daemon=True).start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _poll(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            self._readings.append(self._device.readings())

    def conditions(self) -> Conditions:
        """Return what the machine did since the start, and end the watch."""
        self._over.set()
        end, readings = self._device.usage(), [*self._readings, self._device.readings()]
        total = max(end.total_s - self._usage.total_s, 1e-9)
        busy, own = end.busy_s - self._usage.busy_s, end.own_s - self._usage.own_s
        return Conditions(
            load_average=self._device.load_average(),
            steal_share=max(0.0, end.steal_s - self._usage.steal_s) / total,
            foreign_cpu_share=max(0.0, busy - own) / total,
            clock_hz=tuple(one.clock_hz for one in readings if one.clock_hz is not None),
            throttle=tuple(dict.fromkeys(reason for one in readings for reason in one.throttle)),
            power_w=tuple(one.power_w for one in readings if one.power_w is not None),
        )


def disturbance(conditions: Conditions, tolerance: float = TOLERANCE) -> str:
    """Return what disturbed a repeat beyond *tolerance*; empty where nothing did."""
    found = []
    if conditions.foreign_cpu_share > tolerance:
        found.append(f"other processes took {conditions.foreign_cpu_share:.0%} of the cores")
    if STEAL_WEIGHT * conditions.steal_share > tolerance:
        found.append(f"the hypervisor took {conditions.steal_share:.0%} of the cores")
    if held := [reason for reason in conditions.throttle if reason in SLOWED]:
        found.append(f"the GPU held its clocks down ({', '.join(held)})")
    return " and ".join(found)
