"""What a model's cache holds, whichever engine keeps it: geometry times format, no rounding, no spare capacity.

A format stores K and V. What a layer keeps beside them, states and the keys of an indexer, stays in the type it has.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from kvplan.core.formats import in_residual
from kvplan.core.specs import LayerSpec, ModelSpec
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.format import CacheFormat, UnsupportedError, parse
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.layout import FLOAT_BYTES, token_bytes

_BLOCK_TOKENS: Final = 64
"""Of a layout that is only asked for whether there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalSize:
    """Geometry times format, no rounding.

    Attributes:
        bytes_per_sequence: Of a sequence of the context: growing caches, windows and states.
        growth_bytes_per_token: What one more token adds at this context; may be a fraction, 0 once windows are full.
        fixed_bytes_per_sequence: What does not grow at this context: states, full windows, residual and sinks. With
            the growth of all tokens it makes bytes_per_sequence, but for an entry that its tokens have not filled yet.
    """

    bytes_per_sequence: float
    growth_bytes_per_token: float
    fixed_bytes_per_sequence: float


def logical_size(model: ModelSpec, form: ModelFormat, context_tokens: int) -> LogicalSize:
    """Return what a sequence of *context_tokens* takes in all layers of *model*.

    Raises:
        InputError: The model has no layers.
        UnsupportedFormatError: The format does not apply to what a layer caches, or names layers that the model does
            not have; the message says which.
    """
    if not model.layers:
        raise InputError(f"{model.name} has no layers")
    try:
        stored = Counter(zip(model.layers, model.layer_formats(form), strict=True))
    except UnsupportedError as error:
        raise UnsupportedFormatError(f"{form} on {model.name}: {error}") from error
    for layer, own in stored:
        refusal = format_refusal(layer, own)
        if refusal:
            raise UnsupportedFormatError(f"{form} on {model.name}: {refusal}")
    total = sum(count * layer_bytes(*one, context_tokens) for one, count in stored.items())
    growth = sum(count * layer_growth_bytes(*one, context_tokens) for one, count in stored.items())
    return LogicalSize(
        bytes_per_sequence=total,
        growth_bytes_per_token=growth,
        fixed_bytes_per_sequence=max(0.0, total - growth * context_tokens),
    )


def format_refusal(layer: LayerSpec, form: CacheFormat) -> str:
    """Return why *form* does not apply to what *layer* caches; empty where it does.

    >>> from kvplan.core.specs import LayerKind
    >>> format_refusal(LayerSpec(kind=LayerKind.LATENT, kv_heads=1, head_dim=576, value_dim=0), parse("int8"))
    'a layer caches one vector a token, and the format shares scales within heads of K and of V'
    """
    scaled = any(bool(tensor.metadata) for tensor in (form.key, form.value))
    if scaled and layer.value_dim == 0:
        return "a layer caches one vector a token, and the format shares scales within heads of K and of V"
    return ""


def runtime_refusal(model: ModelSpec) -> str:
    """Return why kvplan's own runtime holds no cache of *model*, in whichever format; empty where it does."""
    for layer in dict.fromkeys(model.layers):
        try:
            layer.layout(parse(str(model.float_type)), _BLOCK_TOKENS, model.float_type)
        except UnsupportedError as error:
            return str(error)
    return ""


def held_tokens(layer: LayerSpec, tokens: int) -> int:
    """Return the tokens whose K and V *layer* holds of a sequence of *tokens*.

    A window of w holds w of them, the newest included. A chunk is counted whole: a sequence that goes on fills it.
    """
    return tokens if layer.window_tokens is None else min(tokens, layer.window_tokens)


def layer_bytes(layer: LayerSpec, form: CacheFormat, tokens: int) -> float:
    """Return the bytes that *layer* keeps of a sequence of *tokens*; exact, a fraction where groups share bytes."""
    sides = sum(tokens // side.tokens_per_entry * side.elements * side.item_bits / 8 for side in layer.sides)
    return _kv_bytes(layer, form, held_tokens(layer, tokens)) + sides + sum(state.nbytes for state in layer.states)


def layer_growth_bytes(layer: LayerSpec, form: CacheFormat, tokens: int) -> float:
    """Return the bytes that one more token adds to *tokens* in *layer*, averaged over what is written at once.

    That is a group of K or V that is quantized together, or the tokens that share an entry.
    """
    sides = sum(side.elements * side.item_bits / 8 / side.tokens_per_entry for side in layer.sides)
    return _kv_growth_bytes(layer, form, tokens) + sides


def _kv_growth_bytes(layer: LayerSpec, form: CacheFormat, tokens: int) -> float:
    if not layer.caches_tokens or (layer.window_tokens is not None and tokens >= layer.window_tokens):
        return 0.0
    if in_residual(form, tokens):  # whatever leaves the residual with it
        return layer.kv_heads * FLOAT_BYTES * (layer.head_dim + _value_dim(layer))
    span = form.key_flush.quantum_tokens * form.value_flush.quantum_tokens
    return (_kv_bytes(layer, form, tokens + span) - _kv_bytes(layer, form, tokens)) / span


def _kv_bytes(layer: LayerSpec, form: CacheFormat, tokens: int) -> float:
    """Return the bytes of K and V of *tokens*: `KVLayout.logical_bytes` for any two head sizes."""
    if not layer.caches_tokens:
        return 0.0
    paged = max(0, tokens - form.sink_tokens)
    total = 0.0
    for tensor, flush, dim in (
        (form.key, form.key_flush, layer.head_dim),
        (form.value, form.value_flush, _value_dim(layer)),
    ):
        stored = flush.quantized_tokens(paged) if tensor.quantized else paged
        total += stored * token_bytes(form, tensor, dim) + (tokens - stored) * FLOAT_BYTES * dim
    return layer.kv_heads * total


def _value_dim(layer: LayerSpec) -> int:
    return layer.head_dim if layer.value_dim is None else layer.value_dim
