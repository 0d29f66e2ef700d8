"""Both ways to take codes out of words, as a kernel of its own."""

import triton
import triton.language as tl

from kvplan_kernels.gpu.unpack import unpack


@triton.jit
def unpack_all(words, floats, SHIFT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, COUNT: tl.constexpr):
    """Store the code at bit SHIFT of COUNT words of a program, as float32."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(floats + at, unpack(tl.load(words + at), SHIFT, BITS, ASM).to(tl.float32))
