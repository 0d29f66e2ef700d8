"""Channels of K that have more bits than the others, chosen anew in each group of tokens.

The channels of a group whose elements are largest in the mean are coded in `BOOST_BITS` more (Xia et al. 2025, Kitty,
arXiv 2511.18643). The high bits of such a code lie where the other channels have theirs, beside a scale that is as many
times as large as the code's step; the low bits lie beside them. So reading the codes alone gives all channels, these a
little too low, and the low bits times the step are added to that: min + scale * high + scale / 4 * low.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.tensor_format import BOOST_BITS

STEPS: Final = 1 << BOOST_BITS
"""Of a boosted code to one of its high bits; a power of two, so that a scale over it is exact."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Boosts:
    """The boosted channels of groups of tokens.

    Attributes:
        channel: int64 [..., groups, boosts], the largest first.
        low: Low bits of their codes, int32 [..., tokens, boosts].
        group: Tokens of a group; the last may be short.
    """

    channel: Tensor
    low: Tensor
    group: int


def largest_channels(rows: Tensor, count: int) -> Tensor:
    """Return the *count* channels of largest mean magnitude, int64 [..., count], of *rows*, float32 [..., channels, n].

    The largest comes first, of equals the first channel. Sums go from the first element to the last, so that compiled
    kernels can do the same; one that is not finite counts as 0.
    """
    total = torch.zeros(rows.shape[:-1], device=rows.device)
    for part in rows.abs().unbind(-1):
        total = total + part
    total = torch.where(total.isfinite(), total, 0.0)
    return total.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def chosen_channels(channel: Tensor, head_dim: int) -> Tensor:
    """Return which channels are among *channel* [..., boosts], bool [..., head_dim]."""
    none = torch.zeros(*channel.shape[:-1], head_dim, dtype=torch.bool, device=channel.device)
    return none.scatter(-1, channel, True)


def with_boosts(codes: Tensor, channel: Tensor, group: int) -> tuple[Tensor, Boosts]:
    """Return the high bits of *codes*, int32 [..., tokens, head_dim] of `BOOST_BITS` more, and the boosts of *channel*.

    Those of other channels end with zeros.
    """
    low = (codes % STEPS).gather(-1, _by_token(channel, group, codes.shape[-2]))
    return codes // STEPS, Boosts(channel=channel, low=low, group=group)


def boosted(values: Tensor, boosts: Boosts, scale: Tensor) -> Tensor:
    """Return *values*, float32 [..., tokens, head_dim], with the low bits of boosted channels.

    *scale* is that of each group and channel, float32 [..., groups, head_dim].
    """
    tokens = values.shape[-2]
    steps = scale.gather(-1, boosts.channel) / STEPS
    more = boosts.low.to(torch.float32) * _by_token(steps, boosts.group, tokens)
    return values.scatter_add(-1, _by_token(boosts.channel, boosts.group, tokens), more)


def _by_token(of_groups: Tensor, group: int, tokens: int) -> Tensor:
    """Return [..., groups, boosts] for each of *tokens*: [..., tokens, boosts]."""
    return of_groups.repeat_interleave(group, dim=-2)[..., :tokens, :]
