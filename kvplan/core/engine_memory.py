"""The memory of a setting in another engine than kvplan's: its allocator over the workload's sequences."""

from collections.abc import Callable
from dataclasses import dataclass

from kvplan.core.allocation import Allocation, GroupedAllocation, Term
from kvplan.core.memory import DeviceMemory
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Bucket, Workload

Allocate = Callable[[ModelSpec, Workload, int], Allocation]
"""From model, workload and the sequences at once."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory(DeviceMemory):
    """The memory of one setting in an engine, of the rank that binds.

    Attributes:
        allocate: The engine's allocation for as many sequences.
        allocate_16_bit: The same unquantized.
        batched_tokens: Of a forward pass.
        batch_logits: Whether every token of a batch has logits.
    """

    allocate: Allocate
    allocate_16_bit: Allocate
    batched_tokens: int
    batch_logits: bool = False

    def chunk_tokens(self) -> int:
        """Return the most prompt tokens of one forward pass: what an engine measures its activations with."""
        return self.batched_tokens

    def logit_rows(self, sequences: int) -> int:
        """Return the tokens whose logits are held at once."""
        return max(sequences, self.batched_tokens) if self.batch_logits else sequences

    def cache_terms(self, concurrency: int) -> tuple[Term, ...]:
        """Return the geometry of all sequences, and each term that the engine adds to it."""
        allocation = self.allocate(self.model, self.workload, max(1, self._sequences(concurrency)))
        sums: dict[str, tuple[float, str]] = {}
        for bucket in self.workload.buckets:
            count, tokens = bucket.sequences(concurrency), bucket.total_tokens
            parts = [Term("geometry", allocation.logical_bytes(tokens), "geometry times format")]
            for term in (*parts, *allocation.terms(tokens)):
                sums[term.name] = (sums.get(term.name, (0.0, ""))[0] + count * term.bytes, term.formula)
            shared = self._shared_bytes(allocation, bucket) * max(0, count - 1)
            if shared:
                sums["shared prefixes"] = (sums.get("shared prefixes", (0.0, ""))[0] - shared, "whole blocks held once")
        sequences = self._sequences(concurrency)
        return tuple(Term(name, size, f"{sequences} sequences: {why}") for name, (size, why) in sums.items())

    def _sequences(self, concurrency: int) -> int:
        return sum(bucket.sequences(concurrency) for bucket in self.workload.buckets)

    def _shared_bytes(self, allocation: Allocation, bucket: Bucket) -> float:
        """Return the whole blocks at the start that the bucket's sequences can hold together.

        Windows give such blocks back, and a state is each sequence's own.
        """
        if not self.workload.prefix_caching or not isinstance(allocation, GroupedAllocation):
            return 0.0
        return sum(
            bucket.shared_prefix_tokens // group.block_tokens * group.bytes_per_block
            for group in allocation.groups
            if group.block_tokens is not None and group.held_tokens_max is None
        )

    def pool_blocks(self, concurrency: int) -> int:
        """Return the blocks that all sequences hold at full length; 0 of an engine that has none."""
        allocation = self.allocate(self.model, self.workload, max(1, self._sequences(concurrency)))
        if not isinstance(allocation, GroupedAllocation):
            return 0
        return sum(
            bucket.sequences(concurrency) * allocation.sequence_blocks(bucket.total_tokens)
            for bucket in self.workload.buckets
        )

    def effective_bits(self) -> float:
        """Return bits of an element over the workload's mix, scales counted and padding not."""
        stored, whole = (
            sum(
                bucket.share * make(self.model, self.workload, 1).logical_bytes(bucket.total_tokens)
                for bucket in self.workload.buckets
            )
            for make in (self.allocate, self.allocate_16_bit)
        )
        return 16 * stored / whole if whole else 16.0

    @property
    def residual_bytes(self) -> int:
        """None that is kept apart."""
        return 0
