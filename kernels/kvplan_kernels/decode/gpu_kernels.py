"""Decode in Triton: attention of a few queries over pages, residual and sinks, cut along the sequence.

A program is one KV head of one sequence, one block of rows (queries x query heads of the KV head), and one split of the
tokens. It leaves its sums, their weight and their maximum in a workspace; a second kernel merges the splits. Scores are
in units of log2. The lengths are read on the device, so that a captured call serves any of them.

Matrices are [tokens or channels, rows]: tokens and channels fill the long side of a matrix product, so that few rows
leave little of it idle. A tile is BN tokens, handled as J sub-tiles where J tokens share a word: sub-tile j holds
tokens J * r + j.

Numbers that grow with the context are not specialized, here and in the other kernels: a one or a multiple of 16 among
them would be compiled for anew, which takes seconds in the midst of a run.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.tokens import paged_tokens
from kvplan_kernels.gpu.unpack import unpack, unpack_e4m3

LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_UNIT = tl.constexpr(1e-30)
FARTHEST = tl.constexpr(2147483647)
CENTRE = tl.constexpr(128.0)
"""The middle of 8-bit codes."""
HALF_WEIGHT = tl.constexpr(16384.0)
"""What a weight of 1 is in fp16, so that weights down to 2^-38 are not lost."""


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


# ---- outputs of one sub-tile


@triton.jit
def zero_planes(COUNT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return COUNT sums of matrices."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([PADDED, ROWS], tl.float32),)
    return found


@triton.jit
def zero_rows(COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Return COUNT sums a row."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros([ROWS], tl.float32),)
    return found


@triton.jit
def first_units(COUNT: tl.constexpr):
    """Return the units of operands before any is known."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.full([], LEAST_UNIT, tl.float32),)
    return found


@triton.jit
def weigh(acc, weight, value, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """Add weights, rounded to PARTS operands, times *value* [channels, tokens]; in fp16 times HALF_WEIGHT as well."""
    if TYPE == tl.float16:
        weight = weight * HALF_WEIGHT
    operand = narrow(weight, TYPE)
    acc = product(value, operand, acc)
    if PARTS == 2:
        acc = product(value, narrow(weight - widen(operand), TYPE), acc)
    return acc


@triton.jit
def add_finite(acc, weight, seen, value, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """Add weights times *value* [channels, tokens]: one that is not finite makes NaN of the rows that see its token."""
    finite = (tl.abs(widen(value)) < float("inf")).to(tl.int1)
    acc = weigh(acc, weight, narrow(tl.where(finite, widen(value), 0.0), TYPE), PARTS, TYPE)
    if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
        bad = tl.where(finite, 0.0, 1.0).to(tl.float16)
        reached = product(bad, seen.to(tl.float16), tl.zeros(acc.shape, tl.float32))
        acc = tl.where(reached > 0, float("nan"), acc)
    return acc


@triton.jit
def add_floats(
    acc, weight, seen, rows, inside, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, FLOAT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add weights times the 16-bit values at the pointers *rows*; what a row does not see may be NaN."""
    d = tl.arange(0, DP)[:, None]
    value = tl.load(rows[None, :] + d, mask=inside[None, :] & (d < D), other=0.0)
    if MASKED:
        acc = add_finite(acc, weight, seen, value, PARTS, FLOAT)
    else:
        acc = weigh(acc, weight, value, PARTS, FLOAT)
    return acc


@triton.jit
def without_poison(words, inside, seen):
    """Return *words* [words, tokens] of E4M3 codes without those of no token and of poisoned ones, and who sees these.

    All codes of a poisoned token are NaN, so the low byte of one word tells; that of any word does.
    """
    poisoned = tl.max((words & 0x7F).to(tl.int32), 0) == 0x7F
    sound = inside & (poisoned == 0)
    reached = tl.max((seen & poisoned[:, None]).to(tl.int32), 0) > 0
    return tl.where(sound[None, :], words, 0), reached


@triton.jit
def add_codes(
    acc, minima, units, shrink, weight, seen, inside, words, meta, slab, in_page, PLACE: tl.constexpr,
    G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Shrink the sums so far, and add weights times quantized values, their words given.

    The offset of the codes comes off tile by tile: in the same sums, or for 8 bits, whose offset is eight times as
    large, before them, together with half the range. So sums grow with the codes alone, and what a tensor core cuts off
    does not add up over a long split.

    Returns the sums by plane, and by group of channels the sums of weights times minima, and the unit.
    """
    BITS: tl.constexpr = T.bits
    PLANES: tl.constexpr = T.planes
    GROUPS: tl.constexpr = T.groups
    OFFSET: tl.constexpr = 128.0
    PER_GROUP: tl.constexpr = PLANES // GROUPS
    TYPE: tl.constexpr = operand_type(FLOAT, BITS)
    WHOLE: tl.constexpr = T.whole
    FLOATS: tl.constexpr = T.floats
    new_acc = ()
    if FLOATS:
        new_minima = minima
        new_units = units
        if MASKED:
            words, reached = without_poison(words, inside, seen)
        for k in tl.static_range(PLANES):
            part = weigh(acc[k] * shrink[None, :], weight, unpack_e4m3(words, BITS * k, ASM), 1, TYPE)
            if MASKED:
                part = tl.where(reached[None, :], float("nan"), part)
            new_acc = new_acc + (part,)
    elif WHOLE:
        new_minima = ()
        new_units = ()
        for g in tl.static_range(GROUPS):
            place = slab + g * G.block + in_page
            scale = tl.load(meta + T.scale + place).to(tl.float32)
            minimum = tl.load(meta + T.minimum + place).to(tl.float32)
            if BITS == 8:
                minimum += CENTRE * scale
            unit = units[g]
            factor = shrink
            if BITS == 8:  # fp16 holds what is between a little and 1
                unit = tl.maximum(unit, tl.max(tl.where(inside, scale, 0.0) if MASKED else scale, 0))
                factor = shrink * (units[g] / unit)
                scale = scale * (HALF_WEIGHT / unit)
            weighted = weight * scale[:, None]
            lifted = weight * minimum[:, None]
            if MASKED:  # a weight of 0 does not undo a NaN
                weighted = tl.where(seen, weighted, 0.0)
                lifted = tl.where(seen, lifted, 0.0)
            operand = narrow(weighted, TYPE)
            offset = narrow(tl.full([T.padded, operand.shape[0]], -OFFSET, tl.float32), TYPE)
            new_units = new_units + (unit,)
            new_minima = new_minima + (minima[g] * shrink + tl.sum(lifted, 0),)
            for j in tl.static_range(PER_GROUP):
                code = unpack(words, BITS * (PLACE * PLANES + g * PER_GROUP + j), BITS, ASM)
                before = acc[g * PER_GROUP + j] * factor[None, :]
                if BITS == 8:
                    code = code - (1024.0 + CENTRE)
                else:
                    before = product(offset, operand, before)
                new_acc = new_acc + (product(code, operand, before),)
    else:
        new_minima = minima
        new_units = units
        for k in tl.static_range(PLANES):
            value = dequantized(words, meta, slab, in_page, k, BITS * (PLACE * PLANES + k), G, T, False, TYPE, ASM)
            if MASKED:
                new_acc = new_acc + (add_finite(acc[k] * shrink[None, :], weight, seen, value, 1, TYPE),)
            else:
                new_acc = new_acc + (weigh(acc[k] * shrink[None, :], weight, value, 1, TYPE),)
    return new_acc, new_minima, new_units


# ---- one program


@triton.jit
def attend(
    acc, minima, units, maximum, total, lo, begin, hi, gap_at, gap, first, last, origin,
    query, valid, scale, softcap, codes, meta, source, table, slot, head,
    G: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, FLOAT: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
    PIPELINE: tl.constexpr,
):  # fmt: skip
    """Attend to tokens *begin* to *hi*, in tiles from *lo* on but for *gap* tokens from *gap_at* on; return the sums.

    KEYS and VALUES say where K and V are: "codes" or 16-bit "pages", "ring" or "sinks". Position *origin* is that of
    token 0. Rows attend to positions *first* to *last*; without MASKED all of them attend to all tokens.
    """
    K: tl.constexpr = G.keys
    V: tl.constexpr = G.values
    D: tl.constexpr = G.head_dim
    DP: tl.constexpr = G.padded
    KEY_CODES: tl.constexpr = KEYS == "codes"
    VALUE_CODES: tl.constexpr = VALUES == "codes"
    KEY_PLANES: tl.constexpr = K.planes if KEY_CODES else 1
    KEY_WIDTH: tl.constexpr = K.width if KEY_CODES else D
    KEY_PADDED: tl.constexpr = K.padded if KEY_CODES else DP
    KEY_BITS: tl.constexpr = K.bits if KEY_CODES else 16
    KEY_PLACES: tl.constexpr = K.tokens if KEY_CODES else 1
    VALUE_PLACES: tl.constexpr = V.tokens if VALUE_CODES else 1
    J: tl.constexpr = KEY_PLACES if KEY_PLACES > VALUE_PLACES else VALUE_PLACES
    ONE_PAGE: tl.constexpr = G.block % BN == 0
    PAGED: tl.constexpr = KEY_CODES or VALUE_CODES or KEYS == "pages" or VALUES == "pages"
    FOLD: tl.constexpr = KEY_CODES and K.channel
    TYPE: tl.constexpr = operand_type(FLOAT, KEY_BITS)
    unit = 1.0
    if TYPE == tl.float16:  # what may be out of fp16's range is brought into it
        unit = query_unit(query, valid, D, DP)
    planes = query_planes(query, unit, valid, KEY_PLANES, KEY_WIDTH, KEY_PADDED)
    operands = rounded(planes, TYPE, KEY_PLANES)
    low = rests(planes, operands, TYPE, KEY_PLANES)
    sums = row_sums(planes, KEY_PLANES)
    operand_sums = sums if PARTS == 2 else row_sums(operands, KEY_PLANES)
    factor = unit * scale
    r = tl.arange(0, BN // J)
    for tile in tl.range(lo, hi - gap, BN, num_stages=PIPELINE):
        start = tile
        if MASKED:
            start = tl.where(tile >= gap_at, tile + gap, tile)
        token = start + J * r
        slab = tl.zeros([1], tl.int64)
        if PAGED:
            slab = slabs(table, token, start, hi, head, G, ONE_PAGE)
        in_page = start % G.block + J * r if ONE_PAGE else token % G.block
        if FOLD:
            operands, low, operand_sums, fold_unit, bias = fold_channels(
                planes, meta, slab, start % G.block, factor, G, K, ROWS, FLOAT
            )
        scores = ()
        most = maximum
        for j in tl.static_range(J):
            at = token + j
            inside = (at >= begin) & (at < hi)
            if KEY_CODES:
                if j == 0 or KEY_PLACES < J:
                    words = word_tile(codes, slab, (in_page + j) // KEY_PLACES, K, True)
                score = code_scores(
                    words, operands, low, sums, operand_sums, meta, slab, in_page + j, factor,
                    j if KEY_PLACES == J else 0, G, K, ROWS, 2 if FOLD else PARTS, FLOAT, ASM,
                )  # fmt: skip
                if FOLD:
                    score = score * fold_unit + bias[None, :]
            else:
                rows = float_rows(source, slab, at, slot, head, G, K, KEYS)
                score = float_scores(operands, low, rows, inside, ROWS, PARTS, D, DP) * factor
            score = capped(score, softcap, CAPPED)
            if MASKED:
                score = tl.where(sight(at, origin, inside, first, last), score, float("-inf"))
            most = tl.maximum(most, tl.max(score, 0))
            scores = scores + (score,)
        shrink = tl.exp2(maximum - most)
        total = total * shrink
        maximum = most
        for j in tl.static_range(J):
            at = token + j
            inside = (at >= begin) & (at < hi)
            seen = sight(at, origin, inside, first, last) if MASKED else tl.full([1, 1], 1, tl.int1)
            weight = tl.exp2(scores[j] - maximum[None, :])
            total += tl.sum(weight, 0)
            if j > 0:
                shrink = tl.full([ROWS], 1.0, tl.float32)
            if VALUE_CODES:
                if j == 0 or VALUE_PLACES < J:
                    value_words = word_tile(codes, slab, (in_page + j) // VALUE_PLACES, V, False)
                acc, minima, units = add_codes(
                    acc, minima, units, shrink, weight, seen, inside, value_words, meta, slab, in_page + j,
                    j if VALUE_PLACES == J else 0, G, V, FLOAT, ASM, MASKED,
                )  # fmt: skip
            else:
                value_rows = float_rows(source, slab, at, slot, head, G, V, VALUES)
                # The few 16-bit tokens beside quantized ones must not cost as much as quantizing does.
                WEIGHT_PARTS: tl.constexpr = 1 if VALUES == "pages" else 2
                before = acc[0] * shrink[None, :]
                acc = (add_floats(before, weight, seen, value_rows, inside, D, DP, WEIGHT_PARTS, FLOAT, MASKED),)
    return acc, minima, units, maximum, total


@triton.jit
def store_part(
    acc, minima, units, maximum, total, outputs, weights, maxima, part, held, G: tl.constexpr,
    CODES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store what a program summed at the workspace's rows *part*: outputs, their weight and the maximum."""
    V: tl.constexpr = G.values
    D: tl.constexpr = G.head_dim
    PLANES: tl.constexpr = V.planes if CODES else 1
    WIDTH: tl.constexpr = V.width if CODES else D
    PADDED: tl.constexpr = V.padded if CODES else G.padded
    WHOLE: tl.constexpr = CODES and V.whole
    PER_GROUP: tl.constexpr = V.planes // V.groups if WHOLE else 1
    BITS: tl.constexpr = V.bits if CODES else 16
    TYPE: tl.constexpr = operand_type(FLOAT, BITS)
    i = tl.arange(0, PADDED)[:, None]
    for k in tl.static_range(PLANES):
        out = acc[k]
        if TYPE == tl.float16:
            out = out * (1.0 / HALF_WEIGHT)
        if WHOLE:
            unit = units[k // PER_GROUP] if V.bits == 8 else 1.0
            out = out * unit + minima[k // PER_GROUP][None, :]
        tl.store(outputs + part[None, :] * D + k * WIDTH + i, out, mask=held[None, :] & (i < WIDTH))
    tl.store(weights + part, total, mask=held)
    tl.store(maxima + part, maximum, mask=held)


@triton.jit(do_not_specialize=("table_width", "splits", "all_splits"))
def decode_split(
    query, codes, meta, pages, ring, sinks, block_tables, slots, lengths, positions, outputs, weights, maxima,
    query_stride_sequence, query_stride_query, query_stride_head, table_width, queries, ratio, rows, window, scale,
    softcap, splits, all_splits,
    G: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BN_FLOAT: tl.constexpr, PARTS: tl.constexpr,
    CODE_PARTS: tl.constexpr, FLOAT: tl.constexpr, CAPPED: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    MIDDLE: tl.constexpr, ASM: tl.constexpr, PIPELINE: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one KV head of one sequence.

    Splits 0 to *splits* - 1 share the tokens whose K and V are both in pages. Where MIDDLE, the next takes those of
    which only K is. The last takes sinks and residual, where the format has any.
    """
    V: tl.constexpr = G.values
    KEYS: tl.constexpr = "codes" if G.keys.bits < 16 else "pages"
    VALUES: tl.constexpr = "codes" if V.bits < 16 else "pages"
    pid = tl.program_id(0)
    split = tl.program_id(1)
    sequence = pid // G.kv_heads
    head = pid % G.kv_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    length = tl.load(lengths + sequence)
    slot = tl.load(slots + sequence)
    table = block_tables + sequence.to(tl.int64) * table_width
    if HAS_POSITIONS:
        position = tl.load(positions + sequence * queries + row // ratio, mask=valid, other=-1)
    else:
        position = length - queries + row // ratio
    last = tl.minimum(position + 1, length)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    blind = (first >= last) | (row >= rows)
    first = tl.where(blind, FARTHEST, first)
    last = tl.where(blind, 0, last)
    at = query + sequence.to(tl.int64) * query_stride_sequence + (row // ratio).to(tl.int64) * query_stride_query
    at += (head * ratio + row % ratio) * query_stride_head

    sink_tokens = tl.minimum(length, G.sinks)
    tokens = length - sink_tokens
    key_paged = paged_tokens(tokens, G.keys)
    both = tl.minimum(key_paged, paged_tokens(tokens, V))
    # What no row of the program sees is not looked at.
    seen_first = tl.maximum(tl.min(first, 0) - sink_tokens, 0)
    seen_last = tl.maximum(tl.max(last, 0) - sink_tokens, 0)

    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    part = (pid.to(tl.int64) * all_splits + split) * rows + row
    if split < splits:
        acc = zero_planes(V.planes, V.padded, ROWS)
        minima = zero_rows(V.groups, ROWS)
        units = first_units(V.groups)
        first_tile = tl.minimum(seen_first, both) // BN
        tiles = tl.cdiv(tl.minimum(seen_last, both), BN) - first_tile
        share = tl.cdiv(tl.maximum(tiles, 0), splits)
        lo = (first_tile + split * share) * BN
        hi = tl.minimum(tl.minimum(lo + share * BN, both), seen_last)
        # Tiles that all rows see whole, then those at the edges.
        inner = tl.maximum(tl.cdiv(tl.max(tl.where(valid, first, 0), 0) - sink_tokens, BN) * BN, lo)
        outer = tl.minimum(tl.min(tl.where(valid, last, FARTHEST), 0) - sink_tokens, hi) // BN * BN
        gap = tl.maximum(outer - inner, 0)
        acc, minima, units, maximum, total = attend(
            acc, minima, units, maximum, total, inner, inner, inner + gap, 0, 0, first, last, sink_tokens, at,
            valid, scale, softcap, codes, meta, pages, table, slot, head, G, KEYS, VALUES, ROWS, BN, CODE_PARTS, FLOAT,
            CAPPED, ASM, False, PIPELINE,
        )  # fmt: skip
        acc, minima, units, maximum, total = attend(
            acc, minima, units, maximum, total, lo, lo, hi, inner, gap, first, last, sink_tokens, at, valid,
            scale, softcap, codes, meta, pages, table, slot, head, G, KEYS, VALUES, ROWS, BN, CODE_PARTS, FLOAT, CAPPED,
            ASM, True, 1,
        )  # fmt: skip
        store_part(
            acc, minima, units, maximum, total, outputs, weights, maxima, part, valid, G, VALUES == "codes",
            FLOAT,
        )  # fmt: skip
    else:
        rest = zero_planes(1, G.padded, ROWS)
        none = zero_rows(1, ROWS)
        if MIDDLE:
            if split == splits:
                rest, none, none, maximum, total = attend(
                    rest, none, none, maximum, total, both // BN * BN, both, key_paged, 0, 0, first, last,
                    sink_tokens, at, valid, scale, softcap, codes, meta, ring, table, slot, head, G, KEYS, "ring", ROWS,
                    BN, CODE_PARTS, FLOAT, CAPPED, ASM, True, 1,
                )  # fmt: skip
        if split == all_splits - 1:
            rest, none, none, maximum, total = attend(
                rest, none, none, maximum, total, 0, 0, sink_tokens, 0, 0, first, last, 0, at, valid, scale,
                softcap, codes, meta, sinks, table, slot, head, G, "sinks", "sinks", ROWS, BN_FLOAT, PARTS, FLOAT,
                CAPPED, ASM, True, 1,
            )  # fmt: skip
            start = tl.maximum(key_paged, seen_first)
            rest, none, none, maximum, total = attend(
                rest, none, none, maximum, total, start, start, tl.minimum(tokens, seen_last), 0, 0, first, last,
                sink_tokens, at, valid, scale, softcap, codes, meta, ring, table, slot, head, G, "ring", "ring", ROWS,
                BN_FLOAT, PARTS, FLOAT, CAPPED, ASM, True, 1,
            )  # fmt: skip
        store_part(rest, none, none, maximum, total, outputs, weights, maxima, part, valid, G, False, FLOAT)


@triton.jit(do_not_specialize=("splits",))
def decode_merge(
    outputs, weights, maxima, sink_logits, result, row_maxima, row_totals, queries, ratio, rows, splits,
    G: tl.constexpr, CHUNK: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row: each weighs by how far its maximum is below the greatest.

    The row's maximum and total are left for whoever asks what weight a token received.
    """
    D: tl.constexpr = G.head_dim
    DP: tl.constexpr = G.padded
    row = tl.program_id(0)
    pid = tl.program_id(1)
    sequence = pid // G.kv_heads
    query_head = (pid % G.kv_heads) * ratio + row % ratio
    most = tl.full([], LOWEST, tl.float32)
    extra = tl.zeros([], tl.float32)
    logit = tl.full([], LOWEST, tl.float32)
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + query_head) * LOG2_E
        most = tl.maximum(most, logit)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        part = (pid.to(tl.int64) * splits + s) * rows + row
        most = tl.maximum(most, tl.max(tl.load(maxima + part, mask=s < splits, other=LOWEST), 0))
    if HAS_SINK_LOGITS:
        extra = tl.exp2(logit - most)
    seen = tl.zeros([], tl.float32)
    total = extra
    d = tl.arange(0, DP)
    out = tl.zeros([DP], tl.float32)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        part = (pid.to(tl.int64) * splits + s) * rows + row
        factor = tl.exp2(tl.load(maxima + part, mask=s < splits, other=LOWEST) - most)
        weight = tl.load(weights + part, mask=s < splits, other=0.0)
        seen += tl.sum(weight, 0)
        total += tl.sum(weight * factor, 0)
        mask = (s < splits)[:, None] & (d < D)[None, :]
        parts = tl.load(outputs + part[:, None] * D + d[None, :], mask=mask, other=0.0)
        out += tl.sum(parts * factor[:, None], 0)
    out = out / tl.where(total == 0, 1.0, total)
    place = ((sequence.to(tl.int64) * queries + row // ratio) * (G.kv_heads * ratio) + query_head) * D
    tl.store(result + place + d, tl.where(seen == 0, 0.0, out), mask=d < D)
    tl.store(row_maxima + pid * rows + row, most)
    tl.store(row_totals + pid * rows + row, total)
