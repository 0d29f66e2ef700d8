"""kvplan's own runtime where tokens lie in tiers: `kvplan.runtime.tiered.TieredRuntime`."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplan.core.allocation import ROUNDING, Allocation, BlockGroup, Capacity, Setup, Term, largest
from kvplan.core.specs import ModelSpec
from kvplan.core.tiers import TieredLayout, lay_out_tiers
from kvplan.units import format_bytes
from kvplan_kernels.tier_formats import Score, TieredFormat

_PERCENT: Final = 100


@dataclass(frozen=True, kw_only=True)
class TieredAllocation(Allocation):
    """The caches of one model in tiers; all of a sequence is its prompt."""

    model: ModelSpec
    form: TieredFormat
    block_tokens: int
    setup: Setup

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]  # computed here
        """What to know of the figures."""
        form, found = self.form, []
        if form.kept_percent < _PERCENT:
            found.append(
                f"{form} drops {_PERCENT - form.kept_percent}% of the tokens before the newest {form.window_tokens}, "
                "which later queries cannot see"
            )
        if form.score is Score.ONCE:
            first = self.layout.tiers[0].logical_bytes(1)
            found.append(
                f"{form} is sized for a prompt of the whole context; a token that is generated takes "
                f"{format_bytes(first)}"
            )
        return tuple(found)

    @cached_property
    def layout(self) -> TieredLayout:
        """How all tiers are laid out."""
        return lay_out_tiers(self.model, self.form, self.block_tokens)

    @property
    def blocks(self) -> tuple[BlockGroup, ...]:
        """A group of all layers for each tier, notes on its tokens included."""
        layers = len(self.model.layers)
        return tuple(
            BlockGroup(layers=layers, block_tokens=self.block_tokens, bytes_per_block=size)
            for size in self.layout.block_bytes
        )

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, with scores and positions."""
        return self.layout.logical_bytes(tokens)

    def logical_growth_bytes(self, tokens: int) -> float:
        """Return what one more token adds to that: in the window a token of the first tier, else the mean."""
        if tokens < self.form.window_tokens:
            return self.layout.logical_bytes(1)
        return self.layout.growth_bytes()

    def sequence_bytes(self, tokens: int) -> int:
        """Return what a sequence of *tokens* takes."""
        return self.layout.sequence_bytes(tokens)

    def growth_bytes(self, tokens: int) -> float:
        """Return a page's bytes a token, averaged over tiers and their blocks."""
        first, *_ = each = [size / self.block_tokens for size in self.layout.block_bytes]
        if tokens < self.form.window_tokens:
            return first
        return sum(tier.share * size for tier, size in zip(self.form.tiers, each, strict=True)) / _PERCENT

    def terms(self, tokens: int) -> tuple[Term, ...]:
        """Return the one term between logical and allocated."""
        rounding = self.sequence_bytes(tokens) - self.logical_bytes(tokens)
        return (Term(ROUNDING, rounding, "places of each tier's last block that no token takes"),)

    def capacity(self, pool_bytes: int) -> Capacity:
        """Return what a pool of *pool_bytes* holds, divided among the tiers as its sequences need it."""
        context = self.setup.context_tokens
        concurrency = pool_bytes // max(1, self.sequence_bytes(context))
        return Capacity(
            blocks=concurrency * sum(self.layout.blocks(context)),
            tokens=concurrency * context,
            max_concurrency=concurrency,
            max_context=largest(lambda tokens: self.sequence_bytes(tokens) <= pool_bytes),
        )
