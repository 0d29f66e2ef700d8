"""A layout as the numbers that a Triton kernel is compiled for. All offsets count 2-byte items."""

from functools import lru_cache
from typing import Final, NamedTuple

from kvplan_kernels.format import Axis, Code, Flush, TensorFormat, UnsupportedError
from kvplan_kernels.layout import ROW_PLANES, KVLayout, Order

ITEM_BYTES: Final = 2
DOT_SIZE_MIN: Final = 16
"""The least extent of a matrix product in Triton."""


class TensorGeometry(NamedTuple):
    """Where one of K and V lies and how it is coded.

    Attributes:
        bits: Of a code; 16 where values are stored.
        planes: Channels whose codes share a word.
        tokens: Tokens whose codes share a word.
        width: Words of a row.
        padded: Width, rounded up to what a matrix product takes.
        channel: Whether tokens of a channel share a scale.
        group: Elements that share a scale, along its axis.
        groups: Groups of channels that a token has; 1 where tokens share a scale.
        floats: Whether codes are E4M3 floats, which have neither scale nor minimum.
        whole: Whether codes are integers and each plane of channels lies in one group, so that the codes themselves are
            multiplied and scale and minimum come afterwards; codes become values first where not.
        codes: Start of the codes in a slab.
        scale: Start of the scales in a slab.
        minimum: Start of the minima in a slab.
        keep: Tokens that stay in the residual.
        quantum: Tokens that leave it together.
        ring: Start of the tensor in a head's part of the ring.
        capacity: Tokens of that ring, at least 1.
        sinks: Start of the tensor in a head's part of the sinks.
    """

    bits: int
    planes: int
    tokens: int
    width: int
    padded: int
    channel: bool
    group: int
    groups: int
    floats: bool
    whole: bool
    codes: int
    scale: int
    minimum: int
    keep: int
    quantum: int
    ring: int
    capacity: int
    sinks: int


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

    @property
    def quantized(self) -> bool:
        """Whether pages hold codes of K or V."""
        return min(self.keys.bits, self.values.bits) < 16


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
    )


def _tensor(layout: KVLayout, prefix: str, capacity: int, *, ring: int, sinks: int) -> TensorGeometry:
    tensor: TensorFormat = layout.format.key if prefix == "k" else layout.format.value
    flush: Flush = layout.format.key_flush if prefix == "k" else layout.format.value_flush
    offsets = {section.name: section.offset_bytes // ITEM_BYTES for section in layout.sections}
    planes, tokens = ROW_PLANES[tensor.bits]
    width, channel = layout.head_dim // planes, tensor.axis is Axis.CHANNEL
    if channel and tensor.group_size is None:
        raise UnsupportedError(f"format {layout.format}: a group size is needed where tokens share a scale")
    group = tensor.group_size or layout.head_dim
    one_group = channel or group >= layout.head_dim or group % width == 0
    floats = tensor.quantized and tensor.code is Code.E4M3
    return TensorGeometry(
        bits=tensor.bits,
        planes=planes,
        tokens=tokens,
        width=width,
        padded=padded_size(width),
        channel=channel,
        group=group,
        groups=1 if channel else -(-layout.head_dim // group),
        floats=floats,
        whole=one_group and not floats,
        codes=offsets[f"{prefix}_codes"],
        scale=offsets.get(f"{prefix}_scale", 0),
        minimum=offsets.get(f"{prefix}_min", 0),
        keep=flush.keep_tokens if tensor.quantized else 0,
        quantum=flush.quantum_tokens if tensor.quantized else 1,
        ring=ring,
        capacity=max(1, capacity),
        sinks=sinks,
    )
