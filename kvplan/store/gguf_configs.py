"""A GGUF file's metadata to the config.json that says the same, so that one reader knows every architecture."""

from pathlib import Path
from typing import Any, Final

from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import GGUF_MODEL_TYPES
from kvplan.store.gguf import GgufHeader
from kvplan.store.gguf_layers import LAYER_READERS, LayerKeys
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
_INDEXER_READ: Final = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
_DRAFTS: Final = "nextn_predict_layers"
_DRAFTS_LAST: Final = frozenset({"glm4moe", "glm-dsa", "qwen35", "qwen35moe"})
"""Whose last layers are those for multi-token prediction, which llama.cpp keeps no cache of."""
_LATENT_READ: Final = {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"}
_DELTA_READ: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_FAMILY_READ: Final = {
    "deepseek2": _LATENT_READ, "glm-dsa": _LATENT_READ | _INDEXER_READ,
    "qwen3next": _DELTA_READ, "qwen35": _DELTA_READ, "qwen35moe": _DELTA_READ,
    "mamba": {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.inner_size": "intermediate_size"},
    "mamba2": {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups",
               "ssm.time_step_rank": "num_heads"},
}  # fmt: skip
"""What llama.cpp's converter writes for a family (ggml-org/llama.cpp, conversion: `set_gguf_parameters`)."""
_INNER: Final = "ssm.inner_size"
_HEADS_OF_INNER: Final = {
    "qwen3next": "linear_value_head_dim", "qwen35": "linear_value_head_dim", "qwen35moe": "linear_value_head_dim",
    "mamba2": "head_dim",
}  # fmt: skip
"""The head size of a family's states, which is the inner channels over `ssm.time_step_rank` heads."""
_FAMILY_IGNORED: Final = {
    "deepseek2": frozenset({"attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
                            "attention.key_length", "attention.value_length"}),
    "glm-dsa": frozenset({"attention.q_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
                          "attention.key_length", "attention.value_length"}),
    "mamba": frozenset({"ssm.time_step_rank", "ssm.dt_b_c_rms"}),
}  # fmt: skip
"""What shapes projections, and not the cache."""
_SHAPING_PREFIXES: Final = {
    "nextn_predict_layers": "layers for multi-token prediction among the others",
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
    arrays = {key.removeprefix(prefix) for key in header.lengths}
    config = _read_keys(path, name, own, arrays)
    config.setdefault("vocab_size", header.lengths.get("tokenizer.ggml.tokens"))
    moe = name == "llama" and own.get("expert_count", 0)
    return {"model_type": "mixtral" if moe else GGUF_MODEL_TYPES[name], **config}


def _read_keys(path: Path, name: str, own: dict[str, Any], arrays: set[str]) -> dict[str, Any]:
    """Return the config's keys that the *own* ones of architecture *name* stand for; *arrays* are not all in them."""
    prefix, layers = f"{name}.", LAYER_READERS.get(name)
    ignored = _FAMILY_IGNORED.get(name, frozenset()) | (layers.reads if layers else frozenset())
    read = {key: word for key, word in _READ.items() if key not in ignored} | _FAMILY_READ.get(name, {})
    known = ignored | set(read) | ({_INNER} if name in _HEADS_OF_INNER else set())
    known |= {_DRAFTS} if name in _DRAFTS_LAST else set()
    _refuse_shaping_keys(path, prefix, (arrays | set(own)) - known, own)
    config: dict[str, Any] = {read[key]: _even(path, prefix + key, own[key]) for key in read if key in own}
    if name in _HEADS_OF_INNER:
        config[_HEADS_OF_INNER[name]] = _state_head_dim(path, prefix, own)
    if layers:
        config |= layers.read(LayerKeys(where=str(path), name=name, values=own))
    if name in _DRAFTS_LAST and own.get(_DRAFTS):
        config |= _without_drafts(path, prefix, own)
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("sliding_window", None)
    value_dim = own.get("attention.value_length", own.get("attention.key_length"))
    swa_key, swa_value = own.get("attention.key_length_swa"), own.get("attention.value_length_swa")
    if swa_value not in (None, swa_key):
        raise _unsupported(path, f"{prefix}attention.value_length_swa", UNEVEN)
    if "attention.value_length" not in ignored and value_dim != own.get("attention.key_length"):
        raise _unsupported(path, f"{prefix}attention.value_length", UNEVEN)
    return config


def _without_drafts(path: Path, prefix: str, own: dict[str, Any]) -> dict[str, Any]:
    layers, drafts = own.get("block_count"), own[_DRAFTS]
    if type(layers) is not int or type(drafts) is not int or not 0 < drafts < layers:
        raise InputError(f"{prefix}{_DRAFTS} is {str(drafts)[:60]!r} of {str(layers)[:60]!r} layers", where=str(path))
    return {"num_hidden_layers": layers - drafts, "num_nextn_predict_layers": drafts}


def _state_head_dim(path: Path, prefix: str, own: dict[str, Any]) -> int:
    inner, heads = own.get(_INNER), own.get("ssm.time_step_rank")
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        message = f"{prefix}{_INNER} {inner} is no multiple of {prefix}ssm.time_step_rank {heads}"
        raise InputError(message, where=str(path), hint="convert the model again")
    return inner // heads


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
