"""What was measured: cells, quality results, and the profile that holds them."""

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from kvplan.core.specs import DeviceInfo, Evidence, ModelSpec
from kvplan.core.workloads import Bucket, Prefill


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, with how it is known.

    Attributes:
        unit: s, bytes, bytes/s, share or count.
        value: The figure; of a measured one the median over repeats of each repeat's median; None where absent.
        repeats: All samples of a measured figure, one tuple a repeat; a repeat is a process of its own.
        reason: Why the figure is absent.
    """

    unit: str
    evidence: Evidence
    value: float | None = None
    repeats: tuple[tuple[float, ...], ...] = ()
    reason: str = ""

    @classmethod
    def exact(cls, unit: str, value: float) -> "Figure":
        """Return a figure of arithmetic."""
        return cls(unit=unit, evidence=Evidence.EXACT, value=value)

    @classmethod
    def measured(cls, unit: str, repeats: tuple[tuple[float, ...], ...]) -> "Figure":
        """Return a figure of samples."""
        value = median(median(samples) for samples in repeats)
        return cls(unit=unit, evidence=Evidence.MEASURED, value=value, repeats=repeats)

    @classmethod
    def absent(cls, unit: str, evidence: Evidence, reason: str) -> "Figure":
        """Return a figure that could not be had."""
        return cls(unit=unit, evidence=evidence, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Sequences of one bucket, each at the bucket's full length."""

    bucket: Bucket
    sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CellKey:
    """What a cell measures; two equal keys measure the same thing.

    Attributes:
        loads: One bucket's sequences, or several buckets' for the whole mix.
        cold: Whether buffers were rotated beyond the last-level cache between samples.
        kernel: Operation implementation and path, such as cpu/avx512_vnni.
    """

    model_digest: str
    format: str
    block_tokens: int
    loads: tuple[Load, ...]
    prefill: Prefill
    device_uuid: str
    threads: int
    kernel: str
    kvplan_version: str
    cold: bool = True

    @property
    def label(self) -> str:
        """A short name for people: format, block size, buckets with their sequences."""
        loads = "+".join(f"{load.bucket.name}x{load.sequences}" for load in self.loads)
        return f"{self.format}/b{self.block_tokens}/{loads}"


class CellStatus(StrEnum):
    """How measuring a cell ended."""

    OK = "ok"
    DISTURBED = "disturbed"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The machine while one repeat ran.

    Attributes:
        load_average: Runnable processes over the last minute, at the end.
        steal_share: Part of the cores' time that the hypervisor gave to others.
        foreign_cpu_share: Part of the cores' time that other processes took.
        clock_hz: Core clock at the start and the end, of a GPU between them too; empty where the system does not tell.
        throttle: Why the clocks were held down at any of these moments, in NVML's words; of a GPU.
        power_w: Power at the same moments; empty where nothing tells.
    """

    load_average: float
    steal_share: float
    foreign_cpu_share: float
    clock_hz: tuple[float, ...] = ()
    throttle: tuple[str, ...] = ()
    power_w: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell and what came of it.

    Attributes:
        reason: Why the status is not ok.
        figures: By name; `kvplan.core.figures.FIGURES` says what each means.
        conditions: One entry a repeat.
    """

    key: CellKey
    status: CellStatus
    reason: str = ""
    figures: dict[str, Figure] = field(default_factory=dict)
    conditions: tuple[Conditions, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityKey:
    """What a quality result scores.

    Attributes:
        chunk_tokens: Tokens scored in one forward pass.
        data_digest: SHA-256 of the text and trials scored.
        calibration: SHA-256 of what the format has learned of the model; empty where it learns nothing.
    """

    model_digest: str
    format: str
    block_tokens: int
    prefill: Prefill
    chunk_tokens: int
    data_digest: str
    kernel: str
    kvplan_version: str
    calibration: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentScore:
    """Sums over one document's scored positions, against 16 bits on the same positions. Natural logarithms.

    Attributes:
        positions: Positions scored.
        quantized_positions: Of these, those that attended to at least one quantized token.
        nll_16bit: Negative log-likelihood at 16 bits, summed.
        nll: The same through the format.
        kl: KL divergence of the format's distribution from the 16-bit one, summed.
        flips: Positions whose most likely token changed.
        kl_values: The divergence of each position, for percentiles.
    """

    positions: int
    quantized_positions: int
    nll_16bit: float
    nll: float
    kl: float
    flips: int
    kl_values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalTrial:
    """One key looked up in a long context, at 16 bits and through the format."""

    context_tokens: int
    hit_16bit: bool
    hit: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """What a format costs the model; format bf16 against bf16 is the noise floor."""

    key: QualityKey
    documents: tuple[DocumentScore, ...]
    trials: tuple[RetrievalTrial, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The file of measurements.

    Attributes:
        created: UTC, ISO 8601.
        versions: Of python, torch, transformers and what else shaped the figures.
        how: How it was measured: repeats, threads, text, command.
        base_figures: Of the machine and model as a whole: read bandwidth, memory of the loaded model.
    """

    created: str
    kvplan_version: str
    device: DeviceInfo
    model: ModelSpec
    versions: dict[str, str]
    how: dict[str, str]
    base_figures: dict[str, Figure] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    quality: tuple[Quality, ...] = ()
    schema: int = 1
