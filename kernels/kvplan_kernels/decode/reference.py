"""Decode in plain PyTorch: the definition."""

import torch
from torch import Tensor

from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.calls import check_decode
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.rotation import butterflies
from kvplan_kernels.sequence import sequences
from kvplan_kernels.transforms import restored_keys, transforming_decode
from kvplan_kernels.views import KEY, VALUE


@transforming_decode(butterflies)
def decode(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
    received: bool = False,
    lse: bool = False,
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
        lse: Whether to return the logarithm of each softmax's denominator.
    """
    check_decode(cache, batch, query, options, sink_logits, positions)
    rows, queries, heads, head_dim = query.shape
    if positions is None:
        positions = batch.lengths[:, None] - queries + torch.arange(queries, device=batch.lengths.device)
    longest = max(batch.lengths.tolist(), default=0)
    output = torch.zeros(rows, queries, heads, head_dim, device=query.device)
    share = torch.zeros(rows, heads, longest, device=query.device)
    logarithms = torch.zeros(rows, queries, heads, device=query.device)
    for row, sequence in enumerate(sequences(cache, batch)):
        key = sequence.dense(KEY)
        if cache.rope is not None:
            key = restored_keys(cache, key, butterflies).to(TORCH_FLOAT[cache.layout.float_type]).float()
        output[row], weights, logarithms[row] = attend(
            query[row].float(), key, sequence.dense(VALUE), positions[row], options, sink_logits
        )
        share[row, :, : sequence.length] = weights
    return DecodeResult(output=output, received=share if received else None, lse=logarithms if lse else None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    options: AttentionOptions,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one sequence's attention over dense keys and values, what each token received, and each softmax's size.

    Args:
        query: float32 [queries, query_heads, head_dim].
        key: float32 [kv_heads, tokens, head_dim].
        value: As key.
        positions: int32 [queries].
        options: Scale, window and softcap.
        sink_logits: float32 [query_heads] or None.

    Returns:
        float32 [queries, query_heads, head_dim], [query_heads, tokens] and [queries, query_heads]: probabilities summed
        over the queries, and logarithms of the denominators.
    """
    tokens, heads = key.shape[1], query.shape[1]
    output, share = torch.zeros_like(query), torch.zeros(heads, tokens, device=query.device)
    nothing = torch.full((heads,), -torch.inf, device=query.device) if sink_logits is None else sink_logits
    lse = nothing.to(query.dtype).expand(query.shape[:2]).clone()
    for index, position in enumerate(positions.tolist()):
        first = 0 if options.window is None else max(0, position - options.window + 1)
        last = min(position + 1, tokens)
        if first >= last:
            continue
        folded = query[index].view(key.shape[0], -1, key.shape[2])  # [kv_heads, query heads of each, head_dim]
        scores = (folded @ key[:, first:last].transpose(1, 2)).flatten(0, 1) * options.scale
        weights, lse[index] = _weights(scores, options, sink_logits)
        output[index] = (weights.view(key.shape[0], -1, last - first) @ value[:, first:last]).flatten(0, 1)
        share[:, first:last] += weights
    return output, share, lse


def _weights(scores: Tensor, options: AttentionOptions, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the probabilities of *scores* [query_heads, tokens], and the logarithms [query_heads] of what divides."""
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    logits = scores if sink_logits is None else torch.cat([scores, sink_logits[:, None].to(scores.dtype)], dim=-1)
    return logits.softmax(-1)[:, : scores.shape[1]], logits.logsumexp(-1)
