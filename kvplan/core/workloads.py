"""What a service is asked to do, and what it must keep to."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Final

BATCHED_TOKENS: Final = 8192


class Prefill(StrEnum):
    """What later chunks of a prompt, later turns and prefix hits attend to: 16-bit K and V, or the cache."""

    EXACT = "exact"
    THROUGH_CACHE = "through_cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Requests of one shape.

    Attributes:
        share: Part of the concurrent sequences, 0 to 1.
        shared_prefix_tokens: Tokens at the start of the prompt that all of the bucket's sequences share.
    """

    name: str
    prompt_tokens: int
    generate_tokens: int
    share: float = 1.0
    shared_prefix_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of a sequence at full length."""
        return self.prompt_tokens + self.generate_tokens

    def sequences(self, concurrency: int) -> int:
        """Return how many sequences the bucket holds at *concurrency*.

        >>> Bucket(name="chat", prompt_tokens=1, generate_tokens=1, share=0.3).sequences(32)
        10
        """
        return ceil(round(self.share * concurrency, 9))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the service must hold: sequences at once, and times by percentile (95 -> milliseconds)."""

    concurrency: int
    ttft_ms: dict[int, float] = field(default_factory=dict)
    tpot_ms: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityBudget:
    """What quantizing may cost against 16 bits; None is no constraint. Shares are fractions: 1% is 0.01.

    Attributes:
        confidence: Of the upper bound that is held against the budget.
    """

    max_perplexity_increase: float | None = None
    max_kl: float | None = None
    max_top1_flips: float | None = None
    max_retrieval_drop: float | None = None
    confidence: float = 0.95

    @property
    def constrains(self) -> bool:
        """Whether there is a budget at all."""
        limits = (self.max_perplexity_increase, self.max_kl, self.max_top1_flips, self.max_retrieval_drop)
        return any(limit is not None for limit in limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """How requests arrive; burstiness 1 is Poisson."""

    rate_per_s: float
    burstiness: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The settings to choose among."""

    formats: tuple[str, ...] = ("bf16", "int8", "k8v4", "kivi-k4v4-g64-r128", "int4", "kivi-k2v2-g64-r128", "int2")
    block_tokens: tuple[int, ...] = (64,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A workload YAML, checked.

    Attributes:
        memory_bytes: Of the whole device; None takes the device's own.
        memory_utilization: The part of it that may be used, 0 to 1.
        max_batched_tokens: Prompt tokens of one forward pass; None is the engine's own, BATCHED_TOKENS of kvplan's.
        weights: How weights are held, bf16 or fewer bits.
    """

    model: str
    buckets: tuple[Bucket, ...]
    target: Target
    device: str = "auto"
    memory_bytes: int | None = None
    memory_utilization: float = 0.9
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    weights: str = "bf16"
    engine: str | None = None
    max_batched_tokens: int | None = None
    prefix_caching: bool = True
    prefill: Prefill = Prefill.EXACT
    arrival: Arrival | None = None
    quality: QualityBudget = QualityBudget()
    search: Search = Search()

    @property
    def batched_tokens(self) -> int:
        """Prompt tokens of one forward pass of kvplan's runtime."""
        return self.max_batched_tokens or BATCHED_TOKENS
