"""What the session tells a measuring process, and what comes back: JSON, one message a line."""

from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvplan.core.records import CellKey, CellStatus, Conditions
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill
from kvplan.runtime.ops import Kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much is measured in one repeat.

    Attributes:
        kernel_samples: Samples of each kernel.
        kernel_budget_s: Time for the kernels of one group of cells; three rounds are taken in any case.
        step_samples: Samples of a whole decode step of the model.
        step_budget_s: Time for these, for one group; three rounds are taken in any case.
    """

    kernel_samples: int = 10
    kernel_budget_s: float = 10.0
    step_samples: int = 10
    step_budget_s: float = 60.0


FULL_EFFORT: Final = Effort()
QUICK_EFFORT: Final = Effort(kernel_samples=5, kernel_budget_s=1.5, step_samples=5, step_budget_s=4.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One repeat of some groups of cells, for one process.

    Attributes:
        model: As the user named it.
        has_weights: Whether the model can be run; else its kernels alone are measured.
        groups: Cells of a group are interleaved.
        memory_limit_bytes: Address space of the process; None is the system's own limit.
        calibration: File of what formats have learned; None where none of the groups' formats learns anything.
    """

    model: str
    spec: ModelSpec
    has_weights: bool
    device: str
    kernel: Kernel
    threads: int
    prefill: Prefill
    max_batched_tokens: int
    effort: Effort
    groups: tuple[tuple[CellKey, ...], ...]
    memory_limit_bytes: int | None = None
    calibration: str | None = None


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The process has loaded the model and measured what holds for all its cells.

    Attributes:
        base: Samples of figures of the machine and the model.
        missing: Why figures are absent, by name.
    """

    base: dict[str, tuple[float, ...]]
    missing: dict[str, str] = {}


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """One repeat of one cell.

    Attributes:
        figures: Samples by name.
        missing: Why figures are absent, by name.
        kernel_16bit: The implementation behind decode_16bit_s.
    """

    key: CellKey
    status: CellStatus
    reason: str = ""
    figures: dict[str, tuple[float, ...]] = {}
    missing: dict[str, str] = {}
    conditions: Conditions | None = None
    kernel_16bit: str = ""
    cold_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The process met something to tell the user: an error of `kvplan.errors`, by its class's name."""

    error: str
    message: str
    where: str = ""
    hint: str = ""


Message = Started | Measured | Refused
ENCODER: Final = msgspec.json.Encoder()
DECODER: Final[msgspec.json.Decoder[Message]] = msgspec.json.Decoder(Message)


@dataclass(kw_only=True, slots=True)
class Samples:
    """The figures of one cell while they are collected."""

    figures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    kernel_16bit: str = ""
    cold_bytes: int = 0
