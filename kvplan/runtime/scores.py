"""What the tokens of a prompt received, which is what they are placed by."""

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvplan.core.tiers import scored_queries
from kvplan.runtime.dense import LayerAttention, attention_weights
from kvplan_kernels.tier_formats import Score, TieredFormat

POOLED_TOKENS: Final = 7
"""Neighbours of which the largest counts, in SnapKV's experiments: FasterDecoding/SnapKV, experiments/LongBench,
ablation_c4096_w32_k7_maxpool."""


def first_query(form: TieredFormat, tokens: int) -> int:
    """Return the first query of a prompt of *tokens* that counts: all do in a sum, else those of the window."""
    return 0 if form.score is Score.SUM else max(0, tokens - form.window_tokens)


def prompt_scores(form: TieredFormat, query: Tensor, key: Tensor, attention: LayerAttention) -> Tensor:
    """Return what the tokens of a prompt received from the queries that count, in sum.

    Args:
        form: Says which, and whether neighbours share.
        query: [query_heads, tokens, head_dim].
        key: [kv_heads, tokens, head_dim].
        attention: The layer's.

    Returns:
        float32 [kv_heads, tokens]: of each query the most that a query head of the KV head gave.
    """
    heads, tokens = key.shape[:2]
    scores = torch.zeros(heads, tokens, device=key.device)
    step = scored_queries(form, query.shape[0], tokens)
    for start in range(first_query(form, tokens), tokens, step):
        end = min(tokens, start + step)
        weights = attention_weights(query[:, start:end], key[:, :end], attention)
        scores[:, :end] += torch.unflatten(weights, 0, (heads, -1)).amax(1).sum(1)
    return _pooled(form, scores)


def _pooled(form: TieredFormat, scores: Tensor) -> Tensor:
    before = scores.shape[1] - form.window_tokens
    if form.score is not Score.ONCE or before <= 0:
        return scores
    pooled = max_pool1d(scores[:, :before], POOLED_TOKENS, stride=1, padding=POOLED_TOKENS // 2)
    return torch.cat([pooled, scores[:, before:]], dim=1)
