// A cache read back to dense 16-bit K and V.
#pragma once

struct Dequantize {
  const kvplan_layout *layout;
  const kvplan_batch *batch;
  const kvplan_dequantize_call *call;
  int dim, vectors;
  Mask tail;
  int64_t next;
};

// Where a run of 16 tokens lies: words, and metadata where they are codes (else null).
struct Held {
  const uint8_t *words, *scale, *minimum;
  int bits;
  const uint8_t *slab; // of the page
  int64_t in_page;
};

INLINE void store_row(const Dequantize &d, uint16_t *to, int v, F x) {
  short_store(to + v * LANES, v == d.vectors - 1 ? d.tail : ALL, to_bits(x, d.layout->float_type));
}

// The numbers of one channel group of sixteen tokens.
INLINE Numbers token_numbers(const Dequantize &d, const kvplan_tensor &t, const Held &h, int group) {
  const int64_t at = (int64_t)number_bytes(t.number) * group * d.layout->block_tokens;
  return numbers_load(t, h.scale + at, h.minimum + at);
}

INLINE F level_value(I levels, int byte, F scale, F minimum) {
  return fadd(fmul(itof(iand(ishr(levels, 8 * byte), iset(0xff))), scale), minimum);
}

INLINE bool reads_plain(const kvplan_tensor &t) { return codes_plain(t) && numbers_direct(t) && !t.outliers && !t.boosts; }

// Add the low bits of boosted channels to sixteen tokens, channels by tokens.
INLINE void restore_boosts(const kvplan_tensor &t, const Held &h, const float *scales, KeyRun x) {
  for (int n = 0; n < t.boosts; n++) {
    const int channel = boost_channels(t, h.slab, h.in_page)[n];
    const I word = iload(boost_codes(t, h.slab, h.in_page) + 64 * (n / LANES));
    const F low = itof(iand(ishr(word, shift_of(n % LANES, BOOST_BITS)), iset((1 << BOOST_BITS) - 1)));
    fstore(x[channel], fadd(fload(x[channel]), fmul(low, fset(scales[channel] / BOOST_STEPS))));
  }
}

// Codes of any plane and map, as levels first.
void read_key_any(const Dequantize &d, const Held &h, KeyRun x) {
  const kvplan_tensor &t = d.layout->key;
  uint8_t levels[DIM_MOST * LANES];
  float scales[DIM_MOST], minima[DIM_MOST];
  choose_levels(t)(t, key_planes(t, d.dim, h.slab, h.in_page), d.dim / 4, 1, ALL, levels, 64);
  for (int v = 0; t.per_channel && v < d.vectors; v++) {
    const int64_t at = (int64_t)number_bytes(t.number) * LANES * v;
    const Numbers n = numbers_load(t, h.scale + at, h.minimum + at);
    fstore(scales + v * LANES, n.scale);
    fstore(minima + v * LANES, n.minimum);
  }
  Numbers n = {fzero(), fzero()};
  for (int c = 0; c < d.dim; c++) {
    const I quad = iload(levels + 64 * (c / 4));
    if (t.per_channel) n = {fset(scales[c]), fset(minima[c])};
    else if (has_scale(t) && c % t.group == 0) n = token_numbers(d, t, h, c / t.group);
    fstore(x[c], is_float(t) ? code_float(t, quad, c % 4) : level_value(quad, c % 4, n.scale, n.minimum));
  }
  restore_boosts(t, h, scales, x);
  restore_outliers(t, d.layout->block_tokens, d.layout->float_type, h.slab, h.in_page, x);
}

void read_key_run(const Dequantize &d, const Held &h, KeyRun x) {
  const kvplan_tensor &t = d.layout->key;
  if (h.bits < 16 && !reads_plain(t)) {
    read_key_any(d, h, x);
    return;
  }
  if (h.bits == 16) {
    for (int w = 0; w < d.dim / 2; w++) {
      const I word = iload(h.words + 64 * w);
      fstore(x[2 * w], from_bits(iand(word, iset(0xffff)), d.layout->float_type));
      fstore(x[2 * w + 1], from_bits(ishr(word, 16), d.layout->float_type));
    }
    return;
  }
  const int elements = 32 / h.bits, mask = (1 << h.bits) - 1;
  float scales[DIM_MOST], minima[DIM_MOST];
  for (int v = 0; t.per_channel && v < d.vectors; v++) {
    fstore(scales + v * LANES, half_load(h.scale + 32 * v));
    fstore(minima + v * LANES, half_load(h.minimum + 32 * v));
  }
  F scale = fzero(), minimum = fzero();
  for (int c = 0; c < d.dim; c++) {
    if (t.per_channel) {
      scale = fset(scales[c]);
      minimum = fset(minima[c]);
    } else if (c % t.group == 0) {
      const int64_t at = (int64_t)2 * (c / t.group) * d.layout->block_tokens;
      scale = half_load(h.scale + at);
      minimum = half_load(h.minimum + at);
    }
    const I word = iload(h.words + 64 * (c / elements));
    const I code = iand(ishr(word, shift_of(c % elements, h.bits)), iset(mask));
    fstore(x[c], fadd(fmul(itof(code), scale), minimum));
  }
}

void dequantize_key_run(const Dequantize &d, const Held &h, Mask lanes, uint16_t *rows) {
  KeyRun x;
  read_key_run(d, h, x);
  for (int v = 0; v < d.vectors; v++) {
    F columns[LANES];
    for (int i = 0; i < LANES; i++) columns[i] = v * LANES + i < d.dim ? fload(x[v * LANES + i]) : fzero();
    transpose(columns);
    for (int i = 0; i < LANES; i++)
      if (lanes >> i & 1) store_row(d, rows + (int64_t)i * d.dim, v, columns[i]);
  }
}

// One vector of channels of token `token` of a run, with what was cut off.
INLINE F with_outliers(const Dequantize &d, const kvplan_tensor &t, const Held &h, int token, int v, F x) {
  if (!t.outliers) return x;
  float values[LANES], rest[LANES];
  fstore(values, x);
  for (int n = 0; n < t.outliers; n++) {
    const int block = d.layout->block_tokens;
    const int at = outlier_channels(t, block, h.slab, h.in_page, n)[token] - v * LANES;
    fstore(rest, sixteen_floats(outlier_values(t, block, h.slab, h.in_page, n), d.layout->float_type));
    if (at >= 0 && at < LANES) values[at] += rest[token];
  }
  return fload(values);
}

void dequantize_value_any(const Dequantize &d, const Held &h, Mask lanes, uint16_t *rows) {
  const kvplan_tensor &t = d.layout->value;
  uint8_t levels[DIM_MOST * LANES];
  choose_levels(t)(t, value_planes(t, d.dim, h.slab, h.in_page), 4, d.vectors, d.tail, levels, 4 * d.dim);
  for (int v = 0; v < d.vectors; v++) {
    float scales[LANES] = {}, minima[LANES] = {};
    if (has_scale(t)) {
      const Numbers n = token_numbers(d, t, h, v * LANES / t.group);
      fstore(scales, n.scale);
      fstore(minima, n.minimum);
    }
    for (int i = 0; i < LANES; i++) {
      if (!(lanes >> i & 1)) continue;
      const I quad = iload_part(levels + (int64_t)4 * d.dim * (i / 4) + 64 * v, v == d.vectors - 1 ? d.tail : ALL);
      const F x = is_float(t) ? code_float(t, quad, i % 4) : level_value(quad, i % 4, fset(scales[i]), fset(minima[i]));
      store_row(d, rows + (int64_t)i * d.dim, v, with_outliers(d, t, h, i, v, x));
    }
  }
}

void dequantize_value_run(const Dequantize &d, const Held &h, Mask lanes, uint16_t *rows) {
  if (h.bits < 16 && !reads_plain(d.layout->value)) {
    dequantize_value_any(d, h, lanes, rows);
    return;
  }
  const int elements = 32 / h.bits, group = h.bits < 16 ? d.layout->value.group : d.dim;
  const int64_t stride = (int64_t)2 * d.layout->block_tokens;
  for (int v = 0; v < d.vectors; v++) {
    const Mask channels = v == d.vectors - 1 ? d.tail : ALL;
    float scales[LANES], minima[LANES];
    if (h.bits < 16) {
      fstore(scales, half_load(h.scale + v * LANES / group * stride));
      fstore(minima, half_load(h.minimum + v * LANES / group * stride));
    }
    for (int i = 0; i < LANES; i++) {
      if (!(lanes >> i & 1)) continue;
      const I word = iload_part(h.words + (int64_t)4 * d.dim * (i / elements) + 64 * v, channels);
      F x;
      if (h.bits == 16) {
        x = from_bits(i & 1 ? ishr(word, 16) : iand(word, iset(0xffff)), d.layout->float_type);
      } else {
        const I code = iand(ishr(word, shift_of(i % elements, h.bits)), iset((1 << h.bits) - 1));
        x = fadd(fmul(itof(code), fset(scales[i])), fset(minima[i]));
      }
      store_row(d, rows + (int64_t)i * d.dim, v, x);
    }
  }
}

// The run of 16 that holds token `token` after the sinks, or of the sinks.
Held find_run(const Dequantize &d, int sequence, int head, bool key, bool sinks, bool paged, int64_t token) {
  const kvplan_layout &l = *d.layout;
  const kvplan_tensor &t = key ? l.key : l.value;
  const int64_t slot = d.batch->slot_ids[sequence], row_bytes = 2 * d.dim;
  if (sinks)
    return {d.batch->sinks + slot * l.sink_bytes + head * l.sink_head_bytes + t.sink_offset + token * row_bytes,
            nullptr, nullptr, 16, nullptr, 0};
  if (!paged)
    return {d.batch->ring + slot * l.ring_bytes + head * l.ring_head_bytes + t.ring_offset +
                token % t.ring_tokens * row_bytes,
            nullptr, nullptr, 16, nullptr, 0};
  const int32_t *table = d.batch->block_tables + (int64_t)sequence * d.batch->table_width;
  const uint8_t *slab = d.batch->pages + table[token / l.block_tokens] * l.page_bytes + head * l.slab_bytes;
  const int64_t in_page = token % l.block_tokens;
  const int64_t words = key ? 4 * key_words(d.dim, t.low_bits) * in_page : in_page * t.bits / 8 * d.dim;
  const int64_t at = number_bytes(t.number) * (t.per_channel ? in_page / t.group * d.dim : in_page);
  return {slab + t.codes + words, slab + t.scale + at, slab + t.minimum + at, t.bits, slab, in_page};
}

void dequantize_span(const Dequantize &d, int sequence, int head, bool key, bool sinks, bool paged, int64_t first,
                     int64_t last, uint16_t *base) {
  if (first >= last) return;
  for (int64_t token = first / LANES * LANES; token < last; token += LANES) {
    const Held h = find_run(d, sequence, head, key, sinks, paged, token);
    const Mask lanes = lanes_between(first - token, last - token);
    uint16_t *rows = base + token * d.dim; // only rows in the mask are written
    if (key) dequantize_key_run(d, h, lanes, rows);
    else dequantize_value_run(d, h, lanes, rows);
  }
}

void dequantize_head(const Dequantize &d, int sequence, int head, bool key) {
  const kvplan_layout &l = *d.layout;
  const int64_t length = d.batch->lengths[sequence], sinks = kvplan_least(length, l.sink_tokens);
  const int64_t tokens = length - sinks, paged = kvplan_paged(key ? l.key : l.value, tokens);
  uint16_t *base = key ? d.call->key : d.call->value;
  base += ((int64_t)sequence * l.kv_heads + head) * d.call->tokens * d.dim;
  dequantize_span(d, sequence, head, key, true, false, 0, sinks, base);
  dequantize_span(d, sequence, head, key, false, true, 0, paged, base + sinks * d.dim);
  dequantize_span(d, sequence, head, key, false, false, paged, tokens, base + sinks * d.dim);
  memset(base + length * d.dim, 0, (d.call->tokens - length) * d.dim * 2);
}

void dequantize_tasks(Dequantize &d) {
  const int64_t tasks = (int64_t)2 * d.batch->sequences * d.layout->kv_heads;
  for (;;) {
    const int64_t task = __atomic_fetch_add(&d.next, 1, __ATOMIC_RELAXED);
    if (task >= tasks) return;
    const int64_t pair = task / 2;
    dequantize_head(d, (int)(pair / d.layout->kv_heads), (int)(pair % d.layout->kv_heads), task & 1);
  }
}

int64_t dequantize(const kvplan_layout &l, const kvplan_batch &b, const kvplan_dequantize_call &c) {
  Dequantize d = {&l, &b, &c, l.head_dim, (l.head_dim + LANES - 1) / LANES, 0, 0};
  d.tail = lanes_between(0, l.head_dim - (d.vectors - 1) * LANES);
  if (c.threads > 1) {
#pragma omp parallel num_threads(c.threads)
    dequantize_tasks(d);
  } else {
    dequantize_tasks(d);
  }
  return 0;
}
