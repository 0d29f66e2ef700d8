"""The Triton kernels against the reference: in Triton's interpreter, or with KVPLAN_TEST_GPU every case on a GPU."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvplan_kernels.append import gpu as gpu_append
from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.cases import (
    STORED_NAMES,
    Case,
    Data,
    Tables,
    all_cases,
    covering_cases,
    float_code_cases,
    stored_cases,
)
from kvplan_kernels.decode import gpu
from kvplan_kernels.decode.reference import decode
from kvplan_kernels.decode.result import DecodeResult
from kvplan_kernels.dequantize import gpu as gpu_dequantize
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import FloatType, UnsupportedError, parse
from kvplan_kernels.gpu import targets
from kvplan_kernels.inputs import Inputs, make_inputs
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.recorded import CALLS, KERNELS, Call, launches_of

ON_GPU = "KVPLAN_TEST_GPU" in os.environ
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value", "ignore:All-NaN slice")

COST_MAX = 30_000
"""Query rows times tokens times sequences: what the interpreter takes a second for."""
RECEIVED_COST_MAX = 5_000
READ_BACK_MAX = 300
"""KV heads times tokens of what is read back in the interpreter."""
STEP = 36
TOKENS_MAX, SEQUENCES_MAX = 120, 3
CLASSES = (
    *(Case(format=name, lengths=(300, 41), head_dim=128) for name in ("bf16", "int8", "int4", "int2", "k8v4", "k2v8")),
    *(Case(format=f"k4v4-g{group}-r20-s4", lengths=(333,), head_dim=128) for group in (32, 64, 128)),
    *(Case(format=f"kivi-k4v2-g{group}-r20", lengths=(400,), block_tokens=128) for group in (32, 64, 128)),
    Case(format="kivi-paper", lengths=(127, 128, 129, 300), block_tokens=32),
    Case(format="int4", lengths=(700,), head_dim=80, gqa_ratio=5, queries=2, window=90, softcap=2.5, sink_logits=True),
    Case(format="k2v4-r1", lengths=(200, 0, 1, 2), tables=Tables.SHARED, positions=True, queries=3),
    Case(format="kivi-k2v4-g32-r20-s21", lengths=(210, 5), queries=2, window=150, softcap=2.5, received=True),
    Case(format="int8", lengths=(1500,), data=Data.SPREAD, block_tokens=16),
    Case(format="int4", lengths=(1500,), data=Data.FLAT, block_tokens=256),
    Case(format="k8v8-g64", lengths=(500,), data=Data.OFFSET, head_dim=256, gqa_ratio=1, kv_heads=1),
    Case(format="fp8_e4m3", lengths=(300, 41), head_dim=128),
    Case(format="fp8_e4m3-r20-s4", lengths=(210, 5), head_dim=80, queries=2, window=90, softcap=2.5, received=True),
    Case(format="fp8_e4m3", lengths=(150, 0, 7), data=Data.TIES, block_tokens=16, tables=Tables.SHARED, positions=True),
    Case(format="fp8_e4m3", lengths=(300,), data=Data.EXTREME, head_dim=256, gqa_ratio=1, kv_heads=1),
)


def cost(case: Case) -> int:
    return case.queries * case.gqa_ratio * case.kv_heads * sum(length + 50 for length in case.lengths)


def chosen() -> list[Case]:
    if ON_GPU:
        return [*CLASSES, *(case for case in all_cases() if not case.speed)]
    some = (*covering_cases()[::STEP], *float_code_cases()[::STEP])
    covering = [case for case in some if cost(case) <= COST_MAX]
    return [*CLASSES, *(replace(c, received=c.received and cost(c) <= RECEIVED_COST_MAX) for c in covering)]


@pytest.fixture(autouse=True, scope="module")
def _there_is_a_device() -> None:
    assert targets.missing() is None, targets.missing()


def moved(cache: LayerCache) -> LayerCache:
    """Return a copy of *cache* on the device under test."""
    pages, ring, sinks = (tensor.to(DEVICE, copy=True) for tensor in (cache.pages, cache.ring, cache.sinks))
    return replace(cache, pages=pages, ring=ring, sinks=sinks)


def moved_batch(batch: Batch) -> Batch:
    return Batch(
        block_tables=batch.block_tables.to(DEVICE), slots=batch.slots.to(DEVICE), lengths=batch.lengths.to(DEVICE)
    )


def decoded(
    cache: LayerCache,
    batch: Batch,
    query: Tensor,
    options: AttentionOptions,
    *,
    received: bool = False,
    lse: bool = False,
    **extras: Tensor | None,
) -> DecodeResult:
    """Return what the device makes of a call, on the CPU."""
    there = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in extras.items()}
    found = gpu.decode(moved(cache), moved_batch(batch), query.to(DEVICE), options, received=received, lse=lse, **there)
    told = {name: getattr(found, name) for name in ("received", "lse")}
    return DecodeResult(
        output=found.output.cpu(), **{name: None if told is None else told.cpu() for name, told in told.items()}
    )


def appended_to(cache: LayerCache, batch: Batch, key: Tensor, value: Tensor, counts: Tensor) -> int:
    """Append on the device, and bring the bytes back into *cache*."""
    there = moved(cache)
    poisoned = gpu_append.append(there, moved_batch(batch), key.to(DEVICE), value.to(DEVICE), counts.to(DEVICE))
    for name in ("pages", "ring", "sinks"):
        getattr(cache, name).copy_(getattr(there, name))
    return poisoned


def filled(case: Case) -> Inputs:
    inputs = make_inputs(case, Order.ROWS)
    inputs.fill()
    return inputs


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in chosen()])
def test_decode_agrees(case: Case, assert_decode_agrees: Callable[..., None]) -> None:
    inputs = filled(case)
    arguments = (inputs.cache, inputs.batch, inputs.query, inputs.options)
    extras = {"sink_logits": inputs.sink_logits, "positions": inputs.positions}
    definition = decode(*arguments, received=case.received, lse=True, **extras)
    found = decoded(*arguments, received=case.received, lse=True, **extras)
    assert found.output.shape == definition.output.shape
    assert_decode_agrees(case, inputs, found, definition, "triton", "triton")


@dataclass(frozen=True)
class Way:
    """How K and V may be stored, by the parts of a name."""

    key: str
    value: str
    group: str
    number: str
    fit: str
    boosts: str

    @property
    def name(self) -> str:
        fit = "" if self.fit and "1" in (self.key, self.value) else self.fit
        boosts = self.boosts if fit == "kivi-" and self.key != "8" else ""
        return f"{fit}k{self.key}v{self.value}{self.group}{self.number}{boosts}"


WAYS = st.builds(
    Way,
    key=st.sampled_from("1234568"),
    value=st.sampled_from("1234568"),
    group=st.sampled_from(("", "-g16", "-g32")),
    number=st.sampled_from(("", "-mbf16", "-mfp32", "-me4m3")),
    fit=st.sampled_from(("", "sym-", "kivi-")),
    boosts=st.sampled_from(("", "-b1", "-b3")),
).filter(lambda way: way.fit != "kivi-" or way.group != "")
SMALL = Case(format="int4", kv_heads=1, gqa_ratio=2, head_dim=40, block_tokens=32, lengths=(40,))
"""Few tokens in two pages; groups of 16 and 32 channels lie across planes."""
SLICED = ("nvfp4", "k8v8-g16-mfp32", "sym-k3v6-g16")


def assert_all_agree(case: Case, assert_decode_agrees: Callable[..., None]) -> None:
    """Hold append, dequantize and decode to their references, one token after the others."""
    inputs = make_inputs(case, Order.ROWS)
    cache, lengths = copied(inputs.cache), inputs.batch.lengths
    first = (lengths - 1).clamp(min=0)
    for batch, counts in ((inputs.empty, first), (inputs.empty.after(first), lengths - first)):
        rows = [torch.arange(n) + start for start, n in zip(batch.lengths.tolist(), counts.tolist(), strict=True)]
        key, value = inputs.key[torch.cat(rows)], inputs.value[torch.cat(rows)]
        poisoned = append(inputs.cache, batch, key, value, counts)
        assert appended_to(cache, batch, key, value, counts) == poisoned
        for name in ("pages", "ring", "sinks"):
            assert torch.equal(getattr(cache, name), getattr(inputs.cache, name)), (counts, name)
    read = gpu_dequantize.dequantize(moved(cache), moved_batch(inputs.batch))
    for one, definition in zip(read, dequantize(cache, inputs.batch), strict=True):
        assert torch.equal(bits_of(one), bits_of(definition))
    arguments = (inputs.cache, inputs.batch, inputs.query, inputs.options)
    extras = {"received": case.received, "lse": True, "positions": inputs.positions}
    assert_decode_agrees(case, inputs, decoded(*arguments, **extras), decode(*arguments, **extras), "triton", "triton")


EVERY_WAY = [
    pytest.param(index, id=name, marks=[] if ON_GPU or index % 2 == 0 else pytest.mark.slow)
    for index, name in enumerate(STORED_NAMES)
]


@pytest.mark.parametrize("index", EVERY_WAY)
def test_every_way_to_store_agrees(index: int, assert_decode_agrees: Callable[..., None]) -> None:
    name, shape = STORED_NAMES[index], index % 3
    case = replace(
        SMALL, format=f"{name}-r{shape}-s{2 * shape}", head_dim=(32, 40, 64)[shape],
        block_tokens=128 if "g128" in name else 64,
        lengths=((7,), (70,))["kivi" in name], received=shape == 0, positions=shape == 1,
        data=(Data.NORMAL, Data.OUTLIERS, Data.NORMAL, Data.OFFSET)[index // 3 % 4],
        float_type=tuple(FloatType)[index % 2],
    )  # fmt: skip
    assert_all_agree(case, assert_decode_agrees)


@pytest.mark.parametrize("name", SLICED)
def test_several_groups_of_a_plane_agree(name: str, assert_decode_agrees: Callable[..., None]) -> None:
    assert_all_agree(replace(SMALL, format=name, head_dim=128, lengths=(0, 9)), assert_decode_agrees)


@settings(deadline=None, max_examples=300 if ON_GPU else 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(way=WAYS, dim=st.sampled_from((32, 40)))
def test_random_ways_to_store_agree(way: Way, dim: int, assert_decode_agrees: Callable[..., None]) -> None:
    tokens = 37 if way.fit == "kivi-" else 7
    assert_all_agree(replace(SMALL, format=f"{way.name}-s1", head_dim=dim, lengths=(tokens,)), assert_decode_agrees)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes minutes")
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in stored_cases()])
def test_stored_cases_agree(case: Case, assert_decode_agrees: Callable[..., None]) -> None:
    assert_all_agree(case, assert_decode_agrees)


def copied(cache: LayerCache) -> LayerCache:
    return replace(cache, pages=cache.pages.clone(), ring=cache.ring.clone(), sinks=cache.sinks.clone())


def appended() -> list[Case]:
    step = 1 if ON_GPU else STEP
    some = (*covering_cases()[2::step], *float_code_cases()[2::step])
    covering = [replace(case, received=False) for case in some]
    few = [case for case in covering if sum(case.lengths) <= TOKENS_MAX and len(case.lengths) <= SEQUENCES_MAX]
    short = [replace(case, lengths=tuple(min(length, 100) for length in case.lengths)) for case in CLASSES[::3]]
    return [*short, *few]


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in appended()])
def test_append_leaves_the_same_bytes(case: Case) -> None:
    inputs = make_inputs(case, Order.ROWS)
    cache = copied(inputs.cache)
    for batch, key, value, counts in inputs.appends():
        poisoned = append(inputs.cache, batch, key, value, counts)
        assert appended_to(cache, batch, key, value, counts) == poisoned
        for name in ("pages", "ring", "sinks"):
            assert torch.equal(getattr(cache, name), getattr(inputs.cache, name)), name


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bit patterns of 16-bit floats, the same one for every NaN: those are each device's own."""
    return tensor.cpu().view(torch.int16).masked_fill(tensor.cpu().isnan(), -1)


def read_back() -> list[Case]:
    short = [replace(case, kv_heads=1, lengths=(min(max(case.lengths), 170), 3)) for case in CLASSES[:-3]]
    covering = covering_cases()[3 :: 1 if ON_GPU else STEP]
    return [*short, *(case for case in covering if ON_GPU or case.kv_heads * sum(case.lengths) <= READ_BACK_MAX)]


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in read_back()])
def test_dequantize_gives_the_same_bits(case: Case) -> None:
    inputs = filled(case)
    found = gpu_dequantize.dequantize(moved(inputs.cache), moved_batch(inputs.batch))
    for one, definition in zip(found, dequantize(inputs.cache, inputs.batch), strict=True):
        assert (one.shape, one.dtype) == (definition.shape, definition.dtype)
        assert torch.equal(bits_of(one), bits_of(definition))


@pytest.mark.parametrize("name", ["bf16", "k8v2-g32-s5", "kivi-k4v2-g32-r16"])
def test_poison_is_read_back_where_it_is(name: str) -> None:
    cache, batch, _ = held(name, (78, 1, 5), keys=True)
    for one, definition in zip(
        gpu_dequantize.dequantize(moved(cache), moved_batch(batch)), dequantize(cache, batch), strict=True
    ):
        assert torch.equal(bits_of(one), bits_of(definition))


@pytest.mark.parametrize("tokens", [0, 3, 40, 110])
def test_dequantize_takes_as_many_tokens_as_the_caller_says(tokens: int) -> None:
    inputs = filled(Case(format="k2v4-r1-s5", lengths=(100, 3)))
    key, value = dequantize(inputs.cache, inputs.batch)
    found = gpu_dequantize.dequantize_tokens(moved(inputs.cache), moved_batch(inputs.batch), tokens)
    for one, definition in zip(found, (key, value), strict=True):
        wanted = torch.nn.functional.pad(definition, (0, 0, 0, max(0, tokens - 100)))[:, :, :tokens]
        assert torch.equal(bits_of(one), bits_of(wanted))


def test_no_sequence_reads_back_nothing() -> None:
    inputs = filled(Case(format="int4", lengths=(3,)))
    none = torch.zeros(0, dtype=torch.int32)
    nobody = Batch(block_tables=torch.zeros(0, 1, dtype=torch.int32), slots=none, lengths=none)
    assert [t.shape for t in gpu_dequantize.dequantize(moved(inputs.cache), moved_batch(nobody))] == [(0, 2, 0, 64)] * 2


@pytest.mark.parametrize("name", ["int8", "k2v4-g32", "kivi-k4v2-g32-r16", "fp8_e4m3"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_poison_is_counted_and_stored_alike(name: str, number: float) -> None:
    layout = KVLayout(format=parse(name), kv_heads=2, head_dim=72, block_tokens=32, order=Order.ROWS)
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn(100, 2, 72, generator=generator).bfloat16() for _ in range(2))
    key.view(-1)[torch.randint(key.numel(), (4,), generator=generator)] = number
    value.view(-1)[torch.randint(key.numel(), (4,), generator=generator)] = number
    table = torch.arange(layout.blocks(100), dtype=torch.int32)[None]
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(block_tables=table, slots=0 * one, lengths=0 * one)
    expected, found = (LayerCache.allocate(layout, blocks=layout.blocks(100), slots=1) for _ in range(2))
    expected_poison = append(expected, batch, key, value, 100 * one)
    assert appended_to(found, batch, key, value, 100 * one) == expected_poison
    overflows = bool(layout.format.key.metadata) or not math.isfinite(number)  # floats are as large as can be instead
    assert bool(expected_poison) == overflows
    assert torch.equal(found.pages, expected.pages)


@pytest.mark.parametrize("name", ["int8", "kivi-k4v2-g32-r16"])
def test_a_minimum_of_minus_zero_is_stored_as_plus_zero(name: str) -> None:
    layout = KVLayout(format=parse(name), kv_heads=1, head_dim=64, block_tokens=32, order=Order.ROWS)
    key = torch.full((64, 1, 64), -0.0, dtype=torch.bfloat16)
    key[::2, :, ::2] = 1.0
    table = torch.arange(layout.blocks(64), dtype=torch.int32)[None]
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(block_tables=table, slots=0 * one, lengths=0 * one)
    expected, found = (LayerCache.allocate(layout, blocks=layout.blocks(64), slots=1) for _ in range(2))
    assert append(expected, batch, key, key, 64 * one) == appended_to(found, batch, key, key, 64 * one) == 0
    assert torch.equal(found.pages, expected.pages)


def test_channels_as_large_and_poisoned_ones_are_boosted_alike() -> None:
    layout = KVLayout(format=parse("kivi-k2v2-g32-b2"), kv_heads=1, head_dim=40, block_tokens=32, order=Order.ROWS)
    key = torch.full((32, 1, 40), 2.0, dtype=torch.bfloat16)
    key[::2] = 1.0
    key[:, :, 7::9] = 3.0
    key[3, 0, 25], key[5, 0, 34], key[9, 0, 30] = 1e38, torch.inf, torch.nan
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(block_tables=torch.zeros(1, 1, dtype=torch.int32), slots=0 * one, lengths=0 * one)
    expected, found = (LayerCache.allocate(layout, blocks=1, slots=1) for _ in range(2))
    assert append(expected, batch, key, key, 32 * one) == appended_to(found, batch, key, key, 32 * one)
    assert torch.equal(found.pages, expected.pages)


@pytest.mark.skipif(ON_GPU, reason="the device decides about the splits there")
def test_what_is_inspected_is_what_a_call_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[targets.Launch] = []
    run = targets.Target.launch

    def kept(target: targets.Target, kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        run(replace(target, launches=launched), kernel, grid, *arguments, **named)
        run(target, kernel, grid, *arguments, **named)

    inputs = filled(Case(format="k2v4-r1-s5", lengths=(200, 200), queries=2, softcap=2.5, positions=True))
    call = Call(
        layout=inputs.cache.layout, batch=2, tokens=256, queries=2, gqa=4, query_type=torch.bfloat16, softcap=2.5,
        positions=True,
    )  # fmt: skip
    looked_at = [launch for op in ("received", "append", "dequantize") for launch in interpreted_launches(op, call)]
    table = inputs.batch.block_tables
    batch = replace(inputs.batch, block_tables=torch.cat([table, table], dim=1)[:, : call.layout.blocks(256)].clone())
    monkeypatch.setattr(targets.Target, "launch", kept)
    monkeypatch.setattr(gpu, "_longest", lambda *_: 256)
    gpu.decode(
        inputs.cache, batch, inputs.query, inputs.options, positions=inputs.positions, received=True
    )  # fmt: skip
    new, two = inputs.key[:4], torch.full((2,), 2, dtype=torch.int32)
    poisons = torch.zeros(1, dtype=torch.int32)
    gpu_append.append_counting(copied(inputs.cache), replace(batch, lengths=two), new, new, two, poisons, most=2)
    gpu_dequantize.dequantize_tokens(inputs.cache, batch, 256)
    assert [told(launch) for launch in launched] == [told(launch) for launch in looked_at]
    assert {launch.kernel.__name__ for launch in launched} == set(KERNELS) - {"fold_words"}
    assert set(CALLS) == {"decode", "received", "append", "dequantize", "read"}


def interpreted_launches(op: str, call: Call) -> list[targets.Launch]:
    programs = targets.target(torch.device("cpu")).programs
    return launches_of(op, call, multiprocessors=programs // targets.PROGRAMS_PER_MULTIPROCESSOR, arch="")


def told(launch: targets.Launch) -> tuple[Any, ...]:
    """Return what the compiler is told of a launch, and its grid: of tensors no more than their type."""
    arguments = {
        name: value.dtype if isinstance(value, Tensor) else (type(value), value)
        for name, value in launch.arguments.items()
    }
    return launch.kernel.__name__, launch.grid, arguments, launch.options


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("mxfp4", 6.0), ("nvfp4", 6.0), ("sym-int4", 7.0), ("int4", 15.0), ("llama.cpp:q8_0", 127.0),
        ("llama.cpp:q4_0", 8.0), ("llama.cpp:iq4_nl", 12.0),
    ],
)  # fmt: skip
def test_what_lies_halfway_between_two_levels_is_coded_alike(name: str, most: float) -> None:
    """The largest magnitude, of both signs, makes most scales a power of two, so that halves of a level are exact."""
    layout = KVLayout(format=parse(name), kv_heads=1, head_dim=32, block_tokens=32, order=Order.ROWS)
    key = (torch.arange(-48, 48) / 4).clamp(-most, most).view(3, 1, 32)
    key[:, :, ::16] = torch.tensor([most, -most, most]).view(3, 1, 1)
    key[0, :, 16] = -most  # as large as the first
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(block_tables=torch.zeros(1, 1, dtype=torch.int32), slots=0 * one, lengths=0 * one)
    expected, found = (LayerCache.allocate(layout, blocks=1, slots=1) for _ in range(2))
    append(expected, batch, key, -key, 3 * one)
    appended_to(found, batch, key, -key, 3 * one)
    assert torch.equal(found.pages, expected.pages)


def test_the_least_scales_are_read_back() -> None:
    inputs = filled(replace(SMALL, format="mxfp4", lengths=(5,), data=Data.DENORMAL))
    definition = dequantize(inputs.cache, inputs.batch)
    assert all(one.any() for one in definition)
    for one, expected in zip(
        gpu_dequantize.dequantize(moved(inputs.cache), moved_batch(inputs.batch)), definition, strict=True
    ):
        assert torch.equal(bits_of(one), bits_of(expected))


@pytest.mark.parametrize("most", [1, 70])
def test_append_takes_as_many_programs_as_the_longest_sequence_needs(most: int) -> None:
    layout = KVLayout(format=parse("kivi-k4v2-g32-r16"), kv_heads=1, head_dim=64, block_tokens=32, order=Order.ROWS)
    counts = torch.tensor([most, 1, 0], dtype=torch.int32)
    tables = torch.arange(3 * layout.blocks(200), dtype=torch.int32).view(3, -1)
    slots, lengths = torch.arange(3, dtype=torch.int32), torch.tensor([47, 110, 5], dtype=torch.int32)
    expected = LayerCache.allocate(layout, blocks=tables.numel(), slots=3)
    batch = Batch(block_tables=tables, slots=slots, lengths=0 * lengths)
    generator = torch.Generator().manual_seed(4)
    held = torch.randn(int(lengths.sum()), 1, 64, generator=generator).bfloat16()
    append(expected, batch, held, held, lengths)
    found, new = moved(expected), torch.randn(int(counts.sum()), 1, 64, generator=generator).bfloat16()
    append(expected, batch.after(lengths), new, new, counts)
    gpu_append.append_counting(
        found, moved_batch(batch.after(lengths)), new.to(DEVICE), new.to(DEVICE), counts.to(DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE), most=most,
    )  # fmt: skip
    for name in ("pages", "ring", "sinks"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize(("splits", "tokens"), [(1, 100), (2, 300), (5, 1500)])
def test_splits_meet_without_loss(splits: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = filled(Case(format="int4", lengths=(tokens,), data=Data.SPREAD, head_dim=64))
    monkeypatch.setattr(gpu, "split_count", lambda *_: splits)
    definition = decode(inputs.cache, inputs.batch, inputs.query, inputs.options).output
    found = decoded(inputs.cache, inputs.batch, inputs.query, inputs.options).output
    torch.testing.assert_close(found, definition, rtol=0, atol=0.02)


def held(name: str, poison: tuple[int, int, int], *, keys: bool) -> tuple[LayerCache, Batch, torch.Tensor]:
    layout = KVLayout(format=parse(name), kv_heads=2, head_dim=64, block_tokens=32, order=Order.ROWS)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(200, 2, 64, generator=generator) for _ in range(2))
    (key if keys else value)[poison] = torch.nan
    cache = LayerCache.allocate(layout, blocks=layout.blocks(200) + 1, slots=2)
    table = torch.arange(layout.blocks(200), 0, -1, dtype=torch.int32)[None]
    batch = Batch(block_tables=table, slots=torch.tensor([1], dtype=torch.int32), lengths=torch.zeros(1).int())
    counts = torch.tensor([200], dtype=torch.int32)
    append(cache, batch, key, value, counts)
    return cache, batch.after(counts), torch.randn(1, 3, 4, 64, generator=generator)


@pytest.mark.parametrize("name", ["bf16", "int8", "k4v2-g32", "kivi-k4v2-g32-r16", "kivi-paper", "fp8_e4m3"])
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("window", [None, 120])
def test_poison_reaches_who_sees_it_and_nobody_else(name: str, window: int | None, *, keys: bool) -> None:
    cache, batch, query = held(name, (78, 1, 5), keys=keys)
    options = AttentionOptions(scale=0.125, window=window)
    definition, found = (call(cache, batch, query, options).output for call in (decode, decoded))
    assert torch.equal(found.isnan(), definition.isnan())
    assert definition.isnan().any()
    assert not definition.isnan().all()
    torch.testing.assert_close(found, definition, rtol=0, atol=0.02, equal_nan=True)


def test_what_there_is_no_kernel_for_is_refused_with_the_reason() -> None:
    lanes = make_inputs(Case(format="int4", lengths=(20,)))
    with pytest.raises(UnsupportedError, match="read codes in rows, the cache holds them in lanes"):
        gpu.decode(lanes.cache, lanes.batch, lanes.query, lanes.options)


def test_more_sequences_than_a_launch_takes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="65536 sequences times KV heads"):
        targets.target(torch.device(DEVICE)).launch(None, (1, 65536))


@pytest.mark.parametrize(
    ("pairs", "tokens", "tile", "programs", "splits"),
    [
        (8, 32768, 128, 528, 64),
        (528, 32768, 128, 528, 1),
        (8, 100, 128, 528, 1),
        (1, 1024, 128, 528, 8),
        (136, 2048, 128, 528, 4),
    ],
)
def test_the_fewest_splits_that_fill_the_device(pairs: int, tokens: int, tile: int, programs: int, splits: int) -> None:
    assert gpu.split_count(pairs, tokens, tile, programs) == splits
