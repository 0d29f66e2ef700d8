"""kvplan's own paged cache behind a model: sequences in pages, through its kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.chunks import chunk_sizes
from kvplan.runtime.learned import layer_parameters
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import QUERIES_MAX, Kernel, Ops, load_ops
from kvplan.runtime.pool import CachedSequence, CachePool
from kvplan.runtime.server import OrderedStep, Server, Spent, run_step
from kvplan.store.calibrations import Calibration
from kvplan_kernels.cache import Batch
from kvplan_kernels.layer_formats import ModelFormat


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Chunk:
    """Tokens [first, last) of a call: append them, then let them attend."""

    first: int
    last: int
    before: Batch
    after: Batch
    counts: Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Inputs:
    """What a forward pass over the paged cache takes, on the device."""

    token_ids: Tensor
    positions: Tensor
    chunks: list[_Chunk]


class _PagedIntake:
    """A sequence with pages for a prompt."""

    def __init__(self, runtime: "Runtime", sequence: CachedSequence, tokens: int) -> None:
        self.sequence = sequence
        self._ops = runtime.ops
        self._caches = runtime.pool.caches
        self._batch = runtime.pool.batch([sequence])
        self._counts = torch.tensor([tokens], dtype=torch.int32, device=runtime.ops.device)

    def store(self, layer: int, query: Tensor, key: Tensor, value: Tensor, poisons: Tensor) -> None:
        keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        cache, most = self._caches[layer], keys.shape[0]
        self._ops.append_counting(cache, self._batch, keys, values, self._counts, poisons, most=most)


class _PagedStep(OrderedStep):
    """Attention over the paged cache, after the new tokens were appended to it."""

    def __init__(self, runtime: "Runtime", chunks: Sequence[_Chunk], spent: Spent) -> None:
        super().__init__(runtime.loaded.layers)
        self._ops = runtime.ops
        self._caches = runtime.pool.caches
        self._chunks = chunks
        self._spent = spent
        self.poisons = torch.zeros(1, dtype=torch.int32, device=runtime.ops.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        by_token = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if len(self._chunks) == 1:
            return self._attend_chunk(layer, self._chunks[0], *by_token)
        parts = [
            self._attend_chunk(layer, chunk, *(tensor[:, chunk.first : chunk.last] for tensor in by_token))
            for chunk in self._chunks
        ]
        return torch.cat(parts, dim=1)

    def _attend_chunk(self, layer: int, chunk: _Chunk, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Take [batch, tokens, heads, head_dim] each."""
        attention, cache, spent = self.layers[layer], self._caches[layer], self._spent
        started = perf_counter()
        self._ops.append_counting(
            cache, chunk.before, key.flatten(0, 1), value.flatten(0, 1), chunk.counts, self.poisons, most=key.shape[1]
        )
        appended = perf_counter()
        result = self._ops.decode(cache, chunk.after, query, attention.options, sink_logits=attention.sink_logits)
        output = result.output.to(query.dtype)
        spent.append_s += appended - started
        spent.attend_s += perf_counter() - appended
        return output


class Runtime(Server[CachedSequence]):
    """One model with one of kvplan's formats, in pages.

    Attributes:
        ops: The kernels it calls.
        pool: The memory; `pool.caches` are the layers' caches.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        form: ModelFormat,
        *,
        block_tokens: int,
        blocks: int,
        slots: int,
        kernel: Kernel | str = Kernel.CPU,
        threads: int | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.loaded = loaded
        self.format = form
        self.ops: Ops = load_ops(kernel, threads, loaded.device)
        self.name = self.ops.name
        self.pool = CachePool(
            loaded.spec, form, block_tokens=block_tokens, blocks=blocks, slots=slots, order=self.ops.order,
            device=self.ops.device, parameters=layer_parameters(loaded, form, calibration),
        )  # fmt: skip
        self.spent = Spent()
        self._model_cache = handover_cache(len(loaded.spec.layers))

    def admit(self, tokens: int) -> _PagedIntake:
        """Return a new sequence with pages for a prompt; see `Server.admit`."""
        sequence = self.pool.open()
        try:
            self.pool.grow(sequence, tokens)
        except BaseException:
            self.pool.free(sequence)
            raise
        return _PagedIntake(self, sequence, tokens)

    def reserve(self, sequence: CachedSequence, tokens: int) -> None:
        """Give *sequence* the pages that *tokens* more need; see `Server.reserve`."""
        self.pool.grow(sequence, tokens)

    def step_sizes(self, sequences: list[CachedSequence], tokens: int, limit: int) -> list[int]:
        """Return steps that begin where groups are flushed; see `Server.step_sizes`."""
        return chunk_sizes(self.format, sequences[0].length, tokens, limit)

    def extend(self, sequence: CachedSequence, token_ids: Sequence[int]) -> Tensor:
        """Append a chunk that attends to the cache; see `Server.extend`."""
        sizes = chunk_sizes(self.format, sequence.length, len(token_ids), QUERIES_MAX, single=False)
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.ops.device)
        return self._run([sequence], ids, sizes, last_only=True)[0, -1]

    def step(self, sequences: list[CachedSequence], token_ids: Tensor) -> Tensor:
        """Append and attend; see `Server.step`."""
        if not 1 <= token_ids.shape[1] <= QUERIES_MAX:
            raise ValueError(f"{token_ids.shape[1]} tokens a step: 1 to {QUERIES_MAX}")
        return self._run(sequences, token_ids, [token_ids.shape[1]], last_only=False)

    def recordable(self, sequences: list[CachedSequence], token_ids: Tensor) -> Callable[[], Tensor]:
        """Return a call that does the next step of *sequences* and reads nothing back, so that a device can record it.

        It stores the same tokens at the same place every time; the sequences do not grow.

        Args:
            sequences: Of any lengths.
            token_ids: As of `step`.

        Raises:
            DoesNotFitError: The pool is full.
        """
        inputs = self._inputs(sequences, token_ids, [token_ids.shape[1]])
        return lambda: self._compute(inputs, Spent(), last_only=False)[0]

    def fork(self, sequence: CachedSequence, count: int, *, copy: bool = False) -> list[CachedSequence]:
        """Return *count* sequences that go on from *sequence*; see `CachePool.fork`."""
        return self.pool.fork(sequence, count, copy=copy)

    def free(self, sequence: CachedSequence) -> None:
        """Give back what *sequence* holds."""
        self.pool.free(sequence)

    def _run(
        self, sequences: list[CachedSequence], token_ids: Tensor, sizes: Sequence[int], *, last_only: bool
    ) -> Tensor:
        started = perf_counter()
        self.spent = Spent()
        logits, poisons = self._compute(self._inputs(sequences, token_ids, sizes), self.spent, last_only=last_only)
        for sequence in sequences:
            sequence.length += token_ids.shape[1]
        self.spent.poisoned_groups = int(poisons.item())  # waits for the device
        self.spent.total_s = perf_counter() - started
        return logits

    def _inputs(self, sequences: list[CachedSequence], token_ids: Tensor, sizes: Sequence[int]) -> _Inputs:
        tokens, device = token_ids.shape[1], self.ops.device
        for sequence in sequences:
            self.pool.grow(sequence, tokens)
        batch = self.pool.batch(sequences)
        positions = batch.lengths.to(torch.int64)[:, None] + torch.arange(tokens, device=device)
        return _Inputs(token_ids=token_ids.to(device), positions=positions, chunks=_chunks(batch, sizes))

    def _compute(self, inputs: _Inputs, spent: Spent, *, last_only: bool) -> tuple[Tensor, Tensor]:
        """Return logits, and the number of groups found poisoned."""
        step = _PagedStep(self, inputs.chunks, spent)
        logits = run_step(self.loaded, self._model_cache, step, inputs.token_ids, inputs.positions, last_only=last_only)
        return logits, step.poisons


def _chunks(batch: Batch, sizes: Sequence[int]) -> list[_Chunk]:
    chunks, first, before = [], 0, batch
    for size in sizes:
        counts = torch.full_like(batch.lengths, size)
        after = before.after(counts)
        chunks.append(_Chunk(first=first, last=first + size, before=before, after=after, counts=counts))
        first, before = first + size, after
    return chunks
