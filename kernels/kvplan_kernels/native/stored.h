// What pages hold of a tensor, read back: numbers of groups, and codes of any plane and map as levels of a byte.
//
// The decode kernels multiply codes of 8, 4 and 2 bits as they lie, with fp16 numbers beside them. Whatever else a format
// stores is made that for one tile at a time, in the first cache: levels as 8-bit codes lie, floats of a byte as 16-bit
// values lie, and numbers in float32. So a way to store costs these functions and no kernel.
#pragma once

constexpr int DIM_MOST = 256;
constexpr int GROUPS = 16; // channel groups of one token at most: 256 channels by 16

INLINE int number_bytes(int type) {
  return type == KVPLAN_NUMBER_FP32 ? 4 : type == KVPLAN_NUMBER_E4M3 || type == KVPLAN_NUMBER_E8M0 ? 1 : 2;
}

// E4M3 in the low byte of each lane: sign, exponent and mantissa go where float32 has them; its exponents are 120 less.
INLINE F e4m3_float(I code) {
  const I size = iand(code, iset(0x7f));
  const F value = fmul(fbits(ishl(size, 20)), fset(0x1p120f));
  const I bits = ior(ibits(value), ishl(iand(code, iset(0x80)), 24));
  return fselect(fequal(itof(size), fset(127.0f)), fset(NAN), fbits(bits));
}
INLINE F e5m2_float(I code) { return half_float(ishl(code, 8)); }

INLINE F number_float(I bits, int type) {
  switch (type) {
  case KVPLAN_NUMBER_FP32: return fbits(bits);
  case KVPLAN_NUMBER_BF16: return fbits(ishl(bits, 16));
  case KVPLAN_NUMBER_E4M3: return e4m3_float(bits);
  case KVPLAN_NUMBER_E8M0: {
    const F exponent = itof(bits);
    F power = fbits(ishl(bits, 23));
    power = fselect(fequal(exponent, fzero()), fset(0x1p-127f), power);
    return fselect(fequal(exponent, fset(255.0f)), fset(NAN), power);
  }
  default: return half_float(bits);
  }
}

INLINE F number_load(const uint8_t *p, int type) {
  switch (number_bytes(type)) {
  case 4: return fload((const float *)p);
  case 1: return number_float(byte_load(p), type);
  default: return number_float(short_load(p), type);
  }
}

// Scale and minimum of sixteen groups, as levels take them.
struct Numbers {
  F scale, minimum;
};
INLINE Numbers numbers_load(const kvplan_tensor &t, const uint8_t *scale, const uint8_t *minimum) {
  Numbers n;
  n.scale = t.numbers ? fmul(number_load(scale, t.number), fset(t.unit)) : fset(t.unit);
  n.minimum = t.numbers == 2 ? number_load(minimum, t.number) : fmul(n.scale, fset(-t.centre));
  return n;
}

INLINE bool is_float(const kvplan_tensor &t) { return t.map == KVPLAN_MAP_E4M3 || t.map == KVPLAN_MAP_E5M2; }
// Whether groups have a scale, stored or not: floats of a byte do without.
INLINE bool has_scale(const kvplan_tensor &t) { return t.bits < 16 && !is_float(t); }
// Whether codes are levels of 8, 4 or 2 bits as they lie, and whether numbers are fp16 as they lie.
INLINE bool codes_plain(const kvplan_tensor &t) {
  return t.map == KVPLAN_MAP_INTEGER && !t.high_bits && t.low_bits != 1;
}
INLINE bool numbers_direct(const kvplan_tensor &t) {
  return t.number == KVPLAN_NUMBER_FP16 && t.numbers == 2 && t.unit == 1.0f;
}

// Where the codes of a run of 16 tokens lie: rows of words of each plane, and the quad of codes they begin with.
struct Planes {
  const uint8_t *low, *high;
  int64_t stride; // from one row of words to the next
  int first;      // quads before the run's first, in the first row's count
};

template <bool PART> INLINE I word_load(const uint8_t *at, Mask lanes) { return PART ? iload_part(at, lanes) : iload(at); }
template <bool PART> INLINE void word_store(uint8_t *at, Mask lanes, I word) {
  if (PART) istore_part(at, lanes, word);
  else istore(at, word);
}

// The codes of quad `quad`, one to a byte, of one vector of words. LOW and HIGH are bits of the planes.
template <int LOW, int HIGH, bool PART> INLINE I quad_codes(const Planes &p, int quad, int64_t offset, Mask lanes) {
  constexpr int LOW_QUADS = 8 / LOW;
  constexpr uint32_t LOW_MASK = ((1u << LOW) - 1) * 0x01010101u;
  I codes = word_load<PART>(p.low + quad / LOW_QUADS * p.stride + offset, lanes);
  if (LOW < 8) codes = iand(ishr(codes, quad % LOW_QUADS * LOW), iset((int32_t)LOW_MASK));
  if (!HIGH) return codes;
  constexpr int HIGH_QUADS = HIGH ? 8 / HIGH : 1;
  constexpr uint32_t HIGH_MASK = ((1u << HIGH) - 1) * 0x01010101u;
  const I bits = word_load<PART>(p.high + quad / HIGH_QUADS * p.stride + offset, lanes);
  return ior(codes, ishl(iand(ishr(bits, quad % HIGH_QUADS * HIGH), iset((int32_t)HIGH_MASK)), LOW));
}

template <int LOW, int HIGH, bool TABLE, bool PART>
INLINE void write_vector(const kvplan_tensor &t, const Planes &p, int quads, int64_t offset, Mask lanes, uint8_t *to,
                         int64_t to_stride) {
  for (int q = 0; q < quads; q++) {
    I codes = quad_codes<LOW, HIGH, PART>(p, p.first + q, offset, lanes);
    if (TABLE) codes = table_bytes(t.table, codes);
    word_store<PART>(to + q * to_stride + offset, lanes, codes);
  }
}

// Levels, 8-bit codes, of `quads` quads by `vectors` vectors; `to` rows are `to_stride` bytes apart.
template <int LOW, int HIGH, bool TABLE>
void write_levels(const kvplan_tensor &t, const Planes &p, int quads, int vectors, Mask tail, uint8_t *to,
                  int64_t to_stride) {
  const int whole = tail == ALL ? vectors : vectors - 1;
  for (int v = 0; v < whole; v++) write_vector<LOW, HIGH, TABLE, false>(t, p, quads, 64 * v, ALL, to, to_stride);
  if (whole < vectors) write_vector<LOW, HIGH, TABLE, true>(t, p, quads, 64 * whole, tail, to, to_stride);
}

typedef void (*WriteLevels)(const kvplan_tensor &, const Planes &, int, int, Mask, uint8_t *, int64_t);

INLINE WriteLevels choose_levels(const kvplan_tensor &t) {
  const bool table = t.map == KVPLAN_MAP_TABLE;
  switch (t.low_bits * 8 + t.high_bits) {
  case 1 * 8: return write_levels<1, 0, false>;
  case 2 * 8: return table ? write_levels<2, 0, true> : write_levels<2, 0, false>;
  case 2 * 8 + 1: return table ? write_levels<2, 1, true> : write_levels<2, 1, false>;
  case 4 * 8: return table ? write_levels<4, 0, true> : write_levels<4, 0, false>;
  case 4 * 8 + 1: return write_levels<4, 1, false>;
  case 4 * 8 + 2: return write_levels<4, 2, false>;
  default: return write_levels<8, 0, false>;
  }
}

INLINE F code_float(const kvplan_tensor &t, I codes, int byte) {
  const I code = iand(ishr(codes, 8 * byte), iset(0xff));
  return t.map == KVPLAN_MAP_E5M2 ? e5m2_float(code) : e4m3_float(code);
}

// Two floats of a byte, each in a half of a lane, as bf16: sign, exponent and mantissa go where bf16 has them, `shift` bits
// up; the power makes up for the difference of the exponents' biases. Poison is not seen.
INLINE I pair_bf16(I codes, int shift, F power) {
  const I both = ior(ishl(iand(codes, iset(0x007f007f)), shift), ishl(iand(codes, iset(0x00800080)), 8));
  const I high = iset((int32_t)0xffff0000);
  const F first = fmul(fbits(ishl(both, 16)), power), second = fmul(fbits(iand(both, high)), power);
  return ior(ishr(ibits(first), 16), iand(ibits(second), high));
}

template <bool PART>
INLINE void write_float_vector(const kvplan_tensor &t, const Planes &p, int quads, int64_t offset, Mask lanes, int type,
                               uint8_t *to, int64_t to_stride) {
  const bool e4m3 = t.map == KVPLAN_MAP_E4M3;
  const int shift = e4m3 ? 4 : 5;
  const F power = fset(e4m3 ? 0x1p120f : 0x1p112f);
  for (int q = 0; q < quads; q++) {
    const I codes = quad_codes<8, 0, PART>(p, p.first + q, offset, lanes);
    uint8_t *at = to + 2 * q * to_stride + offset;
    if (type == KVPLAN_BF16) {
      const I first = ior(iand(codes, iset(0xff)), ishl(iand(codes, iset(0xff00)), 8));
      const I second = ior(iand(ishr(codes, 16), iset(0xff)), iand(ishr(codes, 8), iset(0xff0000)));
      word_store<PART>(at, lanes, pair_bf16(first, shift, power));
      word_store<PART>(at + to_stride, lanes, pair_bf16(second, shift, power));
      continue;
    }
    for (int half = 0; half < 2; half++) {
      const I first = to_bits(code_float(t, codes, 2 * half), type);
      const I second = to_bits(code_float(t, codes, 2 * half + 1), type);
      word_store<PART>(at + half * to_stride, lanes, ior(first, ishl(second, 16)));
    }
  }
}

// Floats of a byte as pairs of 16-bit values: each quad of codes is two rows of `to`.
INLINE void write_floats(const kvplan_tensor &t, const Planes &p, int quads, int vectors, Mask tail, int type,
                         uint8_t *to, int64_t to_stride) {
  const int whole = tail == ALL ? vectors : vectors - 1;
  for (int v = 0; v < whole; v++) write_float_vector<false>(t, p, quads, 64 * v, ALL, type, to, to_stride);
  if (whole < vectors) write_float_vector<true>(t, p, quads, 64 * whole, tail, type, to, to_stride);
}

// All codes of a poisoned token are NaN, and no others: one of them tells.
INLINE bool is_poison(uint32_t codes, int byte) { return (codes >> 8 * byte & 0x7f) == 0x7f; }

// Words of a token's codes in one plane of K, and bytes of the rows of V that a run of 16 tokens begins with.
INLINE int64_t key_words(int dim, int bits) { return (dim * bits + 31) / 32; }

INLINE Planes key_planes(const kvplan_tensor &t, int dim, const uint8_t *slab, int64_t in_page) {
  return {slab + t.codes + in_page * 4 * key_words(dim, t.low_bits),
          slab + t.high + in_page * 4 * key_words(dim, t.high_bits), 64, 0};
}
// A row of V holds 32 / bits tokens, so a run may begin within one.
INLINE Planes value_planes(const kvplan_tensor &t, int dim, const uint8_t *slab, int64_t in_page) {
  return {slab + t.codes, slab + t.high, 4 * dim, (int)(in_page / 4)};
}
