"""Scores of one sub-tile of tokens, in Triton: queries as operands, where the tokens lie, products with their keys."""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.numbers import level_minimum, level_scale, number_place
from kvplan_kernels.gpu.unpack import is_signed, offset_of, plane_floats, plane_levels

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_UNIT = tl.constexpr(1e-30)


@triton.constexpr_function
def operand_type(float_type, tensor, codes):
    """Return the type in which a matrix product takes the codes of *tensor*, or its 16-bit tokens."""
    return float_type if not codes else tl.float16 if tensor.half else tl.bfloat16


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
        row = slab + T.low.start + (token % G.block) * G.head_dim
    elif WHERE == "ring":
        row = slot.to(tl.int64) * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
    else:
        row = slot.to(tl.int64) * G.sink + head * G.sink_head + T.sinks + token * G.head_dim
    return source + row


@triton.jit
def word_tiles(codes, slab, row, PLANE: tl.constexpr, T: tl.constexpr, KEYS: tl.constexpr):
    """Return the words of the rows *row* of a plane of codes, by slice: [rows, words] of K, [words, rows] of V."""
    WIDTH: tl.constexpr = T.piece
    PADDED: tl.constexpr = T.padded_piece
    SLICES: tl.constexpr = T.slices
    i = tl.arange(0, PADDED)
    found = ()
    for n in tl.static_range(SLICES):
        first = slab + (PLANE.start + n * WIDTH) + row * T.width
        at = first[:, None] + i[None, :] if KEYS else first[None, :] + i[:, None]
        if WIDTH == PADDED:
            words = tl.load(codes + at)
        else:
            mask = i[None, :] < WIDTH if KEYS else i[:, None] < WIDTH
            words = tl.load(codes + at, mask=mask, other=0)
        found = found + (words,)
    return found


@triton.jit
def dequantized(
    words, high, meta, tables, slab, in_page, inside, k: tl.constexpr, PLACE: tl.constexpr, G: tl.constexpr,
    T: tl.constexpr, KEYS: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return one plane's values over their unit, and the unit: where codes are floats, or the plane has several groups.

    The unit is 1 where values are in the operands' range as they are.
    """
    unit = 1.0
    if len(T.floats) > 0:
        found = plane_floats(words[0], k, T, ASM)
    else:
        levels = widen(plane_levels(words[0], high[0], tables, PLACE, k, T, ASM)) - offset_of(T)
        channel = tl.minimum(k * T.width + tl.arange(0, T.padded), G.head_dim - 1)
        at = number_place(slab, T) + (in_page // T.group * G.head_dim if T.channel else in_page)
        column = channel if T.channel else channel // T.group * G.block
        place = at[:, None] + column[None, :] if KEYS else column[:, None] + at[None, :]
        scale = level_scale(meta, place, None, T)
        value = levels * scale + level_minimum(meta, place, None, scale, T)
        if T.half and T.wide:
            value = tl.where(inside[:, None] if KEYS else inside[None, :], value, 0.0)
            unit = tl.maximum(tl.max(tl.max(tl.abs(value), 1), 0), LEAST_UNIT)
            value = value * (1.0 / unit)
        found = narrow(value, TYPE)
    return found, unit


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
    words, high, operands, low, sums, operand_sums, meta, tables, slab, in_page, inside, factor, PLACE: tl.constexpr,
    G: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return *factor* times the scores of quantized keys, their words by slice given; PLACE is the token within them.

    With a scale per channel, *operands* hold it, and the caller applies the factor.
    """
    PIECES: tl.constexpr = T.pieces
    SLICES: tl.constexpr = T.slices
    TYPE: tl.constexpr = operand_type(FLOAT, T, True)
    WHOLE: tl.constexpr = T.whole
    GROUPED: tl.constexpr = T.groups > 1
    CHANNEL: tl.constexpr = T.channel
    OFFSET: tl.constexpr = offset_of(T)
    SIGNED: tl.constexpr = is_signed(T)
    WIDE: tl.constexpr = T.half and T.wide
    score = tl.zeros([words[0].shape[0], ROWS], tl.float32)
    if not WHOLE:
        for k in tl.static_range(PIECES):
            key, unit = dequantized(words, high, meta, tables, slab, in_page, inside, k, PLACE, G, T, True, TYPE, ASM)
            part = tl.zeros(score.shape, tl.float32) if WIDE else score
            part = product(key, operands[k], part)
            if PARTS == 2:
                part = product(key, low[k], part)
            score = score + part * unit if WIDE else part
        score = score * factor
    elif GROUPED:
        for k in tl.static_range(PIECES):
            code = plane_levels(words[k % SLICES], high[k % SLICES], tables, PLACE, k // SLICES, T, ASM)
            part = product(code, operands[k], tl.zeros(score.shape, tl.float32))
            if PARTS == 2:
                part = product(code, low[k], part)
            place = number_place(slab, T) + (k * T.piece // T.group) * G.block + in_page
            if not SIGNED:
                part = part - (OFFSET * operand_sums[k])[None, :]
            score += with_minimum(part, sums[k], meta, place, factor, T)
    else:
        total = operand_sums[0]
        true = sums[0]
        for k in tl.static_range(PIECES):
            code = plane_levels(words[0], high[0], tables, PLACE, k, T, ASM)
            score = product(code, operands[k], score)
            if PARTS == 2:
                score = product(code, low[k], score)
            if k > 0:
                total += operand_sums[k]
                true += sums[k]
        if not SIGNED:
            score = score - (OFFSET * total)[None, :]
        if not CHANNEL:
            score = with_minimum(score, true, meta, number_place(slab, T) + in_page, factor, T)
    return score


@triton.jit
def with_minimum(score, sums, meta, place, factor, T: tl.constexpr):
    """Return *factor* times the scores of keys from those of their levels; *sums* are those of the queries."""
    scale = level_scale(meta, place, None, T)
    if is_signed(T):  # counted from the centre already
        score = score * (scale * factor)[:, None]
    elif T.minimum >= 0:
        minimum = level_minimum(meta, place, None, scale, T) * factor
        score = score * (scale * factor)[:, None] + minimum[:, None] * sums[None, :]
    else:
        score = (score - (T.centre * sums)[None, :]) * (scale * factor)[:, None]
    return score


@triton.jit
def fold_channels(
    planes, meta, slab, in_page, factor, G: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, FLOAT: tl.constexpr
):
    """Fold the per-channel scales of a tile's group into the queries.

    Returns the operands, what rounding them took as operands of their own, their sums and unit, and what the minima add
    to a score. All channels of a row may be rounded the same way, so one operand would not be enough.
    """
    PLANES: tl.constexpr = T.planes
    WIDTH: tl.constexpr = T.width
    TYPE: tl.constexpr = operand_type(FLOAT, T, True)
    i = tl.arange(0, T.padded)
    first = number_place(slab, T) + (in_page // T.group) * G.head_dim
    scaled = ()
    bias = tl.zeros([ROWS], tl.float32)
    unit = 1.0
    most = tl.zeros([ROWS], tl.float32)
    for k in tl.static_range(PLANES):
        scale = level_scale(meta, first + k * WIDTH + i, i < WIDTH, T)
        minimum = level_minimum(meta, first + k * WIDTH + i, i < WIDTH, scale, T)
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
