"""Dequantize in Triton, on a GPU, or in Triton's interpreter."""

import math
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, Batch, LayerCache
from kvplan_kernels.calls import check_buffers
from kvplan_kernels.format import Number
from kvplan_kernels.gpu import targets
from kvplan_kernels.gpu.geometry import TensorGeometry, geometry
from kvplan_kernels.layout import ceil_div
from kvplan_kernels.rotation import multiply
from kvplan_kernels.transforms import transforming_dequantize

TILE: Final = 32
"""Tokens of a program; fewer where the groups of tokens that share a scale are smaller."""


def dequantize(cache: LayerCache, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return K and V of each sequence in the layout's 16-bit type; `reference.dequantize` defines it.

    Bit for bit what the definition gives, but for the bits of a NaN. Block tables, slots and lengths are taken as they
    are; only the longest length is read back from the device.

    Args:
        cache: As in the definition, on the GPU.
        batch: As in the definition.

    Raises:
        UnsupportedError: No kernel takes the layout, or tensors lie elsewhere than the cache.
    """
    return dequantize_tokens(cache, batch, int(batch.lengths.max()) if batch.lengths.numel() else 0)


@transforming_dequantize(multiply)
def dequantize_tokens(cache: LayerCache, batch: Batch, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the first *tokens* of each sequence as `dequantize` does, zeros past its length: nothing is read back."""
    check_buffers(cache, batch)
    device, g = cache.pages.device, geometry(cache.layout)
    target = targets.target(device)
    targets.check_format(cache.layout.format, target.arch)
    targets.check_devices(device, cache.ring, cache.sinks, batch.lengths, batch.slots, batch.block_tables)
    shape, dtype = (batch.lengths.shape[0], g.kv_heads, tokens, g.head_dim), TORCH_FLOAT[cache.layout.float_type]
    key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    if key.numel():
        _launch(target, cache, batch, key, g.keys)
        _launch(target, cache, batch, value, g.values)
    return key, value


def _launch(target: targets.Target, cache: LayerCache, batch: Batch, out: Tensor, tensor: TensorGeometry) -> None:
    from kvplan_kernels.dequantize import gpu_kernels  # Triton is slow to import, and not everywhere

    g, tokens = geometry(cache.layout), out.shape[2]
    pages, ring, sinks = (buffer.view(-1) for buffer in (cache.pages, cache.ring, cache.sinks))
    tile = min(TILE, tensor.group) if tensor.channel else TILE
    tiles = ceil_div(g.sinks, tile) + ceil_div(max(0, tokens - g.sinks), tile)
    target.launch(
        gpu_kernels.dequantize_tokens, (tiles, out.shape[0] * g.kv_heads), out.view(torch.uint16),
        pages.view(torch.uint16), pages.view(torch.float16), cache.level_words, ring.view(torch.uint16),
        sinks.view(torch.uint16), batch.block_tables, batch.slots, batch.lengths, batch.block_tables.shape[1], tokens,
        G=g, T=tensor, TILE=tile, FLOAT=targets.float_name(cache.layout.float_type), ASM=target.asm, num_warps=4,
        enable_fp_fusion=_exact(tensor),
    )  # fmt: skip


def _exact(tensor: TensorGeometry) -> bool:
    """Return whether level times scale is exact in float32, so that the sum with the minimum is rounded once anyway."""
    return tensor.number != Number.FP32 and math.frexp(tensor.unit)[0] == 0.5
