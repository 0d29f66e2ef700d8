// The Hadamard rotation of heads, in place: butterflies from near pairs to far ones, then one factor.
#pragma once

constexpr int64_t ROTATED_PARALLEL = 1 << 16; // elements; below, waking threads costs more than it saves

// Pairs of up to eight channels apart, with sixteen channels of a block in one column each.
INLINE void rotate_near(float *x, int vectors) {
  F columns[LANES];
  for (int i = 0; i < LANES; i++) columns[i] = i < vectors ? fload(x + i * LANES) : fzero();
  transpose(columns);
#pragma GCC unroll 4
  for (int half = 1; half < LANES; half *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & half) continue;
      const F near = columns[i], far = columns[i + half];
      columns[i] = fadd(near, far);
      columns[i + half] = fsub(near, far);
    }
  transpose(columns);
  for (int i = 0; i < vectors; i++) fstore(x + i * LANES, columns[i]);
}

INLINE void rotate_eight(float *x) {
  for (int half = 1; half < 8; half *= 2)
    for (int i = 0; i < 8; i++) {
      if (i & half) continue;
      const float near = x[i], far = x[i + half];
      x[i] = near + far;
      x[i + half] = near - far;
    }
  const float factor = 1.0f / sqrtf(8.0f);
  for (int i = 0; i < 8; i++) x[i] *= factor;
}

INLINE void rotate_block(float *x, int size) {
  if (size < LANES) {
    rotate_eight(x);
    return;
  }
  rotate_near(x, size / LANES);
  for (int half = LANES; half < size; half *= 2)
    for (int at = 0; at < size; at += 2 * half)
      for (int i = at; i < at + half; i += LANES) {
        const F near = fload(x + i), far = fload(x + i + half);
        fstore(x + i, fadd(near, far));
        fstore(x + i + half, fsub(near, far));
      }
  const F factor = fset(1.0f / sqrtf((float)size));
  for (int i = 0; i < size; i += LANES) fstore(x + i, fmul(fload(x + i), factor));
}

// A block for each binary digit of the head size, the largest first; sizes are multiples of 8.
INLINE void rotate_row(float *x, int dim) {
  for (int size = 1 << (31 - __builtin_clz((unsigned)dim)); size >= 8; size /= 2) {
    if (!(dim & size)) continue;
    rotate_block(x, size);
    x += size;
  }
}

int64_t rotate_rows(float *values, int64_t rows, int dim, int threads) {
  if (threads < 2 || rows * dim < ROTATED_PARALLEL) {
    for (int64_t row = 0; row < rows; row++) rotate_row(values + row * dim, dim);
    return 0;
  }
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row++) rotate_row(values + row * dim, dim);
  return 0;
}
