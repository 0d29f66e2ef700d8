"""Looking at what a model's attention asks for, layer by layer, before anything is run on it.

Whatever is not known to be honoured is refused here, so that no layer is ever computed a little wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvplan.core.specs import LayerSpec, ModelSpec
from kvplan.errors import UnsupportedModelError
from kvplan.runtime.attention import Asked, handover_cache, running, switch
from kvplan.runtime.dense import LayerAttention
from kvplan.runtime.forward import forward
from kvplan_kernels.cache import AttentionOptions

_PROBE_TOKENS: Final = 2
_HONOURED: Final = frozenset({"scaling", "softcap", "s_aux", "sliding_window"})
_WITHOUT_MEANING: Final = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    }
)
"""Passed by models, and of no meaning to attention at inference."""
_ROW_SHARES: Final = (0.0, 0.1, 0.37, 0.5, 0.71, 0.93)


@dataclass(frozen=True, slots=True)
class _Window:
    """What a layer's mask was found to be: causal, over a window or over everything."""

    tokens: int | None


class _ProbeStep:
    """Collects what every layer asks for; the attention itself gives 0."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._pending: int | None = None
        self.found: list[LayerAttention] = []

    def update(self, layer: int) -> None:
        self._pending = layer

    def mask(self, function: Callable[..., Any], arguments: dict[str, Any]) -> object:
        if arguments.get("use_vmap") or arguments.get("attention_mask") is not None:
            raise self._refusal("has a mask of its own kind")
        return _Window(self._mask_window(function))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if self._pending != layer or layer != len(self.found) or layer >= len(self._spec.layers):
            raise self._refusal(f"attends in layer {layer} without keys of that layer's own")
        self._pending = None
        spec = self._spec.layers[layer]
        self._check_shapes(layer, spec, query, key, value)
        self.found.append(self._read(layer, spec, query, asked))
        return torch.zeros_like(query.transpose(1, 2))

    def _read(self, layer: int, spec: LayerSpec, query: Tensor, asked: Asked) -> LayerAttention:
        given = {name: value for name, value in asked.arguments.items() if value is not None}
        unknown = sorted(set(given) - _HONOURED - _WITHOUT_MEANING - {"is_causal"})
        if unknown or given.get("is_causal", True) is not True:
            raise self._refusal(f"passes {', '.join(unknown) or 'is_causal=False'} to its attention")
        if not isinstance(asked.mask, _Window):
            raise self._refusal(f"built no mask for layer {layer}")
        window = asked.mask.tokens
        if window != self._reachable(spec.window_tokens):
            raise self._refusal(f"masks layer {layer} to {window} tokens; its config says {spec.window_tokens}")
        scale, softcap = float(given.get("scaling", query.shape[-1] ** -0.5)), given.get("softcap")
        sinks = given.get("s_aux")
        return LayerAttention(
            options=AttentionOptions(scale=scale, window=window, softcap=None if softcap is None else float(softcap)),
            sink_logits=None if sinks is None else sinks.detach().to(torch.float32).contiguous(),
        )

    def _reachable(self, window: int | None) -> int | None:
        """Return *window*, or None where no position of the model's context ever leaves it."""
        return None if window is None or window >= self._spec.context_tokens else window

    def _check_shapes(self, layer: int, spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> None:
        shape = (1, spec.kv_heads, _PROBE_TOKENS, spec.head_dim)
        if tuple(key.shape) != shape or tuple(value.shape) != shape or query.shape[-1] != spec.head_dim:
            raise self._refusal(
                f"caches {list(key.shape[1:])} and {list(value.shape[1:])} in layer {layer}, where its config "
                f"says {spec.kv_heads} heads of {spec.head_dim}"
            )

    def _mask_window(self, function: Callable[..., Any]) -> int | None:
        """Return the window that *function* masks to, judged at rows spread over the model's context."""
        last = self._spec.context_tokens - 1
        tokens = torch.arange(last + 1, device="cpu")
        window = last + 1 - self._first(function, last, tokens)
        for share in _ROW_SHARES:
            row = round(share * last)
            if self._first(function, row, tokens) != max(0, row + 1 - window):
                raise self._refusal("has a mask that is neither causal nor a sliding window")
        return None if window > last else window

    def _first(self, function: Callable[..., Any], row: int, tokens: Tensor) -> int:
        """Return the first token that position *row* attends to; it must attend to all from there to itself."""
        zero, at = (torch.tensor(number, device=tokens.device) for number in (0, row))
        allowed = torch.as_tensor(function(zero, zero, at, tokens)).expand(len(tokens))
        first = row + 1 - int(allowed.sum())
        if not bool((allowed == ((tokens >= first) & (tokens <= row))).all()):
            raise self._refusal("has a mask that is neither causal nor a sliding window")
        return first

    def _refusal(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._spec.architecture} {what}; kvplan's runtime does not compute that")


def probe(model: Any, spec: ModelSpec) -> tuple[LayerAttention, ...]:
    """Return what each layer's attention computes, from one forward pass of two tokens.

    Raises:
        UnsupportedModelError: The model's attention cannot be replaced, or does something that no kernel here does,
            or is not what *spec* says.
    """
    switch(model)
    step = _ProbeStep(spec)
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_PROBE_TOKENS, device=model.device)[None]
    with running(step):
        forward(model, handover_cache(len(spec.layers)), tokens, positions)
    if len(step.found) != len(spec.layers):
        raise UnsupportedModelError(
            f"{spec.architecture} called its attention for {len(step.found)} of {len(spec.layers)} layers"
        )
    return tuple(step.found)
