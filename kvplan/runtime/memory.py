"""Whether there is memory for something, asked before it is taken: the system kills what asks too late."""

import psutil
import torch

from kvplan.errors import DoesNotFitError
from kvplan.units import format_bytes


def require_memory(needed_bytes: int, what: str, device: str = "cpu") -> None:
    """Refuse to go on where *what* needs more than is available now on *device*, as torch names it.

    Raises:
        DoesNotFitError: It does, with both figures.
    """
    available = available_bytes(device)
    if needed_bytes > available:
        where = "memory" if device == "cpu" else f"the memory of {device}"
        raise DoesNotFitError(
            f"{what} needs about {format_bytes(needed_bytes)}, {format_bytes(available)} of {where} is available"
        )


def available_bytes(device: str) -> int:
    """Return what can be allocated on *device* now, with what torch holds of a GPU and does not use."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
