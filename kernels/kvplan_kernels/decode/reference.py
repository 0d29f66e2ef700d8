"""Decode in plain PyTorch: the definition."""

import torch
from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.calls import check_decode
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.sequence import sequences
from kvplan_kernels.views import KEY, VALUE


def decode(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
    received: bool = False,
) -> DecodeResult:
    """Return the attention of *query* over the tokens that each sequence holds.

    A query at position p attends to tokens at positions up to p, above p - window, below the sequence's length. One
    that has nothing to attend to gives 0.

    Args:
        cache: The layer's cache.
        batch: Its lengths count the queries' own tokens, appended before.
        query: bf16, fp16 or fp32 [batch, queries, query_heads, head_dim]; query head h reads KV head
            h // (query_heads / kv_heads).
        options: Scale, window and softcap.
        sink_logits: float32 [query_heads]: one more logit in each softmax, without a value.
        positions: int32 [batch, queries]; the last tokens of the sequence where None.
        received: Whether to return the probability that each token received.
    """
    check_decode(cache, batch, query, options, sink_logits, positions)
    rows, queries, heads, head_dim = query.shape
    if positions is None:
        positions = batch.lengths[:, None] - queries + torch.arange(queries, device=batch.lengths.device)
    longest = max(batch.lengths.tolist(), default=0)
    output = torch.zeros(rows, queries, heads, head_dim, device=query.device)
    share = torch.zeros(rows, heads, longest, device=query.device)
    ratio = heads // cache.layout.kv_heads
    for row, sequence in enumerate(sequences(cache, batch)):
        key, value = sequence.dense(KEY), sequence.dense(VALUE)  # [kv_heads, length, head_dim]
        for column, position in enumerate(positions[row].tolist()):
            first = 0 if options.window is None else max(0, position - options.window + 1)
            last = min(position + 1, sequence.length)
            if first >= last:
                continue
            folded = query[row, column].float().view(-1, ratio, head_dim)  # [kv_heads, ratio, head_dim]
            scores = (folded @ key[:, first:last].transpose(1, 2)).flatten(0, 1) * options.scale
            weights = _weights(scores, options, sink_logits)
            output[row, column] = (weights.view(-1, ratio, last - first) @ value[:, first:last]).flatten(0, 1)
            share[row, :, first:last] += weights
    return DecodeResult(output=output, received=share if received else None)


def _weights(scores: Tensor, options: AttentionOptions, sink_logits: Tensor | None) -> Tensor:
    """Return the probabilities [query_heads, tokens] of *scores* [query_heads, tokens]."""
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if sink_logits is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink_logits[:, None]], dim=-1).softmax(-1)[:, :-1]
