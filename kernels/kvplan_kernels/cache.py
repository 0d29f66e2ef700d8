"""The tensors of one layer's cache, and the batch of sequences that an operation works on."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from kvplan_kernels.folding import Fold, fold_of
from kvplan_kernels.format import FloatType, UnsupportedError
from kvplan_kernels.huge_pages import zeroed
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.parameters import NOTHING_LEARNED, LayerParameters
from kvplan_kernels.rope import Rope, rope_of
from kvplan_kernels.tensor_format import Levels, learned_levels

_TABLE_BYTES: Final = 16
TORCH_FLOAT: Final = {FloatType.BF16: torch.bfloat16, FloatType.FP16: torch.float16}


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCache:
    """One layer's pages, residuals and sinks.

    Attributes:
        layout: What the bytes mean.
        pages: uint8 [blocks, page_bytes].
        ring: uint8 [slots, ring_bytes].
        sinks: uint8 [slots, sink_bytes].
        parameters: What the format has learned of the layer, on the device of the others.
    """

    layout: KVLayout
    pages: Tensor
    ring: Tensor
    sinks: Tensor
    parameters: LayerParameters = NOTHING_LEARNED

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        *,
        blocks: int,
        slots: int,
        device: str = "cpu",
        parameters: LayerParameters = NOTHING_LEARNED,
    ) -> "LayerCache":
        """Return a zeroed cache of *blocks* pages for *slots* sequences."""
        return cls(
            layout=layout,
            pages=zeroed(blocks, layout.page_bytes, device),
            ring=zeroed(slots, layout.ring_bytes, device),
            sinks=zeroed(slots, layout.sink_bytes, device),
            parameters=parameters.to(device),
        )

    @cached_property
    def fold(self) -> Fold:
        """What is done to K and V before they are stored, but for a rotation.

        Raises:
            UnsupportedError: A number that the format needs was not learned.
        """
        return fold_of(self.layout.format, self.parameters)

    @cached_property
    def rope(self) -> Rope | None:
        """What keys are turned by where they are read, and back before they are stored; None where they lie turned.

        Raises:
            UnsupportedError: The model's numbers are not there.
        """
        return rope_of(self.layout.format, self.parameters)

    @cached_property
    def learned_levels(self) -> dict[str, Levels]:
        """What codes stand for where that is learned, by "k" and "v".

        Raises:
            UnsupportedError: It was not learned.
        """
        tensors = {"k": self.layout.format.key, "v": self.layout.format.value}
        return {
            prefix: learned_levels(self.parameters[f"{prefix}_levels"].tolist(), tensor.fit)
            for prefix, tensor in tensors.items()
            if tensor.learned
        }

    @cached_property
    def level_words(self) -> Tensor:
        """The same as words of four levels, int32 [2, 4], on the cache's device; zeros where none are learned."""
        if self.pages.is_meta:
            return torch.empty(2, _TABLE_BYTES // 4, dtype=torch.int32, device="meta")
        words = torch.zeros(2, _TABLE_BYTES, dtype=torch.uint8, device="cpu")
        for row, prefix in enumerate("kv"):
            if prefix in self.learned_levels:
                table = self.learned_levels[prefix].table
                words[row, : len(table)] = torch.tensor(table, dtype=torch.uint8)
        return words.view(torch.int32).to(self.pages.device)

    def tokens_max(self, batch: "Batch") -> int:
        """Return more tokens than a sequence of *batch* can hold; nothing is read back from a device."""
        layout = self.layout
        return batch.block_tables.shape[1] * layout.block_tokens + layout.key_ring_tokens + layout.sink_capacity_tokens

    @property
    def nbytes(self) -> int:
        """The bytes of the three buffers; what was learned is a few numbers a layer, once."""
        return self.pages.nbytes + self.ring.nbytes + self.sinks.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The sequences of one call.

    Attributes:
        block_tables: int32 [batch, blocks]: the pages of each sequence, in order.
        slots: int32 [batch]: the row of each sequence in ring and sinks.
        lengths: int32 [batch]: tokens held, before an append and at a decode.
    """

    block_tables: Tensor
    slots: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        """Refuse tensors that the kernels would misread."""
        batch = self.lengths.numel()
        for name, tensor, shape in (
            ("block_tables", self.block_tables, (batch, self.block_tables.shape[-1])),
            ("slots", self.slots, (batch,)),
            ("lengths", self.lengths, (batch,)),
        ):
            if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise UnsupportedError(
                    f"{name}: contiguous int32 {list(shape)} is needed, got {tensor.dtype} {list(tensor.shape)}"
                )

    def to(self, device: str) -> "Batch":
        """Return the same sequences on *device*."""
        return Batch(
            block_tables=self.block_tables.to(device), slots=self.slots.to(device), lengths=self.lengths.to(device)
        )

    def after(self, counts: Tensor) -> "Batch":
        """Return the same sequences with *counts*, int32 [batch], more tokens held."""
        return Batch(block_tables=self.block_tables, slots=self.slots, lengths=self.lengths + counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What a model's attention does beside softmax of scaled scores.

    Attributes:
        scale: Factor on the scores.
        window: A query at position p attends to positions above p - window; None attends to all before it.
        softcap: Scores become softcap * tanh(score / softcap); None leaves them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
