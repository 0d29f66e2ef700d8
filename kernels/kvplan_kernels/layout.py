"""Where codes, scales, minima and 16-bit tokens lie: the one layout that byte counts and kernels obey.

Standard library only. Three buffers hold one layer's cache:

* *pages*, uint8 [blocks, page_bytes]: quantized tokens (all tokens of an unquantized format), `block_tokens` to a page;
* *ring*, uint8 [slots, ring_bytes]: the 16-bit residual of each sequence;
* *sinks*, uint8 [slots, sink_bytes]: the first S tokens of each sequence, in 16 bits.

A page is [kv_heads] slabs. A slab is the sections of `KVLayout.sections`, in order. Token index inside pages and ring
counts from the first token after the sinks. Integers are little-endian. Codes lie in one of two orders, each made for
the instructions of one kind of processor; all else is the same in both. A code of 3, 5 or 6 bits is two
(`tensor_format.PLANES`): its low bits lie in the section of codes, the bits above them in one of their own behind it,
each as codes of so many bits.

`Order.LANES`, for vector units of 16 lanes: 32-bit words that hold n = 32 / bits codes: element e = 4k + j of a word
sits at bit 8j + bits * k, so `(word >> bits * k) & mask` leaves four codes, one to a byte, in order: what a four-way
byte dot product takes. A 16-bit word holds elements 0 (low half) and 1 (high half).

* K codes: uint32 [block_tokens / 16, ceil(head_dim / n), 16]: lane l is token l of a run of 16, the word's elements
  are n consecutive channels. Channels past head_dim are zero codes.
* V codes: uint32 [block_tokens / n, head_dim]: the word's elements are n consecutive tokens of one channel.

`Order.ROWS`, for tensor cores: K and V alike as rows of 16-bit words, uint16 [block_tokens / T, head_dim / C]. A word
holds the codes of C channels, a C-th of the head apart, and of T consecutive tokens (`ROW_PLANES`): the code of channel
c * head_dim / C + i and token T * r + t sits in word (r, i) at bit bits * (t * C + c). One shift and one mask on two
neighbouring words leave two codes of neighbouring channels: what a 16-bit matrix product takes.

In both orders:

* per-token scale and minimum, of the format's `Number`: [ceil(head_dim / group_size), block_tokens];
* per-channel scale and minimum (K): [block_tokens / group_size, head_dim];
* what a format's `Fit` does not store has no section;
* the low bits of boosted channels (K, `boosts`) as K's 2-bit codes in lanes: uint32 [block_tokens / 16, n / 16, 16], n
  being the boosted channels, rounded up to 16, in the order of [block_tokens / group_size, n], a byte for each: the
  largest first. Past the last are zeros;
* outliers of a token, the largest first, in the layout's 16-bit type: [outliers, block_tokens], and the channel that
  each is of, a byte: the same. A token that holds a NaN or an infinity has zeros.

Ring and sinks use the 16-bit K and V sections with their own capacity, per head: K then V. Token p (counted after the
sinks) of the ring lies at slot p mod capacity of that tensor's ring.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Final

from kvplan_kernels.format import (
    Axis,
    CacheFormat,
    Code,
    FloatType,
    Flush,
    TensorFormat,
    Transform,
    UnsupportedError,
)
from kvplan_kernels.tensor_format import BOOST_BITS

LANES: Final = 16
ROW_PLANES: Final = {16: (1, 1), 8: (2, 1), 4: (4, 1), 2: (4, 2), 1: (4, 4)}
"""Channels and tokens whose codes share a 16-bit word in `Order.ROWS`, by bits of a code plane."""
PLANE_NAMES: Final = ("codes", "high")
"""Of the sections that hold the planes of a code, low bits first."""
WORD_BITS: Final = 32
SLAB_ALIGN_BYTES: Final = 64
HEAD_DIM_MIN: Final = 32
HEAD_DIM_MAX: Final = 256
BLOCK_TOKENS_MAX: Final = 256
BLOCK_TABLE_ENTRY_BYTES: Final = 4
FLOAT_BYTES: Final = 2
OUTLIER_BYTES: Final = 3
"""Of a 16-bit value and its channel."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of *multiple* that is not under *value*."""
    return ceil_div(value, multiple) * multiple


class Order(StrEnum):
    """How codes lie in pages, ring and sinks."""

    LANES = "lanes"
    ROWS = "rows"


IMPLEMENTATION_ORDER: Final = {"cpu": Order.LANES, "reference": Order.LANES, "triton": Order.ROWS}
"""By implementation of the operations; the reference takes both, and is given the first."""


def order_of(kernel: str) -> Order:
    """Return the order of codes in the caches of *kernel*, an implementation and its path.

    >>> order_of("triton/sm_90"), order_of("cpu/avx512_vnni")
    (<Order.ROWS: 'rows'>, <Order.LANES: 'lanes'>)
    """
    return IMPLEMENTATION_ORDER.get(kernel.partition("/")[0], Order.LANES)


@dataclass(frozen=True, slots=True)
class Section:
    """One array inside a head's slab.

    Attributes:
        name: k_codes, k_high, k_scale, k_min, k_boost, k_boost_channel, k_outlier, k_outlier_channel, and the same of
            V, which has no boosts.
        offset_bytes: From the start of the slab.
        item_bytes: 4 or 2 for words, those of a number for metadata.
        shape: Items along each axis.
    """

    name: str
    offset_bytes: int
    item_bytes: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The section's bytes."""
        return self.item_bytes * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The layout of one layer's cache.

    Raises:
        UnsupportedError: No kernel takes this combination; the message says why.
    """

    format: CacheFormat
    kv_heads: int
    head_dim: int
    block_tokens: int
    float_type: FloatType = FloatType.BF16
    order: Order = Order.LANES

    def __post_init__(self) -> None:
        """Refuse what the kernels cannot lay out."""
        if not HEAD_DIM_MIN <= self.head_dim <= HEAD_DIM_MAX or self.head_dim % 8:
            raise UnsupportedError(f"head size {self.head_dim}: the kernels take 32 to 256 in steps of 8")
        if self.kv_heads < 1:
            raise UnsupportedError(f"{self.kv_heads} KV heads: there must be at least one")
        if not LANES <= self.block_tokens <= BLOCK_TOKENS_MAX or self.block_tokens % LANES:
            raise UnsupportedError(f"block size {self.block_tokens}: 16 to 256 tokens in steps of 16")
        group = self.format.key.group_size
        if self.format.key.axis is Axis.CHANNEL and group is not None and self.block_tokens % group:
            raise UnsupportedError(
                f"block size {self.block_tokens} is no multiple of the group size {group}, and {self.format} shares a "
                f"scale over {group} tokens of a channel; use block size {round_up(self.block_tokens, group)}"
            )
        tokens = max(WORD_BITS // bits for bits in self.format.value.planes)
        if self.block_tokens % tokens:
            raise UnsupportedError(
                f"block size {self.block_tokens}: a word of {self.format}'s V holds {tokens} tokens; use block size "
                f"{round_up(self.block_tokens, tokens)}"
            )
        if max(len(tensor.planes) for tensor in (self.format.key, self.format.value)) > len(PLANE_NAMES):
            raise UnsupportedError(
                f"format {self.format}: a code of more than {len(PLANE_NAMES)} planes has no section"
            )
        if (reason := self._transform_refusal()) is not None:
            raise UnsupportedError(f"format {self.format}: {reason}")
        if self.format.float_type not in (None, self.float_type):
            raise UnsupportedError(f"format {self.format} holds {self.format.float_type}, the cache {self.float_type}")

    def _transform_refusal(self) -> str | None:
        """Return why a transform changes nothing here, or leads out of the 16-bit type, or None."""
        form = self.format
        tensors = (form.key, form.value)
        grouped = [t.group_size for t in tensors if t.axis is Axis.TOKEN and t.group_size is not None]
        if Transform.ORDER in form.transforms and min(grouped, default=self.head_dim) >= self.head_dim:
            return f"a group is a whole head of {self.head_dim} channels, and their order changes nothing"
        scaled = {Transform.SCALED, Transform.SCALED_TENSOR} & set(form.transforms)
        if scaled and self.float_type is FloatType.FP16 and any(t.code is Code.E5M2 for t in tensors):
            return "what is larger than the largest that was learned would leave fp16 before it is coded; use fp8_e4m3"
        return None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The arrays of one KV head in one page, in order."""
        found: list[Section] = []
        offset = 0
        for prefix, tensor in (("k", self.format.key), ("v", self.format.value)):
            for name, bits in zip(PLANE_NAMES, tensor.planes, strict=False):
                found.append(Section(f"{prefix}_{name}", offset, self._word_bytes, self._codes_shape(prefix, bits)))
                offset += found[-1].nbytes
            for name in tensor.metadata:
                shape = self._metadata_shape(tensor)
                found.append(Section(f"{prefix}_{name}", offset, tensor.number.bits // 8, shape))
                offset += found[-1].nbytes
            for name, size, held in (*self._boost_sections(tensor), *self._outlier_sections(tensor)):
                found.append(Section(f"{prefix}_{name}", offset, size, held))
                offset += found[-1].nbytes
        return tuple(found)

    def boost_words(self, tensor: TensorFormat) -> int:
        """Return how many words the low bits of a token's boosted channels take."""
        return ceil_div(tensor.boosted_channels(self.head_dim), WORD_BITS // BOOST_BITS)

    def _boost_sections(self, tensor: TensorFormat) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        words = self.boost_words(tensor)
        if not words or tensor.group_size is None:
            return ()
        return (
            ("boost", WORD_BITS // 8, (self.block_tokens // LANES, words, LANES)),
            ("boost_channel", 1, (self.block_tokens // tensor.group_size, words * (WORD_BITS // BOOST_BITS))),
        )

    def _outlier_sections(self, tensor: TensorFormat) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        if not tensor.quantized or not self.format.outliers:
            return ()
        shape = (self.format.outliers, self.block_tokens)
        return ("outlier", FLOAT_BYTES, shape), ("outlier_channel", OUTLIER_BYTES - FLOAT_BYTES, shape)

    def section(self, name: str) -> Section:
        """Return the section called *name*; KeyError where the format has none."""
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(name)

    @property
    def _word_bytes(self) -> int:
        return 2 if self.order is Order.ROWS else 4

    def _codes_shape(self, prefix: str, bits: int) -> tuple[int, ...]:
        if self.order is Order.ROWS:
            channels, tokens = ROW_PLANES[bits]
            return (self.block_tokens // tokens, self.head_dim // channels)
        per_word = WORD_BITS // bits
        if prefix == "k":
            return (self.block_tokens // LANES, ceil_div(self.head_dim, per_word), LANES)
        return (self.block_tokens // per_word, self.head_dim)

    def _metadata_shape(self, tensor: TensorFormat) -> tuple[int, int]:
        group = tensor.group_size or self.head_dim
        if tensor.axis is Axis.CHANNEL:
            return (self.block_tokens // group, self.head_dim)
        return (ceil_div(self.head_dim, group), self.block_tokens)

    @cached_property
    def slab_bytes(self) -> int:
        """Bytes of one KV head in one page, with the padding to a cache line."""
        last = self.sections[-1]
        return round_up(last.offset_bytes + last.nbytes, SLAB_ALIGN_BYTES)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.kv_heads * self.slab_bytes

    @cached_property
    def key_ring_tokens(self) -> int:
        """Tokens that the ring of K holds; 0 where tokens go straight to pages."""
        return self._ring_tokens(self.format.key, self.format.key_flush)

    @cached_property
    def value_ring_tokens(self) -> int:
        """Tokens that the ring of V holds; 0 where tokens go straight to pages."""
        return self._ring_tokens(self.format.value, self.format.value_flush)

    def _ring_tokens(self, tensor: TensorFormat, flush: Flush) -> int:
        return round_up(flush.held_tokens_max, LANES) if tensor.quantized else 0

    @property
    def sink_capacity_tokens(self) -> int:
        """Tokens that the sink buffer holds: the sinks, rounded up to a run of lanes."""
        return round_up(self.format.sink_tokens, LANES)

    @cached_property
    def ring_bytes(self) -> int:
        """Bytes of one sequence's residual in one layer."""
        return self.kv_heads * self.head_dim * 2 * (self.key_ring_tokens + self.value_ring_tokens)

    @cached_property
    def sink_bytes(self) -> int:
        """Bytes of one sequence's sinks in one layer."""
        return self.kv_heads * self.head_dim * 2 * 2 * self.sink_capacity_tokens

    def quantized_tokens(self, tokens: int) -> tuple[int, int]:
        """Return how many tokens of K and of V lie in pages when *tokens* are held, sinks not counted."""
        paged = max(0, tokens - self.format.sink_tokens)
        key = self.format.key_flush.quantized_tokens(paged) if self.format.key.quantized else paged
        value = self.format.value_flush.quantized_tokens(paged) if self.format.value.quantized else paged
        return key, value

    def blocks(self, tokens: int) -> int:
        """Return the pages that a sequence of *tokens* needs in a layer."""
        return ceil_div(max(self.quantized_tokens(tokens)), self.block_tokens)

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes allocated to a sequence of *tokens* in one layer: pages, residual and sinks."""
        return self.blocks(tokens) * self.page_bytes + self.ring_bytes + self.sink_bytes

    def logical_bytes(self, tokens: int) -> float:
        """Return the bytes of geometry times format for *tokens* in one layer: no rounding, no spare capacity.

        Exact; a fraction where groups share bytes. It is also what one decode step has to read.
        """
        key, value = self.quantized_tokens(tokens)
        stored = token_bytes(self.format, self.format.key, self.head_dim) * key
        stored += token_bytes(self.format, self.format.value, self.head_dim) * value
        return self.kv_heads * (stored + 2 * self.head_dim * (2 * tokens - key - value))


def token_bytes(form: CacheFormat, tensor: TensorFormat, head_dim: int) -> float:
    """Return the bytes of one head of one token in pages, its part of what groups and outliers have beside codes.

    *tensor* is *form*'s K or V.
    """
    if not tensor.quantized or not head_dim:
        return FLOAT_BYTES * head_dim
    group = tensor.group_size or head_dim
    by_channel = tensor.axis is Axis.CHANNEL
    groups = head_dim / group if by_channel else ceil_div(head_dim, group)
    boosts = tensor.boosted_channels(head_dim) * (BOOST_BITS + 8 / group) if by_channel else 0
    codes = (head_dim * tensor.bits + groups * tensor.group_bits + boosts) / 8
    return codes + form.outliers * OUTLIER_BYTES
