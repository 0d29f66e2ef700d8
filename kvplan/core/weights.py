"""The weights of a model, matrix by matrix, and the bytes that each takes as it is stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class WeightKind(StrEnum):
    """What a weight is to quantization."""

    LINEAR = "linear"
    """The matrix of a linear layer."""
    EXPERT = "expert"
    """One of the matrices of experts."""
    HEAD = "head"
    """The output embedding."""
    OTHER = "other"
    """What no quantization converts: embeddings, norms, biases, routers, convolutions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One matrix, or several alike such as the experts' of one layer.

    Attributes:
        name: Of the module in the checkpoint, below the language model: `layers.3.self_attn.q_proj`.
        rows: Output features; all elements of a weight that is no matrix.
        columns: Input features.
        copies: How many there are.
    """

    name: str
    rows: int
    columns: int = 1
    copies: int = 1
    kind: WeightKind = WeightKind.OTHER

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return self.rows * self.columns * self.copies


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """How the elements of a matrix are stored.

    Attributes:
        bits: Of an element.
        group_rows: Rows that share a scale; 0 for all.
        group_columns: Columns that share a scale; 0 for all.
        scale_bits: Of a group's scale, and of its zero point where it has one.
        matrix_bytes: Of what the whole matrix has beside: a scale of the scales.
        column_bytes: Of what each column has beside: the order of activations.
    """

    bits: int
    group_rows: int = 0
    group_columns: int = 0
    scale_bits: int = 0
    matrix_bytes: int = 0
    column_bytes: int = 0

    def nbytes(self, weight: Weight) -> int:
        """Bytes of all copies of *weight*."""
        high = -(-weight.rows // (self.group_rows or weight.rows))
        wide = -(-weight.columns // (self.group_columns or weight.columns))
        codes = -(-weight.rows * weight.columns * self.bits // 8)
        scales = -(-high * wide * self.scale_bits // 8)
        return weight.copies * (codes + scales + self.matrix_bytes + weight.columns * self.column_bytes)


FLOAT16 = WeightFormat(bits=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCount:
    """What weights come to.

    Attributes:
        parameters: Elements, whatever they are stored in.
    """

    parameters: int
    nbytes: int


def count_weights(stored: Sequence[tuple[Weight, WeightFormat]]) -> WeightCount:
    """Return what the weights, each in its format, come to."""
    return WeightCount(
        parameters=sum(weight.elements for weight, _ in stored), nbytes=sum(form.nbytes(one) for one, form in stored)
    )
