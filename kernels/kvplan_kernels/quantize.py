"""The quantization of groups, in float32: the definition that `append` stores and `decode` reads back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvplan_kernels.format import Axis, TensorFormat


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


def group_dim(tensor: TensorFormat) -> int:
    """Return the axis of [..., tokens, head_dim] along which elements share a scale."""
    return -2 if tensor.axis is Axis.CHANNEL else -1


def quantize(values: Tensor, tensor: TensorFormat) -> Quantized:
    """Quantize *values*, float32 [..., tokens, head_dim]; a last group may be short."""
    dim = group_dim(tensor)
    groups = [
        _quantize_group(group, dim, tensor.bits) for group in torch.split(values, _group_size(values, tensor), dim)
    ]
    return Quantized(
        codes=torch.cat([group.codes for group in groups], dim),
        scale=torch.stack([group.scale for group in groups], -2),
        minimum=torch.stack([group.minimum for group in groups], -2),
        poisoned=sum(group.poisoned for group in groups),
    )


def dequantize_codes(codes: Tensor, scale: Tensor, minimum: Tensor, tensor: TensorFormat) -> Tensor:
    """Return float32 values [..., tokens, head_dim]: code * scale + minimum, each step rounded to float32."""
    size = _group_size(codes, tensor)
    return codes.to(torch.float32) * _spread(scale, tensor, size, codes) + _spread(minimum, tensor, size, codes)


def _group_size(tokens: Tensor, tensor: TensorFormat) -> int:
    return tensor.group_size or tokens.shape[-1]


def _spread(metadata: Tensor, tensor: TensorFormat, size: int, codes: Tensor) -> Tensor:
    by_element = metadata.to(torch.float32).repeat_interleave(size, dim=-2)
    if tensor.axis is Axis.CHANNEL:
        return by_element[..., : codes.shape[-2], :]
    return by_element[..., : codes.shape[-1], :].transpose(-2, -1)


def _quantize_group(values: Tensor, dim: int, bits: int) -> Quantized:
    steps = (1 << bits) - 1
    low = values.amin(dim) + 0.0  # A minimum of -0 is stored as +0, whichever zero came first.
    high = values.amax(dim) + 0.0
    minimum, scale = low.to(torch.float16), ((high - low) / steps).to(torch.float16)
    poison = ~(minimum.isfinite() & scale.isfinite())
    offset = values - minimum.to(torch.float32).unsqueeze(dim)
    codes = (offset / scale.to(torch.float32).unsqueeze(dim)).round().clamp(0, steps)
    coded = (scale != 0) & ~poison
    return Quantized(
        codes=torch.where(coded.unsqueeze(dim), codes, 0.0).to(torch.int32),
        scale=scale.masked_fill(poison, torch.nan),
        minimum=minimum.masked_fill(poison, torch.nan),
        poisoned=int(poison.sum()),
    )
