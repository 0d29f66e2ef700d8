"""The allocation of a cache in tiers: geometry by hand, rounding as the whole difference, and what a pool holds."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.allocation import Setup
from kvplan.engines import ENGINES, allocate
from kvplan.errors import UnsupportedFormatError

NAMES = ("diffkv", "h2o", "snapkv", "tiers-w8-0-int8", "tiers-w1-20-int8+20-int4-o1+20-int2", "tiers-100-16bit")


def full(spec: Any) -> Any:
    return spec(4, 8, 2, 256, head_dim=64)


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(NAMES), tokens=st.integers(0, 5000), block=st.sampled_from([16, 64, 256]),
    pool=st.integers(1, 64),
)  # fmt: skip
def test_rounding_is_the_whole_difference_and_more_holds_no_less(
    spec: Any, name: str, tokens: int, block: int, pool: int
) -> None:
    setup = Setup(context_tokens=4096, block_tokens=block)
    allocation = allocate(ENGINES["kvplan"], full(spec), name, setup)
    difference = allocation.sequence_bytes(tokens) - allocation.logical_bytes(tokens)
    assert sum(term.bytes for term in allocation.terms(tokens)) == pytest.approx(difference)
    assert difference >= 0
    assert allocation.sequence_bytes(tokens) <= allocation.sequence_bytes(tokens + 1)
    held, more = (allocation.capacity(size << 20) for size in (pool, pool + 1))
    for figure in ("blocks", "tokens", "max_concurrency", "max_context"):
        assert getattr(held, figure) <= getattr(more, figure)
    if held.max_context:
        assert allocation.sequence_bytes(held.max_context) <= pool << 20
    assert held.max_concurrency * allocation.sequence_bytes(4096) <= pool << 20


def test_bytes_are_those_of_each_tier_s_tokens_in_every_head(spec: Any) -> None:
    allocation = allocate(ENGINES["kvplan"], full(spec), "diffkv", Setup(context_tokens=4096))
    heads, notes = 4 * 2, 8
    high, low = 64 * 12 // 8 + 8 + notes, 64 * 6 // 8 + 8 + notes
    tokens = 64 + 1000
    assert allocation.logical_bytes(tokens) == heads * ((64 + 250) * high + 500 * low)
    assert allocation.sequence_bytes(tokens) == heads * 64 * (5 * high + 8 * low)
    assert allocation.logical_growth_bytes(10) == heads * high
    assert allocation.logical_growth_bytes(tokens) == heads * (0.25 * high + 0.5 * low)
    assert allocation.growth_bytes(10) == heads * high
    assert allocation.growth_bytes(tokens) == heads * (0.25 * high + 0.5 * low)
    assert [group.bytes_per_block for group in allocation.blocks] == [heads * 64 * high, heads * 64 * low]


def test_what_is_placed_once_has_no_notes(spec: Any) -> None:
    again, once = (
        allocate(ENGINES["kvplan"], full(spec), name, Setup(context_tokens=4096))
        for name in ("tiers-w32-25-16bit", "tiers-once-w32-25-16bit")
    )
    tokens = 32 + 25
    assert again.logical_bytes(132) - once.logical_bytes(132) == 4 * 2 * 8 * tokens
    assert not any("generated" in note for note in again.notes)
    assert any("a token that is generated takes 2.0 KiB" in note for note in once.notes)


def test_layers_that_slide_are_refused(spec: Any) -> None:
    sliding = spec(
        6, 8, 4, 512, model_type="gemma3_text", head_dim=64, sliding_window=96, sliding_window_pattern=3
    )  # fmt: skip
    with pytest.raises(UnsupportedFormatError, match="looks at its newest 96 tokens"):
        allocate(ENGINES["kvplan"], sliding, "diffkv", Setup(context_tokens=4096))
