"""The library's two extension points: a cache that hands back only new K and V, and an attention function for it.

A forward pass runs inside a *step*, which says what attention means this time: over fresh K and V, over the paged
cache, or nothing but looking at what the model asks for. One cache object and one registered name serve all models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from kvplan.errors import UnsupportedModelError

NAME: Final = "kvplan"
"""Under which both functions are registered. Neither a path nor a name of the library's own: those have meanings."""


class Step(Protocol):
    """What attention does during one forward pass."""

    def update(self, layer: int) -> None:
        """Note that *layer* has handed over its new K and V."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: "Asked") -> Tensor:
        """Return the attention's output [batch, tokens, query_heads, head_dim].

        Args:
            layer: Index of the layer that calls.
            query: [batch, query_heads, tokens, head_dim].
            key: New keys only, [batch, kv_heads, tokens, head_dim].
            value: As key.
            asked: What else the model passed.
        """

    def mask(self, function: Callable[..., Any], arguments: dict[str, Any]) -> object:
        """Return what the model passes to the attention function as its mask; None in a step that needs none."""


class Asked:
    """The mask and the keyword arguments of one attention call, as the model passed them."""

    __slots__ = ("arguments", "mask")

    def __init__(self, mask: object, arguments: dict[str, Any]) -> None:
        self.mask = mask
        self.arguments = arguments


_step: ContextVar[Step] = ContextVar("step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Let the forward passes inside be *step*."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


class HandoverLayer(CacheLayerMixin):  # type: ignore[misc]  # the library is not typed
    """A layer's entry in the model's cache: it keeps nothing, and returns the new K and V as they came."""

    is_sliding = False

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._layer = layer

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Tell the step, and return the new tokens: the step holds the others."""
        _step.get().update(self._layer)
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the memory is the pool's."""

    def get_seq_length(self) -> int:
        """Return 0: positions are given with every call, and no mask is built from lengths."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the new tokens alone; the kernels mask by position."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the pool is what is bounded."""
        return -1

    def reset(self) -> None:
        """Do nothing; nothing is held."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse: beams would have to share pages."""
        raise NotImplementedError("kvplan's cache takes no beam search")


def handover_cache(layers: int) -> Any:
    """Return the cache object for a model of *layers* layers."""
    return Cache(layers=[HandoverLayer(layer) for layer in range(layers)])


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **arguments: Any
) -> tuple[Tensor, None]:
    return _step.get().attend(module.layer_idx, query, key, value, Asked(attention_mask, arguments)), None


def _mask(*_: Any, mask_function: Callable[..., Any], **arguments: Any) -> object:
    return _step.get().mask(mask_function, arguments)


def register() -> None:
    """Make the two functions known to the library; again and again is the same as once."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def switch(model: Any, name: str = NAME) -> None:
    """Let *model* use the attention called *name*.

    Raises:
        UnsupportedModelError: The model's code does not let its attention be replaced.
    """
    register()
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == name:  # noqa: SLF001 - the library offers no public getter
        return
    if model._can_set_attn_implementation():  # noqa: SLF001
        model.set_attn_implementation(name)
    if config._attn_implementation != name:  # noqa: SLF001
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention in its own code, so its cache cannot be replaced"
        )
