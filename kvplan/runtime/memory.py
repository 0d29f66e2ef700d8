"""Whether there is memory for something, asked before it is taken: the system kills what asks too late."""

import psutil

from kvplan.errors import DoesNotFitError
from kvplan.units import format_bytes


def require_memory(needed_bytes: int, what: str) -> None:
    """Refuse to go on where *what* needs more than is available now.

    Raises:
        DoesNotFitError: It does, with both figures.
    """
    available = psutil.virtual_memory().available
    if needed_bytes > available:
        raise DoesNotFitError(
            f"{what} needs about {format_bytes(needed_bytes)}, {format_bytes(available)} of memory is available"
        )
