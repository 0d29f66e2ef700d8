"""What a start-up log says of the setting: fields of arguments that were printed, or of the command itself."""

import re
from collections.abc import Mapping, Sequence

from kvplan.engines.logs import Line


def field(name: str, value: str, *flags: str) -> re.Pattern[str]:
    r"""Return what finds *value* of the field *name* or of any of *flags*, which are without dashes.

    >>> field("tp_size", r"(\d+)", "tp", "tp-size").findall("ServerArgs(tp_size=4) --tp 8")
    [('4', ''), ('', '8')]
    """
    named = rf"(?<![\w-]){name}['\"]?\s*[=:]\s*['\"]?{value}"
    if not flags:
        return re.compile(named)
    return re.compile(rf"{named}|--(?:{'|'.join(flags)})[ =]['\"]?{value}")


def first_match(lines: Sequence[Line], pattern: re.Pattern[str]) -> str:
    """Return what *pattern* captures where it is first found; empty where it is not."""
    for line in lines:
        if match := pattern.search(line.text):
            return next(group for group in match.groups() if group is not None)
    return ""


def last_match(lines: Sequence[Line], pattern: re.Pattern[str]) -> str:
    """Return what *pattern* captures where it is last found; empty where it is not."""
    for line in reversed(lines):
        found = list(pattern.finditer(line.text))
        if found:
            return next(group for group in found[-1].groups() if group is not None)
    return ""


def last_numbers(lines: Sequence[Line], patterns: Mapping[str, re.Pattern[str]]) -> dict[str, int]:
    """Return the number that each pattern captures where it is last found, by name; without those that are not."""
    found = {name: last_match(lines, pattern) for name, pattern in patterns.items()}
    return {name: int(text) for name, text in found.items() if text}


def read_version(text: str) -> tuple[int, ...] | None:
    """Return the release that *text* begins with; None where it begins with none.

    >>> read_version("0.5.9.post1"), read_version("main")
    ((0, 5, 9), None)
    """
    numbers = re.match(r"\d{1,4}(?:\.\d{1,6})*", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else None
