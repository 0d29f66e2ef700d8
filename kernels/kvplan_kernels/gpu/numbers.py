"""The scales and minima of groups in Triton, in and out of the type in which a page holds them; `scales` defines it."""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import narrow, small_float_code, widen

E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)
BF16_NAN = tl.constexpr(0x7FC0)


@triton.constexpr_function
def number_bytes(tensor) -> int:
    """Return the bytes of a number."""
    return {"fp32": 4, "e4m3": 1, "e8m0": 1}.get(tensor.number, 2)


@triton.jit
def number_place(slab, T: tl.constexpr):
    """Return the number at which a slab begins, from the item of two bytes."""
    BYTES: tl.constexpr = number_bytes(T)
    place = slab
    if BYTES == 4:
        place = slab // 2
    elif BYTES == 1:
        place = slab * 2
    return place


@triton.jit
def numbers_in(meta, T: tl.constexpr):
    """Return *meta*, the pages as fp16, as what the tensor's numbers are; numbers of a byte are patterns."""
    if T.number == "bf16":
        found = meta.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    elif T.number == "fp32":
        found = meta.to(tl.pointer_type(tl.float32), bitcast=True)
    elif number_bytes(T) == 1:
        found = meta.to(tl.pointer_type(tl.uint8), bitcast=True)
    else:
        found = meta
    return found


@triton.jit
def number_value(stored, T: tl.constexpr):
    """Return what a number as a page holds it stands for, float32."""
    if T.number == "e4m3":  # in the bits of an fp32, whose exponents are 120 more for the same number
        code = stored.to(tl.int32)
        bits = (code & 0x7F) << 20
        if T.fit != "absmax":  # has no negative numbers
            bits |= (code & 0x80) << 24
        value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        value = tl.where((code & 0x7F) == E4M3_NAN, float("nan"), value)
    elif T.number == "e8m0":
        bits = stored.to(tl.int32) << 23
        bits = tl.where(stored == 0, 1 << 22, bits)  # 2^-127 is no normal number
        value = tl.where(stored == E8M0_NAN, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        value = widen(stored)
    return value


@triton.jit
def stored_number(x, T: tl.constexpr):
    """Return float32 *x* as a page holds it, rounded."""
    if T.number == "bf16":
        stored = narrow(x, tl.bfloat16)
    elif T.number == "fp32":
        stored = x
    elif T.number == "e4m3":
        stored = tl.where(x == x, small_float_code(x, "e4m3"), E4M3_NAN).to(tl.uint8)
    elif T.number == "e8m0":
        stored = ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
    else:
        stored = narrow(x, tl.float16)
    return stored


@triton.jit
def poisoned_number(stored, poisoned, T: tl.constexpr):
    """Return *stored*, or NaN where the group is poisoned."""
    if T.number == "e4m3":
        found = tl.where(poisoned, E4M3_NAN, stored).to(tl.uint8)
    elif T.number == "e8m0":
        found = tl.where(poisoned, E8M0_NAN, stored).to(tl.uint8)
    elif T.number == "bf16":  # of which the interpreter knows no constants
        bits = tl.where(poisoned, BF16_NAN, stored.to(tl.uint16, bitcast=True))
        found = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = tl.where(poisoned, float("nan"), stored)
    return found


@triton.jit
def load_number(at, mask, T: tl.constexpr):
    """Return the numbers at the pointers *at*, float32; all of them where *mask* is None."""
    stored = tl.load(at) if mask is None else tl.load(at, mask=mask, other=0)
    return number_value(stored, T)


@triton.jit
def level_scale(meta, place, mask, T: tl.constexpr):
    """Return what one level is worth in the groups at *place*, float32."""
    if T.fit == "none":  # a scale of 1, which is not stored
        scale = tl.full(place.shape, T.unit, tl.float32)
    else:
        scale = load_number(numbers_in(meta, T) + T.scale + place, mask, T)
        if T.unit != 1.0:
            scale = scale * T.unit
    return scale


@triton.jit
def level_minimum(meta, place, mask, scale, T: tl.constexpr):
    """Return what level 0 stands for in the groups at *place*, float32, from their `level_scale`."""
    if T.minimum >= 0:
        minimum = load_number(numbers_in(meta, T) + T.minimum + place, mask, T)
    else:
        minimum = scale * -T.centre
    return minimum
