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
  n.scale = fmul(number_load(scale, t.number), fset(t.unit));
  n.minimum = t.numbers == 2 ? number_load(minimum, t.number) : fmul(n.scale, fset(-t.centre));
  return n;
}

INLINE bool is_float(const kvplan_tensor &t) { return t.map == KVPLAN_MAP_E4M3 || t.map == KVPLAN_MAP_E5M2; }
// Whether codes are levels as they lie, and whether numbers are fp16 as they lie.
INLINE bool codes_direct(const kvplan_tensor &t) {
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

// The codes of quad `quad`, one to a byte, of the words `offset` bytes into a row. LOW and HIGH are bits of the planes.
template <int LOW, int HIGH>
INLINE I quad_codes(const Planes &p, int quad, int64_t offset, Mask lanes) {
  constexpr int LOW_QUADS = 8 / LOW;
  constexpr uint32_t LOW_MASK = ((1u << LOW) - 1) * 0x01010101u;
  const uint8_t *low = p.low + quad / LOW_QUADS * p.stride + offset;
  I codes = lanes == ALL ? iload(low) : iload_part(low, lanes);
  if (LOW < 8) codes = iand(ishr(codes, quad % LOW_QUADS * LOW), iset((int32_t)LOW_MASK));
  if (!HIGH) return codes;
  constexpr int HIGH_QUADS = HIGH ? 8 / HIGH : 1;
  constexpr uint32_t HIGH_MASK = ((1u << HIGH) - 1) * 0x01010101u;
  const uint8_t *high = p.high + quad / HIGH_QUADS * p.stride + offset;
  const I bits = lanes == ALL ? iload(high) : iload_part(high, lanes);
  return ior(codes, ishl(iand(ishr(bits, quad % HIGH_QUADS * HIGH), iset((int32_t)HIGH_MASK)), LOW));
}

typedef I (*QuadCodes)(const Planes &, int, int64_t, Mask);

// Levels, 8-bit codes, of `quads` quads by `vectors` vectors; `to` rows are `to_stride` bytes apart.
template <int LOW, int HIGH>
void write_levels(const kvplan_tensor &t, const Planes &p, int quads, int vectors, Mask tail, uint8_t *to,
                  int64_t to_stride) {
  for (int v = 0; v < vectors; v++) {
    const Mask lanes = v == vectors - 1 ? tail : ALL;
    for (int q = 0; q < quads; q++) {
      I codes = quad_codes<LOW, HIGH>(p, p.first + q, 64 * v, lanes);
      if (t.map == KVPLAN_MAP_TABLE) codes = table_bytes(t.table, codes);
      istore_part(to + q * to_stride + 64 * v, lanes, codes);
    }
  }
}

typedef void (*WriteLevels)(const kvplan_tensor &, const Planes &, int, int, Mask, uint8_t *, int64_t);

INLINE WriteLevels choose_levels(const kvplan_tensor &t) {
  switch (t.low_bits * 8 + t.high_bits) {
  case 1 * 8: return write_levels<1, 0>;
  case 2 * 8: return write_levels<2, 0>;
  case 2 * 8 + 1: return write_levels<2, 1>;
  case 4 * 8: return write_levels<4, 0>;
  case 4 * 8 + 1: return write_levels<4, 1>;
  case 4 * 8 + 2: return write_levels<4, 2>;
  default: return write_levels<8, 0>;
  }
}

INLINE F code_float(const kvplan_tensor &t, I codes, int byte) {
  const I code = iand(ishr(codes, 8 * byte), iset(0xff));
  return t.map == KVPLAN_MAP_E5M2 ? e5m2_float(code) : e4m3_float(code);
}

// Floats of a byte as pairs of 16-bit values: each quad of codes is two rows of `to`.
INLINE void write_floats(const kvplan_tensor &t, const Planes &p, int quads, int vectors, Mask tail, int type,
                         uint8_t *to, int64_t to_stride) {
  for (int v = 0; v < vectors; v++) {
    const Mask lanes = v == vectors - 1 ? tail : ALL;
    for (int q = 0; q < quads; q++) {
      const I codes = quad_codes<8, 0>(p, p.first + q, 64 * v, lanes);
      for (int half = 0; half < 2; half++) {
        const I first = to_bits(code_float(t, codes, 2 * half), type);
        const I second = to_bits(code_float(t, codes, 2 * half + 1), type);
        istore_part(to + (2 * q + half) * to_stride + 64 * v, lanes, ior(first, ishl(second, 16)));
      }
    }
  }
}

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
