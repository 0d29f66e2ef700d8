"""One call of a model's forward pass, by the names that the installed library gives its arguments."""

from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor


@cache
def _cache_argument(model_class: type) -> str:
    """Return the argument that takes the cache; it was renamed in transformers 5.24."""
    return "cache" if "cache" in signature(model_class.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


@torch.inference_mode()
def forward(model: Any, model_cache: Any, token_ids: Tensor, positions: Tensor, *, last_only: bool = False) -> Tensor:
    """Return logits [batch, tokens, vocabulary] of *token_ids* [batch, tokens]; of the last token if *last_only*."""
    arguments = {_cache_argument(type(model)): model_cache}
    output = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,
        **arguments,
    )
    logits: Tensor = output.logits
    return logits
