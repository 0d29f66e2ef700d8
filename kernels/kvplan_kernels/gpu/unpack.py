"""Codes out of 16-bit words as 16-bit floats, two at a time, without converting integers.

A level in the low bits of a float's mantissa, below an exponent at which one unit is 1, is that float's offset from a
power of two: 128 + level in bf16, which has 7 bits of mantissa, and 1024 + level in fp16 for levels of 8 bits. Whoever
multiplies the floats takes the offset off again with the sum of the other operands.

Where levels are not the codes themselves, they are looked up: on NVIDIA's devices in a table of bytes that are permuted
by a register of four codes, elsewhere one after the other. E2M1 codes become the floats that they are there, which need
no offset.

A code that is a float of 8 bits becomes fp16, which holds all of them: E4M3 by NVIDIA's own instruction, or in its
bits.
"""

import triton
import triton.language as tl

TABLE_WORDS = tl.constexpr(8)
"""Of the learned levels of K and V."""


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
def offset_of(tensor) -> float:
    """Return what is added to a level in the floats that `plane_levels` returns."""
    return -tensor.centre if tensor.signed else 1024.0 if tensor.half else 128.0


@triton.constexpr_function
def is_signed(tensor) -> bool:
    """Return whether those floats are levels counted from the centre."""
    return len(tensor.signed) > 0


@triton.constexpr_function
def exponent_of(tensor) -> int:
    """Return the bits of that number as a 16-bit float."""
    return 0x6400 if tensor.half else 0x4300


@triton.constexpr_function
def shift_of(plane, place: int, channels: int, k: int) -> int:
    """Return where in a word of *plane* the code of channel *k* of *channels* and of its token *place* begins."""
    return plane.bits * (place % plane.tokens * channels + k)


@triton.constexpr_function
def bits_of_code(tensor, code: int) -> int:
    """Return the 16-bit float that stands for a code whose level is in a table."""
    return tensor.signed[code] if tensor.signed else tensor.table[code] | exponent_of(tensor)


@triton.constexpr_function
def codes_of_table(tensor) -> int:
    """Return how many codes have a level of their own; 0 where all are their own level."""
    return tensor.learned or len(tensor.table)


@triton.constexpr_function
def word_of_table(tensor, code: int) -> int:
    """Return which of the words that `level_tables` returns holds the level of *code*."""
    return tensor.first_word + code // 4


@triton.jit
def level_tables(words, G: tl.constexpr):
    """Return the levels that were learned, four to an int32, K's before V's; nothing where none were."""
    found = ()
    if G.learned:
        for i in tl.static_range(TABLE_WORDS):
            found = found + (tl.load(words + i),)
    return found


@triton.jit
def learned_level(tables, code: tl.constexpr, T: tl.constexpr):
    """Return the level of *code*, int32, where it was learned."""
    return (tables[word_of_table(T, code)] >> (8 * (code % 4))) & 0xFF


@triton.jit
def plane_codes(words, high, PLACE: tl.constexpr, k: tl.constexpr, T: tl.constexpr):
    """Return the codes of one plane of channels, uint16: its low bits from *words*, the others from *high*."""
    LOW: tl.constexpr = T.low.bits
    HIGH: tl.constexpr = T.high.bits
    codes = (words >> shift_of(T.low, PLACE, T.planes, k)) & ((1 << LOW) - 1)
    if HIGH > 0:
        codes |= ((high >> shift_of(T.high, PLACE, T.planes, k)) & ((1 << HIGH) - 1)) << LOW
    return codes


@triton.constexpr_function
def two_planes_asm_text(low_bits: int, low_shift: int, high_bits: int, high_shift: int, exponent: int) -> str:
    """Return PTX that takes codes of two planes out of two pairs of words, and puts them under *exponent*."""
    up = low_bits - high_shift
    moves = [_moved("t", "$1", -low_shift), _moved("u", "$2", up)]
    low, high = (1 << low_bits) - 1, (1 << high_bits) - 1 << low_bits
    takes = [f"lop3.b32 t, t, {_pair(low)}, {_pair(exponent)}, 0xEA;", f"lop3.b32 $0, u, {_pair(high)}, t, 0xEA;"]
    return "{ .reg .b32 t, u; " + " ".join(moves + takes) + " }"


@triton.constexpr_function
def _pair(half: int) -> str:
    return f"{half << 16 | half:#010x}"


@triton.constexpr_function
def _moved(to: str, source: str, up: int) -> str:
    """Return PTX that moves bits *up*; what one word loses to the other lies outside of the masks."""
    if up == 0:
        return f"mov.b32 {to}, {source};"
    return f"shl.b32 {to}, {source}, {up};" if up > 0 else f"shr.u32 {to}, {source}, {-up};"


@triton.constexpr_function
def look_up_asm_text(table, bits: int, place: int, exponent: int) -> str:
    """Return PTX that looks up the levels of the codes of one token in two words: $0 to $3 are the four channels'.

    Without a *table* it lies in $6 to $13, each word of it twice: an operand of 32 bits is handed over for either word.

    Codes are spread to four bits each, which is what prmt picks bytes by; it takes three of them from eight bytes, so
    that sixteen levels are two picks and one between them.

    Args:
        table: Of 4, 8 or 16 levels; none where they are operands.
        bits: 2, 3 or 4; a third bit lies in $5, the others in $4.
        place: Of the token in both words.
        exponent: What levels are put under.
    """
    text = [".reg .b32 n, m, s, t, a, b, c;"]
    if bits == 4:
        text += ["mov.b32 n, $4;"]
    else:
        text += [_moved("n", "$4", -8 * (place % 2)), f"and.b32 n, n, {_pair(0xFF)};"]
        text += [
            f"shl.b32 t, n, {up}; lop3.b32 n, n, t, {_pair(mask)}, 0xA8;" for up, mask in ((4, 0x0F0F), (2, 0x3333))
        ]
    if bits == 3:
        text += [_moved("m", "$5", -4 * place), f"and.b32 m, m, {_pair(0xF)};"]
        text += [
            f"shl.b32 t, m, {up}; lop3.b32 m, m, t, {_pair(mask)}, 0xA8;" for up, mask in ((6, 0x0303), (3, 0x1111))
        ]
        text += ["shl.b32 m, m, 2; or.b32 n, n, m;"]
    bytes_of = [*table, *(0 for _ in range(len(table), 16))]
    words = [f"{int.from_bytes(bytes_of[i : i + 4], 'little'):#010x}" for i in range(0, 16, 4)]
    if not table:
        words = [f"${6 + 2 * i}" for i in range(4)]
    if bits == 4:
        text += [f"shr.u32 m, n, 1; lop3.b32 m, m, {_pair(0x4444)}, {_pair(0x3210)}, 0xEA;"]
    text += [f"and.b32 n, n, {_pair(0x7777)};"]
    for found in ("a", "b"):
        text += [f"prmt.b32 {found}, {words[0]}, {words[1]}, n;"]
        if bits == 4:
            text += [f"prmt.b32 c, {words[2]}, {words[3]}, n; prmt.b32 {found}, {found}, c, m; shr.u32 m, m, 16;"]
        text += ["shr.u32 n, n, 16;"]
    for k in range(4):
        text += [
            f"prmt.b32 t, a, b, {k | (4 + k) << 8:#06x}; lop3.b32 ${k}, t, {_pair(0xFF)}, {_pair(exponent)}, 0xEA;"
        ]
    return "{ " + " ".join(text) + " }"


@triton.constexpr_function
def e2m1_asm_text(shift: int) -> str:
    """Return PTX that makes bf16 of the halves in the E2M1 codes at bit *shift* of two words.

    Sign, exponent and mantissa go where bf16 has them; its exponents are 126 more for the same number.
    """
    moves = [_moved("t", "$1", 12 - shift), _moved("u", "$1", 6 - shift)]
    takes = [f"and.b32 t, t, {_pair(0x8000)};", f"lop3.b32 t, u, {_pair(0x01C0)}, t, 0xEA;"]
    times = f"mov.b32 u, {_pair(0x7F00)}; mov.b32 v, {_pair(0x8000)}; fma.rn.bf16x2 $0, t, u, v;"
    return "{ .reg .b32 t, u, v; " + " ".join(moves + takes) + f" {times} }}"


@triton.jit
def looked_up(words, high, tables, PLACE: tl.constexpr, k: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """Return offset + level of one plane of channels whose levels are in a table."""
    TYPE: tl.constexpr = tl.float16 if T.half else tl.bfloat16
    EXPONENT: tl.constexpr = exponent_of(T)
    if ASM and is_signed(T):
        SIGNED_TEXT: tl.constexpr = e2m1_asm_text(shift_of(T.low, PLACE, T.planes, k))
        levels = tl.inline_asm_elementwise(SIGNED_TEXT, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif ASM and T.learned > 0:
        LEARNED_TEXT: tl.constexpr = look_up_asm_text((), T.bits, PLACE, EXPONENT)
        found = tl.inline_asm_elementwise(
            LEARNED_TEXT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [words, high, tables[T.first_word], tables[T.first_word + 1], tables[T.first_word + 2],
             tables[T.first_word + 3]],
            dtype=(tl.float16,) * 4, is_pure=True, pack=2,
        )  # fmt: skip
        levels = found[k]
    elif ASM:  # the same for all planes, so that the compiler does it once
        TEXT: tl.constexpr = look_up_asm_text(T.table, T.bits, PLACE, EXPONENT)
        if T.half:
            found = tl.inline_asm_elementwise(
                TEXT, "=r,=r,=r,=r,r,r", [words, high], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
        else:
            found = tl.inline_asm_elementwise(
                TEXT, "=r,=r,=r,=r,r,r", [words, high], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        levels = found[k]
    else:
        codes = plane_codes(words, high, PLACE, k, T)
        bits = codes & 0
        for code in tl.static_range(codes_of_table(T)):
            if T.learned > 0:
                bits = tl.where(codes == code, (learned_level(tables, code, T) | EXPONENT).to(bits.dtype), bits)
            else:
                bits = tl.where(codes == code, bits_of_code(T, code), bits)
        levels = bits.to(tl.uint16).to(TYPE, bitcast=True)
    return levels


@triton.jit
def plane_levels(words, high, tables, PLACE: tl.constexpr, k: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """Return offset + level of the codes of channel plane *k* and of the token at PLACE of their words.

    Args:
        words: uint16, those of the plane of low bits.
        high: Those of the plane of high bits; anything where there is none.
        tables: What `level_tables` returned.
        PLACE: Of the token in the plane whose words hold most tokens.
        k: Of `T.planes`.
        T: How the tensor is coded.
        ASM: Whether the device takes NVIDIA's PTX.
    """
    LOW: tl.constexpr = T.low.bits
    HIGH: tl.constexpr = T.high.bits
    SHIFT: tl.constexpr = shift_of(T.low, PLACE, T.planes, k)
    if codes_of_table(T) > 0:
        levels = looked_up(words, high, tables, PLACE, k, T, ASM)
    elif HIGH == 0:
        levels = unpack(words, SHIFT, LOW, ASM)
    elif ASM:
        TEXT: tl.constexpr = two_planes_asm_text(LOW, SHIFT, HIGH, shift_of(T.high, PLACE, T.planes, k), exponent_of(T))
        levels = tl.inline_asm_elementwise(TEXT, "=r,r,r", [words, high], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        codes = plane_codes(words, high, PLACE, k, T)
        levels = (codes | exponent_of(T)).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return levels


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


@triton.constexpr_function
def e5m2_asm_text(shift: int) -> str:
    """Return PTX that makes fp16 of the E5M2 codes at bit *shift*, 0 or 8, of two words: they are its upper bytes."""
    return f"{{ .reg .b32 t; {_moved('t', '$1', 8 - shift)} and.b32 $0, t, {_pair(0xFF00)}; }}"


@triton.jit
def unpack_e5m2(words, SHIFT: tl.constexpr, ASM: tl.constexpr):
    """Return fp16 of the E5M2 codes at bit SHIFT, 0 or 8, of uint16 *words*."""
    if ASM:
        TEXT: tl.constexpr = e5m2_asm_text(SHIFT)
        floats = tl.inline_asm_elementwise(TEXT, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        floats = (((words >> SHIFT) & 0xFF) << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    return floats


@triton.jit
def plane_floats(words, k: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr):
    """Return fp16 of the codes of channel plane *k*, which are floats of 8 bits."""
    if T.floats == "e4m3":
        floats = unpack_e4m3(words, T.bits * k, ASM)
    else:
        floats = unpack_e5m2(words, T.bits * k, ASM)
    return floats
