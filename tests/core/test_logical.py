from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvplan.core.formats import growth_bytes
from kvplan.core.logical import held_tokens, layer_bytes, layer_growth_bytes, logical_size, runtime_refusal
from kvplan.core.specs import LayerKind, LayerSpec, ModelSpec, SideCache, StateCache
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.layout import KVLayout

FULL = LayerSpec(kind=LayerKind.FULL, kv_heads=2, head_dim=64)
SLIDING = replace(FULL, kind=LayerKind.SLIDING, window_tokens=100)
LATENT = LayerSpec(kind=LayerKind.LATENT, kv_heads=1, head_dim=576, value_dim=0, rope_dim=64)
STATE = LayerSpec(kind=LayerKind.NONE, states=(StateCache(name="recurrent state", elements=10, item_bits=32),))
FORMATS = (
    "bf16",
    "fp8_e4m3",
    "int8",
    "k8v4-g64",
    "int4",
    "kivi-k2v2-g64-r128",
    "kivi-paper",
    "int4-g32-r100-s4",
    "int4-g32-o2",
    "kivi-k2v2-g32-b1-o1-r3",
)
BF16 = parse("bf16")


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(
        name="m", digest="d", architecture="A", layers=layers, query_heads=4, hidden_size=64, vocab_size=10,
        context_tokens=4096,
    )  # fmt: skip


@settings(deadline=None)
@example(form="kivi-paper", head_dim=4, heads=1, tokens=127)  # K leaves the residual, and V does not yet
@given(form=st.sampled_from(FORMATS), head_dim=st.integers(4, 32), heads=st.integers(1, 4), tokens=st.integers(0, 1000))
def test_bytes_and_growth_are_those_of_the_layout(form: str, head_dim: int, heads: int, tokens: int) -> None:
    layer = replace(FULL, kv_heads=heads, head_dim=8 * head_dim)
    layout = KVLayout(format=parse(form), kv_heads=heads, head_dim=8 * head_dim, block_tokens=64)
    assert layer_bytes(layer, parse(form), tokens) == pytest.approx(layout.logical_bytes(tokens), rel=1e-12)
    assert layer_growth_bytes(layer, parse(form), tokens) == pytest.approx(growth_bytes(layout, tokens), rel=1e-12)


def test_a_full_window_grows_by_nothing() -> None:
    assert [held_tokens(SLIDING, tokens) for tokens in (99, 100, 101)] == [99, 100, 100]
    assert layer_growth_bytes(SLIDING, BF16, 99) == 2 * 2 * 64 * 2
    assert layer_growth_bytes(SLIDING, BF16, 100) == 0
    size = logical_size(model(FULL, SLIDING), BF16, 1000)
    assert size.growth_bytes_per_token == 512
    assert size.fixed_bytes_per_sequence == 100 * 512


def test_a_state_is_there_whatever_the_context() -> None:
    for tokens in (1, 1000):
        size = logical_size(model(STATE, STATE), BF16, tokens)
        assert (size.bytes_per_sequence, size.growth_bytes_per_token) == (80, 0)


def test_an_entry_is_added_when_its_tokens_are_there() -> None:
    layer = replace(SLIDING, sides=(SideCache(name="entries", elements=8, tokens_per_entry=4),))
    assert [layer_bytes(layer, BF16, 200 + more) - 100 * 512 for more in (0, 3, 4)] == [800, 800, 816]
    assert layer_growth_bytes(layer, BF16, 200) == 4
    assert logical_size(model(layer), BF16, 3).fixed_bytes_per_sequence == 0


def test_a_layer_that_shares_or_caches_nothing_takes_nothing() -> None:
    for layer in (replace(FULL, shared_with=0), LayerSpec(kind=LayerKind.NONE)):
        assert layer_bytes(layer, BF16, 50) == layer_growth_bytes(layer, BF16, 50) == 0


def test_a_latent_vector_has_16_or_8_bits_but_no_scales() -> None:
    assert layer_bytes(LATENT, BF16, 10) == 10 * 576 * 2
    assert layer_bytes(LATENT, parse("fp8_e4m3"), 10) == 10 * 576
    with pytest.raises(UnsupportedFormatError, match="int8 on m: a layer caches one vector a token"):
        logical_size(model(FULL, LATENT), parse("int8"), 10)


def test_keys_and_values_of_two_sizes_are_each_stored_in_their_own() -> None:
    layer = replace(FULL, head_dim=192, value_dim=128)
    assert layer_bytes(layer, parse("int8"), 10) == 10 * 2 * (192 + 4 + 128 + 4)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no layers"):
        logical_size(model(), BF16, 10)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (LATENT, "attention is latent"),
        (STATE, "keeps a state"),
        (replace(FULL, kind=LayerKind.CHUNKED, window_tokens=8), "attention is chunked"),
        (replace(FULL, shared_with=0), "the cache of another"),
        (replace(FULL, value_dim=32), "K has a head size of 64 and V of 32"),
        (replace(FULL, sides=(SideCache(name="indexer keys", elements=8),)), "keeps indexer keys beside K and V"),
        (LayerSpec(kind=LayerKind.NONE), "caches nothing"),
        (replace(FULL, head_dim=512), "head size 512"),
    ],
)
def test_what_the_kernels_do_not_lay_out_is_refused_with_its_reason(layer: LayerSpec, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        layer.layout(BF16, 64, model().float_type)
    assert says in runtime_refusal(model(FULL, layer))
    assert runtime_refusal(model(FULL, SLIDING)) == ""


def test_a_layer_of_an_older_profile_is_read() -> None:
    old = b'{"kind": "sliding", "kv_heads": 2, "head_dim": 64, "window_tokens": 100}'
    assert msgspec.json.decode(old, type=LayerSpec) == SLIDING
    assert msgspec.json.decode(msgspec.json.encode(STATE), type=LayerSpec) == STATE


@given(tokens=st.integers(0, 400))
def test_bytes_by_layer_are_the_sum_of_what_each_layer_stores(tokens: int) -> None:
    form = parse_formats("int4@0=bf16@-1=int8-r50")
    parts = [parse(name) for name in ("bf16", "int4", "int4", "int8-r50")]
    layers = (FULL, SLIDING, FULL, SLIDING)
    size = logical_size(model(*layers), form, tokens)
    pairs = list(zip(layers, parts, strict=True))
    assert size.bytes_per_sequence == sum(layer_bytes(layer, part, tokens) for layer, part in pairs)
    assert size.growth_bytes_per_token == sum(layer_growth_bytes(layer, part, tokens) for layer, part in pairs)


def test_layers_are_counted_among_those_that_cache_keys_and_values() -> None:
    shared = replace(FULL, shared_with=1)
    hybrid = model(STATE, FULL, STATE, FULL, shared)
    assert hybrid.caching_layers == 2
    last = logical_size(hybrid, parse_formats("int4@-1=bf16"), 64).bytes_per_sequence
    assert last == 2 * 40 + layer_bytes(FULL, parse("int4"), 64) + layer_bytes(FULL, BF16, 64)
    with pytest.raises(UnsupportedFormatError, match="int4@2=bf16 on m: no layer 2 among the 2 that cache"):
        logical_size(hybrid, parse_formats("int4@2=bf16"), 64)
