"""What calibrated transforms learn, from the keys and values of a model that runs in 16 bits.

A `Learner` sees keys and values as they are once the other transforms of its recipe are done to them (`as_stored`), and
has the tensors of `parameters.LEARNED` in the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from kvplan_kernels.folding import fold_of
from kvplan_kernels.format import CacheFormat, Transform
from kvplan_kernels.parameters import (
    KEY_DIVISOR,
    KEY_LARGEST,
    KEY_OFFSET,
    KEY_ORDER,
    VALUE_LARGEST,
    VALUE_ORDER,
    LayerParameters,
)
from kvplan_kernels.rotation import multiply

SMOOTHING_EXPONENT: Final = 0.5
"""Of the largest key of a channel: QServe, arXiv 2405.04532, section 4.2, which found no better one."""


class Learner(Protocol):
    """Learns one transform of one layer."""

    def observe(self, key: Tensor, value: Tensor) -> None:
        """Take more keys and values, float32 [tokens, kv_heads, head_dim]."""
        ...

    def learned(self) -> dict[str, Tensor]:
        """Return the transform's tensors by name; something was observed."""
        ...


class _Mean:
    """The mean key of each channel. RoPE turns a bias of the projection, so that what is constant is seen after it."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._tokens = 0

    def observe(self, key: Tensor, value: Tensor) -> None:
        self._total = self._total + key.double().sum(0)
        self._tokens += key.shape[0]

    def learned(self) -> dict[str, Tensor]:
        return {KEY_OFFSET: (torch.as_tensor(self._total) / self._tokens).float()}


class _Largest:
    """The largest key and value of each channel, without their signs."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def observe(self, key: Tensor, value: Tensor) -> None:
        self._key, self._value = _larger(self._key, key), _larger(self._value, value)

    def found(self) -> tuple[Tensor, Tensor]:
        assert self._key is not None
        assert self._value is not None
        return self._key, self._value


def _larger(before: Tensor | None, new: Tensor) -> Tensor:
    largest = new.abs().amax(0)
    return largest if before is None else torch.maximum(before, largest)


class _Root(_Largest):
    """The root of the largest key of each channel, one for both channels that RoPE turns together, (i, i + D/2).

    The pair has one number so that it could stand before RoPE as well, in the weights, where QServe has it.
    """

    def learned(self) -> dict[str, Tensor]:
        largest = self.found()[0]
        pairs = torch.maximum(*largest.chunk(2, dim=-1))
        return {KEY_DIVISOR: _above_zero(torch.cat([pairs, pairs], dim=-1)) ** SMOOTHING_EXPONENT}


class _Sorted(_Largest):
    """Channels by their largest key, or value, the least one first: those that share a group are of like size."""

    def learned(self) -> dict[str, Tensor]:
        orders = (largest.argsort(dim=-1, stable=True) for largest in self.found())
        return dict(zip((KEY_ORDER, VALUE_ORDER), orders, strict=True))


class _LargestOfHeads(_Largest):
    """The largest key, and value, of each KV head."""

    def learned(self) -> dict[str, Tensor]:
        largest = (_above_zero(largest.amax(-1)) for largest in self.found())
        return dict(zip((KEY_LARGEST, VALUE_LARGEST), largest, strict=True))


class _LargestOfAll(_Largest):
    """The largest key, and value, of the layer, said for each KV head."""

    def learned(self) -> dict[str, Tensor]:
        largest = (_above_zero(largest.max().expand(largest.shape[0]).clone()) for largest in self.found())
        return dict(zip((KEY_LARGEST, VALUE_LARGEST), largest, strict=True))


def _above_zero(largest: Tensor) -> Tensor:
    """Return *largest* with 1 for 0: what never held anything is left as it is."""
    return torch.where(largest > 0, largest, 1.0)


LEARNERS: Final[Mapping[Transform, Callable[[], Learner]]] = {
    Transform.UNBIAS: _Mean,
    Transform.SMOOTH: _Root,
    Transform.ORDER: _Sorted,
    Transform.SCALED_TENSOR: _LargestOfAll,
    Transform.SCALED: _LargestOfHeads,
}


def as_stored(
    form: CacheFormat, transform: Transform, before: LayerParameters, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values as *transform* of *form* learns from them: with the rest of its recipe done to them.

    Args:
        form: The format.
        transform: One of its own.
        before: What the rest of the recipe has learned.
        key: [tokens, kv_heads, head_dim].
        value: As key.
    """
    others = tuple(other for other in form.recipe(transform) if other is not transform)
    fold = fold_of(replace(form, transforms=others), before)
    key, value = fold.key.stored(key), fold.value.stored(value)
    if Transform.HADAMARD in others:
        key, value = multiply(key), multiply(value)
    return key.to(torch.float32), value.to(torch.float32)


def learn(form: CacheFormat, key: Tensor, value: Tensor) -> LayerParameters:
    """Return what *form* learns from all of a layer's keys and values at once, [tokens, kv_heads, head_dim]."""
    learned: dict[str, Tensor] = {}
    for transform in form.calibrated:
        learner = LEARNERS[transform]()
        learner.observe(*as_stored(form, transform, LayerParameters(learned), key, value))
        learned |= learner.learned()
    return LayerParameters(learned)
