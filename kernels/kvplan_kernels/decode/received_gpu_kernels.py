"""What weight each token received, in Triton: scores once more, against the maxima and totals that decode left."""

import triton
import triton.language as tl

from kvplan_kernels.decode.restored_gpu_kernels import (
    all_code_values,
    asked_queries,
    float_values,
    restored_scores,
    turned_operands,
)
from kvplan_kernels.decode.scores_gpu_kernels import (
    capped,
    code_scores,
    float_rows,
    float_scores,
    fold_channels,
    operand_type,
    query_planes,
    query_unit,
    rests,
    rounded,
    row_sums,
    sight,
    slabs,
    word_tiles,
)
from kvplan_kernels.gpu.boosts import add_folded_boosts, boost_scores, fold_boosts
from kvplan_kernels.gpu.outliers import outlier_scores
from kvplan_kernels.gpu.tokens import paged_tokens
from kvplan_kernels.gpu.unpack import level_tables


@triton.jit
def tile_scores(
    at, inside, start, planes, operands, low, sums, operand_sums, factor, codes, meta, tables, source, table, hi,
    slot, head, PLACE: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the scores of the tokens *at*, which have place PLACE in their words, before any softcap."""
    K: tl.constexpr = G.keys
    ONE_PAGE: tl.constexpr = G.block % BN == 0
    slab = tl.zeros([1], tl.int64)
    if KEYS == "codes" or KEYS == "pages":
        slab = slabs(table, at, start, hi, head, G, ONE_PAGE)
    if KEYS == "codes":
        in_page = at % G.block
        words = word_tiles(codes, slab, in_page // K.low.tokens, K.low, K, True)
        high = words
        if K.high.bits > 0:
            high = word_tiles(codes, slab, in_page // K.high.tokens, K.high, K, True)
        if K.channel and K.whole:
            folded, folded_low, folded_sums, unit, bias = fold_channels(
                planes, meta, slab, start % G.block, factor, G, K, ROWS, FLOAT
            )
            score = code_scores(
                words, high, folded, folded_low, sums, folded_sums, meta, tables, slab, in_page, inside, factor,
                PLACE, G, K, ROWS, 2, FLOAT, ASM,
            )  # fmt: skip
            score = score * unit + bias[None, :]
        else:
            score = code_scores(
                words, high, operands, low, sums, operand_sums, meta, tables, slab, in_page, inside, factor, PLACE, G,
                K, ROWS, PARTS, FLOAT, ASM,
            )  # fmt: skip
    else:
        rows = float_rows(source, slab, at, slot, head, G, K, KEYS)
        score = float_scores(operands, low, rows, inside, ROWS, PARTS, G.head_dim, G.padded) * factor
    return score


@triton.jit
def restored_tile_scores(
    at, inside, start, origin, query, unit, valid, codes, meta, tables, restore, source, table, hi, slot, head,
    PLACE: tl.constexpr, G: tl.constexpr, KEYS: tl.constexpr, BN: tl.constexpr, FLOAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the same, with all that lies beside codes, where keys lie as they were before RoPE."""
    K: tl.constexpr = G.keys
    CODES: tl.constexpr = KEYS == "codes"
    TYPE: tl.constexpr = operand_type(FLOAT, K, CODES)
    asked = asked_queries(query, unit, valid, CODES, G)
    turned = turned_operands(asked, origin + start, head, restore, CODES, TYPE, G)
    if CODES:
        slab = slabs(table, at, start, hi, head, G, G.block % BN == 0)
        in_page = at % G.block
        words = word_tiles(codes, slab, in_page // K.low.tokens, K.low, K, True)
        high = words
        if K.high.bits > 0:
            high = word_tiles(codes, slab, in_page // K.high.tokens, K.high, K, True)
        values = all_code_values(words, high, meta, tables, slab, in_page, inside, PLACE, G, FLOAT, ASM)
    else:
        slab = tl.zeros([1], tl.int64)
        if KEYS == "pages":
            slab = slabs(table, at, start, hi, head, G, G.block % BN == 0)
        values = (float_values(float_rows(source, slab, at, slot, head, G, K, KEYS), inside, G.head_dim, G.padded),)
    return restored_scores(values, turned, at - start, head, restore, CODES, TYPE, G)


@triton.jit
def add_weights(
    received, start, begin, hi, origin, length, query, query_stride_query, query_stride_head, positions, row_maxima,
    row_totals, queries, ratio, window, scale, softcap, codes, meta, tables, restore, source, table, slot, sequence,
    head, tokens, G: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
    FLOAT: tl.constexpr, CAPPED: tl.constexpr, HAS_POSITIONS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Store the weight that each token of one tile received, summed over the queries."""
    K: tl.constexpr = G.keys
    CODES: tl.constexpr = KEYS == "codes"
    PLANES: tl.constexpr = K.pieces if CODES else 1
    WIDTH: tl.constexpr = K.piece if CODES else G.head_dim
    PADDED: tl.constexpr = K.padded_piece if CODES else G.padded
    J: tl.constexpr = K.tokens if CODES else 1
    R: tl.constexpr = BN // J
    TYPE: tl.constexpr = operand_type(FLOAT, K, CODES)
    h = tl.arange(0, ROWS)
    valid = h < ratio
    for j in tl.static_range(J):
        at = start + J * tl.arange(0, R) + j
        inside = (at >= begin) & (at < hi)
        share = tl.zeros([R, ROWS], tl.float32)
        for q in range(queries):
            if HAS_POSITIONS:
                position = tl.load(positions + sequence * queries + q)
            else:
                position = length - queries + q
            last = tl.zeros([ROWS], tl.int32) + tl.minimum(position + 1, length)
            first = tl.zeros([ROWS], tl.int32) + tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
            rows = query + q * query_stride_query + (head * ratio + h) * query_stride_head
            unit = 1.0
            if TYPE == tl.float16:
                unit = query_unit(rows, valid, G.head_dim, G.padded)
            BESIDE: tl.constexpr = CODES and G.restore is None
            if G.restore is None:
                planes = query_planes(rows, unit, valid, PLANES, WIDTH, PADDED)
                operands = rounded(planes, TYPE, PLANES)
                low = rests(planes, operands, TYPE, PLANES)
                sums = row_sums(planes, PLANES)
                operand_sums = sums if PARTS == 2 else row_sums(operands, PLANES)
                score = tile_scores(
                    at, inside, start, planes, operands, low, sums, operand_sums, unit * scale, codes, meta, tables,
                    source, table, hi, slot, head, j, G, KEYS, ROWS, BN, PARTS, FLOAT, ASM,
                )  # fmt: skip
            else:
                score = unit * scale * restored_tile_scores(
                    at, inside, start, origin, rows, unit, valid, codes, meta, tables, restore, source, table, hi,
                    slot, head, j, G, KEYS, BN, FLOAT, ASM,
                )  # fmt: skip
            if BESIDE and K.outliers + K.boosts > 0:
                slab = slabs(table, at, start, hi, head, G, G.block % BN == 0)
            if BESIDE and K.boosts > 0:
                if K.whole:
                    boosts, boosts_low, lift = fold_boosts(rows, valid, meta, slab, start % G.block, G, K)
                    none = tl.zeros(score.shape, tl.float32)
                    more = add_folded_boosts(none, boosts, boosts_low, meta, slab, at % G.block, inside, K)
                    score += (more - lift[None, :]) * scale
                else:
                    score += boost_scores(rows, valid, meta, slab, at % G.block, inside, scale, G, K)
            if BESIDE and K.outliers > 0:
                score += outlier_scores(rows, valid, meta, slab, at % G.block, inside, scale, G, K, FLOAT)
            score = capped(score, softcap, CAPPED)
            seen = sight(at, origin, inside, first, last) & valid[None, :]
            of_row = q * ratio + h
            maximum = tl.load(row_maxima + of_row, mask=valid, other=0.0)
            total = tl.load(row_totals + of_row, mask=valid, other=1.0)
            share += tl.where(seen, tl.exp2(score - maximum[None, :]) / total[None, :], 0.0)
        place = received + (head * ratio + h)[None, :] * tokens + (origin + at)[:, None]
        tl.store(place, share, mask=inside[:, None] & valid[None, :] & (origin + at < tokens)[:, None])


@triton.jit(do_not_specialize=("far_stride", "table_width", "tokens", "page_tiles", "ring_tiles"))
def decode_received(
    query, codes, meta, levels, near, far, shift, signs, norms, pages, ring, sinks, block_tables, slots, lengths,
    positions, row_maxima, row_totals, received, near_stride, far_stride, query_stride_sequence, query_stride_query,
    query_stride_head, table_width, queries, ratio, window, scale, softcap, tokens, page_tiles, ring_tiles,
    G: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BN_FLOAT: tl.constexpr, PARTS: tl.constexpr,
    CODE_PARTS: tl.constexpr, FLOAT: tl.constexpr, CAPPED: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Store the weight that each token of one tile received: tiles of pages, then of the residual, then of sinks."""
    KEYS: tl.constexpr = "codes" if G.keys.bits < 16 else "pages"
    tile = tl.program_id(0)
    pid = tl.program_id(1)
    sequence = pid // G.kv_heads
    head = pid % G.kv_heads
    length = tl.load(lengths + sequence)
    slot = tl.load(slots + sequence)
    tables = level_tables(levels, G)
    restore = ((near, near_stride), (far, far_stride), shift, (signs, norms))
    table = block_tables + sequence.to(tl.int64) * table_width
    at = query + sequence.to(tl.int64) * query_stride_sequence
    rows = pid * queries * ratio
    out = received + sequence.to(tl.int64) * (G.kv_heads * ratio) * tokens
    sink_tokens = tl.minimum(length, G.sinks)
    held = length - sink_tokens
    key_paged = paged_tokens(held, G.keys)
    if tile < page_tiles:
        if tile * BN < key_paged:
            add_weights(
                out, tile * BN, 0, key_paged, sink_tokens, length, at, query_stride_query, query_stride_head, positions,
                row_maxima + rows, row_totals + rows, queries, ratio, window, scale, softcap, codes, meta, tables,
                restore, pages, table, slot, sequence, head, tokens, G, KEYS, ROWS, BN, CODE_PARTS, FLOAT, CAPPED,
                HAS_POSITIONS, ASM,
            )  # fmt: skip
    elif tile < page_tiles + ring_tiles:
        start = key_paged + (tile - page_tiles) * BN_FLOAT
        if start < held:
            add_weights(
                out, start, 0, held, sink_tokens, length, at, query_stride_query, query_stride_head, positions,
                row_maxima + rows, row_totals + rows, queries, ratio, window, scale, softcap, codes, meta, tables,
                restore, ring, table, slot, sequence, head, tokens, G, "ring", ROWS, BN_FLOAT, PARTS, FLOAT, CAPPED,
                HAS_POSITIONS, ASM,
            )  # fmt: skip
    else:
        start = (tile - page_tiles - ring_tiles) * BN_FLOAT
        if start < sink_tokens:
            add_weights(
                out, start, 0, sink_tokens, 0, length, at, query_stride_query, query_stride_head, positions,
                row_maxima + rows, row_totals + rows, queries, ratio, window, scale, softcap, codes, meta, tables,
                restore, sinks, table, slot, sequence, head, tokens, G, "sinks", ROWS, BN_FLOAT, PARTS, FLOAT, CAPPED,
                HAS_POSITIONS, ASM,
            )  # fmt: skip
