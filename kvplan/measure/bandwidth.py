"""How fast this machine reads memory: the floor under every decode time."""

from typing import Final

import torch

from kvplan.measure.device import Device
from kvplan.measure.timing import time_once
from kvplan_kernels import native

SAMPLES: Final = 7


def read_bandwidth(device: Device, *, threads: int, buffer_bytes: int, samples: int = SAMPLES) -> tuple[float, ...]:
    """Return bytes per second of reading *buffer_bytes* once, on *threads* threads: one figure a pass.

    Several streams a thread with full-width loads, as the decode kernels read; a plain sum of one stream reaches less
    than half of that on server cores and would make every kernel look close to the floor.
    """
    buffer = torch.ones(buffer_bytes, dtype=torch.uint8)  # written, so that every page is a page of its own

    def read() -> None:
        native.read_bytes(buffer, threads)

    read()
    return tuple(buffer_bytes / time_once(device, read) for _ in range(samples))
