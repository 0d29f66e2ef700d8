"""The quantization of groups, in float32: the definition that `append` stores and `decode` reads back.

A group is coded by its format's `Fit` (`fits`), after it was cut out of the tokens here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels import scales
from kvplan_kernels.boosts import STEPS, Boosts, boosted, chosen_channels, largest_channels, with_boosts
from kvplan_kernels.fits import FITS
from kvplan_kernels.format import Axis, Code, TensorFormat
from kvplan_kernels.layout import ceil_div
from kvplan_kernels.tensor_format import E4M3_MAX, E5M2_MAX, Levels

_FLOATS: Final = {Code.E4M3: (torch.float8_e4m3fn, E4M3_MAX), Code.E5M2: (torch.float8_e5m2, E5M2_MAX)}
FLOAT_NAN: Final = 0x7F
"""A NaN of both: all bits but the sign."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Quantized:
    """Tokens of one tensor as codes.

    Attributes:
        codes: int32 [..., tokens, head_dim].
        metadata: By `TensorFormat.metadata`, as `scales.STORED_AS` has the format's numbers: [..., groups, tokens] per
            token, [..., tokens / group size, head_dim] per channel.
        poisoned: Groups that hold a NaN or an infinity or without finite metadata; all that they store of metadata, or
            of floats where there is none, is NaN. Levels without metadata have no NaN: such a group's are the lowest.
        boosts: The low bits of boosted channels, whose high bits are their codes; of formats that have some.
    """

    codes: Tensor
    metadata: Mapping[str, Tensor]
    poisoned: int
    boosts: Boosts | None = None


def quantize(values: Tensor, tensor: TensorFormat, learned: Levels | None = None) -> Quantized:
    """Quantize *values*, float32 [..., tokens, head_dim]; a last group may be short.

    *learned* are the levels of a format whose codes stand for what is learned.
    """
    if tensor.code.is_float:
        return _quantize_floats(values, tensor)
    return _quantize_groups(values, tensor, learned or tensor.levels)


def _quantize_floats(values: Tensor, tensor: TensorFormat) -> Quantized:
    """Round to the nearest float, ties to even; what is larger than the largest becomes that."""
    grouped, dim = _grouped(values, tensor)
    poison = ~grouped.isfinite().all(dim)
    stored_as, most = _FLOATS[tensor.code]
    codes = grouped.clamp(-most, most).to(stored_as).view(torch.uint8).to(torch.int32)
    codes = codes.masked_fill(poison.unsqueeze(dim), FLOAT_NAN)
    return Quantized(codes=_ungrouped(codes, values, tensor), metadata={}, poisoned=int(poison.sum()))


def _quantize_groups(values: Tensor, tensor: TensorFormat, levels: Levels) -> Quantized:
    grouped, dim = _grouped(values, tensor)
    rows = grouped.movedim(dim, -1)
    fitted = FITS[tensor.fit](rows, tensor, levels)
    channel = chosen = finer = None
    numbers = fitted.numbers
    if tensor.boosted_eighths:
        channel = largest_channels(rows, tensor.boosted_channels(values.shape[-1]))
        chosen = chosen_channels(channel, values.shape[-1])
        finer = FITS[tensor.fit](rows, tensor.boosted, tensor.boosted.levels)
        numbers = (torch.where(chosen, finer.numbers[0] * STEPS, numbers[0]), *numbers[1:])
    stored = [scales.encode(number, tensor.number) for number in numbers]
    decoded = [scales.decode(number, tensor.number) for number in stored]
    poison = ~rows.isfinite().all(-1)
    for number in decoded:
        poison |= ~number.isfinite()
    codes = fitted.code(*decoded)
    if finer is not None and chosen is not None:
        fine = finer.code(decoded[0] / STEPS, *decoded[1:])
        codes = torch.where(chosen.unsqueeze(-1), fine, codes * STEPS)
    codes = codes.masked_fill(poison.unsqueeze(-1), 0).to(torch.int32).movedim(-1, dim)
    codes = _ungrouped(codes, values, tensor)
    boosts = None
    if channel is not None:
        codes, boosts = with_boosts(codes, channel, _group_size(values, tensor))
    nan = scales.encode(torch.full((), torch.nan, device=values.device), tensor.number)
    return Quantized(
        codes=codes,
        metadata={
            name: _in_layout(torch.where(poison, nan, number), tensor)
            for name, number in zip(tensor.metadata, stored, strict=True)
        },
        poisoned=int(poison.sum()),
        boosts=boosts,
    )


def dequantize_codes(
    codes: Tensor,
    metadata: Mapping[str, Tensor],
    tensor: TensorFormat,
    learned: Levels | None = None,
    boosts: Boosts | None = None,
) -> Tensor:
    """Return float32 values [..., tokens, head_dim].

    They are level * scale + minimum, each step rounded to float32; floats are what they are. What *boosts* have more is
    added to that.
    """
    if tensor.code.is_float:
        return codes.to(torch.uint8).view(_FLOATS[tensor.code][0]).to(torch.float32)
    levels = learned or tensor.levels
    numbers = [_spread(scales.decode(metadata[name], tensor.number), codes, tensor) for name in tensor.metadata]
    scale = (numbers[0] if numbers else torch.ones(())) * levels.unit
    minimum = numbers[1] if len(numbers) > 1 else scale * -levels.centre
    table = torch.tensor(levels.table, dtype=torch.float32, device=codes.device)
    values = table[codes] * scale + minimum
    return values if boosts is None else boosted(values, boosts, scales.decode(metadata["scale"], tensor.number))


def _group_size(tokens: Tensor, tensor: TensorFormat) -> int:
    return tensor.group_size or tokens.shape[-1]


def _grouped(values: Tensor, tensor: TensorFormat) -> tuple[Tensor, int]:
    """Return *values* with an axis of groups before the axis of a group's elements, and the latter's index.

    A short last group repeats its last element, which changes neither its minimum nor its maximum.
    """
    dim, size = (-2 if tensor.axis is Axis.CHANNEL else -1), _group_size(values, tensor)
    groups = ceil_div(values.shape[dim], size)
    index = torch.arange(groups * size, device=values.device).clamp(max=values.shape[dim] - 1)
    return torch.unflatten(values.index_select(dim, index), dim, (groups, size)), dim


def _ungrouped(codes: Tensor, values: Tensor, tensor: TensorFormat) -> Tensor:
    if tensor.axis is Axis.CHANNEL:
        return codes.flatten(-3, -2)[..., : values.shape[-2], :]
    return codes.flatten(-2)[..., : values.shape[-1]]


def _in_layout(metadata: Tensor, tensor: TensorFormat) -> Tensor:
    """Return [..., tokens, groups] as [..., groups, tokens]; per channel, [..., groups, head_dim] as it is."""
    return metadata if tensor.axis is Axis.CHANNEL else metadata.transpose(-2, -1)


def _spread(metadata: Tensor, codes: Tensor, tensor: TensorFormat) -> Tensor:
    by_element = metadata.repeat_interleave(_group_size(codes, tensor), dim=-2)
    if tensor.axis is Axis.CHANNEL:
        return by_element[..., : codes.shape[-2], :]
    return by_element[..., : codes.shape[-1], :].transpose(-2, -1)
