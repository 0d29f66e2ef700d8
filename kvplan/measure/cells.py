"""Which cells a workload asks for, and the figures of them that are arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvplan import __version__
from kvplan.core.layouts import ModelLayout
from kvplan.core.records import Cell, CellKey, CellStatus, Figure, Load
from kvplan.core.specs import ModelSpec
from kvplan.core.tiers import UNTIMED, TieredLayout, lay_out_tiers
from kvplan.core.workloads import Prefill, Workload
from kvplan.errors import UnsupportedFormatError
from kvplan.units import format_bytes
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.layer_formats import check_formats, parse_formats
from kvplan_kernels.layout import order_of
from kvplan_kernels.tier_formats import TieredFormat

CACHE_MEMORY_SHARE: Final = 0.7
"""Of the memory left beside the weights, for one cell's cache; the rest is for activations, buffers and the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all cells of a profile have in common.

    Attributes:
        cache_bytes: Memory that one cell's cache may take.
    """

    device_uuid: str
    threads: int
    kernel: str
    prefill: Prefill
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a profile.

    Attributes:
        groups: Cells to measure; those of a group hold the same sequences and are interleaved.
        settled: Cells whose end is known without measuring: unsupported, or larger than the memory.
    """

    groups: tuple[tuple[CellKey, ...], ...]
    settled: tuple[Cell, ...]

    @property
    def keys(self) -> tuple[CellKey, ...]:
        """Every cell, settled or not."""
        return tuple(key for group in self.groups for key in group) + tuple(cell.key for cell in self.settled)


def plan_cells(
    workload: Workload, spec: ModelSpec, setting: Setting, *, formats: Sequence[str], block_tokens: Sequence[int]
) -> Grid:
    """Return a cell for each format, block size and bucket, and one for all buckets at once.

    A bucket's cell holds as many of its sequences as the target asks for, or as fit. The mix has no such cap: either
    the target fits or it does not.
    """
    groups: dict[tuple[Load, ...], list[CellKey]] = {}
    settled: list[Cell] = []
    for loads in _loads(workload):
        for name in formats:
            for block in block_tokens:
                key = _key(spec, setting, parse_formats(name).name, block, loads)
                cell = _settle(key, spec, workload, setting)
                if isinstance(cell, Cell):
                    settled.append(cell)
                else:
                    groups.setdefault(cell.loads, []).append(cell)
    return Grid(groups=tuple(tuple(keys) for keys in groups.values()), settled=tuple(settled))


def _loads(workload: Workload) -> list[tuple[Load, ...]]:
    single: list[tuple[Load, ...]] = [
        (Load(bucket=bucket, sequences=bucket.sequences(workload.target.concurrency)),) for bucket in workload.buckets
    ]
    mix = tuple(load for loads in single for load in loads)
    return [mix, *single] if len(mix) > 1 else single


def _key(spec: ModelSpec, setting: Setting, form: str, block: int, loads: tuple[Load, ...]) -> CellKey:
    return CellKey(
        model_digest=spec.digest,
        format=form,
        block_tokens=block,
        loads=loads,
        prefill=setting.prefill,
        device_uuid=setting.device_uuid,
        threads=setting.threads,
        kernel=setting.kernel,
        kvplan_version=__version__,
    )


def _settle(key: CellKey, spec: ModelSpec, workload: Workload, setting: Setting) -> CellKey | Cell:
    """Return the cell to measure, its sequences capped by memory, or what is known of it already."""
    longest = max(key.loads, key=lambda load: load.bucket.total_tokens).bucket
    if longest.total_tokens > spec.context_tokens:
        reason = (
            f"bucket {longest.name} holds {longest.total_tokens} tokens, {spec.name} was made for {spec.context_tokens}"
        )
        return Cell(key=key, status=CellStatus.UNSUPPORTED, reason=reason)
    form = parse_formats(key.format)
    try:
        check_formats(setting.kernel.partition("/")[0], form)
        figures = exact_figures(key, spec)
    except UnsupportedError as error:
        return Cell(key=key, status=CellStatus.UNSUPPORTED, reason=str(error))
    except UnsupportedFormatError as error:
        return Cell(key=key, status=CellStatus.UNSUPPORTED, reason=error.message)
    if isinstance(form, TieredFormat):
        reason = f"{form}: {UNTIMED}; its bytes are known, and quality scores it"
        return Cell(key=key, status=CellStatus.UNSUPPORTED, reason=reason, figures=figures)
    needed = figures["cache_bytes"].value or 0
    if needed <= setting.cache_bytes:
        return key
    fitting = int(setting.cache_bytes // (figures["allocated_bytes_per_sequence"].value or 1))
    if len(key.loads) == 1 and fitting:
        return replace(key, loads=(replace(key.loads[0], sequences=fitting),))
    reason = f"its cache takes {format_bytes(needed)} and {format_bytes(setting.cache_bytes)} can be used"
    return Cell(key=key, status=CellStatus.OUT_OF_MEMORY, reason=reason, figures=figures)


def cell_layout(key: CellKey, spec: ModelSpec) -> ModelLayout:
    """Return how a cell's cache is laid out; UnsupportedError where no kernel takes it."""
    return ModelLayout(spec.layouts(parse_formats(key.format), key.block_tokens, order_of(key.kernel)))


def exact_figures(key: CellKey, spec: ModelSpec) -> dict[str, Figure]:
    """Return the figures of a cell that follow from the layout alone, its sequences at full length.

    Raises:
        UnsupportedError: No kernel lays the cell out.
        UnsupportedFormatError: No kernel lays tiers out, or the model's layers are not for them.
    """
    form = parse_formats(key.format)
    if isinstance(form, TieredFormat):
        return _tiered_figures(key, lay_out_tiers(spec, form, key.block_tokens, order_of(key.kernel)))
    layout = cell_layout(key, spec)
    held = [(load.sequences, load.bucket.total_tokens) for load in key.loads]
    sequences = sum(count for count, _ in held)
    allocated = sum(count * layout.sequence_bytes(tokens) for count, tokens in held)
    logical = sum(count * layout.logical_bytes(tokens) for count, tokens in held)
    read = sum(
        count * own.logical_bytes(min(tokens, layer.window_tokens or tokens))
        for own, layer in zip(layout.layers, spec.layers, strict=True)
        for count, tokens in held
    )
    return {
        "allocated_bytes_per_sequence": Figure.exact("bytes", allocated / sequences),
        "logical_bytes_per_sequence": Figure.exact("bytes", logical / sequences),
        "cache_bytes": Figure.exact("bytes", allocated),
        "read_bytes_per_step": Figure.exact("bytes", read),
    }


def _tiered_figures(key: CellKey, layout: TieredLayout) -> dict[str, Figure]:
    """Return the same of a cell in tiers, but for what a step reads: no step of it is timed."""
    held = [(load.sequences, load.bucket.total_tokens, load.bucket.prompt_tokens) for load in key.loads]
    sequences = sum(count for count, *_ in held)
    allocated = sum(count * layout.sequence_bytes(tokens, prompt) for count, tokens, prompt in held)
    logical = sum(count * layout.logical_bytes(tokens, prompt) for count, tokens, prompt in held)
    return {
        "allocated_bytes_per_sequence": Figure.exact("bytes", allocated / sequences),
        "logical_bytes_per_sequence": Figure.exact("bytes", logical / sequences),
        "cache_bytes": Figure.exact("bytes", allocated),
    }


def cache_budget(machine_bytes: int, weight_bytes: int) -> int:
    """Return the memory that one cell's cache may take on a machine of *machine_bytes*.

    It counts all memory and not what happens to be free, so that a resumed profile asks for the same cells. The
    workload's own limit is not counted: what fits the service is arithmetic, and a plan needs the times either way.
    """
    return int(max(0, machine_bytes - weight_bytes) * CACHE_MEMORY_SHARE)
