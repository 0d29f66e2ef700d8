"""One call of a model's forward pass, by the names that the installed library gives its arguments."""

from collections.abc import Callable, Hashable
from functools import cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor


@cache
def _cache_argument(method: Hashable) -> str:
    """Return the argument of a forward method that takes the cache; it was renamed in transformers 5.24."""
    return "cache" if "cache" in signature(cast("Callable[..., Any]", method)).parameters else "past_key_values"


def forward(
    model: Any,
    model_cache: Any,
    token_ids: Tensor,
    positions: Tensor,
    *,
    last_only: bool = False,
    differentiable: bool = False,
) -> Tensor:
    """Return logits [batch, tokens, vocabulary] of *token_ids* [batch, tokens].

    Those of the last token if *last_only*; with a graph back to what requires a gradient if *differentiable*.
    """
    arguments = {_cache_argument(type(model).forward): model_cache}
    with torch.inference_mode(mode=not differentiable):
        output = model(
            input_ids=token_ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
            **arguments,
        )
    logits: Tensor = output.logits
    return logits
