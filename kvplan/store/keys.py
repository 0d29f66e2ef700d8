"""The keys of one config, read one by one: a value that cannot be is an error that names the key and the file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from kvplan.core.specs import LayerSpec
from kvplan.errors import InputError, UnsupportedModelError

LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "model_dim")
CONTEXT: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "model_max_length",
    "context_length", "max_sequence_length", "max_target_positions",
    "max_context_length",
)  # fmt: skip
VOCAB: Final = ("vocab_size", "padded_vocab_size")
LAYERS_MAX: Final = 10_000
SUPPORTED: Final = "supported are the model types that docs/reference/models.md lists"
_COUNT_MAX: Final = 2**31
_ITEM_BITS: Final = {
    "float32": 32, "float": 32, "bfloat16": 16, "float16": 16, "half": 16, "auto": 16,
}  # fmt: skip
"""`auto` is the type that the model runs in (vLLM's `mamba_ssm_cache_dtype`)."""

T = TypeVar("T")


class WindowRule(StrEnum):
    """Which layers a config's `sliding_window` is for, where no `layer_types` says so."""

    NONE = "none"
    ALL = "all"
    AFTER = "after"
    """Layers from `max_window_layers` on."""
    PATTERN = "pattern"
    """All but every n-th, n from `sliding_window_pattern`."""
    LISTED = "listed"
    """Those that `layer_types` names; without it nothing is known."""


class HeadRule(StrEnum):
    """Where the number of KV heads stands."""

    GROUPED = "grouped"
    """The key for it; as many as query heads where that is null or left out without a default."""
    MULTI_QUERY = "multi_query"
    """One head where `multi_query` is true, which it is by default, else as many as query heads."""
    FALCON = "falcon"
    """The key for it under `new_decoder_architecture` or spelled `n_head_kv`, else as MULTI_QUERY."""
    GROUP_NUMBER = "group_number"
    """`multi_query_group_num` where `multi_query_attention` is true, else as many as query heads."""


LayerReader = Callable[["Keys"], tuple[LayerSpec, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRule:
    """How one family's config says what its layers cache.

    Attributes:
        layers: Reads them.
        reads: The cache-shaping keys that `layers` reads, or knows to shape nothing in this family.
        drafts: Reads what the layers for multi-token prediction cache; None where the family has none that is known.
    """

    layers: LayerReader
    reads: frozenset[str] = frozenset()
    drafts: LayerReader | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How one model type's config says what its layers cache.

    Attributes:
        name: The model class, where the config names none.
        cache: The family's rule; None is K and V heads of one size in every layer, full or in a window.
        heads: Where the number of KV heads stands.
        window: Which layers have one.
        gated: Whether the window counts only under `use_sliding_window`.
        tied: Whether input and output embeddings are one tensor where the config does not say.
        head_dim_keys: Spellings of the head size.
        defaults: Values of keys that a config may leave out.
        state_bits: Of an element of a recurrent state where the config does not say: as transformers caches it.
    """

    name: str
    cache: CacheRule | None = None
    heads: HeadRule = HeadRule.GROUPED
    window: WindowRule = WindowRule.NONE
    gated: bool = False
    tied: bool = False
    head_dim_keys: tuple[str, ...] = ("head_dim",)
    defaults: dict[str, int] = field(default_factory=dict)
    state_bits: int = 32


class Keys:
    """One config's language model, or one layer of it.

    Attributes:
        type: The config's model_type.
        where: The file.
        architecture: What is known of it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, model_type: str, architecture: Architecture) -> None:
        self._values = values
        self.where = where
        self.type = model_type
        self.architecture = architecture

    def __contains__(self, key: str) -> bool:
        """Whether *key* stands in the config, be it null."""
        return key in self._values

    def get(self, key: str) -> Any:
        """Return the value as it stands, None where there is none."""
        return self._values.get(key)

    def unsupported(self, key: str, meaning: str) -> UnsupportedModelError:
        """Return the error that *key* says *meaning*, which kvplan does not count."""
        return UnsupportedModelError(f"{key} says {meaning}, which is not supported", where=self.where, hint=SUPPORTED)

    def wrong(self, message: str, hint: str = "") -> InputError:
        """Return the error that the config cannot be as it is."""
        return InputError(message, where=self.where, hint=hint)

    def count(self, *keys: str, required: bool = True, maximum: int = _COUNT_MAX) -> int | None:
        """Return the first of *keys* that is set, else the architecture's default; InputError where it cannot be."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= maximum:
                raise self.wrong(f"{key} is {str(value)[:60]!r}", f"it is a whole number up to {maximum}")
            return value
        defaults = self.architecture.defaults
        default = next((defaults[key] for key in keys if key in defaults), None)
        if default is None and required:
            raise self.wrong(f"has no {keys[0]}", f"a {self.type} config needs it")
        return default

    def size(self, *keys: str, maximum: int = _COUNT_MAX) -> int:
        """Return the first of *keys* that is set, as `count`; InputError where it is 0 too."""
        value = self.count(*keys, maximum=maximum)
        if not value:
            raise self.wrong(f"{keys[0]} is {value}", "it is 1 or more")
        return value

    def layer_count(self) -> int:
        """Return the number of layers."""
        return self.size(*LAYERS, maximum=LAYERS_MAX)

    def state_bits(self, *keys: str) -> int:
        """Return the bits of an element whose type the first set of *keys* names, else the architecture's own."""
        key = next((key for key in keys if self._values.get(key) is not None), None)
        if key is None:
            return self.architecture.state_bits
        name = str(self._values[key])[:60].removeprefix("torch.")
        if name not in _ITEM_BITS:
            raise self.unsupported(key, f"a state in {name!r}")
        return _ITEM_BITS[name]

    def listed(self, key: str, kinds: Mapping[Any, T], length: int | None = None) -> list[T] | None:
        """Return what each item of the list under *key* stands for in *kinds*; None where the key is not set.

        Raises:
            InputError: It is no list, or not of *length* items.
            UnsupportedModelError: An item is none of *kinds*.
        """
        items = self._values.get(key)
        if items is None:
            return None
        if not isinstance(items, Sequence) or (length is not None and len(items) != length):
            of = "" if length is None else f" of {length} names, one a layer"
            raise self.wrong(f"{key} must be a list{of}")
        for item in items:
            if not isinstance(item, str | int) or item not in kinds:
                raise self.unsupported(key, f"layers of kind {str(item)[:60]!r}")
        return [kinds[item] for item in items]

    def inside(self, key: str) -> "Keys":
        """Return the keys of the object under *key*; InputError where it is none."""
        inner = self._values.get(key)
        if not isinstance(inner, Mapping):
            raise self.wrong(f"has no {key}" if inner is None else f"{key} is {str(inner)[:60]!r}", "it is an object")
        return Keys(inner, self.where, self.type, self.architecture)

    def in_layer(self, layer: int, known: frozenset[str]) -> "Keys":
        """Return the keys with what `per_layer_config` says of *layer*, which may set those *known* to shape it.

        transformers 5 saves a model whose layers differ so: by layer number, in digits of one width.
        """
        every = self._values.get("per_layer_config") or {}
        if not isinstance(every, Mapping) or not all(isinstance(one, Mapping) for one in every.values()):
            raise self.wrong("per_layer_config is no object of objects, by layer")
        own: Mapping[str, Any] = next(
            (one for key, one in every.items() if str(key).isdecimal() and int(key) == layer), {}
        )
        unknown = sorted(set(own) - known)
        if unknown:
            raise self.unsupported("per_layer_config", f"{unknown[0][:60]!r} of a layer")
        return Keys({**self._values, **own}, self.where, self.type, self.architecture) if own else self
