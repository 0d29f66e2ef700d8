// Storing codes of any plane, map and fit: groups are coded sixteen at a time, then packed plane by plane.
#pragma once

typedef float CodeRun[DIM_MOST][LANES]; // channels by tokens, whole numbers

// Or the bits of one plane of sixteen codes into words.
INLINE I plane_bits(const float *codes, int plane_shift, int bits, int element) {
  const I code = iand(ishr(ftoi(fload(codes)), plane_shift), iset((1 << bits) - 1));
  return ishl(code, shift_of(element, bits));
}

INLINE void pack_key_plane(const Append &a, uint8_t *words, Mask lanes, const CodeRun codes, int shift, int bits) {
  const int elements = 32 / bits;
  for (int first = 0; first < a.dim; first += elements) {
    I word = izero();
    for (int e = 0; e < elements && first + e < a.dim; e++) word = ior(word, plane_bits(codes[first + e], shift, bits, e));
    istore_part(words + 64 * (first / elements), lanes, word);
  }
}

INLINE void pack_key(const Append &a, const kvplan_tensor &t, uint8_t *slab, int64_t in_page, Mask lanes,
                     const CodeRun codes) {
  const Planes p = key_planes(t, a.dim, slab, in_page);
  pack_key_plane(a, (uint8_t *)p.low, lanes, codes, 0, t.low_bits);
  if (t.high_bits) pack_key_plane(a, (uint8_t *)p.high, lanes, codes, t.low_bits, t.high_bits);
}

INLINE void store_numbers(const kvplan_tensor &t, uint8_t *slab, int64_t at, Mask lanes, const Fitted &f) {
  const int64_t offset = at * number_bytes(t.number);
  if (t.numbers > 0) number_store(slab + t.scale + offset, t.number, lanes, f.numbers[0]);
  if (t.numbers > 1) number_store(slab + t.minimum + offset, t.number, lanes, f.numbers[1]);
}

INLINE int group_count(const Append &a, const kvplan_tensor &t) { return (a.dim + t.group - 1) / t.group; }

// Code the channel groups of sixteen tokens, channels by tokens, and store their numbers.
void fit_tokens(const Append &a, const kvplan_tensor &t, uint8_t *slab, int64_t in_page, Mask lanes, const KeyRun x,
                CodeRun codes, int64_t *poisoned) {
  for (int group = 0; group < group_count(a, t); group++) {
    const int first = group * t.group, last = (int)kvplan_least(a.dim, first + t.group);
    Fitted f;
    fit_groups(t, {x[first], last - first, t.group}, codes[first], &f);
    store_numbers(t, slab, (int64_t)group * a.layout->block_tokens + in_page, lanes, f);
    *poisoned += __builtin_popcount(lanes & ~f.sound);
  }
}

// Channels by tokens without their outliers, which are stored: in `cut`, or as they are where there are none.
INLINE const float (*without_outliers(const Append &a, const kvplan_tensor &t, uint8_t *slab, int64_t in_page,
                                      Mask lanes, const KeyRun x, KeyRun cut))[LANES] {
  if (!t.outliers) return x;
  cut_outliers(t, a.dim, a.layout->block_tokens, a.layout->float_type, slab, in_page, lanes, x, cut);
  return cut;
}

void store_key_any(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, Mask lanes, const KeyRun x,
                   int64_t *poisoned) {
  CodeRun codes;
  KeyRun cut;
  const float(*elements)[LANES] = without_outliers(a, *n.tensor, slab, in_page, lanes, x, cut);
  fit_tokens(a, *n.tensor, slab, in_page, lanes, elements, codes, poisoned);
  pack_key(a, *n.tensor, slab, in_page, lanes, codes);
}

// One group of tokens that share a scale per channel: `runs` runs.
void store_key_any_channel(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, int runs, const KeyRun *x,
                           int64_t *poisoned) {
  const kvplan_tensor &t = *n.tensor;
  CodeRun codes[GROUP_RUNS];
  KeyRun cut[GROUP_RUNS];
  const float(*whole[GROUP_RUNS])[LANES];
  for (int j = 0; j < runs; j++) whole[j] = without_outliers(a, t, slab, in_page + j * LANES, ALL, x[j], cut[j]);
  const int64_t row = in_page / t.group * a.dim;
  for (int v = 0; v < a.vectors; v++) {
    const Mask lanes = v == a.vectors - 1 ? a.tail : ALL;
    float elements[GROUP_RUNS * LANES][LANES], found[GROUP_RUNS * LANES][LANES];
    for (int j = 0; j < runs; j++) {
      F rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = fload(whole[j][v * LANES + i]);
      transpose(rows);
      for (int i = 0; i < LANES; i++) fstore(elements[j * LANES + i], rows[i]);
    }
    Fitted f;
    fit_groups(t, {elements[0], runs * LANES, t.group}, found[0], &f);
    store_numbers(t, slab, row + v * LANES, lanes, f);
    *poisoned += __builtin_popcount(lanes & ~f.sound);
    for (int j = 0; j < runs; j++) {
      F rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = fload(found[j * LANES + i]);
      transpose(rows);
      for (int i = 0; i < LANES; i++) fstore(codes[j][v * LANES + i], rows[i]);
    }
  }
  for (int j = 0; j < runs; j++) pack_key(a, t, slab, in_page + j * LANES, ALL, codes[j]);
}

// One plane of sixteen tokens of V; other tokens of the same words keep their bits.
INLINE void pack_value_plane(const Append &a, uint8_t *rows, int64_t in_page, Mask lanes, const ValueRun codes,
                             int shift, int bits) {
  const int elements = 32 / bits;
  for (int i = 0; i < LANES;) {
    const int64_t token = in_page + i;
    const int start = (int)(token % elements), count = kvplan_least(LANES - i, elements - start);
    uint32_t owned = 0;
    for (int e = 0; e < count; e++)
      if (lanes >> (i + e) & 1) owned |= ((1u << bits) - 1) << shift_of(start + e, bits);
    for (int v = 0; owned && v < a.vectors; v++) {
      I word = izero();
      for (int e = 0; e < count; e++)
        if (lanes >> (i + e) & 1) word = ior(word, plane_bits(codes[i + e] + v * LANES, shift, bits, start + e));
      store_word(rows + token / elements * 4 * a.dim + 64 * v, v == a.vectors - 1 ? a.tail : ALL, word, owned);
    }
    i += count;
  }
}

void store_value_any(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, Mask lanes, const ValueRun x,
                     int64_t *poisoned) {
  const kvplan_tensor &t = *n.tensor;
  KeyRun elements, cut;
  CodeRun codes;
  ValueRun by_token;
  for (int v = 0; v < a.vectors; v++) {
    F rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = lanes >> i & 1 ? fload(x[i] + v * LANES) : fzero();
    transpose(rows);
    for (int i = 0; i < LANES; i++) fstore(elements[v * LANES + i], rows[i]);
  }
  const float(*whole)[LANES] = without_outliers(a, t, slab, in_page, lanes, elements, cut);
  fit_tokens(a, t, slab, in_page, lanes, whole, codes, poisoned);
  for (int v = 0; v < a.vectors; v++) {
    F rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = v * LANES + i < a.dim ? fload(codes[v * LANES + i]) : fzero();
    transpose(rows);
    for (int i = 0; i < LANES; i++) fstore(by_token[i] + v * LANES, rows[i]);
  }
  pack_value_plane(a, slab + t.codes, in_page, lanes, by_token, 0, t.low_bits);
  if (t.high_bits) pack_value_plane(a, slab + t.high, in_page, lanes, by_token, t.low_bits, t.high_bits);
}
