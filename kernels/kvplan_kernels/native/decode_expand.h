// Tiles of what the steps do not multiply as it lies, made levels of a byte or 16-bit values, with float32 numbers.
#pragma once

constexpr int EXPAND_RUNS = 4; // of a tile that is expanded
constexpr int EXPAND_TOKENS = EXPAND_RUNS * LANES;

struct alignas(64) Expanded {
  uint8_t key[EXPAND_RUNS * DIM_MOST * LANES * 2], value[EXPAND_RUNS * DIM_MOST * LANES * 2];
  float key_scale[GROUPS][EXPAND_TOKENS], key_minimum[GROUPS][EXPAND_TOKENS];
  float value_scale[GROUPS][EXPAND_TOKENS], value_minimum[GROUPS][EXPAND_TOKENS];
  float channel_scale[EXPAND_RUNS][DIM_MOST], channel_minimum[EXPAND_RUNS][DIM_MOST];
};

INLINE bool tensor_expands(const kvplan_tensor &t) {
  return t.bits < 16 && (!codes_direct(t) || (has_scale(t) && !numbers_direct(t)));
}

// Where the planes of a run of V begin, of which 16 tokens take 2 * dim bytes a bit.
INLINE const uint8_t *high_row(const Shape &s, const kvplan_tensor &v, const Tile &t, int j) {
  return t.value_high[j] + (int64_t)t.in_page[j] / LANES * 2 * s.dim * v.high_bits;
}
INLINE void prefetch_key(const Shape &s, const Tile &t) {
  for (int j = 0; j < t.runs; j++) prefetch_span(t.key[j], LANES * s.key_page_bytes);
}
INLINE void prefetch_value(const Shape &s, const Tile &t) {
  const kvplan_tensor &v = s.layout->value;
  for (int j = 0; j < t.runs; j++) {
    const int64_t run = (int64_t)2 * s.dim * v.low_bits;
    prefetch_span(t.slab[j] + v.codes + t.in_page[j] / LANES * run, run);
  }
}

INLINE void expand_token_numbers(const Shape &s, const kvplan_tensor &t, int groups, int run, const uint8_t *scale,
                                 const uint8_t *minimum, float (*scales)[EXPAND_TOKENS],
                                 float (*minima)[EXPAND_TOKENS]) {
  const int64_t stride = (int64_t)number_bytes(t.number) * s.layout->block_tokens;
  for (int g = 0; g < groups; g++) {
    const Numbers n = numbers_load(t, scale + g * stride, minimum + g * stride);
    fstore(scales[g] + run * LANES, n.scale);
    fstore(minima[g] + run * LANES, n.minimum);
  }
}

INLINE void expand_key_numbers(const Shape &s, Tile &t, Expanded &x) {
  const kvplan_tensor &k = s.layout->key;
  for (int j = 0; j < t.runs; j++) {
    if (!k.per_channel) {
      expand_token_numbers(s, k, s.key_groups, j, t.key_scale[j], t.key_minimum[j], x.key_scale, x.key_minimum);
      t.key_scale[j] = (const uint8_t *)(x.key_scale[0] + j * LANES);
      t.key_minimum[j] = (const uint8_t *)(x.key_minimum[0] + j * LANES);
      continue;
    }
    const int64_t bytes = number_bytes(k.number) * LANES;
    for (int v = 0; v < s.vectors && !(j && t.key_group[j] == t.key_group[j - 1]); v++) {
      const Numbers n = numbers_load(k, t.key_scale[j] + bytes * v, t.key_minimum[j] + bytes * v);
      fstore(x.channel_scale[j] + LANES * v, n.scale);
      fstore(x.channel_minimum[j] + LANES * v, n.minimum);
    }
    const bool same = j && t.key_group[j] == t.key_group[j - 1];
    t.key_scale[j] = same ? t.key_scale[j - 1] : (const uint8_t *)x.channel_scale[j];
    t.key_minimum[j] = same ? t.key_minimum[j - 1] : (const uint8_t *)x.channel_minimum[j];
  }
}

constexpr uint16_t VALUE_NAN = 0x7fff; // of bf16 and fp16

// Make NaN of the tokens of a run of expanded floats that are poisoned: lanes of K, rows of V.
INLINE void poison_key(const Shape &s, const Planes &p, uint8_t *words) {
  Mask bad = 0;
  for (int i = 0; i < LANES; i++) {
    uint32_t codes;
    memcpy(&codes, p.low + 4 * i, 4);
    bad |= (Mask)is_poison(codes, 0) << i;
  }
  for (int w = 0; bad && w < s.dim / 2; w++) istore_part(words + 64 * w, bad, iset(VALUE_NAN << 16 | VALUE_NAN));
}
INLINE void poison_value(const Shape &s, const Planes &p, uint8_t *words) {
  for (int i = 0; i < LANES; i++) {
    uint32_t codes;
    memcpy(&codes, p.low + (p.first + i / 4) * p.stride, 4);
    uint16_t *row = (uint16_t *)(words + i / 2 * 4 * s.dim);
    for (int c = 0; is_poison(codes, i % 4) && c < s.dim; c++) row[2 * c + i % 2] = VALUE_NAN;
  }
}

INLINE void expand_key(const Shape &s, Tile &t, Expanded &x) {
  const kvplan_tensor &k = s.layout->key;
  if (has_scale(k) && !numbers_direct(k)) expand_key_numbers(s, t, x);
  if (codes_direct(k)) return;
  const WriteLevels write = choose_levels(k);
  for (int j = 0; j < t.runs; j++) {
    uint8_t *to = x.key + j * s.dim * LANES * (is_float(k) ? 2 : 1);
    const Planes p = key_planes(k, s.dim, t.slab[j], t.in_page[j]);
    if (is_float(k)) {
      write_floats(k, p, s.dim / 4, 1, ALL, s.layout->float_type, to, 64);
      poison_key(s, p, to);
    } else write(k, p, s.dim / 4, 1, ALL, to, 64);
    t.key[j] = to;
  }
  if (is_float(k)) t.key_store = STORE_VALUES;
}

INLINE void expand_value(const Shape &s, Tile &t, Expanded &x) {
  const kvplan_tensor &v = s.layout->value;
  const int64_t stride = 4 * s.dim;
  if (has_scale(v) && !numbers_direct(v))
    for (int j = 0; j < t.runs; j++) {
      expand_token_numbers(s, v, s.value_groups, j, t.value_scale[j], t.value_minimum[j], x.value_scale,
                           x.value_minimum);
      t.value_scale[j] = (const uint8_t *)(x.value_scale[0] + j * LANES);
      t.value_minimum[j] = (const uint8_t *)(x.value_minimum[0] + j * LANES);
    }
  if (codes_direct(v)) return;
  const WriteLevels write = choose_levels(v);
  for (int j = 0; j < t.runs; j++) {
    uint8_t *to = x.value + j * s.dim * LANES * (is_float(v) ? 2 : 1);
    const Planes p = value_planes(v, s.dim, t.slab[j], t.in_page[j]);
    if (is_float(v)) {
      write_floats(v, p, 4, s.vectors, s.tail, s.layout->float_type, to, stride);
      poison_value(s, p, to);
    } else write(v, p, 4, s.vectors, s.tail, to, stride);
    t.value[j] = to;
  }
  if (is_float(v)) t.value_store = STORE_VALUES;
}

#include "decode_restore.h"

// Expand what `now` needs. `ahead` is what comes next as the steps prefetch it: what is expanded they need not.
INLINE void expand_tile(const Shape &s, int head, Tile &now, const Tile &next, Tile &ahead, Expanded &x) {
  const kvplan_tensor &k = s.layout->key, &v = s.layout->value;
  const bool restores = s.call->restore, key = !restores && now.key_store == STORE_CODES && tensor_expands(k);
  const bool value = now.value_store == STORE_CODES && tensor_expands(v);
  if (restores) restore_tile(s, head, now, x);
  if (key) expand_key(s, now, x);
  if (value) expand_value(s, now, x);
  ahead = next;
  if (next.key_store == STORE_CODES && (restores || !codes_direct(k)) && k.bits < 16) {
    prefetch_key(s, next);
    memcpy(ahead.key, now.key, sizeof now.key);
  }
  if (next.value_store == STORE_CODES && !codes_direct(v) && v.bits < 16) {
    prefetch_value(s, next);
    memcpy(ahead.value, now.value, sizeof now.value);
  }
}
