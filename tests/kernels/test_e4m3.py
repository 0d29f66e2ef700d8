"""Codes that are E4M3 floats: their definition against a table made from the specification, and every word of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kvplan_kernels.append import gpu as gpu_append
from kvplan_kernels.append.reference import append
from kvplan_kernels.cache import Batch, LayerCache
from kvplan_kernels.cases import Case
from kvplan_kernels.decode import gpu
from kvplan_kernels.format import UnsupportedError, parse
from kvplan_kernels.gpu import targets, unpack
from kvplan_kernels.gpu.floats import small_float_code
from kvplan_kernels.inputs import make_inputs
from kvplan_kernels.layout import KVLayout, Order
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.sequence import sequences

FORM = parse("fp8_e4m3").key
NAN = 0x7F
WORDS = 65536


def value_of(code: int) -> float:
    """Return what a code stands for: one bit of sign, four of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == NAN:
        return math.nan
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return sign * size


VALUES = np.array([value_of(code) for code in range(256)])


def nearest(values: NDArray[Any]) -> NDArray[Any]:
    """Return the code of the nearest float to each finite value; of two as near, the even one."""
    sizes, x = VALUES[:NAN], np.abs(values.astype(np.float64))
    above = np.searchsorted(sizes, x).clip(1, len(sizes) - 1)
    below = above - 1
    gap = (x - sizes[below]) - (sizes[above] - x)
    size = np.where((gap > 0) | ((gap == 0) & (above % 2 == 0)), above, below)
    code: NDArray[Any] = size | (np.signbit(values) * 0x80)
    return code


def all_values(dtype: torch.dtype) -> Tensor:
    """Return every finite 16-bit value, float32 [tokens, 1]: each is a token."""
    values = torch.arange(WORDS).to(torch.int16).view(dtype).float()
    return values[values.isfinite()][:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_becomes_the_nearest_float(dtype: torch.dtype) -> None:
    values = all_values(dtype)
    found = quantize(values, FORM)
    assert found.poisoned == 0
    assert dict(found.metadata) == {}
    np.testing.assert_array_equal(found.codes[:, 0].numpy(), nearest(values[:, 0].numpy()))
    by_torch = values.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(dequantize_codes(found.codes, {}, FORM), by_torch)


def test_every_code_reads_back_as_its_value() -> None:
    found = dequantize_codes(torch.arange(256, dtype=torch.int32), {}, FORM).double().numpy()
    np.testing.assert_array_equal(found, VALUES)
    np.testing.assert_array_equal(np.signbit(found[~np.isnan(found)]), np.arange(256)[~np.isnan(found)] >= 128)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (3e38, 0x7E), (-3e38, 0xFE),
        (0.0, 0), (-0.0, 0x80), (2.0**-9, 1), (2.0**-10, 0), (1.5 * 2.0**-9, 2), (2.5 * 2.0**-9, 2), (-1e-40, 0x80),
        (7.5 * 2.0**-9, 8), (1.0, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (15.5, 0x58),
    ],
)  # fmt: skip
def test_what_is_too_large_saturates_and_ties_go_to_the_even_code(value: float, code: int) -> None:
    assert quantize(torch.tensor([[value, 1.0]]), FORM).codes.tolist() == [[code, 0x38]]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("order", Order)
def test_a_token_and_head_that_is_not_finite_is_nan_as_a_whole(number: float, order: Order) -> None:
    layout = KVLayout(format=parse("fp8_e4m3"), kv_heads=2, head_dim=40, block_tokens=32, order=order)
    cache = LayerCache.allocate(layout, blocks=2, slots=1)
    zero, counts = torch.zeros(1, dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    batch = Batch(block_tables=torch.tensor([[1, 0]], dtype=torch.int32), slots=zero, lengths=zero)
    key, value = (torch.randn(64, 2, 40, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    key[9, 1, 35] = key[9, 1, 3] = value[9, 0, 0] = value[40, 1, 7] = number
    assert append(cache, batch, key, value, counts) == 3
    held = sequences(cache, batch.after(counts))[0]
    for prefix, tokens in (("k", [(1, 9)]), ("v", [(0, 9), (1, 40)])):
        poisoned = torch.zeros(2, 64, 40, dtype=torch.bool)
        for head, token in tokens:
            poisoned[head, token] = True
        assert torch.equal(held.dense(prefix).isnan(), poisoned)


@pytest.mark.parametrize(
    ("arch", "refused"),
    [("sm_80", True), ("sm_86", True), ("sm_89", False), ("sm_90", False), ("sm_120", False), ("gfx942", False)],
)
def test_devices_without_the_instruction_are_refused(arch: str, *, refused: bool) -> None:
    targets.check_format(parse("int8"), arch)
    if refused:
        with pytest.raises(UnsupportedError, match=f"fp8_e4m3 on {arch}: .* start with sm_89"):
            targets.check_format(parse("fp8_e4m3"), arch)
    else:
        targets.check_format(parse("fp8_e4m3"), arch)


def test_a_call_on_such_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = targets.Target(programs=1, asm=True, device=torch.device("cpu"), arch="sm_80")
    monkeypatch.setattr(targets, "target", lambda _: device)
    inputs = make_inputs(Case(format="fp8_e4m3", lengths=(3,)), Order.ROWS)
    with pytest.raises(UnsupportedError, match="start with sm_89"):
        gpu.decode(inputs.cache, inputs.batch, inputs.query, inputs.options)
    with pytest.raises(UnsupportedError, match="start with sm_89"):
        gpu_append.append(inputs.cache, *inputs.appends()[0])


@triton.jit
def code_all(values, codes, count: tl.constexpr):
    i = tl.arange(0, count)
    tl.store(codes + i, small_float_code(tl.load(values + i), "e4m3"))


@triton.jit
def unpack_all(words, floats, shift: tl.constexpr, asm: tl.constexpr, count: tl.constexpr):
    i = tl.arange(0, count)
    tl.store(floats + i, unpack.unpack_e4m3(tl.load(words + i), shift, asm))


def device() -> str:
    return "cpu" if targets.interpreted() else "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_rounds_every_value_as_the_definition_does(dtype: torch.dtype) -> None:
    values = torch.zeros(WORDS)
    finite = all_values(dtype)[:, 0]
    values[: len(finite)] = finite
    codes = torch.zeros(WORDS, dtype=torch.int32, device=device())
    code_all[(1,)](values.to(device()), codes, count=WORDS)
    assert torch.equal(codes.cpu(), quantize(values[:, None], FORM).codes[:, 0])


def evaluate(text: str, pairs: NDArray[Any]) -> NDArray[Any]:
    """Return what the PTX *text* makes of registers that hold two words each."""
    floats = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).numpy()
    registers = {"$1": pairs.astype(np.uint64), "0": np.zeros(len(pairs), np.uint64)}

    def byte(register: NDArray[Any], index: int) -> NDArray[Any]:
        found: NDArray[Any] = register >> np.uint64(8 * index) & np.uint64(0xFF)
        return found

    for line in text.replace("{", " ").replace("}", " ").split(";"):
        name, *operands = line.replace(",", " ").split() or [""]
        if name == "prmt.b32":
            low, high = (registers[operand] for operand in operands[1:3])
            both, selector = low | high << np.uint64(32), int(operands[3], 16)
            parts = [byte(both, selector >> 4 * i & 7) << np.uint64(8 * i) for i in range(4)]
            registers[operands[0]] = parts[0] | parts[1] | parts[2] | parts[3]
        elif name == "mov.b32":
            registers[operands[0]] = registers[operands[2]] & np.uint64(0xFFFF)
            registers[operands[1]] = registers[operands[2]] >> np.uint64(16)
        elif name == "cvt.rn.f16x2.e4m3x2":
            low, high = (floats[byte(registers[operands[1]], i)].view(np.uint16).astype(np.uint64) for i in range(2))
            registers[operands[0]] = low | high << np.uint64(16)
        else:
            assert name in ("", ".reg")
    return registers["$0"]


@pytest.mark.parametrize("shift", [0, 8])
def test_both_ways_to_unpack_are_equal_for_every_word(shift: int) -> None:
    words = np.arange(WORDS, dtype=np.uint64)
    plain = torch.zeros(WORDS, dtype=torch.float16, device=device())
    held = torch.from_numpy(words.astype(np.uint16)).to(device())
    unpack_all[(1,)](held, plain, shift=shift, asm=False, count=WORDS)
    np.testing.assert_array_equal(plain.cpu().double().numpy(), VALUES[np.arange(WORDS) >> shift & 0xFF])
    defined = ~plain.isnan().cpu().numpy()
    bits = plain.cpu().view(torch.int16).numpy().view(np.uint16)
    text = unpack.e4m3_asm_text(shift)
    for other in (np.uint64(0), np.uint64(0xFFFF)):
        low = evaluate(text, words | other << np.uint64(16)) & np.uint64(0xFFFF)
        high = evaluate(text, words << np.uint64(16) | other) >> np.uint64(16)
        for found in (low.astype(np.uint16), high.astype(np.uint16)):
            assert np.array_equal(found[defined], bits[defined])
            assert np.isnan(found[~defined].view(np.float16)).all()


@pytest.mark.skipif(targets.interpreted(), reason="the interpreter knows no inline assembly")
@pytest.mark.parametrize("shift", [0, 8])
def test_the_devices_instruction_unpacks_every_word(shift: int) -> None:
    words = torch.from_numpy(np.arange(WORDS, dtype=np.uint16)).to(device())
    plain, own = (torch.zeros(WORDS, dtype=torch.float16, device=device()) for _ in range(2))
    unpack_all[(1,)](words, plain, shift=shift, asm=False, count=WORDS)
    unpack_all[(1,)](words, own, shift=shift, asm=True, count=WORDS)
    torch.testing.assert_close(own, plain, rtol=0, atol=0, equal_nan=True)
