"""The formats that kvplan has kernels for, and what each takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from kvplan.core.layouts import ModelLayout
from kvplan.core.specs import ModelSpec
from kvplan.core.tiers import TieredLayout, lay_out_tiers
from kvplan.errors import UnsupportedFormatError
from kvplan_kernels.format import CacheFormat, FloatType, UnsupportedError
from kvplan_kernels.layer_formats import LayerFormats, ModelFormat, formats_refusal, parse_formats
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.methods import METHODS
from kvplan_kernels.tensor_format import LLAMA_CPP
from kvplan_kernels.tier_formats import TieredFormat

REFERENCE_HEAD_DIM: Final = 128
"""The head size that effective bits are given for where no model is named."""
_KIVI: Final = "Liu et al. 2024, KIVI, arXiv 2402.02750"
_KEYS_FIRST: Final = "more bits for keys than for values: KV-AdaQuant, arXiv 2502.15075"

_LLOYD_MAX: Final = "Max 1960, Quantizing for minimum distortion"
_LLAMA_CPP: Final = "llama.cpp"
_LEARNED: Final = "levels learned by sensitivity, for K and V of a layer: Hooper et al. 2024, KVQuant, arXiv 2401.18079"
_BLOCKS: Final = "llama.cpp's block of 32 channels: the values of its reference functions, bit for bit"
_ROTATED: Final = "int4 of keys and values rotated head by head: Ashkboos et al. 2024, QuaRot, arXiv 2404.00456"

FORMATS: Final = {
    "bf16": "16 bits, unquantized",
    "fp16": "16 bits, unquantized",
    "fp8_e4m3": "OCP E4M3 floats, no scale: vLLM's fp8, uncalibrated",
    "fp8_e5m2": "OCP E5M2 floats, no scale",
    "scaled-fp8_e4m3": "OCP E4M3 floats, a calibrated scale a KV head",
    "scaled-tensor-fp8_e4m3": "OCP E4M3 floats, a calibrated scale for K and for V of a layer",
    "int8": "one scale and minimum a token and head",
    "int6": "planes of 4 and 2 bits, one scale and minimum a token and head",
    "k8v4": _KEYS_FIRST,
    "k8v4-g64": _KEYS_FIRST,
    "int4": "one scale and minimum a token and head",
    "int4-g64-o1": "the largest element of a token and head beside the codes, as KVQuant keeps outliers",
    "int4-g64": "one scale and minimum for 64 channels of a token",
    "had-int4": _ROTATED,
    "smooth-int4": "SmoothAttention: Lin et al. 2024, QServe, arXiv 2405.04532",
    "unbias-int4": "keys less their mean, which softmax does not see",
    "order-k2v2-g32-r128-s5": "channel reorder of SKVQ: Duanmu et al. 2024, arXiv 2405.06219",
    "nvfp4": "NVIDIA's FP4: E2M1 and an E4M3 scale for 16 channels, without one for the tensor",
    "scaled-tensor-nvfp4": "NVIDIA's FP4 with a calibrated scale for K and for V of a layer, as TensorRT-LLM has it",
    "mxfp4": "OCP Microscaling Formats 1.0, MXFP4: E2M1 and a power of two for 32 channels",
    "fp4_e2m1": "SGLang's fp4_e2m1: E2M1 and a power of two for 16 channels",
    "lloyd4": f"levels of a normal distribution: {_LLOYD_MAX}",
    "int3-g64": "planes of 2 bits and 1, one scale and minimum for 64 channels of a token",
    "nuq4": _LEARNED,
    "nuq3": _LEARNED,
    "lloyd3": f"levels of a normal distribution: {_LLOYD_MAX}",
    "k4v2-g64": _KEYS_FIRST,
    "int2": "one scale and minimum a token and head",
    "kivi-k8v8-g64-r128": _KIVI,
    "kivi-k4v4-g64-r128": _KIVI,
    "kivi-k4v2-g64-r128": _KIVI,
    "kivi-k2v2-g64-r128": _KIVI,
    "kivi-k2v2-g64-b1-r128": "2 more bits for the largest eighth of K's channels: Xia et al. 2025, Kitty, 2511.18643",
    "kivi-paper": _KIVI,
    **{
        f"{_LLAMA_CPP}:{name}": "llama.cpp's block of 32 channels: the values of its reference functions, bit for bit"
        for name in LLAMA_CPP
    },
    **{name: method.source for name, method in METHODS.items()},
}
"""Named formats and methods, and where each comes from; any other name of the grammar works as well."""


def is_by_layer(name: str) -> bool:
    """Return whether a format or a method of this name differs by layer, so that it is one of a model's."""
    return "@" in (METHODS[name].format if name in METHODS else name)


def listed_names(model: ModelSpec | None) -> list[str]:
    """Return the names in `FORMATS` but for those by layer that a model, or no model, has not the layers for."""
    return [name for name in FORMATS if not is_by_layer(name) or (model is not None and _has_layers(model, name))]


def _has_layers(model: ModelSpec, name: str) -> bool:
    try:
        model.layer_formats(parse_formats(name))
    except UnsupportedError:
        return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatFacts:
    """What one format takes.

    Attributes:
        name: As it is listed: a method's name, or the format's own.
        bits_k: Of a code of K, the mean of all layers; of tokens in tiers the mean of those before the window.
        bits_v: Of a code of V.
        effective_bits: Bits of one element in pages, scales and minima counted; residual and sinks not.
        bytes_per_token: Of all layers of a model, marginal; None without a model.
        fused: By device kind, whether a fused decode kernel takes the format.
        learns: Parts whose numbers `kvplan calibrate` learns from a model first; none where it is used as it is.
        engines: By name, those that store the same bits.
        format: The name of the format that a method is; empty for formats of other engines.
        summary: What a screen shows for the source where that is long.
    """

    name: str
    bits_k: float
    bits_v: float
    effective_bits: float
    source: str
    fused: dict[str, bool]
    bytes_per_token: float | None = None
    unsupported: str = ""
    learns: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("kvplan",)
    format: str = ""
    summary: str = ""


def read_format(name: str) -> ModelFormat:
    """Return the format that *name* stands for, by layer where it says so.

    Raises:
        UnsupportedFormatError: The name is unknown, or no kernel here stores such a format.
    """
    try:
        return parse_formats(name)
    except UnsupportedError as error:
        raise UnsupportedFormatError(str(error)) from error


def in_residual(form: CacheFormat, tokens: int) -> bool:
    """Return whether the next token after *tokens* is still one that sinks and residual take in 16 bits."""
    keep = max(form.key_flush.keep_tokens, form.value_flush.keep_tokens) if form.quantized else 0
    return tokens < form.sink_tokens + keep


def growth_bytes(layout: KVLayout, tokens: int) -> float:
    """Return the bytes that one more token adds to *tokens* in one layer, averaged over the group that is flushed."""
    form = layout.format
    if in_residual(form, tokens):
        return 2 * 2 * layout.kv_heads * layout.head_dim
    span = form.key_flush.quantum_tokens * form.value_flush.quantum_tokens
    return (layout.logical_bytes(tokens + span) - layout.logical_bytes(tokens)) / span


def _settled_tokens(form: CacheFormat) -> int:
    """Return a length at which residual and sinks are full."""
    return form.sink_tokens + form.key_flush.held_tokens_max + form.value_flush.held_tokens_max + 1


def mean_bits(form: ModelFormat, layers: int) -> tuple[float, float]:
    """Return the bits of a code of K and of V, the mean of a model's *layers* that cache any, or of tokens in tiers.

    Raises:
        UnsupportedError: The format names layers that are not among them.

    >>> mean_bits(read_format("k8v4@0=bf16"), 4)
    (10.0, 7.0)
    """
    if isinstance(form, TieredFormat):
        return form.bits
    stored = form.of_layers(layers) or form.parts
    return mean(one.key.mean_bits for one in stored), mean(one.value.mean_bits for one in stored)


def format_facts(name: str, model: ModelSpec | None = None) -> FormatFacts:
    """Return the facts of one format, for *model* where given, else for head size 128.

    Raises:
        UnsupportedFormatError: The name is unknown, names layers that the model does not have, or names layers without
            a model that would say how many there are.
    """
    form = read_format(name)
    bits_k, bits_v = _model_bits(form, model)
    unsupported = ""
    grown, elements = 0.0, 0
    try:
        grown, elements = _growth(form, model)
    except UnsupportedError as error:
        unsupported = str(error)
    except UnsupportedFormatError as error:
        unsupported = error.message
    return FormatFacts(
        name=name if name in METHODS else form.name,
        format=form.name,
        bits_k=bits_k,
        bits_v=bits_v,
        effective_bits=8 * grown / elements if elements else float("nan"),
        source=FORMATS.get(name, "a name of the grammar"),
        fused={
            device: not unsupported and formats_refusal(kernel, form) is None
            for device, kernel in (("cpu", "cpu"), ("cuda", "triton"))
        },
        bytes_per_token=grown if model and elements else None,
        unsupported=unsupported,
        learns=tuple(map(str, form.calibrated)),
    )


def _growth(form: ModelFormat, model: ModelSpec | None) -> tuple[float, int]:
    """Return the bytes that a token adds once residual, sinks and window are full, and its elements of K and V."""
    block_tokens = max(64, *(part.key.group_size or 0 for part in form.parts))
    if isinstance(form, TieredFormat):
        tiers = (
            lay_out_tiers(model, form, block_tokens)
            if model
            else TieredLayout(form, tuple(_reference_layout((tier.form,), block_tokens) for tier in form.tiers))
        )
        return tiers.growth_bytes(), tiers.elements
    layouts = model.layouts(form, block_tokens) if model else _reference_layout(form.of_layers(1), block_tokens).layers
    grown = sum(growth_bytes(layout, _settled_tokens(layout.format)) for layout in layouts)
    return grown, sum(2 * layout.kv_heads * layout.head_dim for layout in layouts)


def _model_bits(form: ModelFormat, model: ModelSpec | None) -> tuple[float, float]:
    if model is None and isinstance(form, LayerFormats):
        raise UnsupportedFormatError(f"format {form}: its layers are those of a model", hint="name the model")
    try:
        return mean_bits(form, model.caching_layers if model else 1)
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"format {form}: {error}") from error


def _reference_layout(forms: Sequence[CacheFormat], block_tokens: int) -> ModelLayout:
    """Return the layout of layers of one head, one of each of *forms*."""
    return ModelLayout(
        tuple(
            KVLayout(
                format=one,
                kv_heads=1,
                head_dim=REFERENCE_HEAD_DIM,
                block_tokens=block_tokens,
                float_type=one.float_type or FloatType.BF16,
            )
            for one in forms
        )
    )
