"""A comparison as Markdown, for a pull request's comment. All text that a user may have written is escaped."""

import re
from typing import Final

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.report.verdict_text import change_text

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]()#+!|~@-])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_ENTITIES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ORDER: Final = (Standing.REGRESSED, Standing.UNDECIDED, Standing.NOT_COMPARABLE)


def markdown_text(text: str) -> str:
    r"""Return *text* so that Markdown shows it as it is, on one line, inside a table or out of it.

    >>> markdown_text("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    flat = _CONTROL.sub(" ", text)
    flat = "".join(_ENTITIES.get(character, character) for character in flat)
    return _SPECIAL.sub(r"\\\1", flat)


def comparison_markdown(comparison: Comparison) -> str:
    """Return the comparison: what has not held in a table, then how many figures held."""
    lines = ["# kvplan check", "", markdown_text(comparison.sentence), ""]
    shown = [verdict for standing in _ORDER for verdict in comparison.verdicts if verdict.standing is standing]
    if shown:
        lines += ["| | cell | figure | |", "|---|---|---|---|", *map(_row, shown), ""]
    return "\n".join(lines)


def _row(verdict: FigureVerdict) -> str:
    cells = (str(verdict.standing), verdict.cell, verdict.figure, change_text(verdict))
    return "| " + " | ".join(map(markdown_text, cells)) + " |"
