"""Boosted channels of K in Triton: what lies beside the codes of each group of tokens; `boosts` defines it.

The low bits of a token's boosted channels are words of sixteen, in the order of K's codes in lanes, whatever order
the codes have.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.numbers import level_scale, number_place

IN_WORD = tl.constexpr(16)
LOW_MASK = tl.constexpr(3)
STEP = tl.constexpr(0.25)
"""Of a boosted code to the scale."""
OFFSET = tl.constexpr(128.0)
"""Of codes in the bits of a bf16."""
OFFSET_BITS = tl.constexpr(0x4300)


@triton.jit
def low_shift(n):
    """Return where in its word the low bits of boosted channel *n* begin."""
    return 8 * (n % 4) + 2 * (n % IN_WORD // 4)


@triton.jit
def boost_words(meta, slab, in_page, w, T: tl.constexpr):
    """Return the pointers to word *w* of the low bits of tokens."""
    at = slab // 2 + T.boost + (in_page // IN_WORD * T.boost_words + w) * IN_WORD + in_page % IN_WORD
    return meta.to(tl.pointer_type(tl.int32), bitcast=True) + at


@triton.jit
def boost_channels(meta, slab, in_page, n, T: tl.constexpr):
    """Return the pointers to the number of boosted channel *n* of the groups that tokens lie in."""
    at = slab * 2 + T.boost_channel + in_page // T.group * (IN_WORD * T.boost_words) + n
    return meta.to(tl.pointer_type(tl.uint8), bitcast=True) + at


@triton.jit
def boost_steps(meta, slab, in_page, channel, mask, G: tl.constexpr, T: tl.constexpr):
    """Return what one of the low bits of *channel* is worth, float32."""
    place = number_place(slab, T) + in_page // T.group * G.head_dim + channel
    return level_scale(meta, place, mask, T) * STEP


@triton.jit
def fold_boosts(query, valid, meta, slab, in_page, G: tl.constexpr, T: tl.constexpr):
    """Fold the steps of boosted channels of a tile's group into the queries, of which *query* are pointers.

    Returns by word the operands and what rounding them took, bf16 [channels, rows], and what the offset of the codes
    adds to each row's sums.
    """
    WORDS: tl.constexpr = T.boost_words
    operands = ()
    low = ()
    total = tl.zeros(query.shape, tl.float32)
    for w in tl.static_range(WORDS):
        n = w * IN_WORD + tl.arange(0, IN_WORD)
        channel = tl.load(boost_channels(meta, slab, in_page, n, T)).to(tl.int32)
        mask = valid[None, :] & (n < T.boosts)[:, None]
        asked = widen(tl.load(query[None, :] + channel[:, None], mask=mask, other=0.0))
        x = asked * boost_steps(meta, slab, in_page, channel, None, G, T)[:, None]
        operand = narrow(x, tl.bfloat16)
        operands = operands + (operand,)
        low = low + (narrow(x - widen(operand), tl.bfloat16),)
        total += tl.sum(x, 0)
    return operands, low, total * OFFSET


@triton.jit
def add_folded_boosts(score, operands, low, meta, slab, in_page, inside, T: tl.constexpr):
    """Add the products of low bits, offset, with what `fold_boosts` returned to *score*, float32 [tokens, rows]."""
    WORDS: tl.constexpr = T.boost_words
    shift = low_shift(tl.arange(0, IN_WORD))[None, :]
    for w in tl.static_range(WORDS):
        words = tl.load(boost_words(meta, slab, in_page, w, T), mask=inside, other=0)
        codes = ((words[:, None] >> shift) & LOW_MASK) | OFFSET_BITS
        floats = codes.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        score = product(floats, operands[w], score)
        score = product(floats, low[w], score)
    return score


@triton.jit
def boost_scores(query, valid, meta, slab, in_page, inside, scale, G: tl.constexpr, T: tl.constexpr):
    """Return what low bits add to the scores times *scale*, float32 [tokens, rows], of tokens of any groups."""
    score = tl.zeros([in_page.shape[0], query.shape[0]], tl.float32)
    for index in range(T.boosts):
        n = tl.zeros([1], tl.int32) + index
        channel = tl.load(boost_channels(meta, slab, in_page, n, T), mask=inside, other=0).to(tl.int32)
        words = tl.load(boost_words(meta, slab, in_page, n // IN_WORD, T), mask=inside, other=0)
        low = ((words >> low_shift(n)) & LOW_MASK).to(tl.float32)
        more = low * boost_steps(meta, slab, in_page, channel, inside, G, T)
        asked = widen(tl.load(query[None, :] + channel[:, None], mask=valid[None, :] & inside[:, None], other=0.0))
        score += asked * (more * scale)[:, None]
    return score


@triton.jit
def boost_plane(meta, slab, in_page, inside, k, G: tl.constexpr, T: tl.constexpr):
    """Return what low bits add to one plane of channels of the tokens of a group, float32 [tokens, channels]."""
    channel = k * T.width + tl.arange(0, T.padded)
    first = tl.min(slab, 0)
    group = tl.min(in_page, 0)
    rank = tl.full(channel.shape, -1, tl.int32)
    for n in range(T.boosts):
        rank = tl.where(channel == tl.load(boost_channels(meta, first, group, n, T)).to(tl.int32), n, rank)
    found = (rank >= 0) & (channel < (k + 1) * T.width)
    n = tl.maximum(rank, 0)[None, :]
    mask = inside[:, None] & found[None, :]
    words = tl.load(boost_words(meta, slab[:, None], in_page[:, None], n // IN_WORD, T), mask=mask, other=0)
    low = tl.where(mask, (words >> low_shift(n)) & LOW_MASK, 0).to(tl.float32)
    return low * tl.where(found, boost_steps(meta, first, group, channel, found, G, T), 0.0)[None, :]
