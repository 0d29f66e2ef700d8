"""The decode operation, its implementations, and how far they may be from the definition."""

import math
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.cases import all_cases
from kvplan_kernels.decode import cpu, gpu, reference
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.gpu import targets
from kvplan_kernels.native import loader
from kvplan_kernels.op import Implementation, Op, nothing_missing


class DecodeCall(Protocol):
    """What every implementation of decode takes."""

    def __call__(
        self,
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
        """Return the attention of the queries."""
        ...


DECODE: Final[Op[DecodeCall]] = Op(
    reference=reference.decode,
    implementations={
        "reference": Implementation(call=reference.decode, missing=nothing_missing),
        "cpu": Implementation(call=cpu.decode, missing=loader.missing, kernel="cpu"),
        "triton": Implementation(call=gpu.decode, missing=targets.missing),
    },
    cases=all_cases,
)

QUANTIZATION_SHARE: Final = 0.1
"""The most that an implementation's error may be of the error of quantizing, both as norms over a sequence's output."""

_LEAST_NORMAL: Final = 2.0**-126
_LSE_ROUNDING: Final = 2.0**-18
"""What a logarithm of up to a few hundreds loses in float32."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far an implementation may be from the definition; docs/explanation/kernel-accuracy.md derives it.

    Attributes:
        probability: Error of a token's weight, relative to the range of the values that it weighs.
        score: Error of a score, relative to the largest query times the largest key times the root of the head size.
    """

    probability: float
    score: float


ACCURACY: Final = {
    "cpu": Accuracy(probability=2.0**-12, score=2.0**-15),
    "triton": Accuracy(probability=2.0**-7, score=2.0**-8),
}


def lse_bound(query: Tensor, key: Tensor, options: AttentionOptions, accuracy: Accuracy) -> float:
    """Return how far the logarithm of a row's softmax denominator may be from the definition.

    No weight is off by more than the factor that its bound allows, and so is their sum.

    Args:
        query: float32 [queries, query_heads, head_dim].
        key: float32 [kv_heads, tokens, head_dim].
        options: Scale, window and softcap.
        accuracy: Of the implementation.
    """
    return _relative_bound(query, key, options, accuracy) + _LSE_ROUNDING


def received_bound(query: Tensor, key: Tensor, options: AttentionOptions, accuracy: Accuracy) -> float:
    """Return how far the probability that a token received may be from the definition.

    Args:
        query: float32 [queries, query_heads, head_dim].
        key: float32 [kv_heads, tokens, head_dim].
        options: Scale, window and softcap.
        accuracy: Of the implementation.
    """
    return query.shape[0] * _relative_bound(query, key, options, accuracy)


def output_bound(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, accuracy: Accuracy) -> float:
    """Return how far an element of one sequence's output may be from the definition.

    Args:
        query: float32 [queries, query_heads, head_dim].
        key: float32 [kv_heads, tokens, head_dim].
        value: As key.
        options: Scale, window and softcap.
        accuracy: Of the implementation.
    """
    if not key.shape[1]:
        return 0.0
    return float(value.abs().max()) * _relative_bound(query, key, options, accuracy) + _LEAST_NORMAL


def _relative_bound(query: Tensor, key: Tensor, options: AttentionOptions, accuracy: Accuracy) -> float:
    if not key.shape[1]:
        return 0.0
    score = float(query.abs().max() * key.abs().max()) * math.sqrt(query.shape[-1]) * abs(options.scale)
    return accuracy.probability + accuracy.score * score
