"""Boosted channels have finer steps: the largest of each group, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.append.reference import append
from kvplan_kernels.boosts import largest_channels
from kvplan_kernels.cache import LayerCache
from kvplan_kernels.cases import Case
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import TensorFormat, UnsupportedError, parse
from kvplan_kernels.inputs import make_inputs
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.views import section_view

GROUP = 32


def keys(seed: int, groups: int = 2, head_dim: int = 64) -> torch.Tensor:
    """Keys [1, tokens, head_dim] whose large channels differ from group to group, some of them equally large."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, groups * GROUP, head_dim, generator=generator)
    for group in range(groups):
        values[:, group * GROUP : (group + 1) * GROUP, torch.randperm(head_dim, generator=generator)[:9]] *= 7
    values[..., 11] = values[..., 40]
    return values


def in_float64(values: np.ndarray, bits: int, *, symmetric: bool) -> np.ndarray:
    """Quantize one channel of a group in float64, by the numbers as fp16 holds them."""
    coarse = 1.0 if bits <= 2 else 4.0  # steps to a step of the high bits
    if symmetric:
        step = float(np.float16(np.float32(np.abs(values).max()) / np.float32(2 ** (bits - 1) - 1) * coarse)) / coarse
        if step == 0:
            return np.zeros_like(values)
        codes = np.clip(np.round(values / step) + 2 ** (bits - 1), 0, 2**bits - 1)
        return (codes - 2 ** (bits - 1)) * step
    low, steps = float(np.float16(values.min())), 2**bits - 1
    spread = np.float32(values.max()) - np.float32(values.min())
    step = float(np.float16(spread / np.float32(steps) * np.float32(coarse))) / coarse
    codes = np.clip(np.round((values - low) / step), 0, steps) if step else np.zeros_like(values)
    return low + codes * step


def read_back(values: torch.Tensor, tensor: TensorFormat) -> torch.Tensor:
    found = quantize(values, tensor)
    return dequantize_codes(found.codes, found.metadata, tensor, boosts=found.boosts)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from((1, 2, 4)), st.booleans())
def test_the_largest_channels_of_each_group_have_two_more_bits(seed: int, eighths: int, symmetric: bool) -> None:
    values = keys(seed)
    tensor = parse(f"{'sym-' if symmetric else ''}kivi-k2v2-g{GROUP}-b{eighths}").key
    found = read_back(values, tensor)[0].double().numpy()
    for first in range(0, values.shape[1], GROUP):
        group = values[0, first : first + GROUP].double().numpy()
        sizes = np.abs(group).mean(0)
        chosen = set(np.argsort(-sizes, kind="stable")[: 8 * eighths].tolist())
        for channel in range(64):
            expected = in_float64(group[:, channel], 4 if channel in chosen else 2, symmetric=symmetric)
            np.testing.assert_allclose(found[first : first + GROUP, channel], expected, rtol=1e-6, atol=1e-6)


def test_of_equally_large_channels_the_first_are_boosted() -> None:
    rows = torch.tensor([[1.0, -1.0], [2.0, 0.0], [0.0, -2.0], [0.5, 0.0], [float("inf"), 3.0], [float("nan"), 9.0]])
    assert largest_channels(rows, 2).tolist() == [0, 1]
    assert largest_channels(rows, 6).tolist() == [0, 1, 2, 3, 4, 5]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(("", "-me4m3", "-mfp32", "-mbf16")), st.sampled_from((1, 3, 4)))
def test_codes_alone_give_keys_less_the_low_bits(seed: int, number: str, eighths: int) -> None:
    values, tensor = keys(seed), parse(f"kivi-k2v2-g{GROUP}{number}-b{eighths}").key
    found = quantize(values, tensor)
    coarse = dequantize_codes(found.codes, found.metadata, tensor)
    finer = dequantize_codes(found.codes, found.metadata, tensor, boosts=found.boosts)
    assert found.codes.max() <= 3
    assert bool((finer >= coarse).all())
    assert int((finer > coarse).any(1).sum()) <= 2 * 8 * eighths


@pytest.mark.parametrize("name", ["kivi-k2v2-g32", "kivi-k3v2-g32", "sym-kivi-k4v4-g32", "kivi-k2v2-g32-c90"])
def test_more_boosts_lose_less(name: str) -> None:
    values = keys(3)
    errors = [float((read_back(values, parse(n).key) - values).norm()) for n in (name, f"{name}-b1", f"{name}-b4")]
    assert errors[0] > errors[1] > errors[2]


def test_scales_too_small_for_their_type_leave_boosts_at_the_minimum() -> None:
    values = torch.full((1, GROUP, 64), 1e-9)
    values[:, ::2] = 2e-9
    tensor = parse(f"kivi-k2v2-g{GROUP}-b2").key
    found = quantize(values, tensor)
    assert not found.codes.any()
    assert found.boosts is not None
    assert not found.boosts.low.any()
    assert not found.poisoned


def test_a_poisoned_channel_is_not_preferred() -> None:
    values = keys(5, groups=1)
    values[0, 7, 23] = float("inf")
    found = quantize(values, parse(f"kivi-k2v2-g{GROUP}-b1").key)
    assert found.poisoned == 1
    assert found.boosts is not None
    assert 23 not in found.boosts.channel[0, 0].tolist()


@pytest.mark.parametrize(("head_dim", "eighths", "words"), [(64, 1, 1), (128, 1, 1), (128, 2, 2), (80, 3, 2)])
def test_boosts_take_two_bits_of_each_token_and_a_byte_of_each_group(head_dim: int, eighths: int, words: int) -> None:
    plain, boosted = (
        KVLayout(format=parse(name), kv_heads=2, head_dim=head_dim, block_tokens=256)
        for name in ("kivi-k2v2-g128", f"kivi-k2v2-g128-b{eighths}")
    )
    count = head_dim * eighths // 8
    assert boosted.logical_bytes(1280) - plain.logical_bytes(1280) == 2 * count * (1280 * 2 / 8 + 10)
    assert boosted.section("k_boost").shape == (16, words, 16)
    assert boosted.section("k_boost_channel").shape == (2, 16 * words)


def test_what_a_page_holds_of_boosts_is_read_back() -> None:
    case = Case(format="kivi-k2v2-g32-b1-r3-s2", lengths=(210, 40), head_dim=80, block_tokens=64)
    inputs = make_inputs(case)
    inputs.fill()
    form = inputs.cache.layout.format
    key = dequantize(inputs.cache, inputs.batch)[0]
    stored = inputs.key[2:194].float().transpose(0, 1)
    torch.testing.assert_close(key[0, :, 2:194].float(), read_back(stored, form.key).bfloat16().float())


def test_a_cache_of_boosts_appends_alike_at_once_and_one_by_one() -> None:
    inputs = make_inputs(Case(format="kivi-k2v2-g16-b2-r5-s1", lengths=(90,), head_dim=40, block_tokens=32))
    empty, whole = LayerCache.allocate, inputs.cache
    one = empty(whole.layout, blocks=whole.pages.shape[0], slots=whole.ring.shape[0])
    for cache in (whole, one):
        cache.pages.zero_()
    key, value, batch = inputs.key[:90], inputs.value[:90], inputs.empty
    append(whole, batch, key, value, torch.tensor([90], dtype=torch.int32))
    for token in range(90):
        step = torch.tensor([1], dtype=torch.int32)
        append(one, batch, key[token : token + 1], value[token : token + 1], step)
        batch = batch.after(step)
    assert torch.equal(one.pages, whole.pages)
    assert section_view(one.pages, one.layout, "k_boost").any()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int4-b1", "leave -b1 out, or take a kivi format"),
        ("k2v2-g32-b1", "leave -b1 out, or take a kivi format"),
        ("lloyd4-b1", "leave -b1 out, or take a kivi format"),
        ("fp8_e4m3-b2", "leave -b2 out, or take a kivi format"),
        ("scaled-channel-static-nuq3/nuq3-b1", "leave -b1 out, or take a kivi format"),
        ("llama.cpp:q4_0-b1", "leave -b1 out, or take a kivi format"),
        ("kivi-k2v2-g32-b5", "5 of 8 channels boosted; up to 4"),
        ("kivi-k8v8-g32-b1", "K has 8 bits, and a boosted channel 2 more"),
        ("bf16-b1", "unknown format"),
    ],
)
def test_boosts_are_refused_where_they_do_not_apply(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        parse(name)


@pytest.mark.parametrize(
    "name", ["kivi-k2v2-g128-b1", "had-sym-kivi-k3v2-g32-mfp32-b2-o1-r3-s2", "kivi-paper-k1v2-g32-b4-r32"]
)
def test_names_of_boosts_are_printed_as_they_are_read(name: str) -> None:
    assert str(parse(name)) == name
