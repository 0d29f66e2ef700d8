"""The machine that measures, behind one protocol: what it is, its clock, its memory and who else uses its cores."""

import hashlib
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from kvplan.core.specs import DeviceInfo, DeviceKind
from kvplan.errors import InputError, MissingPartError, UnsupportedFormatError

_PROC: Final = Path("/proc")
_CACHE_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Core time spent since some fixed moment, in core-seconds.

    Attributes:
        total_s: All cores, idle or not.
        busy_s: All processes and the kernel.
        steal_s: Given to other guests by the hypervisor.
        own_s: This process and its finished children.
    """

    total_s: float
    busy_s: float
    steal_s: float
    own_s: float


class Device(Protocol):
    """What measuring asks of a device."""

    @property
    def info(self) -> DeviceInfo:
        """What the device is."""
        ...

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def synchronize(self) -> None:
        """Wait until everything started on the device is done."""
        ...

    def available_bytes(self) -> int:
        """Return the bytes that can be allocated now without displacing anything."""
        ...

    def resident_bytes(self) -> int:
        """Return the memory that this process holds now."""
        ...

    def peak_bytes(self) -> int:
        """Return the most memory that this process ever held."""
        ...

    def usage(self) -> Usage:
        """Return the core time spent so far."""
        ...

    def load_average(self) -> float:
        """Return the runnable processes over the last minute."""
        ...

    def clock_hz(self) -> float | None:
        """Return the core clock now; None where the system does not tell."""
        ...


class CpuDevice:
    """The processor kvplan runs on, read from Linux' own files."""

    def __init__(self, kernel_variant: str = "") -> None:
        if platform.system() != "Linux":
            raise MissingPartError(
                f"measuring reads Linux' /proc and this is {platform.system()}",
                hint="profile on Linux; recommend, check and size work here",
            )
        self._info = _describe(kernel_variant)
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    @property
    def info(self) -> DeviceInfo:
        """What the processor is."""
        return self._info

    def now(self) -> float:
        """Return the performance counter."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: a call that returned has finished."""

    def available_bytes(self) -> int:
        """Return what Linux counts as available, less where a control group allows less."""
        free = _meminfo()["MemAvailable"]
        limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
        return free if limit is None or used is None else max(0, min(free, limit - used))

    def resident_bytes(self) -> int:
        """Return this process' resident set."""
        pages = int((_PROC / "self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """Return this process' largest resident set."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def usage(self) -> Usage:
        """Return the first line of /proc/stat and this process' own time."""
        line = (_PROC / "stat").read_text().split("\n", 1)[0]
        times = os.times()
        return parse_usage(line, self._ticks_per_s, own_s=sum(times[:4]))

    def load_average(self) -> float:
        """Return the one-minute load average."""
        return os.getloadavg()[0]

    def clock_hz(self) -> float | None:
        """Return the mean over cores of what /proc/cpuinfo says."""
        clocks = [float(value) * 1e6 for value in _cpuinfo().get("cpu MHz", [])]
        return sum(clocks) / len(clocks) if clocks else None


@dataclass
class FakeDevice:
    """A device without time or memory of its own: tests say what each reading is.

    Attributes:
        info: What it claims to be.
        time_s: The clock; `pass_time` moves it.
        free_bytes: What `available_bytes` answers.
        usages: Answers of `usage`, one after another; the last one stays.
    """

    info: DeviceInfo = field(
        default_factory=lambda: DeviceInfo(
            name="fake",
            uuid="fake-0",
            kind=DeviceKind.CPU,
            cores=2,
            memory_bytes=2**34,
            last_level_cache_bytes=2**20,
            kernel_variant="fake",
        )
    )
    time_s: float = 0.0
    free_bytes: int = 2**33
    usages: list[Usage] = field(default_factory=lambda: [Usage(total_s=0, busy_s=0, steal_s=0, own_s=0)])
    hz: float | None = None

    def pass_time(self, seconds: float) -> None:
        """Move the clock on."""
        self.time_s += seconds

    def now(self) -> float:
        """Return the clock."""
        return self.time_s

    def synchronize(self) -> None:
        """Do nothing."""

    def available_bytes(self) -> int:
        """Return `free_bytes`."""
        return self.free_bytes

    def resident_bytes(self) -> int:
        """Return 0."""
        return 0

    def peak_bytes(self) -> int:
        """Return 0."""
        return 0

    def usage(self) -> Usage:
        """Return the next scripted reading."""
        return self.usages.pop(0) if len(self.usages) > 1 else self.usages[0]

    def load_average(self) -> float:
        """Return 0."""
        return 0.0

    def clock_hz(self) -> float | None:
        """Return `hz`."""
        return self.hz


DEVICES: Final[dict[str, Callable[[str], Device]]] = {"cpu": CpuDevice}
"""Device by name, made from the kernel variant chosen on it. CUDA joins here."""


def open_device(name: str, kernel_variant: str = "") -> Device:
    """Return the device called *name*, by its kind or as `kvplan devices` names it; auto is the processor.

    Raises:
        UnsupportedFormatError: A device that no kernel here runs on.
        InputError: No such device.
    """
    wanted = "cpu" if name == "auto" else name
    if wanted in DEVICES:
        return DEVICES[wanted](kernel_variant)
    for make in DEVICES.values():
        device = make(kernel_variant)
        if device.info.name == name:
            return device
    if wanted.startswith("cuda"):
        raise UnsupportedFormatError(f"device {name}: no kernel here runs on CUDA", hint="use --device cpu")
    raise InputError(f"no device {name!r}", hint=f"use {', '.join(DEVICES)} or auto")


def parse_usage(line: str, ticks_per_s: int, *, own_s: float) -> Usage:
    """Return the usage that the first line of /proc/stat tells.

    Its columns are user, nice, system, idle, iowait, irq, softirq and steal (man 5 proc_stat); guest time is in user.

    >>> parse_usage("cpu 100 0 50 800 0 0 0 50 0 0", 100, own_s=1.0)
    Usage(total_s=10.0, busy_s=1.5, steal_s=0.5, own_s=1.0)
    """
    user, nice, system, idle, iowait, irq, softirq, steal = (int(ticks) for ticks in line.split()[1:9])
    busy = user + nice + system + irq + softirq
    return Usage(
        total_s=(busy + idle + iowait + steal) / ticks_per_s,
        busy_s=busy / ticks_per_s,
        steal_s=steal / ticks_per_s,
        own_s=own_s,
    )


def _describe(kernel_variant: str) -> DeviceInfo:
    cpuinfo = _cpuinfo()
    model = next(iter(cpuinfo.get("model name", [])), platform.machine())
    cores = _physical_cores(cpuinfo)
    identity = f"{_machine_id()}|{model}|{cores}".encode()
    return DeviceInfo(
        name=model,
        uuid=f"cpu-{hashlib.sha256(identity).hexdigest()[:16]}",
        kind=DeviceKind.CPU,
        cores=cores,
        memory_bytes=_meminfo()["MemTotal"],
        last_level_cache_bytes=last_level_cache_bytes(),
        kernel_variant=kernel_variant,
    )


def last_level_cache_bytes(cache: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the first core's largest cache; 0 where the system does not tell."""
    sizes = [_cache_size(path.read_text().strip()) for path in cache.glob("index*/size")]
    return max(sizes, default=0)


def _cache_size(text: str) -> int:
    return int(text[:-1]) * _CACHE_UNITS[text[-1]] if text[-1:] in _CACHE_UNITS else int(text or 0)


def _physical_cores(cpuinfo: dict[str, list[str]]) -> int:
    pairs = set(zip(cpuinfo.get("physical id", []), cpuinfo.get("core id", []), strict=False))
    return len(pairs) or os.cpu_count() or 1


def usable_cores() -> int:
    """Return the cores that this process may run on, siblings of one core counted once."""
    return max(1, min(len(os.sched_getaffinity(0)), _physical_cores(_cpuinfo())))


def _cpuinfo() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), []).append(value.strip())
    return found


def _meminfo() -> dict[str, int]:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _machine_id() -> str:
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return platform.node()
