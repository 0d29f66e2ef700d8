"""Formats in tiers: their names, and how many tokens each tier holds."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.layer_formats import parse_formats
from kvplan_kernels.methods import METHODS
from kvplan_kernels.tier_formats import Score, TieredFormat, parse_tiers

STORED = st.sampled_from(
    ("16bit", "bf16", "int8", "k8v4", "k4v2", "k3v2-g32", "had-int4", "nvfp4", "llama.cpp:q8_0", "k4v2-o1", "fp8_e4m3")
)
SHARES = st.lists(st.integers(1, 60), min_size=1, max_size=4).filter(lambda shares: sum(shares) <= 100)


@st.composite
def names(draw: st.DrawFn) -> str:
    score = draw(st.sampled_from(("", "sum-", "once-")))
    window = draw(st.sampled_from(("", "w1-", "w64-", "w32-", "w100-")))
    shares = draw(SHARES)
    shares[0] = draw(st.sampled_from((0, shares[0])))
    return f"tiers-{score}{window}" + "+".join(f"{share}-{draw(STORED)}" for share in shares)


@given(name=names())
def test_a_printed_name_is_the_same_format(name: str) -> None:
    form = parse_formats(name)
    assert isinstance(form, TieredFormat)
    assert parse_formats(form.name) == form
    assert parse_formats(str(form)).name == form.name


@given(name=names(), tokens=st.integers(0, 700), prompt=st.integers(0, 700))
def test_one_more_token_adds_one_to_one_tier_or_none(name: str, tokens: int, prompt: int) -> None:
    form = parse_tiers(name)
    assume(form.score is not Score.ONCE or prompt <= tokens)
    before, after = form.lengths(tokens, prompt), form.lengths(tokens + 1, prompt)
    grown = [late - early for early, late in zip(before, after, strict=True)]
    assert sorted(grown, reverse=True) in ([1, *[0] * (len(grown) - 1)], [0] * len(grown))
    assert sum(after) <= tokens + 1
    if form.kept_percent == 100 or tokens < form.window_tokens or form.score is Score.ONCE:
        assert sum(grown) == 1


@given(name=names(), hundreds=st.integers(0, 40))
def test_shares_are_those_of_the_name(name: str, hundreds: int) -> None:
    form = parse_tiers(name)
    held = form.lengths(form.window_tokens + 100 * hundreds)
    assert [length - form.window_tokens * (not tier) for tier, length in enumerate(held)] == [
        tier.share * hundreds for tier in form.tiers
    ]


@given(name=names(), tokens=st.integers(0, 700), prompt=st.integers(0, 700), block=st.sampled_from((16, 64, 256)))
def test_blocks_hold_the_lengths(name: str, tokens: int, prompt: int, block: int) -> None:
    form = parse_tiers(name)
    pairs = zip(form.lengths(tokens, prompt), form.blocks(tokens, block, prompt), strict=True)
    assert all((count - 1) * block < length <= count * block for length, count in pairs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiers-", "no tiers"),
        ("tiers-int4", "tier 'int4'"),
        ("tiers-60-int8+50-int4", "shares of 110 percent"),
        ("tiers-20-int8+0-int4", "a tier of 0 percent holds nothing"),
        ("tiers-w0-20-int8", "the window is 1 or more"),
        ("tiers-20-int3.5", "unknown format 'int3.5'"),
        ("tiers-20-int8-r64", "leave -r and -s out"),
        ("tiers-20-int8-s4", "leave -r and -s out"),
        ("tiers-20-kivi-k4v4-g32", "a tier replaces them one by one"),
        ("tiers-20-smooth-int4", "what it learns is of a layer's heads together"),
        ("tiers-20-static-int4", "static codes want scales"),
        ("tiers-20-int8/static-nuq4", "static codes want scales"),
        ("tiers-20-prerope-int4", "a tier's tokens lie in no order"),
        ("tiers-20-nuq3", "what it learns is of a layer's heads together"),
        ("tiers-20-int4@0=bf16", "is of tokens in tiers"),
        ("int4@0=tiers-20-int4", "is of tokens in tiers"),
    ],
)
def test_what_cannot_be_a_tier_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_formats(name)
    assert reason in str(caught.value)


def test_a_layer_has_no_one_format() -> None:
    with pytest.raises(UnsupportedError, match="is of tokens in tiers"):
        parse("diffkv")
    with pytest.raises(UnsupportedError, match="each of the 4 layers"):
        parse_formats("diffkv").of_layers(4)


@pytest.mark.parametrize("method", ["diffkv", "h2o", "snapkv"])
def test_methods_are_formats_in_tiers(method: str) -> None:
    assert parse_formats(method).name == METHODS[method].format


@pytest.mark.parametrize(
    ("name", "loses"),
    [("tiers-100-16bit", False), ("tiers-20-16bit", True), ("tiers-100-int8", True), ("tiers-0-bf16+100-int8", True)],
)
def test_dropped_tokens_count_as_quantized(name: str, loses: bool) -> None:
    assert parse_formats(name).quantized is loses
