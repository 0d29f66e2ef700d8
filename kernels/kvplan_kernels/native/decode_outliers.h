// What the outliers of a tile add to scores and outputs: a product for each, with one channel of the query or output.
#pragma once

typedef float Four __attribute__((vector_size(16), aligned(4)));
static_assert(ROWS == 4, "rows are worked through as one vector");

// Four rows of four tokens become four tokens of four rows, and back.
INLINE void transpose_four(Four (&x)[4]) {
#ifdef __clang__
#define KVPLAN_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
  typedef int32_t Places __attribute__((vector_size(16)));
#define KVPLAN_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (Places){i, j, k, l})
#endif
  const Four low01 = KVPLAN_SHUFFLE(x[0], x[1], 0, 4, 1, 5), high01 = KVPLAN_SHUFFLE(x[0], x[1], 2, 6, 3, 7);
  const Four low23 = KVPLAN_SHUFFLE(x[2], x[3], 0, 4, 1, 5), high23 = KVPLAN_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
  x[0] = KVPLAN_SHUFFLE(low01, low23, 0, 1, 4, 5);
  x[1] = KVPLAN_SHUFFLE(low01, low23, 2, 3, 6, 7);
  x[2] = KVPLAN_SHUFFLE(high01, high23, 0, 1, 4, 5);
  x[3] = KVPLAN_SHUFFLE(high01, high23, 2, 3, 6, 7);
#undef KVPLAN_SHUFFLE
}

INLINE void prefetch_outliers(const Shape &s, const Tile &next) {
  const kvplan_layout &l = *s.layout;
  for (int j = 0; j < next.runs; j++)
    for (int n = 0; n < l.key.outliers; n++) { // as many as of V
      prefetch(outlier_channels(l.key, l.block_tokens, next.slab[j], next.in_page[j], n));
      prefetch(outlier_values(l.key, l.block_tokens, next.slab[j], next.in_page[j], n));
      prefetch(outlier_channels(l.value, l.block_tokens, next.slab[j], next.in_page[j], n));
      prefetch(outlier_values(l.value, l.block_tokens, next.slab[j], next.in_page[j], n));
    }
}

// Scores come by row and token, in the unit of the factor; what a row does not see may become anything.
INLINE void add_key_outliers(const Shape &s, const Rows &rows, const Tile &now, float *scores) {
  const kvplan_tensor &k = s.layout->key;
  for (int j = 0; j < now.runs; j++)
    for (int n = 0; n < k.outliers; n++) {
      const uint8_t *channels = outlier_channels(k, s.layout->block_tokens, now.slab[j], now.in_page[j], n);
      float rest[LANES];
      const uint8_t *values = outlier_values(k, s.layout->block_tokens, now.slab[j], now.in_page[j], n);
      fstore(rest, fmul(sixteen_floats(values, s.layout->float_type), fset(s.factor)));
      for (int i = 0; i < LANES; i += 4) {
        Four add[4];
        for (int e = 0; e < 4; e++) add[e] = *(const Four *)rows.by_channel[channels[i + e]] * rest[i + e];
        transpose_four(add);
        for (int r = 0; r < ROWS; r++) *(Four *)(scores + r * TILE + j * LANES + i) += add[r];
      }
    }
}

// Outputs of outliers are kept apart until the rows' chunk is done, one of each row together, and those of every second
// token: most tokens have theirs in the same channels, and one sum would wait for the other.
INLINE void shrink_outliers(const Shape &s, Rows &rows, const Weights &w) {
  Four shrink;
  for (int r = 0; r < ROWS; r++) shrink[r] = r < rows.count ? w.shrink[r] : 0.0f;
  for (int c = 0; c < s.dim; c++)
    for (int half = 0; half < 2; half++) *(Four *)rows.beside[half][c] *= shrink;
}

INLINE void add_value_outliers(const Shape &s, Rows &rows, const Tile &now, const Weights &w) {
  const kvplan_tensor &v = s.layout->value;
  for (int j = 0; j < now.runs; j++)
    for (int n = 0; n < v.outliers; n++) {
      const uint8_t *channels = outlier_channels(v, s.layout->block_tokens, now.slab[j], now.in_page[j], n);
      float rest[LANES];
      const uint8_t *values = outlier_values(v, s.layout->block_tokens, now.slab[j], now.in_page[j], n);
      const F held = sixteen_floats(values, s.layout->float_type);
      fstore(rest, w.full ? held : fselect(w.any[j], held, fzero())); // what nobody sees may be anything
      for (int i = 0; i < LANES; i += 4) {
        Four p[4];
        for (int r = 0; r < ROWS; r++) p[r] = *(const Four *)(w.p + r * TILE + j * LANES + i);
        transpose_four(p);
        for (int e = 0; e < 4; e++) *(Four *)rows.beside[e % 2][channels[i + e]] += p[e] * rest[i + e];
      }
    }
}

INLINE void begin_outliers(const Shape &s, Rows &rows) {
  memset(rows.beside, 0, sizeof rows.beside);
  memset(rows.by_channel, 0, sizeof rows.by_channel);
  for (int r = 0; r < rows.count; r++)
    for (int c = 0; c < s.dim; c++) rows.by_channel[c][r] = rows.query[r][c];
}

INLINE void end_outliers(const Shape &s, Rows &rows) {
  for (int r = 0; r < rows.count; r++)
    for (int c = 0; c < s.dim; c++) rows.output[r * s.padded + c] += rows.beside[0][c][r] + rows.beside[1][c][r];
}
