"""What a model caches, layer by layer, and what a device has."""

from dataclasses import dataclass
from enum import StrEnum

from kvplan_kernels.format import CacheFormat, FloatType, UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import KVLayout, Order


class Evidence(StrEnum):
    """How a figure is known."""

    EXACT = "exact"
    MEASURED = "measured"
    PREDICTED = "predicted"
    REPORTED = "reported"


class LayerKind(StrEnum):
    """What a layer's attention keeps of the tokens it has seen."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    """The tokens of the current chunk; a new chunk begins with none."""
    LATENT = "latent"
    """One vector a token, from which all heads' K and V are computed (MLA)."""
    NONE = "none"
    """No attention, or none of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideCache:
    """What a layer keeps of its tokens beside K and V.

    Attributes:
        name: What it is, such as the keys of an indexer that picks the tokens to attend to.
        elements: Of one entry.
        item_bits: Of one element; 16 where it is of the type that the model runs in.
        tokens_per_entry: Tokens that share an entry; more than one where they are compressed.
    """

    name: str
    elements: int
    item_bits: int = 16
    tokens_per_entry: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCache:
    """What a layer keeps of a sequence whatever its length.

    Attributes:
        name: What it is: the inputs of a short convolution, or a recurrent state.
        elements: Of one sequence.
        item_bits: Of one element; 16 where it is of the type that the model runs in.
        inputs: Of a convolution, how many past ones the elements are; 0 in a state that is no such thing.
        free_type: Whether neither the config nor the family says the type, so that each engine takes its own.
    """

    name: str
    elements: int
    item_bits: int = 16
    inputs: int = 0
    free_type: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence."""
        return self.elements * self.item_bits // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What one layer caches: attention's K and V, a state, both, or nothing.

    K and V that come from one projection (`attention_k_eq_v`) are normed and rotated apart, so both are cached; a layer
    whose heads read their values from the cached keys has a value_dim of 0.

    Attributes:
        kind: Every token, a sliding window or chunk of them, one latent vector each, or none.
        kv_heads: Heads of K and V; 1 in a latent layer, 0 without attention.
        head_dim: Elements of one head of K, and of V where value_dim is None; latent and rope part together in a latent
            layer.
        value_dim: Elements of one head of V where they differ; 0 where V is read from what is cached of K.
        rope_dim: Elements at the end of a latent vector that carry the position, which engines keep in more bits.
        window_tokens: The window of a sliding layer, the chunk of a chunked one.
        shared_with: The earlier layer whose K and V this one attends to; it caches none of its own.
        sides: Caches beside K and V that grow with the tokens.
        states: Caches of one size for each sequence.
    """

    kind: LayerKind
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int | None = None
    rope_dim: int = 0
    window_tokens: int | None = None
    shared_with: int | None = None
    sides: tuple[SideCache, ...] = ()
    states: tuple[StateCache, ...] = ()

    def layout(
        self, form: CacheFormat, block_tokens: int, float_type: FloatType, order: Order = Order.LANES
    ) -> KVLayout:
        """Return the layout of the layer in kvplan's own caches; UnsupportedError where no kernel takes it."""
        refusal = self.runtime_refusal
        if refusal:
            raise UnsupportedError(refusal)
        return KVLayout(
            format=form,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            float_type=form.float_type or float_type,
            order=order,
        )

    @property
    def caches_tokens(self) -> bool:
        """Whether it keeps keys and values, or what they are computed from, that are not another layer's."""
        return self.kind is not LayerKind.NONE and self.shared_with is None

    @property
    def runtime_refusal(self) -> str:
        """Why kvplan's runtime does not hold such a layer; empty where it does."""
        if self.states:
            return f"a layer keeps a state ({self.states[0].name}), and the kernels keep K and V"
        if self.shared_with is not None:
            return "a layer attends to the cache of another, and in the kernels' caches each has its own"
        if self.kind is LayerKind.NONE:
            return "a layer caches nothing, and the kernels keep K and V of each"
        if self.sides:
            return f"a layer keeps {self.sides[0].name} beside K and V, and the kernels keep nothing else"
        if self.kind not in (LayerKind.FULL, LayerKind.SLIDING):
            return f"attention is {self.kind}, and the kernels take full and sliding attention"
        if self.value_dim not in (None, self.head_dim):
            return f"K has a head size of {self.head_dim} and V of {self.value_dim}, and the kernels take one for both"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedCache:
    """What a checkpoint says that its cache is to be quantized to.

    Attributes:
        format: By kvplan's name, such as fp8_e4m3.
        library: The one that quantized it, as `quant_method` names it: modelopt or compressed-tensors.
    """

    format: str
    library: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What kvplan needs to know of a model.

    Attributes:
        name: As the user named it.
        digest: SHA-256 of what the spec was read from, weights' headers included; names the model in files.
        architecture: The config's architecture, such as LlamaForCausalLM.
        layers: What each layer caches, in order.
        query_heads: Query heads of a layer, the most of any; 0 without attention.
        context_tokens: The longest context the model was made for.
        weight_bytes: Bytes of the weights as loaded; None where nothing tells them.
        weight_evidence: How weight_bytes is known; exact from file headers, predicted from the config alone.
        stored_weight_bytes: Bytes of the weights in a file whose quantization engines keep, of a GGUF file; None else.
        weights_unknown: Why nothing tells them; empty where something does.
        parameters: Number of parameters; None where nothing tells it.
        float_type: The 16-bit type that the model runs and caches in.
        stated_cache: What the checkpoint says of the cache; None where it says nothing. Some engines take it for their
            default, kvplan's runtime does not.
        draft_layers: What layers for multi-token prediction cache where they draft; no part of `layers`.
        draft_weight_bytes: Bytes of their weights beside those that they share with the model, no part of
            weight_bytes where that is predicted; None where unknown.
    """

    name: str
    digest: str
    architecture: str
    layers: tuple[LayerSpec, ...]
    query_heads: int
    hidden_size: int
    vocab_size: int
    context_tokens: int
    weight_bytes: int | None = None
    weight_evidence: Evidence = Evidence.EXACT
    stored_weight_bytes: int | None = None
    weights_unknown: str = ""
    parameters: int | None = None
    float_type: FloatType = FloatType.BF16
    stated_cache: StatedCache | None = None
    draft_layers: tuple[LayerSpec, ...] = ()
    draft_weight_bytes: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether the weights themselves are there to be loaded."""
        return self.weight_bytes is not None and self.weight_evidence is Evidence.EXACT

    @property
    def caching_layers(self) -> int:
        """Layers that cache keys and values of their own: those that a format by layer counts."""
        return sum(layer.caches_tokens for layer in self.layers)

    def layer_formats(self, form: ModelFormat) -> tuple[CacheFormat, ...]:
        """Return the format of each layer; one that caches none of its own stores nothing in the first part's.

        Raises:
            UnsupportedError: The format names layers that the model does not have.
        """
        formats = iter(form.of_layers(self.caching_layers))
        return tuple(next(formats) if layer.caches_tokens else form.parts[0] for layer in self.layers)

    def layouts(self, form: ModelFormat, block_tokens: int, order: Order = Order.LANES) -> tuple[KVLayout, ...]:
        """Return the layout of each layer in kvplan's own caches.

        Raises:
            UnsupportedError: No kernel takes one of them, or the format names layers that the model does not have.
        """
        return tuple(
            layer.layout(stored, block_tokens, self.float_type, order)
            for layer, stored in zip(self.layers, self.layer_formats(form), strict=True)
        )


class DeviceKind(StrEnum):
    """What a device is."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """The device that measurements were taken on.

    Attributes:
        uuid: Names one device among all of its kind; measurements on two uuids are two devices.
        memory_bytes: All the memory it has.
        last_level_cache_bytes: Its largest cache; 0 where unknown.
        kernel_variant: The kernel path chosen on it, such as avx512_vnni.
    """

    name: str
    uuid: str
    kind: DeviceKind
    cores: int
    memory_bytes: int
    last_level_cache_bytes: int = 0
    kernel_variant: str = ""
