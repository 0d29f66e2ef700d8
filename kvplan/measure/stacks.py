"""One cell's kernels over all layers of a model: what a decode step asks of the cache, without the model around it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan.core.records import CellKey
from kvplan.core.specs import LayerSpec, ModelSpec
from kvplan.measure.beds import DenseBed, Group, PagedBed, synthetic
from kvplan.measure.cells import cell_layout
from kvplan.runtime.ops import Ops
from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.layout import KVLayout, ceil_div
from kvplan_kernels.parameters import neutral

PACK_COPIES: Final = 2
"""Caches that a prompt is packed into in turn; a page just written is not the next one written."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers that cache the same: one bed stands for all of them, *count* times a step."""

    layer: LayerSpec
    layout: KVLayout
    count: int

    @property
    def options(self) -> AttentionOptions:
        """What the layers' attention does, at the usual scale."""
        return AttentionOptions(scale=self.layer.head_dim**-0.5, window=self.layer.window_tokens)


def layer_runs(key: CellKey, spec: ModelSpec) -> tuple[LayerRun, ...]:
    """Return the model's layers, those that cache the same together; UnsupportedError where no kernel takes one."""
    stored = zip(spec.layers, cell_layout(key, spec).layers, strict=True)
    return tuple(LayerRun(*one, count) for one, count in Counter(stored).items())


def groups_of(key: CellKey) -> tuple[Group, ...]:
    """Return a cell's sequences at full length."""
    return tuple(Group(sequences=load.sequences, tokens=load.bucket.total_tokens) for load in key.loads)


def rotation(runs: Sequence[LayerRun], copies: Sequence[int]) -> int:
    """Return the steps in which every one of *copies* of each run's bed is read."""
    return max(ceil_div(number, run.count) for run, number in zip(runs, copies, strict=True))


def layer_bytes(run: LayerRun, groups: tuple[Group, ...]) -> int:
    """Return the bytes of one layer's cache."""
    return sum(group.sequences * run.layout.sequence_bytes(group.tokens) for group in groups)


def query_for(run: LayerRun, spec: ModelSpec, sequences: int, device: str) -> Tensor:
    """Return one query token of every sequence, [sequences, 1, query_heads, head_dim], in the model's 16-bit type."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(sequences, 1, spec.query_heads, run.layer.head_dim, generator=generator, device="cpu")
    return query.to(TORCH_FLOAT[spec.float_type]).to(device)


class Stack:
    """The paged caches of one cell, a bed for each kind of layer.

    Attributes:
        rotation: Calls of a method after which every copy of every bed was read.
    """

    def __init__(self, key: CellKey, spec: ModelSpec, ops: Ops, copies: list[int]) -> None:
        self.key = key
        self._ops = ops
        self._groups = groups_of(key)
        self._runs = layer_runs(key, spec)
        self._beds = [
            PagedBed(run.layout, self._groups, ops, copies=number)
            for run, number in zip(self._runs, copies, strict=True)
        ]
        self.rotation = rotation(self._runs, copies)
        self._queries = [query_for(run, spec, self._beds[0].sequences, ops.device) for run in self._runs]

    def decode(self) -> None:
        """Attend once in every layer."""
        for run, bed, query in zip(self._runs, self._beds, self._queries, strict=True):
            for _ in range(run.count):
                bed.decode(query, run.options)

    def decode_unfused(self) -> None:
        """Dequantize to a temporary and attend to it, in every layer."""
        for run, bed, query in zip(self._runs, self._beds, self._queries, strict=True):
            for _ in range(run.count):
                bed.decode_unfused(query, run.options)

    @property
    def append_steps(self) -> int:
        """Steps in which every flush of the format falls at least once, and a few more."""
        forms = [run.layout.format for run in self._runs]
        flushes = [flush for form in forms for flush in (form.key_flush, form.value_flush)]
        shortest = min(group.tokens for group in self._groups)
        return min(shortest, 8 + max(flush.quantum_tokens for flush in flushes))

    def append_calls(self) -> list[Callable[[], object]]:
        """Return one call a step: append a token to every sequence in every layer, up to full length."""
        tokens = [synthetic(run.layout, self._beds[0].sequences, self._ops.device) for run in self._runs]

        def step(back: int) -> Callable[[], object]:
            calls = [
                (run.count, bed.append_call(key, value, back=back))
                for run, bed, (key, value) in zip(self._runs, self._beds, tokens, strict=True)
            ]

            def call() -> None:
                for count, append in calls:
                    for _ in range(count):
                        append()

            return call

        return [step(back) for back in range(self.append_steps, 0, -1)]

    def pack_call(self, prompt_tokens: int) -> Callable[[], object]:
        """Return a call that quantizes one prompt into pages in every layer."""
        device = self._ops.device
        parts = [
            (run, [_empty_cache(run.layout, prompt_tokens, device) for _ in range(PACK_COPIES)],
             synthetic(run.layout, prompt_tokens, device))
            for run in self._runs
        ]  # fmt: skip
        counts = torch.tensor([prompt_tokens], dtype=torch.int32, device=device)
        poisons = torch.zeros(1, dtype=torch.int32, device=device)

        def call() -> None:
            for run, caches, (key, value) in parts:
                for layer in range(run.count):
                    cache, batch = caches[layer % PACK_COPIES]
                    self._ops.append_counting(cache, batch, key, value, counts, poisons, most=prompt_tokens)

        return call


class DenseStack:
    """The same sequences in torch's own layout, 16 bits.

    Attributes:
        rotation: As of `Stack`.
    """

    def __init__(self, key: CellKey, spec: ModelSpec, copies: list[int], device: str) -> None:
        groups = groups_of(key)
        self._runs = layer_runs(key, spec)
        self._beds = [
            DenseBed(run.layout, groups, copies=number, device=device)
            for run, number in zip(self._runs, copies, strict=True)
        ]
        self.rotation = rotation(self._runs, copies)
        sequences = sum(group.sequences for group in groups)
        self._queries = [query_for(run, spec, sequences, device) for run in self._runs]

    def decode(self) -> None:
        """Attend once in every layer, query heads folded."""
        for run, bed, query in zip(self._runs, self._beds, self._queries, strict=True):
            for _ in range(run.count):
                bed.decode_folded(query, run.options)


def _empty_cache(layout: KVLayout, tokens: int, device: str) -> tuple[LayerCache, Batch]:
    blocks = layout.blocks(tokens)
    batch = Batch(
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device).view(1, -1),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        lengths=torch.zeros(1, dtype=torch.int32, device=device),
    )
    return LayerCache.allocate(layout, blocks=max(1, blocks), slots=1, device=device, parameters=neutral(layout)), batch
