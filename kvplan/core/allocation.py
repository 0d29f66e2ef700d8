"""What an engine reserves for a sequence, and the named terms that make it more than the geometry times the format.

An engine's allocator says which layers share blocks and what a block takes (`CacheGroup`); everything else follows.
All figures are of one rank: the one that binds where ranks differ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvplan.core.specs import Evidence
from kvplan_kernels.layout import ceil_div

_CONTEXT_MAX: Final = 1 << 40

REPLICATED: Final = "KV heads on several ranks"
BEHIND_WINDOW: Final = "tokens behind the window"
ROUNDING: Final = "block rounding"
SPARE: Final = "spare blocks"
PAGE_PADDING: Final = "page padding"
PADDING_LAYERS: Final = "padding layers"


@dataclass(frozen=True, slots=True)
class Term:
    """One named part of the memory.

    Attributes:
        formula: What it is made of.
    """

    name: str
    bytes: float
    formula: str
    evidence: Evidence = Evidence.EXACT


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What an engine is told beside the model and the format; None is the engine's own default.

    Attributes:
        context_tokens: The longest sequence that is served.
        sequences: The most sequences at once.
        draft_tokens: Tokens that a model's own draft layers propose a step; 0 drafts none.
        version: Of the engine, as (0, 29); None takes the rules of the version that its module names.
        options: The engine's own flags that change what it allocates, without dashes, as `swa-full`.
    """

    context_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_batched_tokens: int | None = None
    block_tokens: int | None = None
    sequences: int | None = None
    prefix_caching: bool | None = None
    draft_tokens: int = 0
    version: tuple[int, ...] | None = None
    options: frozenset[str] = frozenset()

    def option(self, name: str) -> str | None:
        """Return the value of the option `name=value`; None where it is not set."""
        found = [text.partition("=")[2] for text in self.options if text.partition("=")[0] == name]
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGroup:
    """Layers whose blocks are alike.

    Attributes:
        block_tokens: None where a block is the state of a sequence.
        bytes_per_block: Of all the group's layers.
    """

    layers: int
    block_tokens: int | None
    bytes_per_block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePart:
    """Layers of a group that the geometry asks the same of.

    A unit is a token, or the whole state of a sequence in a group of states.

    Attributes:
        name: What they cache.
        layers: How many there are on the rank.
        logical_unit_bytes: Geometry times format of all these layers, this rank's share of it.
        unit_bytes: What the rank stores; more where ranks repeat each other's heads.
        window_tokens: What is attended to; None is everything.
        entry_tokens: Tokens that share an entry; what they have not filled is not cached yet.
    """

    name: str
    layers: int
    logical_unit_bytes: float
    unit_bytes: float
    window_tokens: int | None = None
    entry_tokens: int = 1

    def seen(self, tokens: int) -> int:
        """Return the tokens of a sequence of *tokens* that are attended to."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def logical_units(self, tokens: int) -> int:
        """Return those of them that the geometry caches: whole entries."""
        return self.seen(tokens) // self.entry_tokens * self.entry_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that hold the same tokens in blocks that are alike, or states of one shape.

    Attributes:
        parts: Its layers.
        block_tokens: Tokens of a block; None where a block is the state of a sequence.
        page_padding_bytes: Of a block, what is added to layers' pages to make pages alike.
        padding_layer_bytes: Of a block, what stands empty for layers that the group does not have.
        held_tokens_max: What is kept of a sequence at most; None is everything.
        spare_blocks: Blocks of a sequence beside those that the held tokens fill.
    """

    parts: tuple[CachePart, ...]
    block_tokens: int | None
    page_padding_bytes: float = 0
    padding_layer_bytes: float = 0
    held_tokens_max: int | None = None
    spare_blocks: int = 0

    @property
    def name(self) -> str:
        """What its layers cache."""
        return " and ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def layers(self) -> int:
        """How many layers it has; one that caches two things counts for both."""
        return sum(part.layers for part in self.parts)

    @property
    def units_per_block(self) -> int:
        """Tokens of a block, or the one state."""
        return 1 if self.block_tokens is None else self.block_tokens

    @property
    def bytes_per_block(self) -> float:
        """Bytes of a block in all layers, padding included."""
        filled = self.units_per_block * sum(part.unit_bytes for part in self.parts)
        return filled + self.page_padding_bytes + self.padding_layer_bytes

    def held(self, tokens: int) -> int:
        """Return the units kept of a sequence of *tokens*."""
        if self.block_tokens is None:
            return 1
        return tokens if self.held_tokens_max is None else min(tokens, self.held_tokens_max)

    def filled_blocks(self, tokens: int) -> int:
        """Return the blocks that hold the units of a sequence of *tokens*."""
        return ceil_div(self.held(tokens), self.units_per_block)

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a sequence of *tokens* takes, spare ones included."""
        return self.filled_blocks(tokens) + self.spare_blocks

    def growth_bytes(self, tokens: int) -> float:
        """Return what one more token takes, averaged over a block; nothing once no more is kept."""
        grows = self.held(tokens + 1) > self.held(tokens)
        return self.bytes_per_block / self.units_per_block if grows else 0.0

    def logical_bytes(self, tokens: int) -> float:
        """Return what the geometry asks for of a sequence of *tokens*."""
        units = 1 if self.block_tokens is None else tokens
        return sum(part.logical_units(units) * part.logical_unit_bytes for part in self.parts)

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that, averaged over the tokens of an entry."""
        if self.block_tokens is None:
            return 0.0
        return sum(part.logical_unit_bytes for part in self.parts if part.seen(tokens + 1) > part.seen(tokens))

    def terms(self, tokens: int) -> dict[str, float]:
        """Return the bytes of each term between logical and allocated of a sequence of *tokens*."""
        units = 1 if self.block_tokens is None else tokens
        held, room, taken = self.held(tokens), self.filled_blocks(tokens) * self.units_per_block, self.blocks(tokens)
        repeated = behind = rounding = 0.0
        for part in self.parts:
            logical, seen = part.logical_units(units), part.seen(units)
            repeated += logical * (part.unit_bytes - part.logical_unit_bytes)
            behind += (held - seen) * part.unit_bytes
            rounding += (room - held + seen - logical) * part.unit_bytes
        spare = self.spare_blocks * self.units_per_block * sum(part.unit_bytes for part in self.parts)
        padding = taken * self.page_padding_bytes, taken * self.padding_layer_bytes
        return dict(zip(_FORMULAS, (repeated, behind, rounding, spare, *padding), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What a pool holds.

    Attributes:
        blocks: Blocks of the pool, as the engine counts them.
        tokens: As the engine prints them; of some it is derived from max_concurrency, and no count of anything.
        max_concurrency: Sequences of the context; a fraction where the engine prints one.
        max_context: Tokens of a sequence that has the pool for itself; the model may have been made for fewer.
    """

    blocks: int
    tokens: int
    max_concurrency: float
    max_context: int


class Allocation(ABC):
    """How one engine lays out the cache of one model, format and setup on the rank that binds.

    Attributes:
        setup: What the engine was told.
        notes: What to know of the figures, a sentence each.
    """

    setup: Setup
    notes: tuple[str, ...]

    @property
    def beside(self) -> tuple[Term, ...]:
        """What is taken whatever sequences there are: blocks that hold nothing, tables."""
        return ()

    @property
    @abstractmethod
    def blocks(self) -> tuple[BlockGroup, ...]:
        """Groups of layers with what a block of each takes."""

    @abstractmethod
    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, this rank's share."""

    @abstractmethod
    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that."""

    @abstractmethod
    def sequence_bytes(self, tokens: int) -> float:
        """Return what a sequence of *tokens* takes."""

    @abstractmethod
    def growth_bytes(self, tokens: int) -> float:
        """Return what one more token takes, averaged over a block."""

    @abstractmethod
    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms between logical and allocated; their sum is the difference, exactly."""

    @abstractmethod
    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds."""


_FORMULAS: Final = {
    REPLICATED: "heads or latent vectors that more than one rank holds",
    BEHIND_WINDOW: "tokens that a window no longer sees and the engine still keeps",
    ROUNDING: "places of the last block that no token takes",
    SPARE: "blocks that are held beside the filled ones",
    PAGE_PADDING: "what makes pages of unlike layers alike",
    PADDING_LAYERS: "empty layers that make groups alike",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedAllocation(Allocation):
    """An allocation that is the sum of its groups; blocks of all groups come from one pool and take as much.

    An engine with pools of another kind overrides `capacity`.
    """

    groups: tuple[CacheGroup, ...]
    setup: Setup
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """Groups of layers with what a block of each takes."""
        return tuple(
            BlockGroup(layers=g.layers, block_tokens=g.block_tokens, bytes_per_block=round(g.bytes_per_block))
            for g in self.groups
        )

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, this rank's share."""
        return sum(group.logical_bytes(tokens) for group in self.groups)

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that."""
        return sum(group.logical_growth_bytes(tokens) for group in self.groups)

    def sequence_bytes(self, tokens: int) -> float:
        """Return what a sequence of *tokens* takes."""
        return sum(group.blocks(tokens) * group.bytes_per_block for group in self.groups)

    def growth_bytes(self, tokens: int) -> float:
        """Return what one more token takes, averaged over a block."""
        return sum(group.growth_bytes(tokens) for group in self.groups)

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms that are not nothing, in the order in which they arise."""
        parts = [group.terms(tokens) for group in self.groups]
        sums = {name: sum(part[name] for part in parts) for name in _FORMULAS}
        return tuple(Term(name, value, _FORMULAS[name]) for name, value in sums.items() if value)

    def charged_bytes(self, tokens: int) -> float:
        """Return what the engine's own check of a longest sequence charges for *tokens*; what it takes, mostly."""
        return self.sequence_bytes(tokens)

    def sequence_blocks(self, tokens: int) -> int:
        """Return the blocks of all groups that a sequence of *tokens* takes."""
        return sum(group.blocks(tokens) for group in self.groups)

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds."""
        context = self.setup.context_tokens
        blocks = int(pool_bytes // self.groups[0].bytes_per_block)
        concurrency = blocks / self.sequence_blocks(context)
        return Capacity(
            blocks=blocks,
            tokens=int(concurrency * context),
            max_concurrency=concurrency,
            max_context=largest(lambda tokens: self.sequence_blocks(tokens) <= blocks),
        )


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest count that fits, of a condition that never turns true again; 0 where not even one does.

    >>> largest(lambda count: count < 100)
    99
    """
    low, high = 0, 1
    while high < _CONTEXT_MAX and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
