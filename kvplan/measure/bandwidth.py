"""How fast a device reads and copies memory: the floor under every decode time."""

from typing import Final

import torch

from kvplan.core.specs import DeviceKind
from kvplan.measure.device import Device
from kvplan.measure.timing import Call, Sampling, sample_interleaved
from kvplan_kernels import native
from kvplan_kernels.cache import LayerCache
from kvplan_kernels.format import parse
from kvplan_kernels.gpu.read import read_words
from kvplan_kernels.layout import KVLayout

SAMPLES: Final = 7
READ: Final = "read"
COPY: Final = "copy"
_LAYOUT: Final = KVLayout(format=parse("bf16"), kv_heads=1, head_dim=128, block_tokens=256)


def read_pass(device: Device, threads: int, buffer_bytes: int) -> tuple[Call, int]:
    """Return a call that reads a buffer of about *buffer_bytes* once, and its exact bytes.

    As the decode kernels read: on a processor several streams for each of *threads* threads, with full-width loads; a
    plain sum of one stream reaches less than half of that on server cores and would make every kernel look close to
    the floor. On a GPU in 16-byte accesses by every multiprocessor.
    """
    buffer = _buffer(device, buffer_bytes)
    if device.info.kind is DeviceKind.CPU:
        return lambda: native.read_bytes(buffer, threads), buffer.nbytes
    words = buffer.view(-1).view(torch.int32)
    return lambda: read_words(words), buffer.nbytes


def copy_pass(device: Device, buffer_bytes: int) -> tuple[Call, int]:
    """Return a call of torch's that copies half of *buffer_bytes*, and the bytes that it reads and writes."""
    source, target = (_buffer(device, buffer_bytes // 2) for _ in range(2))
    return lambda: target.copy_(source), source.nbytes + target.nbytes


def bandwidths(
    device: Device, *, threads: int, buffer_bytes: int, samples: int = SAMPLES
) -> dict[str, tuple[float, ...]]:
    """Return bytes per second of reading, and on a GPU of copying, one figure a sample, both over *buffer_bytes*."""
    passes = {READ: read_pass(device, threads, buffer_bytes)}
    if device.info.kind is DeviceKind.CUDA:
        passes[COPY] = copy_pass(device, buffer_bytes)
    calls = {name: call for name, (call, _) in passes.items()}
    times = sample_interleaved(device, calls, Sampling(samples=samples, warmups=1))
    return {name: tuple(passes[name][1] / seconds for seconds in found) for name, found in times.items()}


def _buffer(device: Device, buffer_bytes: int) -> torch.Tensor:
    """Return touched memory of the kind that caches lie in."""
    blocks = max(1, buffer_bytes // _LAYOUT.page_bytes)
    return LayerCache.allocate(_LAYOUT, blocks=blocks, slots=1, device=device.torch_name).pages.fill_(1)
