"""Scores of one sub-tile of tokens, in Triton: queries as operands, where the tokens lie, products with their keys."""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.unpack import unpack, unpack_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_UNIT = tl.constexpr(1e-30)


@triton.constexpr_function
def operand_type(float_type, bits):
    """Return the type in which a matrix product takes what has *bits* bits in the cache."""
    return float_type if bits == 16 else tl.float16 if bits == 8 else tl.bfloat16


# ---- queries


@triton.jit
def query_unit(query, valid, D: tl.constexpr, DP: tl.constexpr):
    """Return the power of two that the largest magnitude of all rows has, at least a little.

    fp16 operands are divided by it: nothing but what lies far below the largest loses a bit.
    """
    d = tl.arange(0, DP)[:, None]
    x = widen(tl.load(query[None, :] + d, mask=valid[None, :] & (d < D), other=0.0))
    most = tl.maximum(tl.max(tl.max(tl.abs(x), 0), 0), LEAST_UNIT)
    return (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def query_planes(query, unit, valid, PLANES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the queries divided by *unit*, float32 [PADDED, rows] for each plane of channels."""
    found = ()
    i = tl.arange(0, PADDED)[:, None]
    for k in tl.static_range(PLANES):
        mask = valid[None, :] & (i < WIDTH)
        x = widen(tl.load(query[None, :] + k * WIDTH + i, mask=mask, other=0.0))
        found = found + (x / unit,)
    return found


@triton.jit
def rounded(planes, TYPE: tl.constexpr, COUNT: tl.constexpr):
    """Return *planes* rounded to TYPE."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (narrow(planes[k], TYPE),)
    return found


@triton.jit
def rests(planes, operands, TYPE: tl.constexpr, COUNT: tl.constexpr):
    """Return what rounding to TYPE took from *planes*, in that type."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (narrow(planes[k] - widen(operands[k]), TYPE),)
    return found


@triton.jit
def row_sums(planes, COUNT: tl.constexpr):
    """Return the sum of each row over each plane, float32 [rows]."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.sum(widen(planes[k]), 0),)
    return found


# ---- where a tile's tokens lie


@triton.jit
def slabs(table, token, start, limit, head, G: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Return the item at which the slab of each of *token* begins, int64; one for all of them where ONE_PAGE."""
    if ONE_PAGE:
        page = tl.load(table + start // G.block)
    else:
        page = tl.load(table + token // G.block, mask=token < limit, other=0)
    return page.to(tl.int64) * G.page + head * G.slab


@triton.jit
def float_rows(source, slab, token, slot, head, G: tl.constexpr, T: tl.constexpr, WHERE: tl.constexpr):
    """Return the pointers to the 16-bit rows of *token* in pages, residual or sinks."""
    if WHERE == "pages":
        row = slab + T.codes + (token % G.block) * G.head_dim
    elif WHERE == "ring":
        row = slot.to(tl.int64) * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
    else:
        row = slot.to(tl.int64) * G.sink + head * G.sink_head + T.sinks + token * G.head_dim
    return source + row


@triton.jit
def word_tile(codes, slab, row, T: tl.constexpr, KEYS: tl.constexpr):
    """Return the words of the rows *row*: [rows, words] of K, [words, rows] of V."""
    WIDTH: tl.constexpr = T.width
    PADDED: tl.constexpr = T.padded
    i = tl.arange(0, PADDED)
    first = slab + T.codes + row * WIDTH
    at = first[:, None] + i[None, :] if KEYS else first[None, :] + i[:, None]
    if WIDTH == PADDED:
        words = tl.load(codes + at)
    else:
        mask = i[None, :] < WIDTH if KEYS else i[:, None] < WIDTH
        words = tl.load(codes + at, mask=mask, other=0)
    return words


@triton.jit
def dequantized(
    words, meta, slab, in_page, k, SHIFT: tl.constexpr, G: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr,
    TYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return one plane's values, where codes are floats or its channels belong to several groups."""
    BITS: tl.constexpr = T.bits
    FLOATS: tl.constexpr = T.floats
    OFFSET: tl.constexpr = 1024.0 if BITS == 8 else 128.0
    if FLOATS:
        found = unpack_e4m3(words, SHIFT, ASM)
    else:
        codes = widen(unpack(words, SHIFT, BITS, ASM)) - OFFSET
        channel = k * T.width + tl.arange(0, T.padded)
        group = tl.minimum(channel // T.group, T.groups - 1)
        at = slab + in_page
        place = at[:, None] + group[None, :] * G.block if KEYS else group[:, None] * G.block + at[None, :]
        found = narrow(codes * tl.load(meta + T.scale + place) + tl.load(meta + T.minimum + place), TYPE)
    return found


# ---- scores of one sub-tile


@triton.jit
def float_scores(
    operands, low, rows, inside, ROWS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Return the 16-bit keys at the pointers *rows* times operands, float32 [tokens, rows of queries]."""
    d = tl.arange(0, DP)[None, :]
    key = tl.load(rows[:, None] + d, mask=inside[:, None] & (d < D), other=0.0)
    score = product(key, operands[0], tl.zeros([rows.shape[0], ROWS], tl.float32))
    if PARTS == 2:
        score = product(key, low[0], score)
    return score


@triton.jit
def code_scores(
    words, operands, low, sums, operand_sums, meta, slab, in_page, factor, PLACE: tl.constexpr, G: tl.constexpr,
    T: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return *factor* times the scores of quantized keys, their words given; PLACE is the token within a word.

    With a scale per channel, *operands* hold it, and the caller applies the factor.
    """
    BITS: tl.constexpr = T.bits
    PLANES: tl.constexpr = T.planes
    TYPE: tl.constexpr = operand_type(FLOAT, BITS)
    WHOLE: tl.constexpr = T.whole
    GROUPED: tl.constexpr = T.groups > 1
    CHANNEL: tl.constexpr = T.channel
    OFFSET: tl.constexpr = 1024.0 if BITS == 8 else 128.0
    score = tl.zeros([words.shape[0], ROWS], tl.float32)
    if not WHOLE:
        for k in tl.static_range(PLANES):
            key = dequantized(words, meta, slab, in_page, k, BITS * (PLACE * PLANES + k), G, T, True, TYPE, ASM)
            score = product(key, operands[k], score)
            if PARTS == 2:
                score = product(key, low[k], score)
        score = score * factor
    elif GROUPED:
        for k in tl.static_range(PLANES):
            code = unpack(words, BITS * (PLACE * PLANES + k), BITS, ASM)
            part = product(code, operands[k], tl.zeros([words.shape[0], ROWS], tl.float32))
            if PARTS == 2:
                part = product(code, low[k], part)
            place = slab + (k * T.width // T.group) * G.block + in_page
            scale = tl.load(meta + T.scale + place).to(tl.float32) * factor
            minimum = tl.load(meta + T.minimum + place).to(tl.float32) * factor
            part = part - (OFFSET * operand_sums[k])[None, :]
            score += part * scale[:, None] + minimum[:, None] * sums[k][None, :]
    else:
        total = operand_sums[0]
        true = sums[0]
        for k in tl.static_range(PLANES):
            code = unpack(words, BITS * (PLACE * PLANES + k), BITS, ASM)
            score = product(code, operands[k], score)
            if PARTS == 2:
                score = product(code, low[k], score)
            if k > 0:
                total += operand_sums[k]
                true += sums[k]
        score = score - (OFFSET * total)[None, :]
        if not CHANNEL:
            scale = tl.load(meta + T.scale + slab + in_page).to(tl.float32) * factor
            minimum = tl.load(meta + T.minimum + slab + in_page).to(tl.float32) * factor
            score = score * scale[:, None] + minimum[:, None] * true[None, :]
    return score


@triton.jit
def fold_channels(
    planes, meta, slab, in_page, factor, G: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, FLOAT: tl.constexpr
):
    """Fold the per-channel scales of a tile's group into the queries.

    Returns the operands, what rounding them took as operands of their own, their sums and unit, and what the minima add
    to a score. All channels of a row may be rounded the same way, so one operand would not be enough.
    """
    BITS: tl.constexpr = T.bits
    PLANES: tl.constexpr = T.planes
    WIDTH: tl.constexpr = T.width
    TYPE: tl.constexpr = operand_type(FLOAT, BITS)
    i = tl.arange(0, T.padded)
    first = slab + (in_page // T.group) * G.head_dim
    scaled = ()
    bias = tl.zeros([ROWS], tl.float32)
    unit = 1.0
    most = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(PLANES):
        scale = tl.load(meta + T.scale + first + k * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        minimum = tl.load(meta + T.minimum + first + k * WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        x = planes[k] * scale[:, None]
        bias += tl.sum(planes[k] * minimum[:, None], 0)
        if TYPE == tl.float16:
            most = tl.maximum(most, tl.max(tl.abs(x), 0))
        scaled = scaled + (x,)
    if TYPE == tl.float16:
        unit = tl.maximum(tl.max(most, 0), LEAST_UNIT)
    operands = ()
    low = ()
    sums = ()
    for k in tl.static_range(PLANES):
        x = scaled[k] / unit
        operand = narrow(x, TYPE)
        operands = operands + (operand,)
        low = low + (narrow(x - widen(operand), TYPE),)
        sums = sums + (tl.sum(x, 0),)
    return operands, low, sums, unit * factor, bias * factor


@triton.jit
def capped(score, softcap, CAPPED: tl.constexpr):
    """Return scores in units of log2; with a softcap they come as the argument of its tangent."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is 1 where the power overflows.
        score = softcap * LOG2_E * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2_E)) + 1.0))
    return score


@triton.jit
def sight(at, origin, inside, first, last):
    """Return which tokens *at* each row sees, [tokens, rows]."""
    position = (origin + at)[:, None]
    return (position >= first[None, :]) & (position < last[None, :]) & inside[:, None]
