"""The same passages through several caches side by side, so that logits are compared and never stored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvplan.core.workloads import Prefill
from kvplan.quality.lane import Lane, Room
from kvplan.quality.passages import Passage
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import QUERIES_MAX
from kvplan.runtime.server import Server, prefill_exact

THROUGH_CACHE_TOKENS: Final = 128
"""Tokens of one forward pass of a prompt prefilled through the cache: all but the first of them read it."""


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


class Lanes:
    """Servers that share one model, each with its own cache.

    Attributes:
        servers: One a lane, in order.
        poisoned_groups: Of each lane, until now.
    """

    def __init__(
        self, loaded: LoadedModel, lanes: Sequence[Lane], room: Room, *, chunk_tokens: int, prefill: Prefill
    ) -> None:
        self._batch = room.batch
        self._chunk_tokens = chunk_tokens
        self._prefill = prefill
        self.servers: tuple[Server[Any], ...] = tuple(lane.open(loaded, room) for lane in lanes)
        self.poisoned_groups = [0] * len(self.servers)

    def run(self, passages: Sequence[Passage], progress: Callable[[int], None]) -> Iterator[Span]:
        """Yield the logits of *passages*, all of equal lengths, span by span; *progress* hears tokens computed."""
        for first in range(0, len(passages), self._batch):
            rows = passages[first : first + self._batch]
            held = self._fill(rows, progress)
            try:
                yield from self._feed(rows, first, held, progress)
            finally:
                for server, sequences in zip(self.servers, held, strict=True):
                    for sequence in sequences:
                        server.free(sequence)

    def _fill(self, rows: Sequence[Passage], progress: Callable[[int], None]) -> list[list[Any]]:
        """Prefill every row in every lane; in mode exact the 16-bit forward pass is one for all lanes."""
        held: list[list[Any]] = [[] for _ in self.servers]
        for row in rows:
            if self._prefill is Prefill.EXACT:
                filled = prefill_exact(self.servers, row.prompt)
                progress(len(row.prompt))
            else:
                filled = [
                    server.prefill(row.prompt, self._prefill, max_batched_tokens=THROUGH_CACHE_TOKENS)
                    for server in self.servers
                ]
                progress(len(row.prompt) * len(self.servers))
            for lane, prefilled in enumerate(filled):
                held[lane].append(prefilled.sequence)
        return held

    def _feed(
        self,
        rows: Sequence[Passage],
        first: int,
        held: list[list[Any]],
        progress: Callable[[int], None],
    ) -> Iterator[Span]:
        fed = torch.tensor([row.fed for row in rows], dtype=torch.int64, device="cpu")
        for start in range(0, fed.shape[1], QUERIES_MAX):
            part = fed[:, start : start + QUERIES_MAX]
            logits = []
            for lane, (server, sequences) in enumerate(zip(self.servers, held, strict=True)):
                sizes = server.step_sizes(sequences, part.shape[1], self._chunk_tokens)
                steps = []
                for piece in torch.split(part, sizes, dim=1):
                    steps.append(server.step(sequences, piece))
                    self.poisoned_groups[lane] += server.spent.poisoned_groups
                logits.append(torch.cat(steps, dim=1))
                progress(part.numel())
            yield Span(first_passage=first, start=start, logits=tuple(logits))
