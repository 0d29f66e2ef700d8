"""Attention over dense K and V: what a model's own prefill computes, and the second half of the unfused path."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvplan_kernels.cache import AttentionOptions

_QUERIES_AT_ONCE: Final = 512
"""Bounds the scores that are alive; changes no result."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class LayerAttention:
    """What one layer's attention computes.

    Attributes:
        sink_logits: float32 [query_heads], or None.
    """

    options: AttentionOptions
    sink_logits: Tensor | None = None


def attend_fresh(query: Tensor, key: Tensor, value: Tensor, attention: LayerAttention) -> Tensor:
    """Return causal attention of tokens that have nothing before them.

    Args:
        query: [batch, query_heads, tokens, head_dim].
        key: [batch, kv_heads, tokens, head_dim].
        value: As key.
        attention: Scale, window, softcap and sink logits.

    Returns:
        [batch, tokens, query_heads, head_dim] in the type of *query*.
    """
    tokens, window = query.shape[2], attention.options.window
    plain = attention.options.softcap is None and attention.sink_logits is None
    if plain and (window is None or window >= tokens):
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=attention.options.scale, enable_gqa=key.shape[1] != query.shape[1]
        )
        return output.transpose(1, 2).contiguous()
    parts = []
    for start in range(0, tokens, _QUERIES_AT_ONCE):
        end = min(tokens, start + _QUERIES_AT_ONCE)
        first = 0 if window is None else max(0, start - window + 1)
        allowed = _allowed(end - start, end - first, window, query.device)
        parts.append(
            attend_masked(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], allowed, attention)
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _allowed(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: the last query is the last key's own."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    token = torch.arange(keys, device=device)
    mask = token <= position
    return mask if window is None else mask & (token > position - window)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, attention: LayerAttention) -> Tensor:
    """Return attention to the tokens that *allowed*, bool [..., queries, tokens], lets each query see.

    Shapes are those of `attend_fresh`, as is the result but for its order: [batch, query_heads, queries, head_dim].
    """
    if attention.options.softcap is None and attention.sink_logits is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=allowed,
            scale=attention.options.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return _attend_scores(query, key, value, allowed, attention)


def _attend_scores(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, attention: LayerAttention) -> Tensor:
    """Attend in float32 with softcap and sink logits, which torch's own function does not take."""
    weights = _weights(query, key, allowed, attention)
    return (weights @ value.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)).to(query.dtype)


def attention_weights(query: Tensor, key: Tensor, attention: LayerAttention) -> Tensor:
    """Return the probabilities that queries give to tokens, float32 [query_heads, queries, tokens].

    Args:
        query: [query_heads, queries, head_dim]; the last is the last key's own.
        key: [kv_heads, tokens, head_dim].
        attention: Scale, window, softcap and sink logits.
    """
    allowed = _allowed(query.shape[1], key.shape[1], attention.options.window, query.device)
    return _weights(query[None], key[None], allowed, attention)[0]


def _weights(query: Tensor, key: Tensor, allowed: Tensor, attention: LayerAttention) -> Tensor:
    options, ratio = attention.options, query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(ratio, dim=1)
    scores = query.float() @ keys.transpose(2, 3) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores.masked_fill_(~allowed, -torch.inf)
    if attention.sink_logits is not None:
        sinks = attention.sink_logits.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return scores.softmax(-1)
