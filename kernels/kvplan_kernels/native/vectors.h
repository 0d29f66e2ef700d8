// What the kernels share on top of sixteen lanes.
#pragma once

constexpr int LANES = 16;
constexpr int ROWS = 4; // the most rows that KVPLAN_BLOCK_ROWS may be; states and operands have room for them
constexpr float OPERAND_MOST = 32512.0f; // 127 * 256: the largest 16-bit operand whose high part fits a byte
constexpr Mask ALL = 0xffff;

INLINE Mask lanes_between(int64_t first, int64_t last) {
  int64_t a = first < 0 ? 0 : first > LANES ? LANES : first, b = last < 0 ? 0 : last > LANES ? LANES : last;
  return b > a ? (Mask)((1u << b) - (1u << a)) : 0;
}

// To the second level, which has three times the first one's room for lines under way.
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }
INLINE void prefetch_span(const uint8_t *from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) prefetch(from + at);
}

// 2^r for r in [-1/2, 1/2]: Chebyshev fit of degree 5, relative error 2.2e-7 in float32.
INLINE F power_part(F r) {
  F p = fset(0.0013266970636323094f);
  p = fma(p, r, fset(0.009675459936261177f));
  p = fma(p, r, fset(0.05550742521882057f));
  p = fma(p, r, fset(0.24022121727466583f));
  p = fma(p, r, fset(0.6931469440460205f));
  return fma(p, r, fset(1.0000001192092896f));
}

// 2^x, x limited to what a normal float32 holds. NaN stays NaN.
INLINE F fexp2(F x) {
  x = fmin(fset(126.0f), fmax(fset(-126.0f), x));
  F whole = fround(x), r = fsub(x, whole);
  return ftimes_power(power_part(r), whole);
}

// 2^x for x <= 0.
INLINE F fexp2_below(F x) {
  x = fmax(fset(-126.0f), x);
  F whole = fround(x), r = fsub(x, whole);
  return ftimes_power(power_part(r), whole);
}

INLINE float exp2_scalar(float x) {
  float lanes[LANES];
  fstore(lanes, fexp2(fset(x)));
  return lanes[0];
}

INLINE F ftanh(F x) { // (e - 1) / (e + 1) with e = exp(2 x); absolute error 2e-7
  F limited = fmin(fset(20.0f), fmax(fset(-20.0f), x));
  F e = fexp2(fmul(limited, fset(2.8853900817779268f)));
  return fdiv(fsub(e, fset(1.0f)), fadd(e, fset(1.0f)));
}

// Float32 values of 16 elements in a 16- or 32-bit type, zero outside the mask.
INLINE F load_values(const void *p, int type, Mask m) {
  if (type == KVPLAN_FP32) return fload_part((const float *)p, m);
  I bits = m == ALL ? short_load(p) : short_load_part(p, m);
  return type == KVPLAN_BF16 ? fbits(ishl(bits, 16)) : half_float(bits);
}

INLINE int64_t type_bytes(int type) { return type == KVPLAN_FP32 ? 4 : 2; }

// The 16-bit pattern of each value, rounded half to even.
INLINE I to_bits(F x, int type) {
  if (type == KVPLAN_FP16) return half_bits(x);
  I b = ibits(x);
  I rounded = ishr(iadd(b, iadd(iset(0x7fff), iand(ishr(b, 16), iset(1)))), 16);
  I quiet = ior(ishr(b, 16), iset(0x40));
  return iselect(fequal(x, x), rounded, quiet);
}

// Sixteen values as two bf16 parts each, the value cut and what is left: 16 bits of mantissa.
INLINE void store_halves(uint16_t *high, uint16_t *low, F x) {
  const I top = iand(ibits(x), iset((int32_t)0xffff0000));
  short_store(high, ALL, ishr(top, 16));
  short_store(low, ALL, ishr(iadd(ibits(fsub(x, fbits(top))), iset(0x8000)), 16));
}

INLINE F from_bits(I b, int type) { return type == KVPLAN_FP16 ? half_float(b) : fbits(ishl(b, 16)); }
