// Elements that are too large for the codes: a token's few of largest magnitude lie beside them, as what was cut off.
#pragma once

constexpr int OUTLIERS = 16; // of one token at most

INLINE const uint8_t *outlier_channels(const kvplan_tensor &t, int block_tokens, const uint8_t *slab, int64_t in_page,
                                       int n) {
  return slab + t.outlier_channel + (int64_t)n * block_tokens + in_page;
}
INLINE const uint8_t *outlier_values(const kvplan_tensor &t, int block_tokens, const uint8_t *slab, int64_t in_page,
                                     int n) {
  return slab + t.outlier + 2 * ((int64_t)n * block_tokens + in_page);
}
INLINE F sixteen_floats(const uint8_t *at, int type) { return from_bits(short_load(at), type); }

// Cut sixteen tokens, channels by tokens, at the magnitude that follows the t.outliers largest; store what that takes.
INLINE void cut_outliers(const kvplan_tensor &t, int dim, int block_tokens, int type, uint8_t *slab, int64_t in_page,
                         Mask lanes, const float (*x)[LANES], float (*cut)[LANES]) {
  F size[OUTLIERS + 1];
  I channel[OUTLIERS + 1];
  for (int n = 0; n <= t.outliers; n++) {
    size[n] = fset(-1.0f);
    channel[n] = izero();
  }
  Mask sound = ALL;
  for (int c = 0; c < dim; c++) {
    F here = fabs_(fload(x[c]));
    I at = iset(c);
    sound &= ffinite(here);
    Mask more = 0;
    for (int n = 0; n <= t.outliers; n++) { // the first of equals stays before the others, which move on together
      more |= fless(size[n], here);
      const F less = fselect(more, size[n], here);
      const I less_at = iselect(more, channel[n], at);
      size[n] = fselect(more, here, size[n]);
      channel[n] = iselect(more, at, channel[n]);
      here = less;
      at = less_at;
    }
  }
  const F most = fselect(sound, size[t.outliers], fset(INFINITY)), least = fsub(fzero(), most);
  for (int c = 0; c < dim; c++) {
    const F whole = fload(x[c]);
    fstore(cut[c], fselect(fless(most, whole), most, fselect(fless(whole, least), least, whole)));
  }
  for (int n = 0; n < t.outliers; n++) {
    int32_t channels[LANES];
    float rest[LANES];
    istore_part(channels, ALL, iselect(sound, channel[n], izero()));
    for (int i = 0; i < LANES; i++) rest[i] = x[channels[i]][i] - cut[channels[i]][i];
    const F difference = fselect(sound, fload(rest), fzero());
    short_store((uint8_t *)outlier_values(t, block_tokens, slab, in_page, n), lanes, to_bits(difference, type));
    byte_store((uint8_t *)outlier_channels(t, block_tokens, slab, in_page, n), lanes, iload(channels));
  }
}

// Add what was cut off to sixteen tokens, channels by tokens.
INLINE void restore_outliers(const kvplan_tensor &t, int block_tokens, int type, const uint8_t *slab, int64_t in_page,
                             float (*x)[LANES]) {
  for (int n = 0; n < t.outliers; n++) {
    const uint8_t *channels = outlier_channels(t, block_tokens, slab, in_page, n);
    float rest[LANES];
    fstore(rest, sixteen_floats(outlier_values(t, block_tokens, slab, in_page, n), type));
    for (int i = 0; i < LANES; i++) x[channels[i]][i] += rest[i];
  }
}
