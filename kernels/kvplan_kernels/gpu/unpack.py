"""Codes out of 16-bit words as 16-bit floats, two at a time, without converting integers.

A code in the low bits of a float's mantissa, below an exponent at which one unit is 1, is that float's offset from a
power of two: 128 + code in bf16, which has 7 bits of mantissa, and 1024 + code in fp16 for codes of 8 bits. Whoever
multiplies the floats takes the offset off again with the sum of the other operands.

A code that is an E4M3 float becomes fp16, which holds all of them: by NVIDIA's own instruction, or in its bits.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def asm_text(shift: int, mask: int, exponent: int) -> str:
    """Return PTX that takes the codes at bit *shift* of two 16-bit words in a 32-bit register.

    Bits that the shift brings over from the upper word lie above the mask. 0xEA is (a & b) | c.
    """
    pair, base = mask << 16 | mask, exponent << 16 | exponent
    move = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    return f"{{ .reg .b32 t; {move} lop3.b32 $0, t, {pair:#010x}, {base:#010x}, 0xEA; }}"


@triton.jit
def unpack(words, SHIFT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return offset + code, bf16 or for 8 bits fp16, of the codes at bit SHIFT of uint16 *words*.

    With ASM the shift, the mask and the exponent are a shift and one three-way logic operation on two words.
    """
    TYPE: tl.constexpr = tl.float16 if BITS == 8 else tl.bfloat16
    MASK: tl.constexpr = (1 << BITS) - 1
    EXPONENT: tl.constexpr = 0x6400 if BITS == 8 else 0x4300
    if ASM:
        TEXT: tl.constexpr = asm_text(SHIFT, MASK, EXPONENT)
        if BITS == 8:
            floats = tl.inline_asm_elementwise(TEXT, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
        else:
            floats = tl.inline_asm_elementwise(TEXT, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        floats = (((words >> SHIFT) & MASK) | EXPONENT).to(tl.uint16).to(TYPE, bitcast=True)
    return floats


@triton.constexpr_function
def e4m3_asm_text(shift: int) -> str:
    """Return PTX that makes fp16 of the E4M3 codes at bit *shift*, 0 or 8, of two 16-bit words in a 32-bit register.

    The bytes are put in the order of planes, the same for both of them, so that the assembler does it once.
    """
    half = "hi" if shift else "lo"
    gather = "prmt.b32 t, $1, 0, 0x3120; mov.b32 {lo, hi}, t;"
    return f"{{ .reg .b32 t; .reg .b16 lo, hi; {gather} cvt.rn.f16x2.e4m3x2 $0, {half}; }}"


@triton.jit
def unpack_e4m3(words, SHIFT: tl.constexpr, ASM: tl.constexpr):
    """Return fp16 of the E4M3 codes at bit SHIFT, 0 or 8, of uint16 *words*.

    Without ASM sign, exponent and mantissa go where fp16 has them; its exponents are 8 less for the same number.
    """
    if ASM:
        TEXT: tl.constexpr = e4m3_asm_text(SHIFT)
        floats = tl.inline_asm_elementwise(TEXT, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        code = (words >> SHIFT) & 0xFF
        size = code & 0x7F
        bits = tl.where(size == 0x7F, 0x7E00, size << 7) | ((code & 0x80) << 8)
        floats = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return floats
