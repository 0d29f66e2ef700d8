"""Decode in Triton: attention of a few queries over pages, residual and sinks, cut along the sequence.

A program is one KV head of one sequence, one block of rows (queries x query heads of the KV head), and one split of the
tokens. It leaves its sums, their weight and their maximum in a workspace; a second kernel merges the splits. Scores are
in units of log2. The lengths are read on the device, so that a captured call serves any of them.

Matrices are [tokens or channels, rows]: tokens and channels fill the long side of a matrix product, so that few rows
leave little of it idle. A tile is BN tokens, handled as J sub-tiles where J tokens share a word: sub-tile j holds
tokens J * r + j.

Numbers that grow with the context are not specialized, here and in the other kernels: a one or a multiple of 16 among
them would be compiled for anew, which takes seconds in the midst of a run.
"""

import triton
import triton.language as tl

from kvplan_kernels.decode.outputs_gpu_kernels import (
    HALF_WEIGHT,
    add_codes,
    add_floats,
    add_outliers,
    first_units,
    zero_planes,
    zero_rows,
)
from kvplan_kernels.decode.restored_gpu_kernels import (
    all_code_values,
    asked_queries,
    float_values,
    restored_scores,
    turned_operands,
)
from kvplan_kernels.decode.scores_gpu_kernels import (
    LOG2_E,
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

LOWEST = tl.constexpr(-1e30)
FARTHEST = tl.constexpr(2147483647)


@triton.jit
def attend(
    acc, minima, units, maximum, total, lo, begin, hi, gap_at, gap, first, last, origin,
    query, valid, scale, softcap, codes, meta, tables, restore, source, table, slot, head,
    G: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    PARTS: tl.constexpr, FLOAT: tl.constexpr, CAPPED: tl.constexpr, ASM: tl.constexpr, MASKED: tl.constexpr,
    PIPELINE: tl.constexpr,
):  # fmt: skip
    """Attend to tokens *begin* to *hi*, in tiles from *lo* on but for *gap* tokens from *gap_at* on; return the sums.

    KEYS and VALUES say where K and V are: "codes" or 16-bit "pages", "ring" or "sinks". Position *origin* is that of
    token 0. Rows attend to positions *first* to *last*; without MASKED all of them attend to all tokens.
    """
    K: tl.constexpr = G.keys
    V: tl.constexpr = G.values
    D: tl.constexpr = G.head_dim
    DP: tl.constexpr = G.padded
    KEY_CODES: tl.constexpr = KEYS == "codes"
    VALUE_CODES: tl.constexpr = VALUES == "codes"
    KEY_PLANES: tl.constexpr = K.pieces if KEY_CODES else 1
    KEY_WIDTH: tl.constexpr = K.piece if KEY_CODES else D
    KEY_PADDED: tl.constexpr = K.padded_piece if KEY_CODES else DP
    KEY_PLACES: tl.constexpr = K.tokens if KEY_CODES else 1
    VALUE_PLACES: tl.constexpr = V.tokens if VALUE_CODES else 1
    J: tl.constexpr = KEY_PLACES if KEY_PLACES > VALUE_PLACES else VALUE_PLACES
    ONE_PAGE: tl.constexpr = G.block % BN == 0
    PAGED: tl.constexpr = KEY_CODES or VALUE_CODES or KEYS == "pages" or VALUES == "pages"
    FOLD: tl.constexpr = KEY_CODES and K.channel and K.whole
    TYPE: tl.constexpr = operand_type(FLOAT, K, KEY_CODES)
    unit = 1.0
    if TYPE == tl.float16:  # what may be out of fp16's range is brought into it
        unit = query_unit(query, valid, D, DP)
    planes = query_planes(query, unit, valid, KEY_PLANES, KEY_WIDTH, KEY_PADDED)
    RESTORES: tl.constexpr = G.restore is not None
    if RESTORES:  # operands are those of a tile
        asked = asked_queries(query, unit, valid, KEY_CODES, G)
    operands = rounded(planes, TYPE, KEY_PLANES)
    low = rests(planes, operands, TYPE, KEY_PLANES)
    sums = row_sums(planes, KEY_PLANES)
    operand_sums = sums if PARTS == 2 else row_sums(operands, KEY_PLANES)
    factor = unit * scale
    r = tl.arange(0, BN // J)
    for tile in tl.range(lo, hi - gap, BN, num_stages=PIPELINE):
        start = tile
        if MASKED:
            start = tl.where(tile >= gap_at, tile + gap, tile)
        token = start + J * r
        slab = tl.zeros([1], tl.int64)
        if PAGED:
            slab = slabs(table, token, start, hi, head, G, ONE_PAGE)
        in_page = start % G.block + J * r if ONE_PAGE else token % G.block
        if RESTORES:
            turned = turned_operands(asked, origin + start, head, restore, KEY_CODES, TYPE, G)
        elif FOLD:
            operands, low, operand_sums, fold_unit, bias = fold_channels(
                planes, meta, slab, start % G.block, factor, G, K, ROWS, FLOAT
            )
            if K.boosts > 0:  # codes of few bits: operands are bf16, and their unit is 1
                boost_operands, boost_low, lift = fold_boosts(query, valid, meta, slab, start % G.block, G, K)
                bias -= lift * fold_unit
        scores = ()
        most = maximum
        for j in tl.static_range(J):
            at = token + j
            inside = (at >= begin) & (at < hi)
            if KEY_CODES:
                if j % K.low.tokens == 0:
                    words = word_tiles(codes, slab, (in_page + j) // K.low.tokens, K.low, K, True)
                if K.high.bits == 0:
                    high = words
                elif j % K.high.tokens == 0:
                    high = word_tiles(codes, slab, (in_page + j) // K.high.tokens, K.high, K, True)
                if RESTORES:
                    values = all_code_values(
                        words, high, meta, tables, slab, in_page + j, inside, j % KEY_PLACES, G, FLOAT, ASM
                    )
                else:
                    score = code_scores(
                        words, high, operands, low, sums, operand_sums, meta, tables, slab, in_page + j, inside,
                        factor, j % KEY_PLACES, G, K, ROWS, 2 if FOLD else PARTS, FLOAT, ASM,
                    )  # fmt: skip
                    if FOLD:
                        if K.boosts > 0:
                            score = add_folded_boosts(
                                score, boost_operands, boost_low, meta, slab, in_page + j, inside, K
                            )
                        score = score * fold_unit + bias[None, :]
                    if K.boosts > 0 and not FOLD:
                        score += boost_scores(query, valid, meta, slab, in_page + j, inside, scale, G, K)
                    if K.outliers > 0:
                        score += outlier_scores(query, valid, meta, slab, in_page + j, inside, scale, G, K, FLOAT)
            else:
                rows = float_rows(source, slab, at, slot, head, G, K, KEYS)
                if RESTORES:
                    values = (float_values(rows, inside, D, DP),)
                else:
                    score = float_scores(operands, low, rows, inside, ROWS, PARTS, D, DP) * factor
            if RESTORES:
                score = factor * restored_scores(values, turned, J * r + j, head, restore, KEY_CODES, TYPE, G)
            score = capped(score, softcap, CAPPED)
            if MASKED:
                score = tl.where(sight(at, origin, inside, first, last), score, float("-inf"))
            most = tl.maximum(most, tl.max(score, 0))
            scores = scores + (score,)
        shrink = tl.exp2(maximum - most)
        total = total * shrink
        maximum = most
        for j in tl.static_range(J):
            at = token + j
            inside = (at >= begin) & (at < hi)
            seen = sight(at, origin, inside, first, last) if MASKED else tl.full([1, 1], 1, tl.int1)
            weight = tl.exp2(scores[j] - maximum[None, :])
            total += tl.sum(weight, 0)
            if j > 0:
                shrink = tl.full([ROWS], 1.0, tl.float32)
            if VALUE_CODES:
                if j % V.low.tokens == 0:
                    value_words = word_tiles(codes, slab, (in_page + j) // V.low.tokens, V.low, V, False)
                if V.high.bits == 0:
                    value_high = value_words
                elif j % V.high.tokens == 0:
                    value_high = word_tiles(codes, slab, (in_page + j) // V.high.tokens, V.high, V, False)
                beside = add_outliers(acc, shrink, weight, meta, slab, in_page + j, inside, G, V, FLOAT)
                acc, minima, units = add_codes(
                    acc, minima, units, shrink, weight, seen, inside, value_words, value_high, meta, tables, slab,
                    in_page + j, j % VALUE_PLACES, G, V, FLOAT, ASM, MASKED,
                )  # fmt: skip
                acc = acc + beside
            else:
                value_rows = float_rows(source, slab, at, slot, head, G, V, VALUES)
                # The few 16-bit tokens beside quantized ones must not cost as much as quantizing does.
                WEIGHT_PARTS: tl.constexpr = 1 if VALUES == "pages" else 2
                before = acc[0] * shrink[None, :]
                acc = (add_floats(before, weight, seen, value_rows, inside, D, DP, WEIGHT_PARTS, FLOAT, MASKED),)
    return acc, minima, units, maximum, total


@triton.jit
def store_part(
    acc, minima, units, maximum, total, outputs, weights, maxima, part, held, G: tl.constexpr,
    CODES: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store what a program summed at the workspace's rows *part*: outputs, their weight and the maximum."""
    V: tl.constexpr = G.values
    D: tl.constexpr = G.head_dim
    PLANES: tl.constexpr = V.pieces if CODES else 1
    WIDTH: tl.constexpr = V.piece if CODES else D
    PADDED: tl.constexpr = V.padded_piece if CODES else G.padded
    WHOLE: tl.constexpr = CODES and V.whole
    PER_GROUP: tl.constexpr = V.pieces // V.groups if WHOLE else 1
    TYPE: tl.constexpr = operand_type(FLOAT, V, CODES)
    i = tl.arange(0, PADDED)[:, None]
    for k in tl.static_range(PLANES):
        out = acc[k]
        if TYPE == tl.float16:
            out = out * (1.0 / HALF_WEIGHT)
        if WHOLE:
            unit = units[k // PER_GROUP] if V.half else 1.0
            out = out * unit + minima[k // PER_GROUP][None, :]
        if CODES and V.outliers > 0:
            out += acc[PLANES + k] * (1.0 / HALF_WEIGHT if FLOAT == tl.float16 else 1.0)
        tl.store(outputs + part[None, :] * D + k * WIDTH + i, out, mask=held[None, :] & (i < WIDTH))
    tl.store(weights + part, total, mask=held)
    tl.store(maxima + part, maximum, mask=held)


@triton.jit(do_not_specialize=("far_stride", "table_width", "splits", "all_splits"))
def decode_split(
    query, codes, meta, levels, near, far, shift, signs, norms, pages, ring, sinks, block_tables, slots, lengths,
    positions, outputs, weights, maxima, near_stride, far_stride, query_stride_sequence, query_stride_query,
    query_stride_head, table_width, queries, ratio, rows, window, scale,
    softcap, splits, all_splits,
    G: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BN_FLOAT: tl.constexpr, PARTS: tl.constexpr,
    CODE_PARTS: tl.constexpr, FLOAT: tl.constexpr, CAPPED: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    MIDDLE: tl.constexpr, ASM: tl.constexpr, PIPELINE: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one KV head of one sequence.

    Splits 0 to *splits* - 1 share the tokens whose K and V are both in pages. Where MIDDLE, the next takes those of
    which only K is. The last takes sinks and residual, where the format has any.
    """
    V: tl.constexpr = G.values
    KEYS: tl.constexpr = "codes" if G.keys.bits < 16 else "pages"
    VALUES: tl.constexpr = "codes" if V.bits < 16 else "pages"
    pid = tl.program_id(0)
    split = tl.program_id(1)
    sequence = pid // G.kv_heads
    head = pid % G.kv_heads
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    length = tl.load(lengths + sequence)
    slot = tl.load(slots + sequence)
    tables = level_tables(levels, G)
    restore = ((near, near_stride), (far, far_stride), shift, (signs, norms))
    table = block_tables + sequence.to(tl.int64) * table_width
    if HAS_POSITIONS:
        position = tl.load(positions + sequence * queries + row // ratio, mask=valid, other=-1)
    else:
        position = length - queries + row // ratio
    last = tl.minimum(position + 1, length)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    blind = (first >= last) | (row >= rows)
    first = tl.where(blind, FARTHEST, first)
    last = tl.where(blind, 0, last)
    at = query + sequence.to(tl.int64) * query_stride_sequence + (row // ratio).to(tl.int64) * query_stride_query
    at += (head * ratio + row % ratio) * query_stride_head

    sink_tokens = tl.minimum(length, G.sinks)
    tokens = length - sink_tokens
    key_paged = paged_tokens(tokens, G.keys)
    both = tl.minimum(key_paged, paged_tokens(tokens, V))
    # What no row of the program sees is not looked at.
    seen_first = tl.maximum(tl.min(first, 0) - sink_tokens, 0)
    seen_last = tl.maximum(tl.max(last, 0) - sink_tokens, 0)

    maximum = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    part = (pid.to(tl.int64) * all_splits + split) * rows + row
    if split < splits:
        acc = zero_planes(V.sums, V.padded_piece, ROWS)
        minima = zero_rows(V.groups, ROWS)
        units = first_units(V.groups)
        first_tile = tl.minimum(seen_first, both) // BN
        tiles = tl.cdiv(tl.minimum(seen_last, both), BN) - first_tile
        share = tl.cdiv(tl.maximum(tiles, 0), splits)
        lo = (first_tile + split * share) * BN
        hi = tl.minimum(tl.minimum(lo + share * BN, both), seen_last)
        # Tiles that all rows see whole, then those at the edges.
        inner = tl.maximum(tl.cdiv(tl.max(tl.where(valid, first, 0), 0) - sink_tokens, BN) * BN, lo)
        outer = tl.minimum(tl.min(tl.where(valid, last, FARTHEST), 0) - sink_tokens, hi) // BN * BN
        gap = tl.maximum(outer - inner, 0)
        acc, minima, units, maximum, total = attend(
            acc, minima, units, maximum, total, inner, inner, inner + gap, 0, 0, first, last, sink_tokens, at,
            valid, scale, softcap, codes, meta, tables, restore, pages, table, slot, head, G, KEYS, VALUES, ROWS, BN,
            CODE_PARTS, FLOAT, CAPPED, ASM, False, PIPELINE,
        )  # fmt: skip
        acc, minima, units, maximum, total = attend(
            acc, minima, units, maximum, total, lo, lo, hi, inner, gap, first, last, sink_tokens, at, valid,
            scale, softcap, codes, meta, tables, restore, pages, table, slot, head, G, KEYS, VALUES, ROWS, BN,
            CODE_PARTS, FLOAT, CAPPED, ASM, True, 1,
        )  # fmt: skip
        store_part(
            acc, minima, units, maximum, total, outputs, weights, maxima, part, valid, G, VALUES == "codes",
            FLOAT,
        )  # fmt: skip
    else:
        rest = zero_planes(1, G.padded, ROWS)
        none = zero_rows(1, ROWS)
        if MIDDLE:
            if split == splits:
                rest, none, none, maximum, total = attend(
                    rest, none, none, maximum, total, both // BN * BN, both, key_paged, 0, 0, first, last,
                    sink_tokens, at, valid, scale, softcap, codes, meta, tables, restore, ring, table, slot, head, G,
                    KEYS, "ring", ROWS, BN, CODE_PARTS, FLOAT, CAPPED, ASM, True, 1,
                )  # fmt: skip
        if split == all_splits - 1:
            rest, none, none, maximum, total = attend(
                rest, none, none, maximum, total, 0, 0, sink_tokens, 0, 0, first, last, 0, at, valid, scale,
                softcap, codes, meta, tables, restore, sinks, table, slot, head, G, "sinks", "sinks", ROWS, BN_FLOAT,
                PARTS, FLOAT, CAPPED, ASM, True, 1,
            )  # fmt: skip
            start = tl.maximum(key_paged, seen_first)
            rest, none, none, maximum, total = attend(
                rest, none, none, maximum, total, start, start, tl.minimum(tokens, seen_last), 0, 0, first, last,
                sink_tokens, at, valid, scale, softcap, codes, meta, tables, restore, ring, table, slot, head, G,
                "ring", "ring", ROWS, BN_FLOAT, PARTS, FLOAT, CAPPED, ASM, True, 1,
            )  # fmt: skip
        store_part(rest, none, none, maximum, total, outputs, weights, maxima, part, valid, G, False, FLOAT)


@triton.jit(do_not_specialize=("splits",))
def decode_merge(
    outputs, weights, maxima, sink_logits, result, row_maxima, row_totals, queries, ratio, rows, splits,
    G: tl.constexpr, CHUNK: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row: each weighs by how far its maximum is below the greatest.

    The row's maximum and total are left for whoever asks what weight a token received.
    """
    D: tl.constexpr = G.head_dim
    DP: tl.constexpr = G.padded
    row = tl.program_id(0)
    pid = tl.program_id(1)
    sequence = pid // G.kv_heads
    query_head = (pid % G.kv_heads) * ratio + row % ratio
    most = tl.full([], LOWEST, tl.float32)
    extra = tl.zeros([], tl.float32)
    logit = tl.full([], LOWEST, tl.float32)
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + query_head) * LOG2_E
        most = tl.maximum(most, logit)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        part = (pid.to(tl.int64) * splits + s) * rows + row
        most = tl.maximum(most, tl.max(tl.load(maxima + part, mask=s < splits, other=LOWEST), 0))
    if HAS_SINK_LOGITS:
        extra = tl.exp2(logit - most)
    seen = tl.zeros([], tl.float32)
    total = extra
    d = tl.arange(0, DP)
    out = tl.zeros([DP], tl.float32)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        part = (pid.to(tl.int64) * splits + s) * rows + row
        factor = tl.exp2(tl.load(maxima + part, mask=s < splits, other=LOWEST) - most)
        weight = tl.load(weights + part, mask=s < splits, other=0.0)
        seen += tl.sum(weight, 0)
        total += tl.sum(weight * factor, 0)
        mask = (s < splits)[:, None] & (d < D)[None, :]
        parts = tl.load(outputs + part[:, None] * D + d[None, :], mask=mask, other=0.0)
        out += tl.sum(parts * factor[:, None], 0)
    out = out / tl.where(total == 0, 1.0, total)
    place = ((sequence.to(tl.int64) * queries + row // ratio) * (G.kv_heads * ratio) + query_head) * D
    tl.store(result + place + d, tl.where(seen == 0, 0.0, out), mask=d < D)
    tl.store(row_maxima + pid * rows + row, most)
    tl.store(row_totals + pid * rows + row, total)
