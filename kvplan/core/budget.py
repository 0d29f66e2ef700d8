"""What `kvplan check` holds a profile to where there is no other profile to compare with."""

from dataclasses import dataclass, field

from kvplan.core.workloads import QualityBudget


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one format may take and must give; None and empty are no limit.

    Attributes:
        max_bytes_per_sequence: Of the cache as allocated, for every cell's sequences at full length.
        min_sessions: Sequences that must fit the budget's memory beside the model.
        max_decode_ratio: Fused decode time over that of the best 16-bit kernel of the same run.
        max_tpot_ms: Milliseconds of one decode step by percentile.
        quality: What quantizing may cost.
    """

    max_bytes_per_sequence: int | None = None
    min_sessions: int | None = None
    max_decode_ratio: float | None = None
    max_tpot_ms: dict[int, float] = field(default_factory=dict)
    quality: QualityBudget = field(default_factory=QualityBudget)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A budget file, checked.

    Attributes:
        default: The limits of every format that has none of its own.
        formats: Limits by canonical format name; what an entry leaves out is filled from the default.
        memory_bytes: Of the whole device, for min_sessions.
        memory_utilization: The part of it that may be used, 0 to 1.
    """

    default: Limits = Limits()
    formats: dict[str, Limits] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_utilization: float = 0.9

    def limits(self, format_name: str) -> Limits:
        """Return what holds for the format of that canonical name."""
        return self.formats.get(format_name, self.default)
