"""Families whose GGUF files list something for each layer, to the keys of the config.json that says the same.

Keys are those that llama.cpp's converter writes and its loader reads (ggml-org/llama.cpp, conversion and
src/models/<architecture>.cpp, main of 2026-11). A layer without KV heads has no attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvplan.errors import InputError

_KV_HEADS: Final = "attention.head_count_kv"
_PATTERN: Final = "attention.sliding_window_pattern"
_SSM: Final = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
_LLAMA4_CHUNK_TOKENS: Final = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKeys:
    """The keys of one file's architecture.

    Attributes:
        where: The file.
        name: The architecture.
        values: By key, the architecture's name left out.
    """

    where: str
    name: str
    values: Mapping[str, Any]

    def size(self, key: str) -> int:
        """Return the number under *key*; InputError where it is none or 0."""
        value = self.values.get(key)
        if type(value) is not int or value < 1:
            raise self.wrong(f"{self.name}.{key} is {str(value)[:60]!r}", "it is 1 or more")
        return value

    def wrong(self, message: str, hint: str = "convert the model again") -> InputError:
        """Return the error that the file cannot be as it is."""
        return InputError(message, where=self.where, hint=hint)

    def of_layers(self, key: str) -> list[int]:
        """Return the number of each layer; one that is no list is that of all."""
        layers, value = self.size("block_count"), self.values.get(key)
        found = [value] * layers if type(value) is int else list(value) if isinstance(value, tuple) else []
        if len(found) != layers or not all(isinstance(one, int) and one >= 0 for one in found):
            raise self.wrong(f"{self.name}.{key} must be a list of {layers} numbers, one a layer")
        return [int(one) for one in found]

    def slides(self) -> list[bool]:
        """Return which layers have a window: as listed, or all but each n-th."""
        layers, value = self.size("block_count"), self.values.get(_PATTERN)
        if type(value) is int:
            return [value > 0 and (layer + 1) % value != 0 for layer in range(layers)]
        return [bool(one) for one in self.of_layers(_PATTERN)]

    def heads(self) -> tuple[list[int], int]:
        """Return the KV heads of each layer, and those of the layers that have some."""
        listed = self.of_layers(_KV_HEADS)
        some = sorted({heads for heads in listed if heads})
        if len(some) > 1:
            raise self.wrong(f"{self.name}.{_KV_HEADS} lists layers of {some[0]} and of {some[-1]} KV heads", "")
        return listed, some[0] if some else 0

    def parted(self, key: str, parts: str) -> int:
        """Return the part of *key* that each of *parts* has; InputError where it cannot be."""
        whole, many = self.size(key), self.size(parts)
        if whole % many:
            raise self.wrong(f"{self.name}.{key} {whole} is no multiple of {self.name}.{parts} {many}")
        return whole // many


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReader:
    """How one architecture lists its layers.

    Attributes:
        read: Takes a file's keys to the config's.
        reads: The keys that it reads.
    """

    read: Callable[[LayerKeys], dict[str, Any]]
    reads: frozenset[str]


def _named(heads: list[int], attention: str, other: str) -> list[str]:
    return [attention if many else other for many in heads]


def _lfm2(keys: LayerKeys) -> dict[str, Any]:
    heads, some = keys.heads()
    return {
        "layer_types": _named(heads, "full_attention", "conv"), "num_key_value_heads": some,
        "conv_L_cache": keys.size("shortconv.l_cache"),
    }  # fmt: skip


def _mixer(keys: LayerKeys) -> dict[str, Any]:
    """Return the keys of Bamba's mixer."""
    return {
        "mamba_n_heads": keys.size("ssm.time_step_rank"), "mamba_d_ssm": keys.size("ssm.inner_size"),
        "mamba_d_head": keys.parted("ssm.inner_size", "ssm.time_step_rank"),
        "mamba_n_groups": keys.size("ssm.group_count"), "mamba_d_state": keys.size("ssm.state_size"),
        "mamba_d_conv": keys.size("ssm.conv_kernel"),
    }  # fmt: skip


def _granite(keys: LayerKeys) -> dict[str, Any]:
    heads, some = keys.heads()
    states = _mixer(keys) if not all(heads) else {}
    return {"layer_types": _named(heads, "attention", "mamba"), "num_key_value_heads": some, **states}


def _falcon_h1(keys: LayerKeys) -> dict[str, Any]:
    return {"num_key_value_heads": keys.size(_KV_HEADS), **_mixer(keys)}


def _jamba(keys: LayerKeys) -> dict[str, Any]:
    heads, some = keys.heads()
    return {
        "layers_block_type": _named(heads, "attention", "mamba"), "num_key_value_heads": some,
        "mamba_expand": keys.parted("ssm.inner_size", "embedding_length"),
        "mamba_d_state": keys.size("ssm.state_size"), "mamba_d_conv": keys.size("ssm.conv_kernel"),
    }  # fmt: skip


def _nemotron(keys: LayerKeys) -> dict[str, Any]:
    """Return Nemotron H's blocks: without KV heads and without a feed-forward width a block has a state."""
    heads, some = keys.heads()
    widths = keys.of_layers("feed_forward_length")
    kinds = ["attention" if many else "mlp" if wide else "mamba" for many, wide in zip(heads, widths, strict=True)]
    return {
        "layers_block_type": kinds, "num_key_value_heads": some, "mamba_num_heads": keys.size("ssm.time_step_rank"),
        "mamba_head_dim": keys.parted("ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": keys.size("ssm.group_count"), "ssm_state_size": keys.size("ssm.state_size"),
        "conv_kernel": keys.size("ssm.conv_kernel"),
    }  # fmt: skip


def _gemma(keys: LayerKeys) -> dict[str, Any]:
    """Return Gemma 3n's layers."""
    kinds = ["sliding_attention" if one else "full_attention" for one in keys.slides()]
    return {"layer_types": kinds, "num_kv_shared_layers": keys.values.get("attention.shared_kv_layers", 0)}


def _gemma4(keys: LayerKeys) -> dict[str, Any]:
    """Return Gemma 4's layers: those with a window have a head size of their own, and KV heads."""
    slides, heads = keys.slides(), keys.of_layers(_KV_HEADS)
    found: dict[str, Any] = {**_gemma(keys), "global_head_dim": keys.size("attention.key_length")}
    found["head_dim"] = keys.size("attention.key_length_swa")
    for key, window in (("num_key_value_heads", True), ("num_global_key_value_heads", False)):
        some = {many for many, one in zip(heads, slides, strict=True) if one is window}
        if len(some) > 1 or 0 in some:
            raise keys.wrong(f"{keys.name}.{_KV_HEADS} lists layers of one kind with several numbers of KV heads", "")
        found[key] = some.pop() if some else max(heads)
    return {**found, "attention_k_eq_v": True}  # KV heads of global layers are read where that is so


def _llama4(keys: LayerKeys) -> dict[str, Any]:
    """Return Llama 4's layers: three of four in chunks of 8192, unless the file says a window of 0."""
    none = keys.values.get("attention.sliding_window") == 0
    return {"attention_chunk_size": None if none else _LLAMA4_CHUNK_TOKENS, "no_rope_layer_interval": 4}


_MIXER_READS: Final = frozenset({*_SSM, "ssm.group_count", _KV_HEADS})
LAYER_READERS: Final[dict[str, LayerReader]] = {
    "falcon-h1": LayerReader(read=_falcon_h1, reads=_MIXER_READS),
    "gemma3n": LayerReader(read=_gemma, reads=frozenset({_PATTERN, "attention.shared_kv_layers"})),
    "gemma4": LayerReader(read=_gemma4, reads=frozenset({
        _PATTERN, _KV_HEADS, "attention.shared_kv_layers", "attention.key_length", "attention.key_length_swa",
        "attention.value_length_swa"})),
    "granitehybrid": LayerReader(read=_granite, reads=_MIXER_READS),
    "jamba": LayerReader(read=_jamba, reads=frozenset({*_SSM, _KV_HEADS})),
    "lfm2": LayerReader(read=_lfm2, reads=frozenset({"shortconv.l_cache", _KV_HEADS})),
    "lfm2moe": LayerReader(read=_lfm2, reads=frozenset({"shortconv.l_cache", _KV_HEADS})),
    "llama4": LayerReader(read=_llama4, reads=frozenset({"attention.sliding_window"})),
    "nemotron_h": LayerReader(read=_nemotron, reads=_MIXER_READS),
    "nemotron_h_moe": LayerReader(read=_nemotron, reads=_MIXER_READS),
}  # fmt: skip
"""By `general.architecture`."""
