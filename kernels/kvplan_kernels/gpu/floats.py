"""16-bit floats, rounded, widened and multiplied alike on a device and in Triton's interpreter.

The interpreter truncates to bf16, takes bf16 below its least normal number for others, and multiplies bf16 as integers.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.targets import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """Return float32 *x* in a 16-bit type, rounded to the nearest, ties to even."""
    if _INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, (bits >> 16) | 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)


@triton.jit
def widen(x):
    """Return *x* of any float type as float32, which holds it exactly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def small_float_code(x, FLOATS: tl.constexpr):
    """Return the code of finite float32 *x* as "e4m3" or "e5m2", int32: the nearest, ties to even, at most the largest.

    Integers and one float32 sum: conversions to 8-bit floats differ between devices, and the interpreter's are its own.
    """
    MOST: tl.constexpr = 448.0 if FLOATS == "e4m3" else 57344.0
    MANTISSA: tl.constexpr = 3 if FLOATS == "e4m3" else 2
    # The difference of the exponents' biases, 127 - 7 or 15.
    BIAS: tl.constexpr = 120 if FLOATS == "e4m3" else 112
    LEAST_NORMAL: tl.constexpr = 0.015625 if FLOATS == "e4m3" else 0.00006103515625
    # A number whose last bit is the least code, 2^-9 or 2^-16: adding it rounds to whole ones.
    LIFT: tl.constexpr = 16384.0 if FLOATS == "e4m3" else 128.0
    LIFT_BITS: tl.constexpr = 0x46800000 if FLOATS == "e4m3" else 0x43000000
    CUT: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), MOST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - (BIAS << MANTISSA)
    denormal = (size + LIFT).to(tl.int32, bitcast=True) - LIFT_BITS
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < LEAST_NORMAL, denormal, normal) | sign


@triton.jit
def product(a, b, acc):
    """Return acc + a times b, matrices of 16-bit floats, in float32.

    As float32 nothing is lost: no product of two 16-bit operands is rounded in 32 bits.
    """
    if _INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
