// Attention of up to 32 queries over pages, residual and sinks, in one pass.
//
// A task is one KV head of one sequence and a range of tiles of 64 tokens. Its rows (queries x query heads of the KV
// head) are worked through in blocks of four per tile, so that K and V come from memory once. Scores are in units of
// log2: exp2 gives the weights. The integer sums are exact; docs/explanation/kernel-accuracy.md bounds the rest.
#pragma once

constexpr int TILE_RUNS = 4;
constexpr int TILE = TILE_RUNS * LANES;
constexpr int GROUPS = 8; // channel groups of one token at most: 256 channels by 32
constexpr float LOWEST = -1e30f; // running maximum before any token: finite, so that differences stay numbers
constexpr float LOG2_E = 1.4426950408889634f;
constexpr int64_t CHUNK_TILES_MIN = 4; // below, starting a task costs more than it saves

enum Store { STORE_CODES, STORE_VALUES };

struct Tile {
  int runs, key_store, value_store;
  int64_t position;     // of the first token of run 0
  int64_t first, last;  // positions that the tile's segment covers
  const uint8_t *key[TILE_RUNS], *key_scale[TILE_RUNS], *key_minimum[TILE_RUNS];
  const uint8_t *value[TILE_RUNS], *value_scale[TILE_RUNS], *value_minimum[TILE_RUNS];
};

struct Segment { // tokens that lie alike; indices count from `position`
  int64_t first, last, position, tile;
  bool sinks, key_paged, value_paged;
};

struct Sequence {
  int64_t length, tiles, chunk_tiles, chunks, task;
  Segment segments[4];
};

struct Shape {
  const kvplan_layout *layout;
  const kvplan_batch *batch;
  const kvplan_decode_call *call;
  int dim, vectors, padded, ratio, rows, blocks;
  int key_groups, value_groups; // channel groups
  Mask tail;                    // lanes of the last vector of channels
  float factor, cap;            // dot -> log2 score; with softcap, dot -> argument of tanh, and the cap in log2
  int64_t state_floats;
};

// Up to four rows: their operands, their range of positions, and where their state lies.
struct Rows {
  int count;
  int64_t first[ROWS], last[ROWS]; // positions each row attends to
  float *query, *pairs;            // [ROWS][padded]
  uint8_t *high, *low;             // [ROWS][padded] operand planes of the query
  uint8_t *channel_high, *channel_low; // of query times per-channel scale
  float unit[ROWS], sums[GROUPS][ROWS];
  float channel_unit[ROWS], channel_bias[ROWS];
  const uint8_t *channel_group; // the metadata that the channel operands hold
  float *maximum, *total, *minima, *output; // state: [16], [ROWS][16], [GROUPS][ROWS][16], [ROWS][padded]
  float *scores[ROWS];                      // kept scores by position, or null
};

struct Weights { // of one tile
  float p[ROWS * TILE];
  Mask seen[ROWS * TILE_RUNS];
  Mask any[TILE_RUNS], all[TILE_RUNS];
  float shrink[LANES], most[LANES]; // factor on what was summed before; greatest weight of each row
  bool full;
};

// ---- scores

template <int BITS, int RB, int RUNS, bool CHANNEL>
INLINE void score_codes_runs(const Shape &s, const Rows &rows, const Tile &now, const Tile &next, int run, float *out) {
  constexpr int ELEMENTS = 32 / BITS, PLANES = 8 / BITS;
  const int words = (s.dim + ELEMENTS - 1) / ELEMENTS, groups = CHANNEL ? 1 : s.key_groups;
  const int per_group = groups == 1 ? words : s.layout->key.group / ELEMENTS;
  const uint8_t *plane_a = CHANNEL ? rows.channel_high : rows.high, *plane_b = CHANNEL ? rows.channel_low : rows.low;
  const I mask = iset(BITS == 8 ? -1 : BITS == 4 ? 0x0f0f0f0f : 0x03030303);
  F sum[RB][RUNS] = {};
  for (int group = 0; group < groups; group++) {
    Dot dot[RB][RUNS];
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
      for (int j = 0; j < RUNS; j++) dot[r][j] = dot_zero();
    const int end = group == groups - 1 ? words : (group + 1) * per_group;
    for (int w = group * per_group; w < end; w++) {
      I word[RUNS];
#pragma GCC unroll 4
      for (int j = 0; j < RUNS; j++) {
        word[j] = iload(now.key[run + j] + 64 * w);
        prefetch(next.key[run + j] + 64 * w);
      }
#pragma GCC unroll 4
      for (int k = 0; k < PLANES; k++) {
        I codes[RUNS];
#pragma GCC unroll 4
        for (int j = 0; j < RUNS; j++) {
          codes[j] = k ? ishr(word[j], BITS * k) : word[j];
          if (BITS < 8) codes[j] = iand(codes[j], mask);
        }
#pragma GCC unroll 4
        for (int r = 0; r < RB; r++) {
          const int at = r * s.padded + w * ELEMENTS + 4 * k;
          Quad q = quad_load(plane_a + at, plane_b + at);
#pragma GCC unroll 4
          for (int j = 0; j < RUNS; j++) dot_add(dot[r][j], codes[j], q);
        }
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) {
      F scale, minimum;
      if (!CHANNEL) {
        const int64_t at = (int64_t)2 * group * s.layout->block_tokens;
        scale = half_load(now.key_scale[run + j] + at);
        minimum = half_load(now.key_minimum[run + j] + at);
      }
#pragma GCC unroll 4
      for (int r = 0; r < RB; r++) {
        F x = itof(dot_sum(dot[r][j]));
        if (CHANNEL) x = fma(x, fset(rows.channel_unit[r]), fset(rows.channel_bias[r]));
        else x = fma(minimum, fset(rows.sums[group][r]), fmul(x, fmul(scale, fset(rows.unit[r]))));
        sum[r][j] = group ? fadd(sum[r][j], x) : x;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int j = 0; j < RUNS; j++) fstore(out + r * TILE + (run + j) * LANES, sum[r][j]);
}

// Make the operands of query times scale, and the bias, for the token group that a run belongs to.
template <int RB> void fill_channel_operands(const Shape &s, Rows &rows, const uint8_t *scales, const uint8_t *minima) {
  float scaled[ROWS][256];
  F most[ROWS] = {fzero(), fzero(), fzero(), fzero()}, bias[RB];
  for (int r = 0; r < RB; r++) bias[r] = fzero();
  for (int v = 0; v < s.vectors; v++) {
    F scale = half_load(scales + 32 * v), minimum = half_load(minima + 32 * v);
    if (v == s.vectors - 1) {
      scale = fselect(s.tail, scale, fzero());
      minimum = fselect(s.tail, minimum, fzero());
    }
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      F q = fload(rows.query + r * s.padded + v * LANES), x = fmul(q, scale);
      bias[r] = fma(q, minimum, bias[r]);
      most[r] = fmax(fabs_(x), most[r]);
      fstore(scaled[r] + v * LANES, x);
    }
  }
  float units[LANES], inverses[LANES];
  F largest = fmul(fmax4(most), fset(1.0f / OPERAND_MOST));
  fstore(units, largest);
  fstore(inverses, fdiv(fset(1.0f), fmax(largest, fset(1e-37f))));
  for (int r = 0; r < RB; r++) {
    rows.channel_unit[r] = units[r] * s.factor;
    rows.channel_bias[r] = fsum(bias[r]) * s.factor;
    F inverse = fset(inverses[r]);
    for (int v = 0; v < s.vectors; v++) {
      const int at = r * s.padded + v * LANES;
      quads_store(rows.channel_high + at, rows.channel_low + at, ftoi(fmul(fload(scaled[r] + v * LANES), inverse)));
    }
  }
  rows.channel_group = scales;
}

template <int BITS, int RB, bool CHANNEL>
void score_codes(const Shape &s, Rows &rows, const Tile &now, const Tile &next, float *out) {
  int run = 0;
  while (run < now.runs) {
    bool joint = run + KVPLAN_KEY_RUNS <= now.runs;
    if (CHANNEL) {
      const uint8_t *group = now.key_scale[run];
      joint = joint && now.key_scale[run + KVPLAN_KEY_RUNS - 1] == group;
      if (rows.channel_group != group) fill_channel_operands<RB>(s, rows, group, now.key_minimum[run]);
    }
    if (joint) score_codes_runs<BITS, RB, KVPLAN_KEY_RUNS, CHANNEL>(s, rows, now, next, run, out);
    else score_codes_runs<BITS, RB, 1, CHANNEL>(s, rows, now, next, run, out);
    run += joint ? KVPLAN_KEY_RUNS : 1;
  }
}

template <int TYPE, int RB, int RUNS>
INLINE void score_values_runs(const Shape &s, const Rows &rows, const Tile &now, const Tile &next, int run, float *out) {
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
      for (int j = 0; j < RUNS; j++) sum[r][j].add(word[j], rows.pairs + r * s.padded + 2 * w);
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
  w.full = true;
  for (int j = 0; j < tile.runs; j++) {
    w.any[j] = 0;
    w.all[j] = ALL;
    const int64_t start = tile.position + j * LANES;
    for (int r = 0; r < rows.count; r++) {
      int64_t first = kvplan_most(tile.first, rows.first[r]), last = kvplan_least(tile.last, rows.last[r]);
      Mask m = lanes_between(first - start, last - start);
      w.seen[r * TILE_RUNS + j] = m;
      w.any[j] |= m;
      w.all[j] &= m;
    }
    w.full = w.full && w.all[j] == ALL;
  }
}

INLINE void keep_scores(const Rows &rows, const Tile &tile, const Weights &w, int r, int j, F x) {
  float lanes[LANES];
  fstore(lanes, x);
  for (int i = 0; i < LANES; i++)
    if (w.seen[r * TILE_RUNS + j] >> i & 1) rows.scores[r][tile.position + j * LANES + i] = lanes[i];
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
  fstore(w.most, fexp2(fsub(here, after)));
  float maxima[LANES];
  fstore(maxima, after);
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) {
    F sum = fmul(fload(rows.total + r * LANES), fset(w.shrink[r]));
    const F maximum = fset(maxima[r]);
    for (int j = 0; j < tile.runs; j++) {
      float *at = w.p + r * TILE + j * LANES;
      F p = fexp2(fsub(fload(at), maximum));
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

struct Operands { // weights times V scale of one channel group
  uint8_t high[ROWS * TILE], low[ROWS * TILE];
  float unit[LANES];
};

template <int RB>
INLINE void fill_value_operands(const Shape &s, Rows &rows, const Tile &now, const Weights &w, int group, Operands &o) {
  const int64_t at = (int64_t)2 * group * s.layout->block_tokens;
  F largest = fzero();
  for (int j = 0; j < now.runs; j++) {
    F scale = half_load(now.value_scale[j] + at);
    if (!w.full) scale = fselect(w.any[j], scale, fzero());
    largest = fmax(scale, largest);
  }
  float inverse[LANES];
  F unit = fmax(fmul(fload(w.most), fset(fmaximum(largest) * (1.0f / OPERAND_MOST))), fset(1e-30f));
  fstore(o.unit, unit);
  fstore(inverse, fdiv(fset(1.0f), unit));
  F minima[RB];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) minima[r] = fload(rows.minima + (group * ROWS + r) * LANES);
  for (int j = 0; j < now.runs; j++) {
    const F scale = half_load(now.value_scale[j] + at), minimum = half_load(now.value_minimum[j] + at);
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      const int lane = r * TILE + j * LANES;
      const F p = fload(w.p + lane);
      F x = fmul(p, fmul(scale, fset(inverse[r]))), y = minimum;
      if (!w.full) {
        x = fselect(w.seen[r * TILE_RUNS + j], x, fzero());
        y = fselect(w.seen[r * TILE_RUNS + j], y, fzero());
      }
      minima[r] = fma(p, y, minima[r]);
      quads_store(o.high + lane, o.low + lane, ftoi(x));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) fstore(rows.minima + (group * ROWS + r) * LANES, minima[r]);
}

template <int BITS, int RB, int VECTORS, bool PART>
INLINE void add_codes_vectors(const Shape &s, Rows &rows, const Tile &now, const Tile &next, const Weights &w,
                              const Operands &o, int vector) {
  constexpr int ELEMENTS = 32 / BITS, PLANES = 8 / BITS;
  const I mask = iset(BITS == 8 ? -1 : BITS == 4 ? 0x0f0f0f0f : 0x03030303);
  Dot dot[RB][VECTORS];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) dot[r][v] = dot_zero();
  for (int j = 0; j < now.runs; j++) {
    const int64_t offset = 64 * vector, stride = 4 * s.dim;
    const uint8_t *from = now.value[j] + offset, *ahead = next.value[j] + offset;
    for (int e = 0; e < LANES; e += ELEMENTS, from += stride, ahead += stride) {
      I word[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        word[v] = PART ? iload_part(from + 64 * v, s.tail) : iload(from + 64 * v);
        prefetch(ahead + 64 * v);
      }
#pragma GCC unroll 4
      for (int k = 0; k < PLANES; k++) {
        I codes[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
          codes[v] = k ? ishr(word[v], BITS * k) : word[v];
          if (BITS < 8) codes[v] = iand(codes[v], mask);
        }
        const int lane = j * LANES + e + 4 * k;
#pragma GCC unroll 4
        for (int r = 0; r < RB; r++) {
          Quad q = quad_load(o.high + r * TILE + lane, o.low + r * TILE + lane);
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

template <int BITS, int RB>
void add_codes(const Shape &s, Rows &rows, const Tile &now, const Tile &next, Weights &w) {
  const int per_group = s.value_groups == 1 ? s.vectors : s.layout->value.group / LANES;
  const int whole = s.tail == ALL ? s.vectors : s.vectors - 1;
  for (int group = 0; group < s.value_groups; group++) {
    Operands o;
    fill_value_operands<RB>(s, rows, now, w, group, o);
    const int end = group == s.value_groups - 1 ? s.vectors : (group + 1) * per_group;
    const int whole_end = end < whole ? end : whole;
    int v = group * per_group;
    for (; v + KVPLAN_VALUE_VECTORS <= whole_end; v += KVPLAN_VALUE_VECTORS)
      add_codes_vectors<BITS, RB, KVPLAN_VALUE_VECTORS, false>(s, rows, now, next, w, o, v);
    for (; v < whole_end; v++) add_codes_vectors<BITS, RB, 1, false>(s, rows, now, next, w, o, v);
    if (v < end) add_codes_vectors<BITS, RB, 1, true>(s, rows, now, next, w, o, v);
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

// ---- choice of the functions for a format and a number of rows

typedef void (*ScoreFunction)(const Shape &, Rows &, const Tile &, const Tile &, float *);
typedef void (*WeighFunction)(const Shape &, Rows &, const Tile &, Weights &);
typedef void (*AddFunction)(const Shape &, Rows &, const Tile &, const Tile &, Weights &);

template <int RB> ScoreFunction choose_score(const kvplan_layout &l, int store) {
  if (store == STORE_VALUES || l.key.bits == 16)
    return l.float_type == KVPLAN_BF16 ? score_values<KVPLAN_BF16, RB> : score_values<KVPLAN_FP16, RB>;
  if (l.key.bits == 8) return l.key.per_channel ? score_codes<8, RB, true> : score_codes<8, RB, false>;
  if (l.key.bits == 4) return l.key.per_channel ? score_codes<4, RB, true> : score_codes<4, RB, false>;
  return l.key.per_channel ? score_codes<2, RB, true> : score_codes<2, RB, false>;
}

template <int RB> AddFunction choose_add(const kvplan_layout &l, int store) {
  if (store == STORE_VALUES || l.value.bits == 16)
    return l.float_type == KVPLAN_BF16 ? add_values<KVPLAN_BF16, RB> : add_values<KVPLAN_FP16, RB>;
  return l.value.bits == 8 ? add_codes<8, RB> : l.value.bits == 4 ? add_codes<4, RB> : add_codes<2, RB>;
}

struct Steps {
  ScoreFunction score[2];
  WeighFunction weigh;
  AddFunction add[2];
};

template <int RB> Steps choose_steps(const kvplan_layout &l) {
  return {{choose_score<RB>(l, STORE_CODES), choose_score<RB>(l, STORE_VALUES)},
          weigh<RB>,
          {choose_add<RB>(l, STORE_CODES), choose_add<RB>(l, STORE_VALUES)}};
}

#include "decode_tasks.h"
