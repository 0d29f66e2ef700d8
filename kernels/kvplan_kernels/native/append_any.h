// Storing codes of any plane, map and fit: groups are coded sixteen at a time, then packed plane by plane.
#pragma once

typedef float CodeRun[DIM_MOST][LANES]; // channels by tokens, whole numbers

// Or the bits of one plane of sixteen codes into words.
INLINE I plane_bits(const float *codes, int plane_shift, int bits, int element) {
  const I code = iand(ishr(ftoi(fload(codes)), plane_shift), iset((1 << bits) - 1));
  return ishl(code, shift_of(element, bits));
}

INLINE void pack_key_plane(int dim, uint8_t *words, Mask lanes, const float (*codes)[LANES], int shift, int bits) {
  const int elements = 32 / bits;
  for (int first = 0; first < dim; first += elements) {
    I word = izero();
    for (int e = 0; e < elements && first + e < dim; e++) word = ior(word, plane_bits(codes[first + e], shift, bits, e));
    istore_part(words + 64 * (first / elements), lanes, word);
  }
}

INLINE void pack_key(const Append &a, const kvplan_tensor &t, uint8_t *slab, int64_t in_page, Mask lanes,
                     const CodeRun codes) {
  const Planes p = key_planes(t, a.dim, slab, in_page);
  pack_key_plane(a.dim, (uint8_t *)p.low, lanes, codes, 0, t.low_bits);
  if (t.high_bits) pack_key_plane(a.dim, (uint8_t *)p.high, lanes, codes, t.low_bits, t.high_bits);
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

// A group of tokens: for each run channels by tokens.
typedef const float (*GroupRuns[GROUP_RUNS])[LANES];
typedef float (*GroupCodes[GROUP_RUNS])[LANES];

// Sixteen channels of a group, tokens by channels.
INLINE void load_channels(const GroupRuns &x, int runs, const uint8_t *channels, float (*elements)[LANES]) {
  for (int j = 0; j < runs; j++) {
    F rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = fload(x[j][channels[i]]);
    transpose(rows);
    for (int i = 0; i < LANES; i++) fstore(elements[j * LANES + i], rows[i]);
  }
}

// Code sixteen channels of a group, into the rows of `codes` from `first` on.
INLINE void fit_channels(const kvplan_tensor &t, const GroupRuns &x, int runs, const uint8_t *channels, float coarse,
                         const GroupCodes &codes, int first, Fitted *f) {
  float elements[GROUP_RUNS * LANES][LANES], found[GROUP_RUNS * LANES][LANES];
  load_channels(x, runs, channels, elements);
  fit_groups(t, {elements[0], runs * LANES, t.group}, found[0], f, coarse);
  for (int j = 0; j < runs; j++) {
    F rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = fload(found[j * LANES + i]);
    transpose(rows);
    for (int i = 0; i < LANES; i++) fstore(codes[j][first + i], rows[i]);
  }
}

// The channels of a group that are boosted, by rank; those from the last to a multiple of sixteen are 0.
INLINE void choose_boosts(const Append &a, const kvplan_tensor &t, const GroupRuns &x, int runs, const uint8_t *all,
                          uint8_t *chosen) {
  float sizes[DIM_MOST], elements[GROUP_RUNS * LANES][LANES];
  for (int v = 0; v < a.vectors; v++) {
    load_channels(x, runs, all + v * LANES, elements);
    F total = fzero();
    for (int i = 0; i < runs * LANES; i++) total = fadd(total, fabs_(fload(elements[i])));
    total = fselect(ffinite(total), total, fzero());
    fstore(sizes + v * LANES, fselect(v == a.vectors - 1 ? a.tail : ALL, total, fset(-1.0f)));
  }
  memset(chosen, 0, BOOSTS);
  for (int c = 0; c < a.dim; c++) {
    const F own = fset(sizes[c]);
    int rank = 0; // of equals the first channel comes first
    for (int v = 0; v < a.vectors; v++) {
      const F others = fload(sizes + v * LANES);
      rank += __builtin_popcount(fless(own, others) | (fequal(own, others) & lanes_between(0, c - v * LANES)));
    }
    if (rank < t.boosts) chosen[rank] = c;
  }
}

// Code the boosted channels of a group: numbers and high bits take the place of those that they had, low bits are stored.
INLINE void store_boosts(const Append &a, const kvplan_tensor &t, uint8_t *slab, int64_t in_page, int runs,
                         const GroupRuns &x, const uint8_t *chosen, const GroupCodes &codes, int64_t *poisoned) {
  const kvplan_tensor fine = boosted_tensor(t);
  float low[GROUP_RUNS][BOOSTS][LANES];
  GroupCodes to;
  for (int j = 0; j < runs; j++) to[j] = low[j];
  const int64_t row = in_page / t.group * a.dim;
  for (int w = 0; w < boost_words(t); w++) {
    const Mask lanes = lanes_between(0, t.boosts - w * LANES);
    Fitted f;
    fit_channels(fine, x, runs, chosen + w * LANES, BOOST_STEPS, to, w * LANES, &f);
    *poisoned += __builtin_popcount(lanes & ~f.sound);
    int32_t numbers[2][LANES];
    for (int k = 0; k < 2; k++) istore_part(numbers[k], ALL, f.numbers[k]);
    for (int i = 0; i < LANES; i++) {
      if (!(lanes >> i & 1)) continue;
      const Fitted one = {{iset(numbers[0][i]), iset(numbers[1][i])}, ALL};
      store_numbers(t, slab, row + chosen[w * LANES + i], 1, one);
    }
  }
  for (int j = 0; j < runs; j++) {
    for (int n = 0; n < boost_words(t) * LANES; n++) {
      const F code = n < t.boosts ? fload(low[j][n]) : fzero(), high = ftruncate(fdiv(code, fset(BOOST_STEPS)));
      fstore(low[j][n], fsub(code, fmul(high, fset(BOOST_STEPS))));
      if (n < t.boosts) fstore(codes[j][chosen[n]], high);
    }
    uint8_t *words = (uint8_t *)boost_codes(t, slab, in_page + j * LANES);
    pack_key_plane(boost_words(t) * LANES, words, ALL, low[j], 0, BOOST_BITS);
  }
  memcpy((uint8_t *)boost_channels(t, slab, in_page), chosen, boost_words(t) * LANES);
}

// One group of tokens that share a scale per channel: `runs` runs.
void store_key_any_channel(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, int runs, const KeyRun *x,
                           int64_t *poisoned) {
  const kvplan_tensor &t = *n.tensor;
  CodeRun held[GROUP_RUNS];
  KeyRun cut[GROUP_RUNS];
  GroupRuns whole;
  GroupCodes codes;
  for (int j = 0; j < runs; j++) {
    whole[j] = without_outliers(a, t, slab, in_page + j * LANES, ALL, x[j], cut[j]);
    codes[j] = held[j];
  }
  uint8_t all[DIM_MOST], chosen[BOOSTS];
  for (int c = 0; c < DIM_MOST; c++) all[c] = c;
  Mask counted[DIM_MOST / LANES]; // groups that are not coded once more
  for (int v = 0; v < a.vectors; v++) counted[v] = v == a.vectors - 1 ? a.tail : ALL;
  if (t.boosts) choose_boosts(a, t, whole, runs, all, chosen);
  for (int b = 0; b < t.boosts; b++) counted[chosen[b] / LANES] &= ~((Mask)1 << chosen[b] % LANES);
  const int64_t row = in_page / t.group * a.dim;
  for (int v = 0; v < a.vectors; v++) {
    Fitted f;
    fit_channels(t, whole, runs, all + v * LANES, 1.0f, codes, v * LANES, &f);
    store_numbers(t, slab, row + v * LANES, v == a.vectors - 1 ? a.tail : ALL, f);
    *poisoned += __builtin_popcount(counted[v] & ~f.sound);
  }
  if (t.boosts) store_boosts(a, t, slab, in_page, runs, whole, chosen, codes, poisoned);
  for (int j = 0; j < runs; j++) pack_key(a, t, slab, in_page + j * LANES, ALL, held[j]);
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
