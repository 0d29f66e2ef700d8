"""RoPE undone before keys are stored: what is undone is what is applied, at any position."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.dequantize.reference import dequantize
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.parameters import ROPE_FREQUENCY, ROPE_PARTNER, rope_parameters, usual
from kvplan_kernels.rope import Rope, rope_of_numbers

BASES = st.sampled_from((10_000.0, 500_000.0, 1e6))


def rope(head_dim: int, turned: int, base: float, interleaved: bool) -> Rope:
    frequency = base ** (-2.0 * torch.arange(turned // 2, dtype=torch.float64) / max(1, turned))
    return rope_of_numbers(rope_parameters(frequency, head_dim, interleaved=interleaved))


def turned_in_float64(key: torch.Tensor, position: int, turned: int, base: float, interleaved: bool) -> torch.Tensor:
    """Return [heads, head_dim] turned, pair by pair, by the embedding's definition."""
    found = key.double().clone()
    for pair in range(turned // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turned // 2)
        angle = position * base ** (-2 * pair / turned)
        x, y = key[:, first].double(), key[:, second].double()
        found[:, first] = x * math.cos(angle) - y * math.sin(angle)
        found[:, second] = y * math.cos(angle) + x * math.sin(angle)
    return found


@given(
    head_dim=st.sampled_from((32, 40, 64, 128)),
    share=st.sampled_from((0, 0.25, 0.5, 1)),
    base=BASES,
    interleaved=st.booleans(),
    position=st.integers(0, 1 << 20),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_keys_are_turned_as_the_embedding_is_defined(
    head_dim: int, share: float, base: float, interleaved: bool, position: int, seed: int
) -> None:
    turned = int(head_dim * share) // 2 * 2
    key = torch.randn(1, 3, head_dim, generator=torch.Generator().manual_seed(seed))
    places = torch.tensor([position])
    found = rope(head_dim, turned, base, interleaved).applied(key, places, position + 1)
    expected = turned_in_float64(key[0], position, turned, base, interleaved)
    torch.testing.assert_close(found[0].double(), expected, atol=2e-6, rtol=0)


@given(positions=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40), base=BASES, seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_what_is_undone_and_applied_is_what_it_was(positions: list[int], base: float, seed: int) -> None:
    """The bound: some roundings to float32 of two turns, at a million tokens as at the first."""
    key = torch.randn(len(positions), 2, 64, generator=torch.Generator().manual_seed(seed))
    places, tokens = torch.tensor(positions), max(positions) + 1
    one = rope(64, 64, base, False)
    back = one.applied(one.undone(key, places, tokens), places, tokens)
    assert float((back - key).abs().max()) <= 8 * 2.0**-24 * float(key.abs().max())


def test_keys_that_are_alike_before_rope_share_a_scale_per_channel_without_loss() -> None:
    """A key that is the same at all positions is one code a channel, where after RoPE it is none that is constant."""
    key = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(1)).expand(128, 2, 64)
    model = rope_of_numbers(usual(64))
    turned = model.applied(key, torch.arange(128), 128)
    errors = []
    for name in ("prerope-kivi-k2v2-g32", "kivi-k2v2-g32"):
        layout = KVLayout(format=parse(name), kv_heads=2, head_dim=64, block_tokens=32)
        cache = LayerCache.allocate(layout, blocks=4, slots=1, parameters=usual(64))
        batch = Batch(
            block_tables=torch.arange(4, dtype=torch.int32)[None],
            slots=torch.zeros(1, dtype=torch.int32),
            lengths=torch.zeros(1, dtype=torch.int32),
        )
        counts = torch.tensor([128], dtype=torch.int32)
        append(cache, batch, turned, turned, counts)
        read = dequantize(cache, batch.after(counts))[0][0].transpose(0, 1).float()
        errors.append(float((read - turned).norm() / turned.norm()))
    assert errors[0] < 0.005  # two roundings to bf16
    assert errors[1] > 0.1


def test_a_cache_that_does_not_know_the_embedding_is_refused() -> None:
    layout = KVLayout(format=parse("prerope-int4"), kv_heads=1, head_dim=32, block_tokens=16)
    cache = LayerCache.allocate(layout, blocks=1, slots=1)
    with pytest.raises(UnsupportedError, match="rope_frequency: the format needs this tensor"):
        _ = cache.rope


def test_channels_that_are_not_turned_are_their_own_partners() -> None:
    known = rope_parameters(torch.tensor([1.0, 0.1], dtype=torch.float64), 32, interleaved=False)
    assert known[ROPE_PARTNER].tolist() == [2, 3, 0, 1, *range(4, 32)]
    assert known[ROPE_FREQUENCY].tolist() == [1.0, 0.1, -1.0, -0.1, *[0.0] * 28]
