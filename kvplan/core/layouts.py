"""How kvplan's runtime lays out a whole model's cache: a layout a layer, and one block number for a page in each.

Layers may store their tokens in different formats. Those that keep more of them in 16 bits fill fewer pages; a sequence
holds the blocks that the layer with most pages needs, and a block is complete once it is in every layer.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.format import CacheFormat, UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import KVLayout, Order


@dataclass(frozen=True)
class ModelLayout:
    """The layouts of a model's layers, in order; at least one, and all of one block size."""

    layers: tuple[KVLayout, ...]

    @cached_property
    def counted(self) -> tuple[tuple[KVLayout, int], ...]:
        """Distinct layouts, each with its number of layers."""
        return tuple(Counter(self.layers).items())

    @property
    def block_tokens(self) -> int:
        """Tokens of a page."""
        return self.layers[0].block_tokens

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: a page in every layer."""
        return sum(count * layout.page_bytes for layout, count in self.counted)

    @cached_property
    def ring_bytes(self) -> int:
        """Bytes of one sequence's 16-bit residual in all layers."""
        return sum(count * layout.ring_bytes for layout, count in self.counted)

    @cached_property
    def sink_bytes(self) -> int:
        """Bytes of one sequence's sinks in all layers."""
        return sum(count * layout.sink_bytes for layout, count in self.counted)

    @property
    def own_bytes(self) -> int:
        """Bytes of one sequence beside its blocks: residual and sinks."""
        return self.ring_bytes + self.sink_bytes

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a sequence of *tokens*: as many as the layer with most pages needs."""
        return max(layout.blocks(tokens) for layout, _ in self.counted)

    def whole_blocks(self, tokens: int) -> int:
        """Return how many blocks of a sequence of *tokens* are full in every layer, and so are not written again."""
        return min(min(layout.quantized_tokens(tokens)) for layout, _ in self.counted) // self.block_tokens

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes allocated to a sequence of *tokens*."""
        return self.blocks(tokens) * self.block_bytes + self.own_bytes

    def logical_bytes(self, tokens: int) -> float:
        """Return geometry times format of a sequence of *tokens*, every layer holding all of them."""
        return sum(count * layout.logical_bytes(tokens) for layout, count in self.counted)

    def pool_bytes(self, *, blocks: int, slots: int) -> int:
        """Return the bytes of a pool of *blocks* blocks for *slots* sequences."""
        return blocks * self.block_bytes + slots * self.own_bytes


def lay_out(model: ModelSpec, form: ModelFormat, block_tokens: int, order: Order = Order.LANES) -> ModelLayout:
    """Return the layout of the model's cache with codes in *order*.

    Raises:
        InputError: The model has no layers.
        UnsupportedFormatError: No kernel takes the format with this model and block size, or it names layers that the
            model does not have.
    """
    if not model.layers:
        raise InputError(f"{model.name} has no layers that cache anything")
    try:
        return ModelLayout(model.layouts(form, block_tokens, order))
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{form} on {model.name}: {error}") from error


def formats_of_layers(model: ModelSpec, form: ModelFormat) -> tuple[CacheFormat, ...]:
    """Return the format of each layer.

    Raises:
        UnsupportedFormatError: The format names layers that the model does not have.
    """
    try:
        return model.layer_formats(form)
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{form} on {model.name}: {error}") from error
