"""A model's rotary embedding, found by what it does to keys."""

from collections.abc import Callable

import pytest
import torch

from kvplan.core.workloads import Prefill
from kvplan.errors import UnsupportedModelError
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.observing import observe
from kvplan.runtime.rotary import rotary_parameters
from kvplan.runtime.session import Runtime
from kvplan_kernels.format import parse
from kvplan_kernels.parameters import ROPE_FREQUENCY, ROPE_PARTNER
from kvplan_kernels.seen import Seen


def frequencies(loaded: LoadedModel) -> torch.Tensor:
    return loaded.model.model.rotary_emb.inv_freq.double()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3", "Gemma2", "Olmo2", "GptOss"])
def test_frequencies_are_those_of_the_model(build: Callable[..., LoadedModel], family: str) -> None:
    loaded = build(family)
    expected = frequencies(loaded)
    pairs = len(expected)
    for known in rotary_parameters(loaded):
        torch.testing.assert_close(known[ROPE_FREQUENCY][:pairs], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(known[ROPE_FREQUENCY][pairs : 2 * pairs], -expected, atol=1e-6, rtol=0)
        assert known[ROPE_PARTNER][:2].tolist() == [pairs, pairs + 1]


def test_pairs_of_neighbours_are_found(build: Callable[..., LoadedModel]) -> None:
    loaded = build("Cohere2")
    known = rotary_parameters(loaded)[0]
    assert known[ROPE_PARTNER][:4].tolist() == [1, 0, 3, 2]
    torch.testing.assert_close(known[ROPE_FREQUENCY][::2], frequencies(loaded), atol=1e-6, rtol=0)


def test_layers_have_embeddings_of_their_own(build: Callable[..., LoadedModel]) -> None:
    """Gemma 3 turns keys of sliding layers by another base than those of full ones."""
    near, far = rotary_parameters(build("Gemma3Text"))[:2]
    assert float((near[ROPE_FREQUENCY] - far[ROPE_FREQUENCY]).abs().max()) > 0.1


def test_a_part_of_a_head_may_be_turned(build: Callable[..., LoadedModel]) -> None:
    loaded = build("Phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    known = rotary_parameters(loaded)[0]
    turned = 2 * len(frequencies(loaded))
    assert turned < loaded.spec.layers[0].head_dim
    assert not known[ROPE_FREQUENCY][turned:].any()
    assert known[ROPE_PARTNER][0] == turned // 2


def test_keys_of_a_repeated_token_are_the_same_without_their_embedding(build: Callable[..., LoadedModel]) -> None:
    loaded, heard = build("Llama"), {}

    def hear(layer: int, seen: Seen) -> None:
        heard[layer] = seen.key

    observe(loaded, [7] * 50, hear)
    known = rotary_parameters(loaded)[0]
    runtime = Runtime(loaded, parse("prerope-int4"), block_tokens=16, blocks=4, slots=1)
    rope = runtime.pool.caches[0].rope
    assert rope is not None
    assert torch.equal(rope.frequency, known[ROPE_FREQUENCY])
    undone = rope.undone(heard[0], torch.arange(50), 50)
    assert float((undone - undone[:1]).abs().max()) < 1e-3 * float(undone.abs().max())
    assert float((heard[0] - heard[0][:1]).abs().max()) > 0.1 * float(undone.abs().max())


def test_keys_that_change_otherwise_are_refused(
    build: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = build("Llama")
    rotary = loaded.model.model.rotary_emb
    whole = type(rotary).forward

    def growing(self: object, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = whole(self, x, position_ids)
        size = 1 + position_ids[..., None] / 100
        return cos * size, sin * size

    monkeypatch.setattr(type(rotary), "forward", growing)
    with pytest.raises(UnsupportedModelError, match="layer 0 does something else to its keys by position"):
        rotary_parameters(loaded)


@pytest.mark.parametrize("family", ["Llama", "Cohere2", "GptOss"])
def test_a_model_reads_its_keys_as_they_were(build: Callable[..., LoadedModel], family: str) -> None:
    """Held in 16 bits, and turned back and forth, a cache gives what one gives that holds keys as they are."""
    loaded = build(family)
    ids = torch.randint(3, 199, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    found = []
    for name in ("bf16", "prerope-int8-r500"):
        server = Runtime(loaded, parse(name), block_tokens=16, blocks=40, slots=1)
        found.append(server.prefill(ids, Prefill.THROUGH_CACHE, max_batched_tokens=20).logits)
    torch.testing.assert_close(found[0], found[1], atol=0.05 * float(found[0].abs().max()), rtol=0)
