"""How the scale, the minimum and the codes of a group are chosen, in float32: one short function for each `Fit`.

A fit looks at whole groups and returns the numbers to store, and how elements are coded once these were rounded to what
the page holds. Sums go from the first element to the last, so that compiled kernels can do the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.tensor_format import Fit, Levels, TensorFormat


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit found.

    Attributes:
        numbers: By `TensorFormat.metadata`, float32 [...], not yet rounded.
        code: From the numbers as they are stored, float32 [...], to codes [..., group].
    """

    numbers: tuple[Tensor, ...]
    code: Callable[..., Tensor]


def _least_to_largest(rows: Tensor, steps: int, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return minimum and scale; a minimum of -0 is +0, whichever zero came first."""
    low, high = rows.amin(-1) * clip + 0.0, rows.amax(-1) * clip + 0.0
    return low, (high - low) / steps


def _clip(tensor: TensorFormat) -> float:
    return tensor.clip_percent / 100


def _range(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    low, scale = _least_to_largest(rows, levels.steps, _clip(tensor))

    def code(scale: Tensor, minimum: Tensor) -> Tensor:
        step = scale.unsqueeze(-1)
        heights = (rows - minimum.unsqueeze(-1)) / step
        codes = heights.round().clamp(0, levels.steps) if levels.are_codes else nearest_codes(heights, levels)
        return torch.where(step != 0, codes, 0.0)

    return Fitted((scale, low), code)


def nearest_codes(values: Tensor, levels: Levels) -> Tensor:
    """Return the codes of the levels nearest to *values*, float32, which count from the centre in units."""
    if levels.are_codes:
        return (values.round() + levels.centre).clamp(0, len(levels.table) - 1)
    rank = torch.zeros_like(values, dtype=torch.int64)
    for middle, low in levels.middles:
        rank += values > middle if low else values >= middle
    return torch.tensor(levels.ranked, device=values.device)[rank].to(torch.float32)


def _scaled(rows: Tensor, levels: Levels, number: Tensor) -> Fitted:
    """Return codes nearest to the elements over the stored *number*; zeros where it is 0."""

    def code(scale: Tensor) -> Tensor:
        step = (scale * levels.unit).unsqueeze(-1)
        values = torch.where(step != 0, rows / step, 0.0)
        return nearest_codes(values, levels)

    return Fitted((number,), code)


def _absmax(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    return _scaled(rows, levels, rows.abs().amax(-1) * _clip(tensor) / levels.extent)


def _fixed(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """Return codes by a scale of 1: what lies outside becomes the outermost level."""
    return Fitted((), lambda: nearest_codes(rows / levels.unit, levels))


def _power(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """OCP Microscaling Formats 1.0, section 6.3: the largest power of two in the group over that in the code."""
    most = 2.0 ** torch.tensor(levels.extent).log2().floor()
    return _scaled(rows, levels, rows.abs().amax(-1) / most)


def _norm(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """As TurboQuant's caches in vLLM: a norm of the group, over that of the levels that were chosen for it."""
    size = rows.shape[-1]
    norm = _root(_in_order(rows * rows))
    spread = norm / _root(torch.tensor(float(size)))
    values = torch.where(spread.unsqueeze(-1) != 0, rows / (spread * levels.unit).unsqueeze(-1), 0.0)
    codes = nearest_codes(values, levels)
    table = torch.tensor(levels.table, dtype=torch.float32, device=rows.device)
    chosen = (table[codes.to(torch.int64)] - levels.centre) * levels.unit
    return Fitted((norm / _root(_in_order(chosen * chosen)),), lambda scale: codes)


def _root(values: Tensor) -> Tensor:
    """Return the square roots, rounded to the nearest: torch's own of float32 are a unit off now and then."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def _in_order(values: Tensor) -> Tensor:
    """Return the sum over the last axis, from the first to the last."""
    total = torch.zeros(values.shape[:-1], device=values.device)
    for part in values.unbind(-1):
        total = total + part
    return total


def _reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 where that is 0."""
    return torch.where(scale != 0, 1.0 / scale, 0.0).unsqueeze(-1)


def _signed_largest(rows: Tensor) -> Tensor:
    """Return the element of largest magnitude, the first of several."""
    return rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).squeeze(-1)


def _q8_0(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """llama.cpp, quantize_row_q8_0_ref: halves are rounded away from 0."""
    scale = rows.abs().amax(-1) / 127
    values = rows * _reciprocal(scale)
    away = values.sign() * (values.abs() + 0.5).floor()
    exact = torch.where((values.abs() + 0.5).floor() - values.abs() > 0.5, values.round(), away)
    return Fitted((scale,), lambda stored: exact.clamp(-128, 127) + 128)


def _q5_0(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """llama.cpp, quantize_row_q5_0_ref and quantize_row_q4_0_ref."""
    half = len(levels.table) // 2
    scale = _signed_largest(rows) / -half
    codes = (rows * _reciprocal(scale) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
    return Fitted((scale,), lambda stored: codes)


def _q5_1(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """llama.cpp, quantize_row_q5_1_ref and quantize_row_q4_1_ref."""
    low, scale = _least_to_largest(rows, levels.steps)
    codes = ((rows - low.unsqueeze(-1)) * _reciprocal(scale) + 0.5).trunc().clamp(0, levels.steps)
    return Fitted((scale, low), lambda scale, minimum: codes)


def _iq4_nl(rows: Tensor, tensor: TensorFormat, levels: Levels) -> Fitted:
    """llama.cpp, quantize_row_iq4_nl_ref: codes first, then the scale that is best for them, squares weighing most."""
    first = _signed_largest(rows) / (levels.table[0] - levels.centre)
    codes = nearest_codes(rows * _reciprocal(first), levels)
    table = torch.tensor(levels.table, dtype=torch.float32, device=rows.device) - levels.centre
    heights, weights = table[codes.to(torch.int64)], rows * rows
    products, squares = _in_order(weights * heights * rows), _in_order(weights * heights * heights)
    return Fitted((torch.where(squares > 0, products / squares, 0.0),), lambda stored: codes)


FITS: Final[Mapping[Fit, Callable[[Tensor, TensorFormat, Levels], Fitted]]] = {
    Fit.RANGE: _range,
    Fit.ABSMAX: _absmax,
    Fit.POWER: _power,
    Fit.NORM: _norm,
    Fit.Q8_0: _q8_0,
    Fit.Q5_0: _q5_0,
    Fit.Q5_1: _q5_1,
    Fit.IQ4_NL: _iq4_nl,
    Fit.NONE: _fixed,
}
"""Every fit of codes that are levels."""
