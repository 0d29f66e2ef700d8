"""The references against a second reading of the definitions: numpy, token by token, from bytes, in float64."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import TORCH_FLOAT, AttentionOptions, Batch, LayerCache
from kvplan_kernels.decode.reference import decode
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import Axis, Code, Fit, FloatType, Number, ResidualRule, TensorFormat, parse
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.sequence import sequences

Array = NDArray[Any]
LENGTHS: Final = (1, 31, 200, 0, 97)
CASES: Final = [
    ("bf16", 2, 40, 16),
    ("fp16", 1, 32, 48),
    ("int8", 3, 72, 32),
    ("int4", 1, 256, 16),
    ("k2v2-g32", 2, 80, 160),
    ("k8v2-g64-r7", 2, 96, 16),
    ("k2v4-g128-s5", 1, 200, 64),
    ("k4v8-g32-r50-s17", 2, 48, 32),
    ("kivi-k4v2-g32", 2, 40, 32),
    ("kivi-k2v4-g64-r30", 1, 72, 64),
    ("kivi-k8v8-g32-r64-s4", 2, 104, 96),
    ("kivi-paper-k2v2-g32-r64", 2, 64, 64),
    ("kivi-paper-k4v8-g64-r64-s3", 1, 40, 64),
    ("fp8_e4m3", 2, 40, 16),
    ("fp8_e4m3-r7-s5", 1, 200, 48),
    ("fp8_e5m2/int3-g16", 2, 48, 32),
    ("k3v5-g32-r9", 1, 72, 64),
    ("k6v1-g16-s3", 2, 104, 32),
    ("kivi-k1v6-g32", 1, 40, 64),
    ("sym-kivi-k5v3-g16-mfp32", 2, 64, 32),
    ("nvfp4-r3", 2, 56, 16),
    ("mxfp4/nvfp4", 1, 40, 48),
    ("lloyd3/int4-mbf16", 1, 128, 32),
    ("k2v2-g64-me4m3", 2, 72, 16),
    ("llama.cpp:q5_1/iq4_nl-s4", 1, 64, 32),
    ("llama.cpp:q8_0/q5_0", 2, 80, 32),
]


@dataclass(frozen=True)
class Filled:
    """A cache that holds *key* and *value*, float32 [sequence][tokens, heads, head_dim], each a bf16 or fp16 number."""

    cache: LayerCache
    batch: Batch
    key: list[Tensor]
    value: list[Tensor]


def fill(
    name: str, heads: int, head_dim: int, block: int, order: Order = Order.LANES, *, lengths: tuple[int, ...] = LENGTHS
) -> Filled:
    float_type = FloatType.FP16 if name == "fp16" else FloatType.BF16
    layout = KVLayout(
        format=parse(name), kv_heads=heads, head_dim=head_dim, block_tokens=block, float_type=float_type, order=order
    )
    generator = torch.Generator().manual_seed(7)
    cache, batch = empty(layout, lengths, generator)
    shape = (sum(lengths), heads, head_dim)
    key, value = (torch.randn(shape, generator=generator).to(TORCH_FLOAT[float_type]) for _ in range(2))
    assert append(cache, batch, key, value, torch.tensor(lengths, dtype=torch.int32)) == 0
    return Filled(
        cache=cache,
        batch=replace(batch, lengths=torch.tensor(lengths, dtype=torch.int32)),
        key=list(torch.split(key.float(), list(lengths))),
        value=list(torch.split(value.float(), list(lengths))),
    )


def empty(layout: KVLayout, lengths: tuple[int, ...], generator: torch.Generator) -> tuple[LayerCache, Batch]:
    """Return a cache full of NaN, its pages handed out in no order."""
    width = max(layout.blocks(length) for length in lengths)
    blocks, rows = max(1, width * len(lengths)), len(lengths)
    cache = LayerCache.allocate(layout, blocks=blocks, slots=rows + 1)
    for buffer in (cache.pages, cache.ring, cache.sinks):
        buffer.fill_(0xFF)
    table = torch.randperm(blocks, generator=generator)[: width * rows].reshape(rows, width)
    slots = torch.randperm(rows + 1, generator=generator)[:rows]
    return cache, Batch(
        block_tables=table.to(torch.int32), slots=slots.to(torch.int32), lengths=torch.zeros(rows, dtype=torch.int32)
    )


def quantized_tokens(filled: Filled, prefix: str, length: int) -> int:
    """Append *length* tokens one at a time and count those that left the residual."""
    form = filled.cache.layout.format
    tensor = form.key if prefix == "k" else form.value
    residual, group = form.residual_tokens, 1
    if form.key.axis is Axis.CHANNEL:
        group = form.key.group_size or 0
    held = left = 0
    for token in range(length):
        if token < form.sink_tokens:
            continue
        held += 1
        if not tensor.quantized:
            step = held
        elif form.rule is ResidualRule.GROUP:
            step = group if held == residual + group else 0
        elif prefix == "k":
            step = residual if held == residual else 0
        else:
            step = 1 if held > residual else 0
        held, left = held - step, left + step
    return left


def page_codes(slab: Array, layout: KVLayout, prefix: str) -> Array:
    """Return the codes [tokens, head_dim] of a head's slab, uint8 [bytes], by the layout's own words."""
    bits = layout.format.key.bits if prefix == "k" else layout.format.value.bits
    high = {3: 1, 5: 1, 6: 2}.get(bits, 0)
    codes = plane_codes(slab, layout, prefix, "codes", bits - high)
    return codes | plane_codes(slab, layout, prefix, "high", high) << (bits - high) if high else codes


def plane_codes(slab: Array, layout: KVLayout, prefix: str, name: str, bits: int) -> Array:
    n = 32 // bits
    section = layout.section(f"{prefix}_{name}")
    stored = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
    token, channel = np.indices((layout.block_tokens, layout.head_dim))
    if layout.order is Order.ROWS:
        return row_codes(stored.view("<u2"), token, channel, bits, layout.head_dim)
    words = stored.view("<u4")
    if prefix == "k":
        word, e = (token // 16 * -(-layout.head_dim // n) + channel // n) * 16 + token % 16, channel % n
    else:
        word, e = token // n * layout.head_dim + channel, token % n
    k, j = e // 4, e % 4
    shift = 16 * e if bits == 16 else 8 * j + bits * k
    codes: Array = (words[word] >> shift.astype(np.uint32)) & ((1 << bits) - 1)
    return codes


def row_codes(words: Array, token: Array, channel: Array, bits: int, head_dim: int) -> Array:
    channels, tokens = {16: (1, 1), 8: (2, 1), 4: (4, 1), 2: (4, 2), 1: (4, 4)}[bits]
    width = head_dim // channels
    shift = bits * (token % tokens * channels + channel // width)
    codes: Array = (words[token // tokens * width + channel % width].astype(np.uint32) >> shift.astype(np.uint32)) & (
        (1 << bits) - 1
    )
    return codes


def page_metadata(slab: Array, layout: KVLayout, name: str, tensor: TensorFormat) -> Array:
    """Return the scale or minimum of each element, float32 [tokens, head_dim]."""
    section = layout.section(name)
    raw = slab[section.offset_bytes : section.offset_bytes + section.nbytes]
    stored = page_numbers(raw, tensor.number).reshape(section.shape)
    group = tensor.group_size or layout.head_dim
    token, channel = np.indices((layout.block_tokens, layout.head_dim))
    if tensor.axis is Axis.CHANNEL:
        spread: Array = stored[token // group, channel]
    else:
        spread = stored[channel // group, token]
    return spread.astype(np.float32)


def page_numbers(raw: Array, number: Number) -> Array:
    """Return the numbers in *raw* bytes, float32."""
    if number is Number.E8M0:
        return np.exp2(np.minimum(raw, 200).astype(np.float32) - 127)  # What no token wrote may be anything.
    if number is Number.E4M3:
        found: Array = torch.from_numpy(raw.copy()).view(torch.float8_e4m3fn).float().numpy()
        return found
    if number is Number.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view("<f4")
    return raw.view("<f4" if number is Number.FP32 else "<f2").astype(np.float32)


def expected(values: Array, tensor: TensorFormat) -> Array:
    """Return what quantized *values* [tokens, head_dim] read back as."""
    if not tensor.quantized:
        return values
    if tensor.code is Code.E4M3:
        return expected_floats(values)
    if tensor.fit is not Fit.RANGE or tensor.number is not Number.FP16:  # test_fits holds these to their definitions
        coded = quantize(torch.from_numpy(values), tensor)
        return dequantize_codes(coded.codes, coded.metadata, tensor).numpy()
    result = np.empty_like(values)
    along = 0 if tensor.axis is Axis.CHANNEL else 1
    group = tensor.group_size or values.shape[1]
    for line in np.ndindex(values.shape[1 - along]):
        for first in range(0, values.shape[along], group):
            place: Any = (
                (slice(first, first + group), line[0]) if along == 0 else (line[0], slice(first, first + group))
            )
            result[place] = expected_group(values[place], tensor.bits)
    return result


def expected_floats(x: Array) -> Array:
    """Return *x* rounded to three bits of mantissa, none of them under 2^-9; 448 is far from it."""
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6) - 3)
    result: Array = (np.rint(x / unit) * unit).astype(x.dtype)
    return result


def expected_group(x: Array, bits: int) -> Array:
    top = np.float32(2**bits - 1)
    minimum = np.float32(np.float16(x.min()))
    scale = np.float32(np.float16((x.max() - x.min()) / top))
    code = np.clip(np.rint((x - minimum) / scale), 0, top) if scale else np.zeros_like(x)
    result: Array = code * scale + minimum
    return result


def attention(
    query: Array, key: Array, value: Array, visible: Array, options: AttentionOptions, sink: float
) -> tuple[Array, float]:
    """Return weights and log-sum-exp in float64 of one query head; *sink* is the logit without a value."""
    score = key.astype(np.float64) @ query.astype(np.float64) * options.scale
    if options.softcap:
        score = options.softcap * np.tanh(score / options.softcap)
    most = max(score.max(initial=-1e9), sink)
    weight = np.where(visible, np.exp(score - most), 0)
    total = weight.sum() + np.exp(sink - most)
    return (weight / total, float(np.log(total) + most)) if total else (weight, -np.inf)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(("name", "heads", "head_dim", "block"), CASES)
def test_held_tokens_read_back_as_defined(name: str, heads: int, head_dim: int, block: int, order: Order) -> None:
    filled = fill(name, heads, head_dim, block, order)
    form = filled.cache.layout.format
    for sequence, keys, values in zip(sequences(filled.cache, filled.batch), filled.key, filled.value, strict=True):
        for prefix, tensor, held in (("k", form.key, keys), ("v", form.value, values)):
            first = min(form.sink_tokens, sequence.length)
            last = first + quantized_tokens(filled, prefix, sequence.length)
            read = sequence.dense(prefix).numpy()
            for head in range(heads):
                whole = held[:, head].numpy().copy()
                whole[first:last] = expected(whole[first:last], tensor)
                np.testing.assert_array_equal(read[head], whole)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(("name", "heads", "head_dim", "block"), CASES)
def test_pages_hold_codes_where_the_layout_says(name: str, heads: int, head_dim: int, block: int, order: Order) -> None:
    filled = fill(name, heads, head_dim, block, order)
    layout = filled.cache.layout
    pages = filled.cache.pages.numpy().reshape(-1, heads, layout.slab_bytes)
    for row, sequence in enumerate(sequences(filled.cache, filled.batch)):
        for prefix, tensor in (("k", layout.format.key), ("v", layout.format.value)):
            quantized = quantized_tokens(filled, prefix, sequence.length)
            read = sequence.dense(prefix).numpy()[:, min(layout.format.sink_tokens, sequence.length) :]
            for block_index in range(-(-quantized // block)):
                page = pages[int(filled.batch.block_tables[row, block_index])]
                start, stop = block_index * block, min(quantized, (block_index + 1) * block)
                for head in range(heads):
                    codes = page_codes(page[head], layout, prefix)
                    if tensor.code.is_float:
                        kind = torch.float8_e4m3fn if tensor.code is Code.E4M3 else torch.float8_e5m2
                        found = torch.from_numpy(codes.astype(np.uint8)).view(kind).float().numpy()
                    elif tensor.quantized:
                        levels = tensor.levels
                        scale = page_metadata(page[head], layout, f"{prefix}_scale", tensor) * np.float32(levels.unit)
                        found = np.array(levels.table, np.float32)[codes] * scale
                        found += (
                            page_metadata(page[head], layout, f"{prefix}_min", tensor)
                            if "min" in tensor.metadata
                            else scale * np.float32(-levels.centre)
                        )
                    else:
                        bits = torch.from_numpy(codes.astype(np.uint16).view(np.int16))
                        found = bits.view(TORCH_FLOAT[layout.float_type]).float().numpy()
                    np.testing.assert_array_equal(found[: stop - start], read[head, start:stop])


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(("name", "heads", "head_dim", "block"), CASES)
def test_dequantize_gives_the_held_tokens_and_zeros(
    name: str, heads: int, head_dim: int, block: int, order: Order
) -> None:
    filled = fill(name, heads, head_dim, block, order)
    key, value = dequantize(filled.cache, filled.batch)
    assert key.dtype == TORCH_FLOAT[filled.cache.layout.float_type]
    assert tuple(key.shape) == (len(LENGTHS), heads, max(LENGTHS), head_dim) == tuple(value.shape)
    for row, sequence in enumerate(sequences(filled.cache, filled.batch)):
        for dense, prefix in ((key, "k"), (value, "v")):
            assert torch.equal(dense[row, :, : sequence.length], sequence.dense(prefix).to(dense.dtype))
            assert not dense[row, :, sequence.length :].any()


@pytest.mark.parametrize("extras", ["plain", "window", "softcap", "sink", "positions", "all"])
@pytest.mark.parametrize(("name", "heads", "head_dim", "block"), CASES[1::3])
def test_decode_is_attention(name: str, heads: int, head_dim: int, block: int, extras: str) -> None:
    filled = fill(name, heads, head_dim, block)
    queries, ratio, rows = 3, 2, len(LENGTHS)
    generator = torch.Generator().manual_seed(11)
    query = torch.randn(rows, queries, heads * ratio, head_dim, generator=generator)
    options = AttentionOptions(
        scale=head_dim**-0.5,
        window=40 if extras in ("window", "all") else None,
        softcap=1.5 if extras in ("softcap", "all") else None,
    )
    sinks = torch.randn(heads * ratio, generator=generator) if extras in ("sink", "all") else None
    positions = torch.arange(queries, dtype=torch.int32) - queries + filled.batch.lengths[:, None]
    if extras in ("positions", "all"):
        positions = torch.randint(-2, max(LENGTHS) + 9, (rows, queries), generator=generator, dtype=torch.int32)
    result = decode(
        filled.cache,
        filled.batch,
        query,
        options,
        sink_logits=sinks,
        positions=positions if extras in ("positions", "all") else None,
        received=True,
        lse=True,
    )
    assert result.received is not None
    assert result.lse is not None
    received = np.zeros(result.received.shape)
    for row, sequence in enumerate(sequences(filled.cache, filled.batch)):
        key, value = sequence.dense("k").numpy(), sequence.dense("v").numpy()
        token = np.arange(sequence.length)
        for column, head in np.ndindex(queries, heads * ratio):
            at = int(positions[row, column])
            visible = (token <= at) & (token > at - (options.window or 10**9))
            sink = -np.inf if sinks is None else float(sinks[head])
            with np.errstate(invalid="ignore"):
                weight, lse = attention(
                    query[row, column, head].numpy(), key[head // ratio], value, visible, options, sink
                )
            output = weight @ value[head // ratio].astype(np.float64)
            received[row, head, : sequence.length] += weight
            np.testing.assert_allclose(result.output[row, column, head].numpy(), output, atol=3e-6)
            np.testing.assert_allclose(result.lse[row, column, head].numpy(), lse, atol=3e-6)
    np.testing.assert_allclose(result.received.numpy(), received, atol=3e-6)


@pytest.mark.parametrize(
    "name", ["int8", "int4", "int2", "k4v2-g32-r8", "kivi-k2v4-g32-r5-s3", "kivi-paper", "fp8_e4m3-r5-s3"]
)
def test_one_token_at_a_time_leaves_the_same_cache(name: str) -> None:
    layout = KVLayout(format=parse(name), kv_heads=2, head_dim=48, block_tokens=32)
    lengths = (70, 41)
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(sum(lengths), 2, 48, generator=generator) for _ in range(2))
    caches = []
    for steps in (1, 7, 70):
        cache, batch = empty(layout, lengths, torch.Generator().manual_seed(5))
        for first in range(0, 70, steps):
            counts = torch.tensor([max(0, min(steps, length - first)) for length in lengths], dtype=torch.int32)
            rows = torch.cat(
                [
                    start + torch.arange(first, first + count)
                    for start, count in zip((0, lengths[0]), counts.tolist(), strict=True)
                ]
            )
            append(cache, batch, key[rows], value[rows], counts)
            batch = batch.after(counts)
        caches.append((cache, batch))
    whole, batch = caches.pop()
    for cache, _ in caches:
        assert torch.equal(cache.pages, whole.pages)
        assert torch.equal(cache.sinks, whole.sinks)
        for one, other in zip(sequences(cache, batch), sequences(whole, batch), strict=True):
            assert torch.equal(one.dense("k"), other.dense("k"))
            assert torch.equal(one.dense("v"), other.dense("v"))


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "k4v2-g32", "kivi-k2v4-g32", "kivi-k8v8-g32"])
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -3.140625, 1000.0, -(2.0**-14), 57344.0])
def test_constant_groups_are_exact(name: str, number: float) -> None:
    layout = KVLayout(format=parse(name), kv_heads=1, head_dim=40, block_tokens=32)
    cache, batch = empty(layout, (64,), torch.Generator())
    values = torch.full((64, 1, 40), number)
    append(cache, batch, values, values, torch.tensor([64], dtype=torch.int32))
    held = sequences(cache, batch.after(torch.tensor([64], dtype=torch.int32)))[0]
    assert (held.dense("k") == number).all()
    assert (held.dense("v") == number).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38, -7e4])
@pytest.mark.parametrize("name", ["int4", "k2v8-g32", "kivi-k4v2-g32", "kivi-paper-k2v2-g32-r32"])
def test_what_fp16_metadata_cannot_hold_poisons_its_own_group(name: str, number: float) -> None:
    layout = KVLayout(format=parse(name), kv_heads=2, head_dim=40, block_tokens=32)
    clean, poisoned = (torch.randn(64, 2, 40, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    poisoned[9, 1, 35] = number
    dense = []
    for values, count in ((clean, 0), (poisoned, 2)):
        cache, batch = empty(layout, (64,), torch.Generator())
        counts = torch.tensor([64], dtype=torch.int32)
        assert append(cache, batch, values, values, counts) == count
        dense.append(sequences(cache, batch.after(counts))[0])
    for prefix, tensor in (("k", layout.format.key), ("v", layout.format.value)):
        whole, damaged = dense[0].dense(prefix), dense[1].dense(prefix)
        expected_nan = torch.zeros(2, 64, 40, dtype=torch.bool)
        if tensor.axis is Axis.CHANNEL:
            expected_nan[1, :32, 35] = True
        else:
            expected_nan[1, 9, 32 if tensor.group_size else 0 :] = True
        assert torch.equal(damaged.isnan(), expected_nan)
        assert torch.equal(damaged[~expected_nan], whole[~expected_nan])


def test_a_16_bit_nan_is_stored_as_it_is() -> None:
    layout = KVLayout(format=parse("int4-r16-s2"), kv_heads=1, head_dim=32, block_tokens=16)
    cache, batch = empty(layout, (10,), torch.Generator())
    values = torch.zeros(10, 1, 32)
    values[1, 0, 3] = values[8, 0, 5] = torch.nan
    counts = torch.tensor([10], dtype=torch.int32)
    assert append(cache, batch, values, values, counts) == 0
    held = sequences(cache, batch.after(counts))[0].dense("k")
    assert held.isnan().nonzero().tolist() == [[0, 1, 3], [0, 8, 5]]


def test_a_poisoned_token_outside_the_window_leaves_the_answer_finite() -> None:
    layout = KVLayout(format=parse("int4"), kv_heads=1, head_dim=32, block_tokens=16)
    cache, batch = empty(layout, (40,), torch.Generator())
    values = torch.randn(40, 1, 32, generator=torch.Generator().manual_seed(1))
    values[3] = torch.nan
    counts = torch.tensor([40], dtype=torch.int32)
    assert append(cache, batch, values, values, counts) == 2
    query = torch.ones(1, 1, 1, 32)
    inside = decode(cache, batch.after(counts), query, AttentionOptions(scale=0.1, window=37))
    outside = decode(cache, batch.after(counts), query, AttentionOptions(scale=0.1, window=36))
    assert inside.output.isnan().all()
    assert outside.output.isfinite().all()
