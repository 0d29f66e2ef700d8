"""Append in Triton: quantize what leaves the residual, then store what stays.

Two launches, since a new token may take the ring slot of one that leaves. A program of the first is one tile of tokens
of one KV head; of the second likewise. All arithmetic is float32, step by step as the definition has it.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import e4m3_code, narrow, widen
from kvplan_kernels.gpu.tokens import paged_tokens

NEAREST = tl.constexpr(12582912.0)
"""1.5 x 2^23: added to a float32 under 2^22 and taken off again, it leaves the nearest integer, ties to even."""
E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def tokens_of(lengths, counts, sequence, G: tl.constexpr):
    """Return a sequence's tokens after the sinks before and after the append, and its new and held sinks and tokens."""
    length = tl.load(lengths + sequence)
    count = tl.load(counts + sequence)
    sinks = tl.minimum(length, G.sinks)
    to_sinks = tl.minimum(count, G.sinks - sinks)
    before = length - sinks
    return before, before + count - to_sinks, to_sinks, sinks, count


@triton.jit
def load_plane(
    new, ring, token, inside, before, first_row, slot, head, k, stride_token, stride_head, G: tl.constexpr,
    T: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return one plane of channels of *token* from the residual or the new tokens, [tokens, channels], and its mask."""
    i = tl.arange(0, T.padded)[None, :]
    mask = inside[:, None] & (i < T.width)
    channel = k * T.width + i
    held = token < before
    row = slot.to(tl.int64) * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
    old = widen(tl.load(ring + row[:, None] + channel, mask=mask & held[:, None], other=0.0))
    at = (first_row + token - before).to(tl.int64) * stride_token + head * stride_head
    fresh = widen(tl.load(new + at[:, None] + channel, mask=mask & (token >= before)[:, None], other=0.0))
    return tl.where(held[:, None], old, widen(narrow(fresh, FLOAT))), mask


@triton.jit
def metadata(low, high, nan, BITS: tl.constexpr):
    """Return minimum and scale as fp16, and which groups are poisoned."""
    low = low + 0.0  # a minimum of -0 is stored as +0
    minimum = narrow(low, tl.float16)
    scale = narrow(tl.math.div_rn(high + 0.0 - low, ((1 << BITS) - 1) * 1.0), tl.float16)
    sound = (tl.abs(minimum.to(tl.float32)) < float("inf")) & (tl.abs(scale.to(tl.float32)) < float("inf"))
    return minimum, scale, (nan > 0) | (sound == 0)


@triton.jit
def code_of(x, minimum, scale, poisoned, BITS: tl.constexpr):
    """Return the codes of *x*, int32; minimum, scale and poisoned are broadcast to it."""
    coded = (scale.to(tl.float32) != 0.0) & (poisoned == 0)
    step = tl.where(coded, scale.to(tl.float32), 1.0)
    lifted = tl.where(coded, x - minimum.to(tl.float32), 0.0)
    code = (tl.math.div_rn(lifted, step) + NEAREST) - NEAREST
    return tl.minimum(tl.maximum(code, 0.0), ((1 << BITS) - 1) * 1.0).to(tl.int32)


@triton.jit
def float_words(
    new, ring, token, inside, before, first_row, slot, head, stride_token, stride_head, G: tl.constexpr,
    T: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Return the words of *token* in E4M3, int32 [tokens, words], and which tokens are poisoned."""
    PLANES: tl.constexpr = T.planes
    PADDED: tl.constexpr = T.padded
    BITS: tl.constexpr = T.bits
    bad = tl.zeros([token.shape[0]], tl.int32)
    packed = tl.zeros([token.shape[0], PADDED], tl.int32)
    for k in tl.static_range(PLANES):
        x, _ = load_plane(
            new, ring, token, inside, before, first_row, slot, head, k, stride_token, stride_head, G, T, FLOAT
        )
        finite = tl.abs(x) < float("inf")
        bad += tl.sum((finite == 0).to(tl.int32), 1)
        packed |= e4m3_code(tl.where(finite, x, 0.0)) << (BITS * k)
    all_nan = tl.zeros([token.shape[0], PADDED], tl.int32)
    for k in tl.static_range(PLANES):
        all_nan |= E4M3_NAN << (BITS * k)
    return tl.where((bad > 0)[:, None], all_nan, packed), bad > 0


@triton.jit(do_not_specialize=("table_width",))
def append_pages(
    new, words, meta, pages, ring, block_tables, slots, lengths, counts, starts, poisons, stride_token, stride_head,
    table_width, G: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store one tile of the tokens that go to pages, quantized where the format says so."""
    BITS: tl.constexpr = T.bits
    PLANES: tl.constexpr = T.planes
    PLACES: tl.constexpr = T.tokens
    GROUPS: tl.constexpr = T.groups
    CHANNEL: tl.constexpr = T.channel
    FLOATS: tl.constexpr = T.floats
    R: tl.constexpr = TILE // PLACES
    PADDED: tl.constexpr = T.padded
    sequence = tl.program_id(1) // G.kv_heads
    head = tl.program_id(1) % G.kv_heads
    before, after, to_sinks, _, _ = tokens_of(lengths, counts, sequence, G)
    first = paged_tokens(before, T)
    last = paged_tokens(after, T)
    start = first // PLACES * PLACES + tl.program_id(0) * TILE
    if start < last:
        slot = tl.load(slots + sequence)
        first_row = tl.load(starts + sequence) + to_sinks
        row = start + PLACES * tl.arange(0, R)
        page = tl.load(block_tables + sequence.to(tl.int64) * table_width + row // G.block, mask=row < last, other=0)
        slab = page.to(tl.int64) * G.page + head * G.slab
        in_page = row % G.block
        i = tl.arange(0, PADDED)
        if BITS == 16:
            x, mask = load_plane(
                new, ring, row, (row >= first) & (row < last), before, first_row, slot, head, 0, stride_token,
                stride_head, G, T, FLOAT,
            )  # fmt: skip
            at = slab + T.codes + in_page * G.head_dim
            tl.store(pages + at[:, None] + i[None, :], narrow(x, FLOAT), mask=mask)
        else:
            packed = tl.zeros([R, PADDED], tl.int32)
            kept = tl.zeros([R, 1], tl.int32)
            if FLOATS:
                inside = (row >= first) & (row < last)
                packed, poisoned = float_words(
                    new, ring, row, inside, before, first_row, slot, head, stride_token, stride_head, G, T, FLOAT
                )
                tl.atomic_add(poisons, tl.sum((poisoned & inside).to(tl.int32), 0))
            elif CHANNEL:
                for k in tl.static_range(PLANES):
                    low = tl.full([PADDED], float("inf"), tl.float32)
                    high = tl.full([PADDED], float("-inf"), tl.float32)
                    nan = tl.zeros([PADDED], tl.int32)
                    for p in tl.static_range(PLACES):
                        x, mask = load_plane(
                            new, ring, row + p, row + p < last, before, first_row, slot, head, k, stride_token,
                            stride_head, G, T, FLOAT,
                        )  # fmt: skip
                        low = tl.minimum(low, tl.min(x, 0))
                        high = tl.maximum(high, tl.max(x, 0))
                        nan += tl.sum((x != x).to(tl.int32), 0)
                    minimum, scale, poisoned = metadata(low, high, nan, BITS)
                    at = tl.min(slab, 0) + (start % G.block // T.group) * G.head_dim + k * T.width + i
                    held = i < T.width
                    tl.store(meta + T.scale + at, tl.where(poisoned, float("nan"), scale), mask=held)
                    tl.store(meta + T.minimum + at, tl.where(poisoned, float("nan"), minimum), mask=held)
                    tl.atomic_add(poisons, tl.sum((poisoned & held).to(tl.int32), 0))
                    for p in tl.static_range(PLACES):
                        x, mask = load_plane(
                            new, ring, row + p, row + p < last, before, first_row, slot, head, k, stride_token,
                            stride_head, G, T, FLOAT,
                        )  # fmt: skip
                        code = code_of(x, minimum[None, :], scale[None, :], poisoned[None, :], BITS)
                        packed |= code << (BITS * (p * PLANES + k))
            else:
                for p in tl.static_range(PLACES):
                    token = row + p
                    inside = (token >= first) & (token < last)
                    if PLACES > 1:
                        kept |= tl.where(inside, 0, ((1 << (BITS * PLANES)) - 1) << (BITS * PLANES * p))[:, None]
                    for g in tl.static_range(GROUPS):
                        low = tl.full([R], float("inf"), tl.float32)
                        high = tl.full([R], float("-inf"), tl.float32)
                        nan = tl.zeros([R], tl.int32)
                        for k in tl.static_range(PLANES):
                            if (k * T.width < (g + 1) * T.group) and ((k + 1) * T.width > g * T.group):
                                x, mask = load_plane(
                                    new, ring, token, inside, before, first_row, slot, head, k, stride_token,
                                    stride_head, G, T, FLOAT,
                                )  # fmt: skip
                                own = ((k * T.width + i) // T.group == g)[None, :] & mask
                                low = tl.minimum(low, tl.min(tl.where(own, x, float("inf")), 1))
                                high = tl.maximum(high, tl.max(tl.where(own, x, float("-inf")), 1))
                                nan += tl.sum((own & (x != x)).to(tl.int32), 1)
                        low = tl.where(inside, low, 0.0)
                        high = tl.where(inside, high, 0.0)
                        minimum, scale, poisoned = metadata(low, high, nan, BITS)
                        at = slab + g * G.block + in_page + p
                        tl.store(meta + T.scale + at, tl.where(poisoned, float("nan"), scale), mask=inside)
                        tl.store(meta + T.minimum + at, tl.where(poisoned, float("nan"), minimum), mask=inside)
                        tl.atomic_add(poisons, tl.sum((poisoned & inside).to(tl.int32), 0))
                        for k in tl.static_range(PLANES):
                            if (k * T.width < (g + 1) * T.group) and ((k + 1) * T.width > g * T.group):
                                x, mask = load_plane(
                                    new, ring, token, inside, before, first_row, slot, head, k, stride_token,
                                    stride_head, G, T, FLOAT,
                                )  # fmt: skip
                                own = ((k * T.width + i) // T.group == g)[None, :] & mask
                                code = code_of(x, minimum[:, None], scale[:, None], poisoned[:, None], BITS)
                                packed |= tl.where(own, code, 0) << (BITS * (p * PLANES + k))
            at = slab + T.codes + in_page // PLACES * T.width
            mask = (row < last)[:, None] & (i < T.width)[None, :]
            place = words + at[:, None] + i[None, :]
            if PLACES > 1:  # a word's other token keeps its bits
                old = tl.load(place, mask=mask, other=0).to(tl.int32)
                packed |= old & kept
            tl.store(place, packed.to(tl.uint16), mask=mask)


@triton.jit
def append_rest(
    new, ring, sinks, slots, lengths, counts, starts, stride_token, stride_head,
    G: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store one tile of the new tokens: those that go to the sinks, and those that stay in the residual."""
    BITS: tl.constexpr = T.bits
    sequence = tl.program_id(1) // G.kv_heads
    head = tl.program_id(1) % G.kv_heads
    before, after, to_sinks, held, count = tokens_of(lengths, counts, sequence, G)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < count:
        slot = tl.load(slots + sequence).to(tl.int64)
        d = tl.arange(0, G.padded)[None, :]
        mask = (n < count)[:, None] & (d < G.head_dim)
        at = (tl.load(starts + sequence) + n).to(tl.int64) * stride_token + head * stride_head
        x = narrow(widen(tl.load(new + at[:, None] + d, mask=mask, other=0.0)), FLOAT)
        sink = slot * G.sink + head * G.sink_head + T.sinks + (held + n) * G.head_dim
        tl.store(sinks + sink[:, None] + d, x, mask=mask & (n < to_sinks)[:, None])
        if BITS < 16:
            token = before + n - to_sinks
            stays = (n >= to_sinks) & (token >= paged_tokens(after, T))
            row = slot * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
            tl.store(ring + row[:, None] + d, x, mask=mask & stays[:, None])
