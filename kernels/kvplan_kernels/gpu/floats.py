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
def e4m3_code(x):
    """Return the E4M3 code of finite float32 *x*, int32: the nearest, ties to even, of at most +-448.

    Integers and one float32 sum: conversions to 8-bit floats differ between devices, and the interpreter's are its own.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Three bits of mantissa stay of 23; 120 is the difference of the exponents' biases.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # The last bit of 2^14 is 2^-9, the least code: adding rounds to whole ones.
    denormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < 0.015625, denormal, normal) | sign


@triton.jit
def product(a, b, acc):
    """Return acc + a times b, matrices of 16-bit floats, in float32.

    As float32 nothing is lost: no product of two 16-bit operands is rounded in 32 bits.
    """
    if _INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
