"""The memory of a setting whose tokens lie in tiers, in kvplan's own runtime."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplan.core.allocation import Term
from kvplan.core.memory import TABLE_STEP_BLOCKS, DeviceMemory, MemoryModel
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.core.tiers import TieredLayout, lay_out_tiers, scored_queries
from kvplan.core.workloads import Bucket, Workload
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import BLOCK_TABLE_ENTRY_BYTES, Order, round_up
from kvplan_kernels.tier_formats import TieredFormat

_ROW_BYTES: Final = 12
"""Slot of a head of a sequence, int32, and the position of its new token, int64."""
_ROW_TIER_BYTES: Final = 8
"""What it holds of a tier before and after that token, int32 each."""
_PROBABILITY_COPIES: Final = 3
"""Scores before and after the softmax, and what they are masked into."""


@dataclass(frozen=True, kw_only=True)
class TieredMemory(DeviceMemory):
    """The memory of a setting in tiers.

    No prefix is shared: what a page holds is what the queries behind the prefix chose.

    Attributes:
        order: Of codes in the caches of the kernel that runs; few head sizes take other bytes in another.
    """

    form: TieredFormat
    block_tokens: int
    order: Order = Order.LANES

    @cached_property
    def layout(self) -> TieredLayout:
        """How all tiers are laid out."""
        return lay_out_tiers(self.model, self.form, self.block_tokens, self.order)

    @property
    def residual_bytes(self) -> int:
        """None that is kept apart: the window lies in the first tier."""
        return 0

    def tier_blocks(self, concurrency: int) -> tuple[int, ...]:
        """Return the blocks of each tier that all sequences hold at full length."""
        total = [0] * len(self.form.tiers)
        for bucket in self.workload.buckets:
            sequences = bucket.sequences(concurrency)
            total = [held + sequences * each for held, each in zip(total, self._blocks(bucket), strict=True)]
        return tuple(total)

    def pool_blocks(self, concurrency: int) -> int:
        """Return the blocks of all tiers that all sequences hold at full length."""
        return sum(self.tier_blocks(concurrency))

    def cache_terms(self, concurrency: int) -> tuple[Term, ...]:
        """Return what the caches of all sequences take at full length."""
        layout, blocks = self.layout, self.tier_blocks(concurrency)
        sequences = sum(bucket.sequences(concurrency) for bucket in self.workload.buckets)
        notes = sum(blocks) * layout.block_tokens * layout.note_bytes
        columns = sum(max(TABLE_STEP_BLOCKS, round_up(count, TABLE_STEP_BLOCKS)) for count in self._longest_blocks())
        heads, entry = layout.heads_max, BLOCK_TABLE_ENTRY_BYTES
        row = _ROW_BYTES + _ROW_TIER_BYTES * len(layout.tiers)
        pages = tuple(
            Term(
                f"pages {tier.name}",
                count * own.block_bytes,
                f"{count} blocks of {self.block_tokens} tokens x {own.block_bytes} B in all layers",
            )
            for tier, own, count in zip(self.form.tiers, layout.tiers, blocks, strict=True)
        )
        return (
            *pages,
            Term(
                "scores and positions", notes, f"{sum(blocks)} blocks of tokens x {layout.note_bytes} B in all layers"
            ),
            Term(
                "block tables",
                sequences * heads * (columns * entry + row),
                f"{sequences} sequences x {heads} heads x ({columns} columns x {entry} B + {row} B)",
            ),
        )

    def _working_terms(self, concurrency: int) -> tuple[Term, ...]:
        return (*super()._working_terms(concurrency), *self._scoring_terms(concurrency))

    def _scoring_terms(self, concurrency: int) -> tuple[Term, ...]:
        """Return what is held while a prompt's tokens are scored, and while a step's attention is noted."""
        heads, dim = self.model.query_heads, max(layer.head_dim for layer in self.model.layers)
        prompt = max(bucket.prompt_tokens for bucket in self.workload.buckets)
        queries = scored_queries(self.form, heads, prompt)
        scoring = Term(
            "prompt scores",
            4 * heads * prompt * (dim + _PROBABILITY_COPIES * queries),
            f"{heads} query heads x {prompt} tokens x ({dim} + {_PROBABILITY_COPIES} x {queries} queries) x 32 bits",
            Evidence.PREDICTED,
        )
        if not self.form.note_bytes:
            return (scoring,)
        sequences = sum(bucket.sequences(concurrency) for bucket in self.workload.buckets)
        places = sum(self._longest_blocks()) * self.block_tokens
        received = Term(
            "attention received",
            4 * sequences * heads * places,
            f"{sequences} sequences x {heads} query heads x {places} places in tiers x 32 bits",
            Evidence.PREDICTED,
        )
        return scoring, received

    def _longest_blocks(self) -> list[int]:
        """Return the most blocks of each tier that a sequence holds."""
        return [max(counts) for counts in zip(*map(self._blocks, self.workload.buckets), strict=True)]

    def effective_bits(self) -> float:
        """Return bits of one element over the workload's mix at full length, of tokens dropped as well."""
        buckets = self.workload.buckets
        stored = sum(b.share * self.layout.logical_bytes(b.total_tokens, b.prompt_tokens) for b in buckets)
        return 8 * stored / (self.layout.elements * sum(b.share * b.total_tokens for b in buckets))

    def _blocks(self, bucket: Bucket) -> tuple[int, ...]:
        return self.layout.blocks(bucket.total_tokens, bucket.prompt_tokens)


def runtime_memory(
    form: ModelFormat, block_tokens: int, workload: Workload, model: ModelSpec, memory_bytes: int, order: Order
) -> DeviceMemory:
    """Return the memory of a setting in kvplan's own runtime."""
    if isinstance(form, TieredFormat):
        return TieredMemory(
            model=model, workload=workload, form=form, block_tokens=block_tokens, memory_bytes=memory_bytes, order=order
        )
    return MemoryModel(
        model=model, workload=workload, form=form, block_tokens=block_tokens, memory_bytes=memory_bytes, order=order
    )
