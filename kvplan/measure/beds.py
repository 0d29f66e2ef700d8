"""Caches to time kernels on: a layer's pages as a server would hold them, in copies that outgrow the CPU's own cache.

A model's step reads each layer's cache once, and nothing of it is left in the processor's cache at the next step when
the caches are larger than that. A bed keeps several copies of one layer's cache and takes the next copy at every call,
so that a byte is read again only after `COLD_FACTOR` times the last-level cache of other bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import ceil
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvplan.errors import DoesNotFitError
from kvplan.measure.device import Device
from kvplan.runtime.ops import Ops
from kvplan.units import format_bytes
from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.parameters import neutral

COLD_FACTOR: Final = 4
SEED: Final = 0
_UNBOUNDED: Final = 10**9


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one length."""

    sequences: int
    tokens: int


def copies_needed(layer_bytes: Sequence[int], reads: Sequence[int], cold_bytes: int) -> list[int]:
    """Return the copies of each bed so that *cold_bytes* are read before any byte is read again.

    *layer_bytes* are the beds that are read in turn, *reads* how often each in a round. A bed either outgrows
    *cold_bytes* alone, or it has a copy for every read of as many rounds as outgrow it together.

    >>> copies_needed([10, 30], [2, 2], cold_bytes=100)
    [4, 4]
    """
    round_bytes = max(1, sum(size * count for size, count in zip(layer_bytes, reads, strict=True)))
    rounds = max(1, ceil(cold_bytes / round_bytes))
    return [
        max(1, min(ceil(cold_bytes / max(1, size)), count * rounds))
        for size, count in zip(layer_bytes, reads, strict=True)
    ]


def fitting_copies(
    layer_bytes: Sequence[int], reads: Sequence[int], cold_bytes: int, allowed_bytes: int
) -> tuple[list[int], int]:
    """Return the copies of each bed, and the bytes rotated over: *cold_bytes*, less where *allowed_bytes* are fewer.

    Raises:
        DoesNotFitError: One copy of each is more than *allowed_bytes*.
    """
    if sum(layer_bytes) > allowed_bytes:
        raise DoesNotFitError(
            f"one layer of each cache takes {format_bytes(sum(layer_bytes))}, {format_bytes(allowed_bytes)} is free"
        )
    while True:
        copies = copies_needed(layer_bytes, reads, cold_bytes)
        total = sum(size * count for size, count in zip(layer_bytes, copies, strict=True))
        if total <= allowed_bytes or max(copies) == 1:
            return copies, cold_bytes
        cold_bytes = min(cold_bytes - 1, int(cold_bytes * allowed_bytes / total))


def reads_between(device: Device, reads: Sequence[int]) -> Sequence[int]:
    """Return *reads* of each bed in a round, as `fitting_copies` takes them: no bound where a bed is sampled alone."""
    return [_UNBOUNDED] * len(reads) if device.records else reads


def synthetic(layout: KVLayout, tokens: int, device: str = "cpu", *, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """Return normal keys and values [tokens, kv_heads, head_dim] in the cache's 16-bit type, alike on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (tokens, layout.kv_heads, layout.head_dim), TORCH_FLOAT[layout.float_type]
    key, value = (torch.randn(shape, generator=generator, device="cpu").to(dtype).to(device) for _ in range(2))
    return key, value


class PagedBed:
    """Copies of one layer's cache with *groups* of sequences in it, filled by the append operation.

    Attributes:
        layout: With codes in the order that the operations take.
        batch: All sequences at full length.
        batches: The same by group.

    One sequence of each group is appended and its pages are replicated, in shuffled order as a server that has run for
    a while leaves them.
    """

    def __init__(self, layout: KVLayout, groups: Sequence[Group], ops: Ops, *, copies: int) -> None:
        self.layout = layout = ops.lay(layout)
        self.groups = tuple(groups)
        self._ops = ops
        filled = _fill(layout, self.groups, ops)
        blocks = sum(group.sequences * layout.blocks(group.tokens) for group in self.groups)
        generator = torch.Generator().manual_seed(SEED)
        order = torch.randperm(max(1, blocks), generator=generator, device="cpu").to(torch.int32)
        whole, parts = _batches(layout, self.groups, order)
        self.batch, self.batches = whole.to(ops.device), [part.to(ops.device) for part in parts]
        self.caches = _copies(_replicate(filled, self.groups, order), copies)
        self._next: Iterator[int] = count()

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return self.caches[0].nbytes

    @property
    def sequences(self) -> int:
        """Sequences held."""
        return sum(group.sequences for group in self.groups)

    def next_cache(self) -> LayerCache:
        """Return the copy that was left alone longest."""
        return self.caches[next(self._next) % len(self.caches)]

    def decode(self, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend with *query* [sequences, 1, query_heads, head_dim] to every sequence of the next copy."""
        return self._ops.decode(self.next_cache(), self.batch, query, options).output

    def decode_unfused(self, query: Tensor, options: AttentionOptions) -> None:
        """Attend as an engine without fusion does: dequantize to a temporary, then attend to that."""
        cache, start = self.next_cache(), 0
        for group, batch in zip(self.groups, self.batches, strict=True):
            key, value = self._ops.dequantize_tokens(cache, batch, group.tokens)
            attend_folded(query[start : start + group.sequences, 0], key, value, options)
            start += group.sequences

    def append_call(self, key: Tensor, value: Tensor, *, back: int) -> Callable[[], None]:
        """Return a call that appends one token to every sequence of the next copy, *back* tokens before full length."""
        device = self._ops.device
        counts = torch.ones(self.sequences, dtype=torch.int32, device=device)
        lengths = (self.batch.lengths - back).clamp(min=0)
        batch = Batch(block_tables=self.batch.block_tables, slots=self.batch.slots, lengths=lengths)
        poisons = torch.zeros(1, dtype=torch.int32, device=device)
        return lambda: self._ops.append_counting(self.next_cache(), batch, key, value, counts, poisons, most=1)


class DenseBed:
    """Copies of one layer's 16-bit K and V as torch's attention takes them, [sequences, kv_heads, tokens, dim]."""

    def __init__(self, layout: KVLayout, groups: Sequence[Group], *, copies: int, device: str = "cpu") -> None:
        self.groups = tuple(groups)
        longest = max(group.tokens for group in self.groups)
        key, value = (tensor.transpose(0, 1) for tensor in synthetic(layout, longest, device))
        split = [
            tensor[:, : group.tokens].repeat(copies, group.sequences, 1, 1, 1).unbind()
            for group in self.groups
            for tensor in (key, value)
        ]
        self.copies = [list(zip(copy[::2], copy[1::2], strict=True)) for copy in zip(*split, strict=True)]
        self._next: Iterator[int] = count()

    @property
    def nbytes(self) -> int:
        """Bytes of one copy."""
        return sum(key.nbytes + value.nbytes for key, value in self.copies[0])

    def next_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return the copy that was left alone longest: keys and values of each group."""
        return self.copies[next(self._next) % len(self.copies)]

    def decode_folded(self, query: Tensor, options: AttentionOptions) -> None:
        """Attend with torch as a careful user calls it: query heads folded, so that each KV head is read once."""
        start = 0
        for key, value in self.next_tensors():
            attend_folded(query[start : start + key.shape[0], 0], key, value, options)
            start += key.shape[0]


def attend_folded(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Return torch's attention of *query* [sequences, query_heads, dim], its heads folded by KV head."""
    kv_heads, tokens = key.shape[1], key.shape[2]
    folded = query.to(key.dtype).view(query.shape[0], kv_heads, -1, query.shape[2])
    first = first_attended(tokens, options)
    return scaled_dot_product_attention(folded, key[:, :, first:], value[:, :, first:], scale=options.scale)


def first_attended(tokens: int, options: AttentionOptions) -> int:
    """Return the first token that the newest one attends to."""
    return 0 if options.window is None else max(0, tokens - options.window)


def _fill(layout: KVLayout, groups: Sequence[Group], ops: Ops) -> LayerCache:
    blocks = [layout.blocks(group.tokens) for group in groups]
    cache = LayerCache.allocate(
        layout, blocks=max(1, sum(blocks)), slots=len(groups), device=ops.device, parameters=neutral(layout)
    )
    start = 0
    for slot, (group, needed) in enumerate(zip(groups, blocks, strict=True)):
        batch = Batch(
            block_tables=torch.arange(start, start + needed, dtype=torch.int32, device=ops.device).view(1, -1),
            slots=torch.tensor([slot], dtype=torch.int32, device=ops.device),
            lengths=torch.zeros(1, dtype=torch.int32, device=ops.device),
        )
        key, value = synthetic(layout, group.tokens, ops.device)
        ops.append(cache, batch, key, value, torch.tensor([group.tokens], dtype=torch.int32, device=ops.device))
        start += needed
    return cache


def _batches(layout: KVLayout, groups: Sequence[Group], order: Tensor) -> tuple[Batch, list[Batch]]:
    width = max(layout.blocks(group.tokens) for group in groups)
    sequences = sum(group.sequences for group in groups)
    tables = torch.zeros(sequences, width, dtype=torch.int32, device="cpu")
    lengths = torch.zeros(sequences, dtype=torch.int32, device="cpu")
    row = start = 0
    for group in groups:
        needed = layout.blocks(group.tokens)
        for _ in range(group.sequences):
            tables[row, :needed] = order[start : start + needed]
            lengths[row] = group.tokens
            row, start = row + 1, start + needed
    whole = Batch(block_tables=tables, slots=torch.arange(sequences, dtype=torch.int32, device="cpu"), lengths=lengths)
    parts, start = [], 0
    for group in groups:
        rows = slice(start, start + group.sequences)
        parts.append(Batch(block_tables=tables[rows], slots=whole.slots[rows], lengths=lengths[rows]))
        start += group.sequences
    return whole, parts


def _replicate(filled: LayerCache, groups: Sequence[Group], order: Tensor) -> LayerCache:
    layout, device = filled.layout, filled.pages.device
    pages, slots = [], []
    start = 0
    for slot, group in enumerate(groups):
        needed = layout.blocks(group.tokens)
        pages += list(range(start, start + needed)) * group.sequences
        slots += [slot] * group.sequences
        start += needed
    target = torch.empty(max(1, len(pages)), layout.page_bytes, dtype=torch.uint8, device=device)
    if pages:
        target[order.long().to(device)] = filled.pages[torch.tensor(pages, device=device)]
    rows = torch.tensor(slots, device=device)
    return replace(filled, pages=target, ring=filled.ring[rows], sinks=filled.sinks[rows])


def _copies(cache: LayerCache, copies: int) -> list[LayerCache]:
    """Return *copies* of *cache*, all in one allocation of the kind that a runtime's cache has."""
    blocks, slots = cache.pages.shape[0], cache.ring.shape[0]
    device = str(cache.pages.device)
    whole = LayerCache.allocate(cache.layout, blocks=copies * blocks, slots=copies * slots, device=device)
    split = []
    for source, target in ((cache.pages, whole.pages), (cache.ring, whole.ring), (cache.sinks, whole.sinks)):
        parts = target.view(copies, *source.shape)
        parts.copy_(source)
        split.append(parts.unbind())
    return [replace(cache, pages=pages, ring=ring, sinks=sinks) for pages, ring, sinks in zip(*split, strict=True)]
