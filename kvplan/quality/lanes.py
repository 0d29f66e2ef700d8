"""The same passages through several caches side by side, so that logits are compared and never stored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan.core.layouts import lay_out
from kvplan.core.specs import ModelSpec
from kvplan.core.workloads import Prefill
from kvplan.quality.passages import Passage
from kvplan.runtime.chunks import chunk_sizes
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import QUERIES_MAX, Kernel, unfused
from kvplan.runtime.pool import CachedSequence
from kvplan.runtime.session import Runtime, prefill_exact
from kvplan.store.calibrations import Calibration
from kvplan_kernels.format import CacheFormat, parse
from kvplan_kernels.layer_formats import ModelFormat

THROUGH_CACHE_TOKENS: Final = 128
"""Tokens of one forward pass of a prompt prefilled through the cache: all but the first of them read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One way to compute the passages.

    Attributes:
        unfused: Whether torch's own attention reads the cache, and not the kernel.
    """

    format: ModelFormat
    unfused: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Span:
    """Logits at positions [start, start + n) of what passages are fed.

    Attributes:
        first_passage: Index of the first row's passage.
        logits: One tensor [batch, n, vocabulary] a lane, in the model's own type.
    """

    first_passage: int
    start: int
    logits: tuple[Tensor, ...]


def reference_format(spec: ModelSpec) -> CacheFormat:
    """Return the 16-bit format of the model's own type, which everything is compared with."""
    return parse(spec.float_type)


class Lanes:
    """Runtimes that share one model, each with its own cache format."""

    def __init__(
        self,
        loaded: LoadedModel,
        lanes: Sequence[Lane],
        *,
        block_tokens: int,
        tokens: int,
        batch: int,
        chunk_tokens: int,
        prefill: Prefill,
        kernel: Kernel | str,
        threads: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self._lanes = tuple(lanes)
        self._batch = batch
        self._chunk_tokens = chunk_tokens
        self._prefill = prefill
        self.runtimes = tuple(
            Runtime(
                loaded,
                lane.format,
                block_tokens=block_tokens,
                blocks=batch * lay_out(loaded.spec, lane.format, block_tokens).blocks(tokens),
                slots=batch,
                kernel=kernel,
                threads=threads,
                calibration=calibration,
            )
            for lane in lanes
        )
        for runtime, lane in zip(self.runtimes, lanes, strict=True):
            if lane.unfused:
                runtime.ops = unfused(runtime.ops)
        self.poisoned_groups = [0] * len(self._lanes)

    def run(self, passages: Sequence[Passage], progress: Callable[[int], None]) -> Iterator[Span]:
        """Yield the logits of *passages*, all of equal lengths, span by span; *progress* hears tokens computed."""
        for first in range(0, len(passages), self._batch):
            rows = passages[first : first + self._batch]
            held = self._fill(rows, progress)
            try:
                yield from self._feed(rows, first, held, progress)
            finally:
                for runtime, sequences in zip(self.runtimes, held, strict=True):
                    for sequence in sequences:
                        runtime.free(sequence)

    def _fill(self, rows: Sequence[Passage], progress: Callable[[int], None]) -> list[list[CachedSequence]]:
        """Prefill every row in every lane; in mode exact the 16-bit forward pass is one for all lanes."""
        held: list[list[CachedSequence]] = [[] for _ in self.runtimes]
        for row in rows:
            if self._prefill is Prefill.EXACT:
                filled = prefill_exact(self.runtimes, row.prompt)
                progress(len(row.prompt))
            else:
                filled = [
                    runtime.prefill(row.prompt, self._prefill, max_batched_tokens=THROUGH_CACHE_TOKENS)
                    for runtime in self.runtimes
                ]
                progress(len(row.prompt) * len(self.runtimes))
            for lane, prefilled in enumerate(filled):
                held[lane].append(prefilled.sequence)
        return held

    def _feed(
        self,
        rows: Sequence[Passage],
        first: int,
        held: list[list[CachedSequence]],
        progress: Callable[[int], None],
    ) -> Iterator[Span]:
        fed = torch.tensor([row.fed for row in rows], dtype=torch.int64, device="cpu")
        prompt = len(rows[0].prompt)
        for start in range(0, fed.shape[1], QUERIES_MAX):
            part = fed[:, start : start + QUERIES_MAX]
            logits = []
            for lane, (runtime, sequences) in enumerate(zip(self.runtimes, held, strict=True)):
                sizes = chunk_sizes(self._lanes[lane].format, prompt + start, part.shape[1], self._chunk_tokens)
                steps = []
                for piece in torch.split(part, sizes, dim=1):
                    steps.append(runtime.step(sequences, piece))
                    self.poisoned_groups[lane] += runtime.spent.poisoned_groups
                logits.append(torch.cat(steps, dim=1))
                progress(part.numel())
            yield Span(first_passage=first, start=start, logits=tuple(logits))
