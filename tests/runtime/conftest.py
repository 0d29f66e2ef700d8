"""Models for the runtime's tests: tiny random ones of several families, and their specs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.runtime.loading import LoadedModel, attach
from kvplan_kernels.format import FloatType

COMMON = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 24

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 50, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 50, "sliding_window_pattern": 2},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Cohere2": {"sliding_window": WINDOW},
    "Olmo2": {},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def build() -> Callable[..., LoadedModel]:
    """Builds a tiny model of a family, its weights large enough that attention is far from uniform."""
    return _build


def _build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family] | changes))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(3)
    return attach(model, None, spec_of(config))


def spec_of(config: Any) -> ModelSpec:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    layers = tuple(
        LayerSpec(
            kind=LayerKind.SLIDING if kind == "sliding_attention" else LayerKind.FULL,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window_tokens=window if kind == "sliding_attention" else None,
        )
        for kind in kinds
    )
    return ModelSpec(
        name="tiny",
        digest="0" * 64,
        architecture=type(config).__name__.replace("Config", "ForCausalLM"),
        layers=layers,
        query_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        float_type=FloatType.BF16,
    )
