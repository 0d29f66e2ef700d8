"""What one decode call moves between the GPU's memory and its caches, by the GPU's own counters.

`KVLayout.logical_bytes` counts what a call has to read; whether the kernels read no more than that is a question to
the hardware. Nsight Compute's `ncu` answers it where it is installed and may read the counters.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvplan.errors import UnsupportedFormatError
from kvplan.measure.bench import DecodeCase
from kvplan.measure.faults import telling_line
from kvplan.measure.launch import end_group
from kvplan.measure.ncu import METRICS, UNKNOWN_METRIC, Counted, KernelTraffic, explain, parse
from kvplan.runtime.ops import Kernel
from kvplan.units import format_limit
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.format import parse as parse_format
from kvplan_kernels.layout import KVLayout

LIMIT_S: Final = 600.0
"""For one run of ncu: it starts Python and torch, compiles the kernels, and runs each of them a few times."""
PROBE: Final = "kvplan.measure.traffic_probe"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficCase:
    """One decode call whose traffic is asked for.

    Attributes:
        device: As torch names it.
    """

    case: DecodeCase
    format: str
    block_tokens: int
    kernel: Kernel
    device: str

    def layout(self) -> KVLayout:
        """Return how the cache lies.

        Raises:
            UnsupportedFormatError: No kernel takes the format with this shape.
        """
        case = self.case
        try:
            return KVLayout(
                format=parse_format(self.format), kv_heads=case.kv_heads, head_dim=case.head_dim,
                block_tokens=self.block_tokens,
            )  # fmt: skip
        except UnsupportedError as error:
            raise UnsupportedFormatError(str(error), where="--format") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one decode call moved between DRAM and the GPU's caches.

    Attributes:
        counted_bytes: What it has to read, by the layout.
        read_bytes: What its kernels read; None where that is not known.
        written_bytes: What they wrote; None where that is not known.
        by_kernel: Both, and the number of launches, by the kernel's name.
        reason: Why it is not known; empty where it is.
    """

    counted_bytes: int
    read_bytes: int | None = None
    written_bytes: int | None = None
    by_kernel: Mapping[str, KernelTraffic] = field(default_factory=dict)
    reason: str = ""


def measure_traffic(case: TrafficCase, *, ncu: str = "ncu", limit_s: float = LIMIT_S) -> Traffic:
    """Return the DRAM traffic of one decode call of *case*; where it cannot be had, the reason instead.

    A process of its own builds the cache, calls once so that all kernels are compiled, and calls once more; ncu
    counts the second call alone. Each kernel starts with empty caches, so what one kernel of a call leaves to the next
    is read from DRAM; clocks are left as they are, since bytes do not depend on them.

    Args:
        case: What is called.
        ncu: The command, by name or path.
        limit_s: How long one run of it may take; there are two where the GPU has the newer names for its counters.

    Raises:
        UnsupportedFormatError: No kernel takes the format with this shape.
    """
    counted_bytes = round(case.case.batch * case.layout().logical_bytes(case.case.tokens))
    found = _count(case, ncu, limit_s)
    if found.reason:
        return Traffic(counted_bytes=counted_bytes, reason=found.reason)
    return Traffic(
        counted_bytes=counted_bytes,
        read_bytes=sum(kernel.read_bytes for kernel in found.by_kernel.values()),
        written_bytes=sum(kernel.written_bytes for kernel in found.by_kernel.values()),
        by_kernel=found.by_kernel,
    )


def _count(case: TrafficCase, ncu: str, limit_s: float) -> Counted:
    path = shutil.which(ncu)
    if path is None:
        return Counted(reason=f"{ncu} is not found; install NVIDIA Nsight Compute, or put its folder on PATH")
    try:
        told = _run(path, METRICS[0], case, limit_s)
        if UNKNOWN_METRIC in told.log:
            told = _run(path, METRICS[1], case, limit_s)
    except subprocess.TimeoutExpired:
        return Counted(reason=f"ncu gave no answer within {format_limit(limit_s)} and was ended")
    except OSError as error:
        return Counted(reason=f"{path} does not start: {error.strerror}")
    return told.counted()


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of a run of ncu.

    Attributes:
        log: All that ncu wrote.
        output: What the probe wrote, or an ncu that did not get as far as its log.
    """

    returncode: int
    log: str
    output: str

    def counted(self) -> Counted:
        """Return the bytes, or why there are none; a table of a run that failed is none."""
        found = parse(self.log)
        if self.returncode == 0 and not found.reason:
            return found
        reason = explain(f"{self.log}\n{self.output}")
        if not reason and self.returncode:
            words = telling_line(self.output) or f"it ended with status {self.returncode}"
            reason = f"the probe failed under ncu: {words}"
        return Counted(reason=reason or found.reason)


def _run(path: str, names: tuple[str, str], case: TrafficCase, limit_s: float) -> _Told:
    """Run the probe under ncu.

    Raises:
        TimeoutExpired: It took longer than *limit_s*; it is ended with all that it started.
        OSError: *path* cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder) / "ncu.csv", Path(folder) / "output"
        command = [
            path, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
            "--metrics", ",".join(names), "--profile-from-start", "off", "--target-processes", "all",
            "--cache-control", "all", "--clock-control", "none", "--log-file", str(log),
            sys.executable, "-m", PROBE, msgspec.json.encode(case).decode(),
        ]  # fmt: skip
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env={**os.environ, "LC_ALL": "C.UTF-8"},  # numbers with points, whatever the user's language
            )  # fmt: skip
            try:
                process.wait(limit_s)
            finally:
                end_group(process)
        return _Told(process.returncode, _text(log), _text(output))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
