"""Reading memory and nothing else, in Triton."""

import triton
import triton.language as tl


@triton.jit
def fold_words(words, folds, count, TILE: tl.constexpr, TILES: tl.constexpr):
    """Store TILES tiles of TILE words folded into one by exclusive or, so that no load can be left out."""
    start = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    folded = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES):
        at = start + tile * TILE + tl.arange(0, TILE)
        folded ^= tl.load(words + at, mask=at < count, other=0)
    tl.store(folds + tl.program_id(0), tl.xor_sum(folded, 0))
