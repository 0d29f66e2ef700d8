"""The rotary embedding of a model's layers, found by what it does to their keys.

A token that is repeated has the same keys at all positions, in every layer, but for their embedding, if attention adds
nothing: so keys of a few positions tell by how much each pair of channels is turned. Positions double, and each one
makes the frequency that the last one gave more exact: no step leaves a whole turn open. Which channels make a pair is
tried out. This needs to know nothing of how a library, or a family of models, computes its embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvplan.errors import UnsupportedModelError
from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.server import OrderedStep, run_step
from kvplan_kernels.parameters import LayerParameters, rope_parameters
from kvplan_kernels.rope import rope_of_numbers

_TOKENS: Final = 16
"""Different tokens that are looked at: a pair of channels may be near 0 in the keys of one."""
_DOUBLINGS_MAX: Final = 16
_STEP: Final = 8
"""Channels by which the turned part of a head may grow."""
_UNEXPLAINED_MAX: Final = 1e-3
"""The most that may be left of the squared keys: keys of 8 bits of mantissa leave some 1e-5."""


class _ListeningStep(OrderedStep):
    """Attention that gives 0.

    Attributes:
        keys: Of each layer, float64 [tokens, positions, kv_heads, head_dim].
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.layers)
        self.keys: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        self.keys.append(key.transpose(1, 2).to("cpu", torch.float64))
        return torch.zeros_like(query.transpose(1, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pairing:
    """Which channels might be turned together: the first *turned* of a head."""

    turned: int
    interleaved: bool

    def split(self, keys: Tensor) -> Tensor:
        """Return the pairs of keys [..., head_dim] as complex numbers [..., pairs]."""
        held = keys[..., : self.turned]
        pairs = torch.unflatten(held, -1, (-1, 2) if self.interleaved else (2, -1))
        first, second = pairs.unbind(-1 if self.interleaved else -2)
        return torch.complex(first, second)


def rotary_parameters(loaded: LoadedModel) -> tuple[LayerParameters, ...]:
    """Return the embedding of every layer, as caches that undo it take it; frequencies of 0 where a layer has none.

    Raises:
        UnsupportedModelError: A layer does something else to its keys.
    """
    last = max(1, loaded.spec.context_tokens - 1)
    doublings = min(_DOUBLINGS_MAX, last.bit_length() - 1)
    positions = torch.tensor([0, *(1 << step for step in range(doublings + 1))], device=loaded.device)
    vocabulary = loaded.spec.vocab_size
    tokens = torch.arange(_TOKENS, device=loaded.device) * max(1, vocabulary // _TOKENS) % vocabulary
    step = _ListeningStep(loaded)
    ids = tokens[:, None].expand(-1, len(positions)).contiguous()
    run_step(loaded, handover_cache(len(loaded.spec.layers)), step, ids, positions.expand(_TOKENS, -1), last_only=True)
    return tuple(_found(loaded, layer, keys, positions.cpu()) for layer, keys in enumerate(step.keys))


def _found(loaded: LoadedModel, layer: int, keys: Tensor, positions: Tensor) -> LayerParameters:
    """Return the embedding of a layer: that which leaves least of its keys unexplained."""
    head_dim = keys.shape[-1]
    tried = [
        rope_parameters(_frequencies(pairing.split(keys), positions), head_dim, interleaved=pairing.interleaved)
        for pairing in _pairings(head_dim)
    ]
    unexplained = [_unexplained(found, keys, positions) for found in tried]
    if (least := min(unexplained)) <= _UNEXPLAINED_MAX:
        return tried[unexplained.index(least)]
    raise UnsupportedModelError(
        f"{loaded.spec.name}: layer {layer} does something else to its keys by position than turn pairs of channels, "
        "so it cannot be undone; leave prerope- out of the format"
    )


def _pairings(head_dim: int) -> Iterator[_Pairing]:
    for turned in range(0, head_dim + 1, _STEP):
        yield _Pairing(turned=turned, interleaved=False)
        yield _Pairing(turned=turned, interleaved=True)


def _frequencies(pairs: Tensor, positions: Tensor) -> Tensor:
    """Return the frequency of each pair, float64 [pairs], from complex [tokens, positions, kv_heads, pairs].

    Args:
        pairs: Keys.
        positions: 0, 1, 2, 4 and so on.
    """
    products = (pairs * pairs[:, :1].conj()).sum((0, 2))  # [positions, pairs]
    frequency = products[1].angle()
    for place in range(2, len(positions)):
        position = float(positions[place])
        expected = frequency * position
        frequency = frequency + (products[place] * torch.polar(torch.ones_like(expected), -expected)).angle() / position
    return frequency


def _unexplained(found: LayerParameters, keys: Tensor, positions: Tensor) -> float:
    """Return what share of the squared keys is left when those of position 0 are turned as *found* says."""
    rope = rope_of_numbers(found)
    tokens = int(positions[-1]) + 1
    first = keys[:, :1].expand_as(keys).transpose(0, 1).flatten(1, 2)  # [positions, tokens x kv_heads, head_dim]
    turned = rope.applied(first, positions, tokens)
    left = (turned - keys.transpose(0, 1).flatten(1, 2)).square().sum()
    return float(left / keys.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
