"""RoPE, undone before keys are stored and applied where they are read.

A model hands over keys that its rotary embedding has turned: by position times frequency, in the plane of each pair of
channels (Su et al. 2021, RoFormer, arXiv 2104.09864). Turning mixes channels that differ in size, and never the same
way twice, so a scale of a channel fits keys better before it (Hooper et al. 2024, KVQuant, arXiv 2401.18079, section
3.2). Channel d of a key k at position t is

    turned[d] = k[d] cos(t w[d]) - k[partner[d]] sin(t w[d])

where the two channels of a pair have frequencies w of opposite sign. Whatever the frequencies are, what is undone is
what is applied, and attention is unchanged: wrong ones would only be of no use.

A rotation by t is one by a multiple of `NEAR` and one by what is left, both from tables in float32 that were computed
in float64: so it is as exact at a million tokens as at the first.
"""

import math
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.format import CacheFormat, Transform
from kvplan_kernels.layout import LANES
from kvplan_kernels.parameters import ROPE_FREQUENCY, ROPE_PARTNER, LayerParameters

NEAR: Final = 256
"""Rows of the near table."""
_FAR_MIN: Final = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Rope:
    """The rotary embedding of a layer's keys.

    Attributes:
        frequency: float64 [head_dim], rad a token; 0 where a channel is not turned.
        partner: int64 [head_dim]: the other channel of the pair, itself where there is none.
    """

    frequency: Tensor
    partner: Tensor
    _tables: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def near(self) -> Tensor:
        """Cosines and sines of 0 to `NEAR` - 1 tokens, float32 [NEAR, 2, head_dim]."""
        if "near" not in self._tables:
            self._tables["near"] = self._table(torch.arange(NEAR, device="cpu"))
        return self._tables["near"]

    @property
    def lanes(self) -> Tensor:
        """Those of the first 16 tokens, channel by channel, float32 [head_dim, 2, 16]."""
        if "lanes" not in self._tables:
            self._tables["lanes"] = self.near[:LANES].permute(2, 1, 0).contiguous()
        return self._tables["lanes"]

    def far(self, tokens: int) -> Tensor:
        """Return those of multiples of `NEAR`, float32 [rows, 2, head_dim], for positions under *tokens* or more."""
        rows = max(_FAR_MIN, 1 << math.ceil(math.log2(tokens // NEAR + 1)))
        if "far" not in self._tables or self._tables["far"].shape[0] < rows:
            self._tables["far"] = self._table(NEAR * torch.arange(rows, device="cpu"))
        return self._tables["far"]

    def applied(self, key: Tensor, positions: Tensor, tokens: int) -> Tensor:
        """Return *key* [tokens, heads, head_dim] turned, float32.

        Args:
            key: Of any float type.
            positions: Integers [tokens].
            tokens: More than any of them.
        """
        cosine, sine = self._rotation(positions, tokens)
        return key.to(torch.float32) * cosine - key.to(torch.float32)[..., self.partner] * sine

    def undone(self, key: Tensor, positions: Tensor, tokens: int) -> Tensor:
        """Return *key* turned back; as `applied` has it."""
        cosine, sine = self._rotation(positions, tokens)
        return key.to(torch.float32) * cosine + key.to(torch.float32)[..., self.partner] * sine

    def _rotation(self, positions: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, float32 [tokens, 1, head_dim]."""
        positions = positions.to(torch.int64)
        far, near = self.far(tokens)[positions // NEAR], self.near[positions % NEAR]
        cosine = far[:, 0] * near[:, 0] - far[:, 1] * near[:, 1]
        sine = far[:, 1] * near[:, 0] + far[:, 0] * near[:, 1]
        return cosine[:, None], sine[:, None]

    def _table(self, positions: Tensor) -> Tensor:
        angles = positions.to(torch.float64)[:, None] * self.frequency.cpu()
        return torch.stack([angles.cos(), angles.sin()], dim=1).to(torch.float32).to(self.frequency.device)


def rope_of(form: CacheFormat, known: LayerParameters) -> Rope | None:
    """Return the embedding that caches of *form* undo, as *known* has it; None where they do not.

    Raises:
        UnsupportedError: It is not known.
    """
    if Transform.PREROPE not in form.transforms:
        return None
    return rope_of_numbers(known)


def rope_of_numbers(known: LayerParameters) -> Rope:
    """Return the embedding that *known* has.

    Raises:
        UnsupportedError: It has none.
    """
    return Rope(frequency=known[ROPE_FREQUENCY], partner=known[ROPE_PARTNER])
