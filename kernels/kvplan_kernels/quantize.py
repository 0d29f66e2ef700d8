"""The quantization of groups, in float32: the definition that `append` stores and `decode` reads back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvplan_kernels.format import Axis, TensorFormat
from kvplan_kernels.layout import ceil_div


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Quantized:
    """Tokens of one tensor as codes.

    Attributes:
        codes: int32 [..., tokens, head_dim].
        scale: fp16 [..., groups, tokens] per token, [..., tokens / group size, head_dim] per channel.
        minimum: As scale.
        poisoned: Groups without finite scale and minimum; both are NaN there.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    poisoned: int


def quantize(values: Tensor, tensor: TensorFormat) -> Quantized:
    """Quantize *values*, float32 [..., tokens, head_dim]; a last group may be short."""
    steps = (1 << tensor.bits) - 1
    grouped, dim = _grouped(values, tensor)
    low = grouped.amin(dim) + 0.0  # A minimum of -0 is stored as +0, whichever zero came first.
    high = grouped.amax(dim) + 0.0
    minimum, scale = low.to(torch.float16), ((high - low) / steps).to(torch.float16)
    poison = ~(minimum.isfinite() & scale.isfinite())
    offset = grouped - minimum.to(torch.float32).unsqueeze(dim)
    codes = (offset / scale.to(torch.float32).unsqueeze(dim)).round().clamp(0, steps)
    coded = ((scale != 0) & ~poison).unsqueeze(dim)
    return Quantized(
        codes=_ungrouped(torch.where(coded, codes, 0.0).to(torch.int32), values, tensor),
        scale=_in_layout(scale.masked_fill(poison, torch.nan), tensor),
        minimum=_in_layout(minimum.masked_fill(poison, torch.nan), tensor),
        poisoned=int(poison.sum()),
    )


def dequantize_codes(codes: Tensor, scale: Tensor, minimum: Tensor, tensor: TensorFormat) -> Tensor:
    """Return float32 values [..., tokens, head_dim]: code * scale + minimum, each step rounded to float32."""
    return codes.to(torch.float32) * _spread(scale, codes, tensor) + _spread(minimum, codes, tensor)


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
    by_element = metadata.to(torch.float32).repeat_interleave(_group_size(codes, tensor), dim=-2)
    if tensor.axis is Axis.CHANNEL:
        return by_element[..., : codes.shape[-2], :]
    return by_element[..., : codes.shape[-1], :].transpose(-2, -1)
