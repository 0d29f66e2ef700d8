"""Reading memory and nothing else, in Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("count",))
def sum_words(words, sums, count, TILE: tl.constexpr, TILES: tl.constexpr):
    """Store the sum of TILES tiles of TILE words, so that no load can be left out."""
    start = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    total = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES):
        at = start + tile * TILE + tl.arange(0, TILE)
        total += tl.load(words + at, mask=at < count, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))
