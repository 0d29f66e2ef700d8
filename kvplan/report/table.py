"""What the screens are made of: plain tables and lines, safe for a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def plain_table(columns: Sequence[tuple[str, bool]]) -> Table:
    """Return an empty table of *columns*: the heading, and whether the cells are figures."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for heading, figures in columns:
        table.add_column(escape(heading), justify="right" if figures else "left", no_wrap=True)
    return table


def say(console: Console, text: str, *, style: str = "", wrap: bool = True, lines: bool = False) -> None:
    """Print *text*, on one line where not *wrap*; on those that it has where *lines*."""
    if lines:
        for line in text.splitlines():
            say(console, line, style=style, wrap=wrap)
        return
    console.print(escape(printable(text)), style=style, highlight=False, soft_wrap=not wrap)


def printable(text: str) -> str:
    """Return *text* without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)
