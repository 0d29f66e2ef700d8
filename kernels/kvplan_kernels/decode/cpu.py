"""Decode on the CPU: the compiled kernel."""

from ctypes import addressof, byref

import torch
from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.calls import check_buffers, check_decode, check_query
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.native import abi, loader
from kvplan_kernels.transforms import transforming_decode


@transforming_decode(None)
def decode(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
    received: bool = False,
    lse: bool = False,
    threads: int | None = None,
) -> DecodeResult:
    """Return the attention of *query* over the tokens that each sequence holds; `reference.decode` defines it.

    Args:
        cache: As in the definition, like all that follow, on the CPU.
        batch: As in the definition.
        query: As in the definition; any strides.
        options: As in the definition.
        sink_logits: As in the definition.
        positions: As in the definition.
        received: As in the definition.
        lse: As in the definition.
        threads: Threads to run on, None for torch's own count.
    """
    library = loader.library()
    check_buffers(cache, batch)
    check_query(cache, batch, query, options, sink_logits, positions)
    abi.check_device(cache.pages, cache.ring, cache.sinks, query, batch.lengths, sink_logits, positions)
    sequences, queries, heads, head_dim = query.shape
    if query.stride(3) != 1:
        query = query.contiguous()
    output = torch.empty(sequences, queries, heads, head_dim)
    tokens = max(batch.lengths.tolist(), default=0) if received else 0
    share = torch.empty(sequences, heads, tokens) if received else None
    logarithms = torch.empty(sequences, queries, heads) if lse else None
    sink_logits = None if sink_logits is None else sink_logits.contiguous()
    positions = None if positions is None else positions.contiguous()
    restore = abi.restore_struct(cache, batch)
    call = abi.DecodeCall(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        query.stride(2),
        output.data_ptr(),
        None if share is None else share.data_ptr(),
        None if logarithms is None else logarithms.data_ptr(),
        None if sink_logits is None else sink_logits.data_ptr(),
        None if positions is None else positions.data_ptr(),
        None if restore is None else addressof(restore),
        tokens,
        abi.SOURCE_TYPE[query.dtype],
        queries,
        heads,
        options.window or 0,
        options.scale,
        options.softcap or 0.0,
        torch.get_num_threads() if threads is None else threads,
        loader.variant_index(),
    )
    layout = abi.layout_struct(cache)
    status = library.kvplan_decode(byref(layout), byref(abi.batch_struct(cache, batch)), byref(call))
    if status == abi.OUTSIDE:
        check_decode(cache, batch, query, options, sink_logits, positions)  # says which index it was
    abi.check_status("decode", status)
    return DecodeResult(output=output, received=share, lse=logarithms)
