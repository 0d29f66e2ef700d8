"""What transformers' own quantized caches cost, their streaming fault included."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import QuantizedLayer

from kvplan.engines import transformers_cache
from kvplan.errors import UnsupportedFormatError
from kvplan.quality.scoring import QualityOptions, score
from kvplan.runtime.loading import LoadedModel

SMALL = QualityOptions(context_tokens=512, documents=2, trials=2)
SPAN = 32
"""Tokens from one quantization to the next in the tests of streaming; the library's 128 would take long documents."""

pytestmark = pytest.mark.usefixtures("quanto_in_python")


def test_the_library_s_cache_is_scored_beside_kvplan_s_formats(demo: LoadedModel) -> None:
    eight, library, four = score(demo, ["int8", "transformers:quanto-int4", "int4"], SMALL)

    assert (library.key.format, library.key.model_digest) == ("transformers:quanto-int4", demo.spec.digest)
    assert library.key.kernel.startswith("transformers-5.")
    assert library.key.kernel.endswith("/optimum-quanto-0.2.7")
    assert all(document.quantized_positions == document.positions == 128 for document in library.documents)
    assert [document.nll_16bit for document in library.documents] == [document.nll_16bit for document in four.documents]
    # the same bits in the same groups, the newest up to 127 tokens in 16
    assert sum(d.kl for d in eight.documents) < sum(d.kl for d in library.documents) < sum(d.kl for d in four.documents)
    assert len(library.trials) == 2


def test_alone_it_scores_as_among_others(demo: LoadedModel) -> None:
    names = ["int8", "transformers:fp8"]
    assert score(demo, names[1:], SMALL) == score(demo, names, replace(SMALL, batch=1))[1:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transformers:int3", "transformers has no cache format"),
        ("transformers:bf16", "is not quantized; give bf16"),
        ("transformers:hqq-int2-axis1", "packs 2 groups of a token into broken bytes; use hqq-int2"),
        ("vllm:nvfp4", "a format of vLLM alone: kvplan has no kernel"),
    ],
)
def test_what_the_library_does_not_do_is_refused(demo: LoadedModel, name: str, message: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=message):
        score(demo, [name], SMALL)


Divergence = Callable[[str], torch.Tensor]


@pytest.fixture
def divergence(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Divergence:
    """Returns the mean divergence from 16 bits in nats between one quantization and the next, [4]."""
    monkeypatch.setattr(transformers_cache, "RESIDUAL_TOKENS", SPAN)

    def measure(name: str) -> torch.Tensor:
        quality = score(demo, [f"transformers:{name}"], replace(SMALL, documents=1, trials=0))[0]
        return torch.tensor([document.kl_values for document in quality.documents]).reshape(-1, 4, SPAN).mean((0, 2))

    return measure


@pytest.fixture
def quantized_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the library quantize from the 16-bit keys and values each time, and not from what it dequantized."""
    shipped = QuantizedLayer.update

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        held = getattr(self, "exact", [key[:, :, :0], value[:, :, :0]])
        self.exact = [torch.cat(pair, dim=-2) for pair in zip(held, (key, value), strict=True)]
        returned = shipped(self, key, value)
        if self.keys.dim() != 4:  # nothing waits: all was quantized
            self._quantized_keys = self._quantize(self.exact[0], axis=self.axis_key)
            self._quantized_values = self._quantize(self.exact[1], axis=self.axis_value)
        return returned

    return lambda: monkeypatch.setattr(QuantizedLayer, "update", update)


def test_hqq_loses_more_at_each_quantization_of_what_it_dequantized(
    divergence: Divergence, quantized_once: Callable[[], None]
) -> None:
    """At the library's default axis the elements of a group are others at each length."""
    streamed = divergence("hqq-int2")
    quantized_once()
    once = divergence("hqq-int2")

    assert streamed[0] == once[0]  # the prompt, quantized once in both
    assert streamed[1:].mean() > 2 * once[1:].mean()
    assert streamed[-1] > 2 * streamed[0]
    assert once[-1] < 1.5 * once[0]


def test_quanto_loses_no_more_at_each_quantization(divergence: Divergence, quantized_once: Callable[[], None]) -> None:
    """Groups of a token's channels stay the same, and their minimum and maximum are codes: nothing changes again."""
    streamed = divergence("quanto-int2")
    quantized_once()

    assert streamed.tolist() == pytest.approx(divergence("quanto-int2").tolist(), rel=1e-2)
