"""A model whose attention kvplan does not compute is refused, never run a little wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from kvplan.errors import UnsupportedModelError
from kvplan.runtime import attention
from kvplan.runtime.loading import LoadedModel, attach

Build = Callable[..., LoadedModel]


def test_scale_window_softcap_and_sinks_are_read_from_the_model(build: Build) -> None:
    gemma, oss = build("Gemma2"), build("GptOss")

    assert [layer.options.window for layer in gemma.layers] == [24, None, 24]
    assert {layer.options.softcap for layer in gemma.layers} == {2.0}
    assert gemma.layers[0].options.scale == pytest.approx(50**-0.5)
    assert all(layer.sink_logits is not None and layer.sink_logits.shape == (6,) for layer in oss.layers)
    assert {layer.options.scale for layer in oss.layers} == {32**-0.5}


def test_a_spec_that_is_not_the_model_s_is_refused(build: Build) -> None:
    loaded = build("Llama")
    layers = tuple(replace(layer, kv_heads=3) for layer in loaded.spec.layers)
    with pytest.raises(UnsupportedModelError, match=r"layer 0, where its config says 3 heads of 32"):
        attach(loaded.model, None, replace(loaded.spec, layers=layers))
    with pytest.raises(UnsupportedModelError, match="3 of 4 layers"):
        attach(loaded.model, None, replace(loaded.spec, layers=(*loaded.spec.layers, loaded.spec.layers[0])))
    windowed = tuple(replace(layer, window_tokens=9) for layer in loaded.spec.layers)
    with pytest.raises(UnsupportedModelError, match="masks layer 0 to None tokens; its config says 9"):
        attach(loaded.model, None, replace(loaded.spec, layers=windowed))


def test_a_window_beyond_the_context_is_no_window(build: Build) -> None:
    assert {layer.options.window for layer in build("Mistral", sliding_window=4096).layers} == {None}


def test_a_model_without_the_library_s_attention_interface_is_refused(build: Build) -> None:
    config = transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=2, n_head=2)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="its cache cannot be replaced"):
        attach(model, None, replace(build("Llama").spec, architecture="BloomForCausalLM"))


def test_chunked_attention_is_refused(build: Build) -> None:
    changes = {"attention_chunk_size": 16, "num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 32}
    config = transformers.Llama4TextConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        **changes,
    )
    model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        attach(model, None, replace(build("Llama").spec, architecture="Llama4ForCausalLM"))


def test_an_argument_that_means_something_unknown_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build("Llama")
    layer = loaded.model.model.layers[1].self_attn
    stock = type(layer).forward

    def biased(self: Any, *arguments: Any, **named: Any) -> Any:
        return stock(self, *arguments, **named, position_bias=torch.zeros(1))

    monkeypatch.setattr(type(layer), "forward", biased)
    with pytest.raises(UnsupportedModelError, match="passes position_bias to its attention"):
        attach(loaded.model, None, loaded.spec)


def test_a_layer_that_attends_without_new_keys_of_its_own_is_refused(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = build("Llama")
    monkeypatch.setattr(attention.HandoverLayer, "update", lambda _, key, value, *__, **___: (key, value))
    with pytest.raises(UnsupportedModelError, match="attends in layer 0 without keys"):
        attach(loaded.model, None, loaded.spec)
