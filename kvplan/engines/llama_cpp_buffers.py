"""What a llama.cpp server allocates: buffers of cells for its slots, and what lies between them and the geometry."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from kvplan.core.allocation import BEHIND_WINDOW, ROUNDING, Allocation, BlockGroup, Capacity, Setup, Term, largest
from kvplan_kernels.layout import round_up

PAD_CELLS: Final = 256
"""Since ggml-org/llama.cpp#17046 of November 2025."""
OTHER_SLOTS: Final = "windows of other slots"
OTHER_STATES: Final = "states of other slots"
DRAFT_STATES: Final = "states of a draft's tokens"
DRAFT_TYPE: Final = "layers that draft in 16 bits"
WIDE_STATES: Final = "states in 32 bits"
WIDE_VALUES: Final = "V as wide as the widest layer's"
_FORMULAS: Final = {
    WIDE_VALUES: "V padded to the widest layer's, since without flash attention it is kept transposed",
    BEHIND_WINDOW: "tokens of a batch, or of a context whose window is not kept apart",
    OTHER_SLOTS: "a window for each other slot that the buffer serves",
    ROUNDING: f"cells to the next multiple of {PAD_CELLS}",
    WIDE_STATES: "float32 where the model's own type is narrower",
    DRAFT_STATES: "a state for each token of a draft, to go back to",
    OTHER_STATES: "states of each other slot",
    DRAFT_TYPE: "f16 in a context of their own (--spec-draft-type-k, --spec-draft-type-v)",
}
DRAFT: Final = "attention that drafts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How many sequences a server takes at once, and which of them a figure is for.

    Attributes:
        count: Slots.
        shared: Whether they share one buffer.
        counted: Slots that the cells of a figure are for: all that share them, or one of the unnumbered.
        batch_tokens: The most tokens of a batch (`--ubatch-size`).
        pad_cells: What numbers of cells are padded to.
        window_first: Whether a window's cells are padded before the context caps them.
    """

    count: int
    shared: bool
    counted: int
    batch_tokens: int
    pad_cells: int = PAD_CELLS
    window_first: bool = False

    @property
    def sharing(self) -> int:
        """Slots that share a buffer."""
        return self.count if self.shared else 1

    @property
    def buffers(self) -> int:
        """Buffers of the server."""
        return 1 if self.shared else self.count

    def cells(self, tokens: int) -> int:
        """Return the cells of a buffer whose counted slots each hold *tokens*."""
        return round_up((self.counted if self.shared else 1) * tokens, self.pad_cells)

    def window_cells(self, window: int, tokens: int) -> int:
        """Return the cells of a buffer for windows."""
        asked = window * self.sharing + self.batch_tokens
        if self.window_first:
            return min(self.cells(tokens), round_up(asked, self.pad_cells))
        return round_up(min(self.cells(tokens), asked), self.pad_cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellCache:
    """Layers that are kept in one kind of cells.

    Attributes:
        layers: How many.
        cell_bytes: Of one cell in all of them.
        logical_bytes: Of a token by the geometry.
        window_tokens: What they attend to; None is everything.
        window_kept: Whether their cells are as many as windows ask for.
    """

    name: str
    layers: int
    cell_bytes: Fraction
    logical_bytes: Fraction
    window_tokens: int | None = None
    window_kept: bool = False

    def seen(self, tokens: int) -> int:
        """Return the tokens of a sequence of *tokens* that the geometry asks for."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def cells(self, slots: Slots, tokens: int) -> int:
        """Return the cells of a buffer."""
        if self.window_kept and self.window_tokens is not None:
            return slots.window_cells(self.window_tokens, tokens)
        return slots.cells(tokens)

    def sequence_cells(self, slots: Slots, tokens: int) -> Fraction:
        """Return the cells that a counted sequence has."""
        return Fraction(self.cells(slots, tokens), slots.counted if slots.shared else 1)

    def terms(self, slots: Slots, tokens: int) -> dict[str, Fraction]:
        """Return the bytes of each term between logical and allocated of a sequence of *tokens*."""
        seen, cells = self.seen(tokens), self.sequence_cells(slots, tokens)
        behind = other = Fraction(0)
        if self.window_kept and self.window_tokens is not None:
            shared = slots.counted if slots.shared else 1
            whole = slots.cells(tokens)
            own = min(whole, self.window_tokens * shared)
            every = min(whole, self.window_tokens * slots.sharing)
            batch = min(whole, self.window_tokens * slots.sharing + slots.batch_tokens)
            behind, other = Fraction(batch - every, shared), Fraction(every - own, shared)
        else:
            behind = Fraction(tokens - seen)
        return {
            DRAFT_TYPE if self.name == DRAFT else WIDE_VALUES: seen * (self.cell_bytes - self.logical_bytes),
            BEHIND_WINDOW: behind * self.cell_bytes,
            OTHER_SLOTS: other * self.cell_bytes,
            ROUNDING: (cells - seen - behind - other) * self.cell_bytes,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferAllocation(Allocation):
    """The buffers that a server makes on the device that holds the most of them, for sequences of one length.

    Attributes:
        caches: Layers in cells.
        state_layers: Layers with a state.
        state_bytes: Of one slot, as they are stored.
        states: That a slot has: one, and one for each token of a draft.
        state_logical_bytes: Of one sequence, by the geometry.
        slots: Who they are for.
    """

    caches: tuple[CellCache, ...]
    state_layers: int
    state_bytes: int
    state_logical_bytes: int
    states: int
    slots: Slots
    setup: Setup
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """Groups of layers with what the cells that are padded together take."""
        pad = self.slots.pad_cells
        cells = tuple(
            BlockGroup(layers=c.layers, block_tokens=pad, bytes_per_block=round(pad * c.cell_bytes))
            for c in self.caches
        )
        if not self.state_layers:
            return cells
        return (*cells, BlockGroup(layers=self.state_layers, block_tokens=None, bytes_per_block=self.state_bytes))

    @property
    def counted_states(self) -> int:
        """The states of a figure for one sequence: its own, or those of all slots where nobody counted them."""
        return self.slots.count // self.slots.counted if self.slots.shared else 1

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, this device's part of the layers."""
        return float(sum(c.seen(tokens) * c.logical_bytes for c in self.caches) + self.state_logical_bytes)

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that."""
        return float(sum(c.logical_bytes for c in self.caches if c.seen(tokens + 1) > c.seen(tokens)))

    def sequence_bytes(self, tokens: int) -> float:
        """Return what a sequence of *tokens* takes: a slot's part of the buffers, or all where slots are unnumbered."""
        cells = sum(c.sequence_cells(self.slots, tokens) * c.cell_bytes for c in self.caches)
        return float(cells + self.counted_states * self.state_bytes)

    def growth_bytes(self, tokens: int) -> float:
        """Return what one more token takes, averaged over the cells that are padded together."""
        pad = self.slots.pad_cells
        return (self.sequence_bytes(tokens + pad) - self.sequence_bytes(tokens)) / pad

    def server_bytes(self, tokens: int) -> float:
        """Return what all slots take."""
        cells = sum(
            c.cells(self.slots, tokens) * c.cell_bytes.numerator / c.cell_bytes.denominator for c in self.caches
        )
        return self.slots.buffers * cells + self.slots.count * self.state_bytes

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the terms that are not nothing."""
        parts = [c.terms(self.slots, tokens) for c in self.caches]
        one = self.state_bytes // self.states
        sums = {name: sum((part.get(name, Fraction(0)) for part in parts), Fraction(0)) for name in _FORMULAS}
        sums[WIDE_STATES] = Fraction(one - self.state_logical_bytes)
        sums[DRAFT_STATES] = Fraction(self.state_bytes - one)
        sums[OTHER_STATES] = Fraction((self.counted_states - 1) * self.state_bytes)
        return tuple(Term(name, float(value), _FORMULAS[name]) for name, value in sums.items() if value)

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what fits in *pool_bytes*: slots with a buffer each, cells of the layers that keep everything."""
        context = self.setup.context_tokens

        def takes(count: int) -> float:
            own = replace(self.slots, count=count, counted=count, shared=self.slots.shared and self.slots.counted > 1)
            return replace(self, slots=own).server_bytes(context)

        longest = largest(lambda tokens: self.server_bytes(tokens) <= pool_bytes)
        return Capacity(
            blocks=longest // self.slots.pad_cells,
            tokens=longest * self.slots.buffers,
            max_concurrency=largest(lambda count: takes(count) <= pool_bytes),
            max_context=longest,
        )
