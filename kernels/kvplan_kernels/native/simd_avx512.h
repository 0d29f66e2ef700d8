// Sixteen lanes on AVX-512 F, BW, DQ, VL and VNNI, with BF16 dot products where KVPLAN_DOT_BF16 is set.
#pragma once

typedef __m512 F;
typedef __m512i I;
typedef uint32_t Mask;

#define KVPLAN_BLOCK_ROWS 4 // query rows that share one pass over a tile
#define KVPLAN_KEY_RUNS 2      // runs of 16 tokens whose integer scores are summed together
#define KVPLAN_VALUE_VECTORS 2 // vectors of 16 channels whose integer sums are held together
#define KVPLAN_HALF_VECTORS 4  // either, for 16-bit values

INLINE F fzero() { return _mm512_setzero_ps(); }
INLINE F fset(float x) { return _mm512_set1_ps(x); }
INLINE F fload(const float *p) { return _mm512_loadu_ps(p); }
INLINE void fstore(float *p, F x) { _mm512_storeu_ps(p, x); }
INLINE F fadd(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
INLINE F fmax(F a, F b) { return _mm512_max_ps(a, b); } // b where either is NaN
INLINE F fmin(F a, F b) { return _mm512_min_ps(a, b); } // b where either is NaN
INLINE F fabs_(F a) { return _mm512_abs_ps(a); }
INLINE F fround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE F fselect(Mask m, F a, F b) { return _mm512_mask_mov_ps(b, (__mmask16)m, a); }
INLINE Mask fless(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE Mask fequal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE Mask ffinite(F a) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(__FLT_MAX__), _CMP_LE_OQ);
}
INLINE I ftoi(F a) { return _mm512_cvtps_epi32(a); }
INLINE F itof(I a) { return _mm512_cvtepi32_ps(a); }
INLINE F fbits(I a) { return _mm512_castsi512_ps(a); }
INLINE I ibits(F a) { return _mm512_castps_si512(a); }
INLINE F ftimes_power(F p, F n) { return _mm512_scalef_ps(p, n); } // p * 2^n
INLINE float fsum(F a) { return _mm512_reduce_add_ps(a); }
INLINE float fmaximum(F a) { return _mm512_reduce_max_ps(a); }
INLINE float fminimum(F a) { return _mm512_reduce_min_ps(a); }

// The greatest lane of each of four vectors, in lanes 0 to 3. No NaN.
INLINE F fmax4(const F *v) {
  F a = fmax(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  F b = fmax(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512d ad = _mm512_castps_pd(a), bd = _mm512_castps_pd(b);
  F c = fmax(_mm512_castpd_ps(_mm512_unpacklo_pd(ad, bd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ad, bd)));
  c = fmax(c, _mm512_shuffle_f32x4(c, c, 0x4e));
  return fmax(c, _mm512_shuffle_f32x4(c, c, 0xb1));
}

// The sum of each of four vectors, in lanes 0 to 3.
INLINE F fsum4(const F *v) {
  F a = fadd(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  F b = fadd(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  __m512d ad = _mm512_castps_pd(a), bd = _mm512_castps_pd(b);
  F c = fadd(_mm512_castpd_ps(_mm512_unpacklo_pd(ad, bd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ad, bd)));
  c = fadd(c, _mm512_shuffle_f32x4(c, c, 0x4e));
  return fadd(c, _mm512_shuffle_f32x4(c, c, 0xb1));
}

INLINE F half_load(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void half_store(void *p, Mask m, F a) {
  _mm256_mask_storeu_epi16(p, (__mmask16)m, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE F half_round(F a) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE I half_bits(F a) {
  return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE F half_float(I a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
INLINE I short_load(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE I short_load_part(const void *p, Mask m) {
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)m, p));
}
INLINE void short_store(void *p, Mask m, I a) {
  _mm256_mask_storeu_epi16(p, (__mmask16)m, _mm512_cvtepi32_epi16(a));
}

INLINE I izero() { return _mm512_setzero_si512(); }
INLINE I iset(int32_t x) { return _mm512_set1_epi32(x); }
INLINE I iload(const void *p) { return _mm512_loadu_si512(p); }
INLINE I iload_part(const void *p, Mask m) { return _mm512_maskz_loadu_epi32((__mmask16)m, p); }
INLINE void istore(void *p, I a) { _mm512_storeu_si512(p, a); }
INLINE void istore_part(void *p, Mask m, I a) { _mm512_mask_storeu_epi32(p, (__mmask16)m, a); }
INLINE F fload_part(const float *p, Mask m) { return _mm512_maskz_loadu_ps((__mmask16)m, p); }
INLINE F fsqrt(F a) { return _mm512_sqrt_ps(a); }
INLINE I byte_load(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE void byte_store(void *p, Mask m, I a) { _mm_mask_storeu_epi8(p, (__mmask16)m, _mm512_cvtepi32_epi8(a)); }
// The byte of a table of 16 that each byte, at most 15, names.
INLINE I table_bytes(const uint8_t *table, I x) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), x);
}
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
INLINE I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
INLINE I ishl(I a, int n) { return _mm512_slli_epi32(a, n); }
INLINE I ishr(I a, int n) { return _mm512_srli_epi32(a, n); }
INLINE I isar(I a, int n) { return _mm512_srai_epi32(a, n); }
INLINE I iselect(Mask m, I a, I b) { return _mm512_mask_mov_epi32(b, (__mmask16)m, a); }

// Rows become columns: 16 vectors of 16 lanes.
INLINE void transpose(F *r) {
  F t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 2]);
    __m512d c = _mm512_castps_pd(t[4 * i + 1]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Sums of unsigned code bytes times 16-bit operands, exact in 32 bits: 256 channels * 255 * 32639 < 2^31.
// An operand x is 256 * high + low, either part a signed byte.
struct Dot {
  I high, low;
};
INLINE Dot dot_zero() { return {izero(), izero()}; }
INLINE I byte4(const void *p) { return _mm512_set1_epi32(*(const int32_t *)p); }
struct Quad {
  I high, low;
};
INLINE Quad quad_load(const uint8_t *a, const uint8_t *b) { return {byte4(a), byte4(b)}; }
INLINE void dot_add(Dot &d, I codes, const Quad &q) {
  d.high = _mm512_dpbusd_epi32(d.high, codes, q.high);
  d.low = _mm512_dpbusd_epi32(d.low, codes, q.low);
}
INLINE I dot_sum(const Dot &d) { return iadd(ishl(d.high, 8), d.low); }
// Store 32 operands, within +-32512, as 8 quads on each of two planes.
INLINE void quads_store(uint8_t *a, uint8_t *b, I x, I y) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i both = _mm512_packs_epi32(x, y);
  const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(both, _mm512_set1_epi16(128)), 8);
  const __m512i low = _mm512_sub_epi16(both, _mm512_slli_epi16(high, 8));
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(high, low));
  _mm256_storeu_si256((__m256i *)a, _mm512_castsi512_si256(bytes));
  _mm256_storeu_si256((__m256i *)b, _mm512_extracti64x4_epi64(bytes, 1));
}

// Sums of 16-bit values times float32 operands; a word holds two values.
template <int TYPE> struct Pairs;
#ifdef KVPLAN_DOT_BF16
template <> struct Pairs<KVPLAN_BF16> {
  F sum;
  typedef __m512bh Word;
  static INLINE Word load(I w) { return (__m512bh)w; }
  INLINE void zero() { sum = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    sum = _mm512_dpbf16_ps(sum, w, (__m512bh)byte4(operands));
    sum = _mm512_dpbf16_ps(sum, w, (__m512bh)byte4(operands + 1));
  }
  INLINE F total() const { return sum; }
  // Eight pairs as two bf16 parts each, the value rounded and what is left: 16 bits of mantissa.
  static INLINE void store(float *p, F x) {
    F high = _mm512_castsi512_ps(iand(ibits(x), iset((int32_t)0xffff0000)));
    I low = iadd(ibits(fsub(x, high)), iset(0x8000));
    I first = ishr(ibits(high), 16), second = ishr(low, 16);
    // Lanes 2k and 2k + 1 hold one pair: join their 16-bit halves in a word each.
    I highs = ior(first, _mm512_slli_epi64(_mm512_srli_epi64(first, 32), 16));
    I lows = ior(second, _mm512_slli_epi64(_mm512_srli_epi64(second, 32), 16));
    _mm512_storeu_si512(p, _mm512_mask_mov_epi32(highs, 0xaaaa, _mm512_slli_epi64(lows, 32)));
  }
};
#else
template <> struct Pairs<KVPLAN_BF16> {
  F sum;
  struct Word {
    F first, second;
  };
  static INLINE Word load(I w) {
    return {fbits(ishl(w, 16)), fbits(iand(w, iset((int32_t)0xffff0000)))};
  }
  INLINE void zero() { sum = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    sum = fma(w.first, fset(operands[0]), sum);
    sum = fma(w.second, fset(operands[1]), sum);
  }
  INLINE F total() const { return sum; }
  static INLINE void store(float *p, F x) { fstore(p, x); }
};
#endif
template <> struct Pairs<KVPLAN_FP16> {
  F low, high; // of words 0 to 7 and 8 to 15; first and second values alternate
  struct Word {
    F low, high;
  };
  static INLINE Word load(I w) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(w)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1))};
  }
  INLINE void zero() { low = high = fzero(); }
  INLINE void add(const Word &w, const float *operands) {
    double both;
    __builtin_memcpy(&both, operands, 8);
    F x = _mm512_castpd_ps(_mm512_set1_pd(both));
    low = fma(w.low, x, low);
    high = fma(w.high, x, high);
  }
  static INLINE void store(float *p, F x) { fstore(p, x); }
  INLINE F total() const {
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return fadd(_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high));
  }
};
