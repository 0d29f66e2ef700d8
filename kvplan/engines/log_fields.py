"""How figures and fields stand in a start-up log: numbers, sizes, counts of the setting, releases.

Every number of a log is found by a pattern of this module. All are bounded and begin where digits begin: a run of
digits that is longer than any figure is none, and takes no longer to pass over than to read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from kvplan.engines.logs import Line, Pattern, Printed

END: Final = r"(?![.,]?\d)"
"""A number goes no further: 1.2.3 is none, nor the first digits of many."""
DIGITS: Final = r"(?<![\d.,])-?\d{1,18}(?:,\d{3}){0,6}(?:\.\d{1,9})?" + END
NUMBER: Final = rf"(?P<number>{DIGITS})"
"""A figure, with commas between thousands or none."""
SIZE: Final = NUMBER + r"\s?(?P<unit>[KMGT]iB)"
WHOLE: Final = r"\d{1,12}" + END
"""A whole number, to be named or counted by who uses it."""
COUNT: Final = r"([1-9]\d{0,11})" + END
"""How many of something: a setting of none, of less or of a part is not read."""
SHARE: Final = r"(\d{0,3}\.?\d{1,18})" + END
RELEASE: Final = r"v?(\d{1,4}\.\d{1,6}(?!\d)[\w.+-]{0,99})"
_REACH: Final = r".{0,500}?"
"""What may stand between two parts of one line."""
_WORDS: Final = {
    "NUMBER": (NUMBER, None),
    "SIZE": (SIZE, None),
    "GIGABYTES": (NUMBER + r"\s?(?P<unit>GB)", 2.0**30),
    "MEGABYTES": (NUMBER + r"\s?(?P<unit>MB)", 2.0**20),
}
"""What `figure_at` puts in the place of a word, and the bytes of the unit where it is not what it says."""


def figure_at(name: str, text: str, unit: str = "") -> Pattern:
    """Return how a figure stands in a log, with one of NUMBER, SIZE, GIGABYTES and MEGABYTES where it is.

    An engine whose GB are 2^30 bytes has GIGABYTES; `.*?` reaches no further than 500 characters.

    >>> figure_at("k", "K size: GIGABYTES").regex.search("K size: 1.25 GB")["number"]
    '1.25'
    """
    word = next(word for word in _WORDS if word in text)
    pattern, scale = _WORDS[word]
    return Pattern(name, re.compile(text.replace(".*?", _REACH).replace(word, pattern)), unit, scale)


def field(name: str, value: str, *flags: str) -> re.Pattern[str]:
    r"""Return what finds *value* of the field *name* or of any of *flags*, which are without dashes.

    >>> field("tp_size", COUNT, "tp", "tp-size").findall("ServerArgs(tp_size=4) --tp 8")
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


def last_count(figures: Sequence[Printed]) -> int:
    """Return the last figure as how many of something; 0 where it is none, less than one or a part."""
    value = figures[-1].value if figures else 0.0
    return int(value) if value > 0 and value.is_integer() else 0


def highest_rank(lines: Sequence[Line], pattern: re.Pattern[str]) -> int:
    """Return the highest number that *pattern* captures; 0 where it finds none."""
    return max((int(match[1]) for line in lines for match in pattern.finditer(line.text)), default=0)


def last_numbers(lines: Sequence[Line], patterns: Mapping[str, re.Pattern[str]]) -> dict[str, int]:
    """Return the number that each pattern captures where it is last found, by name; without those that are not."""
    found = {name: last_match(lines, pattern) for name, pattern in patterns.items()}
    return {name: int(text) for name, text in found.items() if text}


def read_version(text: str) -> tuple[int, ...] | None:
    """Return the release that *text* begins with; None where it begins with none.

    >>> read_version("0.5.9.post1"), read_version("main")
    ((0, 5, 9), None)
    """
    numbers = re.match(r"\d{1,4}(?:\.\d{1,6}){0,9}(?!\d)", text)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else None
