// Attention of up to 32 queries over pages, residual and sinks, in one pass.
//
// A task is one KV head of one sequence and a range of tiles of 64 tokens. Its rows (queries x query heads of the KV
// head) are worked through in blocks of four per tile, so that K and V come from memory once. Scores are in units of
// log2: exp2 gives the weights. The integer sums are exact; docs/explanation/kernel-accuracy.md bounds the rest.
#pragma once

constexpr int TILE_RUNS = 8; // the most; Shape::tile_tokens says how much of it a format uses
constexpr int TILE = TILE_RUNS * LANES;
constexpr float LOWEST = -1e30f; // running maximum before any token: finite, so that differences stay numbers
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int64_t CHUNK_TILES_MIN = 4; // below, starting a task costs more than it saves

// How the codes lie that a step takes: bits of the low and of the high plane, and whether they name levels of a table.
constexpr int codes_of(int low, int high, bool table) { return low | high << 4 | table << 8; }
constexpr int low_bits(int codes) { return codes & 15; }
constexpr int high_bits(int codes) { return codes >> 4 & 15; }
constexpr bool by_table(int codes) { return codes >> 8; }
constexpr uint32_t byte_mask(int bits) { return ((1u << bits) - 1) * 0x01010101u; }
constexpr int CODES_3 = codes_of(2, 1, false), CODES_3_TABLE = codes_of(2, 1, true);
constexpr int CODES_4_TABLE = codes_of(4, 0, true);

enum Store { STORE_CODES, STORE_VALUES };

struct Tile {
  int runs, key_store, value_store;
  int64_t position;     // of the first token of run 0
  int64_t first, last;  // positions that the tile's segment covers
  const uint8_t *key[TILE_RUNS], *key_scale[TILE_RUNS], *key_minimum[TILE_RUNS];
  const uint8_t *value[TILE_RUNS], *value_scale[TILE_RUNS], *value_minimum[TILE_RUNS];
  const uint8_t *key_group[TILE_RUNS];               // the same for runs whose channels share scales
  const uint8_t *slab[TILE_RUNS];                    // of the page, for what is not read as it lies
  int32_t in_page[TILE_RUNS];
  const uint8_t *key_high[TILE_RUNS], *value_high[TILE_RUNS]; // where steps take the high plane as it lies
};

struct Segment { // tokens that lie alike; indices count from `position`
  int64_t first, last, position, tile;
  bool sinks, key_paged, value_paged;
};

struct Sequence {
  int64_t length, tiles, chunk_tiles, chunks, task;
  Segment segments[4];
};

// How a group's numbers lie in a tile: fp16 in pages, float32 where they were expanded.
struct NumberPlace {
  bool single;
  int64_t group_bytes; // from one channel group to the next
};
INLINE F number_of(const NumberPlace &n, const uint8_t *at, int group) {
  at += group * n.group_bytes;
  return n.single ? fload((const float *)at) : half_load(at);
}
INLINE F channel_number(const NumberPlace &n, const uint8_t *at, int vector) {
  return n.single ? fload((const float *)at + LANES * vector) : half_load(at + 32 * vector);
}

struct Shape {
  const kvplan_layout *layout;
  const kvplan_batch *batch;
  const kvplan_decode_call *call;
  int dim, vectors, padded, ratio, rows, blocks;
  int key_groups, value_groups; // channel groups
  Mask tail;                    // lanes of the last vector of channels
  float factor, cap;            // dot -> log2 score; with softcap, dot -> argument of tanh, and the cap in log2
  int64_t state_floats;
  int tile_tokens;
  NumberPlace key_numbers, value_numbers;
  bool expands; // tiles are made what the steps multiply before they do
  int64_t key_high_bytes;
  int64_t key_page_bytes, value_page_bytes; // of a token's codes or values in pages
};

// A row's operands on two planes; the strides are constants, so that the inner loops need one pointer.
typedef uint8_t Operands[2][ROWS][DIM_MOST];

// Rows times the numbers of one token group's channels: a product with codes times the unit, and the bias, is a score.
struct ChannelOperands {
  Operands operands;
  float unit[ROWS], bias[ROWS];
};

// Up to four rows: their operands, their range of positions, and where their state lies.
struct Rows {
  Operands operands;         // of the query
  ChannelOperands channels;  // of query times per-channel scale
  ChannelOperands boosts;    // the same of boosted channels, where there are some
  float query[ROWS][DIM_MOST], pairs[ROWS][DIM_MOST];
  uint16_t halves[2][ROWS][DIM_MOST]; // of the query, as two bf16 parts; where tiles multiply them
  int count;
  int64_t first[ROWS], last[ROWS]; // positions each row attends to
  int64_t all_first, all_last;     // positions that every row attends to
  float unit[ROWS], sums[GROUPS][ROWS];
  float rests[GROUPS][ROWS]; // what rounding took from the operands' sum, times the middle code
  const uint8_t *channel_group, *boost_group; // the metadata that their operands hold
  float *maximum, *total, *minima, *output; // state: [16], [ROWS][16], [GROUPS][ROWS][16], [ROWS][padded]
  float *scores[ROWS];                      // kept scores by position, or null
  float by_channel[DIM_MOST][ROWS], beside[2][DIM_MOST][ROWS]; // of the query, and of the output: where there are outliers
};

struct Weights { // of one tile
  float p[ROWS * TILE];
  Mask seen[ROWS * TILE_RUNS];
  Mask any[TILE_RUNS], all[TILE_RUNS];
  float shrink[LANES]; // factor on what was summed before
  bool full;
};

// ---- scores

// Four codes to a word out of plane `k` of a word of low bits, and of the word of high bits that goes with it.
template <int CODES> INLINE I codes_at(I low, I high, int k, const uint8_t *table) {
  constexpr int LOW = low_bits(CODES), HIGH = high_bits(CODES);
  I codes = k ? ishr(low, LOW * k) : low;
  if (LOW < 8) codes = iand(codes, iset((int32_t)byte_mask(LOW)));
  if (HIGH) codes = ior(codes, ishl(iand(k ? ishr(high, HIGH * k) : high, iset((int32_t)byte_mask(HIGH))), LOW));
  return by_table(CODES) ? table_bytes(table, codes) : codes;
}

// Add the products of `words` words of each run to the dots; the operands start at the same channel.
template <int CODES, int RB, int RUNS>
INLINE void dot_words(const uint8_t *table, const uint8_t *const *now, const uint8_t *const *now_high,
                      const uint8_t *const *next, const uint8_t *operands, int64_t first, int64_t words,
                      Dot (&dot)[RB][RUNS]) {
  constexpr int BITS = low_bits(CODES), HIGH = high_bits(CODES);
  constexpr int ELEMENTS = 32 / BITS, PLANES = 8 / BITS, PLANE = ROWS * DIM_MOST, SHARE = HIGH ? BITS / HIGH : 1;
  const uint8_t *from[RUNS], *ahead[RUNS];
#pragma GCC unroll 4
  for (int j = 0; j < RUNS; j++) {
    from[j] = now[j] + 64 * first;
    ahead[j] = next[j] + 64 * first;
  }
  operands += first * ELEMENTS;
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) dot[r][j] = dot_zero();
  for (int64_t at = 0; at < 64 * words; at += 64, operands += ELEMENTS) {
    I word[RUNS], high[RUNS];
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) {
      word[j] = iload(from[j] + at);
      high[j] = izero();
      if (HIGH) { // a word of the high plane goes with several of the low one
        const int64_t w = first + at / 64;
        high[j] = ishr(iload(now_high[j] + w / SHARE * 64), (int)(w % SHARE) * PLANES * HIGH);
      }
      prefetch(ahead[j] + at);
    }
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; k++) {
      I codes[RUNS];
#pragma GCC unroll 4
      for (int j = 0; j < RUNS; j++) codes[j] = codes_at<CODES>(word[j], high[j], k, table);
#pragma GCC unroll 4
      for (int r = 0; r < RB; r++) {
        const uint8_t *at_row = operands + r * DIM_MOST + 4 * k;
        const Quad q = quad_load(at_row, at_row + PLANE);
#pragma GCC unroll 4
        for (int j = 0; j < RUNS; j++) dot_add(dot[r][j], codes[j], q);
      }
    }
  }
}

// The score of tokens that have their own scale and minimum. Operands are rounded; codes scatter around the middle one,
// so most of what rounding takes away is the middle code times the sum of the roundings, which is known.
INLINE F token_score(const Rows &rows, int group, int r, F dot, F scale, F minimum) {
  const F codes = fma(dot, fset(rows.unit[r]), fset(rows.rests[group][r]));
  return fma(codes, scale, fmul(minimum, fset(rows.sums[group][r])));
}

template <int CODES, int RB, int RUNS, bool CHANNEL>
INLINE void score_codes_runs(const Shape &s, const Rows &rows, const Tile &now, const Tile &next, int run, float *out) {
  constexpr int ELEMENTS = 32 / low_bits(CODES);
  const int words = (s.dim + ELEMENTS - 1) / ELEMENTS, groups = CHANNEL ? 1 : s.key_groups;
  const int per_group = groups == 1 ? words : s.layout->key.group / ELEMENTS;
  const uint8_t *operands = CHANNEL ? rows.channels.operands[0][0] : rows.operands[0][0];
  out += run * LANES;
  for (int group = 0; group < groups; group++) {
    const int first = group * per_group, count = group == groups - 1 ? words - first : per_group;
    Dot dot[RB][RUNS];
    dot_words<CODES, RB, RUNS>(s.layout->key.table, now.key + run, now.key_high + run, next.key + run, operands, first,
                               count, dot);
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) {
      F scale = fzero(), minimum = fzero();
      if (!CHANNEL) {
        scale = number_of(s.key_numbers, now.key_scale[run + j], group);
        minimum = number_of(s.key_numbers, now.key_minimum[run + j], group);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RB; r++) {
        F x = itof(dot_sum(dot[r][j]));
        float *to = out + r * TILE + j * LANES;
        if (CHANNEL) x = fma(x, fset(rows.channels.unit[r]), fset(rows.channels.bias[r]));
        else x = token_score(rows, group, r, x, scale, minimum);
        fstore(to, group ? fadd(fload(to), x) : x);
      }
    }
  }
}

// Round rows, of which the largest magnitudes are given, to operands; what rounding took times the middle code is added
// to the bias.
template <int RB>
INLINE void round_rows(const Shape &s, const float (*scaled)[DIM_MOST], const F *most, int vectors, float middle,
                       ChannelOperands &o, F *bias) {
  float units[LANES], inverses[LANES], biases[LANES];
  F largest = fmul(fmax4(most), fset(1.0f / OPERAND_MOST));
  fstore(units, largest);
  fstore(inverses, fdiv(fset(1.0f), fmax(largest, fset(1e-37f))));
  for (int r = 0; r < RB; r++) {
    const F inverse = fset(inverses[r]), unit = fset(-units[r]);
    F rest = fzero();
    for (int v = 0; v < vectors; v += 2) {
      const int at = v * LANES;
      const F x = fload(scaled[r] + at), y = v + 1 < vectors ? fload(scaled[r] + at + LANES) : fzero();
      const I x_operands = ftoi(fmul(x, inverse)), y_operands = ftoi(fmul(y, inverse));
      quads_store(o.operands[0][r] + at, o.operands[1][r] + at, x_operands, y_operands);
      rest = fadd(rest, fadd(fma(itof(x_operands), unit, x), fma(itof(y_operands), unit, y)));
    }
    bias[r] = fma(rest, fset(middle), bias[r]);
  }
  fstore(biases, fsum4(bias));
  for (int r = 0; r < RB; r++) {
    o.unit[r] = units[r] * s.factor;
    o.bias[r] = biases[r] * s.factor;
  }
}

// Make the operands of query times scale, and the bias, for the token group that a run belongs to.
template <int RB> void fill_channel_operands(const Shape &s, Rows &rows, const Tile &now, int run) {
  const uint8_t *scales = now.key_scale[run], *minima = now.key_minimum[run];
  float scaled[ROWS][DIM_MOST];
  F most[ROWS], bias[ROWS];
  for (int r = 0; r < ROWS; r++) most[r] = bias[r] = fzero();
  for (int v = 0; v < s.vectors; v++) {
    F scale = channel_number(s.key_numbers, scales, v), minimum = channel_number(s.key_numbers, minima, v);
    if (v == s.vectors - 1) {
      scale = fselect(s.tail, scale, fzero());
      minimum = fselect(s.tail, minimum, fzero());
    }
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      F q = fload(rows.query[r] + v * LANES), x = fmul(q, scale);
      bias[r] = fma(q, minimum, bias[r]);
      most[r] = fmax(fabs_(x), most[r]);
      fstore(scaled[r] + v * LANES, x);
    }
  }
  round_rows<RB>(s, scaled, most, s.vectors, s.layout->key.middle, rows.channels, bias);
  rows.channel_group = now.key_group[run];
}

template <int CODES, int RB, bool CHANNEL>
void score_codes(const Shape &s, Rows &rows, const Tile &now, const Tile &next, float *out) {
  int run = 0;
  while (run < now.runs) {
    bool joint = run + KVPLAN_KEY_RUNS <= now.runs;
    if (CHANNEL) {
      const uint8_t *group = now.key_group[run];
      joint = joint && now.key_group[run + KVPLAN_KEY_RUNS - 1] == group;
      if (rows.channel_group != group) fill_channel_operands<RB>(s, rows, now, run);
    }
    if (joint) score_codes_runs<CODES, RB, KVPLAN_KEY_RUNS, CHANNEL>(s, rows, now, next, run, out);
    else score_codes_runs<CODES, RB, 1, CHANNEL>(s, rows, now, next, run, out);
    run += joint ? KVPLAN_KEY_RUNS : 1;
  }
}

template <int TYPE, int RB, int RUNS>
INLINE void score_values_runs(const Shape &s, const Rows &rows, const Tile &now, const Tile &next, int run,
                              float *out) {
  Pairs<TYPE> sum[RB][RUNS];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) sum[r][j].zero();
  for (int w = 0; w < s.dim / 2; w++) {
    typename Pairs<TYPE>::Word word[RUNS];
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) {
      word[j] = Pairs<TYPE>::load(iload(now.key[run + j] + 64 * w));
      prefetch(next.key[run + j] + 64 * w);
    }
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
      for (int j = 0; j < RUNS; j++) sum[r][j].add(word[j], rows.pairs[r] + 2 * w);
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++)
      fstore(out + r * TILE + (run + j) * LANES, fmul(sum[r][j].total(), fset(s.factor)));
}

template <int TYPE, int RB>
void score_values(const Shape &s, Rows &rows, const Tile &now, const Tile &next, float *out) {
  constexpr int RUNS = TYPE == KVPLAN_FP16 && KVPLAN_HALF_VECTORS > 1 ? KVPLAN_HALF_VECTORS / 2 : KVPLAN_HALF_VECTORS;
  int run = 0;
  for (; run + RUNS <= now.runs; run += RUNS) score_values_runs<TYPE, RB, RUNS>(s, rows, now, next, run, out);
  for (; run < now.runs; run++) score_values_runs<TYPE, RB, 1>(s, rows, now, next, run, out);
}

// ---- softmax

INLINE void see(const Rows &rows, const Tile &tile, Weights &w) {
  const int64_t first = kvplan_most(tile.first, rows.all_first), last = kvplan_least(tile.last, rows.all_last);
  w.full = first <= tile.position && tile.position + tile.runs * LANES <= last;
  if (w.full) {
    for (int j = 0; j < TILE_RUNS; j++) w.all[j] = ALL;
    return;
  }
  for (int j = 0; j < tile.runs; j++) {
    w.any[j] = 0;
    w.all[j] = ALL;
    const int64_t start = tile.position + j * LANES;
    for (int r = 0; r < rows.count; r++) {
      const int64_t from = kvplan_most(tile.first, rows.first[r]), to = kvplan_least(tile.last, rows.last[r]);
      const Mask m = lanes_between(from - start, to - start);
      w.seen[r * TILE_RUNS + j] = m;
      w.any[j] |= m;
      w.all[j] &= m;
    }
  }
}

INLINE void keep_scores(const Rows &rows, const Tile &tile, const Weights &w, int r, int j, F x) {
  float lanes[LANES];
  fstore(lanes, x);
  for (int i = 0; i < LANES; i++)
    if (w.full || w.seen[r * TILE_RUNS + j] >> i & 1) rows.scores[r][tile.position + j * LANES + i] = lanes[i];
}

// Turn the scores of a tile into weights, and take them into the running maximum and total.
template <int RB> void weigh(const Shape &s, Rows &rows, const Tile &tile, Weights &w) {
  F most[ROWS];
  for (int r = 0; r < ROWS; r++) most[r] = fset(-INFINITY);
  for (int j = 0; j < tile.runs; j++) {
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      float *at = w.p + r * TILE + j * LANES;
      F x = fload(at);
      if (s.cap > 0) x = fmul(fset(s.cap), ftanh(x));
      if (!w.full) x = fselect(w.seen[r * TILE_RUNS + j], x, fset(-INFINITY));
      if (s.cap > 0 || !w.full) fstore(at, x);
      if (rows.scores[r]) keep_scores(rows, tile, w, r, j, x);
      most[r] = fmax(x, most[r]);
    }
  }
  const F here = fmax4(most), before = fload(rows.maximum), after = fmax(here, before);
  fstore(rows.maximum, after);
  fstore(w.shrink, fexp2(fsub(before, after)));
  float maxima[LANES];
  fstore(maxima, after);
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) {
    F sum = fmul(fload(rows.total + r * LANES), fset(w.shrink[r]));
    const F maximum = fset(maxima[r]);
    for (int j = 0; j < tile.runs; j++) {
      float *at = w.p + r * TILE + j * LANES;
      F p = fexp2_below(fsub(fload(at), maximum));
      if (!w.full) p = fselect(w.seen[r * TILE_RUNS + j], p, fzero());
      fstore(at, p);
      sum = fadd(sum, p);
    }
    fstore(rows.total + r * LANES, sum);
  }
  for (int g = 0; g < s.value_groups; g++)
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      float *at = rows.minima + (g * ROWS + r) * LANES;
      fstore(at, fmul(fload(at), fset(w.shrink[r])));
    }
}

// ---- outputs

struct Weighted { // weights times V scale of one channel group
  uint8_t operands[2][ROWS][TILE];
  float unit[LANES];
};

template <int RB>
INLINE void fill_value_operands(const Shape &s, Rows &rows, const Tile &now, const Weights &w, int group, Weighted &o) {
  F most[ROWS];
  for (int r = 0; r < ROWS; r++) most[r] = fzero();
  for (int j = 0; j < now.runs; j++) {
    const F scale = fabs_(number_of(s.value_numbers, now.value_scale[j], group));
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      F x = fmul(fload(w.p + r * TILE + j * LANES), scale);
      if (!w.full) x = fselect(w.seen[r * TILE_RUNS + j], x, fzero());
      most[r] = fmax(x, most[r]);
    }
  }
  float inverse[LANES];
  F unit = fmax(fmul(fmax4(most), fset(1.0f / OPERAND_MOST)), fset(1e-30f));
  fstore(o.unit, unit);
  fstore(inverse, fdiv(fset(1.0f), unit));
  F minima[RB];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) minima[r] = fload(rows.minima + (group * ROWS + r) * LANES);
  for (int j = 0; j < now.runs; j += 2) {
    const bool two = j + 1 < now.runs;
    const F scale0 = number_of(s.value_numbers, now.value_scale[j], group);
    const F minimum0 = number_of(s.value_numbers, now.value_minimum[j], group);
    const F scale1 = two ? number_of(s.value_numbers, now.value_scale[j + 1], group) : fzero();
    const F minimum1 = two ? number_of(s.value_numbers, now.value_minimum[j + 1], group) : fzero();
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      const float *p = w.p + r * TILE + j * LANES;
      const F p0 = fload(p), p1 = two ? fload(p + LANES) : fzero(), factor = fset(inverse[r]);
      F x0 = fmul(p0, fmul(scale0, factor)), x1 = fmul(p1, fmul(scale1, factor)), y0 = minimum0, y1 = minimum1;
      if (!w.full) { // a weight of 0 does not undo a NaN
        const Mask m0 = w.seen[r * TILE_RUNS + j], m1 = two ? w.seen[r * TILE_RUNS + j + 1] : 0;
        x0 = fselect(m0, x0, fzero());
        y0 = fselect(m0, y0, fzero());
        x1 = fselect(m1, x1, fzero());
        y1 = fselect(m1, y1, fzero());
      }
      minima[r] = fma(p1, y1, fma(p0, y0, minima[r]));
      quads_store(o.operands[0][r] + j * LANES, o.operands[1][r] + j * LANES, ftoi(x0), ftoi(x1));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) fstore(rows.minima + (group * ROWS + r) * LANES, minima[r]);
}

template <int CODES, int RB, int VECTORS, bool PART>
INLINE void add_codes_vectors(const Shape &s, Rows &rows, const Tile &now, const Tile &next, const Weights &w,
                              const Weighted &o, int vector) {
  constexpr int BITS = low_bits(CODES), HIGH = high_bits(CODES);
  constexpr int ELEMENTS = 32 / BITS, PLANES = 8 / BITS, PLANE = ROWS * TILE, HIGH_ELEMENTS = HIGH ? 32 / HIGH : 1;
  Dot dot[RB][VECTORS];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) dot[r][v] = dot_zero();
  const uint8_t *operands = o.operands[0][0];
  const int64_t offset = 64 * vector, stride = 4 * s.dim;
  for (int j = 0; j < now.runs; j++) {
    const uint8_t *from = now.value[j] + offset, *ahead = next.value[j] + offset;
#pragma GCC unroll 1
    for (int e = 0; e < LANES; e += ELEMENTS, from += stride, ahead += stride, operands += ELEMENTS) {
      I word[VECTORS], high[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        word[v] = word_load<PART>(from + 64 * v, s.tail);
        high[v] = izero();
        if (HIGH) {
          const int token = now.in_page[j] + e;
          const I row = word_load<PART>(now.value_high[j] + token / HIGH_ELEMENTS * stride + offset + 64 * v, s.tail);
          high[v] = ishr(row, token % HIGH_ELEMENTS / 4 * HIGH);
        }
        prefetch(ahead + 64 * v);
      }
#pragma GCC unroll 4
      for (int k = 0; k < PLANES; k++) {
        I codes[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) codes[v] = codes_at<CODES>(word[v], high[v], k, s.layout->value.table);
#pragma GCC unroll 4
        for (int r = 0; r < RB; r++) {
          const uint8_t *at_row = operands + r * TILE + 4 * k;
          const Quad q = quad_load(at_row, at_row + PLANE);
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) dot_add(dot[r][v], codes[v], q);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) {
    const F shrink = fset(w.shrink[r]), unit = fset(o.unit[r]);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      float *at = rows.output + r * s.padded + (vector + v) * LANES;
      fstore(at, fma(itof(dot_sum(dot[r][v])), unit, fmul(fload(at), shrink)));
    }
  }
}

template <int CODES, int RB>
void add_codes(const Shape &s, Rows &rows, const Tile &now, const Tile &next, Weights &w) {
  const int per_group = s.value_groups == 1 ? s.vectors : s.layout->value.group / LANES;
  const int whole = s.tail == ALL ? s.vectors : s.vectors - 1;
  for (int group = 0; group < s.value_groups; group++) {
    Weighted o;
    fill_value_operands<RB>(s, rows, now, w, group, o);
    const int end = group == s.value_groups - 1 ? s.vectors : (group + 1) * per_group;
    const int whole_end = end < whole ? end : whole;
    int v = group * per_group;
    for (; v + KVPLAN_VALUE_VECTORS <= whole_end; v += KVPLAN_VALUE_VECTORS)
      add_codes_vectors<CODES, RB, KVPLAN_VALUE_VECTORS, false>(s, rows, now, next, w, o, v);
    for (; v < whole_end; v++) add_codes_vectors<CODES, RB, 1, false>(s, rows, now, next, w, o, v);
    if (v < end) add_codes_vectors<CODES, RB, 1, true>(s, rows, now, next, w, o, v);
  }
}

template <int TYPE, int RB, int VECTORS, bool PART>
INLINE void add_values_vectors(const Shape &s, Rows &rows, const Tile &now, const Tile &next, const Weights &w,
                               int vector) {
  Pairs<TYPE> sum[RB][VECTORS];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sum[r][v].zero();
  for (int j = 0; j < now.runs; j++) {
    if (w.all[j] != ALL) continue;
    const int64_t offset = 64 * vector, stride = 4 * s.dim;
    const uint8_t *from = now.value[j] + offset, *ahead = next.value[j] + offset;
    for (int e = 0; e < LANES; e += 2, from += stride, ahead += stride) {
      typename Pairs<TYPE>::Word word[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        word[v] = Pairs<TYPE>::load(PART ? iload_part(from + 64 * v, s.tail) : iload(from + 64 * v));
        prefetch(ahead + 64 * v);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sum[r][v].add(word[v], w.p + r * TILE + j * LANES + e);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      float *at = rows.output + r * s.padded + (vector + v) * LANES;
      fstore(at, fma(fload(at), fset(w.shrink[r]), sum[r][v].total()));
    }
}

// Add the tokens of one run that some rows do not see, one by one: what a row does not see may be NaN.
template <int TYPE>
void add_values_seen(const Shape &s, Rows &rows, const Tile &now, const Weights &w, int j) {
  for (int i = 0; i < LANES; i++) {
    if (!(w.any[j] >> i & 1)) continue;
    const uint8_t *from = now.value[j] + (int64_t)4 * s.dim * (i / 2);
    for (int v = 0; v < s.vectors; v++) {
      I word = v == s.vectors - 1 ? iload_part(from + 64 * v, s.tail) : iload(from + 64 * v);
      I bits = i & 1 ? ishr(word, 16) : iand(word, iset(0xffff));
      F x = from_bits(bits, TYPE);
      for (int r = 0; r < rows.count; r++) {
        if (!(w.seen[r * TILE_RUNS + j] >> i & 1)) continue;
        float *at = rows.output + r * s.padded + v * LANES;
        fstore(at, fma(fset(w.p[r * TILE + j * LANES + i]), x, fload(at)));
      }
    }
  }
}

template <int TYPE, int RB>
void add_values(const Shape &s, Rows &rows, const Tile &now, const Tile &next, Weights &w) {
  constexpr int VECTORS =
      TYPE == KVPLAN_FP16 && KVPLAN_HALF_VECTORS > 1 ? KVPLAN_HALF_VECTORS / 2 : KVPLAN_HALF_VECTORS;
  for (int j = 0; j < now.runs; j++)
    for (int r = 0; r < RB; r++) {
      float *p = w.p + r * TILE + j * LANES;
      if (w.all[j] == ALL) Pairs<TYPE>::store(p, fload(p));
    }
  const int whole = s.tail == ALL ? s.vectors : s.vectors - 1;
  int v = 0;
  for (; v + VECTORS <= whole; v += VECTORS) add_values_vectors<TYPE, RB, VECTORS, false>(s, rows, now, next, w, v);
  for (; v < whole; v++) add_values_vectors<TYPE, RB, 1, false>(s, rows, now, next, w, v);
  if (v < s.vectors) add_values_vectors<TYPE, RB, 1, true>(s, rows, now, next, w, v);
  for (int j = 0; j < now.runs; j++)
    if (w.all[j] != ALL) add_values_seen<TYPE>(s, rows, now, w, j);
}

#include "decode_boosts.h"

#ifdef KVPLAN_AMX
#include "decode_amx.h"
#else
struct TileConfig {};
INLINE void tiles_begin(TileConfig *) {}
INLINE void tiles_end(const TileConfig *) {}
#endif

// ---- choice of the functions for a format and a number of rows

typedef void (*ScoreFunction)(const Shape &, Rows &, const Tile &, const Tile &, float *);
typedef void (*WeighFunction)(const Shape &, Rows &, const Tile &, Weights &);
typedef void (*AddFunction)(const Shape &, Rows &, const Tile &, const Tile &, Weights &);

// Whether a step takes a tensor's codes as they lie.
INLINE bool codes_direct(const kvplan_tensor &t) {
  if (codes_plain(t)) return true;
#ifdef KVPLAN_AMX
  return false; // tiles want a byte a code
#else
  const int codes = codes_of(t.low_bits, t.high_bits, t.map == KVPLAN_MAP_TABLE);
  return !is_float(t) && (codes == CODES_3 || (!t.per_channel && (codes == CODES_3_TABLE || codes == CODES_4_TABLE)));
#endif
}
// How the codes lie that the steps are handed: 16 for values, bytes where they were expanded.
INLINE int step_codes(const kvplan_tensor &t) {
  if (t.bits == 16 || is_float(t)) return 16;
  return codes_direct(t) ? codes_of(t.low_bits, t.high_bits, t.map == KVPLAN_MAP_TABLE) : 8;
}

template <int RB> ScoreFunction choose_score(const kvplan_layout &l, int store) {
  const int codes = store == STORE_VALUES ? 16 : step_codes(l.key);
#ifdef KVPLAN_AMX
  if (codes == 16 && l.float_type == KVPLAN_BF16) return score_values_tiles<RB>;
  const bool chunks = l.key.per_channel || l.key.group % CHUNK == 0 || l.key.group >= l.head_dim;
  if (codes != 16 && chunks) {
    if (codes == 8) return l.key.per_channel ? score_codes_tiles<8, RB, true> : score_codes_tiles<8, RB, false>;
    if (codes == 4) return l.key.per_channel ? score_codes_tiles<4, RB, true> : score_codes_tiles<4, RB, false>;
    return l.key.per_channel ? score_codes_tiles<2, RB, true> : score_codes_tiles<2, RB, false>;
  }
#endif
  if (codes == 16) return l.float_type == KVPLAN_BF16 ? score_values<KVPLAN_BF16, RB> : score_values<KVPLAN_FP16, RB>;
  if (codes == 8) return l.key.per_channel ? score_codes<8, RB, true> : score_codes<8, RB, false>;
  if (codes == 4) return l.key.per_channel ? score_codes<4, RB, true> : score_codes<4, RB, false>;
  if (codes == CODES_3) return l.key.per_channel ? score_codes<CODES_3, RB, true> : score_codes<CODES_3, RB, false>;
  if (codes == CODES_3_TABLE) return score_codes<CODES_3_TABLE, RB, false>;
  if (codes == CODES_4_TABLE) return score_codes<CODES_4_TABLE, RB, false>;
  return l.key.per_channel ? score_codes<2, RB, true> : score_codes<2, RB, false>;
}

template <int RB> AddFunction choose_add(const kvplan_layout &l, int store) {
  const int codes = store == STORE_VALUES ? 16 : step_codes(l.value);
#ifdef KVPLAN_AMX
  if (codes == 16 && l.float_type == KVPLAN_BF16) return add_values_tiles<RB>;
  if (codes != 16) return codes == 8 ? add_codes_tiles<8, RB> : codes == 4 ? add_codes_tiles<4, RB> : add_codes_tiles<2, RB>;
#endif
  if (codes == 16) return l.float_type == KVPLAN_BF16 ? add_values<KVPLAN_BF16, RB> : add_values<KVPLAN_FP16, RB>;
  if (codes == CODES_3) return add_codes<CODES_3, RB>;
  if (codes == CODES_3_TABLE) return add_codes<CODES_3_TABLE, RB>;
  if (codes == CODES_4_TABLE) return add_codes<CODES_4_TABLE, RB>;
  return codes == 8 ? add_codes<8, RB> : codes == 4 ? add_codes<4, RB> : add_codes<2, RB>;
}

struct Steps {
  ScoreFunction score[2], boost; // the latter adds to scores of codes
  WeighFunction weigh;
  AddFunction add[2];
};

template <int RB> Steps choose_steps(const kvplan_layout &l) {
  return {{choose_score<RB>(l, STORE_CODES), choose_score<RB>(l, STORE_VALUES)},
          add_key_boosts<RB>,
          weigh<RB>,
          {choose_add<RB>(l, STORE_CODES), choose_add<RB>(l, STORE_VALUES)}};
}

#include "decode_expand.h"
#include "decode_outliers.h"
#include "decode_tasks.h"
