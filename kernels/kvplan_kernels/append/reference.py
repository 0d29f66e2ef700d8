"""Append in plain PyTorch: the definition."""

from dataclasses import replace

import torch
from torch import Tensor

from kvplan_kernels.boosts import Boosts
from kvplan_kernels.cache import TORCH_FLOAT, Batch, LayerCache
from kvplan_kernels.calls import check_append
from kvplan_kernels.format import Axis, TensorFormat
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.outliers import Outliers, cut
from kvplan_kernels.quantize import quantize
from kvplan_kernels.rotation import butterflies
from kvplan_kernels.sequence import Sequence, sequences
from kvplan_kernels.transforms import transforming_append
from kvplan_kernels.views import (
    KEY,
    VALUE,
    read_words,
    ring_tokens,
    ring_view,
    section_view,
    sink_view,
    tensor_flush,
    tensor_format,
    write_boosts,
    write_codes,
    write_words,
)
from kvplan_kernels.words import float_codes, float_values


@transforming_append(butterflies)
def append(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> int:
    """Store new tokens, quantizing those that leave the residual.

    Tokens lie where appending them one by one would have left them. Bits of other tokens stay as they are, and so do
    ring slots that no held token owns.

    Args:
        cache: Changed in place.
        batch: Its lengths are the tokens held before.
        key: bf16, fp16 or fp32 [sum of counts, kv_heads, head_dim], one sequence after another; rounded to the
            layout's 16-bit type first.
        value: As key.
        counts: int32 [batch]: new tokens of each sequence.

    Returns:
        Poisoned groups: those that hold a NaN or an infinity, or whose scale or minimum overflows its type.
    """
    check_append(cache, batch, key, value, counts)
    poisoned = 0
    ends = counts.cumsum(0).tolist()
    for sequence, count, end in zip(sequences(cache, batch), counts.tolist(), ends, strict=True):
        for prefix, tensor in ((KEY, key), (VALUE, value)):
            heads_first = tensor[end - count : end].transpose(0, 1)
            poisoned += _append_tensor(sequence, prefix, float_codes(heads_first, cache.layout.float_type))
    return poisoned


def _append_tensor(sequence: Sequence, prefix: str, new: Tensor) -> int:
    """Store the bit patterns *new*, int32 [kv_heads, count, head_dim], of K or V."""
    layout = sequence.cache.layout
    to_sinks = min(new.shape[1], max(0, layout.format.sink_tokens - sequence.length))
    if to_sinks:
        words = sink_view(sequence.cache.sinks, layout, prefix)[sequence.slot]
        write_words(words, layout, prefix, 16, sequence.length + torch.arange(to_sinks), new[:, :to_sinks])
    new = new[:, to_sinks:]
    before = max(0, sequence.length - layout.format.sink_tokens)
    after = before + new.shape[1]
    if not tensor_format(layout, prefix).quantized:
        return _store_pages(sequence, prefix, before, new)
    flush = tensor_flush(layout, prefix)
    first, last = flush.quantized_tokens(before), flush.quantized_tokens(after)
    leaving = torch.cat([_held(sequence, prefix, first, min(before, last)), new[:, : max(0, last - before)]], dim=1)
    poisoned = _store_pages(sequence, prefix, first, leaving)
    staying = torch.arange(max(before, last), after)
    if len(staying):
        words = ring_view(sequence.cache.ring, layout, prefix)[sequence.slot]
        write_words(words, layout, prefix, 16, staying % ring_tokens(layout, prefix), new[:, staying - before])
    return poisoned


def _held(sequence: Sequence, prefix: str, first: int, last: int) -> Tensor:
    """Return the bit patterns of the residual's tokens *first* to *last*, int32 [kv_heads, tokens, head_dim]."""
    layout = sequence.cache.layout
    if last <= first:
        return torch.zeros(layout.kv_heads, 0, layout.head_dim, dtype=torch.int32)
    words = ring_view(sequence.cache.ring, layout, prefix)[sequence.slot]
    return read_words(words, layout, prefix, 16)[:, torch.arange(first, last) % ring_tokens(layout, prefix)]


def _store_pages(sequence: Sequence, prefix: str, first: int, new: Tensor) -> int:
    """Store the 16-bit patterns *new* in pages, from token *first* on, quantized where the format says so."""
    layout = sequence.cache.layout
    tensor = tensor_format(layout, prefix)
    if not new.shape[1]:
        return 0
    learned = sequence.cache.learned_levels.get(prefix)
    quantized = outliers = None
    if tensor.quantized:
        dense, outliers = cut(float_values(new, layout.float_type), layout.format.outliers)
        quantized = quantize(dense, tensor, learned)
    codes = new if quantized is None else quantized.codes
    done = 0
    while done < codes.shape[1]:
        block, start = divmod(first + done, layout.block_tokens)
        stop = min(done + layout.block_tokens - start, codes.shape[1])
        page = sequence.cache.pages[int(sequence.blocks[block])]
        write_codes(page, layout, prefix, start + torch.arange(stop - done), codes[:, done:stop])
        if quantized is not None:
            for name, metadata in quantized.metadata.items():
                stored = section_view(page, layout, f"{prefix}_{name}")
                _store_metadata(stored, metadata, tensor, start, done, stop)
            if quantized.boosts is not None:
                write_boosts(page, layout, start, _boosts_between(quantized.boosts, done, stop))
        if outliers is not None and layout.format.outliers:
            _store_outliers(page, layout, prefix, outliers, start, done, stop)
        done = stop
    return 0 if quantized is None else quantized.poisoned


def _boosts_between(boosts: Boosts, first: int, last: int) -> Boosts:
    """Return the boosts of tokens *first* to *last*, which are whole groups."""
    groups = slice(first // boosts.group, last // boosts.group)
    return replace(boosts, channel=boosts.channel[:, groups], low=boosts.low[:, first:last])


def _store_outliers(
    page: Tensor, layout: KVLayout, prefix: str, outliers: Outliers, start: int, first: int, last: int
) -> None:
    """Store the outliers of tokens *first* to *last* at token *start* of a page."""
    rest, channel = (found[:, first:last].transpose(1, 2) for found in (outliers.rest, outliers.channel))
    tokens = slice(start, start + last - first)
    section_view(page, layout, f"{prefix}_outlier")[..., tokens] = rest.to(TORCH_FLOAT[layout.float_type])
    section_view(page, layout, f"{prefix}_outlier_channel")[..., tokens] = channel.to(torch.uint8)


def _store_metadata(stored: Tensor, metadata: Tensor, tensor: TensorFormat, start: int, first: int, last: int) -> None:
    """Store the metadata of tokens *first* to *last* at token *start* of a page's section."""
    if tensor.axis is Axis.CHANNEL and tensor.group_size is not None:
        size = tensor.group_size
        stored[:, start // size : (start + last - first) // size] = metadata[:, first // size : last // size]
    else:
        stored[:, :, start : start + last - first] = metadata[:, :, first:last]
