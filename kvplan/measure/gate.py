"""A kernel must agree with its definition before its time means anything."""

from math import sqrt
from typing import Final

import torch

from kvplan.errors import MismatchError
from kvplan.measure.beds import Group, PagedBed, synthetic
from kvplan.runtime.ops import Ops, load_ops
from kvplan_kernels.cache import AttentionOptions
from kvplan_kernels.layout import KVLayout

GROUPS: Final = (Group(sequences=1, tokens=333), Group(sequences=2, tokens=70))
"""A length past several pages with an unfinished group, and one shorter than a residual of 128."""
FORMAT_ERROR_SHARE: Final = 0.1
"""What the kernel may add to the format's own error: a tenth of it."""
ROUNDING_SHARE: Final = 0.01
"""What the kernel may add to the output's size: operands are rounded to bf16 or 8 bits (2^-8 each)."""


def check_decode(ops: Ops, layout: KVLayout, query_heads: int) -> None:
    """Refuse to time a decode that differs from the definition on a small case of the same shape.

    Raises:
        MismatchError: The kernel's error is more than rounding and a tenth of the format's own.
    """
    reference = load_ops("reference")
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 1, query_heads, layout.head_dim, generator=generator, device="cpu").bfloat16()
    options = AttentionOptions(scale=layout.head_dim**-0.5)
    bed = PagedBed(layout, GROUPS, ops, copies=1)
    defined = PagedBed(layout, GROUPS, reference, copies=1)
    expected = defined.decode(query, options)
    error = float((bed.decode(query.to(ops.device), options).cpu() - expected).norm())
    allowed = ROUNDING_SHARE * float(expected.norm()) + FORMAT_ERROR_SHARE * _format_error(layout, query, expected)
    if not error <= allowed:
        raise MismatchError(
            f"the {ops.name} decode of {layout.format} differs from its definition by {error:.3g}, {allowed:.3g} is "
            f"allowed: no time of it is reported",
            hint="report this with the output of `kvplan doctor`",
        )


def _format_error(layout: KVLayout, query: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far quantizing alone moves the output."""
    ratio, total = query.shape[2] // layout.kv_heads, 0.0
    lengths = [group.tokens for group in GROUPS for _ in range(group.sequences)]
    for row, tokens in enumerate(lengths):
        key, value = (tensor.float().transpose(0, 1) for tensor in synthetic(layout, tokens))
        folded = query[row, 0].float().view(layout.kv_heads, ratio, layout.head_dim)
        weights = (folded @ key.transpose(1, 2) * layout.head_dim**-0.5).softmax(-1)
        exact = (weights @ value).flatten(0, 1)
        total += float((expected[row, 0] - exact).square().sum())
    return sqrt(total)
