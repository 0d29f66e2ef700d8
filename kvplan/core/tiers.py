"""How kvplan's runtime lays out a cache whose tokens lie in tiers: a pool of pages a tier, and notes beside them.

In a tier every KV head holds tokens of its own choice, equally many in each head. So a block is what it is elsewhere, a
page in every layer, and a page is a slab a head; but a slab's tokens are the head's own. A token that may be placed
again has a score and a position in every head, which lie in blocks as well.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvplan.core.layouts import ModelLayout, lay_out
from kvplan.core.specs import ModelSpec
from kvplan.errors import UnsupportedFormatError
from kvplan_kernels.layout import Order
from kvplan_kernels.tier_formats import Score, TieredFormat

UNTIMED: Final = (
    "tokens are put into tiers by torch, one operation after another, and no time of that is one of a server"
)
"""Why no time of a format in tiers is measured."""

PROBABILITIES_AT_ONCE: Final = 1 << 24
"""Of a prompt's queries and tokens, while its tokens are scored; bounds memory and changes no result."""


def scored_queries(form: TieredFormat, query_heads: int, tokens: int) -> int:
    """Return the queries of a prompt of *tokens* whose probabilities are computed at once."""
    counted = tokens if form.score is Score.SUM else min(tokens, form.window_tokens)
    return max(1, min(counted, PROBABILITIES_AT_ONCE // (query_heads * max(1, tokens))))


@dataclass(frozen=True)
class TieredLayout:
    """The layouts of a format's tiers, each of all layers of a model, in order."""

    form: TieredFormat
    tiers: tuple[ModelLayout, ...]

    @property
    def block_tokens(self) -> int:
        """Tokens of a page, in each tier."""
        return self.tiers[0].block_tokens

    @cached_property
    def note_bytes(self) -> int:
        """Bytes of scores and positions of one token of a tier, in all heads of all layers."""
        return self.form.note_bytes * sum(layout.kv_heads for layout in self.tiers[0].layers)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each tier: a page in every layer, and notes on its tokens."""
        return tuple(tier.block_bytes + self.block_tokens * self.note_bytes for tier in self.tiers)

    def blocks(self, tokens: int, prompt_tokens: int | None = None) -> tuple[int, ...]:
        """Return the blocks of each tier of a sequence of *tokens*; see `TieredFormat.blocks`."""
        return self.form.blocks(tokens, self.block_tokens, prompt_tokens)

    def sequence_bytes(self, tokens: int, prompt_tokens: int | None = None) -> int:
        """Return the bytes allocated to a sequence of *tokens*."""
        return self.pool_bytes(self.blocks(tokens, prompt_tokens))

    def logical_bytes(self, tokens: int, prompt_tokens: int | None = None) -> float:
        """Return geometry times format of a sequence of *tokens*, with its notes."""
        lengths = self.form.lengths(tokens, prompt_tokens)
        return sum(
            tier.logical_bytes(length) + length * self.note_bytes
            for tier, length in zip(self.tiers, lengths, strict=True)
        )

    @cached_property
    def elements(self) -> int:
        """Elements of K and V of one token in all layers."""
        return sum(2 * layout.kv_heads * layout.head_dim for layout in self.tiers[0].layers)

    @property
    def heads_max(self) -> int:
        """KV heads of the layer that has most."""
        return max(layout.kv_heads for layout in self.tiers[0].layers)

    def growth_bytes(self) -> float:
        """Return what one more token of a prompt adds to that once the window is full: the mean of a hundred."""
        first = self.form.window_tokens + 100
        return (self.logical_bytes(first + 100) - self.logical_bytes(first)) / 100

    def pool_bytes(self, blocks: tuple[int, ...]) -> int:
        """Return the bytes of pools of *blocks* blocks, one of each tier."""
        return sum(count * each for count, each in zip(blocks, self.block_bytes, strict=True))


def lay_out_tiers(model: ModelSpec, form: TieredFormat, block_tokens: int, order: Order = Order.LANES) -> TieredLayout:
    """Return the layout of the model's cache with codes in *order*.

    Raises:
        InputError: The model has no layers.
        UnsupportedFormatError: No kernel takes the format with this model and block size, or a layer slides.
    """
    sliding = [layer.window_tokens for layer in model.layers if layer.window_tokens is not None]
    if sliding:
        raise UnsupportedFormatError(
            f"{form} on {model.name}: a layer looks at its newest {sliding[0]} tokens, and tiers are of layers that "
            "look at all; give a format without tiers"
        )
    return TieredLayout(form, tuple(lay_out(model, tier.form, block_tokens, order) for tier in form.tiers))
