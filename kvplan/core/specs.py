"""What a model caches, layer by layer, and what a device has."""

from dataclasses import dataclass
from enum import StrEnum

from kvplan_kernels.format import CacheFormat, FloatType
from kvplan_kernels.layout import KVLayout, Order


class Evidence(StrEnum):
    """How a figure is known."""

    EXACT = "exact"
    MEASURED = "measured"
    PREDICTED = "predicted"
    REPORTED = "reported"


class LayerKind(StrEnum):
    """What a layer keeps of the tokens it has seen."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What one layer caches.

    Attributes:
        kind: Every token, or a sliding window of them.
        kv_heads: Heads of K and V.
        head_dim: Elements of one head of K, and of V.
        window_tokens: The window of a sliding layer.
    """

    kind: LayerKind
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None

    def layout(
        self, form: CacheFormat, block_tokens: int, float_type: FloatType, order: Order = Order.LANES
    ) -> KVLayout:
        """Return the layer's layout; UnsupportedError where no kernel takes it."""
        return KVLayout(
            format=form,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            float_type=form.float_type or float_type,
            order=order,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """What kvplan needs to know of a model.

    Attributes:
        name: As the user named it.
        digest: SHA-256 of what the spec was read from, weights' headers included; names the model in files.
        architecture: The config's architecture, such as LlamaForCausalLM.
        layers: What each layer caches, in order.
        query_heads: Query heads of a layer.
        context_tokens: The longest context the model was made for.
        weight_bytes: Bytes of the weights as loaded; None where no weights are there.
        weight_evidence: How weight_bytes is known; exact from file headers.
        parameters: Number of parameters; None where no weights are there.
        float_type: The 16-bit type that the model runs and caches in.
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
    parameters: int | None = None
    float_type: FloatType = FloatType.BF16


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
