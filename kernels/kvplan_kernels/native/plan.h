// What a call covers: which tokens lie where. Shared by all kernels; plain C++.
#pragma once
#include "abi.h"

static inline int64_t kvplan_least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kvplan_most(int64_t a, int64_t b) { return a > b ? a : b; }

// Of `tokens` counted after the sinks, how many lie in pages.
static inline int64_t kvplan_paged(const kvplan_tensor &t, int64_t tokens) {
  if (t.bits == 16) return tokens;
  return kvplan_most(0, tokens - t.keep_tokens) / t.quantum_tokens * t.quantum_tokens;
}

// Whether every sequence, holding lengths[i] + extra[i] tokens, stays inside its buffers.
static inline bool kvplan_inside(const kvplan_layout &l, const kvplan_batch &b, const int32_t *extra) {
  for (int32_t i = 0; i < b.sequences; i++) {
    int64_t length = b.lengths[i], more = extra ? extra[i] : 0;
    if (length < 0 || more < 0) return false;
    int64_t tokens = kvplan_most(0, length + more - l.sink_tokens);
    int64_t paged = kvplan_most(kvplan_paged(l.key, tokens), kvplan_paged(l.value, tokens));
    int64_t blocks = (paged + l.block_tokens - 1) / l.block_tokens;
    if (blocks > b.table_width || b.slot_ids[i] < 0 || b.slot_ids[i] >= b.slots) return false;
    const int32_t *table = b.block_tables + (int64_t)i * b.table_width;
    for (int64_t k = 0; k < blocks; k++)
      if (table[k] < 0 || table[k] >= b.blocks) return false;
  }
  return true;
}
