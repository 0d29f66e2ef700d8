from collections.abc import Callable
from typing import Any

import pytest

from kvplan.core.specs import ModelSpec
from kvplan.store.configs import read_geometry

Spec = Callable[..., ModelSpec]


def model(layers: int, heads: int, kv: int | None, hidden: int, **more: Any) -> ModelSpec:
    """The model of a config with these keys, of the Llama family unless *more* names another."""
    config = {
        "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "hidden_size": hidden, "max_position_embeddings": 131072, "vocab_size": 128256, **more,
    }  # fmt: skip
    geometry = read_geometry({key: value for key, value in config.items() if value is not None}, "config.json")
    return ModelSpec(
        name="m", digest="d", architecture=geometry.architecture, layers=geometry.layers,
        query_heads=geometry.query_heads, hidden_size=geometry.hidden_size, vocab_size=geometry.vocab_size,
        context_tokens=geometry.context_tokens, float_type=geometry.float_type, draft_layers=geometry.draft_layers,
    )  # fmt: skip


@pytest.fixture(scope="session")
def spec() -> Spec:
    """Makes the model of a config."""
    return model
