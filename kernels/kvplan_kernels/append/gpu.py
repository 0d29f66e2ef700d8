"""Append in Triton, on a GPU, or in Triton's interpreter."""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, Batch, LayerCache
from kvplan_kernels.calls import FLOAT_TYPES, check_buffers
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.gpu import targets
from kvplan_kernels.gpu.geometry import TensorGeometry, geometry
from kvplan_kernels.layout import ceil_div
from kvplan_kernels.rotation import multiply
from kvplan_kernels.transforms import transforming_append

PAGE_TILE: Final = 32
REST_TILE: Final = 16


def append(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> int:
    """Store new tokens, quantizing those that leave the residual; `reference.append` defines it.

    Block tables, slots, lengths and counts are taken as they are; only the number of poisoned groups is read back.

    Args:
        cache: As in the definition, like all that follow, on the GPU.
        batch: As in the definition.
        key: As in the definition; any strides.
        value: As key.
        counts: As in the definition.
    """
    poisons = torch.zeros(1, dtype=torch.int32, device=cache.pages.device)
    append_counting(cache, batch, key, value, counts, poisons)
    return int(poisons.item())


@transforming_append(multiply)
def append_counting(
    cache: LayerCache,
    batch: Batch,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    poisons: Tensor,
    *,
    most: int | None = None,
) -> None:
    """Store new tokens as `append` does, and count the poisoned groups without reading anything back.

    Args:
        cache: As in the definition, like all that follow, on the GPU.
        batch: As in the definition.
        key: As in the definition; any strides.
        value: As key.
        counts: As in the definition.
        poisons: int32 [1], to which the poisoned groups are added.
        most: The largest of *counts*, where the caller knows it: else programs are launched as if each sequence could
            have all new tokens, and most of them find nothing to do. Tokens beyond it are lost.
    """
    check_buffers(cache, batch)
    _check_tokens(cache, batch, key, value, counts)
    target = targets.target(cache.pages.device)
    targets.check_devices(cache.pages.device, cache.ring, cache.sinks, batch.lengths, key, value, counts, poisons)
    targets.check_format(cache.layout.format, target.arch)
    if not batch.lengths.shape[0] or not key.shape[0]:
        return
    g = geometry(cache.layout)
    starts = (counts.cumsum(0) - counts).to(torch.int32)
    longest = key.shape[0] if most is None else min(most, key.shape[0])
    for new, tensor in ((key, g.keys), (value, g.values)):
        rows = new if new.stride(2) == 1 else new.contiguous()
        _append(target, cache, batch, rows, counts, starts, poisons, tensor, longest)


def _append(
    target: targets.Target, cache: LayerCache, batch: Batch, new: Tensor, counts: Tensor, starts: Tensor,
    poisons: Tensor, tensor: TensorGeometry, longest: int,
) -> None:  # fmt: skip
    from kvplan_kernels.append import gpu_kernels  # Triton is slow to import, and not everywhere

    g, dtype = geometry(cache.layout), TORCH_FLOAT[cache.layout.float_type]
    pairs = batch.lengths.shape[0] * g.kv_heads
    pages, ring, sinks = cache.pages.view(-1), cache.ring.view(-1).view(dtype), cache.sinks.view(-1).view(dtype)
    tile = tensor.group if tensor.channel else PAGE_TILE
    float_type = targets.float_name(cache.layout.float_type)
    # A flush takes a quantum less one of held tokens along, and a word's tokens before the first.
    leaving = longest + tensor.quantum - 1 + tensor.tokens - 1
    target.launch(
        gpu_kernels.append_pages, (ceil_div(leaving, tile), pairs), new, pages.view(torch.uint16),
        pages.view(torch.float16), cache.level_words, pages.view(dtype), ring, batch.block_tables, batch.slots,
        batch.lengths, counts, starts, poisons, new.stride(0), new.stride(1), batch.block_tables.shape[1], G=g,
        T=tensor, TILE=tile, FLOAT=float_type, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    target.launch(
        gpu_kernels.append_rest, (ceil_div(longest, REST_TILE), pairs), new, ring, sinks, batch.slots, batch.lengths,
        counts, starts, new.stride(0), new.stride(1), G=g, T=tensor, TILE=REST_TILE, FLOAT=float_type, num_warps=4,
    )  # fmt: skip


def _check_tokens(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> None:
    """Refuse tensors of another shape or type; what the counts say is not looked at."""
    shape = (key.shape[0], cache.layout.kv_heads, cache.layout.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in FLOAT_TYPES or tuple(tensor.shape) != shape:
            raise UnsupportedError(f"{name}: bf16, fp16 or fp32 {list(shape)} is needed, got {list(tensor.shape)}")
    if counts.dtype != torch.int32 or tuple(counts.shape) != (batch.lengths.shape[0],):
        raise UnsupportedError(f"counts: int32 [{batch.lengths.shape[0]}] is needed")
