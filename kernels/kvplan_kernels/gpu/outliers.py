"""Elements that are too large for the codes, in Triton: what lies beside the codes of each token."""

import triton
import triton.language as tl

from kvplan_kernels.gpu.floats import widen


@triton.jit
def load_outlier(meta, slab, in_page, n, inside, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):
    """Return the *n*-th outlier of each token, float32, and its channel; 0 of channel 0 where not *inside*."""
    at = n * G.block + in_page
    rest = tl.load(meta.to(tl.pointer_type(FLOAT), bitcast=True) + slab + T.outlier + at, mask=inside, other=0.0)
    bytes_in = meta.to(tl.pointer_type(tl.uint8), bitcast=True)
    channel = tl.load(bytes_in + slab * 2 + T.outlier_channel + at, mask=inside, other=0)
    return widen(rest), channel.to(tl.int32)


@triton.jit
def outlier_scores(
    query, valid, meta, slab, in_page, inside, scale, G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr
):
    """Return what the outliers of keys add to the scores times *scale*, float32 [tokens, rows]."""
    OUTLIERS: tl.constexpr = T.outliers
    score = tl.zeros([in_page.shape[0], query.shape[0]], tl.float32)
    for n in tl.static_range(OUTLIERS):
        rest, channel = load_outlier(meta, slab, in_page, n, inside, G, T, FLOAT)
        asked = widen(tl.load(query[None, :] + channel[:, None], mask=valid[None, :] & inside[:, None], other=0.0))
        score += asked * (rest * scale)[:, None]
    return score


@triton.jit
def outlier_plane(meta, slab, in_page, inside, first, WIDTH: tl.constexpr, PADDED: tl.constexpr,
                  G: tl.constexpr, T: tl.constexpr, FLOAT: tl.constexpr):  # fmt: skip
    """Return the outliers of values among the channels from *first* on, float32 [channels, tokens], zeros elsewhere."""
    OUTLIERS: tl.constexpr = T.outliers
    i = tl.arange(0, PADDED)[:, None]
    found = tl.zeros([PADDED, in_page.shape[0]], tl.float32)
    for n in tl.static_range(OUTLIERS):
        rest, channel = load_outlier(meta, slab, in_page, n, inside, G, T, FLOAT)
        found += tl.where((channel[None, :] == first + i) & (i < WIDTH), rest[None, :], 0.0)
    return found
