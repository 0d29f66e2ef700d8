"""What is too large for the codes lies beside them: nothing of it is lost, and the rest is held better."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.outliers import cut, restored
from kvplan_kernels.quantize import dequantize_codes, quantize


def rows(seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, 30, 64, generator=generator) * spread
    values[:, ::3, 5] *= 40
    values[:, 1::3, [9, 20]] *= -15
    values[:, 2::3] = values[:, 2::3].round()  # several of one magnitude
    return values


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from((1, 2, 5, 16)))
def test_the_largest_lie_beside_and_the_rest_is_as_it_was(seed: int, count: int) -> None:
    values = rows(seed)
    dense, outliers = cut(values, count)
    sizes = values.abs().sort(dim=-1, descending=True).values
    torch.testing.assert_close(restored(dense, outliers), values)
    assert torch.equal(dense.abs().amax(-1), sizes[..., count])
    within = values.abs() <= sizes[..., count : count + 1]
    assert torch.equal(dense[within], values[within])
    picked = values.gather(-1, outliers.channel).abs()
    assert torch.equal(picked, sizes[..., :count])
    assert all(len(set(channels)) == count for channels in outliers.channel[0].tolist())


def test_of_equals_the_first_channels_lie_beside() -> None:
    values = torch.tensor([[[1.0, -2.0, 2.0, 2.0, 0.5, -2.0]]])
    dense, outliers = cut(values, 2)
    assert outliers.channel.tolist() == [[[1, 2]]]
    assert torch.equal(dense, values)
    assert not outliers.rest.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_token_that_is_not_finite_is_left_to_the_codes(bad: float) -> None:
    values = rows(1)
    values[0, 4, 7] = bad
    dense, outliers = cut(values, 2)
    torch.testing.assert_close(dense[0, 4], values[0, 4], equal_nan=True)
    assert not outliers.rest[0, 4].any()
    assert outliers.rest[0, 3].any()


@pytest.mark.parametrize("name", ["int2", "int4", "sym-int4", "nvfp4", "kivi-k2v2-g32"])
def test_codes_lose_less_once_a_few_lie_beside(name: str) -> None:
    tensor, values = parse(name).value, rows(3)

    def coded(dense: torch.Tensor) -> torch.Tensor:
        found = quantize(dense, tensor)
        return dequantize_codes(found.codes, found.metadata, tensor)

    dense, outliers = cut(values, 2)
    errors = [float((found - values).norm()) for found in (restored(coded(dense), outliers), coded(values))]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("count", [1, 3])
def test_an_outlier_takes_three_bytes_of_each_token(count: int) -> None:
    plain, beside = (
        KVLayout(format=parse(name), kv_heads=2, head_dim=128, block_tokens=64)
        for name in ("int4-g32", f"int4-g32-o{count}")
    )
    assert beside.logical_bytes(1000) - plain.logical_bytes(1000) == 2 * 2 * 3 * count * 1000
    names = [section.name for section in beside.sections if "outlier" in section.name]
    assert names == ["k_outlier", "k_outlier_channel", "v_outlier", "v_outlier_channel"]
    assert sum(beside.section(name).nbytes for name in names) == 2 * 3 * count * 64


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int4-o17", "17 outliers of a token; up to 16"),
        ("lloyd4-o1", "leave -o1 out"),
        ("llama.cpp:q4_0-o1", "leave -o1 out"),
        ("bf16-o1", "unknown format"),
    ],
)
def test_outliers_are_refused_where_they_are_of_no_use(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        parse(name)
