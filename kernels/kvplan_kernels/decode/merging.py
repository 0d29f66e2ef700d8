"""Attention over several caches: what decode makes of each, merged by the sizes of their softmaxes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvplan_kernels.decode.result import DecodeResult


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Merged:
    """Attention over the tokens of several caches together.

    Attributes:
        output: float32 [batch, queries, query_heads, head_dim].
        lse: float32 [batch, queries, query_heads], as of a `DecodeResult`.
        shares: float32 [caches, batch, queries, query_heads]: the part of a query's probability that lies in each.
    """

    output: Tensor
    lse: Tensor
    shares: Tensor


def merge(results: Sequence[DecodeResult]) -> Merged:
    """Return the attention over the union of the caches that *results* are of.

    The queries must be the same, softcap and scale too; sink logits are given to one of the calls alone.

    Args:
        results: One or more, each with its lse.
    """
    logarithms = torch.stack([_lse(result) for result in results])
    lse = logarithms.logsumexp(0)
    # Where nothing is seen in any of them, the difference is of two infinities.
    shares = torch.where(lse == -torch.inf, 0.0, (logarithms - lse).exp())
    output = sum(
        (result.output * share[..., None] for result, share in zip(results, shares, strict=True)),
        start=torch.zeros_like(results[0].output),
    )
    return Merged(output=output, lse=lse, shares=shares)


def _lse(result: DecodeResult) -> Tensor:
    if result.lse is None:
        raise ValueError("results are merged by their lse, which was not asked for")
    return result.lse
