"""Decode in Triton, on a GPU, or in Triton's interpreter."""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.calls import check_buffers, check_query
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.gpu import targets
from kvplan_kernels.gpu.geometry import DOT_SIZE_MIN, Geometry, geometry, padded_size
from kvplan_kernels.layout import ceil_div
from kvplan_kernels.rotation import multiply
from kvplan_kernels.transforms import transforming_decode

SPLIT_TOKENS_MIN: Final = 128
ROWS_MAX: Final = 32
"""Rows of one program; more are given to several, which read the cache again."""
GROUPED_ROWS_MAX: Final = 16
"""The same where scales are applied group by group, which takes registers."""
ROWS_MIN: Final = 8
FOLDED_CHANNELS_MAX: Final = 128
"""Channels whose scales two warps fold into the queries without running out of registers in the loop."""
RESTORED_TOKENS: Final = 64
"""Of a tile of keys that are read back before they are multiplied."""
FLOAT_TILE: Final = 32
MERGE_CHUNK: Final = 16
LOG2_E: Final = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a call is cut.

    Attributes:
        tokens: Of a tile.
        rows: Query rows of a program.
        warps: Of a program.
        stages: Tiles in flight.
    """

    tokens: int
    rows: int
    warps: int
    stages: int


def tiling(g: Geometry, rows: int) -> Tiling:
    """Return the tiles for *rows* query rows of a KV head.

    Tiles of keys whose scales per channel are folded into the queries lie in one group. Each warp
    keeps all query rows as operands, so more rows leave registers for fewer tokens; more warps would compute the same
    products of V again, whose planes have a few dozen channels.
    """
    grouped = g.keys.channel or max(g.keys.groups, g.values.groups) > 1
    padded = min(GROUPED_ROWS_MAX if grouped else ROWS_MAX, padded_size(rows, ROWS_MIN))
    tokens = (128 if g.quantized else 64) // (1 if padded == ROWS_MIN else 2)
    if g.keys.channel and (g.keys.whole or (g.restore is not None and g.keys.boosts)):
        tokens = min(tokens, g.keys.group)
    if g.restore is not None:  # a tile's keys are held in 16 bits, and three matrices of their size
        return Tiling(tokens=min(tokens, RESTORED_TOKENS), rows=padded, warps=2, stages=3)
    folds_much = g.keys.channel and g.padded > FOLDED_CHANNELS_MAX
    holds_more = folds_much or g.values.outliers > 0  # which are sums of their own
    return Tiling(tokens=tokens, rows=padded, warps=4 if holds_more else 2, stages=3)


def split_count(pairs: int, tokens: int, tile: int, programs: int) -> int:
    """Return into how many splits the tokens of each of *pairs* KV heads are cut: so many that all slots are taken.

    Args:
        pairs: Sequences times KV heads times blocks of rows.
        tokens: The most that a sequence can hold.
        tile: Tokens of a tile.
        programs: Programs that run at once.

    >>> split_count(8, 32768, 128, 528)
    64
    >>> split_count(528, 32768, 128, 528)
    1
    """
    most = max(1, tokens // max(SPLIT_TOKENS_MIN, tile))
    wanted = math.ceil(programs / max(1, pairs))
    share = math.ceil(math.ceil(tokens / tile) / min(wanted, most))
    return max(1, math.ceil(math.ceil(tokens / tile) / max(1, share)))


@transforming_decode(multiply)
def decode(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
    received: bool = False,
    lse: bool = False,
) -> DecodeResult:
    """Return the attention of *query* over the tokens that each sequence holds; `reference.decode` defines it.

    Block tables, slots and lengths are taken as they are. Nothing is read back from the device, but for the longest
    length where what tokens received is asked for.

    Args:
        cache: As in the definition, like all that follow, on the GPU.
        batch: As in the definition.
        query: As in the definition; any strides.
        options: As in the definition.
        sink_logits: As in the definition.
        positions: As in the definition.
        received: As in the definition.
        lse: As in the definition.
    """
    check_buffers(cache, batch)
    check_query(cache, batch, query, options, sink_logits, positions)
    target = targets.target(cache.pages.device)
    targets.check_devices(cache.pages.device, cache.ring, cache.sinks, batch.lengths, query, sink_logits, positions)
    g, form = geometry(cache.layout), cache.layout.format
    targets.check_format(form, target.arch)
    sequences, queries, heads, _ = query.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if cache.restoring is not None:
        _check_boosts(g)
        query = cache.restoring.asked(query)
    if not sequences:
        share = output.new_zeros(0, heads, 0) if received else None
        return DecodeResult(output=output, received=share, lse=output.new_zeros(0, queries, heads) if lse else None)
    ratio = heads // g.kv_heads
    rows, tiles = queries * ratio, tiling(g, queries * ratio)
    row_blocks = math.ceil(rows / tiles.rows)
    pairs = sequences * g.kv_heads
    splits = split_count(pairs * row_blocks, batch.block_tables.shape[1] * g.block, tiles.tokens, target.programs)
    middle = form.key_flush != form.value_flush and form.quantized
    rest = form.quantized or form.sink_tokens > 0
    all_splits = splits + int(middle) + int(rest)
    outputs, weights, maxima = (
        torch.empty(pairs * all_splits * rows * size, dtype=torch.float32, device=query.device)
        for size in (g.head_dim, 1, 1)
    )
    from kvplan_kernels.decode import gpu_kernels  # Triton is slow to import, and not everywhere

    row_maxima, row_totals = (torch.empty(pairs * rows, dtype=torch.float32, device=query.device) for _ in range(2))
    restore, table_strides = _restore(cache, batch)
    strides = (*table_strides, query.stride(0), query.stride(1), query.stride(2), batch.block_tables.shape[1])
    scale = options.scale / options.softcap if options.softcap else options.scale * LOG2_E
    held = (
        query, *_views(cache, restore), batch.block_tables, batch.slots, batch.lengths,
        batch.lengths if positions is None else positions.contiguous(),
    )  # fmt: skip
    compiled_for = {
        "G": g, "BN": tiles.tokens, "BN_FLOAT": FLOAT_TILE,
        "PARTS": _parts(query.dtype, TORCH_FLOAT[cache.layout.float_type]),
        "CODE_PARTS": _parts(query.dtype, _operand_type(g, cache)),
        "FLOAT": targets.float_name(cache.layout.float_type), "CAPPED": options.softcap is not None,
        "HAS_POSITIONS": positions is not None, "ASM": target.asm,
    }  # fmt: skip
    target.launch(
        gpu_kernels.decode_split, (pairs, all_splits, row_blocks), *held, outputs, weights, maxima, *strides, queries,
        ratio, rows, options.window or 0, scale, options.softcap or 0.0, splits, all_splits, ROWS=tiles.rows,
        MIDDLE=middle, PIPELINE=tiles.stages, num_warps=tiles.warps, **compiled_for,
    )  # fmt: skip
    target.launch(
        gpu_kernels.decode_merge, (rows, pairs), outputs, weights, maxima,
        output if sink_logits is None else sink_logits.contiguous(), output, row_maxima, row_totals, queries, ratio,
        rows, all_splits, G=g, CHUNK=MERGE_CHUNK, HAS_SINK_LOGITS=sink_logits is not None, num_warps=4,
    )  # fmt: skip
    logarithms = None
    if lse:
        by_head = ((row_maxima + row_totals.log2()) / LOG2_E).view(sequences, g.kv_heads, queries, ratio)
        logarithms = by_head.transpose(1, 2).reshape(sequences, queries, heads)
    if not received:
        return DecodeResult(output=output, lse=logarithms)
    from kvplan_kernels.decode import received_gpu_kernels

    tokens = _longest(cache, batch)
    share = torch.zeros(sequences, heads, tokens, dtype=torch.float32, device=query.device)
    page_tiles, ring_tiles = ceil_div(tokens, tiles.tokens), ceil_div(cache.layout.key_ring_tokens, FLOAT_TILE)
    sink_tiles = ceil_div(form.sink_tokens, FLOAT_TILE)
    target.launch(
        received_gpu_kernels.decode_received, (page_tiles + ring_tiles + sink_tiles, pairs), *held, row_maxima,
        row_totals, share, *strides, queries, ratio, options.window or 0, scale, options.softcap or 0.0, tokens,
        page_tiles, ring_tiles, ROWS=padded_size(ratio, ROWS_MIN), num_warps=4, **compiled_for,
    )  # fmt: skip
    return DecodeResult(output=output, received=share, lse=logarithms)


def _longest(cache: LayerCache, batch: Batch) -> int:
    """Return the longest length; where tensors hold nothing, the most that a block table has room for."""
    if batch.lengths.is_meta:
        return batch.block_tables.shape[1] * cache.layout.block_tokens
    return int(batch.lengths.max())


def _restore(cache: LayerCache, batch: Batch) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """Return what keys are read back by that lie as they were before RoPE, and the strides by head of both tables.

    Levels stand in for tables where keys lie as they are.
    """
    found = cache.restoring
    if found is None:
        return (cache.level_words,) * 5, (0, 0)
    near, far = found.near, found.far(cache.tokens_max(batch))
    strides = (near.stride(0), far.stride(0)) if found.side.order is not None else (0, 0)
    return (near, far, found.shift, *found.rotation), strides


def _check_boosts(g: Geometry) -> None:
    """Refuse tiles that would be of several groups of boosted channels."""
    if g.keys.boosts and g.keys.group < DOT_SIZE_MIN * max(g.keys.tokens, g.values.tokens):
        raise UnsupportedError(
            f"boosted channels of groups of {g.keys.group} tokens, stored as they were before RoPE, have no Triton "
            "kernel; use larger groups"
        )


def _views(cache: LayerCache, restore: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return pages as words and metadata, learned levels, *restore*, then pages, ring and sinks as 16-bit values."""
    dtype = TORCH_FLOAT[cache.layout.float_type]
    pages = cache.pages.view(-1)
    return (
        pages.view(torch.uint16), pages.view(torch.float16), cache.level_words, *restore, pages.view(dtype),
        cache.ring.view(-1).view(dtype), cache.sinks.view(-1).view(dtype),
    )  # fmt: skip


def _operand_type(g: Geometry, cache: LayerCache) -> torch.dtype:
    if g.keys.bits == 16:
        return TORCH_FLOAT[cache.layout.float_type]
    return torch.float16 if g.keys.half else torch.bfloat16


def _parts(held: torch.dtype, operand: torch.dtype) -> int:
    """Return how many operands hold a query exactly enough: one where its mantissa fits, else one more for the rest."""
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
    return 1 if bits[held] <= bits[operand] else 2
