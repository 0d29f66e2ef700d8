"""What an operation refuses before it touches memory: shapes, types, and indices that would lead outside the cache."""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.format import UnsupportedError

FLOAT_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
QUERIES_MAX: Final = 32
GQA_RATIO_MAX: Final = 16


def check_buffers(cache: LayerCache, batch: Batch) -> None:
    """Refuse buffers of other shapes than the layout's."""
    layout = cache.layout
    for name, buffer, row_bytes in (
        ("pages", cache.pages, layout.page_bytes),
        ("ring", cache.ring, layout.ring_bytes),
        ("sinks", cache.sinks, layout.sink_bytes),
    ):
        if buffer.dtype != torch.uint8 or buffer.dim() != 2 or buffer.shape[1] != row_bytes:
            raise UnsupportedError(f"{name}: uint8 [rows, {row_bytes}] is needed, got {_describe(buffer)}")
        if not buffer.is_contiguous():
            raise UnsupportedError(f"{name}: a contiguous tensor is needed")
    if batch.block_tables.dim() != 2:
        raise UnsupportedError(f"block_tables: [batch, blocks] is needed, got {_describe(batch.block_tables)}")


def check_cache(cache: LayerCache, batch: Batch) -> None:
    """Refuse buffers of other shapes than the layout's, and sequences that reach outside them."""
    check_buffers(cache, batch)
    slots = min(cache.ring.shape[0], cache.sinks.shape[0])
    for row, slot in enumerate(batch.slots.tolist()):
        if not 0 <= slot < slots:
            raise UnsupportedError(f"sequence {row}: slot {slot} of {slots}")
    for row, length in enumerate(batch.lengths.tolist()):
        _check_blocks(cache, batch, row, length)


def _check_blocks(cache: LayerCache, batch: Batch, row: int, length: int) -> None:
    if length < 0:
        raise UnsupportedError(f"sequence {row}: {length} tokens held")
    needed, width = cache.layout.blocks(length), batch.block_tables.shape[1]
    if needed > width:
        raise UnsupportedError(f"sequence {row}: {length} tokens take {needed} blocks, its block table has {width}")
    for block in batch.block_tables[row, :needed].tolist():
        if not 0 <= block < cache.pages.shape[0]:
            raise UnsupportedError(f"sequence {row}: block {block} of {cache.pages.shape[0]}")


def check_tokens(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> None:
    """Refuse new tokens of another shape or type, whatever the cache holds."""
    sequences = batch.lengths.numel()
    if counts.dtype != torch.int32 or tuple(counts.shape) != (sequences,):
        raise UnsupportedError(f"counts: int32 [{sequences}] is needed, got {_describe(counts)}")
    if sequences and int(counts.min()) < 0:
        raise UnsupportedError(f"counts: {int(counts.min())} tokens to append")
    shape = (int(counts.sum()), cache.layout.kv_heads, cache.layout.head_dim)
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype not in FLOAT_TYPES or tuple(tensor.shape) != shape:
            raise UnsupportedError(f"{name}: bf16, fp16 or fp32 {list(shape)} is needed, got {_describe(tensor)}")


def check_append(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> None:
    """Refuse an append that the definition does not cover."""
    check_tokens(cache, batch, key, value, counts)
    if len(set(batch.slots.tolist())) != batch.slots.numel():
        raise UnsupportedError("slots: two sequences of one append share a slot")
    check_cache(cache, batch)
    check_cache(cache, batch.after(counts))


def check_query(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    sink_logits: Tensor | None,
    positions: Tensor | None,
) -> None:
    """Refuse queries and options that the definition does not cover, whatever the cache holds."""
    if query.dtype not in FLOAT_TYPES or query.dim() != 4:
        raise UnsupportedError(f"query: bf16, fp16 or fp32 [batch, queries, heads, head_dim], got {_describe(query)}")
    sequences, queries, heads, head_dim = query.shape
    if sequences != batch.lengths.numel() or head_dim != cache.layout.head_dim:
        raise UnsupportedError(
            f"query {_describe(query)}: {batch.lengths.numel()} sequences of head size {cache.layout.head_dim} are held"
        )
    if not 1 <= queries <= QUERIES_MAX:
        raise UnsupportedError(f"{queries} queries a sequence: 1 to {QUERIES_MAX}")
    if heads % cache.layout.kv_heads or not 1 <= heads // cache.layout.kv_heads <= GQA_RATIO_MAX:
        raise UnsupportedError(
            f"{heads} query heads for {cache.layout.kv_heads} KV heads: whole groups of 1 to {GQA_RATIO_MAX} are needed"
        )
    if sink_logits is not None and (sink_logits.dtype != torch.float32 or tuple(sink_logits.shape) != (heads,)):
        raise UnsupportedError(f"sink_logits: float32 [{heads}] is needed, got {_describe(sink_logits)}")
    if positions is not None and (positions.dtype != torch.int32 or tuple(positions.shape) != (sequences, queries)):
        raise UnsupportedError(f"positions: int32 [{sequences}, {queries}] is needed, got {_describe(positions)}")
    if options.window is not None and options.window < 1:
        raise UnsupportedError(f"window of {options.window} tokens: at least 1, or None")
    if options.softcap is not None and not options.softcap > 0:
        raise UnsupportedError(f"softcap {options.softcap}: above 0, or None")


def check_decode(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    sink_logits: Tensor | None,
    positions: Tensor | None,
) -> None:
    """Refuse a decode that the definition does not cover."""
    check_query(cache, batch, query, options, sink_logits, positions)
    check_cache(cache, batch)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
