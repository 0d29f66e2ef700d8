"""How fast this machine reads memory: the floor under every decode time."""

from typing import Final

from kvplan.measure.device import Device
from kvplan.measure.timing import Call, time_once
from kvplan_kernels import native
from kvplan_kernels.cache import LayerCache
from kvplan_kernels.format import parse
from kvplan_kernels.layout import KVLayout

SAMPLES: Final = 7
_LAYOUT: Final = KVLayout(format=parse("bf16"), kv_heads=1, head_dim=128, block_tokens=256)


def read_pass(threads: int, buffer_bytes: int) -> tuple[Call, int]:
    """Return a call that reads a buffer of about *buffer_bytes* once, on *threads* threads, and its exact bytes.

    Several streams a thread with full-width loads, as the decode kernels read; a plain sum of one stream reaches less
    than half of that on server cores and would make every kernel look close to the floor.
    """
    blocks = max(1, buffer_bytes // _LAYOUT.page_bytes)
    buffer = LayerCache.allocate(_LAYOUT, blocks=blocks, slots=1).pages  # memory of the kind that caches lie in
    buffer.fill_(1)
    return lambda: native.read_bytes(buffer, threads), buffer.nbytes


def read_bandwidth(device: Device, *, threads: int, buffer_bytes: int, samples: int = SAMPLES) -> tuple[float, ...]:
    """Return bytes per second of reading *buffer_bytes* once, on *threads* threads: one figure a pass."""
    read, size = read_pass(threads, buffer_bytes)
    read()
    return tuple(size / time_once(device, read) for _ in range(samples))
