"""The screen of `check`."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape

from kvplan.core.comparisons import Comparison, FigureVerdict, Standing
from kvplan.report.table import plain_table, printable, say
from kvplan.report.verdict_text import change_text

ROWS_MAX: Final = 40
"""Of a comparison's table; a screen is for what to look at first."""


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print what has not held or held with a remark, and how many figures held."""
    say(console, comparison.sentence, style="bold")
    shown = [verdict for verdict in comparison.verdicts if verdict.standing is not Standing.HELD or verdict.reason]
    if not shown:
        return
    table = plain_table([("", False), ("cell", False), ("figure", False), ("", False)])
    for column in table.columns[1:]:
        column.no_wrap, column.overflow = False, "fold"
    order = [standing for standing in Standing if standing is not Standing.HELD] + [Standing.HELD]
    rows = sorted(_rows(shown), key=lambda row: order.index(row[0]))
    for standing, *texts in rows[:ROWS_MAX]:
        table.add_row(str(standing), *(escape(printable(text)) for text in texts))
    console.print(table)
    if len(rows) > ROWS_MAX:
        say(console, f"and {len(rows) - ROWS_MAX} more; --json has them all")


def _rows(verdicts: Sequence[FigureVerdict]) -> list[tuple[Standing, str, str, str]]:
    """Return a row a verdict; those without figures share one where standing and reason are the same."""
    grouped: dict[tuple[Standing, str], list[FigureVerdict]] = {}
    rows: list[tuple[Standing, str, str, str]] = []
    for verdict in verdicts:
        if verdict.current is None and verdict.standing is Standing.NOT_COMPARABLE:
            grouped.setdefault((verdict.standing, verdict.reason), []).append(verdict)
        else:
            rows.append((verdict.standing, verdict.cell, verdict.figure, change_text(verdict)))
    for (standing, reason), alike in grouped.items():
        cells, figures = (list(dict.fromkeys(names)) for names in ([v.cell for v in alike], [v.figure for v in alike]))
        rows.append((standing, cells[0] if len(cells) == 1 else f"{len(cells)} cells", ", ".join(figures), reason))
    return rows
