"""What Nsight Compute's command line (`ncu --csv --page raw`) wrote: DRAM bytes by kernel, or why there are none.

Its table has a header, a row of units, and a row for each launch; its own lines, which begin with ==, lie before,
between and after. (Nsight Compute CLI, "Console Output"; units are decimal.)
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class KernelTraffic:
    """What all launches of one kernel moved between DRAM and the GPU's caches."""

    launches: int
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Counted:
    """What a run of ncu counted.

    Attributes:
        by_kernel: By the kernel's name; empty where nothing was counted.
        reason: Why nothing was; empty where something was.
    """

    by_kernel: Mapping[str, KernelTraffic] = field(default_factory=dict)
    reason: str = ""


METRICS: Final = (
    ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    ("dram__bytes_op_read.sum", "dram__bytes_op_write.sum"),
)
"""Bytes read and written, as GPUs up to Hopper name the counters, and as later ones do."""

_UNIT_BYTES: Final = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
_NUMBER: Final = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,6}|[0-9]{1,20})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?")
_ID: Final = "ID"
_KERNEL: Final = "Kernel Name"

UNKNOWN_METRIC: Final = "Failed to find metric"
"""What ncu says of a counter that the GPU does not have."""
_REASONS: Final = {
    "ERR_NVGPUCTRPERM": (
        "the NVIDIA driver keeps its counters for administrators; run as root, or load the module nvidia with "
        "NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
    ),
    "driver resource was unavailable": (
        "another profiler holds the GPU's counters; stop it, or where DCGM runs `dcgmi profile --pause`"
    ),
    "driver is not compatible": (
        "the NVIDIA driver is too old for this ncu, or too new; install the ncu of the CUDA version in `nvidia-smi`"
    ),
    "compatible driver library": (
        "ncu finds no counters that go with this NVIDIA driver; install the ncu of the CUDA version in `nvidia-smi`"
    ),
    "failed to connect to the CUDA driver": (
        "ncu cannot reach the NVIDIA driver; it is missing, too old for this ncu, or hidden by a stub libcuda.so"
    ),
    UNKNOWN_METRIC: "ncu knows no counter of DRAM bytes for this GPU",
    "Unable to access the following": (
        "ncu cannot read the counters of DRAM bytes; a MIG instance shares them with others, a whole GPU has them"
    ),
}
"""By what ncu writes; the first that it wrote counts."""
_FAILED: Final = "The application returned an error code"
_NO_KERNELS: Final = "No kernels were profiled"
_ERROR: Final = re.compile(
    r"==ERROR== (?!An error was reported|An error occurred|For more information|Failed to profile"
    rf"|{_FAILED})(.+)"
)
"""A line of ncu's that says what is wrong; those left out say only that something is."""


def parse(text: str) -> Counted:
    """Return the bytes of every kernel in *text*: all that ncu wrote. Raises nothing, whatever it is.

    A value that is missing, or is no number of bytes, leaves all of it absent: part of a sum would mislead.
    """
    try:
        by_kernel = _sum(_rows(text))
    except (_UnreadableError, csv.Error) as error:
        return Counted(reason=explain(text) or f"ncu's table cannot be read: {error}")
    return Counted(by_kernel) if by_kernel else Counted(reason=explain(text) or "ncu wrote no table")


def explain(text: str) -> str:
    """Return what ncu says in *text* of why it counted nothing; empty where nothing, or only the probe knows."""
    if known := next((reason for words, reason in _REASONS.items() if words in text), ""):
        return known
    if match := _ERROR.search(text):
        return f"ncu: {match[1].strip()}"
    return "the call ran no kernel on a GPU" if _NO_KERNELS in text and _FAILED not in text else ""


class _UnreadableError(Exception):
    """The table is not of the form that is documented."""


def _rows(text: str) -> Iterator[dict[str, str]]:
    """Yield each row by column; what a column is counted in is under `unit of` it."""
    header: list[str] = []
    units: dict[str, str] = {}
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if row[0] == _ID:
            header, units = row, {}
            continue
        if len(row) != len(header):
            raise _UnreadableError(f"{len(row)} columns under {len(header)} names")
        named = dict(zip(header, row, strict=True))
        if not row[0]:
            units = {_unit_of(name): unit for name, unit in named.items()}
            continue
        yield named | units


def _sum(rows: Iterator[dict[str, str]]) -> dict[str, KernelTraffic]:
    found: dict[str, KernelTraffic] = {}
    for row in rows:
        pair = next((pair for pair in METRICS if all(name in row for name in pair)), None)
        if pair is None or _KERNEL not in row:
            raise _UnreadableError(f"it has no columns {', '.join(METRICS[0])}")
        read, written = (_bytes(row, name) for name in pair)
        before = found.get(row[_KERNEL], KernelTraffic(0, 0, 0))
        found[row[_KERNEL]] = KernelTraffic(
            before.launches + 1, before.read_bytes + read, before.written_bytes + written
        )
    return found


def _bytes(row: dict[str, str], name: str) -> int:
    text, unit = row[name].strip(), row.get(_unit_of(name), "")
    if unit not in _UNIT_BYTES or not _NUMBER.fullmatch(text):
        raise _UnreadableError(f"{name} of {row[_KERNEL]} is {text!r} {unit}".rstrip())
    return round(float(text.replace(",", "")) * _UNIT_BYTES[unit])


def _unit_of(name: str) -> str:
    return f"unit of {name}"
