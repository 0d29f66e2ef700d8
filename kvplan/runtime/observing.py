"""A model's own keys and values, layer by layer, as it hands them over to its cache; its loss's gradient by them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.dense import attend_fresh
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.server import OrderedStep, run_step
from kvplan_kernels.seen import Seen

Hear = Callable[[int, Seen], None]
"""Takes a layer, and its keys and values in the model's type, keys after RoPE."""


class _ObservingStep(OrderedStep):
    """Attention of whole prompts in 16 bits, with somebody listening."""

    def __init__(self, loaded: LoadedModel, hear: Hear) -> None:
        super().__init__(loaded.layers)
        self._hear = hear

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        self._hear(layer, Seen(key=_by_token(key), value=_by_token(value)))
        return attend_fresh(query, key, value, self.layers[layer])


class _DifferentiatingStep(OrderedStep):
    """The same, with zeros added to keys and values: the loss's gradient by these is that by keys and values.

    Attributes:
        asked: Of each layer keys, values, and what was added to either.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.layers)
        self.asked: list[tuple[Tensor, ...]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        added = [torch.zeros_like(tensor, requires_grad=True) for tensor in (key, value)]
        self.asked.append((key.detach(), value.detach(), *added))
        return attend_fresh(query, key + added[0], value + added[1], self.layers[layer])


def _by_token(tensor: Tensor) -> Tensor:
    """Return [1, kv_heads, tokens, head_dim] as [tokens, kv_heads, head_dim]."""
    return tensor[0].transpose(0, 1)


def observe(loaded: LoadedModel, token_ids: Sequence[int], hear: Hear) -> None:
    """Run the model over one sequence in 16 bits, and let *hear* have the keys and values of every layer in turn."""
    _run(loaded, token_ids, _ObservingStep(loaded, hear))


def observe_gradients(loaded: LoadedModel, token_ids: Sequence[int], hear: Hear) -> None:
    """As `observe`, with the gradients of the mean loss of the next token; all layers are heard in the end."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        step = _DifferentiatingStep(loaded)
        logits = _run(loaded, token_ids, step, differentiable=True)
        following = torch.tensor(list(token_ids[1:]), dtype=torch.int64, device=loaded.device)
        loss = cross_entropy(logits[0, :-1].float(), following)
        gradients = torch.autograd.grad(loss, [added for *_, key, value in step.asked for added in (key, value)])
    for layer, (key, value, *_) in enumerate(step.asked):
        by_key, by_value = gradients[2 * layer : 2 * layer + 2]
        found = map(_by_token, (key, value, by_key, by_value))
        hear(layer, Seen(**dict(zip(("key", "value", "key_gradient", "value_gradient"), found, strict=True))))


def _run(loaded: LoadedModel, token_ids: Sequence[int], step: OrderedStep, *, differentiable: bool = False) -> Tensor:
    ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=loaded.device)
    positions = torch.arange(len(token_ids), device=loaded.device)[None]
    cache = handover_cache(len(loaded.spec.layers))
    return run_step(loaded, cache, step, ids, positions, last_only=not differentiable, differentiable=differentiable)
