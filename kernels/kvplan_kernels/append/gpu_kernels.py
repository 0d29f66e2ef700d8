"""Append in Triton: quantize what leaves the residual, then store what stays.

Two launches, since a new token may take the ring slot of one that leaves. A program of the first is one tile of tokens
of one KV head; of the second likewise.
"""

import triton
import triton.language as tl

from kvplan_kernels.append.fits_gpu_kernels import (
    code_of,
    cut_at,
    fit_extremes,
    fit_fixed,
    fit_in_order,
    has_minimum,
    in_order,
    load_plane,
    rows_of,
)
from kvplan_kernels.gpu.boosts import IN_WORD, LOW_MASK, boost_channels, boost_words, low_shift
from kvplan_kernels.gpu.floats import narrow, small_float_code, widen
from kvplan_kernels.gpu.numbers import number_place, numbers_in, poisoned_number
from kvplan_kernels.gpu.tokens import paged_tokens
from kvplan_kernels.gpu.unpack import level_tables, shift_of

FLOAT_NAN = tl.constexpr(0x7F)
"""A NaN of both floats of 8 bits."""


@triton.jit
def tokens_of(lengths, counts, sequence, G: tl.constexpr):
    """Return a sequence's tokens after the sinks before and after the append, and its new and held sinks and tokens."""
    length = tl.load(lengths + sequence)
    count = tl.load(counts + sequence)
    sinks = tl.minimum(length, G.sinks)
    to_sinks = tl.minimum(count, G.sinks - sinks)
    before = length - sinks
    return before, before + count - to_sinks, to_sinks, sinks, count


# ---- words


@triton.jit
def float_words(source, token, inside, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the words of *token* whose codes are floats, int32 [tokens, words], and which tokens are poisoned."""
    PLANES: tl.constexpr = T.planes
    PADDED: tl.constexpr = T.padded
    BITS: tl.constexpr = T.bits
    bad = tl.zeros([token.shape[0]], tl.int32)
    packed = tl.zeros([token.shape[0], PADDED], tl.int32)
    for k in tl.static_range(PLANES):
        x, _ = load_plane(source, token, inside, k, G, T, FLOAT)
        finite = tl.abs(x) < float("inf")
        bad += tl.sum((finite == 0).to(tl.int32), 1)
        packed |= small_float_code(tl.where(finite, x, 0.0), T.floats) << (BITS * k)
    all_nan = tl.zeros([token.shape[0], PADDED], tl.int32)
    for k in tl.static_range(PLANES):
        all_nan |= FLOAT_NAN << (BITS * k)
    return tl.where((bad > 0)[:, None], all_nan, packed), bad > 0


@triton.jit
def with_codes(low, high, code, PLACE: tl.constexpr, k: tl.constexpr, T: tl.constexpr):
    """Return words of both planes with the codes of the token at PLACE and of channel plane *k* put in."""
    LOW: tl.constexpr = T.low.bits
    if T.high.bits > 0:
        high |= (code >> LOW) << shift_of(T.high, PLACE, T.planes, k)
        code = code & ((1 << LOW) - 1)
    low |= code << shift_of(T.low, PLACE, T.planes, k)
    return low, high


@triton.jit
def store_words(
    words, packed, slab, row, p: tl.constexpr, first, last, PLANE: tl.constexpr, G: tl.constexpr, T: tl.constexpr
):
    """Store *packed*, the words of a plane whose first token is *p* after *row*: tokens of others keep their bits."""
    PLACES: tl.constexpr = PLANE.tokens
    SHIFT: tl.constexpr = PLANE.bits * T.planes
    token = row + p
    i = tl.arange(0, T.padded)
    place = words + (slab + PLANE.start + token % G.block // PLACES * T.width)[:, None] + i[None, :]
    mask = (token < last)[:, None] & (i < T.width)[None, :]
    if T.tokens > PLACES:  # the other plane's row begins earlier
        mask = mask & (token + PLACES > first)[:, None]
    if PLACES > 1 and not T.channel:
        kept = tl.zeros([row.shape[0], 1], tl.int32)
        for q in tl.static_range(PLACES):
            inside = (token + q >= first) & (token + q < last)
            kept |= tl.where(inside, 0, ((1 << SHIFT) - 1) << (SHIFT * q))[:, None]
        old = tl.load(place, mask=mask, other=0).to(tl.int32)
        packed |= old & kept
    tl.store(place, packed.to(tl.uint16), mask=mask)


# ---- outliers


@triton.jit
def store_outliers(source, meta, slab, token, inside, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Store the outliers of each token; return the magnitude that the rest is cut at, infinite where it is poisoned."""
    OUTLIERS: tl.constexpr = T.outliers
    PLANES: tl.constexpr = T.planes
    bad = tl.zeros(token.shape, tl.int32)
    for k in tl.static_range(PLANES):
        x, mask = load_plane(source, token, inside, k, G, T, FLOAT)
        bad += tl.sum((mask & ((tl.abs(x) < float("inf")) == 0)).to(tl.int32), 1)
    sound = bad == 0
    size = tl.full(token.shape, float("inf"), tl.float32)
    at = tl.full(token.shape, -1, tl.int32)
    signed = tl.zeros(token.shape, tl.float32)
    found = ()
    for _ in tl.static_range(OUTLIERS + 1):
        size, at, signed = next_largest(source, token, inside, size, at, G, T, FLOAT)
        found = found + ((at, signed),)
    values = meta.to(tl.pointer_type(FLOAT), bitcast=True) + slab + T.outlier
    channels = meta.to(tl.pointer_type(tl.uint8), bitcast=True) + slab * 2 + T.outlier_channel
    for n in tl.static_range(OUTLIERS):
        channel, x = found[n]
        rest = tl.where(sound, tl.where(x > size, x - size, tl.where(x < -size, x + size, 0.0)), 0.0)
        place = n * G.block + token % G.block
        tl.store(values + place, narrow(rest, FLOAT), mask=inside)
        tl.store(channels + place, tl.where(sound, channel, 0).to(tl.uint8), mask=inside)
    return tl.where(sound, size, float("inf"))


@triton.jit
def next_largest(source, token, inside, size, at, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return magnitude, channel and element after those of magnitude *size* in channel *at*, the first of equals."""
    PLANES: tl.constexpr = T.planes
    i = tl.arange(0, T.padded)[None, :]
    most = tl.full(token.shape, -1.0, tl.float32)
    first = tl.zeros(token.shape, tl.int32)
    element = tl.zeros(token.shape, tl.float32)
    for k in tl.static_range(PLANES):
        x, mask = load_plane(source, token, inside, k, G, T, FLOAT)
        channel = k * T.width + i
        here = tl.abs(x)
        left = mask & ((here < size[:, None]) | ((here == size[:, None]) & (channel > at[:, None])))
        plane_most = tl.max(tl.where(left, here, -1.0), 1)
        held = left & (here == plane_most[:, None])
        plane_first = tl.min(tl.where(held, channel, 65536), 1)
        plane_element = tl.sum(tl.where(held & (channel == plane_first[:, None]), x, 0.0), 1)
        more = plane_most > most  # planes come in the order of channels
        most = tl.where(more, plane_most, most)
        first = tl.where(more, plane_first, first)
        element = tl.where(more, plane_element, element)
    return most, first, element


# ---- groups of channels


@triton.jit
def token_extremes(source, token, inside, g: tl.constexpr, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the least and the largest element of group *g* of each token, and how many are NaN."""
    R: tl.constexpr = token.shape[0]
    PLANES: tl.constexpr = T.planes
    i = tl.arange(0, T.padded)
    low = tl.full([R], float("inf"), tl.float32)
    high = tl.full([R], float("-inf"), tl.float32)
    nan = tl.zeros([R], tl.int32)
    for k in tl.static_range(PLANES):
        if (k * T.width < (g + 1) * T.group) and ((k + 1) * T.width > g * T.group):
            x, mask = load_plane(source, token, inside, k, G, T, FLOAT)
            own = ((k * T.width + i) // T.group == g)[None, :] & mask
            low = tl.minimum(low, tl.min(tl.where(own, x, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(own, x, float("-inf")), 1))
            nan += tl.sum((own & (x != x)).to(tl.int32), 1)
    return tl.where(inside, low, 0.0), tl.where(inside, high, 0.0), nan


@triton.jit
def fit_tokens(source, meta, poisons, slab, row, first, last, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Store the numbers of all groups that are fitted element by element; return how they are coded, by group.

    That is the step and which are poisoned, [rows of words, tokens of a word].
    """
    PLACES: tl.constexpr = T.tokens
    GROUPS: tl.constexpr = T.groups
    token = row[:, None] + tl.arange(0, PLACES)[None, :]
    inside = (token >= first) & (token < last)
    rows = rows_of(source, token, G, T)
    fitted = ()
    for g in tl.static_range(GROUPS):
        scale, poisoned, step = fit_in_order(rows, inside, g, G, T, FLOAT)
        at = (number_place(slab, T) + g * G.block)[:, None] + token % G.block
        store_numbers(meta, at, scale, scale, poisoned, inside, T)
        tl.atomic_add(poisons, tl.sum(tl.sum((poisoned & inside).to(tl.int32), 1), 0))
        fitted = fitted + ((step, poisoned.to(tl.int32)),)
    return fitted


@triton.jit
def at_place(x, PLACE: tl.constexpr):
    """Return one column of *x*, int32 [rows, columns]."""
    column = tl.arange(0, x.shape[1])[None, :]
    return tl.sum(tl.where(column == PLACE, x, 0), 1)


@triton.jit
def add_token_codes(
    low, high, source, fitted, meta, tables, poisons, slab, token, inside, PLACE: tl.constexpr, G: tl.constexpr,
    T: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Put the codes of *token* into the words of both planes.

    Groups are coded as they are *fitted*, or else fitted here, and their numbers stored.
    """
    PLANES: tl.constexpr = T.planes
    GROUPS: tl.constexpr = T.groups
    i = tl.arange(0, T.padded)
    for g in tl.static_range(GROUPS):
        if in_order(T):
            steps, bad = fitted[g]
            step = at_place(steps.to(tl.int32, bitcast=True), PLACE).to(tl.float32, bitcast=True)
            base = step
            poisoned = at_place(bad, PLACE) > 0
        else:
            least, most, nan = token_extremes(source, token, inside, g, G, T, FLOAT)
            if T.fit == "none":
                poisoned, step, base = fit_fixed(least, most, nan, T)
            else:
                scale, minimum, poisoned, step, base = fit_extremes(least, most, nan, None, T)
                at = number_place(slab, T) + g * G.block + token % G.block
                store_numbers(meta, at, scale, minimum, poisoned, inside, T)
            tl.atomic_add(poisons, tl.sum((poisoned & inside).to(tl.int32), 0))
        for k in tl.static_range(PLANES):
            if (k * T.width < (g + 1) * T.group) and ((k + 1) * T.width > g * T.group):
                x, mask = load_plane(source, token, inside, k, G, T, FLOAT)
                own = ((k * T.width + i) // T.group == g)[None, :] & mask
                code = code_of(x, step[:, None], base[:, None], poisoned[:, None], None, tables, T)
                low, high = with_codes(low, high, tl.where(own, code, 0), PLACE, k, T)
    return low, high


@triton.jit
def store_numbers(meta, at, scale, minimum, poisoned, mask, T: tl.constexpr):
    """Store the numbers of groups as a page holds them."""
    numbers = numbers_in(meta, T)
    tl.store(numbers + T.scale + at, poisoned_number(scale, poisoned, T), mask=mask)
    if has_minimum(T):
        tl.store(numbers + T.minimum + at, poisoned_number(minimum, poisoned, T), mask=mask)


# ---- groups of tokens


@triton.jit
def with_token(sizes, source, token, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return *sizes*, by plane, with the magnitudes of the one *token*."""
    PLANES: tl.constexpr = T.planes
    found = ()
    for k in tl.static_range(PLANES):
        x, _ = load_plane(source, token, token >= 0, k, G, T, FLOAT)
        found = found + (sizes[k] + tl.sum(tl.abs(x), 0),)
    return found


@triton.jit
def channel_sizes(sources, row, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the sums of magnitudes of the channels of a group, by plane; 0 where it is not finite.

    Tokens are added from the first to the last, as the definition does.
    """
    PLANES: tl.constexpr = T.planes
    PLACES: tl.constexpr = T.tokens
    PADDED: tl.constexpr = T.padded
    ROWS: tl.constexpr = row.shape[0]
    first = tl.min(row, 0) + tl.zeros([1], tl.int32)
    sizes = ()
    for _ in tl.static_range(PLANES):
        sizes = sizes + (tl.zeros([PADDED], tl.float32),)
    for r in range(ROWS):
        for p in tl.static_range(PLACES):
            if T.outliers > 0:
                most = tl.sum(tl.where(tl.arange(0, ROWS) == r, sources[p][8], 0.0), 0)
                cut = cut_at(sources[p], most + tl.zeros([1], tl.float32))
                sizes = with_token(sizes, cut, first + (r * PLACES + p), G, T, FLOAT)
            else:
                sizes = with_token(sizes, sources[p], first + (r * PLACES + p), G, T, FLOAT)
    found = ()
    for k in tl.static_range(PLANES):
        found = found + (tl.where(sizes[k] < float("inf"), sizes[k], 0.0),)
    return found


@triton.jit
def channel_ranks(sizes, T: tl.constexpr):
    """Return how many channels are larger than each, or as large and before it, by plane."""
    PLANES: tl.constexpr = T.planes
    i = tl.arange(0, T.padded)
    held = i < T.width
    ranks = ()
    for k in tl.static_range(PLANES):
        rank = tl.where(held, 0, T.width * PLANES)
        for other in tl.static_range(PLANES):
            more = sizes[other][None, :] > sizes[k][:, None]
            earlier = (other * T.width + i)[None, :] < (k * T.width + i)[:, None]
            before = more | ((sizes[other][None, :] == sizes[k][:, None]) & earlier)
            rank += tl.sum((before & held[None, :]).to(tl.int32), 1)
        ranks = ranks + (rank,)
    return ranks


@triton.jit
def store_boost_channels(meta, slab, in_page, ranks, T: tl.constexpr):
    """Store the boosted channels of a group by rank, and zeros behind them."""
    PLANES: tl.constexpr = T.planes
    WORDS: tl.constexpr = T.boost_words
    for k in tl.static_range(PLANES):
        channel = k * T.width + tl.arange(0, T.padded)
        place = boost_channels(meta, slab, in_page, ranks[k], T)
        tl.store(place, channel.to(tl.uint8), mask=ranks[k] < T.boosts)
    for w in tl.static_range(WORDS):
        n = w * IN_WORD + tl.arange(0, IN_WORD)
        tl.store(boost_channels(meta, slab, in_page, n, T), tl.zeros([IN_WORD], tl.uint8), mask=n >= T.boosts)


@triton.jit
def with_low_bits(words, code, rank, T: tl.constexpr):
    """Return the words of low bits of tokens with those of one plane of channels, and the bits above them."""
    WORDS: tl.constexpr = T.boost_words
    boosted = rank < T.boosts
    found = ()
    for w in tl.static_range(WORDS):
        here = boosted & (rank // IN_WORD == w)
        bits = tl.where(here[None, :], (code & LOW_MASK) << low_shift(rank)[None, :], 0)
        found = found + (words[w] | tl.sum(bits, 1),)
    return found, tl.where(boosted[None, :], code >> 2, code)


@triton.jit
def fit_channels(sources, meta, poisons, slab, row, last, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Store the numbers of a group of tokens, which the tile is; return how each plane of channels is coded."""
    PADDED: tl.constexpr = T.padded
    PLANES: tl.constexpr = T.planes
    PLACES: tl.constexpr = T.tokens
    i = tl.arange(0, PADDED)
    held = i < T.width
    first = number_place(tl.min(slab, 0), T) + tl.min(row, 0) % G.block // T.group * G.head_dim
    ranks = ()
    if T.boosts > 0:
        ranks = channel_ranks(channel_sizes(sources, row, G, T, FLOAT), T)
        store_boost_channels(meta, tl.min(slab, 0), tl.min(row, 0) % G.block, ranks, T)
    fitted = ()
    for k in tl.static_range(PLANES):
        rank = ranks[k] if T.boosts > 0 else i
        low = tl.full([PADDED], float("inf"), tl.float32)
        high = tl.full([PADDED], float("-inf"), tl.float32)
        nan = tl.zeros([PADDED], tl.int32)
        for p in tl.static_range(PLACES):
            x, _ = load_plane(sources[p], row + p, row + p < last, k, G, T, FLOAT)
            low = tl.minimum(low, tl.min(x, 0))
            high = tl.maximum(high, tl.max(x, 0))
            nan += tl.sum((x != x).to(tl.int32), 0)
        scale, minimum, poisoned, step, base = fit_extremes(low, high, nan, rank < T.boosts, T)
        store_numbers(meta, first + k * T.width + i, scale, minimum, poisoned, held, T)
        tl.atomic_add(poisons, tl.sum((poisoned & held).to(tl.int32), 0))
        fitted = fitted + ((step, base, poisoned, rank),)
    return fitted


@triton.jit
def add_channel_codes(
    low, high, source, fitted, tables, token, inside, PLACE: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Put the codes of *token* into the words of both planes; return these, and the words of boosted channels."""
    PLANES: tl.constexpr = T.planes
    WORDS: tl.constexpr = T.boost_words
    boosts = ()
    for _ in tl.static_range(WORDS):
        boosts = boosts + (tl.zeros(token.shape, tl.int32),)
    for k in tl.static_range(PLANES):
        x, _ = load_plane(source, token, inside, k, G, T, FLOAT)
        step, base, poisoned, rank = fitted[k]
        code = code_of(x, step[None, :], base[None, :], poisoned[None, :], (rank < T.boosts)[None, :], tables, T)
        if WORDS > 0:
            boosts, code = with_low_bits(boosts, code, rank, T)
        low, high = with_codes(low, high, code, PLACE, k, T)
    return low, high, boosts


# ---- kernels


@triton.jit
def quantize_tile(
    source, words, meta, tables, poisons, slab, row, first, last, G: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Store the tokens from *first* to *last* of a tile as codes; *row* are those that begin a row of words."""
    PLACES: tl.constexpr = T.tokens
    R: tl.constexpr = TILE // PLACES
    PADDED: tl.constexpr = T.padded
    WORDS: tl.constexpr = T.boost_words
    sources = ()
    for p in tl.static_range(PLACES):
        token = row + p
        if T.outliers > 0:
            most = store_outliers(source, meta, slab, token, (token >= first) & (token < last), G, T, FLOAT)
            sources = sources + (cut_at(source, most),)
        else:
            sources = sources + (source,)
    fitted = ()
    if T.channel:
        fitted = fit_channels(sources, meta, poisons, slab, row, last, G, T, FLOAT)
    elif in_order(T):
        fitted = fit_tokens(source, meta, poisons, slab, row, first, last, G, T, FLOAT)
    high = tl.zeros([R, PADDED], tl.int32)
    for p in tl.static_range(PLACES):
        token = row + p
        inside = (token >= first) & (token < last)
        if p % T.low.tokens == 0:
            low = tl.zeros([R, PADDED], tl.int32)
        if len(T.floats) > 0:
            low, poisoned = float_words(sources[p], token, inside, G, T, FLOAT)
            tl.atomic_add(poisons, tl.sum((poisoned & inside).to(tl.int32), 0))
        elif T.channel:
            low, high, boosts = add_channel_codes(low, high, sources[p], fitted, tables, token, inside, p, G, T, FLOAT)
            for w in tl.static_range(WORDS):
                tl.store(boost_words(meta, slab, token % G.block, w, T), boosts[w], mask=inside)
        else:
            low, high = add_token_codes(
                low, high, sources[p], fitted, meta, tables, poisons, slab, token, inside, p, G, T, FLOAT
            )
        if (p + 1) % T.low.tokens == 0:
            store_words(words, low, slab, row, p + 1 - T.low.tokens, first, last, T.low, G, T)
    if T.high.bits > 0:
        store_words(words, high, slab, row, 0, first, last, T.high, G, T)


@triton.jit(do_not_specialize=("table_width",))
def append_pages(
    new, words, meta, levels, pages, ring, block_tables, slots, lengths, counts, starts, poisons, stride_token,
    stride_head, table_width, G: tl.constexpr, T: tl.constexpr, TILE: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store one tile of the tokens that go to pages, quantized where the format says so."""
    BITS: tl.constexpr = T.bits
    PLACES: tl.constexpr = T.tokens
    sequence = tl.program_id(1) // G.kv_heads
    head = tl.program_id(1) % G.kv_heads
    before, after, to_sinks, _, _ = tokens_of(lengths, counts, sequence, G)
    first = paged_tokens(before, T)
    last = paged_tokens(after, T)
    start = first // PLACES * PLACES + tl.program_id(0) * TILE
    if start < last:
        slot = tl.load(slots + sequence)
        first_row = tl.load(starts + sequence) + to_sinks
        row = start + PLACES * tl.arange(0, TILE // PLACES)
        page = tl.load(block_tables + sequence.to(tl.int64) * table_width + row // G.block, mask=row < last, other=0)
        slab = page.to(tl.int64) * G.page + head * G.slab
        source = (
            new,
            ring,
            before,
            first_row,
            slot,
            head,
            stride_token,
            stride_head,
            tl.full(row.shape, float("inf"), tl.float32),
        )
        if BITS == 16:
            x, mask = load_plane(source, row, (row >= first) & (row < last), 0, G, T, FLOAT)
            at = slab + T.low.start + row % G.block * G.head_dim
            tl.store(pages + at[:, None] + tl.arange(0, T.padded)[None, :], narrow(x, FLOAT), mask=mask)
        else:
            tables = level_tables(levels, G)
            quantize_tile(source, words, meta, tables, poisons, slab, row, first, last, G, T, TILE, FLOAT)


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
