"""Codes out of words: the PTX that NVIDIA's devices run, and what runs elsewhere, against the layout's definition."""

from typing import Any, Final

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvplan_kernels.format import parse
from kvplan_kernels.gpu import targets, unpack
from kvplan_kernels.gpu.geometry import Geometry, TensorGeometry, geometry
from kvplan_kernels.layout import ROW_PLANES, KVLayout, Order
from kvplan_kernels.quantize import dequantize_codes

Words = NDArray[np.uint64]
WORDS: Final = 65536
NAMES: Final = ("int8", "int6", "int5", "int4", "int3", "int2", "int1", "nvfp4", "lloyd2", "lloyd3", "lloyd4",
                "llama.cpp:iq4_nl", "nuq2", "nuq3", "nuq4", "static-nuq3/nuq3")  # fmt: skip
LEARNED: Final = {bits: tuple(range(5, 256, 250 // (1 << bits)))[: 1 << bits] for bits in (2, 3, 4)}
"""A table by bits of a code."""
LOOK_UP: Final = {0xEA: lambda a, b, c: (a & b) | c, 0xA8: lambda a, b, c: (a | b) & c}
"""By the table of a three-way logic operation: what it is of 0xF0, 0xCC and 0xAA."""


def evaluate(text: str, *inputs: Words, outputs: int = 1) -> list[Words]:
    """Return what the PTX *text* makes of registers of 32 bits that hold two words each."""
    registers: dict[str, Any] = {f"${outputs + i}": words for i, words in enumerate(inputs)}

    def value(operand: str) -> Any:
        return registers[operand] if operand in registers else np.uint64(int(operand, 0))

    for line in text.strip("{} ").split(";"):
        name, *operands = line.replace(",", " ").split() or [""]
        if name in ("", ".reg"):
            continue
        to, *given = operands[0], *(value(operand) for operand in operands[1:])
        if name == "lop3.b32":
            found = LOOK_UP[int(given[3])](*given[:3])
        elif name == "fma.rn.bf16x2":
            found = multiplied(given[0], given[1])
            assert (given[2] == 0x80008000).all()  # -0, which changes no product
        elif name == "prmt.b32":
            both, found = given[0] | given[1] << np.uint64(32), np.uint64(0)
            for i in range(4):
                nibble = given[2] >> np.uint64(4 * i) & np.uint64(0xF)
                assert not (nibble & np.uint64(8)).any()  # a sign would be repeated
                found = found | (both >> nibble * np.uint64(8) & np.uint64(0xFF)) << np.uint64(8 * i)
        else:
            found = {
                "mov.b32": lambda x: x,
                "shl.b32": lambda x, n: x << n,
                "shr.u32": lambda x, n: x >> n,
                "and.b32": lambda x, y: x & y,
                "or.b32": lambda x, y: x | y,
            }[name](*given)
        registers[to] = found & np.uint64(0xFFFFFFFF)
    return [registers[f"${i}"] for i in range(outputs)]


def multiplied(x: Words, y: Words) -> Words:
    """Return products of pairs of bf16 that are exact."""
    found = np.uint64(0)
    for up in (np.uint64(0), np.uint64(16)):
        a, b = ((pair >> up & np.uint64(0xFFFF)).astype(np.uint32) << 16 for pair in np.broadcast_arrays(x, y))
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
        assert not (product & 0xFFFF).any()
        found = found | (product >> 16).astype(np.uint64) << up
    return found  # type: ignore[return-value]  # arrays, once one was added


def cache_of(name: str) -> Geometry:
    return geometry(KVLayout(format=parse(name), kv_heads=1, head_dim=64, block_tokens=64, order=Order.ROWS))


def words_of(seed: int) -> Words:
    """Return each word once, in some order."""
    return np.random.default_rng(seed).permutation(WORDS).astype(np.uint64)


def codes_of(tensor: TensorGeometry, low: Words, high: Words, place: int, k: int) -> Words:
    """Return the codes of channel plane *k* and token *place*, as `layout` defines them."""
    found = np.zeros_like(low)
    for plane, words, up in ((tensor.low, low, 0), (tensor.high, high, tensor.low.bits)):
        if plane.bits:
            channels, tokens = ROW_PLANES[plane.bits]
            shift = plane.bits * (place % tokens * channels + k)
            found |= (words >> np.uint64(shift) & np.uint64((1 << plane.bits) - 1)) << np.uint64(up)
    return found


def levels_of(name: str, codes: Words) -> NDArray[Any]:
    key = parse(name).key
    table = LEARNED[key.bits] if key.learned else key.levels.table
    return np.array(table)[codes.astype(np.int64)]


def table_words(bits: int) -> NDArray[np.int32]:
    """Return the learned tables of K and of V as words of four levels; V's are others."""
    table = np.zeros(32, np.uint8)
    if bits in LEARNED:
        table[: 1 << bits] = LEARNED[bits]
        table[16 : 16 + (1 << bits)] = 255 - np.array(LEARNED[bits])[::-1]
    return table.view(np.int32)


def asm_words(name: str, tensor: TensorGeometry, low: Words, high: Words, place: int, k: int) -> Words:
    """Return what the PTX that the kernels hand to NVIDIA's compiler makes of pairs of words."""
    exponent, shift = unpack.exponent_of(tensor), unpack.shift_of(tensor.low, place, tensor.planes, k)
    if tensor.signed:
        return evaluate(unpack.e2m1_asm_text(shift), low)[0]
    if tensor.learned:
        text = unpack.look_up_asm_text((), tensor.bits, place, exponent)
        words = [np.uint64(word) for word in table_words(tensor.bits).view(np.uint32)[:4] for _ in "lh"]
        return evaluate(text, low, high, *words, outputs=4)[k]
    if tensor.table:
        return evaluate(unpack.look_up_asm_text(tensor.table, tensor.bits, place, exponent), low, high, outputs=4)[k]
    if not tensor.high.bits:
        return evaluate(unpack.asm_text(shift, (1 << tensor.bits) - 1, exponent), low)[0]
    high_shift = unpack.shift_of(tensor.high, place, tensor.planes, k)
    return evaluate(
        unpack.two_planes_asm_text(tensor.low.bits, shift, tensor.high.bits, high_shift, exponent), low, high
    )[0]


def values_of(tensor: TensorGeometry, floats: torch.Tensor) -> NDArray[Any]:
    """Return what 16-bit patterns stand for as operands of the tensor's products."""
    found: NDArray[Any] = floats.view(torch.float16 if tensor.half else torch.bfloat16).float().numpy()
    return found


@triton.jit
def unpack_all(
    low, high, words, floats, place: tl.constexpr, k: tl.constexpr, cache: tl.constexpr, count: tl.constexpr
):
    i = tl.arange(0, count)
    tables = unpack.level_tables(words, cache)
    levels = unpack.plane_levels(tl.load(low + i), tl.load(high + i), tables, place, k, cache.keys, False)
    tl.store(floats + i, levels.to(tl.uint16, bitcast=True))


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_to_unpack_give_each_codes_level(name: str) -> None:
    cache = cache_of(name)
    tensor = cache.keys
    low, high = words_of(1), words_of(2)
    device = "cpu" if targets.interpreted() else "cuda"
    held = [torch.from_numpy(words.astype(np.uint16)).to(device) for words in (low, high)]
    held.append(torch.from_numpy(table_words(tensor.bits)).to(device))
    floats = torch.zeros(WORDS, dtype=torch.uint16, device=device)
    for place in range(tensor.tokens):
        for k in range(tensor.planes):
            levels = levels_of(name, codes_of(tensor, low, high, place, k))
            unpack_all[(1,)](*held, floats, place=place, k=k, cache=cache, count=WORDS)
            plain = values_of(tensor, floats.cpu())
            np.testing.assert_array_equal(plain, levels + unpack.offset_of(tensor))
            for up in (0, 16):  # as the lower and as the upper word of a register, beside other words
                beside = [words << np.uint64(up) | other << np.uint64(16 - up) for words, other in
                          ((low, words_of(3)), (high, words_of(4)))]  # fmt: skip
                found = asm_words(name, tensor, *beside, place, k) >> np.uint64(up) & np.uint64(0xFFFF)
                np.testing.assert_array_equal(values_of(tensor, torch.from_numpy(found.astype(np.uint16))), plain)


@pytest.mark.parametrize("shift", [0, 8])
def test_e5m2_is_the_upper_byte_of_an_fp16(shift: int) -> None:
    words = words_of(1)
    codes = torch.from_numpy((words >> np.uint64(shift) & np.uint64(0xFF)).astype(np.int32))
    expected = dequantize_codes(codes, {}, parse("fp8_e5m2").key).half().view(torch.int16).numpy().view(np.uint16)
    for up in (0, 16):
        pairs = words << np.uint64(up) | words_of(2) << np.uint64(16 - up)
        found = evaluate(unpack.e5m2_asm_text(shift), pairs)[0] >> np.uint64(up) & np.uint64(0xFFFF)
        finite = ~np.isnan(expected.view(np.float16))
        np.testing.assert_array_equal(found[finite], expected[finite])
        assert np.isnan(found[~finite].astype(np.uint16).view(np.float16)).all()
