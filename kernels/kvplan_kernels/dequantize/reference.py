"""Dequantize in plain PyTorch: the definition."""

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, Batch, LayerCache
from kvplan_kernels.calls import check_cache
from kvplan_kernels.rotation import butterflies
from kvplan_kernels.sequence import sequences
from kvplan_kernels.transforms import transforming_dequantize
from kvplan_kernels.views import KEY, VALUE


@transforming_dequantize(butterflies)
def dequantize(cache: LayerCache, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return K and V of each sequence in the layout's 16-bit type.

    Returns:
        Two tensors [batch, kv_heads, longest length, head_dim], zero past a sequence's length.
    """
    check_cache(cache, batch)
    layout = cache.layout
    shape = (batch.lengths.numel(), layout.kv_heads, max(batch.lengths.tolist(), default=0), layout.head_dim)
    dense = {
        p: torch.zeros(shape, dtype=TORCH_FLOAT[layout.float_type], device=cache.pages.device) for p in (KEY, VALUE)
    }
    for row, sequence in enumerate(sequences(cache, batch)):
        for prefix, tensor in dense.items():
            tensor[row, :, : sequence.length] = sequence.dense(prefix).to(tensor.dtype)
    return dense[KEY], dense[VALUE]
