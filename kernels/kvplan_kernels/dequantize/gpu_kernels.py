"""Dequantize in Triton: a program reads back one tile of tokens of K or V of one KV head.

Tiles of sinks come first, then tiles of the tokens after them: so a tile of pages begins at a whole word, and lies in
one group where tokens share a scale. 16-bit values are copied as bit patterns.

A level has 8 bits at most and a 16-bit scale 11, so their product is exact in float32: whether a compiler fuses it with
the addition of the minimum or not, the sum is rounded once, as the definition has it. Where scales have more bits, the
caller keeps the compiler from it. Only the bits of a NaN are a device's own.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.boosts import boost_plane
from kvplan_kernels.gpu.floats import narrow, widen
from kvplan_kernels.gpu.numbers import level_minimum, level_scale, number_place
from kvplan_kernels.gpu.outliers import outlier_plane
from kvplan_kernels.gpu.tokens import paged_tokens
from kvplan_kernels.gpu.unpack import level_tables, offset_of, plane_floats, plane_levels


@triton.jit
def values_of(levels, meta, slab, in_page, k, G: tl.constexpr, T: tl.constexpr):
    """Return the values of one plane of channels from their levels, float32 [tokens, channels]."""
    CHANNEL: tl.constexpr = T.channel
    WHOLE: tl.constexpr = T.whole and T.slices == 1
    channel = k * T.width + tl.arange(0, T.padded)
    first = number_place(slab, T)
    mask = None
    if CHANNEL:  # the tile lies in one group
        place = tl.min(first, 0) + tl.min(in_page, 0) // T.group * G.head_dim + channel[None, :]
        mask = (channel < (k + 1) * T.width)[None, :]
    elif WHOLE:
        place = first[:, None] + (k * T.width // T.group) * G.block + in_page[:, None]
    else:
        group = tl.minimum(channel // T.group, T.groups - 1)
        place = first[:, None] + group[None, :] * G.block + in_page[:, None]
    scale = level_scale(meta, place, mask, T)
    return levels * scale + level_minimum(meta, place, mask, scale, T)


@triton.jit
def write_codes(
    out,
    words,
    meta,
    tables,
    slab,
    token,
    paged,
    G: tl.constexpr,
    T: tl.constexpr,
    FLOAT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write the quantized tokens *token*, the first of each word, and those that share its words, where under *paged*.

    Row 0 of *out* is token 0.
    """
    PLANES: tl.constexpr = T.planes
    PLACES: tl.constexpr = T.tokens
    i = tl.arange(0, T.padded)
    in_page = token % G.block
    for p in tl.static_range(PLACES):
        mask = (token + p < paged)[:, None] & (i < T.width)[None, :]
        if p % T.low.tokens == 0:
            at = slab + T.low.start + (in_page + p) // T.low.tokens * T.width
            held = tl.load(words + at[:, None] + i[None, :], mask=mask, other=0)
        if T.high.bits == 0:
            high = held
        elif p % T.high.tokens == 0:
            at = slab + T.high.start + (in_page + p) // T.high.tokens * T.width
            high = tl.load(words + at[:, None] + i[None, :], mask=mask, other=0)
        row = (token + p).to(tl.int64) * G.head_dim
        for k in tl.static_range(PLANES):
            if len(T.floats) > 0:
                value = widen(plane_floats(held, k, T, ASM))
            else:
                levels = widen(plane_levels(held, high, tables, p, k, T, ASM)) - offset_of(T)
                value = values_of(levels, meta, slab, in_page + p, k, G, T)
            inside = token + p < paged
            if T.boosts > 0:
                value += boost_plane(meta, slab, in_page + p, inside, k, G, T)
            if T.outliers > 0:
                rest = outlier_plane(meta, slab, in_page + p, inside, k * T.width, T.width, T.padded, G, T, FLOAT)
                value += tl.trans(rest)
            bits = narrow(value, FLOAT).to(tl.uint16, bitcast=True)
            tl.store(out + row[:, None] + (k * T.width + i)[None, :], bits, mask=mask)


@triton.jit
def copy_rows(out, source, from_row, to_row, held, wanted, G: tl.constexpr):
    """Copy 16-bit rows that are *held*, and write zeros where a row is wanted and not held."""
    d = tl.arange(0, G.padded)[None, :]
    mask = d < G.head_dim
    bits = tl.load(source + from_row[:, None] + d, mask=mask & held[:, None], other=0)
    tl.store(out + to_row.to(tl.int64)[:, None] * G.head_dim + d, bits, mask=mask & wanted[:, None])


@triton.jit(do_not_specialize=("table_width", "tokens"))
def dequantize_tokens(
    out, words, meta, levels, ring, sinks, block_tables, slots, lengths, table_width, tokens,
    G: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write one tile of *out*, 16-bit patterns [sequences, kv_heads, tokens, head_dim]: zeros past a length."""
    BITS: tl.constexpr = T.bits
    PLACES: tl.constexpr = T.tokens
    SINK_TILES: tl.constexpr = (G.sinks + TILE - 1) // TILE
    tile = tl.program_id(0)
    pid = tl.program_id(1)
    sequence = pid // G.kv_heads
    head = pid % G.kv_heads
    length = tl.load(lengths + sequence)
    slot = tl.load(slots + sequence).to(tl.int64)
    sink_tokens = tl.minimum(length, G.sinks)
    first_row = out + pid.to(tl.int64) * tokens * G.head_dim
    n = tl.arange(0, TILE)
    if tile < SINK_TILES:
        token = tile * TILE + n
        at = slot * G.sink + head * G.sink_head + T.sinks + token * G.head_dim
        copy_rows(first_row, sinks, at, token, token < sink_tokens, (token < G.sinks) & (token < tokens), G)
    else:
        first_row += G.sinks * G.head_dim
        held = length - sink_tokens
        paged = tl.minimum(paged_tokens(held, T), tokens - G.sinks)
        start = (tile - SINK_TILES) * TILE
        token = start + n
        if start < paged:
            row = start + PLACES * tl.arange(0, TILE // PLACES)
            table = block_tables + sequence.to(tl.int64) * table_width
            page = tl.load(table + row // G.block, mask=row < paged, other=0)
            slab = page.to(tl.int64) * G.page + head * G.slab
            if BITS == 16:
                at = slab + T.low.start + row % G.block * G.head_dim
                copy_rows(first_row, words, at, row, row < paged, row < paged, G)
            else:
                tables = level_tables(levels, G)
                write_codes(first_row, words, meta, tables, slab, row, paged, G, T, FLOAT, ASM)
        if start + TILE > paged:
            at = slot * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
            stays = token >= paged
            copy_rows(first_row, ring, at, token, stays & (token < held), stays & (token < tokens - G.sinks), G)
