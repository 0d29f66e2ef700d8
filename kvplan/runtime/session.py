"""A model that serves sequences from a cache: prefill and step, whatever holds them; and kvplan's own paged one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvplan.core.workloads import Prefill
from kvplan.errors import InputError, UnsupportedFormatError, UnsupportedModelError
from kvplan.runtime.attention import Asked, handover_cache, running, switch
from kvplan.runtime.chunks import chunk_sizes
from kvplan.runtime.dense import LayerAttention, attend_fresh
from kvplan.runtime.forward import forward
from kvplan.runtime.learned import layer_parameters
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import QUERIES_MAX, Kernel, Ops, load_ops
from kvplan.runtime.pool import CachedSequence, CachePool
from kvplan.runtime.stopwatch import Stopwatch
from kvplan.store.calibrations import Calibration
from kvplan_kernels.cache import Batch
from kvplan_kernels.format import UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat

MAX_BATCHED_TOKENS: Final = 8192


@dataclass(kw_only=True, slots=True)
class Spent:
    """Seconds that the cache operations of one call took, over all layers, and groups found poisoned.

    On a GPU the parts of a step are those of starting it: to wait for each would slow what is measured.

    Attributes:
        append_s: Quantizing and storing new tokens; of a prefill the device's own time.
        attend_s: Attention over the paged cache.
        total_s: The whole call.
    """

    append_s: float = 0.0
    attend_s: float = 0.0
    total_s: float = 0.0
    poisoned_groups: int = 0


class Held(Protocol):
    """A sequence in a cache.

    Attributes:
        length: Tokens held.
    """

    length: int


HeldT = TypeVar("HeldT", bound=Held)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Prefilled(Generic[HeldT]):
    """A prompt in the cache.

    Attributes:
        logits: [vocabulary], after the last token.
        spent: `append_s` is the time of packing K and V; `total_s` less that is the 16-bit prefill of mode exact.
    """

    sequence: HeldT
    logits: Tensor
    spent: Spent


class Intake(Protocol[HeldT]):
    """A sequence that waits for its prompt.

    Attributes:
        sequence: Empty until the whole prompt is stored.
    """

    sequence: HeldT

    def store(self, layer: int, key: Tensor, value: Tensor, poisons: Tensor) -> None:
        """Store one layer's K and V of the whole prompt, [1, kv_heads, tokens, head_dim]; count poisoned groups."""


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


class OrderedStep:
    """The order of calls that every step insists on: a layer hands over, then it attends."""

    def __init__(self, layers: Sequence[LayerAttention]) -> None:
        self.layers = layers
        self.calls = 0
        self._pending = -1

    def update(self, layer: int) -> None:
        """Note which layer attends next."""
        self._pending = layer

    def mask(self, function: Callable[..., Any], arguments: dict[str, Any]) -> object:
        """Return nothing: attention masks by position."""
        return None

    def begin(self, layer: int) -> None:
        """Refuse a layer that attends out of turn; count the call."""
        if layer != self._pending:
            raise UnsupportedModelError(f"layer {layer} attends without having handed over its keys")
        self._pending = -1
        self.calls += 1


class _FreshStep(OrderedStep):
    """Attention of a whole prompt over its own 16-bit K and V, which are then stored in every target's cache."""

    def __init__(self, loaded: LoadedModel, intakes: Sequence[Intake[Any]]) -> None:
        super().__init__(loaded.layers)
        self._intakes = intakes
        self.appending = Stopwatch(loaded.device)
        self.poisons = torch.zeros(1, dtype=torch.int32, device=loaded.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        output = attend_fresh(query, key, value, self.layers[layer])
        with self.appending.running():
            for intake in self._intakes:
                intake.store(layer, key, value, self.poisons)
        return output


class _PagedIntake:
    """A sequence with pages for a prompt."""

    def __init__(self, runtime: "Runtime", sequence: CachedSequence, tokens: int) -> None:
        self.sequence = sequence
        self._ops = runtime.ops
        self._caches = runtime.pool.caches
        self._batch = runtime.pool.batch([sequence])
        self._counts = torch.tensor([tokens], dtype=torch.int32, device=runtime.ops.device)

    def store(self, layer: int, key: Tensor, value: Tensor, poisons: Tensor) -> None:
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


class Server(ABC, Generic[HeldT]):
    """One model with one kind of cache.

    Several may share a loaded model; each has a cache of its own.

    Attributes:
        loaded: The model.
        name: What records call the code that stores and attends.
        spent: Of the last call of `step` or `extend`.
    """

    loaded: LoadedModel
    name: str
    spent: Spent

    def prefill(
        self,
        token_ids: Sequence[int],
        mode: Prefill = Prefill.EXACT,
        *,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
    ) -> Prefilled[HeldT]:
        """Bring a prompt into the cache.

        Args:
            token_ids: The prompt, at least one token.
            mode: `exact` computes the whole prompt in 16 bits and then stores it. `through_cache` computes the first
                *max_batched_tokens* so, and lets later chunks attend to the quantized cache.
            max_batched_tokens: Tokens of one forward pass of mode through_cache.

        Raises:
            DoesNotFitError: The cache is full; it is as before.
        """
        if mode is Prefill.EXACT:
            return prefill_exact([self], token_ids)[0]
        first = prefill_exact([self], token_ids[:max_batched_tokens])[0]
        logits, spent = first.logits, first.spent
        try:
            self.reserve(first.sequence, len(token_ids) - first.sequence.length)
            for start in range(max_batched_tokens, len(token_ids), max_batched_tokens):
                logits = self.extend(first.sequence, token_ids[start : start + max_batched_tokens])
                _add(spent, self.spent)
        except BaseException:
            self.free(first.sequence)
            raise
        return Prefilled(sequence=first.sequence, logits=logits, spent=spent)

    @abstractmethod
    def admit(self, tokens: int) -> Intake[HeldT]:
        """Return a new sequence that waits for a prompt of *tokens*.

        Raises:
            DoesNotFitError: The cache is full; it is as before.
        """

    @abstractmethod
    def reserve(self, sequence: HeldT, tokens: int) -> None:
        """Make room for *tokens* more.

        Raises:
            DoesNotFitError: There is none; the sequence is as before.
        """

    @abstractmethod
    def step_sizes(self, sequences: list[HeldT], tokens: int, limit: int) -> list[int]:
        """Return how to cut *tokens* into steps of at most *limit* that read the cache as single tokens would.

        Args:
            sequences: Of equal lengths.
            tokens: To append to each.
            limit: 1 or more.
        """

    @abstractmethod
    def extend(self, sequence: HeldT, token_ids: Sequence[int]) -> Tensor:
        """Append a chunk of any length that attends to the cache, and return logits [vocabulary] after its last token.

        What later chunks of a prompt, later turns and the rest of a prompt after a shared prefix do.
        """

    @abstractmethod
    def step(self, sequences: list[HeldT], token_ids: Tensor) -> Tensor:
        """Append and attend, and return logits [batch, tokens, vocabulary].

        Args:
            sequences: Of any lengths.
            token_ids: int64 [batch, tokens], 1 to 32 tokens each.

        Raises:
            DoesNotFitError: The cache is full.
        """

    @abstractmethod
    def free(self, sequence: HeldT) -> None:
        """Give back what *sequence* holds."""


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


def prefill_exact(targets: Sequence[Server[HeldT]], token_ids: Sequence[int]) -> list[Prefilled[HeldT]]:
    """Compute a prompt once in 16 bits and store it in the cache of every target; they share one loaded model.

    No dense K or V outlives its layer's forward pass.
    """
    if not token_ids:
        raise InputError("an empty prompt has nothing to attend to")
    started, spent, loaded = perf_counter(), Spent(), targets[0].loaded
    intakes: list[Intake[HeldT]] = []
    try:
        for target in targets:
            intakes.append(target.admit(len(token_ids)))  # noqa: PERF401 - those before one that fails are freed
        step = _FreshStep(loaded, intakes)
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=loaded.device)
        positions = torch.arange(len(token_ids), device=loaded.device)[None]
        model_cache = handover_cache(len(loaded.spec.layers))
        logits = run_step(loaded, model_cache, step, ids, positions, last_only=True)
    except BaseException:
        for target, intake in zip(targets, intakes, strict=False):
            target.free(intake.sequence)
        raise
    for intake in intakes:
        intake.sequence.length = len(token_ids)
    spent.poisoned_groups = int(step.poisons.item())  # waits for the device
    spent.append_s = step.appending.seconds()
    spent.total_s = perf_counter() - started
    return [Prefilled(sequence=intake.sequence, logits=logits[0, -1], spent=spent) for intake in intakes]


def run_step(
    loaded: LoadedModel, model_cache: Any, step: Any, token_ids: Tensor, positions: Tensor, *, last_only: bool
) -> Tensor:
    """Run one forward pass as *step*, and hold it to one attention call a layer."""
    switch(loaded.model)
    try:
        with running(step):
            logits = forward(loaded.model, model_cache, token_ids, positions, last_only=last_only)
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{loaded.spec.name}: {error}") from error
    if step.calls != len(loaded.spec.layers):
        raise UnsupportedModelError(
            f"{loaded.spec.architecture} called its attention {step.calls} times for {len(loaded.spec.layers)} layers"
        )
    return logits


def _chunks(batch: Batch, sizes: Sequence[int]) -> list[_Chunk]:
    chunks, first, before = [], 0, batch
    for size in sizes:
        counts = torch.full_like(batch.lengths, size)
        after = before.after(counts)
        chunks.append(_Chunk(first=first, last=first + size, before=before, after=after, counts=counts))
        first, before = first + size, after
    return chunks


def _add(total: Spent, more: Spent) -> None:
    total.append_s += more.append_s
    total.attend_s += more.attend_s
    total.total_s += more.total_s
    total.poisoned_groups += more.poisoned_groups
