"""One layer's decode attention against torch's, in one run: the kernels alone, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import torch

from kvplan.core.records import Conditions
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.measure.bandwidth import read_pass
from kvplan.measure.beds import COLD_FACTOR, DenseBed, Group, PagedBed, fitting_copies, reads_between
from kvplan.measure.device import Device
from kvplan.measure.environment import Watch
from kvplan.measure.gate import check_decode
from kvplan.measure.rivals import build_rivals, rivals_on
from kvplan.measure.timing import Call, Sampling, sample_interleaved
from kvplan.runtime.ops import Ops
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.format import UnsupportedError, check_kernel, parse
from kvplan_kernels.layout import KVLayout

DEFAULT_FORMATS: Final = ("bf16", "int8", "int4", "kivi-k4v4-g64", "kivi-k2v2-g64")
OWN: Final = "kvplan"
READ_BYTES_MIN: Final = 2**26
_READ: Final = "read"
_MEMORY_SHARE: Final = 0.7
"""Of the available memory, for all copies together; the rest is for torch and the page cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCase:
    """The shape of one decode call: one new token of *batch* sequences of *tokens* tokens each."""

    batch: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tokens: int = 32768
    threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCell:
    """One implementation's times.

    Attributes:
        impl: kvplan or a rival's name.
        bytes: What one call has to read of the cache.
        samples_s: Every sample.
    """

    impl: str
    format: str
    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    threads: int
    median_s: float
    samples_s: tuple[float, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBench:
    """The result of one run.

    Attributes:
        read_bandwidth_bytes_per_s: The machine's, on the same number of threads.
        kernel: The implementation behind kvplan's cells.
        cold_bytes: What was rotated over, so that no call found its cache warm.
        cold_bytes_wanted: Four times the last-level cache.
        conditions: The machine meanwhile.
        not_compared: Why other implementations were not, by name.
    """

    read_bandwidth_bytes_per_s: float
    cells: tuple[DecodeCell, ...]
    kernel: str
    cold_bytes: int
    cold_bytes_wanted: int
    conditions: Conditions
    not_compared: dict[str, str] = field(default_factory=dict)

    def best_16bit_s(self) -> float:
        """Return the time of the fastest 16-bit implementation."""
        return min(cell.median_s for cell in self.cells if parse(cell.format).float_type is not None)


def bench_decode(
    device: Device, ops: Ops, case: DecodeCase, *, formats: Sequence[str], block_tokens: int, samples: int
) -> DecodeBench:
    """Return the times of each of *formats* and of torch on the same shape, interleaved, buffers rotated.

    Raises:
        UnsupportedFormatError: No kernel takes a format with this shape.
        MismatchError: A kernel disagrees with its definition.
        DoesNotFitError: One copy of each cache is more than the memory there is.
    """
    torch.set_num_threads(case.threads)
    layouts = {name: _layout(name, ops, case, block_tokens) for name in formats}
    for layout in layouts.values():
        check_decode(ops, layout, case.query_heads)
    wanted = COLD_FACTOR * device.info.last_level_cache_bytes
    allowed = int(device.available_bytes() * _MEMORY_SHARE)
    read, read_size = read_pass(device, case.threads, min(max(wanted, READ_BYTES_MIN), allowed // 3))
    timed, not_compared, rotated = _timed(device, ops, case, layouts, wanted, allowed - read_size)
    calls = {_READ: read, **{name: one.call for name, one in timed.items()}}
    rotations = {name: one.rotation for name, one in timed.items()}
    with Watch(device) as watch:
        times = sample_interleaved(device, calls, Sampling(samples=samples), rotations)
        conditions = watch.conditions()
    bandwidth = read_size / median(times.pop(_READ))
    cells = tuple(_cell(case, name, timed[name].read_bytes, found) for name, found in times.items())
    return DecodeBench(
        read_bandwidth_bytes_per_s=bandwidth, cells=cells, kernel=ops.name, cold_bytes=rotated,
        cold_bytes_wanted=wanted, conditions=conditions, not_compared=not_compared,
    )  # fmt: skip


def _layout(name: str, ops: Ops, case: DecodeCase, block_tokens: int) -> KVLayout:
    if case.query_heads % case.kv_heads:
        raise InputError(
            f"{case.query_heads} query heads for {case.kv_heads} KV heads",
            where="--query-heads",
            hint=f"use a multiple of {case.kv_heads}",
        )
    try:
        form = parse(name)
        check_kernel(ops.name.partition("/")[0], form)
        return ops.lay(KVLayout(format=form, kv_heads=case.kv_heads, head_dim=case.head_dim, block_tokens=block_tokens))
    except UnsupportedError as error:
        raise UnsupportedFormatError(str(error), where="--format") from error


@dataclass(frozen=True, slots=True)
class _Timed:
    """A call to time, the bytes that it has to read, and the calls after which all copies were read."""

    call: Call
    read_bytes: int
    rotation: int


def _timed(
    device: Device, ops: Ops, case: DecodeCase, layouts: dict[str, KVLayout], wanted: int, allowed: int
) -> tuple[dict[str, _Timed], dict[str, str], int]:
    """Return what to time, why others are not, and the bytes that one rotation covers."""
    groups = (Group(sequences=case.batch, tokens=case.tokens),)
    dense = KVLayout(format=parse("bf16"), kv_heads=case.kv_heads, head_dim=case.head_dim, block_tokens=16)
    read = {name: round(case.batch * layout.logical_bytes(case.tokens)) for name, layout in layouts.items()}
    dense_bytes = round(case.batch * dense.logical_bytes(case.tokens))
    rivals, missing = rivals_on(device.info.kind)
    sizes = [*read.values(), *(dense_bytes for _ in rivals)]
    copies, rotated = fitting_copies(sizes, reads_between(device, [1] * len(sizes)), wanted, allowed)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(case.batch, 1, case.query_heads, case.head_dim, generator=generator, device="cpu")
    query, options = query.bfloat16().to(ops.device), AttentionOptions(scale=case.head_dim**-0.5)
    timed: dict[str, _Timed] = {}
    for (name, layout), number in zip(layouts.items(), copies, strict=False):
        call = _bind(PagedBed(layout, groups, ops, copies=number), query, options)
        timed[f"{OWN} {name}"] = _Timed(call, read[name], number)
    number = sum(copies[len(layouts) :]) // (1 + sum(rival.copies_cache for rival in rivals))
    bed = DenseBed(dense, groups, copies=number, device=ops.device)
    rival_calls, failed = build_rivals(rivals, bed, query[:, 0], options)
    for name, rival_call in rival_calls.items():
        timed[f"{name} bf16"] = _Timed(rival_call, dense_bytes, number)
    return timed, missing | failed, rotated


def _bind(bed: PagedBed, query: torch.Tensor, options: AttentionOptions) -> Call:
    return lambda: bed.decode(query, options)


def _cell(case: DecodeCase, name: str, size: int, samples: tuple[float, ...]) -> DecodeCell:
    impl, form = name.split(" ")
    return DecodeCell(
        impl=impl,
        format=form,
        batch=case.batch,
        query_heads=case.query_heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        tokens=case.tokens,
        threads=case.threads,
        median_s=median(samples),
        samples_s=samples,
        bytes=size,
    )
