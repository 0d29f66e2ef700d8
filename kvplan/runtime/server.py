"""A model that serves sequences from a cache, whatever holds them: prefill once, then step."""

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
from kvplan.runtime.dense import LayerAttention, attend_fresh
from kvplan.runtime.forward import forward
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.stopwatch import Stopwatch
from kvplan_kernels.format import UnsupportedError

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

    def store(self, layer: int, query: Tensor, key: Tensor, value: Tensor, poisons: Tensor) -> None:
        """Store one layer's K and V of the whole prompt, [1, kv_heads, tokens, head_dim]; count poisoned groups.

        What its tokens received is told by *query*, [1, query_heads, tokens, head_dim].
        """


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
                intake.store(layer, query, key, value, self.poisons)
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
    loaded: LoadedModel,
    model_cache: Any,
    step: Any,
    token_ids: Tensor,
    positions: Tensor,
    *,
    last_only: bool,
    differentiable: bool = False,
) -> Tensor:
    """Run one forward pass as *step*, and hold it to one attention call a layer; the rest is as in `forward`."""
    switch(loaded.model)
    try:
        with running(step):
            logits = forward(
                loaded.model, model_cache, token_ids, positions, last_only=last_only, differentiable=differentiable
            )
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{loaded.spec.name}: {error}") from error
    if step.calls != len(loaded.spec.layers):
        raise UnsupportedModelError(
            f"{loaded.spec.architecture} called its attention {step.calls} times for {len(loaded.spec.layers)} layers"
        )
    return logits


def _add(total: Spent, more: Spent) -> None:
    total.append_s += more.append_s
    total.attend_s += more.attend_s
    total.total_s += more.total_s
    total.poisoned_groups += more.poisoned_groups
