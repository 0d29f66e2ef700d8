"""A GGUF file's metadata to the config.json that says the same, so that one reader knows every architecture."""

from pathlib import Path
from typing import Any, Final

from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import GGUF_MODEL_TYPES
from kvplan.store.gguf import GgufHeader
from kvplan.store.keys import SUPPORTED
from kvplan.store.shaping import CHUNKED, LATENT, RECURRENT, SHARED, SPARSE, UNEVEN

_READ: Final = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}  # fmt: skip
_HARMLESS_ATTENTION_KEYS: Final = frozenset({
    "value_length", "layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon", "group_norm_groups", "causal",
    "clamp_kqv", "max_alibi_bias", "scale", "output_scale", "temperature_length", "temperature_scale",
    "sliding_window_pattern",
})  # fmt: skip
_SHAPING_PREFIXES: Final = {
    "ssm.": RECURRENT, "wkv.": RECURRENT, "shortconv.": RECURRENT, "full_attention_interval": RECURRENT,
    "attention.kv_lora_rank": LATENT, "attention.q_lora_rank": LATENT, "attention.key_length_mla": LATENT,
    "attention.value_length_mla": LATENT, "attention.key_length_swa": UNEVEN, "attention.value_length_swa": UNEVEN,
    "attention.shared_kv_layers": SHARED, "attention.indexer.": SPARSE, "attention.chunk_size": CHUNKED,
}  # fmt: skip


def gguf_config(path: Path, header: GgufHeader) -> dict[str, Any]:
    """Return the config that *header*, read from *path*, amounts to.

    Raises:
        UnsupportedModelError: The architecture is unknown or a key says that layers cache something else.
        InputError: A key is missing or cannot be.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InputError("names no general.architecture", where=str(path))
    if header.metadata.get("split.count", 1) not in (0, 1):
        hint = "merge them with `llama-gguf-split --merge`"
        raise InputError("is one part of a model in several GGUF files", where=str(path), hint=hint)
    if name not in GGUF_MODEL_TYPES:
        raise UnsupportedModelError(f"architecture {name[:60]!r} is not known", where=str(path), hint=SUPPORTED)
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    _refuse_shaping_keys(path, prefix, {key.removeprefix(prefix) for key in header.lengths} | set(own), own)
    config: dict[str, Any] = {_READ[key]: _even(path, prefix + key, own[key]) for key in _READ if key in own}
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("sliding_window", None)
    config.setdefault("vocab_size", header.lengths.get("tokenizer.ggml.tokens"))
    if own.get("attention.value_length", config.get("head_dim")) != config.get("head_dim"):
        raise _unsupported(path, f"{prefix}attention.value_length", UNEVEN)
    moe = name == "llama" and own.get("expert_count", 0)
    return {"model_type": "mixtral" if moe else GGUF_MODEL_TYPES[name], **config}


def _unsupported(path: Path, key: str, meaning: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{key} says {meaning}, which is not supported", where=str(path), hint=SUPPORTED)


def _refuse_shaping_keys(path: Path, prefix: str, keys: set[str], values: dict[str, Any]) -> None:
    for key in sorted(keys):
        meaning = next((meaning for start, meaning in _SHAPING_PREFIXES.items() if key.startswith(start)), None)
        if meaning is not None and values.get(key, True):
            raise _unsupported(path, prefix + key, meaning)
        part = key.removeprefix("attention.")
        if part != key and key not in _READ and part not in _HARMLESS_ATTENTION_KEYS and meaning is None:
            raise _unsupported(path, prefix + key, "something of attention that kvplan does not read")


def _even(path: Path, key: str, value: Any) -> Any:
    """Return the one value of a list that has one a layer."""
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        raise _unsupported(path, key, UNEVEN)
    return value[0]
