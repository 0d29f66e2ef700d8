"""Where a sequence's tokens are, in Triton."""

import triton
import triton.language as tl


@triton.jit
def paged_tokens(tokens, T: tl.constexpr):
    """Return how many of *tokens*, counted after the sinks, lie in pages."""
    BITS: tl.constexpr = T.bits
    paged = tokens
    if BITS < 16:
        paged = tl.maximum(tokens - T.keep, 0) // T.quantum * T.quantum
    return paged
