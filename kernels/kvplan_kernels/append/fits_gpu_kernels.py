"""How groups are coded, in Triton: what `fits` defines, from a group's extremes or from its elements one by one.

All arithmetic is float32, step by step as the definition has it; the caller keeps the compiler from fusing steps.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.boosts import STEP
from kvplan_kernels.gpu.floats import narrow, widen
from kvplan_kernels.gpu.numbers import number_value, stored_number
from kvplan_kernels.gpu.unpack import learned_level

NEAREST = tl.constexpr(12582912.0)
"""1.5 x 2^23: added to a float32 under 2^22 and taken off again, it leaves the nearest integer, ties to even."""


@triton.constexpr_function
def in_order(tensor) -> bool:
    """Return whether the fit looks at elements one by one, from the first to the last."""
    return tensor.fit in ("norm", "q5_0", "iq4_nl")


@triton.constexpr_function
def has_minimum(tensor) -> bool:
    """Return whether groups have a minimum."""
    return tensor.minimum >= 0


@triton.constexpr_function
def ranks(tensor) -> int:
    """Return how many different levels a table has; 0 where codes are their own levels."""
    return len(tensor.ranked)


@triton.constexpr_function
def code_of_rank(tensor, rank: int) -> int:
    """Return a code, the lowest level's first."""
    return tensor.ranked[rank]


@triton.constexpr_function
def height_of_rank(tensor, rank: int) -> float:
    """Return a level counted from the centre, the lowest first."""
    return tensor.table[tensor.ranked[rank]] - tensor.centre


@triton.constexpr_function
def middle_above(tensor, rank: int) -> float:
    """Return what lies halfway from a level to the next."""
    return tensor.middles[rank][0]


@triton.constexpr_function
def tie_falls(tensor, rank: int) -> bool:
    """Return whether what lies halfway takes the lower level."""
    return tensor.middles[rank][1]


@triton.jit
def rows_of(source, token, G: tl.constexpr, T: tl.constexpr):
    """Return where the rows of *token* begin in the residual and among the new tokens, and which are in the former."""
    new, ring, before, first_row, slot, head, stride_token, stride_head, _ = source
    row = slot.to(tl.int64) * G.ring + head * G.ring_head + T.ring + (token % T.capacity) * G.head_dim
    at = (first_row + token - before).to(tl.int64) * stride_token + head * stride_head
    return ring + row, new + at, token < before


@triton.jit
def load_elements(rows, channel, mask, FLOAT: tl.constexpr):
    """Return elements of rows, float32, as the cache's 16-bit type holds them."""
    ring_row, new_row, held = rows
    old = widen(tl.load(ring_row + channel, mask=mask & held, other=0.0))
    fresh = widen(tl.load(new_row + channel, mask=mask & (held == 0), other=0.0))
    return tl.where(held, old, widen(narrow(fresh, FLOAT)))


@triton.jit
def load_plane(source, token, inside, k, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return one plane of channels of *token*, [tokens, channels], and its mask."""
    i = tl.arange(0, T.padded)[None, :]
    mask = inside[:, None] & (i < T.width)
    x = load_elements(rows_of(source, token[:, None], G, T), k * T.width + i, mask, FLOAT)
    if T.outliers > 0:
        most = source[8][:, None]
        x = tl.where(x > most, most, tl.where(x < -most, -most, x))
    return x, mask


@triton.jit
def cut_at(source, most):
    """Return *source* whose elements are cut at the magnitude *most* of each token."""
    new, ring, before, first_row, slot, head, stride_token, stride_head, _ = source
    return (new, ring, before, first_row, slot, head, stride_token, stride_head, most)


@triton.jit
def load_column(rows, inside, g, e, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return element *e* of group *g* of each row; a short last group repeats its last element."""
    return load_elements(rows, tl.minimum(g * T.group + e, G.head_dim - 1), inside, FLOAT)


@triton.jit
def over(x, step):
    """Return *x* / *step*, and 0 where that is 0."""
    return tl.where(step != 0.0, tl.math.div_rn(x, tl.where(step != 0.0, step, 1.0)), 0.0)


@triton.jit
def reciprocal(x):
    """Return 1 / *x*, and 0 where that is 0."""
    return over(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def nearest(x, T: tl.constexpr, HEIGHT: tl.constexpr):
    """Return the level nearest to *x*, both counted from the centre, where HEIGHT, else its code: float32."""
    found = tl.full(x.shape, height_of_rank(T, 0) if HEIGHT else code_of_rank(T, 0) * 1.0, tl.float32)
    for rank in tl.static_range(ranks(T) - 1):
        middle = middle_above(T, rank)
        above = x > middle if tie_falls(T, rank) else x >= middle
        found = tl.where(above, height_of_rank(T, rank + 1) if HEIGHT else code_of_rank(T, rank + 1) * 1.0, found)
    return found


# ---- a group's numbers, and what its elements are coded with


@triton.jit
def held_numbers(scale, minimum, bad, T: tl.constexpr):
    """Return scale and minimum as a page holds them, what these stand for, and which groups are poisoned."""
    stored_scale = stored_number(scale, T)
    held_scale = number_value(stored_scale, T)
    stored_minimum = stored_scale
    held_minimum = held_scale
    sound = tl.abs(held_scale) < float("inf")
    if has_minimum(T):
        stored_minimum = stored_number(minimum, T)
        held_minimum = number_value(stored_minimum, T)
        sound = sound & (tl.abs(held_minimum) < float("inf"))
    return stored_scale, stored_minimum, held_scale, held_minimum, bad | (sound == 0)


@triton.jit
def fit_extremes(low, high, nan, boosted, T: tl.constexpr):
    """Return a group's numbers as `held_numbers` does, and the step and the base that its elements are coded with.

    *boosted* says which groups are, where some may be.
    """
    bad = nan > 0
    if T.number == "e4m3":  # has no infinity to tell
        bad = bad | ((tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf")) == 0)
    if T.clip != 1.0:
        low = low * T.clip
        high = high * T.clip
    if has_minimum(T):
        low = low + 0.0  # a minimum of -0 is stored as +0
        scale = scale_of(high + 0.0 - low, boosted, T)
    else:
        scale = scale_of(tl.maximum(high, -low), boosted, T)
    stored_scale, stored_minimum, held_scale, held_minimum, poisoned = held_numbers(scale, low, bad, T)
    if T.fit == "range":
        step = held_scale
        base = held_minimum
    elif T.fit == "q5_1":
        step = reciprocal(scale)
        base = low
    elif T.fit == "q8_0":
        step = reciprocal(scale)
        base = scale
    else:
        step = held_scale * T.unit
        base = scale
    if T.boosts > 0:
        step = tl.where(boosted, step * STEP, step)
    return stored_scale, stored_minimum, poisoned, step, base


@triton.jit
def scale_of(extent, boosted, T: tl.constexpr):
    """Return the scale of groups of an *extent*, not yet rounded."""
    scale = tl.math.div_rn(extent, T.divisor)
    if T.boosts > 0:
        scale = tl.where(boosted, tl.math.div_rn(extent, T.boost_divisor) / STEP, scale)
    return scale


@triton.jit
def fit_fixed(low, high, nan, T: tl.constexpr):
    """Return which groups are poisoned, and the step and the base that elements are coded with: a scale of 1."""
    poisoned = (nan > 0) | ((tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf")) == 0)
    return poisoned, tl.full(low.shape, T.unit, tl.float32), low


@triton.jit
def fit_in_order(rows, inside, g, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the numbers of group *g* of each row, from its elements one by one: as `fit_extremes` does, no base."""
    if T.fit == "norm":
        scale, step, bad = fit_norm(rows, inside, g, G, T, FLOAT)
    else:
        largest, bad = signed_largest(rows, inside, g, G, T, FLOAT)
        scale = tl.math.div_rn(largest, T.divisor)
        step = reciprocal(scale)
        if T.fit == "iq4_nl":
            scale = fit_squares(rows, inside, g, step, G, T, FLOAT)
    stored, _, _, _, poisoned = held_numbers(scale, scale, bad > 0, T)
    return stored, poisoned, step


@triton.jit
def signed_largest(rows, inside, g, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the element of largest magnitude, the first of several, and whether one is not finite."""
    largest = tl.zeros(inside.shape, tl.float32)
    bad = tl.zeros(inside.shape, tl.int32)
    for e in range(T.group):
        x = load_column(rows, inside, g, e, G, T, FLOAT)
        largest = tl.where((tl.abs(x) > tl.abs(largest)) | (e == 0), x, largest)
        bad |= tl.where(tl.abs(x) < float("inf"), 0, 1)
    return largest, bad


@triton.jit
def fit_squares(rows, inside, g, step, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the scale of the least squared error for the levels that *step* leads to, squares weighing most."""
    products = tl.zeros(inside.shape, tl.float32)
    squares = tl.zeros(inside.shape, tl.float32)
    for e in range(T.group):
        x = load_column(rows, inside, g, e, G, T, FLOAT)
        height = nearest(x * step, T, True)
        products += x * x * height * x
        squares += x * x * height * height
    return tl.where(squares > 0.0, tl.math.div_rn(products, tl.where(squares > 0.0, squares, 1.0)), 0.0)


@triton.jit
def fit_norm(rows, inside, g, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the norm of each group over that of its levels, what elements are over before, and what is not finite."""
    total = tl.zeros(inside.shape, tl.float32)
    bad = tl.zeros(inside.shape, tl.int32)
    for e in range(T.group):
        x = load_column(rows, inside, g, e, G, T, FLOAT)
        total += x * x
        bad |= tl.where(tl.abs(x) < float("inf"), 0, 1)
    norm = tl.sqrt_rn(total)
    spread = tl.math.div_rn(norm, T.divisor)
    step = tl.where(spread != 0.0, spread * T.unit, -1.0)
    chosen = tl.zeros(inside.shape, tl.float32)
    for e in range(T.group):
        x = load_column(rows, inside, g, e, G, T, FLOAT)
        height = nearest(over_spread(x, step), T, True) * T.unit
        chosen += height * height
    return tl.math.div_rn(norm, tl.sqrt_rn(chosen)), step, bad


@triton.jit
def over_spread(x, step):
    """Return *x* over *step*, and 0 where that is negative: the spread is 0 there."""
    return tl.where(step >= 0.0, tl.math.div_rn(x, step), 0.0)


# ---- codes


@triton.jit
def nearest_learned(x, tables, T: tl.constexpr):
    """Return the code of the level nearest to *x*, which counts as the levels do that were learned, float32."""
    CODES: tl.constexpr = T.learned
    code = tl.zeros(x.shape, tl.float32)
    for c in tl.static_range(CODES - 1):
        both = learned_level(tables, c, T) + learned_level(tables, c + 1, T)
        code += tl.where(x >= both.to(tl.float32) * 0.5 - T.centre, 1.0, 0.0)
    return code


@triton.jit
def code_of(x, step, base, poisoned, boosted, tables, T: tl.constexpr):
    """Return the codes of *x*, int32; what they are coded with is broadcast to it."""
    MOST: tl.constexpr = (1 << T.bits) - 1
    most = MOST * 1.0
    if T.boosts > 0:
        most = tl.where(boosted, (MOST + 1) / STEP - 1, most)
    if T.fit == "range":
        coded = (step != 0.0) & (poisoned == 0)
        lifted = tl.where(coded, x - base, 0.0)
        height = tl.math.div_rn(lifted, tl.where(coded, step, 1.0))
        if T.learned > 0:
            code = tl.where(coded, nearest_learned(height, tables, T), 0.0)
        else:
            code = (height + NEAREST) - NEAREST
    else:
        x = tl.where(poisoned, 0.0, x)
        if T.fit == "q8_0":
            code = rounded_away(x * step) + 128.0
        elif T.fit == "q5_0":
            code = x * step + ((1 << (T.bits - 1)) + 0.5)
        elif T.fit == "q5_1":
            code = (x - base) * step + 0.5
        else:
            code = scaled_code(x, step, boosted, tables, T)
        code = tl.where(poisoned, 0.0, code)
    return tl.minimum(tl.maximum(code, 0.0), most).to(tl.int32)


@triton.jit
def rounded_away(x):
    """Return the nearest integers, halves away from 0, of -128 to 127."""
    size = tl.abs(x)
    away = tl.floor(size + 0.5)
    # Just under a half the sum is rounded up to 1.
    found = tl.where(away - size > 0.5, (size + NEAREST) - NEAREST, away)
    return tl.minimum(tl.maximum(tl.where(x < 0.0, -found, found), -128.0), 127.0)


@triton.jit
def scaled_code(x, step, boosted, tables, T: tl.constexpr):
    """Return the codes of the levels nearest to *x* over *step*, float32."""
    if T.fit == "iq4_nl":
        height = x * step
    elif T.fit == "norm":
        height = over_spread(x, step)
    else:
        height = over(x, step)
    if T.learned > 0:
        code = nearest_learned(height, tables, T)
    elif ranks(T) > 0:
        code = nearest(height, T, False)
    else:
        centre = T.centre
        if T.boosts > 0:
            centre = tl.where(boosted, T.centre / STEP, centre)
        code = ((height + NEAREST) - NEAREST) + centre
    return code
