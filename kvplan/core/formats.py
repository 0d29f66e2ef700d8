"""The formats that kvplan has kernels for, and what each takes."""

from dataclasses import dataclass
from typing import Final

from kvplan.core.specs import ModelSpec
from kvplan.errors import UnsupportedFormatError
from kvplan_kernels.format import CacheFormat, FloatType, UnsupportedError, kernel_refusal, parse
from kvplan_kernels.layout import KVLayout

REFERENCE_HEAD_DIM: Final = 128
"""The head size that effective bits are given for where no model is named."""
_KIVI: Final = "Liu et al. 2024, KIVI, arXiv 2402.02750"
_KEYS_FIRST: Final = "more bits for keys than for values: KV-AdaQuant, arXiv 2502.15075"

_ROTATED: Final = "int4 of keys and values rotated head by head: Ashkboos et al. 2024, QuaRot, arXiv 2404.00456"

FORMATS: Final = {
    "bf16": "16 bits, unquantized",
    "fp16": "16 bits, unquantized",
    "fp8_e4m3": "OCP E4M3 floats, no scale: vLLM's fp8, uncalibrated",
    "scaled-fp8_e4m3": "OCP E4M3 floats, a calibrated scale a KV head",
    "scaled-tensor-fp8_e4m3": "OCP E4M3 floats, a calibrated scale for K and for V of a layer",
    "int8": "one scale and minimum a token and head",
    "k8v4": _KEYS_FIRST,
    "k8v4-g64": _KEYS_FIRST,
    "int4": "one scale and minimum a token and head",
    "int4-g64": "one scale and minimum for 64 channels of a token",
    "had-int4": _ROTATED,
    "smooth-int4": "SmoothAttention: Lin et al. 2024, QServe, arXiv 2405.04532",
    "unbias-int4": "keys less their mean, which softmax does not see",
    "order-k2v2-g128-r128-s5": "channel reorder of SKVQ: Duanmu et al. 2024, arXiv 2405.06219",
    "k4v2-g64": _KEYS_FIRST,
    "int2": "one scale and minimum a token and head",
    "kivi-k8v8-g64-r128": _KIVI,
    "kivi-k4v4-g64-r128": _KIVI,
    "kivi-k4v2-g64-r128": _KIVI,
    "kivi-k2v2-g64-r128": _KIVI,
    "kivi-paper": _KIVI,
}
"""Named formats and where each comes from; any other name of the grammar works as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatFacts:
    """What one format takes.

    Attributes:
        effective_bits: Bits of one element in pages, scales and minima counted; residual and sinks not.
        bytes_per_token: Of all layers of a model, marginal; None without a model.
        fused: By device kind, whether a fused decode kernel takes the format.
        learns: Parts whose numbers `kvplan calibrate` learns from a model first; none where it is used as it is.
        engines: By name, those that store the same bits.
        summary: What a screen shows for the source where that is long.
    """

    name: str
    bits_k: int
    bits_v: int
    effective_bits: float
    source: str
    fused: dict[str, bool]
    bytes_per_token: float | None = None
    unsupported: str = ""
    learns: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("kvplan",)
    summary: str = ""


def read_format(name: str) -> CacheFormat:
    """Return the format that *name* stands for.

    Raises:
        UnsupportedFormatError: The name is unknown, or no kernel here stores such a format.
    """
    try:
        return parse(name)
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


def format_facts(name: str, model: ModelSpec | None = None) -> FormatFacts:
    """Return the facts of one format, for *model* where given, else for head size 128."""
    form = read_format(name)
    block_tokens = max(64, form.key.group_size or 0)
    layouts: list[KVLayout] = []
    unsupported = ""
    try:
        layouts = (
            [layer.layout(form, block_tokens, model.float_type) for layer in model.layers]
            if model
            else [_reference_layout(form, block_tokens)]
        )
    except UnsupportedError as error:
        unsupported = str(error)
    grown = sum(growth_bytes(layout, _settled_tokens(form)) for layout in layouts)
    elements = sum(2 * layout.kv_heads * layout.head_dim for layout in layouts)
    return FormatFacts(
        name=form.name,
        bits_k=form.key.bits,
        bits_v=form.value.bits,
        effective_bits=8 * grown / elements if elements else float("nan"),
        source=FORMATS.get(name, "a name of the grammar"),
        fused={
            "cpu": not unsupported and kernel_refusal("cpu", form) is None,
            "cuda": not unsupported and kernel_refusal("triton", form) is None,
        },
        bytes_per_token=grown if model and layouts else None,
        unsupported=unsupported,
        learns=tuple(map(str, form.calibrated)),
    )


def _reference_layout(form: CacheFormat, block_tokens: int) -> KVLayout:
    return KVLayout(
        format=form,
        kv_heads=1,
        head_dim=REFERENCE_HEAD_DIM,
        block_tokens=block_tokens,
        float_type=form.float_type or FloatType.BF16,
    )
