"""A model's own keys and values, layer by layer, as it hands them over to its cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.dense import attend_fresh
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.server import OrderedStep, run_step

Hear = Callable[[int, Tensor, Tensor], None]
"""Takes a layer, and its keys and values [tokens, kv_heads, head_dim] in the model's type, keys after RoPE."""


class _ObservingStep(OrderedStep):
    """Attention of whole prompts in 16 bits, with somebody listening."""

    def __init__(self, loaded: LoadedModel, hear: Hear) -> None:
        super().__init__(loaded.layers)
        self._hear = hear

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        self._hear(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return attend_fresh(query, key, value, self.layers[layer])


def observe(loaded: LoadedModel, token_ids: Sequence[int], hear: Hear) -> None:
    """Run the model over one sequence in 16 bits, and let *hear* have the keys and values of every layer in turn."""
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=loaded.device)
    positions = torch.arange(len(token_ids), device=loaded.device)[None]
    step = _ObservingStep(loaded, hear)
    run_step(loaded, handover_cache(len(loaded.spec.layers)), step, ids, positions, last_only=True)
