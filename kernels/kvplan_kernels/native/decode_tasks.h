// The frame around the decode kernels: segments, tiles, tasks, and the merge of what tasks found.
#pragma once

INLINE const uint8_t *slab_of(const Shape &s, int sequence, int head, uint32_t page) {
  const kvplan_layout &l = *s.layout;
  const int32_t *table = s.batch->block_tables + (int64_t)sequence * s.batch->table_width;
  return s.batch->pages + table[page] * l.page_bytes + head * l.slab_bytes;
}

// Where the runs of a tile lie in pages: one look-up a page, K and V alike.
INLINE void locate_pages(const Shape &s, int sequence, int head, uint32_t token, bool key, bool value, Tile &t) {
  const kvplan_layout &l = *s.layout;
  const uint32_t block = l.block_tokens;
  uint32_t page = token / block, in_page = token % block;
  const uint8_t *slab = slab_of(s, sequence, head, page);
  for (int j = 0; j < t.runs; j++) {
    if (key) {
      const int64_t group = l.key.per_channel ? (int64_t)(in_page / (uint32_t)l.key.group) * s.dim : in_page;
      const int64_t at = number_bytes(l.key.number) * group;
      t.key[j] = slab + l.key.codes + in_page * s.key_page_bytes;
      t.key_scale[j] = slab + l.key.scale + at;
      t.key_minimum[j] = slab + l.key.minimum + at;
      t.key_group[j] = t.key_scale[j];
    }
    if (value) {
      t.value[j] = slab + l.value.codes + in_page * s.value_page_bytes; // not of one bit, which is expanded
      t.value_scale[j] = slab + l.value.scale + number_bytes(l.value.number) * in_page;
      t.value_minimum[j] = slab + l.value.minimum + number_bytes(l.value.number) * in_page;
    }
    t.key_high[j] = slab + l.key.high + in_page * s.key_high_bytes;
    t.value_high[j] = slab + l.value.high;
    t.slab[j] = slab;
    t.in_page[j] = in_page;
    in_page += LANES;
    if (in_page == block && j + 1 < t.runs) {
      in_page = 0;
      slab = slab_of(s, sequence, head, ++page);
    }
  }
}

INLINE void locate_words(const uint8_t *base, int64_t token, int64_t capacity, int64_t token_bytes, int runs,
                         const uint8_t **at) {
  for (int j = 0; j < runs; j++) at[j] = base + (token + j * LANES) % capacity * token_bytes;
}

INLINE void locate(const Shape &s, int sequence, int head, const Segment &g, int64_t token, Tile &t) {
  const kvplan_layout &l = *s.layout;
  const int64_t slot = s.batch->slot_ids[sequence], token_bytes = 2 * s.dim;
  const uint8_t *ring = s.batch->ring + slot * l.ring_bytes + head * l.ring_head_bytes;
  const uint8_t *sinks = s.batch->sinks + slot * l.sink_bytes + head * l.sink_head_bytes;
  if (g.sinks) {
    locate_words(sinks + l.key.sink_offset, token, l.sink_capacity, token_bytes, t.runs, t.key);
    locate_words(sinks + l.value.sink_offset, token, l.sink_capacity, token_bytes, t.runs, t.value);
    return;
  }
  if (g.key_paged || g.value_paged)
    locate_pages(s, sequence, head, (uint32_t)token, g.key_paged, g.value_paged, t);
  if (!g.key_paged) locate_words(ring + l.key.ring_offset, token, l.key.ring_tokens, token_bytes, t.runs, t.key);
  if (!g.value_paged)
    locate_words(ring + l.value.ring_offset, token, l.value.ring_tokens, token_bytes, t.runs, t.value);
}

// Fill in tile number `index` of a sequence. Tiles are aligned to their size; only runs with tokens are in them.
INLINE void fill_tile(const Shape &s, const Sequence &q, int sequence, int head, int64_t index, Tile &t) {
  int k = 0;
  while (k < 3 && index >= q.segments[k + 1].tile) k++;
  const Segment &g = q.segments[k];
  const int64_t tile = g.first / s.tile_tokens + index - g.tile;
  const int64_t first = kvplan_most(tile * s.tile_tokens, g.first / LANES * LANES);
  const int64_t last = kvplan_least((tile + 1) * s.tile_tokens, g.last);
  t.runs = (int)((last - first + LANES - 1) / LANES);
  t.position = g.position + first;
  t.first = g.position + g.first;
  t.last = g.position + g.last;
  t.key_store = g.key_paged && s.layout->key.bits < 16 ? STORE_CODES : STORE_VALUES;
  t.value_store = g.value_paged && s.layout->value.bits < 16 ? STORE_CODES : STORE_VALUES;
  for (int j = 0; j < t.runs; j++)
    t.key_scale[j] = t.key_minimum[j] = t.value_scale[j] = t.value_minimum[j] = t.key_group[j] = s.batch->pages;
  locate(s, sequence, head, g, first, t);
  for (int j = t.runs; j < TILE_RUNS; j++) { // never read, but prefetched
    t.key[j] = t.key[0];
    t.value[j] = t.value[0];
  }
}

INLINE int64_t position_of(const Shape &s, int sequence, int query) {
  const kvplan_decode_call &c = *s.call;
  if (c.positions) return c.positions[(int64_t)sequence * c.queries + query];
  return (int64_t)s.batch->lengths[sequence] - c.queries + query;
}

// The positions that a query attends to.
INLINE void range_of(const Shape &s, int sequence, int query, int64_t *first, int64_t *last) {
  const int64_t position = position_of(s, sequence, query);
  *last = kvplan_least(position + 1, s.batch->lengths[sequence]);
  *first = s.call->window ? kvplan_most(0, position - s.call->window + 1) : 0;
  if (*first >= *last) *first = *last = 0;
}

void plan_sequence(const Shape &s, int sequence, Sequence &q) {
  const kvplan_layout &l = *s.layout;
  q.length = s.batch->lengths[sequence];
  int64_t low = q.length, high = 0;
  for (int j = 0; j < s.call->queries; j++) {
    int64_t first, last;
    range_of(s, sequence, j, &first, &last);
    if (first == last) continue;
    low = kvplan_least(low, first);
    high = kvplan_most(high, last);
  }
  const int64_t sinks = kvplan_least(q.length, l.sink_tokens), tokens = q.length - sinks;
  const int64_t key = kvplan_paged(l.key, tokens), value = kvplan_paged(l.value, tokens);
  const int64_t less = kvplan_least(key, value), more = kvplan_most(key, value);
  const Segment found[4] = {{0, sinks, 0, 0, true, false, false},
                            {0, less, sinks, 0, false, true, true},
                            {less, more, sinks, 0, false, key > value, value > key},
                            {more, tokens, sinks, 0, false, false, false}};
  q.tiles = 0;
  for (int k = 0; k < 4; k++) {
    Segment g = found[k];
    g.first = kvplan_most(g.first, low - g.position);
    g.last = kvplan_least(g.last, high - g.position);
    g.tile = q.tiles;
    if (g.first < g.last) q.tiles += (g.last + s.tile_tokens - 1) / s.tile_tokens - g.first / s.tile_tokens;
    q.segments[k] = g;
  }
}

// Round a row to operands; keep the sums, per channel group, of the row and of what rounding took.
INLINE void fill_operands(const Shape &s, Rows &rows, int r, float unit) {
  const F inverse = fset(unit > 1e-37f ? 1.0f / unit : 0.0f), step = fset(-unit);
  const float middle = s.layout->key.middle;
  const int per_group = s.key_groups == 1 ? s.vectors : s.layout->key.group / LANES;
  F sum = fzero(), rest = fzero();
  for (int v = 0; v < s.vectors; v += 2) {
    const int at = v * LANES;
    const F x = fload(rows.query[r] + at), y = v + 1 < s.vectors ? fload(rows.query[r] + at + LANES) : fzero();
    const I x_operands = ftoi(fmul(x, inverse)), y_operands = ftoi(fmul(y, inverse));
    quads_store(rows.operands[0][r] + at, rows.operands[1][r] + at, x_operands, y_operands);
    const F x_rest = fma(itof(x_operands), step, x), y_rest = fma(itof(y_operands), step, y);
    if (per_group == 1) { // a group to each vector
      rows.sums[v][r] = fsum(x) * s.factor;
      rows.rests[v][r] = fsum(x_rest) * s.factor * middle;
      if (v + 1 == s.vectors) break;
      rows.sums[v + 1][r] = fsum(y) * s.factor;
      rows.rests[v + 1][r] = fsum(y_rest) * s.factor * middle;
      continue;
    }
    sum = fadd(sum, fadd(x, y));
    rest = fadd(rest, fadd(x_rest, y_rest));
    if ((v + 2) % per_group && v + 2 < s.vectors) continue;
    rows.sums[v / per_group][r] = fsum(sum) * s.factor;
    rows.rests[v / per_group][r] = fsum(rest) * s.factor * middle;
    sum = rest = fzero();
  }
}

// Read the queries of one block of rows and make their operands.
void fill_rows(const Shape &s, int sequence, int head, int block, Rows &rows) {
  const kvplan_decode_call &c = *s.call;
  const int first_row = (int)((int64_t)s.rows * block / s.blocks);
  rows.count = (int)((int64_t)s.rows * (block + 1) / s.blocks) - first_row;
  rows.channel_group = rows.boost_group = nullptr;
  memset(rows.operands, 0, sizeof rows.operands); // channels past the last weigh nothing
  memset(rows.channels.operands, 0, sizeof rows.channels.operands);
  memset(rows.halves, 0, sizeof rows.halves);
  for (int r = 0; r < rows.count; r++) {
    const int row = first_row + r, query = row / s.ratio, query_head = head * s.ratio + row % s.ratio;
    range_of(s, sequence, query, &rows.first[r], &rows.last[r]);
    const int64_t at = sequence * c.query_stride_sequence + query * c.query_stride_query +
                       query_head * c.query_stride_head;
    const uint8_t *from = (const uint8_t *)c.query + at * type_bytes(c.query_type);
    rows.all_first = kvplan_most(r ? rows.all_first : 0, rows.first[r]);
    rows.all_last = r ? kvplan_least(rows.all_last, rows.last[r]) : rows.last[r];
    float *to = rows.query[r];
    F most = fzero();
    Mask finite = ALL;
    for (int v = 0; v < s.vectors; v++) {
      const int64_t offset = v * LANES * type_bytes(c.query_type);
      fstore(to + v * LANES, load_values(from + offset, c.query_type, v == s.vectors - 1 ? s.tail : ALL));
    }
    if (s.layout->rotated && !c.restore) rotate_row(to, s.dim);
    for (int v = 0; v < s.vectors; v++) {
      const F x = fload(to + v * LANES);
      Pairs<KVPLAN_BF16>::store(rows.pairs[r] + v * LANES, x);
      if (s.layout->float_type == KVPLAN_FP16) fstore(rows.pairs[r] + v * LANES, x);
      store_halves(rows.halves[0][r] + v * LANES, rows.halves[1][r] + v * LANES, x);
      most = fmax(fabs_(x), most);
      finite &= ffinite(x);
    }
    const float unit = fmaximum(most) * (1.0f / OPERAND_MOST);
    rows.unit[r] = finite == ALL ? unit * s.factor : NAN;
    fill_operands(s, rows, r, unit);
  }
}

INLINE void clear_state(const Shape &s, Rows &rows, float *state) {
  rows.maximum = state;
  rows.total = rows.maximum + LANES;
  rows.minima = rows.total + ROWS * LANES;
  rows.output = rows.minima + s.value_groups * ROWS * LANES;
  memset(state, 0, s.state_floats * sizeof(float));
  fstore(rows.maximum, fset(LOWEST));
}

// The channels' scales and minima of one group of tokens lie together, over several lines.
INLINE void prefetch_channels(const Shape &s, const uint8_t *scales, const uint8_t *minima) {
  for (int64_t at = 0; at < number_bytes(s.layout->key.number) * s.dim; at += 64) {
    prefetch(scales + at);
    prefetch(minima + at);
  }
}

// The tokens' scales and minima of every group of channels.
INLINE void prefetch_tokens(const Shape &s, const kvplan_tensor &t, int groups, const uint8_t *scales,
                            const uint8_t *minima) {
  const int64_t bytes = (int64_t)number_bytes(t.number) * s.layout->block_tokens;
  for (int64_t at = 0; at < groups * bytes; at += bytes) {
    prefetch(scales + at);
    if (t.numbers == 2) prefetch(minima + at);
  }
}

INLINE void prefetch_metadata(const Shape &s, const Tile &t) {
  const kvplan_tensor &k = s.layout->key, &v = s.layout->value;
  const bool key = t.key_store == STORE_CODES && k.numbers, value = t.value_store == STORE_CODES && v.numbers;
  for (int j = 0; j < t.runs; j++) {
    if (key && !s.layout->key.per_channel) prefetch_tokens(s, k, s.key_groups, t.key_scale[j], t.key_minimum[j]);
    else if (key && (j == 0 || t.key_scale[j] != t.key_scale[j - 1]))
      prefetch_channels(s, t.key_scale[j], t.key_minimum[j]);
    if (t.key_store == STORE_CODES && k.high_bits) prefetch_span(t.key_high[j], LANES * s.key_high_bytes);
    if (t.value_store == STORE_CODES && v.high_bits) prefetch_span(high_row(s, v, t, j), 2 * s.dim * v.high_bits);
    if (value) prefetch_tokens(s, v, s.value_groups, t.value_scale[j], t.value_minimum[j]);
  }
}

INLINE int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Work {
  Shape shape;
  Sequence *sequences;
  Steps steps[ROWS + 1];
  int64_t tasks;
  float *states;   // [tasks][blocks][state_floats]
  float *scores;   // [sequences][kv_heads][rows][received_tokens] or null
  int32_t *done;   // [sequences][kv_heads] tasks finished
  uint8_t *scratch; // [threads][blocks] of Rows
  int64_t scratch_bytes;
  int64_t next; // task to take
};

void run_tiles(const Work &work, Rows *rows, Expanded *expanded, int sequence, int head, int64_t first, int64_t last) {
  const Shape &s = work.shape;
  const Sequence &q = work.sequences[sequence];
  const kvplan_tensor &k = s.layout->key, &v = s.layout->value;
  Tile tiles[2], unexpanded;
  Weights w;
  if (first < last) fill_tile(s, q, sequence, head, first, tiles[0]);
  for (int64_t i = first; i < last; i++) {
    Tile &now = tiles[(i - first) & 1];
    Tile &next = tiles[(i - first + 1) & 1];
    if (i + 1 < last) fill_tile(s, q, sequence, head, i + 1, next);
    else next = now;
    prefetch_metadata(s, next);
    prefetch_boosts(s, next);
    prefetch_outliers(s, next);
    const bool key_boosts = k.boosts && now.key_store == STORE_CODES && !s.call->restore;
    const bool key_outliers = k.outliers && now.key_store == STORE_CODES && !s.call->restore;
    const bool value_outliers = v.outliers && now.value_store == STORE_CODES;
    if (s.expands) expand_tile(s, head, now, next, unexpanded, *expanded);
    const Tile &following = s.expands ? unexpanded : next;
    for (int b = 0; b < s.blocks; b++) {
      const Steps &steps = work.steps[rows[b].count];
      const Tile &ahead = b ? now : following;
      see(rows[b], now, w);
      steps.score[now.key_store](s, rows[b], now, ahead, w.p);
      if (key_boosts) steps.boost(s, rows[b], now, ahead, w.p);
      if (key_outliers) add_key_outliers(s, rows[b], now, w.p);
      steps.weigh(s, rows[b], now, w);
      if (v.outliers) shrink_outliers(s, rows[b], w);
      if (value_outliers) add_value_outliers(s, rows[b], now, w);
      steps.add[now.value_store](s, rows[b], now, ahead, w);
    }
  }
}

// Write the outputs of one row from the states of its chunks; returns maximum and total for the kept scores.
void merge_row(const Work &work, int sequence, int head, int row, const float *states, float *maximum, float *total) {
  const Shape &s = work.shape;
  const kvplan_decode_call &c = *s.call;
  const Sequence &q = work.sequences[sequence];
  const int block = (int)(((int64_t)(row + 1) * s.blocks - 1) / s.rows);
  const int r = row - (int)((int64_t)s.rows * block / s.blocks);
  const int query = row / s.ratio, query_head = head * s.ratio + row % s.ratio;
  const int64_t stride = s.blocks * s.state_floats;
  states += block * s.state_floats;
  float most = c.sink_logits ? fmaxf(LOWEST, c.sink_logits[query_head] * LOG2_E) : LOWEST;
  for (int64_t k = 0; k < q.chunks; k++) most = fmaxf(most, states[k * stride + r]);
  float sum = c.sink_logits ? exp2_scalar(c.sink_logits[query_head] * LOG2_E - most) : 0.0f;
  float *out = c.output + (((int64_t)sequence * c.queries + query) * c.query_heads + query_head) * s.dim;
  F acc[16];
  for (int v = 0; v < s.vectors; v++) acc[v] = fzero();
  const int per_group = s.value_groups == 1 ? s.vectors : s.layout->value.group / LANES;
  for (int64_t k = 0; k < q.chunks; k++) {
    const float *state = states + k * stride, *total_at = state + LANES, *minima = total_at + ROWS * LANES;
    const float *output = minima + s.value_groups * ROWS * LANES, weight = exp2_scalar(state[r] - most);
    sum += weight * fsum(fload(total_at + r * LANES));
    for (int v = 0; v < s.vectors; v++) {
      const float extra = fsum(fload(minima + (v / per_group * ROWS + r) * LANES));
      acc[v] = fma(fset(weight), fadd(fload(output + r * s.padded + v * LANES), fset(extra)), acc[v]);
    }
  }
  int64_t first, last;
  range_of(s, sequence, query, &first, &last);
  const float divisor = first == last ? 1.0f : sum; // nothing to attend to: the sums are 0
  for (int v = 0; v < s.vectors; v++) {
    float lanes[LANES];
    fstore(lanes, fdiv(acc[v], fset(divisor)));
    const int count = v == s.vectors - 1 ? s.dim - v * LANES : LANES;
    memcpy(out + v * LANES, lanes, count * sizeof(float));
  }
  if (s.layout->rotated) rotate_row(out, s.dim);
  if (c.lse) c.lse[((int64_t)sequence * c.queries + query) * c.query_heads + query_head] = (most + log2f(sum)) / LOG2_E;
  *maximum = most;
  *total = sum;
}

void add_received(const Work &work, int sequence, int head, int row, float maximum, float total) {
  const Shape &s = work.shape;
  const int64_t tokens = s.call->received_tokens;
  int64_t first, last;
  range_of(s, sequence, row / s.ratio, &first, &last);
  const float *scores = work.scores + (((int64_t)sequence * s.layout->kv_heads + head) * s.rows + row) * tokens;
  const int64_t query_head = head * s.ratio + row % s.ratio;
  float *to = s.call->received + ((int64_t)sequence * s.call->query_heads + query_head) * tokens;
  const F inverse = fset(1.0f / total), offset = fset(maximum);
  for (int64_t t = first / LANES * LANES; t < last; t += LANES) {
    const Mask held = lanes_between(0, tokens - t), seen = lanes_between(first - t, last - t);
    F x = fmul(fexp2(fsub(fload_part(scores + t, held), offset)), inverse);
    istore_part(to + t, seen, ibits(fadd(fload_part(to + t, held), x)));
  }
}

void run_task(Work &work, int64_t task, uint8_t *scratch) {
  const Shape &s = work.shape;
  const int heads = s.layout->kv_heads;
  int sequence = 0;
  while (sequence + 1 < s.batch->sequences && task >= work.sequences[sequence + 1].task) sequence++;
  const Sequence &q = work.sequences[sequence];
  const int head = (int)((task - q.task) / q.chunks);
  const int64_t chunk = (task - q.task) % q.chunks;
  Rows *rows = (Rows *)scratch;
  Expanded *expanded = (Expanded *)(scratch + rounded(s.blocks * sizeof(Rows)));
  float *states = work.states + task * s.blocks * s.state_floats;
  for (int b = 0; b < s.blocks; b++) {
    fill_rows(s, sequence, head, b, rows[b]);
    clear_state(s, rows[b], states + b * s.state_floats);
    const int64_t row = ((int64_t)sequence * heads + head) * s.rows + (int64_t)s.rows * b / s.blocks;
    for (int r = 0; r < ROWS; r++)
      rows[b].scores[r] = work.scores ? work.scores + (row + r) * s.call->received_tokens : nullptr;
  }
  const bool outliers = s.layout->key.outliers || s.layout->value.outliers;
  for (int b = 0; outliers && b < s.blocks; b++) begin_outliers(s, rows[b]);
  const int64_t last = kvplan_least(q.tiles, (chunk + 1) * q.chunk_tiles);
  run_tiles(work, rows, expanded, sequence, head, chunk * q.chunk_tiles, last);
  for (int b = 0; outliers && b < s.blocks; b++) end_outliers(s, rows[b]);
  int32_t *done = work.done + (int64_t)sequence * heads + head;
  if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < q.chunks) return;
  const float *first_state = work.states + (task - chunk) * s.blocks * s.state_floats;
  for (int row = 0; row < s.rows; row++) {
    float maximum, total;
    merge_row(work, sequence, head, row, first_state, &maximum, &total);
    if (work.scores) add_received(work, sequence, head, row, maximum, total);
  }
}

void run_tasks(Work &work, int thread) {
  TileConfig before;
  tiles_begin(&before);
  for (;;) {
    const int64_t task = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    if (task >= work.tasks) break;
    run_task(work, task, work.scratch + thread * work.scratch_bytes);
  }
  tiles_end(&before);
}

INLINE NumberPlace place_of(const kvplan_layout &l, const kvplan_tensor &t) {
  if (numbers_direct(t)) return {false, (int64_t)2 * l.block_tokens};
  return {true, (int64_t)sizeof(float) * EXPAND_TOKENS};
}

Shape shape_of(const kvplan_layout &l, const kvplan_batch &b, const kvplan_decode_call &c) {
  Shape s;
  s.layout = &l;
  s.batch = &b;
  s.call = &c;
  s.dim = l.head_dim;
  s.vectors = (l.head_dim + LANES - 1) / LANES;
  s.padded = s.vectors * LANES;
  s.ratio = c.query_heads / l.kv_heads;
  s.rows = c.queries * s.ratio;
  s.blocks = (s.rows + KVPLAN_BLOCK_ROWS - 1) / KVPLAN_BLOCK_ROWS;
  s.key_groups = step_codes(l.key) == 16 || l.key.per_channel ? 1 : (l.head_dim + l.key.group - 1) / l.key.group;
  s.value_groups = step_codes(l.value) == 16 ? 1 : (l.head_dim + l.value.group - 1) / l.value.group;
  s.tail = lanes_between(0, l.head_dim - (s.vectors - 1) * LANES);
  s.factor = c.softcap > 0 ? c.scale / c.softcap : c.scale * LOG2_E;
  s.cap = c.softcap * LOG2_E;
  s.state_floats = LANES + ROWS * LANES * (1 + s.value_groups) + ROWS * s.padded;
  // Few bits leave room in the first cache for more tokens, which share what a tile costs once.
  s.expands = tensor_expands(l.key) || tensor_expands(l.value) || c.restore;
  s.tile_tokens = s.expands ? EXPAND_TOKENS : l.key.bits <= 4 && l.value.bits <= 4 ? 128 : 64;
  s.key_numbers = place_of(l, l.key);
  s.value_numbers = place_of(l, l.value);
  s.key_high_bytes = 4 * key_words(l.head_dim, l.key.high_bits);
  s.key_page_bytes = 4 * key_words(l.head_dim, l.key.low_bits);
  s.value_page_bytes = l.head_dim * l.value.low_bits / 8;
  return s;
}

// Cut sequences into tasks: several for each thread, so that none waits long for the last.
void plan_tasks(Work &work, int threads) {
  const Shape &s = work.shape;
  int64_t tiles = 0;
  for (int i = 0; i < s.batch->sequences; i++) {
    plan_sequence(s, i, work.sequences[i]);
    tiles += work.sequences[i].tiles * s.layout->kv_heads;
  }
  const int64_t wanted = threads > 1 ? 3 * threads : 1;
  const int64_t share = threads > 1 ? kvplan_most(CHUNK_TILES_MIN, (tiles + wanted - 1) / wanted) : INT64_MAX;
  work.tasks = 0;
  for (int i = 0; i < s.batch->sequences; i++) {
    Sequence &q = work.sequences[i];
    q.chunk_tiles = kvplan_most(1, kvplan_least(share, q.tiles));
    q.chunks = kvplan_most(1, (q.tiles + q.chunk_tiles - 1) / q.chunk_tiles);
    q.task = work.tasks;
    work.tasks += q.chunks * s.layout->kv_heads;
  }
}

int64_t decode(const kvplan_layout &l, const kvplan_batch &b, const kvplan_decode_call &c) {
  if (!b.sequences) return 0;
  Work work;
  work.shape = shape_of(l, b, c);
  const Shape &s = work.shape;
  work.sequences = (Sequence *)malloc(b.sequences * sizeof(Sequence));
  if (!work.sequences) return -3;
  int threads = c.threads < 1 ? 1 : c.threads;
  plan_tasks(work, threads);
  threads = (int)kvplan_least(threads, work.tasks);
  work.steps[1] = choose_steps<1>(l);
#if KVPLAN_BLOCK_ROWS == 4
  work.steps[2] = choose_steps<2>(l);
  work.steps[3] = choose_steps<3>(l);
  work.steps[4] = choose_steps<4>(l);
#endif
  work.scratch_bytes = rounded(s.blocks * sizeof(Rows)) + (s.expands ? rounded(sizeof(Expanded)) : 0);
  const int64_t pairs = (int64_t)b.sequences * l.kv_heads, row_count = pairs * s.rows;
  const int64_t state_bytes = rounded(work.tasks * s.blocks * s.state_floats * sizeof(float));
  const int64_t score_bytes = c.received ? rounded((row_count + ROWS) * c.received_tokens * sizeof(float)) : 0;
  const int64_t all = state_bytes + score_bytes + rounded(pairs * sizeof(int32_t)) + threads * work.scratch_bytes;
  uint8_t *memory = (uint8_t *)aligned_alloc(64, all);
  if (!memory) {
    free(work.sequences);
    return -3;
  }
  work.states = (float *)memory;
  work.scores = c.received ? (float *)(memory + state_bytes) : nullptr;
  work.done = (int32_t *)(memory + state_bytes + score_bytes);
  work.scratch = (uint8_t *)work.done + rounded(pairs * sizeof(int32_t));
  work.next = 0;
  memset(work.done, 0, pairs * sizeof(int32_t));
  if (c.received) memset(c.received, 0, sizeof(float) * b.sequences * c.query_heads * c.received_tokens);
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    run_tasks(work, omp_get_thread_num());
  } else {
    run_tasks(work, 0);
  }
  free(memory);
  free(work.sequences);
  return 0;
}
