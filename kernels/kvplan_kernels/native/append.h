// Storing new tokens: 16-bit words for residual, sinks and unquantized pages; codes and fp16 metadata for the rest.
//
// Every step is one IEEE float32 operation of the definition, so that codes and metadata agree bit for bit. Division by
// the scale is replaced by its reciprocal where that provably rounds to the same code, and done where it may not.
#pragma once

constexpr int GROUP_RUNS = 8;             // runs of the largest token group, 128
constexpr int64_t PAGE_CHUNK_TOKENS = 256; // a multiple of every token group
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16; // below, waking threads costs more than it saves

typedef float KeyRun[DIM_MOST][LANES];   // channels by tokens
typedef float ValueRun[LANES][DIM_MOST]; // tokens by channels

struct Append {
  const kvplan_layout *layout;
  const kvplan_batch *batch;
  const kvplan_append_call *call;
  int dim, vectors;
  Mask tail;
  int64_t poisoned, next;
};

// The tokens of one KV head of one sequence, for K or V. Token t after the sinks is input t + sinks - length.
struct Lane {
  const kvplan_tensor *tensor;
  const uint8_t *input;    // row of the sequence's first new token
  int64_t row_bytes;       // from one new token to the next
  int64_t length, count;   // held before, appended
  int64_t sinks;           // tokens in front of index 0
  int64_t before, after;   // tokens after the sinks, before and after the append
  int64_t first, last;     // of them, those that go to pages now
  int sequence, head;
  uint8_t *ring, *sink;    // the head's part
};

INLINE uint8_t *append_slab(const Append &a, const Lane &n, int64_t token) {
  const int32_t *table = a.batch->block_tables + (int64_t)n.sequence * a.batch->table_width;
  return a.batch->pages + table[token / a.layout->block_tokens] * a.layout->page_bytes + n.head * a.layout->slab_bytes;
}

INLINE F input_values(const Append &a, const Lane &n, int64_t input, int v) {
  const int type = a.call->source_type;
  const uint8_t *from = n.input + input * n.row_bytes + v * LANES * type_bytes(type);
  F x = load_values(from, type, v == a.vectors - 1 ? a.tail : ALL);
  return type == a.layout->float_type ? x : from_bits(to_bits(x, a.layout->float_type), a.layout->float_type);
}

// A head's part of a token is a few lines far from the next token's: too short for the machine to see a stream.
INLINE void prefetch_input(const Append &a, const Lane &n, int64_t input) {
  const int64_t bytes = a.dim * type_bytes(a.call->source_type);
  for (int i = 0; i < LANES; i++)
    for (int64_t at = 0; at < bytes; at += 64) prefetch(n.input + (input + i) * n.row_bytes + at);
}

// ---- sixteen tokens of K

// Fill the lanes `fresh` from the input, where lane 0 is input `start`, and `held` from 16-bit words.
void gather_key(const Append &a, const Lane &n, int64_t start, Mask fresh, const uint8_t *words, Mask held, KeyRun x) {
  if (fresh == ALL) prefetch_input(a, n, start + LANES);
  for (int v = 0; v < a.vectors; v++) {
    F rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = fresh >> i & 1 ? input_values(a, n, start + i, v) : fzero();
    if (fresh & (fresh - 1)) {
      transpose(rows);
      for (int i = 0; i < LANES; i++) fstore(x[v * LANES + i], rows[i]);
    } else {
      const int lane = fresh ? __builtin_ctz(fresh) : 0;
      float channels[LANES];
      fstore(channels, rows[lane]);
      for (int i = 0; i < LANES; i++) {
        fstore(x[v * LANES + i], fzero());
        x[v * LANES + i][lane] = channels[i];
      }
    }
  }
  if (!held) return;
  for (int w = 0; w < a.dim / 2; w++) {
    const I word = iload(words + 64 * w);
    for (int half = 0; half < 2; half++) {
      F value = from_bits(half ? ishr(word, 16) : iand(word, iset(0xffff)), a.layout->float_type);
      float *at = x[2 * w + half];
      fstore(at, fselect(held, value, fload(at)));
    }
  }
}

void store_key_values(const Append &a, uint8_t *words, Mask lanes, const KeyRun x) {
  const int type = a.layout->float_type;
  for (int w = 0; w < a.dim / 2; w++) {
    const I first = to_bits(fload(x[2 * w]), type), second = to_bits(fload(x[2 * w + 1]), type);
    istore_part(words + 64 * w, lanes, ior(first, ishl(second, 16)));
  }
}

struct Metadata { // of sixteen groups
  F scale, minimum, inverse;
  Mask sound, coded;
};

INLINE Metadata metadata_of(F low, F high, Mask finite, float steps) {
  Metadata m;
  low = fadd(low, fzero()); // -0 becomes +0
  high = fadd(high, fzero());
  m.minimum = half_round(low);
  m.scale = half_round(fdiv(fsub(high, low), fset(steps)));
  m.sound = finite & ffinite(m.minimum) & ffinite(m.scale);
  m.coded = m.sound & ~fequal(m.scale, fzero());
  m.inverse = fdiv(fset(1.0f), m.scale);
  return m;
}

INLINE void store_metadata(uint8_t *scale, uint8_t *minimum, Mask lanes, const Metadata &m) {
  const I poison = iset(0x7e00);
  short_store(scale, lanes, iselect(m.sound, half_bits(m.scale), poison));
  short_store(minimum, lanes, iselect(m.sound, half_bits(m.minimum), poison));
}

// The code before clamping, by the reciprocal. Its error is under 1e-4 wherever the clamp does not decide, so it is
// exact unless the quotient is that near to a tie; then `unsure` is raised.
INLINE F quick_code(F x, F minimum, F inverse, Mask *unsure) {
  F t = fmul(fsub(x, minimum), inverse), whole = fround(t);
  *unsure |= ALL & ~fless(fabs_(fsub(t, whole)), fset(0.4999f));
  return whole;
}

INLINE F exact_code(F x, F minimum, F scale) { return fround(fdiv(fsub(x, minimum), scale)); }

INLINE I clamp_code(F whole, float steps, Mask coded) {
  return iselect(coded, ftoi(fmin(fmax(whole, fzero()), fset(steps))), izero());
}

INLINE int shift_of(int element, int bits) { return 8 * (element & 3) + bits * (element >> 2); }

template <int BITS>
void store_key_codes_token(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, Mask lanes, const KeyRun x,
                           int64_t *poisoned) {
  constexpr int ELEMENTS = 32 / BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  const int words = (a.dim + ELEMENTS - 1) / ELEMENTS;
  uint8_t *codes = slab + n.tensor->codes + in_page * words * 4;
  for (int channel = 0, group = 0; channel < a.dim; channel += n.tensor->group, group++) {
    const int end = (int)kvplan_least(a.dim, channel + n.tensor->group);
    F low = fload(x[channel]), high = low;
    Mask finite = ffinite(low);
    for (int c = channel + 1; c < end; c++) {
      F y = fload(x[c]);
      low = fmin(y, low);
      high = fmax(y, high);
      finite &= ffinite(y);
    }
    const Metadata m = metadata_of(low, high, finite, STEPS);
    const int64_t at = 2 * ((int64_t)group * a.layout->block_tokens + in_page);
    store_metadata(slab + n.tensor->scale + at, slab + n.tensor->minimum + at, lanes, m);
    *poisoned += __builtin_popcount(lanes & ~m.sound);
    for (int first = channel; first < end; first += ELEMENTS) {
      const int count = end - first < ELEMENTS ? end - first : ELEMENTS;
      I word = izero();
      Mask unsure = 0;
      for (int e = 0; e < count; e++) {
        const F whole = quick_code(fload(x[first + e]), m.minimum, m.inverse, &unsure);
        word = ior(word, ishl(clamp_code(whole, STEPS, m.coded), shift_of(e, BITS)));
      }
      if (unsure & m.coded & lanes) {
        word = izero();
        for (int e = 0; e < count; e++) {
          const F whole = exact_code(fload(x[first + e]), m.minimum, m.scale);
          word = ior(word, ishl(clamp_code(whole, STEPS, m.coded), shift_of(e, BITS)));
        }
      }
      istore_part(codes + 64 * (first / ELEMENTS), lanes, word);
    }
  }
}

// One group of tokens that share a scale per channel: `runs` runs.
template <int BITS>
void store_key_codes_channel(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, int runs, const KeyRun *x,
                             int64_t *poisoned) {
  constexpr int ELEMENTS = 32 / BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  const int words = (a.dim + ELEMENTS - 1) / ELEMENTS;
  float minima[DIM_MOST], scales[DIM_MOST], inverses[DIM_MOST];
  uint8_t coded[DIM_MOST];
  const int64_t row = in_page / n.tensor->group * a.dim * 2;
  for (int v = 0; v < a.vectors; v++) {
    F low[LANES], high[LANES];
    Mask finite = 0;
    for (int i = 0; i < LANES; i++) {
      low[i] = high[i] = fload(x[0][v * LANES + i]);
      Mask all = ffinite(low[i]);
      for (int j = 1; j < runs; j++) {
        F y = fload(x[j][v * LANES + i]);
        low[i] = fmin(y, low[i]);
        high[i] = fmax(y, high[i]);
        all &= ffinite(y);
      }
      finite |= (Mask)(all == ALL) << i;
    }
    transpose(low);
    transpose(high);
    for (int i = 1; i < LANES; i++) {
      low[0] = fmin(low[i], low[0]);
      high[0] = fmax(high[i], high[0]);
    }
    const Metadata m = metadata_of(low[0], high[0], finite, STEPS);
    const Mask lanes = v == a.vectors - 1 ? a.tail : ALL;
    store_metadata(slab + n.tensor->scale + row + 32 * v, slab + n.tensor->minimum + row + 32 * v, lanes, m);
    *poisoned += __builtin_popcount(lanes & ~m.sound);
    fstore(minima + v * LANES, m.minimum);
    fstore(scales + v * LANES, m.scale);
    fstore(inverses + v * LANES, m.inverse);
    for (int i = 0; i < LANES; i++) coded[v * LANES + i] = m.coded >> i & 1;
  }
  for (int j = 0; j < runs; j++) {
    uint8_t *codes = slab + n.tensor->codes + (in_page + j * LANES) * words * 4;
    for (int first = 0; first < a.dim; first += ELEMENTS) {
      const int count = a.dim - first < ELEMENTS ? a.dim - first : ELEMENTS;
      I word = izero();
      for (int e = 0; e < count; e++) {
        const int c = first + e;
        if (!coded[c]) continue;
        Mask unsure = 0;
        F value = fload(x[j][c]), whole = quick_code(value, fset(minima[c]), fset(inverses[c]), &unsure);
        if (unsure) whole = exact_code(value, fset(minima[c]), fset(scales[c]));
        word = ior(word, ishl(clamp_code(whole, STEPS, ALL), shift_of(e, BITS)));
      }
      istore_part(codes + 64 * (first / ELEMENTS), ALL, word);
    }
  }
}

// ---- sixteen tokens of V

void gather_value(const Append &a, const Lane &n, int64_t start, Mask fresh, const uint8_t *words, Mask held,
                  ValueRun x) {
  if (fresh == ALL) prefetch_input(a, n, start + LANES);
  for (int i = 0; i < LANES; i++) {
    if (fresh >> i & 1) {
      for (int v = 0; v < a.vectors; v++) fstore(x[i] + v * LANES, input_values(a, n, start + i, v));
    } else if (held >> i & 1) {
      const uint8_t *from = words + (int64_t)4 * a.dim * (i / 2);
      for (int v = 0; v < a.vectors; v++) {
        I word = iload_part(from + 64 * v, v == a.vectors - 1 ? a.tail : ALL);
        fstore(x[i] + v * LANES, from_bits(i & 1 ? ishr(word, 16) : iand(word, iset(0xffff)), a.layout->float_type));
      }
    }
  }
}

INLINE void store_word(uint8_t *at, Mask channels, I word, uint32_t owned) {
  if (owned != 0xffffffff) word = ior(word, iand(iload_part(at, channels), iset((int32_t)~owned)));
  istore_part(at, channels, word);
}

void store_value_values(const Append &a, uint8_t *words, Mask lanes, const ValueRun x) {
  for (int i = 0; i < LANES; i += 2) {
    const Mask both = lanes >> i & 3;
    if (!both) continue;
    const uint32_t owned = (both & 1 ? 0xffffu : 0) | (both & 2 ? 0xffff0000u : 0);
    for (int v = 0; v < a.vectors; v++) {
      I word = izero();
      if (both & 1) word = to_bits(fload(x[i] + v * LANES), a.layout->float_type);
      if (both & 2) word = ior(word, ishl(to_bits(fload(x[i + 1] + v * LANES), a.layout->float_type), 16));
      store_word(words + (int64_t)4 * a.dim * (i / 2) + 64 * v, v == a.vectors - 1 ? a.tail : ALL, word, owned);
    }
  }
}

template <int BITS>
void store_value_codes(const Append &a, const Lane &n, uint8_t *slab, int64_t in_page, Mask lanes, const ValueRun x,
                       int64_t *poisoned) {
  constexpr int ELEMENTS = 32 / BITS;
  constexpr float STEPS = (1 << BITS) - 1;
  constexpr uint32_t CODE = (1u << BITS) - 1;
  uint8_t *codes = slab + n.tensor->codes + in_page * BITS / 8 * a.dim;
  const int per_group = (n.tensor->group + LANES - 1) / LANES;
  for (int from = 0, group = 0; from < a.vectors; from += per_group, group++) {
    const int end = (int)kvplan_least(a.vectors, from + per_group);
    float lows[LANES] = {}, highs[LANES] = {};
    Mask finite = 0;
    for (int i = 0; i < LANES; i++) {
      if (!(lanes >> i & 1)) continue;
      F low = fset(INFINITY), high = fset(-INFINITY);
      Mask all = ALL;
      for (int v = from; v < end; v++) {
        F y = fload(x[i] + v * LANES);
        all &= ffinite(y);
        const bool part = v == a.vectors - 1 && a.tail != ALL;
        low = fmin(part ? fselect(a.tail, y, fset(INFINITY)) : y, low);
        high = fmax(part ? fselect(a.tail, y, fset(-INFINITY)) : y, high);
      }
      lows[i] = fminimum(low);
      highs[i] = fmaximum(high);
      finite |= (Mask)(all == ALL) << i;
    }
    const Metadata m = metadata_of(fload(lows), fload(highs), finite, STEPS);
    const int64_t at = 2 * ((int64_t)group * a.layout->block_tokens + in_page);
    store_metadata(slab + n.tensor->scale + at, slab + n.tensor->minimum + at, lanes, m);
    *poisoned += __builtin_popcount(lanes & ~m.sound);
    float minima[LANES], scales[LANES], inverses[LANES];
    fstore(minima, m.minimum);
    fstore(scales, m.scale);
    fstore(inverses, m.inverse);
    for (int first = 0; first < LANES; first += ELEMENTS) {
      const Mask here = lanes >> first & (Mask)((1ull << ELEMENTS) - 1);
      if (!here) continue;
      uint32_t owned = 0;
      for (int e = 0; e < ELEMENTS; e++)
        if (here >> e & 1) owned |= CODE << shift_of(e, BITS);
      for (int v = from; v < end; v++) {
        I word = izero();
        for (int e = 0; e < ELEMENTS; e++) {
          const int i = first + e;
          if (!((lanes & m.coded) >> i & 1)) continue;
          Mask unsure = 0;
          F value = fload(x[i] + v * LANES), whole = quick_code(value, fset(minima[i]), fset(inverses[i]), &unsure);
          if (unsure) whole = exact_code(value, fset(minima[i]), fset(scales[i]));
          word = ior(word, ishl(clamp_code(whole, STEPS, ALL), shift_of(e, BITS)));
        }
        uint8_t *to = codes + (int64_t)4 * a.dim * (first / ELEMENTS) + 64 * v;
        store_word(to, v == a.vectors - 1 ? a.tail : ALL, word, owned);
      }
    }
  }
}

#include "fits.h"

#include "append_any.h"

// ---- the parts of an append

// Whether codes are what the functions above store: integers of 8, 4 or 2 bits from minimum to maximum.
INLINE bool is_range(const kvplan_tensor &t) {
  return t.fit == KVPLAN_FIT_RANGE && codes_plain(t) && numbers_direct(t) && t.clip == 1.0f && !t.outliers && !t.boosts;
}

INLINE const uint8_t *ring_words(const Append &a, const Lane &n, int64_t token) {
  return n.tensor->ring_tokens ? n.ring + token % n.tensor->ring_tokens * a.dim * 2 : nullptr;
}

int64_t append_key_pages(const Append &a, const Lane &n, int64_t first, int64_t last) {
  KeyRun x[GROUP_RUNS];
  int64_t poisoned = 0;
  const int step = n.tensor->per_channel ? n.tensor->group : LANES;
  for (int64_t token = first / step * step; token < last; token += step) {
    Mask lanes = ALL;
    for (int j = 0; j < step / LANES; j++) {
      const int64_t run = token + j * LANES;
      lanes = lanes_between(first - run, last - run);
      const Mask held = lanes & lanes_between(0, n.before - run);
      gather_key(a, n, run + n.sinks - n.length, lanes & ~held, ring_words(a, n, run), held, x[j]);
    }
    uint8_t *slab = append_slab(a, n, token);
    const int64_t in_page = token % a.layout->block_tokens;
    const int bits = n.tensor->bits, runs = step / LANES;
    if (bits == 16) store_key_values(a, slab + n.tensor->codes + in_page * a.dim * 2, lanes, x[0]);
    else if (!is_range(*n.tensor) && !n.tensor->per_channel)
      store_key_any(a, n, slab, in_page, lanes, x[0], &poisoned);
    else if (!is_range(*n.tensor)) store_key_any_channel(a, n, slab, in_page, runs, x, &poisoned);
    else if (!n.tensor->per_channel && bits == 8) store_key_codes_token<8>(a, n, slab, in_page, lanes, x[0], &poisoned);
    else if (!n.tensor->per_channel && bits == 4) store_key_codes_token<4>(a, n, slab, in_page, lanes, x[0], &poisoned);
    else if (!n.tensor->per_channel) store_key_codes_token<2>(a, n, slab, in_page, lanes, x[0], &poisoned);
    else if (bits == 8) store_key_codes_channel<8>(a, n, slab, in_page, runs, x, &poisoned);
    else if (bits == 4) store_key_codes_channel<4>(a, n, slab, in_page, runs, x, &poisoned);
    else store_key_codes_channel<2>(a, n, slab, in_page, runs, x, &poisoned);
  }
  return poisoned;
}

int64_t append_value_pages(const Append &a, const Lane &n, int64_t first, int64_t last) {
  ValueRun x;
  int64_t poisoned = 0;
  for (int64_t token = first / LANES * LANES; token < last; token += LANES) {
    const Mask lanes = lanes_between(first - token, last - token), held = lanes & lanes_between(0, n.before - token);
    gather_value(a, n, token + n.sinks - n.length, lanes & ~held, ring_words(a, n, token), held, x);
    uint8_t *slab = append_slab(a, n, token);
    const int64_t in_page = token % a.layout->block_tokens;
    const int bits = n.tensor->bits;
    if (bits == 16) store_value_values(a, slab + n.tensor->codes + in_page * a.dim * 2, lanes, x);
    else if (!is_range(*n.tensor)) store_value_any(a, n, slab, in_page, lanes, x, &poisoned);
    else if (bits == 8) store_value_codes<8>(a, n, slab, in_page, lanes, x, &poisoned);
    else if (bits == 4) store_value_codes<4>(a, n, slab, in_page, lanes, x, &poisoned);
    else store_value_codes<2>(a, n, slab, in_page, lanes, x, &poisoned);
  }
  return poisoned;
}

// Store tokens [first, last), whose token 0 is input `offset`, in 16-bit words that wrap after `capacity` tokens.
void append_words(const Append &a, const Lane &n, bool key, uint8_t *words, int64_t capacity, int64_t first,
                  int64_t last, int64_t offset) {
  for (int64_t token = first / LANES * LANES; token < last; token += LANES) {
    const Mask lanes = lanes_between(first - token, last - token);
    uint8_t *to = words + token % capacity * a.dim * 2;
    if (key) {
      KeyRun x;
      gather_key(a, n, token + offset, lanes, nullptr, 0, x);
      store_key_values(a, to, lanes, x);
    } else {
      ValueRun x;
      gather_value(a, n, token + offset, lanes, nullptr, 0, x);
      store_value_values(a, to, lanes, x);
    }
  }
}

void append_rest(const Append &a, const Lane &n, bool key) {
  const int64_t sinks = kvplan_least(n.sinks, n.length + n.count);
  if (n.length < sinks) append_words(a, n, key, n.sink, a.layout->sink_capacity, n.length, sinks, -n.length);
  const int64_t first = kvplan_most(n.last, n.before);
  if (n.tensor->bits < 16 && first < n.after)
    append_words(a, n, key, n.ring, n.tensor->ring_tokens, first, n.after, n.sinks - n.length);
}

Lane lane_of(const Append &a, int sequence, int head, bool key, int64_t start) {
  const kvplan_layout &l = *a.layout;
  const kvplan_source &source = key ? a.call->key : a.call->value;
  const int64_t item = type_bytes(a.call->source_type), slot = a.batch->slot_ids[sequence];
  Lane n;
  n.tensor = key ? &l.key : &l.value;
  n.row_bytes = source.token_stride * item;
  n.input = (const uint8_t *)source.data + start * n.row_bytes + head * source.head_stride * item;
  n.length = a.batch->lengths[sequence];
  n.count = a.call->counts[sequence];
  n.sinks = l.sink_tokens;
  n.before = kvplan_most(0, n.length - n.sinks);
  n.after = kvplan_most(0, n.length + n.count - n.sinks);
  n.first = kvplan_paged(*n.tensor, n.before);
  n.last = kvplan_paged(*n.tensor, n.after);
  n.sequence = sequence;
  n.head = head;
  n.ring = a.batch->ring + slot * l.ring_bytes + head * l.ring_head_bytes + n.tensor->ring_offset;
  n.sink = a.batch->sinks + slot * l.sink_bytes + head * l.sink_head_bytes + n.tensor->sink_offset;
  return n;
}

// Pages first: a group may leave slots of the residual that new tokens then take.
void append_part(Append &a, bool pages, int sequence, int head, bool key, int64_t start, int64_t chunk) {
  const Lane n = lane_of(a, sequence, head, key, start);
  if (!pages) {
    append_rest(a, n, key);
    return;
  }
  const int64_t base = n.first / PAGE_CHUNK_TOKENS * PAGE_CHUNK_TOKENS + chunk * PAGE_CHUNK_TOKENS;
  const int64_t first = kvplan_most(n.first, base), last = kvplan_least(n.last, base + PAGE_CHUNK_TOKENS);
  if (first >= last) return;
  const int64_t poisoned = key ? append_key_pages(a, n, first, last) : append_value_pages(a, n, first, last);
  if (poisoned) __atomic_add_fetch(&a.poisoned, poisoned, __ATOMIC_RELAXED);
}

INLINE int64_t chunks_of(const Append &a, int sequence) {
  int64_t most = 0;
  for (int key = 0; key < 2; key++) {
    const Lane n = lane_of(a, sequence, 0, key, 0);
    if (n.first < n.last)
      most = kvplan_most(most, (n.last - 1) / PAGE_CHUNK_TOKENS - n.first / PAGE_CHUNK_TOKENS + 1);
  }
  return most;
}

void append_tasks(Append &a, bool pages) {
  for (;;) {
    int64_t task = __atomic_fetch_add(&a.next, 1, __ATOMIC_RELAXED), start = 0;
    int sequence = 0;
    for (; sequence < a.batch->sequences; sequence++) {
      const int64_t here = 2 * a.layout->kv_heads * (pages ? chunks_of(a, sequence) : 1);
      if (task < here) break;
      task -= here;
      start += a.call->counts[sequence];
    }
    if (sequence == a.batch->sequences) return;
    const bool key = task & 1;
    const int head = (int)(task / 2 % a.layout->kv_heads);
    append_part(a, pages, sequence, head, key, start, task / 2 / a.layout->kv_heads);
  }
}

int64_t append(const kvplan_layout &l, const kvplan_batch &b, const kvplan_append_call &c) {
  Append a = {&l, &b, &c, l.head_dim, (l.head_dim + LANES - 1) / LANES, 0, 0, 0};
  a.tail = lanes_between(0, l.head_dim - (a.vectors - 1) * LANES);
  int64_t tokens = 0;
  for (int i = 0; i < b.sequences; i++) tokens += c.counts[i];
  const int threads = tokens * l.kv_heads * l.head_dim < PARALLEL_ELEMENTS || c.threads < 1 ? 1 : c.threads;
  for (int pages = 1; pages >= 0; pages--) {
    a.next = 0;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
      append_tasks(a, pages);
    } else {
      append_tasks(a, pages);
    }
  }
  return a.poisoned;
}
