"""Scores of keys that lie as they were before RoPE, in Triton.

With w the frequency of a channel d, p its partner and q a query, the score of key k at position t is the sum over d of

    k[d] (cos(t w) q[d] + sin(t w) q[p])

so that a tile's keys are multiplied by cosines and by sines, and these by two operands, q and q of the partners. Where
the tile begins the operands are turned; tokens of the tile are turned from there, all tiles by the same table. What
else was done to keys is undone before, on the keys: a channel's number is added, heads are rotated back. Factors and
the order of channels are in the operands and the tables.
"""

import triton
import triton.language as tl

from kvplan_kernels.decode.scores_gpu_kernels import LEAST_UNIT, query_planes
from kvplan_kernels.gpu.boosts import boost_plane
from kvplan_kernels.gpu.floats import narrow, product, widen
from kvplan_kernels.gpu.numbers import level_minimum, level_scale, number_place
from kvplan_kernels.gpu.outliers import outlier_plane
from kvplan_kernels.gpu.unpack import offset_of, plane_floats, plane_levels

NEAR = tl.constexpr(256)


@triton.constexpr_function
def stored_shape(g, codes):
    """Return count, width and padded width of the planes in which keys of *g* come, as codes or as 16-bit rows."""
    return (g.keys.pieces, g.keys.piece, g.keys.padded_piece) if codes else (1, g.head_dim, g.padded)


@triton.constexpr_function
def asked_shape(g, codes):
    """Return the same of the queries that meet them: whole heads where keys are rotated back first."""
    return (1, g.head_dim, g.padded) if g.restore.rotated else stored_shape(g, codes)


@triton.jit
def rotations(table, head, row, mask, channel, G: tl.constexpr):
    """Return cosines and sines of row *row* of a table of *head*, at *channel*."""
    HEADS: tl.constexpr = G.restore.by_head
    at = row * (2 * G.head_dim) + channel
    if HEADS:
        at += head * table[1]
    return tl.load(table[0] + at, mask=mask, other=0.0), tl.load(table[0] + at + G.head_dim, mask=mask, other=0.0)


@triton.jit
def asked_queries(query, unit, valid, CODES: tl.constexpr, G: tl.constexpr):
    """Return the queries of channels and of their partners, by plane, from the pointers *query*."""
    SHAPE: tl.constexpr = asked_shape(G, CODES)
    channels = query_planes(query, unit, valid, SHAPE[0], SHAPE[1], SHAPE[2])
    return channels, query_planes(query + G.head_dim, unit, valid, SHAPE[0], SHAPE[1], SHAPE[2])


@triton.jit
def turned_operands(asked, position, head, restore, CODES: tl.constexpr, TYPE: tl.constexpr, G: tl.constexpr):
    """Return the operands of cosines and of sines for a tile that begins at *position*, by plane, [channels, rows]."""
    SHAPE: tl.constexpr = asked_shape(G, CODES)
    COUNT: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = SHAPE[1]
    PADDED: tl.constexpr = SHAPE[2]
    planes, partners = asked
    near, far, _, _ = restore
    cosines = ()
    sines = ()
    i = tl.arange(0, PADDED)
    for k in tl.static_range(COUNT):
        mask = i < WIDTH
        channel = k * WIDTH + i
        near_cos, near_sin = rotations(near, head, position % NEAR, mask, channel, G)
        far_cos, far_sin = rotations(far, head, position // NEAR, mask, channel, G)
        cosine = (far_cos * near_cos - far_sin * near_sin)[:, None]
        sine = (far_sin * near_cos + far_cos * near_sin)[:, None]
        cosines = cosines + (narrow(cosine * planes[k] + sine * partners[k], TYPE),)
        sines = sines + (narrow(cosine * partners[k] - sine * planes[k], TYPE),)
    return cosines, sines


@triton.jit
def code_values(
    words, high, meta, tables, slab, in_page, inside, k: tl.constexpr, PLACE: tl.constexpr, G: tl.constexpr,
    T: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the values of one plane or slice, with all that lies beside the codes, float32 [tokens, channels]."""
    SLICES: tl.constexpr = T.slices
    if len(T.floats) > 0:
        value = widen(plane_floats(words[0], k, T, ASM))
    else:
        levels = plane_levels(words[k % SLICES], high[k % SLICES], tables, PLACE, k // SLICES, T, ASM)
        channel = tl.minimum(k * T.piece + tl.arange(0, T.padded_piece), G.head_dim - 1)
        at = number_place(slab, T) + (in_page // T.group * G.head_dim if T.channel else in_page)
        column = channel if T.channel else channel // T.group * G.block
        place = at[:, None] + column[None, :]
        scale = level_scale(meta, place, None, T)
        value = (widen(levels) - offset_of(T)) * scale + level_minimum(meta, place, None, scale, T)
    if T.boosts > 0:  # the tile lies in one group, and so in one page
        value += boost_plane(meta, slab + tl.zeros(in_page.shape, tl.int64), in_page, inside, k, G, T)
    if T.outliers > 0:
        beside = outlier_plane(meta, slab, in_page, inside, k * T.piece, T.piece, T.padded_piece, G, T, FLOAT)
        value += tl.trans(beside)
    return tl.where(inside[:, None], value, 0.0)


@triton.jit
def all_code_values(
    words, high, meta, tables, slab, in_page, inside, PLACE: tl.constexpr, G: tl.constexpr, FLOAT: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return the values of keys, by plane."""
    COUNT: tl.constexpr = G.keys.pieces
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (
            code_values(words, high, meta, tables, slab, in_page, inside, k, PLACE, G, G.keys, FLOAT, ASM),
        )
    return found


@triton.jit
def fitted(value, TYPE: tl.constexpr):
    """Return *value* over a unit of each token, as operand, and the unit: fp16 does not hold all that bf16 does."""
    if TYPE == tl.float16:
        unit = tl.maximum(tl.max(tl.abs(value), 1), LEAST_UNIT)
        value = value * (1.0 / unit)[:, None]
    else:
        unit = tl.full([value.shape[0]], 1.0, tl.float32)
    return value, unit


@triton.jit
def turned_score(
    value, cosine, sine, row, head, restore, k: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TYPE: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Return the part of the scores that one plane of channels has, float32 [tokens, rows].

    *value* is what is stored of each token, rotated back; *row* are tokens from the tile's beginning. Operands are
    those of this plane.
    """
    near, _, shift, _ = restore
    i = tl.arange(0, PADDED)
    mask = i < WIDTH
    channel = k * WIDTH + i
    if G.restore.shifted:
        value += tl.load(shift + head * G.head_dim + channel, mask=mask, other=0.0)[None, :]
    c, s = rotations(near, head, row[:, None], mask[None, :], channel[None, :], G)
    value, unit = fitted(value, TYPE)
    score = product(narrow(value * c, TYPE), cosine, tl.zeros([value.shape[0], cosine.shape[1]], tl.float32))
    return product(narrow(value * s, TYPE), sine, score) * unit[:, None]


@triton.jit
def unrotated(values, restore, COUNT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              TYPE: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Return *values* by plane times the rotation of heads, float32 [tokens, channels of a head]."""
    _, _, _, rotation = restore
    d = tl.arange(0, G.padded)
    i = tl.arange(0, PADDED)
    DP: tl.constexpr = G.padded
    found = tl.zeros([values[0].shape[0], DP], tl.float32)
    for k in tl.static_range(COUNT):
        mask = (i < WIDTH)[:, None] & (d < G.head_dim)[None, :]
        signs = tl.load(rotation[0] + (k * WIDTH + i)[:, None] * G.head_dim + d[None, :], mask=mask, other=0.0)
        value, unit = fitted(values[k], TYPE)
        part = product(narrow(value, TYPE), signs.to(TYPE), tl.zeros(found.shape, tl.float32))
        found += part * unit[:, None]
    return found * tl.load(rotation[1] + d, mask=d < G.head_dim, other=0.0)[None, :]


@triton.jit
def restored_scores(values, operands, row, head, restore, CODES: tl.constexpr, TYPE: tl.constexpr, G: tl.constexpr):
    """Return the scores of one sub-tile's keys, float32 [tokens, rows], from what is stored of them, by plane."""
    SHAPE: tl.constexpr = stored_shape(G, CODES)
    COUNT: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = SHAPE[1]
    PADDED: tl.constexpr = SHAPE[2]
    cosines, sines = operands
    if G.restore.rotated:
        whole = unrotated(values, restore, COUNT, WIDTH, PADDED, TYPE, G)
        score = turned_score(whole, cosines[0], sines[0], row, head, restore, 0, G.head_dim, G.padded, TYPE, G)
    else:
        score = turned_score(values[0], cosines[0], sines[0], row, head, restore, 0, WIDTH, PADDED, TYPE, G)
        for k in tl.static_range(1, COUNT):
            score += turned_score(values[k], cosines[k], sines[k], row, head, restore, k, WIDTH, PADDED, TYPE, G)
    return score


@triton.jit
def float_values(rows, inside, D: tl.constexpr, DP: tl.constexpr):
    """Return the 16-bit keys at the pointers *rows*, float32 [tokens, channels]."""
    d = tl.arange(0, DP)[None, :]
    return widen(tl.load(rows[:, None] + d, mask=inside[:, None] & (d < D), other=0.0))
