"""Outputs of one sub-tile of tokens, in Triton: weights times values, added to what came before."""

import triton
import triton.language as tl

from kvplan_kernels.decode.scores_gpu_kernels import LEAST_UNIT, dequantized, operand_type
from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.numbers import level_minimum, level_scale, number_place
from kvplan_kernels.gpu.outliers import outlier_plane
from kvplan_kernels.gpu.unpack import offset_of, plane_floats, plane_levels

HALF_WEIGHT = tl.constexpr(16384.0)
"""What a weight of 1 is in fp16, so that weights down to 2^-38 are not lost."""


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
def add_outliers(
    acc, shrink, weight, meta, slab, in_page, inside, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr
):
    """Return the sums of weights times outliers so far, shrunk, with those of more tokens; nothing without outliers."""
    PIECES: tl.constexpr = T.pieces
    found = ()
    if T.outliers > 0:
        for k in tl.static_range(PIECES):
            rest = outlier_plane(meta, slab, in_page, inside, k * T.piece, T.piece, T.padded_piece, G, T, FLOAT)
            before = acc[PIECES + k] * shrink[None, :]
            found = found + (weigh(before, weight, narrow(rest, FLOAT), 2, FLOAT),)
    return found


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
    """Return *words* [words, tokens] of floats without those of no token and of poisoned ones, and who sees these.

    All codes of a poisoned token are NaN, so the low byte of one word tells; that of any word does.
    """
    poisoned = tl.max((words & 0x7F).to(tl.int32), 0) == 0x7F
    sound = inside & (poisoned == 0)
    reached = tl.max((seen & poisoned[:, None]).to(tl.int32), 0) > 0
    return tl.where(sound[None, :], words, 0), reached


@triton.constexpr_function
def is_lifted(tensor) -> bool:
    """Return whether values have something beside the scale times their level, counted from the middle."""
    return tensor.minimum >= 0 or tensor.middle != tensor.centre


@triton.jit
def add_codes(
    acc, minima, units, shrink, weight, seen, inside, words, high, meta, tables, slab, in_page, PLACE: tl.constexpr,
    G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Shrink the sums so far, and add weights times quantized values, their words by slice given.

    The offset of the levels comes off tile by tile, together with the middle: in the same sums, or in fp16, where the
    offset is eight times as large, before them. So sums grow with the levels alone, and what a tensor core cuts off
    does not add up over a long split.

    Returns the sums by plane, and by group of channels the sums of weights times minima, and the unit.
    """
    PIECES: tl.constexpr = T.pieces
    SLICES: tl.constexpr = T.slices
    GROUPS: tl.constexpr = T.groups
    HALF: tl.constexpr = T.half
    MIDDLE: tl.constexpr = T.middle
    OFFSET: tl.constexpr = offset_of(T) + T.middle
    HAS_MINIMUM: tl.constexpr = is_lifted(T)
    SIGNED: tl.constexpr = T.fit == "q5_0" or T.fit == "iq4_nl"  # scales may be negative
    PER_GROUP: tl.constexpr = PIECES // GROUPS
    TYPE: tl.constexpr = operand_type(FLOAT, T, True)
    WHOLE: tl.constexpr = T.whole
    FLOATS: tl.constexpr = len(T.floats) > 0
    new_acc = ()
    if FLOATS:
        new_minima = minima
        new_units = units
        if MASKED:
            sound, reached = without_poison(words[0], inside, seen)
            words = (sound,)
        for k in tl.static_range(PIECES):
            part = weigh(acc[k] * shrink[None, :], weight, plane_floats(words[0], k, T, ASM), 1, TYPE)
            if MASKED:
                part = tl.where(reached[None, :], float("nan"), part)
            new_acc = new_acc + (part,)
    elif WHOLE:
        new_minima = ()
        new_units = ()
        for g in tl.static_range(GROUPS):
            place = number_place(slab, T) + g * G.block + in_page
            scale = level_scale(meta, place, None, T)
            if HAS_MINIMUM:
                minimum = level_minimum(meta, place, None, scale, T)
                if MIDDLE > 0:
                    minimum += MIDDLE * scale
            unit = units[g]
            factor = shrink
            if HALF:  # fp16 holds what is between a little and 1
                size = tl.abs(scale) if SIGNED else scale
                unit = tl.maximum(unit, tl.max(tl.where(inside, size, 0.0) if MASKED else size, 0))
                factor = shrink * (units[g] / unit)
                scale = scale * (HALF_WEIGHT / unit)
            weighted = weight * scale[:, None]
            if HAS_MINIMUM:
                lifted = weight * minimum[:, None]
            if MASKED:  # a weight of 0 does not undo a NaN
                weighted = tl.where(seen, weighted, 0.0)
                if HAS_MINIMUM:
                    lifted = tl.where(seen, lifted, 0.0)
            operand = narrow(weighted, TYPE)
            offset = narrow(tl.full([T.padded_piece, operand.shape[0]], -OFFSET, tl.float32), TYPE)
            new_units = new_units + (unit,)
            lifts = minima[g]
            if HAS_MINIMUM:
                lifts = lifts * shrink + tl.sum(lifted, 0)
            new_minima = new_minima + (lifts,)
            for j in tl.static_range(PER_GROUP):
                slice_words, slice_high = words[(g * PER_GROUP + j) % SLICES], high[(g * PER_GROUP + j) % SLICES]
                code = plane_levels(slice_words, slice_high, tables, PLACE, (g * PER_GROUP + j) // SLICES, T, ASM)
                before = acc[g * PER_GROUP + j] * factor[None, :]
                if HALF:
                    code = code - OFFSET
                elif OFFSET != 0:
                    before = product(offset, operand, before)
                new_acc = new_acc + (product(code, operand, before),)
    else:
        new_minima = minima
        new_units = units
        for k in tl.static_range(PIECES):
            value, unit = dequantized(
                words, high, meta, tables, slab, in_page, inside, k, PLACE, G, T, False, TYPE, ASM
            )
            before = acc[k] * shrink[None, :]
            part = tl.zeros(before.shape, tl.float32) if HALF and T.wide else before
            if MASKED:
                part = add_finite(part, weight, seen, value, 1, TYPE)
            else:
                part = weigh(part, weight, value, 1, TYPE)
            new_acc = new_acc + (before + part * unit if HALF and T.wide else part,)
    return new_acc, new_minima, new_units
