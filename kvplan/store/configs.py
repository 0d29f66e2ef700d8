"""A Hugging Face config.json, in the spelling of any transformers version, to what each layer caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvplan.core.specs import LayerSpec
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES
from kvplan.store.attention import PLAIN
from kvplan.store.keys import CONTEXT, HEADS, HIDDEN, LAYERS, SUPPORTED, VOCAB, Architecture, Keys
from kvplan.store.shaping import SHAPING_KEYS
from kvplan_kernels.format import FloatType

_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_FLOAT_TYPES: Final = {
    "bfloat16": FloatType.BF16, "float16": FloatType.FP16, "half": FloatType.FP16, "float32": FloatType.BF16,
    "float": FloatType.BF16, "auto": FloatType.BF16,
}  # fmt: skip
"""A model saved in float32 runs in bf16: the 16-bit type with its range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a config says of a model's cache and size.

    Attributes:
        query_heads: Of a layer; 0 without attention.
        context_tokens: The longest context the model was made for; 0 where the config sets none.
        tied: Whether input and output embeddings are one tensor.
        draft_layers: What layers for multi-token prediction cache where they draft.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    float_type: FloatType
    tied: bool
    draft_layers: tuple[LayerSpec, ...] = ()


def read_geometry(config: Mapping[str, Any], where: str) -> Geometry:
    """Return the geometry that *config*, read from *where*, describes.

    Raises:
        UnsupportedModelError: The architecture is unknown or a key shapes the cache in a way that is not counted.
        InputError: A value cannot be.
    """
    keys = language_keys(config, where)
    inner, architecture = _language_model(config), keys.architecture
    if inner is config:
        _need_shape(keys)
    rule = architecture.cache or PLAIN
    for key, meaning in SHAPING_KEYS.items():
        if keys.get(key) and key not in rule.reads and key not in architecture.head_dim_keys:
            raise keys.unsupported(key, meaning)
    layers = rule.layers(keys)
    attends = any(layer.kv_heads for layer in layers)
    context = keys.count(*CONTEXT, required=attends) or 0
    return Geometry(
        architecture=_name(config, inner, architecture),
        layers=layers,
        query_heads=_query_heads(keys) if attends else 0,
        hidden_size=keys.size(*HIDDEN),
        vocab_size=keys.size(*VOCAB),
        context_tokens=keys.size(*CONTEXT) if attends else context,
        float_type=_float_type(config, keys),
        tied=_tied(config, inner, architecture),
        draft_layers=rule.drafts(keys) if rule.drafts else (),
    )


def _query_heads(keys: Keys) -> int:
    """Return the query heads of a layer, the most of any where each has its own number."""
    listed: Any = keys.get("num_query_heads")
    if not isinstance(listed, list):
        return keys.size(*HEADS)
    if not listed or not all(type(heads) is int and heads > 0 for heads in listed):
        raise keys.wrong("num_query_heads must be a list of numbers, one a layer")
    return int(max(listed))


def language_keys(config: Mapping[str, Any], where: str) -> Keys:
    """Return the keys of the language model that *config*, read from *where*, describes; raises as `read_geometry`."""
    inner = _language_model(config)
    model_type = _model_type(config, inner, where)
    return Keys(inner, where, model_type, _known(model_type, inner, where))


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model inside one with vision or speech."""
    for key in _NESTED:
        inner = config.get(key)
        if isinstance(inner, dict):
            return _language_model(inner)
    return config


def _model_type(config: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> str:
    """Return the language model's type; one that a nested config leaves out is the class that the outer type names.

    Older configs of models that see have the language model's keys beside `vision_config`, under the outer type.
    """
    stated = inner.get("model_type")
    if stated is None and inner is not config:
        stated = config.get("model_type")
    if not isinstance(stated, str):
        raise InputError("has no model_type", where=where, hint="a model's config.json names its model_type")
    if stated not in ARCHITECTURES and f"{stated}_text" in ARCHITECTURES:
        return f"{stated}_text"
    return stated


def _known(model_type: str, values: Mapping[str, Any], where: str) -> Architecture:
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    told = next((f", and {key} says {says}" for key, says in SHAPING_KEYS.items() if values.get(key)), "")
    raise UnsupportedModelError(f"model_type {model_type[:60]!r} is not known{told}", where=where, hint=SUPPORTED)


def _need_shape(keys: Keys) -> None:
    """Refuse a config of its own without a shape; only a nested one leaves out what its class has by default."""
    for names in (LAYERS, HEADS, HIDDEN):
        if all(keys.get(name) is None for name in names) and any(name in keys.architecture.defaults for name in names):
            raise keys.wrong(f"has no {names[0]}", f"a {keys.type} config needs it")


def _name(config: Mapping[str, Any], inner: Mapping[str, Any], architecture: Architecture) -> str:
    """Return the outermost class that the config names."""
    for values in (config, inner):
        names = values.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    return architecture.name


def _float_type(config: Mapping[str, Any], keys: Keys) -> FloatType:
    for get in (keys.get, config.get):
        for key in ("dtype", "torch_dtype"):
            stated = get(key)
            if stated is None:
                continue
            name = str(stated)[:60].removeprefix("torch.")
            if name not in _FLOAT_TYPES:
                raise keys.unsupported(key, f"weights in {name!r}")
            return _FLOAT_TYPES[name]
    return FloatType.BF16


def _tied(config: Mapping[str, Any], inner: Mapping[str, Any], architecture: Architecture) -> bool:
    for values in (config, inner):
        stated = values.get("tie_word_embeddings", values.get("share_input_output_layers"))
        if isinstance(stated, bool):
            return stated
    return architecture.tied
