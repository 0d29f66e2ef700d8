// Keys that lie as they were before RoPE, made those of the model for one tile at a time, in its 16-bit type.
#pragma once

constexpr int64_t NEAR_TOKENS = 256; // rows of the near table, and the tokens between two rows of the far one: rope.py

// Columns of sixteen tokens times the rotation of heads: as `rotate_row`, a block for each binary digit of the size.
INLINE void rotate_columns(KeyRun x, int dim) {
  for (int size = 1 << (31 - __builtin_clz((unsigned)dim)), first = 0; size >= 8; size /= 2) {
    if (!(dim & size)) continue;
    for (int half = 1; half < size; half *= 2)
      for (int at = first; at < first + size; at += 2 * half)
        for (int i = at; i < at + half; i++) {
          const F near = fload(x[i]), far = fload(x[i + half]);
          fstore(x[i], fadd(near, far));
          fstore(x[i + half], fsub(near, far));
        }
    const F factor = fset(1.0f / sqrtf((float)size));
    for (int i = first; i < first + size; i++) fstore(x[i], fmul(fload(x[i]), factor));
    first += size;
  }
}

// One channel of sixteen tokens, as it was before anything was done to it but RoPE.
INLINE F restored(const Shape &s, int head, const KeyRun x, int channel) {
  const kvplan_restore &r = *s.call->restore;
  const int64_t at = (int64_t)head * s.dim + channel;
  F value = fload(x[r.place ? r.place[at] : channel]);
  if (r.factor) value = fmul(value, fset(r.factor[at]));
  return r.offset ? fadd(value, fset(r.offset[at])) : value;
}

// Turn the channels of a run of tokens from `position` on, and store them as 16-bit values lie.
void turn_run(const Shape &s, int head, int64_t position, const KeyRun x, uint8_t *to) {
  const kvplan_restore &r = *s.call->restore;
  const float *far = r.far + kvplan_least(position / NEAR_TOKENS, r.far_rows - 1) * 2 * s.dim;
  const float *near = r.near + position % NEAR_TOKENS * 2 * s.dim;
  KeyRun y;
  for (int a = 0; a < s.dim; a++) {
    const int b = (int)r.partner[a];
    if (b < a) continue;
    const F xa = restored(s, head, x, a);
    if (a == b) {
      fstore(y[a], xa);
      continue;
    }
    // The rotation of the run's first token, then that of each token from there.
    const float first_cos = far[a] * near[a] - far[s.dim + a] * near[s.dim + a];
    const float first_sin = far[s.dim + a] * near[a] + far[a] * near[s.dim + a];
    const float *lanes = r.lanes + a * 2 * LANES;
    const F c = fload(lanes), d = fload(lanes + LANES), xb = restored(s, head, x, b);
    const F cosine = fsub(fmul(c, fset(first_cos)), fmul(d, fset(first_sin)));
    const F sine = fma(c, fset(first_sin), fmul(d, fset(first_cos)));
    fstore(y[a], fsub(fmul(xa, cosine), fmul(xb, sine)));
    fstore(y[b], fma(xb, cosine, fmul(xa, sine)));
  }
  for (int w = 0; w < s.dim / 2; w++) {
    const I low = to_bits(fload(y[2 * w]), s.layout->float_type), high = to_bits(fload(y[2 * w + 1]), s.layout->float_type);
    istore(to + 64 * w, ior(low, ishl(high, 16)));
  }
}

INLINE Held held_keys(const Shape &s, const Tile &t, int j) {
  const kvplan_tensor &k = s.layout->key;
  const bool codes = t.key_store == STORE_CODES;
  return {t.key[j], t.key_scale[j], t.key_minimum[j], codes ? k.bits : 16, t.slab[j], t.in_page[j]};
}

void restore_tile(const Shape &s, int head, Tile &t, Expanded &x) {
  const Dequantize d = {s.layout, s.batch, nullptr, s.dim, s.vectors, s.tail, 0};
  for (int j = 0; j < t.runs; j++) {
    KeyRun keys;
    read_key_run(d, held_keys(s, t, j), keys);
    if (s.layout->rotated) rotate_columns(keys, s.dim);
    uint8_t *to = x.key + j * s.dim * LANES * 2;
    turn_run(s, head, t.position + j * LANES, keys, to);
    t.key[j] = to;
  }
  t.key_store = STORE_VALUES;
}
