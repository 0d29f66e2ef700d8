"""Where tables are printed: NO_COLOR, a narrow terminal and a pipe are all honoured."""

import sys

from rich.console import Console

PIPE_WIDTH = 100
"""Columns where the output is no terminal, so that a log does not depend on who reads it."""


def open_console() -> Console:
    """Return a console on standard output."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, emoji=False)
