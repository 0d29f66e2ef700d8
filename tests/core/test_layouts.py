"""Blocks of a cache whose layers fill different numbers of pages."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.layouts import ModelLayout, lay_out
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.format import CacheFormat, parse
from kvplan_kernels.layer_formats import by_layer, parse_formats

LAYER = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=64)
MODEL = ModelSpec(
    name="m", digest="d", architecture="A", layers=(LAYER, replace(LAYER, kv_heads=1), LAYER), query_heads=4,
    hidden_size=64, vocab_size=10, context_tokens=4096,
)  # fmt: skip
FORMS = st.sampled_from(
    ("bf16", "int8", "int4-r100", "int4-r33-s4", "kivi-k4v2-g32-r64", "kivi-paper-k2v2-g32-r64", "int8-s40")
).map(parse)
PARTS = st.tuples(FORMS, FORMS, FORMS)


def of_parts(parts: Sequence[CacheFormat]) -> ModelLayout:
    return lay_out(MODEL, by_layer(parts[0], dict(enumerate(parts))), 32)


@settings(deadline=None)
@given(parts=PARTS, tokens=st.integers(0, 500))
def test_a_sequence_has_as_many_blocks_as_its_fullest_layer_and_no_more(
    parts: Sequence[CacheFormat], tokens: int
) -> None:
    layout = of_parts(parts)
    paged = [max(layer.quantized_tokens(tokens)) for layer in layout.layers]
    blocks = layout.blocks(tokens)
    assert all(count <= 32 * blocks for count in paged)
    assert blocks == 0 or any(count > 32 * (blocks - 1) for count in paged)


@settings(deadline=None)
@given(parts=PARTS, tokens=st.integers(0, 500))
def test_a_whole_block_is_full_in_every_layer(parts: Sequence[CacheFormat], tokens: int) -> None:
    layout = of_parts(parts)
    paged = [count for layer in layout.layers for count in layer.quantized_tokens(tokens)]
    whole = layout.whole_blocks(tokens)
    assert all(count >= 32 * whole for count in paged)
    assert any(count < 32 * (whole + 1) for count in paged)


@settings(deadline=None)
@given(parts=PARTS, tokens=st.integers(0, 500))
def test_bytes_are_sums_over_layers_with_a_page_of_each_in_a_block(parts: Sequence[CacheFormat], tokens: int) -> None:
    layout = of_parts(parts)
    assert [layer.format for layer in layout.layers] == list(parts)
    assert layout.sequence_bytes(tokens) == sum(
        layout.blocks(tokens) * layer.page_bytes + layer.ring_bytes + layer.sink_bytes for layer in layout.layers
    )
    assert layout.logical_bytes(tokens) == pytest.approx(sum(layer.logical_bytes(tokens) for layer in layout.layers))


def test_what_cannot_be_laid_out_is_refused_with_model_and_format() -> None:
    with pytest.raises(UnsupportedFormatError, match="int4@3=bf16 on m: no layer 3 among the 3"):
        lay_out(MODEL, parse_formats("int4@3=bf16"), 32)
    with pytest.raises(UnsupportedFormatError, match=r"int8@0=kivi-k4v4-g64 on m: block size 32 .* use block size 64"):
        lay_out(MODEL, parse_formats("int8@0=kivi-k4v4-g64"), 32)
    with pytest.raises(InputError, match="m has no layers"):
        lay_out(replace(MODEL, layers=()), parse_formats("int8"), 32)
