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


@dataclass(frozen=True, slots=True)
class Watch:
    """A stretch of time being watched, from `start` on."""

    device: Device
    usage: Usage
    readings: "Readings"

    @classmethod
    def start(cls, device: Device) -> "Watch":
        """Begin to watch."""
        return cls(device, device.usage(), Readings.of(device))

    def conditions(self) -> Conditions:
        """Return what the machine did since the start."""
        end, both = self.device.usage(), (self.readings, Readings.of(self.device))
        total = max(end.total_s - self.usage.total_s, 1e-9)
        busy, own = end.busy_s - self.usage.busy_s, end.own_s - self.usage.own_s
        return Conditions(
            load_average=self.device.load_average(),
            steal_share=max(0.0, end.steal_s - self.usage.steal_s) / total,
            foreign_cpu_share=max(0.0, busy - own) / total,
            clock_hz=tuple(one.clock_hz for one in both if one.clock_hz is not None),
            throttle=tuple(dict.fromkeys(reason for one in both for reason in one.throttle)),
            power_w=tuple(one.power_w for one in both if one.power_w is not None),
        )


@dataclass(frozen=True, slots=True)
class Readings:
    """What a device tells of its clocks at one moment."""

    clock_hz: float | None
    throttle: tuple[str, ...]
    power_w: float | None

    @classmethod
    def of(cls, device: Device) -> "Readings":
        """Read them."""
        return cls(device.clock_hz(), device.throttle(), device.power_w())


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
