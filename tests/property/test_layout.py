import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.cache import LayerCache
from kvplan_kernels.format import KEY_VALUE_BITS, TOKEN_GROUPS, Axis, FloatType, UnsupportedError, parse
from kvplan_kernels.layout import SLAB_ALIGN_BYTES, KVLayout, Order
from kvplan_kernels.tensor_format import LLAMA_CPP, STORED

BITS = st.sampled_from(KEY_VALUE_BITS)
OWN = (
    *STORED,
    *(f"llama.cpp:{name}" for name in LLAMA_CPP),
    "fp8_e4m3/int4-g32",
    "k3v2-g32-o3",
    "nvfp4-o1",
    "llama.cpp:q8_0/q5_1",
)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    family = draw(st.sampled_from(("", "kivi-", "kivi-paper-", "own", "bf16", "fp16")))
    heads, head_dim, order = draw(st.integers(1, 4)), 8 * draw(st.integers(4, 32)), draw(st.sampled_from(Order))
    if family in ("bf16", "fp16"):
        block = 16 * draw(st.integers(1, 16))
        return KVLayout(
            format=parse(family),
            kv_heads=heads,
            head_dim=head_dim,
            block_tokens=block,
            float_type=FloatType(family),
            order=order,
        )
    kivi = family.startswith("kivi")
    group = draw(st.sampled_from(TOKEN_GROUPS if kivi else (*TOKEN_GROUPS, None)))
    if family == "own":
        group, name = None, draw(st.sampled_from(OWN))
    else:
        key_bits = draw(BITS)
        name = f"{family}k{key_bits}v{draw(BITS)}" + (f"-g{group}" if group else "")
        name += draw(st.sampled_from(("", "-mfp32", "-me4m3")))
        name += draw(st.sampled_from(("", "-b1", "-b3"))) if kivi and key_bits <= 6 else ""
    residual = (group or 0) * draw(st.integers(1, 3)) if family == "kivi-paper-" else draw(st.integers(0, 200))
    name += f"-r{residual}-s{draw(st.integers(0, 40))}"
    step = 32 if any(1 in tensor.planes for tensor in (parse(name).key, parse(name).value)) else 16
    step = max(step, group if kivi and group else 16)
    block = step * draw(st.integers(1, 256 // step))
    return KVLayout(format=parse(name), kv_heads=heads, head_dim=head_dim, block_tokens=block, order=order)


@given(layouts())
def test_sections_follow_one_another_inside_the_slab(layout: KVLayout) -> None:
    assert layout.sections[0].offset_bytes == 0
    for one, next_one in pairwise(layout.sections):
        assert next_one.offset_bytes == one.offset_bytes + one.nbytes
    last = layout.sections[-1]
    assert 0 <= layout.slab_bytes - last.offset_bytes - last.nbytes < SLAB_ALIGN_BYTES
    assert layout.slab_bytes % SLAB_ALIGN_BYTES == 0
    assert all(section.offset_bytes % section.item_bytes == 0 for section in layout.sections)
    assert all(section.nbytes == section.item_bytes * prod(section.shape) for section in layout.sections)


@given(layouts())
def test_codes_and_metadata_have_room_for_every_element(layout: KVLayout) -> None:
    tokens, dim = layout.block_tokens, layout.head_dim
    for prefix, tensor in (("k", layout.format.key), ("v", layout.format.value)):
        for name, bits in zip(("codes", "high"), tensor.planes, strict=False):
            held = layout.section(f"{prefix}_{name}").nbytes * 8 // bits
            assert tokens * dim <= held < tokens * (dim + 32)
        if not tensor.metadata:
            assert {section.name for section in layout.sections}.isdisjoint({f"{prefix}_scale", f"{prefix}_min"})
            continue
        size = tensor.group_size or dim
        groups = tokens // size * dim if tensor.axis is Axis.CHANNEL else tokens * -(-dim // size)
        for name in tensor.metadata:
            assert prod(layout.section(f"{prefix}_{name}").shape) == groups
            assert layout.section(f"{prefix}_{name}").nbytes * 8 == groups * tensor.number.bits


@settings(max_examples=50)
@given(layouts(), st.integers(1, 3), st.integers(1, 3))
def test_counted_bytes_are_allocated_bytes(layout: KVLayout, blocks: int, slots: int) -> None:
    cache = LayerCache.allocate(layout, blocks=blocks, slots=slots)
    assert cache.pages.nbytes == blocks * layout.page_bytes
    assert cache.ring.nbytes == slots * layout.ring_bytes
    assert cache.sinks.nbytes == slots * layout.sink_bytes
    assert cache.nbytes == blocks * layout.page_bytes + slots * (layout.ring_bytes + layout.sink_bytes)


@given(layouts(), st.integers(0, 3000))
def test_a_sequence_never_shrinks_and_grows_a_page_at_a_time(layout: KVLayout, tokens: int) -> None:
    grown = layout.sequence_bytes(tokens + 1) - layout.sequence_bytes(tokens)
    assert grown in (0, layout.page_bytes)


@given(layouts(), st.integers(0, 3000))
def test_allocated_bytes_are_never_under_the_logical_ones(layout: KVLayout, tokens: int) -> None:
    assert layout.logical_bytes(tokens) <= layout.sequence_bytes(tokens)


@given(layouts(), st.integers(0, 3000))
def test_what_is_not_in_pages_fits_residual_and_sinks(layout: KVLayout, tokens: int) -> None:
    key, value = layout.quantized_tokens(tokens)
    sinks = min(tokens, layout.format.sink_tokens)
    assert sinks <= layout.sink_capacity_tokens
    assert 0 <= tokens - sinks - key <= layout.key_ring_tokens
    assert 0 <= tokens - sinks - value <= layout.value_ring_tokens
    assert max(key, value) <= layout.blocks(tokens) * layout.block_tokens


@given(layouts())
def test_a_sequence_of_at_most_r_tokens_is_in_16_bits(layout: KVLayout) -> None:
    form = layout.format
    if form.rule != "group" or not form.quantized:
        return
    assert layout.quantized_tokens(form.residual_tokens + form.sink_tokens) == (0, 0)
    assert layout.blocks(form.residual_tokens + form.sink_tokens) == 0


@given(layouts(), st.integers(0, 3000))
def test_r_to_r_plus_g_minus_1_tokens_stay_in_16_bits(layout: KVLayout, tokens: int) -> None:
    form = layout.format
    if form.rule != "group" or not form.quantized:
        return
    quantum = form.key.group_size if form.key.axis is Axis.CHANNEL and form.key.group_size else 1
    paged = max(0, tokens - form.sink_tokens)
    for quantized in layout.quantized_tokens(tokens):
        assert quantized % quantum == 0
        kept = paged - quantized
        assert kept == paged or form.residual_tokens <= kept < form.residual_tokens + quantum


def test_the_logical_bytes_of_a_known_case() -> None:
    layout = KVLayout(format=parse("kivi-k4v2-g64-r128"), kv_heads=8, head_dim=128, block_tokens=64)
    key = 128 * 4 / 8 + 128 / 64 * 4
    value = 128 * 2 / 8 + 2 * 4
    assert layout.quantized_tokens(1000) == (832, 832)
    assert layout.logical_bytes(1000) == 8 * (832 * (key + value) + 168 * 2 * 256)


@given(layouts(), st.integers(0, 3000))
def test_floats_of_8_bits_take_8_bits_an_element(layout: KVLayout, tokens: int) -> None:
    layout = replace(layout, format=parse("fp8_e4m3"))
    elements = 2 * layout.kv_heads * layout.head_dim
    assert layout.logical_bytes(tokens) == tokens * elements
    assert layout.page_bytes == layout.block_tokens * elements
    assert layout.ring_bytes == layout.sink_bytes == 0


def test_a_short_last_group_is_counted() -> None:
    layout = KVLayout(format=parse("k4v4-g64"), kv_heads=1, head_dim=80, block_tokens=16)
    assert layout.section("k_scale").shape == (2, 16)
    assert layout.logical_bytes(10) == 10 * 2 * (40 + 8)


@pytest.mark.parametrize(
    ("name", "head_dim", "block", "says"),
    [
        ("int4", 24, 64, "head size 24"),
        ("int4", 264, 64, "head size 264"),
        ("int4", 100, 64, "head size 100"),
        ("int4", 64, 8, "block size 8"),
        ("int4", 64, 40, "block size 40"),
        ("int4", 64, 272, "block size 272"),
        ("kivi-k4v4-g64", 64, 96, "use block size 128"),
        ("k4v3", 64, 48, "V holds 32 tokens; use block size 64"),
        ("fp16", 64, 64, "holds fp16"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_the_reason(name: str, head_dim: int, block: int, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        KVLayout(format=parse(name), kv_heads=1, head_dim=head_dim, block_tokens=block)


def test_formats_and_layouts_never_import_torch() -> None:
    code = "import sys, kvplan_kernels.format, kvplan_kernels.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "head_dim", "float_type", "says"),
    [
        ("order-k4v4-g64", 64, FloatType.BF16, "their order changes nothing"),
        ("scaled-fp8_e5m2", 64, FloatType.FP16, "would leave fp16"),
    ],
)
def test_transforms_that_change_nothing_or_too_much_are_refused(
    name: str, head_dim: int, float_type: FloatType, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        KVLayout(format=parse(name), kv_heads=1, head_dim=head_dim, block_tokens=64, float_type=float_type)
    assert KVLayout(format=parse(name), kv_heads=1, head_dim=128, block_tokens=64)
