"""Where the words and fp16 metadata of `layout` lie in a cache's tensors, as views that can be read and written."""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.boosts import Boosts
from kvplan_kernels.cache import TORCH_FLOAT
from kvplan_kernels.format import Flush, TensorFormat
from kvplan_kernels.layout import LANES, PLANE_NAMES, KVLayout, Order
from kvplan_kernels.outliers import Outliers, restored
from kvplan_kernels.quantize import dequantize_codes
from kvplan_kernels.rows import read_row_codes, write_row_codes
from kvplan_kernels.scales import STORED_AS
from kvplan_kernels.tensor_format import BOOST_BITS, Levels
from kvplan_kernels.words import float_values, read_key_codes, read_value_codes, write_key_codes, write_value_codes

KEY: Final = "k"
VALUE: Final = "v"
_WORD_TYPE: Final = {Order.LANES: torch.int32, Order.ROWS: torch.int16}


def tensor_format(layout: KVLayout, prefix: str) -> TensorFormat:
    """Return how K ("k") or V ("v") is stored."""
    return layout.format.key if prefix == KEY else layout.format.value


def tensor_flush(layout: KVLayout, prefix: str) -> Flush:
    """Return when K or V leaves the residual."""
    return layout.format.key_flush if prefix == KEY else layout.format.value_flush


def ring_tokens(layout: KVLayout, prefix: str) -> int:
    """Return the capacity of the ring of K or V."""
    return layout.key_ring_tokens if prefix == KEY else layout.value_ring_tokens


def section_view(pages: Tensor, layout: KVLayout, name: str) -> Tensor:
    """Return one section [pages, kv_heads, *shape] of *pages*, uint8 [pages, page_bytes]: signed words, or numbers.

    Numbers are as `scales.STORED_AS` has them.
    """
    section = layout.section(name)
    slabs = pages.view(*pages.shape[:-1], layout.kv_heads, layout.slab_bytes)
    raw = slabs[..., section.offset_bytes : section.offset_bytes + section.nbytes]
    prefix, _, part = name.partition("_")
    dtype = _part_type(layout, prefix, part)
    return raw.view(dtype).view(*raw.shape[:-1], *section.shape)


def _part_type(layout: KVLayout, prefix: str, part: str) -> torch.dtype:
    if part in PLANE_NAMES:
        return _WORD_TYPE[layout.order]
    beside = {
        "boost": torch.int32,
        "boost_channel": torch.uint8,
        "outlier": TORCH_FLOAT[layout.float_type],
        "outlier_channel": torch.uint8,
    }
    return beside[part] if part in beside else STORED_AS[tensor_format(layout, prefix).number]


def ring_view(ring: Tensor, layout: KVLayout, prefix: str) -> Tensor:
    """Return the 16-bit words [slots, kv_heads, ...] of the residual of K or V; its capacity is not 0."""
    first = 0 if prefix == KEY else layout.key_ring_tokens
    return _whole_view(ring, layout, prefix, first, ring_tokens(layout, prefix))


def sink_view(sinks: Tensor, layout: KVLayout, prefix: str) -> Tensor:
    """Return the 16-bit words [slots, kv_heads, ...] of the sinks of K or V; there are some."""
    capacity = layout.sink_capacity_tokens
    return _whole_view(sinks, layout, prefix, 0 if prefix == KEY else capacity, capacity)


def _whole_view(buffer: Tensor, layout: KVLayout, prefix: str, first: int, capacity: int) -> Tensor:
    """Return the words of *capacity* 16-bit tokens that start *first* tokens into each head's part."""
    token_bytes = 2 * layout.head_dim
    heads = buffer.view(*buffer.shape[:-1], layout.kv_heads, -1)
    words = heads[..., first * token_bytes : (first + capacity) * token_bytes].view(_WORD_TYPE[layout.order])
    if layout.order is Order.ROWS:
        return words.view(*words.shape[:-1], capacity, layout.head_dim)
    if prefix == KEY:
        return words.view(*words.shape[:-1], capacity // LANES, layout.head_dim // 2, LANES)
    return words.view(*words.shape[:-1], capacity // 2, layout.head_dim)


def read_words(words: Tensor, layout: KVLayout, prefix: str, bits: int) -> Tensor:
    """Return the codes [..., tokens, head_dim] of *words* of K or V."""
    if layout.order is Order.ROWS:
        return read_row_codes(words, bits)
    return read_key_codes(words, bits, layout.head_dim) if prefix == KEY else read_value_codes(words, bits)


def write_words(words: Tensor, layout: KVLayout, prefix: str, bits: int, tokens: Tensor, codes: Tensor) -> None:
    """Store *codes* [..., n, head_dim] at the indices *tokens* of *words* of K or V."""
    if layout.order is Order.ROWS:
        write_row_codes(words, tokens, codes, bits)
        return
    write = write_key_codes if prefix == KEY else write_value_codes
    write(words, tokens, codes, bits)


def read_codes(pages: Tensor, layout: KVLayout, prefix: str) -> Tensor:
    """Return the codes of K or V, int32 [pages, kv_heads, block_tokens, head_dim], of *pages*, planes put together."""
    codes, shift = torch.zeros((), dtype=torch.int32, device=pages.device), 0
    for name, bits in zip(PLANE_NAMES, tensor_format(layout, prefix).planes, strict=False):
        codes = codes | read_words(section_view(pages, layout, f"{prefix}_{name}"), layout, prefix, bits) << shift
        shift += bits
    return codes


def write_codes(page: Tensor, layout: KVLayout, prefix: str, tokens: Tensor, codes: Tensor) -> None:
    """Store *codes* [kv_heads, n, head_dim] of K or V at the indices *tokens* of one page, plane by plane."""
    for name, bits in zip(PLANE_NAMES, tensor_format(layout, prefix).planes, strict=False):
        words = section_view(page, layout, f"{prefix}_{name}")
        write_words(words, layout, prefix, bits, tokens, codes & ((1 << bits) - 1))
        codes = codes >> bits


def write_boosts(page: Tensor, layout: KVLayout, start: int, boosts: Boosts) -> None:
    """Store the *boosts* of K, [kv_heads, ...], of groups from token *start* of one page on; zeros behind them."""
    groups, count = boosts.channel.shape[-2:]
    words, channel = (section_view(page, layout, name) for name in (f"{KEY}_boost", f"{KEY}_boost_channel"))
    write_key_codes(words, start + torch.arange(groups * boosts.group), boosts.low, BOOST_BITS)
    here = channel[:, start // boosts.group :][:, :groups]
    here[..., :count] = boosts.channel.to(torch.uint8)
    here[..., count:] = 0


def read_boosts(pages: Tensor, layout: KVLayout) -> Boosts | None:
    """Return the boosts of K of *pages*, [pages, kv_heads, ...], or None."""
    count = layout.format.key.boosted_channels(layout.head_dim)
    if not count:
        return None
    words, channel = (section_view(pages, layout, name) for name in (f"{KEY}_boost", f"{KEY}_boost_channel"))
    within = channel[..., :count].long().clamp(max=layout.head_dim - 1)  # what was never written may be anything
    group = layout.block_tokens // channel.shape[-2]
    return Boosts(channel=within, low=read_key_codes(words, BOOST_BITS, count), group=group)


def read_pages(pages: Tensor, layout: KVLayout, prefix: str, learned: Levels | None) -> Tensor:
    """Return K or V, float32 [kv_heads, pages * block_tokens, head_dim], of *pages*, uint8 [pages, page_bytes].

    *learned* are the levels of codes that stand for what is learned.
    """
    tensor = tensor_format(layout, prefix)
    codes = read_codes(pages, layout, prefix)
    if tensor.quantized:
        metadata = {name: section_view(pages, layout, f"{prefix}_{name}") for name in tensor.metadata}
        boosts = read_boosts(pages, layout) if prefix == KEY else None
        values = dequantize_codes(codes, metadata, tensor, learned, boosts)
        if layout.format.outliers:
            names = (f"{prefix}_outlier", f"{prefix}_outlier_channel")
            rest, channel = (section_view(pages, layout, name).transpose(-2, -1) for name in names)
            within = channel.long().clamp(max=layout.head_dim - 1)  # what was never written may be anything
            values = restored(values, Outliers(rest=rest.float(), channel=within))
    else:
        values = float_values(codes, layout.float_type)
    return values.transpose(0, 1).flatten(1, 2)
