// How groups are coded: fits.py, compiled, sixteen groups at a time, one to a lane.
//
// Every step is one IEEE float32 operation of the definition, so that codes and numbers agree bit for bit.
#pragma once

struct Fitted {
  I numbers[2]; // as stored
  Mask sound;   // groups that are not poisoned
};

INLINE F ftruncate(F x) { // of what is within 2^22
  const F whole = fround(x);
  return fselect(fless(x, whole), fsub(whole, fset(1.0f)), whole);
}
INLINE F clamped(F x, float most) { return fmin(fmax(x, fzero()), fset(most)); }

// The bits of a byte float nearest to x, ties to even, of at most `most`: EXPONENTS is the difference of the exponents'
// biases, MANTISSA the bits that stay, LEAST what must be added for the least code to be the sum's last bit.
template <int EXPONENTS, int MANTISSA> INLINE I byte_float_bits(F x, float most, float least, float normal_from) {
  constexpr int DROPPED = 23 - MANTISSA;
  const F size = fmin(fabs_(x), fset(most));
  const I bits = ibits(size), even = iand(ishr(bits, DROPPED), iset(1));
  const I normal = isub(ishr(iadd(bits, iadd(iset((1 << (DROPPED - 1)) - 1), even)), DROPPED),
                        iset(EXPONENTS << MANTISSA));
  const I denormal = isub(ibits(fadd(size, fset(least))), ibits(fset(least)));
  return ior(iselect(fless(size, fset(normal_from)), denormal, normal), iand(ishr(ibits(x), 24), iset(0x80)));
}
INLINE I e4m3_bits(F x) { return byte_float_bits<120, 3>(x, 448.0f, 0x1p14f, 0x1p-6f); }
INLINE I e5m2_bits(F x) { return byte_float_bits<112, 2>(x, 57344.0f, 0x1p7f, 0x1p-14f); }

INLINE I number_bits(F x, int type) {
  switch (type) {
  case KVPLAN_NUMBER_FP32: return ibits(x);
  case KVPLAN_NUMBER_BF16: return to_bits(x, KVPLAN_BF16);
  case KVPLAN_NUMBER_E4M3: return e4m3_bits(x);
  case KVPLAN_NUMBER_E8M0: return ishr(ibits(x), 23); // of what is not negative
  default: return half_bits(x);
  }
}
INLINE int32_t poison_bits(int type) {
  switch (type) {
  case KVPLAN_NUMBER_FP32: return 0x7fc00000;
  case KVPLAN_NUMBER_BF16: return 0x7fc0;
  case KVPLAN_NUMBER_E4M3: return 0x7f;
  case KVPLAN_NUMBER_E8M0: return 0xff;
  default: return 0x7e00;
  }
}
INLINE void number_store(uint8_t *p, int type, Mask lanes, I bits) {
  switch (number_bytes(type)) {
  case 4: istore_part(p, lanes, bits); break;
  case 1: byte_store(p, lanes, bits); break;
  default: short_store(p, lanes, bits);
  }
}

// One group's elements: element i of sixteen groups is row i, and past the last it is the last.
struct Elements {
  const float *rows;
  int count, size;
  F at(int i) const { return fload(rows + LANES * (i < count ? i : count - 1)); }
};

INLINE F largest_magnitude(const Elements &e) {
  F most = fzero();
  for (int i = 0; i < e.count; i++) most = fmax(fabs_(e.at(i)), most);
  return most;
}
INLINE F signed_largest(const Elements &e) { // the first of several
  F most = fabs_(e.at(0)), found = e.at(0);
  for (int i = 1; i < e.count; i++) {
    const F x = e.at(i), size = fabs_(x);
    const Mask more = fless(most, size);
    most = fselect(more, size, most);
    found = fselect(more, x, found);
  }
  return found;
}
INLINE void least_and_largest(const Elements &e, F *low, F *high) {
  *low = *high = e.at(0);
  for (int i = 1; i < e.count; i++) {
    *low = fmin(e.at(i), *low);
    *high = fmax(e.at(i), *high);
  }
  *low = fadd(*low, fzero()); // -0 becomes +0
  *high = fadd(*high, fzero());
}
INLINE F reciprocal(F x) { return fselect(fequal(x, fzero()), fzero(), fdiv(fset(1.0f), x)); }
INLINE F quotient(F x, F step) { return fselect(fequal(step, fzero()), fzero(), fdiv(x, step)); }

// The code of the level nearest to a value that counts from the centre in units.
INLINE F nearest_code(const kvplan_tensor &t, F value) {
  if (t.map == KVPLAN_MAP_INTEGER) return clamped(fadd(fround(value), fset(t.centre)), (float)((1 << t.bits) - 1));
  I rank = izero();
  for (int i = 0; i + 1 < t.level_count; i++) {
    const F middle = fset(t.middles[i]);
    const Mask more = fless(middle, value), above = t.lower_ties >> i & 1 ? more : more | fequal(middle, value);
    rank = iadd(rank, iselect(above, iset(1), izero()));
  }
  return itof(iand(table_bytes(t.ranked, rank), iset(0xff)));
}
INLINE F level_height(const kvplan_tensor &t, F code) {
  return fsub(itof(iand(table_bytes(t.table, ftoi(code)), iset(0xff))), fset(t.centre));
}

// Codes go to `codes` as float32 row by row, before poisoned groups are cleared; returns the numbers, not yet rounded.
INLINE void fit_scaled(const kvplan_tensor &t, const Elements &e, F scale, float coarse, float *codes) {
  const F step = fmul(fdiv(number_float(number_bits(scale, t.number), t.number), fset(coarse)), fset(t.unit));
  for (int i = 0; i < e.count; i++) fstore(codes + LANES * i, nearest_code(t, quotient(e.at(i), step)));
}

INLINE void fit_fixed(const kvplan_tensor &t, const Elements &e, float *codes) {
  for (int i = 0; i < e.count; i++) fstore(codes + LANES * i, nearest_code(t, fdiv(e.at(i), fset(t.unit))));
}

INLINE void fit_range(const kvplan_tensor &t, const Elements &e, F scale, F low, float coarse, float *codes) {
  const F step = fdiv(number_float(number_bits(scale, t.number), t.number), fset(coarse));
  const F minimum = number_float(number_bits(low, t.number), t.number);
  for (int i = 0; i < e.count; i++) {
    const F height = fdiv(fsub(e.at(i), minimum), step);
    const F code = t.map == KVPLAN_MAP_TABLE ? nearest_code(t, height) : clamped(fround(height), t.steps);
    fstore(codes + LANES * i, fselect(fequal(step, fzero()), fzero(), code));
  }
}

INLINE F fit_norm(const kvplan_tensor &t, const Elements &e, float *codes) {
  F squares = fzero(), chosen_squares = fzero();
  for (int i = 0; i < e.size; i++) squares = fadd(squares, fmul(e.at(i), e.at(i)));
  const F norm = fsqrt(squares), spread = fdiv(norm, fsqrt(fset((float)e.size)));
  const F step = fmul(spread, fset(t.unit));
  for (int i = 0; i < e.size; i++) {
    const F value = fselect(fequal(spread, fzero()), fzero(), fdiv(e.at(i), step));
    const F code = nearest_code(t, value), chosen = fmul(level_height(t, code), fset(t.unit));
    if (i < e.count) fstore(codes + LANES * i, code);
    chosen_squares = fadd(chosen_squares, fmul(chosen, chosen));
  }
  return fdiv(norm, fsqrt(chosen_squares));
}

INLINE F fit_q8_0(const Elements &e, float *codes) {
  const F scale = fdiv(largest_magnitude(e), fset(127.0f)), inverse = reciprocal(scale);
  for (int i = 0; i < e.count; i++) {
    const F value = fmul(e.at(i), inverse), size = fabs_(value), half_up = ftruncate(fadd(size, fset(0.5f)));
    const F whole = fselect(fless(fset(0.5f), fsub(half_up, size)), fround(size), half_up); // the sum was rounded up
    const F away = fselect(fless(value, fzero()), fsub(fzero(), whole), whole);
    fstore(codes + LANES * i, fadd(fmin(fmax(away, fset(-128.0f)), fset(127.0f)), fset(128.0f)));
  }
  return scale;
}

INLINE F fit_q5_0(const kvplan_tensor &t, const Elements &e, float *codes) {
  const float half = (float)(1 << (t.bits - 1)), most = 2 * half - 1;
  const F scale = fdiv(signed_largest(e), fset(-half)), inverse = reciprocal(scale);
  for (int i = 0; i < e.count; i++) {
    const F value = fadd(fmul(e.at(i), inverse), fset(half + 0.5f));
    fstore(codes + LANES * i, clamped(ftruncate(clamped(value, most + 1)), most));
  }
  return scale;
}

INLINE void fit_q5_1(const kvplan_tensor &t, const Elements &e, F scale, F low, float *codes) {
  const float most = (float)((1 << t.bits) - 1);
  const F inverse = reciprocal(scale);
  for (int i = 0; i < e.count; i++) {
    const F value = fadd(fmul(fsub(e.at(i), low), inverse), fset(0.5f));
    fstore(codes + LANES * i, clamped(ftruncate(clamped(value, most + 1)), most));
  }
}

INLINE F fit_iq4_nl(const kvplan_tensor &t, const Elements &e, float *codes) {
  const F first = fdiv(signed_largest(e), fset((float)t.table[0] - t.centre)), inverse = reciprocal(first);
  F products = fzero(), squares = fzero();
  for (int i = 0; i < e.size; i++) {
    const F x = e.at(i), code = nearest_code(t, fmul(x, inverse)), height = level_height(t, code);
    const F weighted = fmul(fmul(x, x), height);
    if (i < e.count) fstore(codes + LANES * i, code);
    products = fadd(products, fmul(weighted, x));
    squares = fadd(squares, fmul(weighted, height));
  }
  return fselect(fless(fzero(), squares), fdiv(products, squares), fzero());
}

// Code sixteen groups: `codes` gets whole numbers row by row, 0 where a group is poisoned. A stored scale is `coarse`
// steps of a code, a power of two.
void fit_groups(const kvplan_tensor &t, const Elements &e, float *codes, Fitted *found, float coarse = 1.0f) {
  F scale = fzero(), low = fzero(), high = fzero();
  switch (t.fit) {
  case KVPLAN_FIT_ABSMAX:
    scale = fmul(fdiv(fmul(largest_magnitude(e), fset(t.clip)), fset(t.extent)), fset(coarse));
    fit_scaled(t, e, scale, coarse, codes);
    break;
  case KVPLAN_FIT_POWER:
    scale = fdiv(largest_magnitude(e), fset(t.power));
    fit_scaled(t, e, scale, 1.0f, codes);
    break;
  case KVPLAN_FIT_NORM: scale = fit_norm(t, e, codes); break;
  case KVPLAN_FIT_Q8_0: scale = fit_q8_0(e, codes); break;
  case KVPLAN_FIT_Q5_0: scale = fit_q5_0(t, e, codes); break;
  case KVPLAN_FIT_IQ4_NL: scale = fit_iq4_nl(t, e, codes); break;
  case KVPLAN_FIT_NONE:
    if (!is_float(t)) fit_fixed(t, e, codes);
    break;
  case KVPLAN_FIT_RANGE:
  case KVPLAN_FIT_Q5_1:
    least_and_largest(e, &low, &high);
    low = fmul(low, fset(t.clip));
    high = fmul(high, fset(t.clip));
    scale = fmul(fdiv(fsub(high, low), fset(t.steps)), fset(coarse));
    if (t.fit == KVPLAN_FIT_RANGE) fit_range(t, e, scale, low, coarse, codes);
    else fit_q5_1(t, e, scale, low, codes);
  }
  found->numbers[0] = number_bits(scale, t.number);
  found->numbers[1] = number_bits(low, t.number);
  found->sound = ALL;
  for (int i = 0; i < e.count; i++) found->sound &= ffinite(e.at(i));
  for (int i = 0; i < t.numbers; i++) found->sound &= ffinite(number_float(found->numbers[i], t.number));
  const I poison = iset(poison_bits(t.number));
  for (int i = 0; i < 2; i++) found->numbers[i] = iselect(found->sound, found->numbers[i], poison);
  for (int i = 0; i < e.count; i++) {
    float *at = codes + LANES * i;
    if (is_float(t)) {
      const I code = t.map == KVPLAN_MAP_E5M2 ? e5m2_bits(e.at(i)) : e4m3_bits(e.at(i));
      fstore(at, itof(iselect(found->sound, code, iset(0x7f))));
    } else {
      fstore(at, fselect(found->sound, fload(at), fzero()));
    }
  }
}
