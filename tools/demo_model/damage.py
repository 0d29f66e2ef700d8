"""What a quantized KV cache does to the demo model, simulated: quantize on entry, store in 16 bits.

The figures say how graded the damage is; kvplan's own measurements run the real packed cache.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from demo_model.rows import RowSource

SETTINGS: tuple[tuple[str, int, int], ...] = (
    ("16 bits", 16, 16),
    ("K8V8", 8, 8),
    ("K4V4", 4, 4),
    ("K4V2", 4, 2),
    ("K2V4", 2, 4),
    ("K3V3", 3, 3),
    ("K2V2", 2, 2),
)


@dataclass(frozen=True)
class Damage:
    """Perplexity a token on held-out text, and the share of retrieval trials answered right."""

    setting: str
    perplexity: float
    retrieval: tuple[float, ...]


class QuantizingCache(DynamicCache):  # type: ignore[misc]
    """A cache that rounds K and V per token and head to few bits, with a stored minimum and scale."""

    def __init__(self, key_bits: int, value_bits: int) -> None:
        super().__init__()
        self._key_bits = key_bits
        self._value_bits = value_bits

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round (B, H, T, D) keys and values, then store them as usual."""
        keys = rounded(key_states, self._key_bits)
        values = rounded(value_states, self._value_bits)
        stored: tuple[torch.Tensor, torch.Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return stored


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest of 2**bits levels between the minimum and maximum of the last axis; 16 leaves `x` alone."""
    if bits >= 16:
        return x
    low, high = x.float().aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    levels = ((x.float() - low) / scale).round()
    return torch.addcmul(low, levels, scale).to(x.dtype)


def perplexity(model: LlamaForCausalLM, stream: torch.Tensor, window: int, bits: tuple[int, int]) -> float:
    """Perplexity a token: exp of the mean negative log-likelihood over windows that do not overlap."""
    total, count = 0.0, 0
    for start in range(0, len(stream) - window, window):
        ids = stream[start : start + window + 1].unsqueeze(0)
        logits = _logits(model, ids[:, :-1], bits)
        total += torch.nn.functional.cross_entropy(logits[0].float(), ids[0, 1:], reduction="sum").item()
        count += window
    return math.exp(total / count)


def retrieval(model: LlamaForCausalLM, trials: Sequence[tuple[list[int], int]], bits: tuple[int, int]) -> float:
    """Share of trials whose most likely next token, over the whole vocabulary, is the right value."""
    hits = 0
    for ids, value in trials:
        logits = _logits(model, torch.tensor([ids]), bits, last_only=True)
        hits += int(logits[0, -1].argmax()) == value
    return hits / len(trials)


def damage_table(
    model: LlamaForCausalLM, stream: torch.Tensor, rows: RowSource, shapes: Sequence[tuple[int, int]], trials: int
) -> list[Damage]:
    """Measure every setting on the same text and the same trials; `shapes` are (tokens, pairs)."""
    drawn = [[rows.trial(length, pairs) for _ in range(trials)] for length, pairs in shapes]
    table = []
    for name, key_bits, value_bits in SETTINGS:
        bits = (key_bits, value_bits)
        found = tuple(retrieval(model, one_shape, bits) for one_shape in drawn)
        table.append(Damage(name, perplexity(model, stream, 1024, bits), found))
    return table


def print_damage(table: Sequence[Damage], shapes: Sequence[tuple[int, int]], started: float) -> None:
    """Print the table in Markdown, as the demo model's README quotes it."""
    heads = [f"{length} tokens, {pairs} pair{'s' if pairs > 1 else ''}" for length, pairs in shapes]
    print("| cache | perplexity | " + " | ".join(heads) + " |")
    print("|---|--:|" + "--:|" * len(heads))
    for row in table:
        print(f"| {row.setting} | {row.perplexity:.2f} | " + " | ".join(f"{x:.3f}" for x in row.retrieval) + " |")
    print(f"\nMeasured in {time.perf_counter() - started:.0f} s.")


@torch.inference_mode()
def _logits(model: LlamaForCausalLM, ids: torch.Tensor, bits: tuple[int, int], last_only: bool = False) -> torch.Tensor:
    cache = QuantizingCache(*bits)
    logits: torch.Tensor = model(input_ids=ids, cache=cache, logits_to_keep=1 if last_only else 0).logits
    return logits
