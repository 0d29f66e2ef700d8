"""One sequence of a batch: what it holds, read back dense."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.views import KEY, read_pages, read_words, ring_tokens, ring_view, sink_view
from kvplan_kernels.words import float_values


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequence:
    """The place of one sequence in a cache.

    Attributes:
        cache: The layer's cache.
        blocks: int64 [blocks]: its pages, in order.
        slot: Its row in ring and sinks.
        length: Tokens held.
    """

    cache: LayerCache
    blocks: Tensor
    slot: int
    length: int

    def dense(self, prefix: str) -> Tensor:
        """Return K ("k") or V ("v"), float32 [kv_heads, length, head_dim]: sinks, then pages, then residual."""
        layout = self.cache.layout
        sinks = min(self.length, layout.format.sink_tokens)
        paged = self.length - sinks
        quantized = layout.quantized_tokens(self.length)[0 if prefix == KEY else 1]
        parts = [torch.zeros(layout.kv_heads, 0, layout.head_dim, device=self.cache.pages.device)]
        if sinks:
            words = sink_view(self.cache.sinks, layout, prefix)[self.slot]
            parts.append(self._floats(words, prefix, torch.arange(sinks)))
        if quantized:
            blocks = self.blocks[: layout.blocks(self.length)]
            levels = self.cache.learned_levels.get(prefix)
            parts.append(read_pages(self.cache.pages[blocks], layout, prefix, levels)[:, :quantized])
        if paged > quantized:
            words = ring_view(self.cache.ring, layout, prefix)[self.slot]
            parts.append(self._floats(words, prefix, torch.arange(quantized, paged) % ring_tokens(layout, prefix)))
        return torch.cat(parts, dim=1)

    def _floats(self, words: Tensor, prefix: str, tokens: Tensor) -> Tensor:
        layout = self.cache.layout
        return float_values(read_words(words, layout, prefix, 16)[:, tokens], layout.float_type)


def sequences(cache: LayerCache, batch: Batch) -> list[Sequence]:
    """Return the sequences of *batch*."""
    return [
        Sequence(cache=cache, blocks=blocks.to(torch.int64), slot=slot, length=length)
        for blocks, slot, length in zip(batch.block_tables, batch.slots.tolist(), batch.lengths.tolist(), strict=True)
    ]
