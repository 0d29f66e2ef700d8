"""16-bit floats, rounded and multiplied alike on a device and in Triton's interpreter.

The interpreter truncates to bf16, and multiplies bf16 as integers.
"""

import triton
import triton.language as tl

from kvplan_kernels.gpu.targets import interpreted

_INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """Return float32 *x* in a 16-bit type, rounded to the nearest, ties to even."""
    if _INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x).to(tl.bfloat16)
    else:
        return x.to(TYPE)


@triton.jit
def product(a, b, acc):
    """Return acc + a times b, matrices of 16-bit floats, in float32.

    As float32 nothing is lost: no product of two 16-bit operands is rounded in 32 bits.
    """
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
