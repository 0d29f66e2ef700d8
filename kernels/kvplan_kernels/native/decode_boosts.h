// What the low bits of boosted channels add to scores: the product of some words more, with queries of these channels.
#pragma once

INLINE void prefetch_boosts(const Shape &s, const Tile &next) {
  const kvplan_tensor &k = s.layout->key;
  if (!k.boosts || next.key_store != STORE_CODES) return;
  for (int j = 0; j < next.runs; j++) {
    prefetch_span(boost_codes(k, next.slab[j], next.in_page[j]), 64 * boost_words(k));
    prefetch(boost_channels(k, next.slab[j], next.in_page[j]));
  }
}

// Make the operands of query times step, and the bias, for the token group that a run belongs to.
template <int RB> void fill_boost_operands(const Shape &s, Rows &rows, const Tile &now, int run) {
  const kvplan_tensor &k = s.layout->key;
  const uint8_t *channels = boost_channels(k, now.slab[run], now.in_page[run]);
  const int vectors = boost_words(k);
  float scales[DIM_MOST], scaled[ROWS][DIM_MOST];
  for (int v = 0; v < s.vectors; v++) fstore(scales + v * LANES, channel_number(s.key_numbers, now.key_scale[run], v));
  F most[ROWS], bias[ROWS];
  for (int r = 0; r < ROWS; r++) most[r] = bias[r] = fzero();
  for (int r = 0; r < RB; r++) {
    for (int n = 0; n < vectors * LANES; n++)
      scaled[r][n] = n < k.boosts ? rows.query[r][channels[n]] * (scales[channels[n]] / BOOST_STEPS) : 0.0f;
    for (int v = 0; v < vectors; v++) most[r] = fmax(fabs_(fload(scaled[r] + v * LANES)), most[r]);
  }
  round_rows<RB>(s, scaled, most, vectors, (BOOST_STEPS - 1) / 2, rows.boosts, bias);
  rows.boost_group = now.key_group[run];
}

template <int RB, int RUNS> INLINE void add_boosts_runs(const Shape &s, const Rows &rows, const Tile &now, int run, float *out) {
  const kvplan_tensor &k = s.layout->key;
  const uint8_t *words[RUNS];
  for (int j = 0; j < RUNS; j++) words[j] = boost_codes(k, now.slab[run + j], now.in_page[run + j]);
  Dot dot[RB][RUNS];
  dot_words<BOOST_BITS, RB, RUNS>(nullptr, words, words, words, rows.boosts.operands[0][0], 0, boost_words(k), dot);
#pragma GCC unroll 4
  for (int j = 0; j < RUNS; j++)
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      float *to = out + r * TILE + (run + j) * LANES;
      const F x = fma(itof(dot_sum(dot[r][j])), fset(rows.boosts.unit[r]), fset(rows.boosts.bias[r]));
      fstore(to, fadd(fload(to), x));
    }
}

// Scores come by row and token, in the unit of the factor.
template <int RB> void add_key_boosts(const Shape &s, Rows &rows, const Tile &now, const Tile &, float *out) {
  for (int run = 0; run < now.runs;) {
    const uint8_t *group = now.key_group[run];
    if (rows.boost_group != group) fill_boost_operands<RB>(s, rows, now, run);
    if (run + KVPLAN_KEY_RUNS <= now.runs && now.key_group[run + KVPLAN_KEY_RUNS - 1] == group) {
      add_boosts_runs<RB, KVPLAN_KEY_RUNS>(s, rows, now, run, out);
      run += KVPLAN_KEY_RUNS;
    } else {
      add_boosts_runs<RB, 1>(s, rows, now, run++, out);
    }
  }
}
