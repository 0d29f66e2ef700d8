"""The Hadamard rotation of a head.

Keys and values are stored as x H, a query is asked as q H, and what comes out is multiplied by H once more. H is
orthogonal and symmetric, so scores and outputs are those without it, but for rounding: (q H)(k H)^T = q k^T. What
changes is what a group of codes has to hold: an outlier of one channel becomes a little of all (Ashkboos et al. 2024,
QuaRot, arXiv 2404.00456, section 4: keys after RoPE, head by head, and values).

H is block-diagonal where the head size is no power of two: one block for each of its binary digits, the largest first
(80 = 64 + 16). Blocks are Sylvester's matrices over the root of their size.

An implementation of the operations brings its own way to multiply: `butterflies` defines it, the CPU's is compiled
(its decode rotates where it reads queries and writes outputs), and a GPU multiplies by the matrix, in one launch.
`transforms` puts them around operations.
"""

from functools import cache as memoized

import torch
from torch import Tensor


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
