"""The intermediate results of a forward pass."""

from typing import Final

from kvplan.core.specs import ModelSpec

MLP_WIDTHS: Final = 8
"""Hidden sizes that gate, up and their product are allowed together: a model's MLP is at most 4 hidden sizes wide."""


def activation_bytes(model: ModelSpec, tokens: int) -> int:
    """Return the 16-bit intermediate results of *tokens* in one forward pass: what is alive at the widest place.

    A residual stream and its normed copy, queries and attention output, K and V, and an MLP's gate, up and product.
    """
    head_dim = max(layer.head_dim for layer in model.layers)
    kv_heads = max(layer.kv_heads for layer in model.layers)
    return 2 * tokens * ((2 + MLP_WIDTHS) * model.hidden_size + 2 * (model.query_heads + kv_heads) * head_dim)
