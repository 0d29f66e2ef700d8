"""What calibrated transforms do to keys and values, and what queries and outputs do to make up for it.

All of them are affine and head by head, so that any number of them is one step: with an offset c and a factor f a
channel, and an order P of the channels,

* keys are stored as P((k - c) f) and a query is asked as P(q / f), which leaves q c^T out of every score of the query:
  the same for all tokens, so that softmax does not see it;
* values are stored as P(v f), and what comes out, a sum of values, is read as the inverse of that.

What is computed is float32; what is stored is then rounded to 16 bits, as it is without a transform. A rotation comes
after the order: `transforms` puts both around an operation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import CacheFormat, TensorFormat, Transform
from kvplan_kernels.parameters import (
    KEY_DIVISOR,
    KEY_LARGEST,
    KEY_MIDDLE,
    KEY_OFFSET,
    KEY_ORDER,
    KEY_REACH,
    VALUE_LARGEST,
    VALUE_ORDER,
    VALUE_REACH,
    LayerParameters,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """What is done to K, or to V, of any float type [..., kv_heads, head_dim]; what it changes becomes float32.

    Attributes:
        offset: float32 [kv_heads, head_dim], or None for 0.
        factor: float32 [kv_heads, head_dim], or None for 1.
        order: int64 [kv_heads, head_dim]: the channel that is stored at each place; None leaves them.
    """

    offset: Tensor | None = None
    factor: Tensor | None = None
    order: Tensor | None = None

    @property
    def asks(self) -> bool:
        """Whether queries or outputs make up for anything: an offset of keys is nothing to them."""
        return self.factor is not None or self.order is not None

    @cached_property
    def _places(self) -> Tensor | None:
        return None if self.order is None else self.order.argsort(-1)

    def stored(self, values: Tensor) -> Tensor:
        """Return what a cache holds of *values*."""
        values = values if self.offset is None else values.to(torch.float32) - self.offset
        return _taken(values if self.factor is None else values * self.factor, self.order)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values of which a cache holds *stored*."""
        values = _taken(stored, self._places)
        values = values if self.factor is None else values / self.factor
        return values if self.offset is None else values + self.offset

    def asked(self, query: Tensor) -> Tensor:
        """Return the query whose product with what is stored is that of *query* with the values, less the offset."""
        return _taken(query if self.factor is None else query / self.factor, self.order)

    @cached_property
    def restoring(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What `read` does, by channel [kv_heads, head_dim]: the place it is stored at, int32, a factor, an offset."""
        place = None if self._places is None else self._places.to(torch.int32).contiguous()
        factor = None if self.factor is None else self.factor.reciprocal().contiguous()
        return place, factor, None if self.offset is None else self.offset.contiguous()

    def less(self, offset: Tensor) -> "Side":
        """Return the same with *offset* taken from what is stored."""
        more = offset if self.factor is None else offset / self.factor
        return replace(self, offset=more if self.offset is None else self.offset + more)

    def times(self, factor: Tensor) -> "Side":
        """Return the same with another factor on top."""
        return replace(self, factor=factor if self.factor is None else self.factor * factor)


def _taken(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else values.gather(-1, order.expand(values.shape))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Fold:
    """What is done to K and V of one layer."""

    key: Side = Side()
    value: Side = Side()


_Step = Callable[[Fold, LayerParameters, CacheFormat], Fold]


def _unbiased(fold: Fold, learned: LayerParameters, _: CacheFormat) -> Fold:
    return replace(fold, key=replace(fold.key, offset=learned[KEY_OFFSET]))


def _smoothed(fold: Fold, learned: LayerParameters, _: CacheFormat) -> Fold:
    return replace(fold, key=fold.key.times(learned[KEY_DIVISOR].reciprocal()))


def _ordered(fold: Fold, learned: LayerParameters, _: CacheFormat) -> Fold:
    key, value = (
        replace(side, order=learned[name]) for side, name in ((fold.key, KEY_ORDER), (fold.value, VALUE_ORDER))
    )
    return Fold(key=key, value=value)


def _scaled(fold: Fold, learned: LayerParameters, form: CacheFormat) -> Fold:
    return Fold(
        key=_fitted(fold.key, learned[KEY_LARGEST], form.key),
        value=_fitted(fold.value, learned[VALUE_LARGEST], form.value),
    )


def _channels_scaled(fold: Fold, learned: LayerParameters, form: CacheFormat) -> Fold:
    """Values keep their middle: what attention adds up to would change by it where a softmax has sink logits."""
    key, value = fold.key, fold.value
    if form.key.most is not None:
        key = key.less(learned[KEY_MIDDLE]).times(form.key.most / learned[KEY_REACH])
    if form.value.most is not None:
        value = value.times(form.value.most / learned[VALUE_REACH])
    return Fold(key=key, value=value)


def _fitted(side: Side, largest: Tensor, tensor: TensorFormat) -> Side:
    """Return *side* with what is *largest*, [kv_heads], at the end of the codes, which other codes do without."""
    return side if tensor.most is None else side.times((tensor.most / largest)[:, None])


_STEPS: Final[Mapping[Transform, _Step]] = {
    Transform.UNBIAS: _unbiased,
    Transform.SMOOTH: _smoothed,
    Transform.ORDER: _ordered,
    Transform.SCALED_TENSOR: _scaled,
    Transform.SCALED_CHANNEL: _channels_scaled,
    Transform.SCALED: _scaled,
}
"""In any order but this a factor would be of a channel's place and not of the channel."""


def fold_of(form: CacheFormat, learned: LayerParameters) -> Fold:
    """Return what caches of *form* do to K and V, but for a rotation.

    Raises:
        UnsupportedError: A number that the format needs was not learned.
    """
    fold = Fold()
    for transform in filter(_STEPS.__contains__, form.transforms):
        fold = _STEPS[transform](fold, learned, form)
    return fold


def attention_refusal(form: CacheFormat, *, softcap: bool, sink_logits: bool) -> str | None:
    """Return why *form* would change an attention with a softcap, or with logits that have no value, or None.

    Keys less a constant lower all scores of a query alike, which only a plain softmax does not see.
    """
    constant = {Transform.UNBIAS, Transform.SCALED_CHANNEL} & set(form.transforms)
    if not constant or Transform.PREROPE in form.transforms or not (softcap or sink_logits):
        return None  # what is taken before RoPE is given back
    other = "a softcap" if softcap else "sink logits"
    return f"format {form} takes a constant from the keys, which changes attention that has {other}"
