"""A Hugging Face config.json, in the spelling of any transformers version, to what each layer caches."""

from dataclasses import dataclass
from typing import Any, Final

from kvplan.core.specs import LayerKind, LayerSpec
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES, SHAPING_KEYS, SUPPORTED, Architecture, HeadRule, WindowRule
from kvplan_kernels.format import FloatType

_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_CONTEXT: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_VOCAB: Final = ("vocab_size", "padded_vocab_size")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_OTHER_KV_HEADS: Final = ("multi_query", "multi_query_attention", "multi_query_group_num", "kv_n_heads")
_NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_COUNT_MAX: Final = 2**31
_LAYERS_MAX: Final = 10_000
_FLOAT_TYPES: Final = {
    "bfloat16": FloatType.BF16, "float16": FloatType.FP16, "half": FloatType.FP16, "float32": FloatType.BF16,
    "float": FloatType.BF16, "auto": FloatType.BF16,
}  # fmt: skip
"""A model saved in float32 runs in bf16: the 16-bit type with its range."""
_LAYER_KINDS: Final = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING}


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What a config says of a model's cache and size.

    Attributes:
        tied: Whether input and output embeddings are one tensor.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    float_type: FloatType
    tied: bool


def read_geometry(config: dict[str, Any], where: str) -> Geometry:
    """Return the geometry that *config*, read from *where*, describes.

    Raises:
        UnsupportedModelError: The architecture is unknown or a key shapes the cache in a way that is not counted.
        InputError: A value cannot be.
    """
    return _Config(config, where).geometry()


class _Config:
    """One config's language model: the nested one of a model with vision or speech."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self._where = where
        self._outer = config
        self._values = self._language_model(config)
        model_type = self._values.get("model_type")
        if not isinstance(model_type, str):
            raise InputError("has no model_type", where=where, hint="a model's config.json names its model_type")
        self._type = model_type
        self._architecture = self._known(model_type)

    def _language_model(self, config: dict[str, Any]) -> dict[str, Any]:
        for key in _NESTED:
            inner = config.get(key)
            if isinstance(inner, dict):
                return self._language_model(inner)
        return config

    def _known(self, model_type: str) -> Architecture:
        if model_type in ARCHITECTURES:
            return ARCHITECTURES[model_type]
        told = next((f", and {key} says {says}" for key, says in SHAPING_KEYS.items() if self._values.get(key)), "")
        message = f"model_type {model_type[:60]!r} is not known{told}"
        raise UnsupportedModelError(message, where=self._where, hint=SUPPORTED)

    def _unsupported(self, key: str, meaning: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{key} says {meaning}, which is not supported", where=self._where, hint=SUPPORTED)

    def _count(self, keys: tuple[str, ...], *, required: bool = True, maximum: int = _COUNT_MAX) -> int | None:
        """Return the first of *keys* that is set, else the architecture's default."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= maximum:
                raise InputError(f"{key} is {str(value)[:60]!r}", where=self._where,
                                 hint=f"it is a whole number up to {maximum}")  # fmt: skip
            return value
        default = next((self._architecture.defaults[key] for key in keys if key in self._architecture.defaults), None)
        if default is not None:
            return default
        if required:
            raise InputError(f"has no {keys[0]}", where=self._where, hint=f"a {self._type} config needs it")
        return None

    def _size(self, keys: tuple[str, ...], maximum: int = _COUNT_MAX) -> int:
        value = self._count(keys, maximum=maximum)
        if not value:
            raise InputError(f"{keys[0]} is {value}", where=self._where, hint="it is 1 or more")
        return value

    def geometry(self) -> Geometry:
        """Return all of it."""
        if self._values is self._outer:
            self._need_shape()
        self._refuse_shaping_keys()
        heads, hidden = self._size(_HEADS), self._size(_HIDDEN)
        context = self._size(_CONTEXT)
        kv_heads = self._kv_heads(heads)
        if heads % kv_heads:
            raise InputError(f"{heads} query heads cannot share {kv_heads} KV heads evenly", where=self._where)
        return Geometry(
            architecture=self._name(),
            layers=self._layers(kv_heads, self._head_dim(heads, hidden), context),
            query_heads=heads,
            hidden_size=hidden,
            vocab_size=self._size(_VOCAB),
            context_tokens=context,
            float_type=self._float_type(),
            tied=self._tied(),
        )

    def _need_shape(self) -> None:
        """Refuse a config of its own without a shape; only a nested one leaves out what its class has by default."""
        for keys in (_LAYERS, _HEADS, _HIDDEN):
            if all(self._values.get(key) is None for key in keys):
                raise InputError(f"has no {keys[0]}", where=self._where, hint=f"a {self._type} config needs it")

    def _refuse_shaping_keys(self) -> None:
        for key, meaning in SHAPING_KEYS.items():
            if self._values.get(key):
                raise self._unsupported(key, meaning)
        kinds = self._values.get("attn_type_list")
        if kinds and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
            raise self._unsupported("attn_type_list", "layers with a recurrent state")
        if self._architecture.heads is HeadRule.GROUPED:
            for key in _OTHER_KV_HEADS:
                if self._values.get(key):
                    raise self._unsupported(key, f"a number of KV heads that {self._type} is not known to read")

    def _kv_heads(self, heads: int) -> int:
        rule = self._architecture.heads
        if isinstance(self._values.get("num_key_value_heads"), list):
            raise self._unsupported("num_key_value_heads", "layers or heads of several shapes")
        if rule is HeadRule.FALCON and any(self._values.get(key) for key in ("new_decoder_architecture", "n_head_kv")):
            rule = HeadRule.GROUPED
        if rule is not HeadRule.GROUPED and self._values.get("num_key_value_heads") is None:
            return 1 if self._values.get("multi_query", True) else heads
        for key in _KV_HEADS:
            if key in self._values and self._values[key] is None:
                return heads
        found = self._count(_KV_HEADS, required=False)
        return heads if found is None else self._size(_KV_HEADS)

    def _head_dim(self, heads: int, hidden: int) -> int:
        """Return the head size: stated, else the class's own, else derived; null and 0 state nothing."""
        if "head_dim" in self._values and not self._values["head_dim"]:
            stated = None
        else:
            stated = self._count(("head_dim",), required=False)
        if stated:
            return stated
        if hidden % heads:
            raise InputError(f"hidden_size {hidden} is no multiple of {heads} heads", where=self._where,
                             hint="the config needs head_dim")  # fmt: skip
        return hidden // heads

    def _layers(self, kv_heads: int, head_dim: int, context: int) -> tuple[LayerSpec, ...]:
        window = self._window()
        found: list[LayerSpec] = []
        for kind in self._kinds(self._size(_LAYERS, _LAYERS_MAX), window):
            if kind is LayerKind.SLIDING and window is not None and window < context:
                found.append(LayerSpec(kind=kind, kv_heads=kv_heads, head_dim=head_dim, window_tokens=window))
            else:  # a window that holds the whole context is none
                found.append(LayerSpec(kind=LayerKind.FULL, kv_heads=kv_heads, head_dim=head_dim))
        return tuple(found)

    def _window(self) -> int | None:
        """Return the window, or None where it is switched off or left null."""
        if self._architecture.gated and not self._values.get("use_sliding_window", False):
            return None
        if "sliding_window" in self._values and not self._values["sliding_window"]:
            return None
        return self._count(("sliding_window",), required=False)

    def _kinds(self, layers: int, window: int | None) -> list[LayerKind]:
        listed = self._listed_kinds(layers)
        rule = self._architecture.window
        if listed is not None:
            if LayerKind.SLIDING in listed and rule is WindowRule.NONE:
                raise self._unsupported("layer_types", f"sliding windows that {self._type} is not known to have")
            if LayerKind.SLIDING in listed and window is None:
                raise InputError("layer_types names sliding_attention without a sliding_window", where=self._where)
            return listed
        if window is None:
            return [LayerKind.FULL] * layers
        return [LayerKind.SLIDING if slides else LayerKind.FULL for slides in self._slides(rule, layers, window)]

    def _listed_kinds(self, layers: int) -> list[LayerKind] | None:
        types = self._values.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != layers:
            raise InputError(f"layer_types must be a list of {layers} names, one a layer", where=self._where)
        for name in types:
            if not isinstance(name, str) or name not in _LAYER_KINDS:
                raise self._unsupported("layer_types", f"layers of kind {str(name)[:60]!r}")
        return [_LAYER_KINDS[name] for name in types]

    def _slides(self, rule: WindowRule, layers: int, window: int) -> list[bool]:
        if rule is WindowRule.ALL:
            return [True] * layers
        if rule is WindowRule.AFTER:
            first = self._count(("max_window_layers",)) or 0
            return [layer >= first for layer in range(layers)]
        if rule is WindowRule.PATTERN:
            every = self._size(("sliding_window_pattern", "_sliding_window_pattern"))
            return [(layer + 1) % every != 0 for layer in range(layers)]
        if rule is WindowRule.NONE and window >= self._size(_CONTEXT):
            return [False] * layers
        raise self._unsupported("sliding_window", f"a window whose layers {self._type} does not name in layer_types")

    def _name(self) -> str:
        """Return the outermost class that the config names."""
        for config in (self._outer, self._values):
            names = config.get("architectures")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return names[0]
        return self._architecture.name

    def _float_type(self) -> FloatType:
        for config in (self._values, self._outer):
            for key in ("dtype", "torch_dtype"):
                stated = config.get(key)
                if stated is None:
                    continue
                name = str(stated)[:60].removeprefix("torch.")
                if name not in _FLOAT_TYPES:
                    raise self._unsupported(key, f"weights in {name!r}")
                return _FLOAT_TYPES[name]
        return FloatType.BF16

    def _tied(self) -> bool:
        for config in (self._outer, self._values):
            stated = config.get("tie_word_embeddings")
            if isinstance(stated, bool):
                return stated
        return self._architecture.tied
