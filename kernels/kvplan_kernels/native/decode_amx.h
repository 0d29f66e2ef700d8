// The dot products of decode on AMX tiles: rows of operands (both planes of four query rows) times sixteen columns.
//
// A column is a token for K and a channel for V, as a lane is elsewhere, so codes and bf16 pairs lie in pages just as a
// tile wants them: 8-bit codes and bf16 values are loaded straight from the page, 4 and 2 bits are unpacked first.
// Integer sums are the same as with VNNI; bf16 operands are split in two parts, which keeps 16 bits of mantissa.
#pragma once

constexpr int BATCH = 4; // tiles of sums at a time: the eight tile registers hold them, operands and codes
constexpr int CHUNK = 64; // bytes of operands of one tile row: 64 codes or 32 pairs' halves

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

typedef int32_t Sums[2 * ROWS][LANES];

// Take the tile registers, keeping the configuration that another library may have left.
INLINE void tiles_begin(TileConfig *before) {
  TileConfig now = {};
  _tile_storeconfig(before);
  now.palette = 1;
  for (int i = 0; i < 8; i++) {
    now.row_bytes[i] = CHUNK;
    now.rows[i] = i < 6 ? 2 * ROWS : LANES; // 0, 1 operands; 2 to 5 sums; 6, 7 codes
  }
  _tile_loadconfig(&now);
}
INLINE void tiles_end(const TileConfig *before) {
  if (before->palette) _tile_loadconfig(before);
  else _tile_release();
}

INLINE void clear_sums() {
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
}

template <bool CODES> INLINE void multiply(int j, const uint8_t *columns, int64_t stride) {
#define KVPLAN_MULTIPLY(sums, at)                                                                                      \
  _tile_loadd(at, columns, stride);                                                                                    \
  if (CODES) _tile_dpbsud(sums, 0, at);                                                                                \
  else _tile_dpbf16ps(sums, 0, at);
  switch (j) {
  case 0: KVPLAN_MULTIPLY(2, 6) break;
  case 1: KVPLAN_MULTIPLY(3, 7) break;
  case 2: KVPLAN_MULTIPLY(4, 6) break;
  default: KVPLAN_MULTIPLY(5, 7)
  }
#undef KVPLAN_MULTIPLY
}

INLINE void store_sums(void *to) {
  uint8_t *at = (uint8_t *)to;
  _tile_stored(2, at, 64);
  _tile_stored(3, at + sizeof(Sums), 64);
  _tile_stored(4, at + 2 * sizeof(Sums), 64);
  _tile_stored(5, at + 3 * sizeof(Sums), 64);
}

INLINE F code_sum(const Sums &sums, int r) {
  return itof(iadd(ishl(iload(sums[r]), 8), iload(sums[ROWS + r])));
}
INLINE F value_sum(const Sums &sums, int r) {
  return fadd(fbits(iload(sums[r])), fbits(iload(sums[ROWS + r])));
}

// Unpack up to 16 words of one vector of lanes, `stride` bytes apart, to rows of codes.
template <int BITS, bool PART>
INLINE void unpack_rows(const uint8_t *from, const uint8_t *ahead, int64_t stride, int words, Mask tail, uint8_t *to) {
  constexpr int PLANES = 8 / BITS;
  const I mask = iset(BITS == 8 ? -1 : BITS == 4 ? 0x0f0f0f0f : 0x03030303);
  for (int w = 0; w < words; w++, from += stride, ahead += stride, to += 64 * PLANES) {
    const I word = PART ? iload_part(from, tail) : iload(from);
    prefetch(ahead);
#pragma GCC unroll 4
    for (int k = 0; k < PLANES; k++) {
      I codes = k ? ishr(word, BITS * k) : word;
      if (BITS < 8) codes = iand(codes, mask);
      _mm512_store_si512(to + 64 * k, codes);
    }
  }
}

INLINE void prefetch_rows(const uint8_t *ahead, int64_t stride, int rows) {
  for (int i = 0; i < rows; i++) prefetch(ahead + i * stride);
}

// ---- K

// The codes of four runs and 64 channels, or of four vectors and 64 tokens, on the way from a page to the tiles.
// Unpacking runs one stage ahead of multiplying: a tile load waits until the stores that it reads have reached L1.
typedef uint8_t Stage[BATCH][LANES * 64];

template <int BITS, int RB, bool CHANNEL>
INLINE void finish_scores(const Shape &s, const Rows &rows, const Tile &now, int run, int count, int group,
                          float *out) {
  alignas(64) Sums sums[BATCH];
  store_sums(sums);
  for (int j = 0; j < count; j++) {
    F scale = fzero(), minimum = fzero();
    if (!CHANNEL) {
      scale = number_of(s.key_numbers, now.key_scale[run + j], group);
      minimum = number_of(s.key_numbers, now.key_minimum[run + j], group);
    }
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++) {
      F x = code_sum(sums[j], r);
      float *to = out + r * TILE + (run + j) * LANES;
      if (CHANNEL) x = fma(x, fset(rows.channels.unit[r]), fset(rows.channels.bias[r]));
      else x = token_score(rows, group, r, x, scale, minimum);
      fstore(to, group ? fadd(fload(to), x) : x);
    }
  }
}

// How many runs from `run` on are multiplied together: up to four, of one token group.
template <bool CHANNEL> INLINE int batch_runs(const Tile &now, int run) {
  const int most = now.runs - run < BATCH ? now.runs - run : BATCH;
  int count = 1;
  while (count < most && (!CHANNEL || now.key_group[run + count] == now.key_group[run])) count++;
  return count;
}

// Channels [64 * chunk, ...) of up to four runs.
template <int BITS>
INLINE void unpack_key(const Tile &now, const Tile &next, int run, int count, int word, int words, Stage &stage) {
  for (int j = 0; j < count; j++)
    unpack_rows<BITS, false>(now.key[run + j] + 64 * word, next.key[run + j] + 64 * word, 64, words, ALL, stage[j]);
}

template <int BITS, int RB, bool CHANNEL>
void score_codes_tiles(const Shape &s, Rows &rows, const Tile &now, const Tile &next, float *out) {
  constexpr int ELEMENTS = 32 / BITS, CHUNK_WORDS = CHUNK / ELEMENTS;
  alignas(64) Stage stages[2];
  const int words = (s.dim + ELEMENTS - 1) / ELEMENTS, chunks = (words + CHUNK_WORDS - 1) / CHUNK_WORDS;
  const int chunks_per_group = CHANNEL || s.key_groups == 1 ? chunks : s.layout->key.group / CHUNK;
  const uint8_t *operands = CHANNEL ? rows.channels.operands[0][0] : rows.operands[0][0];
  // 8-bit codes of a whole chunk are multiplied where they lie; the rest passes through a stage.
  const bool direct = BITS == 8 && words % CHUNK_WORDS == 0;
  int fill_run = 0, fill_chunk = 0;
  auto fill = [&](Stage &stage) {
    const int word = fill_chunk * CHUNK_WORDS, here = words - word < CHUNK_WORDS ? words - word : CHUNK_WORDS;
    const int count = batch_runs<CHANNEL>(now, fill_run);
    unpack_key<BITS>(now, next, fill_run, count, word, here, stage);
    if (++fill_chunk == chunks) {
      fill_chunk = 0;
      fill_run += count;
    }
  };
  if (!direct) fill(stages[0]);
  for (int run = 0, chunk = 0, unit = 0; run < now.runs; unit++) {
    const int count = batch_runs<CHANNEL>(now, run), group = chunk / chunks_per_group;
    if (!direct && fill_run < now.runs) fill(stages[(unit + 1) & 1]);
    if (CHANNEL && !chunk && rows.channel_group != now.key_group[run]) fill_channel_operands<RB>(s, rows, now, run);
    if (chunk % chunks_per_group == 0) clear_sums();
    _tile_loadd(0, operands + chunk * CHUNK, DIM_MOST);
#pragma GCC unroll 4
    for (int j = 0; j < BATCH; j++) {
      if (j >= count) break;
      if (direct) {
        prefetch_rows(next.key[run + j] + chunk * CHUNK_WORDS * 64, 64, LANES);
        multiply<true>(j, now.key[run + j] + chunk * CHUNK_WORDS * 64, 64);
      } else {
        multiply<true>(j, stages[unit & 1][j], 64);
      }
    }
    chunk++;
    if (chunk % chunks_per_group == 0 || chunk == chunks)
      finish_scores<BITS, RB, CHANNEL>(s, rows, now, run, count, group, out);
    if (chunk == chunks) {
      chunk = 0;
      run += count;
    }
  }
}

template <int RB> void score_values_tiles(const Shape &s, Rows &rows, const Tile &now, const Tile &next, float *out) {
  alignas(64) uint8_t part[BATCH][LANES * 64];
  alignas(64) Sums sums[BATCH];
  const int pairs = s.dim / 2;
  for (int run = 0, count; run < now.runs; run += count) {
    count = now.runs - run < BATCH ? now.runs - run : BATCH;
    clear_sums();
    for (int w = 0; w < pairs; w += LANES) {
      const int here = pairs - w < LANES ? pairs - w : LANES;
      _tile_loadd(0, rows.halves[0][0] + 2 * w, 2 * DIM_MOST);
#pragma GCC unroll 4
      for (int j = 0; j < BATCH; j++) {
        if (j >= count) break;
        const uint8_t *from = now.key[run + j] + 64 * w, *ahead = next.key[run + j] + 64 * w;
        prefetch_rows(ahead, 64, here);
        if (here == LANES) {
          multiply<false>(j, from, 64);
        } else { // past the last channel there may be anything, NaN as well
          memset(part[j], 0, sizeof part[j]);
          memcpy(part[j], from, 64 * here);
          multiply<false>(j, part[j], 64);
        }
      }
    }
    store_sums(sums);
    for (int j = 0; j < count; j++)
#pragma GCC unroll 4
      for (int r = 0; r < RB; r++)
        fstore(out + r * TILE + (run + j) * LANES, fmul(value_sum(sums[j], r), fset(s.factor)));
  }
}

// ---- V

// Up to four vectors of channels and four runs.
template <int BITS>
INLINE void unpack_value(const Shape &s, const Tile &now, const Tile &next, int vector, int count, int run,
                         Stage &stage) {
  constexpr int RUN_WORDS = LANES * BITS / 32, RUN_BYTES = LANES / 4 * 64;
  const int64_t stride = 4 * s.dim;
  const int runs = now.runs - run < BATCH ? now.runs - run : BATCH;
  for (int v = 0; v < count; v++) {
    const int64_t offset = 64 * (vector + v);
    const bool part = vector + v == s.vectors - 1 && s.tail != ALL;
    for (int j = 0; j < runs; j++) {
      const uint8_t *from = now.value[run + j] + offset, *ahead = next.value[run + j] + offset;
      if (part) unpack_rows<BITS, true>(from, ahead, stride, RUN_WORDS, s.tail, stage[v] + j * RUN_BYTES);
      else unpack_rows<BITS, false>(from, ahead, stride, RUN_WORDS, ALL, stage[v] + j * RUN_BYTES);
    }
  }
}

template <int RB>
INLINE void finish_codes(const Shape &s, Rows &rows, const Weights &w, const Weighted &o, int vector, int count) {
  alignas(64) Sums sums[BATCH];
  store_sums(sums);
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++) {
    const F shrink = fset(w.shrink[r]), unit = fset(o.unit[r]);
    for (int v = 0; v < count; v++) {
      float *at = rows.output + r * s.padded + (vector + v) * LANES;
      fstore(at, fma(code_sum(sums[v], r), unit, fmul(fload(at), shrink)));
    }
  }
}

template <int BITS, int RB>
INLINE void add_codes_group(const Shape &s, Rows &rows, const Tile &now, const Tile &next, const Weights &w,
                            const Weighted &o, int first, int last) {
  alignas(64) Stage stages[2];
  constexpr int RUN_WORDS = LANES * BITS / 32;
  const int64_t stride = 4 * s.dim;
  bool direct = BITS == 8 && now.runs % BATCH == 0 && s.tail == ALL;
  for (int j = 1; j < now.runs; j++)
    direct = direct && (j % BATCH == 0 || now.value[j] == now.value[j - 1] + RUN_WORDS * stride);
  const int batches = (now.runs + BATCH - 1) / BATCH, units = (last - first + BATCH - 1) / BATCH * batches;
  int fill_vector = first, fill_batch = 0;
  auto fill = [&](Stage &stage) {
    const int count = last - fill_vector < BATCH ? last - fill_vector : BATCH;
    unpack_value<BITS>(s, now, next, fill_vector, count, fill_batch * BATCH, stage);
    if (++fill_batch == batches) {
      fill_batch = 0;
      fill_vector += BATCH;
    }
  };
  if (!direct) fill(stages[0]);
  for (int unit = 0, vector = first, batch = 0; unit < units; unit++) {
    const int count = last - vector < BATCH ? last - vector : BATCH;
    if (!direct && unit + 1 < units) fill(stages[(unit + 1) & 1]);
    if (!batch) clear_sums();
    _tile_loadd(0, o.operands[0][0] + batch * CHUNK, TILE);
#pragma GCC unroll 4
    for (int v = 0; v < BATCH; v++) {
      if (v >= count) break;
      if (direct) {
        const int64_t offset = 64 * (vector + v);
        prefetch_rows(next.value[batch * BATCH] + offset, stride, LANES);
        multiply<true>(v, now.value[batch * BATCH] + offset, stride);
      } else {
        multiply<true>(v, stages[unit & 1][v], 64);
      }
    }
    if (++batch < batches) continue;
    batch = 0;
    finish_codes<RB>(s, rows, w, o, vector, count);
    vector += BATCH;
  }
}

template <int BITS, int RB>
void add_codes_tiles(const Shape &s, Rows &rows, const Tile &now, const Tile &next, Weights &w) {
  const int per_group = s.value_groups == 1 ? s.vectors : s.layout->value.group / LANES;
  for (int group = 0; group < s.value_groups; group++) {
    alignas(64) Weighted o;
    fill_value_operands<RB>(s, rows, now, w, group, o);
    for (int j = now.runs; j % BATCH; j++) // runs that are not there weigh nothing
      for (int row = 0; row < 2 * ROWS; row++) memset(o.operands[0][0] + row * TILE + j * LANES, 0, LANES);
    const int end = group == s.value_groups - 1 ? s.vectors : (group + 1) * per_group;
    add_codes_group<BITS, RB>(s, rows, now, next, w, o, group * per_group, end);
  }
}

template <int RB> void add_values_tiles(const Shape &s, Rows &rows, const Tile &now, const Tile &next, Weights &w) {
  const int64_t stride = 4 * s.dim, run_bytes = LANES / 2 * stride;
  bool whole = w.full && s.tail == ALL && now.runs % 2 == 0;
  for (int j = 0; j < now.runs; j += 2) whole = whole && now.value[j + 1] == now.value[j] + run_bytes;
  if (!whole) {
    add_values<KVPLAN_BF16, RB>(s, rows, now, next, w);
    return;
  }
  alignas(64) uint16_t halves[2][ROWS][TILE];
  alignas(64) Sums sums[BATCH];
#pragma GCC unroll 4
  for (int r = 0; r < RB; r++)
    for (int j = 0; j < now.runs; j++)
      store_halves(halves[0][r] + j * LANES, halves[1][r] + j * LANES, fload(w.p + r * TILE + j * LANES));
  for (int vector = 0; vector < s.vectors; vector += BATCH) {
    const int count = s.vectors - vector < BATCH ? s.vectors - vector : BATCH;
    clear_sums();
    for (int j = 0; j < now.runs; j += 2) {
      _tile_loadd(0, halves[0][0] + j * LANES, 2 * TILE);
#pragma GCC unroll 4
      for (int v = 0; v < BATCH; v++) {
        if (v >= count) break;
        const int64_t offset = 64 * (vector + v);
        prefetch_rows(next.value[j] + offset, stride, LANES);
        multiply<false>(v, now.value[j] + offset, stride);
      }
    }
    store_sums(sums);
#pragma GCC unroll 4
    for (int r = 0; r < RB; r++)
      for (int v = 0; v < count; v++) {
        float *at = rows.output + r * s.padded + (vector + v) * LANES;
        fstore(at, fma(fload(at), fset(w.shrink[r]), value_sum(sums[v], r)));
      }
  }
}
