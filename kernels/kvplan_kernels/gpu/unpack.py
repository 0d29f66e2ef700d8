"""Codes out of 16-bit words as 16-bit floats, two at a time, without converting integers.

A code in the low bits of a float's mantissa, below an exponent at which one unit is 1, is that float's offset from a
power of two: 128 + code in bf16, which has 7 bits of mantissa, and 1024 + code in fp16 for codes of 8 bits. Whoever
multiplies the floats takes the offset off again with the sum of the other operands.
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
