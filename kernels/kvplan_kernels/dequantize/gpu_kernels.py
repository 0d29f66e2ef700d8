"""Dequantize in Triton: a program reads back one tile of tokens of K or V of one KV head.

Tiles of sinks come first, then tiles of the tokens after them: so a tile of pages begins at a whole word, and lies in
one group where tokens share a scale. 16-bit values are copied as bit patterns.

A code has 8 bits at most and a scale 11, so their product is exact in float32: whether a compiler fuses it with the
addition of the minimum or not, the sum is rounded once, as the definition has it. Only the bits of a NaN are a
device's own.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, widen
from kvplan_kernels.gpu.tokens import paged_tokens
from kvplan_kernels.gpu.unpack import unpack, unpack_e4m3


@triton.jit
def metadata_of(meta, slab, in_page, k, G: tl.constexpr, T: tl.constexpr):
    """Return the scales or minima, which begin at *meta*, of one plane of channels: float32, for [tokens, channels]."""
    CHANNEL: tl.constexpr = T.channel
    WHOLE: tl.constexpr = T.whole
    channel = k * T.width + tl.arange(0, T.padded)
    if CHANNEL:  # the tile lies in one group
        first = tl.min(slab, 0) + tl.min(in_page, 0) // T.group * G.head_dim
        found = tl.load(meta + first + channel[None, :], mask=(channel < (k + 1) * T.width)[None, :], other=0.0)
    elif WHOLE:
        found = tl.load(meta + slab[:, None] + (k * T.width // T.group) * G.block + in_page[:, None])
    else:
        group = tl.minimum(channel // T.group, T.groups - 1)
        found = tl.load(meta + slab[:, None] + group[None, :] * G.block + in_page[:, None])
    return found.to(tl.float32)


@triton.jit
def write_codes(
    out, words, meta, slab, token, paged, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr
):
    """Write the quantized tokens *token*, the first of each word, and those that share its words, where under *paged*.

    Row 0 of *out* is token 0.
    """
    BITS: tl.constexpr = T.bits
    PLANES: tl.constexpr = T.planes
    PLACES: tl.constexpr = T.tokens
    FLOATS: tl.constexpr = T.floats
    OFFSET: tl.constexpr = 1024.0 if BITS == 8 else 128.0
    i = tl.arange(0, T.padded)
    in_page = token % G.block
    at = slab + T.codes + in_page // PLACES * T.width
    held = tl.load(words + at[:, None] + i[None, :], mask=(token < paged)[:, None] & (i < T.width)[None, :], other=0)
    for p in tl.static_range(PLACES):
        row = (token + p).to(tl.int64) * G.head_dim
        mask = (token + p < paged)[:, None] & (i < T.width)[None, :]
        for k in tl.static_range(PLANES):
            if FLOATS:
                value = widen(unpack_e4m3(held, BITS * (p * PLANES + k), ASM))
            else:
                code = widen(unpack(held, BITS * (p * PLANES + k), BITS, ASM)) - OFFSET
                scale = metadata_of(meta + T.scale, slab, in_page + p, k, G, T)
                value = code * scale + metadata_of(meta + T.minimum, slab, in_page + p, k, G, T)
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
    out, words, meta, ring, sinks, block_tables, slots, lengths, table_width, tokens,
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
                at = slab + T.codes + row % G.block * G.head_dim
                copy_rows(first_row, words, at, row, row < paged, row < paged, G)
            else:
                write_codes(first_row, words, meta, slab, row, paged, G, T, FLOAT, ASM)
        if start + TILE > paged:
            at = slot * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
            stays = token >= paged
            copy_rows(first_row, ring, at, token, stays & (token < held), stays & (token < tokens - G.sinks), G)
