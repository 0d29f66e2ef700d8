"""What keys and values are transformed by, around operations whose kernels know nothing of it.

The model's rotary embedding is undone first (`rope`), then what calibration learned is folded in (`folding`), then
heads are rotated (`rotation`); on the way back a query is asked, and an output read, by the inverse. All are plain
torch in float32, on the device of the cache. The CPU's decode rotates where it reads queries and writes outputs, so
that only the fold is around it.

Nothing can be asked of a query to make up for an embedding that was undone, as it is another for each token: where keys
are stored without, decode reads each of them back as `restored_keys` defines it, in 16 bits as attention takes them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.calls import FLOAT_TYPES
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.folding import Side, attention_refusal
from kvplan_kernels.format import Transform, UnsupportedError
from kvplan_kernels.layout import KVLayout

Operation = TypeVar("Operation", bound=Callable[..., Any])
Rotate = Callable[[Tensor], Tensor]
"""From [..., head_dim] to float32 of that shape."""


def _rotated(values: Tensor, layout: KVLayout, rotate: Rotate | None) -> Tensor:
    return values if rotate is None or Transform.HADAMARD not in layout.format.transforms else rotate(values)


def _stored(values: Tensor, side: Side, layout: KVLayout, rotate: Rotate) -> Tensor:
    """Return what a cache holds of *values* [tokens, kv_heads, head_dim]; others as they are, for append to refuse."""
    if values.dtype not in FLOAT_TYPES or values.shape[1:] != (layout.kv_heads, layout.head_dim):
        return values
    return _rotated(side.stored(values), layout, rotate)


def _read(stored: Tensor, side: Side, layout: KVLayout, rotate: Rotate) -> Tensor:
    """Return the values of which a cache holds *stored* [..., kv_heads, tokens, head_dim]."""
    values = _rotated(stored, layout, rotate)
    return side.read(values.transpose(-3, -2)).transpose(-3, -2)


def restored_keys(cache: LayerCache, stored: Tensor, rotate: Rotate) -> Tensor:
    """Return the keys, as the model handed them over, of which the cache holds *stored*.

    Args:
        cache: Says what was done to them.
        stored: [..., kv_heads, tokens, head_dim], each sequence's from its first token on.
        rotate: Multiplies by H.
    """
    keys = _read(stored, cache.fold.key, cache.layout, rotate)
    if cache.rope is None:
        return keys
    tokens = keys.shape[-2]
    places = torch.arange(tokens, device=keys.device)
    return cache.rope.applied(keys.transpose(-3, -2), places, tokens).transpose(-3, -2)


def _without_rope(cache: LayerCache, batch: Batch, key: Tensor, counts: Tensor) -> Tensor:
    """Return new keys [tokens, kv_heads, head_dim] without RoPE; others as they are, for append to refuse."""
    layout = cache.layout
    if cache.rope is None or key.dtype not in FLOAT_TYPES or key.shape[1:] != (layout.kv_heads, layout.head_dim):
        return key
    if not counts.numel() or counts.shape != batch.lengths.shape:
        return key
    ends, index = counts.cumsum(0), torch.arange(key.shape[0], device=key.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=counts.numel() - 1)
    most = cache.tokens_max(batch)
    positions = (batch.lengths + counts - ends)[row] + index
    return cache.rope.undone(key, positions.clamp(0, most - 1), most)


def _asked(query: Tensor, side: Side, kv_heads: int) -> Tensor:
    """Return what is asked for *query* [..., query_heads, head_dim] where *side* is done to keys."""
    return _ungrouped(side.asked(_grouped(query, kv_heads))) if side.asks else query


def _told(output: Tensor, side: Side, kv_heads: int) -> Tensor:
    """Return the output [..., query_heads, head_dim] of values to which *side* is done."""
    return _ungrouped(side.read(_grouped(output, kv_heads))) if side.asks else output


def _untold(query: Tensor, side: Side, options: AttentionOptions, kv_heads: int) -> Tensor | float:
    """Return what taking an offset from the keys takes from every score of a query, [batch, queries, query_heads]."""
    if side.offset is None:
        return 0.0
    products = (_grouped(query.to(torch.float32), kv_heads) * side.offset).sum(-1)
    return options.scale * products.transpose(-2, -1).flatten(-2)


def _grouped(heads: Tensor, kv_heads: int) -> Tensor:
    """Return query heads [..., query heads of each, kv_heads, head_dim], by the KV head that they read."""
    return torch.unflatten(heads, -2, (kv_heads, -1)).transpose(-3, -2)


def _ungrouped(heads: Tensor) -> Tensor:
    return heads.transpose(-3, -2).flatten(-3, -2)


def transforming_append(rotate: Rotate) -> Callable[[Operation], Operation]:
    """Return what makes an append one for caches with transforms as well; *rotate* multiplies by H."""

    def decorate(append: Operation) -> Operation:
        @wraps(append)
        def transformed(
            cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor, *more: Any, **named: Any
        ) -> Any:
            if cache.layout.format.transforms:
                key = _stored(_without_rope(cache, batch, key, counts), cache.fold.key, cache.layout, rotate)
                value = _stored(value, cache.fold.value, cache.layout, rotate)
            return append(cache, batch, key, value, counts, *more, **named)

        return cast(Operation, transformed)

    return decorate


def transforming_decode(rotate: Rotate | None) -> Callable[[Operation], Operation]:
    """Return what makes a decode one for caches with transforms as well.

    Args:
        rotate: Multiplies by H; None for a decode that rotates by itself.
    """

    def decorate(decode: Operation) -> Operation:
        @wraps(decode)
        def transformed(
            cache: LayerCache, batch: Any, query: Tensor, options: AttentionOptions, **named: Any
        ) -> DecodeResult:
            layout = cache.layout
            if not layout.format.transforms or not _asks(query, layout):
                return cast(DecodeResult, decode(cache, batch, query, options, **named))
            _check_attention(cache, options, named.get("sink_logits"))
            asked = query
            if cache.rope is None:
                asked = _rotated(_asked(query, cache.fold.key, layout.kv_heads), layout, rotate)
            result: DecodeResult = decode(cache, batch, asked, options, **named)
            output = _rotated(result.output, layout, rotate)
            output = _told(output, cache.fold.value, layout.kv_heads)
            lse = result.lse
            if lse is not None and cache.rope is None:
                lse = lse + _untold(query, cache.fold.key, options, layout.kv_heads)
            return replace(result, output=output, lse=lse)

        return cast(Operation, transformed)

    return decorate


def _asks(query: Tensor, layout: KVLayout) -> bool:
    """Whether *query* is one for caches of *layout*; decode refuses others."""
    fits = query.dim() == 4 and query.shape[2] > 0 and query.shape[2] % layout.kv_heads == 0
    return fits and query.dtype in FLOAT_TYPES and query.shape[3] == layout.head_dim


def _check_attention(cache: LayerCache, options: AttentionOptions, sink_logits: Tensor | None) -> None:
    form, capped = cache.layout.format, options.softcap is not None
    if (reason := attention_refusal(form, softcap=capped, sink_logits=sink_logits is not None)) is not None:
        raise UnsupportedError(reason)


def transforming_dequantize(rotate: Rotate) -> Callable[[Operation], Operation]:
    """Return what makes a dequantize one for caches with transforms as well; *rotate* multiplies by H."""

    def decorate(dequantize: Operation) -> Operation:
        @wraps(dequantize)
        def transformed(cache: LayerCache, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            key, value = dequantize(cache, *more, **named)
            if cache.layout.format.transforms:
                key = restored_keys(cache, key, rotate).to(key.dtype)
                value = _read(value, cache.fold.value, cache.layout, rotate).to(value.dtype)
            return key, value

        return cast(Operation, transformed)

    return decorate
