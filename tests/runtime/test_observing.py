"""What a model's keys and values are, and what its loss makes of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvplan.runtime.attention import Asked, handover_cache
from kvplan.runtime.dense import attend_fresh
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.observing import observe, observe_gradients
from kvplan.runtime.server import OrderedStep, run_step
from kvplan_kernels.seen import Seen

IDS = torch.randint(3, 199, (20,), generator=torch.Generator().manual_seed(0)).tolist()
EPSILON = 1e-2


class _Pushed(OrderedStep):
    """Attention with something added to the keys or values of one layer."""

    def __init__(self, loaded: LoadedModel, layer: int, key: Tensor | float, value: Tensor | float) -> None:
        super().__init__(loaded.layers)
        self._layer, self._added = layer, (key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.begin(layer)
        added = self._added if layer == self._layer else (0.0, 0.0)
        return attend_fresh(query, key + added[0], value + added[1], self.layers[layer])


def loss_of(loaded: LoadedModel, layer: int, key: Tensor | float, value: Tensor | float) -> float:
    step, positions = _Pushed(loaded, layer, key, value), torch.arange(len(IDS))[None]
    logits = run_step(loaded, handover_cache(3), step, torch.tensor([IDS]), positions, last_only=False)
    return float(cross_entropy(logits[0, :-1].double(), torch.tensor(IDS[1:])))


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_gradient_says_what_a_little_more_does_to_the_loss(
    build: Callable[..., LoadedModel], family: str, layer: int
) -> None:
    # All experts are asked: which of them are is no smooth function.
    loaded = build(family, **({"num_experts_per_tok": 2} if family == "GptOss" else {}))
    found: dict[int, Seen] = {}
    with torch.inference_mode():
        observe_gradients(loaded, IDS, found.__setitem__)
    assert list(found) == [0, 1, 2]
    seen = found[layer]
    assert seen.key_gradient is not None
    assert seen.value_gradient is not None
    assert not seen.value_gradient[-1].any()  # nobody asks after the last token
    for name, gradient in (("key", seen.key_gradient), ("value", seen.value_gradient)):
        direction = gradient / gradient.norm()
        added = (EPSILON * direction).transpose(0, 1)[None]
        zeros = {"key": 0.0, "value": 0.0}
        up, down = (loss_of(loaded, layer, **(zeros | {name: sign * added})) for sign in (1, -1))
        slope = (up - down) / (2 * EPSILON)
        assert slope == pytest.approx(float(gradient.norm()), rel=0.05)


def test_keys_and_values_are_the_same_with_and_without_a_gradient(build: Callable[..., LoadedModel]) -> None:
    loaded, plain, differentiated = build("Llama"), {}, {}
    observe(loaded, IDS, plain.__setitem__)
    observe_gradients(loaded, IDS, differentiated.__setitem__)
    for layer in range(3):
        torch.testing.assert_close(plain[layer].key, differentiated[layer].key)
        torch.testing.assert_close(plain[layer].value, differentiated[layer].value)
        assert plain[layer].key_gradient is None
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
