"""How far a session has come: a bar on a terminal, plain lines elsewhere, always on standard error."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Who is told what is being measured."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """Say something once."""

    def at(self, done: int, total: int, label: str, left_s: float | None) -> None:
        """Say how far things are; *left_s* is None while nobody knows."""

    def share(self, label: str, share: float) -> None:
        """Say which part of one long task is done, 0 to 1."""


_SHARE_STEP: Final = 0.1


class LineProgress:
    """A line an event."""

    def __init__(self) -> None:
        self._said = 0.0

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Write *text*."""
        sys.stderr.write(text + "\n")

    def at(self, done: int, total: int, label: str, left_s: float | None) -> None:
        """Write where things are."""
        sys.stderr.write(f"[{done}/{total}] {label}{'' if left_s is None else f', about {duration(left_s)} left'}\n")

    def share(self, label: str, share: float) -> None:
        """Write every tenth."""
        if share < self._said:
            self._said = 0.0
        if share >= self._said + _SHARE_STEP:
            self._said = share
            sys.stderr.write(f"{label}: {share:.0%}\n")


class BarProgress:
    """A bar that stays in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar: RichProgress = Progress(
            BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.description}", markup=False), TextColumn("{task.fields[left]}"),
            console=Console(stderr=True), transient=True, refresh_per_second=2,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def note(self, text: str) -> None:
        """Write *text* above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def at(self, done: int, total: int, label: str, left_s: float | None) -> None:
        """Move the bar."""
        left = "" if left_s is None else f"about {duration(left_s)} left"
        self._bar.update(self._task, completed=done, total=total, description=label, left=left)

    def share(self, label: str, share: float) -> None:
        """Move the bar to *share*."""
        self._bar.update(self._task, completed=round(100 * share), total=100, description=f"% {label}", left="")


def open_progress() -> Progress:
    """Return a bar where standard error is a terminal, else lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def duration(seconds: float) -> str:
    """Return a rough time.

    >>> duration(95), duration(4000)
    ('2 min', '1 h 7 min')
    """
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
