"""One layer's cache in tiers: every KV head of every sequence is a sequence of its own, in a cache a tier.

A tier is a `LayerCache` of one KV head: its pages are the slabs of a pool's pages. A token is put at the end of a tier,
or in the place of one that received less, which then goes on to the next tier; so nothing is ever moved within a tier,
and the order of its tokens means nothing, as their keys carry their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvplan.runtime.dense import LayerAttention
from kvplan.runtime.ops import Ops
from kvplan.runtime.scores import first_query
from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.decode.merging import merge
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.tier_formats import Score, TieredFormat


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Rows:
    """Where the KV heads of some sequences lie: one row for each, sequence by sequence.

    Attributes:
        tables: Of each tier, int32 [rows, columns]: pages of one head.
        slots: int32 [rows], each its own.
    """

    tables: tuple[Tensor, ...]
    slots: Tensor

    def batch(self, tier: int, lengths: Tensor, rows: Tensor | None = None) -> Batch:
        """Return the batch of a tier that holds *lengths*, int32 [rows]; of some *rows* alone where given."""
        table = self.tables[tier]
        if rows is None:
            return Batch(block_tables=table, slots=self.slots, lengths=lengths)
        return Batch(block_tables=table[rows], slots=self.slots[rows], lengths=lengths)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Arrival:
    """The coming of one token to every row.

    Attributes:
        positions: int64 [rows].
        before: Of each tier, the tokens held, int32 [rows].
        after: The same once it has come.
    """

    positions: Tensor
    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Carried:
    """Tokens on their way, one to each of *rows*, int64 [n].

    Attributes:
        key: 16 bits [n, 1, head_dim].
        value: As key.
        score: float32 [n]: what it received, in sum.
        since: int32 [n]: its position, or the first query that counts where that is later.
    """

    rows: Tensor
    key: Tensor
    value: Tensor
    score: Tensor
    since: Tensor

    def of(self, chosen: Tensor) -> "_Carried":
        """Return those of an index or a mask."""
        return _Carried(
            rows=self.rows[chosen], key=self.key[chosen], value=self.value[chosen], score=self.score[chosen],
            since=self.since[chosen],
        )  # fmt: skip


class _Notes:
    """What is kept of the tokens of one tier beside K and V, by page and place.

    Attributes:
        scores: float32 [pages, block_tokens].
        since: int32 [pages, block_tokens].
    """

    def __init__(self, pages: int, block_tokens: int, device: str) -> None:
        self.scores = torch.zeros(pages, block_tokens, device=device)
        self.since = torch.zeros(pages, block_tokens, dtype=torch.int32, device=device)
        self._block_tokens = block_tokens

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes + self.since.nbytes

    def write(self, table: Tensor, places: Tensor, scores: Tensor, since: Tensor) -> None:
        """Write the notes of *places*, int64 [rows, n]."""
        pages, offsets = self._at(table, places)
        self.scores[pages, offsets] = scores
        self.since[pages, offsets] = since

    def add(self, table: Tensor, scores: Tensor) -> None:
        """Add float32 [rows, n] to the first n tokens of each row; past a row's end it is 0."""
        places = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
        pages, offsets = self._at(table, places)
        flat = (pages * self._block_tokens + offsets).flatten()
        self.scores.view(-1).scatter_add_(0, flat, scores.flatten())

    def read(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and since of all that the pages of *table* have room for, [rows, places]."""
        pages = table.to(torch.int64)
        return self.scores[pages].flatten(1), self.since[pages].flatten(1)

    def _at(self, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        pages = table.to(torch.int64).gather(1, places // self._block_tokens)
        return pages, places % self._block_tokens


class TieredLayer:
    """One layer's tiers.

    Attributes:
        poisons: int32 [1]: groups found poisoned until now.
    """

    def __init__(self, form: TieredFormat, caches: Sequence[LayerCache], ops: Ops) -> None:
        """Take the layer's caches of the pools of each tier, of all its KV heads."""
        self._form = form
        self._ops = ops
        self.heads = caches[0].layout.kv_heads
        self._caches = tuple(_by_head(cache) for cache in caches)
        self._notes = (
            tuple(_Notes(cache.pages.shape[0], cache.layout.block_tokens, ops.device) for cache in self._caches)
            if form.note_bytes
            else ()
        )
        self.poisons = torch.zeros(1, dtype=torch.int32, device=ops.device)

    @property
    def note_bytes(self) -> int:
        """Bytes of scores and positions."""
        return sum(notes.nbytes for notes in self._notes)

    def fill(self, rows: Rows, key: Tensor, value: Tensor, scores: Tensor) -> None:
        """Place the tokens of a prompt, the window in the first tier, then those that received most.

        Args:
            rows: Of one sequence that holds nothing.
            key: [kv_heads, tokens, head_dim].
            value: As key.
            scores: float32 [kv_heads, tokens].
        """
        tokens, device = key.shape[1], key.device
        order = scores.clone()
        order[:, max(0, tokens - self._form.window_tokens) :] = torch.inf
        by_rank = order.argsort(dim=1, descending=True, stable=True)
        since = torch.arange(tokens, device=device).clamp_min(first_query(self._form, tokens)).to(torch.int32)
        start = 0
        for tier, length in enumerate(self._form.lengths(tokens)):
            chosen = by_rank[:, start : start + length]
            start += length
            at = chosen[..., None].expand(*chosen.shape, key.shape[2])
            batch = rows.batch(tier, torch.zeros(self.heads, dtype=torch.int32, device=device))
            counts = torch.full((self.heads,), length, dtype=torch.int32, device=device)
            keys, values = (tensor.gather(1, at).flatten(0, 1)[:, None] for tensor in (key, value))
            self._ops.append_counting(self._caches[tier], batch, keys, values, counts, self.poisons, most=length)
            if self._notes and length:
                places = torch.arange(length, device=device).expand(chosen.shape)
                self._notes[tier].write(rows.tables[tier], places, scores.gather(1, chosen), since[chosen])

    def push(self, rows: Rows, arrival: Arrival, key: Tensor, value: Tensor) -> None:
        """Put a new token of each row, [rows, head_dim], in the first tier; what has to make room goes down."""
        count = key.shape[0]
        carried = _Carried(
            rows=torch.arange(count, device=key.device), key=key[:, None], value=value[:, None],
            score=torch.zeros(count, device=key.device), since=arrival.positions.to(torch.int32),
        )  # fmt: skip
        for tier in range(len(self._caches)):
            grows = arrival.after[tier][carried.rows] > arrival.before[tier][carried.rows]
            self._write(rows, tier, carried.of(grows), arrival.before[tier][carried.rows[grows]])
            carried = carried.of(~grows)
            if not len(carried.rows):
                return
            carried = self._replace(rows, tier, carried, arrival)

    def attend(self, rows: Rows, lengths: tuple[Tensor, ...], query: Tensor, attention: LayerAttention) -> Tensor:
        """Return the attention of one query of each row, float32 [rows, query heads of each, head_dim]; note it.

        Args:
            rows: The rows.
            lengths: Of each tier, tokens held.
            query: [rows, query heads of each, head_dim].
            attention: The layer's; sink logits are of all its query heads.
        """
        options, asked = attention.options, query[:, None]
        noted = bool(self._notes)
        results = [
            self._ops.decode(cache, rows.batch(tier, held), asked, options, received=noted, lse=True)
            for tier, (cache, held) in enumerate(zip(self._caches, lengths, strict=True))
        ]
        parts = results
        if attention.sink_logits is not None:  # heads differ by row, so they are one more part and not the kernel's
            sinks = attention.sink_logits.view(self.heads, 1, -1).repeat(query.shape[0] // self.heads, 1, 1)
            parts = [*results, DecodeResult(output=torch.zeros_like(results[0].output), lse=sinks)]
        merged = merge(parts)
        for notes, table, result, share in zip(self._notes, rows.tables, results, merged.shares, strict=False):
            assert result.received is not None
            notes.add(table, (result.received * share.transpose(1, 2)).amax(1))
        return merged.output[:, 0]

    def _replace(self, rows: Rows, tier: int, carried: _Carried, arrival: Arrival) -> _Carried:
        """Put tokens in a full tier in the place of the weakest, and return what goes on: these, or they themselves.

        A token of the first tier's window is not asked; one that comes new is of it.
        """
        if not len(self._caches[tier].pages):  # the pool's sequences are too short for this tier
            return carried
        scores, since = self._notes[tier].read(rows.tables[tier][carried.rows])
        now = arrival.positions[carried.rows]
        places = torch.arange(scores.shape[1], device=scores.device)
        held = places < arrival.before[tier][carried.rows][:, None]
        if tier == 0:
            held = held & (since <= (now - self._form.window_tokens)[:, None])
        ranks = torch.where(held, self._ranks(scores, since, now[:, None]), torch.inf)
        weakest, place = ranks.min(1)
        swaps = weakest < torch.inf
        if tier:
            swaps &= self._ranks(carried.score, carried.since, now) > weakest
        coming, at = carried.of(swaps), place[swaps]
        going = self._read(rows, tier, coming.rows, at, scores[swaps, at], since[swaps, at])
        self._write(rows, tier, coming, at)
        staying = carried.of(~swaps)
        return _Carried(
            **{
                name: torch.cat([getattr(going, name), getattr(staying, name)])
                for name in ("rows", "key", "value", "score", "since")
            }
        )

    def _ranks(self, scores: Tensor, since: Tensor, now: Tensor) -> Tensor:
        """Return what tokens are compared by at position *now*: the sum of what they received, or its mean."""
        return scores if self._form.score is Score.SUM else scores / (now - since).clamp_min(1)

    def _read(self, rows: Rows, tier: int, chosen: Tensor, places: Tensor, score: Tensor, since: Tensor) -> _Carried:
        """Read one token of each of the *chosen* rows, as it is stored."""
        cache = self._caches[tier]
        block = cache.layout.block_tokens
        tables = rows.tables[tier][chosen].gather(1, places[:, None] // block)
        lengths = (places % block + 1).to(torch.int32)
        if not len(chosen):
            shape = (0, 1, cache.layout.head_dim)
            empty = torch.zeros(shape, device=places.device)
            return _Carried(rows=chosen, key=empty, value=empty, score=score, since=since)
        batch = Batch(block_tables=tables, slots=rows.slots[chosen], lengths=lengths)
        key, value = self._ops.dequantize(cache, batch)
        at = (places % block)[:, None, None, None].expand(-1, 1, 1, key.shape[3])
        key, value = (tensor.gather(2, at)[:, :, 0].float() for tensor in (key, value))
        return _Carried(rows=chosen, key=key, value=value, score=score, since=since)

    def _write(self, rows: Rows, tier: int, carried: _Carried, places: Tensor) -> None:
        """Write one token of each row at its place, and its notes."""
        if not len(carried.rows):
            return
        batch = rows.batch(tier, places.to(torch.int32), carried.rows)
        ones = torch.ones_like(batch.lengths)
        self._ops.append_counting(self._caches[tier], batch, carried.key, carried.value, ones, self.poisons, most=1)
        if self._notes:
            self._notes[tier].write(
                batch.block_tables, places.to(torch.int64)[:, None], carried.score[:, None], carried.since[:, None]
            )


def _by_head(cache: LayerCache) -> LayerCache:
    """Return a view of the cache of a layer's heads as one of a head, its slabs as pages and as many slots."""
    layout = cache.layout
    heads = layout.kv_heads
    return LayerCache(
        layout=replace(layout, kv_heads=1),
        pages=cache.pages.view(-1, layout.slab_bytes),
        ring=cache.ring.view(cache.ring.shape[0] * heads, 0),
        sinks=cache.sinks.view(cache.sinks.shape[0] * heads, 0),
    )


def rows_of(batches: Sequence[Batch], heads: int) -> Rows:
    """Return the rows of *heads* KV heads of the sequences of *batches*, one of each tier.

    Slab h of page p is page p * heads + h of a head's own.
    """
    head = torch.arange(heads, dtype=torch.int32, device=batches[0].slots.device)
    tables = tuple(
        (batch.block_tables[:, None] * heads + head[:, None]).flatten(0, 1).contiguous() for batch in batches
    )
    return Rows(tables=tables, slots=(batches[0].slots[:, None] * heads + head).flatten())
