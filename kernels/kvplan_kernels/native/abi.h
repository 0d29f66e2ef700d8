// The plain C interface between Python (ctypes) and the kernels. layout.py decides every offset; nothing here does.
#pragma once
#include <stdint.h>

#define KVPLAN_ABI_VERSION 2

enum { KVPLAN_BF16 = 0, KVPLAN_FP16 = 1, KVPLAN_FP32 = 2 };

// How one of K and V is stored. Offsets in bytes.
struct kvplan_tensor {
  int32_t bits;            // 8, 4, 2, or 16 for values
  int32_t per_channel;     // tokens of a channel share a scale
  int32_t group;           // elements that share a scale; the whole head at most
  int32_t keep_tokens;     // Flush
  int32_t quantum_tokens;  // Flush
  int32_t ring_tokens;     // capacity, a multiple of 16
  int64_t codes, scale, minimum;     // from the start of a slab
  int64_t ring_offset, sink_offset;  // from the start of a head's residual and sinks
};

struct kvplan_layout {
  int32_t abi_version, struct_bytes;
  int32_t kv_heads, head_dim, block_tokens, float_type, sink_tokens, sink_capacity;
  int32_t rotated;  // heads are rotated: decode asks with rotated queries, and turns back what comes out
  int64_t slab_bytes, page_bytes, ring_bytes, sink_bytes, ring_head_bytes, sink_head_bytes;
  kvplan_tensor key, value;
};

struct kvplan_batch {
  uint8_t *pages, *ring, *sinks;
  int64_t blocks, slots;
  const int32_t *block_tables, *slot_ids, *lengths;
  int32_t sequences, table_width;
};

// Values of new tokens: [tokens, kv_heads, head_dim], the last axis contiguous; strides in elements.
struct kvplan_source {
  const void *data;
  int64_t token_stride, head_stride;
};

struct kvplan_append_call {
  kvplan_source key, value;
  const int32_t *counts;
  int32_t source_type, threads, variant;
};

struct kvplan_decode_call {
  const void *query;  // [sequences, queries, query_heads, head_dim]
  int64_t query_stride_sequence, query_stride_query, query_stride_head;
  float *output;             // contiguous, same shape
  float *received;           // [sequences, query_heads, received_tokens] or null
  const float *sink_logits;  // [query_heads] or null
  const int32_t *positions;  // [sequences, queries] or null
  int64_t received_tokens;
  int32_t query_type, queries, query_heads, window;  // window 0: none
  float scale, softcap;                              // softcap 0: none
  int32_t threads, variant;
};

struct kvplan_dequantize_call {
  uint16_t *key, *value;  // [sequences, kv_heads, tokens, head_dim]
  int64_t tokens;
  int32_t threads, variant;
};

extern "C" {
int32_t kvplan_abi_version();
// The variants that this machine runs, best first; null past the last.
const char *kvplan_variant_name(int32_t index);
// Poisoned groups, or a negative refusal: -1 layout of another version, -2 values that lead outside, -3 memory.
int64_t kvplan_append(const kvplan_layout *, const kvplan_batch *, const kvplan_append_call *);
int64_t kvplan_decode(const kvplan_layout *, const kvplan_batch *, const kvplan_decode_call *);
int64_t kvplan_dequantize(const kvplan_layout *, const kvplan_batch *, const kvplan_dequantize_call *);
// The exclusive or of a buffer's 64-bit words: how fast memory is read.
int64_t kvplan_read(const void *, int64_t bytes, int32_t threads, int32_t variant);
// Rotate rows of heads in place; `dim` is a multiple of 8.
int64_t kvplan_rotate(float *, int64_t rows, int32_t dim, int32_t threads, int32_t variant);
}

// One compiled variant of the kernels.
struct kvplan_kernels {
  int64_t (*append)(const kvplan_layout &, const kvplan_batch &, const kvplan_append_call &);
  int64_t (*decode)(const kvplan_layout &, const kvplan_batch &, const kvplan_decode_call &);
  int64_t (*dequantize)(const kvplan_layout &, const kvplan_batch &, const kvplan_dequantize_call &);
  int64_t (*read)(const void *, int64_t, int);
  int64_t (*rotate)(float *, int64_t, int, int);
};
