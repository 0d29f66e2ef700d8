"""Outputs of one sub-tile of tokens, in Triton: weights times values, added to what came before."""

import triton
import triton.language as tl

from kvplan_kernels.decode.scores_gpu_kernels import LEAST_UNIT, dequantized, operand_type
from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.unpack import unpack, unpack_e4m3

CENTRE = tl.constexpr(128.0)
"""The middle of 8-bit codes."""
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
