"""How much memory a setting takes, term by term, and how many sessions fit.

The counts are those of kvplan's own runtime: every layer keeps every token (a sliding layer too, and masks by window),
a block number means the same page in all layers, and full blocks of a shared prefix are held once.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplan.core.activations import MLP_WIDTHS, activation_bytes
from kvplan.core.allocation import Term
from kvplan.core.layouts import ModelLayout, lay_out
from kvplan.core.specs import Evidence, ModelSpec
from kvplan.core.workloads import Bucket, Prefill, Workload
from kvplan.errors import InputError
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import BLOCK_TABLE_ENTRY_BYTES, Order, round_up

SESSIONS_MAX: Final = 1 << 20
"""Where the search for the largest concurrency stops."""
TABLE_STEP_BLOCKS: Final = 16
"""Columns by which the runtime widens its block tables when a sequence outgrows them."""
WEIGHT_BITS: Final = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
_SEQUENCE_ENTRY_BYTES: Final = 8
"""Slot and length of a sequence, int32 each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What a setting takes at a concurrency, against what there is.

    Attributes:
        limit_bytes: Of the device, memory_utilization applied.
    """

    weights: Term
    cache: tuple[Term, ...]
    working: tuple[Term, ...]
    limit_bytes: int

    @property
    def terms(self) -> tuple[Term, ...]:
        """All parts, largest things first as a reader asks for them."""
        return (self.weights, *self.cache, *self.working)

    @property
    def cache_bytes(self) -> int:
        """Pages, residuals, sinks and block tables."""
        return int(sum(term.bytes for term in self.cache))

    @property
    def need_bytes(self) -> int:
        """All terms together."""
        return int(sum(term.bytes for term in self.terms))

    @property
    def free_for_cache_bytes(self) -> int:
        """What weights and working memory leave."""
        return int(self.limit_bytes - self.weights.bytes - sum(term.bytes for term in self.working))

    @property
    def fits(self) -> bool:
        """Whether the need is within the limit."""
        return self.need_bytes <= self.limit_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceMemory(ABC):
    """The memory of one model with one setting under one workload, as a function of concurrency, of one rank.

    Attributes:
        memory_bytes: Of the whole device.
    """

    model: ModelSpec
    workload: Workload
    memory_bytes: int

    @abstractmethod
    def cache_terms(self, concurrency: int) -> tuple[Term, ...]:
        """Return what the caches of all sequences take at full length."""

    @abstractmethod
    def pool_blocks(self, concurrency: int) -> int:
        """Return the blocks that all sequences hold at full length."""

    @abstractmethod
    def effective_bits(self) -> float:
        """Return bits of one element over the workload's mix at full length, residual and metadata counted."""

    @property
    @abstractmethod
    def residual_bytes(self) -> int:
        """What a sequence keeps in 16 bits beside its quantized tokens."""

    def plan(self, concurrency: int) -> MemoryPlan:
        """Return every term at *concurrency*."""
        return MemoryPlan(
            weights=self.weights,
            cache=self.cache_terms(concurrency),
            working=self._working_terms(concurrency),
            limit_bytes=int(self.memory_bytes * self.workload.memory_utilization),
        )

    @cached_property
    def weights(self) -> Term:
        """The weights as one rank holds them.

        Raises:
            InputError: The model's files say nothing of its weights.
        """
        whole = self._whole_weights()
        ranks = self.workload.tensor_parallel * self.workload.pipeline_parallel
        if ranks == 1:
            return whole
        return Term(whole.name, -(-int(whole.bytes) // ranks), f"{whole.formula} / {ranks} ranks", whole.evidence)

    def _whole_weights(self) -> Term:
        model, kind = self.model, self.workload.weights
        if kind not in WEIGHT_BITS:
            raise InputError(f"weights {kind!r} are not known", hint=f"use one of {', '.join(WEIGHT_BITS)}")
        if WEIGHT_BITS[kind] == 16 and model.weight_bytes is not None:
            formula = "as loaded, 16 bits" if model.has_weights else "as the model's config describes them"
            return Term("weights", model.weight_bytes, formula, model.weight_evidence)
        if model.parameters is None:
            reason = f": {model.weights_unknown}" if model.weights_unknown else ""
            raise InputError(f"{model.name} has no weights to count{reason}", hint="name a model with its weights")
        size = model.parameters * WEIGHT_BITS[kind] // 8
        return Term(
            "weights", size, f"{model.parameters} parameters x {WEIGHT_BITS[kind]} bits, no scales", Evidence.PREDICTED
        )

    def _working_terms(self, concurrency: int) -> tuple[Term, ...]:
        model = self.model
        sequences = sum(bucket.sequences(concurrency) for bucket in self.workload.buckets)
        tokens = max(self.chunk_tokens(), sequences)
        ranks = self.workload.tensor_parallel
        state = model.query_heads * (max(layer.head_dim for layer in model.layers) + 2)
        return (
            Term(
                "activations",
                activation_bytes(model, tokens) // ranks,
                f"{tokens} tokens x 16 bits x ({2 + MLP_WIDTHS} hidden sizes + 2 (query + KV heads) x head size)",
                Evidence.PREDICTED,
            ),
            Term(
                "logits",
                self.logit_rows(sequences) * model.vocab_size * 6 // ranks,
                f"{self.logit_rows(sequences)} sequences x {model.vocab_size} tokens x (16 + 32 bits)",
                Evidence.PREDICTED,
            ),
            Term(
                "attention workspace",
                sequences * state * 4 // ranks,
                f"{sequences} sequences x query heads x (head size + 2) x 32 bits",
                Evidence.PREDICTED,
            ),
        )

    def logit_rows(self, sequences: int) -> int:
        """Return the tokens whose logits are held at once: each sequence's last."""
        return sequences

    def chunk_tokens(self) -> int:
        """Return the most prompt tokens of one forward pass: `exact` computes a prompt whole."""
        longest = max(bucket.prompt_tokens for bucket in self.workload.buckets)
        return longest if self.workload.prefill is Prefill.EXACT else min(longest, self.workload.batched_tokens)

    def sessions(self) -> int:
        """Return the largest concurrency that fits, each bucket holding ceil(share x concurrency) sequences."""
        low, high = 0, 1
        while high <= SESSIONS_MAX and self.plan(high).fits:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.plan(middle).fits else (low, middle)
        return low


@dataclass(frozen=True, kw_only=True)
class MemoryModel(DeviceMemory):
    """The memory of a setting in kvplan's own runtime.

    Attributes:
        order: Of codes in the caches of the kernel that runs; few head sizes take other bytes in another.
    """

    form: ModelFormat
    block_tokens: int
    order: Order = Order.LANES

    @cached_property
    def layout(self) -> ModelLayout:
        """How all layers are laid out."""
        return lay_out(self.model, self.form, self.block_tokens, self.order)

    @property
    def residual_bytes(self) -> int:
        """What a sequence keeps in 16 bits: its residual and its sinks."""
        return self.layout.own_bytes

    def sequence_bytes(self, bucket: Bucket) -> int:
        """Return the cache of one sequence of the bucket at full length, nothing shared."""
        return self.layout.sequence_bytes(bucket.total_tokens)

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a sequence of *tokens*; the same in every layer."""
        return self.layout.blocks(tokens)

    def shared_blocks(self, bucket: Bucket) -> int:
        """Return the whole blocks at the start that all sequences of the bucket can hold together.

        It is shared as it stood when it ended: what was in the residual then is each sequence's own.
        """
        return self.layout.whole_blocks(bucket.shared_prefix_tokens) if self.workload.prefix_caching else 0

    def pool_blocks(self, concurrency: int) -> int:
        """Return the blocks that all sequences hold at full length."""
        total = 0
        for bucket in self.workload.buckets:
            sequences, shared = bucket.sequences(concurrency), self.shared_blocks(bucket)
            if sequences:
                total += sequences * (self.blocks(bucket.total_tokens) - shared) + shared
        return total

    def cache_terms(self, concurrency: int) -> tuple[Term, ...]:
        """Return what the caches of all sequences take at full length."""
        sequences = sum(bucket.sequences(concurrency) for bucket in self.workload.buckets)
        blocks = self.pool_blocks(concurrency)
        longest = max(self.blocks(bucket.total_tokens) for bucket in self.workload.buckets)
        columns = max(TABLE_STEP_BLOCKS, round_up(longest, TABLE_STEP_BLOCKS))
        entry, pair = BLOCK_TABLE_ENTRY_BYTES, _SEQUENCE_ENTRY_BYTES
        block, ring, sinks = self.layout.block_bytes, self.layout.ring_bytes, self.layout.sink_bytes
        return (
            Term(
                "pages",
                blocks * block,
                f"{blocks} blocks of {self.block_tokens} tokens x {block} B in all layers",
            ),
            Term("residual", sequences * ring, f"{sequences} sequences x {ring} B in 16 bits"),
            Term("sinks", sequences * sinks, f"{sequences} sequences x {sinks} B in 16 bits"),
            Term(
                "block tables",
                sequences * (columns * entry + pair),
                f"{sequences} sequences x ({columns} columns x {entry} B + {pair} B)",
            ),
        )

    def effective_bits(self) -> float:
        """Return bits of one element over the workload's mix at full length, residual and metadata counted."""
        loads = [(bucket.total_tokens, bucket.share) for bucket in self.workload.buckets]
        per_token = sum(2 * layout.kv_heads * layout.head_dim for layout in self.layout.layers)
        elements = per_token * sum(tokens * share for tokens, share in loads)
        return 8 * sum(share * self.layout.logical_bytes(tokens) for tokens, share in loads) / elements
