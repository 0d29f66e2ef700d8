"""What formats learn, from the keys and values of a model that runs in 16 bits.

A `Learner` sees keys and values as they are once the other transforms of its recipe are done to them (`as_stored`), and
has the tensors of `parameters.LEARNED` in the end. What some of them want beside is how much the model's loss changes
with each: its gradient, which changes with a transform as a query does.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from kvplan_kernels.folding import Side, fold_of
from kvplan_kernels.format import CacheFormat, CodeTable, Lesson, Transform
from kvplan_kernels.level_learning import LevelLearner
from kvplan_kernels.outliers import cut
from kvplan_kernels.parameters import (
    KEY_DIVISOR,
    KEY_LARGEST,
    KEY_MIDDLE,
    KEY_OFFSET,
    KEY_ORDER,
    KEY_REACH,
    NOTHING_LEARNED,
    VALUE_LARGEST,
    VALUE_ORDER,
    VALUE_REACH,
    LayerParameters,
)
from kvplan_kernels.rope import Rope, rope_of
from kvplan_kernels.rotation import multiply
from kvplan_kernels.seen import Seen

SMOOTHING_EXPONENT: Final = 0.5
"""Of the largest key of a channel: QServe, arXiv 2405.04532, section 4.2, which found no better one."""
_NOTHING: Final = 1e-30
_TAIL: Final = 0.005
"""Of the keys of a channel, on either side."""


class Learner(Protocol):
    """Learns one lesson of one layer."""

    def observe(self, seen: Seen) -> None:
        """Take the keys and values of one more text."""
        ...

    def learned(self) -> dict[str, Tensor]:
        """Return the lesson's tensors by name; something was observed."""
        ...


class _Mean:
    """The mean key of each channel. RoPE turns a bias of the projection, so that what is constant is seen after it."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._tokens = 0

    def observe(self, seen: Seen) -> None:
        self._total = self._total + seen.key.double().sum(0)
        self._tokens += seen.key.shape[0]

    def learned(self) -> dict[str, Tensor]:
        return {KEY_OFFSET: (torch.as_tensor(self._total) / self._tokens).float()}


class _Largest:
    """The largest key and value of each channel, without their signs."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def observe(self, seen: Seen) -> None:
        self._key, self._value = _larger(self._key, seen.key), _larger(self._value, seen.value)

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


class _Usual:
    """Between which two numbers all but one in a hundred keys of a channel lie, and under which such values do.

    Those of several texts are averaged. What lies outside is cut off, or is kept beside as an outlier: KVQuant's
    thresholds, arXiv 2401.18079, section 3.4.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []

    def observe(self, seen: Seen) -> None:
        low, high = torch.quantile(seen.key, torch.tensor([_TAIL, 1 - _TAIL], device=seen.key.device), dim=0)
        self._found.append((low, high, torch.quantile(seen.value.abs(), 1 - 2 * _TAIL, dim=0)))

    def learned(self) -> dict[str, Tensor]:
        low, high, reach = (torch.stack(found).mean(0) for found in zip(*self._found, strict=True))
        names = (KEY_MIDDLE, KEY_REACH, VALUE_REACH)
        return dict(zip(names, ((low + high) / 2, _above_zero((high - low) / 2), _above_zero(reach)), strict=True))


def _above_zero(largest: Tensor) -> Tensor:
    """Return *largest* with 1 where next to nothing was held, by which nothing can be divided."""
    return torch.where(largest > _NOTHING, largest, 1.0)


_OF_TRANSFORMS: Final[Mapping[Lesson, Callable[[], Learner]]] = {
    Transform.UNBIAS: _Mean,
    Transform.SMOOTH: _Root,
    Transform.ORDER: _Sorted,
    Transform.SCALED_TENSOR: _LargestOfAll,
    Transform.SCALED_CHANNEL: _Usual,
    Transform.SCALED: _LargestOfHeads,
}


def learner(form: CacheFormat, lesson: Lesson) -> Learner:
    """Return somebody who learns *lesson*, one of *form*'s, of one layer."""
    return LevelLearner(form) if lesson is CodeTable.LEVELS else _OF_TRANSFORMS[lesson]()


def needs_gradient(lesson: Lesson) -> bool:
    """Return whether *lesson* weighs keys and values by the gradient of the model's loss."""
    return lesson is CodeTable.LEVELS


def as_stored(form: CacheFormat, lesson: Lesson, before: LayerParameters, seen: Seen) -> Seen:
    """Return *seen* as *lesson* of *form* learns from it: with the rest of its recipe done to it.

    Args:
        form: The format.
        lesson: One of its own.
        before: What the rest of the recipe has learned, and what the model has.
        seen: As the model has it.
    """
    recipe = form.recipe(lesson)
    others = tuple(other for other in form.transforms if other in recipe and other is not lesson)
    fold, rotated = fold_of(replace(form, transforms=others), before), Transform.HADAMARD in others
    seen = _without_rope(seen, rope_of(form, before))

    def turned(values: Tensor) -> Tensor:
        return multiply(values) if rotated else values.to(torch.float32)

    def gradient(found: Tensor | None, side: Side) -> Tensor | None:
        return None if found is None else turned(side.asked(found))

    def dense(values: Tensor) -> Tensor:
        """Leave out what does not lie in codes, where codes are what is learned."""
        return cut(values, form.outliers)[0] if lesson is CodeTable.LEVELS and form.outliers else values

    return Seen(
        key=dense(turned(fold.key.stored(seen.key))),
        value=dense(turned(fold.value.stored(seen.value))),
        key_gradient=gradient(seen.key_gradient, fold.key),
        value_gradient=gradient(seen.value_gradient, fold.value),
    )


def _without_rope(seen: Seen, rope: Rope | None) -> Seen:
    """Return *seen*, a text from its first token on, with keys as they were before their embedding."""
    if rope is None:
        return seen
    tokens = seen.key.shape[0]
    places = torch.arange(tokens, device=seen.key.device)
    gradient = None if seen.key_gradient is None else rope.undone(seen.key_gradient, places, tokens)
    return replace(seen, key=rope.undone(seen.key, places, tokens), key_gradient=gradient)


def learn(form: CacheFormat, key: Tensor, value: Tensor, known: LayerParameters = NOTHING_LEARNED) -> LayerParameters:
    """Return *known*, and what *form* learns from all of a layer's keys and values, [tokens, kv_heads, head_dim]."""
    for lesson in form.calibrated:
        one = learner(form, lesson)
        one.observe(as_stored(form, lesson, known, Seen(key=key, value=value)))
        known = known | LayerParameters(one.learned())
    return known
