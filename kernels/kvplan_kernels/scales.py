"""The numbers that groups of codes have beside them, in and out of the type that a page holds them in."""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.tensor_format import Number

STORED_AS: Final = {
    Number.FP16: torch.float16,
    Number.BF16: torch.bfloat16,
    Number.FP32: torch.float32,
    Number.E4M3: torch.uint8,
    Number.E8M0: torch.uint8,
}
"""What tensors of stored numbers are; those of a byte are bit patterns."""
_E4M3_MOST: Final = 448.0
_E8M0_NAN: Final = 0xFF
_E8M0_BIAS: Final = 127
_MANTISSA_BITS: Final = 23
_LEAST_POWER: Final = 1 << _MANTISSA_BITS - 1
_FP32_NAN: Final = 0x7FC00000


def encode(values: Tensor, number: Number) -> Tensor:
    """Return float32 *values* as a page holds them, rounded to the nearest, ties to even; NaN stays NaN.

    A power of two (`Number.E8M0`) is the one below, within 2^-127 and 2^127. What is too large for a type with
    infinities becomes one; E4M3 has none, and holds 448 at most.
    """
    if number is Number.E8M0:
        exponent = torch.frexp(values).exponent - 1
        bits = (exponent + _E8M0_BIAS).clamp(0, _E8M0_NAN - 1)
        return bits.masked_fill(~values.isfinite(), _E8M0_NAN).masked_fill(values == 0, 0).to(torch.uint8)
    if number is Number.E4M3:
        return values.clamp(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    return values.to(STORED_AS[number])


def decode(stored: Tensor, number: Number) -> Tensor:
    """Return the float32 values of *stored*."""
    if number is Number.E8M0:
        bits = stored.to(torch.int32) << _MANTISSA_BITS  # 2^-127 is no normal number.
        bits = bits.masked_fill(stored == 0, _LEAST_POWER).masked_fill(stored == _E8M0_NAN, _FP32_NAN)
        return bits.view(torch.float32)
    if number is Number.E4M3:
        return stored.view(torch.float8_e4m3fn).to(torch.float32)
    return stored.to(torch.float32)
