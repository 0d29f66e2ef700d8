"""Append on the CPU: the compiled kernel."""

from ctypes import byref

import torch
from torch import Tensor

from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.calls import check_append, check_buffers, check_tokens
from kvplan_kernels.native import abi, loader
from kvplan_kernels.native.rotation import rotate
from kvplan_kernels.transforms import transforming_append


@transforming_append(rotate)
def append(
    cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor, *, threads: int | None = None
) -> int:
    """Store new tokens, quantizing those that leave the residual; `reference.append` defines it.

    Args:
        cache: As in the definition, like all that follow, on the CPU.
        batch: As in the definition.
        key: As in the definition; any strides.
        value: As key.
        counts: As in the definition.
        threads: Threads to run on, None for torch's own count; few tokens take one.
    """
    library = loader.library()
    check_buffers(cache, batch)
    check_tokens(cache, batch, key, value, counts)
    abi.check_device(cache.pages, cache.ring, cache.sinks, key, value, batch.lengths, counts)
    if key.dtype != value.dtype:
        key, value = key.float(), value.float()
    key, value, counts = _contiguous_rows(key), _contiguous_rows(value), counts.contiguous()
    call = abi.AppendCall(
        abi.Source(key.data_ptr(), key.stride(0), key.stride(1)),
        abi.Source(value.data_ptr(), value.stride(0), value.stride(1)),
        counts.data_ptr(),
        abi.SOURCE_TYPE[key.dtype],
        torch.get_num_threads() if threads is None else threads,
        loader.variant_index(),
    )
    layout = abi.layout_struct(cache)
    poisoned = int(library.kvplan_append(byref(layout), byref(abi.batch_struct(cache, batch)), byref(call)))
    if poisoned == abi.OUTSIDE:
        check_append(cache, batch, key, value, counts)  # says which index it was
    abi.check_status("append", poisoned)
    return poisoned


def _contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
