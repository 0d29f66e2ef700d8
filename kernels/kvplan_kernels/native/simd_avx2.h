// Sixteen lanes as two vectors of eight, on AVX2, FMA and F16C.
#pragma once

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
typedef uint32_t Mask;

#define KVPLAN_BLOCK_ROWS 4 // query rows that share one pass over a tile
#define KVPLAN_KEY_RUNS 1
#define KVPLAN_VALUE_VECTORS 1
#define KVPLAN_HALF_VECTORS 1

#define KVPLAN_ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

INLINE __m256i lanes8(Mask m) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bit), bit);
}
INLINE Mask bits8(__m256 a, __m256 b) { return (Mask)_mm256_movemask_ps(a) | (Mask)_mm256_movemask_ps(b) << 8; }

INLINE F fzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE F fset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F fload(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void fstore(float *p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; } // y where either is NaN
INLINE F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; } // y where either is NaN
INLINE F fabs_(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE F fround(F x) { return {_mm256_round_ps(x.a, KVPLAN_ROUND), _mm256_round_ps(x.b, KVPLAN_ROUND)}; }
INLINE F fselect(Mask m, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(lanes8(m))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(lanes8(m >> 8)))};
}
INLINE Mask fless(F x, F y) { return bits8(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)); }
INLINE Mask fequal(F x, F y) { return bits8(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)); }
INLINE Mask ffinite(F x) {
  F size = fabs_(x);
  const __m256 most = _mm256_set1_ps(__FLT_MAX__);
  return bits8(_mm256_cmp_ps(size.a, most, _CMP_LE_OQ), _mm256_cmp_ps(size.b, most, _CMP_LE_OQ));
}
INLINE I ftoi(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE F itof(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE F fbits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE I ibits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE I iload(const void *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
INLINE I iload_part(const void *p, Mask m) {
  return {_mm256_maskload_epi32((const int *)p, lanes8(m)), _mm256_maskload_epi32((const int *)p + 8, lanes8(m >> 8))};
}
INLINE void istore(void *p, I x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
INLINE void istore_part(void *p, Mask m, I x) {
  _mm256_maskstore_epi32((int *)p, lanes8(m), x.a);
  _mm256_maskstore_epi32((int *)p + 8, lanes8(m >> 8), x.b);
}
INLINE F fsqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE I byte_load(const void *p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
INLINE void byte_store(void *p, Mask m, I x) {
  int32_t lanes[16];
  _mm256_storeu_si256((__m256i *)lanes, x.a);
  _mm256_storeu_si256((__m256i *)lanes + 1, x.b);
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) ((uint8_t *)p)[i] = (uint8_t)lanes[i];
}
// The byte of a table of 16 that each byte, at most 15, names.
INLINE I table_bytes(const uint8_t *table, I x) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return {_mm256_shuffle_epi8(both, x.a), _mm256_shuffle_epi8(both, x.b)};
}
INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
INLINE I ishl(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
INLINE I ishr(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
INLINE I isar(I x, int n) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
INLINE I iselect(Mask m, I x, I y) { return ibits(fselect(m, fbits(x), fbits(y))); }
INLINE F fload_part(const float *p, Mask m) { return fbits(iload_part(p, m)); }

INLINE F ftimes_power(F p, F n) { // p * 2^n, n within -126 to 127
  I e = ishl(iadd(ftoi(n), iset(127)), 23);
  return fmul(p, fbits(e));
}
INLINE float fsum(F x) {
  __m256 v = _mm256_add_ps(x.a, x.b);
  __m128 w = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  w = _mm_add_ps(w, _mm_movehl_ps(w, w));
  return _mm_cvtss_f32(_mm_add_ss(w, _mm_movehdup_ps(w)));
}
INLINE float fmaximum(F x) {
  __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  w = _mm_max_ps(w, _mm_movehl_ps(w, w));
  return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}
INLINE float fminimum(F x) { return -fmaximum(fsub(fzero(), x)); }
INLINE F fmax4(const F *v) {
  float lanes[16] = {fmaximum(v[0]), fmaximum(v[1]), fmaximum(v[2]), fmaximum(v[3])};
  return fload(lanes);
}
INLINE F fsum4(const F *v) {
  float lanes[16] = {fsum(v[0]), fsum(v[1]), fsum(v[2]), fsum(v[3])};
  return fload(lanes);
}

INLINE F half_load(const void *p) {
  const __m128i *at = (const __m128i *)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
INLINE F half_round(F x) {
  return {_mm256_cvtph_ps(_mm256_cvtps_ph(x.a, KVPLAN_ROUND)), _mm256_cvtph_ps(_mm256_cvtps_ph(x.b, KVPLAN_ROUND))};
}
INLINE I half_bits(F x) {
  return {_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.a, KVPLAN_ROUND)),
          _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.b, KVPLAN_ROUND))};
}
INLINE __m128i shorts8(__m256i x) {
  __m256i packed = _mm256_packus_epi32(x, x);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
INLINE F half_float(I x) { return {_mm256_cvtph_ps(shorts8(x.a)), _mm256_cvtph_ps(shorts8(x.b))}; }
INLINE I short_load(const void *p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)),
          _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1))};
}
INLINE I short_load_part(const void *p, Mask m) {
  uint16_t lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = m >> i & 1 ? ((const uint16_t *)p)[i] : 0;
  return short_load(lanes);
}
INLINE void short_store(void *p, Mask m, I x) {
  __m128i a = shorts8(x.a), b = shorts8(x.b);
  if (m == 0xffff) {
    _mm_storeu_si128((__m128i *)p, a);
    _mm_storeu_si128((__m128i *)p + 1, b);
    return;
  }
  uint16_t lanes[16];
  _mm_storeu_si128((__m128i *)lanes, a);
  _mm_storeu_si128((__m128i *)lanes + 1, b);
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) ((uint16_t *)p)[i] = lanes[i];
}
INLINE void half_store(void *p, Mask m, F x) { short_store(p, m, half_bits(x)); }

INLINE void transpose8(__m256 *r) {
  __m256 t[8], u[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
INLINE void transpose(F *r) {
  __m256 q[4][8];
  for (int i = 0; i < 8; i++) {
    q[0][i] = r[i].a;
    q[1][i] = r[i].b;
    q[2][i] = r[i + 8].a;
    q[3][i] = r[i + 8].b;
  }
  for (int i = 0; i < 4; i++) transpose8(q[i]);
  for (int i = 0; i < 8; i++) {
    r[i] = {q[0][i], q[2][i]};
    r[i + 8] = {q[1][i], q[3][i]};
  }
}

// Sums of unsigned code bytes times 16-bit operands, exact in 32 bits: even and odd bytes with pairs of int16.
struct Dot {
  I sum;
};
INLINE Dot dot_zero() { return {izero()}; }
struct Quad {
  __m256i even, odd;
};
INLINE Quad quad_load(const uint8_t *a, const uint8_t *b) {
  return {_mm256_set1_epi32(*(const int32_t *)a), _mm256_set1_epi32(*(const int32_t *)b)};
}
INLINE __m256i dot8(__m256i sum, __m256i codes, const Quad &q) {
  __m256i even = _mm256_and_si256(codes, _mm256_set1_epi32(0x00ff00ff)), odd = _mm256_srli_epi16(codes, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, q.even), _mm256_madd_epi16(odd, q.odd)));
}
INLINE void dot_add(Dot &d, I codes, const Quad &q) {
  d.sum.a = dot8(d.sum.a, codes.a, q);
  d.sum.b = dot8(d.sum.b, codes.b, q);
}
INLINE I dot_sum(const Dot &d) { return d.sum; }
// Store 16 operands, within +-32512, as 4 quads on each of two planes.
INLINE void quads_store16(uint8_t *a, uint8_t *b, I x) {
  // Per half: shorts x0 x1 .. x7 of two quads; even members to plane a, odd ones to b.
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); // x0 .. x15
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, //
                                         0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  __m256i split = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(packed, order), 0xd8);
  _mm_storeu_si128((__m128i *)a, _mm256_castsi256_si128(split));
  _mm_storeu_si128((__m128i *)b, _mm256_extracti128_si256(split, 1));
}
INLINE void quads_store(uint8_t *a, uint8_t *b, I x, I y) {
  quads_store16(a, b, x);
  quads_store16(a + 16, b + 16, y);
}

// Sums of 16-bit values times float32 operands; a word holds two values.
template <int TYPE> struct Pairs;
template <> struct Pairs<KVPLAN_BF16> {
  F sum;
  struct Word {
    F first, second;
  };
  static INLINE Word load(I w) { return {fbits(ishl(w, 16)), fbits(iand(w, iset((int32_t)0xffff0000)))}; }
  static INLINE void store(float *p, F x) { fstore(p, x); }
  INLINE void zero() { sum = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    sum = fma(w.first, fset(operands[0]), sum);
    sum = fma(w.second, fset(operands[1]), sum);
  }
  INLINE F total() const { return sum; }
};
template <> struct Pairs<KVPLAN_FP16> {
  F low, high; // of words 0 to 7 and 8 to 15; first and second values alternate
  struct Word {
    F low, high;
  };
  static INLINE F halves(__m256i w) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(w)), _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1))};
  }
  static INLINE Word load(I w) { return {halves(w.a), halves(w.b)}; }
  static INLINE void store(float *p, F x) { fstore(p, x); }
  INLINE void zero() { low = high = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    double both;
    __builtin_memcpy(&both, operands, 8);
    __m256 x = _mm256_castpd_ps(_mm256_set1_pd(both));
    low = {_mm256_fmadd_ps(w.low.a, x, low.a), _mm256_fmadd_ps(w.low.b, x, low.b)};
    high = {_mm256_fmadd_ps(w.high.a, x, high.a), _mm256_fmadd_ps(w.high.b, x, high.b)};
  }
  static INLINE __m256 joined(F x) {
    __m256d sums = _mm256_castps_pd(_mm256_hadd_ps(x.a, x.b));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(sums, 0xd8));
  }
  INLINE F total() const { return {joined(low), joined(high)}; }
};
