"""A layout as the numbers that a Triton kernel is compiled for.

Offsets count 2-byte items, but for those of scales and minima, which count numbers of the format's type.
"""

import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from kvplan_kernels.format import Axis, Code, Fit, Number, TensorFormat, Transform, UnsupportedError
from kvplan_kernels.layout import PLANE_NAMES, ROW_PLANES, KVLayout, Order
from kvplan_kernels.tensor_format import LEVEL_MOST, Levels, learned_levels
from kvplan_kernels.views import KEY, tensor_flush, tensor_format

ITEM_BYTES: Final = 2
DOT_SIZE_MIN: Final = 16
"""The least extent of a matrix product in Triton."""
BF16_LEVEL_MAX: Final = 127
"""bf16 has 7 bits of mantissa."""
FEW_BITS: Final = 4
_TABLE_WORDS: Final = 4
"""Of the levels of 16 codes."""
BF16_SHIFT: Final = 16
"""bf16 is the upper half of an fp32."""


class Plane(NamedTuple):
    """One plane of codes.

    Attributes:
        bits: Of a code's part in it; 0 where there is no such plane.
        tokens: Tokens whose codes share a word.
        start: Start of the words in a slab.
    """

    bits: int
    tokens: int
    start: int


_NO_PLANE: Final = Plane(bits=0, tokens=1, start=0)


class TensorGeometry(NamedTuple):
    """Where one of K and V lies and how it is coded.

    Attributes:
        bits: Of a code; 16 where values are stored.
        low: The plane of the low bits, or of all of them.
        high: The plane of the bits above them.
        planes: Channels whose codes share a word; a C-th of the head apart, they are C planes of channels.
        tokens: Tokens whose codes share a word, of the plane where they are most.
        width: Words of a row.
        padded: Width, rounded up to what a matrix product takes.
        slices: Groups of channels in a plane, each multiplied by itself, where whole and there are several; else 1.
        channel: Whether tokens of a channel share a scale.
        group: Elements that share a scale, along its axis.
        groups: Groups of channels that a token has; 1 where tokens share a scale.
        floats: What codes are that are floats of 8 bits, "e4m3" or "e5m2": they have neither scale nor minimum.
        table: The level of each code, where it is not the code itself.
        learned: How many codes there are where their levels are learned, which differ from layer to layer; else 0.
        first_word: The first of the learned tables' words that is this tensor's.
        signed: By code the bits of the bf16 that is multiplied, its level counted from the centre: where codes are
            E2M1, whose bits these have too. Other levels are offset.
        half: Whether levels are multiplied in fp16, which holds 1024 + level for all of them, and not in bf16, which
            holds 128 + level for the lower half.
        middle: The level, near the middle, that V's levels are counted from in products.
        unit: What one level is times the stored scale.
        centre: The level that stands for 0 where a group has no minimum.
        ranked: One code of each level, the lowest level first, where there is a table.
        middles: Of each of these but the last what lies halfway to the next, and whether that takes the former.
        fit: How a group is coded, the name of a `Fit`.
        divisor: What a fit divides a group's range, largest magnitude or norm by.
        clip: What the codes reach of a group's least and largest element.
        number: The type of scales and minima, the name of a `Number`.
        whole: Whether codes are levels and each slice of a plane of channels lies in one group, so that the levels
            themselves are multiplied and scale and minimum come afterwards; codes become values first where not.
        wide: Whether values may be out of the range of fp16 where they come first in it.
        scale: Start of the scales in a slab, in numbers.
        minimum: Start of the minima in a slab, in numbers; -1 where none are stored.
        keep: Tokens that stay in the residual.
        quantum: Tokens that leave it together.
        outliers: Of each token.
        outlier: Start of their values in a slab.
        outlier_channel: Start of their channels in a slab, in bytes.
        boosts: Boosted channels of each group of tokens, K alone.
        boost_words: Words of their low bits that a token has.
        boost: Start of these words in a slab, in words of 4 bytes.
        boost_channel: Start of their channels in a slab, in bytes.
        boost_divisor: What a fit divides by where a channel is boosted.
        ring: Start of the tensor in a head's part of the ring.
        capacity: Tokens of that ring, at least 1.
        sinks: Start of the tensor in a head's part of the sinks.
    """

    bits: int
    low: Plane
    high: Plane
    planes: int
    tokens: int
    width: int
    padded: int
    slices: int
    channel: bool
    group: int
    groups: int
    floats: str
    table: tuple[int, ...]
    learned: int
    first_word: int
    signed: tuple[int, ...]
    half: bool
    middle: int
    unit: float
    centre: float
    ranked: tuple[int, ...]
    middles: tuple[tuple[float, bool], ...]
    fit: str
    divisor: float
    clip: float
    number: str
    whole: bool
    wide: bool
    scale: int
    minimum: int
    keep: int
    quantum: int
    outliers: int
    outlier: int
    outlier_channel: int
    boosts: int
    boost_words: int
    boost: int
    boost_channel: int
    boost_divisor: float
    ring: int
    capacity: int
    sinks: int

    @property
    def pieces(self) -> int:
        """Slices of all planes, in the order of channels."""
        return self.planes * self.slices

    @property
    def sums(self) -> int:
        """Sums that outputs are kept in, one a slice: of codes, and of outliers where there are any."""
        return self.pieces * (2 if self.outliers else 1)

    @property
    def piece(self) -> int:
        """Channels of a slice."""
        return self.width // self.slices

    @property
    def padded_piece(self) -> int:
        """The same, rounded up to what a matrix product takes."""
        return self.padded if self.slices == 1 else self.piece


class Restore(NamedTuple):
    """What was done to keys that lie as they were before RoPE, beside undoing it.

    Attributes:
        rotated: Whether heads were rotated.
        shifted: Whether a number was taken from each channel.
        by_head: Whether KV heads have orders of channels, and so tables, of their own.
    """

    rotated: bool
    shifted: bool
    by_head: bool


class Geometry(NamedTuple):
    """A layer's cache.

    Attributes:
        padded: Head size, rounded up to what a matrix product takes.
        block: Tokens of a page.
        page: Items of a page, of all heads.
        slab: Items of a head in a page.
        ring: Items of a sequence's residual.
        ring_head: Items of a head in it.
        sink: Items of a sequence's sinks.
        sink_head: Items of a head in them.
        sinks: Sink tokens.
        restore: How keys are read back that lie as they were before RoPE; None where they do not.
    """

    kv_heads: int
    head_dim: int
    padded: int
    block: int
    page: int
    slab: int
    ring: int
    ring_head: int
    sink: int
    sink_head: int
    sinks: int
    keys: TensorGeometry
    values: TensorGeometry
    restore: Restore | None

    @property
    def quantized(self) -> bool:
        """Whether pages hold codes of K or V."""
        return min(self.keys.bits, self.values.bits) < 16

    @property
    def learned(self) -> bool:
        """Whether levels of K or V are learned."""
        return self.keys.learned + self.values.learned > 0


def padded_size(size: int, least: int = DOT_SIZE_MIN) -> int:
    """Return the least power of two that is not under *size* and *least*, what a matrix product takes.

    >>> padded_size(20)
    32
    """
    return max(least, 1 << (size - 1).bit_length())


@lru_cache(maxsize=64)
def geometry(layout: KVLayout) -> Geometry:
    """Return the numbers of *layout*.

    Raises:
        UnsupportedError: Its codes do not lie in rows, or V has a scale per channel.
    """
    if layout.order is not Order.ROWS:
        raise UnsupportedError(f"the Triton kernels read codes in rows, the cache holds them in {layout.order}")
    if layout.format.value.axis is Axis.CHANNEL:
        raise UnsupportedError(f"format {layout.format}: V per channel has no kernel here")
    key_ring, capacity = layout.head_dim * layout.key_ring_tokens, layout.sink_capacity_tokens
    return Geometry(
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        padded=padded_size(layout.head_dim),
        block=layout.block_tokens,
        page=layout.page_bytes // ITEM_BYTES,
        slab=layout.slab_bytes // ITEM_BYTES,
        ring=layout.ring_bytes // ITEM_BYTES,
        ring_head=layout.ring_bytes // ITEM_BYTES // layout.kv_heads,
        sink=layout.sink_bytes // ITEM_BYTES,
        sink_head=layout.sink_bytes // ITEM_BYTES // layout.kv_heads,
        sinks=layout.format.sink_tokens,
        keys=_tensor(layout, "k", layout.key_ring_tokens, ring=0, sinks=0),
        values=_tensor(layout, "v", layout.value_ring_tokens, ring=key_ring, sinks=layout.head_dim * capacity),
        restore=_restore(layout.format.transforms),
    )


def _restore(transforms: tuple[Transform, ...]) -> Restore | None:
    if Transform.PREROPE not in transforms:
        return None
    return Restore(
        rotated=Transform.HADAMARD in transforms,
        shifted=bool({Transform.UNBIAS, Transform.SCALED_CHANNEL} & set(transforms)),
        by_head=Transform.ORDER in transforms,
    )


def _planes(layout: KVLayout, prefix: str) -> tuple[Plane, Plane]:
    found = [
        Plane(
            bits=bits, tokens=ROW_PLANES[bits][1], start=layout.section(f"{prefix}_{name}").offset_bytes // ITEM_BYTES
        )
        for name, bits in zip(PLANE_NAMES, tensor_format(layout, prefix).planes, strict=False)
    ]
    low, high = (*found, _NO_PLANE)[:2]
    return low, high


def _folds(layout: KVLayout) -> bool:
    """Return whether tiles of keys that share scales are large enough to be a matrix product's side."""
    places = [ROW_PLANES[bits][1] for tensor in (layout.format.key, layout.format.value) for bits in tensor.planes]
    group = layout.format.key.group_size
    return group is not None and group >= DOT_SIZE_MIN * max(places)


def _middle(tensor: TensorFormat, levels: Levels) -> int:
    """Return the level that V's are counted from: sums then grow less, and lose less of rounded weights.

    Up to 4 bits codes from the least element to the largest lose little.
    """
    if tensor.learned:
        return (LEVEL_MOST + 1) // 2
    if tensor.fit is Fit.RANGE and tensor.bits <= FEW_BITS:
        return 0
    return int(levels.centre)


def _levels(tensor: TensorFormat) -> Levels:
    """Return the levels of *tensor*; in place of those that are learned, and not known here, others of their extent."""
    even = range(0, LEVEL_MOST + 1, LEVEL_MOST // ((1 << tensor.bits) - 1))
    return learned_levels(even, tensor.fit) if tensor.learned else tensor.levels


def _signed(levels: Levels) -> tuple[int, ...]:
    heights = [level - levels.centre for level in levels.table]
    return tuple(int(np.float32(height).view(np.uint32)) >> BF16_SHIFT for height in heights)


def _divisor(tensor: TensorFormat, levels: Levels, group: int) -> float:
    """Return what the fit divides by, as `fits` has it."""
    match tensor.fit:
        case Fit.ABSMAX | Fit.Q8_0:
            return levels.extent
        case Fit.POWER:
            return 2.0 ** math.floor(math.log2(levels.extent))
        case Fit.NORM:
            return math.sqrt(group)
        case Fit.Q5_0 | Fit.IQ4_NL:
            return levels.table[0] - levels.centre
        case _:
            return float(levels.steps)


def _tensor(layout: KVLayout, prefix: str, capacity: int, *, ring: int, sinks: int) -> TensorGeometry:
    tensor, flush = tensor_format(layout, prefix), tensor_flush(layout, prefix)
    if tensor.axis is Axis.CHANNEL and tensor.group_size is None:
        raise UnsupportedError(f"format {layout.format}: a group size is needed where tokens share a scale")
    low, high = _planes(layout, prefix)
    planes, channel = ROW_PLANES[low.bits][0], tensor.axis is Axis.CHANNEL
    width, tokens = layout.head_dim // planes, max(low.tokens, high.tokens)
    group = tensor.group_size or layout.head_dim
    floats = tensor.quantized and tensor.code.is_float
    slices = width // group if not channel and width % group == 0 else 1
    in_groups = group >= layout.head_dim or group * slices % width == 0
    whole = (_folds(layout) if channel else in_groups) and not floats
    levels = _levels(tensor) if tensor.quantized and not floats else None
    tabled = levels is not None and not levels.are_codes and not tensor.learned
    starts = {section.name: section.offset_bytes // section.item_bytes for section in layout.sections}
    return TensorGeometry(
        bits=tensor.bits,
        low=low,
        high=high,
        planes=planes,
        tokens=tokens,
        width=width,
        padded=padded_size(width),
        slices=slices,
        channel=channel,
        group=group,
        groups=1 if channel else -(-layout.head_dim // group),
        floats=str(tensor.code) if floats else "",
        table=levels.table if levels is not None and tabled else (),
        learned=1 << tensor.bits if tensor.learned else 0,
        first_word=0 if prefix == KEY else _TABLE_WORDS,
        signed=_signed(levels) if levels is not None and tensor.code is Code.E2M1 else (),
        half=bool(floats) or tensor.learned or (levels is not None and max(levels.table) > BF16_LEVEL_MAX),
        middle=0 if levels is None else _middle(tensor, levels),
        unit=1.0 if levels is None else levels.unit,
        centre=0.0 if levels is None else levels.centre,
        ranked=levels.ranked if levels is not None and tabled else (),
        middles=levels.middles if levels is not None and tabled else (),
        fit=str(tensor.fit),
        divisor=1.0 if levels is None else _divisor(tensor, levels, group),
        clip=tensor.clip_percent / 100,
        number=str(tensor.number),
        whole=whole,
        wide=tensor.fit is not Fit.RANGE or tensor.number is not Number.FP16,
        scale=starts.get(f"{prefix}_scale", 0),
        minimum=starts.get(f"{prefix}_min", -1),
        keep=flush.keep_tokens if tensor.quantized else 0,
        quantum=flush.quantum_tokens if tensor.quantized else 1,
        outliers=layout.format.outliers if tensor.quantized else 0,
        outlier=starts.get(f"{prefix}_outlier", 0),
        outlier_channel=starts.get(f"{prefix}_outlier_channel", 0),
        boosts=tensor.boosted_channels(layout.head_dim),
        boost_words=layout.boost_words(tensor),
        boost=starts.get(f"{prefix}_boost", 0),
        boost_channel=starts.get(f"{prefix}_boost_channel", 0),
        boost_divisor=_divisor(tensor.boosted, tensor.boosted.levels, group) if tensor.boosted_eighths else 1.0,
        ring=ring,
        capacity=max(1, capacity),
        sinks=sinks,
    )
