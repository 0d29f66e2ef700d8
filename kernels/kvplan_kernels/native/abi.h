// The plain C interface between Python (ctypes) and the kernels. layout.py decides every offset; nothing here does.
#pragma once
#include <stdint.h>

#define KVPLAN_ABI_VERSION 8

enum { KVPLAN_BF16 = 0, KVPLAN_FP16 = 1, KVPLAN_FP32 = 2 };

enum { KVPLAN_MAP_INTEGER = 0, KVPLAN_MAP_TABLE = 1, KVPLAN_MAP_E4M3 = 2, KVPLAN_MAP_E5M2 = 3 };
enum {
  KVPLAN_NUMBER_FP16 = 0,
  KVPLAN_NUMBER_BF16 = 1,
  KVPLAN_NUMBER_FP32 = 2,
  KVPLAN_NUMBER_E4M3 = 3,
  KVPLAN_NUMBER_E8M0 = 4
};
enum {
  KVPLAN_FIT_RANGE = 0,
  KVPLAN_FIT_ABSMAX = 1,
  KVPLAN_FIT_POWER = 2,
  KVPLAN_FIT_NORM = 3,
  KVPLAN_FIT_Q8_0 = 4,
  KVPLAN_FIT_Q5_0 = 5,
  KVPLAN_FIT_Q5_1 = 6,
  KVPLAN_FIT_IQ4_NL = 7,
  KVPLAN_FIT_NONE = 8
};

// How one of K and V is stored (tensor_format.py). Offsets in bytes.
struct kvplan_tensor {
  int32_t bits;                 // of a code, or 16 for values
  int32_t low_bits, high_bits;  // of its planes; 0 where there is one
  int32_t map, fit, number;     // what a code stands for, how it is chosen, the type of a group's numbers
  int32_t numbers;              // stored of a group: scale and minimum, scale, none: its scale is 1
  int32_t level_count;          // of a table
  int32_t lower_ties;           // bit i: halfway between levels i and i + 1 the lower is taken
  float unit, centre;           // of levels: value = (level - centre) * unit * scale without a minimum
  float extent, power;          // the largest value that a scale of 1 reaches, and the power of two in it
  float middle;                 // half of the largest level
  float clip;                   // of a group's least and largest element, what the codes reach
  float steps;                  // levels from the least to the largest element of a group that stores both
  uint8_t table[16], ranked[16];  // the level of each code, the code of each level from the lowest on
  float middles[16];              // between one level and the next, from the centre
  int32_t per_channel;     // tokens of a channel share a scale
  int32_t group;           // elements that share a scale; the whole head at most
  int32_t keep_tokens;     // Flush
  int32_t quantum_tokens;  // Flush
  int32_t ring_tokens;     // capacity, a multiple of 16
  int32_t outliers;        // of each token
  int32_t boosts;          // channels of each group of tokens, K alone
  int64_t codes, high, scale, minimum, outlier, outlier_channel, boost, boost_channel;  // from the start of a slab
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

// What decode does to keys that lie as they were before RoPE: rope.py and folding.py say what was done to them.
struct kvplan_restore {
  const float *near, *far;      // cosines and sines [256][2][head_dim], and of multiples of 256
  const float *lanes;           // of the first 16 positions [head_dim][2][16]
  const int64_t *partner;       // [head_dim]: the other channel of the pair
  const int32_t *place;         // [kv_heads][head_dim]: where a channel is stored; or null
  const float *factor, *offset; // [kv_heads][head_dim], by channel; or null
  int64_t far_rows;
};

struct kvplan_decode_call {
  const void *query;  // [sequences, queries, query_heads, head_dim]
  int64_t query_stride_sequence, query_stride_query, query_stride_head;
  float *output;             // contiguous, same shape
  float *received;           // [sequences, query_heads, received_tokens] or null
  float *lse;                // [sequences, queries, query_heads] or null
  const float *sink_logits;  // [query_heads] or null
  const int32_t *positions;  // [sequences, queries] or null
  const kvplan_restore *restore;  // or null: keys lie as queries take them
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
