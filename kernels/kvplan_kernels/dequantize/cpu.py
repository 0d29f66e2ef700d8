"""Dequantize on the CPU: the compiled kernel."""

from ctypes import byref

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, Batch, LayerCache
from kvplan_kernels.calls import check_buffers, check_cache
from kvplan_kernels.native import abi, loader
from kvplan_kernels.native.rotation import rotate
from kvplan_kernels.transforms import transforming_dequantize


@transforming_dequantize(rotate)
def dequantize(cache: LayerCache, batch: Batch, *, threads: int | None = None) -> tuple[Tensor, Tensor]:
    """Return K and V of each sequence in the layout's 16-bit type; `reference.dequantize` defines it.

    Args:
        cache: As in the definition, on the CPU.
        batch: As in the definition.
        threads: Threads to run on, None for torch's own count.
    """
    library = loader.library()
    check_buffers(cache, batch)
    abi.check_device(cache.pages, cache.ring, cache.sinks, batch.lengths)
    layout = cache.layout
    tokens = max(0, *batch.lengths.tolist(), 0)
    shape = (batch.lengths.shape[0], layout.kv_heads, tokens, layout.head_dim)
    key, value = (torch.empty(shape, dtype=TORCH_FLOAT[layout.float_type]) for _ in range(2))
    call = abi.DequantizeCall(
        key.data_ptr(),
        value.data_ptr(),
        tokens,
        torch.get_num_threads() if threads is None else threads,
        loader.variant_index(),
    )
    struct = abi.layout_struct(cache)
    status = library.kvplan_dequantize(byref(struct), byref(abi.batch_struct(cache, batch)), byref(call))
    if status == abi.OUTSIDE:
        check_cache(cache, batch)  # says which index it was
    abi.check_status("dequantize", status)
    return key, value
