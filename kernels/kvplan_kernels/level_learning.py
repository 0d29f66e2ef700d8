"""Which levels codes stand for, learned from a model: those of which a byte has 256 that lose least.

What KVQuant calls nuq (Hooper et al. 2024, arXiv 2401.18079, section 3.3): elements are brought to one range, as they
are when they are coded, and one table serves all of K, or of V, of a layer. An element's squared error weighs as much
as the squared gradient of the model's loss by it, the diagonal of the Fisher information, and as the square of what it
was divided by. KVQuant looks for the table by k-means; in one dimension and among 256 levels the best one is found.
"""

from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import CacheFormat
from kvplan_kernels.parameters import KEY_LEVELS, VALUE_LEVELS
from kvplan_kernels.seen import Seen
from kvplan_kernels.tensor_format import LEVEL_MOST, Fit, TensorFormat

_PARTS: Final = 8
"""Of the distance of two levels that elements are told apart by."""
_PLACES: Final = LEVEL_MOST * _PARTS + 1


class LevelLearner:
    """Counts where the elements of K and V of one layer lie, as `learning.Learner` has it."""

    def __init__(self, form: CacheFormat) -> None:
        """Learn for those of *form*'s K and V whose codes stand for what is learned."""
        self._counts = {
            name: _Weights(tensor)
            for name, tensor in ((KEY_LEVELS, form.key), (VALUE_LEVELS, form.value))
            if tensor.learned
        }

    def observe(self, seen: Seen) -> None:
        """Take the keys and values of one more text, and their gradients where they are known."""
        of = {
            KEY_LEVELS: (seen.key, seen.key_gradient),
            VALUE_LEVELS: (seen.value, seen.value_gradient),
        }
        for name, counts in self._counts.items():
            counts.add(*of[name])

    def learned(self) -> dict[str, Tensor]:
        """Return the levels, int64, by the names of `parameters`."""
        return {name: counts.levels() for name, counts in self._counts.items()}


class _Weights:
    """How much the elements weigh that lie at each place from level 0 to the last."""

    def __init__(self, tensor: TensorFormat) -> None:
        self._tensor = tensor
        self._weights = torch.zeros(_PLACES, dtype=torch.float64)

    def add(self, values: Tensor, gradient: Tensor | None) -> None:
        heights, size = _heights(values, self._tensor)
        weight = size.double().square().expand(heights.shape)
        if gradient is not None:
            weight = weight * gradient.double().square()
        places = (heights * _PARTS).round().long().clamp(0, _PLACES - 1)
        self._weights += torch.bincount(places.flatten().cpu(), weight.flatten().cpu(), minlength=_PLACES)

    def levels(self) -> Tensor:
        weights = self._weights if bool(self._weights.sum() > 0) else torch.ones_like(self._weights)
        return best_levels(weights, 1 << self._tensor.bits)


def _heights(values: Tensor, tensor: TensorFormat) -> tuple[Tensor, Tensor]:
    """Return where elements lie between levels, and what a level is worth there."""
    if tensor.fit is Fit.NONE:
        return (values + 1) * (LEVEL_MOST / 2), torch.full((), 2 / LEVEL_MOST)
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = (high - low) / LEVEL_MOST
    return torch.where(step > 0, (values - low) / step, 0.0), step


def best_levels(weights: Tensor, count: int) -> Tensor:
    """Return the *count* levels, int64 ascending, from which elements are least far.

    Args:
        weights: float64: how much the elements weigh at each eighth of a level, from 0 to 255.
        count: 2 to 256.
    """
    between, below, above = _losses(weights)
    least = below
    chosen = []
    for _ in range(count - 1):
        losses = least[:, None] + between
        least, before = losses.min(0)
        chosen.append(before)
    last = int((least + above).argmin())
    found = [last]
    for before in reversed(chosen):
        found.append(int(before[found[-1]]))
    return torch.tensor(found[::-1])


def _losses(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is lost between two neighbouring levels, infinite where they are none, and below and above one."""
    places = torch.arange(_PLACES, dtype=torch.float64) / _PARTS
    sums = torch.stack([weights, weights * places, weights * places.square()])
    sums = torch.cat([torch.zeros(3, 1, dtype=torch.float64), sums.cumsum(1)], dim=1)

    def loss(first: Tensor, last: Tensor, level: Tensor) -> Tensor:
        weight, moment, square = (row[last] - row[first] for row in sums)
        found: Tensor = square - 2 * level * moment + level.square() * weight
        return found

    level = torch.arange(LEVEL_MOST + 1)
    low, high = level[:, None], level[None, :]
    middle = (low + high) * _PARTS // 2
    between = loss(low * _PARTS, middle, low.double()) + loss(middle, high * _PARTS, high.double())
    start, end = torch.zeros_like(level), torch.full_like(level, _PLACES)
    below, above = loss(start, level * _PARTS, level.double()), loss(level * _PARTS, end, level.double())
    return between.masked_fill(low >= high, torch.inf), below, above
