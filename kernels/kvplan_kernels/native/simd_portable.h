// Sixteen lanes in the compiler's own vectors: any machine, no flags.
#pragma once

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint32_t Mask;

#define KVPLAN_BLOCK_ROWS 1 // query rows that share one pass over a tile
#define KVPLAN_KEY_RUNS 1
#define KVPLAN_VALUE_VECTORS 1
#define KVPLAN_HALF_VECTORS 1

INLINE I lanes(Mask m) {
  const I bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  return (((I){} + (int32_t)m) & bit) != 0;
}
INLINE Mask bits(I x) {
  Mask m = 0;
  for (int i = 0; i < 16; i++) m |= (Mask)(x[i] & 1) << i;
  return m;
}

INLINE F fzero() { return (F){}; }
INLINE F fset(float x) { return x - (F){}; }
INLINE F fload(const float *p) {
  F x;
  __builtin_memcpy(&x, p, 64);
  return x;
}
INLINE void fstore(float *p, F x) { __builtin_memcpy(p, &x, 64); }
INLINE F fadd(F a, F b) { return a + b; }
INLINE F fsub(F a, F b) { return a - b; }
INLINE F fmul(F a, F b) { return a * b; }
INLINE F fdiv(F a, F b) { return a / b; }
INLINE F fma(F a, F b, F c) { return a * b + c; }
INLINE F fmax(F a, F b) { return a > b ? a : b; } // b where either is NaN
INLINE F fmin(F a, F b) { return a < b ? a : b; } // b where either is NaN
INLINE F fbits(I a) { return (F)a; }
INLINE I ibits(F a) { return (I)a; }
INLINE F fabs_(F a) { return fbits(ibits(a) & 0x7fffffff); }
INLINE F fselect(Mask m, F a, F b) { return lanes(m) ? a : b; }
INLINE Mask fless(F a, F b) { return bits(a < b); }
INLINE Mask fequal(F a, F b) { return bits(a == b); }
INLINE Mask ffinite(F a) { return bits(fabs_(a) <= __FLT_MAX__); }
INLINE F itof(I a) { return __builtin_convertvector(a, F); }
// Half to even: adding 1.5 * 2^23 leaves no fraction bits. Larger values are whole already.
INLINE F fround(F a) {
  const F magic = fset(12582912.0f);
  volatile F shifted = a + magic;
  F whole = shifted - magic;
  return fabs_(a) < 4194304.0f ? whole : a;
}
INLINE I ftoi(F a) {
  F x = fround(a);
  x = x > -2147483648.0f ? x : fset(-2147483648.0f); // NaN as well
  x = x < 2147483520.0f ? x : fset(2147483520.0f);
  return __builtin_convertvector(x, I);
}

INLINE I izero() { return (I){}; }
INLINE I iset(int32_t x) { return (I){} + x; }
INLINE I iload(const void *p) {
  I x;
  __builtin_memcpy(&x, p, 64);
  return x;
}
INLINE I iload_part(const void *p, Mask m) {
  I x = {};
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) __builtin_memcpy((char *)&x + 4 * i, (const char *)p + 4 * i, 4);
  return x;
}
INLINE void istore(void *p, I x) { __builtin_memcpy(p, &x, 64); }
INLINE void istore_part(void *p, Mask m, I x) {
  if (m == 0xffff) __builtin_memcpy(p, &x, 64);
  else
    for (int i = 0; i < 16; i++)
      if (m >> i & 1) __builtin_memcpy((char *)p + 4 * i, (const char *)&x + 4 * i, 4);
}
INLINE I iadd(I a, I b) { return (I)((U)a + (U)b); }
INLINE I isub(I a, I b) { return (I)((U)a - (U)b); }
INLINE I iand(I a, I b) { return a & b; }
INLINE I ior(I a, I b) { return a | b; }
INLINE I ixor(I a, I b) { return a ^ b; }
INLINE I ishl(I a, int n) { return (I)((U)a << n); }
INLINE I ishr(I a, int n) { return (I)((U)a >> n); }
INLINE I isar(I a, int n) { return a >> n; }
INLINE I iselect(Mask m, I a, I b) { return lanes(m) ? a : b; }
INLINE F fload_part(const float *p, Mask m) { return fbits(iload_part(p, m)); }
INLINE F fsqrt(F a) {
  F x;
  for (int i = 0; i < 16; i++) x[i] = sqrtf(a[i]);
  return x;
}
INLINE I byte_load(const void *p) {
  I x;
  for (int i = 0; i < 16; i++) x[i] = ((const uint8_t *)p)[i];
  return x;
}
INLINE void byte_store(void *p, Mask m, I x) {
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) ((uint8_t *)p)[i] = (uint8_t)x[i];
}
// The byte of a table of 16 that each byte, at most 15, names.
INLINE I table_bytes(const uint8_t *table, I x) {
  uint8_t names[64];
  __builtin_memcpy(names, &x, 64);
  for (int i = 0; i < 64; i++) names[i] = table[names[i] & 15];
  __builtin_memcpy(&x, names, 64);
  return x;
}

INLINE F ftimes_power(F p, F n) { return p * fbits((ftoi(n) + 127) << 23); } // p * 2^n, n within -126 to 127
INLINE float fsum(F x) {
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
}
INLINE float fmaximum(F x) {
  float most = x[0];
  for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
  return most;
}
INLINE float fminimum(F x) { return -fmaximum(-x); }
INLINE F fmax4(const F *v) {
  F x = {fmaximum(v[0]), fmaximum(v[1]), fmaximum(v[2]), fmaximum(v[3])};
  return x;
}
INLINE F fsum4(const F *v) {
  F x = {fsum(v[0]), fsum(v[1]), fsum(v[2]), fsum(v[3])};
  return x;
}

INLINE F half_float(I h) {
  I sign = ishl(h & 0x8000, 16), rest = h & 0x7fff;
  F finite = fbits(rest << 13) * 5.192296858534828e33f; // 2^112: exponent bias 15 to 127, subnormals as well
  F special = fbits((rest << 13) | 0x7f800000);
  return fbits(ibits(rest < 0x7c00 ? finite : special) | sign);
}
INLINE I half_bits(F x) { // round half to even
  I sign = iand(ishr(ibits(x), 16), iset(0x8000)), rest = ibits(x) & 0x7fffffff;
  I odd = (rest >> 13) & 1;
  I normal = (rest - 0x38000000 + 0xfff + odd) >> 13;
  F shifted = fbits(rest) + 0.5f; // 2^-1 has units of 2^-24, fp16's smallest step
  I subnormal = ibits(shifted) - 0x3f000000;
  I half = rest < 0x38800000 ? subnormal : normal;
  half = half > 0x7c00 ? iset(0x7c00) : half;
  half = rest > 0x7f800000 ? iset(0x7e00) : half;
  return half | sign;
}
INLINE F half_round(F x) { return half_float(half_bits(x)); }
INLINE I short_load(const void *p) {
  typedef uint16_t S __attribute__((vector_size(32)));
  S x;
  __builtin_memcpy(&x, p, 32);
  return __builtin_convertvector(x, I);
}
INLINE I short_load_part(const void *p, Mask m) {
  I x = {};
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) x[i] = ((const uint16_t *)p)[i];
  return x;
}
INLINE void short_store(void *p, Mask m, I x) {
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) ((uint16_t *)p)[i] = (uint16_t)x[i];
}
INLINE F half_load(const void *p) { return half_float(short_load(p)); }
INLINE void half_store(void *p, Mask m, F x) { short_store(p, m, half_bits(x)); }

INLINE void transpose(F *r) {
  float t[16][16];
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) t[j][i] = r[i][j];
  for (int i = 0; i < 16; i++) r[i] = fload(t[i]);
}

// Sums of unsigned code bytes times 16-bit operands, exact in 32 bits.
struct Dot {
  I sum;
};
INLINE Dot dot_zero() { return {izero()}; }
struct Quad {
  int32_t x[4];
};
INLINE Quad quad_load(const uint8_t *a, const uint8_t *b) {
  int16_t even[2], odd[2];
  __builtin_memcpy(even, a, 4);
  __builtin_memcpy(odd, b, 4);
  return {{even[0], odd[0], even[1], odd[1]}};
}
INLINE void dot_add(Dot &d, I codes, const Quad &q) {
  d.sum += (codes & 255) * q.x[0] + (codes >> 8 & 255) * q.x[1];
  d.sum += (codes >> 16 & 255) * q.x[2] + (ishr(codes, 24)) * q.x[3];
}
INLINE I dot_sum(const Dot &d) { return d.sum; }
// Store 16 operands, within +-32512, as 4 quads on each of two planes.
INLINE void quads_store16(uint8_t *a, uint8_t *b, I x) {
  int16_t even[8], odd[8];
  for (int i = 0; i < 8; i++) {
    even[i] = (int16_t)x[2 * i];
    odd[i] = (int16_t)x[2 * i + 1];
  }
  __builtin_memcpy(a, even, 16);
  __builtin_memcpy(b, odd, 16);
}
INLINE void quads_store(uint8_t *a, uint8_t *b, I x, I y) {
  quads_store16(a, b, x);
  quads_store16(a + 16, b + 16, y);
}

// Sums of 16-bit values times float32 operands; a word holds two values.
template <int TYPE> struct Pairs {
  F sum;
  struct Word {
    F first, second;
  };
  static INLINE Word load(I w) {
    if (TYPE == KVPLAN_BF16) return {fbits(ishl(w, 16)), fbits(w & (int32_t)0xffff0000)};
    return {half_float(w & 0xffff), half_float(ishr(w, 16))};
  }
  static INLINE void store(float *p, F x) { fstore(p, x); }
  INLINE void zero() { sum = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    sum = fma(w.first, fset(operands[0]), sum);
    sum = fma(w.second, fset(operands[1]), sum);
  }
  INLINE F total() const { return sum; }
};
