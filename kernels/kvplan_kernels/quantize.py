"""The quantization of groups, in float32: the definition that `append` stores and `decode` reads back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import E4M3_MAX, Axis, Code, TensorFormat
from kvplan_kernels.layout import ceil_div

E4M3_NAN: Final = 0x7F


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Quantized:
    """Tokens of one tensor as codes.

    Attributes:
        codes: int32 [..., tokens, head_dim].
        metadata: By `TensorFormat.metadata`, fp16 [..., groups, tokens] per token, [..., tokens / group size, head_dim]
            per channel.
        poisoned: Groups that hold a NaN or an infinity or without finite metadata; all that they store of metadata, or
            of codes where there is none, is NaN.
    """

    codes: Tensor
    metadata: Mapping[str, Tensor]
    poisoned: int


def quantize(values: Tensor, tensor: TensorFormat) -> Quantized:
    """Quantize *values*, float32 [..., tokens, head_dim]; a last group may be short."""
    return _quantize_e4m3(values, tensor) if tensor.code is Code.E4M3 else _quantize_integers(values, tensor)


def _quantize_e4m3(values: Tensor, tensor: TensorFormat) -> Quantized:
    """Round to the nearest float, ties to even; what is larger than the largest becomes that."""
    grouped, dim = _grouped(values, tensor)
    poison = ~grouped.isfinite().all(dim)
    codes = grouped.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
    codes = codes.masked_fill(poison.unsqueeze(dim), E4M3_NAN)
    return Quantized(codes=_ungrouped(codes, values, tensor), metadata={}, poisoned=int(poison.sum()))


def _quantize_integers(values: Tensor, tensor: TensorFormat) -> Quantized:
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
        metadata={
            name: _in_layout(numbers.masked_fill(poison, torch.nan), tensor)
            for name, numbers in (("scale", scale), ("min", minimum))
        },
        poisoned=int(poison.sum()),
    )


def dequantize_codes(codes: Tensor, metadata: Mapping[str, Tensor], tensor: TensorFormat) -> Tensor:
    """Return float32 values [..., tokens, head_dim].

    Integers are code * scale + minimum, each step rounded to float32; floats are what they are.
    """
    if tensor.code is Code.E4M3:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    scale, minimum = (_spread(metadata[name], codes, tensor) for name in ("scale", "min"))
    return codes.to(torch.float32) * scale + minimum


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
