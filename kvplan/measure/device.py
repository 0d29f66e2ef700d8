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
from kvplan.errors import MissingPartError

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

    @property
    def torch_name(self) -> str:
        """What torch calls it."""
        ...

    @property
    def records(self) -> bool:
        """Whether it records calls and replays them without the host.

        A sample then takes all copies of one bed before the next bed's, so that each has to outgrow the cache alone.
        """
        ...

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""
        ...

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds from before *call* until everything that it started is done."""
        ...

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a call that does *call* *times* times over, at as little cost of its own as the device allows."""
        ...

    def available_bytes(self) -> int:
        """Return the bytes that can be allocated now without displacing anything."""
        ...

    def resident_bytes(self) -> int:
        """Return the memory that this process holds now."""
        ...

    def start_cell(self) -> None:
        """Give back what earlier cells left behind."""
        ...

    def memory(self) -> "MemoryFigures":
        """Return what is known of the memory that this process takes, by name of a figure."""
        ...

    def usage(self) -> Usage:
        """Return the core time spent so far."""
        ...

    def load_average(self) -> float:
        """Return the runnable processes over the last minute."""
        ...

    @property
    def poll_s(self) -> float | None:
        """How often its readings are worth taking while it works; None where its ends tell enough."""
        ...

    def readings(self) -> "Readings":
        """Return what it tells of its clocks now."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """What a device tells of its clocks at one moment.

    Attributes:
        clock_hz: Of the cores; None where nothing tells.
        throttle: Why the clocks are held down; empty where they are not, or nothing tells.
        power_w: None where nothing tells.
    """

    clock_hz: float | None = None
    throttle: tuple[str, ...] = ()
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Bytes by name of a figure, and why others are absent."""

    figures: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)


def repeat(call: Callable[[], object], times: int) -> Callable[[], object]:
    """Return a call that does *call* *times* times over."""

    def loop() -> None:
        for _ in range(times):
            call()

    return loop if times > 1 else call


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

    @property
    def torch_name(self) -> str:
        """The processor."""
        return "cpu"

    @property
    def records(self) -> bool:
        """A call of one bed follows another's, copy by copy."""
        return False

    def now(self) -> float:
        """Return the performance counter."""
        return time.perf_counter()

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds of the call: when it returns it has finished."""
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a loop."""
        return repeat(call, times)

    def available_bytes(self) -> int:
        """Return what Linux counts as available, less where a control group allows less."""
        free = _meminfo()["MemAvailable"]
        limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
        return free if limit is None or used is None else max(0, min(free, limit - used))

    def resident_bytes(self) -> int:
        """Return this process' resident set."""
        pages = int((_PROC / "self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def start_cell(self) -> None:
        """Do nothing: what is freed is given back."""

    def memory(self) -> MemoryFigures:
        """Return this process' largest resident set."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryFigures(figures={"process_peak_bytes": float(peak)})

    def usage(self) -> Usage:
        """Return the first line of /proc/stat and this process' own time."""
        line = (_PROC / "stat").read_text().split("\n", 1)[0]
        times = os.times()
        return parse_usage(line, self._ticks_per_s, own_s=sum(times[:4]))

    def load_average(self) -> float:
        """Return the one-minute load average."""
        return os.getloadavg()[0]

    @property
    def poll_s(self) -> float | None:
        """Polling would take time of the cores that are measured."""
        return None

    def readings(self) -> Readings:
        """Return the mean clock over cores that /proc/cpuinfo has; Linux does not tell the rest of processors."""
        clocks = [float(value) * 1e6 for value in _cpuinfo().get("cpu MHz", [])]
        return Readings(clock_hz=sum(clocks) / len(clocks) if clocks else None)


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
    throttled: tuple[str, ...] = ()

    def pass_time(self, seconds: float) -> None:
        """Move the clock on."""
        self.time_s += seconds

    @property
    def torch_name(self) -> str:
        """The processor."""
        return "cpu"

    @property
    def records(self) -> bool:
        """As a processor."""
        return False

    def now(self) -> float:
        """Return the clock."""
        return self.time_s

    def time(self, call: Callable[[], object]) -> float:
        """Return how far the call moved the clock."""
        start = self.time_s
        call()
        return self.time_s - start

    def repeated(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a loop."""
        return repeat(call, times)

    def available_bytes(self) -> int:
        """Return `free_bytes`."""
        return self.free_bytes

    def resident_bytes(self) -> int:
        """Return 0."""
        return 0

    def start_cell(self) -> None:
        """Do nothing."""

    def memory(self) -> MemoryFigures:
        """Return 0."""
        return MemoryFigures(figures={"process_peak_bytes": 0.0})

    def usage(self) -> Usage:
        """Return the next scripted reading."""
        return self.usages.pop(0) if len(self.usages) > 1 else self.usages[0]

    def load_average(self) -> float:
        """Return 0."""
        return 0.0

    @property
    def poll_s(self) -> float | None:
        """Nothing happens between two readings."""
        return None

    def readings(self) -> Readings:
        """Return `hz` and `throttled`."""
        return Readings(clock_hz=self.hz, throttle=self.throttled)


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
