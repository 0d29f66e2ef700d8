"""kvplan's paged cache in tiers behind a model: tokens lie where the attention they received puts them.

Tokens come one by one, whatever the chunk: each is placed, then attends to all tiers, then what it gave is noted. So a
chunk reads what single tokens would have read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvplan.core.tiers import TieredLayout, lay_out_tiers
from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.memory import require_memory
from kvplan.runtime.ops import QUERIES_MAX, Kernel, Ops, load_ops
from kvplan.runtime.pool import CachedSequence, CachePool
from kvplan.runtime.scores import prompt_scores
from kvplan.runtime.server import OrderedStep, Server, Spent, run_step
from kvplan.runtime.tier_cache import Arrival, Rows, TieredLayer, rows_of
from kvplan_kernels.tier_formats import TieredFormat


@dataclass(kw_only=True, eq=False, slots=True)
class TieredSequence:
    """One sequence.

    Attributes:
        parts: Of each tier, the sequence of its pool.
        length: Tokens that came, those dropped among them.
        prompt_tokens: Of them, those that were placed at once.
    """

    parts: tuple[CachedSequence, ...]
    length: int = 0
    prompt_tokens: int = 0


class TieredRuntime(Server[TieredSequence]):
    """One model with one of the formats in tiers.

    Attributes:
        ops: The kernels it calls.
        pools: The memory of each tier.
        layers: The layers' tiers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        form: TieredFormat,
        *,
        block_tokens: int,
        blocks: tuple[int, ...],
        slots: int,
        kernel: Kernel | str = Kernel.CPU,
        threads: int | None = None,
    ) -> None:
        """Allocate pools of *blocks* blocks, one of each tier, for *slots* sequences.

        Raises:
            DoesNotFitError: The memory for it is not there.
            UnsupportedFormatError: No kernel takes the format with this model and block size, or a layer slides.
        """
        self.loaded = loaded
        self.format = form
        self.ops: Ops = load_ops(kernel, threads, loaded.device)
        self.name = self.ops.name
        self.layout: TieredLayout = lay_out_tiers(loaded.spec, form, block_tokens, self.ops.order)
        require_memory(self.layout.pool_bytes(blocks), f"the {form} cache of {slots} sequences", self.ops.device)
        self.pools = tuple(
            CachePool(
                loaded.spec, tier.form, block_tokens=block_tokens, blocks=count, slots=slots, order=self.ops.order,
                device=self.ops.device,
            )
            for tier, count in zip(form.tiers, blocks, strict=True)
        )  # fmt: skip
        self.layers = tuple(
            TieredLayer(form, caches, self.ops) for caches in zip(*(pool.caches for pool in self.pools), strict=True)
        )
        self.spent = Spent()
        self._model_cache = handover_cache(len(loaded.spec.layers))

    @property
    def nbytes(self) -> int:
        """Bytes of all tiers' pages and of the notes on their tokens."""
        return sum(pool.nbytes for pool in self.pools) + sum(layer.note_bytes for layer in self.layers)

    def admit(self, tokens: int) -> "_TieredIntake":
        """Return a new sequence with pages for a prompt; see `Server.admit`."""
        sequence = TieredSequence(parts=())
        try:
            for pool in self.pools:
                sequence.parts = (*sequence.parts, pool.open())
            sequence.prompt_tokens = tokens
            self.reserve(sequence, tokens)
        except BaseException:
            self.free(sequence)
            raise
        return _TieredIntake(self, sequence)

    def reserve(self, sequence: TieredSequence, tokens: int) -> None:
        """Give *sequence* the pages that *tokens* more need; see `Server.reserve`.

        Where one tier has no room, the pages that others gave stay the sequence's and are freed with it.
        """
        lengths = self.lengths(sequence, sequence.length + tokens)
        for pool, part, length in zip(self.pools, sequence.parts, lengths, strict=True):
            pool.grow(part, length - part.length)

    def lengths(self, sequence: TieredSequence, tokens: int) -> tuple[int, ...]:
        """Return what each tier holds of *sequence* once *tokens* came."""
        return self.format.lengths(tokens, sequence.prompt_tokens)

    def step_sizes(self, sequences: list[TieredSequence], tokens: int, limit: int) -> list[int]:
        """Return the longest steps there are, as tokens come one by one anyway; see `Server.step_sizes`."""
        return [min(limit, tokens - start) for start in range(0, tokens, limit)]

    def extend(self, sequence: TieredSequence, token_ids: Sequence[int]) -> Tensor:
        """Append a chunk that attends to the tiers; see `Server.extend`."""
        return self._run([sequence], torch.tensor([list(token_ids)], dtype=torch.int64), last_only=True)[0, -1]

    def step(self, sequences: list[TieredSequence], token_ids: Tensor) -> Tensor:
        """Append and attend; see `Server.step`."""
        if not 1 <= token_ids.shape[1] <= QUERIES_MAX:
            raise ValueError(f"{token_ids.shape[1]} tokens a step: 1 to {QUERIES_MAX}")
        return self._run(sequences, token_ids, last_only=False)

    def free(self, sequence: TieredSequence) -> None:
        """Give back what *sequence* holds."""
        for pool, part in zip(self.pools, sequence.parts, strict=False):
            pool.free(part)
        sequence.parts, sequence.length = (), 0

    def rows(self, sequences: list[TieredSequence], heads: int) -> Rows:
        """Return where the KV heads of a layer of *heads* heads lie."""
        parts = zip(*(sequence.parts for sequence in sequences), strict=True)
        batches = [pool.batch(list(of_tier)) for pool, of_tier in zip(self.pools, parts, strict=True)]
        return rows_of(batches, heads)

    def hold(self, sequence: TieredSequence, tokens: int) -> None:
        """Note that *sequence* has come to *tokens*."""
        sequence.length = tokens
        for part, length in zip(sequence.parts, self.lengths(sequence, tokens), strict=True):
            part.length = length

    def _run(self, sequences: list[TieredSequence], token_ids: Tensor, *, last_only: bool) -> Tensor:
        started, device, tokens = perf_counter(), self.ops.device, token_ids.shape[1]
        self.spent = Spent()
        for sequence in sequences:
            self.reserve(sequence, tokens)
        for layer in self.layers:
            layer.poisons.zero_()
        first = torch.tensor([[sequence.length] for sequence in sequences], device=device)
        positions = first + torch.arange(tokens, device=device)
        step = _TieredStep(self, sequences, tokens)
        logits = run_step(
            self.loaded, self._model_cache, step, token_ids.to(device), positions, last_only=last_only
        )  # fmt: skip
        for sequence in sequences:
            self.hold(sequence, sequence.length + tokens)
        self.spent.poisoned_groups = sum(int(layer.poisons.item()) for layer in self.layers)  # waits for the device
        self.spent.total_s = perf_counter() - started
        return logits


class _TieredIntake:
    """A sequence with pages for a prompt."""

    def __init__(self, runtime: TieredRuntime, sequence: TieredSequence) -> None:
        self.sequence = sequence
        self._runtime = runtime

    def store(self, layer: int, query: Tensor, key: Tensor, value: Tensor, poisons: Tensor) -> None:
        runtime = self._runtime
        tiers = runtime.layers[layer]
        scores = prompt_scores(runtime.format, query[0], key[0], runtime.loaded.layers[layer])
        before = tiers.poisons.clone()
        tiers.fill(runtime.rows([self.sequence], tiers.heads), key[0], value[0], scores)
        poisons += tiers.poisons - before
        if layer == len(runtime.layers) - 1:
            runtime.hold(self.sequence, key.shape[2])


class _TieredStep(OrderedStep):
    """Attention over the tiers, token by token."""

    def __init__(self, runtime: TieredRuntime, sequences: list[TieredSequence], tokens: int) -> None:
        super().__init__(runtime.loaded.layers)
        self._runtime = runtime
        self._heads = sorted({layer.heads for layer in runtime.layers})
        self._rows = {heads: runtime.rows(sequences, heads) for heads in self._heads}
        lengths = [
            [runtime.lengths(sequence, sequence.length + done) for sequence in sequences] for done in range(tokens + 1)
        ]
        held = torch.tensor(lengths, dtype=torch.int32, device="cpu").to(runtime.ops.device)
        first = torch.tensor([sequence.length for sequence in sequences], device="cpu").to(runtime.ops.device)
        self._arrivals = {heads: _arrivals(held, first, heads) for heads in self._heads}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        tiers, spent = self._runtime.layers[layer], self._runtime.spent
        rows, outputs = self._rows[tiers.heads], []
        for token, arrival in enumerate(self._arrivals[tiers.heads]):
            started = perf_counter()
            tiers.push(rows, arrival, key[:, :, token].flatten(0, 1), value[:, :, token].flatten(0, 1))
            pushed = perf_counter()
            by_row = torch.unflatten(query[:, :, token], 1, (tiers.heads, -1)).flatten(0, 1)
            output = tiers.attend(rows, arrival.after, by_row, self.layers[layer])
            outputs.append(torch.unflatten(output, 0, (-1, tiers.heads)).flatten(1, 2))
            spent.append_s += pushed - started
            spent.attend_s += perf_counter() - pushed
        return torch.stack(outputs, dim=1).to(query.dtype)


def _arrivals(held: Tensor, first: Tensor, heads: int) -> list[Arrival]:
    """Return the coming of each token to the rows of *heads* heads.

    Args:
        held: int32 [tokens + 1, sequences, tiers]: what each tier holds before the first token and after each.
        first: int64 [sequences]: the position of the first.
        heads: KV heads.
    """
    by_row = [tuple(held[done].repeat_interleave(heads, dim=0).T.contiguous()) for done in range(held.shape[0])]
    return [
        Arrival(positions=(first + done).repeat_interleave(heads), before=by_row[done], after=by_row[done + 1])
        for done in range(held.shape[0] - 1)
    ]
