// Reading memory at the speed that a decode kernel can hope for: several streams, full-width loads.
#pragma once

constexpr int STREAMS = 4;

INLINE int64_t read_part(const uint8_t *from, int64_t bytes) {
  const int64_t share = bytes / STREAMS / 256 * 256;
  I sum[STREAMS];
  for (int k = 0; k < STREAMS; k++) sum[k] = izero();
  for (int64_t at = 0; at < share; at += 256)
#pragma GCC unroll 4
    for (int line = 0; line < 4; line++)
#pragma GCC unroll 4
      for (int k = 0; k < STREAMS; k++) sum[k] = ixor(sum[k], iload(from + k * share + at + 64 * line));
  int64_t words[8], total = 0;
  for (int k = 0; k < STREAMS; k++) {
    istore_part(words, ALL, sum[k]);
    for (int i = 0; i < 8; i++) total ^= words[i];
  }
  for (int64_t at = share * STREAMS; at + 8 <= bytes; at += 8) {
    int64_t word;
    memcpy(&word, from + at, 8);
    total ^= word;
  }
  return total;
}

int64_t read_bytes(const void *data, int64_t bytes, int threads) {
  const uint8_t *from = (const uint8_t *)data;
  if (threads < 2) return read_part(from, bytes);
  int64_t total = 0, next = 0;
  const int64_t share = (bytes / threads + 7) / 8 * 8;
#pragma omp parallel num_threads(threads)
  for (;;) { // a part each, whatever number of threads there are
    const int64_t first = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) * share;
    if (first >= bytes) break;
    __atomic_fetch_xor(&total, read_part(from + first, kvplan_least(share, bytes - first)), __ATOMIC_RELAXED);
  }
  return total;
}
