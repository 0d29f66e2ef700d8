"""The C structures of `abi.h`, field by field, and how a cache fills them."""

import ctypes
import math
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint8, c_void_p
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.format import (
    Axis,
    Code,
    Fit,
    FloatType,
    Number,
    TensorFormat,
    Transform,
    UnsupportedError,
    check_kernel,
)
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.tensor_format import Levels

ABI_VERSION: Final = 8
OUTSIDE: Final = -2
OUT_OF_MEMORY: Final = -3

FLOAT_TYPE: Final = {FloatType.BF16: 0, FloatType.FP16: 1}
MAP: Final = {
    Code.INTEGER: 0,
    Code.E2M1: 1,
    Code.IQ4_NL: 1,
    Code.LLOYD_MAX: 1,
    Code.LEARNED: 1,
    Code.E4M3: 2,
    Code.E5M2: 3,
}
NUMBER: Final = {Number.FP16: 0, Number.BF16: 1, Number.FP32: 2, Number.E4M3: 3, Number.E8M0: 4}
FIT: Final = {
    Fit.RANGE: 0,
    Fit.ABSMAX: 1,
    Fit.POWER: 2,
    Fit.NORM: 3,
    Fit.Q8_0: 4,
    Fit.Q5_0: 5,
    Fit.Q5_1: 6,
    Fit.IQ4_NL: 7,
    Fit.NONE: 8,
}
TABLE_LEVELS: Final = 16
TABLE_PLANES: Final = ((2,), (2, 1), (4,))
SOURCE_TYPE: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class TensorLayout(ctypes.Structure):
    """`kvplan_tensor`."""

    _fields_ = [
        *_fields(c_int32, "bits low_bits high_bits map fit number numbers level_count lower_ties"),
        *_fields(c_float, "unit centre extent power middle clip steps"),
        ("table", c_uint8 * TABLE_LEVELS),
        ("ranked", c_uint8 * TABLE_LEVELS),
        ("middles", c_float * TABLE_LEVELS),
        *_fields(c_int32, "per_channel group keep_tokens quantum_tokens ring_tokens outliers boosts"),
        *_fields(c_int64, "codes high scale minimum outlier outlier_channel boost boost_channel"),
        *_fields(c_int64, "ring_offset sink_offset"),
    ]


class Layout(ctypes.Structure):
    """`kvplan_layout`."""

    _fields_ = [
        *_fields(
            c_int32,
            "abi_version struct_bytes kv_heads head_dim block_tokens float_type sink_tokens sink_capacity rotated",
        ),
        *_fields(c_int64, "slab_bytes page_bytes ring_bytes sink_bytes ring_head_bytes sink_head_bytes"),
        *_fields(TensorLayout, "key value"),
    ]


class BatchCall(ctypes.Structure):
    """`kvplan_batch`."""

    _fields_ = [
        *_fields(c_void_p, "pages ring sinks"),
        *_fields(c_int64, "blocks slots"),
        *_fields(c_void_p, "block_tables slot_ids lengths"),
        *_fields(c_int32, "sequences table_width"),
    ]


class Source(ctypes.Structure):
    """`kvplan_source`."""

    _fields_ = [*_fields(c_void_p, "data"), *_fields(c_int64, "token_stride head_stride")]


class AppendCall(ctypes.Structure):
    """`kvplan_append_call`."""

    _fields_ = [
        *_fields(Source, "key value"),
        *_fields(c_void_p, "counts"),
        *_fields(c_int32, "source_type threads variant"),
    ]


class Restore(ctypes.Structure):
    """`kvplan_restore`."""

    _fields_ = [*_fields(c_void_p, "near far lanes partner place factor offset"), *_fields(c_int64, "far_rows")]


class DecodeCall(ctypes.Structure):
    """`kvplan_decode_call`."""

    _fields_ = [
        *_fields(c_void_p, "query"),
        *_fields(c_int64, "query_stride_sequence query_stride_query query_stride_head"),
        *_fields(c_void_p, "output received lse sink_logits positions restore"),
        *_fields(c_int64, "received_tokens"),
        *_fields(c_int32, "query_type queries query_heads window"),
        *_fields(c_float, "scale softcap"),
        *_fields(c_int32, "threads variant"),
    ]


class DequantizeCall(ctypes.Structure):
    """`kvplan_dequantize_call`."""

    _fields_ = [
        *_fields(c_void_p, "key value"),
        *_fields(c_int64, "tokens"),
        *_fields(c_int32, "threads variant"),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the signatures of *library*."""
    library.kvplan_variant_name.argtypes = [c_int32]
    library.kvplan_variant_name.restype = c_char_p
    library.kvplan_read.argtypes = [c_void_p, c_int64, c_int32, c_int32]
    library.kvplan_read.restype = c_int64
    library.kvplan_rotate.argtypes = [c_void_p, c_int64, c_int32, c_int32, c_int32]
    library.kvplan_rotate.restype = c_int64
    for name, call in (("append", AppendCall), ("decode", DecodeCall), ("dequantize", DequantizeCall)):
        function = getattr(library, f"kvplan_{name}")
        function.argtypes = [POINTER(Layout), POINTER(BatchCall), POINTER(call)]
        function.restype = c_int64


def layout_struct(cache: LayerCache) -> Layout:
    """Return the layout of *cache*, and what its codes stand for, as the kernels read it.

    Raises:
        UnsupportedError: They read no such codes, or what they stand for was not learned.
    """
    return _layout_struct(cache.layout, cache.learned_levels.get("k"), cache.learned_levels.get("v"))


@lru_cache(maxsize=256)
def _layout_struct(layout: KVLayout, key_levels: Levels | None, value_levels: Levels | None) -> Layout:
    check_kernel("cpu", layout.format)
    if layout.order is not Order.LANES:
        raise UnsupportedError(f"the CPU kernels read codes in lanes, the cache holds them in {layout.order}")
    if layout.format.value.axis is Axis.CHANNEL:
        raise UnsupportedError(f"format {layout.format}: V per channel has no kernel here")
    key_row, value_row = layout.head_dim * 2 * layout.key_ring_tokens, layout.head_dim * 2 * layout.sink_capacity_tokens
    return Layout(
        abi_version=ABI_VERSION,
        struct_bytes=ctypes.sizeof(Layout),
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        float_type=FLOAT_TYPE[layout.float_type],
        sink_tokens=layout.format.sink_tokens,
        sink_capacity=layout.sink_capacity_tokens,
        rotated=Transform.HADAMARD in layout.format.transforms,
        slab_bytes=layout.slab_bytes,
        page_bytes=layout.page_bytes,
        ring_bytes=layout.ring_bytes,
        sink_bytes=layout.sink_bytes,
        ring_head_bytes=layout.ring_bytes // layout.kv_heads,
        sink_head_bytes=layout.sink_bytes // layout.kv_heads,
        key=_tensor_struct(layout, "k", key_levels, ring_offset=0, sink_offset=0),
        value=_tensor_struct(layout, "v", value_levels, ring_offset=key_row, sink_offset=value_row),
    )


def _tensor_struct(
    layout: KVLayout, prefix: str, learned: Levels | None, *, ring_offset: int, sink_offset: int
) -> TensorLayout:
    tensor = layout.format.key if prefix == "k" else layout.format.value
    if tensor.axis is Axis.CHANNEL and tensor.group_size is None:
        raise UnsupportedError(f"format {layout.format}: a group size is needed where tokens share a scale")
    flush = layout.format.key_flush if prefix == "k" else layout.format.value_flush
    offsets = {section.name: section.offset_bytes for section in layout.sections}
    group = tensor.group_size or layout.head_dim
    planes = (*tensor.planes, 0)
    return TensorLayout(
        bits=tensor.bits,
        low_bits=planes[0],
        high_bits=planes[1],
        map=MAP[tensor.code],
        fit=FIT[tensor.fit],
        number=NUMBER[tensor.number],
        numbers=len(tensor.metadata),
        **_level_fields(tensor, learned),
        per_channel=tensor.axis is Axis.CHANNEL,
        group=group if tensor.axis is Axis.CHANNEL else min(group, layout.head_dim),
        keep_tokens=flush.keep_tokens,
        quantum_tokens=flush.quantum_tokens,
        ring_tokens=layout.key_ring_tokens if prefix == "k" else layout.value_ring_tokens,
        codes=offsets[f"{prefix}_codes"],
        high=offsets.get(f"{prefix}_high", 0),
        scale=offsets.get(f"{prefix}_scale", 0),
        minimum=offsets.get(f"{prefix}_min", 0),
        outliers=layout.format.outliers if tensor.quantized else 0,
        outlier=offsets.get(f"{prefix}_outlier", 0),
        outlier_channel=offsets.get(f"{prefix}_outlier_channel", 0),
        boosts=tensor.boosted_channels(layout.head_dim),
        boost=offsets.get(f"{prefix}_boost", 0),
        boost_channel=offsets.get(f"{prefix}_boost_channel", 0),
        ring_offset=ring_offset,
        sink_offset=sink_offset,
    )


def _level_fields(tensor: TensorFormat, learned: Levels | None) -> dict[str, Any]:
    """Return the fields that say what codes stand for."""
    if not tensor.quantized or tensor.code.is_float:
        return {}
    if MAP[tensor.code] == MAP[Code.E2M1] and tensor.planes not in TABLE_PLANES:
        raise UnsupportedError(f"codes of {tensor.bits} bits that name levels of a table have no CPU kernel")
    levels = learned or tensor.levels
    fields = {
        "unit": levels.unit,
        "centre": levels.centre,
        "extent": levels.extent,
        "power": 2.0 ** math.floor(math.log2(levels.extent)) if levels.extent > 0 else 0.0,
        "middle": max(levels.table) / 2,
        "clip": tensor.clip_percent / 100,
        "steps": levels.steps,
    }
    if MAP[tensor.code] == MAP[Code.INTEGER]:
        return fields
    return fields | {
        "level_count": len(levels.ranked),
        "lower_ties": sum(lower << index for index, (_, lower) in enumerate(levels.middles)),
        "table": (c_uint8 * TABLE_LEVELS)(*levels.table),
        "ranked": (c_uint8 * TABLE_LEVELS)(*levels.ranked),
        "middles": (c_float * TABLE_LEVELS)(*(middle for middle, _ in levels.middles)),
    }


def batch_struct(cache: LayerCache, batch: Batch) -> BatchCall:
    """Return the addresses of a cache and a batch; both must outlive the call."""
    return BatchCall(
        cache.pages.data_ptr(),
        cache.ring.data_ptr(),
        cache.sinks.data_ptr(),
        cache.pages.shape[0],
        min(cache.ring.shape[0], cache.sinks.shape[0]),
        batch.block_tables.data_ptr(),
        batch.slots.data_ptr(),
        batch.lengths.data_ptr(),
        batch.lengths.shape[0],
        batch.block_tables.shape[1],
    )


def restore_struct(cache: LayerCache, batch: Batch) -> Restore | None:
    """Return how keys are read back that lie as they were before RoPE, None where they do not; as `batch_struct`."""
    rope = cache.rope
    if rope is None:
        return None
    far = rope.far(cache.tokens_max(batch))
    optional = (None if tensor is None else tensor.data_ptr() for tensor in cache.fold.key.restoring)
    return Restore(
        rope.near.data_ptr(), far.data_ptr(), rope.lanes.data_ptr(), rope.partner.data_ptr(), *optional, far.shape[0]
    )


def check_device(*tensors: Tensor | None) -> None:
    """Refuse tensors that lie elsewhere than in the CPU's memory."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cpu":
            raise UnsupportedError(f"the CPU kernels take tensors on the CPU, got one on {tensor.device}")


def check_status(operation: str, status: int) -> None:
    """Refuse what the compiled kernel refused, where the Python checks found nothing wrong."""
    if status == OUT_OF_MEMORY:
        raise MemoryError(f"{operation}: no memory for the kernel's partial results")
    if status < 0:
        raise UnsupportedError(f"{operation}: the compiled kernel refused the call ({status})")
