"""A recommendation with its evidence: every setting that was looked at, target by target."""

from dataclasses import dataclass
from enum import StrEnum

from kvplan.core.latency import StepShares, TimeEstimate
from kvplan.core.memory import MemoryPlan
from kvplan.core.quality_bounds import QualityBounds
from kvplan.core.settings import Setting
from kvplan.core.specs import Evidence


class Status(StrEnum):
    """Whether a setting meets a target."""

    FITS = "fits"
    OVER = "over"
    UNDECIDED = "undecided"


class Gap(StrEnum):
    """Why a verdict is undecided."""

    NONE = ""
    MISSING = "missing"
    SPREAD = "spread"


class Quantity(StrEnum):
    """What a target limits."""

    MEMORY = "memory"
    TPOT = "tpot"
    TTFT = "ttft"
    PERPLEXITY = "perplexity increase"
    KL = "mean KL divergence"
    FLIPS = "top-1 flips"
    RETRIEVAL = "retrieval drop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One target held against one setting.

    Attributes:
        percent: Percentile of a time.
        value: Bytes, seconds, a share or nats; None where nothing was measured.
        bound: The upper bound that is held against the limit.
        gap: Why it is undecided: nothing measured, or the spread crosses the limit; none where nothing can be
            measured.
    """

    quantity: Quantity
    status: Status
    limit: float
    value: float | None = None
    bound: float | None = None
    percent: int = 0
    evidence: Evidence = Evidence.MEASURED
    gap: Gap = Gap.NONE
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One setting.

    Attributes:
        setting: Its format and block size, and what they take.
        sessions: The largest concurrency that fits into memory.
        blocks: Pages a layer that the target concurrency holds.
        slots: Sequences that the target concurrency holds, each bucket's rounded up.
        effective_bits: Of an element at the workload's lengths, residual and metadata counted.
        residual_bytes: Of one sequence.
        tpot: At the target concurrency, at the percentile of the target (95 without one).
        quality: None where not measured; 16 bits has none to lose.
    """

    setting: Setting
    memory: MemoryPlan
    sessions: int
    blocks: int
    slots: int
    effective_bits: float
    residual_bytes: int
    tpot: TimeEstimate
    ttft: TimeEstimate
    shares: StepShares | None
    quality: QualityBounds | None
    verdicts: tuple[Verdict, ...]

    @property
    def format(self) -> str:
        """As the engine names it."""
        return self.setting.format

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.setting.block_tokens

    @property
    def quantized(self) -> bool:
        """Whether anything takes fewer than 16 bits."""
        return self.setting.quantized

    @property
    def label(self) -> str:
        """The setting in words."""
        return f"{self.format} block {self.block_tokens}"

    @property
    def status(self) -> Status:
        """Over if any target is over, else undecided if any is, else fits."""
        statuses = {verdict.status for verdict in self.verdicts}
        return next((s for s in (Status.OVER, Status.UNDECIDED) if s in statuses), Status.FITS)

    @property
    def gaps(self) -> tuple[Verdict, ...]:
        """Verdicts that a measurement which was never taken would decide."""
        return tuple(verdict for verdict in self.verdicts if verdict.gap is Gap.MISSING)


class Outcome(StrEnum):
    """What a plan says."""

    KEEP_16_BIT = "keep 16 bits"
    QUANTIZE = "quantize"
    NOTHING_FITS = "nothing fits"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A change under which a setting would meet the target.

    Attributes:
        kind: sessions, context or memory.
        text: What to change, in words.
        value: The number in it: sessions, a share of the context, or bytes.
    """

    kind: str
    text: str
    value: float
    format: str
    block_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The recommendation.

    Attributes:
        engine: Whose allocator and formats it is made of.
        options: Least aggressive first; the 16-bit one is always among them.
        refused: Settings that no kernel takes, with the reason.
        percent: The percentile of TPOT shown.
        device: What times and quality were measured on; empty without measurements.
        kernels: The implementations that were timed.
        remedies: What would make the target reachable, where nothing fits.
        missing: Settings whose measurement would decide, as (format, block size, what).
        remarks: Further things to know, a sentence each.
    """

    outcome: Outcome
    sentence: str
    concurrency: int
    percent: int
    pick: Option | None
    options: tuple[Option, ...]
    engine: str = "kvplan"
    refused: tuple[tuple[str, str], ...] = ()
    device: str = ""
    kernels: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    missing: tuple[tuple[str, int, str], ...] = ()
    remarks: tuple[str, ...] = ()
    bottleneck: str = ""
