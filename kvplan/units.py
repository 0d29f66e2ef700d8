"""Bytes, times and shares as people write them. Imports nothing of kvplan but its errors."""

import re
from typing import Final

from kvplan.errors import InputError

_BYTES: Final = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BYTES_MAX: Final = 2**63
_PLAIN_BYTES_MIN: Final = 2**20
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Return the bytes that *text* says: GiB is 2^30, GB is 10^9, a plain number of a mebibyte or more is bytes.

    A smaller plain number is far more often a size whose unit was forgotten.

    Raises:
        InputError: No such size.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    match = None if isinstance(text, bool) else _QUANTITY.fullmatch(str(text))
    if match is None or (match[2] or "B") not in _BYTES:
        raise InputError(f"{text!r} is no size", hint="write it as 24GiB, 512MiB or 24GB")
    if not match[2] and 0 < float(match[1]) < _PLAIN_BYTES_MIN:
        raise InputError(f"{text!r} has no unit", hint=f"write it as {match[1]}GiB, or as {match[1]}B for bytes")
    count = float(match[1]) * _BYTES[match[2] or "B"]
    return _positive(round(count) if count <= _BYTES_MAX else 0, text)


def _positive(value: int, text: object) -> int:
    if value <= 0:
        raise InputError(f"{text!r} is no size", hint="a size is above 0 and below 2^63 bytes")
    return value


def parse_share(text: str | float) -> float:
    """Return a share as a fraction: '70%' and 0.7 alike.

    >>> parse_share("70%")
    0.7
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in ("", "%"):
        raise InputError(f"{text!r} is no share", hint="write it as 70% or 0.7")
    return float(match[1]) / 100 if match[2] else float(match[1])


def parse_seconds(text: str) -> float:
    """Return the seconds of a length of time; one without a unit is refused, since it could be any.

    Raises:
        InputError: No such time, or none at all.

    >>> parse_seconds("30min")
    1800.0
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _SECONDS or not float(match[1]):
        raise InputError(f"{text!r} is no length of time", hint="write it as 90s, 30min or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers that a release's name begins with, or the one of a build.

    Raises:
        InputError: It begins with none.

    >>> parse_version("v0.29.1rc1")
    (0, 29, 1)
    >>> parse_version("b6182")
    (6182,)
    """
    match = re.fullmatch(r"b(\d+)", text) or re.match(r"v?(\d+(?:\.\d+)*)", text)
    if match is None:
        raise InputError(f"{text!r} is no version", hint="write it as 0.29, or a build as b6182")
    return tuple(int(part) for part in match[1].split("."))


def format_count(count: float) -> str:
    """Return a count, with two decimals where it is no whole number.

    >>> format_count(3), format_count(1.5616)
    ('3', '1.56')
    """
    return str(int(count)) if count == int(count) else f"{count:.2f}"


def format_bytes(count: float, *, digits: int = 1) -> str:
    """Return *count* bytes in the largest binary unit that leaves at least one.

    >>> format_bytes(98304)
    '96.0 KiB'
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= _BYTES[unit]:
            return f"{count / _BYTES[unit]:.{digits}f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits.

    >>> format_seconds(0.01234)
    '12.3 ms'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(seconds) * factor >= 1:
            return f"{_significant(seconds * factor)} {unit}"
    return f"{_significant(seconds * 1e9)} ns"


def format_limit(seconds: float) -> str:
    """Return a limit as people set it, in the largest unit that leaves a whole number.

    >>> format_limit(1800), format_limit(90), format_limit(0.5)
    ('30 min', '90 s', '0.5 s')
    """
    unit = next((name for name in ("h", "min") if seconds % _SECONDS[name] == 0), "s")
    return f"{seconds / _SECONDS[unit]:g} {unit}"


def _significant(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
