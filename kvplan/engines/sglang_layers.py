"""What SGLang keeps of one layer in its pools; see `kvplan.engines.sglang` for where the rules are from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvplan.core.allocation import CachePart, Setup
from kvplan.core.packing import EngineFormat
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec, SideCache, StateCache
from kvplan.engines.engine import (
    head_bytes,
    rank_heads,
    refuse_layer,
)
from kvplan.engines.sglang_formats import FP4_NAMES, NAME, SPARSE_LATENT
from kvplan.engines.sglang_models import WINDOW_CLASSES
from kvplan.engines.sglang_options import sequence_ranks
from kvplan.errors import UnsupportedFormatError

_OWN_INDEXERS: Final = (0, 5, 18)
"""The release from which a layer that takes another's choice of tokens has no buffer for an indexer's keys."""
_INDEXER_BYTES_OF_128: Final = 132
_CONV_BITS: Final = 16
"""Inputs of a convolution are bf16 whatever the model runs in (SGLANG_MAMBA_CONV_DTYPE)."""
STATE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """What one layer has in one pool.

    Attributes:
        empty_bytes: Of a token, what is allocated and never filled.
    """

    part: CachePart | None
    empty_bytes: float = 0


def in_window_pool(model: ModelSpec, layer: LayerSpec, setup: Setup) -> bool:
    """Whether *layer* is in the pool of windows."""
    pooled = model.architecture in WINDOW_CLASSES and "disable-hybrid-swa-memory" not in setup.options
    return pooled and layer.window_tokens is not None


def token_buffers(
    model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup, shape: LayerSpec | None
) -> list[Buffers]:
    """Return the buffers of *layer* in a pool whose layers have the K and V of *shape*."""
    if shape is None or (not layer.kv_heads and any(one.states for one in model.layers)):
        return []  # layers of states have no tokens, and beside them other layers have none either
    if shape.kind is LayerKind.LATENT:
        return [_latent_buffers(model, layer, form, setup), *_side_buffers(model, layer, setup)]
    if form.name in FP4_NAMES and shape.value_dim not in (None, shape.head_dim):
        raise UnsupportedFormatError(f"{NAME} {form.name} takes one head size, and {model.name} has another for V")
    stored = head_bytes(shape, form.key, form.value)
    held = rank_heads(model, shape, sequence_ranks(setup)) * stored
    if layer.shared_with is not None or not layer.kv_heads:
        return [Buffers(part=None, empty_bytes=held)]
    part = CachePart(
        name="sliding attention" if layer.window_tokens else "full attention",
        layers=1,
        logical_unit_bytes=layer.kv_heads * stored / sequence_ranks(setup),
        unit_bytes=held,
        window_tokens=layer.window_tokens,
    )
    return [Buffers(part=part)]


def pool_shape(model: ModelSpec, pool: Sequence[LayerSpec]) -> LayerSpec | None:
    """Return a layer of the shape that all layers of *pool* have; None where none has K and V."""
    attends = [layer for layer in pool if layer.kv_heads]
    shapes = {(layer.kind is LayerKind.LATENT, layer.kv_heads, layer.head_dim, layer.value_dim) for layer in attends}
    if len(shapes) > 1:
        raise refuse_layer("SGLang", model, "K and V of several shapes in one pool")
    if attends and attends[0].kind is not LayerKind.LATENT and attends[0].value_dim == 0:
        raise refuse_layer("SGLang", model, "keys that are read as values")
    return attends[0] if attends else None


def _latent_buffers(model: ModelSpec, layer: LayerSpec, form: EngineFormat, setup: Setup) -> Buffers:
    """Return the buffer of a latent vector, which every rank holds whole."""
    stored = form.latent_bytes(layer.head_dim, layer.rope_dim)
    if form.quantized and any(one.sides for one in model.layers):
        stored = _sparse_latent_bytes(layer, form, setup)
    if stored is None:
        raise UnsupportedFormatError(f"{NAME} has no latent cache (MLA) in {form.name}", hint="use bf16 or fp8_e4m3")
    part = CachePart(
        name="latent attention", layers=1, logical_unit_bytes=stored / sequence_ranks(setup), unit_bytes=stored
    )
    return Buffers(part=part)


def _sparse_latent_bytes(layer: LayerSpec, form: EngineFormat, setup: Setup) -> float | None:
    """Return the bytes of a latent vector for sparse attention, whose TensorRT-LLM kernels read it without scales."""
    if form.name != "fp8_e4m3":
        raise UnsupportedFormatError(f"{NAME}'s sparse MLA takes bf16 and fp8_e4m3, not {form.name}")
    if "trtllm" in (setup.option("dsa-prefill-backend"), setup.option("dsa-decode-backend")):
        return form.latent_bytes(layer.head_dim, layer.rope_dim)
    latent = layer.head_dim - layer.rope_dim
    return float(SPARSE_LATENT.vector_bytes(latent)) + layer.rope_dim * 2


def _side_buffers(model: ModelSpec, layer: LayerSpec, setup: Setup) -> list[Buffers]:
    sides = layer.sides or _missing_sides(model, setup)
    found: list[Buffers] = []
    for side in sides:
        stored = side.elements * _INDEXER_BYTES_OF_128 / 128
        part = CachePart(name=side.name, layers=1, logical_unit_bytes=stored / sequence_ranks(setup), unit_bytes=stored)
        found.append(Buffers(part=part) if layer.sides else Buffers(part=None, empty_bytes=stored))
    return found


def _missing_sides(model: ModelSpec, setup: Setup) -> tuple[SideCache, ...]:
    """Return what a layer without an indexer has buffers for all the same, where others have one."""
    if setup.version is None or setup.version >= _OWN_INDEXERS:
        return ()
    return next((layer.sides for layer in model.layers if layer.sides), ())


def state_bits(setup: Setup, state: StateCache) -> int:
    """Return the bits of an element of *state*, as an option says them or the model does."""
    if state.name != "recurrent state":
        return _CONV_BITS
    stated = setup.option("mamba-ssm-dtype")
    return state.item_bits if stated is None else STATE_BITS[stated]
