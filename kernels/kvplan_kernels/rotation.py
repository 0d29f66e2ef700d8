"""The Hadamard rotation of a head, around operations whose kernels know nothing of it.

Keys and values are stored as x H, a query is asked as q H, and what comes out is multiplied by H once more. H is
orthogonal and symmetric, so scores and outputs are those without it, but for rounding: (q H)(k H)^T = q k^T. What
changes is what a group of codes has to hold: an outlier of one channel becomes a little of all (Ashkboos et al. 2024,
QuaRot, arXiv 2404.00456, section 4: keys after RoPE, head by head, and values).

H is block-diagonal where the head size is no power of two: one block for each of its binary digits, the largest first
(80 = 64 + 16). Blocks are Sylvester's matrices over the root of their size.

An implementation of the operations brings its own way to multiply: `butterflies` defines it, the CPU's is compiled
(its decode rotates where it reads queries and writes outputs), and a GPU multiplies by the matrix, in one launch.
"""

from collections.abc import Callable
from functools import cache as memoized
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kvplan_kernels.calls import FLOAT_TYPES
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.format import Transform
from kvplan_kernels.layout import KVLayout

Operation = TypeVar("Operation", bound=Callable[..., Any])
Rotate = Callable[[Tensor], Tensor]
"""From [..., head_dim] to float32 of that shape."""


def block_sizes(head_dim: int) -> list[int]:
    """Return the sizes of the blocks of a head's rotation, the largest first.

    >>> block_sizes(80), block_sizes(128)
    ([64, 16], [128])
    """
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


def butterflies(values: Tensor) -> Tensor:
    """Return *values* [..., head_dim] times H in float32, by sums and differences of pairs, near ones first."""
    parts = torch.split_with_sizes(values.to(torch.float32), block_sizes(values.shape[-1]), dim=-1)
    return torch.cat([_block(part) for part in parts], dim=-1)


def _block(values: Tensor) -> Tensor:
    size, half = values.shape[-1], 1
    while half < size:
        near, far = torch.unflatten(values, -1, (-1, 2, half)).unbind(-2)
        values = torch.stack([near + far, near - far], dim=-2).flatten(-3)
        half *= 2
    return values * torch.tensor(float(size)).sqrt().reciprocal().item()


@memoized
def hadamard(head_dim: int, device: str = "cpu") -> Tensor:
    """Return H, float32 [head_dim, head_dim]."""
    return butterflies(torch.eye(head_dim)).to(device)


def multiply(values: Tensor) -> Tensor:
    """Return *values* [..., head_dim] times H as a product of matrices."""
    return values.to(torch.float32) @ hadamard(values.shape[-1], str(values.device))


def _rotated(values: Tensor, layout: KVLayout, rotate: Rotate) -> Tensor:
    """Return what a cache holds of *values*; what is no such tensor as it is, for the operation to refuse."""
    fits = values.dtype in FLOAT_TYPES and values.dim() and values.shape[-1] == layout.head_dim
    return rotate(values) if fits and layout.format.transform is Transform.HADAMARD else values


def rotating_append(rotate: Rotate) -> Callable[[Operation], Operation]:
    """Return what makes an append one for caches whose keys and values are rotated as well."""

    def decorate(append: Operation) -> Operation:
        @wraps(append)
        def rotated(cache: Any, batch: Any, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Any:
            key, value = (_rotated(tensor, cache.layout, rotate) for tensor in (key, value))
            return append(cache, batch, key, value, *more, **named)

        return cast(Operation, rotated)

    return decorate


def rotating_decode(rotate: Rotate) -> Callable[[Operation], Operation]:
    """Return what makes a decode one for caches whose keys and values are rotated as well."""

    def decorate(decode: Operation) -> Operation:
        @wraps(decode)
        def rotated(cache: Any, batch: Any, query: Tensor, *more: Any, **named: Any) -> DecodeResult:
            result: DecodeResult = decode(cache, batch, _rotated(query, cache.layout, rotate), *more, **named)
            return DecodeResult(output=_rotated(result.output, cache.layout, rotate), received=result.received)

        return cast(Operation, rotated)

    return decorate


def rotating_dequantize(rotate: Rotate) -> Callable[[Operation], Operation]:
    """Return what makes a dequantize one for caches whose keys and values are rotated as well."""

    def decorate(dequantize: Operation) -> Operation:
        @wraps(dequantize)
        def rotated(cache: Any, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            key, value = dequantize(cache, *more, **named)
            return _rotated(key, cache.layout, rotate).to(key.dtype), _rotated(value, cache.layout, rotate).to(
                value.dtype
            )

        return cast(Operation, rotated)

    return decorate
