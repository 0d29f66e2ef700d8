"""What a lesson is learned from."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Seen:
    """Keys and values of one text, as a lesson has them.

    Attributes:
        key: float32 [tokens, kv_heads, head_dim].
        value: As key.
        key_gradient: The gradient of the model's loss by each of *key*; None where it was not asked for.
        value_gradient: The same by *value*.
    """

    key: Tensor
    value: Tensor
    key_gradient: Tensor | None = None
    value_gradient: Tensor | None = None
