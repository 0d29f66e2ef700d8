"""How SGLang divides memory into its pools, and what they hold.

From PyPI `sglang` 0.5.23 (2026-10-30), read 2026-11-30: `srt/model_executor/pool_configurator.py` and
`_handle_max_mamba_cache` of `srt/mem_cache/kv_cache_configurator.py`.
"""

from dataclasses import dataclass
from typing import Final

from kvplan.core.allocation import PADDING_LAYERS, CacheGroup, Capacity, GroupedAllocation, Setup, Term, largest

EMPTY_LAYERS: Final = "buffers of layers that cache nothing"
_EMPTY_FORMULA: Final = "buffers of layers that share another's cache, have no attention or no indexer of their own"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRules:
    """How the memory is divided.

    Attributes:
        window_ratio: Tokens of the pool of windows to those of the full pool.
        window_tokens: Of the pool of windows where the requests set it; None where the ratio does.
        state_ratio: Memory of states to that of tokens.
        slot_bytes: Of a state, on the stage that has most.
        slots: Where they are set; None where the ratio does.
        request_slots: Slots of the pool that a request is counted for.
        draft_slots: States of a request beside the pool, one a token that it drafts.
        charged_slots: Slots that padding writes to and the memory is charged for.
        tokens_max: `--max-total-tokens`.
    """

    window_ratio: float
    window_tokens: int | None
    state_ratio: float
    slot_bytes: float
    slots: int | None
    request_slots: int
    draft_slots: int
    charged_slots: int
    tokens_max: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSizes:
    """What a memory is divided into.

    Attributes:
        tokens: Of the full pool, `max_total_num_tokens`; of the pool of windows where there is no full one.
        window_tokens: Of the pool of windows.
        slots: `max_mamba_cache_size`; buffers have one more.
    """

    tokens: int
    window_tokens: int
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPools(GroupedAllocation):
    """Pools of tokens, of windows and of states, those of them that the model has, each with blocks of its own."""

    rules: PoolRules
    groups: tuple[CacheGroup, ...]
    setup: Setup
    notes: tuple[str, ...] = ()

    @property
    def full(self) -> CacheGroup | None:
        """The pool that holds every token."""
        return next((g for g in self.groups if g.block_tokens is not None and g.held_tokens_max is None), None)

    @property
    def windows(self) -> CacheGroup | None:
        """The pool that holds windows alone."""
        return next((g for g in self.groups if g.held_tokens_max is not None), None)

    @property
    def states(self) -> CacheGroup | None:
        """The pool of states."""
        return next((g for g in self.groups if g.block_tokens is None), None)

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms between logical and allocated; their sum is the difference."""
        found = GroupedAllocation.terms(self, tokens)
        return tuple(Term(EMPTY_LAYERS, t.bytes, _EMPTY_FORMULA) if t.name == PADDING_LAYERS else t for t in found)

    def sizes(self, pool_bytes: int) -> PoolSizes:
        """Return the pools that *pool_bytes* are divided into."""
        slots, rest = self._states_first(pool_bytes)
        full, windows = self.full, self.windows
        if full is None and windows is None:
            return PoolSizes(tokens=self.rules.tokens_max or self.setup.context_tokens, window_tokens=0, slots=slots)
        if full is None or windows is None:
            only = full or windows
            assert only is not None
            tokens = self._aligned(rest // _token_bytes(only), only)
            return PoolSizes(tokens=tokens, window_tokens=0 if full else tokens, slots=slots)
        cap = self.rules.window_tokens
        if cap is not None:
            tokens = self._aligned((rest - cap * _token_bytes(windows)) // _token_bytes(full), full)
            return PoolSizes(tokens=tokens, window_tokens=min(cap, tokens), slots=slots)
        cell = _token_bytes(full) + self.rules.window_ratio * _token_bytes(windows)
        tokens = self._aligned(rest // cell, full)
        held = int(tokens * self.rules.window_ratio) // windows.units_per_block * windows.units_per_block
        return PoolSizes(tokens=tokens, window_tokens=held, slots=slots)

    def _aligned(self, tokens: float, group: CacheGroup) -> int:
        page = group.units_per_block
        limit = self.rules.tokens_max
        whole = max(0, int(tokens) // page * page)
        return whole if limit is None else min(whole, limit // page * page)

    def _states_first(self, pool_bytes: int) -> tuple[int, float]:
        """Return the slots of states, and the bytes that they leave for tokens."""
        rules = self.rules
        if self.states is None:
            return 0, pool_bytes
        each, drafts = rules.slot_bytes, rules.draft_slots
        budget = pool_bytes * rules.state_ratio / (1 + rules.state_ratio)
        slots = rules.slots
        if slots is None:
            spent = rules.charged_slots * each * (1 + drafts)
            slots = max(0, int((budget - spent) // (each * (1 + drafts / rules.request_slots))))
        requests = slots // rules.request_slots
        if self.setup.sequences is not None:
            requests = min(requests, self.setup.sequences)
        charged = (slots + rules.charged_slots) * each
        charged += (requests + rules.charged_slots) * each * drafts
        return slots, pool_bytes - charged

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds; blocks are pages of the full pool, or slots without one."""
        sizes = self.sizes(pool_bytes)
        full = self.full or self.windows
        pages = sizes.tokens // full.units_per_block if full else sizes.slots
        return Capacity(
            blocks=pages,
            tokens=sizes.tokens,
            max_concurrency=self._sequences(sizes, self.setup.context_tokens),
            max_context=largest(lambda tokens: self._sequences(sizes, tokens) >= 1),
        )

    def _sequences(self, sizes: PoolSizes, tokens: int) -> int:
        """Return the sequences of *tokens* that all pools hold."""
        held = []
        if self.full is not None:
            held.append(sizes.tokens // self.full.units_per_block // self.full.blocks(tokens))
        if self.windows is not None:
            held.append(sizes.window_tokens // self.windows.units_per_block // self.windows.blocks(tokens))
        if self.states is not None:
            held.append(sizes.slots // self.rules.request_slots)
        return min(held)


def _token_bytes(group: CacheGroup) -> float:
    return group.bytes_per_block / group.units_per_block
