"""Fits against their sources: llama.cpp's Python package, and float64 or scalar readings of the others."""

import math
from typing import Any, Final

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvplan_kernels import scales
from kvplan_kernels.format import Fit, Number, TensorFormat, parse
from kvplan_kernels.quantize import Quantized, dequantize_codes, quantize
from kvplan_kernels.tensor_format import LLAMA_CPP, STORED, Code, Levels, learned_levels, levels

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALED: Final = [name for name, tensor in (STORED | LLAMA_CPP).items() if tensor.metadata]
SPREADS: Final = st.sampled_from((1e-6, 0.03, 1.0, 40.0, 600.0))


def rows(seed: int, spread: float, count: int = 40, size: int = 64) -> Tensor:
    """Return float32 [1, count, size]: normal, with a few large, repeated and zero elements, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, count, size, generator=generator) * spread
    values[:, ::5, 7] *= 20
    values[:, 1::5, 9] = -values[:, 1::5, 8]
    values[:, 2::5, ::3] = 0
    values[:, 3] = 0
    return values


def read(coded: Quantized, tensor: TensorFormat) -> Tensor:
    return dequantize_codes(coded.codes, coded.metadata, tensor, some_levels(tensor))


def coded_by(values: Tensor, tensor: TensorFormat) -> Quantized:
    return quantize(values, tensor, some_levels(tensor))


def some_levels(tensor: TensorFormat) -> Levels | None:
    """Return levels of an uneven table where *tensor*'s are learned."""
    if not tensor.learned:
        return None
    return learned_levels([(code * (code + 40)) // 4 + 2 for code in range(1 << tensor.bits)], tensor.fit)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]), st.integers(0, 10**6), SPREADS)
def test_llama_cpps_blocks_give_its_own_values_bit_for_bit(name: str, seed: int, spread: float) -> None:
    values = rows(seed, spread)
    kind = GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        theirs = quants.dequantize(quants.quantize(values.numpy(), kind), kind)
    np.testing.assert_array_equal(read(quantize(values, LLAMA_CPP[name]), LLAMA_CPP[name]).numpy(), theirs)


def scalar_iq4_nl(block: Any) -> tuple[Any, list[int]]:
    """Return scale and codes of 32 float32 numbers as quantize_row_iq4_nl_ref finds them, in its order of sums."""
    table = [np.float32(level - 127) for level in levels(Code.IQ4_NL, 4).table]
    largest = max(block, key=abs)
    if largest == 0:
        return np.float16(0), [7] * 32
    inverse = np.float32(1) / (largest / table[0])
    codes, products, squares = [], np.float32(0), np.float32(0)
    for x in block:
        scaled = inverse * x
        above = next((i for i, level in enumerate(table) if level > scaled), 16)
        if above in (0, 16):
            code = min(above, 15)
        else:
            code = above - 1 if scaled - table[above - 1] < table[above] - scaled else above
        codes.append(code)
        weight = x * x
        products += weight * table[code] * x
        squares += weight * table[code] * table[code]
    return np.float16(products / squares), codes


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from((0.03, 1.0, 40.0)))
def test_iq4_nl_is_coded_as_the_scalar_code_does(seed: int, spread: float) -> None:
    values = rows(seed, spread, count=6)
    coded = quantize(values, LLAMA_CPP["iq4_nl"])
    scale = coded.metadata["scale"].numpy()
    for token, row in enumerate(values[0].numpy()):
        for group in range(2):
            block = row[32 * group : 32 * group + 32]
            expected_scale, codes = scalar_iq4_nl(block)
            assert scale[0, group, token] == expected_scale
            if expected_scale:
                assert coded.codes[0, token, 32 * group : 32 * group + 32].tolist() == codes


def test_iq4_nl_reads_back_as_llama_cpps_package_does() -> None:
    values = rows(3, 1.0)
    coded = quantize(values, LLAMA_CPP["iq4_nl"])
    codes = coded.codes.reshape(-1, 2, 16).numpy().astype(np.uint8)
    scale = coded.metadata["scale"].transpose(-2, -1).reshape(-1, 1).numpy().view(np.uint8)
    blocks = np.concatenate([scale, codes[:, 0] | codes[:, 1] << 4], axis=-1)
    theirs = quants.dequantize(blocks, GGMLQuantizationType.IQ4_NL).reshape(values.shape)
    np.testing.assert_array_equal(read(coded, LLAMA_CPP["iq4_nl"]).numpy(), theirs)


def nearest_e2m1(x: float) -> float:
    """Return the E2M1 float nearest to *x*, of two the one with the even code, at most 6."""
    size = min(abs(x), 6.0)
    code = min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
    return math.copysign(E2M1[code], x)


@settings(deadline=None, max_examples=6)
@given(st.sampled_from(("nvfp4", "mxfp4")), st.integers(0, 10**6), SPREADS)
def test_fp4_blocks_are_e2m1_times_the_blocks_scale(name: str, seed: int, spread: float) -> None:
    tensor, values = STORED[name], rows(seed, spread, count=6)
    found, size = read(quantize(values, tensor), tensor), tensor.group_size or 0
    for x, y in zip(values.reshape(-1, size).tolist(), found.reshape(-1, size).tolist(), strict=True):
        largest = max(map(abs, x))
        if name == "mxfp4":
            scale = 2.0 ** max(-127, math.floor(math.log2(largest)) - 2) if largest else 0.0
        else:
            scale = float(torch.tensor(largest / 6).to(torch.float8_e4m3fn))
        # One float32 division stands between: what it moves over a tie is a code away at most.
        assert y == [nearest_e2m1(float(np.float32(v) / np.float32(scale))) * scale if scale else 0.0 for v in x]


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 8).filter(lambda b: b != 7), st.integers(0, 10**6), SPREADS)
def test_symmetric_codes_hold_zero_and_the_largest_magnitude(bits: int, seed: int, spread: float) -> None:
    tensor = parse(f"sym-int{bits}-mfp32").key
    values = rows(seed, spread)
    values[0, 5] = values[0, 5].abs()  # One sign: half of the codes are wasted, zero stays exact.
    found = read(quantize(values, tensor), tensor)
    step = values.abs().amax(-1, keepdim=True).double() / (2 ** (bits - 1) - 1)
    assert ((found - values).abs() <= step * (0.5 + 1e-6)).all()
    assert not found[values == 0].any()


@settings(deadline=None, max_examples=10)
@given(st.sampled_from((2, 3, 4)), st.integers(0, 10**6), st.sampled_from((0.03, 1.0, 40.0)))
def test_lloyd_max_codes_give_back_the_norm(bits: int, seed: int, spread: float) -> None:
    tensor = STORED[f"lloyd{bits}"]
    values = rows(seed, spread)
    found = read(quantize(values, tensor), tensor)
    norms = values.double().norm(dim=-1)
    assert ((found.double().norm(dim=-1) - norms).abs() <= 1e-3 * norms).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lloyd_max_loses_what_its_source_says_and_less_than_even_steps(bits: int) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(1, 400, 256, generator=generator)
    distortion = {2: 0.1175, 3: 0.03454, 4: 0.009497}[bits]  # Max 1960, table I
    errors = [float((read(quantize(values, t), t) - values).square().mean()) for t in _both(bits)]
    assert errors[0] == pytest.approx(distortion, rel=0.05)
    assert errors[0] < errors[1]


def _both(bits: int) -> tuple[TensorFormat, TensorFormat]:
    return STORED[f"lloyd{bits}"], parse(f"int{bits}").key


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_without_numbers_is_poisoned_whole_and_no_other(name: str, bad: float) -> None:
    tensor = (STORED | LLAMA_CPP)[name]
    values = rows(1, 1.0)
    values[0, 4, 20] = bad
    coded = coded_by(values, tensor)
    found, clean = read(coded, tensor), read(coded_by(rows(1, 1.0), tensor), tensor)
    group = tensor.group_size or 64
    hit = torch.zeros_like(values, dtype=torch.bool)
    hit[0, 4, 20 // group * group : (20 // group + 1) * group] = True
    assert coded.poisoned == 1
    assert found[hit].isnan().all()
    assert torch.equal(found[~hit], clean[~hit])


@pytest.mark.parametrize("name", SCALED)
def test_zeros_stay_zeros_and_what_overflows_an_fp16_scale_is_poisoned(name: str) -> None:
    tensor = (STORED | LLAMA_CPP)[name]
    zeros = coded_by(torch.zeros(1, 2, 64), tensor)
    assert zeros.poisoned == 0
    assert not read(zeros, tensor).any()
    huge = coded_by(torch.full((1, 1, 64), 3e38), tensor)
    overflows = tensor.number is Number.FP16
    assert huge.poisoned == (64 // (tensor.group_size or 64) if overflows else 0)
    assert read(huge, tensor).isnan().all() == overflows


@given(st.sampled_from(Number), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_numbers_are_rounded_to_the_nearest_they_hold(number: Number, x: float) -> None:
    held = scales.decode(torch.arange(256, dtype=torch.uint8), number) if number.bits == 8 else None
    found = float(scales.decode(scales.encode(torch.tensor(x), number), number))
    if held is None:
        assert found == float(torch.tensor(x).to(scales.STORED_AS[number]).float())
    elif number is Number.E8M0:
        size = min(max(abs(x), 2.0**-127), 2.0**127)
        assert found <= size < 2 * found or found == 2.0**127
    elif abs(x) <= 448:
        assert abs(found - x) == float((held[held.isfinite()].double() - x).abs().min())
    else:
        assert abs(found) == 448


def test_every_fit_has_its_numbers_in_a_format_that_uses_it() -> None:
    used = {parse("int4").key.fit, parse("sym-int4").key.fit} | {t.fit for t in (STORED | LLAMA_CPP).values()}
    assert used == set(Fit)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(sorted(name for name in STORED if "nuq" in name)), st.integers(0, 10**6))
def test_learned_levels_are_chosen_by_the_least_distance(name: str, seed: int) -> None:
    tensor, values = STORED[name], rows(seed, 0.3)
    levels = some_levels(tensor)
    assert levels is not None
    found = read(coded_by(values, tensor), tensor)
    low, high = values.amin(-1, keepdim=True).half(), values.amax(-1, keepdim=True)
    scale = ((high - values.amin(-1, keepdim=True)) / 255).half().float()
    if tensor.fit is Fit.NONE:
        heights = torch.tensor([(level - 127.5) / 127.5 for level in levels.table]).expand(*values.shape, -1)
    else:
        heights = low.float().unsqueeze(-1) + torch.tensor(levels.table).float() * scale.unsqueeze(-1)
    nearest = (heights - values.unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close((found - values).abs(), nearest, atol=2e-4, rtol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_static_integers_have_a_scale_of_one_and_saturate(bits: int) -> None:
    """SmoothQuant's int8 cache, arXiv 2211.10438: symmetric, by a scale that was calibrated before."""
    tensor, most = STORED[f"static-int{bits}"], (1 << bits - 1) - 1
    values = torch.linspace(-1, 1, 2 * most + 1)[None, None]
    torch.testing.assert_close(read(quantize(values, tensor), tensor), values, atol=1e-6, rtol=0)
    outside = read(quantize(torch.tensor([[[5.0, -5.0] * 16]]), tensor), tensor)
    assert outside[0, 0, :2].tolist() == pytest.approx([1.0, -(most + 1) / most])
    bad = quantize(torch.full((1, 1, 32), math.nan), tensor)
    assert (bad.poisoned, bad.codes.any().item()) == (1, False)
