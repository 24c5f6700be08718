// Operands of attention: heads and their strides, sequences, and visible keys.
//
// Legend: T tokens, Hq Hkv heads, D Dv head dims. Strides count elements.
#pragma once

#include "attention_scores.h"

namespace {

constexpr int64_t kBlock = 64;  // keys that are processed together

// The keys that a query sees: from first(its position) to its own position.
struct Visible {
  int64_t window, attention_chunk;  // 0: none; at most one of them is positive
  int64_t first(int64_t position) const {
    if (attention_chunk > 0) return position / attention_chunk * attention_chunk;
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

struct Heads {
  int64_t Hq, Hkv, D, Dv;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
  int64_t k_key_stride, k_head_stride, k_block_stride, v_key_stride, v_head_stride, v_block_stride;
  int64_t block_size, chunk;
  Visible visible;
  Scores scores;
  int64_t relative_token_stride, relative_head_stride;
  int32_t dtype, cache_dtype;
  int64_t group() const { return Hq / Hkv; }
};

struct Sequence {
  const char* q; const char* k; const char* v; char* out;
  const int32_t* table;  // null: keys are contiguous
  int64_t num_queries, first_position;
  const float* relative;  // biases of the first query, or null
  float* lse;             // [num_queries, Hq]: receives the log-sum-exp of each row, or null
};

// Visible keys [begin, end) of a block; if there are none, both may lie outside the block
struct Keys {
  int64_t begin, end;
  bool none() const { return begin >= end; }
  bool all() const { return begin == 0 && end == kBlock; }
};

struct Task { int64_t sequence, kv_head, begin, end; };

const char* key_address(const char* base, const int32_t* table, int64_t block_size, int64_t block_stride, int64_t key_stride,
                        int64_t p, int64_t bytes) {
  if (!table) return base + p * key_stride * bytes;
  return base + (table[p / block_size] * block_stride + p % block_size * key_stride) * bytes;
}

}  // namespace
