"""The memory of a model's cache: pages for all layers, handed out block by block to sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import torch
from torch import Tensor

from kvplan.core.layouts import lay_out
from kvplan.core.memory import TABLE_STEP_BLOCKS
from kvplan.core.specs import ModelSpec
from kvplan.errors import DoesNotFitError
from kvplan.runtime.memory import require_memory
from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import Order
from kvplan_kernels.parameters import NOTHING_LEARNED, LayerParameters

_UNUSED: Final = 0


@dataclass(kw_only=True, eq=False, slots=True)
class CachedSequence:
    """One sequence in a pool.

    Attributes:
        slot: Its row in ring and sinks.
        length: Tokens held.
        blocks: Its pages, in order; the same in every layer.
    """

    slot: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)


class CachePool:
    """Every layer's cache, and which sequence holds which page.

    A block number means the same page in every layer, so one block table serves all of them. Pages are counted: a full
    page of a shared prefix belongs to several sequences and is freed with the last. *parameters* are what the format
    has learned, layer by layer.

    Raises:
        DoesNotFitError: The memory for it is not there.
        UnsupportedFormatError: No kernel takes the format with this model and block size.
    """

    def __init__(
        self,
        spec: ModelSpec,
        form: ModelFormat,
        *,
        block_tokens: int,
        blocks: int,
        slots: int,
        order: Order = Order.LANES,
        device: str = "cpu",
        parameters: Sequence[LayerParameters] = (),
    ) -> None:
        self.format = form
        self.block_tokens = block_tokens
        self._device = device
        self.layout = lay_out(spec, form, block_tokens, order)
        needed = self.layout.pool_bytes(blocks=blocks, slots=slots)
        require_memory(needed, f"the {form} cache of {blocks} blocks for {slots} sequences", device)
        self.caches = tuple(
            LayerCache.allocate(layout, blocks=blocks, slots=slots, device=device, parameters=learned)
            for layout, learned in zip(self.layout.layers, parameters or repeat(NOTHING_LEARNED), strict=False)
        )
        self._free_blocks = list(range(blocks - 1, -1, -1))
        self._free_slots = list(range(slots - 1, -1, -1))
        self._holders = [0] * blocks
        self._tables = _tables(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' pages, residuals and sinks."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def free_blocks(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free_blocks)

    def open(self) -> CachedSequence:
        """Return an empty sequence.

        Raises:
            DoesNotFitError: Every slot is taken.
        """
        if not self._free_slots:
            raise DoesNotFitError(f"all {len(self._tables)} sequences of the cache are in use")
        return CachedSequence(slot=self._free_slots.pop())

    def grow(self, sequence: CachedSequence, tokens: int) -> None:
        """Give *sequence* the pages that *tokens* more tokens need.

        Raises:
            DoesNotFitError: There are not enough free pages; the sequence is as before.
        """
        needed = self.layout.blocks(sequence.length + tokens) - len(sequence.blocks)
        if needed <= 0:
            return
        self._check_free(needed, f"{sequence.length + tokens} tokens of a sequence")
        for _ in range(needed):
            self._hold(sequence, self._take())

    def fork(self, sequence: CachedSequence, count: int, *, copy: bool = False) -> list[CachedSequence]:
        """Return *count* new sequences that hold what *sequence* holds.

        Args:
            sequence: Stays as it is.
            count: New sequences.
            copy: Whether each gets pages of its own; else full pages are shared, as a prefix cache does.

        Raises:
            DoesNotFitError: There are not enough free pages or slots; nothing has changed.
        """
        shared = 0 if copy else self.layout.whole_blocks(sequence.length)
        own = len(sequence.blocks) - shared
        self._check_free(own * count, f"{count} copies of a sequence of {sequence.length} tokens")
        if count > len(self._free_slots):
            raise DoesNotFitError(f"{count} more sequences: the cache has room for {len(self._free_slots)}")
        return [self._copy(sequence, shared) for _ in range(count)]

    def free(self, sequence: CachedSequence) -> None:
        """Give back the slot of *sequence*, and those of its pages that nobody else holds."""
        for block in sequence.blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free_blocks.append(block)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.length, sequence.slot = [], 0, -1

    def batch(self, sequences: list[CachedSequence]) -> Batch:
        """Return the tensors that kernels need, with the lengths of now."""
        width = max(1, *(len(sequence.blocks) for sequence in sequences))
        slots = torch.tensor([sequence.slot for sequence in sequences], dtype=torch.int32, device="cpu")
        lengths = torch.tensor([sequence.length for sequence in sequences], dtype=torch.int32, device="cpu")
        tables = self._tables[:, :width].index_select(0, slots)
        return Batch(block_tables=tables, slots=slots, lengths=lengths).to(self._device)

    def _check_free(self, needed: int, purpose: str) -> None:
        if needed > len(self._free_blocks):
            raise DoesNotFitError(
                f"{purpose}: {needed} more blocks of {self.block_tokens} tokens are needed, "
                f"{len(self._free_blocks)} of {len(self._holders)} are free"
            )

    def _take(self) -> int:
        block = self._free_blocks.pop()
        self._holders[block] = 1
        return block

    def _hold(self, sequence: CachedSequence, block: int) -> None:
        if len(sequence.blocks) == self._tables.shape[1]:
            self._tables = torch.cat([self._tables, _tables(len(self._tables))], dim=1)
        self._tables[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)

    def _copy(self, source: CachedSequence, shared: int) -> CachedSequence:
        twin = self.open()
        twin.length = source.length
        for block in source.blocks[:shared]:
            self._holders[block] += 1
            self._hold(twin, block)
        for _ in source.blocks[shared:]:
            self._hold(twin, self._take())
        old, new = (
            torch.tensor(sequence.blocks[shared:], dtype=torch.int64, device=self._device)
            for sequence in (source, twin)
        )
        for cache in self.caches:
            if len(old):
                cache.pages[new] = cache.pages[old]
            cache.ring[twin.slot] = cache.ring[source.slot]
            cache.sinks[twin.slot] = cache.sinks[source.slot]
        return twin


def _tables(slots: int) -> Tensor:
    """Return more columns of block tables; they stay on the host, which writes them."""
    return torch.full((slots, TABLE_STEP_BLOCKS), _UNUSED, dtype=torch.int32, device="cpu")
