"""Calls that tempt a kernel to read or write where it must not, or to divide by nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvplan_kernels.append import cpu as append_cpu
from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.cases import Case
from kvplan_kernels.decode import cpu as decode_cpu
from kvplan_kernels.decode.reference import decode
from kvplan_kernels.dequantize import cpu as dequantize_cpu
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import FloatType, UnsupportedError, parse
from kvplan_kernels.inputs import make_inputs
from kvplan_kernels.layout import KVLayout

VARIANT = "KVPLAN_CPU_VARIANT"
FORMATS = ["bf16", "int8", "k4v2-g32", "k2v8-g64-r20-s4", "kivi-k4v2-g32-r16", "kivi-k2v4-g32", "kivi-paper"]
OPTIONS = AttentionOptions(scale=0.125)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def layout_of(name: str, head_dim: int = 64, *, float_type: FloatType = FloatType.BF16) -> KVLayout:
    return KVLayout(format=parse(name), kv_heads=2, head_dim=head_dim, block_tokens=32, float_type=float_type)


def held(layout: KVLayout, key: Tensor, value: Tensor) -> tuple[LayerCache, Batch, int]:
    """Return a cache of one sequence that holds *key* and *value*, [tokens, kv_heads, head_dim]."""
    tokens = key.shape[0]
    cache = LayerCache.allocate(layout, blocks=layout.blocks(tokens) + 1, slots=2)
    for buffer in (cache.pages, cache.ring, cache.sinks):
        buffer.fill_(0xFF)
    table = torch.arange(layout.blocks(tokens), 0, -1, dtype=torch.int32)[None]
    batch = Batch(block_tables=table, slots=int32(1), lengths=int32(0))
    poisoned = append(cache, batch, key, value, int32(tokens))
    return cache, batch.after(int32(tokens)), poisoned


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*FORMATS, "kivi-k2v4-g32-b2"])
@pytest.mark.parametrize("count", [1, 4, 40])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_poison_is_counted_and_stored_alike(
    name: str, count: int, number: float, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name, 72)
    key, value = normal(300, 2, 72, seed=1).bfloat16(), normal(300, 2, 72, seed=2).bfloat16()
    spots = torch.Generator().manual_seed(count)
    for values in (key, value):
        values.view(-1)[torch.randint(values.numel(), (count,), generator=spots)] = number
    expected, batch, poisoned = held(layout, key, value)
    assert bool(poisoned) == (name != "bf16")
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        cache = LayerCache.allocate(layout, blocks=expected.pages.shape[0], slots=2)
        for buffer in (cache.pages, cache.ring, cache.sinks):
            buffer.fill_(0xFF)
        before = replace(batch, lengths=int32(0))
        assert append_cpu.append(cache, before, key, value, int32(300)) == poisoned
        assert torch.equal(cache.pages, held(layout, key, value)[0].pages)


@pytest.mark.parametrize("name", FORMATS[1:])
def test_a_poisoned_group_reaches_its_own_head_and_nothing_else(
    name: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name)
    key, value = normal(300, 2, 64, seed=1), normal(300, 2, 64, seed=2)
    query = normal(1, 2, 6, 64, seed=3)
    clean, batch, _ = held(layout, key, value)
    key[40, 1, 5] = torch.nan
    cache, batch, poisoned = held(layout, key, value)
    assert poisoned == 1
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        before = decode_cpu.decode(clean, batch, query, OPTIONS).output
        after = decode_cpu.decode(cache, batch, query, OPTIONS).output
        assert torch.equal(before[:, :, :3], after[:, :, :3])
        assert after[:, :, 3:].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_a_poisoned_value_reaches_its_own_channels_and_nothing_else(
    name: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name)
    key, value = normal(300, 2, 64, seed=1), normal(300, 2, 64, seed=2)
    query = normal(1, 1, 4, 64, seed=3)
    value[40, 1, 5] = torch.nan
    cache, batch, _ = held(layout, key, value)
    definition = decode(cache, batch, query, OPTIONS).output
    assert 0 < definition.isnan().sum() <= 2 * 64
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS).output
        assert torch.equal(found.isnan(), definition.isnan())
        torch.testing.assert_close(found, definition, rtol=0, atol=0.02, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("window", [1, 5, 16, 33, 200])
def test_what_a_query_may_not_see_leaves_it_finite(
    name: str, window: int, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name)
    key, value, query = normal(300, 2, 64, seed=1), normal(300, 2, 64, seed=2), normal(1, 3, 4, 64, seed=3)
    group = 32 if "kivi" in name else 1
    visible_first = (210 - window + 1) // group * group - (0 if group == 1 else group)
    key[: max(0, visible_first)] = torch.nan
    value[: max(0, 210 - window + 1)] = torch.nan
    value[213:] = torch.nan
    cache, batch, _ = held(layout, key, value)
    options = AttentionOptions(scale=0.125, window=window)
    positions = int32(210, 211, 212)[None]
    definition = decode(cache, batch, query, options, positions=positions).output
    assert definition.isfinite().all()
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, options, positions=positions).output
        torch.testing.assert_close(found, definition, rtol=0, atol=0.02)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("zero", ["query", "key", "value", "all"])
def test_zeros_are_no_division(
    name: str, zero: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, value, query = normal(200, 2, 64, seed=1), normal(200, 2, 64, seed=2), normal(1, 2, 8, 64, seed=3)
    for part, tensor in (("key", key), ("value", value), ("query", query)):
        if zero in (part, "all"):
            tensor.zero_()
    cache, batch, _ = held(layout_of(name), key, value)
    definition = decode(cache, batch, query, OPTIONS)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS, received=True)
        torch.testing.assert_close(found.output, definition.output, rtol=0, atol=0.01)
        if zero in ("value", "all"):
            assert not found.output.any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_huge_scores_neither_vanish_nor_overflow(
    name: str, sign: float, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, query = torch.full((200, 2, 64), 100.0 * sign), torch.full((1, 1, 4, 64), 100.0)
    value = normal(200, 2, 64, seed=2)
    cache, batch, _ = held(layout_of(name), key, value)
    logits = torch.full((4,), 80_000.0 * sign)
    definition = decode(cache, batch, query, OPTIONS, sink_logits=logits)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS, sink_logits=logits)
        torch.testing.assert_close(found.output, definition.output, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_query_that_is_no_number_leaves_the_others_alone(
    name: str, number: float, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, batch, _ = held(layout_of(name), normal(200, 2, 64, seed=1), normal(200, 2, 64, seed=2))
    query = normal(1, 3, 4, 64, seed=3)
    definition = decode(cache, batch, query, OPTIONS).output
    query[0, 1, 2, 9] = number
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS).output
        assert found[0, 1, 2].isnan().all()
        found[0, 1, 2] = definition[0, 1, 2]
        torch.testing.assert_close(found, definition, rtol=0, atol=0.01)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("part", ["key", "value"])
def test_a_poisoned_newest_token_reaches_only_the_query_that_sees_it(
    name: str, part: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 288  # whole groups of every format
    key, value = normal(length, 2, 64, seed=1), normal(length, 2, 64, seed=2)
    {"key": key, "value": value}[part][-1] = torch.nan
    cache, batch, _ = held(layout_of(name), key, value)
    query = normal(1, 32, 4, 64, seed=3)
    behind = 0 if name != "kivi-k2v4-g32" or part == "value" else 31  # its last group of keys is poisoned whole
    positions = (torch.arange(32, dtype=torch.int32) + length - 32 - behind)[None]
    positions[0, -1] = length - 1
    definition = decode(cache, batch, query, OPTIONS, positions=positions).output
    assert definition[0, :-1].isfinite().all()
    assert definition[0, -1].isnan().any()
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS, positions=positions).output
        assert torch.equal(found.isnan(), definition.isnan())
        torch.testing.assert_close(found, definition, rtol=0, atol=0.02, equal_nan=True)


@pytest.mark.parametrize("name", ["int8", "kivi-k4v2-g32-r16"])
def test_pages_beyond_two_gibibytes_are_reached(
    name: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout(format=parse(name), kv_heads=8, head_dim=256, block_tokens=256)
    blocks = 2**32 // layout.page_bytes + 3
    pages = torch.from_numpy(np.zeros((blocks, layout.page_bytes), np.uint8))  # mapped, not touched
    slot = torch.zeros(1, layout.ring_bytes, dtype=torch.uint8)
    cache = LayerCache(layout=layout, pages=pages, ring=slot, sinks=torch.zeros(1, 0, dtype=torch.uint8))
    batch = Batch(block_tables=int32(blocks - 1, 1)[None], slots=int32(0), lengths=int32(0))
    key, value, query = normal(300, 8, 256, seed=1), normal(300, 8, 256, seed=2), normal(1, 1, 8, 256, seed=3)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        append_cpu.append(cache, batch, key, value, int32(300))
        definition = decode(cache, batch.after(int32(300)), query, AttentionOptions(scale=0.06))
        found = decode_cpu.decode(cache, batch.after(int32(300)), query, AttentionOptions(scale=0.06))
        torch.testing.assert_close(found.output, definition.output, rtol=0, atol=0.01)
        dense = dequantize_cpu.dequantize(cache, batch.after(int32(300)))
        assert torch.equal(dense[0], dequantize(cache, batch.after(int32(300)))[0])
    assert pages[-1].any()


@pytest.mark.parametrize("logit", [-1e4, 0.0, 30.0, 1e4])
def test_a_sink_logit_of_any_size_only_takes_its_share(
    logit: float, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, batch, _ = held(layout_of("int8"), normal(90, 2, 64, seed=1), normal(90, 2, 64, seed=2))
    query = normal(1, 2, 4, 64, seed=3)
    logits = torch.tensor([logit, 0.0, logit, -logit])
    definition = decode(cache, batch, query, OPTIONS, sink_logits=logits, received=True)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        found = decode_cpu.decode(cache, batch, query, OPTIONS, sink_logits=logits, received=True)
        torch.testing.assert_close(found.output, definition.output, rtol=0, atol=0.005)
        torch.testing.assert_close(found.received, definition.received, rtol=0, atol=0.005)


@pytest.mark.parametrize("name", FORMATS)
def test_strided_tensors_are_read_as_they_are(
    name: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name)
    both = normal(200, 4, 128, seed=1)
    key, value = both[:, ::2, :64], both[:, 1::2, 64:]
    query = normal(4, 1, 3, 64, seed=3).permute(1, 2, 0, 3)
    cache, batch, _ = held(layout, key, value)
    definition = decode(cache, batch, query, OPTIONS).output
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        other = LayerCache.allocate(layout, blocks=cache.pages.shape[0], slots=2)
        for buffer in (other.pages, other.ring, other.sinks):
            buffer.fill_(0xFF)
        append_cpu.append(other, replace(batch, lengths=int32(0)), key, value, int32(200))
        assert torch.equal(other.pages, cache.pages)
        assert torch.equal(other.ring, cache.ring)
        torch.testing.assert_close(
            decode_cpu.decode(other, batch, query, OPTIONS).output, definition, rtol=0, atol=0.01
        )


@pytest.mark.parametrize("name", FORMATS)
def test_no_sequence_and_no_token_are_no_error(
    name: str, variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_of(name)
    cache = LayerCache.allocate(layout, blocks=1, slots=1)
    nobody = Batch(block_tables=torch.zeros(0, 0, dtype=torch.int32), slots=int32(), lengths=int32())
    nothing = Batch(block_tables=torch.zeros(1, 0, dtype=torch.int32), slots=int32(0), lengths=int32(0))
    none = torch.zeros(0, 2, 64)
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        assert append_cpu.append(cache, nobody, none, none, int32()) == 0
        assert append_cpu.append(cache, nothing, none, none, int32(0)) == 0
        assert decode_cpu.decode(cache, nobody, torch.zeros(0, 1, 2, 64), OPTIONS).output.shape == (0, 1, 2, 64)
        result = decode_cpu.decode(cache, nothing, torch.ones(1, 1, 2, 64), OPTIONS, received=True)
        assert not result.output.any()
        assert result.received is not None
        assert result.received.shape == (1, 2, 0)
        assert dequantize_cpu.dequantize(cache, nothing)[0].shape == (1, 2, 0, 64)
    assert not cache.pages.any()


def test_threads_change_nothing_beyond_rounding(variants: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(format="int4", kv_heads=1, lengths=(3000, 5), queries=2, received=True)
    inputs = make_inputs(case)
    inputs.fill()
    for variant in variants:
        monkeypatch.setenv(VARIANT, variant)
        results = [
            decode_cpu.decode(inputs.cache, inputs.batch, inputs.query, inputs.options, received=True, threads=threads)
            for threads in (1, 1, 2, 7)
        ]
        assert torch.equal(results[0].output, results[1].output)
        for other in results[2:]:
            torch.testing.assert_close(other.output, results[0].output, rtol=0, atol=2e-3)
            torch.testing.assert_close(other.received, results[0].received, rtol=0, atol=1e-4)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("block 9 of", {"block_tables": [[0, 9]]}),
    ("block -1 of", {"block_tables": [[-1, 0]]}),
    ("take 2 blocks", {"block_tables": [[0]]}),
    ("slot 1 of 1", {"slots": [1]}),
    ("slot -1 of 1", {"slots": [-1]}),
    ("-1 tokens", {"lengths": [-1]}),
]


@pytest.mark.parametrize("module", ["reference", "cpu"])
@pytest.mark.parametrize(("says", "changes"), REFUSED)
def test_a_batch_that_leads_outside_is_refused(
    module: str, says: str, changes: dict[str, Any], variants: tuple[str, ...]
) -> None:
    cache = LayerCache.allocate(layout_of("int4-r8-s2"), blocks=3, slots=1)
    fields = {"block_tables": [[0, 1]], "slots": [0], "lengths": [50], **changes}
    batch = Batch(**{name: torch.tensor(value, dtype=torch.int32) for name, value in fields.items()})
    key = torch.zeros(1, 2, 64)
    append_call, decode_call, dequantize_call = (
        (append, decode, dequantize)
        if module == "reference"
        else (append_cpu.append, decode_cpu.decode, dequantize_cpu.dequantize)
    )
    assert variants
    with pytest.raises(UnsupportedError):
        append_call(cache, batch, key, key, int32(1))
    with pytest.raises(UnsupportedError):
        decode_call(cache, batch, torch.zeros(1, 1, 2, 64), OPTIONS)
    with pytest.raises(UnsupportedError):
        dequantize_call(cache, batch)
    if module == "reference":
        with pytest.raises(UnsupportedError, match=says):
            dequantize(cache, batch)


@pytest.mark.parametrize("module", ["reference", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {"query": torch.zeros(1, 33, 2, 64)},
        {"query": torch.zeros(1, 0, 2, 64)},
        {"query": torch.zeros(1, 1, 3, 64)},
        {"query": torch.zeros(1, 1, 34, 64)},
        {"query": torch.zeros(1, 1, 2, 32)},
        {"query": torch.zeros(2, 1, 2, 64)},
        {"query": torch.zeros(1, 1, 2, 64, dtype=torch.float64)},
        {"query": torch.zeros(1, 2, 64)},
        {"sink_logits": torch.zeros(3)},
        {"sink_logits": torch.zeros(2, dtype=torch.float16)},
        {"positions": torch.zeros(1, 2, dtype=torch.int32)},
        {"positions": torch.zeros(1, 1, dtype=torch.int64)},
        {"options": AttentionOptions(scale=1.0, window=0)},
        {"options": AttentionOptions(scale=1.0, softcap=0.0)},
        {"options": AttentionOptions(scale=1.0, softcap=-1.0)},
    ],
)
def test_what_decode_does_not_take_is_refused(module: str, changes: dict[str, Any], variants: tuple[str, ...]) -> None:
    cache = LayerCache.allocate(layout_of("int4"), blocks=3, slots=1)
    batch = Batch(block_tables=int32(0, 1)[None], slots=int32(0), lengths=int32(50))
    call: Any = decode if module == "reference" else decode_cpu.decode
    arguments = {"query": torch.zeros(1, 1, 2, 64), "options": OPTIONS, **changes}
    assert variants
    with pytest.raises(UnsupportedError):
        call(cache, batch, **arguments)


@pytest.mark.parametrize("module", ["reference", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {"key": torch.zeros(2, 2, 64)},
        {"value": torch.zeros(3, 1, 64)},
        {"value": torch.zeros(3, 2, 32)},
        {"key": torch.zeros(3, 2, 64, dtype=torch.float64)},
        {"counts": torch.tensor([3])},
        {"counts": int32(-3)},
        {"counts": int32(3, 0)},
        {"counts": int32(60), "key": torch.zeros(60, 2, 64), "value": torch.zeros(60, 2, 64)},
    ],
)
def test_what_append_does_not_take_is_refused_and_nothing_is_written(
    module: str, changes: dict[str, Any], variants: tuple[str, ...]
) -> None:
    cache = LayerCache.allocate(layout_of("int4-r8-s2"), blocks=3, slots=1)
    batch = Batch(block_tables=int32(0, 1)[None], slots=int32(0), lengths=int32(50))
    call: Any = append if module == "reference" else append_cpu.append
    arguments = {"key": torch.ones(3, 2, 64), "value": torch.ones(3, 2, 64), "counts": int32(3), **changes}
    assert variants
    with pytest.raises(UnsupportedError):
        call(cache, batch, **arguments)
    assert not cache.pages.any()
    assert not cache.ring.any()


@pytest.mark.parametrize("module", ["reference", "cpu"])
def test_two_sequences_of_an_append_may_not_share_a_slot(module: str, variants: tuple[str, ...]) -> None:
    cache = LayerCache.allocate(layout_of("int4-r8"), blocks=3, slots=2)
    batch = Batch(block_tables=int32(0, 1)[:, None].contiguous(), slots=int32(1, 1), lengths=int32(0, 0))
    call: Any = append if module == "reference" else append_cpu.append
    assert variants
    with pytest.raises(UnsupportedError):
        call(cache, batch, torch.zeros(2, 2, 64), torch.zeros(2, 2, 64), int32(1, 1))


@pytest.mark.parametrize("module", ["reference", "cpu"])
def test_buffers_of_another_layout_are_refused(module: str, variants: tuple[str, ...]) -> None:
    cache = LayerCache.allocate(layout_of("int4"), blocks=3, slots=2)
    batch = Batch(block_tables=int32(0, 1)[None], slots=int32(0), lengths=int32(50))
    call: Any = decode if module == "reference" else decode_cpu.decode
    assert variants
    for changed in (
        replace(cache, layout=layout_of("int8")),
        replace(cache, layout=layout_of("int4-r8")),
        replace(cache, pages=cache.pages.to(torch.int32)),
        replace(cache, pages=cache.pages[:, ::2]),
    ):
        with pytest.raises(UnsupportedError):
            call(changed, batch, torch.zeros(1, 1, 2, 64), OPTIONS)
