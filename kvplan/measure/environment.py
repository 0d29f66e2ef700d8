"""What else shaped a figure: versions, other processes, stolen time, clocks."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvplan import __version__
from kvplan.core.records import Conditions
from kvplan.measure.device import Device, Usage

TOLERANCE: Final = 0.10
"""Core time of other processes, as a share, above which a repeat is measured again: a tenth of the cores moves
memory-bound times by about as much as the margin that `kvplan check` allows on a CPU."""
STEAL_WEIGHT: Final = 5
"""Stolen time counts five times: it stalls one thread and with it the whole step."""

_PACKAGES: Final = ("torch", "transformers", "numpy", "accelerate", "gguf", "safetensors")


def versions() -> dict[str, str]:
    """Return the version of all that takes part in measuring; packages that are not installed are left out."""
    found = {"kvplan": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Watch:
    """A stretch of time being watched, from `start` on."""

    device: Device
    usage: Usage
    clock_hz: float | None

    @classmethod
    def start(cls, device: Device) -> "Watch":
        """Begin to watch."""
        return cls(device, device.usage(), device.clock_hz())

    def conditions(self) -> Conditions:
        """Return what the machine did since the start."""
        end, clock = self.device.usage(), self.device.clock_hz()
        total = max(end.total_s - self.usage.total_s, 1e-9)
        busy, own = end.busy_s - self.usage.busy_s, end.own_s - self.usage.own_s
        return Conditions(
            load_average=self.device.load_average(),
            steal_share=max(0.0, end.steal_s - self.usage.steal_s) / total,
            foreign_cpu_share=max(0.0, busy - own) / total,
            clock_hz=tuple(hz for hz in (self.clock_hz, clock) if hz is not None),
        )


def disturbance(conditions: Conditions, tolerance: float = TOLERANCE) -> str:
    """Return what disturbed a repeat beyond *tolerance*; empty where nothing did."""
    found = []
    if conditions.foreign_cpu_share > tolerance:
        found.append(f"other processes took {conditions.foreign_cpu_share:.0%} of the cores")
    if STEAL_WEIGHT * conditions.steal_share > tolerance:
        found.append(f"the hypervisor took {conditions.steal_share:.0%} of the cores")
    return " and ".join(found)
