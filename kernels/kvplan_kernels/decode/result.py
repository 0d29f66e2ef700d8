"""What decode returns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DecodeResult:
    """The attention's output.

    Attributes:
        output: float32 [batch, queries, query_heads, head_dim].
        received: float32 [batch, query_heads, longest length]: the probability each token received, summed over the
            queries; None where it was not asked for.
        lse: float32 [batch, queries, query_heads]: the natural logarithm of the softmax's denominator, sink logits
            among it; -inf where there is nothing in it, None where it was not asked for.
    """

    output: Tensor
    received: Tensor | None = None
    lse: Tensor | None = None
