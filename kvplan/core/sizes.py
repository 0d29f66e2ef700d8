"""Exact arithmetic of a model's cache in one format: what a sequence takes, and how many fit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvplan.core.formats import in_residual
from kvplan.core.logical import LogicalSize, logical_size, runtime_refusal
from kvplan.core.memory import layer_layouts
from kvplan.core.specs import ModelSpec
from kvplan_kernels.format import CacheFormat
from kvplan_kernels.layout import KVLayout

_CONTEXT_MAX: Final = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Layers whose pages are alike."""

    layers: int
    block_tokens: int
    bytes_per_block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedSize:
    """What the runtime takes for a sequence: whole blocks, full residual rings, sinks."""

    bytes_per_sequence: int
    growth_bytes_per_token: float
    groups: tuple[BlockGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What a pool holds.

    Attributes:
        blocks: Blocks, each a page in every layer, beside the residuals of max_concurrency sequences.
        tokens: Tokens in these blocks.
        max_concurrency: Sequences of the context.
        max_context: Tokens of a sequence that has the pool for itself; the model may have been made for fewer.
    """

    blocks: int
    tokens: int
    max_concurrency: int
    max_context: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """The size of one model's cache in one format at one context.

    Attributes:
        allocated: None where no engine that kvplan counts for allocates such a cache.
        reason: Why allocated is None.
    """

    model: str
    format: str
    context_tokens: int
    logical: LogicalSize
    allocated: AllocatedSize | None
    capacity: Capacity | None = None
    reason: str = ""


def size_cache(
    model: ModelSpec, form: CacheFormat, block_tokens: int, context_tokens: int, kv_bytes: int | None = None
) -> CacheSize:
    """Return the sizes, with the capacity of a pool of *kv_bytes* where given; logical ones alone where that is all.

    Raises:
        UnsupportedFormatError: No kernel takes the format with this model and block size, or the format says nothing
            of what the model caches.
    """
    logical = logical_size(model, form, context_tokens)
    reason = runtime_refusal(model)
    if reason:
        return CacheSize(
            model=model.name, format=form.name, context_tokens=context_tokens, logical=logical, allocated=None,
            reason=reason,
        )  # fmt: skip
    layouts = layer_layouts(model, form, block_tokens)
    return CacheSize(
        model=model.name,
        format=form.name,
        context_tokens=context_tokens,
        logical=logical,
        allocated=AllocatedSize(
            bytes_per_sequence=sum(n * layout.sequence_bytes(context_tokens) for layout, n in layouts),
            growth_bytes_per_token=_allocated_growth(layouts, context_tokens),
            groups=tuple(
                BlockGroup(layers=n, block_tokens=block_tokens, bytes_per_block=layout.page_bytes)
                for layout, n in layouts
            ),
        ),
        capacity=None if kv_bytes is None else _capacity(layouts, context_tokens, kv_bytes),
    )


def _allocated_growth(layouts: tuple[tuple[KVLayout, int], ...], context_tokens: int) -> float:
    """Return a page's bytes a token, averaged over the block; nothing while the residual has room."""
    first = layouts[0][0]
    if in_residual(first.format, context_tokens):
        return 0.0
    return sum(n * layout.page_bytes for layout, n in layouts) / first.block_tokens


def _capacity(layouts: tuple[tuple[KVLayout, int], ...], context_tokens: int, kv_bytes: int) -> Capacity:
    block_bytes = sum(n * layout.page_bytes for layout, n in layouts)
    own_bytes = sum(n * (layout.ring_bytes + layout.sink_bytes) for layout, n in layouts)
    first = layouts[0][0]

    def need(tokens: int) -> int:
        return own_bytes + first.blocks(tokens) * block_bytes

    concurrency = kv_bytes // max(1, need(context_tokens))
    blocks = max(0, kv_bytes - max(1, concurrency) * own_bytes) // block_bytes
    return Capacity(
        blocks=blocks,
        tokens=blocks * first.block_tokens,
        max_concurrency=concurrency,
        max_context=_largest(lambda tokens: need(tokens) <= kv_bytes),
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, of a condition that never turns true again."""
    low, high = 0, 1
    while high < _CONTEXT_MAX and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
