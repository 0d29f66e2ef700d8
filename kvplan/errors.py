"""Every error that a user can cause or meet, and the exit status of each. Imports nothing of kvplan."""

from enum import IntEnum
from typing import ClassVar


class ExitStatus(IntEnum):
    """What the process returns."""

    DONE = 0
    NOT_MET = 1
    BAD_INPUT = 2
    UNSUPPORTED = 3
    MISMATCH = 4
    BUG = 70
    INTERRUPTED = 130


class KvplanError(Exception):
    """Something to tell the user in one line.

    Attributes:
        message: What is wrong, with the value.
        where: File and line, or option; empty where the message says it.
        hint: One command or edit that mends it; empty where there is none.
    """

    status: ClassVar[ExitStatus] = ExitStatus.BAD_INPUT

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        """Return the line: where, what, how to mend it; what a file smuggles in stays on it, escaped."""
        line = f"{self.where + ': ' if self.where else ''}{self.message}{'; ' + self.hint if self.hint else ''}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class InputError(KvplanError):
    """A file, option or value that cannot be read as what it should be."""


class UnsupportedModelError(KvplanError):
    """A model whose cache kvplan does not know how to count or run."""

    status = ExitStatus.UNSUPPORTED


class UnsupportedFormatError(KvplanError):
    """A format, block size or device that no kernel takes."""

    status = ExitStatus.UNSUPPORTED


class UnsupportedSettingError(InputError):
    """A setting that one engine does not take and another may: beside others its refusal is an answer."""


class NotComparableError(KvplanError):
    """Two measurements, or a measurement and a question, that say nothing about each other."""

    status = ExitStatus.UNSUPPORTED


class MissingPartError(KvplanError):
    """Something this command needs is not installed on this machine."""

    status = ExitStatus.UNSUPPORTED


class DoesNotFitError(KvplanError):
    """The model or a cell needs more memory than there is."""

    status = ExitStatus.NOT_MET


class NotRecordedError(KvplanError):
    """A call that a device cannot record and replay: something in it waits for the host."""

    status = ExitStatus.UNSUPPORTED


class MismatchError(KvplanError):
    """A measured figure disagrees with the predicted one."""

    status = ExitStatus.MISMATCH
